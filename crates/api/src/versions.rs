//! Further versions of built-in kinds, which are served only if `--runtime-config` enables them.
//!
//! In: a table. Out: a [`Version`] with its codec, and objects of it: each is the stored version's
//! object under another name, so that no kind has a second Rust type. Where the versions' fields
//! differ, they do by a box around some of them ([`BOXES`]).
//!
//! Invariant: an object that goes to another version and back is what it was.

use std::sync::Arc;

use machinery::object::{Codec, DecodeError, Decoded, Unstructured};
use machinery::protobuf::{MessageId, Unsettled};
use machinery::{Object, ObjectMeta};
use serde_json::{Map, Value};

use crate::{facts, kinds, protobuf};

/// Kinds that are served in a version, and stored in another.
pub struct Family {
    /// `resource.k8s.io/v1beta1`.
    pub api_version: &'static str,
    /// The stored version.
    pub stored: &'static str,
    pub kinds: &'static [&'static str],
    /// The deprecation warning behind version and kind; empty if the version is not deprecated.
    deprecation: &'static str,
}

const fn family(
    api_version: &'static str,
    stored: &'static str,
    kinds: &'static [&'static str],
    deprecation: &'static str,
) -> Family {
    Family { api_version, stored, kinds, deprecation }
}

const POLICIES: &[&str] = &["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"];
const DEVICES: &[&str] =
    &["DeviceClass", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice"];

/// All that this release has; none is served by default.
pub const FAMILIES: &[Family] = &[
    family(
        "admissionregistration.k8s.io/v1alpha1",
        "admissionregistration.k8s.io/v1",
        POLICIES,
        "is deprecated in v1.35+, unavailable in v1.38+",
    ),
    family("admissionregistration.k8s.io/v1beta1", "admissionregistration.k8s.io/v1", POLICIES, ""),
    family(
        "certificates.k8s.io/v1alpha1",
        "certificates.k8s.io/v1beta1",
        &["ClusterTrustBundle"],
        "is deprecated in v1.34+, unavailable in v1.37+",
    ),
    family(
        "coordination.k8s.io/v1alpha2",
        "coordination.k8s.io/v1beta1",
        &["LeaseCandidate"],
        "is deprecated in v1.35+, unavailable in v1.38+",
    ),
    family(
        "networking.k8s.io/v1beta1",
        "networking.k8s.io/v1",
        &["IPAddress", "ServiceCIDR"],
        "is deprecated in v1.34+, unavailable in v1.37+",
    ),
    family(
        "resource.k8s.io/v1beta1",
        "resource.k8s.io/v1",
        DEVICES,
        "is deprecated in v1.35+, unavailable in v1.38+",
    ),
    family(
        "resource.k8s.io/v1beta2",
        "resource.k8s.io/v1",
        DEVICES,
        "is deprecated in v1.36+, unavailable in v1.39+",
    ),
    family("resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3", &["DeviceTaintRule"], ""),
    family(
        "storage.k8s.io/v1beta1",
        "storage.k8s.io/v1",
        &["VolumeAttributesClass"],
        "is deprecated in v1.34+, unavailable in v1.37+; use storage.k8s.io/v1 VolumeAttributesClass",
    ),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToStored,
    ToServed,
}

/// Elements of a list that one of two versions has flat, and the other with most fields in a box.
struct Boxed {
    api_version: &'static str,
    kind: &'static str,
    list: &'static str,
    /// The field that holds the others, and in which direction they go into it.
    field: &'static str,
    into: Way,
    /// Fields that stay outside.
    outside: &'static [&'static str],
    /// Is there a box even if nothing is in it?
    always: bool,
}

const V1BETA1: &str = "resource.k8s.io/v1beta1";

const BOXES: &[Boxed] = &[
    Boxed {
        api_version: V1BETA1,
        kind: "ResourceClaim",
        list: "/spec/devices/requests",
        field: "exactly",
        into: Way::ToStored,
        outside: &["name", "firstAvailable"],
        always: false,
    },
    Boxed {
        api_version: V1BETA1,
        kind: "ResourceClaimTemplate",
        list: "/spec/spec/devices/requests",
        field: "exactly",
        into: Way::ToStored,
        outside: &["name", "firstAvailable"],
        always: false,
    },
    Boxed {
        api_version: V1BETA1,
        kind: "ResourceSlice",
        list: "/spec/devices",
        field: "basic",
        into: Way::ToServed,
        outside: &["name"],
        always: true,
    },
];

/// A kind in one of the versions of [`FAMILIES`].
#[derive(Clone, Copy)]
pub struct Version {
    family: &'static Family,
    pub kind: &'static str,
}

/// The further versions of all kinds.
pub fn all() -> impl Iterator<Item = Version> {
    FAMILIES.iter().flat_map(|family| family.kinds.iter().map(|kind| Version { family, kind }))
}

pub fn find(api_version: &str, kind: &str) -> Option<Version> {
    all().find(|one| one.family.api_version == api_version && one.kind == kind)
}

impl Version {
    pub fn group(self) -> &'static str {
        self.family.api_version.split_once('/').map_or("", |(group, _)| group)
    }

    /// `v1beta1`.
    pub fn version(self) -> &'static str {
        self.family.api_version.split_once('/').map_or("", |(_, version)| version)
    }

    pub fn api_version(self) -> &'static str {
        self.family.api_version
    }

    /// The version that is stored, with its group.
    pub fn stored(self) -> &'static str {
        self.family.stored
    }

    /// Upstream's deprecation warning.
    pub fn deprecation(self) -> Option<String> {
        let Family { api_version, deprecation, .. } = self.family;
        (!deprecation.is_empty()).then(|| format!("{api_version} {} {deprecation}", self.kind))
    }

    pub fn codec(self) -> Option<Arc<dyn Codec>> {
        let stored = kinds::codec(self.family.stored, self.kind)?;
        Some(Arc::new(Renaming { version: self, stored }))
    }

    /// An object of the stored version as one of this.
    pub fn show(self, stored: Box<dyn Object>) -> Box<dyn Object> {
        Box::new(Renamed { version: self, stored })
    }

    fn box_of(self) -> Option<&'static Boxed> {
        BOXES.iter().find(|one| one.api_version == self.api_version() && one.kind == self.kind)
    }

    fn message(self) -> Option<MessageId> {
        protobuf::descriptors().kind(self.api_version(), self.kind)
    }

    fn reshape(self, tree: &mut Value, way: Way) {
        let Some(one) = self.box_of() else { return };
        let Some(Value::Array(list)) = tree.pointer_mut(one.list) else { return };
        for element in list.iter_mut().filter_map(Value::as_object_mut) {
            if way == one.into {
                fill(one, element);
            } else if let Some(Value::Object(inner)) = element.remove(one.field) {
                element.extend(inner);
            }
        }
    }
}

/// Puts the fields into the box.
fn fill(one: &Boxed, element: &mut Map<String, Value>) {
    let (outer, inner): (Map<_, _>, Map<_, _>) =
        std::mem::take(element).into_iter().partition(|(name, _)| one.outside.contains(&&**name));
    *element = outer;
    if one.always || inner.values().any(|value| !is_zero(value)) {
        element.insert(one.field.into(), inner.into());
    }
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_i64() == Some(0),
        Value::Array(list) => list.is_empty(),
        Value::Bool(_) | Value::Object(_) => false,
    }
}

/// An object of the stored version, shown in another.
struct Renamed {
    version: Version,
    stored: Box<dyn Object>,
}

/// Converts the object to the stored version; an object of the stored version is returned unchanged.
pub fn stored(object: Box<dyn Object>) -> Box<dyn Object> {
    object.downcast::<Renamed>().map_or_else(|| object.boxed_clone(), |one| one.stored.clone())
}

impl Object for Renamed {
    fn api_version(&self) -> &str {
        self.version.api_version()
    }

    fn kind(&self) -> &str {
        self.stored.kind()
    }

    fn meta(&self) -> &ObjectMeta {
        self.stored.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.stored.meta_mut()
    }

    fn to_value(&self) -> Value {
        let mut tree = self.stored.to_value();
        self.version.reshape(&mut tree, Way::ToServed);
        tree["apiVersion"] = self.version.api_version().into();
        tree
    }

    fn encode(&self) -> Vec<u8> {
        let json = self.stored.encode();
        let head = format!("{{\"apiVersion\":\"{}\"", self.version.stored());
        match json.strip_prefix(head.as_bytes()).filter(|_| self.version.box_of().is_none()) {
            Some(rest) => {
                let mut out =
                    format!("{{\"apiVersion\":\"{}\"", self.version.api_version()).into_bytes();
                out.extend_from_slice(rest);
                out
            }
            None => Unstructured::from_value(self.to_value())
                .expect("an object's tree is an object")
                .encode(),
        }
    }

    fn boxed_clone(&self) -> Box<dyn Object> {
        self.version.show(self.stored.clone())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
        self
    }
}

/// Reads a version by way of the stored one.
struct Renaming {
    version: Version,
    stored: Arc<dyn Codec>,
}

impl Codec for Renaming {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        let settled = self.version.message().map(|one| protobuf::descriptors().settle(one, json));
        match settled {
            Some(Ok(settled)) => self.renamed(serde_json::from_slice(&settled)?),
            None | Some(Err(Unsettled::Malformed)) => self.renamed(serde_json::from_slice(json)?),
            Some(Err(Unsettled::Value(why))) => Err(DecodeError(why)),
        }
    }

    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        self.decode(&serde_json::to_vec(&value).map_err(DecodeError::from)?)
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        Ok(self.renamed(serde_json::from_slice(json)?)?.object)
    }

    fn empty(&self) -> Box<dyn Object> {
        self.version.show(self.stored.empty())
    }

    fn settle(&self, json: Vec<u8>) -> Vec<u8> {
        let Some(message) = self.version.message() else { return json };
        protobuf::descriptors().settle(message, &json).unwrap_or(json)
    }
}

impl Renaming {
    fn renamed(&self, mut tree: Value) -> Result<Decoded, DecodeError> {
        let version = self.version;
        let mut unknown = vec![];
        if version.box_of().is_some() {
            // A field that is unknown in this version may be known in the other.
            let name = facts::definition_name(version.group(), version.version(), version.kind);
            prune(name.unwrap_or_default(), &mut tree, "", &mut unknown);
            version.reshape(&mut tree, Way::ToStored);
        }
        if let Some(fields) = tree.as_object_mut() {
            fields.insert("apiVersion".into(), version.stored().into());
        }
        let Decoded { object, unknown_fields } = self.stored.decode_value(tree)?;
        unknown.extend(unknown_fields);
        Ok(Decoded { object: version.show(object), unknown_fields: unknown })
    }
}

/// Takes out the fields that a definition does not have, and notes their paths.
fn prune(name: &str, value: &mut Value, path: &str, unknown: &mut Vec<String>) {
    let Some(definition) = facts::definition(name).filter(|one| one.fields().next().is_some())
    else {
        return;
    };
    let Value::Object(fields) = value else { return };
    let below = |name: &str| if path.is_empty() { name.into() } else { format!("{path}.{name}") };
    fields.retain(|name, value| {
        let Some(field) = definition.field(name) else {
            unknown.push(below(name));
            return false;
        };
        if facts::OPAQUE.contains(&field.definition) {
            return true;
        }
        match (field.shape, value) {
            ("[]", Value::Array(items)) => {
                for (index, item) in items.iter_mut().enumerate() {
                    let path = format!("{}[{index}]", below(name));
                    prune(field.definition, item, &path, unknown);
                }
            }
            ("{}", Value::Object(items)) => {
                for (key, item) in items {
                    prune(field.definition, item, &format!("{}.{key}", below(name)), unknown);
                }
            }
            (_, value) => prune(field.definition, value, &below(name), unknown),
        }
        true
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    /// The fields of a definition and of all that it is made of, without the version.
    fn shape(name: &str, api_version: &str, found: &mut BTreeMap<String, Vec<String>>) {
        let (group, version) = api_version.split_once('/').expect("a group");
        let own = format!("io.k8s.api.{}.", group.split('.').next().unwrap_or_default());
        let plain = |name: &str| name.replace(&format!("{own}{version}."), &own);
        let Some(definition) = facts::definition(name) else { return };
        if found.contains_key(&plain(name)) {
            return;
        }
        let field = |field: facts::Field| format!("{} {}", field.name, plain(field.definition));
        found.insert(plain(name), definition.fields().map(field).collect());
        for field in definition.fields() {
            shape(field.definition, api_version, found);
        }
    }

    #[test]
    fn versions_without_a_box_have_the_same_fields() {
        for version in all() {
            let of = |api_version: &str| {
                let (group, number) = api_version.split_once('/').expect("a group");
                let name = facts::definition_name(group, number, version.kind).expect("a kind");
                let mut found = BTreeMap::new();
                shape(name, api_version, &mut found);
                found
            };
            let is_same = of(version.api_version()) == of(version.stored());
            let is_boxed = version.box_of().is_some();
            assert_eq!(is_same, !is_boxed, "{} {}", version.api_version(), version.kind);
            assert!(version.message().is_some() && version.codec().is_some(), "{}", version.kind);
        }
    }

    #[test]
    fn boxes_name_fields_that_there_are() {
        for one in BOXES {
            let served = find(one.api_version, one.kind).expect("a version");
            // The box is a field of the version that has it, and so is what stays beside it.
            let api_version =
                if one.into == Way::ToStored { served.stored() } else { one.api_version };
            let (group, version) = api_version.split_once('/').expect("a group");
            let kind = facts::definition_name(group, version, one.kind).expect("a kind");
            let element = one.list[1..].split('/').fold(kind, |definition, name| {
                let definition = facts::definition(definition).expect("a definition");
                definition.field(name).unwrap_or_else(|| panic!("{}: {name}", one.list)).definition
            });
            let element = facts::definition(element).expect("a definition");
            for name in one.outside.iter().chain([&one.field]) {
                assert!(element.field(name).is_some(), "{}: {name}", element.name);
            }
        }
    }

    #[test]
    fn objects_go_there_and_back() {
        let check = |kind: &str, served: Value, path: &str, expected: Value, unknown: &[&str]| {
            let mut whole = json!({"apiVersion": V1BETA1, "kind": kind, "metadata": {"name": "a"}});
            whole["spec"] = served["spec"].clone();
            let codec = kinds::codec(V1BETA1, kind).expect("a codec");
            let decoded = codec.decode_value(whole).expect("an object");
            assert_eq!(decoded.unknown_fields, unknown, "{kind}");
            let there = stored(decoded.object.boxed_clone()).to_value();
            assert_eq!(there["apiVersion"], "resource.k8s.io/v1");
            assert_eq!(there.pointer(path), Some(&expected), "{there}");
            let json = codec.settle(decoded.object.encode());
            assert!(json.starts_with(b"{\"apiVersion\":\"resource.k8s.io/v1beta1\",\"kind\":"));
            let again = codec.decode_stored(&json).expect("an object");
            assert_eq!(again.to_value(), decoded.object.to_value());
        };
        let request = json!({"name": "r", "deviceClassName": "c", "count": 2, "exactly": {"x": 1}});
        check(
            "ResourceClaim",
            json!({"spec": {"devices": {"requests": [request]}}}),
            "/spec/devices/requests/0/exactly/count",
            2.into(),
            &["spec.devices.requests[0].exactly"],
        );
        let either =
            json!({"name": "r", "firstAvailable": [{"name": "s", "deviceClassName": "c"}]});
        check(
            "ResourceClaimTemplate",
            json!({"spec": {"spec": {"devices": {"requests": [either]}}}}),
            "/spec/spec/devices/requests/0",
            json!({"name": "r", "firstAvailable": [{"name": "s", "deviceClassName": "c"}]}),
            &[],
        );
        let device = json!({"name": "d", "basic": {"nodeName": "n", "taint": 1}});
        check(
            "ResourceSlice",
            json!({"spec": {"driver": "x", "pool": {"name": "p", "generation": 1,
                "resourceSliceCount": 1}, "devices": [device]}}),
            "/spec/devices/0",
            json!({"name": "d", "nodeName": "n"}),
            &["spec.devices[0].basic.taint"],
        );
    }
}
