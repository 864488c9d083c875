//! Evicts pods when the node runs out of memory, disk, inodes or process ids.
//!
//! ```text
//!  every 10 s: observe ─► thresholds met ─► conditions of the node (kept 5 min)
//!                                └─► free unused images ─► enough? done : evict one pod, wait for its end
//! ```
//!
//! In: the configured thresholds, the node's free resources, pods' usage and requests. Out: the pressure
//! conditions, removed images, one eviction per round.
//! Invariants: static and critical pods stay; a pod is evicted once; the next round waits until the evicted
//! pod has stopped, or a timeout. While a condition lasts, new pods are rejected ([`admits`]).
//! Cost: a round reads a few files; only a round that must evict looks at the pods.
//! Upstream: `pkg/kubelet/eviction`. Deviation: free memory is the kernel's MemAvailable.

mod rank;
mod state;
pub mod threshold;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use api::taints::tolerates;
use client::EventType;
use k8s_openapi::api::core::v1::{Pod, Taint};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names;
use crate::node::families;
use crate::node::upkeep::Upkeep;
use crate::pod::set::PodSet;
use crate::pod::worker::View;
use crate::reason::Reason;
use crate::resources::{BEST_EFFORT, qos_class};
use rank::{choose, message};
use state::{Observations, State, met};
use threshold::{Condition, Signal, Threshold};
use usage::{Places, living, observe, of_pods};

/// How long a round waits for the evicted pod to stop. Upstream: podCleanupTimeout.
const CLEANUP: Duration = Duration::from_secs(30);
/// The grace period of pods after a hard threshold. Upstream: immediateEvictionGracePeriodSeconds.
const AT_ONCE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Settings {
    pub thresholds: Vec<Threshold>,
    /// The longest grace period of pods after a soft threshold.
    pub longest_grace: Duration,
    /// How long a condition lasts after it was last observed.
    pub transition: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            thresholds: threshold::parse(&threshold::Maps::default(), true).unwrap_or_default(),
            longest_grace: Duration::ZERO,
            transition: Duration::from_secs(300),
        }
    }
}

impl Settings {
    /// The amount of the signal that hard thresholds keep free.
    pub fn hard(&self, signal: Signal, capacity: u64) -> u64 {
        let ours = self.thresholds.iter().filter(|one| one.signal == signal && one.is_hard());
        ours.map(|one| one.value.of(capacity)).max().unwrap_or(0)
    }
}

/// Watches the node; never returns.
pub async fn keep(own: Arc<Upkeep>, hurry: Arc<Notify>) {
    let mut state = State::default();
    let mut places: Option<Places> = None;
    loop {
        tokio::time::sleep(own.node.config.eviction_interval).await;
        let places = match &mut places {
            Some(known) => known,
            none => none.insert(Places::find(&own).await),
        };
        let settings = &own.node.config.eviction;
        let (seen, now) = (observe(&own, places), Instant::now());
        let due = state.observe(&settings.thresholds, &seen, now);
        show_conditions(&own, state.conditions(settings.transition, now), &hurry);
        let Some(first) = due.first() else { continue };
        let text = format!("Attempting to reclaim {}", first.signal.resource());
        let node = own.node.reference();
        own.events.about(node, EventType::Warning, "EvictionThresholdMet", text);
        if first.signal.is_disk() && free_images(&own, places, *first).await {
            continue;
        }
        evict_one(&own, *first, &due, &seen).await;
    }
}

/// The conditions are in the node's status at once.
fn show_conditions(own: &Upkeep, conditions: Vec<Condition>, hurry: &Notify) {
    let is_news = own.node.pressure.send_if_modified(|known| {
        let is_news = *known != conditions;
        *known = conditions;
        is_news
    });
    if is_news {
        hurry.notify_one();
    }
}

/// Removes unused images; true if that suffices.
async fn free_images(own: &Upkeep, places: &Places, threshold: Threshold) -> bool {
    // A disk without images does not gain from it.
    let is_of_node = matches!(threshold.signal, Signal::NodeFs | Signal::NodeFsInodes);
    if places.images.is_some() && is_of_node {
        return false;
    }
    own.images.remove_unused(own).await;
    met(&[threshold], &observe(own, places), true).is_empty()
}

async fn evict_one(own: &Upkeep, first: Threshold, due: &[Threshold], seen: &Observations) {
    let views = candidates(&own.pods);
    let usage = of_pods(own, &views, first.signal).await;
    let pods = living(&views).map(|(_, pod)| pod);
    let Some(pod) = choose(pods, &usage, first.signal) else {
        tracing::warn!(signal = first.signal.name(), "no pod can be evicted");
        return;
    };
    let uid = names::uid(&pod);
    let same = due.iter().find(|one| one.signal.resource() == first.signal.resource());
    let info = same.and_then(|one| {
        let seen = seen.get(&one.signal)?;
        Some((one.value.of(seen.capacity), seen.available))
    });
    let message = message(first.signal, info, &pod, usage.get(uid));
    let grace = match first.is_hard() {
        true => AT_ONCE,
        false => soft_grace(own, &pod),
    };
    if !own.pods.evict_for_node(uid, &message, grace) {
        return;
    }
    families::evicted(first.signal.name());
    own.events.tell(&pod, EventType::Warning, "Evicted", message);
    if tokio::time::timeout(CLEANUP, own.pods.until_stopped(uid)).await.is_err() {
        tracing::warn!(pod = names::full(&pod), "the evicted pod did not stop in time");
    }
}

fn soft_grace(own: &Upkeep, pod: &Pod) -> Duration {
    let longest = own.node.config.eviction.longest_grace;
    let wanted = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let wanted = wanted.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
    wanted.map_or(longest, |wanted| wanted.min(longest))
}

/// Pods that use resources and are not being evicted: the resources of those will soon be free.
fn candidates(pods: &PodSet) -> Vec<View> {
    let mut views = pods.views();
    views.retain(|view| {
        !view.stopped && view.pod.as_ref().is_some_and(|pod| !pods.is_failed(names::uid(pod)))
    });
    views
}

/// Whether the pod may start under these conditions. Upstream: `managerImpl.Admit`.
pub fn admits(pod: &Pod, conditions: &[Condition]) -> Result<(), Reason> {
    if conditions.is_empty() || rank::is_critical(pod) {
        return Ok(());
    }
    if conditions == [Condition::Memory] {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".into(),
            effect: "NoSchedule".into(),
            ..Taint::default()
        };
        let tolerations = pod.spec.iter().flat_map(|spec| spec.tolerations.iter().flatten());
        let mut tolerations = tolerations.into_iter();
        if qos_class(pod) != BEST_EFFORT || tolerations.any(|one| tolerates(one, &taint)) {
            return Ok(());
        }
    }
    let names: Vec<&str> = conditions.iter().map(|condition| condition.name()).collect();
    let message = format!("The node had condition: [{}]. ", names.join(" "));
    Err(Reason::new("Evicted", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn pods_are_rejected_under_pressure() {
        let check = |spec: Value, conditions: &[Condition], expected: Option<&str>| {
            let pod = json!({"metadata": {"name": "p"}, "spec": spec});
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            let got = admits(&pod, conditions).err().map(|reason| reason.message);
            assert_eq!(got.as_deref(), expected, "{conditions:?}");
        };
        let bare = || json!({"containers": [{"name": "a"}]});
        let asking = || {
            let resources = json!({"requests": {"memory": "1Mi"}});
            json!({"containers": [{"name": "a", "resources": resources}]})
        };
        use Condition::{Disk, Memory};
        check(bare(), &[], None);
        check(bare(), &[Memory], Some("The node had condition: [MemoryPressure]. "));
        check(asking(), &[Memory], None);
        check(
            asking(),
            &[Memory, Disk],
            Some("The node had condition: [MemoryPressure DiskPressure]. "),
        );
        let mut critical = bare();
        critical["priority"] = json!(2_000_000_000);
        check(critical, &[Disk], None);
        let mut tolerant = bare();
        let key = "node.kubernetes.io/memory-pressure";
        tolerant["tolerations"] = json!([{"key": key, "operator": "Exists"}]);
        check(tolerant.clone(), &[Memory], None);
        check(tolerant, &[Disk], Some("The node had condition: [DiskPressure]. "));
    }

    #[test]
    fn hard_thresholds_reduce_the_allocatable() {
        let settings = Settings::default();
        assert_eq!(settings.hard(Signal::Memory, 1 << 40), 100 << 20);
        assert_eq!(settings.hard(Signal::NodeFs, 1000), 50);
        assert_eq!(settings.hard(Signal::Pids, 1000), 0);
    }
}
