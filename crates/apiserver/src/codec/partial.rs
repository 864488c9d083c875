//! PartialObjectMetadata: an object reduced to its metadata, which is copied from its bytes.

use serde::Deserialize;
use serde_json::value::RawValue;

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
pub fn object(version: &str, json: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    write_object(&mut out, version, json);
    out
}

pub fn write_object(out: &mut Vec<u8>, version: &str, json: &[u8]) {
    out.extend_from_slice(br#"{"kind":"PartialObjectMetadata","apiVersion":""#);
    out.extend_from_slice(version.as_bytes());
    out.extend_from_slice(br#"","metadata":"#);
    out.extend_from_slice(metadata(json));
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    #[test]
    fn keeps_the_metadata_only() {
        let json = br#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"x":1}}"#;
        let cut = super::object("meta.k8s.io/v1", json);
        assert_eq!(
            String::from_utf8_lossy(&cut),
            r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"a"}}"#
        );
    }
}
