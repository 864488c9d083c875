//! AppArmor profiles of old: annotations that say what fields say today.
//! Upstream: `applyAppArmorVersionSkew` of `pkg/registry/core/pod/strategy.go`.
//!
//! In: a new pod. Out: the pod with the fields of its annotations, and a warning for
//! each annotation that no field accompanied. Bad annotations are refused later.

use k8s_openapi::api::core::v1::{AppArmorProfile, Pod, SecurityContext};

pub(crate) const PREFIX: &str = "container.apparmor.security.beta.kubernetes.io/";
/// Of the path of a profile.
const MAX_LENGTH: usize = 4095;

/// The field that says the same, if there is one.
pub(crate) fn field_of(annotation: &str) -> Option<AppArmorProfile> {
    let of = |kind: &str, path: Option<&str>| AppArmorProfile {
        type_: kind.into(),
        localhost_profile: path.map(str::to_owned),
    };
    match annotation {
        "unconfined" => Some(of("Unconfined", None)),
        "runtime/default" => Some(of("RuntimeDefault", None)),
        _ => {
            let path = annotation.strip_prefix("localhost/").filter(|path| !path.is_empty())?;
            Some(of("Localhost", Some(path)))
        }
    }
}

fn is_valid(profile: &AppArmorProfile) -> bool {
    let path = profile.localhost_profile.as_deref();
    path.is_none_or(|path| path.trim() == path && path.len() <= MAX_LENGTH)
}

/// Fills the fields in; returns what the client should know.
pub(crate) fn from_annotations(pod: &mut Pod) -> Vec<String> {
    let (Some(notes), Some(spec)) = (&pod.metadata.annotations, &mut pod.spec) else {
        return vec![];
    };
    if spec.os.as_ref().is_some_and(|os| os.name == "windows") {
        return vec![];
    }
    let of_pod =
        spec.security_context.as_ref().and_then(|context| context.app_armor_profile.clone());
    let regular = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
    let regular = regular.map(|one| (&one.name, &mut one.security_context));
    let ephemeral = spec.ephemeral_containers.iter_mut().flatten();
    let ephemeral = ephemeral.map(|one| (&one.name, &mut one.security_context));
    let mut warnings = vec![];
    for (name, context) in regular.chain(ephemeral) {
        let key = format!("{PREFIX}{name}");
        let Some(annotation) = notes.get(&key) else { continue };
        if context.as_ref().is_some_and(|context| context.app_armor_profile.is_some()) {
            continue;
        }
        let field = field_of(annotation).filter(is_valid);
        if field.is_some() && field == of_pod {
            continue;
        }
        if field.is_some() {
            let context: &mut SecurityContext = context.get_or_insert_default();
            context.app_armor_profile = field;
        }
        warnings.push(format!(
            "metadata.annotations[{key}]: deprecated since v1.30; use the \"appArmorProfile\" field instead"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    #[test]
    fn annotations_become_fields() {
        let localhost = json!({"type": "Localhost", "localhostProfile": "x"});
        for (note, of_pod, expected, warns) in [
            ("unconfined", Value::Null, json!({"type": "Unconfined"}), true),
            ("runtime/default", Value::Null, json!({"type": "RuntimeDefault"}), true),
            ("runtime/default", json!({"type": "RuntimeDefault"}), Value::Null, false),
            ("localhost/x", json!({"type": "RuntimeDefault"}), localhost, true),
            ("localhost/", Value::Null, Value::Null, true),
            ("localhost/ x", Value::Null, Value::Null, true),
            ("what", Value::Null, Value::Null, true),
        ] {
            let key = format!("{PREFIX}c");
            let mut pod: Pod = from_value(json!({"metadata": {"annotations": {key: note}},
                "spec": {"containers": [{"name": "c"}, {"name": "d"}],
                    "securityContext": {"appArmorProfile": of_pod}}}))
            .expect("a pod");
            let warnings = from_annotations(&mut pod);
            assert_eq!(warnings.len(), usize::from(warns), "{note}");
            let spec = serde_json::to_value(pod.spec).expect("JSON");
            let field = spec.pointer("/containers/0/securityContext/appArmorProfile");
            assert_eq!(field.unwrap_or(&Value::Null), &expected, "{note}");
            assert_eq!(spec.pointer("/containers/1/securityContext"), None);
        }
    }
}
