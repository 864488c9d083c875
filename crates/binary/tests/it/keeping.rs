//! Secrets at rest and their keys, and the certificate authorities.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testkit::http::ApiClient;
use testkit::wait;

use crate::support::{LONG, Server};

/// A text in no other file of the machine.
const MARK: &str = "hunter2-of-the-control-plane";

/// The steps of `secrets-encrypt` in docs/security.md, on a running server.
#[test]
fn secrets_are_encrypted_rotated_and_decrypted_again() -> Result<()> {
    let mut server = Server::start(&[])?;
    let status = server.decapod(&["secrets-encrypt", "status"])?;
    ensure!(status.contains("Disabled"), "{status}");
    server.decapod(&["secrets-encrypt", "enable", "--provider", "aesgcm"])?;
    create(&server, "sealed")?;
    let sealed = STANDARD.encode(MARK);
    for mark in [MARK, &sealed] {
        // The server rewrites its files at any time: a file may be replaced during the search.
        let found = wait::until(LONG, "its files hold still", || {
            any_file_has(&server.data().join("store"), mark.as_bytes())
        })?;
        ensure!(!found, "{mark} is there");
    }
    server.decapod(&["secrets-encrypt", "rotate"])?;
    ensure!(read(&server, "sealed")? == sealed, "another value after the rotation");
    // A restarted server finds the keys.
    server.stop()?;
    server.launch()?;
    ensure!(read(&server, "sealed")? == sealed, "another value after a restart");
    server.decapod(&["secrets-encrypt", "reencrypt"])?;
    let status = server.decapod(&["secrets-encrypt", "status"])?;
    ensure!(status.contains("Enabled") && status.contains("All hashes match"), "{status}");
    server.decapod(&["secrets-encrypt", "disable"])?;
    ensure!(read(&server, "sealed")? == sealed, "another value after all");
    let status = server.decapod(&["secrets-encrypt", "status"])?;
    ensure!(status.contains("Disabled"), "{status}");
    Ok(())
}

/// Kubeconfigs from before and after `rotate-ca` and a restart, twice in a row.
#[test]
fn clients_that_trust_the_old_authority_trust_the_new_one() -> Result<()> {
    let mut server = Server::start(&[])?;
    let mut kubeconfigs = vec![server.kubeconfig()?];
    for _ in 0..2 {
        let said = server.decapod(&["certificate", "rotate-ca"])?;
        ensure!(said.contains("replaced: ca, front-proxy-ca"), "{said}");
        server.stop()?;
        server.launch()?;
        let new = server.kubeconfig()?;
        for old in &kubeconfigs {
            // The free port changes with each start.
            let moved = old.replace(address_in(old)?, address_in(&new)?);
            let answer = ApiClient::from_kubeconfig(&moved)?.get("/api/v1/namespaces", LONG)?;
            ensure!(answer.status == 200, "a kubeconfig of before: {}", answer.body);
        }
        kubeconfigs.push(new);
    }
    let listed = server.decapod(&["certificate", "check"])?;
    ensure!(listed.contains("CN=kubernetes@") && !listed.contains("EXPIRED"), "{listed}");
    Ok(())
}

/// The last step of a new authority: refused while a client needs the old one; after that, certificates of
/// the old one are refused.
#[test]
fn the_old_authority_is_removed_when_no_client_needs_it() -> Result<()> {
    let mut server = Server::start(&[])?;
    let before = server.kubeconfig()?;
    let finish = ["certificate", "rotate-ca", "--finish", "--unused-for", "1s"];
    ensure!(server.decapod(&finish)?.contains("no older authority"), "there is none yet");
    server.decapod(&["certificate", "rotate-ca"])?;
    let refused = |server: &Server, why: &str| -> Result<()> {
        let told = server.decapod(&["certificate", "rotate-ca", "--finish"]);
        let told = format!("{:#}", told.err().context("it was not refused")?);
        ensure!(told.contains("nothing was changed") && told.contains(why), "{told}");
        Ok(())
    };
    refused(&server, "the server has not been restarted since")?;
    server.stop()?;
    refused(&server, "failed to ask the server for its clients")?;
    server.launch()?;
    let moved = before.replace(address_in(&before)?, address_in(&server.kubeconfig()?)?);
    let answer = ApiClient::from_kubeconfig(&moved)?.get("/api/v1/namespaces", LONG)?;
    ensure!(answer.status == 200, "a kubeconfig of before: {}", answer.body);
    refused(&server, "kubernetes-admin used a certificate of CN=kubernetes ")?;
    // Later: the pods know the new authority, and no client uses the old kubeconfig.
    wait::until(LONG, "no client needs the old authority", || server.decapod(&finish))?;
    ensure!(server.api()?.get("/readyz", LONG)?.status == 200, "the running server is lost");
    server.stop()?;
    server.launch()?;
    let answer = server.api()?.get("/api/v1/namespaces", LONG)?;
    ensure!(answer.status == 200, "the administrator: {}", answer.body);
    let mixed = user_of(&server.kubeconfig()?, &before)?;
    let answer = ApiClient::from_kubeconfig(&mixed)?.get("/api/v1/namespaces", LONG)?;
    ensure!(answer.status == 401, "a certificate of before: {answer:?}");
    Ok(())
}

/// A kubeconfig with the user of another.
fn user_of(kubeconfig: &str, other: &str) -> Result<String> {
    let mut config: Value = serde_saphyr::from_str(kubeconfig)?;
    let other: Value = serde_saphyr::from_str(other)?;
    config["users"] = other["users"].clone();
    Ok(config.to_string())
}

fn address_in(kubeconfig: &str) -> Result<&str> {
    let rest = kubeconfig.split("https://").nth(1).context("a server")?;
    let end = rest.find(|one: char| !one.is_ascii_digit() && !".:".contains(one));
    Ok(&rest[..end.unwrap_or(rest.len())])
}

fn create(server: &Server, name: &str) -> Result<()> {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": name}, "stringData": {"password": MARK},
    });
    let path = "/api/v1/namespaces/default/secrets";
    let answer = server.api()?.post(path, &secret.to_string(), LONG)?;
    ensure!(answer.status == 201, "{}", answer.body);
    Ok(())
}

fn read(server: &Server, name: &str) -> Result<String> {
    let path = format!("/api/v1/namespaces/default/secrets/{name}");
    let answer = server.api()?.get(&path, LONG)?;
    let secret: Value = serde_json::from_str(&answer.body)?;
    Ok(secret["data"]["password"].as_str().context("no password")?.to_owned())
}

fn any_file_has(directory: &Path, bytes: &[u8]) -> Result<bool> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let found = match path.is_dir() {
            true => any_file_has(&path, bytes)?,
            false => std::fs::read(&path)?.windows(bytes.len()).any(|part| part == bytes),
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}
