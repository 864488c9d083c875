//! HTTP extenders: external servers that filter, score and bind.
//!
//! In: a pod and the nodes that fit. Out: the nodes that the extenders accept, with their scores.
//! Upstream: `pkg/scheduler/extender.go`. Field names are read in any case, as Go reads them.
//! Deviation: extenders are not asked about preemption.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use client::Lister;
use http_body_util::{BodyExt, Full, Limited};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use transport::{ClientOptions, HttpClient};

use crate::config::{ConfigError, Extender as Settings};
use crate::error::ExtenderError;
use crate::framework::{MAX_SCORE, Rejection};
use crate::pod::PodInfo;

/// The highest score that an extender gives.
const MAX_EXTENDER_SCORE: i64 = 10;
const PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_ANSWER: usize = 64 << 20;

pub struct Extenders {
    all: Vec<Extender>,
    pods: Lister<Pod>,
    nodes: Lister<Node>,
}

struct Extender {
    settings: Settings,
    http: HttpClient,
    patience: Duration,
}

/// The nodes that extenders accept, and the rejections of the others.
#[derive(Debug, Default)]
pub struct Left {
    pub nodes: Vec<(String, i64)>,
    pub rejections: BTreeMap<String, Rejection>,
}

impl Extenders {
    pub fn new(
        settings: &[Settings],
        pods: Lister<Pod>,
        nodes: Lister<Node>,
    ) -> Result<Self, ConfigError> {
        let all = settings.iter().map(Extender::new).collect::<Result<_, _>>()?;
        Ok(Self { all, pods, nodes })
    }

    pub fn concern(&self, pod: &PodInfo) -> bool {
        self.all.iter().any(|one| one.concerns(pod))
    }

    /// Asks each extender in turn. An error ends the attempt, unless the extender is ignorable.
    pub async fn ask(
        &self,
        pod: &PodInfo,
        nodes: Vec<(String, i64)>,
    ) -> Result<Left, ExtenderError> {
        let mut left = Left { nodes, ..Left::default() };
        let whole = self.pods.get_key(&pod.key).ok_or(ExtenderError::PodIsGone)?;
        let whole = json!(&*whole);
        for extender in self.all.iter().filter(|one| one.concerns(pod)) {
            if extender.settings.filter_verb.is_empty() || left.nodes.is_empty() {
                continue;
            }
            match extender.filter(&whole, &left.nodes, &self.nodes).await {
                Ok((kept, rejected)) => {
                    left.nodes.retain(|(name, _)| kept.contains(name));
                    left.rejections.extend(rejected);
                }
                Err(error) if extender.settings.ignorable => {
                    let extender = extender.settings.url_prefix.as_str();
                    tracing::warn!(extender, %error, "failed to ask the extender; it is ignorable");
                }
                Err(error) => return Err(error),
            }
        }
        let scorers = self.all.iter().filter(|one| one.concerns(pod));
        for extender in scorers.filter(|one| !one.settings.prioritize_verb.is_empty()) {
            if left.nodes.len() < 2 {
                break;
            }
            // Upstream: an extender that fails to score is ignored.
            let Ok(scores) = extender.prioritize(&whole, &left.nodes, &self.nodes).await else {
                continue;
            };
            for (name, total) in &mut left.nodes {
                let score = scores.get(name).copied().unwrap_or_default();
                *total += score * extender.settings.weight * (MAX_SCORE / MAX_EXTENDER_SCORE);
            }
        }
        Ok(left)
    }

    /// Binds by the extender of the pod; `None` if no extender binds it.
    pub async fn bind(&self, pod: &PodInfo, node: &str) -> Option<Result<(), ExtenderError>> {
        let mut all = self.all.iter().filter(|one| !one.settings.bind_verb.is_empty());
        let extender = all.find(|one| one.concerns(pod))?;
        let args = json!({
            "PodName": *pod.key.name, "PodNamespace": *pod.key.namespace,
            "PodUID": pod.uid, "Node": node,
        });
        let answer = extender.call(&extender.settings.bind_verb, &args).await;
        Some(answer.and_then(
            |answer| match text(&answer, "Error").filter(|error| !error.is_empty()) {
                Some(error) => Err(ExtenderError::Refused(error.to_owned())),
                None => Ok(()),
            },
        ))
    }
}

impl Extender {
    fn new(settings: &Settings) -> Result<Self, ConfigError> {
        let read = |path: &str, data: &str| -> Result<Option<String>, ConfigError> {
            use base64::Engine;
            let wrong = |why: String| ConfigError(format!("extender's TLS: {why}"));
            if !data.is_empty() {
                let bytes = base64::engine::general_purpose::STANDARD.decode(data);
                let bytes = bytes.map_err(|error| wrong(error.to_string()))?;
                return String::from_utf8(bytes).map(Some).map_err(|e| wrong(e.to_string()));
            }
            if path.is_empty() {
                return Ok(None);
            }
            let text = std::fs::read_to_string(path);
            text.map(Some).map_err(|error| wrong(format!("{path}: {error}")))
        };
        let tls = settings.tls_config.clone().unwrap_or_default();
        let options = ClientOptions {
            ca_pem: read(&tls.ca_file, &tls.ca_data)?,
            cert_pem: read(&tls.cert_file, &tls.cert_data)?,
            key_pem: read(&tls.key_file, &tls.key_data)?,
            insecure: tls.insecure || !settings.enable_https,
            server_name: Some(tls.server_name).filter(|name| !name.is_empty()),
            user_agent: Some("kube-scheduler".into()),
            ..ClientOptions::default()
        };
        let http = HttpClient::new(&options).map_err(|error| ConfigError(error.to_string()))?;
        let timeout = settings.http_timeout.as_deref();
        let patience = match timeout.map(base::duration::parse).transpose() {
            Ok(None | Some(Duration::ZERO)) => PATIENCE,
            Ok(Some(patience)) => patience,
            Err(why) => return Err(ConfigError(why)),
        };
        Ok(Self { settings: settings.clone(), http, patience })
    }

    fn concerns(&self, pod: &PodInfo) -> bool {
        let managed = &self.settings.managed_resources;
        let asked = &pod.requests.scalar;
        managed.is_empty() || managed.iter().any(|one| asked.contains_key(&one.name))
    }

    /// The accepted nodes, and the rejections of the others.
    async fn filter(
        &self,
        pod: &Value,
        nodes: &[(String, i64)],
        known: &Lister<Node>,
    ) -> Result<(Vec<String>, BTreeMap<String, Rejection>), ExtenderError> {
        let args = self.args(pod, nodes, known);
        let answer = self.call(&self.settings.filter_verb, &args).await?;
        if let Some(error) = text(&answer, "Error").filter(|error| !error.is_empty()) {
            return Err(ExtenderError::Refused(error.to_owned()));
        }
        let mut rejections = BTreeMap::new();
        for (field_name, unresolvable) in
            [("FailedNodes", false), ("FailedAndUnresolvableNodes", true)]
        {
            let failed = field(&answer, field_name).and_then(Value::as_object);
            for (node, why) in failed.into_iter().flatten() {
                let reasons = vec![why.as_str().unwrap_or_default().to_owned().into()];
                rejections.insert(
                    node.clone(),
                    Rejection { reasons, unresolvable, ..Rejection::default() },
                );
            }
        }
        let names = field(&answer, "NodeNames").and_then(Value::as_array);
        let kept = match names.filter(|_| self.settings.node_cache_capable) {
            Some(names) => {
                names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
            }
            None => {
                let items = field(&answer, "Nodes").and_then(|list| list["items"].as_array());
                let name = |node: &Value| node["metadata"]["name"].as_str().map(str::to_owned);
                items.into_iter().flatten().filter_map(name).collect()
            }
        };
        Ok((kept, rejections))
    }

    async fn prioritize(
        &self,
        pod: &Value,
        nodes: &[(String, i64)],
        known: &Lister<Node>,
    ) -> Result<HashMap<String, i64>, ExtenderError> {
        let args = self.args(pod, nodes, known);
        let answer = self.call(&self.settings.prioritize_verb, &args).await?;
        let entries = answer.as_array().into_iter().flatten();
        let score = |entry: &Value| {
            Some((text(entry, "Host")?.to_owned(), field(entry, "Score")?.as_i64()?))
        };
        Ok(entries.filter_map(score).collect())
    }

    fn args(&self, pod: &Value, nodes: &[(String, i64)], known: &Lister<Node>) -> Value {
        let names = nodes.iter().map(|(name, _)| name);
        if self.settings.node_cache_capable {
            let names: Vec<_> = names.collect();
            return json!({ "Pod": pod, "Nodes": null, "NodeNames": names });
        }
        let items: Vec<Value> =
            names.filter_map(|name| known.get("", name)).map(|node| json!(&*node)).collect();
        json!({ "Pod": pod, "Nodes": { "metadata": {}, "items": items }, "NodeNames": null })
    }

    async fn call(&self, verb: &str, args: &Value) -> Result<Value, ExtenderError> {
        let url = format!("{}/{verb}", self.settings.url_prefix.trim_end_matches('/'));
        let body = Full::new(Bytes::from(args.to_string()));
        let request = http::Request::post(&url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body)?;
        let answer = async {
            let response = self.http.request(request).await?;
            let status = response.status();
            if status != http::StatusCode::OK {
                let (verb, url) = (verb.to_owned(), url.clone());
                return Err(ExtenderError::Code { verb, url, code: status.as_u16() });
            }
            let body = Limited::new(response.into_body(), LONGEST_ANSWER).collect().await;
            let bytes = body.map_err(ExtenderError::Body)?.to_bytes();
            Ok(serde_json::from_slice(&bytes)?)
        };
        let answer = tokio::time::timeout(self.patience, answer).await;
        let verb = verb.to_owned();
        answer.unwrap_or(Err(ExtenderError::Timeout { verb, url: url.clone() }))
    }
}

/// A field by its name in any case.
fn field<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let fields = value.as_object()?;
    fields.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    field(value, name)?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_go_reads_them() {
        let answer = json!({"nodenames": ["a"], "failedNodes": {"b": "full"}, "error": ""});
        assert_eq!(field(&answer, "NodeNames"), Some(&json!(["a"])));
        assert_eq!(field(&answer, "FailedNodes"), Some(&json!({"b": "full"})));
        assert_eq!(text(&answer, "Error"), Some(""));
        assert_eq!(field(&answer, "Nodes"), None);
    }

    /// A server that answers one request, and what it was asked.
    async fn answering(answer: Value) -> (String, impl Future<Output = (String, Value)>) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/scheduler/", listener.local_addr().unwrap());
        let asked = async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![];
            loop {
                let mut part = [0; 4096];
                let read = stream.read(&mut part).await.unwrap();
                request.extend_from_slice(&part[..read]);
                let text = String::from_utf8_lossy(&request);
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                if let Ok(body) = serde_json::from_str(body) {
                    let head = head.lines().next().unwrap_or_default().to_owned();
                    let answer = answer.to_string();
                    let length = answer.len();
                    let answer = format!(
                        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{answer}"
                    );
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    return (head, body);
                }
            }
        };
        (url, asked)
    }

    #[tokio::test]
    async fn an_extender_binds_the_pods_that_concern_it() {
        let tasks = base::task::Tasks::new("test");
        let found = crate::testing::lookups(&tasks, vec![]).await;
        let informers = found.informers;
        let pod = |resource: &str| {
            PodInfo::new(
                &serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
                    "spec": {"containers": [{"name": "c", "resources": {"requests": {resource: "1"}}}]}}))
                .unwrap(),
            )
        };
        for (answer, expected) in [
            (json!({}), Ok(())),
            (json!({"Error": ""}), Ok(())),
            (json!({"error": "no device"}), Err("no device".to_owned())),
        ] {
            let (url, asked) = answering(answer).await;
            let settings: Settings = serde_json::from_value(json!({"urlPrefix": url,
                "bindVerb": "bind", "managedResources": [{"name": "example.com/gpu"}]}))
            .unwrap();
            let listers = (informers.of::<Pod>().lister(), informers.of::<Node>().lister());
            let extenders = Extenders::new(&[settings], listers.0, listers.1).unwrap();
            assert!(extenders.bind(&pod("example.com/other"), "n").await.is_none());
            let concerned = pod("example.com/gpu");
            let (bound, (head, body)) = tokio::join!(extenders.bind(&concerned, "n"), asked);
            let bound = bound.map(|bound| bound.map_err(|why| why.to_string()));
            assert_eq!(bound, Some(expected));
            assert_eq!(head, "POST /scheduler/bind HTTP/1.1");
            let wanted = json!({"PodName": "p", "PodNamespace": "ns", "PodUID": "u", "Node": "n"});
            assert_eq!(body, wanted);
        }
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
