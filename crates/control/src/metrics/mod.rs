//! The metrics API, metrics.k8s.io/v1beta1: what nodes and pods use now.
//!
//! In: kubelets' `/metrics/resource`. Out: NodeMetrics and PodMetrics, for `kubectl top` and the
//! HorizontalPodAutoscaler with nothing installed.
//!
//! Nothing is stored, and nothing is scraped without a request: a request asks the kubelets unless
//! the last answers are fresh, and a first question asks twice, as a rate needs two samples. There
//! is no APIService for these rows: one that a user's own metrics-server brings takes the version
//! over, and gives it back when it is deleted.
//! Upstream: metrics-server, which is an add-on.

mod samples;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apiserver::Registry;
use apiserver::request::Key;
use apiserver::resource::{Column, Computed, Doc, TableConvertor};
use async_trait::async_trait;
use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use machinery::object::Unstructured;
use machinery::quantity::canonical;
use machinery::{Object, ObjectMeta, StatusError, Time};
use resources::Row;
use serde_json::{Map, Value, json};

use self::samples::{History, Sample, Usage};
use crate::kubelets::Kubelets;

const GROUP: &str = "metrics.k8s.io";
const VERSION: &str = "v1beta1";
/// How old an answer may be: a little less than the autoscaler's period, so that each of its looks
/// finds news.
const FRESH_MS: i64 = 10_000;
/// Between the two scrapes of a first question.
const FIRST_WINDOW: Duration = Duration::from_secs(1);
/// Upstream: `--kubelet-request-timeout`.
const PATIENCE: Duration = Duration::from_secs(10);
const AT_ONCE: usize = 64;

pub(crate) fn rows(kubelets: &Arc<Kubelets>) -> [Row; 2] {
    let collector =
        Arc::new(Collector { kubelets: kubelets.clone(), nodes: Mutex::new(HashMap::new()) });
    let nodes = Arc::new(NodeMetrics(collector.clone()));
    let pods = Arc::new(PodMetrics(collector));
    [
        Row::computed((GROUP, VERSION, "NodeMetrics"), "nodes", nodes.clone(), nodes)
            .cluster_scoped(),
        Row::computed((GROUP, VERSION, "PodMetrics"), "pods", pods.clone(), pods),
    ]
}

/// Asks kubelets, and remembers their latest answers.
struct Collector {
    kubelets: Arc<Kubelets>,
    /// By node. Held for look-ups only, never across an await.
    nodes: Mutex<HashMap<String, History>>,
}

impl Collector {
    /// Sees to it that the nodes' figures are fresh. Nodes that do not answer keep their old ones
    /// until these are too old to tell anything.
    async fn refresh(&self, registry: &Registry, nodes: &BTreeSet<String>) {
        stream::iter(nodes)
            .for_each_concurrent(AT_ONCE, |node| async move {
                if self.of(node, |history| history.is_fresh(now_ms(), FRESH_MS)) {
                    return;
                }
                self.scrape(registry, node).await;
                if self.of(node, |history| history.lacks_one()) {
                    tokio::time::sleep(FIRST_WINDOW).await;
                    self.scrape(registry, node).await;
                }
            })
            .await;
    }

    async fn scrape(&self, registry: &Registry, node: &str) {
        let text = self.kubelets.text(registry, node, "/metrics/resource");
        match tokio::time::timeout(PATIENCE, text).await {
            Ok(Ok(text)) => {
                let sample = Sample::parse(&text, now_ms());
                self.of(node, |history| history.push(sample));
            }
            Ok(Err(error)) => tracing::debug!(node, %error, "failed to read the node's metrics"),
            Err(_) => tracing::debug!(node, "failed to read the node's metrics in time"),
        }
    }

    fn of<R>(&self, node: &str, look: impl FnOnce(&mut History) -> R) -> R {
        let mut nodes = self.nodes.lock().expect("no panic under the lock");
        look(nodes.entry(node.to_owned()).or_default())
    }

    /// Forgets the nodes that are no more.
    fn keep(&self, nodes: &BTreeSet<String>) {
        self.nodes.lock().expect("no panic under the lock").retain(|name, _| nodes.contains(name));
    }
}

fn now_ms() -> i64 {
    base::clock::now().as_millisecond()
}

struct NodeMetrics(Arc<Collector>);

#[async_trait]
impl Computed for NodeMetrics {
    async fn computed(
        &self,
        registry: &Registry,
        wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        let nodes = match wanted.name.as_str() {
            "" => registry.cached::<Node>("").await?,
            name => registry.find::<Node>("", name).await?.into_iter().collect(),
        };
        let names: BTreeSet<String> = nodes.iter().map(|node| node.name().to_owned()).collect();
        if wanted.name.is_empty() {
            self.0.keep(&names);
        }
        self.0.refresh(registry, &names).await;
        let usage = |node: &Node| {
            let usage = self.0.of(node.name(), |history| history.node())?;
            Some(object("NodeMetrics", &node.metadata, usage, |fields| {
                fields.insert("usage".into(), figures(usage));
            }))
        };
        Ok(nodes.iter().filter_map(usage).collect())
    }
}

impl TableConvertor for NodeMetrics {
    fn columns(&self) -> Vec<Column> {
        columns()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let object = object.expect::<Unstructured>();
        cells(object, object.fields.get("usage").into_iter())
    }
}

struct PodMetrics(Arc<Collector>);

#[async_trait]
impl Computed for PodMetrics {
    async fn computed(
        &self,
        registry: &Registry,
        wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        let mut pods = match wanted.name.as_str() {
            "" => registry.cached::<Pod>(&wanted.namespace).await?,
            name => registry.find::<Pod>(&wanted.namespace, name).await?.into_iter().collect(),
        };
        let is_running = |pod: &Pod| {
            pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
        };
        pods.retain(|pod| is_running(pod) && node_of(pod).is_some());
        let nodes: BTreeSet<String> = pods.iter().filter_map(node_of).collect();
        self.0.refresh(registry, &nodes).await;
        Ok(pods.iter().filter_map(|pod| self.of(pod)).collect())
    }
}

impl TableConvertor for PodMetrics {
    fn columns(&self) -> Vec<Column> {
        columns()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let object = object.expect::<Unstructured>();
        let containers = object.fields.get("containers").and_then(Value::as_array);
        cells(object, containers.into_iter().flatten().filter_map(|one| one.get("usage")))
    }
}

impl PodMetrics {
    fn of(&self, pod: &Pod) -> Option<Box<dyn Object>> {
        self.0.of(&node_of(pod)?, |history| {
            let containers = history.pod(pod.namespace(), pod.name())?;
            let earliest = *containers.values().min_by_key(|usage| usage.at_ms)?;
            let container =
                |(name, usage): (&&str, &Usage)| json!({ "name": name, "usage": figures(*usage) });
            let all: Vec<Value> = containers.iter().map(container).collect();
            Some(object("PodMetrics", &pod.metadata, earliest, |fields| {
                fields.insert("containers".into(), all.into());
            }))
        })
    }
}

fn node_of(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone().filter(|name| !name.is_empty())
}

/// The metrics of what has this metadata.
fn object(
    kind: &str,
    meta: &ObjectMeta,
    usage: Usage,
    more: impl FnOnce(&mut Map<String, Value>),
) -> Box<dyn Object> {
    let at = Timestamp::from_millisecond(usage.at_ms).unwrap_or_default();
    let at = Timestamp::from_second(at.as_second()).unwrap_or_default();
    let mut fields = Map::new();
    fields.insert("timestamp".into(), at.to_string().into());
    fields.insert("window".into(), base::duration::text(usage.window_ms * 1_000_000).into());
    more(&mut fields);
    Box::new(Unstructured {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: kind.into(),
        metadata: ObjectMeta {
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            labels: meta.labels.clone(),
            creation_timestamp: Some(Time(base::clock::now_seconds())),
            ..ObjectMeta::default()
        },
        fields,
    })
}

fn figures(usage: Usage) -> Value {
    let exact = |text: String| canonical(&text).unwrap_or(text);
    let memory = match usage.memory_bytes % 1024 {
        0 => format!("{}Ki", usage.memory_bytes / 1024),
        _ => usage.memory_bytes.to_string(),
    };
    json!({ "cpu": exact(format!("{}n", usage.cpu_nanos)), "memory": memory })
}

fn columns() -> Vec<Column> {
    let column = |name: &'static str, format: &'static str| Column {
        name: name.into(),
        kind: "string".into(),
        format: format.into(),
        description: Doc::Text("".into()),
        priority: 0,
    };
    vec![
        column("Name", "name"),
        column("cpu", "quantity"),
        column("memory", "quantity"),
        column("Window", "duration"),
    ]
}

fn cells<'a>(object: &Unstructured, usages: impl Iterator<Item = &'a Value>) -> Vec<Value> {
    let (mut cpu, mut memory) = (0, 0);
    for usage in usages {
        let amount = |name: &str| {
            let text = usage.get(name).and_then(Value::as_str).unwrap_or_default();
            machinery::quantity::Amount::parse(text).unwrap_or_default()
        };
        cpu += amount("cpu").milli();
        memory += amount("memory").units();
    }
    let window = object.fields.get("window").cloned().unwrap_or_default();
    let memory = format!("{}Ki", memory / 1024);
    vec![object.name().into(), format!("{cpu}m").into(), memory.into(), window]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_as_upstreams() {
        let usage =
            |cpu_nanos, memory_bytes| Usage { at_ms: 0, window_ms: 0, cpu_nanos, memory_bytes };
        let check = |given: Usage, expected: Value| assert_eq!(figures(given), expected);
        check(usage(250_000_000, 2 << 20), json!({ "cpu": "250m", "memory": "2048Ki" }));
        check(usage(1_234_567, 4096), json!({ "cpu": "1234567n", "memory": "4Ki" }));
        check(usage(0, 0), json!({ "cpu": "0", "memory": "0Ki" }));
    }

    #[test]
    fn rows_have_cells_for_their_columns() {
        let meta = ObjectMeta { name: Some("a".into()), ..ObjectMeta::default() };
        let usage =
            Usage { at_ms: 0, window_ms: 15_000, cpu_nanos: 1_000_000, memory_bytes: 1 << 20 };
        let made = object("NodeMetrics", &meta, usage, |fields| {
            fields.insert("usage".into(), figures(usage));
        });
        let row = made.expect::<Unstructured>();
        let cells = cells(row, row.fields.get("usage").into_iter());
        assert_eq!(json!(cells), json!(["a", "1m", "1024Ki", "15s"]));
        assert_eq!(made.to_value()["timestamp"], "1970-01-01T00:00:00Z");
    }
}
