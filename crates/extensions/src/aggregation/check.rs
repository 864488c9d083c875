//! Checks whether a server is available and which resources it serves, by its discovery document.
//!
//! In: an APIService. Out: the condition `Available` with upstream's reasons, written if it
//! changed, and the resources for discovery.
//! Upstream: `pkg/controllers/status/remote`, `pkg/apiserver/handler_discovery.go`.

use std::time::Duration;

use apiserver::Registry;
use apiserver::aggregate::Remote;
use apiserver::registry::Intent;
use apiserver::request::Key;
use bytes::Bytes;
use http::uri::Scheme;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::{
    APIService, APIServiceCondition, APIServiceSpec,
};
use machinery::{Object, StatusError, Time};
use serde_json::{Map, Value, json};
use transport::HostPort;

use super::{Aggregation, Backend, Trust};

const HTTPS: i32 = 443;
const PATIENCE: Duration = Duration::from_secs(5);
/// The size limit of a discovery document. Thousands of kinds take far less.
const LONGEST_ANSWER: usize = 8 << 20;
/// The user of the check: upstream's name, with full rights.
const CHECKER: [(&str, &str); 2] =
    [("x-remote-user", "system:kube-aggregator"), ("x-remote-group", "system:masters")];

pub(super) struct Outcome {
    pub remote: Remote,
    pub backend: Backend,
}

/// The reason and the message of an unavailable server.
type Why = (&'static str, String);

/// Checks one APIService. `None` if its spec is invalid.
pub(super) async fn check(
    aggregation: &Aggregation,
    registry: &Registry,
    service: &APIService,
    before: &[Remote],
) -> Option<Outcome> {
    let spec = service.spec.clone()?;
    let place = spec.service.clone()?;
    let (group, version) = (spec.group.clone()?, spec.version.clone()?);
    let (namespace, name) = (place.namespace?, place.name?);
    let http = match aggregation.client(&trust(&spec, &namespace, &name)) {
        Ok(http) => http,
        Err(error) => {
            tracing::warn!(error, apiservice = service.name(), "invalid caBundle of APIService");
            return None;
        }
    };
    let port = place.port.unwrap_or(HTTPS);
    let mut backend = Backend { http, namespace, service: name, port, is_available: false };
    let outcome = ask(registry, &backend, &group, &version).await;
    backend.is_available = outcome.is_ok();
    let known = before.iter().find(|one| one.group == group && one.version == version);
    let resources = match &outcome {
        Ok(list) => aggregated(list, &group, &version),
        Err(_) => known.map(|one| one.resources.clone()).unwrap_or_default(),
    };
    if let Err(error) = note(registry, service, &outcome).await {
        tracing::warn!(%error, apiservice = service.name(), "failed to update the status of APIService");
    }
    let remote = Remote {
        group,
        version,
        group_priority: spec.group_priority_minimum,
        version_priority: spec.version_priority,
        resources,
        is_available: backend.is_available,
    };
    Some(Outcome { remote, backend })
}

/// The settings to reach its server. `None` for groups of this server.
pub(super) fn trust_of(service: &APIService) -> Option<Trust> {
    let spec = service.spec.as_ref()?;
    let place = spec.service.as_ref()?;
    Some(trust(spec, place.namespace.as_deref()?, place.name.as_deref()?))
}

fn trust(spec: &APIServiceSpec, namespace: &str, name: &str) -> Trust {
    Trust {
        server_name: format!("{name}.{namespace}.svc"),
        authorities: spec.ca_bundle.as_ref().map(|bundle| bundle.0.clone()).unwrap_or_default(),
        is_lax: spec.insecure_skip_tls_verify.unwrap_or_default(),
    }
}

/// The server's list of resources, or the reason why there is none.
async fn ask(
    registry: &Registry,
    backend: &Backend,
    group: &str,
    version: &str,
) -> Result<Value, Why> {
    let address = endpoint(registry, backend).await?;
    let path = format!("/apis/{group}/{version}");
    let url = format!("https://{address}{path}");
    let failed = |why: String| {
        ("FailedDiscoveryCheck", format!("failing or missing response from {url}: {why}"))
    };
    let uri = address.uri(Scheme::HTTPS, &path).map_err(|error| failed(error.to_string()))?;
    let mut request = Request::get(uri).header("accept", "application/json");
    for (name, value) in CHECKER {
        request = request.header(name, value);
    }
    let request = request.body(transport::empty()).map_err(|error| failed(error.to_string()))?;
    let answer = async {
        let response =
            backend.http.request(request).await.map_err(|error| failed(error.to_string()))?;
        let status = response.status();
        if !status.is_success() {
            return Err(failed(format!("bad status from {url}: {}", status.as_u16())));
        }
        let body = Limited::new(response.into_body(), LONGEST_ANSWER).collect().await;
        Ok((status, body.map_err(|error| failed(error.to_string()))?.to_bytes()))
    };
    let timeout = |_| ("FailedDiscoveryCheck", format!("timed out waiting for {url}"));
    let (status, body): (StatusCode, Bytes) =
        tokio::time::timeout(PATIENCE, answer).await.map_err(timeout)??;
    debug_assert!(status.is_success());
    // Upstream accepts any answer. Discovery needs a list.
    Ok(serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// An address of the Service's ready endpoints.
pub(super) async fn endpoint(registry: &Registry, backend: &Backend) -> Result<HostPort, Why> {
    let Backend { namespace, service: name, port, .. } = backend;
    let broken = |error: StatusError| {
        let why = format!("service/{name} in {namespace:?} cannot be checked due to: {error}");
        ("ServiceAccessError", why)
    };
    let found = registry.find::<Service>(namespace, name).await.map_err(broken)?;
    let Some(service) = found else {
        let why = format!("service/{name} in {namespace:?} is not present");
        return Err(("ServiceNotFound", why));
    };
    let spec = service.spec.unwrap_or_default();
    if spec.type_.as_deref() == Some("ExternalName") {
        let host = spec.external_name.unwrap_or_default();
        return HostPort::new(&host, *port).ok_or_else(|| {
            let why = format!("service/{name} in {namespace:?} has no valid external name");
            ("ServiceAccessError", why)
        });
    }
    let Some(service_port) = spec.ports.into_iter().flatten().find(|one| one.port == *port) else {
        let why = format!("service/{name} in {namespace:?} is not listening on port {port}");
        return Err(("ServicePortError", why));
    };
    let port_name = service_port.name.unwrap_or_default();
    let slices = registry.cached::<EndpointSlice>(namespace).await.map_err(broken)?;
    let own = |slice: &EndpointSlice| {
        let labels = slice.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get("kubernetes.io/service-name")) == Some(name)
    };
    let slices: Vec<EndpointSlice> = slices.into_iter().filter(own).collect();
    if slices.is_empty() {
        let why = format!("cannot find endpointslices for service/{name} in {namespace:?}");
        return Err(("EndpointsNotFound", why));
    }
    let addresses: Vec<HostPort> = slices.iter().flat_map(|one| ready(one, &port_name)).collect();
    if addresses.is_empty() {
        let why = format!(
            "endpointslices for service/{name} in {namespace:?} have no addresses with port name {port_name:?}"
        );
        return Err(("MissingEndpoints", why));
    }
    let index = base::rng::below(addresses.len() as u64) as usize;
    Ok(addresses[index].clone())
}

/// The addresses and ports of ready endpoints.
fn ready(slice: &EndpointSlice, port_name: &str) -> Vec<HostPort> {
    let mut ports = slice.ports.iter().flatten();
    let port = ports.find(|port| port.name.as_deref().unwrap_or_default() == port_name);
    let Some(port) = port.and_then(|port| port.port) else { return vec![] };
    let is_ready = |one: &&k8s_openapi::api::discovery::v1::Endpoint| {
        one.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false)
    };
    let ready = slice.endpoints.iter().flatten().filter(is_ready);
    let addresses = ready.flat_map(|endpoint| endpoint.addresses.iter());
    addresses.filter_map(|host| HostPort::new(host, port)).collect()
}

/// Writes the condition if it differs from the present one.
async fn note(
    registry: &Registry,
    service: &APIService,
    outcome: &Result<Value, Why>,
) -> Result<(), StatusError> {
    let (status, reason, message) = match outcome {
        Ok(_) => ("True", "Passed", "all checks passed".to_owned()),
        Err((reason @ "ServiceAccessError", why)) => ("Unknown", *reason, why.clone()),
        Err((reason, why)) => ("False", *reason, why.clone()),
    };
    let old = service.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let old = old.into_iter().find(|condition| condition.type_ == "Available");
    let is_same = old.is_some_and(|old| {
        old.status == status
            && old.reason.as_deref() == Some(reason)
            && old.message.as_deref() == Some(message.as_str())
    });
    if is_same {
        return Ok(());
    }
    let since =
        old.filter(|old| old.status == status).and_then(|old| old.last_transition_time.clone());
    let condition = APIServiceCondition {
        type_: "Available".into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message),
        last_transition_time: since.or_else(|| Some(Time(base::clock::now_seconds()))),
    };
    let mut ctx = registry.own_context::<APIService>();
    ctx.subresource = "status".into();
    let key = Key::new("", service.name());
    let modify = move |object: &mut dyn Object| {
        let object = object.expect_mut::<APIService>();
        let conditions = object.status.get_or_insert_default().conditions.get_or_insert_default();
        conditions.retain(|one| one.type_ != condition.type_);
        conditions.push(condition.clone());
        Ok(())
    };
    registry.write(&ctx, &key, Intent::Modify(Box::new(modify))).await.map(|_| ())
}

/// Converts an APIResourceList to the form of aggregated discovery. Upstream: `endpoints/discovery/aggregated`.
fn aggregated(list: &Value, group: &str, version: &str) -> Vec<Value> {
    let all = list["resources"].as_array().map(Vec::as_slice).unwrap_or_default();
    let name = |one: &Value| one["name"].as_str().unwrap_or_default().to_owned();
    let kind = |one: &Value| {
        let or = |field: &str, own: &str| {
            one[field].as_str().filter(|text| !text.is_empty()).unwrap_or(own).to_owned()
        };
        json!({ "group": or("group", group), "version": or("version", version), "kind": one["kind"] })
    };
    let mut shown = vec![];
    for one in all.iter().filter(|one| !name(one).contains('/')) {
        let scope = if one["namespaced"] == true { "Namespaced" } else { "Cluster" };
        let mut fields = Map::new();
        fields.insert("resource".into(), one["name"].clone());
        fields.insert("responseKind".into(), kind(one));
        fields.insert("scope".into(), scope.into());
        fields.insert("singularResource".into(), one["singularName"].clone());
        fields.insert("verbs".into(), one["verbs"].clone());
        for optional in ["shortNames", "categories"] {
            if let Some(value) = one.get(optional) {
                fields.insert(optional.into(), value.clone());
            }
        }
        let prefix = format!("{}/", name(one));
        let below = all.iter().filter_map(|sub| {
            let short = name(sub).strip_prefix(&prefix)?.to_owned();
            Some(json!({ "subresource": short, "responseKind": kind(sub), "verbs": sub["verbs"] }))
        });
        let below: Vec<Value> = below.collect();
        if !below.is_empty() {
            fields.insert("subresources".into(), below.into());
        }
        shown.push(Value::Object(fields));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_become_aggregated() {
        let list = json!({ "kind": "APIResourceList", "groupVersion": "wardle/v1", "resources": [
            { "name": "fischers", "singularName": "fischer", "namespaced": false, "kind": "Fischer",
              "verbs": ["get"], "shortNames": ["f"] },
            { "name": "fischers/scale", "singularName": "", "namespaced": false, "kind": "Scale",
              "group": "autoscaling", "version": "v1", "verbs": ["get"] },
        ] });
        let expected = json!([{
            "resource": "fischers", "scope": "Cluster", "singularResource": "fischer",
            "responseKind": { "group": "wardle", "version": "v1", "kind": "Fischer" },
            "verbs": ["get"], "shortNames": ["f"],
            "subresources": [{ "subresource": "scale", "verbs": ["get"],
                "responseKind": { "group": "autoscaling", "version": "v1", "kind": "Scale" } }],
        }]);
        assert_eq!(Value::from(aggregated(&list, "wardle", "v1")), expected);
        assert!(aggregated(&Value::Null, "wardle", "v1").is_empty());
    }

    #[test]
    fn endpoints_that_are_ready_have_addresses() {
        let slice: EndpointSlice = serde_json::from_value(json!({
            "addressType": "IPv4", "ports": [{ "name": "https", "port": 8443 }],
            "endpoints": [
                { "addresses": ["10.0.0.1"], "conditions": { "ready": true } },
                { "addresses": ["10.0.0.2"], "conditions": { "ready": false } },
                { "addresses": ["fd00::1"], "conditions": {} },
                { "addresses": ["10.0.0.3:80@127.0.0.1"], "conditions": {} },
            ],
        }))
        .expect("a slice");
        let found: Vec<String> = ready(&slice, "https").iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.1:8443", "[fd00::1]:8443"]);
        assert!(ready(&slice, "").is_empty());
    }
}
