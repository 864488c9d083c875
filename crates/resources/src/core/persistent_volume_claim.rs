//! PersistentVolumeClaim: a claim to a volume.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, TypedLocalObjectReference, TypedObjectReference,
};
use machinery::field::Path;
use release::features::{self, Feature};
use serde_json::Value;

use super::{access_modes_cell, podspec};
use crate::defaults::fill;
use crate::kind::{Kind, Rules, STATUS, Updates, age, field, name, spec_and_status, text, wide};
use crate::validate::at::At;
use crate::validate::storage::claim_spec;
use crate::validate::{internal, quantity, warnings};

pub(crate) static KIND: Kind<PersistentVolumeClaim> = Kind {
    short: &["pvc"],
    subresources: &[STATUS],
    default: |claim| {
        podspec::default_claim(claim.spec.get_or_insert_default());
        let status = claim.status.get_or_insert_default();
        fill(&mut status.phase, "Pending");
        podspec::round([&mut status.capacity, &mut status.allocated_resources]);
    },
    parts: Some(spec_and_status!()),
    gated: close_sources,
    rules: Rules {
        create: claim,
        update: Some(claim_update),
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    warnings: Some(warnings::whole_claim),
    warns_on_update: Updates::All,
    returns_deleted: true,
    columns: &[
        name(),
        field("Status", "string", "api.core.v1.PersistentVolumeClaimStatus.phase", |claim| {
            let phase = claim.status.as_ref().and_then(|status| status.phase.clone());
            match claim.metadata.deletion_timestamp {
                Some(_) => "Terminating".into(),
                None => phase.unwrap_or_default().into(),
            }
        }),
        field("Volume", "string", "api.core.v1.PersistentVolumeClaimSpec.volumeName", |claim| {
            volume(claim).into()
        }),
        field("Capacity", "string", "api.core.v1.PersistentVolumeClaimStatus.capacity", |claim| {
            let status = claim.status.as_ref().filter(|_| !volume(claim).is_empty());
            let capacity = status.and_then(|status| status.capacity.as_ref()?.get("storage"));
            capacity.map_or("", |size| size.0.as_str()).into()
        }),
        field(
            "Access Modes",
            "string",
            "api.core.v1.PersistentVolumeClaimStatus.accessModes",
            |claim| {
                let status = claim.status.as_ref().filter(|_| !volume(claim).is_empty());
                access_modes_cell(status.and_then(|status| status.access_modes.as_deref())).into()
            },
        ),
        text("StorageClass", "string", "StorageClass of the pvc", |claim| {
            let spec = claim.spec.as_ref();
            spec.and_then(|spec| spec.storage_class_name.clone()).unwrap_or_default().into()
        }),
        text("VolumeAttributesClass", "string", "VolumeAttributesClass of the pvc", |claim| {
            let spec = claim.spec.as_ref();
            let class = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
            class.unwrap_or("<unset>").into()
        }),
        age(),
        wide(field(
            "VolumeMode",
            "string",
            "api.core.v1.PersistentVolumeClaimSpec.volumeMode",
            |claim| {
                let spec = claim.spec.as_ref();
                spec.and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("<unset>").into()
            },
        )),
    ],
    ..Kind::BASE
};

fn volume(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

/// Where a claim's data comes from stands in two fields, an older and a newer one. Upstream:
/// `DropDisabledFields`, `EnforceDataSourceBackwardsCompatibility` and `NormalizeDataSources` of
/// claims.
fn close_sources(new: &mut PersistentVolumeClaim, old: Option<&PersistentVolumeClaim>) {
    let old = old.and_then(|old| old.spec.as_ref());
    let Some(spec) = &mut new.spec else { return };
    let had_reference = old.is_some_and(|old| old.data_source_ref.is_some());
    let had_source = old.is_some_and(|old| old.data_source.is_some());
    let is_foreign =
        |namespace: &Option<String>| namespace.as_ref().is_some_and(|it| !it.is_empty());
    if !features::enabled(Feature::CrossNamespaceVolumeDataSource) && !had_reference {
        spec.data_source_ref.take_if(|reference| is_foreign(&reference.namespace));
    }
    // What the older field may not say was always left out without a word.
    if !had_source && !had_reference && spec.data_source_ref.is_none() {
        spec.data_source.take_if(|source| {
            let group = source.api_group.as_deref().unwrap_or_default();
            !matches!(
                (group, source.kind.as_str()),
                ("", "PersistentVolumeClaim") | ("snapshot.storage.k8s.io", "VolumeSnapshot")
            )
        });
    }
    // A claim that was stored before both were set stays unchanged, because it is immutable.
    if had_source && !had_reference {
        return;
    }
    match (&spec.data_source, &spec.data_source_ref) {
        (Some(source), None) => {
            spec.data_source_ref = Some(TypedObjectReference {
                api_group: source.api_group.clone(),
                kind: source.kind.clone(),
                name: source.name.clone(),
                namespace: None,
            });
        }
        (None, Some(reference)) if !is_foreign(&reference.namespace) => {
            spec.data_source = Some(TypedLocalObjectReference {
                api_group: reference.api_group.clone(),
                kind: reference.kind.clone(),
                name: reference.name.clone(),
            });
        }
        _ => {}
    }
}

fn claim(at: &At<'_>) {
    claim_spec(&at.get("spec"));
}

fn claim_update(at: &At<'_>, old: &At<'_>) {
    claim(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    let (mut new, mut was) = (spec.value.clone(), before.value.clone());
    let set = |tree: &mut Value, field: &str, value: Option<&Value>| {
        let Value::Object(fields) = tree else { return };
        match value {
            Some(value) => fields.insert(field.into(), value.clone()),
            None => fields.remove(field),
        };
    };
    if before.get("volumeName").is_empty() {
        set(&mut was, "volumeName", spec.value.get("volumeName"));
    }
    if !before.has("storageClassName") && spec.has("storageClassName") {
        set(&mut new, "storageClassName", None);
    }
    if at.get("status.phase").is("Bound") {
        set(&mut new, "volumeAttributesClassName", before.value.get("volumeAttributesClassName"));
        let size = before.get("resources.requests.storage").value;
        if let Some(requests @ Value::Object(_)) = new.pointer_mut("/resources/requests") {
            set(requests, "storage", Some(size));
        }
    }
    if new != was {
        let diff = internal::diff("PersistentVolumeClaimSpec", &was, &new);
        spec.forbidden(&format!("spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims\n{diff}"));
    }
    let size = spec.get("resources.requests.storage");
    let amounts = (
        quantity::amount(&size),
        quantity::amount(&before.get("resources.requests.storage")),
        quantity::amount(&old.get("status.capacity.storage")),
    );
    if amounts.0 < amounts.1 && amounts.0 <= amounts.2 {
        size.forbidden("field can not be less than status.capacity");
    }
    let mode = spec.get("volumeMode").called(Path::new("volumeMode"));
    mode.unchanged(&before.get("volumeMode"));
    let class = spec.get("volumeAttributesClassName");
    if class.value != before.get("volumeAttributesClassName").value
        && old.get("status").has("currentVolumeAttributesClassName")
    {
        let now = "is forbidden when status.currentVolumeAttributesClassName is not nil";
        if !class.is_set() {
            class.forbidden(&format!("update to nil {now}"));
        } else if class.is_empty() {
            class.forbidden(&format!("update to empty string {now}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Upstream rounds the amounts of all kinds that have resources.
    #[test]
    fn amounts_are_kept_in_thousandths() {
        let requests = json!({"storage": "1n"});
        let claim = json!({"spec": {"resources": {"requests": requests}}});
        let found = crate::defaults::tests::defaulted(KIND.default, claim);
        assert_eq!(found["spec"]["resources"]["requests"]["storage"], "1m");
    }

    #[test]
    fn both_fields_say_where_a_claims_data_comes_from() {
        let check = |is_on: bool, old: Option<Value>, new: Value, expected: Value| {
            let object = |spec: Value| -> PersistentVolumeClaim {
                serde_json::from_value(json!({"spec": spec})).expect("a claim")
            };
            let (old, mut object) = (old.map(object), object(new.clone()));
            let gates =
                features::Gates::DEFAULT.with(Feature::CrossNamespaceVolumeDataSource, is_on);
            features::scoped(gates, || close_sources(&mut object, old.as_ref()));
            let spec = serde_json::to_value(object.spec).expect("a tree");
            let of = |field: &str| spec.get(field).cloned().unwrap_or_default();
            assert_eq!(json!([of("dataSource"), of("dataSourceRef")]), expected, "{new}");
        };
        let pvc = json!({"kind": "PersistentVolumeClaim", "name": "a"});
        let other = json!({"apiGroup": "x.example", "kind": "Thing", "name": "a"});
        let far = json!({"kind": "PersistentVolumeClaim", "name": "a", "namespace": "n"});
        check(false, None, json!({"dataSource": pvc}), json!([pvc, pvc]));
        check(false, None, json!({"dataSourceRef": other}), json!([other, other]));
        check(false, None, json!({"dataSource": other}), json!([null, null]));
        check(false, None, json!({"dataSourceRef": far}), json!([null, null]));
        check(true, None, json!({"dataSourceRef": far}), json!([null, far]));
        let both = json!({"dataSource": other, "dataSourceRef": other});
        check(false, Some(both.clone()), json!({"dataSource": other}), json!([other, other]));
        let kept = json!({"dataSource": other});
        check(false, Some(kept.clone()), kept, json!([other, null]));
    }
}
