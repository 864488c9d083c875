//! Upstream's command lines of the components that run alone.
//!
//! In: the words of a command line, as kubeadm or an operator writes them for upstream's component, and the
//! component's table of flags (`crates/binary/flags/COMPONENT.txt`). Out: the same flags in one form for
//! `clap`, `--NAME=VALUE`, without those that have no effect here; what the log should say about those.
//!
//! A table row says for each flag of upstream's component what happens with it. `cargo xtask flags`
//! generates docs/flags.md from the tables and compares them with the flags that upstream registers.
//! Upstream: spf13/pflag, `component-base/cli`.

mod parse;
mod table;
mod value;

use std::process::ExitCode;

use anyhow::Context;
use base::telemetry::LogFormat;
use clap::CommandFactory;

pub use table::Component;

/// What a command line says.
#[derive(Debug, Default, PartialEq)]
pub struct CommandLine {
    /// The command and its flags, for `clap`.
    pub words: Vec<String>,
    /// Flags without effect, with the reason.
    pub ignored: Vec<(String, &'static str)>,
    pub wants: Wants,
    /// `--logging-format`
    pub log_format: Option<LogFormat>,
    /// `-v`
    pub verbosity: Option<i32>,
}

/// Upstream's flags that end the program at once.
#[derive(Debug, Default, PartialEq)]
pub enum Wants {
    #[default]
    Run,
    Help,
    /// `--version=raw` prints all fields.
    Version {
        raw: bool,
    },
}

/// The component that these arguments start: by the name of the program, a link to it, or by the command.
/// With the words behind it, and those in front of the command.
pub fn component(arguments: &[String]) -> Option<(Component, Vec<String>, Vec<String>)> {
    let program = arguments.first()?;
    let name = program.rsplit('/').next().unwrap_or_default();
    if let Some(component) = Component::named(name) {
        return Some((component, vec![program.clone()], arguments[1..].to_vec()));
    }
    // Flags of Decapod may precede the command: `decapod -d DIRECTORY kubelet`.
    let mut at = 1;
    while let Some(word) = arguments.get(at) {
        match word.as_str() {
            "-d" | "--data-dir" | "--log-format" => at += 2,
            flag if flag.starts_with('-') => at += 1,
            command => {
                let component = Component::named(command)?;
                return Some((component, arguments[..at].to_vec(), arguments[at + 1..].to_vec()));
            }
        }
    }
    None
}

impl CommandLine {
    /// Prints what `--help` and `--version` ask for; `None`: the component starts.
    pub fn answer(&self) -> anyhow::Result<Option<ExitCode>> {
        match self.wants {
            Wants::Run => return Ok(None),
            Wants::Version { raw } => println!("{}", version(raw)),
            Wants::Help => {
                let name = self.words.last().map(String::as_str).unwrap_or_default();
                print!("{}", help(name)?);
            }
        }
        Ok(Some(ExitCode::SUCCESS))
    }

    /// Logs once for each flag that it has no effect.
    pub fn tell(&self) {
        for (flag, reason) in &self.ignored {
            tracing::warn!(flag, reason, "this flag has no effect");
        }
    }

    /// The filter of the log for `-v`: upstream logs events of a person's interest up to 3, its inner work
    /// from 4, and requests from 6.
    pub fn log_filter(&self) -> Option<&'static str> {
        self.verbosity.map(|level| match level {
            ..=3 => "info",
            4..=5 => "debug",
            6.. => "trace",
        })
    }
}

/// What `--help` of a component prints.
pub fn help(name: &str) -> anyhow::Result<String> {
    let mut program = crate::Arguments::command();
    let command = program.find_subcommand_mut(name).context("a component")?;
    let mut out = command.render_long_help().to_string();
    let component = Component::named(name).context("a component")?;
    out.push_str("\nFlags of upstream without effect:\n");
    for row in component.with(table::Effect::Ignored) {
        out.push_str(&format!("      --{}  {}\n", row.name, row.reason));
    }
    Ok(out)
}

/// What `--version` prints.
pub fn version(raw: bool) -> String {
    let tag = release::KUBERNETES.tag;
    match raw {
        true => format!("version.Info{:#}", apiserver::serve::Version::default().json()),
        false => format!("Kubernetes {tag}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_or_a_command_names_the_component() {
        let check = |words: &[&str], expected: Option<(&str, usize, usize)>| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let found = component(&words);
            let found =
                found.as_ref().map(|(one, front, rest)| (one.name, front.len(), rest.len()));
            assert_eq!(found, expected, "{words:?}");
        };
        check(&["/usr/local/bin/kube-apiserver", "--v=2"], Some(("kube-apiserver", 1, 1)));
        check(&["decapod", "kubelet", "-v", "2"], Some(("kubelet", 1, 2)));
        check(&["decapod", "-d", "kubelet", "kube-proxy"], Some(("kube-proxy", 3, 0)));
        check(&["decapod", "--log-format=json", "kube-proxy"], Some(("kube-proxy", 2, 0)));
        check(&["decapod", "server", "kubelet"], None);
        check(&["decapod"], None);
    }

    #[test]
    fn verbosity_is_a_filter_of_the_log() {
        let filter = |verbosity| CommandLine { verbosity, ..CommandLine::default() }.log_filter();
        assert_eq!(filter(None), None);
        assert_eq!(filter(Some(2)), Some("info"));
        assert_eq!(filter(Some(4)), Some("debug"));
        assert_eq!(filter(Some(10)), Some("trace"));
    }
}
