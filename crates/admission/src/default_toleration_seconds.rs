//! DefaultTolerationSeconds: pods tolerate a node that is not ready or unreachable for five minutes,
//! unless their spec says otherwise.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Pod, Toleration};

use crate::Row;

const SECONDS: i64 = 300;
const TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

pub(crate) const ROW: Row =
    Row::enabled("DefaultTolerationSeconds", |_| Ok(Box::new(DefaultTolerationSeconds)));

pub(crate) struct DefaultTolerationSeconds;

#[async_trait]
impl Plugin for DefaultTolerationSeconds {
    fn name(&self) -> &'static str {
        "DefaultTolerationSeconds"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let Some(pod) = attributes.object.as_mut().and_then(|object| object.downcast_mut::<Pod>())
        else {
            return Ok(());
        };
        let tolerations = pod.spec.get_or_insert_default().tolerations.get_or_insert_default();
        for taint in TAINTS {
            if !tolerations.iter().any(|toleration| covers(toleration, taint)) {
                tolerations.push(Toleration {
                    key: Some(taint.into()),
                    operator: Some("Exists".into()),
                    effect: Some("NoExecute".into()),
                    toleration_seconds: Some(SECONDS),
                    ..Toleration::default()
                });
            }
        }
        Ok(())
    }
}

fn covers(toleration: &Toleration, taint: &str) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let effect = toleration.effect.as_deref().unwrap_or_default();
    (key == taint || key.is_empty()) && (effect == "NoExecute" || effect.is_empty())
}
