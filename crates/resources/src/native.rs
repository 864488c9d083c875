//! Objects as this server would have written them.
//!
//! In: the JSON of an object that an upstream API server has stored in protobuf. Out: the same with
//! what protobuf does not carry (nulls, the kind of a claim within a StatefulSet) and the defaults
//! that upstream applies whenever it reads. So a list shows the same object whether this server or upstream wrote it.

use std::sync::LazyLock;

use apiserver::resource::Resource;
use machinery::Object;
use machinery::object::{DecodeError, Unstructured};
use serde::Deserialize;

use crate::RESOURCES;

/// Those that need no running server; the others' objects are complete when they are stored.
static ROWS: LazyLock<Vec<Resource>> = LazyLock::new(|| {
    let kinds = RESOURCES.iter().filter(|kind| !kind.is_wired());
    let rows = kinds.map(|kind| kind.row(None).build(None));
    rows.filter(|row| row.is_stored() && row.conversion.is_none()).collect()
});

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TypeMeta {
    api_version: String,
    kind: String,
}

pub fn native(json: Vec<u8>) -> Result<Vec<u8>, DecodeError> {
    let TypeMeta { api_version, kind } = serde_json::from_slice(&json)?;
    let Some(codec) = api::kinds::codec(&api_version, &kind) else {
        return Ok(Unstructured::from_value(serde_json::from_slice(&json)?)?.encode());
    };
    // Upstream keeps some kinds in a version that is another one's view here.
    if let Some(version) = api::versions::find(&api_version, &kind) {
        let stored = api::versions::stored(codec.decode_stored(&json)?).encode();
        debug_assert_ne!(version.stored(), api_version);
        return native(stored);
    }
    let mut object = codec.decode_stored(&json)?;
    if let Some(row) = ROWS.iter().find(|row| row.kind == kind && row.api_version() == api_version)
    {
        row.strategy.default(&mut *object);
    }
    Ok(codec.settle(object.encode()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn what_protobuf_does_not_carry_is_back() {
        let check = |stored: Value, path: &str, expected: Value| {
            let native = native(stored.to_string().into_bytes()).expect("an object");
            let native: Value = serde_json::from_slice(&native).expect("JSON");
            assert_eq!(native.pointer(path), Some(&expected), "{native}");
        };
        let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "a"},
            "involvedObject": {}, "source": {}});
        check(event, "/firstTimestamp", Value::Null);
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": "a"}});
        check(role, "/rules", Value::Null);
        let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "a"}, "spec": {}});
        check(claim, "/status/phase", "Pending".into());
        let set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "a"},
            "spec": {"selector": {}, "template": {}, "volumeClaimTemplates": [{"metadata": {"name": "d"}}]}});
        check(set, "/spec/volumeClaimTemplates/0/kind", "PersistentVolumeClaim".into());
        let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1beta1",
            "kind": "MutatingAdmissionPolicy", "metadata": {"name": "a"}, "spec": {}});
        check(policy.clone(), "/apiVersion", "admissionregistration.k8s.io/v1".into());
        check(policy, "/spec/failurePolicy", "Fail".into());
        let custom =
            json!({"apiVersion": "a.b/v1", "kind": "C", "metadata": {"name": "a"}, "x": 1});
        check(custom, "/x", 1.into());
    }
}
