//! `cargo xtask faults`: a cluster of three servers is harmed under load, and judged by what its clients saw.
//!
//! In: the debug binary, which is built, or the one that DECAPOD_BINARY names; etcd in the cache. Out: a table,
//! and each contradiction. A program of the test kit does the work, because it needs namespaces and a TLS client.

use std::path::PathBuf;

use crate::sh::{self, Outcome};
use crate::{foreign, packages};

pub fn run(arguments: &[String]) -> Outcome {
    if !sh::is_root() {
        return Err("faults happen on hosts of their own: making them needs root".to_owned());
    }
    packages::ensure(&[packages::BUILD, packages::TEST])?;
    packages::ensure_lists()?;
    foreign::etcd()?;
    foreign::kubectl()?;
    let binary = match std::env::var_os("DECAPOD_BINARY") {
        Some(path) => PathBuf::from(path),
        None => {
            sh::run(sh::cargo().args(["build", "--package", "decapod"]))?;
            sh::target_directory().join("debug/decapod")
        }
    };
    let mut command = sh::cargo();
    command.args(["run", "--quiet", "--package", "decapod-testkit", "--", "faults"]);
    sh::run(command.arg(binary).args(arguments))
}
