//! Where Kubernetes' version may be spelled out: in `crates/release`, once.
//!
//! In: a source, and the manifests that choose the types' version. Out: breaches. Texts that say since
//! when something is deprecated are upstream's and stay. Tests of the program may name any version.

use std::fs;
use std::path::Path;

use super::{Breach, Source};
use crate::sh::Outcome;

const RULE: &str = "version";
const HOME: &str = "crates/release/";
/// Upstream's words for what goes away: `is deprecated in v1.36+, unavailable in v1.39+`.
const HISTORY: &str = "deprecated in v";
/// Whose features say of which release the types are.
const MANIFESTS: &[&str] = &["Cargo.toml", "fuzz/Cargo.toml"];

pub fn check(source: &Source) -> Vec<Breach> {
    if source.is_test || source.name.starts_with(HOME) {
        return vec![];
    }
    let says = |(number, raw): (usize, &String)| {
        let is_code = !source.masked.lines[number].trim().is_empty() || raw.contains('"');
        let is_comment = raw.trim_start().starts_with("//");
        (is_code && !is_comment && !source.masked.in_test[number] && names_version(raw))
            .then(|| source.breach(number, RULE, "say release::KUBERNETES in one of its forms"))
    };
    source.raw.iter().enumerate().filter_map(says).collect()
}

/// Does the line name our minor release, or a patch of it?
fn names_version(line: &str) -> bool {
    let minor = release::KUBERNETES.minor;
    let forms = [format!("1.{minor}"), format!("v0.{minor}"), format!("v1_{minor}")];
    let is_end = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_digit());
    let is_start =
        |before: &str| !before.ends_with(|last: char| last.is_ascii_digit() || last == '.');
    !line.contains(HISTORY)
        && forms.iter().any(|form| {
            line.match_indices(form.as_str())
                .any(|(at, _)| is_start(&line[..at]) && is_end(&line[at + form.len()..]))
        })
}

/// The types must be those of the release.
pub fn of_types(root: &Path) -> Outcome<Vec<Breach>> {
    let feature = format!("v1_{}", release::KUBERNETES.minor);
    let mut breaches = vec![];
    for name in MANIFESTS {
        let path = root.join(name);
        let text =
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let lines = text.lines().enumerate();
        let mut lines = lines.filter(|(_, line)| line.starts_with("k8s-openapi = {"));
        breaches.extend(lines.find(|(_, line)| !line.contains(&feature)).map(|(number, _)| {
            let text = format!("k8s-openapi must have the feature {feature}");
            Breach { file: (*name).to_owned(), line: number + 1, rule: RULE, text }
        }));
    }
    Ok(breaches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_spelled_out_once() {
        let check = |line: &str, expected: bool| {
            let line = line.replace('N', release::KUBERNETES.minor);
            let source = Source::new("crates/kubelet/src/lib.rs".into(), &line);
            assert_eq!(check(&source).len(), usize::from(expected), "{line}");
        };
        check("const A: &str = \"v1.N.2\";", true);
        check("const A: &str = \"kube-probe/1.N\";", true);
        check("const A: &str = \"k8s.io/api@v0.N.2\";", true);
        check("const A: &str = \"1.N0\";", false);
        check("const A: &str = \"10.1.N.2\";", false);
        check("// upstream v1.N does so", false);
        check("const A: &str = \"is deprecated in v1.N+, unavailable in v1.39+\";", false);
        check("#[cfg(test)]\nmod tests {\n    const A: &str = \"1.N.0\";\n}", false);
        let home = Source::new("crates/release/src/lib.rs".into(), "const A: &str = \"1.N\";");
        assert!(super::check(&home).is_empty());
    }
}
