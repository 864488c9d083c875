//! The tables of flags: data, one line for each flag.
//!
//! ```text
//! NAME  TYPE  EFFECT  [REASON]
//! ```
//!
//! Invariants: names are sorted and unique; a flag without effect and a refused one have a reason.

use super::value::Type;

const TABLES: &[(&str, &str)] = &[
    ("cloud-controller-manager", include_str!("../../flags/cloud-controller-manager.txt")),
    ("kube-apiserver", include_str!("../../flags/kube-apiserver.txt")),
    ("kube-controller-manager", include_str!("../../flags/kube-controller-manager.txt")),
    ("kube-proxy", include_str!("../../flags/kube-proxy.txt")),
    ("kube-scheduler", include_str!("../../flags/kube-scheduler.txt")),
    ("kubelet", include_str!("../../flags/kubelet.txt")),
];

/// One of upstream's components and its flags.
#[derive(Debug)]
pub struct Component {
    pub name: &'static str,
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub kind: Type,
    pub effect: Effect,
    pub reason: &'static str,
}

/// What happens with a flag.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Effect {
    /// What upstream's flag does.
    Does,
    /// Its value is checked. The log says once that it has no effect.
    Ignored,
    /// The component does not start with it, unless it has its default value.
    Refused,
    /// A flag of Decapod that upstream does not have.
    Own,
}

impl Component {
    pub fn named(name: &str) -> Option<Self> {
        let (name, text) = TABLES.iter().find(|(one, _)| *one == name)?;
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let row = |line| Row::parse(line).unwrap_or_else(|| panic!("{name}.txt: {line}"));
        Some(Self { name, rows: lines.map(row).collect() })
    }

    pub fn flag(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Names of the flags with this effect.
    pub fn with(&self, effect: Effect) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.effect == effect)
    }
}

impl Row {
    fn parse(line: &'static str) -> Option<Self> {
        let (name, rest) = word(line)?;
        let (kind, rest) = word(rest)?;
        let (effect, reason) = word(rest)?;
        let effect = match effect {
            "does" => Effect::Does,
            "ignored" => Effect::Ignored,
            "refused" => Effect::Refused,
            "own" => Effect::Own,
            _ => return None,
        };
        Some(Self { name, kind: Type::named(kind)?, effect, reason })
    }
}

/// The first column, and the rest of the line. Columns are padded with spaces.
fn word(line: &'static str) -> Option<(&'static str, &'static str)> {
    let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
    (!first.is_empty()).then(|| (first, rest.trim()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Flags that the parser of the command line handles itself.
    const PARSERS: [&str; 4] = ["help", "logging-format", "v", "version"];
    /// Flags of every command of Decapod.
    const COMMON: [&str; 2] = ["data-dir", "log-format"];

    /// A flag that does something is an argument of the command, and the other way round.
    #[test]
    fn the_tables_and_the_commands_have_the_same_flags() {
        let mut program = crate::Arguments::command();
        program.build();
        for (name, _) in TABLES {
            let component = Component::named(name).expect("a table");
            let command = program.find_subcommand(name).expect("a command");
            let arguments: Vec<&str> =
                command.get_arguments().filter_map(|one| one.get_long()).collect();
            let mut wrong = vec![];
            for row in &component.rows {
                let is_known = arguments.contains(&row.name) || PARSERS.contains(&row.name);
                let is_wanted = matches!(row.effect, Effect::Does | Effect::Own);
                if is_known != is_wanted {
                    wrong.push(format!("{name}: {} is {:?}", row.name, row.effect));
                }
            }
            for argument in arguments {
                if component.flag(argument).is_none() && !COMMON.contains(&argument) {
                    wrong.push(format!("{name}: {argument} has no row"));
                }
            }
            assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        }
    }

    #[test]
    fn rows_are_sorted_and_say_why() {
        for (name, _) in TABLES {
            let component = Component::named(name).expect("a table");
            assert!(component.rows.is_sorted_by(|one, next| one.name < next.name), "{name}");
            for row in &component.rows {
                let has_reason = !row.reason.is_empty();
                let is_wanted = matches!(row.effect, Effect::Ignored | Effect::Refused);
                assert_eq!(has_reason, is_wanted, "{name}: {}", row.name);
            }
        }
    }
}
