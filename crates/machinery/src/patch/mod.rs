//! The four patch formats: JSON patch (RFC 6902), merge patch (RFC 7386), strategic merge, and
//! server-side apply. All work on value trees; what a kind's lists and maps mean comes from the
//! caller as a [`Schema`].

pub mod apply;
mod strategic;

use std::sync::Arc;

use serde_json::Value;

pub use strategic::strategic;

/// How a client changes an object that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchKind {
    Json,
    Merge,
    Strategic,
    /// Server-side apply; `force` takes fields from other managers.
    Apply {
        force: bool,
    },
}

/// The meaning of a list or map in server-side apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// Replaced as a whole: the default of lists.
    #[default]
    Atomic,
    /// A list of scalars, each owned by itself.
    Set,
    /// A list of objects known by their keys.
    Map,
    /// A map or struct, each field owned by itself: the default of maps.
    Granular,
}

/// The facts about one field of a definition for patches. Strategic merge and apply have columns of
/// their own, because they differ: container ports merge by `containerPort`, but are known to apply
/// by `containerPort` and `protocol`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldFacts {
    /// Strategic merge: the key that names an element of the list.
    pub merge_key: Option<String>,
    /// Strategic merge: `merge` on lists.
    pub merges: bool,
    /// Strategic merge: `retainKeys` on maps.
    pub retain_keys: bool,
    /// Apply: what the list or map means.
    pub topology: Option<Topology>,
    /// Apply: the keys of a [`Topology::Map`], and their defaults.
    pub map_keys: Vec<(String, Option<Value>)>,
    /// The definition of the field, or of its elements.
    pub definition: Option<String>,
}

/// The patch facts of kinds, by definition name (`io.k8s.api.core.v1.PodSpec`).
pub trait Schema: Send + Sync {
    /// `None`: the definition has no such field.
    fn field(&self, definition: &str, field: &str) -> Option<FieldFacts>;

    /// The type of a kind, for apply and managedFields: see [`apply::types`] for how a structural
    /// schema becomes one. It is asked for at every write: make it once, hand out clones of the
    /// `Arc`. `None`: nothing is known, so maps are granular and lists atomic, all the way down.
    ///
    /// A custom resource has a schema of its own per version; this is called
    /// with the row's `definition`, and [`field`](Self::field) may answer `None` (it is strategic merge's).
    fn type_of(&self, _definition: &str) -> Option<Arc<apply::types::Type>> {
        None
    }

    /// The fields that writes to the object (`subresource` is empty) or to one of its subresources
    /// reset, so that these writes get no ownership of them. The default is right for custom resources
    /// with a `status` subresource; it is called only for kinds that have one.
    fn resets(&self, _definition: &str, subresource: &str) -> apply::Resets {
        apply::Resets::of_subresources(subresource, &[&["metadata"], &["spec"]])
    }
}

/// Why a patch cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    /// The patch is no patch of its format.
    #[error("{0}")]
    Malformed(String),
    /// It is one, but does not fit the object (a failed `test`, a missing path).
    #[error("{0}")]
    Unfit(String),
    /// Upstream calls it its own error.
    #[error("{0}")]
    Broken(String),
}

/// What the copies of one patch may add, in bytes: each of a row of copies of the whole into itself
/// doubles it. Upstream: `JSONPatchMaxCopyBytes`.
const COPY_LIMIT: usize = 3 << 20;

/// RFC 6902. A failing operation leaves nothing changed.
pub fn json(document: &Value, patch: &[u8]) -> Result<Value, PatchError> {
    let patch: Value =
        serde_json::from_slice(patch).map_err(|error| PatchError::Malformed(error.to_string()))?;
    // A list of something else than operations fails where upstream applies them.
    let patch = match patch {
        Value::Null => json_patch::Patch::default(),
        patch => serde_json::from_value(patch)
            .map_err(|error: serde_json::Error| PatchError::Unfit(error.to_string()))?,
    };
    let mut document = document.clone();
    let mut copied = 0;
    for (index, operation) in patch.0.iter().enumerate() {
        if let json_patch::PatchOperation::Copy(copy) = operation {
            copied += document.pointer(copy.from.as_str()).map_or(0, size);
            if copied > COPY_LIMIT {
                return Err(PatchError::Unfit(format!(
                    "Unable to complete the copy, the accumulated size increase of copy is {copied}, exceeding the limit {COPY_LIMIT}"
                )));
            }
        }
        // Upstream: what an object lacks passes a test for null; operators guard by it what they add.
        if let json_patch::PatchOperation::Test(test) = operation
            && test.value.is_null()
            && lacks(&document, &test.path.to_string())
        {
            continue;
        }
        // Upstream: a replacement sets what an object lacks.
        let set;
        let operation = match operation {
            json_patch::PatchOperation::Replace(replace)
                if lacks(&document, &replace.path.to_string()) =>
            {
                let (path, value) = (replace.path.clone(), replace.value.clone());
                set = json_patch::PatchOperation::Add(json_patch::AddOperation { path, value });
                &set
            }
            other => other,
        };
        // The result of a failed patch is dropped: it needs no undo, which panics after some moves.
        json_patch::patch_unsafe(&mut document, std::slice::from_ref(operation)).map_err(
            |mut error| {
                error.operation = index;
                PatchError::Unfit(error.to_string())
            },
        )?;
    }
    Ok(document)
}

/// The length of a value's JSON.
fn size(value: &Value) -> usize {
    struct Counter(usize);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    // Counting cannot fail, and every tree has a text.
    let _ = serde_json::to_writer(&mut counter, value);
    counter.0
}

/// Is there an object that the path leads into, without its last key?
fn lacks(document: &Value, path: &str) -> bool {
    let parent = path.rsplit_once('/').and_then(|(parent, _)| document.pointer(parent));
    parent.is_some_and(Value::is_object) && document.pointer(path).is_none()
}

/// RFC 7386.
pub fn merge(document: &Value, patch: &[u8]) -> Result<Value, PatchError> {
    let patch: Value =
        serde_json::from_slice(patch).map_err(|error| PatchError::Malformed(error.to_string()))?;
    let mut document = document.clone();
    json_patch::merge(&mut document, &patch);
    Ok(document)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_replacement_sets_what_an_object_lacks() {
        let document = json!({ "a": { "b": 1 }, "list": [1] });
        let check = |path: &str, expected: Option<Value>| {
            let patch = json!([{ "op": "replace", "path": path, "value": 2 }]).to_string();
            assert_eq!(super::json(&document, patch.as_bytes()).ok(), expected, "{path}");
        };
        check("/a/b", Some(json!({ "a": { "b": 2 }, "list": [1] })));
        check("/a/c", Some(json!({ "a": { "b": 1, "c": 2 }, "list": [1] })));
        check("/none/c", None);
        check("/list/1", None);
    }

    #[test]
    fn copies_do_not_blow_up() {
        let document = json!({ "a": "x".repeat(1000) });
        let patch = |count: usize| {
            let one = |index| json!({ "op": "copy", "from": "", "path": format!("/{index}") });
            Value::from_iter((0..count).map(one)).to_string()
        };
        let check = |count, expected: bool| {
            let outcome = super::json(&document, patch(count).as_bytes());
            assert_eq!(outcome.is_ok(), expected, "{count}");
        };
        // A thousand bytes that double with each copy.
        check(10, true);
        check(13, false);
        check(64, false);
    }

    #[test]
    fn a_test_for_null_passes_where_nothing_is() {
        let check = |path: &str, passes: bool| {
            let patch = json!([{"op": "test", "path": path, "value": null}]).to_string();
            let document = json!({"metadata": {"name": "a"}, "list": [1]});
            assert_eq!(json(&document, patch.as_bytes()).is_ok(), passes, "{path}");
        };
        check("/metadata/finalizers", true);
        check("/metadata/name", false);
        check("/status/done", false);
        check("/list/1", false);
    }

    #[test]
    fn a_patch_that_fails_after_moves_is_refused() {
        let patch = json!([
            {"op": "move", "from": "/a", "path": ""},
            {"op": "move", "from": "", "path": "/b"},
        ]);
        let failed = json(&json!({"a": "1", "b": "2"}), patch.to_string().as_bytes());
        assert!(matches!(failed, Err(PatchError::Unfit(_))), "{failed:?}");
    }
}
