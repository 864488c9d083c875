//! Kinds of the core group that need little: defaults, columns.

use apiserver::resource::Column;
use k8s_openapi::api::core::v1::{
    ConfigMap, Endpoints, LimitRange, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeClaimStatus, PersistentVolumeStatus, PodTemplate, ReplicationController,
    ResourceQuota, Secret, ServiceAccount,
};
use machinery::Object;
use serde_json::Value;

use super::podspec;
use crate::Row;
use crate::defaults::fill;
use crate::gated;
use crate::parts::{Simple, SpecStatus, parts};
use crate::print::{age, containers, labels, or_none};

pub(super) fn config_map() -> Row {
    fn cells(map: &ConfigMap) -> Vec<Value> {
        let count = map.data.as_ref().map_or(0, |data| data.len())
            + map.binary_data.as_ref().map_or(0, |data| data.len());
        vec![map.name().into(), count.into(), age(map)]
    }
    fn tidy(map: &mut ConfigMap) {
        map.data.take_if(|data| data.is_empty());
        map.binary_data.take_if(|data| data.is_empty());
    }
    Row::new::<ConfigMap>(Simple::new(cells).default(tidy)).short(&["cm"])
}

pub(super) fn endpoints() -> Row {
    fn cells(endpoints: &Endpoints) -> Vec<Value> {
        vec![endpoints.name().into(), addresses(endpoints).into(), age(endpoints)]
    }
    fn default(endpoints: &mut Endpoints) {
        for port in endpoints
            .subsets
            .iter_mut()
            .flatten()
            .flat_map(|subset| subset.ports.iter_mut().flatten())
        {
            fill(&mut port.protocol, "TCP");
        }
        endpoints.subsets.take_if(|subsets| subsets.is_empty());
    }
    Row::new::<Endpoints>(Simple::new(cells).default(default))
        .short(&["ep"])
        .storage("services/endpoints")
}

/// The first three addresses with ports, and how many more there are.
fn addresses(endpoints: &Endpoints) -> String {
    const SHOWN: usize = 3;
    let mut all = vec![];
    for subset in endpoints.subsets.iter().flatten() {
        for address in subset.addresses.iter().flatten() {
            match &subset.ports {
                Some(ports) if !ports.is_empty() => {
                    all.extend(ports.iter().map(|port| format!("{}:{}", address.ip, port.port)));
                }
                _ => all.push(address.ip.clone()),
            }
        }
    }
    let more = all.len().saturating_sub(SHOWN);
    all.truncate(SHOWN);
    let text = all.join(",");
    or_none(if more > 0 { format!("{text} + {more} more...") } else { text })
}

pub(super) fn limit_range() -> Row {
    fn cells(range: &LimitRange) -> Vec<Value> {
        let created = range.metadata.creation_timestamp.as_ref().map(|time| time.0.to_string());
        vec![range.name().into(), created.into()]
    }
    Row::new::<LimitRange>(Simple::new(cells).default(crate::defaults::limit_range))
        .short(&["limits"])
}

pub(super) fn pod_template() -> Row {
    fn cells(template: &PodTemplate) -> Vec<Value> {
        let inner = template.template.clone().unwrap_or_default();
        let (names, images) = containers(&inner.spec.unwrap_or_default().containers);
        let map = inner.metadata.and_then(|meta| meta.labels);
        vec![template.name().into(), names.into(), images.into(), labels(map.as_ref()).into()]
    }
    fn default(template: &mut PodTemplate) {
        podspec::default_template(template.template.get_or_insert_default());
    }
    Row::new::<PodTemplate>(
        Simple::new(cells)
            .default(default)
            .closed(gated::pod_template)
            .generation(|new, old| new.template != old.template),
    )
}

pub(super) fn replication_controller() -> Row {
    fn cells(rc: &ReplicationController) -> Vec<Value> {
        let (spec, status) =
            (rc.spec.clone().unwrap_or_default(), rc.status.clone().unwrap_or_default());
        let inner = spec.template.and_then(|template| template.spec).unwrap_or_default();
        let (names, images) = containers(&inner.containers);
        vec![
            rc.name().into(),
            spec.replicas.unwrap_or_default().into(),
            status.replicas.into(),
            status.ready_replicas.unwrap_or_default().into(),
            age(rc),
            names.into(),
            images.into(),
            labels(spec.selector.as_ref()).into(),
        ]
    }
    fn default(rc: &mut ReplicationController) {
        let spec = rc.spec.get_or_insert_default();
        spec.replicas.get_or_insert(1);
        let Some(template) = &mut spec.template else { return };
        podspec::default_template(template);
        let of_template = template.metadata.as_ref().and_then(|meta| meta.labels.clone());
        if let Some(of_template) = of_template.filter(|map| !map.is_empty()) {
            if spec.selector.as_ref().is_none_or(|selector| selector.is_empty()) {
                spec.selector = Some(of_template.clone());
            }
            if rc.metadata.labels.as_ref().is_none_or(|own| own.is_empty()) {
                rc.metadata.labels = Some(of_template);
            }
        }
        rc.status.get_or_insert_default();
    }
    Row::new::<ReplicationController>(
        SpecStatus::new(parts!(ReplicationController))
            .generation()
            .orphans()
            .default(default)
            .closed(gated::replication_controller)
            .cells(cells)
            .selectable(&["status.replicas"], |rc| {
                let count = rc.status.as_ref().map_or(0, |status| status.replicas);
                vec![("status.replicas", count.to_string())]
            }),
    )
    .short(&["rc"])
    .categories(&["all"])
    .storage("controllers")
    .status()
    .sub(
        "scale",
        Some(("autoscaling", "v1", "Scale")),
        &["get", "patch", "update"],
        crate::scale::behaviour::<ReplicationController>(),
    )
}

pub(super) fn resource_quota() -> Row {
    fn cells(quota: &ResourceQuota) -> Vec<Value> {
        let status = quota.status.clone().unwrap_or_default();
        let (hard, used) = (status.hard.unwrap_or_default(), status.used.unwrap_or_default());
        let (mut requests, mut limits) = (vec![], vec![]);
        for (name, hard) in hard {
            let used = used.get(&name).map_or("0", |quantity| quantity.0.as_str());
            let side = if name.starts_with("limits.") { &mut limits } else { &mut requests };
            side.push(format!("{name}: {used}/{}", hard.0));
        }
        vec![quota.name().into(), requests.join(", ").into(), limits.join(", ").into(), age(quota)]
    }
    Row::new::<ResourceQuota>(SpecStatus::new(parts!(ResourceQuota)).cells(cells))
        .short(&["quota"])
        .status()
}

pub(super) fn secret() -> Row {
    Row::new::<Secret>(SecretStrategy)
}

struct SecretStrategy;

impl apiserver::resource::Strategy for SecretStrategy {
    crate::validate::checked!(Secret);

    fn default(&self, object: &mut dyn Object) {
        let secret = object.expect_mut::<Secret>();
        fill(&mut secret.type_, "Opaque");
        // What comes as text is kept as bytes.
        if let Some(text) = secret.string_data.take() {
            let data = secret.data.get_or_insert_default();
            for (key, value) in text {
                data.insert(key, k8s_openapi::ByteString(value.into_bytes()));
            }
        }
        secret.data.take_if(|data| data.is_empty());
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        &["type"]
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        vec![("type", object.expect::<Secret>().type_.clone().unwrap_or_default())]
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<Secret>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let secret = object.expect::<Secret>();
        let count = secret.data.as_ref().map_or(0, |data| data.len());
        vec![object.name().into(), secret.type_.clone().into(), count.into(), age(object)]
    }
}

pub(crate) fn service_account(
    tokens: std::sync::Arc<dyn apiserver::resource::CreateHandler>,
) -> Row {
    fn default(account: &mut ServiceAccount) {
        account.secrets.take_if(|secrets| secrets.is_empty());
        account.image_pull_secrets.take_if(|secrets| secrets.is_empty());
    }
    fn cells(account: &ServiceAccount) -> Vec<Value> {
        vec![account.name().into(), age(account)]
    }
    let kind = Some(("authentication.k8s.io", "v1", "TokenRequest"));
    let behaviour = apiserver::resource::Behaviour::Create(tokens);
    Row::new::<ServiceAccount>(Simple::new(cells).default(default)).short(&["sa"]).sub(
        "token",
        kind,
        &["create"],
        behaviour,
    )
}

pub(super) fn persistent_volume_claim() -> Row {
    fn cells(claim: &PersistentVolumeClaim) -> Vec<Value> {
        let (spec, status) =
            (claim.spec.clone().unwrap_or_default(), claim.status.clone().unwrap_or_default());
        let bound = spec.volume_name.as_deref().is_some_and(|name| !name.is_empty());
        let capacity =
            status.capacity.as_ref().and_then(|map| map.get("storage")).map(|size| size.0.clone());
        let phase = match claim.metadata.deletion_timestamp {
            Some(_) => "Terminating".to_owned(),
            None => status.phase.unwrap_or_default(),
        };
        vec![
            claim.name().into(),
            phase.into(),
            spec.volume_name.unwrap_or_default().into(),
            capacity.filter(|_| bound).unwrap_or_default().into(),
            if bound { access_modes(status.access_modes.as_deref()) } else { String::new() }.into(),
            spec.storage_class_name.unwrap_or_default().into(),
            spec.volume_attributes_class_name.unwrap_or_else(|| "<unset>".into()).into(),
            age(claim),
            spec.volume_mode.unwrap_or_else(|| "<unset>".into()).into(),
        ]
    }
    fn default(claim: &mut PersistentVolumeClaim) {
        claim.spec.get_or_insert_default().volume_mode.get_or_insert_with(|| "Filesystem".into());
        let status: &mut PersistentVolumeClaimStatus = claim.status.get_or_insert_default();
        fill(&mut status.phase, "Pending");
    }
    Row::new::<PersistentVolumeClaim>(
        SpecStatus::new(parts!(PersistentVolumeClaim))
            .default(default)
            .closed(gated::claim)
            .cells(cells),
    )
    .short(&["pvc"])
    .status()
}

pub(super) fn persistent_volume() -> Row {
    fn cells(volume: &PersistentVolume) -> Vec<Value> {
        let (spec, status) =
            (volume.spec.clone().unwrap_or_default(), volume.status.clone().unwrap_or_default());
        let claim = spec.claim_ref.map(|claim| {
            format!("{}/{}", claim.namespace.unwrap_or_default(), claim.name.unwrap_or_default())
        });
        let size =
            spec.capacity.as_ref().and_then(|map| map.get("storage")).map(|size| size.0.clone());
        let phase = match volume.metadata.deletion_timestamp {
            Some(_) => "Terminating".to_owned(),
            None => status.phase.unwrap_or_default(),
        };
        vec![
            volume.name().into(),
            size.unwrap_or_default().into(),
            access_modes(spec.access_modes.as_deref()).into(),
            spec.persistent_volume_reclaim_policy.unwrap_or_default().into(),
            phase.into(),
            claim.unwrap_or_default().into(),
            spec.storage_class_name.unwrap_or_default().into(),
            spec.volume_attributes_class_name.unwrap_or_else(|| "<unset>".into()).into(),
            status.reason.unwrap_or_default().into(),
            age(volume),
            spec.volume_mode.unwrap_or_else(|| "<unset>".into()).into(),
        ]
    }
    fn default(volume: &mut PersistentVolume) {
        let spec = volume.spec.get_or_insert_default();
        fill(&mut spec.persistent_volume_reclaim_policy, "Retain");
        spec.volume_mode.get_or_insert_with(|| "Filesystem".into());
        podspec::default_source!(spec);
        let status: &mut PersistentVolumeStatus = volume.status.get_or_insert_default();
        // Who changes the phase says when; a new volume's begins now.
        if status.phase.is_none() {
            status.phase = Some("Pending".into());
            status.last_phase_transition_time = Some(machinery::Time(base::clock::now_seconds()));
        }
    }
    Row::new::<PersistentVolume>(
        SpecStatus::new(parts!(PersistentVolume)).default(default).cells(cells),
    )
    .short(&["pv"])
    .status()
}

fn access_modes(modes: Option<&[String]>) -> String {
    let short = |mode: &String| match mode.as_str() {
        "ReadWriteOnce" => "RWO",
        "ReadOnlyMany" => "ROX",
        "ReadWriteMany" => "RWX",
        "ReadWriteOncePod" => "RWOP",
        _ => "",
    };
    modes.unwrap_or_default().iter().map(short).collect::<Vec<_>>().join(",")
}
