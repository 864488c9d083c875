//! One cycle: what plugins see, and the evictions that they ask for.
//!
//! Invariant: no more evictions than the policy's limits allow; a dry run counts and evicts nothing. A pod is
//! evicted once in a cycle. Upstream: `pkg/descheduler/evictions`.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use client::{Client, ErrorExt, EventRecorder, EventType, Gvr};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::policy::{Limits, Policy, Profile};
use crate::snapshot::{Snapshot, namespace, node_name};
use crate::{EVICTED, NAME, Settings};

/// What a plugin of a profile sees.
pub struct Cycle<'a> {
    pub snapshot: Arc<Snapshot>,
    pub now: Timestamp,
    evictions: &'a Evictions<'a>,
    profile: &'a Profile,
    plugin: &'static str,
}

/// Why a pod was not evicted.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// Its node has lost as many pods as a cycle may evict there.
    NodeLimit,
    /// The cycle may evict no more pods.
    TotalLimit,
    /// Another pod may go: the namespace's limit, or the API server refused.
    ThisPod,
}

impl<'a> Cycle<'a> {
    pub fn new(
        snapshot: Arc<Snapshot>,
        evictions: &'a Evictions<'a>,
        profile: &'a Profile,
    ) -> Self {
        Self { snapshot, now: base::clock::now(), evictions, profile, plugin: "" }
    }

    /// The same for one plugin.
    pub fn of(&self, plugin: &'static str) -> Self {
        Self {
            snapshot: self.snapshot.clone(),
            now: self.now,
            evictions: self.evictions,
            profile: self.profile,
            plugin,
        }
    }

    /// The extension point Filter.
    pub fn may_go(&self, pod: &Pod) -> bool {
        self.profile.evictor.may_go(pod, &self.snapshot, self.now) && !self.evictions.has(pod)
    }

    /// The extension point PreEvictionFilter.
    pub fn may_move(&self, pod: &Pod) -> bool {
        self.profile.evictor.may_move(pod, self)
    }

    pub async fn evict(&self, pod: &Pod) -> Result<(), Refused> {
        self.evictions.evict(pod, &self.profile.name, self.plugin).await
    }
}

pub struct Evictions<'a> {
    client: &'a Client,
    limits: Limits,
    notes_failures: bool,
    grace_period: Option<i64>,
    is_dry_run: bool,
    events: &'a EventRecorder,
    /// Held to look and to count, never across an eviction.
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    by_node: HashMap<String, usize>,
    by_namespace: HashMap<String, usize>,
    /// Uids.
    evicted: HashSet<String>,
}

impl<'a> Evictions<'a> {
    pub fn new(
        client: &'a Client,
        policy: &Policy,
        settings: &Settings,
        events: &'a EventRecorder,
    ) -> Self {
        Self {
            client,
            limits: policy.limits,
            notes_failures: policy.notes_failures,
            grace_period: policy.grace_period,
            is_dry_run: settings.is_dry_run,
            events,
            counts: Mutex::default(),
        }
    }

    pub fn total(&self) -> usize {
        self.counts().evicted.len()
    }

    fn has(&self, pod: &Pod) -> bool {
        self.counts().evicted.contains(uid(pod))
    }

    async fn evict(&self, pod: &Pod, profile: &str, plugin: &str) -> Result<(), Refused> {
        let node = node_name(pod);
        if let Some((refused, limit)) = self.beyond(pod) {
            self.count("limit", pod, profile, plugin);
            self.note_failure(pod, &limit);
            tracing::info!(pod = %name(pod), limit, "did not evict the pod");
            return Err(refused);
        }
        if !self.is_dry_run
            && let Err(error) = self.ask(pod, profile, plugin).await
        {
            self.count("error", pod, profile, plugin);
            self.note_failure(pod, &error.text());
            tracing::warn!(pod = %name(pod), error = error.text(), "failed to evict the pod");
            return Err(Refused::ThisPod);
        }
        let mut counts = self.counts();
        *counts.by_node.entry(node.to_owned()).or_default() += 1;
        *counts.by_namespace.entry(namespace(pod).to_owned()).or_default() += 1;
        counts.evicted.insert(uid(pod).to_owned());
        drop(counts);
        self.count("success", pod, profile, plugin);
        if self.is_dry_run {
            tracing::info!(pod = %name(pod), node, plugin, profile, "evicted pod in dry run mode");
            return Ok(());
        }
        tracing::info!(pod = %name(pod), node, plugin, profile, "evicted pod");
        let text = format!("pod eviction from {node} node by {NAME}");
        self.events.event(pod, EventType::Normal, plugin, text);
        Ok(())
    }

    /// The limit that one more eviction would break.
    fn beyond(&self, pod: &Pod) -> Option<(Refused, String)> {
        let counts = self.counts();
        let (node, namespace) = (node_name(pod), namespace(pod));
        let count = |all: &HashMap<String, usize>, key: &str| all.get(key).copied().unwrap_or(0);
        for (limit, is, what, refused) in [
            (self.limits.total, counts.evicted.len(), "total", Refused::TotalLimit),
            (self.limits.per_node, count(&counts.by_node, node), "node", Refused::NodeLimit),
            (
                self.limits.per_namespace,
                count(&counts.by_namespace, namespace),
                "namespace",
                Refused::ThisPod,
            ),
        ] {
            if let Some(limit) = limit.filter(|limit| is >= *limit) {
                return Some((refused, format!("{what} eviction limit exceeded ({limit})")));
            }
        }
        None
    }

    async fn ask(&self, pod: &Pod, profile: &str, plugin: &str) -> client::Result<()> {
        let own = pod.metadata.name.as_deref().unwrap_or_default();
        let path = format!("{}/eviction", Gvr::of::<Pod>().object(Some(namespace(pod)), own));
        let mut eviction = json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {
                "name": own, "namespace": namespace(pod),
                "annotations": {
                    "reason": format!("triggered by {profile}/{plugin}: "),
                    "requested-by": NAME,
                },
            },
            // Another pod of the same name is not meant.
            "deleteOptions": {"preconditions": {"uid": uid(pod)}},
        });
        if let Some(seconds) = self.grace_period {
            eviction["deleteOptions"]["gracePeriodSeconds"] = seconds.into();
        }
        let body = eviction.to_string();
        self.client.call(Method::POST, &path, "application/json", body).await.map(drop)
    }

    fn note_failure(&self, pod: &Pod, why: &str) {
        if self.notes_failures {
            let node = node_name(pod);
            let text = format!("pod eviction from {node} node by {NAME} failed: {why}");
            self.events.event(pod, EventType::Warning, "EvictionFailed", text);
        }
    }

    fn count(&self, result: &str, pod: &Pod, profile: &str, plugin: &str) {
        EVICTED.count(&[result, plugin, profile, namespace(pod), node_name(pod)]);
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("no panic while held")
    }
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn name(pod: &Pod) -> String {
    format!("{}/{}", namespace(pod), pod.metadata.name.as_deref().unwrap_or_default())
}
