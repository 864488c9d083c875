//! CRDs that upstream stored in `v1beta1`, which no server serves any more.
//!
//! In: an object that upstream's API server wrote to a shared etcd. Out: the same object in `v1`.
//! This server writes `v1`. Upstream reads both.
//! Upstream: `k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/{v1,v1beta1}/conversion.go`.

use bytes::Bytes;
use machinery::Object;
use machinery::object::Unstructured;
use serde_json::{Map, Value, json};

use super::{GROUP, PLURAL};

/// Fields that `v1` has in each version and `v1beta1` has, also or only, in the spec: (old name, new name).
const ONCE_FOR_ALL: &[(&str, &str)] = &[
    ("validation", "schema"),
    ("subresources", "subresources"),
    ("additionalPrinterColumns", "additionalPrinterColumns"),
];

/// Converts a CRD in `v1beta1` to `v1`. `None` for anything else.
pub fn modern(key: &[u8], value: &[u8]) -> Option<Result<Bytes, serde_json::Error>> {
    let below = key.strip_prefix(b"/registry/")?.strip_prefix(GROUP.as_bytes())?;
    below.strip_prefix(b"/")?.strip_prefix(PLURAL.as_bytes())?.strip_prefix(b"/")?;
    let mut crd: Value = match serde_json::from_slice(value) {
        Ok(crd) => crd,
        Err(error) => return Some(Err(error)),
    };
    if crd["apiVersion"] != "apiextensions.k8s.io/v1beta1" {
        return None;
    }
    crd["apiVersion"] = "apiextensions.k8s.io/v1".into();
    if let Some(spec) = crd["spec"].as_object_mut() {
        convert(spec);
    }
    let encoded = Unstructured::from_value(crd).map(|object| object.encode().into());
    Some(encoded.map_err(serde::de::Error::custom))
}

fn convert(spec: &mut Map<String, Value>) {
    let only = spec.remove("version");
    let versions = spec.entry("versions").or_insert_with(|| json!([]));
    if let (Some(versions), Some(name)) = (versions.as_array_mut(), only)
        && versions.is_empty()
    {
        versions.push(json!({"name": name, "served": true, "storage": true}));
    }
    for (old, new) in ONCE_FOR_ALL {
        let Some(part) = spec.remove(*old) else { continue };
        for version in spec["versions"].as_array_mut().into_iter().flatten() {
            version[*new] = part.clone();
        }
    }
    for version in spec["versions"].as_array_mut().into_iter().flatten() {
        let columns = version.get_mut("additionalPrinterColumns").and_then(Value::as_array_mut);
        for column in columns.into_iter().flatten().filter_map(Value::as_object_mut) {
            if let Some(path) = column.remove("JSONPath") {
                column.insert("jsonPath".into(), path);
            }
        }
    }
    // The default in `v1beta1` is true.
    match spec.get("preserveUnknownFields") {
        None => _ = spec.insert("preserveUnknownFields".into(), true.into()),
        Some(Value::Bool(false)) => _ = spec.remove("preserveUnknownFields"),
        Some(_) => {}
    }
    if let Some(conversion) = spec.get_mut("conversion").and_then(Value::as_object_mut) {
        let mut webhook = Map::new();
        for (old, new) in [
            ("webhookClientConfig", "clientConfig"),
            ("conversionReviewVersions", "conversionReviewVersions"),
        ] {
            webhook.extend(conversion.remove(old).map(|value| (new.to_owned(), value)));
        }
        if !webhook.is_empty() {
            conversion.insert("webhook".into(), webhook.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &[u8] = b"/registry/apiextensions.k8s.io/customresourcedefinitions/a.b.c";

    fn check(old: Value, expected: Value) {
        let crd = |version: &str, spec: Value| {
            json!({"kind": "CustomResourceDefinition", "apiVersion": format!("apiextensions.k8s.io/{version}"),
                "metadata": {"name": "a.b.c"}, "spec": spec, "status": {"storedVersions": ["v1"]}})
        };
        let old = crd("v1beta1", old).to_string();
        let new = modern(KEY, old.as_bytes()).expect("an old one").expect("an object");
        let new: Value = serde_json::from_slice(&new).expect("JSON");
        assert_eq!(new, crd("v1", expected));
    }

    #[test]
    fn each_version_gets_what_all_shared() {
        let schema = json!({"openAPIV3Schema": {"type": "object"}});
        check(
            json!({"group": "b.c", "version": "v1", "preserveUnknownFields": false,
                "versions": [{"name": "v1", "served": true, "storage": true}],
                "validation": schema, "subresources": {"status": {}},
                "additionalPrinterColumns": [{"name": "Age", "type": "date", "JSONPath": ".x"}],
                "conversion": {"strategy": "None"}}),
            json!({"group": "b.c",
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [{"name": "Age", "type": "date", "jsonPath": ".x"}]}],
                "conversion": {"strategy": "None"}}),
        );
    }

    #[test]
    fn versions_of_their_own_stay() {
        check(
            json!({"group": "b.c", "version": "v2", "preserveUnknownFields": false,
                "versions": [{"name": "v2", "additionalPrinterColumns": [{"JSONPath": ".x"}]}, {"name": "v1"}],
                "conversion": {"strategy": "Webhook", "webhookClientConfig": {"url": "https://x"},
                    "conversionReviewVersions": ["v1"]}}),
            json!({"group": "b.c",
                "versions": [{"name": "v2", "additionalPrinterColumns": [{"jsonPath": ".x"}]}, {"name": "v1"}],
                "conversion": {"strategy": "Webhook", "webhook": {"clientConfig": {"url": "https://x"},
                    "conversionReviewVersions": ["v1"]}}}),
        );
    }

    #[test]
    fn the_oldest_have_one_version_and_keep_unknown_fields() {
        check(
            json!({"group": "b.c", "version": "v1"}),
            json!({"group": "b.c", "preserveUnknownFields": true,
                "versions": [{"name": "v1", "served": true, "storage": true}]}),
        );
    }

    #[test]
    fn others_are_left_alone() {
        let check = |key: &[u8], value: &str| assert!(modern(key, value.as_bytes()).is_none());
        check(KEY, r#"{"apiVersion":"apiextensions.k8s.io/v1"}"#);
        check(b"/registry/pods/a/b", r#"{"apiVersion":"apiextensions.k8s.io/v1beta1"}"#);
    }
}
