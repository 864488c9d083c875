//! PodTolerationRestriction: a namespace's annotations, or the cluster's configuration, set the default
//! and the allowed tolerations of its pods.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Namespace, Pod, Toleration};
use serde::Deserialize;

use crate::{OptionsError, Row};

const DEFAULTS: &str = "scheduler.alpha.kubernetes.io/defaultTolerations";
const ALLOWED: &str = "scheduler.alpha.kubernetes.io/tolerationsWhitelist";
const MEMORY_PRESSURE: &str = "node.kubernetes.io/memory-pressure";

pub(crate) const ROW: Row = Row::disabled("PodTolerationRestriction", |options| {
    let configuration = options.configuration.of("PodTolerationRestriction");
    let made = PodTolerationRestriction::new(configuration)?;
    Ok(Box::new(made))
});

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodTolerationRestriction {
    default: Vec<Toleration>,
    whitelist: Vec<Toleration>,
}

impl PodTolerationRestriction {
    pub fn new(configuration: Option<&serde_json::Value>) -> Result<Self, OptionsError> {
        let read = |tree: &serde_json::Value| serde_json::from_value(tree.clone());
        Ok(configuration.map_or(Ok(Self::default()), read)?)
    }
}

async fn annotated(
    attributes: &Attributes<'_>,
    key: &str,
) -> Result<Option<Vec<Toleration>>, StatusError> {
    let name = &attributes.key.namespace;
    let found = attributes.registry.find::<Namespace>("", name).await?;
    let missing = || StatusError::not_found("", "namespaces", name);
    let namespace = found.ok_or_else(missing)?;
    let text = namespace.metadata.annotations.as_ref().and_then(|map| map.get(key));
    match text.map(String::as_str) {
        None => Ok(None),
        Some("") => Ok(Some(vec![])),
        Some(text) => serde_json::from_str(text).map(Some).map_err(StatusError::internal),
    }
}

#[async_trait]
impl Plugin for PodTolerationRestriction {
    fn name(&self) -> &'static str {
        "PodTolerationRestriction"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let mut more = vec![];
        if attributes.operation == Operation::Create {
            more = annotated(attributes, DEFAULTS).await?.unwrap_or_else(|| self.default.clone());
        }
        let Some(spec) = attributes.object_as_mut::<Pod>().and_then(|pod| pod.spec.as_mut()) else {
            return Ok(());
        };
        if asks_for_something(spec) {
            more.push(Toleration {
                key: Some(MEMORY_PRESSURE.into()),
                operator: Some("Exists".into()),
                effect: Some("NoSchedule".into()),
                ..Toleration::default()
            });
        }
        for toleration in more {
            let all = spec.tolerations.get_or_insert_default();
            if !all.contains(&toleration) {
                all.push(toleration);
            }
        }
        Ok(())
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let spec = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
        let own = spec.and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
        if own.is_empty() {
            return Ok(());
        }
        let (allowed, scope) = match annotated(attributes, ALLOWED).await? {
            Some(allowed) => (allowed, "namespace"),
            None => (self.whitelist.clone(), "cluster"),
        };
        let covered = |one: &Toleration| allowed.iter().any(|wide| is_superset(wide, one));
        if allowed.is_empty() || own.iter().all(covered) {
            return Ok(());
        }
        Err(StatusError::internal(format!(
            "pod tolerations (possibly merged with namespace default tolerations) conflict with its {scope} whitelist"
        )))
    }
}

fn asks_for_something(spec: &k8s_openapi::api::core::v1::PodSpec) -> bool {
    use crate::resources::{Which, of_pod};
    [Which::Requests, Which::Limits].into_iter().any(|which| {
        of_pod(spec, which)
            .iter()
            .any(|(name, one)| matches!(&**name, "cpu" | "memory") && !one.amount.is_zero())
    })
}

/// Whether `wide` tolerates everything that `one` tolerates. Upstream: `tolerations.isSuperset`.
fn is_superset(wide: &Toleration, one: &Toleration) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (key, operator, effect) = (text(&wide.key), text(&wide.operator), text(&wide.effect));
    let exists = operator == "Exists";
    if wide == one
        || (key.is_empty() && exists && (effect.is_empty() || effect == text(&one.effect)))
    {
        return true;
    }
    let lasts = match (wide.toleration_seconds, one.toleration_seconds) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(wide), Some(one)) => wide >= one,
    };
    key == text(&one.key)
        && (effect.is_empty() || effect == text(&one.effect))
        && (effect != "NoExecute" || lasts)
        && (exists || (text(&one.operator) != "Exists" && wide.value == one.value))
}
