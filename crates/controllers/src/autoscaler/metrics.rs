//! Where metrics come from: the resource, custom and external metrics APIs.
//!
//! In: a metric of a spec, the pods' selector. Out: its values, or why there are none, in
//! upstream's words. Upstream: `metrics/client.go`, `k8s.io/metrics`.

use std::collections::BTreeMap;
use std::time::Duration;

use base::percent;
use client::{Client, ErrorExt};
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{
    CrossVersionObjectReference, ExternalMetricSource, HorizontalPodAutoscaler, MetricIdentifier,
    MetricSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use machinery::Object;
use machinery::quantity;
use machinery::selector::Selector;
use serde::Deserialize;

use super::plan::Values;
use super::replicas::{PodMetric, PodMetrics};
use super::target;

const CUSTOM: &str = "custom.metrics.k8s.io";
/// The window of custom metrics that do not set one.
const DEFAULT_WINDOW: Duration = Duration::from_secs(60);

/// The values of one metric. `pods` selects the target's pods, as in its scale.
pub async fn fetch(
    client: &Client,
    autoscaler: &HorizontalPodAutoscaler,
    spec: &MetricSpec,
    pods: &str,
) -> Result<Values, String> {
    let namespace = autoscaler.namespace();
    if let Some(source) = &spec.resource {
        return resource(client, namespace, pods, &source.name, None).await;
    }
    if let Some(source) = &spec.container_resource {
        let container = Some(source.container.as_str());
        return resource(client, namespace, pods, &source.name, container).await;
    }
    let custom = |why| format!("unable to fetch metrics from custom metrics API: {why}");
    if let Some(source) = &spec.pods {
        let found = of_pods(client, namespace, pods, &source.metric).await.map_err(custom)?;
        return match found.is_empty() {
            true => Err("no metrics returned from custom metrics API".into()),
            false => Ok(Values::Pods(found)),
        };
    }
    if let Some(source) = &spec.object {
        let found = of_object(client, namespace, &source.described_object, &source.metric);
        return Ok(Values::Object(found.await.map_err(custom)?));
    }
    match &spec.external {
        Some(source) => external(client, namespace, source).await,
        None => Err("the metric has no source".into()),
    }
}

#[derive(Deserialize)]
struct List<T> {
    items: Vec<T>,
}

#[derive(Deserialize)]
struct PodMetricsItem {
    metadata: Named,
    timestamp: Timestamp,
    window: String,
    #[serde(default)]
    containers: Vec<ContainerMetrics>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct ContainerMetrics {
    name: String,
    #[serde(default)]
    usage: BTreeMap<String, Quantity>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetricValue {
    described_object: Option<Named>,
    timestamp: Option<Timestamp>,
    window_seconds: Option<u64>,
    value: Quantity,
}

async fn resource(
    client: &Client,
    namespace: &str,
    pods: &str,
    resource: &str,
    container: Option<&str>,
) -> Result<Values, String> {
    let query = query(&[("labelSelector", pods)]);
    let path = format!("/apis/metrics.k8s.io/v1beta1/namespaces/{namespace}/pods{query}");
    let failed = |error: client::Error| {
        format!("unable to fetch metrics from resource metrics API: {}", error.text())
    };
    let list: List<PodMetricsItem> = client.get(&path).await.map_err(failed)?;
    if list.items.is_empty() {
        return Err("no metrics returned from resource metrics API".into());
    }
    let usages = list.items.into_iter().filter_map(|item| {
        let value = usage(&item.containers, resource, container)?;
        let window = base::duration::parse(&item.window).unwrap_or_default();
        Some((item.metadata.name, PodMetric { value, at: item.timestamp, window }))
    });
    Ok(Values::Pods(usages.collect()))
}

/// What a pod uses, or one of its containers; nothing unless it is known of all of them.
fn usage(containers: &[ContainerMetrics], resource: &str, container: Option<&str>) -> Option<i64> {
    let of = |one: &ContainerMetrics| one.usage.get(resource).map(quantity::milli);
    if let Some(name) = container {
        return of(containers.iter().find(|one| one.name == name)?);
    }
    if containers.is_empty() {
        return None;
    }
    containers.iter().map(of).sum()
}

async fn of_pods(
    client: &Client,
    namespace: &str,
    pods: &str,
    metric: &MetricIdentifier,
) -> Result<PodMetrics, String> {
    let version = custom_version(client).await?;
    let query = query(&[
        ("labelSelector", pods),
        ("metricLabelSelector", &selector(metric.selector.as_ref())?),
    ]);
    let name = &metric.name;
    let path = format!("/apis/{CUSTOM}/{version}/namespaces/{namespace}/pods/*/{name}{query}");
    let list: List<MetricValue> = client.get(&path).await.map_err(|error| error.text())?;
    let values = list.items.into_iter().filter_map(|item| {
        let metric = PodMetric {
            value: quantity::milli(&item.value),
            at: item.timestamp.unwrap_or_default(),
            window: item.window_seconds.map_or(DEFAULT_WINDOW, Duration::from_secs),
        };
        Some((item.described_object?.name, metric))
    });
    Ok(values.collect())
}

async fn of_object(
    client: &Client,
    namespace: &str,
    object: &CrossVersionObjectReference,
    metric: &MetricIdentifier,
) -> Result<i64, String> {
    let version = custom_version(client).await?;
    let name = &metric.name;
    let query = query(&[("metricLabelSelector", &selector(metric.selector.as_ref())?)]);
    let root = format!("/apis/{CUSTOM}/{version}/namespaces/{namespace}");
    let api_version = object.api_version.as_deref().unwrap_or_default();
    let (group, _) = target::split(api_version);
    let path = if object.kind == "Namespace" && group.is_empty() {
        format!("{root}/metrics/{name}{query}")
    } else {
        let gvr = target::resource(client, api_version, &object.kind).await?;
        let dot = if group.is_empty() { "" } else { "." };
        format!("{root}/{}{dot}{group}/{}/{name}{query}", gvr.resource, object.name)
    };
    let list: List<MetricValue> = client.get(&path).await.map_err(|error| error.text())?;
    match list.items.as_slice() {
        [one] => Ok(quantity::milli(&one.value)),
        several => {
            let count = several.len();
            Err(format!(
                "the custom metrics API server returned {count} results when we asked for exactly one"
            ))
        }
    }
}

async fn external(
    client: &Client,
    namespace: &str,
    source: &ExternalMetricSource,
) -> Result<Values, String> {
    let name = &source.metric.name;
    let query = query(&[("labelSelector", &selector(source.metric.selector.as_ref())?)]);
    let path =
        format!("/apis/external.metrics.k8s.io/v1beta1/namespaces/{namespace}/{name}{query}");
    let failed = |error: client::Error| {
        format!("unable to fetch metrics from external metrics API: {}", error.text())
    };
    let list: List<MetricValue> = client.get(&path).await.map_err(failed)?;
    match list.items.is_empty() {
        true => Err("no metrics returned from external metrics API".into()),
        false => {
            let values = list.items.iter().map(|item| quantity::milli(&item.value));
            Ok(Values::External(values.collect()))
        }
    }
}

/// The version of the custom metrics API that the server prefers.
async fn custom_version(client: &Client) -> Result<String, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Group {
        preferred_version: Version,
    }
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    match client.get::<Group>(&format!("/apis/{CUSTOM}")).await {
        Ok(group) => Ok(group.preferred_version.version),
        Err(error) if error.is_not_found() => {
            Err("no custom metrics API (custom.metrics.k8s.io) registered".into())
        }
        Err(error) => Err(error.text()),
    }
}

fn selector(selector: Option<&LabelSelector>) -> Result<String, String> {
    match selector {
        None => Ok(String::new()),
        some => Selector::from_api(some)
            .map(|selector| selector.to_string())
            .map_err(|error| error.to_string()),
    }
}

/// A query string of the pairs that have a value.
fn query(pairs: &[(&str, &str)]) -> String {
    let mut out = String::new();
    for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
        out.push(if out.is_empty() { '?' } else { '&' });
        out.push_str(name);
        out.push('=');
        out.push_str(&percent::encode(value));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_encoded() {
        let pairs = [("labelSelector", "app=web,tier in (a)"), ("metricLabelSelector", "")];
        assert_eq!(query(&pairs), "?labelSelector=app%3Dweb%2Ctier%20in%20%28a%29");
        assert_eq!(query(&[]), "");
    }

    #[test]
    fn a_pods_usage_is_known_as_a_whole_or_not_at_all() {
        let container = |name: &str, cpu: Option<&str>| ContainerMetrics {
            name: name.into(),
            usage: cpu.map(|cpu| ("cpu".to_owned(), Quantity(cpu.into()))).into_iter().collect(),
        };
        let both = [container("a", Some("250m")), container("b", Some("1500000n"))];
        assert_eq!(usage(&both, "cpu", None), Some(252));
        assert_eq!(usage(&both, "cpu", Some("a")), Some(250));
        assert_eq!(usage(&both, "memory", None), None);
        assert_eq!(usage(&[container("a", Some("1")), container("b", None)], "cpu", None), None);
        assert_eq!(usage(&[], "cpu", None), None);
    }
}
