//! `cargo xtask wire`: replays recorded interactions of upstream against a new server.
//!
//! In: the corpus beside the repository (`../shared/spec/wire`, or `DECAPOD_SPEC`), the built binary.
//! Out: passed cases by area, and a verdict against `xtask/expected/wire.txt`. See xtask/README.md.
//!
//! The corpus' own program sends and compares; this program starts servers for it. Most areas share one
//! server. Areas that list all objects get one server each, and their cases run one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::expected::Expected;
use crate::sh::{self, Outcome};

const USAGE: &str = "usage: cargo xtask wire [--area A,B] [--case RE] [--accept] [--binary PATH]";

/// Areas that need a server without any other clients.
const ALONE: &[&str] = &["admission", "controllers", "discovery", "nodes"];

/// The flags of the recorded server, as far as answers depend on them.
const AS_RECORDED: &[&str] = &[
    "--disable-agent",
    "--https-listen-port=0",
    "--service-cidr=10.0.0.0/24",
    "--cluster-dns=10.0.0.10",
    // The recorded cluster had no metrics-server, and no network policies of ours.
    "--runtime-config=metrics.k8s.io/v1beta1=false,network.decapod.io/v1=false",
    "--disable-admission-plugins=NodeRestriction",
    "--allow-privileged=false",
    "--allocate-node-cidrs=false",
];

/// Cases that are not judged, because they depend on a race: between the next request and the garbage
/// collector, between the update of a claim and a controller that binds another case's volume to it,
/// or between the answer and the end of a second.
const RACES: &[&str] = &[
    "tables/row-object/IPAddress",
    "validation/PersistentVolumeClaim/update-modes",
    "verbs/delete/options-foreground",
];

/// Sends and compares with the corpus' own program, but removes from both sides the facts of either
/// environment. That file has the rules and their reasons.
const REPLAY: &str = "xtask/src/wire_upstream.py";

#[derive(Default)]
struct Options {
    areas: Vec<String>,
    case: Option<String>,
    accept: bool,
    binary: Option<PathBuf>,
}

/// The result of the replay program.
#[derive(Debug, Default, PartialEq)]
struct Replay {
    /// Passed and failed, by area.
    areas: BTreeMap<String, (usize, usize)>,
    /// Failed cases, with the lines that show the difference.
    failures: BTreeMap<String, String>,
}

pub fn run(arguments: &[String]) -> Outcome {
    let options = Options::parse(arguments)?;
    let mut expected = Expected::load("wire")?;
    expected.check_history()?;
    let Some(corpus) = corpus() else {
        println!("skipped: no recorded interactions beside the repository (../shared/spec/wire)");
        return Ok(());
    };
    if !sh::exists("python3") {
        println!("skipped: no python3, which replays the recorded interactions");
        return Ok(());
    }
    let binary = match &options.binary {
        Some(path) => path.clone(),
        None => build()?,
    };
    let areas = areas(&corpus, &options.areas)?;
    let mut all = Replay::default();
    for part in side_by_side(&binary, &corpus, &groups(&areas), options.case.as_deref()) {
        all.add(part?);
    }
    all.failures.retain(|name, _| !RACES.contains(&name.as_str()));
    conclude(&options, &mut expected, &all, &areas)
}

/// Runs a server and a replay for each group, all at once: they mostly wait.
fn side_by_side(
    binary: &Path,
    corpus: &Path,
    groups: &[Vec<String>],
    case: Option<&str>,
) -> Vec<Outcome<Replay>> {
    let one = |group: &[String]| {
        let server = Server::start_with(binary, AS_RECORDED)?;
        Ok(parse_replay(&replay(corpus, &server.kubeconfig(), group, case)?))
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = groups.iter().map(|group| scope.spawn(move || one(group))).collect();
        let done = running.into_iter();
        done.map(|thread| thread.join().expect("a replay does not panic")).collect()
    })
}

fn conclude(options: &Options, expected: &mut Expected, all: &Replay, areas: &[String]) -> Outcome {
    let failed: BTreeSet<String> = all.failures.keys().cloned().collect();
    // With a filter it is unknown which listed cases ran.
    let whole = options.case.is_none();
    let ran = |name: &str| whole && areas.iter().any(|area| name.split('/').next() == Some(area));
    let verdict = expected.judge(&failed, ran);
    let listed = |name: &String| expected.reason(name).is_some();
    for (_, text) in all.failures.iter().filter(|(name, _)| !whole || !listed(name)) {
        print!("{text}");
    }
    let report = sh::target_directory().join("wire.txt");
    let details: String = all.failures.values().map(String::as_str).collect();
    fs::write(&report, details).map_err(|error| format!("{}: {error}", report.display()))?;
    print!("{}", all.table());
    println!("every difference: {}", report.display());
    if options.accept {
        let grown = verdict.unexpected.clone();
        expected.accept(&verdict, |name| {
            format!("not yet: {}", name.split('/').next().unwrap_or_default())
        })?;
        println!("{} differences are listed now", expected.len());
        let unlisted = grown.iter().filter(|name| expected.reason(name).is_none()).count();
        return match unlisted {
            0 => Ok(()),
            _ => {
                Err(format!("{unlisted} cases failed that are not in the list, which only shrinks"))
            }
        };
    }
    if verdict.is_good() { Ok(()) } else { Err(verdict.text()) }
}

impl Options {
    fn parse(arguments: &[String]) -> Outcome<Self> {
        let mut options = Self::default();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().cloned().ok_or_else(|| USAGE.to_owned());
            match word.as_str() {
                "--area" => options.areas.extend(value()?.split(',').map(str::to_owned)),
                "--case" => options.case = Some(value()?),
                "--binary" => options.binary = Some(value()?.into()),
                "--accept" => options.accept = true,
                _ => return Err(USAGE.to_owned()),
            }
        }
        if options.accept && options.case.is_some() {
            return Err("--accept needs whole areas, not --case".to_owned());
        }
        Ok(options)
    }
}

fn corpus() -> Option<PathBuf> {
    let corpus = specification()?.join("wire");
    corpus.join("wire.py").is_file().then_some(corpus)
}

/// The folder of specification data: beside the repository, or further up.
pub fn specification() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("DECAPOD_SPEC") {
        return Some(path.into());
    }
    let root = sh::root();
    root.ancestors().skip(1).map(|place| place.join("shared/spec")).find(|path| path.is_dir())
}

/// The debug binary; builds it if necessary.
pub fn build() -> Outcome<PathBuf> {
    sh::run(sh::cargo().args(["build", "--workspace", "--bin", "decapod"]))?;
    Ok(sh::target_directory().join("debug/decapod"))
}

/// The areas of the corpus, or the requested ones.
fn areas(corpus: &Path, wanted: &[String]) -> Outcome<Vec<String>> {
    let folder = corpus.join("cases");
    let entries =
        fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut known: Vec<String> =
        names.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned())).collect();
    known.sort();
    if let Some(strange) = wanted.iter().find(|area| !known.contains(area)) {
        return Err(format!("no area {strange}; there are {}", known.join(", ")));
    }
    known.retain(|area| wanted.is_empty() || wanted.contains(area));
    Ok(known)
}

/// Areas that share a server.
fn groups(areas: &[String]) -> Vec<Vec<String>> {
    let (alone, together): (Vec<String>, Vec<String>) =
        areas.iter().cloned().partition(|area| ALONE.contains(&area.as_str()));
    let mut groups: Vec<Vec<String>> = alone.into_iter().map(|area| vec![area]).collect();
    if !together.is_empty() {
        groups.push(together);
    }
    groups
}

fn replay(
    corpus: &Path,
    kubeconfig: &Path,
    areas: &[String],
    case: Option<&str>,
) -> Outcome<String> {
    let alone = areas.iter().all(|area| ALONE.contains(&area.as_str()));
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", corpus).env("PYTHONDONTWRITEBYTECODE", "1");
    command.arg(sh::root().join(REPLAY)).arg("replay").arg("--kubeconfig").arg(kubeconfig);
    command.arg("--corpus").arg(corpus).args(["--area", &areas.join(",")]);
    command.args(["--workers", if alone { "1" } else { "4" }, "--max-diffs", "100"]);
    if let Some(case) = case {
        command.args(["--case", case]);
    }
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("python3: {error}"))?;
    // Its exit status is 1 if a case fails. A program that crashed has not printed a total.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.lines().any(|line| line.starts_with("total ")) {
        Ok(text)
    } else {
        Err(format!("the replay of {} ended early: {}", areas.join(", "), output.status))
    }
}

fn parse_replay(text: &str) -> Replay {
    let mut replay = Replay::default();
    let mut current = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("FAIL ") {
            current = Some(name.to_owned());
        } else if !line.starts_with(' ') {
            current = None;
        }
        if let Some(name) = &current {
            let text = replay.failures.entry(name.clone()).or_default();
            text.push_str(line);
            text.push('\n');
        } else if let [area, passed, failed] = line.split_whitespace().collect::<Vec<_>>()[..]
            && let (Ok(passed), Ok(failed)) = (passed.parse(), failed.parse())
        {
            replay.areas.insert(area.to_owned(), (passed, failed));
        }
    }
    replay
}

impl Replay {
    fn add(&mut self, other: Self) {
        self.areas.extend(other.areas);
        self.failures.extend(other.failures);
    }

    fn table(&self) -> String {
        let row = |name: &str, (passed, failed): (usize, usize)| {
            format!("{name:<14} {passed:>5} / {:<5}\n", passed + failed)
        };
        let sum = |pick: fn(&(usize, usize)) -> usize| self.areas.values().map(pick).sum();
        let rows: String = self.areas.iter().map(|(name, counts)| row(name, *counts)).collect();
        rows + &row("total", (sum(|counts| counts.0), sum(|counts| counts.1)))
    }
}

/// A control plane without a node, in its own directory; both are removed on drop.
pub struct Server {
    process: Child,
    directory: PathBuf,
    /// Kept open: a write of the server to a closed standard output could fail.
    _output: BufReader<std::process::ChildStdout>,
}

impl Server {
    pub fn start(binary: &Path) -> Outcome<Self> {
        Self::start_with(binary, &["--disable-agent", "--https-listen-port", "0"])
    }

    pub fn start_with(binary: &Path, arguments: &[&str]) -> Outcome<Self> {
        let directory = sh::temporary_directory("server")?;
        let log = directory.join("server.log");
        let log_file = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let mut command = Command::new(binary);
        command.arg("server").args(arguments);
        command.arg("--data-dir").arg(directory.join("data"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file);
        let mut process =
            command.spawn().map_err(|error| format!("{}: {error}", binary.display()))?;
        let output = process.stdout.take().expect("a pipe was asked for");
        let mut server = Self { process, directory, _output: BufReader::new(output) };
        let mut line = String::new();
        // A server that cannot start ends, and closes its pipe.
        while server._output.read_line(&mut line).is_ok_and(|length| length > 0) {
            if line.contains("API server ready") {
                return Ok(server);
            }
            line.clear();
        }
        let log = fs::read_to_string(log).unwrap_or_default();
        Err(format!("{} server ended before it was ready\n{log}", binary.display()))
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("data/kubeconfig")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_replay_prints() {
        let text = "FAIL verbs/a\n  step 0 GET /x\n    .code: 200 → 404\nFAIL crd/b\n  step 1 GET /y\n\
                    area                    passed  failed\ncrd  0  1\nverbs  3  1\ntotal  3  2   4s\n";
        let replay = parse_replay(text);
        assert_eq!(replay.areas["verbs"], (3, 1));
        assert_eq!(replay.areas.len(), 2);
        assert_eq!(replay.failures["crd/b"], "FAIL crd/b\n  step 1 GET /y\n");
        assert!(replay.table().ends_with("total              3 / 5    \n"));
    }

    #[test]
    fn areas_that_list_everything_run_alone() {
        let areas = ["apply", "discovery", "nodes", "verbs"].map(str::to_owned);
        let groups: Vec<String> = groups(&areas).iter().map(|group| group.join(",")).collect();
        assert_eq!(groups, ["discovery", "nodes", "apply,verbs"]);
    }
}
