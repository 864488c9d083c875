//! PodSecurity: labels of a namespace set the security level of its pods. Violations are rejected, noted
//! in the audit log, or warned about; pod templates are only noted and warned about.

mod checks;
mod policy;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{
    Container, Namespace, Pod, PodSpec, PodTemplate, PodTemplateSpec, ReplicationController,
};
use machinery::{Object, ObjectMeta};
use serde::Deserialize;

use policy::{Level, Mode, Policy};

use crate::{OptionsError, Row};

const NAME: &str = "PodSecurity";
/// The maximum number of existing pods that are checked when a namespace becomes stricter.
const PODS_CHECKED: usize = 3000;
/// Subresources of a pod that contain no pod.
const NO_PODS: [&str; 8] =
    ["exec", "attach", "binding", "eviction", "log", "portforward", "proxy", "status"];

pub(crate) const ROW: Row = Row::enabled(NAME, |options| {
    let configuration = options.configuration.of("PodSecurity");
    Ok(Box::new(PodSecurity::new(configuration)?))
});

pub(crate) struct PodSecurity {
    defaults: Policy,
    exemptions: Exemptions,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Exemptions {
    usernames: Vec<String>,
    namespaces: Vec<String>,
    runtime_classes: Vec<String>,
}

/// `PodSecurityConfiguration`.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Configuration {
    defaults: std::collections::BTreeMap<String, String>,
    exemptions: Exemptions,
}

impl PodSecurity {
    pub fn new(configuration: Option<&serde_json::Value>) -> Result<Self, OptionsError> {
        let Some(tree) = configuration else {
            let (defaults, exemptions) = (Policy::default(), Exemptions::default());
            return Ok(Self { defaults, exemptions });
        };
        let read: Configuration = serde_json::from_value(tree.clone())?;
        let labels = read
            .defaults
            .iter()
            .map(|(key, value)| (format!("pod-security.kubernetes.io/{key}"), value.clone()));
        let (defaults, errors) = Policy::of_labels(Some(&labels.collect()), &Policy::default());
        if !errors.is_empty() {
            return Err(OptionsError::Fields(errors.summary()));
        }
        Ok(Self { defaults, exemptions: read.exemptions })
    }

    fn is_exempt(&self, attributes: &Attributes<'_>) -> bool {
        self.exemptions.namespaces.contains(&attributes.key.namespace)
            || self.exemptions.usernames.contains(&attributes.ctx.user.name)
    }

    async fn namespace(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let Some(namespace) = attributes.object_as::<Namespace>() else { return Ok(()) };
        let labels = namespace.metadata.labels.as_ref();
        let (policy, errors) = Policy::of_labels(labels, &self.defaults);
        let invalid = |errors| Err(StatusError::invalid("", "Namespace", namespace.name(), errors));
        let warn_if_exempt = || {
            let exempt = self.exemptions.namespaces.iter().any(|name| name == namespace.name());
            if exempt && !policy.is_privileged() && policy != self.defaults {
                let shown = policy.shown(&labels.cloned().unwrap_or_default());
                attributes.ctx.warn(format!(
                    "namespace {:?} is exempt from Pod Security, and the policy ({shown}) will be ignored",
                    namespace.name()
                ));
            }
            exempt
        };
        let Some(old) = attributes.old_as::<Namespace>() else {
            warn_if_exempt();
            return if errors.is_empty() { Ok(()) } else { invalid(errors) };
        };
        let (before, old_errors) = Policy::of_labels(old.metadata.labels.as_ref(), &self.defaults);
        if !errors.is_empty() && errors.summary() != old_errors.summary() {
            return invalid(errors);
        }
        let (new, was) = (policy.enforce, before.enforce);
        let relaxed = new.version == was.version && new.level <= was.level;
        if new == was || new.level == Level::Privileged || relaxed || warn_if_exempt() {
            return Ok(());
        }
        self.warn_about_pods(attributes, namespace.name(), new).await
    }

    async fn warn_about_pods(
        &self,
        attributes: &Attributes<'_>,
        namespace: &str,
        enforce: Mode,
    ) -> Result<(), StatusError> {
        let mut pods = attributes.registry.cached::<Pod>(namespace).await?;
        pods.retain(|pod| !self.has_exempt_class(pod.spec.as_ref()));
        let total = pods.len();
        pods.truncate(PODS_CHECKED);
        let mut found: std::collections::BTreeMap<String, Vec<&str>> = Default::default();
        for pod in &pods {
            let Some(spec) = &pod.spec else { continue };
            let violations = checks::violations(enforce, &pod.metadata, spec);
            if !violations.is_empty() {
                found.entry(checks::reasons(&violations)).or_default().push(pod.name());
            }
        }
        if total > pods.len() {
            attributes.ctx.warn(format!(
                "new PodSecurity enforce level only checked against the first {} of {total} existing pods",
                pods.len()
            ));
        }
        if !found.is_empty() {
            attributes.ctx.warn(format!(
                "existing pods in namespace {namespace:?} violate the new PodSecurity enforce level \"{enforce}\""
            ));
        }
        let mut warnings: Vec<String> = found
            .into_iter()
            .map(|(reasons, mut names)| {
                names.sort_unstable();
                match names.len() {
                    1 => format!("{}: {reasons}", names[0]),
                    2 => format!("{} (and 1 other pod): {reasons}", names[0]),
                    count => format!("{} (and {} other pods): {reasons}", names[0], count - 1),
                }
            })
            .collect();
        warnings.sort_unstable();
        warnings.into_iter().for_each(|text| attributes.ctx.warn(text));
        Ok(())
    }

    fn has_exempt_class(&self, spec: Option<&PodSpec>) -> bool {
        let class = spec.and_then(|spec| spec.runtime_class_name.as_ref());
        class.is_some_and(|class| self.exemptions.runtime_classes.contains(class))
    }

    async fn policy_of(&self, attributes: &Attributes<'_>) -> Result<Policy, StatusError> {
        let name = &attributes.key.namespace;
        let found = attributes.registry.known::<Namespace>("", name).await?;
        let lost = || StatusError::internal(format!("failed to lookup namespace {name:?}"));
        let namespace = found.ok_or_else(lost)?;
        let labels = namespace.metadata.labels.as_ref();
        let (policy, errors) = Policy::of_labels(labels, &self.defaults);
        if !errors.is_empty() {
            let why = format!("Failed to parse policy: {}", errors.summary());
            attributes.ctx.annotate("pod-security.kubernetes.io/error", why);
        }
        Ok(policy)
    }

    /// A pod is checked in all three modes; a template is never rejected.
    fn judge(
        &self,
        attributes: &Attributes<'_>,
        policy: &Policy,
        meta: &ObjectMeta,
        spec: &PodSpec,
        enforced: bool,
    ) -> Result<(), StatusError> {
        if self.has_exempt_class(Some(spec)) {
            return Ok(());
        }
        let say = |mode: Mode| {
            let found = checks::violations(mode, meta, spec);
            (!found.is_empty())
                .then(|| format!("PodSecurity \"{mode}\": {}", checks::details(&found)))
        };
        if let Some(found) = say(policy.audit) {
            let key = "pod-security.kubernetes.io/audit-violations";
            attributes.ctx.annotate(key, format!("would violate {found}"));
        }
        if enforced {
            let key = "pod-security.kubernetes.io/enforce-policy";
            attributes.ctx.annotate(key, policy.enforce.to_string());
            if let Some(found) = say(policy.enforce) {
                return Err(attributes.forbidden(format!("violates {found}")));
            }
        }
        if let Some(found) = say(policy.warn) {
            attributes.ctx.warn(format!("would violate {found}"));
        }
        Ok(())
    }

    async fn pod(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let sub = attributes.ctx.subresource.as_str();
        let Some(pod) = attributes.object_as::<Pod>() else { return Ok(()) };
        if NO_PODS.contains(&sub) || self.is_exempt(attributes) {
            return Ok(());
        }
        if let Some(old) = attributes.old_as::<Pod>()
            && !is_significant(pod, old)
        {
            return Ok(());
        }
        let policy = self.policy_of(attributes).await?;
        let Some(spec) = pod.spec.as_ref().filter(|_| !policy.is_privileged()) else {
            return Ok(());
        };
        self.judge(attributes, &policy, &pod.metadata, spec, true)
    }

    async fn controller(
        &self,
        attributes: &Attributes<'_>,
        template: &PodTemplateSpec,
    ) -> Result<(), StatusError> {
        if !attributes.ctx.subresource.is_empty() || self.is_exempt(attributes) {
            return Ok(());
        }
        let policy = self.policy_of(attributes).await?;
        let Some(spec) = template.spec.as_ref().filter(|_| !policy.is_privileged()) else {
            return Ok(());
        };
        let meta = template.metadata.clone().unwrap_or_default();
        self.judge(attributes, &policy, &meta, spec, false)
    }
}

#[async_trait]
impl Plugin for PodSecurity {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if attributes.is_resource("", "namespaces") {
            return self.namespace(attributes).await;
        }
        let row = &attributes.ctx.resource;
        if row.group.is_empty() && row.plural == "pods" {
            return self.pod(attributes).await;
        }
        let object = attributes.object.as_deref();
        match object.and_then(|object| template_of(&**object)) {
            Some(template) => self.controller(attributes, template).await,
            None => Ok(()),
        }
    }
}

/// The pod template of a workload.
fn template_of(object: &dyn Object) -> Option<&PodTemplateSpec> {
    if let Some(one) = object.downcast::<Deployment>() {
        return one.spec.as_ref().map(|spec| &spec.template);
    }
    if let Some(one) = object.downcast::<ReplicaSet>() {
        return one.spec.as_ref()?.template.as_ref();
    }
    if let Some(one) = object.downcast::<DaemonSet>() {
        return one.spec.as_ref().map(|spec| &spec.template);
    }
    if let Some(one) = object.downcast::<StatefulSet>() {
        return one.spec.as_ref().map(|spec| &spec.template);
    }
    if let Some(one) = object.downcast::<Job>() {
        return one.spec.as_ref().map(|spec| &spec.template);
    }
    if let Some(one) = object.downcast::<CronJob>() {
        return one.spec.job_template.spec.as_ref().map(|spec| &spec.template);
    }
    if let Some(one) = object.downcast::<ReplicationController>() {
        return one.spec.as_ref()?.template.as_ref();
    }
    object.downcast::<PodTemplate>()?.template.as_ref()
}

/// Only changed images and added containers matter.
fn is_significant(pod: &Pod, old: &Pod) -> bool {
    let (Some(new), Some(old)) = (&pod.spec, &old.spec) else { return true };
    let images = |all: &[Container]| all.iter().map(|one| one.image.clone()).collect::<Vec<_>>();
    let init = |spec: &PodSpec| images(spec.init_containers.as_deref().unwrap_or_default());
    let ephemeral = |spec: &PodSpec| {
        let all = spec.ephemeral_containers.iter().flatten();
        all.map(|one| (one.name.clone(), one.image.clone())).collect::<Vec<_>>()
    };
    let known = ephemeral(old);
    images(&new.containers) != images(&old.containers)
        || init(new) != init(old)
        || ephemeral(new).iter().any(|one| !known.contains(one))
}
