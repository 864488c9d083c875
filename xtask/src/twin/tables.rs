//! The objects of upstream's own unit tests, as a source of requests.
//!
//! In: the Go module of Kubernetes, `tables.go`. Out: a file in the cache with a JSON list in each line: an object,
//! or an object and the older one that it replaces. Upstream's tests of validation run once with a hook in each
//! validation function. Nothing of upstream is committed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::foreign;
use crate::sh::{self, Outcome};

const PROGRAM: &str = include_str!("tables.go");

const FILE: &str = "twin-tables.jsonl";
/// The program that made the file.
const MADE_BY: &str = "twin-tables.txt";

/// The file, if the cache has it from this program.
pub fn cached() -> Option<PathBuf> {
    let directory = foreign::kubernetes_module().ok()?;
    let made_by = fs::read_to_string(directory.join(MADE_BY)).ok()?;
    let file = directory.join(FILE);
    (made_by == PROGRAM && file.is_file()).then_some(file)
}

/// The file, made if the cache has none of this program.
pub fn extracted() -> Outcome<PathBuf> {
    if let Some(file) = cached() {
        return Ok(file);
    }
    let directory = foreign::kubernetes_module()?;
    let (file, program) = (directory.join(FILE), directory.join(MADE_BY));
    if !foreign::has_go() {
        return Err("no Go toolchain".to_owned());
    }
    let work = sh::temporary_directory("twin-tables")?;
    let made = extract(&directory, &work, &work.join("objects.jsonl"));
    let moved = made.and_then(|found| {
        let text = fs::read(&found).map_err(|error| format!("{}: {error}", found.display()))?;
        fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        fs::write(&program, PROGRAM).map_err(|error| format!("{}: {error}", program.display()))
    });
    let _ = fs::remove_dir_all(&work);
    moved.map(|()| file)
}

/// Runs upstream's tests of validation with hooks.
fn extract(module: &Path, work: &Path, out: &Path) -> Outcome<PathBuf> {
    let source = work.join("tables.go");
    fs::write(&source, PROGRAM).map_err(|error| error.to_string())?;
    let overlay = work.join("overlay");
    fs::create_dir(&overlay).map_err(|error| error.to_string())?;
    // Go refuses to replace files of its module cache: under another name it takes them.
    let alias = work.join("kubernetes");
    std::os::unix::fs::symlink(foreign::module_source()?, &alias)
        .map_err(|error| error.to_string())?;
    let mut command = Command::new("go");
    command.current_dir(work).env("GOFLAGS", "").arg("run").arg(&source);
    command.arg(&alias).arg("k8s.io/kubernetes").arg(&overlay);
    let packages = sh::capture(&mut command)?;
    let text = fs::read_to_string(module.join("go.mod")).map_err(|error| error.to_string())?;
    let text = format!("{text}replace k8s.io/kubernetes => {}\n", alias.display());
    fs::write(work.join("go.mod"), text).map_err(|error| error.to_string())?;
    let sums = fs::read(module.join("go.sum")).unwrap_or_default();
    fs::write(work.join("go.sum"), sums).map_err(|error| error.to_string())?;
    let mut tests = foreign::go(work);
    tests.args(["test", "-trimpath", "-vet=off", "-count=1", "-p=1", "-overlay"]);
    tests.arg(overlay.join("overlay.json")).args(packages.split_whitespace());
    tests.env("TWIN_OUT", out).stdout(Stdio::null()).stderr(Stdio::null());
    // A test that fails because of the hook has been seen all the same.
    let _ = tests.status();
    if out.is_file() {
        Ok(out.to_owned())
    } else {
        Err("upstream's tests saw no object".to_owned())
    }
}
