//! The pod network of one node: a veth pair per pod, and routes. Pods are routed, not bridged.
//!
//! ```text
//!  pod netns                          node netns
//!  eth0 10.42.0.7/32 ═════veth═════ vethXXXX 10.42.0.1/32     route 10.42.0.7/32 dev vethXXXX
//!  default via 10.42.0.1 onlink       decapod0 10.42.0.1/24, a bridge without ports
//!  10.42.0.1 is at 0a:58:0a:2a:00:01  10.42.0.7 is at 0a:58:0a:2a:00:07
//! ```
//!
//! Every packet of a pod passes the node's rules, even to a pod of the same node. Services need
//! that: without the kernel module `br_netfilter`, a bridged answer would pass no rule. Routing
//! also prevents ARP spoofing between pods.
//! Each veth has the gateway's address, so that the node uses it for ARP and for masquerading. The bridge has
//! the address, too: it exists before the first pod, and takes packets for addresses without a pod.
//! Both ends have permanent neighbour entries: no packet waits for ARP, NDP or duplicate detection.
//! Hardware addresses derive from IP addresses.
//! Earlier versions bridged pods. [`adopt_pod`] converts them, and their connections continue.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use rtnetlink::{LinkBridge, LinkMessageBuilder, LinkUnspec};

use crate::error::{During, Error, tolerate};
use crate::links::{Links, Pair, Via};

/// The interface's name inside every pod.
pub const POD_INTERFACE: &str = "eth0";

/// The bridge in the kernel. It has no ports; it holds the gateways' addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridge {
    pub name: String,
    pub index: u32,
    pub mtu: u32,
}

/// How to connect a pod.
#[derive(Clone, Debug)]
pub struct PodAttachment {
    /// The path of the pod's pinned network namespace.
    pub netns: PathBuf,
    /// The name of the node's end of the pair; at most 15 bytes, unique on the node.
    pub host_veth: String,
    /// The pod's addresses, at most one per family.
    pub addresses: Vec<IpAddr>,
    /// The node's addresses in the pod network, one for each of those families.
    pub gateways: Vec<IpAddr>,
    pub mtu: u32,
    /// A host port on 127.0.0.1 leads into the pod.
    pub from_loopback: bool,
}

/// The result of connecting a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLink {
    pub interface: String,
    /// As text, `0a:58:0a:2a:00:07`.
    pub mac: String,
    pub host_index: u32,
}

impl Bridge {
    /// Creates or repairs the bridge: up, with this MTU and all gateway addresses.
    pub async fn ensure(
        links: &Links,
        name: &str,
        gateways: &[IpNet],
        mtu: u32,
    ) -> Result<Self, Error> {
        let first = gateways.first().ok_or_else(|| Error::Invalid("no gateway address".into()))?;
        if links.find(name).await?.is_none() {
            let message =
                LinkBridge::new(name).address(mac_of(&first.addr()).to_vec()).mtu(mtu).build();
            tolerate(links.handle.link().add(message).execute().await, &[libc::EEXIST])
                .during(|| format!("create bridge {name}"))
                .map_err(|error| error.names("bridge"))?;
        }
        let link = links.link(name).await?;
        if !link.up || link.mtu != mtu {
            let message =
                LinkMessageBuilder::<LinkUnspec>::default().index(link.index).mtu(mtu).up().build();
            links
                .handle
                .link()
                .change(message)
                .execute()
                .await
                .during(|| format!("change bridge {name}"))?;
        }
        for gateway in gateways {
            links.ensure_address(link.index, *gateway).await?;
        }
        Ok(Self { name: name.to_owned(), index: link.index, mtu })
    }
}

/// Connects a pod: veth pair, addresses, routes, loopback. Replaces a leftover pair of that name. A
/// failure leaves nothing behind.
pub async fn attach_pod(links: &Links, pod: &PodAttachment) -> Result<PodLink, Error> {
    let attached = attach(links, pod).await;
    if attached.is_err() {
        // Best effort: the first error is the one to report.
        let _ = links.remove(&pod.host_veth).await;
    }
    attached
}

/// Repairs the node's end of a pod from an earlier process, and moves a bridged pod off its bridge.
/// False when the pod has no veth pair.
pub async fn adopt_pod(links: &Links, pod: &PodAttachment) -> Result<bool, Error> {
    let Some(host) = links.find(&pod.host_veth).await? else { return Ok(false) };
    let gateway = pod.gateway_mac()?;
    let is_switched = host.controller.is_some();
    if is_switched {
        links.set_controller(host.index, None).await?;
        // The pod has the bridge's hardware address in its neighbour entry for the gateway.
        links.set_mac(host.index, &gateway).await?;
    }
    configure_host(links, pod, host.index).await?;
    if is_switched {
        let inside = Links::open_in(&pod.netns).await?;
        let eth0 = inside.link(POD_INTERFACE).await?.index;
        configure_inside(&inside, pod, eth0, &gateway).await?;
        forget_neighbours(&inside, pod, eth0).await?;
    }
    Ok(true)
}

/// Disconnects a pod. Succeeds also when the pod was not connected.
pub async fn detach_pod(links: &Links, host_veth: &str) -> Result<(), Error> {
    links.remove(host_veth).await
}

impl PodAttachment {
    /// The hardware address of the gateway, for all families and all pods of the node.
    fn gateway_mac(&self) -> Result<[u8; 6], Error> {
        let first = self.gateways.first();
        first.map(mac_of).ok_or_else(|| Error::Invalid("no gateway address".into()))
    }

    fn mac(&self) -> Result<[u8; 6], Error> {
        let first = self.addresses.first();
        first.map(mac_of).ok_or_else(|| Error::Invalid("no pod address".into()))
    }
}

async fn attach(links: &Links, pod: &PodAttachment) -> Result<PodLink, Error> {
    let (mac, gateway) = (pod.mac()?, pod.gateway_mac()?);
    links.remove(&pod.host_veth).await?;
    let pair = Pair {
        name: &pod.host_veth,
        mac: &gateway,
        peer: POD_INTERFACE,
        peer_mac: &mac,
        peer_netns: &pod.netns,
        mtu: pod.mtu,
    };
    links.create_pair(&pair).await?;
    let host = links.link(&pod.host_veth).await?;
    let inside = async {
        let inside = Links::open_in(&pod.netns).await?;
        inside.set_loopback_up().await?;
        let eth0 = inside.link(POD_INTERFACE).await?.index;
        inside.set_up(eth0).await?;
        configure_inside(&inside, pod, eth0, &gateway).await
    };
    let both = tokio::join!(configure_host(links, pod, host.index), inside);
    both.0.and(both.1)?;
    Ok(PodLink { interface: POD_INTERFACE.into(), mac: format_mac(&mac), host_index: host.index })
}

async fn configure_host(links: &Links, pod: &PodAttachment, index: u32) -> Result<(), Error> {
    let switch = |name: &str| format!("net/ipv4/conf/{}/{name}", pod.host_veth);
    // No redirects: a pod that reaches itself through a Service has no shorter route.
    let mut switches = vec![(switch("send_redirects"), "0".to_owned())];
    // A pod cannot send with another pod's address, whose network policies may allow more.
    switches.push((switch("rp_filter"), "1".to_owned()));
    if pod.from_loopback {
        switches.push((switch("route_localnet"), "1".to_owned()));
    }
    links.sysctls(switches).await?;
    let mac = pod.mac()?;
    for gateway in &pod.gateways {
        links.ensure_address(index, IpNet::from(*gateway)).await?;
    }
    for address in &pod.addresses {
        links.ensure_neighbour(index, *address, &mac).await?;
        links.ensure_route(IpNet::from(*address), &Via::Index(index)).await?;
    }
    Ok(())
}

async fn configure_inside(
    inside: &Links,
    pod: &PodAttachment,
    eth0: u32,
    gateway_mac: &[u8; 6],
) -> Result<(), Error> {
    for address in &pod.addresses {
        inside.ensure_address(eth0, IpNet::from(*address)).await?;
    }
    for gateway in &pod.gateways {
        inside.ensure_neighbour(eth0, *gateway, gateway_mac).await?;
        let via = Via::OnLink { gateway: *gateway, link: eth0 };
        inside.ensure_route(everything(gateway), &via).await?;
    }
    Ok(())
}

/// Removes the on-link routes that a bridged pod had to its network.
async fn forget_neighbours(inside: &Links, pod: &PodAttachment, eth0: u32) -> Result<(), Error> {
    for held in inside.addresses().await? {
        let net = held.net;
        let is_own = held.link == eth0 && pod.addresses.contains(&net.addr());
        if !is_own || net.prefix_len() == net.max_prefix_len() {
            continue;
        }
        // Keeps the address itself. An IPv4 address exists a second time with its full length. An
        // IPv6 address exists only once, so only its route is removed.
        match net.addr() {
            IpAddr::V4(_) => inside.remove_address(eth0, net).await?,
            IpAddr::V6(_) => inside.remove_route(net.trunc()).await?,
        }
    }
    Ok(())
}

fn everything(like: &IpAddr) -> IpNet {
    let net = if like.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    net.parse().expect("a literal network")
}

/// A locally administered hardware address, derived from an IP address.
pub fn mac_of(address: &IpAddr) -> [u8; 6] {
    let tail = match address {
        IpAddr::V4(v4) => v4.octets(),
        // XORs the whole address, so that networks with equal last bits differ.
        IpAddr::V6(v6) => v6.octets().chunks(4).fold([0; 4], |mut sum, chunk| {
            sum.iter_mut().zip(chunk).for_each(|(s, c)| *s ^= c);
            sum
        }),
    };
    [0x0a, 0x58, tail[0], tail[1], tail[2], tail[3]]
}

pub fn format_mac(mac: &[u8]) -> String {
    mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_addresses_follow_the_ip_address() {
        let check = |ip: &str, mac: &str| {
            assert_eq!(format_mac(&mac_of(&ip.parse().expect("an address"))), mac);
        };
        check("10.42.0.7", "0a:58:0a:2a:00:07");
        check("fd00::7", "0a:58:fd:00:00:07");
    }
}
