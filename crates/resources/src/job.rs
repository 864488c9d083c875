//! Jobs: their selector and the labels that it needs are the server's to make.

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Strategy};
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use machinery::Object;
use serde_json::Value;

use crate::core::podspec;
use crate::defaults::fill;
use crate::gated;
use crate::parts::{Parts, parts};
use crate::print::{age, containers, human_duration, selector};

const PARTS: Parts<Job> = parts!(Job);

pub(crate) struct JobStrategy;

impl Strategy for JobStrategy {
    crate::validate::checked!(Job);

    fn default(&self, object: &mut dyn Object) {
        let job = object.expect_mut::<Job>();
        let spec = job.spec.get_or_insert_default();
        if spec.completions.is_none() && spec.parallelism.is_none() {
            spec.completions = Some(1);
        }
        spec.parallelism.get_or_insert(1);
        spec.backoff_limit.get_or_insert(if spec.backoff_limit_per_index.is_some() {
            i32::MAX
        } else {
            6
        });
        spec.completion_mode.get_or_insert_with(|| "NonIndexed".into());
        spec.suspend.get_or_insert(false);
        spec.manual_selector.get_or_insert(false);
        let replace =
            if spec.pod_failure_policy.is_some() { "Failed" } else { "TerminatingOrFailed" };
        spec.pod_replacement_policy.get_or_insert_with(|| replace.into());
        let policy = spec.pod_failure_policy.iter_mut().flat_map(|policy| &mut policy.rules);
        for pattern in policy.flat_map(|rule| rule.on_pod_conditions.iter_mut().flatten()) {
            fill(&mut pattern.status, "True");
        }
        podspec::default_template(&mut spec.template);
        let of_template = spec.template.metadata.as_ref().and_then(|meta| meta.labels.as_ref());
        if job.metadata.labels.as_ref().is_none_or(|own| own.is_empty()) {
            job.metadata.labels = of_template.filter(|labels| !labels.is_empty()).cloned();
        }
        job.status.get_or_insert_default();
    }

    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        PARTS.prepare_create(object);
        let (name, uid) = (object.name().to_owned(), object.uid().to_owned());
        let job = object.expect_mut::<Job>();
        let spec = job.spec.get_or_insert_default();
        if spec.manual_selector != Some(true) {
            select_own_pods(spec, &name, &uid);
        }
        self.default(object);
        gated::job(object.expect_mut(), None);
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        PARTS.prepare_update(ctx, object, old);
        gated::job(object.expect_mut(), Some(old.expect()));
    }

    fn has_generation(&self) -> bool {
        true
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        PARTS.spec_differs(object, old)
    }

    fn orphans_by_default(&self) -> bool {
        // Upstream keeps pods of a Job that an old client deletes without saying how.
        true
    }

    fn delete_warning(&self) -> Option<&'static str> {
        Some(
            "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning",
        )
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        &["status.successful"]
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        let done = object.expect::<Job>().status.as_ref().and_then(|status| status.succeeded);
        vec![("status.successful", done.unwrap_or_default().to_string())]
    }

    fn unknown_field(&self, field: &str) -> String {
        format!("field label {field:?} not supported for Job")
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<Job>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let job = object.expect::<Job>();
        let spec = job.spec.clone().unwrap_or_default();
        let (names, images) =
            containers(&spec.template.spec.clone().unwrap_or_default().containers);
        vec![
            object.name().into(),
            state(job).into(),
            completions(job).into(),
            duration(job).into(),
            age(object),
            names.into(),
            images.into(),
            selector(spec.selector.as_ref()).into(),
        ]
    }
}

/// Adds what is not there; what contradicts is refused later.
fn select_own_pods(spec: &mut JobSpec, name: &str, uid: &str) {
    const SELECTED: &str = "batch.kubernetes.io/controller-uid";
    let labels = spec.template.metadata.get_or_insert_default().labels.get_or_insert_default();
    for (key, value) in [
        ("job-name", name),
        ("batch.kubernetes.io/job-name", name),
        ("controller-uid", uid),
        (SELECTED, uid),
    ] {
        labels.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }
    let selector = spec.selector.get_or_insert_default();
    let selected = selector.match_labels.get_or_insert_default();
    selected.entry(SELECTED.to_owned()).or_insert_with(|| uid.to_owned());
}

fn state(job: &Job) -> &'static str {
    let status = job.status.clone().unwrap_or_default();
    let has = |kind: &str| {
        status.conditions.iter().flatten().any(|one| one.type_ == kind && one.status == "True")
    };
    match () {
        () if has("Complete") => "Complete",
        () if has("Failed") => "Failed",
        () if job.metadata.deletion_timestamp.is_some() => "Terminating",
        () if has("Suspended") => "Suspended",
        () if has("FailureTarget") => "FailureTarget",
        () if has("SuccessCriteriaMet") => "SuccessCriteriaMet",
        () => "Running",
    }
}

fn completions(job: &Job) -> String {
    let (spec, status) =
        (job.spec.clone().unwrap_or_default(), job.status.clone().unwrap_or_default());
    let done = status.succeeded.unwrap_or_default();
    match (spec.completions, spec.parallelism.unwrap_or_default()) {
        (Some(wanted), _) => format!("{done}/{wanted}"),
        (None, parallelism @ 2..) => format!("{done}/1 of {parallelism}"),
        (None, _) => format!("{done}/1"),
    }
}

fn duration(job: &Job) -> String {
    let status = job.status.clone().unwrap_or_default();
    let Some(started) = status.start_time else { return String::new() };
    let ended = status.completion_time.map_or_else(base::clock::now, |time| time.0);
    human_duration(ended.as_second() - started.0.as_second())
}
