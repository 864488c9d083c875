//! The pod network of one node: a bridge with the gateway addresses, and a veth pair per pod.
//!
//! ```text
//!  pod netns                     node netns
//!  eth0 10.42.0.7/24  ═══veth═══  vethXXXX ── bridge 10.42.0.1/24 ── routes to other nodes
//!  default via 10.42.0.1          (hairpin on)
//! ```
//!
//! Hairpin is on so that a pod reaches itself through its own service. Hardware addresses derive
//! from the IP address: when an address is given to the next pod, neighbours' caches stay right.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth};
use rtnetlink::{LinkBridge, LinkBridgePort, LinkMessageBuilder, LinkUnspec};

use crate::error::{During, Error, tolerate};
use crate::links::{Links, Via};

/// The interface's name inside every pod.
pub const POD_INTERFACE: &str = "eth0";

/// The bridge as it is in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridge {
    pub name: String,
    pub index: u32,
    pub mtu: u32,
}

/// What a pod gets.
#[derive(Clone, Debug)]
pub struct PodAttachment {
    /// Where the pod's network namespace is pinned.
    pub netns: PathBuf,
    pub bridge: String,
    /// The name of the node's end of the pair; at most 15 bytes, unique on the node.
    pub host_veth: String,
    /// The pod's addresses with the length of the node's pod network, at most one per family.
    pub addresses: Vec<IpNet>,
    /// The bridge's addresses: the default routes.
    pub gateways: Vec<IpAddr>,
}

/// What a pod got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLink {
    pub interface: String,
    /// As text, `0a:58:0a:2a:00:07`.
    pub mac: String,
    pub host_index: u32,
}

impl Bridge {
    /// Makes the bridge, or repairs it: up, with this MTU and all gateway addresses.
    pub async fn ensure(
        links: &Links,
        name: &str,
        gateways: &[IpNet],
        mtu: u32,
    ) -> Result<Self, Error> {
        let first = gateways.first().ok_or_else(|| Error::Invalid("no gateway address".into()))?;
        if links.find(name).await?.is_none() {
            // A bridge without an address of its own takes the lowest of its ports', which changes
            // as pods come and go.
            let message =
                LinkBridge::new(name).address(mac_of(&first.addr()).to_vec()).mtu(mtu).build();
            tolerate(links.handle.link().add(message).execute().await, &[libc::EEXIST])
                .during(|| format!("create bridge {name}"))?;
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
        // What pods send to a service without endpoints would go back where it came from: the
        // kernel advises the pod of a shorter way, and the rate limit then swallows the refusal.
        links.sysctl(&format!("net/ipv4/conf/{name}/send_redirects"), "0").await?;
        Ok(Self { name: name.to_owned(), index: link.index, mtu })
    }
}

/// Connects a pod: veth pair, addresses, routes, loopback. A leftover pair of that name is
/// replaced. On failure nothing is left behind.
pub async fn attach_pod(links: &Links, pod: &PodAttachment) -> Result<PodLink, Error> {
    let attached = attach(links, pod).await;
    if attached.is_err() {
        // Best effort: the error that counts is the first one.
        let _ = links.remove(&pod.host_veth).await;
    }
    attached
}

/// Disconnects a pod; true also when it was not connected (any more).
pub async fn detach_pod(links: &Links, host_veth: &str) -> Result<(), Error> {
    links.remove(host_veth).await
}

async fn attach(links: &Links, pod: &PodAttachment) -> Result<PodLink, Error> {
    let first = pod.addresses.first().ok_or_else(|| Error::Invalid("no pod address".into()))?;
    let mac = mac_of(&first.addr());
    let bridge = links.link(&pod.bridge).await?;
    links.remove(&pod.host_veth).await?;
    create_pair(links, pod, bridge.index, bridge.mtu, &mac).await?;
    let host = links.link(&pod.host_veth).await?;
    let hairpin = LinkBridgePort::new(host.index).hairpin(true).build();
    links
        .handle
        .link()
        .change(hairpin)
        .execute()
        .await
        .during(|| format!("set hairpin on {}", pod.host_veth))?;
    configure_inside(&pod.netns, &pod.addresses, &pod.gateways).await?;
    Ok(PodLink { interface: POD_INTERFACE.into(), mac: format_mac(&mac), host_index: host.index })
}

/// Both ends in one message: ours as an up port of the bridge, the other born in the pod (down: the
/// kernel answers ENOTCONN to an end that is to be up before it has a peer).
async fn create_pair(
    links: &Links,
    pod: &PodAttachment,
    bridge: u32,
    mtu: u32,
    mac: &[u8; 6],
) -> Result<(), Error> {
    let path = pod.netns.clone();
    let netns = File::open(&path).during(|| format!("open netns {}", path.display()))?;
    let peer = LinkMessageBuilder::<LinkUnspec>::default()
        .name(POD_INTERFACE)
        .address(mac.to_vec())
        .mtu(mtu)
        .setns_by_fd(netns.as_raw_fd())
        .build();
    let message = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Veth)
        .name(pod.host_veth.clone())
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .mtu(mtu)
        .controller(bridge)
        .up()
        .build();
    links
        .handle
        .link()
        .add(message)
        .execute()
        .await
        .during(|| format!("create veth {}", pod.host_veth))
}

async fn configure_inside(
    netns: &Path,
    addresses: &[IpNet],
    gateways: &[IpAddr],
) -> Result<(), Error> {
    let inside = Links::open_in(netns).await?;
    inside.set_loopback_up().await?;
    let eth0 = inside.link(POD_INTERFACE).await?;
    inside.set_up(eth0.index).await?;
    for address in addresses {
        inside.ensure_address(eth0.index, *address).await?;
    }
    for gateway in gateways {
        inside.ensure_route(everything(gateway), &Via::Gateway(*gateway)).await?;
    }
    Ok(())
}

fn everything(like: &IpAddr) -> IpNet {
    let net = if like.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    net.parse().expect("a literal network")
}

/// A locally administered hardware address made from an IP address.
pub fn mac_of(address: &IpAddr) -> [u8; 6] {
    let tail = match address {
        IpAddr::V4(v4) => v4.octets(),
        // Fold the whole address, so that networks with equal last bits differ.
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
