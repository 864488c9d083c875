//! Restricts the audiences of service account tokens that a node requests: a pod must need them, so that a
//! stolen node certificate gives no access outside of the cluster.
//!
//! A pod needs an audience if one of its projected volumes names it, or a CSI driver of one of its
//! volumes does (`tokenRequests`). An empty audience, which means the API server's own, is treated alike.
//! Any other audience needs the verb `request-serviceaccounts-token-audience` on it, as a resource.
//! Upstream: `validateNodeServiceAccountAudience`, gate `ServiceAccountNodeAudienceRestriction`.

use apiserver::StatusError;
use apiserver::admission::Attributes;
use apiserver::authz::{self, Authorizer, Decision};
use apiserver::request::RequestInfo;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, Pod, Volume,
};
use k8s_openapi::api::storage::v1::CSIDriver;
use machinery::status::Reason;

const VERB: &str = "request-serviceaccounts-token-audience";

/// The CSI drivers that replace in-tree volume plugins.
const AZURE_DISK: &str = "disk.csi.azure.com";
const AZURE_FILE: &str = "file.csi.azure.com";
const CINDER: &str = "cinder.csi.openstack.org";
const EBS: &str = "ebs.csi.aws.com";
const GCE: &str = "pd.csi.storage.gke.io";
const PORTWORX: &str = "pxd.portworx.com";
const VSPHERE: &str = "csi.vsphere.vmware.com";

pub(super) async fn check(
    attributes: &Attributes<'_>,
    request: &TokenRequest,
    pod: &Pod,
    authorizer: &dyn Authorizer,
) -> Result<(), StatusError> {
    let spec = request.spec.as_ref();
    let audience = match spec.and_then(|spec| spec.audiences.as_deref()).unwrap_or_default() {
        [] => "",
        [one] => one,
        _ => return Err(attributes.forbidden("node may only request 0 or 1 audiences")),
    };
    match is_of(attributes, pod, audience).await? {
        Verdict::Its => return Ok(()),
        Verdict::NotIts => {}
        Verdict::Unclear(why) => {
            let why = format!("error validating audience {audience:?}: {why}");
            return Err(attributes.forbidden(why));
        }
    }
    let user = &attributes.ctx.user;
    let question = RequestInfo {
        is_resource: true,
        verb: VERB.into(),
        version: "v1".into(),
        namespace: attributes.key.namespace.clone(),
        resource: audience.into(),
        name: attributes.key.name.clone(),
        ..RequestInfo::default()
    };
    let question = authz::Attributes { user: user.clone(), request: question };
    if matches!(authorizer.authorize(&question).await, Decision::Allow { .. }) {
        return Ok(());
    }
    Err(attributes.forbidden(format!(
        "audience {audience:?} not found in pod spec volume, {} is not authorized to request tokens for this audience",
        user.name
    )))
}

/// Whether the pod needs the audience.
enum Verdict {
    Its,
    NotIts,
    /// An object that its volumes refer to is missing.
    Unclear(String),
}

/// A volume that names the audience outweighs others that cannot be checked.
async fn is_of(
    attributes: &Attributes<'_>,
    pod: &Pod,
    audience: &str,
) -> Result<Verdict, StatusError> {
    let mut missing = vec![];
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let sources = volume.projected.iter().flat_map(|one| one.sources.iter().flatten());
        let mut tokens = sources.filter_map(|source| source.service_account_token.as_ref());
        if tokens.any(|token| token.audience.as_deref().unwrap_or_default() == audience) {
            return Ok(Verdict::Its);
        }
        match of_driver(attributes, pod, volume, audience).await {
            Ok(true) => return Ok(Verdict::Its),
            Ok(false) => {}
            Err(error) if error.is(Reason::NotFound) => missing.push(error.message.clone()),
            Err(error) => return Err(error),
        }
    }
    Ok(crate::aggregate(missing).map_or(Verdict::NotIts, Verdict::Unclear))
}

/// Whether the volume's driver requests tokens for the audience.
async fn of_driver(
    attributes: &Attributes<'_>,
    pod: &Pod,
    volume: &Volume,
    audience: &str,
) -> Result<bool, StatusError> {
    let template = volume.ephemeral.as_ref().and_then(|one| one.volume_claim_template.as_ref());
    let driver = if template.is_some() {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        driver_of_claim(attributes, &format!("{name}-{}", volume.name)).await?
    } else if let Some(source) = &volume.persistent_volume_claim {
        driver_of_claim(attributes, &source.claim_name).await?
    } else if let Some(source) = &volume.csi {
        Some(source.driver.clone())
    } else {
        inline_driver(volume).map(str::to_owned)
    };
    let Some(driver) = driver.filter(|driver| !driver.is_empty()) else { return Ok(false) };
    let found = attributes.registry.find::<CSIDriver>("", &driver).await?;
    let missing = || StatusError::not_found("storage.k8s.io", "csidriver", &driver);
    let spec = found.ok_or_else(missing)?.spec;
    Ok(spec.token_requests.iter().flatten().any(|request| request.audience == audience))
}

async fn driver_of_claim(
    attributes: &Attributes<'_>,
    name: &str,
) -> Result<Option<String>, StatusError> {
    let registry = attributes.registry;
    let namespace = attributes.key.namespace.as_str();
    let claim = registry.find::<PersistentVolumeClaim>(namespace, name).await?;
    let claim = claim.ok_or_else(|| StatusError::not_found("", "persistentvolumeclaim", name))?;
    let name = claim.spec.and_then(|spec| spec.volume_name).unwrap_or_default();
    let volume = registry.find::<PersistentVolume>("", &name).await?;
    let volume = volume.ok_or_else(|| StatusError::not_found("", "persistentvolume", &name))?;
    let spec = volume.spec.unwrap_or_default();
    let driver = spec.csi.as_ref().map(|csi| csi.driver.as_str());
    Ok(driver.or_else(|| persistent_driver(&spec)).map(str::to_owned))
}

fn first(table: &[(bool, &'static str)]) -> Option<&'static str> {
    table.iter().find(|(is_it, _)| *is_it).map(|(_, driver)| *driver)
}

fn inline_driver(volume: &Volume) -> Option<&'static str> {
    first(&[
        (volume.aws_elastic_block_store.is_some(), EBS),
        (volume.azure_disk.is_some(), AZURE_DISK),
        (volume.azure_file.is_some(), AZURE_FILE),
        (volume.cinder.is_some(), CINDER),
        (volume.gce_persistent_disk.is_some(), GCE),
        (volume.portworx_volume.is_some(), PORTWORX),
        (volume.vsphere_volume.is_some(), VSPHERE),
    ])
}

fn persistent_driver(spec: &PersistentVolumeSpec) -> Option<&'static str> {
    first(&[
        (spec.aws_elastic_block_store.is_some(), EBS),
        (spec.azure_disk.is_some(), AZURE_DISK),
        (spec.azure_file.is_some(), AZURE_FILE),
        (spec.cinder.is_some(), CINDER),
        (spec.gce_persistent_disk.is_some(), GCE),
        (spec.portworx_volume.is_some(), PORTWORX),
        (spec.vsphere_volume.is_some(), VSPHERE),
    ])
}
