//! PodResizeValidator: a running pod may not grow beyond its node's allocatable resources.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Pod};

use crate::Row;
use crate::resources::{Measure, Which, of_pod, resources};

const OS: &str = "kubernetes.io/os";

pub(crate) const ROW: Row = Row::enabled("PodResizeValidator", |_| Ok(Box::new(PodResize)));

pub(crate) struct PodResize;

#[async_trait]
impl Plugin for PodResize {
    fn name(&self) -> &'static str {
        "PodResizeValidator"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let pods = (attributes.object_as::<Pod>(), attributes.old_as::<Pod>());
        let ((Some(pod), Some(old)), "resize") = (pods, &*attributes.ctx.subresource) else {
            return Ok(());
        };
        let Some(spec) = &pod.spec else { return Ok(()) };
        let name = spec.node_name.as_deref().unwrap_or_default();
        if name.is_empty() || pod.metadata.generation == old.metadata.generation {
            return Ok(());
        }
        let found = attributes.registry.find::<Node>("", name).await?;
        let missing = || attributes.forbidden(format!("node {name:?} not found"));
        let node = found.ok_or_else(missing)?;
        let os = node.metadata.labels.as_ref().and_then(|labels| labels.get(OS));
        if let Some(os) = os.filter(|os| *os != "linux") {
            let why =
                format!("pod resize is only supported on linux nodes, node {name:?} is {os:?}");
            return Err(attributes.forbidden(why).cause("UnsupportedPlatform", "", ""));
        }
        let status = node.status.as_ref();
        let has = resources(status.and_then(|status| status.allocatable.as_ref()));
        let wants = of_pod(spec, Which::Requests);
        let over = |name: &str, number: fn(Measure) -> i64| {
            let wants = wants.get(name).copied().unwrap_or_default();
            let has = has.get(name).copied().unwrap_or_default();
            (wants.amount > has.amount).then(|| {
                format!("{name}, requested: {}, allocatable: {}", number(wants), number(has))
            })
        };
        let over =
            [over("cpu", |one| one.amount.milli()), over("memory", |one| one.amount.units())];
        let over: Vec<String> = over.into_iter().flatten().collect();
        if over.is_empty() {
            return Ok(());
        }
        let why = format!("node didn't have enough allocatable resources: {}", over.join("; "));
        Err(attributes.forbidden(why).cause("NodeCapacity", "", ""))
    }
}
