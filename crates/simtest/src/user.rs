//! Users at work: steps of a plan as requests.
//!
//! In: an act. Out: requests of an administrator, on a connection without faults. What is refused, or is not
//! there, is noted in the trace and is no finding: users make mistakes.

use client::{Client, ErrorExt};
use http::Method;
use serde_json::{Value, json};

use crate::history::{History, State};
use crate::plan::{self, Act};

const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";
const REVISION: &str = "deployment.kubernetes.io/revision";

pub struct User {
    pub client: Client,
    pub history: History,
}

impl User {
    /// Acts on objects; acts on parts are the world's.
    pub async fn perform(&self, act: &Act) {
        match act {
            Act::Create(collection, object) => {
                self.send(Method::POST, collection, JSON, object).await;
            }
            Act::Patch(path, patch) => self.send(Method::PATCH, path, STRATEGIC, patch).await,
            Act::Delete(path, policy) => {
                let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy});
                self.send(Method::DELETE, path, JSON, &options).await;
            }
            Act::RollBack { namespace, name } => {
                let template = previous_template(&self.history.state(), namespace, name);
                if let Some(template) = template {
                    let patch = json!({"spec": {"template": template}});
                    let path = plan::path("deployments", namespace, name);
                    self.send(Method::PATCH, &path, MERGE, &patch).await;
                }
            }
            Act::DeletePod { namespace, nth } => {
                if let Some(name) = self.nth_pod(namespace, *nth) {
                    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
                    self.send(Method::DELETE, &path, JSON, &json!({})).await;
                }
            }
            Act::Evict { namespace, nth } => {
                if let Some(name) = self.nth_pod(namespace, *nth) {
                    self.evict(namespace, &name).await;
                }
            }
            Act::Cordon { node, is_on } => self.cordon(node, *is_on).await,
            Act::Drain { node } => {
                self.cordon(node, true).await;
                let state = self.history.state();
                let here = |pod: &Value| pod["spec"]["nodeName"] == node.as_str();
                for (key, _) in state.all("pods").filter(|(_, pod)| here(pod)) {
                    self.evict(&key.namespace, &key.name).await;
                }
            }
            Act::Kill { .. } | Act::CutOff { .. } | Act::Silence { .. } => {}
        }
    }

    pub async fn cordon(&self, node: &str, is_on: bool) {
        let patch = json!({"spec": {"unschedulable": is_on.then_some(true)}});
        self.send(Method::PATCH, &format!("/api/v1/nodes/{node}"), MERGE, &patch).await;
    }

    pub async fn silence(&self, node: &str, is_on: bool) {
        let mode = is_on.then_some("silent");
        let patch = json!({"metadata": {"annotations": {"decapod.io/simulate": mode}}});
        self.send(Method::PATCH, &format!("/api/v1/nodes/{node}"), MERGE, &patch).await;
    }

    async fn evict(&self, namespace: &str, name: &str) {
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace}});
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction");
        self.send(Method::POST, &path, JSON, &eviction).await;
    }

    async fn send(&self, method: Method, path: &str, content_type: &'static str, body: &Value) {
        let text = format!("user: {method} {path}");
        match self.client.call(method, path, content_type, body.to_string()).await {
            Ok(_) => self.history.remark(format!("{text} {body}")),
            Err(error) => self.history.remark(format!("{text}: {}", error.text())),
        }
    }

    fn nth_pod(&self, namespace: &str, nth: u64) -> Option<String> {
        let state = self.history.state();
        let pods: Vec<&str> = state.within("pods", namespace).map(|(key, _)| &*key.name).collect();
        let count = u64::try_from(pods.len()).ok().filter(|count| *count > 0)?;
        let at = usize::try_from(nth % count).ok()?;
        pods.get(at).map(|name| (*name).to_owned())
    }
}

/// Of the ReplicaSet with the second highest revision.
fn previous_template(state: &State, namespace: &str, name: &str) -> Option<Value> {
    let uid = state.get("deployments", namespace, name)?["metadata"]["uid"].clone();
    let own = |set: &Value| set["metadata"]["ownerReferences"][0]["uid"] == uid;
    let sets = state.within("replicasets", namespace).filter(|(_, set)| own(set));
    let revision = |set: &Value| -> u64 {
        let text = set["metadata"]["annotations"][REVISION].as_str().unwrap_or_default();
        text.parse().unwrap_or_default()
    };
    let mut all: Vec<&Value> = sets.map(|(_, set)| &**set).collect();
    all.sort_by_key(|set| std::cmp::Reverse(revision(set)));
    let mut template = all.get(1)?["spec"]["template"].clone();
    template["metadata"]["labels"]["pod-template-hash"] = Value::Null;
    Some(template)
}
