//! `cargo xtask fuzz`: whatever the server's own schemas allow, and what they do not, sent to it.
//!
//! In: the built binary, how long, a seed. Out: findings (an answer of 5xx, no answer, a panic), each with
//! the request; none in a good run. The fuzz is a program of the test kit, because it needs a TLS client.

use crate::sh::{self, Outcome};
use crate::wire;

const USAGE: &str = "usage: cargo xtask fuzz [--seconds N] [--seed N] [--binary PATH]";

/// A minute is what a change waits for; `DECAPOD_FUZZ_SECONDS=600` is for the night.
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
