//! ConfigMaps, Secrets and service account tokens that this node's pods use.
//!
//! In: the objects that each pod needs. Out: the object, and a wake-up when it changes.
//! One watch per object in use, on that object alone (the node authorizer grants no more); it ends
//! when the last pod that needs it is gone.
//! Invariants: an object is `None` only if its first list returned nothing; the last known object stays
//! while the API is unavailable. Tokens are renewed after 80 % of their lifetime or a day.
//! Upstream: `pkg/kubelet/{configmap,secret,token}` with the watching manager.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use client::{Client, ErrorExt, Informer, Informers, Kind};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use serde_json::json;
use tokio::sync::Notify;

use crate::names;

/// How long a worker waits for the first list of an object before it reports a failure.
const FIRST_LIST: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    kind: &'static str,
    namespace: String,
    name: String,
}

struct Watched {
    /// Ends the object's informer.
    tasks: Tasks,
    /// An `Informer<ConfigMap>` or `Informer<Secret>`.
    informer: Box<dyn Any + Send + Sync>,
    /// The pods (by uid) that use it, and the notifies of their workers.
    users: Arc<Mutex<HashMap<String, Arc<Notify>>>>,
}

struct Token {
    text: String,
    expires: Timestamp,
    refresh: Timestamp,
}

/// The objects of all pods of the node.
pub struct Objects {
    client: Client,
    /// Guards the table of watches; held for look-ups, never across await.
    watched: Mutex<HashMap<Key, Watched>>,
    /// By pod uid, then by audience and lifetime.
    tokens: Mutex<HashMap<String, BTreeMap<String, Token>>>,
}

/// Names of ConfigMaps and Secrets in the pod's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    pub config_maps: BTreeSet<String>,
    pub secrets: BTreeSet<String>,
}

impl References {
    pub fn extend(&mut self, other: Self) {
        self.config_maps.extend(other.config_maps);
        self.secrets.extend(other.secrets);
    }
}

/// Why an object could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    #[error("failed to sync {kind} cache: timed out waiting for the condition")]
    NotYet { kind: &'static str },
    #[error("{0}")]
    Api(String),
}

/// A token and the time to renew it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedToken {
    pub text: String,
    pub refresh: Timestamp,
    pub expires: Timestamp,
}

/// A token request of a projected volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSpec<'a> {
    pub namespace: &'a str,
    pub service_account: &'a str,
    pub audience: Option<&'a str>,
    pub seconds: i64,
    pub pod_name: &'a str,
    pub pod_uid: &'a str,
}

impl<'a> TokenSpec<'a> {
    pub fn of(pod: &'a Pod, audience: Option<&'a str>, seconds: i64) -> Self {
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        Self {
            namespace: names::namespace(pod),
            service_account: account.filter(|name| !name.is_empty()).unwrap_or("default"),
            audience,
            seconds,
            pod_name: names::name(pod),
            pod_uid: names::uid(pod),
        }
    }
}

impl Objects {
    pub fn new(client: Client) -> Self {
        Self { client, watched: Mutex::default(), tokens: Mutex::default() }
    }

    pub async fn config_map(
        &self,
        namespace: &str,
        name: &str,
        pod_uid: &str,
        wake: &Arc<Notify>,
    ) -> Result<Option<Arc<ConfigMap>>, ObjectError> {
        self.get("configmap", namespace, name, pod_uid, wake).await
    }

    pub async fn secret(
        &self,
        namespace: &str,
        name: &str,
        pod_uid: &str,
        wake: &Arc<Notify>,
    ) -> Result<Option<Arc<Secret>>, ObjectError> {
        self.get("secret", namespace, name, pod_uid, wake).await
    }

    async fn get<T: Kind>(
        &self,
        kind: &'static str,
        namespace: &str,
        name: &str,
        pod_uid: &str,
        wake: &Arc<Notify>,
    ) -> Result<Option<Arc<T>>, ObjectError> {
        let key = Key { kind, namespace: namespace.into(), name: name.into() };
        let informer = self.watch::<T>(key, pod_uid, wake);
        if !informer.has_synced()
            && tokio::time::timeout(FIRST_LIST, informer.synced()).await.is_err()
        {
            return Err(ObjectError::NotYet { kind });
        }
        Ok(informer.lister().get(namespace, name))
    }

    fn watch<T: Kind>(&self, key: Key, pod_uid: &str, wake: &Arc<Notify>) -> Informer<T> {
        let mut watched = self.watched.lock().expect("no panic while held");
        let entry = watched.entry(key.clone()).or_insert_with(|| {
            let tasks = Tasks::new(format!("{} {}/{}", key.kind, key.namespace, key.name));
            let informers = Informers::new(self.client.clone(), tasks.clone());
            let only = format!("metadata.name={}", key.name);
            let informer = informers.scoped::<T>(Some(&key.namespace), &only, "");
            let users: Arc<Mutex<HashMap<String, Arc<Notify>>>> = Arc::default();
            let told = users.clone();
            informer.subscribe_raw(move |_| {
                for wake in told.lock().expect("no panic while held").values() {
                    wake.notify_one();
                }
            });
            Watched { tasks, informer: Box::new(informer), users }
        });
        let mut users = entry.users.lock().expect("no panic while held");
        users.entry(pod_uid.to_string()).or_insert_with(|| wake.clone());
        drop(users);
        let informer = entry.informer.downcast_ref::<Informer<T>>();
        informer.expect("the key's kind is the informer's type").clone()
    }

    /// A token of the pod's service account, renewed when it ages.
    pub async fn token(&self, order: &TokenSpec<'_>) -> Result<IssuedToken, ObjectError> {
        let what = format!("{}/{}", order.audience.unwrap_or_default(), order.seconds);
        let now = base::clock::now();
        let known = {
            let tokens = self.tokens.lock().expect("no panic while held");
            let token = tokens.get(order.pod_uid).and_then(|of_pod| of_pod.get(&what));
            token.map(|t| IssuedToken {
                text: t.text.clone(),
                refresh: t.refresh,
                expires: t.expires,
            })
        };
        if let Some(token) = known.as_ref().filter(|token| token.refresh > now) {
            return Ok(token.clone());
        }
        match self.request_token(order).await {
            Ok((text, expires)) => {
                let refresh = refresh_at(now, expires);
                let token = Token { text: text.clone(), expires, refresh };
                let mut tokens = self.tokens.lock().expect("no panic while held");
                tokens.entry(order.pod_uid.to_string()).or_default().insert(what, token);
                Ok(IssuedToken { text, refresh, expires })
            }
            // Keep the old token, which is still valid, and retry soon.
            Err(error) => match known.filter(|token| token.expires > now) {
                Some(token) => {
                    tracing::warn!(%error, pod = order.pod_name, "failed to renew the service account token");
                    Ok(IssuedToken { refresh: now + Duration::from_secs(60), ..token })
                }
                None => Err(error),
            },
        }
    }

    async fn request_token(
        &self,
        order: &TokenSpec<'_>,
    ) -> Result<(String, Timestamp), ObjectError> {
        let mut spec = json!({
            "expirationSeconds": order.seconds,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": order.pod_name,
                "uid": order.pod_uid},
        });
        spec["audiences"] = match order.audience.filter(|a| !a.is_empty()) {
            Some(audience) => json!([audience]),
            None => json!([]),
        };
        let body = json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
            "metadata": {}, "spec": spec});
        let path = format!(
            "/api/v1/namespaces/{}/serviceaccounts/{}/token",
            order.namespace, order.service_account
        );
        let sent = self.client.call(Method::POST, &path, "application/json", body.to_string());
        let bytes = sent.await.map_err(|error| ObjectError::Api(error.text()))?;
        let bad = |what: &str| ObjectError::Api(format!("the token answer has no {what}"));
        let answer: serde_json::Value = serde_json::from_slice(&bytes).map_err(|_| bad("JSON"))?;
        let field = |name: &str| answer["status"][name].as_str().map(str::to_string);
        let text = field("token").ok_or_else(|| bad("token"))?;
        let expires = field("expirationTimestamp").and_then(|t| t.parse().ok());
        Ok((text, expires.ok_or_else(|| bad("expirationTimestamp"))?))
    }

    /// Sets the objects that the pod uses; watches that no pod needs end.
    pub fn keep(
        &self,
        pod_uid: &str,
        config_maps: &BTreeSet<(String, String)>,
        secrets: &BTreeSet<(String, String)>,
    ) {
        let mut watched = self.watched.lock().expect("no panic while held");
        watched.retain(|key, entry| {
            let pair = (key.namespace.clone(), key.name.clone());
            let needed = match key.kind {
                "secret" => secrets.contains(&pair),
                _ => config_maps.contains(&pair),
            };
            let mut users = entry.users.lock().expect("no panic while held");
            if !needed {
                users.remove(pod_uid);
            }
            let keep = !users.is_empty();
            if !keep {
                entry.tasks.stop();
            }
            keep
        });
    }

    /// Forgets a deleted pod.
    pub fn forget(&self, pod_uid: &str) {
        self.keep(pod_uid, &BTreeSet::new(), &BTreeSet::new());
        self.tokens.lock().expect("no panic while held").remove(pod_uid);
    }
}

/// Upstream: requiresRefresh, without its jitter.
fn refresh_at(issued: Timestamp, expires: Timestamp) -> Timestamp {
    let life = Duration::try_from(expires.duration_since(issued)).unwrap_or_default();
    issued + life.mul_f64(0.8).min(Duration::from_secs(24 * 3600))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_tokens_are_renewed() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        assert_eq!(refresh_at(at(0), at(3600)), at(2880));
        assert_eq!(refresh_at(at(0), at(1_000_000)), at(86_400));
    }
}
