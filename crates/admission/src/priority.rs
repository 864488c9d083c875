//! Priority: sets a pod's priority from its PriorityClass, or from the default one.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::registry::Compiled;
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use machinery::Object;

use crate::Row;

pub(crate) const ROW: Row = Row::enabled("Priority", |_| Ok(Box::new(Priority::new())));

pub(crate) struct Priority {
    default: Compiled<PriorityClass, Option<PriorityClass>>,
}

impl Priority {
    pub(crate) const fn new() -> Self {
        Self { default: Compiled::new(default_class) }
    }
}

#[async_trait]
impl Plugin for Priority {
    fn name(&self) -> &'static str {
        "Priority"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        if attributes.operation == Operation::Update {
            keep(attributes);
            return Ok(());
        }
        let registry = attributes.registry;
        let Some(pod) = attributes.object.as_mut().and_then(|object| object.downcast_mut::<Pod>())
        else {
            return Ok(());
        };
        let name = pod.name().to_owned();
        let spec = pod.spec.get_or_insert_default();
        let asked = spec.priority_class_name.clone().filter(|class| !class.is_empty());
        let class = match &asked {
            Some(asked) => {
                let found = registry.find::<PriorityClass>("", asked).await?;
                let refused = || {
                    StatusError::forbidden(
                        "",
                        "pods",
                        &name,
                        format!("no PriorityClass with name {asked} was found"),
                    )
                };
                Some(found.ok_or_else(refused)?)
            }
            None => (*self.default.get(registry).await?).clone(),
        };
        let value = class.as_ref().and_then(|class| class.value).unwrap_or_default();
        if spec.priority.is_some_and(|priority| priority != value) {
            let given = spec.priority.unwrap_or_default();
            let why = format!(
                "the integer value of priority ({given}) must not be provided in pod spec; priority admission controller computed {value} from the given PriorityClass name"
            );
            return Err(StatusError::forbidden("", "pods", &name, why));
        }
        spec.priority = Some(value);
        if let Some(class) = &class {
            spec.priority_class_name = Some(class.name().to_owned());
        }
        let policy = class
            .and_then(|class| class.preemption_policy)
            .unwrap_or_else(|| "PreemptLowerPriority".into());
        let given = spec.preemption_policy.get_or_insert_with(|| policy.clone());
        if *given != policy {
            let why = format!(
                "the string value of PreemptionPolicy ({given}) must not be provided in pod spec; priority admission controller computed {policy} from the given PriorityClass name"
            );
            return Err(StatusError::forbidden("", "pods", &name, why));
        }
        Ok(())
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let Some(class) = attributes.object_as::<PriorityClass>() else { return Ok(()) };
        if class.global_default != Some(true) {
            return Ok(());
        }
        let default = self.default.get(attributes.registry).await?;
        match &*default {
            Some(other) if other.name() != class.name() => Err(attributes.forbidden(format!(
                "PriorityClass {} is already marked as default. Only one default can exist",
                other.name()
            ))),
            _ => Ok(()),
        }
    }
}

/// An update that omits the computed fields keeps them.
fn keep(attributes: &mut Attributes<'_>) {
    let old = attributes.old_as::<Pod>().and_then(|pod| pod.spec.as_ref());
    let Some((priority, policy)) = old.map(|old| (old.priority, old.preemption_policy.clone()))
    else {
        return;
    };
    if let Some(spec) = attributes.object_as_mut::<Pod>().and_then(|pod| pod.spec.as_mut()) {
        spec.priority = spec.priority.or(priority);
        spec.preemption_policy = spec.preemption_policy.take().or(policy);
    }
}

/// Among several defaults the lowest wins.
fn default_class(all: &[PriorityClass]) -> Option<PriorityClass> {
    let defaults = all.iter().filter(|class| class.global_default == Some(true));
    defaults.min_by_key(|class| class.value).cloned()
}
