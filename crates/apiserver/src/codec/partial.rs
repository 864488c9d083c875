//! PartialObjectMetadata: an object reduced to its metadata, which is copied from its bytes.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::stored::Stored;

#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow)]
    metadata: &'a RawValue,
}

/// The object's metadata as JSON.
pub fn metadata(json: &[u8]) -> &[u8] {
    let head: Head<'_> = serde_json::from_slice(json).expect("every encoded object has metadata");
    head.metadata.get().as_bytes()
}

/// `version`: `meta.k8s.io/v1` or `v1beta1`.
pub fn object(version: &str, stored: &Stored) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    write_object(&mut out, version, stored);
    out
}

/// The metadata of a stored object, without the annotation that only whole objects show.
pub fn write_object(out: &mut Vec<u8>, version: &str, stored: &Stored) {
    let json = stored.json();
    match stored.row().settings.annotation_of_whole_objects {
        None => write(out, version, metadata(&json)),
        Some(name) => write(out, version, &without(metadata(&json), name)),
    }
}

pub fn write(out: &mut Vec<u8>, version: &str, metadata: &[u8]) {
    out.extend_from_slice(br#"{"kind":"PartialObjectMetadata","apiVersion":""#);
    out.extend_from_slice(version.as_bytes());
    out.extend_from_slice(br#"","metadata":"#);
    out.extend_from_slice(metadata);
    out.push(b'}');
}

fn without(metadata: &[u8], annotation: &str) -> Vec<u8> {
    let mut tree: Value = serde_json::from_slice(metadata).expect("the server's own JSON is JSON");
    if let Some(fields) = tree.as_object_mut()
        && let Some(annotations) = fields.get_mut("annotations").and_then(Value::as_object_mut)
    {
        annotations.remove(annotation);
        if annotations.is_empty() {
            fields.remove("annotations");
        }
    }
    tree.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_metadata_only() {
        let json = br#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"x":1}}"#;
        let mut cut = Vec::new();
        write(&mut cut, "meta.k8s.io/v1", metadata(json));
        assert_eq!(
            String::from_utf8_lossy(&cut),
            r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"a"}}"#
        );
    }

    #[test]
    fn one_annotation_is_for_whole_objects() {
        let check = |given: &str, expected: &str| {
            assert_eq!(String::from_utf8_lossy(&without(given.as_bytes(), "x")), expected);
        };
        check(r#"{"annotations":{"x":"1","y":"2"}}"#, r#"{"annotations":{"y":"2"}}"#);
        check(r#"{"annotations":{"x":"1"},"name":"a"}"#, r#"{"name":"a"}"#);
        check(r#"{"name":"a"}"#, r#"{"name":"a"}"#);
    }
}
