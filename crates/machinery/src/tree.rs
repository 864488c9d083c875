//! A JSON text as a tree to be read: names and texts are borrowed from it.
//!
//! In: JSON. Out: a tree like [`serde_json::Value`]'s, of which an object of a hundred fields takes some
//! thirty allocations in place of three hundred: there a map of one field takes 632 bytes, and each name
//! and text is an allocation. Code that changes a tree needs a `Value`.
//!
//! Invariant: the fields of a map are sorted by their names, and no two have the same.

use std::borrow::Cow;
use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Number, Value};

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree<'a> {
    Null,
    Bool(bool),
    Number(Number),
    String(Cow<'a, str>),
    List(Vec<Tree<'a>>),
    Map(Vec<(Cow<'a, str>, Tree<'a>)>),
}

impl<'a> Tree<'a> {
    pub fn parse(json: &'a [u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(json)
    }

    /// A field of a map.
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Map(fields) = self else { return None };
        let at = fields.binary_search_by(|(one, _)| (**one).cmp(name)).ok()?;
        Some(&fields[at].1)
    }

    /// Without the fields that a new object of a Go type has, too: nulls and maps of nothing else, but not those
    /// in items of lists. An empty list that the creator sends is not null: it has an owner.
    pub fn without_unset(mut self) -> Self {
        self.leave_out_unset();
        self
    }

    /// Returns whether anything is left.
    fn leave_out_unset(&mut self) -> bool {
        match self {
            Self::Null => false,
            Self::Map(fields) if !fields.is_empty() => {
                fields.retain_mut(|(_, value)| value.leave_out_unset());
                !fields.is_empty()
            }
            _ => true,
        }
    }

    pub fn to_value(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(is_so) => Value::Bool(*is_so),
            Self::Number(number) => Value::Number(number.clone()),
            Self::String(text) => Value::String(text.to_string()),
            Self::List(items) => items.iter().map(Self::to_value).collect(),
            Self::Map(fields) => {
                fields.iter().map(|(name, value)| (name.to_string(), value.to_value())).collect()
            }
        }
    }
}

/// A name, borrowed where nothing in it is escaped.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for Tree<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Tree<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Tree<'de>, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E>(self, is_so: bool) -> Result<Tree<'de>, E> {
        Ok(Tree::Bool(is_so))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Tree<'de>, E> {
        Ok(Tree::Number(number.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Tree<'de>, E> {
        Ok(Tree::Number(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Tree<'de>, E> {
        Ok(Number::from_f64(number).map_or(Tree::Null, Tree::Number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Tree<'de>, E> {
        Ok(Tree::String(Cow::Owned(text.to_owned())))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Tree<'de>, E> {
        Ok(Tree::String(Cow::Borrowed(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tree<'de>, A::Error> {
        let mut items = vec![];
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Tree::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree<'de>, A::Error> {
        let mut fields: Vec<(Cow<'de, str>, Tree<'de>)> = vec![];
        while let Some((Name(name), value)) = map.next_entry()? {
            fields.push((name, value));
        }
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        // The last of equal names counts: the sort is stable.
        fields.dedup_by(|later, earlier| {
            let is_same = later.0 == earlier.0;
            if is_same {
                std::mem::swap(later, earlier);
            }
            is_same
        });
        Ok(Tree::Map(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_tree_that_serde_json_reads() {
        let check = |json: &str| {
            let tree = Tree::parse(json.as_bytes()).expect("JSON");
            let value: Value = serde_json::from_str(json).expect("JSON");
            assert_eq!(tree.to_value(), value, "{json}");
        };
        check("null");
        check(r#"[1,-1,1.0,1e300,18446744073709551615,-0,-0.0,true,"a\n\u00fc",""]"#);
        check(r#"{"b":{},"a":[{"z":null,"\"x\"":1,"y":"t"}],"":false}"#);
        check(r#"{"a":1,"b":2,"a":3,"c":4,"a":[5]}"#);
        for wrong in ["", "{", "[1,]", "{\"a\":1,}", "nul", "1e999", "\"\\ud800\"", "[] []"] {
            assert!(Tree::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_new_object_has_can_be_left_out() {
        let json = r#"{"a":null,"b":[],"c":{"d":[],"e":{}},"f":[{"g":null}],"h":{"i":null}}"#;
        let tree = Tree::parse(json.as_bytes()).expect("JSON").without_unset();
        assert_eq!(tree.to_value().to_string(), r#"{"b":[],"c":{"d":[],"e":{}},"f":[{"g":null}]}"#);
    }

    #[test]
    fn fields_are_found_by_their_names() {
        let json = r#"{"b":1,"a":"x","ab":null}"#;
        let tree = Tree::parse(json.as_bytes()).expect("JSON");
        assert!(matches!(tree.get("a"), Some(Tree::String(Cow::Borrowed("x")))));
        assert_eq!((tree.get("ab"), tree.get("c")), (Some(&Tree::Null), None));
        assert_eq!(Tree::Null.get("a"), None);
    }
}
