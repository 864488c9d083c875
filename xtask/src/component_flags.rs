//! The command lines of upstream's components: the documented table, and its comparison with upstream.
//!
//! In: `crates/binary/flags/COMPONENT.txt`, one line a flag. Out: docs/flags.md; for `--upstream`, each
//! difference between the tables and the flags that upstream's components register. Their own code prints
//! those: `component_flags.go`, built from the Go modules of the release.

use std::fs;
use std::path::Path;

use crate::foreign;
use crate::sh::{self, Outcome};

const DIRECTORY: &str = "crates/binary/flags";
pub const PAGE: &str = "docs/flags.md";

/// By name; the page has this order.
const COMPONENTS: [&str; 6] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "cloud-controller-manager",
];

const HEAD: &str = "\
# Command lines of upstream's components

`decapod COMPONENT`, or a link to the binary with the component's name, takes the flags of Kubernetes v1.36 as
upstream's component does: `--flag=value`, `--flag value`, bare booleans, `-v 4`, repeated lists, `_` for `-`. A
wrong value is upstream's error. `cargo xtask flags` generates this page from `crates/binary/flags`;
`cargo xtask flags --upstream` compares the tables with the flags that upstream's own code registers.

| effect | meaning |
|---|---|
| does | what upstream's flag does |
| ignored | the value is checked, and the log says once that the flag has no effect |
| refused | the component does not start with it, unless the value is empty or `false` |
| own | a flag that upstream does not have |

`-v` up to 3 logs what `info` does, 4 and 5 `debug`, more `trace`.
";

struct Row {
    name: String,
    kind: String,
    effect: String,
    reason: String,
}

pub fn run(arguments: &[String]) -> Outcome {
    let root = sh::root();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let path = root.join(PAGE);
            fs::write(&path, page(&root)?).map_err(|error| format!("{}: {error}", path.display()))
        }
        ["--upstream"] => compare(&root),
        _ => Err("usage: cargo xtask flags [--upstream]".to_owned()),
    }
}

/// Whether the page is the one that the tables make.
pub fn check(root: &Path) -> Outcome {
    let there = fs::read_to_string(root.join(PAGE)).unwrap_or_default();
    match there == page(root)? {
        true => Ok(()),
        false => Err(format!("{PAGE} differs from {DIRECTORY}: run cargo xtask flags")),
    }
}

fn page(root: &Path) -> Outcome<String> {
    let mut page = HEAD.to_owned();
    for component in COMPONENTS {
        let rows = rows(root, component)?;
        let count = |effect: &str| rows.iter().filter(|row| row.effect == effect).count();
        page.push_str(&format!(
            "\n## {component}\n\n{} do what upstream's do, {} are ignored, {} refused.\n\n| flag | type | effect | |\n|---|---|---|---|\n",
            count("does"),
            count("ignored"),
            count("refused"),
        ));
        for Row { name, kind, effect, reason } in &rows {
            page.push_str(&format!("| `--{name}` | {kind} | {effect} | {reason} |\n"));
        }
    }
    page.push_str(&fields(root)?);
    Ok(page)
}

/// The fields of KubeletConfiguration. A test of the binary compares the table with the code.
fn fields(root: &Path) -> Outcome<String> {
    let path = root.join(DIRECTORY).join("KubeletConfiguration.txt");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut rows = String::new();
    let (mut all, mut without) = (0, 0);
    for line in lines {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (effect, reason) = rest.trim().split_once(' ').unwrap_or((rest.trim(), ""));
        all += 1;
        without += usize::from(effect == "nothing");
        rows.push_str(&format!("| `{name}` | {effect} | {reason} |\n"));
    }
    let does = all - without;
    Ok(format!(
        "\n## KubeletConfiguration (`--config`, `--config-dir`)\n\n{does} fields do what upstream's do, \
         {without} do nothing here: the log names them once.\n\n| field | effect | |\n|---|---|---|\n{rows}"
    ))
}

fn rows(root: &Path, component: &str) -> Outcome<Vec<Row>> {
    let path = root.join(DIRECTORY).join(format!("{component}.txt"));
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| row(line).ok_or_else(|| format!("{}: {line}", path.display()))).collect()
}

fn row(line: &str) -> Option<Row> {
    let (name, rest) = line.split_once(char::is_whitespace)?;
    let (kind, rest) = rest.trim_start().split_once(char::is_whitespace)?;
    let rest = rest.trim_start();
    let (effect, reason) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let [name, kind, effect, reason] = [name, kind, effect, reason.trim()].map(str::to_owned);
    Some(Row { name, kind, effect, reason })
}

fn compare(root: &Path) -> Outcome {
    let program = foreign::component_flags()?;
    let mut differences = vec![];
    for component in COMPONENTS {
        let mut command = std::process::Command::new(&program);
        let printed = sh::capture(command.arg(component))?;
        differences.extend(differences_of(component, &rows(root, component)?, &printed));
    }
    match differences.is_empty() {
        true => Ok(()),
        false => Err(differences.join("\n")),
    }
}

/// Flags that one side does not have, or has with another type.
fn differences_of(component: &str, rows: &[Row], printed: &str) -> Vec<String> {
    let upstream: Vec<(String, &str)> = printed
        .lines()
        .filter_map(|line| {
            let mut columns = line.split('\t');
            // Upstream takes `_` for `-`, and registers one flag with it.
            Some((columns.next()?.replace('_', "-"), columns.next()?))
        })
        .collect();
    let mut differences = vec![];
    for (name, kind) in &upstream {
        match rows.iter().find(|row| row.name == *name) {
            None => differences.push(format!("{component}: --{name} ({kind}) has no row")),
            Some(row) if row.effect == "own" => {
                differences.push(format!("{component}: upstream has --{name}, too"));
            }
            Some(row) if !is_same(&row.kind, kind) => differences
                .push(format!("{component}: --{name} is {kind}, the table says {}", row.kind)),
            Some(_) => {}
        }
    }
    for row in rows.iter().filter(|row| row.effect != "own") {
        if !upstream.iter().any(|(name, _)| *name == row.name) {
            differences.push(format!("{component}: upstream has no --{}", row.name));
        }
    }
    differences
}

/// Upstream calls two kinds of maps by one name.
fn is_same(table: &str, upstream: &str) -> bool {
    table == upstream || (table, upstream) == ("thresholds", "mapStringString")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named() {
        let rows: Vec<Row> = [
            "a string does",
            "b  int    ignored  it has no effect here",
            "c string own",
            "d thresholds does",
            "e string does",
        ]
        .iter()
        .filter_map(|line| row(line))
        .collect();
        assert_eq!(rows[1].reason, "it has no effect here");
        let printed = "a\tstring\t\t\tfalse\nb\tbool\t\ttrue\tfalse\nd\tmapStringString\t\t\tfalse\nf_g\tint\t\t\tfalse\n";
        assert_eq!(
            differences_of("x", &rows, printed),
            [
                "x: --b is bool, the table says int",
                "x: --f-g (int) has no row",
                "x: upstream has no --e",
            ]
        );
    }
}
