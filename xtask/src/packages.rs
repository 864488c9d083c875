//! Distribution packages that a build or a test needs.
//!
//! In: a list of needs. Out: installed packages, with a line that names them. On a machine without
//! apt, an error lists the missing packages.

use std::path::Path;
use std::process::Command;

use crate::sh::{self, Outcome};

/// A package and a file or program that proves its presence.
pub struct Need {
    package: &'static str,
    proof: Proof,
    why: &'static str,
}

enum Proof {
    /// A static library of this file name.
    Library(&'static str),
    Program(&'static str),
}

/// What the release build needs in addition to Rust and a C compiler.
pub const BUILD: &[Need] = &[Need {
    package: "libseccomp-dev",
    proof: Proof::Library("libseccomp.a"),
    why: "seccomp filters, linked into the binary",
}];

/// What the tests need in addition.
pub const TEST: &[Need] = &[
    Need { package: "nftables", proof: Proof::Program("nft"), why: "checks our rule sets" },
    Need { package: "iproute2", proof: Proof::Program("ip"), why: "networks for the tests" },
    Need { package: "dpkg", proof: Proof::Program("dpkg-deb"), why: "test images" },
    Need {
        package: "curl",
        proof: Proof::Program("curl"),
        why: "a client that reads answers before its request is sent",
    },
    Need { package: "procps", proof: Proof::Program("ps"), why: "process lists in reports" },
];

/// Installs missing packages. Fails if it cannot.
pub fn ensure(needs: &[&[Need]]) -> Outcome {
    let missing: Vec<&Need> =
        needs.iter().flat_map(|list| list.iter()).filter(|need| !need.is_met()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|need| need.package).collect();
    if !sh::exists("apt-get") || !sh::is_root() {
        let list: Vec<String> =
            missing.iter().map(|need| format!("  {} ({})", need.package, need.why)).collect();
        return Err(format!(
            "missing packages, and this is not a root shell on a Debian-like system; please install:\n{}",
            list.join("\n")
        ));
    }
    for need in &missing {
        println!("installing the package {} ({})", need.package, need.why);
    }
    apt(&["update", "-q"])?;
    let mut install = vec!["install", "-q", "-y", "--no-install-recommends"];
    install.extend(names);
    apt(&install)
}

/// Makes `apt-get download` possible: a new image has no package lists.
pub fn ensure_lists() -> Outcome {
    let known = sh::capture(Command::new("apt-cache").args(["policy", "nginx-light"]));
    if known.is_ok_and(|text| text.contains("Candidate:")) {
        return Ok(());
    }
    apt(&["update", "-q"])
}

fn apt(arguments: &[&str]) -> Outcome {
    let mut command = Command::new("apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(std::process::Stdio::null());
    sh::run(&mut command)
}

/// The directory of a static library, on the distributions that we know.
pub fn library_directory(name: &str) -> Option<&'static Path> {
    const PLACES: &[&str] = &[
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ];
    PLACES.iter().map(Path::new).find(|place| place.join(name).is_file())
}

impl Need {
    fn is_met(&self) -> bool {
        match self.proof {
            Proof::Library(name) => library_directory(name).is_some(),
            Proof::Program(name) => sh::exists(name),
        }
    }
}
