//! Job: pods that run until enough of them have succeeded. The selector, and the labels that it
//! needs, are the server's to make.

use apiserver::request::RequestContext;
use apiserver::resource::MetadataRules;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::Container;
use machinery::Object;

use crate::core::podspec;
use crate::defaults::fill;
use crate::gated::close_template;
use crate::kind::{
    Fields, Hooks, Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide,
};
use crate::print::{images, names, selector};
use crate::validate::{batch, status, warnings};

pub(crate) static KIND: Kind<Job> = Kind {
    categories: &["all"],
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| {
        let old = old.and_then(|old| old.spec.as_ref()).map(|spec| &spec.template);
        close_template(new.spec.as_mut().map(|spec| &mut spec.template), old);
    },
    rules: Rules {
        create: batch::job,
        update: Some(batch::job_update),
        parts: &[("status", status::job)],
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    warnings: Some(|at, out| warnings::hostname(at, "spec.template", out)),
    // Upstream keeps pods of a Job that an old client deletes without saying how.
    orphans: true,
    delete_warning: Some(
        "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning",
    ),
    columns: &[
        name(),
        text("Status", "string", "Status of the job.", |job| state(job).into()),
        field("Completions", "string", "api.batch.v1.JobStatus.succeeded", |job| {
            completions(job).into()
        }),
        text("Duration", "string", "Time required to complete the job.", |job| {
            duration(job).into()
        }),
        age(),
        wide(text("Containers", "string", "Names of each container in the template.", |job| {
            names(containers(job)).into()
        })),
        wide(text(
            "Images",
            "string",
            "Images referenced by each container in the template.",
            |job| images(containers(job)).into(),
        )),
        wide(field("Selector", "string", "api.batch.v1.JobSpec.selector", |job| {
            selector(job.spec.as_ref().and_then(|spec| spec.selector.as_ref())).into()
        })),
    ],
    fields: Fields::Of(&[("status.successful", |job| {
        let done = job.status.as_ref().and_then(|status| status.succeeded);
        done.unwrap_or_default().to_string()
    })]),
    unknown_field: Some(|field| format!("field label {field:?} not supported for Job")),
    hooks: &Life,
    ..Kind::BASE
};

fn default(job: &mut Job) {
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
    let replace = if spec.pod_failure_policy.is_some() { "Failed" } else { "TerminatingOrFailed" };
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

struct Life;

impl Hooks<Job> for Life {
    fn prepare_create(&self, _ctx: &RequestContext, job: &mut Job) {
        let (name, uid) = (job.name().to_owned(), job.uid().to_owned());
        let shares = shares_labels(job);
        let spec = job.spec.get_or_insert_default();
        if spec.manual_selector == Some(true) {
            return;
        }
        select_own_pods(spec, &name, &uid);
        if shares {
            job.metadata.labels =
                spec.template.metadata.as_ref().and_then(|meta| meta.labels.clone());
        }
    }
}

/// Upstream: a Job without labels gets the map of its template, the same map and not a copy. Labels that are
/// added to the template are then the Job's, too.
/// Deviation: a Job that was sent with the labels of its template counts as one without.
fn shares_labels(job: &Job) -> bool {
    let template = job.spec.as_ref().and_then(|spec| spec.template.metadata.as_ref());
    let labels = template.and_then(|meta| meta.labels.as_ref());
    labels.is_some_and(|labels| !labels.is_empty() && job.metadata.labels.as_ref() == Some(labels))
}

fn containers(job: &Job) -> &[Container] {
    let spec = job.spec.as_ref();
    spec.and_then(|spec| spec.template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}

/// Adds missing labels; validation refuses contradicting ones.
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
    base::duration::human(ended.as_second() - started.0.as_second())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_the_template_stay_shared() {
        let labels = |text: &str| Some([(text.to_owned(), "x".to_owned())].into());
        for (own, template, is_shared) in [("", "a", true), ("b", "a", false), ("", "", false)] {
            let mut job = Job::default();
            job.metadata.name = Some("j".into());
            job.metadata.uid = Some("u".into());
            job.metadata.labels = labels(own).filter(|_| !own.is_empty());
            let spec = job.spec.get_or_insert_default();
            spec.template.metadata.get_or_insert_default().labels =
                labels(template).filter(|_| !template.is_empty());
            default(&mut job);
            let shares = shares_labels(&job);
            assert_eq!(shares, is_shared, "{own:?} {template:?}");
        }
    }
}
