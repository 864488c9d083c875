//! PodNodeSelector: a namespace's annotation, or the cluster's configuration, selects the nodes of its
//! pods.

use std::collections::BTreeMap;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Namespace, Pod};

use crate::{OptionsError, Row};

const ANNOTATION: &str = "scheduler.alpha.kubernetes.io/node-selector";
const CLUSTER: &str = "clusterDefaultNodeSelector";

type Labels = BTreeMap<String, String>;

pub(crate) const ROW: Row = Row::disabled("PodNodeSelector", |options| {
    let configuration = options.configuration.of("PodNodeSelector");
    Ok(Box::new(PodNodeSelector::new(configuration)?))
});

/// Selectors of the configuration by namespace, and the cluster's.
pub(crate) struct PodNodeSelector(Labels);

impl PodNodeSelector {
    pub fn new(configuration: Option<&serde_json::Value>) -> Result<Self, OptionsError> {
        let Some(tree) = configuration.map(|tree| &tree["podNodeSelectorPluginConfig"]) else {
            return Ok(Self(Labels::new()));
        };
        Ok(Self(serde_json::from_value(tree.clone())?))
    }

    async fn wanted(&self, attributes: &Attributes<'_>) -> Result<Labels, StatusError> {
        let name = &attributes.key.namespace;
        let found = attributes.registry.find::<Namespace>("", name).await?;
        let missing = || StatusError::not_found("", "namespaces", name);
        let namespace = found.ok_or_else(missing)?;
        let annotation =
            namespace.metadata.annotations.as_ref().and_then(|map| map.get(ANNOTATION));
        Ok(annotation.or(self.0.get(CLUSTER)).map(|text| parse(text)).unwrap_or_default())
    }
}

/// `a=b,c=d`
fn parse(text: &str) -> Labels {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned())).collect()
}

#[async_trait]
impl Plugin for PodNodeSelector {
    fn name(&self) -> &'static str {
        "PodNodeSelector"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let wanted = self.wanted(attributes).await?;
        let spec = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
        let own = spec.and_then(|spec| spec.node_selector.clone()).unwrap_or_default();
        if wanted.iter().any(|(key, value)| own.get(key).is_some_and(|own| own != value)) {
            return Err(attributes.forbidden(
                "pod node label selector conflicts with its namespace node label selector",
            ));
        }
        let spec = attributes.object_as_mut::<Pod>().map(|pod| pod.spec.get_or_insert_default());
        if let Some(spec) = spec.filter(|_| !wanted.is_empty()) {
            spec.node_selector.get_or_insert_default().extend(wanted);
        }
        Ok(())
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let allowed = self.0.get(&attributes.key.namespace).map(|text| parse(text));
        let Some(allowed) = allowed.filter(|allowed| !allowed.is_empty()) else { return Ok(()) };
        let spec = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
        let own = spec.and_then(|spec| spec.node_selector.clone()).unwrap_or_default();
        if own.iter().all(|(key, value)| allowed.get(key) == Some(value)) {
            return Ok(());
        }
        Err(attributes
            .forbidden("pod node label selector labels conflict with its namespace whitelist"))
    }
}
