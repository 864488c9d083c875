//! The test kit's own program: makes the test images, measures the release binary.
//!
//! In: `images` or `measure BINARY`. Out: paths of archives, or markdown with figures.

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["images"] => {
            for path in decapod_testkit::images::all()? {
                println!("{}", path.display());
            }
            Ok(())
        }
        _ => bail!("usage: decapod-testkit images | measure BINARY"),
    }
}
