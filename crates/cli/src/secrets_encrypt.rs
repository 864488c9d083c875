//! `decapod secrets-encrypt`: encrypts Secrets in the store, with the same commands as k3s.
//!
//! In: `<data-dir>/cred/encryption-config.json`, which the server on this machine follows, and its
//! API. Out: another key in that file, and every Secret rewritten with it.
//!
//! ```text
//! enable    [new, identity]            ► all Secrets written
//! rotate    [new, old, identity]       ► all Secrets written ► [new, identity]
//! disable   [identity, old]            ► all Secrets written
//! ```
//!
//! Invariant: the file always has the keys of all stored Secrets, so that an interrupted rotation can be
//! finished by the next one. A key is removed only after the last Secret that uses it was rewritten.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use encryption::Configuration;
use encryption::config::{API_VERSION, Empty, KIND, Key, Keys, Provider, ResourceRule};
use http::Method;
use serde_json::Value;

use crate::cluster::{Cluster, Connection, JSON, with_query};
use crate::failure::Failure;

/// Relative to the data directory.
pub const FILE: &str = "cred/encryption-config.json";
const SECRETS: &str = "/api/v1/secrets";
/// The number of Secrets per request.
const PAGE: &str = "500";
/// How long the server may take to load the file.
const PATIENCE: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[derive(clap::Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct SecretsEncrypt {
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Show whether Secrets are encrypted, and with which keys
    Status,
    /// Encrypt all existing and future Secrets
    Enable(NewKey),
    /// Store Secrets unencrypted again
    Disable,
    /// Encrypt all Secrets with a new key, and remove the old one
    #[command(visible_alias = "rotate-keys")]
    Rotate(NewKey),
    /// Write all Secrets again, with the key in use
    Reencrypt,
}

#[derive(clap::Args, Clone, Debug)]
pub struct NewKey {
    /// secretbox, aesgcm or aescbc
    #[arg(long, default_value = "secretbox", value_parser = ["secretbox", "aesgcm", "aescbc"])]
    pub provider: String,
}

impl SecretsEncrypt {
    pub async fn run(self, data_dir: &Path) -> Result<ExitCode> {
        let cluster = self.connection.open(data_dir).map_err(plain)?;
        let own = Own { path: data_dir.join(FILE), cluster };
        let text = match self.command {
            Command::Status => own.status().await?,
            Command::Enable(key) => own.enable(&key.provider).await?,
            Command::Disable => own.disable().await?,
            Command::Rotate(key) => own.rotate(&key.provider).await?,
            Command::Reencrypt => format!("reencrypted {} secrets\n", own.reencrypt().await?),
        };
        print!("{text}");
        Ok(ExitCode::SUCCESS)
    }
}

/// Removes the prefix, because the binary adds its own to errors.
fn plain(failure: Failure) -> anyhow::Error {
    let text = failure.to_string();
    anyhow::anyhow!("{}", text.strip_prefix("error: ").unwrap_or(&text))
}

/// The file of this server, and its API.
struct Own {
    path: PathBuf,
    cluster: Cluster,
}

impl Own {
    fn read(&self) -> Result<Vec<Provider>> {
        let text = match std::fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", self.path.display()));
            }
        };
        let config = Configuration::parse(&text)
            .with_context(|| format!("{} cannot be used", self.path.display()))?;
        Ok(config.resources.into_iter().flat_map(|rule| rule.providers).collect())
    }

    /// Writes the file, and waits until the server has loaded it.
    async fn write(&self, providers: Vec<Provider>) -> Result<()> {
        let rule = ResourceRule { resources: vec!["secrets".into()], providers };
        let config = Configuration {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            resources: vec![rule],
        };
        let text = serde_json::to_vec(&config)?;
        pki::write_private(&self.path, &text, 0o600)?;
        let wanted = encryption::hash(&text);
        let wait = async {
            while self.in_use().await? != wanted {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(PATIENCE, wait).await {
            Ok(outcome) => outcome,
            Err(_) => bail!(
                "the server has not loaded {}: does it run on another machine, or with --encryption-provider-config?",
                self.path.display()
            ),
        }
    }

    /// The hash of the configuration that the server uses; empty without one.
    async fn in_use(&self) -> Result<String> {
        let page = self.cluster.get_raw("/metrics", "text/plain").await.map_err(plain)?;
        Ok(hash_in(&String::from_utf8_lossy(&page)))
    }

    async fn status(&self) -> Result<String> {
        let (providers, in_use) = (self.read()?, self.in_use().await?);
        let file = std::fs::read(&self.path).map(|text| encryption::hash(&text));
        Ok(shown(&providers, &file.unwrap_or_default(), &in_use))
    }

    async fn enable(&self, kind: &str) -> Result<String> {
        let old = self.read()?;
        if writes_with(&old).is_some() {
            bail!("secrets encryption is enabled already; `rotate` changes its key");
        }
        let mut providers = vec![new_provider(kind)?];
        providers.extend(old.into_iter().filter(|one| one.identity.is_none()));
        providers.push(identity());
        self.write(providers).await?;
        Ok(format!("secrets encryption enabled, reencrypted {} secrets\n", self.reencrypt().await?))
    }

    async fn disable(&self) -> Result<String> {
        let old = self.read()?;
        if writes_with(&old).is_none() {
            bail!("secrets encryption is disabled already");
        }
        let mut providers = vec![identity()];
        providers.extend(old.into_iter().filter(|one| one.identity.is_none()));
        self.write(providers).await?;
        Ok(format!("secrets encryption disabled, rewrote {} secrets\n", self.reencrypt().await?))
    }

    async fn rotate(&self, kind: &str) -> Result<String> {
        let old = self.read()?;
        if writes_with(&old).is_none() {
            bail!("secrets encryption is disabled; `enable` it first");
        }
        let new = new_provider(kind)?;
        let mut all = vec![new.clone()];
        all.extend(old);
        self.write(all).await?;
        let count = self.reencrypt().await?;
        self.write(vec![new, identity()]).await?;
        Ok(format!("keys rotated, reencrypted {count} secrets\n"))
    }

    /// Updates every Secret: the server rewrites it if its stored bytes would change.
    async fn reencrypt(&self) -> Result<usize> {
        let mut count = 0;
        let mut next = String::new();
        loop {
            let path = with_query(SECRETS, &[("limit", PAGE), ("continue", &next)]);
            let list = self.cluster.get(&path).await.map_err(plain)?;
            for secret in list["items"].as_array().into_iter().flatten() {
                count += usize::from(self.rewrite(secret.clone()).await?);
            }
            next = list["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
            if next.is_empty() {
                return Ok(count);
            }
        }
    }

    async fn rewrite(&self, mut secret: Value) -> Result<bool> {
        let text = |secret: &Value, field: &str| {
            secret["metadata"][field].as_str().unwrap_or_default().to_owned()
        };
        let (namespace, name) = (text(&secret, "namespace"), text(&secret, "name"));
        secret["apiVersion"] = "v1".into();
        secret["kind"] = "Secret".into();
        let path = format!("/api/v1/namespaces/{namespace}/secrets/{name}");
        let body = serde_json::to_vec(&secret)?;
        match self.cluster.call(Method::PUT, &path, JSON, body).await {
            Ok(_) => Ok(true),
            // Another client has written it meanwhile, with the new key, or has deleted it.
            Err(Failure::Status(status)) if matches!(status.code, 404 | 409) => Ok(false),
            Err(failure) => Err(plain(failure)).with_context(|| format!("{namespace}/{name}")),
        }
    }
}

fn identity() -> Provider {
    Provider { identity: Some(Empty {}), ..Provider::default() }
}

fn new_provider(kind: &str) -> Result<Provider> {
    let now = base::clock::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let secret = STANDARD.encode(pki::random_bytes::<32>());
    let keys = Some(Keys { keys: vec![Key { name: format!("{kind}key-{now}"), secret }] });
    Ok(match kind {
        "secretbox" => Provider { secretbox: keys, ..Provider::default() },
        "aesgcm" => Provider { aesgcm: keys, ..Provider::default() },
        "aescbc" => Provider { aescbc: keys, ..Provider::default() },
        _ => bail!("no provider {kind:?}"),
    })
}

/// The provider that writes; `None` if that is identity.
fn writes_with(providers: &[Provider]) -> Option<&Provider> {
    providers.first().filter(|first| first.identity.is_none())
}

/// Type and name of every key, in order.
fn keys(providers: &[Provider]) -> Vec<(&'static str, String)> {
    let mut all = vec![];
    for provider in providers {
        let kinds = [
            ("XSalsa20-POLY1305", &provider.secretbox),
            ("AES-GCM", &provider.aesgcm),
            ("AES-CBC", &provider.aescbc),
        ];
        for (kind, keys) in kinds {
            let named = keys.iter().flat_map(|keys| &keys.keys);
            all.extend(named.map(|key| (kind, key.name.clone())));
        }
    }
    all
}

/// The text of `k3s secrets-encrypt status`.
fn shown(providers: &[Provider], file: &str, in_use: &str) -> String {
    if providers.is_empty() {
        return match in_use {
            "" => "Encryption Status: Disabled, no configuration file found\n".into(),
            _ => format!(
                "Encryption Status: the server uses a configuration of its own ({in_use})\n"
            ),
        };
    }
    let is_enabled = writes_with(providers).is_some();
    let keys = keys(providers);
    // More than one key: a rotation was interrupted, and the next one finishes it.
    let stage = if keys.len() > 1 { "reencrypt_active" } else { "start" };
    let hashes = match file == in_use {
        true => "All hashes match".to_owned(),
        false => format!("hash does not match, the server uses {in_use:?}"),
    };
    let state = if is_enabled { "Enabled" } else { "Disabled" };
    let mut out = format!(
        "Encryption Status: {state}\nCurrent Rotation Stage: {stage}\nServer Encryption Hashes: {hashes}\n\n"
    );
    let width = keys.iter().map(|(kind, _)| kind.len()).max().unwrap_or(0).max(8);
    out.push_str(&format!("Active  {:width$}  Name\n", "Key Type"));
    out.push_str(&format!("------  {:width$}  ----\n", "--------"));
    for (index, (kind, name)) in keys.iter().enumerate() {
        let active = if is_enabled && index == 0 { "*" } else { " " };
        out.push_str(&format!(" {active}      {kind:width$}  {name}\n"));
    }
    out
}

fn hash_in(page: &str) -> String {
    const FAMILY: &str = "apiserver_encryption_config_controller_last_config_info{";
    let line = page.lines().find_map(|line| line.strip_prefix(FAMILY));
    let value = line.and_then(|line| line.split_once(",hash=\"")?.1.split_once('"'));
    value.map(|(hash, _)| hash.to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(kind: &str) -> Provider {
        let mut provider = new_provider(kind).expect("a kind");
        for keys in [&mut provider.secretbox, &mut provider.aescbc].into_iter().flatten() {
            keys.keys[0].name = format!("{kind}key");
        }
        provider
    }

    #[test]
    fn status_reads_like_k3s() {
        let check = |providers: &[Provider], file: &str, in_use: &str, expected: &str| {
            assert_eq!(shown(providers, file, in_use), expected);
        };
        check(&[], "", "", "Encryption Status: Disabled, no configuration file found\n");
        check(
            &[provider("aescbc"), identity()],
            "sha256:1",
            "sha256:1",
            "Encryption Status: Enabled\nCurrent Rotation Stage: start\nServer Encryption Hashes: All hashes match\n\n\
             Active  Key Type  Name\n------  --------  ----\n *      AES-CBC   aescbckey\n",
        );
        check(
            &[provider("secretbox"), provider("aescbc"), identity()],
            "sha256:2",
            "sha256:1",
            "Encryption Status: Enabled\nCurrent Rotation Stage: reencrypt_active\n\
             Server Encryption Hashes: hash does not match, the server uses \"sha256:1\"\n\n\
             Active  Key Type           Name\n------  --------           ----\n \
             *      XSalsa20-POLY1305  secretboxkey\n        AES-CBC            aescbckey\n",
        );
    }

    #[test]
    fn the_hash_in_use_is_found_among_the_metrics() {
        let page = "# TYPE x gauge\napiserver_encryption_config_controller_last_config_info{apiserver_id_hash=\"\",hash=\"sha256:ab\"} 1\n";
        assert_eq!(hash_in(page), "sha256:ab");
        assert_eq!(hash_in("up 1\n"), "");
    }

    #[test]
    fn the_written_configuration_is_valid() {
        for kind in ["secretbox", "aesgcm", "aescbc"] {
            let rule = ResourceRule {
                resources: vec!["secrets".into()],
                providers: vec![new_provider(kind).expect("a kind"), identity()],
            };
            let config = Configuration {
                api_version: API_VERSION.into(),
                kind: KIND.into(),
                resources: vec![rule],
            };
            let text = serde_json::to_string(&config).expect("JSON");
            Configuration::parse(&text).expect("valid");
        }
    }
}
