//! Writes one pod's status to the API: only the latest, with retries.
//!
//! In: statuses from the pod's worker. Out: PATCHes of `/status`, in order, never two at once.
//! Invariants: the worker does not wait for the API, except where the API must have the status before it
//! goes on ([`StatusWriter::settled`]); a pod of another uid is never written.
//! Upstream: `pkg/kubelet/status/status_manager.go`, with its strategic merge patches.

use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use bytes::Bytes;
use client::ErrorExt;
use http::Method;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use crate::names;
use crate::pod::api::PodApi;

#[derive(Clone, Default)]
struct Wanted {
    status: Option<Arc<PodStatus>>,
    generation: u64,
}

/// The worker's handle.
pub struct StatusWriter {
    wanted: watch::Sender<Wanted>,
    written: watch::Receiver<u64>,
}

impl StatusWriter {
    /// `pod` gives the identity; for a static pod, its mirror of any uid is written.
    pub fn new(api: Arc<PodApi>, tasks: &Tasks, pod: Arc<Pod>) -> Self {
        let (wanted, wanted_out) = watch::channel(Wanted::default());
        let (written_in, written) = watch::channel(0);
        tasks.spawn("pod-status", write_all(api, pod, wanted_out, written_in));
        Self { wanted, written }
    }

    pub fn set(&self, status: PodStatus) {
        self.wanted.send_modify(|wanted| {
            wanted.status = Some(Arc::new(status));
            wanted.generation += 1;
        });
    }

    /// Resolves when the API has the latest status (or no longer has the pod).
    pub async fn settled(&self) {
        let target = self.wanted.borrow().generation;
        let mut written = self.written.clone();
        // An error means that the writer has ended with its task group.
        let _ = written.wait_for(|generation| *generation >= target).await;
    }
}

async fn write_all(
    api: Arc<PodApi>,
    pod: Arc<Pod>,
    mut wanted: watch::Receiver<Wanted>,
    written: watch::Sender<u64>,
) {
    let mut backoff =
        Backoff::new(Duration::from_millis(200), Duration::from_secs(10)).with_jitter(0.2);
    let mut last: Option<Pod> = None;
    while wanted.changed().await.is_ok() {
        loop {
            let now = wanted.borrow_and_update().clone();
            let Some(status) = now.status else { break };
            match write(&api, &pod, &status, &mut last).await {
                Ok(()) => {
                    backoff.reset();
                    written.send_replace(now.generation);
                    break;
                }
                Err(error) => {
                    tracing::debug!(
                        pod = names::full(&pod),
                        error = error.text(),
                        "failed to update the pod's status"
                    );
                    tokio::time::sleep(backoff.step()).await;
                }
            }
        }
    }
}

fn version(pod: &Pod) -> u64 {
    pod.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(0)
}

/// The newest known API object: the watch's, or the answer to our last write.
fn newest(api: &PodApi, pod: &Pod, last: Option<&Pod>) -> Option<Pod> {
    let cached = api.pods.lister().get(names::namespace(pod), names::name(pod));
    let is_ours =
        |candidate: &Pod| names::is_static(pod) || candidate.metadata.uid == pod.metadata.uid;
    let cached = cached.filter(|cached| is_ours(cached)).map(|cached| Pod::clone(&cached));
    match (cached, last) {
        (Some(cached), Some(last)) if version(last) > version(&cached) => Some(last.clone()),
        (Some(cached), _) => Some(cached),
        (None, last) => last.cloned(),
    }
}

async fn write(
    api: &PodApi,
    pod: &Pod,
    status: &PodStatus,
    last: &mut Option<Pod>,
) -> client::Result<()> {
    let is_static = names::is_static(pod);
    let base = match newest(api, pod, last.as_ref()) {
        Some(base) => base,
        // A mirror that does not exist (yet) cannot be written.
        None if is_static => return Ok(()),
        None => pod.clone(),
    };
    let Some(fields) = changes(base.status.as_ref(), status) else { return Ok(()) };
    let mut sent = send(api, &base, &fields).await;
    if let Err(error) = &sent
        && error.is_invalid()
    {
        let error = error.text();
        tracing::warn!(
            pod = names::full(pod),
            error,
            "the API server rejected the containers' statuses"
        );
        // Phase, conditions and addresses are written without them.
        let Some(rest) = without_containers(fields) else { return Ok(()) };
        sent = send(api, &base, &rest).await;
    }
    match sent {
        Ok(bytes) => {
            *last = serde_json::from_slice(&bytes).ok();
            Ok(())
        }
        Err(error) if error.is_not_found() => Ok(()),
        // A retry would fail again, and the deletion of the pod must not wait for it.
        Err(error) if error.is_invalid() => {
            tracing::warn!(
                pod = names::full(pod),
                error = error.text(),
                "the API server rejected the pod's status"
            );
            Ok(())
        }
        // Another pod of that name, a patch that lost a race, or a webhook's decision.
        Err(error) if error.is_conflict() => match standing(api, &base).await? {
            None => Ok(()),
            Some(now) => {
                *last = Some(now);
                Err(error)
            }
        },
        Err(error) => Err(error),
    }
}

async fn send(api: &PodApi, base: &Pod, fields: &Value) -> client::Result<Bytes> {
    let patch = json!({"metadata": {"uid": base.metadata.uid}, "status": fields});
    let path =
        format!("/api/v1/namespaces/{}/pods/{}/status", names::namespace(base), names::name(base));
    let kind = "application/strategic-merge-patch+json";
    api.client.call(Method::PATCH, &path, kind, patch.to_string()).await
}

/// The other changed fields; `None` if there are none.
fn without_containers(mut fields: Value) -> Option<Value> {
    let all = fields.as_object_mut()?;
    all.retain(|name, _| !name.ends_with("ontainerStatuses"));
    (!all.is_empty()).then_some(fields)
}

/// The API's current pod. `None` if it is deleted, or another pod has its name: then its status is not
/// needed any more.
async fn standing(api: &PodApi, pod: &Pod) -> client::Result<Option<Pod>> {
    let path = format!("/api/v1/namespaces/{}/pods/{}", names::namespace(pod), names::name(pod));
    match api.client.get::<Pod>(&path).await {
        Ok(now) => Ok(Some(now).filter(|now| now.metadata.uid == pod.metadata.uid)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The strategic merge patch from one status to another; `None` if they are equal.
pub fn changes(old: Option<&PodStatus>, new: &PodStatus) -> Option<Value> {
    let tree = |status: &PodStatus| match serde_json::to_value(status) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    let (old, new) = (old.map(tree).unwrap_or_default(), tree(new));
    let mut out = Map::new();
    for (key, value) in &new {
        let before = old.get(key);
        if before == Some(value) {
            continue;
        }
        let value = match key.as_str() {
            "conditions" => changed_items(before, value, "type"),
            "podIPs" | "hostIPs" => changed_items(before, value, "ip"),
            _ => value.clone(),
        };
        out.insert(key.clone(), value);
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        // Fields of other components stay.
        if !matches!(key.as_str(), "resize" | "nominatedNodeName" | "resourceClaimStatuses") {
            out.insert(key.clone(), Value::Null);
        }
    }
    (!out.is_empty()).then_some(Value::Object(out))
}

const OWN: [&str; 2] = [crate::pod::allocation::PENDING, crate::pod::allocation::IN_PROGRESS];

/// For lists that merge by `key`: new and changed items, and deletions of removed addresses. Conditions
/// stay, because others add theirs, except those of a finished resize.
fn changed_items(old: Option<&Value>, new: &Value, key: &str) -> Value {
    let items = |list: Option<&Value>| list.and_then(Value::as_array).cloned().unwrap_or_default();
    let (old, new) = (items(old), items(Some(new)));
    let mut out: Vec<Value> = vec![];
    for item in new.iter().filter(|item| !old.contains(item)) {
        let mut item = item.clone();
        // Items merge field by field: removed fields must be set to null.
        let before = old.iter().find(|o| o[key] == item[key]).and_then(Value::as_object);
        for name in before.into_iter().flat_map(Map::keys) {
            if item.get(name).is_none() {
                item[name] = Value::Null;
            }
        }
        out.push(item);
    }
    let own = |item: &&Value| key == "type" && OWN.iter().any(|own| item[key] == **own);
    let gone = old.iter().filter(own).filter(|item| !new.iter().any(|n| n[key] == item[key]));
    out.extend(gone.map(|item| json!({"$patch": "delete", key: item[key]})));
    if key == "ip" {
        let gone = old.iter().filter(|item| !new.iter().any(|n| n[key] == item[key]));
        out.extend(gone.map(|item| json!({"$patch": "delete", key: item[key]})));
    }
    Value::Array(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(old: Value, new: Value, expected: Value) {
        let read = |v: Value| serde_json::from_value::<PodStatus>(v).expect("a status");
        let got = changes(Some(&read(old)), &read(new)).unwrap_or(Value::Null);
        assert_eq!(got, expected);
    }

    #[test]
    fn the_patch_without_containers() {
        let statuses = json!({"containerStatuses": [], "initContainerStatuses": [], "ephemeralContainerStatuses": []});
        assert_eq!(without_containers(statuses.clone()), None);
        let mut more = statuses;
        more["phase"] = "Failed".into();
        assert_eq!(without_containers(more), Some(json!({"phase": "Failed"})));
    }

    #[test]
    fn patches_hold_only_what_changed() {
        check(json!({"phase": "Running"}), json!({"phase": "Running"}), Value::Null);
        check(
            json!({"phase": "Pending", "message": "m"}),
            json!({"phase": "Running"}),
            json!({"phase": "Running", "message": null}),
        );
        let condition = |name: &str, status: &str| json!({"type": name, "status": status});
        check(
            json!({"conditions": [condition("Ready", "False"), condition("Gate", "True")]}),
            json!({"conditions": [condition("Ready", "True"), condition("Gate", "True")]}),
            json!({"conditions": [condition("Ready", "True")]}),
        );
        check(
            json!({"conditions": [{"type": "Ready", "status": "False", "reason": "R"}]}),
            json!({"conditions": [condition("Ready", "True")]}),
            json!({"conditions": [{"type": "Ready", "status": "True", "reason": null}]}),
        );
        check(
            json!({"conditions": [condition("PodResizePending", "True"), condition("Gate", "True")]}),
            json!({"conditions": []}),
            json!({"conditions": [{"$patch": "delete", "type": "PodResizePending"}]}),
        );
        check(
            json!({"podIPs": [{"ip": "a"}]}),
            json!({"podIPs": [{"ip": "b"}]}),
            json!({"podIPs": [{"ip": "b"}, {"$patch": "delete", "ip": "a"}]}),
        );
    }
}
