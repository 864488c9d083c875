//! `cargo xtask up`: from a clone to a running single-node cluster.
//!
//! In: arguments for `decapod server`. Out: this process becomes that server, so Ctrl-C and exit codes
//! are the server's own.

use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::packages;
use crate::sh::{self, Outcome};

pub fn run(arguments: &[String]) -> Outcome {
    if !cfg!(target_os = "linux") {
        return Err("a node needs Linux".to_owned());
    }
    if !sh::is_root() {
        return Err("a node needs root (containers, networks): run this as root".to_owned());
    }
    if !sh::exists("cc") {
        return Err("no C compiler found (cc): please install gcc or clang".to_owned());
    }
    packages::ensure(&[packages::BUILD])?;
    println!("building decapod (release); the first time takes some minutes");
    sh::run(sh::cargo().args(["build", "--release", "--package", "decapod"]))?;
    let binary = sh::target_directory().join("release/decapod");
    println!("starting {} server", binary.display());
    let error = Command::new(&binary).arg("server").args(arguments).exec();
    Err(format!("{}: {error}", binary.display()))
}
