//! `--runtime-config`: which groups, versions and resources are served.
//!
//! In: pairs of key and value, the rows, and which of them are served by default. Out: which rows are served.
//! Keys are applied in this order: stages of versions (`api/beta`), versions, resources; the last one
//! counts. Upstream: `resourceconfig.MergeAPIResourceConfigs`.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::ConfigError;
use crate::resource::{Resource, ResourceTable};

const ALL: &str = "api/all";

type Matcher = fn(&str) -> bool;

/// The versions of a key, in the order in which such keys are applied.
const MATCHERS: &[(&str, Matcher)] = &[
    (ALL, |_| true),
    ("api/ga", |version| stage(version) == Some("")),
    ("api/beta", |version| stage(version) == Some("beta")),
    ("api/alpha", |version| stage(version) == Some("alpha")),
];

/// The stage of a version: the text between its two numbers.
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
    /// From `KEY=VALUE` and `KEY`, which means `KEY=true`.
    pub fn parse(pairs: &[String]) -> Self {
        let pair = |pair: &String| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key.trim().to_owned(), value.trim().to_owned())
        };
        Self(pairs.iter().map(pair).collect())
    }

    /// The rows, by group, version and plural, that are not served.
    pub fn hidden(&self, table: &ResourceTable) -> Vec<(String, String, String)> {
        let rows = table.iter().filter(|row| !row.custom && !self.serves(row, true));
        rows.map(|row| (row.group.clone(), row.version.clone(), row.plural.clone())).collect()
    }

    /// Whether the row is served; `is_default` is its default. Pairs that [`check`](Self::check) would refuse
    /// are ignored.
    pub fn serves(&self, row: &Resource, is_default: bool) -> bool {
        let mut is_served = is_default;
        for (key, matches) in MATCHERS {
            match self.0.get(*key).map(String::as_str) {
                Some("true") if matches(&row.version) => is_served = true,
                Some("false") if matches(&row.version) => is_served = false,
                _ => {}
            }
        }
        // The core group has no key: there is no cluster without it.
        if row.group.is_empty() {
            return is_served;
        }
        let version = format!("{}/{}", row.group, row.version);
        let said = |key: &str| parse_bool(key, self.0.get(key)?).ok();
        said(&format!("{version}/{}", row.plural)).or_else(|| said(&version)).unwrap_or(is_served)
    }

    /// Returns an error for invalid pairs, and for unknown groups and versions: `known` has all groups with
    /// their versions, served or not. Upstream: `APIEnablementOptions.Validate`, then
    /// `MergeAPIResourceConfigs`.
    pub fn check(&self, known: &BTreeSet<(String, String)>) -> Result<(), ConfigError> {
        if self.0.len() == 1 && self.0.get(ALL).is_some_and(|value| value == "false") {
            return Err(ConfigError::NothingServed(ALL));
        }
        let named = self.0.iter().filter(|(key, _)| !MATCHERS.iter().any(|(name, _)| name == key));
        let mut unknown = BTreeSet::new();
        for (key, _) in named.clone() {
            let (group, version, _) = parts(key).ok_or_else(|| ConfigError::Key(key.clone()))?;
            if !known.iter().any(|(one, _)| one == group) {
                unknown.insert(format!("{group}/{version}"));
            }
        }
        if !unknown.is_empty() {
            let unknown: Vec<String> = unknown.into_iter().collect();
            return Err(ConfigError::UnknownGroups(unknown.join(",")));
        }
        for (key, _) in MATCHERS {
            match self.0.get(*key).map(String::as_str) {
                None | Some("true" | "false") => {}
                Some(value) => {
                    return Err(ConfigError::Matcher { key, value: value.to_owned() });
                }
            }
        }
        for (key, value) in named {
            let Some((group, version, resource)) = parts(key) else { continue };
            if !known.contains(&(group.to_owned(), version.to_owned())) {
                let (group, version) = (group.to_owned(), version.to_owned());
                return Err(ConfigError::UnknownVersion { group, version });
            }
            parse_bool(key, value)?;
            if resource.to_lowercase() != resource {
                let (key, resource) = (key.clone(), resource.to_owned());
                return Err(ConfigError::Plural { key, resource });
            }
        }
        Ok(())
    }
}

/// `GROUP/VERSION[/RESOURCE]`.
fn parts(key: &str) -> Option<(&str, &str, &str)> {
    match key.split('/').collect::<Vec<_>>()[..] {
        [group, version] => Some((group, version, "")),
        [group, version, resource] => Some((group, version, resource)),
        _ => None,
    }
}

fn parse_bool(key: &str, value: &str) -> Result<bool, ConfigError> {
    if value.is_empty() {
        return Ok(true);
    }
    let (key, text) = (key.to_owned(), value.to_owned());
    crate::query::parse_bool(value).ok_or(ConfigError::Boolean { key, value: text })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing;

    fn config(pairs: &str) -> RuntimeConfig {
        let pairs: Vec<String> = pairs.split(',').map(str::to_owned).collect();
        RuntimeConfig::parse(if pairs == [""] { &[] } else { &pairs })
    }

    #[test]
    fn the_more_specific_key_wins() {
        let check = |pairs: &str, expected: &str| {
            let hidden = config(pairs).hidden(&testing::table());
            let names: Vec<&str> = hidden.iter().map(|(_, _, plural)| plural.as_str()).collect();
            assert_eq!(names.join(" "), expected, "{pairs}");
        };
        check("", "");
        check("apps/v1=false", "deployments");
        check("apps/v1/deployments=false", "deployments");
        check("apps/v1=false,apps/v1/deployments=true", "");
        check("api/ga=false,api/all=true", "configmaps namespaces deployments");
        check("api/all=false,apps/v1", "configmaps namespaces");
        check("api/beta=true", "");
    }

    #[test]
    fn versions_off_by_default_are_served_on_request() {
        let check = |pairs: &str, version: &str, expected: bool| {
            let row = testing::table().get("apps", "v1", "deployments").cloned().expect("a row");
            let mut row = Arc::into_inner(row).expect("nobody else has it");
            row.version = version.into();
            assert_eq!(config(pairs).serves(&row, false), expected, "{pairs} {version}");
        };
        for version in ["v1alpha1", "v1beta1"] {
            check("", version, false);
            check("api/all=true", version, true);
            check("api/ga=true", version, false);
            check("api/all=true,api/alpha=false", version, version == "v1beta1");
            check("api/beta=true", version, version == "v1beta1");
            check("api/alpha=true", version, version == "v1alpha1");
            check("apps/v1beta1=true", version, version == "v1beta1");
            check("apps/v1alpha1/deployments", version, version == "v1alpha1");
            check("apps/v1alpha1/others", version, false);
            check("api/all=true,apps/v1beta1/deployments=false", version, version == "v1alpha1");
        }
    }

    #[test]
    fn errors_are_upstreams() {
        let known: BTreeSet<(String, String)> =
            [("apps".into(), "v1".into()), ("apps".into(), "v1beta1".into())].into();
        let check = |pairs: &str, expected: Result<(), &str>| {
            let expected = expected.map_err(str::to_owned);
            let found = config(pairs).check(&known).map_err(|why| why.to_string());
            assert_eq!(found, expected, "{pairs}");
        };
        check("", Ok(()));
        check("api/all=false,apps/v1,apps/v1beta1/deployments=true", Ok(()));
        check("api/all=false", Err("invalid runtime-config with only api/all=false"));
        check("api/beta=maybe", Err("invalid value api/beta=maybe"));
        check("v1=true", Err("runtime-config invalid key v1"));
        check("a/b/c/d=true", Err("runtime-config invalid key a/b/c/d"));
        check("zz/v1=true,api/legacy=true", Err("unknown api groups api/legacy,zz/v1"));
        check("apps/v9=true", Err("group version apps/v9 that has not been registered"));
        check(
            "apps/v1/Deployments",
            Err(
                "invalid key apps/v1/Deployments: group/version/resource and resource is always lowercase plural, not \"Deployments\"",
            ),
        );
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
