//! Flags from files and from the environment.
//!
//! In: the command line; `/etc/decapod/config.yaml`, or the file that `--config` or `DECAPOD_CONFIG` names, with
//! its drop-ins; variables `DECAPOD_FLAG`. Out: the same command line, with these settings as flags in front.
//!
//! ```text
//! command line > DECAPOD_* > drop-ins > the file > defaults
//! ```
//!
//! `decapod server` and `decapod agent` take all their flags from there. Commands that a user runs for a data
//! directory take `data-dir`, so that they find the server's. `kubelet` and `kube-proxy` read upstream's files.
//!
//! Invariants: a list comes from one source as a whole; only feature gates are merged. A key that is no flag is
//! an error with the file and the key.
//! Upstream: k3s' configuration file. Deviation: k3s skips unknown keys, and its file wins over variables.

mod known;
mod sources;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Context;

pub use known::Known;
use known::Setting;
use sources::Files;

/// Read if it exists, unless another file is named.
pub const DEFAULT_FILE: &str = "/etc/decapod/config.yaml";
/// In front of a flag's name, in capitals and with `_` for `-`.
const PREFIX: &str = "DECAPOD_";
/// Commands whose flags come from the files.
const OWN: [&str; 2] = ["server", "agent"];
/// Commands with upstream's configuration files.
const UPSTREAM: [&str; 2] = ["kubelet", "kube-proxy"];
/// Commands that a user runs for the data directory of this machine.
const OF_DATA_DIR: [&str; 9] = [
    "check-config",
    "kubectl",
    "images",
    "token",
    "snapshot",
    "store",
    "member",
    "certificate",
    "secrets-encrypt",
];
const DATA_DIR: &str = "data-dir";

/// Where settings come from besides the command line.
pub struct Sources<'a> {
    pub default_file: &'a Path,
    pub variable: &'a dyn Fn(&str) -> Option<String>,
}

/// The arguments with the settings of this machine's files and environment.
pub fn with_settings(arguments: Vec<String>) -> anyhow::Result<Vec<String>> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let sources = Sources { default_file: Path::new(DEFAULT_FILE), variable: &variable };
    with_settings_of(arguments, &sources)
}

fn with_settings_of(arguments: Vec<String>, sources: &Sources) -> anyhow::Result<Vec<String>> {
    let Some(at) = command_at(&arguments) else { return Ok(arguments) };
    let command = arguments[at].as_str();
    if OWN.contains(&command) {
        return of_command(arguments, at, sources);
    }
    if UPSTREAM.contains(&command) {
        return of_upstream(arguments, at);
    }
    if OF_DATA_DIR.contains(&command) {
        return Ok(of_data_dir(arguments, at, sources));
    }
    Ok(arguments)
}

/// The place of the command: flags of all commands may come first, with their values.
pub fn command_at(arguments: &[String]) -> Option<usize> {
    let mut at = 1;
    loop {
        match arguments.get(at)?.as_str() {
            "-d" | "--data-dir" | "--log-format" => at += 2,
            word if word.starts_with('-') => at += 1,
            _ => return Some(at),
        }
    }
}

/// `decapod server` and `decapod agent`.
fn of_command(arguments: Vec<String>, at: usize, sources: &Sources) -> anyhow::Result<Vec<String>> {
    let known = Known::of(&arguments[at]).context("it is a command of ours")?;
    let mut given = known.given(&arguments);
    let environment = from_environment(&known, sources)?;
    let environment = without(&known, environment, &given);
    given.extend(environment.iter().map(|setting| setting.name.clone()));
    let named = value_of(&arguments, "config").or_else(|| (sources.variable)("DECAPOD_CONFIG"));
    let files = match named {
        Some(path) => Files::read(Path::new(&path), true)?,
        None => Files::read(sources.default_file, false)?,
    };
    let files = without(&known, files.settings(&known)?, &given);
    // Of two values of a gate the last one wins.
    let words = files.into_iter().chain(environment).flat_map(|setting| setting.words);
    Ok(spliced(arguments, at, words.collect()))
}

/// Drops what a stronger source has: the same flag, or one that excludes it.
fn without(known: &Known, settings: Vec<Setting>, given: &BTreeSet<String>) -> Vec<Setting> {
    let is_free = |setting: &Setting| {
        let is_given = given.contains(&setting.name);
        setting.name == crate::component_config::FEATURE_GATES
            || !is_given && known.excludes(&setting.name).is_disjoint(given)
    };
    settings.into_iter().filter(is_free).collect()
}

fn from_environment(known: &Known, sources: &Sources) -> anyhow::Result<Vec<Setting>> {
    let mut found = vec![];
    for name in known.names() {
        for variable in known.variables(&name) {
            if let Some(text) = (sources.variable)(&variable) {
                let setting = known.setting(&name, text.into());
                found.push(setting.with_context(|| format!("environment variable {variable}"))?);
                break;
            }
        }
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// Only `data-dir`. A user who may not read the file names the directory.
fn of_data_dir(arguments: Vec<String>, at: usize, sources: &Sources) -> Vec<String> {
    let is_given = |word: &String| {
        word == "-d" || word.starts_with("-d/") || word.split('=').next() == Some("--data-dir")
    };
    if arguments.iter().any(is_given) {
        return arguments;
    }
    match data_dir_of(sources) {
        Some(directory) => {
            let word = format!("--{DATA_DIR}={}", directory.display());
            spliced(arguments, at, vec![word])
        }
        None => arguments,
    }
}

/// The data directory of this machine's server or agent, if its settings name one.
pub fn data_dir() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    data_dir_of(&Sources { default_file: Path::new(DEFAULT_FILE), variable: &variable })
}

fn data_dir_of(sources: &Sources) -> Option<PathBuf> {
    if let Some(directory) = (sources.variable)("DECAPOD_DATA_DIR") {
        return Some(directory.into());
    }
    let named = (sources.variable)("DECAPOD_CONFIG").map(PathBuf::from);
    let path = named.unwrap_or_else(|| sources.default_file.to_owned());
    let files = Files::read(&path, false).ok()?;
    files.text(DATA_DIR).map(PathBuf::from)
}

/// Upstream's components that run alone: see [`crate::component_config`].
fn of_upstream(arguments: Vec<String>, at: usize) -> anyhow::Result<Vec<String>> {
    let given = (value_of(&arguments, "config"), value_of(&arguments, "config-dir"));
    let extra = match (&given.0, &given.1) {
        (None, None) => return Ok(arguments),
        (path, drop_ins) => {
            crate::component_config::flags(&arguments[at], path.as_deref(), drop_ins.as_deref())?
        }
    };
    let mut extra = extra.unwrap_or_default();
    extra.retain(|setting| {
        let name = setting.split('=').next().unwrap_or_default();
        let is_given = |word: &String| word.split('=').next() == Some(name);
        name.trim_start_matches('-') == crate::component_config::FEATURE_GATES
            || !arguments.iter().any(is_given)
    });
    Ok(spliced(arguments, at, extra))
}

/// The command line's flags stay last.
fn spliced(mut arguments: Vec<String>, at: usize, words: Vec<String>) -> Vec<String> {
    arguments.splice(at + 1..at + 1, words);
    arguments
}

fn value_of(arguments: &[String], name: &str) -> Option<String> {
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let Some(rest) = argument.strip_prefix("--").and_then(|word| word.strip_prefix(name))
        else {
            continue;
        };
        match rest.strip_prefix('=') {
            Some(value) => return Some(value.to_owned()),
            None if rest.is_empty() => return arguments.next().cloned(),
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words after the command, with these files (by name below a directory) and variables.
    fn settled(
        line: &str,
        files: &[(&str, &str)],
        variables: &[(&str, &str)],
    ) -> Result<Vec<String>, String> {
        let root = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("inside")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        let place = format!("{}/", root.path().display());
        let arguments: Vec<String> =
            line.split(' ').map(|word| word.replace("ROOT/", &place)).collect();
        let variable = |name: &str| {
            variables.iter().find(|(one, _)| *one == name).map(|(_, value)| (*value).to_owned())
        };
        let default_file = root.path().join("config.yaml");
        let sources = Sources { default_file: &default_file, variable: &variable };
        let words = with_settings_of(arguments, &sources);
        let words = words.map_err(|error| format!("{error:#}").replace(&place, ""))?;
        Ok(words.into_iter().skip(2).map(|word| word.replace(&place, "")).collect())
    }

    #[test]
    fn files_add_up_as_in_k3s() {
        let check = |line: &str, files: &[(&str, &str)], expected: &[&str]| {
            assert_eq!(settled(line, files, &[]).as_deref(), Ok(&own(expected)[..]), "{line}");
        };
        let main = ("config.yaml", "tls-san: [a, b]\nhttps-listen-port: 7443\ndisable-agent: true");
        check("decapod server", &[], &[]);
        check(
            "decapod server",
            &[main],
            &["--disable-agent", "--https-listen-port=7443", "--tls-san=a", "--tls-san=b"],
        );
        check(
            "decapod server",
            &[
                main,
                ("config.yaml.d/20.yml", "tls-san+: c\ndisable-agent: false"),
                ("config.yaml.d/10.yaml", "https-listen-port: 8443"),
                ("config.yaml.d/30.txt", "nonsense"),
            ],
            &["--https-listen-port=8443", "--tls-san=a", "--tls-san=b", "--tls-san=c"],
        );
        // Drop-ins work without the main file, and a later file replaces a list.
        check(
            "decapod server",
            &[("config.yaml.d/a.yaml", "tls-san: [a]"), ("config.yaml.d/b.yaml", "tls-san: [b]")],
            &["--tls-san=b"],
        );
        check(
            "decapod agent --config ROOT/other.yaml",
            &[main, ("other.yaml", "s: https://a:6443\nnode-label: {a: b}")],
            &["--node-label=a=b", "--server=https://a:6443", "--config", "other.yaml"],
        );
        check(
            "decapod server",
            &[("config.yaml", "allocate-node-cidrs: false\ntaint-control-plane: \"true\"\n")],
            &["--allocate-node-cidrs=false", "--taint-control-plane"],
        );
        check("decapod server", &[("config.yaml", "# nothing\n")], &[]);
    }

    fn own(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn the_command_line_wins_then_the_environment() {
        let file = ("config.yaml", "token: f\ntls-san: [f]\nfeature-gates: {A: true}\nmax-pods: 5");
        let check = |line: &str, variables: &[(&str, &str)], expected: &[&str]| {
            let found = settled(line, &[file], variables);
            assert_eq!(found.as_deref(), Ok(&own(expected)[..]), "{line}");
        };
        check(
            "decapod server --tls-san=l",
            &[("DECAPOD_TOKEN", "v"), ("DECAPOD_MAX_PODS", "7")],
            &["--feature-gates=A=true", "--max-pods=7", "--token=v", "--tls-san=l"],
        );
        // One letter is the same flag; a flag that excludes another one drops it.
        check(
            "decapod server --token-file=t -d /x",
            &[("DECAPOD_DATA_DIR", "/v"), ("DECAPOD_TLS_SAN", "v")],
            &[
                "--feature-gates=A=true",
                "--max-pods=5",
                "--tls-san=v",
                "--token-file=t",
                "-d",
                "/x",
            ],
        );
        check(
            "decapod server --feature-gates=A=false --tls-san=l --token=l --max-pods=1",
            &[("DECAPOD_DISABLE_AGENT", "1"), ("DECAPOD_CLUSTER_INIT", "false")],
            &[
                "--feature-gates=A=true",
                "--disable-agent",
                "--feature-gates=A=false",
                "--tls-san=l",
                "--token=l",
                "--max-pods=1",
            ],
        );
    }

    #[test]
    fn servers_have_two_variables() {
        let found = settled("decapod agent", &[], &[("DECAPOD_URL", "https://a:1")]);
        assert_eq!(found, Ok(vec!["--server=https://a:1".to_owned()]));
    }

    #[test]
    fn errors_name_the_file_and_the_key() {
        let check = |line: &str, text: &str, expected: &str| {
            let found = settled(line, &[("config.yaml", text)], &[]);
            assert_eq!(found, Err(expected.to_owned()), "{text}");
        };
        check(
            "decapod server",
            "tls_san: a",
            "config.yaml: unknown key \"tls_san\"; did you mean tls-san?",
        );
        check(
            "decapod server",
            "lb-server-port: 1",
            "config.yaml: unknown key \"lb-server-port\"; it is a flag of `decapod agent`",
        );
        check(
            "decapod agent",
            "nonsense: 1",
            "config.yaml: unknown key \"nonsense\"; `decapod agent --help` lists the flags, whose names are the keys",
        );
        check(
            "decapod server",
            "disable-agent: often",
            "config.yaml: disable-agent: expected true or false, found \"often\"",
        );
        check(
            "decapod server",
            "token: a\ntoken+: b",
            "config.yaml: token: this flag takes one value, found 2",
        );
        check("decapod server", "- a", "config.yaml: expected a YAML map of flags");
        check(
            "decapod server",
            "config: /x",
            "config.yaml: a file cannot name another one: config",
        );
        let absent = settled("decapod server --config=ROOT/x.yaml", &[], &[]).expect_err("absent");
        assert!(absent.starts_with("cannot read x.yaml"), "{absent}");
        let wrong = settled("decapod server", &[], &[("DECAPOD_DISABLE_AGENT", "often")]);
        let wrong = wrong.expect_err("no boolean");
        let expected =
            "environment variable DECAPOD_DISABLE_AGENT: expected true or false, found \"often\"";
        assert_eq!(wrong, expected);
    }

    #[test]
    fn other_commands_take_the_data_directory() {
        let file = ("config.yaml", "data-dir: /data\ntoken: a");
        let check = |line: &str, variables: &[(&str, &str)], expected: &[&str]| {
            let found = settled(line, &[file], variables);
            assert_eq!(found.as_deref(), Ok(&own(expected)[..]), "{line}");
        };
        check("decapod kubectl get server", &[], &["--data-dir=/data", "get", "server"]);
        check("decapod token list", &[("DECAPOD_DATA_DIR", "/v")], &["--data-dir=/v", "list"]);
        check("decapod kubectl -d /x get", &[], &["-d", "/x", "get"]);
        check("decapod uninstall", &[], &[]);
        check("decapod version", &[], &[]);
    }
}
