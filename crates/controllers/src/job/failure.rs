//! The meaning of a pod's end: failed or not, counted or not, and the backoff after it. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{
    Job, PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyRule,
    SuccessPolicy,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use super::indexes::{Intervals, index_of};
use crate::pod;

pub const FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
pub const IGNORED: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
const BACKOFF: Duration = Duration::from_secs(10);
const MAX_BACKOFF: Duration = Duration::from_secs(600);

/// The action of the pod failure policy for a failed pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub ignored: bool,
    pub fails_index: bool,
    /// Set if the whole Job fails.
    pub fails_job: Option<String>,
}

pub fn judge(policy: Option<&PodFailurePolicy>, failed: &Pod) -> Verdict {
    for (at, rule) in policy.iter().flat_map(|policy| &policy.rules).enumerate() {
        let Some(why) = matches(rule, failed) else { continue };
        let verdict = Verdict::default();
        return match rule.action.as_str() {
            "Ignore" => Verdict { ignored: true, ..verdict },
            "FailIndex" => Verdict { fails_index: true, ..verdict },
            "FailJob" => {
                let message = format!("{why} matching FailJob rule at index {at}");
                Verdict { fails_job: Some(message), ..verdict }
            }
            "Count" => verdict,
            _ => continue,
        };
    }
    Verdict::default()
}

/// The action of the rule that a failed pod matches.
pub fn action<'a>(policy: Option<&'a PodFailurePolicy>, failed: &Pod) -> Option<&'a str> {
    let mut rules = policy?.rules.iter();
    rules.find(|rule| matches(rule, failed).is_some()).map(|rule| rule.action.as_str())
}

/// Says why, in the words of the condition's message.
fn matches(rule: &PodFailurePolicyRule, failed: &Pod) -> Option<String> {
    let status = failed.status.as_ref()?;
    let of = format!(
        "{}/{}",
        failed.metadata.namespace.as_deref().unwrap_or_default(),
        failed.metadata.name.as_deref().unwrap_or_default()
    );
    if let Some(codes) = &rule.on_exit_codes {
        let containers = status.container_statuses.iter().flatten();
        let mut all = containers.chain(status.init_container_statuses.iter().flatten());
        let (name, code) = all.find_map(|one| exit_code(one, codes))?;
        return Some(format!("Container {name} for pod {of} failed with exit code {code}"));
    }
    let patterns = rule.on_pod_conditions.as_ref()?;
    let mut conditions = status.conditions.iter().flatten();
    let found = conditions.find(|condition| {
        patterns.iter().any(|one| {
            let wanted = one.status.as_deref().unwrap_or("True");
            one.type_ == condition.type_ && wanted == condition.status
        })
    })?;
    Some(format!("Pod {of} has condition {}", found.type_))
}

fn exit_code<'a>(
    status: &'a ContainerStatus,
    rule: &PodFailurePolicyOnExitCodesRequirement,
) -> Option<(&'a str, i32)> {
    let code = status.state.as_ref()?.terminated.as_ref()?.exit_code;
    let named = rule.container_name.as_ref().is_none_or(|name| *name == status.name);
    let listed = match rule.operator.as_str() {
        "In" => rule.values.contains(&code),
        "NotIn" => !rule.values.contains(&code),
        _ => false,
    };
    (named && code != 0 && listed).then_some((&status.name, code))
}

/// Whether pods are replaced only once they have ended, not when they are going.
pub fn only_failed_are_replaced(job: &Job) -> bool {
    job.spec.as_ref().is_some_and(|spec| {
        spec.pod_replacement_policy.as_deref() == Some("Failed")
            || spec.pod_failure_policy.is_some()
    })
}

pub fn is_failed(pod: &Pod, job: &Job) -> bool {
    match pod::phase(pod) {
        "Failed" => true,
        "Succeeded" => false,
        // A pod of a lost node may never get to Failed.
        _ => pod::is_deleting(pod) && !only_failed_are_replaced(job),
    }
}

/// Whether this failed pod was its index's last try.
pub fn is_index_failed(pod: &Pod, job: &Job) -> bool {
    let Some(spec) = job.spec.as_ref().filter(|_| is_failed(pod, job)) else { return false };
    let verdict = judge(spec.pod_failure_policy.as_ref(), pod);
    let limit = spec.backoff_limit_per_index.unwrap_or(i32::MAX);
    verdict.fails_index || (!verdict.ignored && failures(pod) >= limit)
}

/// Restarts of containers count, too, where the kubelet restarts them.
pub fn restarts_exceed_limit(job: &Job, pods: &[std::sync::Arc<Pod>]) -> bool {
    let Some(spec) = &job.spec else { return false };
    let policy = spec.template.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref());
    if policy != Some("OnFailure") {
        return false;
    }
    let alive = pods.iter().filter(|pod| matches!(pod::phase(pod), "Running" | "Pending"));
    let statuses = alive.filter_map(|pod| pod.status.as_ref()).flat_map(|status| {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    });
    let restarts: i32 = statuses.map(|status| status.restart_count).sum();
    match spec.backoff_limit.unwrap_or(6) {
        0 => restarts > 0,
        limit => restarts >= limit,
    }
}

fn count(pod: &Pod, annotation: &str) -> i32 {
    let text = pod.metadata.annotations.as_ref().and_then(|all| all.get(annotation));
    text.and_then(|text| text.parse().ok()).filter(|count| *count >= 0).unwrap_or(0)
}

pub fn failures(pod: &Pod) -> i32 {
    count(pod, FAILURES)
}

pub fn all_failures(pod: &Pod) -> i32 {
    count(pod, FAILURES) + count(pod, IGNORED)
}

/// The counts that the successor of a pod of its index carries: failures, ignored failures.
pub fn inherited(job: &Job, replaced: Option<&Pod>) -> (i32, i32) {
    let Some(pod) = replaced else { return (0, 0) };
    let policy = job.spec.as_ref().and_then(|spec| spec.pod_failure_policy.as_ref());
    let ignored = judge(policy, pod).ignored;
    (failures(pod) + i32::from(!ignored), count(pod, IGNORED) + i32::from(ignored))
}

/// The message of the rule that is met.
pub fn success(
    policy: Option<&SuccessPolicy>,
    completions: i32,
    done: &Intervals,
) -> Option<String> {
    if done.is_empty() {
        return None;
    }
    let met = |count: Option<i32>, have: usize| count.is_some_and(|count| have >= count as usize);
    let rules = policy.iter().flat_map(|policy| &policy.rules).enumerate();
    let mut rules = rules.filter(|(_, rule)| match &rule.succeeded_indexes {
        Some(indexes) => {
            let wanted = Intervals::parse(indexes, completions.max(0) as usize);
            let common = wanted.common(done);
            !wanted.is_empty() && (common == wanted.total() || met(rule.succeeded_count, common))
        }
        None => met(rule.succeeded_count, done.total()),
    });
    rules.next().map(|(at, _)| format!("Matched rules at index {at}"))
}

/// Failures since the last success: the delay before the next pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    failures: i32,
    last: Option<Timestamp>,
}

impl Backoff {
    /// With pods that ended since.
    pub fn after(self, succeeded: &[&Pod], failed: &[&Pod]) -> Self {
        let last_of = |pods: &[&Pod]| pods.iter().map(|pod| finished_at(pod)).max();
        match (last_of(succeeded), last_of(failed)) {
            (None, None) => self,
            (None, last) => Self { failures: self.failures + failed.len() as i32, last },
            (Some(_), None) => Self::default(),
            (Some(success), _) => {
                let later = failed.iter().map(|pod| finished_at(pod)).filter(|at| *at > success);
                Self { failures: later.clone().count() as i32, last: later.max() }
            }
        }
    }

    pub fn remaining(self, now: Timestamp) -> Duration {
        let Some(last) = self.last.filter(|_| self.failures > 0) else { return Duration::ZERO };
        let doublings = (self.failures - 1).clamp(0, 16) as u32;
        let delay = (BACKOFF * 2u32.pow(doublings)).min(MAX_BACKOFF);
        delay.saturating_sub(Duration::try_from(now.duration_since(last)).unwrap_or_default())
    }

    /// The backoff of one index, whose last failed pod is known.
    pub fn of_index(last: Option<&Pod>) -> Self {
        last.map_or_else(Self::default, |pod| Self {
            failures: all_failures(pod) + 1,
            last: Some(finished_at(pod)),
        })
    }
}

/// When the pod ended, from the best known source.
pub fn finished_at(pod: &Pod) -> Timestamp {
    let status = pod.status.as_ref();
    let ends = |one: &ContainerStatus| {
        one.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref().map(|time| time.0)
    };
    let statuses = status.and_then(|status| status.container_statuses.as_ref());
    let ended: Option<Vec<_>> =
        statuses.filter(|all| !all.is_empty()).and_then(|all| all.iter().map(ends).collect());
    let by_containers = ended.and_then(|times| times.into_iter().max());
    let by_condition = || {
        let ready = pod::condition(pod, "Ready").filter(|ready| ready.status == "False")?;
        ready.last_transition_time.as_ref().map(|time| time.0)
    };
    let by_deletion = || {
        let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
        let at = pod.metadata.deletion_timestamp.as_ref()?.0;
        Timestamp::from_second(at.as_second() - grace).ok()
    };
    let created = || pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    by_containers.or_else(by_condition).or_else(by_deletion).or_else(created).unwrap_or_default()
}

/// The failed pod of each index that waits for a successor: it keeps its finalizer until then,
/// because the successor inherits its counts.
pub fn awaiting_successors(
    job: &Job,
    pods: &[std::sync::Arc<Pod>],
    settled: impl Fn(usize) -> bool,
) -> std::collections::BTreeMap<usize, std::sync::Arc<Pod>> {
    let completions = job.spec.as_ref().and_then(|spec| spec.completions);
    let mut last = std::collections::BTreeMap::new();
    for pod in pods.iter().filter(|pod| is_failed(pod, job)) {
        let Some(index) = index_of(pod, completions).filter(|index| !settled(*index)) else {
            continue;
        };
        let known = last.entry(index).or_insert_with(|| pod.clone());
        if all_failures(known) <= all_failures(pod) && finished_at(pod) >= finished_at(known) {
            *known = pod.clone();
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    fn failed_pod(exit: i32, conditions: Value) -> Pod {
        from_value(json!({
            "metadata": {"name": "p", "namespace": "ns"},
            "status": {"phase": "Failed", "conditions": conditions, "containerStatuses": [
                {"name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                 "state": {"terminated": {"exitCode": exit, "finishedAt": "2026-01-01T00:00:00Z"}}}]},
        }))
        .unwrap()
    }

    #[test]
    fn rules_judge_failed_pods() {
        let policy: PodFailurePolicy = from_value(json!({"rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42], "containerName": "main"}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [1, 42]}},
        ]}))
        .unwrap();
        let check = |exit: i32, conditions: Value, expected: Verdict| {
            assert_eq!(judge(Some(&policy), &failed_pod(exit, conditions)), expected, "{exit}");
        };
        let message =
            "Container main for pod ns/p failed with exit code 42 matching FailJob rule at index 0";
        check(42, json!([]), Verdict { fails_job: Some(message.into()), ..Verdict::default() });
        let target = json!([{"type": "DisruptionTarget", "status": "True"}]);
        check(1, target, Verdict { ignored: true, ..Verdict::default() });
        check(3, json!([]), Verdict { fails_index: true, ..Verdict::default() });
        check(1, json!([]), Verdict::default());
    }

    #[test]
    fn delays_double_from_ten_seconds_to_ten_minutes() {
        let pod = failed_pod(1, json!([]));
        let end = finished_at(&pod);
        let check = |failures: usize, expected: u64| {
            let failed = vec![&pod; failures];
            let left = Backoff::default().after(&[], &failed).remaining(end);
            assert_eq!(left, Duration::from_secs(expected), "{failures} failures");
        };
        check(0, 0);
        check(1, 10);
        check(2, 20);
        check(3, 40);
        check(7, 600);
        check(40, 600);
        let forgotten = Backoff::default().after(&[], &[&pod]).after(&[&pod], &[]);
        assert_eq!(forgotten, Backoff::default());
    }

    #[test]
    fn success_policies_need_their_indexes() {
        let policy: SuccessPolicy = from_value(json!({"rules": [
            {"succeededIndexes": "0-2", "succeededCount": 2}, {"succeededCount": 4}]}))
        .unwrap();
        let check = |done: &str, expected: Option<&str>| {
            let done = Intervals::parse(done, 10);
            assert_eq!(success(Some(&policy), 10, &done).as_deref(), expected, "{done}");
        };
        check("", None);
        check("0,5", None);
        check("0,2", Some("Matched rules at index 0"));
        check("4-7", Some("Matched rules at index 1"));
    }
}
