//! RuntimeClass: a pod gets its class's overhead, node selector and tolerations.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass as Class;

use crate::Row;
use crate::resources::resources;

const MISMATCH: &str = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";

pub(crate) const ROW: Row = Row::enabled("RuntimeClass", |_| Ok(Box::new(RuntimeClass)));

pub(crate) struct RuntimeClass;

#[async_trait]
impl Plugin for RuntimeClass {
    fn name(&self) -> &'static str {
        "RuntimeClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let Some(class) = class_of(attributes).await? else { return Ok(()) };
        let outcome = attributes.object_as_mut::<Pod>().map_or(Ok(()), |pod| apply(pod, &class));
        outcome.map_err(|why| attributes.forbidden(why))
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let class = class_of(attributes).await?;
        let spec = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
        let has = spec.and_then(|spec| spec.overhead.as_ref());
        let wants = class.as_ref().and_then(|class| class.overhead.as_ref());
        match wants {
            Some(wants) if !same(wants.pod_fixed.as_ref(), has) => {
                Err(attributes.forbidden(MISMATCH))
            }
            None if has.is_some() => Err(attributes.forbidden(
                "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead",
            )),
            _ => Ok(()),
        }
    }
}

async fn class_of(attributes: &Attributes<'_>) -> Result<Option<Class>, StatusError> {
    if !attributes.is_resource("", "pods") {
        return Ok(None);
    }
    let spec = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
    let Some(name) = spec.and_then(|spec| spec.runtime_class_name.clone()) else {
        return Ok(None);
    };
    let found = attributes.registry.find::<Class>("", &name).await?;
    let missing = || attributes.forbidden(format!("pod rejected: RuntimeClass {name:?} not found"));
    found.map(Some).ok_or_else(missing)
}

type Quantities =
    std::collections::BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>;

fn same(one: Option<&Quantities>, other: Option<&Quantities>) -> bool {
    let amounts = |list| {
        resources(list).into_iter().map(|(name, one)| (name, one.amount)).collect::<Vec<_>>()
    };
    amounts(one) == amounts(other)
}

fn apply(pod: &mut Pod, class: &Class) -> Result<(), String> {
    let spec = pod.spec.get_or_insert_default();
    if let Some(overhead) = &class.overhead {
        let given = spec.overhead.as_ref().filter(|given| !given.is_empty());
        if given.is_some() && !same(overhead.pod_fixed.as_ref(), given) {
            return Err(MISMATCH.into());
        }
        spec.overhead.clone_from(&overhead.pod_fixed);
    }
    let Some(scheduling) = &class.scheduling else { return Ok(()) };
    for (key, value) in scheduling.node_selector.iter().flatten() {
        let selector = spec.node_selector.get_or_insert_default();
        match selector.get(key) {
            Some(other) if other != value => {
                return Err(format!(
                    "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {value}; pod.spec.nodeSelector[{key}] = {other}"
                ));
            }
            _ => selector.insert(key.clone(), value.clone()),
        };
    }
    for toleration in scheduling.tolerations.iter().flatten() {
        let all = spec.tolerations.get_or_insert_default();
        if !all.contains(toleration) {
            all.push(toleration.clone());
        }
    }
    Ok(())
}
