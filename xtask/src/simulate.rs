//! `cargo xtask simulate`: rounds of the whole control plane in virtual time.
//!
//! In: the flags of the program `decapod-simtest`, which is built in a debug build. Out: its verdict.

use crate::sh::{self, Outcome};

pub fn run(arguments: &[String]) -> Outcome {
    let mut command = sh::cargo();
    command.args(["run", "--quiet", "--package", "decapod-simtest", "--"]);
    sh::run(command.args(arguments))
}
