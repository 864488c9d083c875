//! The host ports of the sandboxes, applied to the kernel.
//!
//! In: the port mappings of all ready sandboxes. Out: one nftables table of this runtime, named
//! after its bridge. Only differences are applied.
//! Invariant: the kernel's table equals the last applied ruleset. It is replaced as a whole at
//! start, and when the kernel refuses the difference.

use std::net::{IpAddr, SocketAddr};

use cri::{Error, PortMapping, Protocol, Result};
use ipnet::IpNet;
use net::host_ports::{HostPort, forget_flows, none, ruleset};
use net::nft::{Nft, Proto, Ruleset, diff};

pub(crate) struct HostPorts {
    table: String,
    /// Guards the kernel's ruleset during calls that change it. `None`: unknown.
    applied: tokio::sync::Mutex<Option<Ruleset>>,
}

impl HostPorts {
    pub(crate) fn new(bridge: &str) -> Self {
        let table = format!("{bridge}-hostports");
        let applied = tokio::sync::Mutex::new(Some(Ruleset::default()));
        Self { table, applied }
    }

    /// Replaces the rules of a former process, too.
    pub(crate) async fn replace(&self, ports: Vec<HostPort>) -> Result<()> {
        *self.applied.lock().await = None;
        self.follow(ports).await
    }

    pub(crate) async fn follow(&self, ports: Vec<HostPort>) -> Result<()> {
        let mut applied = self.applied.lock().await;
        let wanted = ruleset(&self.table, &ports);
        let known = applied.take();
        if known.as_ref() != Some(&wanted) {
            let is_known = known.is_some();
            let done = self.apply(known, &wanted, &ports).await;
            // Another program may have removed our table: creates all of it again.
            let again = done.is_err() && is_known;
            (if again { self.apply(None, &wanted, &ports).await } else { done })?;
        }
        *applied = Some(wanted);
        Ok(())
    }

    async fn apply(
        &self,
        known: Option<Ruleset>,
        wanted: &Ruleset,
        ports: &[HostPort],
    ) -> Result<()> {
        // An unknown table is replaced, or removed if there are no ports.
        let unknown = || if ports.is_empty() { none(&self.table) } else { Ruleset::default() };
        let batch = diff(&known.unwrap_or_else(unknown), wanted);
        let ports = ports.to_vec();
        let failed =
            |error: &dyn std::fmt::Display| Error::Internal(format!("set up host ports: {error}"));
        let done = tokio::task::spawn_blocking(move || {
            Nft::open().and_then(|mut nft| nft.apply(&batch)).map_err(|error| failed(&error))?;
            forget_flows(&ports).map_err(|error| failed(&error))
        });
        done.await.map_err(|error| Error::Internal(error.to_string()))?
    }
}

/// One sandbox's mappings: one host port for every sandbox address that fits the mapping's host address.
pub(crate) fn of(mappings: &[PortMapping], addresses: &[IpAddr], cidrs: &[IpNet]) -> Vec<HostPort> {
    let mut out = vec![];
    for mapping in mappings {
        let ports = (u16::try_from(mapping.host_port), u16::try_from(mapping.container_port));
        let (Ok(port @ 1..), Ok(inside)) = ports else { continue };
        let protocol = match mapping.protocol() {
            Protocol::Tcp => Proto::Tcp,
            Protocol::Udp => Proto::Udp,
            Protocol::Sctp => Proto::Sctp,
        };
        let host: Option<IpAddr> = mapping.host_ip.parse().ok();
        let host = host.filter(|host| !host.is_unspecified());
        for address in addresses {
            let pods = cidrs.iter().find(|cidr| cidr.contains(address));
            let fits = host.is_none_or(|host| host.is_ipv4() == address.is_ipv4());
            if let (Some(pods), true) = (pods, fits) {
                let to = SocketAddr::new(*address, inside);
                out.push(HostPort { protocol, host, port, to, pods: *pods });
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_become_host_ports() {
        let cidrs = ["10.42.0.0/24", "fd00::/64"].map(|cidr| cidr.parse().expect("a network"));
        let addresses = ["10.42.0.2", "fd00::2"].map(|ip| ip.parse().expect("an address"));
        let check = |host_ip: &str, host_port: i32, expected: &[&str]| {
            let mapping = PortMapping {
                protocol: Protocol::Udp as i32,
                container_port: 53,
                host_port,
                host_ip: host_ip.into(),
            };
            let got = of(&[mapping], &addresses, &cidrs);
            let got: Vec<String> = got.iter().map(|port| port.to.to_string()).collect();
            assert_eq!(got, expected, "{host_ip}:{host_port}");
        };
        check("", 80, &["10.42.0.2:53", "[fd00::2]:53"]);
        check("0.0.0.0", 80, &["10.42.0.2:53", "[fd00::2]:53"]);
        check("127.0.0.1", 80, &["10.42.0.2:53"]);
        check("::1", 80, &["[fd00::2]:53"]);
        check("", 0, &[]);
    }
}
