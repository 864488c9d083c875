//! Host ports: ports of the node that lead into pods.
//!
//! ```text
//!  in from outside ─ prerouting ─┐                   ┌─ ip daddr 10.0.0.5 tcp dport 80 dnat to pod ─┐
//!  the node's own  ─ output ─────┴─ local address? ──┴─ tcp dport 81 dnat to another pod ───────────┴─► bridge
//!                                                       postrouting: pods' and loopback sources are masqueraded
//! ```
//!
//! In: host ports. Out: a ruleset with a table per address family. Pure, except [`forget_flows`],
//! which changes the kernel.
//! Ports on one address come before those on all addresses. Connections from a pod through the
//! node's address, and from the node's loopback, are masqueraded: otherwise their answers would
//! take a shorter route without translation.
//! Upstream: the `portmap` CNI plugin, which the runtimes use.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ipnet::IpNet;

use crate::conntrack::Conntrack;
use crate::error::Error;
use crate::nft::{
    BaseChain, ChainKind, Field, Hook, Ip, Op, Policy, Proto, Ruleset, Stmt, Table, Value, Verdict,
};

/// The address type "local" of the routing table.
const LOCAL: u32 = 2;
const DNAT: u32 = 32;
/// A priority before connection tracking, where no address is translated yet.
const BEFORE_TRACKING: i32 = -300;

/// One port of the node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    pub protocol: Proto,
    /// `None`: every address of the node.
    pub host: Option<IpAddr>,
    pub port: u16,
    pub to: SocketAddr,
    /// The node's pod CIDR of that family.
    pub pods: IpNet,
}

/// A table `name` for every family that has ports.
pub fn ruleset(name: &str, ports: &[HostPort]) -> Ruleset {
    let mut out = Ruleset::default();
    for ip in [Ip::V4, Ip::V6] {
        let mut own: Vec<&HostPort> =
            ports.iter().filter(|port| Ip::of(&port.to.ip()) == ip).collect();
        // Ports on one address come before ports on all addresses.
        own.sort_unstable_by_key(|port| (port.host.is_none(), *port));
        if !own.is_empty() {
            out.tables.insert((ip.family(), name.to_owned()), table(ip, &own));
        }
    }
    out
}

/// The tables that [`ruleset`] may have created, as empty tables to remove.
pub fn none(name: &str) -> Ruleset {
    let empty = |ip: Ip| ((ip.family(), name.to_owned()), Table::default());
    Ruleset { tables: [Ip::V4, Ip::V6].map(empty).into() }
}

fn table(ip: Ip, ports: &[&HostPort]) -> Table {
    let mut table =
        Table { comment: Some("ports of the node that lead into pods".into()), ..Table::default() };
    let base = |hook, priority| {
        Some(BaseChain { kind: ChainKind::Nat, hook, priority, policy: Policy::Accept })
    };
    table.chain("hostports");
    if ip == Ip::V4 {
        not_for_others(&mut table);
    }
    for (chain, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        table.chain(chain).base = base(hook, -100);
        let local = Stmt::equals(Field::FibDaddrType, Value::Number(LOCAL));
        table.rule(chain, vec![local, Stmt::jump("hostports")]);
    }
    for port in ports {
        let host = port.host.map(|host| Stmt::equals(Field::Daddr(ip), Value::Ip(host)));
        let dport = Stmt::Dport { proto: port.protocol, port: port.port };
        let stmts = host.into_iter().chain([dport, Stmt::Dnat(port.to)]);
        table.rule("hostports", stmts.collect());
    }
    table.chain("postrouting").base = base(Hook::Postrouting, 100);
    let untouched = Stmt::NoBit { field: Field::CtStatus, bits: DNAT };
    table.rule("postrouting", vec![untouched, Stmt::Verdict(Verdict::Return)]);
    let targets: BTreeSet<(IpAddr, IpNet)> =
        ports.iter().map(|port| (port.to.ip(), port.pods.trunc())).collect();
    for (pod, pods) in targets {
        let to = Stmt::equals(Field::Daddr(ip), Value::Ip(pod));
        let from = |net| Stmt::InNet { field: Field::Saddr(ip), op: Op::Eq, net };
        let masquerade = || Stmt::Masquerade { fully_random: false };
        table.rule("postrouting", vec![to.clone(), from(pods), masquerade()]);
        if ip == Ip::V4 {
            table.rule("postrouting", vec![to, from(loopback()), masquerade()]);
        }
    }
    table
}

/// Where a port of 127.0.0.1 leads into a pod, the pod's link accepts packets for 127.0.0.0/8
/// (`route_localnet`, see [`crate::pods`]). That is for answers, which are translated after this chain.
/// Packets that a pod sends to that network are dropped: they would reach the node's loopback.
fn not_for_others(table: &mut Table) {
    let chain = "loopback";
    table.chain(chain).base = Some(BaseChain {
        kind: ChainKind::Filter,
        hook: Hook::Prerouting,
        priority: BEFORE_TRACKING,
        policy: Policy::Accept,
    });
    let name = Value::Name("lo".into());
    let elsewhere = Stmt::Match { field: Field::Iifname, op: Op::Ne, value: name };
    let net = loopback();
    let to = Stmt::InNet { field: Field::Daddr(Ip::V4), op: Op::Eq, net };
    table.rule(chain, vec![elsewhere, to, Stmt::Verdict(Verdict::Drop)]);
}

fn loopback() -> IpNet {
    IpNet::new(Ipv4Addr::LOCALHOST.into(), 8).expect("8 is a length")
}

/// Deletes the UDP flows of these ports. They outlive their pod, and the next pod with that port
/// would get nothing from old clients.
pub fn forget_flows(ports: &[HostPort]) -> Result<(), Error> {
    let udp = |ip: Ip| {
        let own = ports.iter().filter(move |p| p.protocol == Proto::Udp);
        own.filter(move |p| Ip::of(&p.to.ip()) == ip).collect::<Vec<_>>()
    };
    for ip in [Ip::V4, Ip::V6] {
        let own = udp(ip);
        if own.is_empty() {
            continue;
        }
        let mut conntrack = Conntrack::open()?;
        for flow in conntrack.udp_flows(ip)? {
            let concerned = own.iter().any(|port| {
                port.port == flow.to.port() && port.host.is_none_or(|host| host == flow.to.ip())
            });
            if concerned && !own.iter().any(|port| port.to == flow.answered_by) {
                conntrack.delete(&flow)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(host: Option<&str>, port: u16, to: &str, pods: &str) -> HostPort {
        HostPort {
            protocol: Proto::Tcp,
            host: host.map(|host| host.parse().expect("an address")),
            port,
            to: to.parse().expect("an address"),
            pods: pods.parse().expect("a network"),
        }
    }

    #[test]
    fn one_address_comes_before_all() {
        let ports = [
            port(None, 80, "10.42.0.2:8080", "10.42.0.0/24"),
            port(Some("192.168.7.1"), 80, "10.42.0.3:8080", "10.42.0.0/24"),
            port(None, 80, "[fd00::2]:8080", "fd00::/64"),
        ];
        let text = ruleset("ports", &ports).to_string();
        let rules: Vec<&str> =
            text.lines().map(str::trim).filter(|line| line.contains("dnat to")).collect();
        assert_eq!(
            rules,
            [
                "ip daddr 192.168.7.1 tcp dport 80 dnat to 10.42.0.3:8080",
                "tcp dport 80 dnat to 10.42.0.2:8080",
                "tcp dport 80 dnat to [fd00::2]:8080",
            ]
        );
        assert!(text.contains("ip daddr 10.42.0.2 ip saddr 127.0.0.0/8 masquerade"), "{text}");
        assert_eq!(ruleset("ports", &ports[..2]).tables.len(), 1);
    }
}
