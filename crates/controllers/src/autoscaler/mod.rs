//! HorizontalPodAutoscalers: as many pods as their load needs.
//!
//! In: autoscalers, their targets' scales and pods, the metrics APIs. Out: the scale subresource of
//! any kind, `status`, events.
//!
//! ```text
//!  every 15 s ► scale ► look: out of bounds? ────────────────► write the scale ► status
//!                        └► metrics ► replicas ► limits ► plan ─┘
//! ```
//!
//! Invariants: metrics are asked for only while an autoscaler exists; what cannot be measured never
//! makes a target smaller.
//! Upstream: `pkg/controller/podautoscaler`. Deviation: a new autoscaler and one whose spec changed
//! are looked at at once, not after 15 s.

mod limits;
mod metrics;
mod plan;
mod replicas;
mod target;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use base::metrics::Timer;
use client::{
    Api, Client, ErrorExt, Event, EventType, Gvr, Lister, ObjectKey, Outcome, PostParams, Result,
};
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscaler, MetricStatus};
use k8s_openapi::api::core::v1::Pod;
use machinery::selector::Selector;

use self::limits::History;
use self::plan::{Draft, Fetched, Look, Observed};
use crate::context::{Autoscaling, Context};
use crate::descriptor::{Descriptor, Row, on};
use crate::metrics::Scaled;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "horizontal-pod-autoscaler-controller",
    account: "horizontal-pod-autoscaler",
    component: "horizontal-pod-autoscaler",
    queue: "horizontalpodautoscaler",
    workers: 5,
    new: |setup| {
        Some(Controller {
            context: setup.context.clone(),
            autoscalers: setup.lister(),
            pods: setup.lister(),
            memory: Mutex::default(),
        })
    },
    watches: &[
        // Its own status is no news.
        &on(|_: &Controller, queue, event: &Event<HorizontalPodAutoscaler>| {
            let is_same = event.old().is_some_and(|old| old.spec == event.object().spec);
            if !is_same || event.is_deleted() {
                queue.add(event.key());
            }
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Upstream: `--concurrent-horizontal-pod-autoscaler-syncs`
/// Times that a scale is written when others write it too.
const TRIES: usize = 5;

struct Controller {
    context: Context,
    autoscalers: Lister<HorizontalPodAutoscaler>,
    pods: Lister<Pod>,
    /// What each autoscaler remembers. Held for look-ups only.
    memory: Mutex<HashMap<ObjectKey, Memory>>,
}

#[derive(Clone)]
struct Memory {
    history: History,
    /// The selector of the pods that it scales, if it is known: two autoscalers must not scale the same pods.
    selector: Selector,
}

impl Default for Memory {
    fn default() -> Self {
        Self { history: History::default(), selector: Selector::nothing() }
    }
}

/// Seconds of `--horizontal-pod-autoscaler-downscale-stabilization`.
fn down_window(settings: &Autoscaling) -> i32 {
    i32::try_from(settings.downscale_stabilization.as_secs()).unwrap_or(i32::MAX)
}

/// The current scale of a target.
struct Found {
    gvr: Gvr,
    scale: Scale,
}

impl Found {
    fn replicas(&self) -> i32 {
        self.scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(0)
    }

    fn running(&self) -> i32 {
        self.scale.status.as_ref().map_or(0, |status| status.replicas)
    }

    fn selector(&self) -> &str {
        let status = self.scale.status.as_ref();
        status.and_then(|status| status.selector.as_deref()).unwrap_or_default()
    }
}

impl Controller {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(autoscaler) = self.autoscalers.get_key(key) else {
            self.memory.lock().expect("no panic under the lock").remove(key);
            return Ok(Outcome::Done);
        };
        let mut draft = Draft::of(&autoscaler, base::clock::now());
        let timer = Timer::start();
        match self.look_at(key, &autoscaler, &mut draft).await {
            Ok((current, desired)) => Scaled::between(current, desired).reconciled(timer),
            Err(trouble) => {
                Scaled::failed(false).reconciled(timer);
                tracing::debug!(autoscaler = %key, trouble, "an autoscaler cannot do its work");
            }
        }
        let written = self.write_status(&autoscaler, &draft).await;
        for (kind, reason, message) in draft.events {
            self.context.events.event(&*autoscaler, kind, reason, message);
        }
        match written {
            Err(error) if error.is_not_found() => Ok(Outcome::Done),
            Err(error) if error.is_conflict() => Ok(Outcome::Backoff),
            Err(error) => {
                let text = error.text();
                self.context.events.event(
                    &*autoscaler,
                    EventType::Warning,
                    "FailedUpdateStatus",
                    text,
                );
                Ok(Outcome::After(self.context.options.autoscaling.sync_period))
            }
            Ok(()) => Ok(Outcome::After(self.context.options.autoscaling.sync_period)),
        }
    }

    /// Returns the replicas before and after.
    async fn look_at(
        &self,
        key: &ObjectKey,
        autoscaler: &HorizontalPodAutoscaler,
        draft: &mut Draft,
    ) -> Result<(i32, i32), String> {
        let found = match self.find(autoscaler).await {
            Ok(found) => found,
            Err(why) => {
                draft.warn("FailedGetScale", why.as_str());
                let message = format!(
                    "the HPA controller was unable to get the target's current scale: {why}"
                );
                draft.condition("AbleToScale", false, "FailedGetScale", message);
                return Err(why);
            }
        };
        let message = "the HPA controller was able to get the target's current scale";
        draft.condition("AbleToScale", true, "SucceededGetScale", message);
        let current = found.replicas();
        let now = base::clock::now();
        let mut history = self.recall(key).history;
        history.down_window = down_window(&self.context.options.autoscaling);
        history.begin(current, now);
        let (desired, reason, metrics) = match plan::look(autoscaler, current) {
            Look::Disabled => {
                let message = "scaling is disabled since the replica count of the target is zero";
                draft.condition("ScalingActive", false, "ScalingDisabled", message);
                (current, String::new(), None)
            }
            Look::Bound(desired, reason) => (desired, reason.to_owned(), None),
            Look::Metrics => {
                let decided = self.by_metrics(key, autoscaler, &found, &mut history, draft).await;
                self.remember(key, |memory| memory.history = history.clone());
                decided?
            }
        };
        if desired == current {
            self.remember(key, |memory| memory.history = history);
            draft.counts(current, current, metrics, false);
            return Ok((current, current));
        }
        let written = write_scale(&self.context.client, autoscaler, &found, desired).await;
        self.note(draft, written, (current, desired), &reason, metrics)?;
        plan::note_zero(autoscaler, current, desired, draft);
        history.scaled(autoscaler.spec.behavior.as_ref(), current, desired, now);
        self.remember(key, |memory| memory.history = history);
        Ok((current, desired))
    }

    /// What the metrics say, or an error that is in the draft already.
    async fn by_metrics(
        &self,
        key: &ObjectKey,
        autoscaler: &HorizontalPodAutoscaler,
        found: &Found,
        history: &mut History,
        draft: &mut Draft,
    ) -> Result<(i32, String, Option<Vec<MetricStatus>>), String> {
        let current = found.replicas();
        let keep = draft.status.desired_replicas;
        let failed = |draft: &mut Draft, why: &str, metrics| {
            draft.counts(current, keep, metrics, false);
            draft.warn("FailedComputeMetricsReplicas", why);
        };
        let pods = match self.pods_of(key, found.selector(), draft) {
            Ok(pods) => pods,
            Err(why) => {
                failed(draft, &why, None);
                return Err(why);
            }
        };
        let (mut fetched, mut times): (Fetched, _) = (vec![], vec![]);
        for spec in autoscaler.spec.metrics.iter().flatten() {
            let (selector, timer) = (found.selector(), Timer::start());
            fetched.push(metrics::fetch(&self.context.client, autoscaler, spec, selector).await);
            times.push(timer.elapsed());
        }
        let running = found.running();
        let now = base::clock::now();
        let observed = Observed {
            autoscaler,
            current,
            running,
            pods: &pods,
            now,
            settings: self.context.options.autoscaling,
        };
        let decision = plan::decide(observed, fetched, history, draft);
        let specs = autoscaler.spec.metrics.iter().flatten();
        for ((spec, time), wanted) in specs.zip(times).zip(&decision.wanted) {
            let scaled =
                wanted.map_or(Scaled::failed(false), |wanted| Scaled::between(current, wanted));
            scaled.computed(&spec.type_, time);
        }
        match (decision.replicas, decision.trouble) {
            (Some(replicas), _) => Ok((replicas, decision.reason, Some(decision.metrics))),
            (None, trouble) => {
                let why = trouble.unwrap_or_default();
                failed(draft, &why, Some(decision.metrics));
                Err(why)
            }
        }
    }

    /// The target's pods, if they are this autoscaler's alone.
    fn pods_of(
        &self,
        key: &ObjectKey,
        selector: &str,
        draft: &mut Draft,
    ) -> Result<Vec<Arc<Pod>>, String> {
        let mut refuse = |event, reason, condition: &str, message: String| {
            draft.warn(event, message.as_str());
            draft.condition("ScalingActive", false, reason, condition);
            Err(message)
        };
        if selector.is_empty() {
            let condition = "the HPA target's scale is missing a selector";
            let message = "selector is required".to_owned();
            return refuse("SelectorRequired", "InvalidSelector", condition, message);
        }
        let parsed = match Selector::parse_labels(selector) {
            Ok(parsed) => parsed,
            Err(error) => {
                let message = format!(
                    "couldn't convert selector into a corresponding internal selector object: {error}"
                );
                let condition = message.clone();
                return refuse("InvalidSelector", "InvalidSelector", &condition, message);
            }
        };
        self.remember(key, |memory| memory.selector = parsed.clone());
        let pods = self.pods.list(Some(&key.namespace), &parsed);
        let rivals = self.rivals(key, &pods);
        if rivals.len() > 1 {
            let names: Vec<String> =
                rivals.iter().map(|one| format!("{{{} {}}}", one.name, one.namespace)).collect();
            let message = format!(
                "pods by selector {selector} are controlled by multiple HPAs: [{}]",
                names.join(" ")
            );
            let condition = message.clone();
            return refuse("AmbiguousSelector", "AmbiguousSelector", &condition, message);
        }
        Ok(pods)
    }

    /// All autoscalers that select any of these pods, in order.
    fn rivals(&self, key: &ObjectKey, pods: &[Arc<Pod>]) -> Vec<ObjectKey> {
        let memory = self.memory.lock().expect("no panic under the lock");
        let selects = |selector: &Selector| {
            pods.iter().any(|pod| selector.matches(pod.metadata.labels.as_ref()))
        };
        let near = memory.iter().filter(|(other, _)| other.namespace == key.namespace);
        let found = near.filter(|(_, one)| selects(&one.selector));
        let by_name: BTreeMap<&str, &ObjectKey> =
            found.map(|(other, _)| (&*other.name, other)).collect();
        by_name.into_values().cloned().collect()
    }

    async fn find(&self, autoscaler: &HorizontalPodAutoscaler) -> Result<Found, String> {
        let reference = &autoscaler.spec.scale_target_ref;
        let client = &self.context.client;
        let api_version = reference.api_version.as_deref().unwrap_or_default();
        let gvr = target::resource(client, api_version, &reference.kind).await?;
        let scale = client.get::<Scale>(&scale_path(autoscaler, &gvr)).await;
        Ok(Found { gvr, scale: scale.map_err(|error| error.text())? })
    }

    /// What became of a rescale.
    fn note(
        &self,
        draft: &mut Draft,
        written: Result<(), String>,
        (current, desired): (i32, i32),
        reason: &str,
        metrics: Option<Vec<MetricStatus>>,
    ) -> Result<(), String> {
        if let Err(why) = written {
            let text = format!("New size: {desired}; reason: {reason}; error: {why}");
            draft.warn("FailedRescale", text);
            let message =
                format!("the HPA controller was unable to update the target scale: {why}");
            draft.condition("AbleToScale", false, "FailedUpdateScale", message);
            draft.counts(current, draft.status.desired_replicas, metrics, false);
            return Err(why);
        }
        let message =
            format!("the HPA controller was able to update the target scale to {desired}");
        draft.condition("AbleToScale", true, "SucceededRescale", message);
        let text = format!("New size: {desired}; reason: {reason}");
        draft.events.push((EventType::Normal, "SuccessfulRescale", text));
        draft.counts(current, desired, metrics, true);
        Ok(())
    }

    async fn write_status(
        &self,
        autoscaler: &HorizontalPodAutoscaler,
        draft: &Draft,
    ) -> Result<()> {
        if autoscaler.status.as_ref() == Some(&draft.status) {
            return Ok(());
        }
        let mut updated = autoscaler.clone();
        updated.status = Some(draft.status.clone());
        let namespace = updated.metadata.namespace.as_deref();
        let api: Api<HorizontalPodAutoscaler> = self.context.client.api(namespace);
        let name = updated.metadata.name.clone().unwrap_or_default();
        api.replace_status(&name, &PostParams::default(), &updated).await.map(drop)
    }

    fn recall(&self, key: &ObjectKey) -> Memory {
        let memory = self.memory.lock().expect("no panic under the lock");
        memory.get(key).cloned().unwrap_or_default()
    }

    fn remember(&self, key: &ObjectKey, change: impl FnOnce(&mut Memory)) {
        let mut memory = self.memory.lock().expect("no panic under the lock");
        change(memory.entry(key.clone()).or_default());
    }
}

fn scale_path(autoscaler: &HorizontalPodAutoscaler, gvr: &Gvr) -> String {
    let namespace = autoscaler.metadata.namespace.as_deref();
    format!("{}/scale", gvr.object(namespace, &autoscaler.spec.scale_target_ref.name))
}

async fn write_scale(
    client: &Client,
    autoscaler: &HorizontalPodAutoscaler,
    found: &Found,
    desired: i32,
) -> Result<(), String> {
    let path = scale_path(autoscaler, &found.gvr);
    let mut scale = found.scale.clone();
    for attempt in 1.. {
        scale.spec.get_or_insert_default().replicas = Some(desired);
        let body = serde_json::to_vec(&scale).map_err(|error| error.to_string())?;
        match client.call(http::Method::PUT, &path, "application/json", body).await {
            Ok(_) => break,
            Err(error) if error.is_conflict() && attempt < TRIES => {
                scale = client.get(&path).await.map_err(|error| error.text())?;
            }
            Err(error) => return Err(error.text()),
        }
    }
    Ok(())
}
