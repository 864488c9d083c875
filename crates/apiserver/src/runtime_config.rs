//! `--runtime-config`: which groups, versions and resources are served.
//!
//! In: pairs of key and value, the rows, and which of them are served by default. Out: the rows that
//! are not served. What is said about all of a kind of versions counts first, what is said about a
//! version next, what is said about one resource last. Upstream: `resourceconfig.MergeAPIResourceConfigs`.

use std::collections::BTreeMap;

use crate::resource::{Resource, ResourceTable};

const ALL: &str = "api/all";

type Matcher = fn(&str) -> bool;

/// Which versions a key stands for, in the order in which such keys count.
const MATCHERS: &[(&str, Matcher)] = &[
    (ALL, |_| true),
    ("api/ga", |version| stage(version) == Some("")),
    ("api/beta", |version| stage(version) == Some("beta")),
    ("api/alpha", |version| stage(version) == Some("alpha")),
];

/// What stands between the two numbers of a version.
fn stage(version: &str) -> Option<&str> {
    let is_digit = |c: char| c.is_ascii_digit();
    let rest = version.strip_prefix('v')?;
    let behind = rest.trim_start_matches(is_digit);
    let word = behind.trim_end_matches(is_digit);
    let has_numbers = behind.len() < rest.len() && (word.is_empty() || word.len() < behind.len());
    has_numbers.then_some(word)
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct RuntimeConfig(BTreeMap<String, String>);

impl RuntimeConfig {
    /// From `KEY=VALUE` and `KEY`, which is `KEY=true`.
    pub fn parse(pairs: &[String]) -> Self {
        let pair = |pair: &String| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key.trim().to_owned(), value.trim().to_owned())
        };
        Self(pairs.iter().map(pair).collect())
    }

    /// The rows, by group, version and plural, that are not to be served.
    pub fn hidden(
        &self,
        table: &ResourceTable,
        is_default: impl Fn(&Resource) -> bool,
    ) -> Result<Vec<(String, String, String)>, String> {
        self.check(table)?;
        let mut hidden = vec![];
        for row in table.iter().filter(|row| !row.custom) {
            if !self.serves(row, is_default(row))? {
                hidden.push((row.group.clone(), row.version.clone(), row.plural.clone()));
            }
        }
        Ok(hidden)
    }

    fn serves(&self, row: &Resource, is_default: bool) -> Result<bool, String> {
        let mut is_served = is_default;
        for (key, matches) in MATCHERS {
            match self.0.get(*key).map(String::as_str) {
                Some("true") if matches(&row.version) => is_served = true,
                Some("false") if matches(&row.version) => is_served = false,
                None | Some("true" | "false") => {}
                Some(value) => return Err(format!("invalid value {key}={value}")),
            }
        }
        // The core group has no key of its own: without it there is no cluster.
        if row.group.is_empty() {
            return Ok(is_served);
        }
        let version = format!("{}/{}", row.group, row.version);
        for key in [format!("{version}/{}", row.plural), version] {
            if let Some(value) = self.0.get(&key) {
                return parse_bool(&key, value);
            }
        }
        Ok(is_served)
    }

    fn check(&self, table: &ResourceTable) -> Result<(), String> {
        if self.0.len() == 1 && self.0.get(ALL).is_some_and(|value| value == "false") {
            return Err(format!("invalid runtime-config with only {ALL}=false"));
        }
        let mut unknown = vec![];
        for (key, value) in &self.0 {
            if MATCHERS.iter().any(|(name, _)| name == key) || key.starts_with("api/") {
                continue;
            }
            let tokens: Vec<&str> = key.split('/').collect();
            let [group, version, rest @ ..] = tokens.as_slice() else { continue };
            if rest.len() > 1 {
                return Err(format!("invalid key {key}"));
            }
            parse_bool(key, value)?;
            if !table.iter().any(|row| row.group == *group) {
                unknown.push(format!("{group}/{version}"));
            } else if !table.iter().any(|row| row.group == *group && row.version == *version) {
                return Err(format!(
                    "group version {group}/{version} that has not been registered"
                ));
            }
            if let Some(resource) = rest.first().filter(|name| name.to_lowercase() != **name) {
                return Err(format!(
                    "invalid key {key}: group/version/resource and resource is always lowercase plural, not {resource:?}"
                ));
            }
        }
        match unknown.is_empty() {
            true => Ok(()),
            false => Err(format!("unknown api groups {}", unknown.join(","))),
        }
    }
}

fn parse_bool(key: &str, value: &str) -> Result<bool, String> {
    if value.is_empty() {
        return Ok(true);
    }
    crate::verbs::query::parse_bool(value).ok_or_else(|| {
        format!(
            "invalid value of {key}: {value}, err: strconv.ParseBool: parsing {value:?}: invalid syntax"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn hidden(pairs: &str) -> Result<String, String> {
        let pairs: Vec<String> = pairs.split(',').map(str::to_owned).collect();
        let hidden = RuntimeConfig::parse(&pairs).hidden(&testing::table(), |_| true)?;
        let names: Vec<&str> = hidden.iter().map(|(_, _, plural)| plural.as_str()).collect();
        Ok(names.join(" "))
    }

    #[test]
    fn the_narrower_key_wins() {
        let check = |pairs: &str, expected: Result<&str, &str>| {
            let expected = expected.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(hidden(pairs), expected, "{pairs}");
        };
        check("", Ok(""));
        check("apps/v1=false", Ok("deployments"));
        check("apps/v1/deployments=false", Ok("deployments"));
        check("apps/v1=false,apps/v1/deployments=true", Ok(""));
        check("api/ga=false,api/all=true", Ok("configmaps namespaces deployments"));
        check("api/all=false,apps/v1", Ok("configmaps namespaces"));
        check("api/beta=true", Ok(""));
        check("api/all=false", Err("invalid runtime-config with only api/all=false"));
        check("api/beta=maybe", Err("invalid value api/beta=maybe"));
        check("nope/v1=true", Err("unknown api groups nope/v1"));
        check("apps/v9=true", Err("group version apps/v9 that has not been registered"));
        check(
            "apps/v1=x",
            Err(
                "invalid value of apps/v1: x, err: strconv.ParseBool: parsing \"x\": invalid syntax",
            ),
        );
    }

    #[test]
    fn versions_have_stages() {
        for (version, expected) in
            [("v1", Some("")), ("v1beta2", Some("beta")), ("v2alpha1", Some("alpha")), ("x", None)]
        {
            assert_eq!(stage(version), expected, "{version}");
        }
    }
}
