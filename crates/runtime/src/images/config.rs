//! The parts of an image's JSON that this crate uses: manifest, index, configuration. Docker's and
//! OCI's media types differ only in name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Descriptor {
    pub media_type: String,
    pub digest: String,
    pub size: u64,
    pub platform: Option<Platform>,
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Platform {
    pub architecture: String,
    pub os: String,
    pub variant: String,
}

/// A manifest or an index: only the fields of one of them are set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Manifest {
    pub media_type: String,
    pub config: Option<Descriptor>,
    pub layers: Vec<Descriptor>,
    /// Set for an index.
    pub manifests: Vec<Descriptor>,
}

/// The image's configuration file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    pub architecture: String,
    pub os: String,
    pub config: Option<ImageConfig>,
    pub rootfs: RootFs,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RootFs {
    pub diff_ids: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageConfig {
    pub user: String,
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub cmd: Vec<String>,
    pub working_dir: String,
    pub stop_signal: String,
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
}

/// Reads docker's `null` as the default value.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

impl Platform {
    /// OCI's names for this machine's OS and architecture.
    pub fn ours() -> (&'static str, &'static str) {
        (base::platform::OS, base::platform::ARCHITECTURE)
    }

    pub fn is_ours(&self) -> bool {
        (self.os.as_str(), self.architecture.as_str()) == Self::ours()
    }
}

/// The manifest of an index that fits this machine. An entry without a platform is the second
/// choice (archives made by hand).
pub fn for_us(manifests: &[Descriptor]) -> Option<&Descriptor> {
    let fitting = |d: &&Descriptor| d.platform.as_ref().is_some_and(Platform::is_ours);
    manifests.iter().find(fitting).or_else(|| manifests.iter().find(|d| d.platform.is_none()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dockers_nulls_are_empty() {
        let text = r#"{"config":{"Cmd":["sh"],"Env":null,"Entrypoint":null,"Labels":null}}"#;
        let file: ConfigFile = serde_json::from_str(text).expect("valid");
        let config = file.config.expect("there");
        assert_eq!((config.cmd.len(), config.env.len()), (1, 0));
    }
}
