//! Reads a command line as pflag does, with its errors.
//!
//! In: words. Out: [`CommandLine`]. `--a=b`, `--a b`, a bare `--flag` for `true`, `-v=2`, `-v 2`, `_` for
//! `-` in names. Of repeated flags the last one wins, unless they add up.

use base::telemetry::LogFormat;

use super::table::{Component, Effect, Row};
use super::{CommandLine, Wants};

/// One-letter names.
const SHORTHANDS: &[(char, &str)] = &[('h', "help"), ('v', "v")];

impl Component {
    /// # Errors
    /// Upstream's.
    pub fn parse(&self, front: &[String], words: &[String]) -> Result<CommandLine, String> {
        let mut line = CommandLine::default();
        let mut given: Vec<(&Row, String)> = vec![];
        let mut words = words.iter();
        while let Some(word) = words.next() {
            if !word.starts_with('-') || word == "-" {
                return Err(self.extra(word));
            }
            if word == "--" {
                match words.next() {
                    Some(extra) => return Err(self.extra(extra)),
                    None => break,
                }
            }
            let (name, said) = self.split(word)?;
            // Flags of every command of Decapod.
            if ["data-dir", "d", "log-format"].contains(&name.as_str()) {
                let value = said.or_else(|| words.next().cloned());
                let value = value.ok_or_else(|| format!("flag needs an argument: {word}"))?;
                let name = if name == "d" { "data-dir" } else { &name };
                line.words.push(format!("--{name}={value}"));
                continue;
            }
            let row = self.flag(&name).ok_or_else(|| format!("unknown flag: --{name}"))?;
            let value = match said.or_else(|| row.kind.bare().map(str::to_owned)) {
                Some(value) => value,
                None => words.next().cloned().ok_or_else(|| needs_argument(word))?,
            };
            let shown = match SHORTHANDS.iter().find(|(_, long)| *long == name) {
                Some((short, long)) => format!("-{short}, --{long}"),
                None => format!("--{name}"),
            };
            let value = row.kind.check(&value).map_err(|cause| {
                format!("invalid argument {value:?} for {shown:?} flag: {cause}")
            })?;
            if !row.kind.adds_up() {
                given.retain(|(one, _)| one.name != row.name);
            }
            given.push((row, value));
        }
        self.apply(given, &mut line)?;
        let mut all = front.to_vec();
        all.push(self.name.to_owned());
        if line.wants == Wants::Run {
            all.append(&mut line.words);
        }
        Ok(CommandLine { words: all, ..line })
    }

    fn apply(&self, given: Vec<(&Row, String)>, line: &mut CommandLine) -> Result<(), String> {
        for (row, value) in given {
            match (row.name, row.effect) {
                ("help", _) if value == "true" => line.wants = Wants::Help,
                ("help", _) => {}
                ("version", _) if line.wants == Wants::Run && value != "false" => {
                    line.wants = Wants::Version { raw: value == "raw" };
                }
                ("version", _) => {}
                ("v", _) => line.verbosity = value.parse().ok(),
                ("logging-format", _) => {
                    line.log_format = Some(match value.as_str() {
                        "text" => LogFormat::Text,
                        "json" => LogFormat::Json,
                        _ => return Err(format!(
                            "[]: logging.format: Invalid value: {value:?}: Unsupported log format"
                        )
                        .trim_start_matches("[]: ")
                        .to_owned()),
                    });
                }
                (_, Effect::Ignored) => {
                    let is_new =
                        line.ignored.iter().all(|(one, _)| one.trim_start_matches('-') != row.name);
                    if is_new {
                        line.ignored.push((format!("--{}", row.name), row.reason));
                    }
                }
                (_, Effect::Refused) if ["", "false"].contains(&value.as_str()) => {}
                (_, Effect::Refused) => {
                    return Err(format!("--{} is not supported: {}", row.name, row.reason));
                }
                (name, Effect::Does | Effect::Own) => line.words.push(format!("--{name}={value}")),
            }
        }
        Ok(())
    }

    /// The name of a flag and the value behind `=`.
    fn split(&self, word: &str) -> Result<(String, Option<String>), String> {
        let Some(long) = word.strip_prefix("--") else { return self.short(&word[1..]) };
        let (name, value) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (long, None),
        };
        if name.is_empty() || name.starts_with('-') {
            return Err(format!("bad flag syntax: {word}"));
        }
        Ok((name.replace('_', "-"), value))
    }

    fn short(&self, letters: &str) -> Result<(String, Option<String>), String> {
        let first = letters.chars().next().unwrap_or_default();
        let rest = &letters[first.len_utf8()..];
        let name = match SHORTHANDS.iter().find(|(letter, _)| *letter == first) {
            Some((_, name)) => *name,
            None if first == 'd' => "d",
            None => return Err(format!("unknown shorthand flag: {first:?} in -{letters}")),
        };
        let value = (!rest.is_empty()).then(|| rest.strip_prefix('=').unwrap_or(rest).to_owned());
        Ok((name.to_owned(), value))
    }

    fn extra(&self, word: &str) -> String {
        match self.name {
            "kubelet" => format!("unknown command {word}"),
            name => format!("{name:?} does not take any arguments, got [{word:?}]"),
        }
    }
}

fn needs_argument(word: &str) -> String {
    match word.strip_prefix('-').filter(|rest| !rest.starts_with('-')) {
        Some(letters) => {
            let first = letters.chars().next().unwrap_or_default();
            format!("flag needs an argument: {first:?} in -{letters}")
        }
        None => format!("flag needs an argument: {word}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(component: &str, words: &[&str]) -> Result<CommandLine, String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        Component::named(component).expect("a table").parse(&["decapod".to_owned()], &words)
    }

    #[test]
    fn words_take_one_form() {
        let check = |component: &str, words: &[&str], expected: &[&str]| {
            let line = parse(component, words).expect("upstream's flags");
            assert_eq!(&line.words[..2], ["decapod", component]);
            assert_eq!(&line.words[2..], expected, "{words:?}");
        };
        let manager = "kube-controller-manager";
        check(manager, &["--allocate-node-cidrs"], &["--allocate-node-cidrs=true"]);
        check(manager, &["--allocate-node-cidrs=F"], &["--allocate-node-cidrs=false"]);
        check(manager, &["--cluster_cidr", "10.0.0.0/8"], &["--cluster-cidr=10.0.0.0/8"]);
        check(manager, &["--cluster-cidr=a", "--cluster-cidr=b"], &["--cluster-cidr=b"]);
        check(
            manager,
            &["--controllers=*", "--controllers", "-a"],
            &["--controllers=*", "--controllers=-a"],
        );
        check("kubelet", &["-d", "/x", "-v2", "-v=3", "-v", "4"], &["--data-dir=/x"]);
    }

    #[test]
    fn errors_are_upstreams() {
        let check = |component: &str, words: &[&str], expected: &str| {
            assert_eq!(parse(component, words).expect_err("a wrong line"), expected);
        };
        check("kube-scheduler", &["--foo=1"], "unknown flag: --foo");
        check("kube-scheduler", &["-x"], "unknown shorthand flag: 'x' in -x");
        check("kube-scheduler", &["--kubeconfig"], "flag needs an argument: --kubeconfig");
        check("kube-scheduler", &["-v"], "flag needs an argument: 'v' in -v");
        check("kube-scheduler", &["--=x"], "bad flag syntax: --=x");
        check(
            "kube-scheduler",
            &["--secure-port=x"],
            "invalid argument \"x\" for \"--secure-port\" flag: strconv.ParseInt: parsing \"x\": invalid syntax",
        );
        check(
            "kube-scheduler",
            &["-v=x"],
            "invalid argument \"x\" for \"-v, --v\" flag: strconv.ParseInt: parsing \"x\": invalid syntax",
        );
        check(
            "kube-scheduler",
            &["word"],
            "\"kube-scheduler\" does not take any arguments, got [\"word\"]",
        );
        check("kubelet", &["word"], "unknown command word");
    }

    #[test]
    fn flags_without_effect_are_named_once() {
        let words =
            ["--vmodule=a=1", "--vmodule=b=2", "--logging-format=json", "-v=4", "--version"];
        let line = parse("kube-scheduler", &words).expect("upstream's flags");
        assert_eq!(line.ignored.len(), 1);
        assert_eq!(line.ignored[0].0, "--vmodule");
        assert_eq!((line.verbosity, line.log_format), (Some(4), Some(LogFormat::Json)));
        assert_eq!(line.wants, Wants::Version { raw: false });
    }
}
