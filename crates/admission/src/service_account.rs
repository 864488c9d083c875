//! Every pod runs as a service account, and finds its token, the cluster's authority and its
//! namespace in a volume.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{
    ConfigMapProjection, Container, DownwardAPIProjection, DownwardAPIVolumeFile, KeyToPath,
    ObjectFieldSelector, Pod, PodSpec, ProjectedVolumeSource, ServiceAccount,
    ServiceAccountTokenProjection, Volume, VolumeMount, VolumeProjection,
};
use machinery::Object;

const DEFAULT: &str = "default";
const MOUNT_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const MIRROR: &str = "kubernetes.io/config.mirror";
/// An hour and a few seconds, by which upstream tells its own tokens from others.
const EXPIRATION_SECONDS: i64 = 3607;
const MODE: i32 = 0o644;

pub(crate) struct ServiceAccounts;

#[async_trait]
impl Plugin for ServiceAccounts {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let registry = attributes.registry;
        let namespace = attributes.key.namespace.clone();
        let Some(pod) = attributes.object.as_mut().and_then(|object| object.downcast_mut::<Pod>())
        else {
            return Ok(());
        };
        // Mirror pods stand for what a node runs by itself: they have no account.
        if pod.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(MIRROR)) {
            return Ok(());
        }
        let pod_name = pod.name().to_owned();
        let spec = pod.spec.get_or_insert_default();
        let name = spec.service_account_name.get_or_insert_with(|| DEFAULT.into()).clone();
        spec.service_account = Some(name.clone());
        let found = registry.find::<ServiceAccount>(&namespace, &name).await?;
        let missing = || {
            let why = format!(
                "error looking up service account {namespace}/{name}: serviceaccount {name:?} not found"
            );
            StatusError::forbidden("", "pods", &pod_name, why)
        };
        let account = found.ok_or_else(missing)?;
        if automounts(spec, &account) {
            mount_token(spec);
        }
        if spec.image_pull_secrets.as_ref().is_none_or(Vec::is_empty) {
            spec.image_pull_secrets = account.image_pull_secrets.clone();
        }
        Ok(())
    }
}

/// The pod's word counts before the account's.
fn automounts(spec: &PodSpec, account: &ServiceAccount) -> bool {
    spec.automount_service_account_token.or(account.automount_service_account_token).unwrap_or(true)
}

fn mount_token(spec: &mut PodSpec) {
    let volumes = spec.volumes.iter().flatten();
    let existing =
        volumes.map(|volume| volume.name.clone()).find(|name| name.starts_with("kube-api-access-"));
    let (name, fresh) = match existing {
        Some(name) => (name, false),
        None => (format!("kube-api-access-{}", base::rng::alphanumeric(5)), true),
    };
    let mut mounted = false;
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        mounted |= mount(container, &name);
    }
    if fresh && mounted {
        spec.volumes.get_or_insert_default().push(token_volume(name));
    }
}

/// `false` where the container has something of its own there.
fn mount(container: &mut Container, volume: &str) -> bool {
    let mounts = container.volume_mounts.get_or_insert_default();
    if mounts.iter().any(|mount| mount.mount_path == MOUNT_PATH) {
        return false;
    }
    mounts.push(VolumeMount {
        name: volume.into(),
        mount_path: MOUNT_PATH.into(),
        read_only: Some(true),
        ..VolumeMount::default()
    });
    true
}

fn token_volume(name: String) -> Volume {
    let token = ServiceAccountTokenProjection {
        path: "token".into(),
        expiration_seconds: Some(EXPIRATION_SECONDS),
        audience: None,
    };
    let authority = ConfigMapProjection {
        name: "kube-root-ca.crt".into(),
        items: Some(vec![KeyToPath { key: "ca.crt".into(), path: "ca.crt".into(), mode: None }]),
        optional: None,
    };
    let namespace = DownwardAPIVolumeFile {
        path: "namespace".into(),
        field_ref: Some(ObjectFieldSelector {
            api_version: Some("v1".into()),
            field_path: "metadata.namespace".into(),
        }),
        ..DownwardAPIVolumeFile::default()
    };
    let sources = vec![
        VolumeProjection { service_account_token: Some(token), ..VolumeProjection::default() },
        VolumeProjection { config_map: Some(authority), ..VolumeProjection::default() },
        VolumeProjection {
            downward_api: Some(DownwardAPIProjection { items: Some(vec![namespace]) }),
            ..VolumeProjection::default()
        },
    ];
    let projected = ProjectedVolumeSource { default_mode: Some(MODE), sources: Some(sources) };
    Volume { name, projected: Some(projected), ..Volume::default() }
}
