//! The file of the provider `hetzner`.
//!
//! ```yaml
//! tokenFile: /etc/decapod/hcloud-token   # or token, or the environment variable HCLOUD_TOKEN
//! network: my-network                    # name or number: private addresses and routes
//! loadBalancer: {type: lb11, location: fsn1, usePrivateIP: true}
//! ```
//!
//! Invariant: without a file the token comes from the environment and everything else has its default.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::provider::OpenError;

const ENDPOINT: &str = "https://api.hetzner.cloud/v1";

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    /// An API token with the right to read and write.
    pub token: Option<String>,
    /// Read for each request, so that a new token is used at once.
    pub token_file: Option<PathBuf>,
    #[serde(default = "endpoint")]
    pub endpoint: String,
    /// Name or number of the private network of the nodes.
    pub network: Option<String>,
    /// Which public addresses nodes have.
    #[serde(default)]
    pub address_family: Family,
    #[serde(default)]
    pub load_balancer: Balancers,
}

fn endpoint() -> String {
    ENDPOINT.to_owned()
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    #[default]
    Ipv4,
    Ipv6,
    DualStack,
}

/// Settings of load balancers whose Services have no annotation.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Balancers {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub location: Option<String>,
    pub network_zone: Option<String>,
    /// Reach the nodes in the private network.
    #[serde(default, rename = "usePrivateIP")]
    pub use_private_ip: bool,
}

impl Config {
    pub fn read(path: Option<&Path>) -> Result<Self, OpenError> {
        let text = match path {
            Some(path) => std::fs::read_to_string(path)
                .map_err(|source| OpenError::Read { path: path.to_owned(), source })?,
            None => "{}".to_owned(),
        };
        let mut config: Self =
            serde_saphyr::from_str(&text).map_err(|error| OpenError::Invalid {
                path: path.map(Path::to_owned).unwrap_or_default(),
                reason: error.to_string(),
            })?;
        if config.token.is_none() && config.token_file.is_none() {
            config.token = std::env::var("HCLOUD_TOKEN").ok().filter(|token| !token.is_empty());
        }
        match config.token.is_some() || config.token_file.is_some() {
            true => Ok(config),
            false => Err(OpenError::NoToken),
        }
    }
}
