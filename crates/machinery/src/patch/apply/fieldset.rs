//! Sets of fields, as managers own them.
//!
//! `{"f:spec":{"f:replicas":{},"f:ports":{".":{},"k:{\"port\":80}":{"f:name":{}}}}}` has the members
//! `.spec.replicas`, `.spec.ports` and `.spec.ports[port=80].name`; `.spec` only leads to members.
//!
//! Invariants: nodes are sorted by their elements, no two have the same, and each is a member or
//! leads to one.

use serde_json::{Map, Value};

use super::FieldsError;
use super::path::Element;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Set(Vec<Node>);

#[derive(Clone, Debug, PartialEq)]
struct Node {
    element: Element,
    member: bool,
    below: Set,
}

/// The result of an operation for two nodes of the same element, or for one without a counterpart.
struct Combine {
    /// Keep nodes that only the left, only the right set has?
    left: bool,
    right: bool,
    member: fn(bool, bool) -> bool,
}

impl Set {
    pub const EMPTY: Self = Self(Vec::new());

    /// The set of one path of field names.
    pub fn of_fields(path: &[&str]) -> Self {
        let mut set = Self::EMPTY;
        for (depth, name) in path.iter().rev().enumerate() {
            set =
                Self(vec![Node { element: Element::field(name), member: depth == 0, below: set }]);
        }
        set
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a node behind all others: its element must be greater than theirs.
    pub(super) fn push(&mut self, element: Element, member: bool, below: Self) {
        debug_assert!(self.0.last().is_none_or(|last| last.element < element));
        if member || !below.is_empty() {
            self.0.push(Node { element, member, below });
        }
    }

    /// Adds a node where it belongs.
    pub(super) fn insert(&mut self, element: Element, member: bool, below: Self) {
        if !member && below.is_empty() {
            return;
        }
        match self.find(&element) {
            Ok(at) => {
                let node = &mut self.0[at];
                node.member |= member;
                node.below = std::mem::take(&mut node.below).union(below);
            }
            Err(at) => self.0.insert(at, Node { element, member, below }),
        }
    }

    /// Sorts the nodes. The order of the texts differs from the order of the elements.
    fn sort(&mut self) {
        if self.0.is_sorted_by(|a, b| a.element < b.element) {
            return;
        }
        let mut nodes = std::mem::take(&mut self.0);
        nodes.sort_by(|a, b| a.element.cmp(&b.element));
        for node in nodes {
            match self.0.last_mut().filter(|last| last.element == node.element) {
                Some(last) => {
                    last.member |= node.member;
                    last.below = std::mem::take(&mut last.below).union(node.below);
                }
                None => self.0.push(node),
            }
        }
    }

    fn find(&self, element: &Element) -> Result<usize, usize> {
        self.0.binary_search_by(|node| node.element.cmp(element))
    }

    fn node(&self, element: &Element) -> Option<&Node> {
        self.find(element).ok().map(|at| &self.0[at])
    }

    pub fn has(&self, element: &Element) -> bool {
        self.node(element).is_some_and(|node| node.member)
    }

    pub fn has_path(&self, path: &[Element]) -> bool {
        match path {
            [] => false,
            [last] => self.has(last),
            [first, rest @ ..] => self.below(first).is_some_and(|below| below.has_path(rest)),
        }
    }

    /// The set below an element, if there is one.
    pub fn below(&self, element: &Element) -> Option<&Self> {
        self.node(element).map(|node| &node.below).filter(|below| !below.is_empty())
    }

    /// Element, membership, and the set below.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (&Element, bool, &Self)> {
        self.0.iter().map(|node| (&node.element, node.member, &node.below))
    }

    pub(super) fn into_nodes(self) -> impl Iterator<Item = (Element, bool, Self)> {
        self.0.into_iter().map(|node| (node.element, node.member, node.below))
    }

    pub fn union(self, other: Self) -> Self {
        if self.is_empty() {
            return other;
        }
        self.combine(other, &Combine { left: true, right: true, member: |a, b| a || b })
    }

    pub fn intersection(self, other: &Self) -> Self {
        if self.is_empty() || other.is_empty() {
            return Self::EMPTY;
        }
        self.combine_with(other, &Combine { left: false, right: false, member: |a, b| a && b })
    }

    /// Without the members of the other set; the fields below a member stay.
    pub fn difference(self, other: &Self) -> Self {
        if self.is_empty() || other.is_empty() {
            return self;
        }
        self.combine_with(other, &Combine { left: true, right: false, member: |a, b| a && !b })
    }

    /// Without the members of the other and all that is below them.
    pub fn without(self, other: &Self) -> Self {
        if other.is_empty() {
            return self;
        }
        let keep = |mut node: Node| match other.node(&node.element) {
            Some(gone) if gone.member => None,
            Some(gone) => {
                node.below = node.below.without(&gone.below);
                (node.member || !node.below.is_empty()).then_some(node)
            }
            None => Some(node),
        };
        Self(self.0.into_iter().filter_map(keep).collect())
    }

    fn combine(self, other: Self, rule: &Combine) -> Self {
        let mut out = Vec::with_capacity(self.0.len().max(other.0.len()));
        let mut others = other.0.into_iter().peekable();
        for mut node in self.0 {
            while let Some(first) = others.next_if(|other| other.element < node.element) {
                if rule.right {
                    out.push(first);
                }
            }
            match others.next_if(|other| other.element == node.element) {
                Some(twin) => {
                    node.member = (rule.member)(node.member, twin.member);
                    node.below = node.below.combine(twin.below, rule);
                    out.push(node);
                }
                None if rule.left => out.push(node),
                None => {}
            }
        }
        if rule.right {
            out.extend(others);
        }
        out.retain(|node| node.member || !node.below.is_empty());
        Self(out)
    }

    /// As [`combine`](Self::combine) where nothing of the other is kept.
    fn combine_with(self, other: &Self, rule: &Combine) -> Self {
        let keep = |mut node: Node| {
            match other.node(&node.element) {
                Some(twin) => {
                    node.member = (rule.member)(node.member, twin.member);
                    node.below = node.below.combine_with(&twin.below, rule);
                }
                None if rule.left => {}
                None => return None,
            }
            (node.member || !node.below.is_empty()).then_some(node)
        };
        Self(self.0.into_iter().filter_map(keep).collect())
    }

    /// Keeps the fields of a pattern and their parents; `*` matches any element.
    pub(super) fn only(self, patterns: &[&[&str]]) -> Self {
        if patterns.iter().any(|pattern| pattern.is_empty()) {
            return self;
        }
        let matches = |first: &str, element: &Element| {
            first == "*" || matches!(element, Element::Field(name) if **name == *first)
        };
        let keep = |mut node: Node| {
            let rest: Vec<&[&str]> = patterns
                .iter()
                .filter(|pattern| matches(pattern[0], &node.element))
                .map(|pattern| &pattern[1..])
                .collect();
            if rest.is_empty() {
                return None;
            }
            node.below = node.below.only(&rest);
            (node.member || !node.below.is_empty()).then_some(node)
        };
        Self(self.0.into_iter().filter_map(keep).collect())
    }

    /// All members, parents before children, in upstream's order: members of a level first.
    pub fn paths(&self) -> Vec<Vec<Element>> {
        let mut out = vec![];
        self.collect(&mut vec![], &mut out);
        out
    }

    fn collect(&self, prefix: &mut Vec<Element>, out: &mut Vec<Vec<Element>>) {
        for node in self.0.iter().filter(|node| node.member) {
            let mut path = prefix.clone();
            path.push(node.element.clone());
            out.push(path);
        }
        for node in &self.0 {
            prefix.push(node.element.clone());
            node.below.collect(prefix, out);
            prefix.pop();
        }
    }

    /// The tree of `fieldsV1`.
    pub fn to_fields(&self) -> Value {
        Value::Object(self.fields(false))
    }

    fn fields(&self, with_self: bool) -> Map<String, Value> {
        let mut out = Map::new();
        if with_self && !self.is_empty() {
            out.insert(".".into(), Value::Object(Map::new()));
        }
        let below = self
            .0
            .iter()
            .map(|node| (node.element.text(), Value::Object(node.below.fields(node.member))));
        out.extend(below);
        out
    }

    pub fn from_fields(fields: &Value) -> Result<Self, FieldsError> {
        Ok(Self::read(fields)?.1)
    }

    /// Whether the path itself is a member, and the set below it.
    fn read(fields: &Value) -> Result<(bool, Self), FieldsError> {
        let fields = match fields {
            Value::Object(fields) => fields,
            Value::Null => return Ok((true, Self::EMPTY)),
            other => return Err(FieldsError::NotAnObject(other.clone())),
        };
        let (mut member, mut set) = (false, Self(Vec::with_capacity(fields.len())));
        for (key, value) in fields {
            if key == "." {
                member = true;
                continue;
            }
            let Some(element) = Element::parse(key)? else { continue };
            let (is_member, below) = Self::read(value)?;
            set.0.push(Node { element, member: is_member, below });
        }
        set.sort();
        Ok((member || set.is_empty(), set))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(fields: Value) -> Set {
        Set::from_fields(&fields).expect("a set")
    }

    #[test]
    fn reads_what_it_writes() {
        for fields in [
            json!({}),
            json!({"f:a":{}}),
            json!({"f:a":{".":{},"f:b":{}},"f:c":{"f:d":{}}}),
            json!({"f:l":{"k:{\"name\":\"a\",\"port\":80}":{".":{},"f:x":{}},"v:\"a.b/c\"":{},"v:7":{},"i:3":{}}}),
            json!({"f:odd.name/with\"quotes":{}}),
        ] {
            assert_eq!(set(fields.clone()).to_fields(), fields);
        }
        for (fields, expected) in [
            (json!({"f:a":null}), json!({"f:a":{}})),
            (json!({"x:a":{"f:b":{}}}), json!({})),
            (json!({"k:{\"b\":1,\"a\":2}":{}}), json!({"k:{\"a\":2,\"b\":1}":{}})),
        ] {
            assert_eq!(set(fields).to_fields(), expected);
        }
        for wrong in
            [json!({"f":{}}), json!({"fa":{}}), json!({"v:{":{}}), json!({"k:1":{}}), json!([1])]
        {
            assert!(Set::from_fields(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn operations() {
        let a = || set(json!({"f:a":{".":{},"f:b":{},"f:c":{}},"f:d":{"f:e":{}},"f:z":{}}));
        let b = || set(json!({"f:a":{".":{},"f:b":{}},"f:d":{},"f:y":{}}));
        for (got, expected) in [
            (
                a().union(b()),
                json!({"f:a":{".":{},"f:b":{},"f:c":{}},"f:d":{".":{},"f:e":{}},"f:y":{},"f:z":{}}),
            ),
            (a().intersection(&b()), json!({"f:a":{".":{},"f:b":{}}})),
            (a().difference(&b()), json!({"f:a":{"f:c":{}},"f:d":{"f:e":{}},"f:z":{}})),
            (a().without(&b()), json!({"f:z":{}})),
            (a().only(&[&["a", "b"], &["d"]]), json!({"f:a":{".":{},"f:b":{}},"f:d":{"f:e":{}}})),
            (Set::of_fields(&["a", "b"]), json!({"f:a":{"f:b":{}}})),
        ] {
            assert_eq!(got.to_fields(), expected);
        }
        let texts: Vec<String> =
            a().paths().iter().map(|path| path.iter().map(Element::to_string).collect()).collect();
        assert_eq!(texts, [".a", ".z", ".a.b", ".a.c", ".d.e"]);
    }
}
