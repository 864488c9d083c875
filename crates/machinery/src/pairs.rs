//! Names with values in one allocation: labels and field values of objects that are kept by the thousand.
//!
//! In: a map. Out: the value of a name, and whether a selector matches. A map of one label takes 600
//! bytes, because its node has room for eleven; this takes what the texts have and eight bytes for a
//! pair. A look-up goes through all of them: they are few.
//!
//! ```text
//! [4 bytes: length of the name][name][4 bytes: length of the value][value] …
//! ```

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// See the module. Invariant: the bytes are whole pairs of UTF-8 texts.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Pairs(Box<[u8]>);

impl Pairs {
    /// The value of a name; the first, if the name occurs twice.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(one, _)| *one == name).map(|(_, value)| value)
    }

    /// In the order in which they were given.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut rest = &*self.0;
        std::iter::from_fn(move || Some((take(&mut rest)?, take(&mut rest)?)))
    }
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let (length, behind) = rest.split_first_chunk()?;
    let (text, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *rest = behind;
    std::str::from_utf8(text).ok()
}

fn put(bytes: &mut Vec<u8>, text: &str) {
    // A text of 4 GiB is none that a request could have brought.
    let length = u32::try_from(text.len()).expect("texts of objects are short");
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

impl<N: AsRef<str>, V: AsRef<str>> FromIterator<(N, V)> for Pairs {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        let mut bytes = Vec::new();
        for (name, value) in pairs {
            put(&mut bytes, name.as_ref());
            put(&mut bytes, value.as_ref());
        }
        Self(bytes.into())
    }
}

impl fmt::Debug for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// From a map, or from null.
impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Map;

        impl<'de> Visitor<'de> for Map {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of texts")
            }

            fn visit_unit<E>(self) -> Result<Pairs, E> {
                Ok(Pairs::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut bytes = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    put(&mut bytes, &name);
                    put(&mut bytes, &value);
                }
                Ok(Pairs(bytes.into()))
            }
        }

        from.deserialize_any(Map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selector::Selector;

    #[test]
    fn what_went_in_comes_out() {
        let check = |json: &str, expected: &[(&str, &str)]| {
            let pairs: Pairs = serde_json::from_str(json).expect("a map");
            assert_eq!(pairs.iter().collect::<Vec<_>>(), expected);
            assert_eq!(expected.iter().copied().collect::<Pairs>(), pairs);
            for (name, value) in expected {
                assert_eq!(pairs.get(name), Some(*value));
            }
            assert_eq!(pairs.get("none"), None);
        };
        check("null", &[]);
        check("{}", &[]);
        check(r#"{"b":"","a":"1","":"ü\u0000"}"#, &[("b", ""), ("a", "1"), ("", "ü\0")]);
        assert!(serde_json::from_str::<Pairs>(r#"{"a":1}"#).is_err());
        assert!(serde_json::from_str::<Pairs>("[]").is_err());
    }

    #[test]
    fn selectors_look_into_them() {
        let labels: Pairs = [("app", "web"), ("tier", "")].into_iter().collect();
        let check = |selector: &str, expected: bool| {
            let selector = Selector::parse_labels(selector).expect("a selector");
            assert_eq!(selector.matches_pairs(&labels), expected);
        };
        check("", true);
        check("app=web,tier", true);
        check("app!=web", false);
        check("!tier", false);
        check("tier=,!other", true);
    }
}
