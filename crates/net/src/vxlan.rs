//! The overlay between nodes without a common layer-2 network: one VXLAN device per node, with
//! permanent neighbour and forwarding entries for the peers. No learning, no multicast.
//!
//! A peer needs only the Node object: the tunnel's inner address is the first address of the pod
//! network (`10.42.1.0`), its hardware address derives from it, and the outer address is the node's
//! internal IP. So nodes exchange data only through the API.

use std::net::IpAddr;

use ipnet::IpNet;
use rtnetlink::LinkVxlan;

use crate::error::{During, Error, tolerate};
use crate::links::{Link, Links, Via};
use crate::pods::mac_of;

/// The device's name on every node.
pub const DEVICE: &str = "decapod.1";
/// flannel's values, so that firewalls opened for flannel fit.
pub const VNI: u32 = 1;
pub const PORT: u16 = 8472;
/// The size of the outer Ethernet, IP, UDP and VXLAN headers (IPv4 outside).
pub const OVERHEAD: u32 = 50;
/// IPv6's header is longer than IPv4's.
const OVERHEAD_V6: u32 = 70;

/// The bytes of each packet that the tunnel between nodes with such addresses takes.
pub fn overhead(outer: &IpAddr) -> u32 {
    if outer.is_ipv4() { OVERHEAD } else { OVERHEAD_V6 }
}

#[derive(Clone, Debug)]
pub struct Vxlan {
    pub name: String,
    pub vni: u32,
    pub port: u16,
    /// The node's own outer address, and the interface that has it.
    pub local: IpAddr,
    pub device: String,
    /// This node's pod network.
    pub pod_cidr: IpNet,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its outer address.
    pub node: IpAddr,
    pub pod_cidr: IpNet,
}

impl Vxlan {
    pub fn new(name: &str, local: IpAddr, device: &str, pod_cidr: IpNet) -> Self {
        let (name, device) = (name.to_owned(), device.to_owned());
        Self { name, vni: VNI, port: PORT, local, device, pod_cidr }
    }

    /// Creates the device, or recreates it when its hardware address belongs to another pod
    /// network. Its MTU is the outer link's minus [`overhead`].
    pub async fn ensure(&self, links: &Links) -> Result<Link, Error> {
        let mac = mac_of(&self.pod_cidr.network());
        if let Some(old) = links.find(&self.name).await?
            && old.mac != mac
        {
            links.remove(&self.name).await?;
        }
        let outer = links.link(&self.device).await?;
        let message = LinkVxlan::new(&self.name, self.vni)
            .dev(outer.index)
            .port(self.port)
            .learning(false)
            .address(mac.to_vec())
            .mtu(outer.mtu.saturating_sub(overhead(&self.local)))
            .up();
        let message = match self.local {
            IpAddr::V4(local) => message.local(local),
            IpAddr::V6(local) => message.local6(local),
        };
        tolerate(links.handle.link().add(message.build()).execute().await, &[libc::EEXIST])
            .during(|| format!("create vxlan {}", self.name))
            .map_err(|error| error.names("vxlan"))?;
        let link = links.link(&self.name).await?;
        let end = IpNet::from(self.pod_cidr.network());
        links.ensure_address(link.index, end).await?;
        links.set_up(link.index).await?;
        Ok(link)
    }

    /// Adds the entries and the route that reach a peer's pods.
    pub async fn ensure_peer(&self, links: &Links, peer: &Peer) -> Result<(), Error> {
        let link = links.link(&self.name).await?;
        let end = peer.pod_cidr.network();
        let mac = mac_of(&end);
        links.ensure_neighbour(link.index, end, &mac).await?;
        let neighbours = links.handle.neighbours();
        neighbours
            .add_bridge(link.index, &mac)
            .destination(peer.node)
            .flags(netlink_packet_route::neighbour::NeighbourFlags::Own)
            .replace()
            .execute()
            .await
            .during(|| format!("add forwarding entry for {}", peer.node))?;
        let via = Via::OnLink { gateway: end, link: link.index };
        links.ensure_route(peer.pod_cidr, &via).await
    }

    /// Removes the entries of a peer; missing ones are no error.
    pub async fn remove_peer(&self, links: &Links, peer: &Peer) -> Result<(), Error> {
        links.remove_route(peer.pod_cidr).await?;
        let Some(link) = links.find(&self.name).await? else { return Ok(()) };
        let end = peer.pod_cidr.network();
        let neighbours = links.handle.neighbours();
        let gone = [libc::ENOENT, libc::ESRCH, libc::ENODEV];
        let neighbour = neighbours.add(link.index, end).message_mut().clone();
        tolerate(neighbours.del(neighbour).execute().await, &gone)
            .during(|| format!("remove neighbour {end}"))?;
        let mut entry = neighbours.add_bridge(link.index, &mac_of(&end)).destination(peer.node);
        let message = entry.message_mut();
        message.header.flags = netlink_packet_route::neighbour::NeighbourFlags::Own;
        tolerate(neighbours.del(message.clone()).execute().await, &gone)
            .during(|| format!("remove forwarding entry for {}", peer.node))
    }
}
