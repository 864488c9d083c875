//! StatefulSets in steps: order, partitions, revisions, claims.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::serde_json::{Value, from_value, json};

use super::plan::{self, Action, Observed};
use super::revision::{self, Change, Revision};

fn set(spec: Value) -> StatefulSet {
    let mut all = json!({
        "replicas": 3, "serviceName": "web",
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": []}},
    });
    for (key, value) in spec.as_object().unwrap() {
        all[key] = value.clone();
    }
    from_value(json!({"metadata": {"name": "web", "namespace": "ns", "uid": "set"}, "spec": all}))
        .unwrap()
}

/// `name phase[!]@revision`: `!` for a pod that goes, `~` for one that is not ready.
fn pod(text: &str) -> Arc<Pod> {
    let (rest, revision) = text.split_once('@').unwrap_or((text, "new"));
    let (name, state) = rest.split_once(' ').unwrap_or((rest, "Running"));
    let phase = state.trim_end_matches(['!', '~']);
    let ready = if phase == "Running" && !state.contains('~') { "True" } else { "False" };
    let mut meta = json!({"name": name, "namespace": "ns", "uid": name, "labels": {
        "app": "web", "controller-revision-hash": revision,
        "statefulset.kubernetes.io/pod-name": name}});
    if state.contains('!') {
        meta["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    Arc::new(
        from_value(json!({"metadata": meta, "spec": {"containers": []}, "status": {
            "phase": phase, "conditions": [{"type": "Ready", "status": ready,
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}))
        .unwrap(),
    )
}

fn now() -> Timestamp {
    "2026-01-01T00:00:05Z".parse().unwrap()
}

fn decide(
    set: &StatefulSet,
    pods: &[&str],
    claims: &[PersistentVolumeClaim],
) -> (String, plan::Outcome) {
    let pods: Vec<_> = pods.iter().map(|text| pod(text)).collect();
    let template = set.spec.as_ref().unwrap().template.clone();
    let claims: BTreeMap<_, _> = claims
        .iter()
        .map(|claim| (claim.metadata.name.clone().unwrap(), Arc::new(claim.clone())))
        .collect();
    let observed = Observed {
        set,
        spec: set.spec.as_ref().unwrap(),
        current: &Revision { name: "old".into(), template: template.clone() },
        update: &Revision { name: "new".into(), template },
        collisions: 0,
        pods: &pods,
        claims: &claims,
        now: now(),
    };
    let decided = plan::plan(&observed);
    let name = |pod: &Pod| pod.metadata.name.clone().unwrap();
    let told: Vec<_> = decided
        .actions
        .iter()
        .map(|action| match action {
            Action::Create { claims, pod } => {
                let labels = pod.metadata.labels.as_ref().unwrap();
                let claims = "c".repeat(claims.len());
                format!("+{}@{}{claims}", name(pod), labels["controller-revision-hash"])
            }
            Action::Claims { claims, pod } => format!("c{} {}", claims.len(), name(pod)),
            Action::Delete(pod) => format!("-{}", name(pod)),
            Action::Update(pod) => format!("~{}", name(pod)),
            Action::Own(claim) => {
                let owners = claim.metadata.owner_references.iter().flatten();
                let owners: Vec<_> = owners.map(|owner| owner.kind.as_str()).collect();
                format!("own {} {owners:?}", claim.metadata.name.as_ref().unwrap())
            }
            Action::Blocked(name) => format!("blocked {name}"),
        })
        .collect();
    (told.join(" "), decided)
}

#[test]
fn pods_come_and_go_in_order() {
    let check = |spec: Value, pods: &[&str], expected: &str| {
        assert_eq!(decide(&set(spec.clone()), pods, &[]).0, expected, "{spec} {pods:?}");
    };
    let plain = || json!({});
    check(plain(), &[], "+web-0@new");
    check(plain(), &["web-0 Pending"], "");
    check(plain(), &["web-0 Running~"], "");
    check(plain(), &["web-0"], "+web-1@new");
    check(plain(), &["web-0", "web-1", "web-2"], "");
    check(plain(), &["web-0", "web-2"], "+web-1@new");
    check(plain(), &["web-0", "web-1 Failed", "web-2"], "-web-1");
    check(plain(), &["web-0", "web-1 Succeeded!", "web-2"], "");
    check(plain(), &["web-0", "web-1 Running!", "web-2", "web-3"], "");
    check(plain(), &["web-0", "web-1", "web-2", "web-3", "web-4"], "-web-4");
    check(plain(), &["web-0", "web-1", "web-2", "web-3", "web-4 Running!"], "");
    check(plain(), &["web-0", "web-1", "web-2", "web-3 Running~", "web-4"], "-web-4");
    check(plain(), &["web-0", "web-1", "web-2", "web-3 Running~", "web-4 Running~"], "");
    check(json!({"replicas": 0}), &["web-0 Running~"], "-web-0");
    check(json!({"minReadySeconds": 10}), &["web-0"], "");
    check(json!({"ordinals": {"start": 5}}), &["web-5"], "+web-6@new");
    let parallel = || json!({"podManagementPolicy": "Parallel"});
    check(parallel(), &[], "+web-0@new +web-1@new +web-2@new");
    check(parallel(), &["web-0 Pending", "web-3", "web-4"], "+web-1@new +web-2@new -web-4 -web-3");
}

#[test]
fn updates_go_from_the_last_to_the_first() {
    let check = |spec: Value, pods: &[&str], expected: &str| {
        assert_eq!(decide(&set(spec.clone()), pods, &[]).0, expected, "{spec} {pods:?}");
    };
    let old = ["web-0@old", "web-1@old", "web-2@old"];
    check(json!({}), &old, "-web-2");
    check(json!({}), &["web-0@old", "web-1@old", "web-2 Running~@new"], "");
    check(json!({}), &["web-0@old", "web-1@old", "web-2@new"], "-web-1");
    check(json!({"updateStrategy": {"type": "OnDelete"}}), &old, "");
    let partition = json!({"updateStrategy": {"rollingUpdate": {"partition": 2}}});
    check(partition.clone(), &old, "-web-2");
    check(partition.clone(), &["web-0@old", "web-1@old", "web-2@new"], "");
    check(partition, &["web-0@old"], "+web-1@old");
    let two = json!({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}});
    check(two.clone(), &old, "-web-2 -web-1");
    let parallel = json!({"podManagementPolicy": "Parallel",
        "updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}});
    check(parallel, &["web-0@old", "web-1@old", "web-2 Running~@new"], "-web-1");
}

#[test]
fn a_status_tells_of_revisions() {
    let (_, decided) = decide(&set(json!({})), &["web-0@old", "web-1@old", "web-2@new"], &[]);
    let status = decided.status;
    assert_eq!((status.replicas, status.ready_replicas), (3, Some(3)));
    assert_eq!((status.current_replicas, status.updated_replicas), (Some(1), Some(1)));
    assert_eq!(status.current_revision.as_deref(), Some("old"));
    let (_, decided) = decide(&set(json!({})), &["web-0", "web-1", "web-2"], &[]);
    assert_eq!(decided.status.current_revision.as_deref(), Some("new"));
    let late = set(json!({"minReadySeconds": 10}));
    let (_, decided) = decide(&late, &["web-0"], &[]);
    assert_eq!(decided.status.available_replicas, Some(0));
    assert_eq!(decided.recheck.map(|rest| rest.as_secs()), Some(5));
}

#[test]
fn claims_are_made_and_owned() {
    let templates = json!([{"metadata": {"name": "data"}, "spec": {}}]);
    let claim = |name: &str, meta: Value| -> PersistentVolumeClaim {
        let mut meta = meta;
        meta["name"] = name.into();
        from_value(json!({"metadata": meta, "spec": {}})).unwrap()
    };
    let plain = set(json!({"volumeClaimTemplates": templates}));
    assert_eq!(decide(&plain, &[], &[]).0, "+web-0@newc");
    let there = claim("data-web-0", json!({}));
    let (told, decided) = decide(&plain, &[], std::slice::from_ref(&there));
    assert_eq!(told, "+web-0@new");
    let Action::Create { pod, .. } = &decided.actions[0] else { panic!("a pod") };
    let volumes = pod.spec.as_ref().unwrap().volumes.as_ref().unwrap();
    let source = volumes[0].persistent_volume_claim.as_ref().unwrap();
    assert_eq!((volumes[0].name.as_str(), source.claim_name.as_str()), ("data", "data-web-0"));
    let going = claim("data-web-0", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
    assert_eq!(decide(&plain, &[], &[going]).0, "blocked data-web-0");
    let retention = |deleted: &str, scaled: &str| {
        set(json!({"replicas": 1, "volumeClaimTemplates": templates,
            "persistentVolumeClaimRetentionPolicy":
                {"whenDeleted": deleted, "whenScaled": scaled}}))
    };
    let one = claim("data-web-1", json!({}));
    let both = retention("Delete", "Delete");
    let mounted = decide(&both, &["web-0", "web-1"], &[there, one]).0;
    assert!(mounted.starts_with("own data-web-0 [\"StatefulSet\"]"), "{mounted}");
    assert!(mounted.contains("own data-web-1 [\"Pod\"] -web-1"), "{mounted}");
}

#[test]
fn going_back_renumbers_the_old_revision() {
    let web = set(json!({}));
    let Change::Create(mut first) = revision::change(&web, &[], 0) else { panic!("new") };
    assert_eq!(first.revision, 1);
    first.metadata.resource_version = Some("1".into());
    let first = Arc::new(first);
    assert!(matches!(revision::change(&web, std::slice::from_ref(&first), 0), Change::None(_)));
    let other = set(json!({"template": {"spec": {"hostname": "x"}}}));
    let Change::Create(second) = revision::change(&other, std::slice::from_ref(&first), 0) else {
        panic!("new")
    };
    assert_eq!(second.revision, 2);
    let both = [first, Arc::new(second)];
    let Change::Renumber(back) = revision::change(&web, &both, 0) else { panic!("back") };
    assert_eq!(back.revision, 3);
    let restored = Revision::of(&back).unwrap();
    assert_eq!(restored.template, web.spec.as_ref().unwrap().template);
    let limited = set(json!({"revisionHistoryLimit": 0}));
    let name = |one: &ControllerRevision| one.metadata.name.clone().unwrap();
    let gone = revision::surplus(&limited, &both, &[&name(&both[1])]);
    assert_eq!(gone.iter().map(|key| key.name.to_string()).collect::<Vec<_>>(), [name(&both[0])]);
}
