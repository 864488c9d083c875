//! The content of ConfigMap, Secret, downward API and projected volumes.
//!
//! In: the volume, the pod, the objects it refers to. Out: files. Pure.
//! Upstream: MakePayload in `pkg/volume/{configmap,secret,projected}`, `downwardapi`.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, ProjectedVolumeSource, Secret, Volume,
    VolumeProjection,
};

use super::atomic::{File, Payload};
use crate::downward::{self, DownwardError};
use crate::env::Surroundings;

/// Why a volume has no content: the text after `MountVolume.SetUp failed for volume "x" : `.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("configmap references non-existent config key: {0}")]
    NoConfigMapKey(String),
    #[error("references non-existent secret key: {0}")]
    NoSecretKey(String),
    #[error(transparent)]
    Downward(#[from] DownwardError),
    #[error("failed to fetch token: {0}")]
    Token(String),
}

pub const DEFAULT_MODE: u32 = 0o644;

fn mode(own: Option<i32>, default: u32) -> u32 {
    own.map_or(default, |mode| mode as u32 & 0o777)
}

fn file(bytes: impl Into<Vec<u8>>, mode: u32) -> File {
    File { bytes: bytes.into(), mode, owner: None }
}

/// Selects keys of one object. `missing` makes the error for an absent key.
fn select(
    data: BTreeMap<&str, Vec<u8>>,
    items: Option<&Vec<KeyToPath>>,
    optional: bool,
    default_mode: u32,
    missing: impl Fn(String) -> PayloadError,
) -> Result<Payload, PayloadError> {
    let Some(items) = items.filter(|items| !items.is_empty()) else {
        let all = data.into_iter().map(|(key, bytes)| (key.to_string(), file(bytes, default_mode)));
        return Ok(all.collect());
    };
    let mut out = Payload::new();
    for item in items {
        match data.get(item.key.as_str()) {
            Some(bytes) => {
                out.insert(item.path.clone(), file(bytes.clone(), mode(item.mode, default_mode)));
            }
            None if optional => {}
            None => return Err(missing(item.key.clone())),
        }
    }
    Ok(out)
}

pub fn config_map(
    name: &str,
    map: Option<&ConfigMap>,
    items: Option<&Vec<KeyToPath>>,
    optional: bool,
    default_mode: u32,
) -> Result<Payload, PayloadError> {
    let Some(map) = map else {
        return if optional {
            Ok(Payload::new())
        } else {
            Err(PayloadError::NoConfigMap(name.into()))
        };
    };
    let text =
        map.data.iter().flatten().map(|(key, value)| (key.as_str(), value.as_bytes().to_vec()));
    let binary =
        map.binary_data.iter().flatten().map(|(key, value)| (key.as_str(), value.0.clone()));
    select(
        text.chain(binary).collect(),
        items,
        optional,
        default_mode,
        PayloadError::NoConfigMapKey,
    )
}

pub fn secret(
    name: &str,
    secret: Option<&Secret>,
    items: Option<&Vec<KeyToPath>>,
    optional: bool,
    default_mode: u32,
) -> Result<Payload, PayloadError> {
    let Some(secret) = secret else {
        return if optional {
            Ok(Payload::new())
        } else {
            Err(PayloadError::NoSecret(name.into()))
        };
    };
    let data = secret.data.iter().flatten().map(|(key, value)| (key.as_str(), value.0.clone()));
    select(data.collect(), items, optional, default_mode, PayloadError::NoSecretKey)
}

pub fn downward_api(
    pod: &Pod,
    items: &[DownwardAPIVolumeFile],
    around: &Surroundings<'_>,
    default_mode: u32,
) -> Result<Payload, PayloadError> {
    let mut out = Payload::new();
    for item in items {
        let text = if let Some(field) = &item.field_ref {
            downward::field(pod, &field.field_path, around.addresses)?
        } else if let Some(selector) = &item.resource_field_ref {
            downward::resource(pod, None, selector, around.allocatable)?
        } else {
            continue;
        };
        out.insert(item.path.clone(), file(text, mode(item.mode, default_mode)));
    }
    Ok(out)
}

/// Names of the ConfigMaps and Secrets of a volume.
pub fn references(volume: &Volume) -> (BTreeSet<&String>, BTreeSet<&String>) {
    let parts = || volume.projected.iter().flat_map(|p| p.sources.iter().flatten());
    let maps = volume.config_map.iter().map(|source| &source.name);
    let maps = maps.chain(parts().filter_map(|p| p.config_map.as_ref()).map(|s| &s.name));
    let secrets = volume.secret.iter().filter_map(|source| source.secret_name.as_ref());
    let secrets = secrets.chain(parts().filter_map(|p| p.secret.as_ref()).map(|s| &s.name));
    (maps.collect(), secrets.collect())
}

/// Tokens by the path of their file, requested by the caller.
pub type Tokens = BTreeMap<String, Result<String, String>>;

pub fn projected(
    pod: &Pod,
    source: &ProjectedVolumeSource,
    around: &Surroundings<'_>,
    tokens: &Tokens,
    token_owner: Option<u32>,
    has_group: bool,
) -> Result<Payload, PayloadError> {
    let default_mode = mode(source.default_mode, DEFAULT_MODE);
    let mut out = Payload::new();
    for part in source.sources.iter().flatten() {
        out.extend(one_projection(pod, part, around, default_mode)?);
        if let Some(token) = &part.service_account_token {
            let text = match tokens.get(&token.path) {
                Some(Ok(text)) => text.clone(),
                Some(Err(error)) => return Err(PayloadError::Token(error.clone())),
                None => return Err(PayloadError::Token("not requested".into())),
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
) -> Result<Payload, PayloadError> {
    let mut out = Payload::new();
    if let Some(source) = &part.config_map {
        let map = around.sources.config_maps.get(&source.name).map(AsRef::as_ref);
        let optional = source.optional == Some(true);
        out.extend(config_map(&source.name, map, source.items.as_ref(), optional, default_mode)?);
    }
    if let Some(source) = &part.secret {
        let object = around.sources.secrets.get(&source.name).map(AsRef::as_ref);
        let optional = source.optional == Some(true);
        out.extend(secret(&source.name, object, source.items.as_ref(), optional, default_mode)?);
    }
    if let Some(source) = &part.downward_api {
        let items = source.items.as_deref().unwrap_or_default();
        out.extend(downward_api(pod, items, around, default_mode)?);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::downward::Addresses;
    use crate::env::Sources;
    use crate::resources::ResourceList;
    use serde_json::json;
    use std::sync::Arc;

    fn show(payload: Result<Payload, PayloadError>) -> String {
        match payload {
            Err(error) => error.to_string(),
            Ok(files) => files
                .iter()
                .map(|(path, f)| {
                    format!("{path}:{:o}:{}", f.mode, String::from_utf8_lossy(&f.bytes))
                })
                .collect::<Vec<_>>()
                .join(" "),
        }
    }

    #[test]
    fn keys_and_paths() {
        let map: ConfigMap = serde_json::from_value(
            json!({"data": {"a": "1", "b": "2"}, "binaryData": {"c": "Mw=="}}),
        )
        .expect("a map");
        let check = |items: serde_json::Value, optional: bool, expected: &str| {
            let items: Option<Vec<KeyToPath>> = serde_json::from_value(items).expect("items");
            assert_eq!(
                show(config_map("m", Some(&map), items.as_ref(), optional, 0o644)),
                expected
            );
        };
        check(json!(null), false, "a:644:1 b:644:2 c:644:3");
        check(json!([{"key": "a", "path": "x/y", "mode": 256}]), false, "x/y:400:1");
        check(
            json!([{"key": "z", "path": "z"}]),
            false,
            "configmap references non-existent config key: z",
        );
        check(json!([{"key": "z", "path": "z"}]), true, "");
        assert_eq!(show(config_map("m", None, None, false, 0o644)), "configmap \"m\" not found");
        assert_eq!(show(secret("s", None, None, true, 0o644)), "");
    }

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
