//! What statuses must be when they are written. Upstream: the `…StatusUpdate` functions of
//! `pkg/apis/*/validation`.
//!
//! In: an object with its new status, and the one before. Out: field errors. The counts of workloads are in
//! `workloads`.

use std::collections::HashSet;

use machinery::names;
use serde_json::Value;

use super::at::At;
use super::batch::index_count;
use super::ip;

/// Of a Service. Upstream: `ValidateLoadBalancerStatus`.
pub(crate) fn service(at: &At<'_>, old: &At<'_>) {
    let list = at.get("status.loadBalancer.ingress");
    if !at.get("spec.type").is("LoadBalancer") && !list.is_empty() {
        return list.forbidden("may only be used when `spec.type` is 'LoadBalancer'");
    }
    let had = addresses(old);
    for one in list.items() {
        let (address, mode) = (one.get("ip"), one.get("ipMode"));
        if !address.is_empty() {
            ip::legacy_unless(&address, &had);
        }
        match (mode.is_set(), address.is_empty()) {
            (false, false) => mode.required("must be specified when `ip` is set"),
            (true, true) => mode.forbidden("may not be specified when `ip` is not set"),
            (true, false) => mode.one_of(&["Proxy", "VIP"]),
            (false, true) => {}
        }
        hostname(&one.get("hostname"));
    }
}

/// Of an Ingress.
pub(crate) fn ingress(at: &At<'_>, old: &At<'_>) {
    let had = addresses(old);
    for one in at.get("status.loadBalancer.ingress").items() {
        let address = one.get("ip");
        if !address.is_empty() {
            ip::legacy_unless(&address, &had);
        }
        hostname(&one.get("hostname"));
    }
}

fn addresses<'a>(old: &At<'a>) -> HashSet<&'a str> {
    old.get("status.loadBalancer.ingress").items().map(|one| one.get("ip").str()).collect()
}

fn hostname(at: &At<'_>) {
    at.any_name(names::dns1123_subdomain);
    if ip::sloppy(at.str()).is_some() {
        at.invalid("must be a DNS name, not an IP address");
    }
}

pub(crate) fn namespace(at: &At<'_>, _old: &At<'_>) {
    let (wanted, detail) = match at.get("metadata").has("deletionTimestamp") {
        false => ("Active", "may only be 'Active' if `deletionTimestamp` is empty"),
        true => ("Terminating", "may only be 'Terminating' if `deletionTimestamp` is not empty"),
    };
    let phase = at.get("status.phase");
    // A missing phase is Active by default.
    if !phase.is(wanted) && (phase.is_set() || wanted != "Active") {
        // Upstream's path has the name of the internal field.
        let shown = phase.called(at.child_path("status").named("Phase"));
        shown.invalid_text(detail);
    }
}

/// Of FlowSchemas and PriorityLevelConfigurations.
pub(crate) fn conditions_of_flows(at: &At<'_>, _old: &At<'_>) {
    let list = at.get("status.conditions");
    let mut seen = HashSet::new();
    for one in list.items() {
        let kind = one.get("type");
        if !seen.insert(kind.str()) {
            kind.duplicate_text();
        }
        kind.need();
    }
}

/// The features that a node declares.
pub(crate) fn declared_features(at: &At<'_>) {
    const LONGEST: usize = 253;
    let list = at.get("status.declaredFeatures");
    let mut before: Option<&str> = None;
    for one in list.items() {
        let name = one.str();
        match before {
            Some(before) if before == name => one.duplicate_text(),
            Some(before) if before > name => one.invalid_text("list must be sorted alphabetically"),
            _ => {}
        }
        before = Some(name);
        if name.len() > LONGEST {
            one.invalid_text(&format!(
                "invalid feature name {name:?}: must be no more than {LONGEST} characters"
            ));
        } else if !is_feature(name) {
            one.invalid_text(&format!("invalid feature name {name:?}: must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes"));
        }
    }
}

/// `MyFeature/mySubFeature`
fn is_feature(name: &str) -> bool {
    let is_segment =
        |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.split('/').all(|part| {
            is_segment(part) && part.starts_with(|first: char| first.is_ascii_alphabetic())
        })
}

/// A Job's status, and what of it changed. Upstream checks most rules only for changed fields, so that a
/// violation that is there does not block other updates.
struct JobStatus<'a> {
    spec: At<'a>,
    new: At<'a>,
    old: At<'a>,
}

pub(crate) fn job(at: &At<'_>, old: &At<'_>) {
    let job = JobStatus { spec: at.get("spec"), new: at.get("status"), old: old.get("status") };
    job.counts();
    job.ends();
    job.finished();
    job.indexes();
    job.success_criteria();
    job.transitions();
}

impl JobStatus<'_> {
    fn holds(status: &At<'_>, kind: &str, value: &str) -> bool {
        let mut all = status.get("conditions").items();
        all.any(|one| one.get("type").is(kind) && one.get("status").is(value))
    }

    fn is(&self, kind: &str) -> bool {
        Self::holds(&self.new, kind, "True")
    }

    fn was(&self, kind: &str) -> bool {
        Self::holds(&self.old, kind, "True")
    }

    fn turned(&self, kind: &str) -> bool {
        self.is(kind) != self.was(kind)
    }

    fn is_finished(&self) -> bool {
        self.is("Complete") || self.is("Failed")
    }

    fn ended_or(&self, field: &'static str) -> bool {
        let was = self.was("Complete") || self.was("Failed");
        was != self.is_finished() || self.changed(field)
    }

    fn changed(&self, field: &'static str) -> bool {
        let empty = |value: &Value| value.is_null() || value == 0 || value == "";
        let (new, old) = (self.new.get(field).value, self.old.get(field).value);
        new != old && !(empty(new) && empty(old))
    }

    fn conditions(&self, detail: &str) {
        let path = self.new.child_path("conditions");
        self.new.errors().invalid_shown(&path, None, detail);
    }

    fn counts(&self) {
        for field in ["active", "succeeded", "failed", "ready", "terminating"] {
            self.new.get(field).not_negative();
        }
        let mut seen = HashSet::new();
        for list in ["succeeded", "failed"] {
            for one in self.new.get("uncountedTerminatedPods").get(list).items() {
                if one.str().is_empty() {
                    one.invalid_text("must not be empty");
                } else if !seen.insert(one.str()) {
                    one.duplicate_text();
                }
            }
        }
    }

    fn ends(&self) {
        let (complete, failed) = (self.is("Complete"), self.is("Failed"));
        let (start, completion) = (self.new.get("startTime"), self.new.get("completionTime"));
        let completion_changed = self.changed("completionTime");
        if (self.turned("Complete") || self.turned("Failed")) && complete && failed {
            self.conditions("cannot set Complete=True and Failed=true conditions");
        }
        let target_changed = self.turned("Complete") || self.turned("FailureTarget");
        if target_changed && complete && self.is("FailureTarget") {
            self.conditions("cannot set Complete=True and FailureTarget=true conditions");
        }
        if self.turned("Complete") || completion_changed {
            if completion.is_set() && !complete {
                completion
                    .invalid("cannot set completionTime when there is no Complete=True condition");
            }
            if !completion.is_set() && complete {
                completion.required("completionTime is required for Complete jobs");
            }
        }
        // Times at rest have one form, whose order is that of the texts.
        let both = start.is_set() && completion.is_set();
        if (self.changed("startTime") || completion_changed)
            && both
            && completion.str() < start.str()
        {
            completion.invalid("must be equal to or after `startTime`");
        }
        if (self.turned("Failed") || self.changed("failedIndexes"))
            && failed
            && !self.is("FailureTarget")
        {
            self.conditions(
                "cannot set Failed=True condition without the FailureTarget=true condition",
            );
        }
        if (self.turned("Complete") || self.turned("SuccessCriteriaMet"))
            && complete
            && !self.is("SuccessCriteriaMet")
        {
            self.conditions(
                "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
            );
        }
    }

    fn finished(&self) {
        if !self.is_finished() {
            return;
        }
        let active = self.new.get("active");
        if self.ended_or("active") && active.int() > 0 {
            active.invalid("active>0 is invalid for finished job");
        }
        let is_idle =
            self.spec.get("suspend").bool() && self.spec.get("completions").number() == Some(0);
        let start = self.new.get("startTime");
        if self.ended_or("startTime") && !is_idle && !start.is_set() {
            start.required("startTime is required for finished job");
        }
        let uncounted = self.new.get("uncountedTerminatedPods");
        let lists = ["succeeded", "failed"].map(|list| uncounted.get(list));
        if self.ended_or("uncountedTerminatedPods") && lists.iter().any(|list| !list.is_empty()) {
            let [succeeded, failed] = lists.map(|list| list.value.clone());
            let shown = format!(r#"{{"Succeeded":{succeeded},"Failed":{failed}}}"#);
            let detail = "must be empty for finished job";
            uncounted.errors().invalid_shown(&uncounted.path, Some(&shown), detail);
        }
    }

    fn indexes(&self) {
        let (completed, failed) = (self.new.get("completedIndexes"), self.new.get("failedIndexes"));
        let changed = [self.changed("completedIndexes"), self.changed("failedIndexes")];
        let completions = self.spec.get("completions").number();
        let per_index = self.spec.has("backoffLimitPerIndex");
        if let (true, Some(count)) = (changed[0], completions)
            && let Err(why) = index_count(completed.str(), count)
        {
            completed.invalid_text(&format!("error parsing completedIndexes: {why}"));
        }
        if let (true, true, true, Some(count)) =
            (changed[1], per_index, failed.is_set(), completions)
            && let Err(why) = index_count(failed.str(), count)
        {
            failed.invalid_text(&format!("error parsing failedIndexes: {why}"));
        }
        if changed[0] && !completed.is_empty() && !self.spec.get("completionMode").is("Indexed") {
            completed
                .invalid("cannot set non-empty completedIndexes when non-indexed completion mode");
        }
        if changed[1] && failed.is_set() && !per_index {
            failed.invalid("cannot set non-null failedIndexes when backoffLimitPerIndex is null");
        }
        if let (true, Some(count)) = (changed[0] || changed[1], completions)
            && let Some(index) = first_in_both(completed.str(), failed.str(), count)
        {
            failed
                .invalid(&format!("failedIndexes and completedIndexes overlap at index: {index}"));
        }
    }

    fn success_criteria(&self) {
        let (new, active) = (&self.new, self.new.get("active").int());
        if self.is_finished() && self.ended_or("terminating") && new.get("terminating").int() > 0 {
            new.get("terminating").invalid("terminating>0 is invalid for finished job");
        }
        let ready = new.get("ready");
        if (self.changed("ready") || self.changed("active")) && ready.int() > active {
            ready.invalid("cannot set more ready pods than active");
        }
        let met = self.is("SuccessCriteriaMet");
        if met && self.is("Failed") {
            self.conditions("cannot set SuccessCriteriaMet=True and Failed=true conditions");
        }
        if met && self.is("FailureTarget") {
            self.conditions("cannot set SuccessCriteriaMet=True and FailureTarget=true conditions");
        }
        if self.spec.has("successPolicy") && !met && self.is("Complete") {
            self.conditions("cannot set Complete=True for Job with SuccessPolicy unless SuccessCriteriaMet=True");
        }
    }

    fn transitions(&self) {
        for kind in ["Failed", "Complete", "FailureTarget"] {
            if self.was(kind) && !self.is(kind) {
                self.conditions(&format!("cannot disable the terminal {kind}=True condition"));
            }
        }
        let (completions, parallelism) =
            (self.spec.get("completions"), self.spec.get("parallelism"));
        let scales = self.spec.get("completionMode").is("Indexed")
            && completions.number() == parallelism.number();
        for (field, detail, is_allowed) in [
            ("failed", "cannot decrease the failed counter", false),
            ("succeeded", "cannot decrease the succeeded counter", scales),
        ] {
            let now = self.new.get(field);
            if !is_allowed && now.int() < self.old.get(field).int() {
                now.invalid_as(now.int(), detail);
            }
        }
        let fixed = |field: &'static str| {
            let (now, had) = (self.new.get(field), self.old.get(field));
            had.is_set() && now.value != had.value
        };
        let completion = self.new.get("completionTime");
        if completion.is_set() && fixed("completionTime") {
            completion.invalid("field is immutable");
        }
        let resumes = self.was("Suspended") && Self::holds(&self.new, "Suspended", "False");
        if !resumes && fixed("startTime") && !self.spec.get("suspend").bool() {
            self.new.get("startTime").invalid("field is immutable for unsuspended job once set");
        }
        let (met, had) = (self.is("SuccessCriteriaMet"), self.was("SuccessCriteriaMet"));
        if had && !met {
            self.conditions("cannot disable the SuccessCriteriaMet=True condition");
        }
        if self.was("Complete") && !had && met {
            self.conditions(
                "cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions",
            );
        }
    }
}

/// The lowest index that both lists name. Intervals that cannot be read are left out.
fn first_in_both(completed: &str, failed: &str, completions: i64) -> Option<i64> {
    let intervals = |text: &str| -> Vec<(i64, i64)> {
        let readable = text.split(',').filter(|one| !one.is_empty());
        let readable = readable.filter(|one| index_count(one, completions).is_ok());
        readable
            .filter_map(|one| {
                let (first, last) = one.split_once('-').unwrap_or((one, one));
                Some((first.parse().ok()?, last.parse().ok()?))
            })
            .collect()
    };
    let failed = intervals(failed);
    intervals(completed).into_iter().find_map(|(first, last)| {
        let hit = failed.iter().find(|(start, end)| first <= *end && *start <= last)?;
        Some(first.max(hit.0))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge_both;

    type Rule = fn(&At<'_>, &At<'_>);

    fn check(rule: Rule, new: Value, old: Value, expected: &[&str]) {
        let errors = judge_both(&new, &old, rule);
        let texts: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
        assert_eq!(texts, expected, "{new}");
    }

    #[test]
    fn load_balancers() {
        let of = |kind: &str, one: Value| json!({"spec": {"type": kind}, "status": {"loadBalancer": {"ingress": [one]}}});
        check(
            service,
            of("ClusterIP", json!({})),
            json!({}),
            &[
                "status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is 'LoadBalancer'",
            ],
        );
        check(
            service,
            of("LoadBalancer", json!({"ip": "1.2.3.4"})),
            json!({}),
            &[
                "status.loadBalancer.ingress[0].ipMode: Required value: must be specified when `ip` is set",
            ],
        );
        check(
            service,
            of("LoadBalancer", json!({"ip": "1.2.3.4", "ipMode": "X"})),
            json!({}),
            &[
                "status.loadBalancer.ingress[0].ipMode: Unsupported value: \"X\": supported values: \"Proxy\", \"VIP\"",
            ],
        );
        check(
            ingress,
            of("", json!({"hostname": "1.2.3.4"})),
            json!({}),
            &[
                "status.loadBalancer.ingress[0].hostname: Invalid value: \"1.2.3.4\": must be a DNS name, not an IP address",
            ],
        );
    }

    #[test]
    fn phases_and_features() {
        check(
            namespace,
            json!({"metadata": {}, "status": {"phase": "X"}}),
            json!({}),
            &[
                "status.Phase: Invalid value: \"X\": may only be 'Active' if `deletionTimestamp` is empty",
            ],
        );
        check(
            |at, _| declared_features(at),
            json!({"status": {"declaredFeatures": ["B/c", "A", "A", "x"]}}),
            json!({}),
            &[
                "status.declaredFeatures[1]: Invalid value: \"A\": list must be sorted alphabetically",
                "status.declaredFeatures[2]: Duplicate value: \"A\"",
                "status.declaredFeatures[3]: Invalid value: \"x\": invalid feature name \"x\": must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes",
            ],
        );
    }

    #[test]
    fn jobs_end_once() {
        let condition = |kind: &str| json!({"type": kind, "status": "True"});
        let of = |status: Value| json!({"spec": {"completions": 3, "parallelism": 1, "completionMode": "Indexed"}, "status": status});
        check(
            job,
            of(json!({"conditions": [condition("Complete")], "active": 1})),
            of(json!({})),
            &[
                "status.completionTime: Required value: completionTime is required for Complete jobs",
                "status.conditions: Invalid value: cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
                "status.active: Invalid value: 1: active>0 is invalid for finished job",
                "status.startTime: Required value: startTime is required for finished job",
            ],
        );
        check(
            job,
            of(json!({"completedIndexes": "0-4", "failed": 0})),
            of(json!({"failed": 1})),
            &[
                "status.completedIndexes: Invalid value: \"0-4\": error parsing completedIndexes: too large index: \"4\"",
                "status.failed: Invalid value: 0: cannot decrease the failed counter",
            ],
        );
        check(job, of(json!({"active": 1, "ready": 1})), of(json!({})), &[]);
    }

    #[test]
    fn overlaps() {
        for (completed, failed, expected) in
            [("0-2,5", "3,5", Some(5)), ("0", "1", None), ("x,1", "0-1", Some(1)), ("", "0", None)]
        {
            assert_eq!(first_in_both(completed, failed, 10), expected, "{completed} {failed}");
        }
    }
}
