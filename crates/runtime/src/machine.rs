//! The abilities of this machine's kernel, and whether the machine rebooted since a file was written.
//!
//! In: the kernel's own tables. Out: answers, and errors that tell the administrator what to do.

use std::fs;
use std::io;
use std::path::Path;

use nix::mount::{MsFlags, mount};

use crate::files;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Different after every boot; `None` where the kernel does not provide it.
pub(crate) fn boot_id() -> Option<String> {
    let text = fs::read_to_string(BOOT_ID).ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

/// Whether the machine rebooted since `written`. Files of older releases lack the boot id; they
/// count as "not rebooted".
pub(crate) fn restarted_since(written: &str, now: Option<&str>) -> bool {
    let written = written.trim();
    !written.is_empty() && now.is_some_and(|now| now != written)
}

/// Mounts an overlayfs at `place` temporarily, which loads the kernel module if necessary. Blocks.
pub(crate) fn check_overlayfs(place: &Path) -> io::Result<()> {
    let root = place.join("overlay-check");
    files::remove_tree(&root)?;
    let [lower, upper, work, merged] =
        ["lower", "upper", "work", "merged"].map(|name| root.join(name));
    for directory in [&lower, &upper, &work, &merged] {
        fs::create_dir_all(directory)?;
    }
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        upper.display(),
        work.display()
    );
    let mounted =
        mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str()));
    let unmounted = files::unmount(&merged);
    mounted.map_err(|errno| overlay_error(errno.into()))?;
    unmounted?;
    files::remove_tree(&root)
}

/// Adds the word overlayfs to an error of mounting one.
pub(crate) fn overlay_error(error: io::Error) -> io::Error {
    let text = match error.raw_os_error() {
        Some(libc::ENODEV) => format!(
            "the kernel has no overlayfs, which containers need ({error}); \
             is its module there (modprobe overlay)?"
        ),
        Some(libc::EINVAL) => format!(
            "overlayfs refuses the file system of the data directory ({error}); \
             the kernel's log says why"
        ),
        _ => format!("overlayfs: {error}"),
    };
    io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_different_boot_id_means_a_reboot() {
        let check = |written, now, expected| {
            assert_eq!(restarted_since(written, now), expected, "{written:?} {now:?}");
        };
        check("a\n", Some("a"), false);
        check("a", Some("b"), true);
        check("", Some("b"), false);
        check("a", None, false);
        assert_eq!(boot_id(), boot_id());
    }

    #[test]
    fn errors_name_overlayfs() {
        for errno in [libc::ENODEV, libc::EINVAL, libc::EPERM] {
            let text = overlay_error(io::Error::from_raw_os_error(errno)).to_string();
            assert!(text.contains("overlayfs"), "{text}");
        }
    }

    #[test]
    fn the_overlayfs_check_leaves_nothing() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let place = tempfile::tempdir().expect("a directory");
        check_overlayfs(place.path()).expect("this kernel has it");
        assert_eq!(fs::read_dir(place.path()).expect("listed").count(), 0);
    }
}
