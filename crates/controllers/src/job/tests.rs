//! Jobs in steps: created and removed pods, counters, and how Jobs end.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::serde_json::{Value, from_value, json};

use super::failure::Backoff;
use super::plan::{self, Acted, Observed, Step, Tracked};
use super::pod_for;

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn job(spec: Value, status: Value) -> Job {
    let mut spec = spec;
    spec["template"] = json!({"spec": {"restartPolicy": "Never",
        "containers": [{"name": "main", "image": "i"}]}});
    from_value(json!({"metadata": {"name": "work", "namespace": "ns", "uid": "job"},
        "spec": spec, "status": status}))
    .unwrap()
}

fn pod(name: &str, phase: &str, index: Option<usize>, going: bool) -> Arc<Pod> {
    let mut meta = json!({"name": name, "uid": name, "namespace": "ns",
        "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": [plan::FINALIZER]});
    if let Some(index) = index {
        meta["annotations"] = json!({super::indexes::INDEX: index.to_string()});
    }
    if going {
        meta["deletionTimestamp"] = json!("2026-01-01T00:59:59Z");
    }
    Arc::new(from_value(json!({"metadata": meta, "status": {"phase": phase}})).unwrap())
}

/// One reconcile in which every write succeeds.
fn step(job: &Job, pods: &[Arc<Pod>]) -> (String, Tracked, Vec<&'static str>) {
    let observed = Observed {
        job,
        pods,
        settled: true,
        removed: &BTreeSet::new(),
        backoff: Backoff::default(),
        now: now(),
    };
    let mut evaluation = plan::evaluate(&observed, job.spec.as_ref().unwrap());
    let names = |pods: &[Arc<Pod>]| {
        let mut names: Vec<_> = pods.iter().map(|pod| pod.metadata.name.clone().unwrap()).collect();
        names.sort();
        names.join(" ")
    };
    let (text, acted) = match &evaluation.step {
        Step::Nothing => (String::new(), Acted::default()),
        Step::Wait(wait) => (format!("wait {}", wait.as_secs()), Acted::default()),
        Step::End(pods) => (
            format!("end {}", names(pods)),
            Acted { removed: pods.len() as i32, ..Acted::default() },
        ),
        Step::Remove(pods) => (
            format!("remove {}", names(pods)),
            Acted { removed: pods.len() as i32, ..Acted::default() },
        ),
        Step::Create(indexes) => (
            format!("create {:?}", indexes.iter().flatten().collect::<Vec<_>>()),
            Acted { created: indexes.len() as i32, ..Acted::default() },
        ),
    };
    let events = evaluation.settle(&acted).into_iter().map(|(reason, _)| reason).collect();
    (text, evaluation.track(), events)
}

#[test]
fn pods_are_made_and_removed() {
    let check = |spec: Value, status: Value, pods: &[Arc<Pod>], expected: &str| {
        let job = job(spec.clone(), status);
        assert_eq!(step(&job, pods).0, expected, "{spec}");
    };
    let run = |name| pod(name, "Running", None, false);
    check(json!({"parallelism": 2, "completions": 3}), json!({}), &[], "create []");
    check(json!({"parallelism": 2, "completions": 3}), json!({"succeeded": 3}), &[], "");
    check(json!({"parallelism": 1}), json!({}), &[run("a"), run("b")], "remove a");
    check(json!({"parallelism": 2}), json!({"succeeded": 1}), &[run("a")], "");
    check(json!({"parallelism": 1, "suspend": true}), json!({}), &[run("a")], "remove a");
    let indexed = json!({"parallelism": 3, "completions": 4, "completionMode": "Indexed"});
    check(indexed.clone(), json!({}), &[], "create [0, 1, 2]");
    let one = pod("b", "Running", Some(1), false);
    check(
        indexed.clone(),
        json!({"completedIndexes": "0"}),
        std::slice::from_ref(&one),
        "create [2, 3]",
    );
    let twin = pod("c", "Running", Some(1), false);
    check(indexed, json!({}), &[one, twin], "remove b");
    // A failed pod ended an hour ago: its successor need not wait.
    let failed = pod("a", "Failed", None, false);
    check(json!({"completions": 1, "backoffLimit": 1}), json!({}), &[failed], "create []");
    let going = pod("a", "Running", None, true);
    let late = json!({"completions": 1, "podReplacementPolicy": "Failed"});
    check(late, json!({}), std::slice::from_ref(&going), "");
    check(json!({"completions": 1}), json!({}), &[going], "wait 9");
}

#[test]
fn jobs_end() {
    let check = |spec: Value, status: Value, pods: &[Arc<Pod>], interim: &str, end: &str| {
        let job = job(spec.clone(), status);
        let (_, mut tracked, _) = step(&job, pods);
        let last =
            tracked.status.conditions.iter().flatten().next_back().map_or(String::new(), |one| {
                format!("{} {}", one.type_, one.reason.clone().unwrap_or_default())
            });
        assert_eq!(last, interim, "{spec}");
        tracked.with_finalizer.clear();
        let terminal = tracked.conclude(true).1.map(|one| one.type_).unwrap_or_default();
        assert_eq!(terminal, end, "{spec}");
    };
    let done = pod("a", "Succeeded", None, false);
    let failed = pod("a", "Failed", None, false);
    let completions = json!({"completions": 1, "parallelism": 1});
    check(completions, json!({}), &[done], "SuccessCriteriaMet CompletionsReached", "Complete");
    let never = json!({"completions": 1, "backoffLimit": 0});
    let limit = "FailureTarget BackoffLimitExceeded";
    check(never.clone(), json!({}), std::slice::from_ref(&failed), limit, "Failed");
    check(json!({"completions": 1, "backoffLimit": 6}), json!({}), &[failed], "", "");
    let going = pod("b", "Running", None, true);
    let status = json!({"failed": 1});
    check(never, status, &[going], limit, "");
    let started = json!({"startTime": "2026-01-01T00:59:00Z"});
    let deadline = json!({"completions": 1, "activeDeadlineSeconds": 60});
    check(deadline, started, &[], "FailureTarget DeadlineExceeded", "Failed");
    let indexed = json!({"completions": 2, "parallelism": 2, "completionMode": "Indexed",
        "backoffLimitPerIndex": 0, "backoffLimit": 100});
    let both = [pod("a", "Failed", Some(0), false), pod("b", "Succeeded", Some(1), false)];
    check(indexed.clone(), json!({}), &both, "FailureTarget FailedIndexes", "Failed");
    let mut limited = indexed.clone();
    limited["maxFailedIndexes"] = 0.into();
    let early = [both[0].clone()];
    check(limited, json!({}), &early, "FailureTarget MaxFailedIndexesExceeded", "Failed");
    let mut lucky = indexed;
    lucky["successPolicy"] = json!({"rules": [{"succeededIndexes": "1"}]});
    let met = "SuccessCriteriaMet SuccessPolicy";
    check(lucky, json!({}), &[both[1].clone()], met, "Complete");
}

#[test]
fn every_pod_is_counted_once() {
    let work = job(json!({"completions": 3, "parallelism": 3}), json!({}));
    let pods = [pod("a", "Succeeded", None, false), pod("b", "Failed", None, false)];
    let (_, mut tracked, _) = step(&work, &pods);
    assert!(tracked.changed);
    assert_eq!(tracked.release.len(), 2);
    let lists = tracked.status.uncounted_terminated_pods.clone().unwrap();
    assert_eq!((lists.succeeded, lists.failed), (Some(vec!["a".into()]), Some(vec!["b".into()])));
    // The same pods again: listed, not yet counted.
    let mut again = work.clone();
    again.status = Some(tracked.status.clone());
    let (_, second, _) = step(&again, &pods);
    assert_eq!(second.status.uncounted_terminated_pods, tracked.status.uncounted_terminated_pods);
    // One finalizer is gone.
    tracked.with_finalizer.remove("a");
    assert!(tracked.conclude(false).0);
    let status = tracked.status;
    assert_eq!((status.succeeded, status.failed), (Some(1), None));
    let lists = status.uncounted_terminated_pods.unwrap();
    assert_eq!((lists.succeeded, lists.failed), (None, Some(vec!["b".into()])));
}

#[test]
fn suspending_and_resuming_is_told() {
    let suspended = job(json!({"parallelism": 1, "suspend": true}), json!({}));
    let (_, tracked, events) = step(&suspended, &[]);
    assert_eq!(events, ["Suspended"]);
    assert_eq!(tracked.status.start_time, None);
    let mut resumed = job(json!({"parallelism": 1, "suspend": false}), json!({}));
    resumed.status = Some(tracked.status);
    let (text, tracked, events) = step(&resumed, &[]);
    assert_eq!((text.as_str(), events), ("create []", vec!["Resumed"]));
    let condition = &tracked.status.conditions.unwrap()[0];
    assert_eq!(condition.status, "False");
    assert!(tracked.status.start_time.is_some());
}

#[test]
fn a_pod_of_an_index_knows_it() {
    let indexed = job(
        json!({"completions": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 2}),
        json!({}),
    );
    let replaced = pod("old", "Failed", Some(1), false);
    let made = pod_for(&indexed, Some(1), Some(&replaced));
    assert_eq!(made.metadata.generate_name.as_deref(), Some("work-1-"));
    assert_eq!(made.metadata.finalizers, Some(vec![plan::FINALIZER.to_owned()]));
    assert_eq!(made.metadata.annotations.unwrap()[super::failure::FAILURES], "1");
    assert_eq!(made.metadata.labels.unwrap()[super::indexes::INDEX], "1");
    let spec = made.spec.unwrap();
    assert_eq!(spec.hostname.as_deref(), Some("work-1"));
    assert_eq!(spec.containers[0].env.as_ref().unwrap()[0].name, "JOB_COMPLETION_INDEX");
    let mut long = indexed;
    long.metadata.name = Some("x".repeat(63));
    let made = pod_for(&long, Some(10), None);
    assert_eq!(made.metadata.generate_name.unwrap().len(), 58);
}
