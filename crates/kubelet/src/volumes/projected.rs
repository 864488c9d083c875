//! Files from several sources in one volume, among them tokens of the pod's service account.

use std::collections::BTreeMap;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, ProjectedVolumeSource, Volume, VolumeProjection};

use super::atomic::{File, Payload};
use super::files::{self, Medium, fs_group};
use super::payload::{self, PayloadError};
use super::plugin::{Host, Mounted, References, Request, Source, VolumeError, VolumePlugin};
use crate::pod::env::Surroundings;
use crate::pod::objects::{ObjectError, Objects, TokenSpec};

pub struct ProjectedPlugin;

const NAME: &str = "projected";

#[async_trait]
impl VolumePlugin for ProjectedPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.projected.is_some()
    }

    fn references(&self, volume: &Volume) -> References {
        let parts = || volume.projected.iter().flat_map(|source| source.sources.iter().flatten());
        let maps = parts().filter_map(|part| Some(part.config_map.as_ref()?.name.clone()));
        let secrets = parts().filter_map(|part| Some(part.secret.as_ref()?.name.clone()));
        References { config_maps: maps.collect(), secrets: secrets.collect() }
    }

    fn refreshes(&self) -> bool {
        true
    }

    fn is_local_storage(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let (pod, volume) = (request.pod, request.source.volume);
        let Some(source) = &volume.projected else { return Err(VolumeError::Unsupported) };
        let (tokens, again) = tokens(&host.objects, pod, source).await;
        let (owner, has_group) = (one_user(pod), fs_group(pod).is_some());
        let files = projected(pod, source, request.around, &tokens, owner, has_group)?;
        let mounted = files::write(host, request, NAME, Medium::Memory, files).await?;
        Ok(Mounted { again, ..mounted })
    }
}

/// The volume's tokens, and when the first of them must be renewed.
async fn tokens(
    objects: &Objects,
    pod: &Pod,
    source: &ProjectedVolumeSource,
) -> (Tokens, Option<Timestamp>) {
    let (mut out, mut again) = (Tokens::new(), None);
    for source in source.sources.iter().flatten() {
        let Some(source) = &source.service_account_token else { continue };
        let seconds = source.expiration_seconds.unwrap_or(3600);
        let token = objects.token(&TokenSpec::of(pod, source.audience.as_deref(), seconds)).await;
        again = [again, token.as_ref().ok().map(|token| token.refresh)].into_iter().flatten().min();
        let text = token.map(|token| token.text);
        out.insert(source.path.clone(), text);
    }
    (out, again)
}

/// The user of every container, if the spec sets one for all.
fn one_user(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let default = spec.security_context.as_ref().and_then(|c| c.run_as_user);
    let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut users = all.map(|container| {
        container.security_context.as_ref().and_then(|c| c.run_as_user).or(default)
    });
    let first = users.next()??;
    users.all(|user| user == Some(first)).then(|| u32::try_from(first).ok()).flatten()
}

/// Tokens by the path of their file, requested by the caller.
pub type Tokens = BTreeMap<String, Result<String, ObjectError>>;

pub fn projected(
    pod: &Pod,
    source: &ProjectedVolumeSource,
    around: &Surroundings<'_>,
    tokens: &Tokens,
    token_owner: Option<u32>,
    has_group: bool,
) -> Result<Payload, VolumeError> {
    let default_mode = payload::mode(source.default_mode, payload::DEFAULT_MODE);
    let mut out = Payload::new();
    for part in source.sources.iter().flatten() {
        out.extend(one_projection(pod, part, around, default_mode)?);
        if let Some(token) = &part.service_account_token {
            let text = match tokens.get(&token.path) {
                Some(Ok(text)) => text.clone(),
                Some(Err(error)) => return Err(PayloadError::Token(error.to_string()).into()),
                None => return Err(PayloadError::Token("not requested".into()).into()),
            };
            let mode = if token_owner.is_some() || has_group { 0o600 } else { default_mode };
            out.insert(
                token.path.clone(),
                File { bytes: text.into_bytes(), mode, owner: token_owner },
            );
        }
    }
    Ok(out)
}

fn one_projection(
    pod: &Pod,
    part: &VolumeProjection,
    around: &Surroundings<'_>,
    default_mode: u32,
) -> Result<Payload, VolumeError> {
    let mut out = Payload::new();
    if let Some(source) = &part.config_map {
        let map = around.sources.config_map(&source.name)?;
        let optional = source.optional == Some(true);
        out.extend(payload::config_map(
            &source.name,
            map,
            source.items.as_ref(),
            optional,
            default_mode,
        )?);
    }
    if let Some(source) = &part.secret {
        let object = around.sources.secret(&source.name)?;
        let optional = source.optional == Some(true);
        out.extend(payload::secret(
            &source.name,
            object,
            source.items.as_ref(),
            optional,
            default_mode,
        )?);
    }
    if let Some(source) = &part.downward_api {
        let items = source.items.as_deref().unwrap_or_default();
        out.extend(payload::downward_api(pod, items, around, default_mode)?);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::payload::tests::show;
    use super::*;
    use crate::pod::downward::Addresses;
    use crate::pod::env::Sources;
    use crate::resources::ResourceList;
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;
    use std::sync::Arc;

    #[test]
    fn a_service_account_volume() {
        let root: ConfigMap =
            serde_json::from_value(json!({"data": {"ca.crt": "CA"}})).expect("a map");
        let sources = Sources {
            config_maps: [("kube-root-ca.crt".to_string(), Arc::new(root))].into(),
            ..Sources::default()
        };
        let around = Surroundings {
            addresses: &Addresses::default(),
            allocatable: &ResourceList::new(),
            sources: &sources,
        };
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns"}}))
                .expect("a pod");
        let source: ProjectedVolumeSource = serde_json::from_value(json!({"defaultMode": 420, "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]}))
        .expect("a source");
        let tokens = Tokens::from([("token".to_string(), Ok("T".to_string()))]);
        let got = projected(&pod, &source, &around, &tokens, None, false);
        assert_eq!(show(got), "ca.crt:644:CA namespace:644:ns token:644:T");
        let owned = projected(&pod, &source, &around, &tokens, Some(1000), false);
        assert_eq!(show(owned), "ca.crt:644:CA namespace:644:ns token:600:T");
    }
}
