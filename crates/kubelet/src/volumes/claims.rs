//! Resolves a pod's claims to the PersistentVolumes that they are bound to.
//!
//! In: the pod. Out: its claims, by the volume's name.
//! Upstream: `pkg/kubelet/volumemanager/populator`.

use std::collections::BTreeMap;

use client::{Api, Client, ErrorExt};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};

use super::plugin::{Bound, VolumeError, is_block};
use crate::names;

/// The resolved claims, by volume name; volumes without a claim are left out.
pub type Claims = BTreeMap<String, Result<Bound, VolumeError>>;

pub async fn resolve(client: &Client, pod: &Pod) -> Claims {
    let mut out = Claims::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        if let Some(name) = claim_of(names::name(pod), volume) {
            out.insert(volume.name.clone(), bound(client, pod, volume, &name).await);
        }
    }
    out
}

/// The claim of a pod's volume.
pub fn claim_of(pod: &str, volume: &Volume) -> Option<String> {
    let named = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.clone());
    named.or_else(|| volume.ephemeral.as_ref().map(|_| format!("{pod}-{}", volume.name)))
}

async fn bound(
    client: &Client,
    pod: &Pod,
    wanted: &Volume,
    name: &str,
) -> Result<Bound, VolumeError> {
    let unread = |error: client::Error| VolumeError::Claim(error.text());
    let claims: Api<PersistentVolumeClaim> = client.api(Some(names::namespace(pod)));
    let claim = claims.get(name).await.map_err(unread)?;
    let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    let named = named.filter(|name| !name.is_empty());
    let named =
        named.ok_or_else(|| VolumeError::Claim("persistentvolumeclaim is not bound".into()))?;
    let volume = client.api::<PersistentVolume>(None).get(named).await.map_err(unread)?;
    check_mode(pod, &wanted.name, &volume)?;
    let source = wanted.persistent_volume_claim.as_ref();
    let read_only = source.and_then(|source| source.read_only) == Some(true);
    Ok(Bound { claim, volume, read_only })
}

/// Checks that the containers use the volume according to its volumeMode.
/// Upstream: createVolumeSpec.
fn check_mode(pod: &Pod, name: &str, volume: &PersistentVolume) -> Result<(), VolumeError> {
    let mode = if is_block(volume) { "Block" } else { "Filesystem" };
    let Some(spec) = &pod.spec else { return Ok(()) };
    let init = spec.init_containers.iter().flatten();
    let (mut is_mounted, mut is_mapped) = (false, false);
    for one in init.chain(&spec.containers) {
        is_mounted |= one.volume_mounts.iter().flatten().any(|mount| mount.name == name);
        is_mapped |= one.volume_devices.iter().flatten().any(|device| device.name == name);
    }
    let wrong = |field: &str| {
        let text = format!("volume {name} has volumeMode {mode}, but is specified in {field}");
        Err(VolumeError::Claim(text))
    };
    match mode {
        "Block" if is_mounted => wrong("volumeMounts"),
        "Filesystem" if is_mapped => wrong("volumeDevices"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn volumes_are_used_by_their_mode() {
        let check = |mode: &str, container: Value, expected: Result<(), &str>| {
            let volume = serde_json::from_value(json!({"spec": {"volumeMode": mode}}));
            let pod = serde_json::from_value(json!({"spec": {"containers": [container]}}));
            let got = check_mode(&pod.expect("a pod"), "v", &volume.expect("a volume"));
            let got = got.map_err(|error| error.to_string());
            assert_eq!(got, expected.map_err(str::to_string));
        };
        let mounts = json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let maps = json!({"name": "c", "volumeDevices": [{"name": "v", "devicePath": "/dev/v"}]});
        check("Filesystem", mounts.clone(), Ok(()));
        check("Block", maps.clone(), Ok(()));
        check("Block", json!({"name": "c"}), Ok(()));
        let text = "volume v has volumeMode Block, but is specified in volumeMounts";
        check("Block", mounts, Err(text));
        let text = "volume v has volumeMode Filesystem, but is specified in volumeDevices";
        check("Filesystem", maps, Err(text));
    }
}
