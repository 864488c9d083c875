//! Encryption of Secrets at rest, and renewed certificates. Leaves Secrets unencrypted, as they were.

use std::path::Path;

use anyhow::{Result, ensure};
use testkit::wait;

use crate::story::{LONG, Story};

/// A text in no other file of the machine.
const MARK: &str = "hunter2-of-the-story";

/// When enabled, no file of the data directory contains the value, and the API still returns it.
pub fn secrets_are_sealed(story: &mut Story) -> Result<()> {
    let status = story.server.decapod(&["secrets-encrypt", "status"])?;
    ensure!(status.contains("Disabled"), "{status}");
    story.server.decapod(&["secrets-encrypt", "enable"])?;
    let data = story.server.data_directory();
    let literal = format!("--from-literal=password={MARK}");
    story.kubectl(&format!("create secret generic sealed {literal}"))?;
    ensure!(story.value("secret sealed", ".data.password")? == base64(MARK), "another value");
    for mark in [MARK, &base64(MARK)] {
        ensure!(!any_file_has(&data.join("store"), mark.as_bytes())?, "{mark} is in the store");
    }
    story.server.decapod(&["secrets-encrypt", "rotate"])?;
    let status = story.server.decapod(&["secrets-encrypt", "status"])?;
    ensure!(status.contains("Enabled") && status.contains("All hashes match"), "{status}");
    ensure!(story.value("secret sealed", ".data.password")? == base64(MARK), "another value");
    story.kubectl("delete secret sealed")?;
    story.server.decapod(&["secrets-encrypt", "disable"])?;
    Ok(())
}

/// A running server uses new certificates; clients with old ones do not notice.
pub fn certificates_are_replaced(story: &mut Story) -> Result<()> {
    let pki = story.server.data_directory().join("pki");
    let before = std::fs::read(pki.join("apiserver.crt"))?;
    let watch = story.server.kubectl_in_background("watch", &["get", "configmaps", "-w"])?;
    wait::until(LONG, "the watch", || {
        ensure!(watch.output()?.contains("NAME"), "nothing is shown yet");
        Ok(())
    })?;
    let said = story.server.decapod(&["certificate", "rotate"])?;
    ensure!(said.contains("certificates moved to"), "{said}");
    wait::until(LONG, "a new certificate", || {
        ensure!(std::fs::read(pki.join("apiserver.crt"))? != before, "still the old one");
        Ok(())
    })?;
    // Over a new connection, and over the existing one.
    story.kubectl("create configmap later")?;
    wait::until(LONG, "the watch goes on", || {
        let shown = watch.output()?;
        ensure!(shown.contains("later"), "{shown}");
        Ok(())
    })?;
    story.kubectl("delete configmap later")?;
    let listed = story.server.decapod(&["certificate", "check"])?;
    ensure!(listed.contains("apiserver.crt") && !listed.contains("EXPIRED"), "{listed}");
    Ok(())
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

fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at)) as usize & 63] as char;
            out.push(if at > chunk.len() { '=' } else { digit });
        }
    }
    out
}
