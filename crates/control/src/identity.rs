//! The Lease of this API server in kube-system: which servers live, for clients and for other servers.
//!
//! In: the host's name. Out: `apiserver-HASH`, renewed while the server runs, deleted when it stops; expired
//! Leases of other servers are deleted, too.
//! Cost: a write every [`RENEW`] with an etcd; every [`RENEW_ALONE`] with the embedded store, where there is
//! no other server to tell. Once an hour a look at the Leases with the label.
//! Upstream: gate APIServerIdentity (`pkg/controlplane/apiserver/server.go`, `apiserverleasegc`).
//! Deviation: with the embedded store upstream's 10 s are 20 minutes, so that an idle server writes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use apiserver::registry::{DeleteOptions, Intent};
use apiserver::request::Key;
use apiserver::{Registry, StatusError};
use base::task::Tasks;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use machinery::selector::Selector;
use machinery::status::Reason;
use machinery::{Object, ObjectMeta};
use release::features::{self, Feature};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;

use crate::bootstrap::{map, named, put};

const LABEL: &str = "apiserver.kubernetes.io/identity";
const COMPONENT: &str = "kube-apiserver";
const DURATION_SECONDS: i32 = 3600;
const RENEW: Duration = Duration::from_secs(10);
const RENEW_ALONE: Duration = Duration::from_secs(1200);
const COLLECT: Duration = Duration::from_secs(3600);
const LIMIT: Duration = Duration::from_secs(5);
const LEAVING_LIMIT: Duration = Duration::from_secs(1);

pub struct Identity {
    registry: Registry,
    host: String,
    name: String,
    /// Another one after each start.
    holder: String,
    every: Duration,
    has_left: AtomicBool,
    /// Held during a renewal, so that none comes after the deletion.
    renewing: Mutex<()>,
}

impl Identity {
    pub fn new(registry: &Registry, host: &str, is_shared: bool) -> Arc<Self> {
        let name = name_of(host);
        auth::reload::set_server(&name);
        Arc::new(Self {
            registry: registry.clone(),
            host: host.to_owned(),
            holder: format!("{name}_{}", base::rng::uuid()),
            name,
            every: if is_shared { RENEW } else { RENEW_ALONE },
            has_left: AtomicBool::new(false),
            renewing: Mutex::default(),
        })
    }

    /// Renews until the tasks end, if the gate is on.
    pub fn start(self: &Arc<Self>, tasks: &Tasks) {
        if !features::enabled(Feature::APIServerIdentity) {
            return;
        }
        tasks.spawn("identity Lease", self.clone().keep());
        tasks.spawn("expired identity Leases", self.clone().collect());
    }

    async fn keep(self: Arc<Self>) {
        loop {
            let error = match tokio::time::timeout(LIMIT, self.renew()).await {
                Ok(Ok(())) => {
                    tokio::time::sleep(self.every).await;
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no result within {LIMIT:?}"),
            };
            tracing::warn!(lease = self.name, error, "failed to renew this server's Lease");
            tokio::time::sleep(RENEW).await;
        }
    }

    async fn renew(&self) -> Result<(), StatusError> {
        let _renewing = self.renewing.lock().await;
        if self.has_left.load(Ordering::Acquire) {
            return Ok(());
        }
        let labels = map([(LABEL, COMPONENT), ("kubernetes.io/hostname", self.host.as_str())]);
        let lease = Lease {
            metadata: ObjectMeta { labels, ..named("kube-system", &self.name) },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.holder.clone()),
                lease_duration_seconds: Some(DURATION_SECONDS),
                renew_time: Some(MicroTime(base::clock::now())),
                ..LeaseSpec::default()
            }),
        };
        put(&self.registry, lease, |new, old| {
            old.metadata
                .labels
                .get_or_insert_default()
                .extend(new.metadata.labels.clone().unwrap_or_default());
            old.spec = new.spec.clone();
        })
        .await
    }

    /// Deletes expired Leases of servers, once an hour.
    async fn collect(self: Arc<Self>) {
        loop {
            if let Err(error) = self.delete_expired().await {
                tracing::warn!(%error, "failed to delete expired Leases of API servers");
            }
            tokio::time::sleep(COLLECT).await;
        }
    }

    async fn delete_expired(&self) -> Result<(), StatusError> {
        let label = Selector::parse_labels(&format!("{LABEL}={COMPONENT}"))
            .map_err(|error| StatusError::internal(format!("{error:?}")))?;
        for lease in self.registry.cached_with::<Lease>("kube-system", label).await? {
            if is_expired(&lease) {
                self.delete(lease.name()).await?;
            }
        }
        Ok(())
    }

    async fn delete(&self, name: &str) -> Result<(), StatusError> {
        let ctx = self.registry.own_context::<Lease>();
        let intent = Intent::Delete { options: DeleteOptions::default() };
        match self.registry.write(&ctx, &Key::new("kube-system", name), intent).await {
            Err(error) if !error.is(Reason::NotFound) => Err(error),
            _ => Ok(()),
        }
    }

    /// Deletes the own Lease, for a server that stops.
    pub async fn leave(&self) {
        if !features::enabled(Feature::APIServerIdentity) {
            return;
        }
        self.has_left.store(true, Ordering::Release);
        let leaving = async {
            let _renewing = self.renewing.lock().await;
            self.delete(&self.name).await
        };
        let error = match tokio::time::timeout(LEAVING_LIMIT, leaving).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no result within {LEAVING_LIMIT:?}"),
        };
        tracing::warn!(lease = self.name, error, "failed to delete this server's Lease");
    }
}

fn is_expired(lease: &Lease) -> bool {
    let Some(spec) = &lease.spec else { return true };
    let (Some(renewed), Some(seconds)) = (&spec.renew_time, spec.lease_duration_seconds) else {
        return true;
    };
    renewed.0.as_second() + i64::from(seconds) < base::clock::now().as_second()
}

/// `apiserver-` and the hash of the host's name and the component, each with its length in front.
fn name_of(host: &str) -> String {
    let mut hash = Sha256::new();
    for part in [host, COMPONENT] {
        // No host name has more than 64 characters.
        hash.update(u16::try_from(part.len()).unwrap_or(u16::MAX).to_be_bytes());
        hash.update(part);
    }
    let hash = hash.finalize();
    format!("apiserver-{}", base32(&hash[..16]))
}

/// RFC 4648 in lower case, without padding.
fn base32(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let bits = |at: usize| {
        let bit = |at: usize| bytes.get(at / 8).map_or(0, |byte| byte >> (7 - at % 8) & 1);
        (at..at + 5).fold(0, |value, at| value << 1 | bit(at))
    };
    let digits = (0..bytes.len() * 8).step_by(5).map(|at| DIGITS[usize::from(bits(at))]);
    digits.map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn names_are_upstreams() {
        // The vectors of RFC 4648.
        for (bytes, expected) in
            [("", ""), ("f", "my"), ("fo", "mzxq"), ("foo", "mzxw6"), ("foobar", "mzxw6ytboi")]
        {
            assert_eq!(base32(bytes.as_bytes()), expected);
        }
        let name = name_of("kind-control-plane");
        assert_eq!(name.len(), "apiserver-".len() + 26);
        assert_ne!(name, name_of("kind-control-plane2"));
    }

    async fn leases(registry: &Registry) -> Vec<Lease> {
        registry.cached("kube-system").await.expect("readable")
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_has_a_lease_while_it_runs() {
        let _world = base::sim::enter(1);
        let (registry, tasks) = (testing::registry(&Tasks::new("test")), Tasks::new("test"));
        let mut stale = Lease { metadata: named("kube-system", "apiserver-old"), spec: None };
        stale.metadata.labels = map([(LABEL, COMPONENT)]);
        crate::bootstrap::create(&registry, stale).await.expect("written");
        let identity = Identity::new(&registry, "host", true);
        identity.start(&tasks);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let first = leases(&registry).await;
        assert_eq!(first.len(), 1, "the expired one is deleted: {first:?}");
        assert_eq!(first[0].name(), name_of("host"));
        tokio::time::sleep(RENEW).await;
        let second = leases(&registry).await;
        let renewed = |all: &[Lease]| all[0].spec.as_ref().and_then(|spec| spec.renew_time.clone());
        assert!(renewed(&second) > renewed(&first));
        identity.leave().await;
        tokio::time::sleep(RENEW * 3).await;
        assert!(leases(&registry).await.is_empty());
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
