//! Rejects mirror pods that refer to API objects: otherwise the node could read these.
//!
//! In: the spec of a pod that a node wants to create. Out: the first reference in it.
//! Invariant: a volume of a type that is not in these tables is rejected.
//! Upstream: `HasAPIObjectReference` of `pkg/api/pod`, with its words.

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, PodSpec, VolumeProjection};
use serde_json::Value;

/// An object reference of a pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reference {
    /// Objects of this resource.
    Kind(&'static str),
    /// An unknown source, which may refer to any object.
    Unknown(String),
}

/// Volume types that need no API object, if they name no secret.
const PLAIN: &[&str] = &[
    "awsElasticBlockStore",
    "azureDisk",
    "cephfs",
    "cinder",
    "downwardAPI",
    "emptyDir",
    "fc",
    "flexVolume",
    "flocker",
    "gcePersistentDisk",
    "gitRepo",
    "hostPath",
    "image",
    "iscsi",
    "nfs",
    "photonPersistentDisk",
    "portworxVolume",
    "quobyte",
    "rbd",
    "scaleIO",
    "storageos",
    "vsphereVolume",
];

/// Volume types that need API objects, with the resource.
const REFERRING: &[(&str, &str)] = &[
    ("configMap", "configmaps (via configmap volumes)"),
    ("secret", "secrets (via secret volumes)"),
    ("csi", "csidrivers (via CSI volumes)"),
    ("glusterfs", "endpoints (via glusterFS volumes)"),
    ("persistentVolumeClaim", "persistentvolumeclaims"),
    ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
    ("azureFile", "secrets (via azureFile volumes)"),
];

/// Fields of volume sources that name a secret.
const SECRETS: &[&str] = &["secretRef", "nodePublishSecretRef", "secretName"];

/// `Err` with the first reference, if there is one.
pub(super) fn none(spec: &PodSpec) -> Result<(), Reference> {
    let refers = |is_so: bool, kind| if is_so { Err(Reference::Kind(kind)) } else { Ok(()) };
    let account = spec.service_account_name.as_deref().unwrap_or_default();
    refers(!account.is_empty(), "serviceaccounts")?;
    refers(spec.image_pull_secrets.as_ref().is_some_and(|all| !all.is_empty()), "secrets")?;
    refers(environment(spec, |names| names.secret), "secrets")?;
    refers(environment(spec, |names| names.config_map), "configmaps")?;
    refers(spec.resource_claims.as_ref().is_some_and(|all| !all.is_empty()), "resourceclaims")?;
    for volume in spec.volumes.iter().flatten() {
        let sources = volume.projected.iter().flat_map(|one| one.sources.iter().flatten());
        sources.clone().try_for_each(|source| projection(source, &volume.name))?;
        if volume.projected.is_none() {
            let tree = serde_json::to_value(volume).unwrap_or_default();
            source(&tree, &volume.name)?;
        }
    }
    Ok(())
}

/// All fields of a volume except its name are its source.
fn source(volume: &Value, name: &str) -> Result<(), Reference> {
    let fields = volume.as_object().into_iter().flatten().filter(|(key, _)| *key != "name");
    let mut is_known = false;
    for (key, source) in fields {
        if let Some((_, kind)) = REFERRING.iter().find(|(known, _)| known == key) {
            return Err(Reference::Kind(kind));
        }
        if SECRETS.iter().any(|field| source.get(field).is_some_and(|value| !value.is_null())) {
            return Err(Reference::Kind("secrets"));
        }
        is_known = PLAIN.contains(&key.as_str());
        if !is_known {
            break;
        }
    }
    match is_known {
        true => Ok(()),
        false => Err(Reference::Unknown(format!("unknown volume type for volume  {name:?}"))),
    }
}

fn projection(source: &VolumeProjection, volume: &str) -> Result<(), Reference> {
    let kinds = [
        (source.config_map.is_some(), "configmaps (via projected volumes)"),
        (source.secret.is_some(), "secrets (via projected volumes)"),
        (source.service_account_token.is_some(), "serviceaccounts (via projected volumes)"),
        (source.cluster_trust_bundle.is_some(), "clustertrustbundles"),
        (source.pod_certificate.is_some(), "podcertificates"),
    ];
    if let Some((_, kind)) = kinds.into_iter().find(|(is_so, _)| *is_so) {
        return Err(Reference::Kind(kind));
    }
    match source.downward_api {
        Some(_) => Ok(()),
        None => Err(Reference::Unknown(format!("unknown source for projected volume {volume:?}"))),
    }
}

/// The kinds of objects that a container's environment uses.
#[derive(Clone, Copy, Default)]
struct Named {
    secret: bool,
    config_map: bool,
}

fn environment(spec: &PodSpec, what: fn(Named) -> bool) -> bool {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let containers = containers.map(|Container { env, env_from, .. }| (env, env_from));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|EphemeralContainer { env, env_from, .. }| (env, env_from));
    containers.chain(ephemeral).any(|(env, env_from)| {
        let from = env_from.iter().flatten().map(|from| Named {
            secret: from.secret_ref.is_some(),
            config_map: from.config_map_ref.is_some(),
        });
        let single = env.iter().flatten().filter_map(|env| env.value_from.as_ref());
        let single = single.map(|source| Named {
            secret: source.secret_key_ref.is_some(),
            config_map: source.config_map_key_ref.is_some(),
        });
        from.chain(single).any(what)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(spec: Value, expected: Result<(), &str>) {
        let typed: PodSpec = serde_json::from_value(spec.clone()).expect("a spec");
        let told = none(&typed).map_err(|reference| match reference {
            Reference::Kind(kind) => kind.to_owned(),
            Reference::Unknown(what) => what,
        });
        assert_eq!(told.as_ref().map(|_| ()).map_err(String::as_str), expected, "{spec}");
    }

    #[test]
    fn volumes_that_need_objects_are_refused() {
        let volume = |source: Value, expected| {
            let mut one = source;
            one["name"] = "v".into();
            check(json!({"containers": [], "volumes": [one]}), expected);
        };
        for (source, kind) in [
            (json!({"csi": {"driver": "d"}}), "csidrivers (via CSI volumes)"),
            (
                json!({"csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}}),
                "csidrivers (via CSI volumes)",
            ),
            (json!({"rbd": {"monitors": [], "image": "i", "secretRef": {"name": "s"}}}), "secrets"),
            (json!({"cephfs": {"monitors": [], "secretRef": {"name": "s"}}}), "secrets"),
            (json!({"flexVolume": {"driver": "d", "secretRef": {"name": "s"}}}), "secrets"),
            (
                json!({"iscsi": {"targetPortal": "t", "iqn": "i", "lun": 0, "secretRef": {"name": "s"}}}),
                "secrets",
            ),
            (
                json!({"scaleIO": {"gateway": "g", "system": "s", "secretRef": {"name": "s"}}}),
                "secrets",
            ),
            (json!({"storageos": {"secretRef": {"name": "s"}}}), "secrets"),
            (json!({"cinder": {"volumeID": "v", "secretRef": {"name": "s"}}}), "secrets"),
            (
                json!({"azureFile": {"secretName": "s", "shareName": "x"}}),
                "secrets (via azureFile volumes)",
            ),
            (
                json!({"glusterfs": {"endpoints": "e", "path": "p"}}),
                "endpoints (via glusterFS volumes)",
            ),
            (json!({"secret": {"secretName": "s"}}), "secrets (via secret volumes)"),
            (json!({"configMap": {"name": "c"}}), "configmaps (via configmap volumes)"),
            (json!({"persistentVolumeClaim": {"claimName": "c"}}), "persistentvolumeclaims"),
            (json!({"ephemeral": {}}), "persistentvolumeclaims (via ephemeral volumes)"),
        ] {
            volume(source, Err(kind));
        }
        volume(json!({}), Err("unknown volume type for volume  \"v\""));
        for plain in [
            json!({"hostPath": {"path": "/x"}}),
            json!({"emptyDir": {}}),
            json!({"downwardAPI": {"items": []}}),
            json!({"rbd": {"monitors": [], "image": "i"}}),
            json!({"image": {"reference": "r"}}),
        ] {
            volume(plain, Ok(()));
        }
        for (source, expected) in [
            (json!({"configMap": {"name": "c"}}), Err("configmaps (via projected volumes)")),
            (json!({"secret": {"name": "c"}}), Err("secrets (via projected volumes)")),
            (
                json!({"serviceAccountToken": {"path": "t"}}),
                Err("serviceaccounts (via projected volumes)"),
            ),
            (json!({"clusterTrustBundle": {"path": "t"}}), Err("clustertrustbundles")),
            (
                json!({"podCertificate": {"signerName": "a/b", "keyType": "ED25519"}}),
                Err("podcertificates"),
            ),
            (json!({}), Err("unknown source for projected volume \"v\"")),
            (json!({"downwardAPI": {}}), Ok(())),
        ] {
            volume(json!({"projected": {"sources": [source]}}), expected);
        }
    }

    #[test]
    fn containers_with_references_are_refused() {
        let secret = json!({"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}});
        let map = json!({"configMapRef": {"name": "c"}});
        check(json!({"containers": [{"name": "c", "env": [secret]}]}), Err("secrets"));
        check(
            json!({"containers": [], "initContainers": [{"name": "c", "envFrom": [map]}]}),
            Err("configmaps"),
        );
        check(
            json!({"containers": [], "ephemeralContainers": [{"name": "c", "env": [secret]}]}),
            Err("secrets"),
        );
        check(json!({"containers": [], "serviceAccountName": "a"}), Err("serviceaccounts"));
        check(json!({"containers": [], "imagePullSecrets": [{"name": "a"}]}), Err("secrets"));
        check(json!({"containers": [], "resourceClaims": [{"name": "a"}]}), Err("resourceclaims"));
        let plain = json!({"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}});
        check(json!({"containers": [{"name": "c", "env": [plain]}]}), Ok(()));
    }
}
