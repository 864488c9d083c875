//! Ownership from one write to the next, as upstream tells it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, Time};
use serde_json::{Value, json};

use super::managed::{ApplyError, Versions, Write};
use super::managers::{conflict_message, scale};
use super::types::{Elements, Field, Key, ListType, MapType, Scalar, Type, TypeRef};
use super::*;
use crate::tree::Tree;

/// A kind with one of each: `metadata` and `spec` are always there; `spec` has scalars, a map, an
/// atomic map, and lists of all sorts. Version `v2` calls `size` what `v1` calls `replicas`.
struct Kind {
    v1: TypeRef,
    v2: TypeRef,
}

fn tree(json: &str) -> Tree<'_> {
    Tree::parse(json.as_bytes()).expect("JSON")
}

fn text() -> TypeRef {
    TypeRef::to(Type::scalar(Scalar::String))
}

fn structure(fields: Vec<(&str, TypeRef)>) -> MapType {
    let field = |(name, of): (&str, TypeRef)| {
        (name.into(), Field { of, always: matches!(name, "metadata" | "spec" | "status") })
    };
    MapType { fields: fields.into_iter().map(field).collect(), ..MapType::default() }
}

fn map(map: MapType) -> TypeRef {
    TypeRef::to(Type { map: Some(map), ..Type::default() })
}

fn map_of(element: TypeRef, atomic: bool) -> TypeRef {
    map(MapType { atomic, fields: BTreeMap::new(), rest: Some(element) })
}

fn list(elements: Elements, element: TypeRef) -> TypeRef {
    TypeRef::to(Type { list: Some(ListType { elements, element }), ..Type::default() })
}

fn key(name: &str, default: Option<Value>) -> Key {
    Key { name: name.into(), default }
}

fn kind(replicas: &str) -> TypeRef {
    let number = || TypeRef::to(Type::scalar(Scalar::Numeric));
    let port = structure(vec![("port", number()), ("protocol", text()), ("name", text())]);
    let item = structure(vec![
        ("name", text()),
        ("value", text()),
        ("args", list(Elements::Atomic, text())),
    ]);
    let spec = structure(vec![
        (replicas, number()),
        ("image", text()),
        ("selector", map_of(text(), true)),
        ("items", list(Elements::Map(vec![key("name", None)]), map(item))),
        (
            "ports",
            list(
                Elements::Map(vec![key("port", None), key("protocol", Some("TCP".into()))]),
                map(port),
            ),
        ),
        ("set", list(Elements::Set, text())),
        ("any", TypeRef::Deduced),
    ]);
    let metadata = structure(vec![
        ("name", text()),
        ("labels", map_of(text(), false)),
        ("annotations", map_of(text(), false)),
    ]);
    map(structure(vec![
        ("apiVersion", text()),
        ("kind", text()),
        ("metadata", map(metadata)),
        ("spec", map(spec)),
        ("status", map(structure(vec![("phase", text())]))),
    ]))
}

impl Versions for Kind {
    fn type_of(&self, api_version: &str) -> TypeRef {
        if api_version == "v2" { self.v2.clone() } else { self.v1.clone() }
    }

    fn convert(&self, tree: &Value, from: &str, to: &str) -> Result<Option<Value>, FieldsError> {
        let name = |version: &str| if version == "v2" { "size" } else { "replicas" };
        if to == "gone" {
            return Ok(None);
        }
        let mut tree = tree.clone();
        tree["apiVersion"] = to.into();
        if let Some(spec) = tree["spec"].as_object_mut()
            && let Some(replicas) = spec.remove(name(from))
        {
            spec.insert(name(to).into(), replicas);
        }
        Ok(Some(tree))
    }

    fn resets(&self) -> Resets {
        Resets::of_subresources("", &[])
    }
}

fn versions() -> Kind {
    Kind { v1: kind("replicas"), v2: kind("size") }
}

fn object(version: &str, spec: Value) -> Value {
    json!({"apiVersion": version, "kind": "Thing", "metadata": {"name": "x"}, "spec": spec})
}

/// One step of a story.
enum Step {
    /// Manager, version, the whole spec.
    Update(&'static str, &'static str, Value),
    /// Manager, version, the applied spec, force.
    Apply(&'static str, &'static str, Value, bool),
}

use Step::{Apply, Update};

/// The object and its entries as time goes by.
#[derive(Default)]
struct Story {
    object: Option<Value>,
    entries: Vec<ManagedFieldsEntry>,
    second: i64,
}

impl Story {
    fn step(&mut self, step: Step) -> Result<(), ApplyError> {
        let kind = versions();
        self.second += 1;
        let (Update(manager, api_version, _) | Apply(manager, api_version, ..)) = &step;
        let now = Time(jiff_at(self.second));
        let write = Write { versions: &kind, api_version, subresource: "", manager, now };
        let there = self.object.as_ref().map(|object| {
            let from = object["apiVersion"].as_str().expect("a version");
            kind.convert(object, from, api_version).expect("converts").expect("is served")
        });
        let live = there.as_ref().map(|there| (there, &self.entries[..]));
        let (after, entries) = match step {
            Update(_, version, spec) => {
                let after = object(version, spec);
                let entries = write.update(live, &after, None)?;
                let texts = (there.as_ref().map(Value::to_string), after.to_string());
                let (was, is) = (texts.0.as_deref().map(tree), tree(&texts.1));
                let was = was.as_ref().map(|was| (was, &self.entries[..]));
                assert_eq!(write.update(was, &is, None).as_ref(), Ok(&entries));
                (after, entries)
            }
            Apply(_, version, spec, force) => {
                let applied = write.apply(live, &object(version, spec), force)?;
                (applied.object, applied.entries)
            }
        };
        (self.object, self.entries) = (Some(after), entries);
        Ok(())
    }
}

fn jiff_at(second: i64) -> jiff::Timestamp {
    jiff::Timestamp::from_second(second).expect("in range")
}

/// Manager, operation, version, the spec's fields, second.
fn shown(entries: &[ManagedFieldsEntry]) -> Value {
    let one = |entry: &ManagedFieldsEntry| {
        let fields = entry.fields_v1.as_ref().map(|fields| fields.0["f:spec"].clone());
        let second = entry.time.as_ref().map(|time| time.0.as_second());
        json!([entry.manager, entry.operation, entry.api_version, fields, second])
    };
    entries.iter().map(one).collect()
}

#[track_caller]
fn check(steps: Vec<Step>, spec: Value, entries: Value) {
    let mut story = Story::default();
    for step in steps {
        story.step(step).expect("no conflict");
    }
    assert_eq!(story.object.expect("there")["spec"], spec);
    assert_eq!(shown(&story.entries), entries);
}

#[test]
fn updates() {
    check(
        vec![
            Update("a", "v1", json!({"image":"i","items":[{"name":"x","value":"1"}]})),
            Update("b", "v1", json!({"image":"j","items":[{"name":"x","value":"1"}]})),
            Update("c", "v1", json!({"image":"j","items":[{"name":"x","value":"1"}]})),
        ],
        json!({"image":"j","items":[{"name":"x","value":"1"}]}),
        json!([
            ["a","Update","v1",{"f:items":{".":{},"k:{\"name\":\"x\"}":{".":{},"f:name":{},"f:value":{}}}},1],
            ["b","Update","v1",{"f:image":{}},2],
        ]),
    );
    // A manager without fields is removed; atomic lists and maps are one field.
    check(
        vec![
            Update("a", "v1", json!({"selector":{"k":"v"},"set":["p","q"]})),
            Update("b", "v1", json!({"selector":{"k":"w"},"set":["q","r"]})),
            Update("b", "v1", json!({"selector":{"k":"w"}})),
        ],
        json!({"selector":{"k":"w"}}),
        json!([["b","Update","v1",{"f:selector":{}},2]]),
    );
}

#[test]
fn applies() {
    // A field that is no longer applied is removed, unless another manager owns it, too.
    check(
        vec![
            Apply(
                "a",
                "v1",
                json!({"image":"i","set":["p","q"],"items":[{"name":"x"},{"name":"y"}]}),
                false,
            ),
            Apply("b", "v1", json!({"set":["q"],"items":[{"name":"y","value":"1"}]}), false),
            Apply("a", "v1", json!({"items":[{"name":"x"}]}), false),
        ],
        json!({"set":["q"],"items":[{"name":"x"},{"name":"y","value":"1"}]}),
        json!([
            ["b","Apply","v1",{"f:items":{"k:{\"name\":\"y\"}":{".":{},"f:name":{},"f:value":{}}},"f:set":{"v:\"q\"":{}}},2],
            ["a","Apply","v1",{"f:items":{"k:{\"name\":\"x\"}":{".":{},"f:name":{}}}},3],
        ]),
    );
    // To own what is there already changes nothing, at no time.
    check(
        vec![
            Apply("a", "v1", json!({"image":"i"}), false),
            Apply("b", "v1", json!({"image":"i"}), false),
        ],
        json!({"image":"i"}),
        json!([["b","Apply","v1",{"f:image":{}},null],["a","Apply","v1",{"f:image":{}},1]]),
    );
    // Force takes; keys have defaults.
    check(
        vec![
            Update("a", "v1", json!({"image":"i","ports":[{"port":80,"protocol":"TCP"}]})),
            Apply("b", "v1", json!({"image":"j","ports":[{"port":80,"name":"http"}]}), true),
        ],
        json!({"image":"j","ports":[{"port":80,"protocol":"TCP","name":"http"}]}),
        json!([
            ["b","Apply","v1",{"f:image":{},"f:ports":{"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:name":{},"f:port":{}}}},2],
            ["a","Update","v1",{"f:ports":{".":{},"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:port":{},"f:protocol":{}}}},1],
        ]),
    );
    // The same manager in another version owns what it owned by another name.
    check(
        vec![
            Apply("a", "v1", json!({"replicas":1,"image":"i"}), false),
            Apply("a", "v2", json!({"size":2}), false),
        ],
        json!({"size":2}),
        json!([["a","Apply","v2",{"f:size":{}},2]]),
    );
}

#[test]
fn conflicts() {
    let mut story = Story::default();
    let start = json!({"image":"i","replicas":1,"items":[{"name":"x","value":"1"}]});
    story.step(Update("kubectl", "v1", start)).expect("an update");
    for (version, spec, expected) in [
        (
            "v1",
            json!({"replicas":2}),
            "Apply failed with 1 conflict: conflict with \"kubectl\" using v1: .spec.replicas",
        ),
        (
            "v2",
            json!({"size":2}),
            "Apply failed with 1 conflict: conflict with \"kubectl\" using v1: .spec.replicas",
        ),
        (
            "v1",
            json!({"image":"j","items":[{"name":"x","value":"2"}]}),
            "Apply failed with 2 conflicts: conflicts with \"kubectl\" using v1:\n- .spec.image\n- .spec.items[name=\"x\"].value",
        ),
    ] {
        match story.step(Apply("b", version, spec, false)) {
            Err(ApplyError::Conflicts(found)) => assert_eq!(conflict_message(&found), expected),
            other => panic!("{other:?} instead of {expected}"),
        }
    }
}

#[test]
fn misfits() {
    for (spec, expected) in [
        (json!({"bogus":1}), ".spec.bogus: field not declared in schema"),
        (json!({"replicas":"many"}), ".spec.replicas: expected numeric (int or float), got string"),
        (json!({"image":1}), ".spec.image: expected string, got &value.valueUnstructured{Value:1}"),
        (
            json!({"items":[{"name":"a"},{"name":"a"}]}),
            ".spec.items: duplicate entries for key [name=\"a\"]",
        ),
        (json!({"set":["a","a"]}), ".spec.set: duplicate entries for key [=\"a\"]"),
        (json!({"items":{}}), ".spec.items: expected list, got &{map[]}"),
        (
            json!({"items":[{"value":"v"}]}),
            ".spec.items: element 0: associative list with keys has an element that omits all key fields [\"name\"] (and doesn't have default values for any key fields)",
        ),
    ] {
        match Story::default().step(Apply("a", "v1", spec, false)) {
            Err(ApplyError::Failed(why)) => assert_eq!(
                why.to_string(),
                format!("failed to create typed patch object (/x; /v1, Kind=Thing): {expected}")
            ),
            other => panic!("{other:?} instead of {expected}"),
        }
    }
}

#[test]
fn ownership_begins_with_the_first_apply_where_it_was_thrown_away() {
    let mut story = Story::default();
    story.step(Update("a", "v1", json!({"image":"i"}))).expect("an update");
    story.entries.clear();
    story.step(Update("a", "v1", json!({"image":"j"}))).expect("an update");
    assert_eq!(story.entries, []);
    story.step(Apply("b", "v1", json!({"replicas":1}), false)).expect("an apply");
    assert_eq!(
        shown(&story.entries),
        json!([
            ["b","Apply","v1",{"f:replicas":{}},3],
            ["before-first-apply","Update","v1",{"f:image":{}},3],
        ])
    );
    let kind = versions();
    let now = Time(jiff_at(9));
    let write = Write { versions: &kind, api_version: "v1", subresource: "", manager: "c", now };
    let (before, after) = (object("v1", json!({})), object("v1", json!({"image":"k"})));
    let stored = &story.entries[..];
    let entry = |operation: &str| ManagedFieldsEntry {
        operation: Some(operation.into()),
        ..ManagedFieldsEntry::default()
    };
    for (sent, count) in [
        (Some(vec![]), 0),
        (Some(vec![ManagedFieldsEntry::default()]), 0),
        (Some(vec![entry("Bogus")]), 2),
        (Some(vec![entry("Update")]), 2),
        (None, 2),
    ] {
        let entries = write.update(Some((&before, stored)), &after, sent.as_deref());
        assert_eq!(entries.expect("never fails").len(), count, "{sent:?}");
    }
}

#[test]
fn client_side_apply_hands_over_to_kubectl() {
    let spec = json!({"image":"i","replicas":1});
    let last = object("v1", json!({"image":"i"}));
    let kind = versions();
    let now = || Time(jiff_at(9));
    let mut live = object("v1", spec);
    live["metadata"]["annotations"] =
        json!({"kubectl.kubernetes.io/last-applied-configuration": last.to_string()});
    let write = |manager| Write {
        versions: &kind,
        api_version: "v1",
        subresource: "",
        manager,
        now: now(),
    };
    let entries = write("kubectl-client-side-apply").update(None, &live, None).expect("a create");
    let applied = object("v1", json!({"image":"j"}));
    let live = (&live, &entries[..]);
    assert!(write("other").apply(Some(live), &applied, false).is_err());
    let done = write("kubectl").apply(Some(live), &applied, false).expect("taken over");
    let annotations = &done.object["metadata"]["annotations"];
    let kept = annotations["kubectl.kubernetes.io/last-applied-configuration"].as_str();
    assert_eq!(kept, Some(format!("{applied}\n").as_str()));
    // What client-side apply did not set is no matter of it.
    let replicas = object("v1", json!({"image":"j","replicas":3}));
    match write("kubectl").apply(Some(live), &replicas, false) {
        Err(ApplyError::Conflicts(left)) => {
            assert_eq!(left.iter().map(|one| one.field()).collect::<Vec<_>>(), [".spec.replicas"]);
        }
        other => panic!("{:?}", other.map(|done| done.object)),
    }
}

#[test]
fn the_oldest_updaters_are_taken_together() {
    let mut story = Story::default();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let mut any = serde_json::Map::new();
    for name in names {
        any.insert(name.into(), 1.into());
        story.step(Update(name, "v1", json!({"any": any.clone()}))).expect("an update");
    }
    let managers: Vec<&str> =
        story.entries.iter().filter_map(|entry| entry.manager.as_deref()).collect();
    assert_eq!(managers, ["ancient-changes", "d", "e", "f", "g", "h", "i", "j", "k", "l"]);
    assert_eq!(story.entries[0].time, Some(Time(jiff_at(3))));
}

#[test]
fn managers_of_versions_that_are_gone_are_too() {
    let mut story = Story::default();
    story.step(Update("a", "v1", json!({"image":"i"}))).expect("an update");
    story.entries[0].api_version = Some("gone".into());
    story.step(Update("b", "v1", json!({"image":"j"}))).expect("an update");
    assert_eq!(shown(&story.entries), json!([["b","Update","v1",{"f:image":{}},2]]));
}

#[test]
fn scales_show_and_change_their_parents_owners() {
    let mut story = Story::default();
    let spec = json!({"replicas":1,"image":"i"});
    story.step(Apply("app", "v1", spec, false)).expect("an apply");
    let path = ["spec", "replicas"];
    let of_scale = scale::from_parent(&story.entries, &path).expect("entries");
    assert_eq!(shown(&of_scale), json!([["app","Apply","autoscaling/v1",{"f:replicas":{}},1]]));
    let same = scale::to_parent(&story.entries, &of_scale, &path, "v1").expect("entries");
    assert_eq!(same, story.entries);
    let mut other = of_scale.clone();
    other[0].manager = Some("hpa".into());
    other[0].operation = Some("Update".into());
    other[0].subresource = Some("scale".into());
    let stolen = scale::to_parent(&story.entries, &other, &path, "v1").expect("entries");
    assert_eq!(
        shown(&stolen),
        json!([
            ["app","Apply","v1",{"f:image":{}},1],
            ["hpa","Update","v1",{"f:replicas":{}},null],
        ])
    );
}
