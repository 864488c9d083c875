//! Upstream's `e2e.test`: lists its specs and runs some of them.
//!
//! In: the program, a kubeconfig, names of specs. Out: their outcomes, as they come in.
//!
//! Specs run in batches, several processes side by side; `[Serial]` ones run alone, last. Why not the
//! suite's own parallel mode: it needs upstream's `ginkgo` program, and one batch that hangs or crashes
//! takes all others with it.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use super::junit::{self, Outcome, Spec};
use crate::sh;

/// The largest number of specs in one process, and so the most that one crash can affect.
const BATCH: usize = 6;
/// How long a batch may run. The specs that it did not reach go back to the queue.
const LIMIT: &str = "12m";

/// The suite's message for a spec that was running when that time was over.
const TIMED_OUT: &str = "[TIMEDOUT] A suite timeout";

pub struct Suite {
    pub program: PathBuf,
    pub kubectl: PathBuf,
}

/// A part of upstream's suite. Conformance specs are only in their own part, so that the parts add up.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Part {
    #[default]
    Conformance,
    /// What upstream runs before each merge.
    Presubmit,
    Slow,
    Serial,
    All,
    /// By the name in `[Feature:NAME]` or `[FeatureGate:NAME]`.
    Feature(String),
}

impl Part {
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "conformance" => Some(Self::Conformance),
            "presubmit" => Some(Self::Presubmit),
            "slow" => Some(Self::Slow),
            "serial" => Some(Self::Serial),
            "all" => Some(Self::All),
            _ => text.strip_prefix("feature:").map(|name| Self::Feature(name.to_owned())),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        if *self == Self::All {
            return true;
        }
        const CONFORMANCE: &str = "[Conformance]";
        let has_any = |tags: &[&str]| tags.iter().any(|tag| name.contains(tag));
        if name.contains(CONFORMANCE) || *self == Self::Conformance {
            return name.contains(CONFORMANCE) && *self == Self::Conformance;
        }
        match self {
            Self::Conformance | Self::All => unreachable!("answered above"),
            Self::Presubmit => {
                !has_any(&["[Slow]", "[Serial]", "[Disruptive]", "[Flaky]", "[Feature:"])
            }
            Self::Slow => {
                name.contains("[Slow]") && !has_any(&["[Serial]", "[Disruptive]", "[Feature:"])
            }
            Self::Serial => has_any(&["[Serial]", "[Disruptive]"]) && !has_any(&["[Feature:"]),
            Self::Feature(feature) => {
                let tags = [format!("[Feature:{feature}]"), format!("[FeatureGate:{feature}]")];
                tags.iter().any(|tag| name.contains(tag))
            }
        }
    }
}

/// Where and how the suite runs.
pub struct Plan<'a> {
    pub kubeconfig: &'a Path,
    /// Zero: one Node object without a kubelet.
    pub nodes: usize,
    pub parallel: usize,
}

impl Suite {
    /// Every spec of the program. The list is cached: the suite takes seconds to print it.
    pub fn specs(&self) -> sh::Outcome<Vec<String>> {
        let list = self.program.with_file_name("specs.txt");
        if let Ok(text) = fs::read_to_string(&list) {
            return Ok(text.lines().map(str::to_owned).collect());
        }
        let directory = sh::temporary_directory("specs")?;
        let mut command = Command::new(&self.program);
        command.args(["--ginkgo.dry-run", "--ginkgo.skip", "^$", "--report-dir"]);
        let ran = sh::capture(command.arg(&directory).current_dir(&directory));
        let report = fs::read_to_string(directory.join("junit_01.xml"));
        let _ = fs::remove_dir_all(&directory);
        ran?;
        let (specs, _) =
            junit::parse(&report.map_err(|error| format!("no list of specs: {error}"))?);
        let mut names: Vec<String> = specs.into_iter().map(|spec| spec.name).collect();
        names.sort();
        fs::write(&list, names.join("\n"))
            .map_err(|error| format!("{}: {error}", list.display()))?;
        Ok(names)
    }

    /// Names of the images that specs run.
    pub fn images(&self) -> sh::Outcome<String> {
        sh::capture(Command::new(&self.program).arg("--list-images"))
    }

    /// Runs specs; calls `seen` for each spec that ended.
    pub fn run(
        &self,
        plan: &Plan<'_>,
        names: &[String],
        seen: &(dyn Fn(&Spec) + Sync),
    ) -> sh::Outcome<Vec<Spec>> {
        let (serial, free): (Vec<String>, Vec<String>) =
            names.iter().cloned().partition(|name| name.contains("[Serial]"));
        let directory = sh::temporary_directory("conformance")?;
        let mut done = self.share(plan, &directory, free, plan.parallel, seen);
        done.extend(self.share(plan, &directory, serial, 1, seen));
        let _ = fs::remove_dir_all(&directory);
        done.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(done)
    }

    /// Workers take batches from one queue until it is empty.
    fn share(
        &self,
        plan: &Plan<'_>,
        directory: &Path,
        names: Vec<String>,
        workers: usize,
        seen: &(dyn Fn(&Spec) + Sync),
    ) -> Vec<Spec> {
        let queue = Mutex::new(VecDeque::from(names));
        let done = Mutex::new(Vec::new());
        let take = || {
            let mut queue = queue.lock().expect("no holder panics");
            let size = (queue.len() / (2 * workers)).clamp(1, BATCH).min(queue.len());
            queue.drain(..size).collect::<Vec<_>>()
        };
        std::thread::scope(|scope| {
            for worker in 0..workers {
                let (take, queue, done) = (&take, &queue, &done);
                scope.spawn(move || {
                    for number in 0.. {
                        let batch = take();
                        if batch.is_empty() {
                            break;
                        }
                        let place = directory.join(format!("{workers}-{worker}-{number}"));
                        let (specs, left) = self.batch(plan, &place, &batch);
                        specs.iter().for_each(seen);
                        done.lock().expect("no holder panics").extend(specs);
                        queue.lock().expect("no holder panics").extend(left);
                    }
                });
            }
        });
        done.into_inner().expect("no holder panics")
    }

    /// The finished specs, and those that must run again because the process ended before them.
    fn batch(&self, plan: &Plan<'_>, place: &Path, names: &[String]) -> (Vec<Spec>, Vec<String>) {
        let ended = self.process(plan, place, names);
        let report = fs::read_to_string(place.join("junit_01.xml")).unwrap_or_default();
        let (specs, around) = junit::parse(&report);
        let mut found: BTreeMap<String, Spec> =
            specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        let _ = fs::remove_dir_all(place);
        let (mut done, mut interrupted, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for name in names {
            match found.remove(name) {
                Some(spec) if spec.message.starts_with(TIMED_OUT) => interrupted.push(spec),
                // Skipped without a reason, although it was selected: the suite ended early.
                Some(spec) if spec.outcome != Outcome::Skipped || !spec.message.is_empty() => {
                    done.push(spec);
                }
                _ => left.push(name.clone()),
            }
        }
        // An interrupted spec had less than the full time, unless it was the first of the batch.
        match (done.is_empty(), interrupted.is_empty()) {
            (true, true) => (),
            (true, false) => return (interrupted, left),
            (false, _) => {
                left.extend(interrupted.into_iter().map(|spec| spec.name));
                return (done, left);
            }
        }
        let message = around.first().map_or_else(
            || format!("the suite did not reach this spec ({ended})"),
            |spec| format!("{}: {}", spec.name, spec.first_line()),
        );
        let failed = left.into_iter().map(|name| Spec {
            name,
            outcome: Outcome::Failed,
            seconds: 0.0,
            message: message.clone(),
        });
        (failed.collect(), Vec::new())
    }

    /// One process of the suite; returns how it ended.
    fn process(&self, plan: &Plan<'_>, place: &Path, names: &[String]) -> String {
        let output =
            match fs::create_dir_all(place).and_then(|()| File::create(place.join("output"))) {
                Ok(file) => file,
                Err(error) => return format!("{}: {error}", place.display()),
            };
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(plan.kubeconfig);
        command.arg("--kubectl-path").arg(&self.kubectl);
        command.args([
            "--provider",
            "skeleton",
            "--disable-log-dump",
            "--dump-logs-on-failure=false",
        ]);
        command.args(["--num-nodes", &plan.nodes.max(1).to_string()]);
        if plan.nodes == 0 {
            command.args(["--allowed-not-ready-nodes", "-1"]);
        }
        command.args(["--ginkgo.no-color", "--ginkgo.timeout", LIMIT]);
        command.arg("--ginkgo.focus").arg(focus(names)).arg("--report-dir").arg(place);
        command.current_dir(place).env("HOME", place).env("TMPDIR", place);
        command.stdin(Stdio::null());
        match output.try_clone() {
            Ok(errors) => command.stdout(output).stderr(errors),
            Err(error) => return error.to_string(),
        };
        match command.status() {
            Ok(status) => status.to_string(),
            Err(error) => format!("{}: {error}", self.program.display()),
        }
    }
}

/// A regular expression that matches exactly these names.
fn focus(names: &[String]) -> String {
    let escaped: Vec<String> = names.iter().map(|name| escape(name)).collect();
    format!("({})$", escaped.join("|"))
}

fn escape(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if r"\.+*?()|[]{}^$".contains(letter) {
            text.push('\\');
        }
        text.push(letter);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_escaped() {
        let names = ["[sig-a] b (c) d.".to_owned(), "e".to_owned()];
        assert_eq!(focus(&names), r"(\[sig-a\] b \(c\) d\.|e)$");
    }

    #[test]
    fn a_spec_is_in_its_parts() {
        let check = |name: &str, wanted: &[&str]| {
            let parts = ["conformance", "presubmit", "slow", "serial", "feature:X"];
            let has = |part: &&&str| Part::parse(part).expect("a part").has(name);
            assert_eq!(
                parts.iter().filter(has).collect::<Vec<_>>(),
                wanted.iter().collect::<Vec<_>>(),
                "{name}"
            );
        };
        check("[sig-a] b [Conformance]", &["conformance"]);
        check("[sig-a] b [Slow] [Conformance]", &["conformance"]);
        check("[sig-a] b", &["presubmit"]);
        check("[sig-a] b [Slow]", &["slow"]);
        check("[sig-a] b [Disruptive] [Slow]", &["serial"]);
        check("[sig-a] b [Feature:X] [Serial]", &["feature:X"]);
        check("[sig-a] b [FeatureGate:X] [Beta]", &["presubmit", "feature:X"]);
        assert_eq!(Part::parse("everything"), None);
    }
}
