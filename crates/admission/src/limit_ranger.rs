//! LimitRanger: a namespace's LimitRanges set missing requests and limits of containers, and restrict
//! those of containers, pods and claims.

use std::collections::BTreeMap;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{
    Container, LimitRange, LimitRangeItem, PersistentVolumeClaim, Pod, PodSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity::Amount;

use crate::Row;
use crate::aggregate;
use crate::resources::{Measure, Resources, Which, of_pod, resources};

const ANNOTATION: &str = "kubernetes.io/limit-ranger";

pub(crate) const ROW: Row = Row::enabled("LimitRanger", |_| Ok(Box::new(LimitRanger)));

pub(crate) struct LimitRanger;

#[async_trait]
impl Plugin for LimitRanger {
    fn name(&self) -> &'static str {
        "LimitRanger"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !is_for(attributes) || attributes.object_as::<Pod>().is_none() {
            return Ok(());
        }
        let ranges = ranges(attributes).await?;
        let Some(pod) = attributes.object_as_mut::<Pod>() else { return Ok(()) };
        for range in &ranges {
            fill_in(pod, range);
        }
        Ok(())
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if !is_for(attributes) {
            return Ok(());
        }
        for range in ranges(attributes).await? {
            let limits = range.spec.iter().flat_map(|spec| &spec.limits);
            let mut errors = vec![];
            for limit in limits {
                if let Some(spec) = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref())
                {
                    check_pod(limit, spec, &mut errors);
                }
                if let Some(claim) = attributes.object_as::<PersistentVolumeClaim>() {
                    check_claim(limit, claim, &mut errors);
                }
            }
            if let Some(why) = aggregate(errors) {
                return Err(attributes.forbidden(why));
            }
        }
        Ok(())
    }
}

fn is_for(attributes: &Attributes<'_>) -> bool {
    let row = &attributes.ctx.resource;
    if !row.group.is_empty()
        || attributes.old.is_some_and(|old| old.meta().deletion_timestamp.is_some())
    {
        return false;
    }
    let is_update = attributes.operation == Operation::Update;
    match (&*row.plural, &*attributes.ctx.subresource) {
        ("pods", "resize") => is_update,
        ("pods", "") => !is_update,
        ("persistentvolumeclaims", "") => true,
        _ => false,
    }
}

async fn ranges(attributes: &Attributes<'_>) -> Result<Vec<LimitRange>, StatusError> {
    attributes.registry.cached::<LimitRange>(&attributes.key.namespace).await
}

type Quantities = BTreeMap<String, Quantity>;

fn fill_in(pod: &mut Pod, range: &LimitRange) {
    let (mut requests, mut limits) = (Quantities::new(), Quantities::new());
    for limit in range.spec.iter().flat_map(|spec| &spec.limits) {
        if limit.type_ == "Container" {
            requests.extend(limit.default_request.clone().unwrap_or_default());
            limits.extend(limit.default.clone().unwrap_or_default());
        }
    }
    let mut notes = vec![];
    let Some(spec) = &mut pod.spec else { return };
    for container in &mut spec.containers {
        fill_in_container(container, "container", &requests, &limits, &mut notes);
    }
    for container in spec.init_containers.iter_mut().flatten() {
        fill_in_container(container, "init container", &requests, &limits, &mut notes);
    }
    if !notes.is_empty() {
        let text = format!("LimitRanger plugin set: {}", notes.join("; "));
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(ANNOTATION.into(), text);
    }
}

fn fill_in_container(
    container: &mut Container,
    kind: &str,
    requests: &Quantities,
    limits: &Quantities,
    notes: &mut Vec<String>,
) {
    if requests.is_empty() && limits.is_empty() {
        return;
    }
    let name = container.name.clone();
    let asked = container.resources.get_or_insert_default();
    let mut fill = |list: &mut Option<Quantities>, defaults: &Quantities, what: &str| {
        let mut set = vec![];
        for (resource, quantity) in defaults {
            let list = list.get_or_insert_default();
            if !list.contains_key(resource) {
                list.insert(resource.clone(), quantity.clone());
                set.push(resource.as_str());
            }
        }
        if !set.is_empty() {
            notes.push(format!("{} {what} for {kind} {name}", set.join(", ")));
        }
    };
    fill(&mut asked.requests, requests, "request");
    fill(&mut asked.limits, limits, "limit");
}

fn check_pod(limit: &LimitRangeItem, spec: &PodSpec, errors: &mut Vec<String>) {
    match limit.type_.as_str() {
        "Container" => {
            for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
                let asked = container.resources.as_ref();
                let requests = resources(asked.and_then(|asked| asked.requests.as_ref()));
                let limits = resources(asked.and_then(|asked| asked.limits.as_ref()));
                check_all(limit, &requests, &limits, errors);
            }
        }
        "Pod" => {
            let (requests, limits) = (of_pod(spec, Which::Requests), of_pod(spec, Which::Limits));
            check_all(limit, &requests, &limits, errors);
        }
        _ => {}
    }
}

fn check_all(
    limit: &LimitRangeItem,
    requests: &Resources,
    limits: &Resources,
    errors: &mut Vec<String>,
) {
    let kind = limit.type_.as_str();
    for (name, enforced) in resources(limit.min.as_ref()) {
        errors.extend(too_little(kind, &name, enforced, requests.get(&name), limits.get(&name)));
    }
    for (name, enforced) in resources(limit.max.as_ref()) {
        errors.extend(too_much(kind, &name, enforced, requests.get(&name), limits.get(&name)));
    }
    for (name, enforced) in resources(limit.max_limit_request_ratio.as_ref()) {
        errors.extend(too_wide(kind, &name, enforced, requests.get(&name), limits.get(&name)));
    }
}

fn check_claim(limit: &LimitRangeItem, claim: &PersistentVolumeClaim, errors: &mut Vec<String>) {
    let kind = limit.type_.as_str();
    if kind != "PersistentVolumeClaim" {
        return;
    }
    let asked = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let requests = resources(asked.and_then(|asked| asked.requests.as_ref()));
    for (name, enforced) in resources(limit.min.as_ref()) {
        errors.extend(too_little(kind, &name, enforced, requests.get(&name), None));
    }
    for (name, enforced) in resources(limit.max.as_ref()) {
        let most = format!("maximum {name} usage per {kind} is {enforced}");
        match requests.get(&name) {
            None => errors.push(format!("{most}.  No request is specified")),
            Some(request) if request.amount > enforced.amount => {
                errors.push(format!("{most}, but request is {request}"));
            }
            Some(_) => {}
        }
    }
}

fn too_little(
    kind: &str,
    name: &str,
    enforced: Measure,
    request: Option<&Measure>,
    limit: Option<&Measure>,
) -> Option<String> {
    let least = format!("minimum {name} usage per {kind} is {enforced}");
    let Some(request) = request else {
        return Some(format!("{least}.  No request is specified"));
    };
    if request.amount < enforced.amount {
        return Some(format!("{least}, but request is {request}"));
    }
    let limit = limit.filter(|limit| limit.amount < enforced.amount)?;
    Some(format!("{least}, but limit is {limit}"))
}

fn too_much(
    kind: &str,
    name: &str,
    enforced: Measure,
    request: Option<&Measure>,
    limit: Option<&Measure>,
) -> Option<String> {
    let most = format!("maximum {name} usage per {kind} is {enforced}");
    let Some(limit) = limit else {
        return Some(format!("{most}.  No limit is specified"));
    };
    if limit.amount > enforced.amount {
        return Some(format!("{most}, but limit is {limit}"));
    }
    let request = request.filter(|request| request.amount > enforced.amount)?;
    Some(format!("{most}, but request is {request}"))
}

fn too_wide(
    kind: &str,
    name: &str,
    enforced: Measure,
    request: Option<&Measure>,
    limit: Option<&Measure>,
) -> Option<String> {
    let most = format!("{name} max limit to request ratio per {kind} is {enforced}");
    let amount = |one: Option<&Measure>| one.map(|one| one.amount).filter(|one| !one.is_zero());
    let Some(request) = amount(request) else {
        return Some(format!("{most}, but no request is specified or request is 0"));
    };
    let Some(limit) = amount(limit) else {
        return Some(format!("{most}, but no limit is specified or limit is 0"));
    };
    let ratio = |limit: Amount, request: Amount| limit.to_f64() / request.to_f64();
    let observed = ratio(limit, request);
    (observed > enforced.amount.to_f64())
        .then(|| format!("{most}, but provided ratio is {observed:.6}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn containers_get_defaults_and_limits() {
        let range: LimitRange = serde_json::from_value(json!({"spec": {"limits": [{
            "type": "Container", "default": {"cpu": "1"}, "defaultRequest": {"cpu": "500m"},
            "max": {"cpu": "2"}, "min": {"cpu": "100m"}, "maxLimitRequestRatio": {"cpu": "4"},
        }]}}))
        .expect("a range");
        let check = |asked: Value, note: Option<&str>, expected: &[&str]| {
            let mut pod: Pod = serde_json::from_value(
                json!({"spec": {"containers": [{"name": "a", "resources": asked}]}}),
            )
            .expect("a pod");
            fill_in(&mut pod, &range);
            let annotations = pod.metadata.annotations.clone().unwrap_or_default();
            assert_eq!(annotations.get(ANNOTATION).map(String::as_str), note);
            let mut errors = vec![];
            let limit = &range.spec.as_ref().expect("a spec").limits[0];
            check_pod(limit, pod.spec.as_ref().expect("a spec"), &mut errors);
            assert_eq!(errors, expected);
        };
        let both = "LimitRanger plugin set: cpu request for container a; cpu limit for container a";
        check(json!({}), Some(both), &[]);
        check(
            json!({"limits": {"cpu": "3"}, "requests": {"cpu": "1"}}),
            None,
            &["maximum cpu usage per Container is 2, but limit is 3"],
        );
        check(
            json!({"limits": {"cpu": "1"}, "requests": {"cpu": "50m"}}),
            None,
            &[
                "minimum cpu usage per Container is 100m, but request is 50m",
                "cpu max limit to request ratio per Container is 4, but provided ratio is 20.000000",
            ],
        );
    }
}
