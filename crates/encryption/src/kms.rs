//! KMS v2: a plugin behind a unix socket seals one seed, and the seed seals values.
//!
//! ```text
//! k8s:enc:kms:v2:NAME: | EncryptedObject { sealed value, key id, sealed seed, annotations, type }
//! ```
//!
//! In: a plugin's socket. Out: values sealed and opened without a call while the seed is cached. After a
//! restart, one call opens a seed, and with it all values under that seed.
//!
//! Invariants: a seed is used for writes only if the plugin has confirmed its key within
//! [`SEED_LIFETIME`]; reads do not need that. Sealed values are bound to their storage key.

mod rpc;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use jiff::Timestamp;
use lru::LruCache;
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::Error;
use crate::cipher::{Cipher, ExtendedNonce, Gcm};
use crate::config;
use rpc::Rpc;

/// Upstream's intervals of the plugin's status checks, for a healthy and an unhealthy plugin.
const WELL_INTERVAL: Duration = Duration::from_secs(60);
const ILL_INTERVAL: Duration = Duration::from_secs(10);
const SEED_LIFETIME: Duration = Duration::from_secs(180);
/// How long a health check reuses the last result.
const WELL_TTL: Duration = Duration::from_secs(20);
const ILL_TTL: Duration = Duration::from_secs(3);
/// The number of cached seeds: about one for each start of each server and each key.
const SEEDS: NonZeroUsize = NonZeroUsize::new(1000).expect("not zero");
const KEY_ID_LIMIT: usize = 1024;
const SEED_LIMIT: usize = 1024;
const ANNOTATIONS_LIMIT: usize = 32 * 1024;

base::messages! {
    /// The stored form of a value.
    message EncryptedObject {
        buffer data = 1;
        string key_id = 2;
        buffer sealed_seed = 3;
        map<string, buffer> annotations = 4;
        int32 source = 5;
    }
}

/// `EncryptedDEKSourceType`: a key, from clusters before v1.28, or a seed.
const KEY: i32 = 0;
const SEED: i32 = 1;

/// The current key for writes.
struct State {
    cipher: Arc<dyn Cipher>,
    /// All fields except the data.
    template: EncryptedObject,
    until: Timestamp,
}

/// The last result of a health check, and its time.
struct Answer {
    at: Instant,
    ttl: Duration,
    outcome: Result<(), String>,
}

/// The client of one KMS plugin.
pub struct Kms {
    name: String,
    rpc: Rpc,
    state: ArcSwapOption<State>,
    /// Opened seeds by fingerprint. Locked for look-ups only.
    seeds: Mutex<LruCache<[u8; 32], Arc<dyn Cipher>>>,
    /// One check at a time; the others wait for its result.
    answer: tokio::sync::Mutex<Option<Answer>>,
}

impl Kms {
    /// Connects at the first call.
    pub fn new(config: &config::Kms) -> Result<Arc<Self>, Error> {
        let timeout = config.timeout().ok_or(Error::NoKeys)?;
        Ok(Arc::new(Self {
            name: config.name.clone(),
            rpc: Rpc::new(&config.endpoint, timeout)?,
            state: ArcSwapOption::empty(),
            seeds: Mutex::new(LruCache::new(SEEDS)),
            answer: tokio::sync::Mutex::default(),
        }))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Checks the plugin periodically, and never returns: its key may change, and the seed expires.
    pub async fn probe(self: Arc<Self>) {
        loop {
            let pause = match self.check().await {
                Ok(()) => WELL_INTERVAL,
                Err(error) => {
                    tracing::warn!(name = self.name, error, "the KMS plugin is not healthy");
                    ILL_INTERVAL
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Checks the plugin's health, and switches to its current key.
    pub async fn check(&self) -> Result<(), String> {
        let mut answer = self.answer.lock().await;
        if let Some(last) = answer.as_ref().filter(|last| last.at.elapsed() < last.ttl) {
            return last.outcome.clone();
        }
        let outcome = self.ask().await;
        let ttl = if outcome.is_ok() { WELL_TTL } else { ILL_TTL };
        *answer = Some(Answer { at: Instant::now(), ttl, outcome: outcome.clone() });
        outcome
    }

    async fn ask(&self) -> Result<(), String> {
        let name = &self.name;
        let status = self.rpc.status().await.map_err(|error| {
            format!("failed to perform status section of the healthz check for KMS Provider {name}, error: {error}")
        })?;
        let unwell = |why: String| format!("kmsv2 Provider {name} is not healthy, error: {why}");
        if status.healthz != "ok" {
            return Err(unwell(format!("got unexpected healthz status: {}", status.healthz)));
        }
        if !matches!(status.version.as_str(), "v2" | "v2beta1") {
            let why = format!("expected KMSv2 API version v2, got {}", status.version);
            return Err(unwell(why));
        }
        check_key_id(&status.key_id).map_err(|error| {
            unwell(format!("got invalid KMSv2 KeyID hash {:?}: {error}", hash(&status.key_id)))
        })?;
        self.take_into_use(&status.key_id).await.map_err(|error| unwell(error.to_string()))
    }

    /// Extends the current seed's lifetime, or makes a new seed for another key.
    async fn take_into_use(&self, key_id: &str) -> Result<(), Error> {
        // Taken before the call, so that the lifetime is a strict bound.
        let until = base::clock::now() + SEED_LIFETIME;
        if let Some(state) = self.state.load_full()
            && state.template.key_id == key_id
        {
            let (cipher, template) = (state.cipher.clone(), state.template.clone());
            self.state.store(Some(Arc::new(State { cipher, template, until })));
            return Ok(());
        }
        let seed = pki::random_bytes::<{ ExtendedNonce::SEED }>();
        let sealed = self.rpc.encrypt(seed.to_vec()).await?;
        let template = EncryptedObject {
            data: vec![],
            key_id: sealed.key_id,
            sealed_seed: sealed.ciphertext,
            annotations: sealed.annotations,
            source: SEED,
        };
        template.check()?;
        if template.key_id != key_id {
            return Err(Error::KeyChanged);
        }
        let cipher: Arc<dyn Cipher> = Arc::new(ExtendedNonce::new(&seed)?);
        self.remember(&template, cipher.clone());
        self.state.store(Some(Arc::new(State { cipher, template, until })));
        Ok(())
    }

    pub fn seal(&self, place: &[u8], value: &[u8]) -> Result<Vec<u8>, Error> {
        let state = self.state.load_full().ok_or_else(|| Error::NoSeed(self.name.clone()))?;
        if base::clock::now() > state.until {
            let (key_id, until) = (hash(&state.template.key_id), state.until);
            return Err(Error::SeedExpired { key_id, until });
        }
        let mut object = state.template.clone();
        object.data = state.cipher.seal(place, value)?;
        Ok(object.encode_to_vec())
    }

    /// The value, and whether its key differs from the key for writes.
    pub fn open(&self, place: &[u8], sealed: &[u8]) -> Result<(Vec<u8>, bool), Error> {
        let object = EncryptedObject::read(sealed)?;
        let cipher = self.remembered(&object).ok_or(Error::NotFetched)?;
        let value = cipher.open(place, &object.data)?;
        let state = self.state.load();
        let is_stale = state.as_ref().is_none_or(|state| {
            (&state.template.key_id, state.template.source) != (&object.key_id, object.source)
        });
        Ok((value, is_stale))
    }

    /// Whether [`open`](Self::open) works without a call of the plugin.
    pub fn has_key_for(&self, sealed: &[u8]) -> bool {
        // An unreadable object needs no key: `open` returns its error.
        EncryptedObject::read(sealed).map_or(true, |object| self.remembered(&object).is_some())
    }

    /// Has the plugin open the seed of a value, and caches it.
    pub async fn fetch(&self, sealed: &[u8]) -> Result<(), Error> {
        let object = EncryptedObject::read(sealed)?;
        let opened = self
            .rpc
            .decrypt(object.sealed_seed.clone(), object.key_id.clone(), object.annotations.clone())
            .await?;
        let cipher: Arc<dyn Cipher> = match object.source {
            SEED => Arc::new(ExtendedNonce::new(&opened)?),
            _ => Arc::new(Gcm::new(&opened)?),
        };
        self.remember(&object, cipher);
        Ok(())
    }

    fn remembered(&self, object: &EncryptedObject) -> Option<Arc<dyn Cipher>> {
        self.seeds.lock().expect("no panic under the lock").get(&object.fingerprint()).cloned()
    }

    fn remember(&self, object: &EncryptedObject, cipher: Arc<dyn Cipher>) {
        self.seeds.lock().expect("no panic under the lock").put(object.fingerprint(), cipher);
    }
}

impl EncryptedObject {
    fn read(sealed: &[u8]) -> Result<Self, Error> {
        let object = Self::decode(sealed).map_err(|error| Error::Plugin(error.to_string()))?;
        if object.data.is_empty() {
            return Err(Error::Plugin("encrypted data is empty".into()));
        }
        object.check()?;
        Ok(object)
    }

    /// Checks upstream's limits.
    fn check(&self) -> Result<(), Error> {
        if !matches!(self.source, KEY | SEED) {
            return Err(Error::Plugin(format!("unknown encryptedDEKSourceType: {}", self.source)));
        }
        let wrong = |why: String| Err(Error::Plugin(why));
        match self.sealed_seed.len() {
            0 => {
                return wrong(
                    "failed to validate encrypted DEK source: encrypted DEK source is empty".into(),
                );
            }
            length if length > SEED_LIMIT => {
                return wrong(format!(
                    "failed to validate encrypted DEK source: encrypted DEK source is {length} bytes, which exceeds the max size of {SEED_LIMIT}"
                ));
            }
            _ => {}
        }
        check_key_id(&self.key_id)
            .map_err(|error| Error::Plugin(format!("failed to validate key id: {error}")))?;
        let size: usize =
            self.annotations.iter().map(|(name, value)| name.len() + value.len()).sum();
        if size > ANNOTATIONS_LIMIT {
            return wrong(format!(
                "failed to validate annotations: total size of annotations is {size}, which exceeds the max size of {ANNOTATIONS_LIMIT}"
            ));
        }
        Ok(())
    }

    /// Identifies a seed: a digest of everything that the plugin needs to open it.
    fn fingerprint(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        let mut part = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_be_bytes());
            digest.update(bytes);
        };
        part(&self.source.to_be_bytes());
        part(&self.sealed_seed);
        part(self.key_id.as_bytes());
        for (name, value) in &self.annotations {
            part(name.as_bytes());
            part(value);
        }
        digest.finalize().into()
    }
}

fn check_key_id(key_id: &str) -> Result<(), Error> {
    match key_id.len() {
        0 => Err(Error::Plugin("keyID is empty".into())),
        length if length > KEY_ID_LIMIT => Err(Error::Plugin(format!(
            "keyID is {length} bytes, which exceeds the max size of {KEY_ID_LIMIT}"
        ))),
        _ => Ok(()),
    }
}

/// Key ids may reveal where keys are kept: logs contain their hash.
fn hash(key_id: &str) -> String {
    if key_id.is_empty() {
        return String::new();
    }
    let digest = Sha256::digest(key_id.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
