//! The test kit's own program: makes the test images, measures the release binary.
//!
//! In: `images`, or `measure BINARY [RUNS] [--starts-only]`. Out: paths of archives, or markdown.

use std::path::Path;

use anyhow::{Result, bail};
use decapod_testkit::{images, measure};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let idle = !arguments.iter().any(|word| word == "--starts-only");
    let words: Vec<&str> =
        arguments.iter().map(String::as_str).filter(|word| !word.starts_with("--")).collect();
    match words.as_slice() {
        ["images"] => {
            for path in images::all()? {
                println!("{}", path.display());
            }
        }
        ["measure", binary] => print!("{}", measure::report(Path::new(binary), 5, idle)?),
        ["measure", binary, runs] => {
            print!("{}", measure::report(Path::new(binary), runs.parse()?, idle)?)
        }
        _ => bail!("usage: decapod-testkit images | measure BINARY [RUNS] [--starts-only]"),
    }
    Ok(())
}
