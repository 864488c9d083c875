//! Disk images of real distributions, made from packages.
//!
//! In: a release of Debian, a machine with apt, mmdebstrap (or debootstrap) and mke2fs, root. Out: in the
//! cache a base disk, the distribution's own kernel and initial RAM disk, and an SSH key for root. Machines
//! write to overlays, so a base disk never changes.
//! Invariant: an image is finished when its directory has its final name. It is made again when
//! [`RECIPE`] increases.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::sh::{self, Outcome};

/// Increase it when the recipe changes.
const RECIPE: u32 = 1;
const MIRROR: &str = "http://deb.debian.org/debian";
/// Bytes of the root disk, as mke2fs writes them. The file is sparse.
const DISK: &str = "8G";

/// A base system with the distribution's kernel, and the programs with which chapters look and disturb.
/// Neither iptables nor conntrack nor a container runtime is among them: Decapod must not need them.
const PACKAGES: &[&str] = &[
    "systemd",
    "systemd-sysv",
    "libpam-systemd",
    "udev",
    "dbus",
    "kmod",
    "initramfs-tools",
    "linux-image-amd64",
    "openssh-server",
    "iproute2",
    "procps",
    "nftables",
    "curl",
    "ca-certificates",
    "busybox-static",
    "apparmor",
    "util-linux",
    "mount",
    "less",
    "e2fsprogs",
    "xfsprogs",
    "btrfs-progs",
    "dmsetup",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    pub number: &'static str,
    pub codename: &'static str,
}

pub const RELEASES: &[Release] =
    &[Release { number: "12", codename: "bookworm" }, Release { number: "13", codename: "trixie" }];

/// A finished image in the cache.
#[derive(Clone, Debug)]
pub struct Image {
    pub release: Release,
    pub disk: PathBuf,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub key: PathBuf,
}

/// What an image and a machine need on this host: the program and its package.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("mke2fs", "e2fsprogs"),
    ("ssh", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
    ("setpriv", "util-linux"),
];

/// Why machines cannot run here, as a sentence.
pub fn obstacle() -> Option<String> {
    if !sh::is_root() {
        return Some("needs root (the image's files have owners)".to_owned());
    }
    if std::env::consts::ARCH != "x86_64" {
        return Some(format!("the recipe is for x86_64, not for {}", std::env::consts::ARCH));
    }
    let missing = PROGRAMS.iter().find(|(program, _)| !sh::exists(program));
    if let Some((program, package)) = missing {
        return Some(format!("{program} is missing (package {package})"));
    }
    if !sh::exists("mmdebstrap") && !sh::exists("debootstrap") {
        return Some("neither mmdebstrap nor debootstrap is installed".to_owned());
    }
    None
}

impl Image {
    /// The image, from the cache or made now (two to four minutes).
    pub fn of(release: Release) -> Outcome<Self> {
        let name = format!("vm-debian{}-{RECIPE}", release.number);
        let place = sh::cache_directory()?.join(name);
        if !place.is_dir() {
            println!("making the image of Debian {} ({})", release.number, release.codename);
            let partial = place.with_extension(format!("partial-{}", std::process::id()));
            let made = make(release, &partial).and_then(|()| {
                fs::rename(&partial, &place)
                    .map_err(|error| format!("{}: {error}", place.display()))
            });
            // After a success the directory has another name.
            let _ = fs::remove_dir_all(&partial);
            made?;
        }
        let file = |name: &str| place.join(name);
        Ok(Self {
            release,
            disk: file("base.qcow2"),
            kernel: file("kernel"),
            initrd: file("initrd"),
            key: file("key"),
        })
    }
}

fn make(release: Release, place: &Path) -> Outcome {
    let root = place.join("root");
    fs::create_dir_all(&root).map_err(|error| format!("{}: {error}", root.display()))?;
    bootstrap(release, &root)?;
    let key = place.join("key");
    quiet(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key))?;
    let key = read(&key.with_extension("pub"))?;
    configure(&root, &key)?;
    take_kernel(&root, place)?;
    let raw = place.join("disk.raw");
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-L", "root", "-d"]).arg(&root).arg(&raw).arg(DISK);
    quiet(&mut mke2fs)?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "qcow2"]).arg(&raw).arg(place.join("base.qcow2"));
    quiet(&mut convert)?;
    let gone = fs::remove_file(&raw).and_then(|()| fs::remove_dir_all(&root));
    gone.map_err(|error| format!("{}: {error}", place.display()))
}

fn bootstrap(release: Release, root: &Path) -> Outcome {
    let packages = format!("--include={}", PACKAGES.join(","));
    let mut command = if sh::exists("mmdebstrap") {
        let mut command = Command::new("mmdebstrap");
        command.args(["--quiet", "--mode=root", "--variant=minbase"]);
        command
    } else {
        let mut command = Command::new("debootstrap");
        command.arg("--variant=minbase");
        command
    };
    command.arg(packages).arg(release.codename).arg(root).arg(MIRROR);
    quiet(&mut command)
}

/// Runs a command whose output matters only if it fails.
fn quiet(command: &mut Command) -> Outcome {
    sh::capture(command.stdin(Stdio::null())).map(drop)
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A machine with a name, a network by DHCP, and root's key.
fn configure(root: &Path, key: &str) -> Outcome {
    const FILES: &[(&str, &str)] = &[
        ("etc/hostname", "node1\n"),
        ("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 node1\n::1 localhost\n"),
        ("etc/fstab", "LABEL=root / ext4 errors=remount-ro 0 1\n"),
        ("etc/resolv.conf", "nameserver 10.0.2.3\n"),
        (
            "etc/systemd/network/10-uplink.network",
            "[Match]\nName=eth0\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\n",
        ),
        // The other end of a second interface: another machine of the same test.
        (
            "etc/systemd/network/20-between.network",
            "[Match]\nName=eth1\n[Link]\nRequiredForOnline=no\n",
        ),
    ];
    /// Work that a distribution starts by itself some minutes after a boot.
    const QUIET: &[&str] = &[
        "apt-daily.timer",
        "apt-daily-upgrade.timer",
        "e2scrub_all.timer",
        "fstrim.timer",
        "dpkg-db-backup.timer",
    ];
    const WANTED: &[(&str, &str)] = &[
        ("multi-user.target.wants", "systemd-networkd.service"),
        ("network-online.target.wants", "systemd-networkd-wait-online.service"),
    ];
    for (name, text) in FILES {
        write(&root.join(name), text, 0o644)?;
    }
    write(&root.join("root/.ssh/authorized_keys"), key, 0o600)?;
    let units = root.join("etc/systemd/system");
    for unit in QUIET {
        link("/dev/null", &units.join(unit))?;
    }
    for (directory, unit) in WANTED {
        link(&format!("/lib/systemd/system/{unit}"), &units.join(directory).join(unit))?;
    }
    // Each machine makes its own.
    write(&root.join("etc/machine-id"), "", 0o444)
}

fn write(path: &Path, text: &str, mode: u32) -> Outcome {
    let directory = path.parent().expect("a file lies in a directory");
    let written = fs::create_dir_all(directory).and_then(|()| {
        // A link of the distribution would lead out of the image.
        let _ = fs::remove_file(path);
        fs::write(path, text)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    });
    written.map_err(|error| format!("{}: {error}", path.display()))
}

fn link(to: &str, path: &Path) -> Outcome {
    let directory = path.parent().expect("a link lies in a directory");
    let made = fs::create_dir_all(directory).and_then(|()| {
        let _ = fs::remove_file(path);
        symlink(to, path)
    });
    made.map_err(|error| format!("{}: {error}", path.display()))
}

fn take_kernel(root: &Path, place: &Path) -> Outcome {
    for (start, name) in [("vmlinuz-", "kernel"), ("initrd.img-", "initrd")] {
        let boot = root.join("boot");
        let entries =
            fs::read_dir(&boot).map_err(|error| format!("{}: {error}", boot.display()))?;
        let found = entries
            .flatten()
            .find(|entry| entry.file_name().to_string_lossy().starts_with(start))
            .ok_or_else(|| format!("{}: no {start}*", boot.display()))?;
        fs::copy(found.path(), place.join(name))
            .map_err(|error| format!("{}: {error}", found.path().display()))?;
    }
    Ok(())
}
