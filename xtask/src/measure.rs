//! `cargo xtask measure`: the figures of docs/performance.md, from the release binary.
//!
//! In: the release build. Out: markdown on standard output. This command starts a program of the test
//! kit that measures, because measuring needs namespaces and a TLS client.

use crate::packages;
use crate::sh::{self, Outcome};

pub fn run(arguments: &[String]) -> Outcome {
    let (program, arguments) = match arguments.split_first() {
        Some((first, rest)) if first == "throughput" => ("throughput", rest),
        Some((first, rest)) if first == "fleet" => ("fleet", rest),
        _ => ("measure", arguments),
    };
    packages::ensure(&[packages::BUILD, packages::TEST])?;
    if program == "measure" {
        if !sh::is_root() {
            return Err("measuring starts a node: it needs root".to_owned());
        }
        packages::ensure_lists()?;
    }
    sh::run(sh::cargo().args(["build", "--release", "--package", "decapod"]))?;
    let binary = sh::target_directory().join("release/decapod");
    let mut command = sh::cargo();
    command.args(["run", "--quiet", "--package", "decapod-testkit"]);
    if program != "measure" {
        // The client must not be slower than the server.
        command.arg("--release");
    }
    sh::run(command.args(["--", program]).arg(binary).args(arguments))
}
