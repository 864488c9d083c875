//! The content of files from ConfigMaps, Secrets and the downward API.
//!
//! In: the object or the pod, the wanted keys. Out: files. Pure.
//! Upstream: MakePayload in `pkg/volume/{configmap,secret,projected}`, `downwardapi`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret};

use super::atomic::{File, Payload};
use crate::pod::downward::{self, DownwardError};
use crate::pod::env::Surroundings;

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

pub fn mode(own: Option<i32>, default: u32) -> u32 {
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

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;

    pub fn show(payload: Result<Payload, impl std::fmt::Display>) -> String {
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
}
