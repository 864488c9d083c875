//! resource.k8s.io: devices, and claims to them.

use std::collections::HashSet;

use cel::environments;
use k8s_openapi::api::resource::v1::{DeviceRequest, ResourceClaimSpec};
use machinery::names;
use release::features::Feature;
use serde_json::Value;

use crate::defaults::fill;
use crate::gated::{Gated, any, gated, taken};
use crate::validate::at::At;
use crate::validate::internal;
use crate::validate::volumes::csi_driver_name;

pub(crate) mod device_class;
pub(crate) mod device_taint_rule;
pub(crate) mod resource_claim;
pub(crate) mod resource_claim_template;
pub(crate) mod resource_pool_status_request;
pub(crate) mod resource_slice;

/// Requests for devices, and their alternatives: types of their own with the same fields.
macro_rules! default_request {
    ($request:expr) => {{
        let request = $request;
        fill(&mut request.allocation_mode, "ExactCount");
        if request.allocation_mode.as_deref() == Some("ExactCount")
            && request.count.is_none_or(|count| count == 0)
        {
            request.count = Some(1);
        }
    }};
}

fn default_claim(spec: &mut ResourceClaimSpec) {
    for request in requests(spec) {
        request.exactly.iter_mut().for_each(|exact| default_request!(exact));
        request.first_available.iter_mut().flatten().for_each(|sub| default_request!(sub));
    }
}

const CLAIM_SPEC: &[Gated<ResourceClaimSpec>] = &[
    gated(&[Feature::DRAPrioritizedList], |spec| {
        any(requests(spec).map(|one| taken(&mut one.first_available)))
    }),
    gated(&[Feature::DRADeviceTaints], |spec| {
        any(requests(spec).map(|one| {
            let exactly = one.exactly.as_mut().is_some_and(|one| taken(&mut one.tolerations));
            let rest = one.first_available.iter_mut().flatten();
            exactly | any(rest.map(|one| taken(&mut one.tolerations)))
        }))
    }),
    gated(&[Feature::DRAConsumableCapacity], |spec| {
        let of_requests = any(requests(spec).map(|one| {
            let exactly = one.exactly.as_mut().is_some_and(|one| taken(&mut one.capacity));
            let rest = one.first_available.iter_mut().flatten();
            exactly | any(rest.map(|one| taken(&mut one.capacity)))
        }));
        let constraints = spec.devices.iter_mut().flat_map(|one| one.constraints.iter_mut());
        of_requests | any(constraints.flatten().map(|one| taken(&mut one.distinct_attribute)))
    }),
];

fn requests(spec: &mut ResourceClaimSpec) -> impl Iterator<Item = &mut DeviceRequest> {
    spec.devices.iter_mut().flat_map(|one| one.requests.iter_mut().flatten())
}

const MOST: usize = 32;

const EXPRESSION: usize = 10 << 10;

const PARAMETERS: usize = 10 << 10;

const EFFECTS: &[&str] = &["NoExecute", "NoSchedule", "None"];

/// As many as may be, each judged; with `key`, none twice. Too many are not looked at.
fn list<'a>(
    at: &At<'a>,
    most: usize,
    check: impl Fn(&At<'a>),
    key: Option<fn(&At<'a>) -> &'a str>,
) {
    if at.len() > most {
        return at.too_many(most);
    }
    at.items().for_each(|one| check(&one));
    let Some(key) = key else { return };
    let mut seen = HashSet::new();
    for one in at.items() {
        let key = key(&one);
        if !seen.insert(key) {
            one.errors().duplicate(&one.path, key);
        }
    }
}

fn label(at: &At<'_>) {
    at.name(names::dns1123_label);
}

fn selectors(at: &At<'_>) {
    list(at, MOST, selector, None);
}

fn selector(at: &At<'_>) {
    let cel = at.get("cel");
    if !cel.is_set() {
        return cel.required("");
    }
    let expression = cel.get("expression");
    if expression.len() > EXPRESSION {
        return expression.too_long(EXPRESSION);
    }
    if let Err(why) = environments::selector(expression.str()) {
        expression.invalid_text(&why);
    }
}

fn configuration(at: &At<'_>) {
    let opaque = at.get("opaque");
    if !opaque.is_set() {
        return opaque.required("");
    }
    csi_driver_name(&opaque.get("driver"));
    raw(&opaque.get("parameters"), PARAMETERS);
}

/// JSON of a driver's own.
fn raw(at: &At<'_>, most: usize) {
    match at.value {
        Value::Null => at.required(""),
        Value::Object(_) if at.value.to_string().len() > most => at.too_long(most),
        Value::Object(_) => {}
        _ => at.invalid_as("<value omitted>", "must be a valid JSON object"),
    }
}

fn claim_update(at: &At<'_>, old: &At<'_>) {
    internal::unchanged(&at.get("spec"), &old.get("spec"), "ResourceClaimSpec");
}

/// A request's name, with its alternatives' as `request/alternative`.
fn request_names(claim: &At<'_>) -> Vec<String> {
    let mut all = vec![];
    for request in claim.get("requests").items() {
        let name = request.get("name").str();
        all.push(name.to_owned());
        let inner = request.get("firstAvailable").items();
        all.extend(inner.map(|one| format!("{name}/{}", one.get("name").str())));
    }
    all
}

fn device_claim(at: &At<'_>) {
    let known = request_names(at);
    list(&at.get("requests"), MOST, request, Some(|one| one.get("name").str()));
    list(&at.get("constraints"), MOST, |one| constraint(one, &known), None);
    let config = |one: &At<'_>| {
        references(&one.get("requests"), &known);
        configuration(one);
    };
    list(&at.get("config"), MOST, config, None);
}

fn request(at: &At<'_>) {
    const ONE: &str = "exactly one of `exactly` or `firstAvailable` is required";
    const ALTERNATIVES: usize = 8;
    label(&at.get("name"));
    let (exactly, first) = (at.get("exactly"), at.get("firstAvailable"));
    match (exactly.is_set(), !first.is_empty()) {
        (false, false) => at.required(ONE),
        (true, true) => {
            at.invalid_as(Value::Null, &format!("{ONE}, but multiple fields are set"));
        }
        (true, false) => exact_request(&exactly),
        (false, true) => {
            let one = |one: &At<'_>| {
                label(&one.get("name"));
                exact_request(one);
            };
            list(&first, ALTERNATIVES, one, Some(|one| one.get("name").str()));
        }
    }
}

fn exact_request(at: &At<'_>) {
    at.get("deviceClassName").need_name(names::dns1123_subdomain);
    selectors(&at.get("selectors"));
    let (mode, count) = (at.get("allocationMode"), at.get("count"));
    match mode.str() {
        "All" if count.int() != 0 => {
            count.invalid("must not be specified when allocationMode is 'All'");
        }
        "All" => {}
        "ExactCount" if count.int() <= 0 => {
            count.invalid_as(count.int(), "must be greater than zero");
        }
        "ExactCount" => {}
        _ => mode.unsupported(&["All", "ExactCount"]),
    }
    at.get("tolerations").items().for_each(|one| toleration(&one));
}

fn toleration(at: &At<'_>) {
    at.get("key").any_name(names::qualified_name);
    let (operator, value) = (at.get("operator"), at.get("value"));
    match operator.str() {
        "Exists" if !value.is_empty() => value.invalid("must be empty for operator `Exists`"),
        "Exists" => {}
        "Equal" => value.name(names::label_value),
        "" => operator.required(""),
        _ => operator.unsupported(&["Equal", "Exists"]),
    }
    let effect = at.get("effect");
    if !effect.is_empty() {
        effect.one_of(EFFECTS);
    }
}

fn constraint(at: &At<'_>, known: &[String]) {
    references(&at.get("requests"), known);
    let (same, distinct) = (at.get("matchAttribute"), at.get("distinctAttribute"));
    match (same.is_set(), distinct.is_set()) {
        (true, _) => full_name(&same),
        (_, true) => full_name(&distinct),
        _ => at.required(r#"exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set"#),
    }
}

fn references(at: &At<'_>, known: &[String]) {
    list(at, MOST, |one| reference(one, known), Some(|one| one.str()));
}

fn reference(at: &At<'_>, known: &[String]) {
    const WRONG: &str = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
    let parts: Vec<&str> = at.str().split('/').collect();
    if parts.len() > 2 {
        return at.invalid(WRONG);
    }
    for part in parts {
        names::dns1123_label(part).iter().for_each(|why| at.invalid_as(part, why));
    }
    if !known.iter().any(|name| name == at.str()) {
        at.invalid(WRONG);
    }
}

fn full_name(at: &At<'_>) {
    name_of_feature(at, at.str());
    if !at.str().contains('/') {
        at.invalid("a fully qualified name must be a domain and a name separated by a slash");
    }
}

/// An attribute's or a capacity's: with a domain, or without.
fn name_of_feature(at: &At<'_>, name: &str) {
    match name.split('/').collect::<Vec<_>>()[..] {
        [name] => identifier(at, name),
        [domain, name] => {
            match domain {
                "" => at.invalid_as("", "the domain must not be empty"),
                domain => csi_driver_name(&at.with(&domain.into())),
            }
            match name {
                "" => at.invalid_as("", "the name must not be empty"),
                name => identifier(at, name),
            }
        }
        _ => {}
    }
}

fn identifier(at: &At<'_>, name: &str) {
    if name.len() > MOST {
        at.too_long(MOST);
    }
    names::c_identifier(name).iter().for_each(|why| at.invalid_as(name, why));
}

fn pool_name(at: &At<'_>) {
    const LONGEST: usize = 253;
    if !at.need() {
        return;
    }
    if at.len() > LONGEST {
        at.too_long(LONGEST);
    }
    for part in at.str().split('/') {
        names::dns1123_subdomain(part).iter().for_each(|why| at.invalid_as(part, why));
    }
}

fn binding_conditions(at: &At<'_>) {
    const CONDITIONS: usize = 4;
    let [wanted, failures] =
        ["bindingConditions", "bindingFailureConditions"].map(|field| at.get(field));
    let name = |one: &At<'_>| one.name(names::qualified_name);
    list(&wanted, CONDITIONS, name, Some(|one| one.str()));
    list(&failures, CONDITIONS, name, Some(|one| one.str()));
    for failure in failures.items().filter(|one| wanted.strings().contains(&one.str())) {
        failure.invalid("bindingFailureConditions must not overlap with bindingConditions");
    }
    match (wanted.is_empty(), failures.is_empty()) {
        (true, false) => {
            wanted.invalid("bindingConditions are required to use bindingFailureConditions");
        }
        (false, true) => {
            failures.invalid("bindingFailureConditions are required to use bindingConditions");
        }
        _ => {}
    }
}

fn taint(at: &At<'_>) {
    at.get("key").need_name(names::qualified_name);
    let value = at.get("value");
    if !value.is_empty() {
        value.name(names::label_value);
    }
    let effect = at.get("effect");
    if effect.need() {
        effect.one_of(EFFECTS);
    }
}
