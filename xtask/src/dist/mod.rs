//! `cargo xtask dist`: the files of a release, for this machine's architecture.
//!
//! In: the tree; the release binary, which is built unless `--binary` names one. Out, in `target/dist`:
//!
//! ```text
//!  decapod-VERSION-linux-ARCH.tar.gz    program, install.sh, documentation
//!  decapod_VERSION_ARCH.deb             program, completion
//!  decapod-VERSION.cdx.json             the packages that the program is made of (CycloneDX)
//!  SHA256SUMS
//! ```
//!
//! Invariant: two runs with the same binary make the same bytes: times are those of the last commit (or
//! `SOURCE_DATE_EPOCH`), names are sorted, owners are root. It needs tar, gzip, grep and sha256sum.

mod archive;
mod deb;
mod sbom;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sh::{self, Outcome};
use archive::Tree;

const USAGE: &str = "usage: cargo xtask dist [--binary FILE] [--output DIRECTORY]";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const INSTALL: &str = include_str!("install.sh");

/// What goes into the archives.
struct Release {
    binary: PathBuf,
    /// As distributions call it: amd64, arm64.
    architecture: &'static str,
    /// Seconds since 1970, for everything that has a time.
    epoch: String,
    output: PathBuf,
}

pub fn run(arguments: &[String]) -> Outcome {
    let (mut binary, mut output) = (None, None);
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let place = match word.as_str() {
            "--binary" => &mut binary,
            "--output" => &mut output,
            _ => return Err(USAGE.to_owned()),
        };
        *place = Some(PathBuf::from(words.next().ok_or(USAGE)?));
    }
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => return Err(format!("no release is made for the architecture {other}")),
    };
    let binary = match binary {
        Some(binary) => binary,
        None => {
            sh::step("building the release binary");
            sh::run(sh::cargo().args(["build", "--release", "--package", "decapod"]))?;
            sh::target_directory().join("release/decapod")
        }
    };
    let output = output.unwrap_or_else(|| sh::target_directory().join("dist"));
    fs::create_dir_all(&output).map_err(|error| format!("{}: {error}", output.display()))?;
    let release = Release { binary, architecture, epoch: epoch()?, output };
    let made = [release.tarball()?, deb::make(&release)?, sbom::make(&release)?];
    release.checksums(&made)
}

/// The last commit's time, so that the same tree makes the same files.
fn epoch() -> Outcome<String> {
    if let Ok(given) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(given);
    }
    let mut git = Command::new("git");
    git.current_dir(sh::root()).args(["log", "-1", "--format=%ct"]);
    Ok(sh::capture(&mut git)?.trim().to_owned())
}

impl Release {
    fn tarball(&self) -> Outcome<PathBuf> {
        let name = format!("decapod-{VERSION}-linux-{}", self.architecture);
        let tree = Tree::new("dist")?;
        tree.copy(&self.binary, &format!("{name}/decapod"), true)?;
        tree.write(&format!("{name}/install.sh"), INSTALL.as_bytes(), true)?;
        for file in ["LICENSE", "README.md"] {
            tree.copy(&sh::root().join(file), &format!("{name}/{file}"), false)?;
        }
        let docs = sh::root().join("docs");
        for page in names(&docs)? {
            tree.copy(&docs.join(&page), &format!("{name}/docs/{page}"), false)?;
        }
        let path = self.output.join(format!("{name}.tar.gz"));
        self.write(&path, &tree.packed(&[&name], &self.epoch)?)?;
        Ok(path)
    }

    /// Writes a file of the release, and says so.
    fn write(&self, path: &Path, content: &[u8]) -> Outcome {
        fs::write(path, content).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("{} ({} KiB)", path.display(), content.len() / 1024);
        Ok(())
    }

    fn checksums(&self, made: &[PathBuf]) -> Outcome {
        let mut command = Command::new("sha256sum");
        command.current_dir(&self.output);
        let mut files: Vec<_> = made.iter().filter_map(|path| path.file_name()).collect();
        files.sort();
        let sums = sh::capture(command.args(files))?;
        self.write(&self.output.join("SHA256SUMS"), sums.as_bytes())
    }
}

/// Names of a directory's files, sorted.
fn names(directory: &Path) -> Outcome<Vec<String>> {
    let failed = |error| format!("{}: {error}", directory.display());
    let mut names = vec![];
    for entry in fs::read_dir(directory).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same input makes the same bytes, whatever the time and the file's own owner and mode.
    #[test]
    fn releases_are_reproducible() {
        let directory = sh::temporary_directory("dist-test").expect("a directory");
        let binary = directory.join("decapod");
        fs::write(&binary, "not a program, GLIBC_2.34").expect("written");
        let make = |name: &str| {
            let output = directory.join(name);
            fs::create_dir(&output).expect("made");
            let epoch = "1700000000".to_owned();
            let release = Release { binary: binary.clone(), architecture: "amd64", epoch, output };
            let made =
                [release.tarball().expect("a tarball"), deb::make(&release).expect("a .deb")];
            release.checksums(&made).expect("checksums");
            let read = |path: &PathBuf| fs::read(path).expect("read");
            (made.iter().map(read).collect::<Vec<_>>(), read(&release.output.join("SHA256SUMS")))
        };
        let first = make("one");
        fs::copy(&binary, directory.join("other")).expect("copied");
        fs::rename(directory.join("other"), &binary).expect("another time");
        assert!(first == make("two"));
        let sums = String::from_utf8(first.1).expect("text");
        assert_eq!(sums.lines().count(), 2, "{sums}");
        fs::remove_dir_all(&directory).expect("removed");
    }
}
