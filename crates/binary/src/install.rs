//! `decapod install`: checks the flags for the service, and makes keys of config.yaml of them.
//!
//! In: the words after `--`. Out: settings for [`cli::install`]. A flag that `decapod server` or `decapod agent` does not
//! know is an error now, not at the service's start.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, CommandFactory};
use cli::install::{Install, Role, Setting};

use crate::config_file;

/// Flags of `install` itself, and the files that they become.
const OWN: [(&str, &str); 4] = [
    ("server", "give --server before `--`"),
    ("token", "give --token-file before `--`"),
    ("token-file", "give --token-file before `--`"),
    ("config", "copy the file to /etc/decapod/config.yaml"),
];

pub fn run(command: &Install) -> anyhow::Result<()> {
    for url in command.servers() {
        crate::agent::host_port(&url)?;
    }
    command.run(settings(command.role(), &command.flags)?)
}

/// The flags as keys, in the order of the help text.
fn settings(role: Role, words: &[String]) -> anyhow::Result<Vec<Setting>> {
    let mut program = crate::Arguments::command();
    program.build();
    let name = role.command();
    let command = program.find_subcommand(name).context("a command of ours")?.clone();
    // An agent's server is known by another flag.
    let command = command.mut_args(|arg| arg.required(false));
    let line = [name.to_owned()].into_iter().chain(words.iter().cloned());
    let matches = match command.clone().try_get_matches_from(line) {
        Ok(matches) => matches,
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            bail!("after `--`, the flags of `decapod {name}`: {first}");
        }
    };
    let mut found = vec![];
    for arg in command.get_arguments() {
        let Some(long) = arg.get_long() else { continue };
        if matches.value_source(arg.get_id().as_str()) != Some(ValueSource::CommandLine) {
            continue;
        }
        if let Some((_, instead)) = OWN.iter().find(|(flag, _)| *flag == long) {
            bail!("--{long} after `--`: {instead}");
        }
        let id = arg.get_id().as_str();
        found.push(match arg.get_action() {
            ArgAction::SetTrue => Setting { key: long.to_owned(), value: true.into() },
            _ => Setting::list(long, raw(&matches, id)?),
        });
    }
    // As the service will read it.
    let known = config_file::Known::of(name).context("a command of ours")?;
    for Setting { key, value } in &found {
        known.setting(key, value.clone()).with_context(|| format!("--{key}"))?;
    }
    found.iter_mut().for_each(absolute);
    Ok(found)
}

fn raw(matches: &ArgMatches, id: &str) -> anyhow::Result<Vec<String>> {
    let values = matches.get_raw(id).into_iter().flatten();
    let text = |value: &OsStr| {
        value.to_str().map(str::to_owned).with_context(|| format!("{value:?} is not UTF-8"))
    };
    values.map(text).collect()
}

/// A service has another working directory than the user's shell.
fn absolute(setting: &mut Setting) {
    if let Some(text) = setting.value.as_str()
        && setting.key.ends_with("-dir")
        && let Ok(path) = std::path::absolute(Path::new(text))
    {
        setting.value = path.display().to_string().into();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keys(role: Role, words: &[&str]) -> Result<serde_json::Value, String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let settings = settings(role, &words).map_err(|error| format!("{error:#}"))?;
        let pairs = settings.into_iter().map(|Setting { key, value }| (key, value));
        Ok(serde_json::Value::Object(pairs.collect()))
    }

    #[test]
    fn flags_become_keys() {
        let words = ["--tls-san=a,b", "--disable-agent", "--https-listen-port", "7443", "-d/data"];
        assert_eq!(
            keys(Role::Server, &words),
            Ok(json!({
                "data-dir": "/data", "disable-agent": true, "https-listen-port": "7443",
                "tls-san": ["a", "b"],
            }))
        );
        assert_eq!(keys(Role::Agent, &[]), Ok(json!({})));
        assert_eq!(
            keys(Role::Server, &["--allocate-node-cidrs=false"]),
            Ok(json!({"allocate-node-cidrs": "false"}))
        );
    }

    #[test]
    fn wrong_flags_are_told_before_anything_is_written() {
        let check = |words: &[&str], part: &str| {
            let error = keys(Role::Server, words).expect_err("a wrong flag");
            assert!(error.contains(part), "{error}");
        };
        check(&["--no-such-flag"], "unexpected argument '--no-such-flag'");
        check(&["--https-listen-port=x"], "invalid value 'x'");
        check(&["--token=x"], "give --token-file before `--`");
        check(&["--config=x"], "copy the file to /etc/decapod/config.yaml");
    }
}
