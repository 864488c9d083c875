//! Programs and their libraries out of Debian packages, without installing them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Fetches packages and unpacks them into one directory, which is removed when dropped.
pub fn unpack(packages: &[&str]) -> Result<tempfile::TempDir> {
    let directory = tempfile::tempdir()?;
    let mut fetch = Command::new("apt-get");
    // By default apt downloads as a user that cannot write here.
    fetch.args(["-q", "-o", "APT::Sandbox::User=root", "download"]).args(packages);
    run(fetch.current_dir(directory.path()))?;
    for entry in std::fs::read_dir(directory.path())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&path).arg(directory.path()))?;
            std::fs::remove_file(&path)?;
        }
    }
    Ok(directory)
}

/// Packages and all their dependencies that the archive has.
pub fn with_dependencies(packages: &[&str]) -> Result<Vec<String>> {
    let mut closure = Command::new("apt-cache");
    closure.args(["depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts"]);
    closure.args(["--no-breaks", "--no-replaces", "--no-enhances"]).args(packages);
    let text = run(&mut closure)?;
    // Indented lines are edges, names in brackets are provided by several packages.
    let named = text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_alphanumeric()));
    let policy = run(Command::new("apt-cache").arg("policy").args(named))?;
    let mut found = Vec::new();
    let mut current = "";
    for line in policy.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|name| !name.starts_with(' ')) {
            current = name;
        } else if line.trim().starts_with("Candidate: ") && !line.ends_with("(none)") {
            found.push(current.to_owned());
        }
    }
    Ok(found)
}

/// A library's name for the loader, and the path of its file.
pub struct Library {
    /// Absolute inside the image, without the first slash.
    pub name: String,
    pub file: PathBuf,
}

/// The libraries that a program needs, found by its own loader in the unpacked tree, and the loader.
pub fn libraries(root: &Path, program: &str) -> Result<Vec<Library>> {
    let triplet = "x86_64-linux-gnu";
    let folders = [root.join("lib").join(triplet), root.join("usr/lib").join(triplet)];
    let search =
        folders.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":");
    let loader = "lib64/ld-linux-x86-64.so.2";
    let loader_file = folders[0].join("ld-linux-x86-64.so.2");
    let program = root.join(program);
    let program = program.to_string_lossy();
    let list = output(&loader_file, &["--library-path", &search, "--list", &program])?;
    let mut found = vec![Library { name: loader.to_owned(), file: loader_file }];
    for line in list.lines() {
        let Some((name, rest)) = line.trim().split_once(" => ") else { continue };
        let file = rest.split_whitespace().next().unwrap_or_default();
        if !file.starts_with('/') {
            bail!("{program} needs {name}, which is in none of the packages");
        }
        found.push(Library { name: format!("lib/{triplet}/{name}"), file: file.into() });
    }
    Ok(found)
}

pub fn output(program: &Path, arguments: &[&str]) -> Result<String> {
    run(Command::new(program).args(arguments))
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{:?}", command.get_program()))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{:?}: {}\n{stderr}", command.get_program(), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
