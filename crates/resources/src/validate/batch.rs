//! Jobs and CronJobs. Upstream: `pkg/apis/batch/validation`.

use std::collections::{BTreeMap, HashSet};

use machinery::names;
use serde_json::Value;

use super::at::At;
use super::{cron, internal, pod, workloads};

pub(crate) fn job(at: &At<'_>) {
    whole_job(at, OWN_LABELS);
}

fn whole_job(at: &At<'_>, labels: &[OwnLabel]) {
    let spec = at.get("spec");
    generated_selector(at, labels);
    job_rules(&spec);
    let completions = spec.get("completions").int();
    if spec.get("completionMode").is("Indexed") && completions > 0 {
        let name = at.get("metadata.name");
        let longest = format!("{}-{}", name.str(), completions - 1);
        if !names::dns1123_label(&longest).is_empty() {
            let detail = format!("will not able to create pod with invalid DNS label: {longest}");
            name.invalid(&detail);
        }
    }
}

/// A label that a Job's pods have of it, and the metadata that it says.
type OwnLabel = (&'static str, &'static str);

/// Upstream's older names come first.
const OWN_LABELS: &[OwnLabel] = &[
    ("controller-uid", "uid"),
    ("job-name", "name"),
    ("batch.kubernetes.io/controller-uid", "uid"),
    ("batch.kubernetes.io/job-name", "name"),
];

/// What the server made, and clients may have contradicted.
fn generated_selector(at: &At<'_>, labels: &[OwnLabel]) {
    let (spec, metadata) = (at.get("spec"), at.get("metadata"));
    let selector = spec.get("selector");
    if spec.get("manualSelector").bool() || !selector.is_set() {
        return;
    }
    let of_template = spec.get("template.metadata.labels");
    let mut own = BTreeMap::new();
    for (key, says) in labels {
        let wanted = metadata.get(says).str();
        own.insert((*key).to_owned(), wanted.to_owned());
        let label = of_template.key(key);
        if !label.is_set() {
            label.required(&format!("must be '{wanted}'"));
        } else if !label.is(wanted) {
            label.invalid_as(of_template.value, &format!("must be '{wanted}'"));
        }
    }
    let parsed = workloads::parsed(&selector);
    if parsed.is_some_and(|parsed| !parsed.matches(Some(&own))) {
        selector.invalid("`selector` not auto-generated");
    }
}

/// A Job's spec with its selector.
fn job_rules(spec: &At<'_>) {
    job_spec(spec);
    let selector = spec.get("selector");
    if !selector.is_set() {
        selector.required("");
    }
    selector.selector();
    workloads::selects_template(selector.is_set().then_some(&selector), &spec.get("template"));
}

/// A Job's spec, in a Job or in a CronJob.
fn job_spec(spec: &At<'_>) {
    for field in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ] {
        spec.get(field).not_negative();
    }
    if spec.has("maxFailedIndexes") && !spec.has("backoffLimitPerIndex") {
        spec.get("backoffLimitPerIndex").required("when maxFailedIndexes is specified");
    }
    if spec.has("managedBy") {
        let by = spec.get("managedBy");
        domain_prefixed_path(&by);
        if by.len() > 63 {
            by.too_long(63);
        }
    }
    completion_mode(spec);
    if spec.has("podFailurePolicy") {
        failure_policy(spec);
    }
    let success = spec.get("successPolicy");
    if success.is_set() && !spec.get("completionMode").is("Indexed") {
        let shown = internal::shown("SuccessPolicy", success.value);
        let detail = "requires indexed completion mode";
        success.errors().invalid_shown(&success.path, Some(&shown), detail);
    } else if success.is_set() {
        success_policy(&success, spec.get("completions").int());
    }
    let replacement = spec.get("podReplacementPolicy");
    match spec.has("podFailurePolicy") {
        true => replacement.any_of(&["Failed"]),
        false => replacement.any_of(&["Failed", "TerminatingOrFailed"]),
    }
    pod::template(&spec.get("template"));
    let restart = spec.get("template.spec.restartPolicy");
    match restart.str() {
        "" | "Always" => restart.required("valid values: \"OnFailure\", \"Never\""),
        "OnFailure" | "Never" => {
            if spec.has("podFailurePolicy") && !restart.is("Never") {
                restart.invalid("only \"Never\" is supported when podFailurePolicy is specified");
            }
        }
        _ => restart.unsupported(&["OnFailure", "Never"]),
    }
}

fn completion_mode(spec: &At<'_>) {
    let mode = spec.get("completionMode");
    mode.any_of(&["NonIndexed", "Indexed"]);
    let (per_index, max_failed) = (spec.get("backoffLimitPerIndex"), spec.get("maxFailedIndexes"));
    if !mode.is_set() || mode.is("NonIndexed") {
        for place in [&per_index, &max_failed].into_iter().filter(|place| place.is_set()) {
            place.invalid("requires indexed completion mode");
        }
    }
    if !mode.is("Indexed") {
        return;
    }
    const MANY: i64 = 100_000;
    const FEW: i64 = 10_000;
    let (completions, parallelism) = (spec.get("completions"), spec.get("parallelism"));
    if !completions.is_set() {
        completions.required("when completion mode is Indexed");
    }
    if parallelism.int() > MANY {
        let detail = "must be less than or equal to 100000 when completion mode is Indexed";
        parallelism.invalid(detail);
    }
    if completions.is_set() && max_failed.int() > completions.int() {
        max_failed.invalid("must be less than or equal to completions");
    }
    if max_failed.int() > MANY {
        max_failed.invalid("must be less than or equal to 100000");
    }
    if completions.int() > MANY && per_index.is_set() {
        let above = "must be less than or equal to 10000 when completions are above 100000 and used with backoff limit per index";
        if !max_failed.is_set() {
            max_failed.required("must be specified when completions is above 100000");
        }
        if parallelism.int() > FEW {
            parallelism.invalid(above);
        }
        if max_failed.int() > FEW {
            max_failed.invalid(above);
        }
    }
}

fn failure_policy(spec: &At<'_>) {
    let rules = spec.get("podFailurePolicy.rules");
    if rules.len() > 20 {
        rules.too_many(20);
    }
    let containers: HashSet<&str> = ["containers", "initContainers"]
        .into_iter()
        .flat_map(|list| spec.get("template.spec").get(list).items())
        .map(|at| at.get("name").str())
        .collect();
    const ACTIONS: &[&str] = &["Count", "FailIndex", "FailJob", "Ignore"];
    for rule in rules.items() {
        let action = rule.get("action");
        match action.str() {
            "" => action.required("valid values: [\"Count\" \"FailIndex\" \"FailJob\" \"Ignore\"]"),
            "FailIndex" => {
                if !spec.has("backoffLimitPerIndex") {
                    action.invalid("requires the backoffLimitPerIndex to be set");
                }
            }
            _ => action.one_of(ACTIONS),
        }
        let (codes, conditions) = (rule.get("onExitCodes"), rule.get("onPodConditions"));
        if codes.is_set() {
            exit_codes(&codes, &containers);
        }
        if conditions.len() > 20 {
            conditions.too_many(20);
        }
        for pattern in conditions.items() {
            pattern.get("type").name(names::qualified_name);
            let status = pattern.get("status");
            if status.is_empty() {
                status.required("valid values: [\"False\" \"True\" \"Unknown\"]");
            } else {
                status.one_of(&["False", "True", "Unknown"]);
            }
        }
        let detail = match (codes.is_set(), conditions.is_empty()) {
            (true, false) => "specifying both OnExitCodes and OnPodConditions is not supported",
            (false, true) => "specifying one of OnExitCodes and OnPodConditions is required",
            _ => continue,
        };
        rule.errors().invalid_shown(&rule.path, None, detail);
    }
}

fn exit_codes(at: &At<'_>, containers: &HashSet<&str>) {
    let operator = at.get("operator");
    if operator.is_empty() {
        operator.required("valid values: [\"In\" \"NotIn\"]");
    } else {
        operator.one_of(&["In", "NotIn"]);
    }
    let name = at.get("containerName");
    if name.is_set() && !containers.contains(name.str()) {
        name.invalid("must be one of the container or initContainer names in the pod template");
    }
    let values = at.get("values");
    if values.is_empty() {
        // Upstream shows an empty list as the client wrote it.
        values.invalid_as(Vec::<i64>::new(), "at least one value is required");
    } else if values.len() > 255 {
        values.too_many(255);
    }
    let mut seen = HashSet::new();
    for value in values.items() {
        if operator.is("In") && value.int() == 0 {
            value.invalid("must not be 0 for the In operator");
        }
        if !seen.insert(value.int()) {
            value.duplicate();
        }
    }
    if !values.items().is_sorted_by_key(|value| value.int()) {
        values.invalid("must be ordered");
    }
}

fn success_policy(at: &At<'_>, completions: i64) {
    let rules = at.get("rules");
    if rules.is_empty() {
        rules.required("at least one rules must be specified when the successPolicy is specified");
    }
    if rules.len() > 20 {
        rules.too_many(20);
    }
    for rule in rules.items() {
        let (count, indexes) = (rule.get("succeededCount"), rule.get("succeededIndexes"));
        if !count.is_set() && !indexes.is_set() {
            rule.required("at least one of succeededCount or succeededIndexes must be specified");
        }
        let mut total = 0;
        if indexes.is_set() {
            if indexes.len() > 64 << 10 {
                indexes.too_long(64 << 10);
            }
            match index_count(indexes.str(), completions) {
                Ok(count) => total = count,
                Err(why) => {
                    indexes.invalid(&format!("error parsing succeededIndexes: {why}"));
                }
            }
        }
        if !count.is_set() {
            continue;
        }
        count.not_negative();
        if count.int() > completions {
            count.invalid(&format!(
                "must be less than or equal to {completions} (the number of specified completions)"
            ));
        }
        if indexes.is_set() && count.int() > total {
            count.invalid(&format!("must be less than or equal to {total} (the number of indexes in the specified succeededIndexes field)"));
        }
    }
}

/// How many indexes `0,2-5` are.
pub(crate) fn index_count(text: &str, completions: i64) -> Result<i64, String> {
    if text.is_empty() {
        return Ok(0);
    }
    let number = |text: &str| match text.parse::<i64>() {
        Err(_) => Err(format!("cannot convert string to integer for index: {text:?}")),
        Ok(index) if index >= completions => Err(format!("too large index: {text:?}")),
        Ok(index) => Ok(index),
    };
    let (mut last, mut total) = (None, 0);
    for interval in text.split(',') {
        let limits: Vec<&str> = interval.split('-').collect();
        if limits.len() > 2 {
            return Err(format!(
                "the fragment {interval:?} violates the requirement that an index interval can have at most two parts separated by '-'"
            ));
        }
        let first = number(limits[0])?;
        let end = match limits.get(1) {
            None => first,
            Some(end) => number(end)?,
        };
        let out_of_order = |previous: i64, current: i64| {
            Err(format!("non-increasing order, previous: {previous}, current: {current}"))
        };
        if limits.len() > 1 && first >= end {
            return out_of_order(first, end);
        }
        match last {
            Some(last) if last >= first => return out_of_order(last, first),
            _ => {}
        }
        total += end - first + 1;
        last = Some(end);
    }
    Ok(total)
}

/// `acme.io/foo`
pub(crate) fn domain_prefixed_path(at: &At<'_>) {
    if !at.need() {
        return;
    }
    let Some((host, path)) =
        at.str().split_once('/').filter(|(host, path)| !host.is_empty() && !path.is_empty())
    else {
        return at.invalid("must be a domain-prefixed path (such as \"acme.io/foo\")");
    };
    for why in names::dns1123_subdomain(host) {
        at.invalid_as(host, &why);
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || r"/-._~%!$&'()*+,;=:".contains(c);
    if !path.chars().all(allowed) {
        at.invalid_as(
            path,
            r"Invalid path (regex used for validation is '[A-Za-z0-9/\-._~%!$&'()*+,;=:]+')",
        );
    }
}

pub(crate) fn job_update(at: &At<'_>, old: &At<'_>) {
    let (spec, before) = (at.get("spec"), old.get("spec"));
    // Jobs from before the newer names need not have them.
    let had = old.get("spec.template.metadata.labels");
    let has_all = OWN_LABELS[2..].iter().all(|(key, _)| had.key(key).is_set());
    whole_job(at, if has_all { OWN_LABELS } else { &OWN_LABELS[..2] });
    // Upstream looks at the spec a second time, and says everything about it twice.
    job_rules(&spec);
    let completions = spec.get("completions");
    let is_indexed = spec.get("completionMode").is("Indexed");
    if !is_indexed {
        completions.unchanged(&before.get("completions"));
    } else if completions.value != before.get("completions").value
        && completions.is_set()
        && completions.int() != spec.get("parallelism").int()
    {
        completions.invalid("can only be modified in tandem with spec.parallelism");
    }
    spec.get("selector").unchanged(&before.get("selector"));
    template_stays(&spec, &before, old);
    spec.get("completionMode").unchanged(&before.get("completionMode"));
    for (field, kind) in
        [("podFailurePolicy", "PodFailurePolicy"), ("successPolicy", "SuccessPolicy")]
    {
        let (new, was) = (spec.get(field), before.get(field));
        if new.value != was.value {
            let shown = internal::shown(kind, new.value);
            new.errors().invalid_shown(&new.path, Some(&shown), "field is immutable");
        }
    }
    for field in ["backoffLimitPerIndex", "managedBy"] {
        spec.get(field).unchanged(&before.get(field));
    }
}

/// Of a suspended Job's template only what it asks for may change, before it ever ran also where it
/// may run.
fn template_stays(spec: &At<'_>, before: &At<'_>, old: &At<'_>) {
    let mut wanted = before.get("template").value.clone();
    let new = spec.get("template");
    let was_suspended = before.get("suspend").bool();
    let is_resource_change = was_suspended && !old.get("status").has("startTime");
    if was_suspended && !old.get("status").has("startTime") {
        copy(&mut wanted, new.value, &["metadata", "annotations"]);
        copy(&mut wanted, new.value, &["metadata", "labels"]);
        for field in ["nodeSelector", "tolerations", "schedulingGates"] {
            copy(&mut wanted, new.value, &["spec", field]);
        }
        copy(&mut wanted, new.value, &["spec", "affinity", "nodeAffinity"]);
        for list in ["containers", "initContainers"] {
            copy_resources(&mut wanted, new.value, list);
        }
    }
    if !is_resource_change {
        if wanted != *new.value {
            let shown = internal::shown("PodTemplateSpec", new.value);
            new.errors().invalid_shown(&new.path, Some(&shown), "field is immutable");
        }
        return;
    }
    let place = spec.get("template.spec");
    if wanted.get("spec") != Some(place.value) {
        let shown = internal::shown("PodSpec", place.value);
        place.errors().invalid_shown(&place.path, Some(&shown), "field is immutable");
    }
}

/// Takes over one field; absence too.
fn copy(to: &mut Value, from: &Value, path: &[&str]) {
    let (Some((last, way)), Value::Object(_)) = (path.split_last(), &*to) else { return };
    let mut source = Some(from);
    let mut target = &mut *to;
    for name in way {
        source = source.and_then(|value| value.get(*name));
        let Value::Object(fields) = target else { return };
        target = fields.entry(*name).or_insert_with(|| Value::Object(Default::default()));
    }
    let Value::Object(fields) = target else { return };
    match source.and_then(|value| value.get(*last)) {
        Some(value) => fields.insert((*last).to_owned(), value.clone()),
        None => fields.remove(*last),
    };
    // An affinity that holds nothing any more is none.
    if let Value::Object(fields) = &mut *to
        && let Some(Value::Object(spec)) = fields.get_mut("spec")
        && spec.get("affinity").is_some_and(|value| value.as_object().is_some_and(|m| m.is_empty()))
        && from.pointer("/spec/affinity").is_none()
    {
        spec.remove("affinity");
    }
}

fn copy_resources(to: &mut Value, from: &Value, list: &str) {
    let pointer = format!("/spec/{list}");
    let (Some(Value::Array(mine)), Some(Value::Array(theirs))) =
        (to.pointer_mut(&pointer), from.pointer(&pointer))
    else {
        return;
    };
    if mine.len() != theirs.len() {
        return;
    }
    for (mine, theirs) in mine.iter_mut().zip(theirs) {
        if mine["name"] == theirs["name"] {
            mine["resources"] = theirs["resources"].clone();
        }
    }
}

pub(crate) fn cron_job(at: &At<'_>) {
    cron_spec(at, None);
    let name = at.get("metadata.name");
    if name.len() > 52 {
        name.invalid("must be no more than 52 characters");
    }
}

pub(crate) fn cron_job_update(at: &At<'_>, old: &At<'_>) {
    cron_spec(at, Some(old));
}

fn cron_spec(at: &At<'_>, old: Option<&At<'_>>) {
    let spec = at.get("spec");
    let (schedule, zone) = (spec.get("schedule"), spec.get("timeZone"));
    if schedule.need() {
        if let Err(why) = cron::check(schedule.str()) {
            schedule.invalid(&why);
        }
        let had_zone = old.is_some_and(|old| old.get("spec.schedule").str().contains("TZ"));
        if schedule.str().contains("TZ") {
            match had_zone {
                true if zone.is_set() => {
                    schedule.invalid("cannot use both timeZone field and TZ or CRON_TZ in schedule")
                }
                true => {}
                false => schedule
                    .invalid("cannot use TZ or CRON_TZ in schedule, use timeZone field instead"),
            }
        }
    }
    spec.get("startingDeadlineSeconds").not_negative();
    if old.is_none_or(|old| old.get("spec.timeZone").value != zone.value) && zone.is_set() {
        time_zone(&zone);
    }
    let policy = spec.get("concurrencyPolicy");
    if policy.need() {
        policy.one_of(&["Allow", "Forbid", "Replace"]);
    }
    let inner = spec.get("jobTemplate.spec");
    job_spec(&inner);
    if inner.has("selector") {
        inner.get("selector").invalid("`selector` will be auto-generated");
    }
    if inner.get("manualSelector").bool() {
        let place = inner.get("manualSelector");
        place.errors().not_supported_value(&place.path, true, &["nil", "false"]);
    }
    spec.get("successfulJobsHistoryLimit").not_negative();
    spec.get("failedJobsHistoryLimit").not_negative();
}

fn time_zone(at: &At<'_>) {
    let zone = at.str();
    if zone.is_empty() {
        return at.invalid("timeZone must be nil or non-empty string");
    }
    let is_part = |part: &str| {
        !matches!(part, "." | "..")
            && !part.starts_with('-')
            && (1..=14).contains(&part.len())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || ".-_+".contains(c))
    };
    let unknown = || at.invalid(&format!("unknown time zone {zone}"));
    if !zone.split('/').all(is_part) {
        return unknown();
    }
    if zone.eq_ignore_ascii_case("Local") {
        return at.invalid(
            "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones",
        );
    }
    if machinery::cron::time_zone(zone).is_none() {
        unknown();
    }
}
