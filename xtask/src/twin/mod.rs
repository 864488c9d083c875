//! `cargo xtask twin`: sends the same requests to upstream's API server and to ours, and reports differences.
//!
//! In: upstream's kube-apiserver and etcd in the cache, the built binary, a duration, a seed. Out: each class of
//! differences with a small case that shows it, a table of the sources of requests, and a verdict against
//! `xtask/expected/twin.txt`. Without the programs the command prints a line and succeeds.
//!
//! This program starts the servers, with the same flags, keys and clock. `twin.py` sends and compares.
//! Why a list of classes and not of cases: cases are random, the rule that differs is not.

mod servers;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::expected;
use crate::sh::{self, Outcome};
use crate::{foreign, wire};

const USAGE: &str = "usage: cargo xtask twin [--seconds N] [--seed S] [--case N --source NAME] \
     [--cases N] [--sources A,B] [--workers N] [--no-shrink] [--report] [--binary PATH] [--serve]";

const SECONDS: &str = "60";

#[derive(Default)]
struct Options {
    binary: Option<PathBuf>,
    /// Only starts the servers, until standard input ends.
    serve: bool,
    /// For `twin.py`.
    words: Vec<String>,
    has_seconds: bool,
    wants_tables: bool,
    /// Prints the differences, without a verdict.
    report: bool,
}

pub fn run(arguments: &[String]) -> Outcome {
    let options = Options::parse(arguments)?;
    if let Some(missing) = missing() {
        println!("skipped: {missing}");
        return Ok(());
    }
    let binary = match &options.binary {
        Some(path) => path.clone(),
        None => wire::build()?,
    };
    let servers = servers::Servers::start(&std::path::absolute(&binary).unwrap_or(binary))?;
    if options.serve {
        println!("{}\n{}", servers.theirs().display(), servers.ours().display());
        let _ = std::io::stdin().lines().last();
        return Ok(());
    }
    // Extracting takes minutes: only on request, once.
    let tables = if options.wants_tables { Some(tables::extracted()?) } else { tables::cached() };
    let text = compare(&options, &servers, tables.as_deref())?;
    if options.report { Ok(()) } else { conclude(&text) }
}

/// What a run needs and this machine has not.
fn missing() -> Option<&'static str> {
    if !foreign::has("kube-apiserver") {
        return Some("no kube-apiserver in the cache (cargo xtask kube-apiserver)");
    }
    if foreign::cached_etcd().is_none() {
        return Some("no etcd in the cache (cargo xtask etcd)");
    }
    let yaml = Command::new("python3").args(["-c", "import yaml"]).stderr(Stdio::null()).status();
    (!yaml.is_ok_and(|status| status.success())).then_some("no Python 3 with PyYAML")
}

fn compare(
    options: &Options,
    servers: &servers::Servers,
    tables: Option<&Path>,
) -> Outcome<String> {
    let out = sh::target_directory().join("twin.jsonl");
    let mut command = Command::new("python3");
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("TZ", "UTC");
    command.arg(sh::root().join("xtask/src/twin/twin.py"));
    command.arg("--theirs").arg(servers.theirs()).arg("--ours").arg(servers.ours());
    command.arg("--out").arg(&out).args(&options.words);
    if let Some(tables) = tables {
        command.arg("--tables").arg(tables);
    }
    if !options.has_seconds {
        command.args(["--seconds", SECONDS]);
    }
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("python3: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    if !output.status.success() {
        return Err(format!("the comparison ended early: {}", output.status));
    }
    println!("every difference with its case: {}", out.display());
    Ok(text)
}

/// The classes in a report that the list of expected ones lacks.
fn conclude(report: &str) -> Outcome {
    let list = sh::root().join("xtask/expected/twin.txt");
    let known = fs::read_to_string(&list).unwrap_or_default();
    let known = expected::parse(&known)?;
    let found = report.lines().filter_map(class);
    let new: Vec<&str> = found.filter(|class| !known.contains_key(*class)).collect();
    match new.as_slice() {
        [] => Ok(()),
        _ => Err(format!("{} classes of differences are not in {}", new.len(), list.display())),
    }
}

/// The class in a line `DIFFERS  12 SOURCE case 7: CLASS`.
fn class(line: &str) -> Option<&str> {
    line.strip_prefix("DIFFERS ")?.split_once(": ").map(|(_, class)| class)
}

impl Options {
    fn parse(arguments: &[String]) -> Outcome<Self> {
        let mut options = Self::default();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().cloned().ok_or_else(|| USAGE.to_owned());
            match word.as_str() {
                "--binary" => options.binary = Some(value()?.into()),
                "--serve" => options.serve = true,
                "--report" => options.report = true,
                "--no-shrink" => options.words.push(word.clone()),
                "--seconds" | "--seed" | "--case" | "--cases" | "--source" | "--sources"
                | "--workers" => {
                    let value = value()?;
                    options.has_seconds |= word == "--seconds";
                    options.wants_tables |=
                        word.starts_with("--source") && value.contains("tables");
                    options.words.extend([word.clone(), value]);
                }
                _ => return Err(USAGE.to_owned()),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_classes_of_a_report() {
        let line = "DIFFERS   12 schema case 7: POST pods 422 a: b | c";
        assert_eq!(class(line), Some("POST pods 422 a: b | c"));
        assert_eq!(class("total 5 6"), None);
    }

    #[test]
    fn options_of_the_comparison_are_handed_on() {
        let words = ["--seed", "7", "--binary", "x", "--no-shrink"].map(str::to_owned);
        let options = Options::parse(&words).expect("they are known");
        assert_eq!(options.words, ["--seed", "7", "--no-shrink"]);
        assert!(!options.has_seconds && options.binary.is_some());
        assert!(Options::parse(&["--odd".to_owned()]).is_err());
    }
}
