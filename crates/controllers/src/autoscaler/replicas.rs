//! How many replicas a metric asks for.
//!
//! In: a metric's values, the target, the pods. Out: a count and what `status.currentMetrics` shows.
//! Pure. Pods that are not ready or have no figures are counted so that they soften the change, and
//! never so that they turn its direction.
//! Upstream: `replica_calculator.go`, `metrics/utilization.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use machinery::quantity;

use crate::context::Autoscaling;
use crate::pod;

/// What a pod uses, in thousandths.
#[derive(Clone, Debug, PartialEq)]
pub struct PodMetric {
    pub value: i64,
    pub at: Timestamp,
    pub window: Duration,
}

/// By pod name.
pub type PodMetrics = BTreeMap<String, PodMetric>;

/// How far usage may be off its target, as a share, before something changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    pub down: f64,
    pub up: f64,
}

impl Tolerances {
    fn hold(self, ratio: f64) -> bool {
        1.0 - self.down <= ratio && ratio <= 1.0 + self.up
    }
}

/// What a metric of pods asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    pub replicas: i32,
    /// The average, in thousandths.
    pub usage: i64,
    /// In percent of the requests.
    pub utilization: Option<i32>,
}

/// What all metrics of one autoscaler are judged by.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub current: i32,
    pub pods: &'a [Arc<Pod>],
    pub tolerances: Tolerances,
    pub now: Timestamp,
    pub settings: Autoscaling,
}

/// Either way to say how much a pod should use.
#[derive(Clone, Copy)]
enum Goal<'a> {
    /// Percent of these requests.
    Share(i32, &'a BTreeMap<String, i64>),
    /// Thousandths for each pod.
    Value(i64),
}

struct Ratio {
    ratio: f64,
    usage: i64,
    utilization: Option<i32>,
}

impl Goal<'_> {
    fn ratio(self, metrics: &PodMetrics) -> Result<Ratio, String> {
        match self {
            Self::Value(target) => {
                let total: i64 = metrics.values().map(|metric| metric.value).sum();
                let usage = total / metrics.len() as i64;
                Ok(Ratio { ratio: usage as f64 / target as f64, usage, utilization: None })
            }
            Self::Share(target, requests) => {
                let known = metrics.iter().filter_map(|(pod, one)| Some((one, requests.get(pod)?)));
                let (mut used, mut requested, mut count) = (0i64, 0i64, 0i64);
                for (metric, request) in known {
                    used += metric.value;
                    requested += request;
                    count += 1;
                }
                if requested == 0 {
                    return Err("no metrics returned matched known pods".into());
                }
                let share = (used * 100 / requested) as i32;
                let ratio = f64::from(share) / f64::from(target);
                Ok(Ratio { ratio, usage: used / count, utilization: Some(share) })
            }
        }
    }

    /// What a pod without figures is taken to use when the others use little.
    fn assumed(self, pod: &str) -> i64 {
        match self {
            Self::Value(target) => target,
            Self::Share(target, requests) => {
                requests.get(pod).copied().unwrap_or_default() * i64::from(target.max(100)) / 100
            }
        }
    }
}

impl Target<'_> {
    /// For a share of what the pods (or their containers of this name) request.
    pub fn utilization(
        self,
        metrics: PodMetrics,
        resource: &str,
        container: Option<&str>,
        percent: i32,
    ) -> Result<Proposal, String> {
        self.check()?;
        let groups = self.groups(&metrics, resource);
        let metrics = groups.counted(metrics)?;
        let requests = requests(self.pods, resource, container)?;
        self.propose(metrics, &groups, Goal::Share(percent, &requests))
    }

    /// For a value per pod, in thousandths. `resource` is empty for metrics that are none.
    pub fn average(
        self,
        metrics: PodMetrics,
        resource: &str,
        target: i64,
    ) -> Result<Proposal, String> {
        self.check()?;
        let groups = self.groups(&metrics, resource);
        let metrics = groups.counted(metrics)?;
        self.propose(metrics, &groups, Goal::Value(target))
    }

    /// For one value that all pods share, such as a queue's length.
    pub fn total(self, usage: i64, target: i64) -> Result<i32, String> {
        let ratio = usage as f64 / target as f64;
        if self.current == 0 {
            return Ok(ratio.ceil() as i32);
        }
        if self.tolerances.hold(ratio) {
            return Ok(self.current);
        }
        self.check().map_err(|why| format!("unable to calculate ready pods: {why}"))?;
        let ready =
            self.pods.iter().filter(|one| pod::phase(one) == "Running" && pod::is_ready(one));
        // Casts of floats stop at the ends of the range.
        Ok((ratio * ready.count() as f64).ceil() as i32)
    }

    /// For a value that is divided among the pods there are: the count, and each one's part.
    pub fn shared(self, replicas: i32, usage: i64, target: i64) -> (i32, i64) {
        let ratio = usage as f64 / (target as f64 * f64::from(replicas));
        let part = (usage as f64 / f64::from(replicas)).ceil() as i64;
        match self.tolerances.hold(ratio) {
            true => (replicas, part),
            false => ((usage as f64 / target as f64).ceil() as i32, part),
        }
    }

    fn check(self) -> Result<(), String> {
        match self.pods.is_empty() {
            true => Err("no pods returned by selector while calculating replica count".into()),
            false => Ok(()),
        }
    }

    fn propose(
        self,
        mut metrics: PodMetrics,
        groups: &Groups,
        goal: Goal<'_>,
    ) -> Result<Proposal, String> {
        let Ratio { ratio, usage, utilization } = goal.ratio(&metrics)?;
        let proposal = |replicas| Ok(Proposal { replicas, usage, utilization });
        let unready_count = !groups.unready.is_empty() && ratio > 1.0;
        if !unready_count && groups.missing.is_empty() {
            return match self.tolerances.hold(ratio) {
                true => proposal(self.current),
                false => proposal((ratio * groups.ready as f64).ceil() as i32),
            };
        }
        let assume = |value| PodMetric { value, at: self.now, window: Duration::ZERO };
        if ratio < 1.0 {
            let missing = groups.missing.iter();
            metrics.extend(missing.map(|pod| (pod.clone(), assume(goal.assumed(pod)))));
        } else if ratio > 1.0 {
            metrics.extend(groups.missing.iter().map(|pod| (pod.clone(), assume(0))));
        }
        if unready_count {
            metrics.extend(groups.unready.iter().map(|pod| (pod.clone(), assume(0))));
        }
        let again = goal.ratio(&metrics)?.ratio;
        let turns = |now: bool, then: bool| now && then;
        if self.tolerances.hold(again)
            || turns(ratio < 1.0, again > 1.0)
            || turns(ratio > 1.0, again < 1.0)
        {
            return proposal(self.current);
        }
        let replicas = (again * metrics.len() as f64).ceil() as i32;
        let turned = turns(again < 1.0, replicas > self.current)
            || turns(again > 1.0, replicas < self.current);
        proposal(if turned { self.current } else { replicas })
    }

    fn groups(self, metrics: &PodMetrics, resource: &str) -> Groups {
        let mut groups = Groups::default();
        for one in self.pods {
            let name = one.metadata.name.clone().unwrap_or_default();
            if pod::is_deleting(one) || pod::phase(one) == "Failed" {
                groups.ignored.insert(name);
            } else if pod::phase(one) == "Pending" {
                groups.unready.insert(name);
            } else {
                match metrics.get(&name) {
                    None => drop(groups.missing.insert(name)),
                    Some(metric) if resource == "cpu" && is_unready(one, metric, &self) => {
                        groups.unready.insert(name);
                    }
                    Some(_) => groups.ready += 1,
                }
            }
        }
        groups
    }
}

/// The CPU that a pod uses before it is ready says nothing about its load.
fn is_unready(one: &Pod, metric: &PodMetric, target: &Target<'_>) -> bool {
    let Target { now, settings, .. } = *target;
    let started = one.status.as_ref().and_then(|status| status.start_time.as_ref());
    let (Some(ready), Some(started)) = (pod::condition(one, "Ready"), started) else {
        return true;
    };
    let is_false = ready.status == "False";
    let changed = ready.last_transition_time.as_ref().map_or(Timestamp::MIN, |time| time.0);
    let after = |time: Timestamp, delay: Duration| time.checked_add(delay).unwrap_or(time);
    if after(started.0, settings.cpu_initialization) > now {
        is_false || metric.at < after(changed, metric.window)
    } else {
        is_false && after(started.0, settings.initial_readiness) > changed
    }
}

/// Names of pods, by how they count.
#[derive(Default)]
struct Groups {
    ready: usize,
    unready: BTreeSet<String>,
    missing: BTreeSet<String>,
    ignored: BTreeSet<String>,
}

impl Groups {
    /// Only the figures that count.
    fn counted(&self, mut metrics: PodMetrics) -> Result<PodMetrics, String> {
        metrics.retain(|pod, _| !self.ignored.contains(pod) && !self.unready.contains(pod));
        match metrics.is_empty() {
            true => Err("did not receive metrics for targeted pods (pods might be unready)".into()),
            false => Ok(metrics),
        }
    }
}

/// What each pod requests, in thousandths.
fn requests(
    pods: &[Arc<Pod>],
    resource: &str,
    container: Option<&str>,
) -> Result<BTreeMap<String, i64>, String> {
    let mut all = BTreeMap::new();
    for one in pods {
        let name = one.metadata.name.clone().unwrap_or_default();
        let request = request(one, &name, resource, container)?;
        all.insert(name, request);
    }
    Ok(all)
}

fn request(one: &Pod, name: &str, resource: &str, container: Option<&str>) -> Result<i64, String> {
    let Some(spec) = &one.spec else { return Ok(0) };
    let of = |resources: Option<&ResourceRequirements>| {
        let requests = resources.and_then(|resources| resources.requests.as_ref())?;
        requests.get(resource).map(quantity::milli)
    };
    let pod_level = spec.resources.as_ref();
    let has_pod_level = pod_level
        .and_then(|level| level.requests.as_ref())
        .is_some_and(|requests| requests.contains_key("cpu") || requests.contains_key("memory"));
    // What the pod as a whole requests counts, unless one container is looked at.
    if container.is_none()
        && has_pod_level
        && let Some(whole) = of(pod_level)
    {
        return Ok(whole);
    }
    let is_sidecar = |one: &&Container| one.restart_policy.as_deref() == Some("Always");
    let sidecars = spec.init_containers.iter().flatten().filter(is_sidecar);
    let mut containers = spec.containers.iter().chain(sidecars);
    let missing = |container: &str| {
        format!("missing request for {resource} in container {container} of Pod {name}")
    };
    if let Some(wanted) = container {
        let found = containers.find(|one| one.name == wanted);
        let found = found.ok_or_else(|| format!("container {wanted} not found in Pod {name}"))?;
        return of(found.resources.as_ref()).ok_or_else(|| missing(wanted));
    }
    let each = |one: &Container| of(one.resources.as_ref()).ok_or_else(|| missing(&one.name));
    containers.map(each).sum()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    const NOW: &str = "2026-01-01T01:00:00Z";

    fn now() -> Timestamp {
        NOW.parse().unwrap()
    }

    /// A pod in words: its phase, `unready`, `hot` (not ready, but long after its start),
    /// `young` (ready, for a moment), `deleting`.
    fn pod(name: &str, words: &str, request: &str) -> Arc<Pod> {
        let has = |word| words.split(' ').any(|one| one == word);
        let phases = ["Pending", "Failed"];
        let phase = phases.into_iter().find(|phase| has(*phase)).unwrap_or("Running");
        let ready = if has("unready") || has("hot") { "False" } else { "True" };
        let (start, changed) = match () {
            () if has("young") => ("2026-01-01T00:58:00Z", "2026-01-01T00:59:50Z"),
            () if has("hot") => ("2026-01-01T00:00:00Z", "2026-01-01T00:59:00Z"),
            () => ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z"),
        };
        let deleted = has("deleting").then_some(NOW);
        Arc::new(
            from_value(json!({
                "metadata": {"name": name, "deletionTimestamp": deleted},
                "spec": {"containers": [
                    {"name": "c1", "resources": {"requests": {"cpu": request}}},
                    {"name": "c2", "resources": {"requests": {"cpu": request}}},
                ]},
                "status": {"phase": phase, "startTime": start,
                    "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": changed}]},
            }))
            .unwrap(),
        )
    }

    fn metrics(values: &[Option<i64>]) -> PodMetrics {
        let metric = |value: i64| PodMetric { value, at: now(), window: Duration::from_secs(30) };
        let known = values.iter().enumerate().filter_map(|(at, value)| Some((at, (*value)?)));
        known.map(|(at, value)| (format!("p{at}"), metric(value))).collect()
    }

    /// Upstream's table of cases: pods in words, what they use, the target, replicas wanted.
    fn check(
        pods: &[&str],
        used: &[Option<i64>],
        percent: i32,
        expected: Result<(i32, i32), &str>,
    ) {
        let all: Vec<_> =
            pods.iter().enumerate().map(|(at, words)| pod(&format!("p{at}"), words, "1")).collect();
        let target = Target {
            settings: Autoscaling::default(),
            current: pods.len() as i32,
            pods: &all,
            tolerances: Tolerances { down: 0.1, up: 0.1 },
            now: now(),
        };
        let found = target.utilization(metrics(used), "cpu", None, percent);
        let found = found.map(|one| (one.replicas, one.utilization.unwrap_or_default()));
        assert_eq!(found, expected.map_err(str::to_owned), "{pods:?} {used:?}");
    }

    #[test]
    fn replicas_follow_utilization() {
        let some = |values: &[i64]| values.iter().map(|value| Some(*value)).collect::<Vec<_>>();
        let three = ["", "", ""];
        // Each pod requests 2000 thousandths.
        check(&three, &some(&[600, 1000, 1400]), 30, Ok((5, 50)));
        check(&three, &some(&[600, 600, 600]), 30, Ok((3, 30)));
        // Within the tolerance.
        check(&three, &some(&[640, 640, 640]), 30, Ok((3, 32)));
        check(&three, &some(&[100, 100, 100]), 50, Ok((1, 5)));
        // Those that are not ready take nothing of the load on the way up,
        check(&["", "", "unready"], &some(&[1000, 1400, 1000]), 30, Ok((4, 60)));
        check(&["", "", "Pending"], &[Some(1000), Some(1400), None], 30, Ok((4, 60)));
        check(&["", "young", "young"], &some(&[1400, 1400, 1400]), 30, Ok((3, 70)));
        // unless they have been ready before: their load is real.
        check(&["", "", "hot"], &some(&[1000, 1000, 1000]), 30, Ok((5, 50)));
        // Failed and deleted ones are none.
        check(&["", "Failed", "deleting"], &some(&[1000, 9, 9]), 25, Ok((2, 50)));
        // Missing ones count as idle on the way up, as busy on the way down.
        check(&three, &[Some(1600), Some(1600), None], 50, Ok((3, 80)));
        check(&["", "", "", ""], &[Some(2000), Some(2000), Some(2000), None], 20, Ok((15, 100)));
        check(&three, &[Some(200), Some(200), None], 50, Ok((3, 10)));
        check(&["", "", "", ""], &[Some(200), Some(200), Some(200), None], 60, Ok((3, 10)));
        let none = "did not receive metrics for targeted pods (pods might be unready)";
        check(&["unready"], &some(&[100]), 50, Err(none));
        check(&[], &[], 50, Err("no pods returned by selector while calculating replica count"));
    }

    #[test]
    fn requests_must_be_known() {
        let check = |container: Option<&str>, resource: &str, expected: Result<i64, &str>| {
            let found = requests(&[pod("p", "", "250m")], resource, container);
            let found = found.map(|all| all["p"]);
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        check(None, "cpu", Ok(500));
        check(Some("c2"), "cpu", Ok(250));
        check(None, "memory", Err("missing request for memory in container c1 of Pod p"));
        check(Some("c3"), "cpu", Err("container c3 not found in Pod p"));
    }

    #[test]
    fn values_are_shared_or_kept_per_pod() {
        let pods: Vec<_> = (0..3).map(|at| pod(&format!("p{at}"), "", "1")).collect();
        let target = Target {
            settings: Autoscaling::default(),
            current: 3,
            pods: &pods,
            tolerances: Tolerances { down: 0.1, up: 0.1 },
            now: now(),
        };
        let average = |used: &[Option<i64>], goal| {
            target.average(metrics(used), "", goal).map(|one| (one.replicas, one.usage))
        };
        assert_eq!(average(&[Some(20_000), Some(10_000), Some(30_000)], 15_000), Ok((4, 20_000)));
        assert_eq!(average(&[Some(20_000), Some(10_000), None], 20_000), Ok((3, 15_000)));
        assert_eq!(target.total(25_000, 15_000), Ok(5));
        assert_eq!(target.total(15_500, 15_000), Ok(3));
        assert_eq!(Target { current: 0, ..target }.total(25_000, 15_000), Ok(2));
        assert_eq!(target.total(i64::MAX, 1), Ok(i32::MAX));
        assert_eq!(target.shared(3, 8_600, 2_150), (4, 2_867));
        assert_eq!(target.shared(4, 8_600, 2_150), (4, 2_150));
    }
}
