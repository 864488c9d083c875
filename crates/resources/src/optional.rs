//! Kinds of which no version is served by default: what there is of them beside their columns and
//! rules. See [`crate::versions`].

use k8s_openapi::api::{
    apiserverinternal::v1alpha1::StorageVersion,
    certificates::v1beta1::{ClusterTrustBundle, PodCertificateRequest},
    coordination::v1beta1::LeaseCandidate,
    resource::v1alpha3::{DeviceTaintRule, ResourcePoolStatusRequest},
    scheduling::v1alpha2::{PodGroup, Workload},
    storagemigration::v1beta1::StorageVersionMigration,
};
use machinery::{Object, Time};
use serde_json::Value;

use crate::parts::{Simple, SpecStatus, parts};
use crate::print::{age, labels, name_and_age_cells, or_none, since};
use crate::{Row, gated, printers};

pub(crate) const ROWS: &[fn() -> Row] = &[
    cluster_trust_bundle,
    pod_certificate_request,
    lease_candidate,
    || {
        let strategy = SpecStatus::new(parts!(StorageVersion));
        Row::new::<StorageVersion>(strategy.cells(storage_version_cells)).status()
    },
    device_taint_rule,
    pool_status_request,
    || {
        Row::new::<Workload>(
            Simple::<Workload>::new(|one| name_and_age_cells(one)).closed(gated::workload),
        )
    },
    || {
        let strategy = SpecStatus::new(parts!(PodGroup)).closed(gated::pod_group);
        Row::new::<PodGroup>(strategy.cells(pod_group_cells)).status()
    },
    || {
        let strategy = SpecStatus::new(parts!(StorageVersionMigration));
        Row::new::<StorageVersionMigration>(strategy.cells(printers::storage_version_migration))
            .status()
    },
];

fn cluster_trust_bundle() -> Row {
    fn cells(bundle: &ClusterTrustBundle) -> Vec<Value> {
        let signer = bundle.spec.signer_name.clone().unwrap_or_default();
        vec![bundle.name().into(), or_none(signer).into()]
    }
    let strategy = Simple::new(cells).selectable(&["spec.signerName"], |bundle| {
        vec![("spec.signerName", bundle.spec.signer_name.clone().unwrap_or_default())]
    });
    Row::new::<ClusterTrustBundle>(strategy)
}

fn pod_certificate_request() -> Row {
    const DAY: i32 = 86_400;
    fn default(request: &mut PodCertificateRequest) {
        request.spec.max_expiration_seconds.get_or_insert(DAY);
    }
    fn cells(request: &PodCertificateRequest) -> Vec<Value> {
        let spec = &request.spec;
        let conditions =
            request.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut kinds = conditions.map(|one| one.type_.as_str());
        let state = kinds.rfind(|kind| matches!(*kind, "Issued" | "Denied" | "Failed"));
        vec![
            request.name().into(),
            spec.pod_name.clone().into(),
            spec.service_account_name.clone().into(),
            spec.node_name.clone().into(),
            spec.signer_name.clone().into(),
            state.unwrap_or("Pending").into(),
            labels(spec.unverified_user_annotations.as_ref()).into(),
        ]
    }
    let strategy = SpecStatus::new(parts!(PodCertificateRequest)).selectable(
        &["spec.signerName", "spec.podName", "spec.nodeName"],
        |request| {
            let spec = &request.spec;
            vec![
                ("spec.signerName", spec.signer_name.clone()),
                ("spec.podName", spec.pod_name.clone()),
                ("spec.nodeName", spec.node_name.clone()),
            ]
        },
    );
    Row::new::<PodCertificateRequest>(strategy.default(default).cells(cells)).status()
}

fn lease_candidate() -> Row {
    fn cells(candidate: &LeaseCandidate) -> Vec<Value> {
        let spec = &candidate.spec;
        vec![
            candidate.name().into(),
            spec.lease_name.clone().into(),
            spec.binary_version.clone().into(),
            spec.emulation_version.clone().unwrap_or_default().into(),
            age(candidate),
        ]
    }
    Row::new::<LeaseCandidate>(Simple::new(cells))
}

fn storage_version_cells(version: &StorageVersion) -> Vec<Value> {
    const SHOWN: usize = 3;
    let status = version.status.clone().unwrap_or_default();
    let all = status.storage_versions.unwrap_or_default();
    let shown = all.iter().take(SHOWN);
    let shown: Vec<String> =
        shown.map(|one| format!("{}={}", one.api_server_id, one.encoding_version)).collect();
    let listed = match (shown.is_empty(), all.len().checked_sub(SHOWN).filter(|more| *more > 0)) {
        (true, _) => "<unset>".into(),
        (_, None) => shown.join(","),
        (_, Some(more)) => format!("{} + {more} more...", shown.join(",")),
    };
    let common = status.common_encoding_version.unwrap_or_else(|| "<unset>".into());
    vec![version.name().into(), common.into(), listed.into(), age(version)]
}

fn device_taint_rule() -> Row {
    fn now() -> Time {
        Time(base::clock::now_seconds())
    }
    fn default(rule: &mut DeviceTaintRule) {
        rule.spec.taint.time_added.get_or_insert_with(now);
    }
    /// Another effect is another taint, since now.
    fn changed(rule: &mut DeviceTaintRule, old: Option<&DeviceTaintRule>) {
        let (taint, Some(old)) = (&mut rule.spec.taint, old) else { return };
        if taint.effect != old.spec.taint.effect && taint.time_added == old.spec.taint.time_added {
            taint.time_added = Some(now());
        }
    }
    fn cells(rule: &DeviceTaintRule) -> Vec<Value> {
        let taint = &rule.spec.taint;
        let added = taint.time_added.as_ref().map_or(String::new(), |time| since(Some(time)));
        vec![
            rule.name().into(),
            taint.key.clone().into(),
            taint.value.clone().unwrap_or_default().into(),
            taint.effect.clone().into(),
            added.into(),
            age(rule),
        ]
    }
    let strategy = SpecStatus::new(parts!(DeviceTaintRule)).generation();
    let strategy = strategy.default(default).closed(changed).cells(cells);
    Row::new::<DeviceTaintRule>(strategy).status()
}

fn pool_status_request() -> Row {
    const LIMIT: i32 = 100;
    fn default(request: &mut ResourcePoolStatusRequest) {
        request.spec.limit.get_or_insert(LIMIT);
    }
    let strategy = SpecStatus::new(parts!(ResourcePoolStatusRequest));
    Row::new::<ResourcePoolStatusRequest>(strategy.default(default).cells(pool_status_cells))
        .status()
}

fn pool_status_cells(request: &ResourcePoolStatusRequest) -> Vec<Value> {
    let driver = request.spec.driver.clone();
    let Some(status) = &request.status else {
        let unknown = || Value::from("-");
        return vec![
            request.name().into(),
            driver.into(),
            unknown(),
            unknown(),
            unknown(),
            unknown(),
            unknown(),
            0.into(),
            "Pending".into(),
            "<none>".into(),
        ];
    };
    let mut done = status.conditions.iter().flatten();
    let done =
        done.find(|one| one.status == "True" && matches!(&*one.type_, "Complete" | "Failed"));
    let is_failed = done.is_some_and(|one| one.type_ == "Failed");
    let completed = done.filter(|_| !is_failed);
    let pools = status.pools.as_deref().unwrap_or_default();
    let shown = i32::try_from(pools.len()).unwrap_or(i32::MAX);
    let state = match completed {
        _ if is_failed => "Failed".into(),
        None => "Pending".into(),
        Some(_) if status.pool_count > shown => {
            format!("Complete ({shown}/{} pools)", status.pool_count)
        }
        Some(_) => "Complete".into(),
    };
    let figure = |of: fn(&k8s_openapi::api::resource::v1alpha3::PoolStatus) -> i32| match is_failed
    {
        true => "-".to_owned(),
        false => pools.iter().map(|pool| i64::from(of(pool))).sum::<i64>().to_string(),
    };
    vec![
        request.name().into(),
        driver.into(),
        figure(|pool| pool.total_devices.unwrap_or_default()).into(),
        figure(|pool| pool.available_devices.unwrap_or_default()).into(),
        figure(|pool| pool.allocated_devices.unwrap_or_default()).into(),
        figure(|pool| pool.unavailable_devices.unwrap_or_default()).into(),
        figure(|pool| i32::from(pool.validation_error.is_some())).into(),
        status.pool_count.into(),
        state.into(),
        completed.map_or("<none>".into(), |one| since(Some(&one.last_transition_time))).into(),
    ]
}

fn pod_group_cells(group: &PodGroup) -> Vec<Value> {
    let spec = &group.spec;
    let policy = if spec.scheduling_policy.gang.is_some() { "Gang" } else { "Basic" };
    let conditions = group.status.as_ref().and_then(|status| status.conditions.as_deref());
    let of = |kind: &str| conditions.unwrap_or_default().iter().rfind(|one| one.type_ == kind);
    let status = match (of("DisruptionTarget"), of("PodGroupScheduled")) {
        (Some(disrupted), _) => disrupted.reason.clone(),
        (None, Some(scheduled)) if scheduled.status == "True" => "Scheduled".into(),
        (None, Some(_)) => "Unschedulable".into(),
        (None, None) => "Pending".into(),
    };
    let template = spec.pod_group_template_ref.as_ref();
    let workload = template.and_then(|one| Some(one.workload.as_ref()?.workload_name.clone()));
    let workload = workload.unwrap_or_else(|| "<none>".into());
    vec![group.name().into(), policy.into(), workload.into(), status.into(), age(group)]
}
