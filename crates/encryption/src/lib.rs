//! Encryption at rest: seals values when they are written to the store, and opens them when read.
//!
//! In: upstream's `EncryptionConfiguration` from a file, and storage keys. Out: a [`store::Transform`]
//! whose bytes are compatible with upstream's API server, in both directions.
//!
//! ```text
//! registry ► [protobuf] ► Encryption ► store        k8s:enc:secretbox:v1:key1:<nonce><tag><bytes>
//! ```
//!
//! Invariants:
//! - a resource without a rule is stored unchanged, and a sealed value of it is refused;
//! - an unusable configuration changes nothing: the previous one stays in use;
//! - keys are never logged, and are stored in files of mode 0600.

mod cipher;
pub mod config;
mod kms;
mod names;
mod provider;
mod reload;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use base::task::Tasks;
use bytes::Bytes;
use jiff::Timestamp;
use sha2::{Digest, Sha256};

pub use config::Configuration;
pub use names::Names;

use config::group_resource;
use kms::Kms;
use provider::{Chain, SEALED, Step};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}")]
    File { path: String, source: std::io::Error },
    #[error("encryption provider configuration file {0:?} is empty")]
    EmptyFile(String),
    #[error("{0}")]
    Config(String),
    #[error("resource {0:?} is masked by earlier rule {1:?}")]
    Masked(String, String),
    #[error("a key of {0} bytes does not fit the cipher")]
    KeySize(usize),
    #[error("there is no key for writing")]
    NoKeys,
    #[error("no matching key was found for the provided {0} transformer")]
    NoKeyFits(&'static str),
    #[error("no matching prefix found")]
    NoPrefixFits,
    #[error("identity transformer tried to read encrypted data")]
    Sealed,
    #[error("the stored data was shorter than the required size")]
    TooShort,
    #[error("the stored data is not a multiple of the block size")]
    NotBlocks,
    #[error("invalid PKCS7 data (empty or not padded)")]
    Padding,
    #[error("cipher: message authentication failed")]
    Authentication,
    #[error("the cipher failed")]
    Cipher,
    #[error("{0}")]
    Plugin(String),
    #[error("the KMS plugin changed its key during the call")]
    KeyChanged,
    #[error("KMS plugin {0} has not answered yet: nothing can be encrypted")]
    NoSeed(String),
    #[error("encryptedDEKSource with keyID hash {key_id:?} expired at {until}")]
    SeedExpired { key_id: String, until: Timestamp },
    #[error("the seed of the value has not been fetched")]
    NotFetched,
}

/// Providers by group and resource; both may be `*`.
type Rules = HashMap<String, HashMap<String, Arc<Chain>>>;

/// A configuration in use.
struct Loaded {
    rules: Rules,
    kms: Vec<Arc<Kms>>,
    /// `sha256:…` of the file; empty without one.
    hash: String,
    /// The plugins' health checks; they end with the configuration.
    tasks: Tasks,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// See the module.
pub struct Encryption {
    names: Names,
    loaded: ArcSwap<Loaded>,
    reloads: Reloads,
}

/// Numbers of reloads, for `/metrics`.
#[derive(Default)]
struct Reloads {
    good: AtomicU64,
    bad: AtomicU64,
    last_good: AtomicI64,
    last_bad: AtomicI64,
}

impl Encryption {
    /// Without a configuration: everything is stored unchanged.
    pub fn new(names: Names) -> Arc<Self> {
        let (rules, tasks) = (Rules::new(), Tasks::new("no encryption"));
        let loaded = Loaded { rules, kms: vec![], hash: String::new(), tasks };
        let loaded = ArcSwap::from_pointee(loaded);
        Arc::new(Self { names, loaded, reloads: Reloads::default() })
    }

    /// Loads a configuration file. Calls every plugin once, so that writes work at once if it is healthy; an
    /// unavailable plugin is retried later.
    pub async fn load(&self, path: &Path) -> Result<(), Error> {
        let display = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::File { path: display.clone(), source })?;
        if text.is_empty() {
            return Err(Error::EmptyFile(display));
        }
        let config = Configuration::parse(&text)?;
        let loaded = Loaded::new(&config, hash(text.as_bytes()))?;
        for kms in &loaded.kms {
            // The periodic check logs the error and retries.
            let _ = kms.check().await;
            loaded.tasks.spawn("kms probe", kms.clone().probe());
        }
        self.loaded.store(Arc::new(loaded));
        Ok(())
    }

    /// Removes the configuration: everything is stored unchanged again.
    pub fn unload(&self) {
        let (rules, tasks) = (Rules::new(), Tasks::new("no encryption"));
        self.loaded.store(Arc::new(Loaded { rules, kms: vec![], hash: String::new(), tasks }));
    }

    /// `sha256:…` of the file in use; empty without a file.
    pub fn hash(&self) -> String {
        self.loaded.load().hash.clone()
    }

    /// Whether every plugin is healthy, for `/healthz/kms-providers`.
    pub async fn check(&self) -> Result<(), String> {
        let loaded = self.loaded.load_full();
        let mut failures = vec![];
        for (index, kms) in loaded.kms.iter().enumerate() {
            if let Err(error) = kms.check().await {
                failures.push(format!("kms-provider-{index}: {error}"));
            }
        }
        match failures.as_slice() {
            [] => Ok(()),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }

    pub fn has_plugins(&self) -> bool {
        !self.loaded.load().kms.is_empty()
    }

    fn chain(&self, key: &[u8]) -> Option<Arc<Chain>> {
        let loaded = self.loaded.load();
        if loaded.rules.is_empty() {
            return None;
        }
        let (group, resource) = self.names.of(key)?;
        let find = |group: &str, resource: &str| loaded.rules.get(group)?.get(resource).cloned();
        find(group, resource).or_else(|| find(group, "*")).or_else(|| find("*", "*"))
    }

    /// The value, and whether a write would seal it differently now.
    fn open_one(&self, key: &[u8], value: &Bytes) -> Result<(Bytes, bool), Error> {
        match self.chain(key) {
            Some(chain) => chain.open(key, value),
            None if value.starts_with(SEALED) => Err(Error::Sealed),
            None => Ok((value.clone(), false)),
        }
    }
}

impl Loaded {
    fn new(config: &Configuration, hash: String) -> Result<Self, Error> {
        // Further rules for a resource append their providers.
        let mut providers: HashMap<(&str, &str), Vec<&config::Provider>> = HashMap::new();
        for rule in &config.resources {
            for name in &rule.resources {
                let (_, group) = group_resource(name);
                let masks = [(group, "*"), ("*", "*")];
                if let Some((group, _)) = masks.iter().find(|mask| providers.contains_key(*mask)) {
                    return Err(Error::Masked(name.clone(), format!("*.{group}")));
                }
            }
            for name in &rule.resources {
                let (resource, group) = group_resource(name);
                providers.entry((group, resource)).or_default().extend(&rule.providers);
            }
        }
        let mut kms: Vec<Arc<Kms>> = vec![];
        let mut service = |given: &config::Kms| {
            if let Some(known) = kms.iter().find(|known| known.name() == given.name) {
                return Ok(known.clone());
            }
            let made = Kms::new(given)?;
            kms.push(made.clone());
            Ok(made)
        };
        let mut rules = Rules::new();
        for ((group, resource), providers) in providers {
            let steps = providers.into_iter().map(|one| Step::new(one, &mut service));
            let chain = Chain(steps.collect::<Result<_, _>>()?);
            rules.entry(group.to_owned()).or_default().insert(resource.to_owned(), Arc::new(chain));
        }
        Ok(Self { rules, kms, hash, tasks: Tasks::new("encryption") })
    }
}

#[async_trait]
impl store::Transform for Encryption {
    fn seal(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        let Some(chain) = self.chain(key) else { return Ok(value) };
        chain.seal(key, value).map_err(|error| unusable(key, "encrypted", &error))
    }

    fn open(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        let opened = self.open_one(key, &value).map(|(value, _)| value);
        opened.map_err(|error| unusable(key, "decrypted", &error))
    }

    /// A value without a rule, unless it was sealed when there was one.
    fn leaves(&self, key: &[u8], value: &store::Value) -> bool {
        self.chain(key).is_none() && !value.starts_with(SEALED)
    }

    fn is_stale(&self, key: &[u8], value: &Bytes) -> bool {
        self.open_one(key, value).is_ok_and(|(_, is_stale)| is_stale)
    }

    fn must_fetch(&self, key: &[u8], value: &[u8]) -> bool {
        value.starts_with(SEALED)
            && self.chain(key).is_some_and(|chain| chain.awaited(value).is_some())
    }

    async fn fetch(&self, key: &[u8], value: &[u8]) -> store::Result<()> {
        let Some(chain) = self.chain(key) else { return Ok(()) };
        let Some((kms, body)) = chain.awaited(value) else { return Ok(()) };
        kms.fetch(body).await.map_err(|error| unusable(key, "decrypted", &error))
    }
}

fn unusable(key: &[u8], what: &str, why: &Error) -> store::Error {
    let key = String::from_utf8_lossy(key);
    tracing::error!(%key, error = %why, "a stored value cannot be {what}");
    store::Error::Unusable(why.to_string().into())
}

/// The hash by which upstream identifies configurations.
pub fn hash(content: &[u8]) -> String {
    let digest = Sha256::digest(content);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl Encryption {
    /// Upstream's metrics of the configuration and its reloads.
    pub fn metrics(&self, out: &mut String) {
        const FAMILY: &str = "apiserver_encryption_config_controller";
        let hash = self.hash();
        if hash.is_empty() {
            return;
        }
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(&str, String)]| {
            let full = format!("{FAMILY}_{name}");
            out.push_str(&format!("# HELP {full} [ALPHA] {help}\n# TYPE {full} {kind}\n"));
            for (labels, value) in samples {
                out.push_str(&format!("{full}{{{labels}}} {value}\n"));
            }
        };
        let info = format!("apiserver_id_hash=\"\",hash=\"{hash}\"");
        family(
            "last_config_info",
            "gauge",
            "Information about the last applied encryption configuration with hash as label, split by apiserver identity.",
            &[(&info, "1".into())],
        );
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed).to_string();
        let (good, bad) = (
            "apiserver_id_hash=\"\",status=\"success\"",
            "apiserver_id_hash=\"\",status=\"failure\"",
        );
        family(
            "automatic_reloads_total",
            "counter",
            "Total number of reload successes and failures of encryption configuration split by apiserver identity.",
            &[(bad, count(&self.reloads.bad)), (good, count(&self.reloads.good))],
        );
        let time = |number: &AtomicI64| number.load(Ordering::Relaxed).to_string();
        family(
            "automatic_reload_last_timestamp_seconds",
            "gauge",
            "Timestamp of the last successful or failed automatic reload of encryption configuration split by apiserver identity.",
            &[(bad, time(&self.reloads.last_bad)), (good, time(&self.reloads.last_good))],
        );
    }
}
