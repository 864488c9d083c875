//! ServiceAccount: sets every pod's service account, and mounts a volume with its token, the cluster's CA
//! and its namespace.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{
    ConfigMapProjection, Container, DownwardAPIProjection, DownwardAPIVolumeFile, KeyToPath,
    ObjectFieldSelector, Pod, PodSpec, ProjectedVolumeSource, ServiceAccount,
    ServiceAccountTokenProjection, Volume, VolumeMount, VolumeProjection,
};
use machinery::Object;

use crate::Row;

const DEFAULT: &str = "default";
const MOUNT_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// An annotation of an account: its pods may use only its own secrets.
const MOUNTABLE_ONLY: &str = "kubernetes.io/enforce-mountable-secrets";
const MIRROR: &str = "kubernetes.io/config.mirror";
/// An hour and a few seconds, which marks upstream's own tokens.
const EXPIRATION_SECONDS: i64 = 3607;
const MODE: i32 = 0o644;

pub(crate) const ROW: Row = Row::enabled("ServiceAccount", |_| Ok(Box::new(ServiceAccounts)));

pub(crate) struct ServiceAccounts;

#[async_trait]
impl Plugin for ServiceAccounts {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") || attributes.operation != Operation::Create {
            return Ok(());
        }
        let registry = attributes.registry;
        let namespace = attributes.key.namespace.clone();
        let Some(pod) = attributes.object.as_mut().and_then(|object| object.downcast_mut::<Pod>())
        else {
            return Ok(());
        };
        // Mirror pods represent pods that the node itself started: they have no account.
        if pod.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(MIRROR)) {
            return Ok(());
        }
        let pod_name = pod.name().to_owned();
        let spec = pod.spec.get_or_insert_default();
        let asked = spec.service_account_name.take().filter(|name| !name.is_empty());
        let name = asked.unwrap_or_else(|| DEFAULT.into());
        spec.service_account_name = Some(name.clone());
        spec.service_account = Some(name.clone());
        let found = registry.known::<ServiceAccount>(&namespace, &name).await?;
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

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let (create, sub) =
            (attributes.operation == Operation::Create, attributes.ctx.subresource.as_str());
        let Some(pod) = attributes.object_as::<Pod>() else { return Ok(()) };
        let Some(spec) = &pod.spec else { return Ok(()) };
        let judged = (create && sub.is_empty()) || (!create && sub == "ephemeralcontainers");
        if !judged {
            return Ok(());
        }
        let is_mirror =
            pod.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(MIRROR));
        if is_mirror {
            let wrong = mirror_mistake(spec);
            return wrong.map_or(Ok(()), |why| Err(attributes.forbidden(why)));
        }
        let name = spec.service_account_name.as_deref().unwrap_or_default();
        let namespace = &attributes.key.namespace;
        if name.is_empty() {
            let why = format!("no service account specified for pod {namespace}/{}", pod.name());
            return Err(attributes.forbidden(why));
        }
        let found = attributes.registry.known::<ServiceAccount>(namespace, name).await?;
        let missing = || {
            attributes.forbidden(format!(
                "error looking up service account {namespace}/{name}: serviceaccount {name:?} not found"
            ))
        };
        let account = found.ok_or_else(missing)?;
        let annotations = account.metadata.annotations.as_ref();
        if annotations.and_then(|map| map.get(MOUNTABLE_ONLY)).map(String::as_str) != Some("true") {
            return Ok(());
        }
        secret_mistake(spec, &account).map_or(Ok(()), |why| Err(attributes.forbidden(why)))
    }
}

/// The forbidden reference of a mirror pod, if any.
fn mirror_mistake(spec: &PodSpec) -> Option<&'static str> {
    if spec.service_account_name.as_deref().is_some_and(|name| !name.is_empty()) {
        return Some("a mirror pod may not reference service accounts");
    }
    let volumes = || spec.volumes.iter().flatten();
    let projections = || {
        volumes()
            .filter_map(|volume| volume.projected.as_ref())
            .flat_map(|one| one.sources.iter().flatten())
    };
    let secrets = volumes().any(|volume| volume.secret.is_some())
        || projections().any(|source| source.secret.is_some())
        || spec.image_pull_secrets.iter().flatten().next().is_some()
        || env_secrets(spec).next().is_some();
    if secrets {
        return Some("a mirror pod may not reference secrets");
    }
    projections()
        .any(|source| source.service_account_token.is_some())
        .then_some("a mirror pod may not use service account token volume projections")
}

/// Secrets in containers' environments: kind of container, its name, the variable (none: the whole
/// secret), the secret.
fn env_secrets(spec: &PodSpec) -> impl Iterator<Item = (&'static str, &str, Option<&str>, &str)> {
    let init = spec.init_containers.iter().flatten().map(|one| ("init container", one));
    let all = init.chain(spec.containers.iter().map(|one| ("container", one)));
    all.flat_map(|(kind, container)| {
        let name = container.name.as_str();
        let single = container.env.iter().flatten().filter_map(move |env| {
            let secret = env.value_from.as_ref()?.secret_key_ref.as_ref()?;
            Some((kind, name, Some(env.name.as_str()), secret.name.as_str()))
        });
        let whole = container.env_from.iter().flatten().filter_map(move |from| {
            Some((kind, name, None, from.secret_ref.as_ref()?.name.as_str()))
        });
        single.chain(whole)
    })
}

/// A secret that the account does not list, if it allows only listed ones.
fn secret_mistake(spec: &PodSpec, account: &ServiceAccount) -> Option<String> {
    let listed = |secret: &str| {
        account.secrets.iter().flatten().any(|one| one.name.as_deref() == Some(secret))
    };
    let who = account.name();
    let tail =
        format!("is not allowed because service account {who} does not reference that secret");
    for volume in spec.volumes.iter().flatten() {
        let secret = volume.secret.as_ref().and_then(|one| one.secret_name.as_deref());
        if let Some(secret) = secret.filter(|secret| !listed(secret)) {
            return Some(format!("volume with secret.secretName={secret:?} {tail}"));
        }
    }
    for (kind, container, variable, secret) in env_secrets(spec) {
        if !listed(secret) {
            let what = match variable {
                Some(variable) => format!("with envVar {variable} "),
                None => "with envFrom ".into(),
            };
            return Some(format!(
                "{kind} {container} {what}referencing secret.secretName={secret:?} {tail}"
            ));
        }
    }
    let pulls =
        |secret: &str| account.image_pull_secrets.iter().flatten().any(|one| one.name == secret);
    let bad = spec.image_pull_secrets.iter().flatten().find(|one| !pulls(&one.name))?;
    Some(format!(
        "imagePullSecret {:?} is not allowed because service account {who} does not reference that imagePullSecret",
        bad.name
    ))
}

/// The pod's field overrides the account's.
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

/// `false` if the container already has a mount at that path.
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
