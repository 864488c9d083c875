//! The flags of a command, by name: what a setting of a file or of the environment may be.
//!
//! In: a name and a value. Out: words for `clap`, which checks the values themselves.

use std::collections::BTreeSet;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, Command, CommandFactory};
use serde_json::Value;

use super::{OWN, PREFIX};

/// Flags that make no sense in a file or a variable.
const NO_SETTINGS: [&str; 3] = ["config", "help", "version"];
/// Variables with another name, as k3s' `K3S_URL`.
const ALIASES: [(&str, &str); 1] = [("server", "DECAPOD_URL")];

/// One flag with its values, from one source.
#[derive(Debug, PartialEq)]
pub struct Setting {
    pub name: String,
    pub words: Vec<String>,
}

pub struct Known(Command);

impl Known {
    pub fn of(command: &str) -> Option<Self> {
        let mut program = crate::Arguments::command();
        program.build();
        program.find_subcommand(command).cloned().map(Self)
    }

    /// Long names.
    pub fn names(&self) -> Vec<String> {
        let longs = self.0.get_arguments().filter_map(Arg::get_long);
        longs.filter(|name| !NO_SETTINGS.contains(name)).map(str::to_owned).collect()
    }

    /// By the long name, or by a letter.
    fn argument(&self, name: &str) -> Option<&Arg> {
        let mut letters = name.chars();
        let letter = letters.next().filter(|_| letters.next().is_none());
        let is_it = |arg: &&Arg| {
            arg.get_long() == Some(name) || letter.is_some() && arg.get_short() == letter
        };
        self.0.get_arguments().find(is_it)
    }

    /// The long name of a key in a file.
    ///
    /// # Errors
    /// No flag has this name; the error says which one may be meant.
    pub fn name(&self, key: &str) -> anyhow::Result<String> {
        if key == "config" {
            bail!("a file cannot name another one: config");
        }
        let is_setting = |name: &&str| !NO_SETTINGS.contains(name);
        if let Some(name) = self.argument(key).and_then(Arg::get_long).filter(is_setting) {
            return Ok(name.to_owned());
        }
        let dashed = key.replace('_', "-").to_lowercase();
        if self.argument(&dashed).is_some() {
            bail!("unknown key {key:?}; did you mean {dashed}?");
        }
        let own = self.0.get_name();
        for other in OWN.iter().filter(|other| **other != own) {
            if Self::of(other).is_some_and(|other| other.argument(key).is_some()) {
                bail!("unknown key {key:?}; it is a flag of `decapod {other}`");
            }
        }
        bail!(
            "unknown key {key:?}; `decapod {own} --help` lists the flags, whose names are the keys"
        );
    }

    /// Variables with the flag's value, the first one wins.
    pub fn variables(&self, name: &str) -> Vec<String> {
        let mut all = vec![format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())];
        let others = ALIASES.iter().filter(|(flag, _)| *flag == name);
        all.extend(others.map(|(_, variable)| (*variable).to_owned()));
        all
    }

    /// The flags of a command line, by their long names.
    pub fn given(&self, arguments: &[String]) -> BTreeSet<String> {
        let long = |word: &String| {
            let name = match word.strip_prefix("--") {
                Some(long) => long.split('=').next().unwrap_or_default(),
                None => {
                    let letter = word.strip_prefix('-')?.chars().next()?;
                    let short = |arg: &&Arg| arg.get_short() == Some(letter);
                    self.0.get_arguments().find(short)?.get_long()?
                }
            };
            Some(name.to_owned())
        };
        arguments.iter().skip(1).filter_map(long).collect()
    }

    /// Flags that cannot stand beside this one.
    pub fn excludes(&self, name: &str) -> BTreeSet<String> {
        let Some(own) = self.argument(name) else { return BTreeSet::new() };
        let conflicts = |arg: &&Arg| {
            let others = self.0.get_arg_conflicts_with(arg);
            others.iter().any(|other| other.get_id() == own.get_id())
        };
        let others = self.0.get_arguments().filter(conflicts);
        let others = others.chain(self.0.get_arg_conflicts_with(own));
        others.filter_map(Arg::get_long).map(str::to_owned).collect()
    }

    /// # Errors
    /// The value has a form that the flag does not take.
    pub fn setting(&self, name: &str, value: Value) -> anyhow::Result<Setting> {
        let arg = self.argument(name).context("it is a flag")?;
        let setting = |words| Setting { name: name.to_owned(), words };
        if matches!(arg.get_action(), ArgAction::SetTrue) {
            let is_on = boolean(&value).with_context(|| {
                let found =
                    value.as_str().map_or_else(|| value.to_string(), |it| format!("{it:?}"));
                format!("expected true or false, found {found}")
            })?;
            return Ok(setting(is_on.then(|| format!("--{name}")).into_iter().collect()));
        }
        let mut words = vec![];
        let listed = match value {
            Value::Array(list) => list,
            other => vec![other],
        };
        for one in listed {
            match one {
                // A flag with a value needs it also for `false`.
                Value::Bool(it) => words.push(format!("--{name}={it}")),
                other => crate::flags::push_setting(&mut words, name, other)?,
            }
        }
        if words.len() > 1 && !matches!(arg.get_action(), ArgAction::Append) {
            bail!("this flag takes one value, found {}", words.len());
        }
        Ok(setting(words))
    }
}

fn boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(it) => Some(*it),
        Value::Null => Some(false),
        Value::String(text) => match text.to_lowercase().as_str() {
            "true" | "t" | "1" | "yes" => Some(true),
            "false" | "f" | "0" | "no" => Some(false),
            _ => None,
        },
        _ => None,
    }
}
