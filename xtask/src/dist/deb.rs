//! The Debian package: the program and its completion. `decapod install` makes the service.
//!
//! Invariant: an upgrade restarts a running service, and pods keep running; a removal stops it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::archive::{Tree, ar};
use super::{Release, VERSION};
use crate::sh::{self, Outcome};

/// After an upgrade. Pods do not belong to the service's processes.
const AFTER: &str = "#!/bin/sh
set -e
if [ \"$1\" = configure ] && [ -d /run/systemd/system ]; then
    systemctl try-restart decapod.service || true
fi
";
const BEFORE_REMOVAL: &str = "#!/bin/sh
set -e
if [ \"$1\" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now decapod.service 2>/dev/null || true
fi
";
/// Bash reads it when the first word is completed.
const COMPLETION: &str = "source <(/usr/bin/decapod completion bash)\n";

pub fn make(release: &Release) -> Outcome<PathBuf> {
    let binary = fs::read(&release.binary)
        .map_err(|error| format!("{}: {error}", release.binary.display()))?;
    let (data, control) = (Tree::new("deb-data")?, Tree::new("deb-control")?);
    data.write("usr/bin/decapod", &binary, true)?;
    data.write("usr/share/bash-completion/completions/decapod", COMPLETION.as_bytes(), false)?;
    data.copy(&sh::root().join("LICENSE"), "usr/share/doc/decapod/copyright", false)?;
    data.copy(&sh::root().join("README.md"), "usr/share/doc/decapod/README.md", false)?;
    let text = control_file(release, binary.len(), libc_of(release)?);
    control.write("control", text.as_bytes(), false)?;
    control.write("postinst", AFTER.as_bytes(), true)?;
    control.write("prerm", BEFORE_REMOVAL.as_bytes(), true)?;
    let parts = [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", control.packed(&["control", "postinst", "prerm"], &release.epoch)?),
        ("data.tar.gz", data.packed(&["usr"], &release.epoch)?),
    ];
    let parts: Vec<(&str, &[u8])> =
        parts.iter().map(|(name, content)| (*name, content.as_slice())).collect();
    let path = release.output.join(format!("decapod_{VERSION}_{}.deb", release.architecture));
    release.write(&path, &ar(&parts, &release.epoch))?;
    Ok(path)
}

fn control_file(release: &Release, size: usize, libc: Option<u32>) -> String {
    let libc = match libc {
        Some(minor) => format!("Depends: libc6 (>= 2.{minor})\n"),
        None => String::new(),
    };
    format!(
        "Package: decapod
Version: {VERSION}
Architecture: {architecture}
Maintainer: The Decapod project
Section: admin
Priority: optional
Installed-Size: {size}
{libc}Recommends: ca-certificates, kmod
Description: Kubernetes in one binary
 API server, store, controllers, scheduler, kubelet, container runtime, pod network,
 Service proxy and cluster DNS. Run `decapod install` to make it a service.
",
        architecture = release.architecture,
        size = size / 1024,
    )
}

/// What the program needs of the C library: the newest `GLIBC_2.34` among its symbols' versions.
fn libc_of(release: &Release) -> Outcome<Option<u32>> {
    // grep is as fast as the disk; this program is never optimised.
    let mut grep = Command::new("grep");
    grep.args(["--text", "--only-matching", "--extended-regexp", "GLIBC_2\\.[0-9]+"]);
    let output = grep.arg(&release.binary).output().map_err(|error| format!("grep: {error}"))?;
    // It fails if there is none, as in a static program.
    Ok(newest(&String::from_utf8_lossy(&output.stdout)))
}

fn newest(versions: &str) -> Option<u32> {
    let minor = |line: &str| line.strip_prefix("GLIBC_2.")?.parse().ok();
    versions.lines().filter_map(minor).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_is_the_newest_that_is_named() {
        assert_eq!(newest("GLIBC_2.2\nGLIBC_2.34\nGLIBC_2.4\n"), Some(34));
        assert_eq!(newest(""), None);
    }
}
