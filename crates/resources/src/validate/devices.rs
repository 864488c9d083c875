//! Devices: classes, claims, and the slices that drivers publish.
//! Upstream: `pkg/apis/resource/validation`.

use std::collections::HashSet;

use cel::environments;
use machinery::names;
use serde_json::{Value, json};

use super::at::{At, NameCheck};
use super::pod::node_selector;
use super::policy::conditions;
use super::volumes::csi_driver_name;

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

pub(crate) fn label(at: &At<'_>) {
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

pub(crate) fn class(at: &At<'_>) {
    let spec = at.get("spec");
    selectors(&spec.get("selectors"));
    list(&spec.get("config"), MOST, configuration, None);
    let name = spec.get("extendedResourceName");
    if name.is_set() && !is_extended_resource(name.str()) {
        name.invalid("must be a valid extended resource name");
    }
}

fn is_extended_resource(name: &str) -> bool {
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    !is_native
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

pub(crate) fn claim(at: &At<'_>) {
    device_claim(&at.get("spec.devices"));
}

pub(crate) fn claim_update(at: &At<'_>, old: &At<'_>) {
    at.get("spec").unchanged(&old.get("spec"));
}

pub(crate) fn claim_template(at: &At<'_>) {
    let metadata = at.get("spec.metadata");
    metadata.get("labels").labels();
    metadata.get("annotations").annotations();
    device_claim(&at.get("spec.spec.devices"));
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

pub(crate) fn claim_status(at: &At<'_>, old: &At<'_>) {
    const USERS: usize = 256;
    let (status, before) = (at.get("status"), old.get("status"));
    let known = request_names(&at.get("spec.devices"));
    let (users, allocation) = (status.get("reservedFor"), status.get("allocation"));
    let user = |one: &At<'_>| {
        for field in ["resource", "name", "uid"] {
            one.get(field).need();
        }
    };
    list(&users, USERS, user, Some(|one| one.get("uid").str()));
    status.get("devices").items().for_each(|one| device_status(&one, &allocation));
    if !users.is_empty() && !allocation.is_set() {
        users.forbidden("may not be specified when `allocated` is not set");
    } else if !users.is_empty() && !at.get("metadata.deletionTimestamp").is_empty() {
        let earlier = before.get("reservedFor").items().map(|one| one.value).collect::<Vec<_>>();
        if users.items().any(|one| !earlier.contains(&one.value)) {
            users.forbidden("new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set");
        }
    }
    if before.has("allocation") && allocation.is_set() {
        allocation.unchanged(&before.get("allocation"));
    } else if allocation.is_set() {
        allocated(&allocation, &known);
    }
}

fn allocated(at: &At<'_>, known: &[String]) {
    let devices = at.get("devices");
    let result = |one: &At<'_>| {
        reference(&one.get("request"), known);
        csi_driver_name(&one.get("driver"));
        pool_name(&one.get("pool"));
        label(&one.get("device"));
        binding_conditions(one);
    };
    list(&devices.get("results"), MOST, result, None);
    let config = |one: &At<'_>| {
        let source = one.get("source");
        if source.need() {
            source.one_of(&["FromClaim", "FromClass"]);
        }
        references(&one.get("requests"), known);
        configuration(one);
    };
    list(&devices.get("config"), 2 * MOST, config, None);
    if at.has("nodeSelector") {
        node_selector(&at.get("nodeSelector"));
    }
}

fn device_status(at: &At<'_>, allocation: &At<'_>) {
    const CONDITIONS: usize = 8;
    csi_driver_name(&at.get("driver"));
    pool_name(&at.get("pool"));
    label(&at.get("device"));
    let id = |at: &At<'_>| {
        ["driver", "pool", "device", "shareID"].map(|field| at.get(field).str().to_owned())
    };
    if !allocation.get("devices.results").items().any(|result| id(&result) == id(at)) {
        let [driver, pool, device, share] = id(at);
        let mut shown = json!({"Driver": driver, "Pool": pool, "Device": device});
        shown["ShareID"] = share.into();
        at.invalid_as(shown, "must be an allocated device in the claim");
    }
    let all = at.get("conditions");
    if all.len() > CONDITIONS {
        all.too_many(CONDITIONS);
    }
    conditions(&all);
    if at.has("data") {
        raw(&at.get("data"), PARAMETERS);
    }
}

pub(crate) fn pool_name(at: &At<'_>) {
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

pub(crate) fn slice(at: &At<'_>) {
    const COUNTERS: usize = 8;
    let spec = at.get("spec");
    csi_driver_name(&spec.get("driver"));
    let pool = spec.get("pool");
    pool_name(&pool.get("name"));
    let count = pool.get("resourceSliceCount");
    if count.int() <= 0 {
        count.invalid_as(count.int(), "must be greater than zero");
    }
    let generation = pool.get("generation");
    if generation.int() < 0 {
        generation.invalid("must be greater than or equal to zero");
    }
    slice_nodes(&spec);
    let (devices, shared) = (spec.get("devices"), spec.get("sharedCounters"));
    if devices.is_set() && shared.is_set() {
        spec.invalid_as("", "only one of `sharedCounters` or `devices` is allowed");
    }
    let own_nodes = spec.get("perDeviceNodeSelection").bool();
    list(
        &devices,
        most_devices(&devices),
        |one| device(one, own_nodes),
        Some(|one| one.get("name").str()),
    );
    let set = |one: &At<'_>| {
        one.get("name").need_name(names::dns1123_label);
        counters(&one.get("counters"));
    };
    list(&shared, COUNTERS, set, Some(|one| one.get("name").str()));
}

pub(crate) fn slice_update(at: &At<'_>, old: &At<'_>) {
    for field in ["spec.pool.name", "spec.driver", "spec.nodeName"] {
        at.get(field).unchanged(&old.get(field));
    }
    slice(at);
}

/// Devices with taints, counters or lists take more room.
fn most_devices(devices: &At<'_>) -> usize {
    const LISTS: &[&str] = &["bools", "ints", "strings", "versions"];
    let is_big = |one: &At<'_>| {
        !one.get("taints").is_empty()
            || !one.get("consumesCounters").is_empty()
            || one
                .get("attributes")
                .entries()
                .any(|(_, one)| LISTS.iter().any(|field| one.has(field)))
    };
    if devices.items().any(|one| is_big(&one)) { 64 } else { 128 }
}

/// Which of several fields are there. `true` only counts.
fn which(at: &At<'_>, fields: &[&'static str], empty_name: &str) -> Vec<String> {
    let mut set = vec![];
    for field in fields {
        let place = at.get(field);
        match (place.value, *field) {
            (Value::Null, _) => continue,
            (Value::Bool(false), _) => {
                place.invalid("must be either unset or set to true");
                continue;
            }
            (Value::String(name), _) if name.is_empty() => {
                place.invalid(empty_name);
                continue;
            }
            (Value::String(_), _) => place.name(names::dns1123_subdomain),
            (_, "nodeSelector") => node_selector(&place),
            _ => {}
        }
        set.push(format!("`{field}`"));
    }
    set
}

fn slice_nodes(spec: &At<'_>) {
    const ONE: &str = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    const FIELDS: &[&str] = &["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let set = which(spec, FIELDS, "must be either unset or set to a non-empty string");
    let terms = spec.get("nodeSelector.nodeSelectorTerms");
    if spec.has("nodeSelector") && terms.len() != 1 {
        terms.invalid("must have exactly one node selector term");
    }
    match set.len() {
        0 => spec.required(ONE),
        1 => {}
        _ => {
            let shown = format!("{{{}}}", set.join(", "));
            spec.invalid_as(shown, &format!("{ONE}, but multiple fields are set"));
        }
    }
}

fn device(at: &At<'_>, own_nodes: bool) {
    const TAINTS: usize = 16;
    const CONSUMED: usize = 2;
    label(&at.get("name"));
    let (attributes, capacity) = (at.get("attributes"), at.get("capacity"));
    let features = attributes.len() + capacity.len();
    if features > MOST {
        let detail =
            format!("the total number of attributes and capacities must not exceed {MOST}");
        at.invalid_as(features, &detail);
    }
    features_of(&attributes, attribute);
    let many = at.get("allowMultipleAllocations").bool();
    features_of(&capacity, |one| {
        let policy = one.get("requestPolicy");
        match (policy.is_set(), many) {
            (true, false) => policy.forbidden("allowMultipleAllocations must be true"),
            (true, true) => request_policy(&policy),
            _ => {}
        }
    });
    list(&at.get("taints"), TAINTS, taint, None);
    let consumed = |one: &At<'_>| {
        one.get("counterSet").need_name(names::dns1123_label);
        counters(&one.get("counters"));
    };
    let consumes = at.get("consumesCounters");
    list(&consumes, CONSUMED, consumed, Some(|one| one.get("counterSet").str()));
    device_nodes(at, own_nodes);
    binding_conditions(at);
}

fn device_nodes(at: &At<'_>, own_nodes: bool) {
    const FIELDS: &[&str] = &["nodeName", "nodeSelector", "allNodes"];
    const ONE: &str = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
    if !own_nodes {
        if FIELDS.iter().any(|field| at.has(field)) {
            at.invalid_as(Value::Null, "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec");
        }
        return;
    }
    let set = which(at, FIELDS, "must not be empty");
    match set.len() {
        0 => at.required(ONE),
        1 => {}
        _ => at.invalid_as(format!("{{{}}}", set.join(", ")), ONE),
    }
}

fn features_of<'a>(at: &At<'a>, check: impl Fn(&At<'a>)) {
    at.entries().for_each(|(_, one)| check(&one));
    at.entries().for_each(|(name, _)| name_of_feature(at, name));
}

/// The fields of an attribute, by the names that Go's struct has for them.
const VALUES: &[(&str, &str)] = &[
    ("int", "IntValue"),
    ("bool", "BoolValue"),
    ("string", "StringValue"),
    ("version", "VersionValue"),
    ("ints", "IntValues"),
    ("bools", "BoolValues"),
    ("strings", "StringValues"),
    ("versions", "VersionValues"),
];

fn attribute(at: &At<'_>) {
    const LONGEST: usize = 64;
    const ONE: &str = "exactly one value must be specified";
    let text = |one: &At<'_>| {
        if one.len() > LONGEST {
            one.too_long(LONGEST);
        }
    };
    let version = |one: &At<'_>| {
        if !is_version(one.str()) {
            one.invalid_text("must be a string compatible with semver.org spec 2.0.0");
        }
        text(one);
    };
    if at.has("string") {
        text(&at.get("string"));
    }
    if at.has("version") {
        version(&at.get("version"));
    }
    at.get("strings").items().for_each(|one| text(&one));
    at.get("versions").items().for_each(|one| version(&one));
    match VALUES.iter().filter(|(field, _)| at.has(field)).count() {
        0 => at.invalid_as("", ONE),
        1 => {}
        _ => {
            // Go shows its struct, with all fields in their order.
            let field =
                |(name, shown): &(&'static str, &str)| format!("{shown:?}:{}", at.get(name).value);
            let fields: Vec<String> = VALUES.iter().map(field).collect();
            let shown = format!("{{{}}}", fields.join(","));
            at.errors().invalid_shown(&at.path, Some(&shown), ONE);
        }
    }
}

/// `1.2.3-rc.1+build`
pub(crate) fn is_version(text: &str) -> bool {
    let (text, build) = text.split_once('+').map_or((text, None), |(text, b)| (text, Some(b)));
    let (core, pre) = text.split_once('-').map_or((text, None), |(core, pre)| (core, Some(pre)));
    let is_number = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let is_word = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    core.split('.').count() == 3
        && core.split('.').all(is_number)
        && pre.is_none_or(|pre| {
            pre.split('.').all(|part| is_word(part) && (!is_digits(part) || is_number(part)))
        })
        && build.is_none_or(|build| build.split('.').all(is_word))
}

pub(crate) fn taint(at: &At<'_>) {
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

fn counters(at: &At<'_>) {
    if at.is_empty() {
        return at.required("");
    }
    if at.len() > MOST {
        return at.too_many(MOST);
    }
    let check: NameCheck = names::dns1123_label;
    for (name, _) in at.entries() {
        check(name).iter().for_each(|why| at.invalid_as(name, why));
    }
}

fn request_policy(at: &At<'_>) {
    let [values, range, default] =
        ["validValues", "validRange", "default"].map(|field| at.get(field));
    match (!values.is_empty(), range.is_set(), default.is_set()) {
        (true, true, _) => at.forbidden(r#"exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time"#),
        (true, _, false) => default.required("required when validValues is defined"),
        (_, true, false) => default.required("required when validRange is defined"),
        (_, true, true) if !range.has("min") => {
            range.get("min").required("required when validRange is defined");
        }
        _ => {}
    }
}
