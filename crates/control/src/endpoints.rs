//! The endpoints of Service `kubernetes`: the addresses of the API servers that live.
//!
//! ```text
//! each server ─► /registry/masterleases/ADDRESS, which expires ─► all servers ─► Endpoints, EndpointSlices
//! ```
//!
//! In: this server's address, and the keys of all servers. Out: the objects, and this server's key. A dead
//! server's key expires, and the watch of the keys wakes the others; a server that stops removes its own.
//! Invariants: an empty list of keys never empties the objects, except when the last server stops. With the
//! embedded store there is one server and no key.
//!
//! Cost: with an etcd, a keep-alive and a read of one key per server every [`EVERY`]; a write only if the
//! list of servers changed. With the embedded store nothing after the first round.
//! Upstream: `pkg/controlplane/reconcilers`, with the same keys, so that servers of both kinds list each
//! other. Deviation: upstream rewrites its key every 10 s with a lease of 15 s, and does not watch.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use apiserver::registry::store_error;
use apiserver::{Registry, StatusError};
use base::log_limit::LogLimit;
use base::task::Tasks;
use bytes::Bytes;
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointPort as SlicePort, EndpointSlice,
};
use machinery::ObjectMeta;
use store::{KeyRange, LeaseId, Op, RangeRequest, Txn, WatchItem, WatchRequest};
use tokio::sync::Mutex;

use crate::bootstrap::{KUBERNETES, KUBERNETES_IPV6, map, named, put};

/// Upstream's directory. Each value is an Endpoints object with one address.
const LEASES: &str = "/registry/masterleases/";
/// The life of a key whose server does not renew it: a dead server leaves the endpoints after it.
const LIFE_SECONDS: i64 = 12;
const EVERY: Duration = Duration::from_secs(4);
/// For one round; the store bounds each call.
const LIMIT: Duration = Duration::from_secs(10);
/// For the removal of the own address when the server stops.
const LEAVING_LIMIT: Duration = Duration::from_secs(2);
/// Before the keys are watched again.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

/// Upstream's `--endpoint-reconciler-type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The servers whose keys live.
    #[default]
    Lease,
    /// The servers that have started, at most so many (`--apiserver-count`).
    MasterCount(usize),
    /// The objects are another program's.
    None,
}

/// This server, as the objects show it.
#[derive(Clone, Debug, Default)]
pub struct Own {
    pub mode: Mode,
    /// Whether other servers may use the same store.
    pub is_shared: bool,
    /// `None` for a server that only its own machine can reach.
    pub address: Option<IpAddr>,
    /// The same for all servers.
    pub port: u16,
}

pub struct Reconciler {
    registry: Registry,
    own: Own,
    /// Held during a round, so that a round never adds what [`Reconciler::leave`] removes.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The lease of this server's key.
    lease: Option<LeaseId>,
    has_left: bool,
}

impl Reconciler {
    pub fn new(registry: &Registry, own: Own) -> Arc<Self> {
        Arc::new(Self { registry: registry.clone(), own, state: Mutex::default() })
    }

    /// Reconciles until the tasks end.
    pub fn start(self: &Arc<Self>, tasks: &Tasks) {
        if self.own.is_shared && self.own.mode == Mode::Lease {
            tasks.spawn("endpoints of the API servers", self.clone().run());
        }
    }

    async fn run(self: Arc<Self>) {
        let failures = LogLimit::default();
        loop {
            let range = KeyRange::prefix(LEASES);
            let request = WatchRequest { range, start: None };
            let Ok(mut keys) = self.registry.store().watch(request).await else {
                tokio::time::sleep(WATCH_AGAIN).await;
                continue;
            };
            loop {
                let round = tokio::time::timeout(LIMIT, self.round()).await;
                let error = match round {
                    Ok(outcome) => outcome.err().map(|error| error.to_string()),
                    Err(_) => Some(format!("no result within {LIMIT:?}")),
                };
                if let Some(error) = error
                    && failures.ask(()).is_some()
                {
                    tracing::warn!(error, "failed to update the endpoints of Service kubernetes");
                }
                let changed = async {
                    loop {
                        match keys.items.recv().await {
                            Some(WatchItem::Progress(_)) => {}
                            Some(WatchItem::Events(..)) => return true,
                            Some(WatchItem::Compacted(_)) | None => return false,
                        }
                    }
                };
                if let Ok(false) = tokio::time::timeout(EVERY, changed).await {
                    break;
                }
            }
        }
    }

    /// Renews the own key, and writes the objects if they differ from the list of servers.
    pub async fn round(&self) -> Result<(), StatusError> {
        let mut state = self.state.lock().await;
        if state.has_left {
            return Ok(());
        }
        let addresses = match self.own.mode {
            Mode::None => return Ok(()),
            Mode::Lease if self.own.is_shared => self.renewed(&mut state).await?,
            Mode::Lease => self.own.address.into_iter().collect(),
            Mode::MasterCount(most) => counted(&self.written().await?, self.own.address, most),
        };
        self.write(&addresses).await
    }

    /// Removes this server from the list, for a server that stops. It takes at most [`LEAVING_LIMIT`].
    pub async fn leave(&self) {
        let leaving = async {
            let mut state = self.state.lock().await;
            state.has_left = true;
            // With the embedded store the server comes back at the same address, or nowhere.
            if !self.own.is_shared || self.own.mode == Mode::None {
                return Ok(());
            }
            let remaining = match (self.own.mode, self.own.address) {
                (_, None) => return Ok(()),
                (Mode::Lease, Some(address)) => {
                    let range = KeyRange::one(key(address));
                    self.commit(Op::DeleteRange { range }).await?;
                    if let Some(lease) = state.lease.take() {
                        // An error means that it expires later, without a key.
                        let _ = self.registry.store().lease_revoke(lease).await;
                    }
                    self.listed().await?
                }
                (_, Some(address)) => {
                    let mut all = self.written().await?;
                    all.remove(&address);
                    all
                }
            };
            self.write(&remaining).await
        };
        let error = match tokio::time::timeout(LEAVING_LIMIT, leaving).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no result within {LEAVING_LIMIT:?}"),
        };
        tracing::warn!(
            error,
            "failed to remove this server from the endpoints of Service kubernetes"
        );
    }

    /// Renews the own key; returns the addresses of all servers.
    async fn renewed(&self, state: &mut State) -> Result<BTreeSet<IpAddr>, StatusError> {
        let store = self.registry.store();
        if let Some(lease) = state.lease {
            match store.lease_keep_alive(lease).await {
                Ok(_) => {}
                Err(store::Error::LeaseNotFound(_)) => state.lease = None,
                Err(error) => return Err(store_error(error)),
            }
        }
        let mut all = self.listed().await?;
        let Some(own) = self.own.address else { return Ok(all) };
        if state.lease.is_none() || !all.contains(&own) {
            let lease = match state.lease {
                Some(lease) => lease,
                None => store.lease_grant(LIFE_SECONDS).await.map_err(store_error)?,
            };
            let value = Bytes::from(
                serde_json::json!({
                    "apiVersion": "v1", "kind": "Endpoints", "metadata": {"generation": 1},
                    "subsets": [{"addresses": [{"ip": own}]}],
                })
                .to_string(),
            );
            self.commit(Op::Put { key: key(own), value, lease }).await?;
            state.lease = Some(lease);
            all.insert(own);
        }
        Ok(all)
    }

    async fn commit(&self, op: Op) -> Result<(), StatusError> {
        let txn = Txn { success: vec![op], ..Txn::default() };
        self.registry.store().txn(txn).await.map(|_| ()).map_err(store_error)
    }

    /// The addresses of the keys. A value without an address is another program's, and counts for none.
    async fn listed(&self) -> Result<BTreeSet<IpAddr>, StatusError> {
        let request = RangeRequest::new(KeyRange::prefix(LEASES));
        let found = self.registry.store().range(request).await.map_err(store_error)?;
        let addresses = found.kvs.iter().filter_map(|kv| {
            let object: Endpoints = serde_json::from_slice(&kv.value.bytes()).ok()?;
            addresses_of(&object).next()
        });
        Ok(addresses.collect())
    }

    /// The addresses that the object shows now.
    async fn written(&self) -> Result<BTreeSet<IpAddr>, StatusError> {
        let object: Option<Endpoints> = self.registry.find("default", KUBERNETES).await?;
        Ok(object.iter().flat_map(addresses_of).collect())
    }

    async fn write(&self, addresses: &BTreeSet<IpAddr>) -> Result<(), StatusError> {
        let port = i32::from(self.own.port);
        put(&self.registry, endpoints(addresses, port), |new, old| {
            old.metadata.labels.get_or_insert_default().extend(skip_mirror());
            old.subsets = new.subsets.clone();
        })
        .await?;
        for (name, is_v4) in [(KUBERNETES, true), (KUBERNETES_IPV6, false)] {
            let family: Vec<&IpAddr> =
                addresses.iter().filter(|ip| ip.is_ipv4() == is_v4).collect();
            let is_empty = family.is_empty();
            if is_empty && self.registry.find::<EndpointSlice>("default", name).await?.is_none() {
                continue;
            }
            put(&self.registry, slice(name, is_v4, &family, port), |new, old| {
                let labels = new.metadata.labels.clone().unwrap_or_default();
                old.metadata.labels.get_or_insert_default().extend(labels);
                old.endpoints = new.endpoints.clone();
                old.ports = new.ports.clone();
            })
            .await?;
        }
        Ok(())
    }
}

fn key(address: IpAddr) -> Bytes {
    format!("{LEASES}{address}").into()
}

fn addresses_of(object: &Endpoints) -> impl Iterator<Item = IpAddr> {
    let subsets = object.subsets.iter().flatten();
    let addresses = subsets.flat_map(|subset| subset.addresses.iter().flatten());
    addresses.filter_map(|address| address.ip.parse().ok())
}

/// The list of servers by their number. If there are too many, those that follow the own address go,
/// in circles. Pure.
fn counted(there: &BTreeSet<IpAddr>, own: Option<IpAddr>, most: usize) -> BTreeSet<IpAddr> {
    let mut all = there.clone();
    let Some(own) = own else { return all };
    all.insert(own);
    while all.len() > most.max(1) {
        let Some(after) = all.range(own..).nth(1).or(all.first()).copied() else { break };
        all.remove(&after);
    }
    all
}

fn skip_mirror() -> std::collections::BTreeMap<String, String> {
    map([("endpointslice.kubernetes.io/skip-mirror", "true")]).unwrap_or_default()
}

fn endpoints(addresses: &BTreeSet<IpAddr>, port: i32) -> Endpoints {
    // Upstream's order is that of the text.
    let texts: BTreeSet<String> = addresses.iter().map(IpAddr::to_string).collect();
    let address = |ip| EndpointAddress { ip, ..EndpointAddress::default() };
    let port = EndpointPort {
        name: Some("https".into()),
        port,
        protocol: Some("TCP".into()),
        ..EndpointPort::default()
    };
    let subset = EndpointSubset {
        addresses: Some(texts.into_iter().map(address).collect()),
        ports: Some(vec![port]),
        ..EndpointSubset::default()
    };
    Endpoints {
        metadata: ObjectMeta { labels: Some(skip_mirror()), ..named("default", KUBERNETES) },
        subsets: (!addresses.is_empty()).then(|| vec![subset]),
    }
}

fn slice(name: &str, is_v4: bool, addresses: &[&IpAddr], port: i32) -> EndpointSlice {
    let texts: BTreeSet<String> = addresses.iter().map(|ip| ip.to_string()).collect();
    let ready = EndpointConditions { ready: Some(true), ..EndpointConditions::default() };
    let endpoint = |ip| Endpoint {
        addresses: vec![ip],
        conditions: Some(ready.clone()),
        ..Endpoint::default()
    };
    EndpointSlice {
        metadata: ObjectMeta {
            labels: map([("kubernetes.io/service-name", KUBERNETES)]),
            ..named("default", name)
        },
        address_type: if is_v4 { "IPv4" } else { "IPv6" }.into(),
        endpoints: Some(texts.into_iter().map(endpoint).collect()),
        ports: Some(vec![SlicePort {
            name: Some("https".into()),
            port: Some(port),
            protocol: Some("TCP".into()),
            ..SlicePort::default()
        }]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn server(registry: &Registry, address: &str) -> Arc<Reconciler> {
        let address = Some(ip(address));
        Reconciler::new(registry, Own { mode: Mode::Lease, is_shared: true, address, port: 6443 })
    }

    /// The addresses of the object; those of the slices are the same.
    async fn shown(registry: &Registry) -> Vec<String> {
        let object: Option<Endpoints> =
            registry.find("default", KUBERNETES).await.expect("readable");
        let all: Vec<String> =
            object.iter().flat_map(addresses_of).map(|ip| ip.to_string()).collect();
        let mut sliced = vec![];
        for name in [KUBERNETES, KUBERNETES_IPV6] {
            let slice: Option<EndpointSlice> =
                registry.find("default", name).await.expect("readable");
            let endpoints = slice.and_then(|slice| slice.endpoints).into_iter().flatten();
            sliced.extend(endpoints.flat_map(|endpoint| endpoint.addresses));
        }
        assert_eq!(all, sliced);
        all
    }

    async fn until(registry: &Registry, wanted: &[&str]) -> Duration {
        let begun = tokio::time::Instant::now();
        while shown(registry).await != wanted {
            assert!(begun.elapsed() < Duration::from_secs(60), "{wanted:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn live_servers_are_listed_and_dead_ones_leave() {
        let _world = base::sim::enter(1);
        let (registry, tasks) = (testing::registry(&Tasks::new("test")), Tasks::new("test"));
        let (dying, stopping, staying) = ("192.0.2.1", "192.0.2.2", "192.0.2.3");
        let doomed = Tasks::new("one server");
        server(&registry, dying).start(&doomed);
        let second = server(&registry, stopping);
        second.start(&tasks);
        server(&registry, staying).start(&tasks);
        until(&registry, &[dying, stopping, staying]).await;
        // Nothing is written while nothing changes.
        let before = registry.revision().await.expect("readable");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(registry.revision().await.expect("readable"), before);
        doomed.shutdown(Duration::from_secs(1)).await;
        let took = until(&registry, &[stopping, staying]).await;
        assert!(took < Duration::from_secs(15), "{took:?}");
        second.leave().await;
        assert_eq!(shown(&registry).await, [staying]);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(shown(&registry).await, [staying], "who has left does not come back");
        tasks.shutdown(Duration::from_secs(5)).await;
    }

    /// The key belongs to an earlier process and will expire, or it was deleted.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_lost_its_key_comes_back() {
        let _world = base::sim::enter(1);
        let registry = testing::registry(&Tasks::new("test"));
        server(&registry, "192.0.2.1").round().await.expect("written");
        let tasks = Tasks::new("test");
        server(&registry, "192.0.2.1").start(&tasks);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(shown(&registry).await, ["192.0.2.1"]);
        let range = KeyRange::prefix(LEASES);
        let txn = Txn { success: vec![Op::DeleteRange { range }], ..Txn::default() };
        registry.store().txn(txn).await.expect("deleted");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(shown(&registry).await, ["192.0.2.1"]);
        tasks.shutdown(Duration::from_secs(5)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn both_families_have_slices_and_one_server_without_an_etcd_has_no_key() {
        let registry = testing::registry(&Tasks::new("test"));
        server(&registry, "2001:db8::1").round().await.expect("written");
        let second = server(&registry, "192.0.2.1");
        second.round().await.expect("written");
        assert_eq!(shown(&registry).await, ["192.0.2.1", "2001:db8::1"]);
        second.leave().await;
        assert_eq!(shown(&registry).await, ["2001:db8::1"]);
        let alone = testing::registry(&Tasks::new("test"));
        let address = Some(ip("192.0.2.7"));
        let own = Own { address, port: 6443, ..Own::default() };
        let reconciler = Reconciler::new(&alone, own);
        reconciler.round().await.expect("written");
        reconciler.leave().await;
        assert_eq!(shown(&alone).await, ["192.0.2.7"], "it comes back at the same address");
        assert!(reconciler.listed().await.expect("readable").is_empty());
    }

    #[test]
    fn servers_are_counted() {
        let check = |there: &[&str], own: &str, most: usize, expected: &[&str]| {
            let set = |all: &[&str]| all.iter().map(|one| ip(one)).collect::<BTreeSet<_>>();
            assert_eq!(counted(&set(there), Some(ip(own)), most), set(expected));
        };
        check(&[], "192.0.2.1", 1, &["192.0.2.1"]);
        check(&["192.0.2.1"], "192.0.2.2", 1, &["192.0.2.2"]);
        check(&["192.0.2.1"], "192.0.2.2", 2, &["192.0.2.1", "192.0.2.2"]);
        let four = &["192.0.2.1", "192.0.2.2", "192.0.2.3"];
        check(four, "192.0.2.4", 2, &["192.0.2.3", "192.0.2.4"]);
        check(four, "192.0.2.0", 3, &["192.0.2.0", "192.0.2.2", "192.0.2.3"]);
    }
}
