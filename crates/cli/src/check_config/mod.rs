//! `decapod check-config`: what this machine has and lacks for a node, before anything is installed.
//!
//! In: `/proc`, `/sys`, the kernel's modules and configuration, ports, the data directory's disk. Out: a line for each
//! check, with what to do; exit code 1 if something is missing that a node needs.
//! Invariant: nothing is changed, and no module is loaded.
//! Upstream: k3s' `check-config`, kubeadm's preflight checks.

mod cgroups;
mod kernel;
mod machine;
mod network;
mod ports;
mod system;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use serde::Serialize;

use self::machine::Machine;
pub use self::ports::owner_of;

#[derive(clap::Args, Clone, Debug)]
pub struct CheckConfig {
    /// Output format: text or json
    #[arg(short = 'o', long, default_value = "text", value_name = "FORMAT")]
    output: String,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// A node runs, but something that users expect does not, or not well.
    Warning,
    /// A node does not run.
    Missing,
}

impl State {
    fn text(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Missing => "missing",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Line {
    check: String,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// The lines in the order of the checks.
#[derive(Debug, Default)]
struct Report(Vec<Line>);

impl Report {
    fn ok(&mut self, check: &str, found: impl Into<String>) {
        self.add(State::Ok, check, found.into(), None);
    }

    fn warning(&mut self, check: &str, found: impl Into<String>, advice: impl Into<String>) {
        self.add(State::Warning, check, found.into(), Some(advice.into()));
    }

    fn missing(&mut self, check: &str, found: impl Into<String>, advice: impl Into<String>) {
        self.add(State::Missing, check, found.into(), Some(advice.into()));
    }

    fn add(&mut self, state: State, check: &str, found: String, advice: Option<String>) {
        self.0.push(Line { check: check.to_owned(), state, found, advice });
    }

    fn count(&self, state: State) -> usize {
        self.0.iter().filter(|line| line.state == state).count()
    }

    fn text(&self) -> String {
        let width = self.0.iter().map(|line| line.check.len()).max().unwrap_or_default();
        let mut text = String::new();
        for Line { check, state, found, advice } in &self.0 {
            text.push_str(&format!("{:<8} {check:<width$}  {found}\n", state.text()));
            if let Some(advice) = advice {
                text.push_str(&format!("{:<8} {:<width$}  → {advice}\n", "", ""));
            }
        }
        let (missing, warnings) = (self.count(State::Missing), self.count(State::Warning));
        text.push_str(&match (missing, warnings) {
            (0, 0) => "this machine has everything that a node needs\n".to_owned(),
            (0, _) => format!("a node runs on this machine; warnings: {warnings}\n"),
            _ => format!(
                "a node does not run on this machine; missing: {missing}, warnings: {warnings}\n"
            ),
        });
        text
    }
}

impl CheckConfig {
    pub async fn run(self, data_dir: &Path) -> Result<ExitCode> {
        if !["text", "json"].contains(&self.output.as_str()) {
            bail!("--output {}: expected text or json", self.output);
        }
        let machine = Machine::this()?;
        let mut report = Report::default();
        system::check(&machine, &mut report);
        kernel::check(&machine, &mut report);
        cgroups::check(&machine, &mut report);
        network::check(&machine, &mut report).await;
        ports::check(data_dir, &mut report);
        system::check_disk(&machine, data_dir, &mut report);
        match self.output.as_str() {
            "json" => println!("{}", serde_json::to_string_pretty(&report.0)?),
            _ => print!("{}", report.text()),
        }
        Ok(match report.count(State::Missing) {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_to_do() {
        let mut report = Report::default();
        report.ok("kernel", "6.1");
        let fine = "ok       kernel  6.1\nthis machine has everything that a node needs\n";
        assert_eq!(report.text(), fine);
        report.warning("swap", "on", "turn it off");
        assert!(report.text().ends_with("a node runs on this machine; warnings: 1\n"));
        report.missing("overlay", "no", "load it");
        let expected = "\
ok       kernel   6.1
warning  swap     on
                  → turn it off
missing  overlay  no
                  → load it
a node does not run on this machine; missing: 1, warnings: 1
";
        assert_eq!(report.text(), expected);
        let json = serde_json::to_value(&report.0).expect("JSON");
        assert_eq!(json[0], serde_json::json!({"check": "kernel", "state": "ok", "found": "6.1"}));
    }
}
