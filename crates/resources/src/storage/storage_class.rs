//! StorageClass: which driver makes a volume, and how.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::{Object, names};

use super::{parameters, provisioner};
use crate::kind::{Kind, Rules, Updates, age, field, named};
use crate::validate::at::At;
use crate::validate::warnings;

const IS_DEFAULT: &str = "storageclass.kubernetes.io/is-default-class";

pub(crate) static KIND: Kind<StorageClass> = Kind {
    short: &["sc"],
    default: |class| {
        class.reclaim_policy.get_or_insert_with(|| "Delete".into());
        class.volume_binding_mode.get_or_insert_with(|| "Immediate".into());
    },
    rules: Rules {
        create: storage_class,
        update: Some(storage_class_update),
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    warnings: Some(warnings::storage_class),
    warns_on_update: Updates::All,
    columns: &[
        named(|class| {
            let note = class.metadata.annotations.as_ref().and_then(|map| map.get(IS_DEFAULT));
            let is_default = note.is_some_and(|value| value == "true");
            format!("{}{}", class.name(), if is_default { " (default)" } else { "" }).into()
        }),
        field("Provisioner", "string", "api.storage.v1.StorageClass.provisioner", |class| {
            class.provisioner.clone().into()
        }),
        field("ReclaimPolicy", "string", "api.storage.v1.StorageClass.reclaimPolicy", |class| {
            class.reclaim_policy.clone().unwrap_or_default().into()
        }),
        field(
            "VolumeBindingMode",
            "string",
            "api.storage.v1.StorageClass.volumeBindingMode",
            |class| class.volume_binding_mode.clone().unwrap_or_default().into(),
        ),
        field(
            "AllowVolumeExpansion",
            "string",
            "api.storage.v1.StorageClass.allowVolumeExpansion",
            |class| class.allow_volume_expansion.unwrap_or_default().into(),
        ),
        age(),
    ],
    returns_deleted: true,
    ..Kind::BASE
};

fn storage_class(at: &At<'_>) {
    provisioner(&at.get("provisioner"));
    parameters(&at.get("parameters"), true);
    let policy = at.get("reclaimPolicy");
    if !policy.is_empty() {
        policy.one_of(&["Delete", "Retain"]);
    }
    let mode = at.get("volumeBindingMode");
    if mode.is_set() {
        mode.one_of(&["Immediate", "WaitForFirstConsumer"]);
    } else {
        mode.required("");
    }
    let mut terms: Vec<BTreeMap<&str, BTreeSet<&str>>> = vec![];
    for term in at.get("allowedTopologies").items() {
        let list = term.get("matchLabelExpressions");
        let wanted: BTreeMap<&str, BTreeSet<&str>> = list
            .items()
            .map(|one| (one.get("key").str(), one.get("values").strings().into_iter().collect()))
            .collect();
        let mut keys = HashSet::new();
        for one in list.items() {
            let values = one.get("values");
            values.need();
            let mut seen = HashSet::new();
            for value in values.items() {
                if !seen.insert(value.str()) {
                    value.duplicate();
                }
            }
            let key = one.get("key");
            key.name(names::qualified_name);
            if !keys.insert(key.str()) {
                key.duplicate();
            }
        }
        for _ in terms.iter().filter(|term| **term == wanted) {
            list.errors().duplicate(&list.path, "");
        }
        terms.push(wanted);
    }
}

fn storage_class_update(at: &At<'_>, old: &At<'_>) {
    storage_class(at);
    for field in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
        at.get(field).unchanged(&old.get(field));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge_both;

    #[test]
    fn topologies_differ_and_updates_are_whole() {
        let class = |terms: serde_json::Value| json!({"provisioner": "a", "volumeBindingMode": "Immediate", "allowedTopologies": terms});
        let term = |values: serde_json::Value| json!({"matchLabelExpressions": [{"key": "k", "values": values}]});
        let check = |new: serde_json::Value, expected: &[&str]| {
            let errors = judge_both(&new, &class(json!(null)), storage_class_update);
            let texts: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
            assert_eq!(texts, expected);
        };
        check(class(json!([term(json!(["a", "b"])), term(json!(["a"]))])), &[]);
        check(
            class(json!([term(json!(["a", "b"])), term(json!(["b", "a"]))])),
            &["allowedTopologies[1].matchLabelExpressions: Duplicate value: \"\""],
        );
        check(
            class(json!([term(json!([]))])),
            &["allowedTopologies[0].matchLabelExpressions[0].values: Required value"],
        );
    }
}
