//! Applies objects to the kernel: computes the ruleset, compares it with the applied one, applies
//! the difference, and deletes UDP flows to removed endpoints.
//!
//! Invariant: `applied` equals the kernel's rules. It is unknown after a refusal and after another
//! program changed the tables. Then the next round replaces the tables, like a new process.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::conntrack::{Conntrack, Flow};
use net::monitor::{Change, Monitor};
use net::nft::{self, Ip, Nft, Proto, Ruleset, diff};
use net::watch::Watch;

use crate::Error;
use crate::endpoints;
use crate::model::{self, Facts};
use crate::services::ServicePort;

pub struct Syncer {
    nft: Nft,
    conntrack: Conntrack,
    applied: Option<Ruleset>,
    udp: Udp,
}

/// The input of one round.
pub struct Seen {
    pub services: Vec<Arc<Service>>,
    pub slices: Vec<Arc<EndpointSlice>>,
    pub facts: Facts,
}

/// The endpoints that may answer UDP traffic to Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Udp {
    addresses: BTreeMap<SocketAddr, BTreeSet<SocketAddr>>,
    node_ports: BTreeMap<(u16, bool), BTreeSet<SocketAddr>>,
}

impl Syncer {
    pub fn open(netns: Option<&Path>) -> Result<Self, Error> {
        let (nft, conntrack) = match netns {
            Some(path) => (Nft::open_in(path)?, Conntrack::open_in(path)?),
            None => (Nft::open()?, Conntrack::open()?),
        };
        Ok(Self { nft, conntrack, applied: None, udp: Udp::default() })
    }

    /// Watches for other programs' changes to the rules.
    pub fn watch(&self, netns: Option<&Path>) -> Result<Watch, Error> {
        Ok(Watch::new(Monitor::of_rules(netns, &self.nft)?))
    }

    pub fn is_own(&self, change: Change<'_>) -> bool {
        let Change::Rules { family, table } = change else { return false };
        self.applied.as_ref().is_some_and(|applied| applied.has_table(family, table))
    }

    /// Loads the kernel modules for the rules, on a thread that may block. Returns the missing ones.
    pub async fn load_modules(mut self) -> Result<(Self, Vec<&'static str>), Error> {
        net::modules::load(net::modules::SERVICES).await;
        let work = move || net::modules::missing(&mut self.nft).map(|missing| (self, missing));
        Ok(tokio::task::spawn_blocking(work).await.map_err(|_| Error::Worker)??)
    }

    /// Call this after another program changed the rules: the next round replaces them.
    pub fn forget(&mut self) {
        self.applied = None;
    }

    /// Runs one round on a thread that may block. Returns the number of requests, or the refusal.
    pub async fn sync(
        mut self,
        seen: Arc<Seen>,
    ) -> Result<(Self, Result<usize, nft::Error>), Error> {
        let work = move || {
            let outcome = self.round(&seen.services, &seen.slices, &seen.facts);
            (self, outcome)
        };
        tokio::task::spawn_blocking(work).await.map_err(|_| Error::Worker)
    }

    fn round(
        &mut self,
        services: &[Arc<Service>],
        slices: &[Arc<EndpointSlice>],
        facts: &Facts,
    ) -> Result<usize, nft::Error> {
        let wanted = model::ruleset(services, slices, facts);
        let batch = diff(&self.applied.take().unwrap_or_default(), &wanted);
        self.nft.apply(&batch)?;
        self.applied = Some(wanted);
        let udp = Udp::of(services, slices, &facts.node);
        if udp != self.udp {
            // Best effort: a remaining flow ends with its timeout.
            if let Err(error) = self.forget_stale_flows(&udp) {
                tracing::debug!(%error, "failed to delete stale UDP flows");
            }
            self.udp = udp;
        }
        Ok(batch.len())
    }

    fn forget_stale_flows(&mut self, udp: &Udp) -> Result<(), net::Error> {
        for ip in [Ip::V4, Ip::V6] {
            let flows = self.conntrack.udp_flows(ip)?;
            for flow in flows.iter().filter(|flow| udp.is_stale(flow)) {
                self.conntrack.delete(flow)?;
            }
        }
        Ok(())
    }
}

impl Udp {
    fn of(services: &[Arc<Service>], slices: &[Arc<EndpointSlice>], node: &str) -> Self {
        let mut udp = Self::default();
        for ip in [Ip::V4, Ip::V6] {
            let all = endpoints::collect(slices, ip, node);
            let ports = services.iter().flat_map(|service| ServicePort::of(service, ip));
            for port in ports.filter(|port| port.name.proto == Proto::Udp) {
                let usable = all.get(&port.name).into_iter().flatten();
                let usable = usable.filter(|e| e.ready || (e.serving && e.terminating));
                let answers: BTreeSet<SocketAddr> = usable.map(|e| e.address).collect();
                let others = port.external_ips.iter().chain(&port.load_balancer_ips);
                for address in [&port.cluster_ip].into_iter().chain(others) {
                    let address = SocketAddr::new(*address, port.port);
                    udp.addresses.insert(address, answers.clone());
                }
                if let Some(node_port) = port.node_port {
                    udp.node_ports.insert((node_port, ip == Ip::V4), answers);
                }
            }
        }
        udp
    }

    /// Whether the flow goes to one of our Services, but no usable endpoint of that Service answers it.
    fn is_stale(&self, flow: &Flow) -> bool {
        let answers = self
            .addresses
            .get(&flow.to)
            .or_else(|| self.node_ports.get(&(flow.to.port(), flow.to.is_ipv4())));
        answers.is_some_and(|answers| !answers.contains(&flow.answered_by))
    }
}
