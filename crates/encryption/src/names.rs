//! Maps a storage key to its resource.
//!
//! `/registry/secrets/default/s` belongs to `secrets`, `/registry/services/specs/default/web` to
//! `services`, `/registry/example.com/crontabs/default/c` to `crontabs.example.com`: built-in kinds are
//! found by the table of their prefixes, custom ones by the group in the key.

use std::collections::HashMap;

const ROOT: &[u8] = b"/registry/";

/// A group and a plural name.
pub type GroupResource = (String, String);

/// Prefixes below `/registry/` of the built-in resources.
#[derive(Clone, Debug, Default)]
pub struct Names(HashMap<String, GroupResource>);

impl Names {
    /// From (prefix, resource) pairs; the first resource of a prefix counts.
    pub fn new(places: impl IntoIterator<Item = (String, GroupResource)>) -> Self {
        let mut all = HashMap::new();
        for (place, resource) in places {
            all.entry(place).or_insert(resource);
        }
        Self(all)
    }

    /// Group and resource of a key; `None` for keys of no object.
    pub fn of<'a>(&'a self, key: &'a [u8]) -> Option<(&'a str, &'a str)> {
        let key = std::str::from_utf8(key.strip_prefix(ROOT)?).ok()?;
        let mut slashes = key.match_indices('/').map(|(at, _)| at);
        let first = slashes.next()?;
        let second = slashes.next();
        let two = second.and_then(|end| self.0.get(&key[..end]));
        if let Some((group, resource)) = two.or_else(|| self.0.get(&key[..first])) {
            return Some((group, resource));
        }
        let group = &key[..first];
        let resource = &key[first + 1..second?];
        group.contains('.').then_some((group, resource))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_belong_to_resources() {
        let place = |place: &str, group: &str, resource: &str| {
            (place.to_owned(), (group.to_owned(), resource.to_owned()))
        };
        let names = Names::new([
            place("secrets", "", "secrets"),
            place("services/specs", "", "services"),
            place("services/endpoints", "", "endpoints"),
            place("deployments", "apps", "deployments"),
            place("events", "", "events"),
            place("events", "events.k8s.io", "events"),
        ]);
        for (key, expected) in [
            ("/registry/secrets/default/s", Some(("", "secrets"))),
            ("/registry/services/specs/default/web", Some(("", "services"))),
            ("/registry/services/endpoints/default/web", Some(("", "endpoints"))),
            ("/registry/deployments/default/web", Some(("apps", "deployments"))),
            ("/registry/events/default/e", Some(("", "events"))),
            ("/registry/example.com/crontabs/default/c", Some(("example.com", "crontabs"))),
            ("/registry/example.com/widgets/w", Some(("example.com", "widgets"))),
            ("/registry/unknown/default/x", None),
            ("/registry/secrets", None),
            ("compact_rev_key", None),
        ] {
            assert_eq!(names.of(key.as_bytes()), expected, "{key}");
        }
    }
}
