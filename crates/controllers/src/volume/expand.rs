//! Claims that ask for more than they have. Local volumes are directories: growing is a new number.
//!
//! In: claims, volumes. Out: capacities of volumes of the built-in provisioner; others are expanded
//! by their CSI drivers. Upstream: `pkg/controller/volume/expand`.

use std::sync::Arc;

use client::{Api, Lister, ObjectKey, Outcome, PostParams, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity::Amount;

use super::local_path;
use super::plan::PROVISIONED_BY;
use crate::context::Context;
use crate::descriptor::{Descriptor, Row, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "persistentvolume-expander-controller",
    account: "expand-controller",
    component: "volume_expand",
    queue: "volume_expand",
    workers: 1,
    new: |setup| {
        Some(Controller {
            context: setup.context.clone(),
            claims: setup.lister(),
            volumes: setup.lister(),
        })
    },
    watches: &[&own::<PersistentVolumeClaim>()],
    reconcile: |this, key| {
        Box::pin(async move {
            let claim = this.claims.get_key(&key);
            let name = claim.as_ref().and_then(|claim| claim.spec.as_ref()?.volume_name.clone());
            let volume = name.and_then(|name| this.volumes.get("", &name));
            match (claim, volume) {
                (Some(claim), Some(volume)) => grow(&this.context, &key, &claim, &volume).await,
                _ => Ok(Outcome::Done),
            }
        })
    },
};

struct Controller {
    context: Context,
    claims: Lister<PersistentVolumeClaim>,
    volumes: Lister<PersistentVolume>,
}

async fn grow(
    context: &Context,
    key: &ObjectKey,
    claim: &Arc<PersistentVolumeClaim>,
    volume: &Arc<PersistentVolume>,
) -> Result<Outcome> {
    let Some(size) = wanted(claim, volume) else {
        return Ok(Outcome::Done);
    };
    let mut larger = (**volume).clone();
    let capacity = larger.spec.get_or_insert_default().capacity.get_or_insert_default();
    capacity.insert("storage".into(), size.clone());
    let volumes: Api<PersistentVolume> = context.client.api(None);
    let name = volume.metadata.name.clone().unwrap_or_default();
    volumes.replace(&name, &PostParams::default(), &larger).await?;
    let mut grown = (**claim).clone();
    let capacity = grown.status.get_or_insert_default().capacity.get_or_insert_default();
    capacity.insert("storage".into(), size);
    let claims: Api<PersistentVolumeClaim> = context.client.api(Some(&key.namespace));
    claims.replace_status(&key.name, &PostParams::default(), &grown).await?;
    Ok(Outcome::Done)
}

/// The size to grow to. Pure.
fn wanted(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<Quantity> {
    let annotations = volume.metadata.annotations.as_ref()?;
    if annotations.get(PROVISIONED_BY).map(String::as_str) != Some(local_path::PROVISIONER) {
        return None;
    }
    let status = claim.status.as_ref().filter(|status| status.phase.as_deref() == Some("Bound"))?;
    let asked = claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?.get("storage")?;
    let has = status.capacity.as_ref()?.get("storage")?;
    let amount = |size: &Quantity| Amount::parse(&size.0).unwrap_or_default();
    (amount(asked) > amount(has)).then(|| asked.clone())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    #[test]
    fn only_our_volumes_grow_and_never_shrink() {
        let check = |by: &str, asked: &str, expected: Option<&str>| {
            let claim = from_value(json!({"metadata": {},
                "spec": {"resources": {"requests": {"storage": asked}}},
                "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}))
            .unwrap();
            let volume =
                from_value(json!({"metadata": {"annotations": {PROVISIONED_BY: by}}})).unwrap();
            assert_eq!(wanted(&claim, &volume).map(|size| size.0).as_deref(), expected);
        };
        check(local_path::PROVISIONER, "2Gi", Some("2Gi"));
        check(local_path::PROVISIONER, "1Gi", None);
        check(local_path::PROVISIONER, "1Mi", None);
        check("other", "2Gi", None);
    }
}
