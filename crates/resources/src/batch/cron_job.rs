//! CronJob: Jobs at set times.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::core::v1::Container;

use crate::core::podspec;
use crate::defaults::fill;
use crate::gated::close_template;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide};
use crate::print::{images, names, or_none, selector, since};
use crate::validate::{batch, warnings};

pub(crate) static KIND: Kind<CronJob> = Kind {
    short: &["cj"],
    categories: &["all"],
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| {
        let new = new.spec.job_template.spec.as_mut().map(|spec| &mut spec.template);
        let old = old.and_then(|old| old.spec.job_template.spec.as_ref());
        close_template(new, old.map(|spec| &spec.template));
    },
    rules: Rules {
        create: batch::cron_job,
        update: Some(batch::cron_job_update),
        metadata: MetadataRules { part: &[], ..MetadataRules::FULL },
        ..Rules::NONE
    },
    warnings: Some(|at, out| warnings::hostname(at, "spec.jobTemplate.spec.template", out)),
    columns: &[
        name(),
        field("Schedule", "string", "api.batch.v1.CronJobSpec.schedule", |job| {
            job.spec.schedule.clone().into()
        }),
        field("Timezone", "string", "api.batch.v1.CronJobSpec.timeZone", |job| {
            or_none(job.spec.time_zone.clone().unwrap_or_default()).into()
        }),
        field("Suspend", "boolean", "api.batch.v1.CronJobSpec.suspend", |job| {
            if job.spec.suspend == Some(true) { "True" } else { "False" }.into()
        }),
        field("Active", "integer", "api.batch.v1.CronJobStatus.active", |job| {
            let status = job.status.as_ref();
            status.and_then(|status| status.active.as_ref()).map_or(0, Vec::len).into()
        }),
        field("Last Schedule", "string", "api.batch.v1.CronJobStatus.lastScheduleTime", |job| {
            let last = job.status.as_ref().and_then(|status| status.last_schedule_time.as_ref());
            last.map_or("<none>".into(), |time| since(Some(time))).into()
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
            let inner = job.spec.job_template.spec.as_ref();
            selector(inner.and_then(|spec| spec.selector.as_ref())).into()
        })),
    ],
    ..Kind::BASE
};

fn default(job: &mut CronJob) {
    let spec = &mut job.spec;
    fill(&mut spec.concurrency_policy, "Allow");
    spec.suspend.get_or_insert(false);
    spec.successful_jobs_history_limit.get_or_insert(3);
    spec.failed_jobs_history_limit.get_or_insert(1);
    let inner = spec.job_template.spec.get_or_insert_default();
    podspec::default_template(&mut inner.template);
    job.status.get_or_insert_default();
}

fn containers(job: &CronJob) -> &[Container] {
    let inner = job.spec.job_template.spec.as_ref();
    inner.and_then(|spec| spec.template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}
