//! Settings from files and from the environment, and what the service manager hears.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::support::{LONG, Scratch, Server};

#[test]
fn files_and_variables_are_flags() -> Result<()> {
    let scratch = Scratch::new()?;
    let config =
        scratch.file("config.yaml", "service-cidr: 10.99.0.0/16\ntls-san: [a.example]\n")?;
    std::fs::create_dir(scratch.path().join("config.yaml.d"))?;
    scratch.file("config.yaml.d/10.yaml", "tls-san+: b.example\n")?;
    let mut server = Server::start_in(scratch, &["--config", &config])?;
    let service = server.api()?.get("/api/v1/namespaces/default/services/kubernetes", LONG)?;
    ensure!(service.body.contains("\"10.99.0.1\""), "{}", service.body);
    server.stop()?;

    server.variables = vec![("DECAPOD_SERVICE_CIDR".into(), "10.98.0.0/33".into())];
    server.launch_with(&[])?;
    let said = server.ends()?;
    ensure!(said.contains("10.98.0.0/33"), "{said}");
    Ok(())
}

#[test]
fn an_unknown_key_is_named_with_its_file() -> Result<()> {
    let scratch = Scratch::new()?;
    let config = scratch.file("config.yaml", "tls_san: a\n")?;
    let output = Command::new(env!("CARGO_BIN_EXE_decapod"))
        .args(["server", "--disable-agent", "--config", &config])
        .output()?;
    ensure!(!output.status.success());
    let expected = format!("decapod: {config}: unknown key \"tls_san\"; did you mean tls-san?\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
    Ok(())
}

/// Reads messages until one has this line.
fn hears(socket: &UnixDatagram, line: &str) -> Result<Vec<String>> {
    socket.set_read_timeout(Some(LONG))?;
    let (mut heard, mut buffer) = (vec![], [0; 4096]);
    loop {
        let length = socket.recv(&mut buffer).with_context(|| format!("{line} after {heard:?}"))?;
        let message = std::str::from_utf8(&buffer[..length])?.to_owned();
        let is_it = message.lines().any(|one| one.starts_with(line));
        heard.push(message);
        if is_it {
            return Ok(heard);
        }
    }
}

#[test]
fn the_service_manager_hears_of_the_start_of_life_and_of_the_end() -> Result<()> {
    let scratch = Scratch::new()?;
    let path = scratch.path().join("notify");
    let socket = UnixDatagram::bind(&path)?;
    let mut server = Server::prepared()?;
    server.variables = vec![
        ("NOTIFY_SOCKET".into(), path.display().to_string()),
        ("WATCHDOG_USEC".into(), Duration::from_secs(2).as_micros().to_string()),
    ];
    server.launch()?;
    let start = hears(&socket, "READY=1")?;
    let last = start.last().context("a message")?;
    ensure!(last.contains("STATUS=the API server is ready at https://"), "{last}");
    ensure!(!start.iter().any(|message| message.contains("WATCHDOG=1")), "{start:?}");
    hears(&socket, "WATCHDOG=1")?;
    hears(&socket, "WATCHDOG=1")?;
    server.stop()?;
    hears(&socket, "STOPPING=1")?;
    Ok(())
}
