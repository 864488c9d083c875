//! The types of built-in kinds for server-side apply and managedFields.
//!
//! In: the field facts (how lists and maps are owned) and, from `facts/protobuf.tsv`, the types of scalars and
//! the fields that Go always writes. Out: a [`Type`] per definition, built at the first write of an
//! object and kept. Definitions share the types of their fields.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Mutex};

use machinery::patch::Topology;
use machinery::patch::apply::Resets;
use machinery::patch::apply::types::{
    Elements, Field, Key, ListType, MapType, Scalar, Type, TypeRef,
};

use crate::facts::{self, Definition, OPAQUE};

static MESSAGES: &str = include_str!("../facts/protobuf.tsv");

/// Types that are structs in Go and scalars on the wire: `lastProbeTime: null`.
const STRUCTS: &[&str] = &["time", "microtime", "quantity", "intstr"];

/// Definitions without fields that are scalars. All other definitions without fields are free-form
/// objects, such as `subresources.status` of a CustomResourceDefinition.
const SCALARS: &[&str] = &[
    "io.k8s.apimachinery.pkg.api.resource.Quantity",
    "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime",
    "io.k8s.apimachinery.pkg.apis.meta.v1.Time",
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString",
];

/// The lock is held for look-ups and inserts. Types are built without it.
static KNOWN: LazyLock<Mutex<HashMap<&'static str, Arc<Type>>>> = LazyLock::new(Mutex::default);

/// The type of a definition, as `io.k8s.api.core.v1.Pod`.
pub fn of(definition: &str) -> Option<Arc<Type>> {
    if let Some(known) = KNOWN.lock().expect("no panic under the lock").get(definition) {
        return Some(known.clone());
    }
    let definition = facts::definition(definition)?;
    let made = Arc::new(structure(definition));
    let mut known = KNOWN.lock().expect("no panic under the lock");
    Some(known.entry(definition.name).or_insert(made).clone())
}

fn structure(definition: Definition) -> Type {
    let message = Message::of(definition.name);
    let field = |field: facts::Field| {
        let column = message.as_ref().and_then(|message| message.field(field.name));
        let (type_name, flags) = column.unwrap_or_default();
        let is_repeated = type_name.starts_with("[]") || type_name.starts_with("{}");
        // Go writes structs even with `omitempty`; it writes lists, maps and scalars only
        // without it.
        let is_named = type_name.contains(|c: char| c.is_ascii_uppercase()) && !is_repeated;
        let is_struct = is_named || STRUCTS.contains(&type_name);
        let may_go = flags.contains(['*', '0']) || flags.contains('?') && !is_struct;
        let always = column.is_some() && !may_go;
        let of = field_type(definition.name, field, type_name);
        (field.name.into(), Field { of, always })
    };
    let fields: BTreeMap<Box<str>, Field> = definition.fields().map(field).collect();
    let atomic = definition.map_type == "atomic";
    let rest = fields.is_empty().then_some(TypeRef::Deduced);
    Type { map: Some(MapType { atomic, fields, rest }), ..Type::default() }
}

fn field_type(definition: &str, field: facts::Field, type_name: &str) -> TypeRef {
    let facts = facts::facts(definition, field.name).unwrap_or_default();
    let scalar_name = type_name.trim_start_matches(['[', ']', '{', '}']);
    let element = match (&facts.definition, field.definition) {
        _ if OPAQUE.contains(&field.definition) => TypeRef::Untyped,
        (Some(name), _) => of(name).map_or(TypeRef::Untyped, TypeRef::To),
        (None, "") => TypeRef::to(Type::scalar(scalar(scalar_name))),
        (None, name) if SCALARS.contains(&name) => TypeRef::to(Type::scalar(Scalar::Untyped)),
        (None, name) => of(name).map_or(TypeRef::Untyped, TypeRef::To),
    };
    match (field.shape, facts.topology) {
        ("[]", topology) => {
            let elements = match topology {
                Some(Topology::Set) => Elements::Set,
                Some(Topology::Map) => Elements::Map(
                    facts
                        .map_keys
                        .into_iter()
                        .map(|(name, default)| {
                            let default = default.or_else(|| zero_key(field.definition, &name));
                            Key { name: name.into(), default }
                        })
                        .collect(),
                ),
                _ => Elements::Atomic,
            };
            TypeRef::to(Type { list: Some(ListType { elements, element }), ..Type::default() })
        }
        ("{}", topology) => TypeRef::to(Type {
            map: Some(MapType {
                atomic: topology == Some(Topology::Atomic),
                fields: BTreeMap::new(),
                rest: Some(in_map(element, type_name)),
            }),
            ..Type::default()
        }),
        // A struct whose ownership (atomic or granular) differs at this field.
        (_, Some(topology)) if !field.list_type.is_empty() => {
            let mut own = element.get().clone();
            if let Some(map) = &mut own.map {
                map.atomic = topology == Topology::Atomic;
            }
            TypeRef::to(own)
        }
        _ => element,
    }
}

/// Fields that Go always writes default to empty, also as keys.
fn zero_key(definition: &str, key: &str) -> Option<serde_json::Value> {
    match Message::of(definition)?.field(key)? {
        ("string", "") => Some("".into()),
        ("int32" | "int64", "") => Some(0.into()),
        _ => None,
    }
}

/// The type of a map's values: strings, or lists of strings.
fn in_map(element: TypeRef, type_name: &str) -> TypeRef {
    if type_name != "{}strings" {
        return element;
    }
    let element = TypeRef::to(Type::scalar(Scalar::String));
    let list = ListType { elements: Elements::Atomic, element };
    TypeRef::to(Type { list: Some(list), ..Type::default() })
}

fn scalar(name: &str) -> Scalar {
    match name {
        "string" | "bytes" => Scalar::String,
        "bool" => Scalar::Boolean,
        "int32" | "int64" | "double" => Scalar::Numeric,
        _ => Scalar::Untyped,
    }
}

/// The lines of one message.
struct Message(&'static str);

impl Message {
    /// `io.k8s.api.core.v1.Pod` is the message `Pod` of `core.v1`.
    fn of(definition: &str) -> Option<Self> {
        let mut parts = definition.rsplit('.');
        let (name, version, group) = (parts.next()?, parts.next()?, parts.next()?);
        let package = format!("\n@{group}.{version}\t");
        let lines = &MESSAGES[MESSAGES.find(&package)? + 1..];
        let end = lines.find("\n@").map_or(lines.len(), |at| at + 1);
        let lines = &lines[..end];
        let head = [format!("\n{name}\n"), format!("\n{name}\t")];
        let at = head.iter().find_map(|head| lines.find(&**head))?;
        let below = lines[at + 1..].split_once('\n')?.1;
        let end = below
            .lines()
            .take_while(|line| line.starts_with('\t'))
            .map(|line| line.len() + 1)
            .sum::<usize>();
        Some(Self(&below[..end.min(below.len())]))
    }

    /// The type and the flags of a field: `*` is a pointer, `?` is left out when empty.
    fn field(&self, name: &str) -> Option<(&'static str, &'static str)> {
        self.0.lines().find_map(|line| {
            let mut columns = line.split('\t').skip(2);
            (columns.next() == Some(name))
                .then(|| (columns.next().unwrap_or_default(), columns.next().unwrap_or_default()))
        })
    }
}

/// Definitions with unusual reset fields: definition without its version, subresource, fields that a
/// write leaves unchanged. Upstream: `GetResetFields`.
const RESETS: &[(&str, &str, Resets)] = &[
    (
        "core.Pod",
        "status",
        excluded(&[
            &["spec"],
            &["metadata", "deletionTimestamp"],
            &["metadata", "ownerReferences"],
        ]),
    ),
    ("core.Pod", "ephemeralcontainers", only(&[&["spec", "ephemeralContainers"]])),
    (
        "core.Pod",
        "resize",
        only(&[
            &["spec", "containers", "*", "resources"],
            &["spec", "containers", "*", "resizePolicy"],
            &["spec", "initContainers", "*", "resources"],
            &["spec", "initContainers", "*", "resizePolicy"],
        ]),
    ),
    ("core.Namespace", "finalize", excluded(&[&["status"]])),
    ("apps.Deployment", "status", excluded(&[&["spec"], &["metadata", "labels"]])),
    ("certificates.CertificateSigningRequest", "", excluded(&[&["spec"], &["status"]])),
    (
        "certificates.CertificateSigningRequest",
        "status",
        excluded(&[&["spec"], &["status", "conditions"]]),
    ),
    (
        "certificates.CertificateSigningRequest",
        "approval",
        excluded(&[&["spec"], &["status", "certificate"]]),
    ),
    ("admissionregistration.ValidatingAdmissionPolicy", "status", METADATA_TOO),
    ("apiregistration.APIService", "status", METADATA_TOO),
    ("apiserverinternal.StorageVersion", "status", METADATA_TOO),
    ("flowcontrol.FlowSchema", "status", METADATA_TOO),
    ("flowcontrol.PriorityLevelConfiguration", "status", METADATA_TOO),
    ("networking.ServiceCIDR", "status", METADATA_TOO),
    ("resource.DeviceTaintRule", "status", METADATA_TOO),
    ("resource.ResourceClaim", "status", METADATA_TOO),
    ("resource.ResourcePoolStatusRequest", "status", METADATA_TOO),
    ("scheduling.PodGroup", "status", METADATA_TOO),
    ("storage.VolumeAttachment", "status", METADATA_TOO),
    ("storagemigration.StorageVersionMigration", "status", METADATA_TOO),
];

const METADATA_TOO: Resets = excluded(&[&["metadata"], &["spec"]]);

const fn excluded(excluded: &'static [&'static [&'static str]]) -> Resets {
    Resets { excluded, only: &[] }
}

const fn only(only: &'static [&'static [&'static str]]) -> Resets {
    Resets { excluded: &[], only }
}

/// The fields that writes to a kind, or to a subresource, leave unchanged.
pub fn resets(definition: &str, subresource: &str) -> Resets {
    let mut parts = definition.rsplit('.');
    let (name, _, group) = (parts.next(), parts.next(), parts.next());
    let wanted = format!("{}.{}", group.unwrap_or_default(), name.unwrap_or_default());
    RESETS
        .iter()
        .find(|(kind, of, _)| *kind == wanted && *of == subresource)
        .map_or_else(|| Resets::of_subresources(subresource, &[&["spec"]]), |(.., resets)| *resets)
}

#[cfg(test)]
mod tests {
    use machinery::patch::apply::Comparison;
    use serde_json::{Value, json};

    use super::*;

    fn owned(definition: &str, object: Value) -> Value {
        let of = of(definition).expect("known");
        let changes = Comparison::of(&json!({}), &object, &of);
        changes.added.union(changes.modified).to_fields()
    }

    #[test]
    fn creators_own_what_go_would_not_have() {
        for (definition, object, expected) in [
            (
                "io.k8s.api.core.v1.ConfigMap",
                json!({"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x","labels":{"a":"b"}},"data":{"k":"v"},"binaryData":{}}),
                json!({"f:apiVersion":{},"f:kind":{},"f:metadata":{"f:name":{},"f:labels":{".":{},"f:a":{}}},"f:data":{".":{},"f:k":{}},"f:binaryData":{}}),
            ),
            (
                "io.k8s.api.apps.v1.Deployment",
                json!({"spec":{"replicas":1,"selector":{"matchLabels":{"a":"b"}},"strategy":{"type":"RollingUpdate","rollingUpdate":{"maxSurge":"25%"}},
                    "template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[
                        {"name":"c","image":"i","resources":{},"ports":[{"containerPort":80}]}],"nodeSelector":{"x":"y"}}}}}),
                json!({"f:spec":{"f:replicas":{},"f:selector":{},"f:strategy":{"f:type":{},"f:rollingUpdate":{".":{},"f:maxSurge":{}}},
                    "f:template":{"f:metadata":{"f:labels":{".":{},"f:a":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"c\"}":{
                        ".":{},"f:name":{},"f:image":{},"f:resources":{},"f:ports":{".":{},"k:{\"containerPort\":80,\"protocol\":\"TCP\"}":{".":{},"f:containerPort":{}}}}},
                        "f:nodeSelector":{}}}}}),
            ),
            (
                "io.k8s.api.rbac.v1.Role",
                json!({"rules":[{"verbs":["get"]}]}),
                json!({"f:rules":{}}),
            ),
        ] {
            assert_eq!(owned(definition, object), expected, "{definition}");
        }
    }

    /// A new element as Go writes it. Its writer owns its empty fields, too.
    #[test]
    fn new_elements_have_all_that_go_writes() {
        let check = |before: Value, after: Value, added: Value, removed: Value| {
            let of = of("io.k8s.api.core.v1.Pod").expect("known");
            let changes = Comparison::of(&before, &after, &of);
            assert_eq!(changes.modified.to_fields(), json!({}));
            assert_eq!(changes.added.to_fields(), added);
            assert_eq!(changes.removed.to_fields(), removed);
        };
        let one = json!({"spec": {"containers": [{"name": "a"}]}});
        let two = json!({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
        let b = json!({"f:spec": {"f:containers": {"k:{\"name\":\"b\"}":
            {".": {}, "f:name": {}, "f:resources": {}}}}});
        check(one.clone(), two.clone(), b.clone(), json!({}));
        check(two, one.clone(), json!({}), b);
        // A field that stays empty has no owner.
        let mut set = one.clone();
        set["spec"]["containers"][0]["resources"] = json!({});
        check(one, set, json!({}), json!({}));
        check(
            json!({"status": {"phase": "Pending"}}),
            json!({"status": {"phase": "Pending", "conditions": [{"type": "Ready", "status": "True"}]}}),
            json!({"f:status": {"f:conditions": {".": {}, "k:{\"type\":\"Ready\"}": {".": {},
                "f:lastProbeTime": {}, "f:lastTransitionTime": {}, "f:status": {}, "f:type": {}}}}}),
            json!({}),
        );
        // A struct that is never empty, and one in it.
        check(
            json!({"spec": {"volumes": [{"name": "v"}]}}),
            json!({"spec": {"volumes": [{"name": "v", "ephemeral": {"volumeClaimTemplate": {}}}]}}),
            json!({"f:spec": {"f:volumes": {"k:{\"name\":\"v\"}": {"f:ephemeral": {".": {},
                "f:volumeClaimTemplate": {".": {}, "f:metadata": {},
                    "f:spec": {".": {}, "f:resources": {}}}}}}}}),
            json!({}),
        );
    }

    #[test]
    fn every_kind_has_a_type() {
        let schema = facts::Facts;
        let known = machinery::patch::Schema::type_of(&schema, "io.k8s.api.core.v1.Pod");
        assert!(known.is_some_and(|of| of.map.is_some()));
        for name in [
            "io.k8s.api.core.v1.Pod",
            "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
            "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition",
        ] {
            let of = of(name).expect("known");
            let map = of.map.as_ref().expect("a struct");
            assert!(!map.atomic && map.rest.is_none() && !map.fields.is_empty(), "{name}");
        }
        assert!(of("io.k8s.api.core.v1.Zebra").is_none());
    }

    /// Upstream: `schemaconv.parseObject`, where an object without properties is a free-form one.
    #[test]
    fn objects_without_properties_are_maps() {
        const CRD: &str =
            "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceSubresources";
        let map = |of: &Type| of.map.clone().expect("a map");
        let subresources = map(&of(CRD).expect("known"));
        let status = subresources.fields["status"].of.get();
        assert_eq!(status.scalar, None);
        assert_eq!(map(status).rest, Some(TypeRef::Deduced));
        // Every field of every definition: a scalar is one on the wire as well.
        let mut seen = 0;
        for definition in facts::definitions() {
            for field in definition.fields().filter(|field| field.shape.is_empty()) {
                let target = facts::definition(field.definition);
                let Some(target) = target.filter(|target| target.fields().next().is_none()) else {
                    continue;
                };
                seen += 1;
                let of = map(&of(definition.name).expect("known")).fields[field.name].of.clone();
                let is_scalar = SCALARS.contains(&target.name);
                assert_eq!(of.get().map.is_none(), is_scalar, "{} {}", definition.name, field.name);
            }
        }
        assert!(seen > 100, "{seen}");
    }

    /// A misspelt kind or field would have no effect.
    #[test]
    fn the_table_of_resets_names_fields_that_there_are() {
        for (kind, _, resets) in RESETS {
            let (group, name) = kind.split_once('.').expect("a group and a kind");
            let is_kind = |one: &Definition| {
                let mut parts = one.name.rsplit('.');
                (parts.next(), parts.nth(1)) == (Some(name), Some(group))
            };
            let of: Vec<Definition> = facts::definitions().filter(is_kind).collect();
            assert!(!of.is_empty(), "{kind}");
            for path in resets.excluded.iter().chain(resets.only) {
                let is_there = |one: &Definition| {
                    path.iter().filter(|step| **step != "*").try_fold(*one, |one, step| {
                        let field = one.field(step)?;
                        Some(facts::definition(field.definition).unwrap_or(one))
                    })
                };
                assert!(of.iter().any(|one| is_there(one).is_some()), "{kind}: {path:?}");
            }
        }
    }

    #[test]
    fn writes_leave_what_the_table_says() {
        assert_eq!(resets("io.k8s.api.core.v1.Service", "status").excluded, [&["spec"]]);
        assert_eq!(resets("io.k8s.api.core.v1.Service", "").excluded, [&["status"]]);
        assert_eq!(resets("io.k8s.api.resource.v1.ResourceClaim", "status").excluded.len(), 2);
    }
}
