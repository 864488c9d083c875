//! Claims of generic ephemeral volumes: made for a pod, owned by it, gone with it.
//!
//! In: pods. Out: claims. Upstream: `pkg/controller/volume/ephemeral`.

use client::{Api, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, PostParams, Result};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use machinery::ObjectMeta;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, on};
use crate::{owner, pod};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "ephemeral-volume-controller",
    account: "ephemeral-volume-controller",
    component: "ephemeral_volume",
    queue: "ephemeral_volume",
    workers: 1,
    new: |setup| Some(Controller { context: setup.context.clone(), pods: setup.lister() }),
    watches: &[&on(|_: &Controller, queue, event: &Event<Pod>| {
        if event.is_added() && !claims(event.object()).is_empty() {
            queue.add(event.key());
        }
    })],
    reconcile: |this, key| {
        Box::pin(async move {
            match this.pods.get_key(&key).filter(|pod| !pod::is_deleting(pod)) {
                Some(pod) => reconcile(&this.context, &key, &pod).await,
                None => Ok(Outcome::Done),
            }
        })
    },
};

struct Controller {
    context: Context,
    pods: Lister<Pod>,
}

async fn reconcile(context: &Context, key: &ObjectKey, pod: &Pod) -> Result<Outcome> {
    let api: Api<PersistentVolumeClaim> = context.client.api(Some(&key.namespace));
    for claim in claims(pod) {
        let name = claim.metadata.name.clone().unwrap_or_default();
        match api.create(&PostParams::default(), &claim).await {
            Err(error) if error.is_already_exists() => {
                let there = api.get_opt(&name).await?;
                let ours = there.as_ref().is_none_or(|there| {
                    owner::controller(&there.metadata)
                        .is_some_and(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
                });
                if !ours {
                    let message = format!(
                        "PVC {}/{name} was not created for pod {key} (pod is not owner)",
                        key.namespace
                    );
                    let reason = "EphemeralVolumeCreationFailed";
                    context.events.event(pod, EventType::Warning, reason, message);
                    return Ok(Outcome::Backoff);
                }
            }
            Err(error) if error.is_namespace_terminating() => return Ok(Outcome::Done),
            done => drop(done?),
        }
    }
    Ok(Outcome::Done)
}

/// Pure.
fn claims(pod: &Pod) -> Vec<PersistentVolumeClaim> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let made = volumes.filter_map(|volume| {
        let template = volume.ephemeral.as_ref()?.volume_claim_template.clone()?;
        let meta = template.metadata.unwrap_or_default();
        Some(PersistentVolumeClaim {
            metadata: ObjectMeta {
                name: Some(format!("{name}-{}", volume.name)),
                namespace: pod.metadata.namespace.clone(),
                labels: meta.labels,
                annotations: meta.annotations,
                owner_references: Some(vec![owner::reference(pod)]),
                ..ObjectMeta::default()
            },
            spec: Some(template.spec),
            status: None,
        })
    });
    made.collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_claim_is_named_after_pod_and_volume() {
        let pod: Pod = from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [], "volumes": [
                {"name": "plain", "emptyDir": {}},
                {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {
                    "metadata": {"labels": {"a": "b"}}, "spec": {"storageClassName": "x"}}}}]},
        }))
        .unwrap();
        let made = claims(&pod);
        assert_eq!(made.len(), 1);
        assert_eq!(made[0].metadata.name.as_deref(), Some("p-scratch"));
        assert_eq!(made[0].metadata.owner_references.as_ref().unwrap()[0].uid, "u");
    }
}
