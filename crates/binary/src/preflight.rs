//! Checks before a start creates anything: flags that cannot work together, and a machine that has a node
//! already.
//!
//! Invariant: these checks change nothing, and an error names the flag that fixes it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpListener};

use anyhow::{Context, bail};
use ipnet::IpNet;

use crate::flags::{Node, Server};

/// A port of a node and its purpose, as in `kubelet::Config` and `proxy::Config`.
type Port = ([u8; 4], u16, &'static str);
const ALL: [u8; 4] = [0, 0, 0, 0];
const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
const KUBELET_PORTS: [Port; 2] =
    [(ALL, 10250, "the kubelet's server"), (LOOPBACK, 10248, "the kubelet's health")];
const PROXY_PORTS: [Port; 2] =
    [(ALL, 10256, "kube-proxy's health"), (LOOPBACK, 10249, "kube-proxy's metrics")];
/// Number of the DNS address in the Service range, as installers of Kubernetes choose it.
const DNS_ADDRESS: u128 = 10;

/// Adds the defaults that depend on other flags.
pub fn completed(mut flags: Server) -> anyhow::Result<Server> {
    if flags.cluster_dns.is_empty()
        && let Some(range) = flags.service_cidr.first()
    {
        let address = nth(range, DNS_ADDRESS).with_context(|| {
            format!("--service-cidr {range} is too small for the cluster's DNS; give --cluster-dns")
        })?;
        flags.cluster_dns = vec![address];
    }
    Ok(flags)
}

/// The address with this number in the range.
fn nth(range: &IpNet, number: u128) -> Option<IpAddr> {
    let address = match range.network() {
        IpAddr::V4(first) => {
            IpAddr::from(u32::from(first).checked_add(number as u32)?.to_be_bytes())
        }
        IpAddr::V6(first) => IpAddr::from(u128::from(first).checked_add(number)?.to_be_bytes()),
    };
    (range.contains(&address) && address != range.broadcast()).then_some(address)
}

/// Overlapping ranges would send traffic of Services to pods, or the reverse.
pub fn check_ranges(flags: &Server) -> anyhow::Result<()> {
    let clusters = flags.cluster_cidr.iter().map(|range| ("--cluster-cidr", range));
    let services = flags.service_cidr.iter().map(|range| ("--service-cidr", range));
    let all: Vec<_> = clusters.chain(services).collect();
    for (index, (flag, range)) in all.iter().enumerate() {
        for (other_flag, other) in &all[..index] {
            if range.contains(&other.network()) || other.contains(&range.network()) {
                bail!(
                    "{flag} {range} overlaps {other_flag} {other}; choose another range for one of them"
                );
            }
        }
    }
    for dns in &flags.cluster_dns {
        if !flags.service_cidr.iter().any(|range| range.contains(dns)) {
            let ranges: Vec<_> = flags.service_cidr.iter().map(ToString::to_string).collect();
            bail!("--cluster-dns {dns} is outside of --service-cidr {}", ranges.join(","));
        }
    }
    Ok(())
}

/// Whether this machine can be the requested node.
pub async fn check_node(flags: &Server) -> anyhow::Result<()> {
    if flags.disable_agent {
        return Ok(());
    }
    check_machine(&flags.node).await
}

/// Checks the ports of the node in this process. Call it after locking the data directory: that error is
/// clearer if the same cluster uses the port.
pub fn check_ports_of(flags: &Server) -> anyhow::Result<()> {
    let takes_free_ones = flags.https_listen_port == 0;
    let has_proxy = !flags.disable.iter().any(|name| name == "kube-proxy");
    if flags.disable_agent || takes_free_ones { Ok(()) } else { check_ports(has_proxy) }
}

/// Checks the name and the addresses.
pub async fn check_machine(flags: &Node) -> anyhow::Result<()> {
    crate::node::name(flags)?;
    if flags.node_ip.is_empty() {
        return Ok(());
    }
    let links = net::Links::open().context("cannot talk to the kernel's network")?;
    let own = links.addresses().await.context("cannot list the addresses of this machine")?;
    let own: BTreeSet<IpAddr> = own.iter().map(|one| one.net.addr()).collect();
    check_addresses(&flags.node_ip, &own)
}

/// Upstream: the kubelet's validateNodeIP.
fn check_addresses(given: &[IpAddr], own: &BTreeSet<IpAddr>) -> anyhow::Result<()> {
    for address in given {
        if address.is_loopback() || address.is_multicast() || address.is_unspecified() {
            bail!("--node-ip {address}: other machines cannot reach this node at this address");
        }
        if !own.contains(address) {
            let others = own.iter().filter(|one| !one.is_loopback());
            let others: Vec<_> = others.map(ToString::to_string).collect();
            bail!(
                "--node-ip {address} is not an address of this machine, which has {}",
                others.join(", ")
            );
        }
    }
    Ok(())
}

/// Returns an error if another process has a port of the node: a machine can be one node only.
pub fn check_ports(has_proxy: bool) -> anyhow::Result<()> {
    let proxy = PROXY_PORTS.iter().filter(|_| has_proxy);
    for &(address, port, purpose) in KUBELET_PORTS.iter().chain(proxy) {
        if let Err(error) = TcpListener::bind(SocketAddr::from((address, port)))
            && error.kind() == std::io::ErrorKind::AddrInUse
        {
            let owner =
                cli::check_config::owner_of(port).unwrap_or_else(|| "another process".into());
            bail!(
                "port {port} ({purpose}) is taken: the node of this machine belongs to {owner}; stop \
                 it, or start with --disable-agent for a control plane alone"
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        server: Server,
    }

    fn flags(words: &[&str]) -> Server {
        let words = ["server"].iter().chain(words);
        Line::try_parse_from(words).expect("flags").server
    }

    #[test]
    fn the_dns_has_the_tenth_service_address() {
        let check = |words: &[&str], expected: &str| {
            let dns = completed(flags(words)).expect("there is room").cluster_dns;
            assert_eq!(dns, [expected.parse::<IpAddr>().expect("an address")], "{words:?}");
        };
        check(&[], "10.43.0.10");
        check(&["--service-cidr=10.96.0.0/12"], "10.96.0.10");
        check(&["--service-cidr=fd43::/112,10.96.0.0/12"], "fd43::a");
        check(&["--cluster-dns=10.43.7.7"], "10.43.7.7");
        let why =
            completed(flags(&["--service-cidr=10.96.0.0/30"])).expect_err("no room").to_string();
        assert!(why.contains("--service-cidr") && why.contains("--cluster-dns"), "{why}");
    }

    #[test]
    fn ranges_that_overlap_are_refused() {
        let check = |words: &[&str], expected: Option<&str>| {
            let flags = completed(flags(words)).expect("there is room");
            let why = check_ranges(&flags).err().map(|error| error.to_string());
            match expected {
                None => assert_eq!(why, None),
                Some(part) => {
                    assert!(why.as_deref().is_some_and(|why| why.contains(part)), "{why:?}")
                }
            }
        };
        check(&[], None);
        check(&["--service-cidr=10.96.0.0/12"], None);
        check(
            &["--cluster-cidr=10.43.0.0/16"],
            Some("--service-cidr 10.43.0.0/16 overlaps --cluster-cidr"),
        );
        check(&["--cluster-cidr=10.0.0.0/8"], Some("overlaps"));
        check(&["--cluster-cidr=10.43.4.0/22"], Some("overlaps"));
        check(&["--service-cidr=10.43.0.0/16,10.43.4.0/22"], Some("overlaps --service-cidr"));
        check(&["--cluster-dns=10.96.0.10"], Some("outside of --service-cidr 10.43.0.0/16"));
    }

    #[test]
    fn addresses_of_other_machines_are_refused() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let own = ["127.0.0.1", "10.0.0.1", "fd00::1"].map(address).into();
        let check =
            |given: &str| check_addresses(&[address(given)], &own).map_err(|e| e.to_string());
        assert_eq!(check("10.0.0.1"), Ok(()));
        assert_eq!(check("fd00::1"), Ok(()));
        let why = check("10.0.0.2").expect_err("not ours");
        assert!(
            why.contains("10.0.0.2 is not an address") && why.contains("10.0.0.1, fd00::1"),
            "{why}"
        );
        for unfit in ["127.0.0.1", "0.0.0.0", "224.0.0.1", "::1"] {
            assert!(check(unfit).is_err(), "{unfit}");
        }
    }
}
