//! The Debian package: the program and its completion. `decapod install` makes the service.
//!
//! Invariant: an upgrade restarts a running service, and pods keep running; a removal stops it.

use std::fs;
use std::path::PathBuf;

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
    let text = control_file(release, &binary);
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

fn control_file(release: &Release, binary: &[u8]) -> String {
    let libc = match oldest_glibc(binary) {
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
        size = binary.len() / 1024,
    )
}

/// The newest version of the C library's symbols that the program uses: GLIBC_2.34.
fn oldest_glibc(binary: &[u8]) -> Option<u32> {
    const MARK: &[u8] = b"GLIBC_2.";
    let starts = binary.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    let minor = |at: usize| {
        let digits: String = binary[at + MARK.len()..]
            .iter()
            .map(|byte| char::from(*byte))
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse().ok()
    };
    starts.filter_map(|(at, _)| minor(at)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_is_the_newest_that_is_named() {
        assert_eq!(oldest_glibc(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0"), Some(34));
        assert_eq!(oldest_glibc(b"GLIBC_PRIVATE"), None);
    }
}
