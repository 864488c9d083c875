//! `decapod install` and `decapod uninstall` below a directory: no root, no service is touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::support::Scratch;

const UNIT: &str = "etc/systemd/system/decapod.service";
const CONFIG: &str = "etc/decapod/config.yaml";

struct Machine {
    scratch: Scratch,
}

impl Machine {
    fn new() -> Result<Self> {
        Ok(Self { scratch: Scratch::new()? })
    }

    fn root(&self) -> PathBuf {
        self.scratch.path().join("root")
    }

    /// The output, or the last line of the errors.
    fn decapod(&self, words: &[&str]) -> Result<Result<String, String>> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_decapod"));
        let (command_name, rest) = words.split_first().expect("a command");
        command.arg(command_name).arg("--root").arg(self.root()).args(rest);
        for variable in ["DECAPOD_URL", "DECAPOD_TOKEN"] {
            command.env_remove(variable);
        }
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        Ok(match output.status.success() {
            true => Ok(String::from_utf8(output.stdout)?),
            false => Err(said.lines().last().unwrap_or_default().to_owned()),
        })
    }

    fn does(&self, words: &[&str]) -> Result<String> {
        self.decapod(words)?.map_err(|error| anyhow::anyhow!("{words:?}: {error}"))
    }

    fn refuses(&self, words: &[&str], part: &str) -> Result<()> {
        let error = self.decapod(words)?.expect_err("it is refused");
        ensure!(error.starts_with("decapod: ") && error.contains(part), "{words:?}: {error}");
        Ok(())
    }

    fn read(&self, path: &str) -> Result<String> {
        Ok(fs::read_to_string(self.root().join(path))?)
    }

    /// All files and links, as paths below the root.
    fn files(&self) -> Result<Vec<String>> {
        let (mut found, mut todo) = (vec![], vec![self.root()]);
        while let Some(directory) = todo.pop() {
            for entry in fs::read_dir(&directory)? {
                let path = entry?.path();
                if path.is_dir() && !path.is_symlink() {
                    todo.push(path);
                } else {
                    found.push(path.strip_prefix(self.root())?.display().to_string());
                }
            }
        }
        found.sort();
        Ok(found)
    }
}

fn mode(path: &Path) -> Result<u32> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::metadata(path)?.permissions().mode() & 0o777)
}

#[test]
fn a_server_is_installed_upgraded_and_removed() -> Result<()> {
    let machine = Machine::new()?;
    let first = machine.does(&["install", "server", "--link-kubectl", "--", "--tls-san=a,b"])?;
    ensure!(first.contains("wrote "), "{first}");
    assert_eq!(
        machine.files()?,
        [
            "etc/crictl.yaml",
            "etc/decapod/config.yaml",
            "etc/decapod/decapod.env",
            "etc/systemd/logind.conf.d/99-decapod.conf",
            UNIT,
            "etc/systemd/system/multi-user.target.wants/decapod.service",
            "usr/local/bin/decapod",
            "usr/local/bin/kubectl",
        ]
    );
    let unit = machine.read(UNIT)?;
    for line in [
        "ExecStart=/usr/local/bin/decapod server",
        "Type=notify",
        "KillMode=process",
        "Delegate=yes",
    ] {
        ensure!(unit.lines().any(|one| one == line), "{line} is missing:\n{unit}");
    }
    let config = machine.read(CONFIG)?;
    ensure!(config.contains("tls-san:\n  - \"a\"\n  - \"b\"\n"), "{config}");
    ensure!(config.contains("shutdown-grace-period: \"30s\"\n"), "{config}");
    assert_eq!(mode(&machine.root().join(CONFIG))?, 0o600);
    assert_eq!(mode(&machine.root().join("usr/local/bin/decapod"))?, 0o755);

    // A second run changes nothing; one with flags changes their keys, and keeps what the user wrote.
    let again = machine.does(&["install", "--link-kubectl"])?;
    ensure!(!again.contains("wrote "), "{again}");
    fs::write(machine.root().join(CONFIG), format!("{config}# mine\nnode-name: n\n"))?;
    machine.does(&["install", "server", "--", "--tls-san=c", "--disable-agent"])?;
    let config = machine.read(CONFIG)?;
    ensure!(
        config.contains("tls-san: \"c\"\n") && config.contains("# mine\nnode-name: n\n"),
        "{config}"
    );
    ensure!(config.ends_with("disable-agent: true\n"), "{config}");

    machine.refuses(&["install", "agent", "--server=https://a:6443"], "installed as server")?;
    let removed = machine.does(&["uninstall"])?;
    ensure!(removed.contains("removed "), "{removed}");
    assert_eq!(machine.files()?, Vec::<String>::new());
    machine.refuses(&["uninstall"], "`decapod install` wrote nothing there")?;
    Ok(())
}

#[test]
fn an_agent_needs_a_server_and_its_token() -> Result<()> {
    let machine = Machine::new()?;
    let server = "--server=https://192.0.2.1:6443";
    machine.refuses(&["install", "agent"], "an agent needs the URL of a server")?;
    machine.refuses(&["install", server], "an agent needs a token")?;
    machine.refuses(&["install", server, "--token=K10xyz::a"], "the token cannot be used")?;
    machine.refuses(&["install", server, "--token-file=/no/such"], "cannot read --token-file")?;
    machine.refuses(&["install", "--server=192.0.2.1", "--token=x"], "expected a URL")?;
    ensure!(!machine.root().join(CONFIG).exists(), "nothing was written");
    let token = format!("K10{}::abcdef.0123456789abcdef", "0".repeat(64));
    let file = machine.scratch.file("token", &format!("{token}\n"))?;
    machine.does(&["install", server, &format!("--token-file={file}")])?;
    assert_eq!(machine.read("etc/decapod/token")?, format!("{token}\n"));
    assert_eq!(mode(&machine.root().join("etc/decapod/token"))?, 0o600);
    let config = machine.read(CONFIG)?;
    ensure!(config.contains("server: \"https://192.0.2.1:6443\"\n"), "{config}");
    ensure!(config.contains("token-file: \"/etc/decapod/token\"\n"), "{config}");
    ensure!(machine.read(UNIT)?.contains("ExecStart=/usr/local/bin/decapod agent\n"));
    // Without flags it is an upgrade.
    machine.does(&["install", "agent"])?;
    Ok(())
}

#[test]
fn openrc_and_foreign_files_are_known() -> Result<()> {
    let machine = Machine::new()?;
    machine.does(&["install", "--init=openrc"])?;
    let script = machine.read("etc/init.d/decapod")?;
    ensure!(
        script.starts_with("#!/sbin/openrc-run\n") && script.contains("command_args=\"server\"")
    );
    assert_eq!(mode(&machine.root().join("etc/init.d/decapod"))?, 0o755);
    ensure!(machine.root().join("etc/runlevels/default/decapod").is_symlink());
    machine.does(&["uninstall"])?;
    assert_eq!(machine.files()?, Vec::<String>::new());

    fs::create_dir_all(machine.root().join("etc/systemd/system"))?;
    fs::write(machine.root().join(UNIT), "[Service]\nExecStart=/usr/bin/decapod server\n")?;
    machine.refuses(&["install"], "was not written by `decapod install`")?;
    machine.refuses(&["install", "--", "--no-such-flag"], "decapod server")?;
    Ok(())
}
