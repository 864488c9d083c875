//! Warnings of single kinds. Upstream: the strategies' `WarningsOnCreate` and `WarningsOnUpdate`.
//!
//! In: an object that was found valid, and on updates the one before. Out: warnings.

use super::{old_label, say};
use crate::validate::at::At;
use crate::validate::quantity;

pub(crate) fn runtime_class(at: &At<'_>, out: &mut Vec<String>) {
    let selector = at.get("scheduling.nodeSelector");
    for text in selector.entries().filter_map(|(key, _)| old_label(key)) {
        say(&selector, text, out);
    }
}

pub(crate) fn storage_capacity(at: &At<'_>, out: &mut Vec<String>) {
    let topology = at.get("nodeTopology");
    for term in topology.get("matchExpressions").items() {
        let key = term.get("key");
        if let Some(text) = old_label(key.str()) {
            say(&key, &format!("{} is {text}", key.str()), out);
        }
    }
    let labels = topology.get("matchLabels");
    for (key, value) in labels.entries() {
        if let Some(text) = old_label(key) {
            say(&value.called(labels.path.named(key)), text, out);
        }
    }
}

pub(crate) fn resource_slice(at: &At<'_>, out: &mut Vec<String>) {
    let driver = at.get("spec.driver");
    if driver.str().to_lowercase() != driver.str() {
        let name = driver.str();
        let text =
            format!("driver names should be lowercase; {name:?} contains uppercase characters");
        say(&driver, &text, out);
    }
}

pub(crate) fn service_account(at: &At<'_>, out: &mut Vec<String>) {
    const MOUNTABLE_ONLY: &str = "kubernetes.io/enforce-mountable-secrets";
    let had =
        at.old().is_some_and(|old| old["metadata"]["annotations"].get(MOUNTABLE_ONLY).is_some());
    if !had && at.get("metadata.annotations").has(MOUNTABLE_ONLY) {
        out.push(format!("metadata.annotations[{MOUNTABLE_ONLY}]: deprecated in v1.32+; prefer separate namespaces to isolate access to mounted secrets"));
    }
}

pub(crate) fn resource_quota(at: &At<'_>, out: &mut Vec<String>) {
    let hard = at.get("spec.hard");
    for name in ["cpu", "memory", "storage", "ephemeral-storage"] {
        let asked = format!("requests.{name}");
        let request = match hard.has(&asked) {
            false if matches!(name, "cpu" | "memory") => name.to_owned(),
            _ => asked,
        };
        let limit = format!("limits.{name}");
        if !hard.has(&request) || !hard.has(&limit) {
            continue;
        }
        let (least, most) = (hard.key(&request), hard.key(&limit));
        if quantity::amount(&least) > quantity::amount(&most) {
            out.push(format!(
                "ResourceQuota {request} ({}) should be less than {limit} ({})",
                least.str(),
                most.str()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::validate::at::judge;

    #[test]
    fn kinds_warn_in_upstreams_words() {
        let check = |of: fn(&At<'_>, &mut Vec<String>), object: Value, expected: &[&str]| {
            let mut out = vec![];
            judge(&object, |at| of(at, &mut out));
            assert_eq!(out, expected, "{object}");
        };
        check(
            runtime_class,
            json!({"scheduling": {"nodeSelector": {"beta.kubernetes.io/os": "a"}}}),
            &["scheduling.nodeSelector: deprecated since v1.14; use \"kubernetes.io/os\" instead"],
        );
        check(
            storage_capacity,
            json!({"nodeTopology": {"matchLabels": {"node-role.kubernetes.io/master": "a"}}}),
            &[
                "nodeTopology.matchLabels.node-role.kubernetes.io/master: use \"node-role.kubernetes.io/control-plane\" instead",
            ],
        );
        check(
            resource_slice,
            json!({"spec": {"driver": "A.b"}}),
            &[
                "spec.driver: driver names should be lowercase; \"A.b\" contains uppercase characters",
            ],
        );
        check(
            resource_quota,
            json!({"spec": {"hard": {"cpu": "2", "limits.cpu": "1", "requests.memory": "1", "limits.memory": "1"}}}),
            &["ResourceQuota cpu (2) should be less than limits.cpu (1)"],
        );
        check(
            service_account,
            json!({"metadata": {"annotations": {"kubernetes.io/enforce-mountable-secrets": "false"}}}),
            &[
                "metadata.annotations[kubernetes.io/enforce-mountable-secrets]: deprecated in v1.32+; prefer separate namespaces to isolate access to mounted secrets",
            ],
        );
    }
}
