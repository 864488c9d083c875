//! `cargo xtask fuzz`: sends a server valid and invalid requests made from its own schemas.
//!
//! In: the built binary, a duration, a seed. Out: findings (a 5xx answer, no answer, a panic), each with
//! its request; none in a good run. The fuzzer is a program of the test kit, because it needs a TLS client.

use crate::sh::{self, Outcome};
use crate::wire;

const USAGE: &str = "usage: cargo xtask fuzz [--seconds N] [--seed N] [--binary PATH]";

/// One minute in ordinary runs; `DECAPOD_FUZZ_SECONDS=600` for long ones.
const SECONDS: &str = "60";

pub fn run(arguments: &[String]) -> Outcome {
    let night = std::env::var("DECAPOD_FUZZ_SECONDS").ok();
    let mut seconds = night.unwrap_or_else(|| SECONDS.to_owned());
    let mut seed = "1".to_owned();
    let mut binary = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let value = words.next().cloned().ok_or_else(|| USAGE.to_owned())?;
        match word.as_str() {
            "--seconds" => seconds = value,
            "--seed" => seed = value,
            "--binary" => binary = Some(value.into()),
            _ => return Err(USAGE.to_owned()),
        }
    }
    let binary = match binary {
        Some(path) => path,
        None => wire::build()?,
    };
    let mut command = sh::cargo();
    command.args(["run", "--quiet", "--package", "decapod-testkit", "--", "fuzz"]);
    sh::run(command.arg(binary).args([seconds, seed]))
}
