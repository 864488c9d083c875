//! `cargo xtask conformance`: runs upstream's unmodified end-to-end suite against our cluster.
//!
//! In: specs, number of nodes. Out: passed, failed and skipped specs by SIG, a JUnit file, and a verdict
//! against `xtask/expected/conformance.txt`. See xtask/README.md.
//!
//! ```text
//! xtask ─► suite, images (once) ─► testkit: hosts, servers ─► xtask --inside, on the first host
//!       └► `--list control-plane`: a server without a node, one Node object ─┐        │
//!                                                                            └► e2e.test, many
//! ```
//!
//! Why this program runs a second time on the first host: the suite must reach nodes and pods, and only
//! the test kit can create and enter that host's namespaces.

mod fake_node;
mod junit;
mod report;
mod suite;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::expected::Expected;
use crate::sh::{self, Outcome};
use crate::{foreign, wire};
use junit::Spec;
use suite::{Part, Plan, Suite};

const USAGE: &str = "\
usage: cargo xtask conformance [--suite conformance|presubmit|slow|serial|feature:NAME|all]
       [--focus TEXT] [--sig NAME] [--list smoke|control-plane|FILE] [--parallel N] [--nodes N] [--binary PATH] [--accept] [--report] [--kubeconfig PATH]";

/// The list of expected failures of all parts except conformance.
const BEYOND: &str = "beyond-conformance";

const SMOKE: &str = include_str!("../../lists/smoke.txt");

#[derive(Default)]
struct Options {
    part: Part,
    /// Words that the name of a spec must contain, all of them.
    focus: Vec<String>,
    sig: Option<String>,
    list: Option<String>,
    parallel: Option<usize>,
    nodes: Option<usize>,
    binary: Option<PathBuf>,
    accept: bool,
    report: bool,
    /// A running cluster to use.
    kubeconfig: Option<PathBuf>,
    /// This is the second process; the cluster's kubeconfig is in the environment.
    inside: bool,
}

pub fn run(arguments: &[String]) -> Outcome {
    let options = Options::parse(arguments)?;
    let is_conformance = options.part == Part::Conformance;
    let expected = Expected::load(if is_conformance { "conformance" } else { BEYOND })?;
    expected.check_history()?;
    if !foreign::has("e2e.test") && !foreign::has_go() {
        println!("skipped: no suite in the cache and no Go toolchain to build it");
        return Ok(());
    }
    let suite = Suite { program: foreign::end_to_end()?, kubectl: foreign::kubectl()? };
    let names = options.select(suite.specs()?)?;
    if options.inside {
        let kubeconfig = std::env::var_os("KUBECONFIG").ok_or("no KUBECONFIG in here")?;
        return judge(&options, &suite, Path::new(&kubeconfig), &names, expected);
    }
    if let Some(kubeconfig) = &options.kubeconfig {
        return judge(&options, &suite, kubeconfig, &names, expected);
    }
    let binary = match &options.binary {
        Some(path) => path.clone(),
        None => wire::build()?,
    };
    if options.nodes() == 0 {
        let server = wire::Server::start(&binary)?;
        let kubeconfig = server.kubeconfig();
        let _node = fake_node::FakeNode::create(&suite.kubectl, &kubeconfig)?;
        return judge(&options, &suite, &kubeconfig, &names, expected);
    }
    inside(&options, &suite, &binary, arguments)
}

/// Starts hosts and nodes, and runs this program again on the first host.
fn inside(options: &Options, suite: &Suite, binary: &Path, arguments: &[String]) -> Outcome {
    if !sh::is_root() {
        println!("skipped: nodes need root (`--list control-plane` does not)");
        return Ok(());
    }
    crate::packages::ensure(&[crate::packages::TEST])?;
    crate::packages::ensure_lists()?;
    let programs = foreign::suite_programs()?;
    let itself = std::env::current_exe().map_err(|error| error.to_string())?;
    sh::run(sh::cargo().args(["build", "--quiet", "--package", "decapod-testkit"]))?;
    let mut command = Command::new(sh::target_directory().join("debug/decapod-testkit"));
    command.arg("suite").arg(programs).arg(foreign::module_source()?);
    command.arg(options.nodes().to_string()).arg(binary);
    command.arg(itself).args(["conformance", "--inside"]).args(arguments);
    let mut child = command.stdin(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let mut input = child.stdin.take().expect("a pipe was asked for");
    input.write_all(suite.images()?.as_bytes()).map_err(|error| error.to_string())?;
    drop(input);
    let status = child.wait().map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err("conformance: see above".to_owned()) }
}

fn judge(
    options: &Options,
    suite: &Suite,
    kubeconfig: &Path,
    names: &[String],
    mut expected: Expected,
) -> Outcome {
    let done = AtomicUsize::new(0);
    let seen = |spec: &Spec| {
        let number = done.fetch_add(1, Ordering::Relaxed) + 1;
        let (word, line) = (spec.outcome.word(), spec.first_line());
        println!("{number}/{} {word} {:.1} s {} {line}", names.len(), spec.seconds, spec.name);
    };
    let nodes = options.nodes();
    let plan = Plan { kubeconfig, nodes, parallel: options.parallel.unwrap_or(3) };
    let specs = suite.run(&plan, names, &seen)?;
    let all = keep(&specs)?;
    println!("\n{}", report::table(&specs));
    if options.report {
        let known = suite.specs()?.iter().filter(|name| Part::Conformance.has(name)).count();
        let (conformance, others): (Vec<Spec>, Vec<Spec>) =
            all.into_iter().partition(|spec| Part::Conformance.has(&spec.name));
        let mut page = report::page(&conformance, known, &demanded(), foreign::KUBERNETES);
        let reasons = Expected::load(BEYOND)?;
        page.push_str(&report::beyond(&others, |name| reasons.reason(name)));
        let path = sh::root().join("docs/conformance.md");
        fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let failed = specs.iter().filter(|spec| spec.outcome == junit::Outcome::Failed);
    let failed: BTreeSet<String> = failed.map(|spec| spec.name.clone()).collect();
    let ran: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let verdict = expected.judge(&failed, |name| ran.contains(name));
    if options.accept {
        let why = |name: &str| {
            let spec = specs.iter().find(|spec| spec.name == name);
            spec.map_or_else(String::new, |spec| spec.first_line().chars().take(100).collect())
        };
        expected.accept(&verdict, why)?;
    }
    let left = expected.judge(&failed, |name| ran.contains(name));
    if left.is_good() { Ok(()) } else { Err(left.text()) }
}

/// Writes the JUnit file, and adds this run to the earlier ones.
fn keep(specs: &[Spec]) -> Outcome<Vec<Spec>> {
    let directory = sh::target_directory().join("conformance");
    let complain = |error: std::io::Error| format!("{}: {error}", directory.display());
    fs::create_dir_all(&directory).map_err(complain)?;
    fs::write(directory.join("junit.xml"), junit::write(specs)).map_err(complain)?;
    report::merge(&directory.join("results.txt"), specs)
}

/// Seconds that specs need, for specs with a measured time.
fn demanded() -> BTreeMap<String, f64> {
    control_plane_list().unwrap_or_default().into_iter().collect()
}

/// The specs that pass without a kubelet, with their seconds.
fn control_plane_list() -> Outcome<Vec<(String, f64)>> {
    let place = wire::specification().ok_or("no specification data beside the repository")?;
    let path = place.join("control-plane-only.txt");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    Ok(lines.filter_map(|(seconds, name)| Some((name.to_owned(), seconds.parse().ok()?))).collect())
}

impl Options {
    fn parse(arguments: &[String]) -> Outcome<Self> {
        let mut options = Self::default();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().cloned().ok_or_else(|| USAGE.to_owned());
            let number = |text: String| text.parse::<usize>().map_err(|_| USAGE.to_owned());
            match word.as_str() {
                "--suite" => {
                    options.part = Part::parse(&value()?).ok_or_else(|| USAGE.to_owned())?;
                }
                "--focus" => options.focus.push(value()?),
                "--sig" => options.sig = Some(value()?),
                "--list" => options.list = Some(value()?),
                "--parallel" => options.parallel = Some(number(value()?)?.max(1)),
                "--nodes" => options.nodes = Some(number(value()?)?),
                "--binary" => options.binary = Some(value()?.into()),
                "--kubeconfig" => options.kubeconfig = Some(value()?.into()),
                "--accept" => options.accept = true,
                "--report" => options.report = true,
                "--inside" => options.inside = true,
                _ => return Err(USAGE.to_owned()),
            }
        }
        Ok(options)
    }

    fn nodes(&self) -> usize {
        let alone = self.list.as_deref() == Some("control-plane");
        self.nodes.unwrap_or(if alone { 0 } else { 2 })
    }

    fn select(&self, mut names: Vec<String>) -> Outcome<Vec<String>> {
        names.retain(|name| self.part.has(name));
        let list = match self.list.as_deref() {
            None => None,
            Some("smoke") => Some(SMOKE.lines().map(str::to_owned).collect::<BTreeSet<_>>()),
            Some("control-plane") => {
                Some(control_plane_list()?.into_iter().map(|(name, _)| name).collect())
            }
            Some(path) => {
                let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
                Some(text.lines().map(str::to_owned).collect())
            }
        };
        if let Some(list) = list {
            names.retain(|name| list.contains(name));
        }
        if let Some(sig) = &self.sig {
            let sig = if sig.starts_with("sig-") { sig.clone() } else { format!("sig-{sig}") };
            names.retain(|name| report::sig(name) == sig);
        }
        names.retain(|name| self.focus.iter().all(|part| matches(name, part)));
        if names.is_empty() { Err("no spec is selected".to_owned()) } else { Ok(names) }
    }
}

/// Alternatives with `|`, each with pieces separated by `.*`: the patterns that `--focus` supports.
fn matches(name: &str, pattern: &str) -> bool {
    pattern.split('|').any(|alternative| {
        let mut rest = name;
        alternative.split(".*").all(|piece| match rest.find(piece) {
            Some(at) => {
                rest = &rest[at + piece.len()..];
                true
            }
            None => false,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_chosen() {
        let check = |arguments: &str, expected: &[&str]| {
            let words: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
            let names = ["[sig-apps] Job runs", "[sig-node] Pods run", "[sig-node] Pods stop"];
            let mut options = Options::parse(&words).expect("the arguments are right");
            options.part = Part::Presubmit;
            let chosen = options.select(names.map(str::to_owned).to_vec()).unwrap_or_default();
            assert_eq!(chosen, expected, "{arguments}");
        };
        check("--sig node", &["[sig-node] Pods run", "[sig-node] Pods stop"]);
        check("--focus Pods.*st", &["[sig-node] Pods stop"]);
        check("--focus Job|stop", &["[sig-apps] Job runs", "[sig-node] Pods stop"]);
        check("--sig storage", &[]);
    }

    #[test]
    fn the_smoke_list_names_sigs() {
        assert!(SMOKE.lines().count() >= 35);
        assert!(
            SMOKE.lines().all(|name| name.starts_with("[sig-") && name.contains("[Conformance]"))
        );
    }
}
