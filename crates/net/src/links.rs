//! Links, addresses and routes of one network namespace.
//!
//! A [`Links`] is one netlink socket and stays in the namespace where it was opened. Changes to an
//! existing link use RTM_NEWLINK (`change`): RTM_SETLINK silently ignores some attributes.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use base::task::Tasks;
use futures::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressProtocol, AddressScope, CacheInfo,
};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use crate::error::{During, Error, netlink_errno, tolerate};
use crate::{netns, sysctl};

/// Marks the addresses that this node announces (`IFA_PROTO`; kernels before 5.18 ignore it).
const ANNOUNCED: AddressProtocol = AddressProtocol::Other(0xdc);
/// Marks the routes to other nodes' pods through these nodes (`RTPROT`).
const OF_NODES: RouteProtocol = RouteProtocol::Other(0xdc);
/// The loopback interface has this index in every namespace.
const LOOPBACK: u32 = 1;

/// One netlink socket for links, addresses and routes. Dropping it ends its task.
pub struct Links {
    pub(crate) handle: rtnetlink::Handle,
    /// The namespace of the socket; none: the process's own.
    netns: Option<PathBuf>,
    /// Owns the task that connects the handle with the socket.
    _driver: Tasks,
}

/// The properties of a link that this crate uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub mtu: u32,
    pub mac: Vec<u8>,
    pub up: bool,
    /// The bridge that this link is a port of.
    pub controller: Option<u32>,
}

/// An address on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub link: u32,
    pub net: IpNet,
    /// Reachable from other hosts (not loopback or link-local).
    pub global: bool,
    /// Added by [`Links::ensure_announced`].
    pub announced: bool,
}

/// The next hop of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Via {
    /// A gateway; the kernel finds its interface.
    Gateway(IpAddr),
    /// Through another node, which has the pods of the destination.
    Node(IpAddr),
    /// The destination is on this link.
    Link(String),
    /// The same, by the link's index.
    Index(u32),
    /// A gateway on a link, by the link's index, outside of the link's networks (VXLAN peers, the
    /// pods' gateway).
    OnLink { gateway: IpAddr, link: u32 },
}

/// A veth pair to create: one end here and up, the other in another namespace.
#[derive(Clone, Debug)]
pub struct Pair<'a> {
    pub name: &'a str,
    pub mac: &'a [u8; 6],
    pub peer: &'a str,
    pub peer_mac: &'a [u8; 6],
    /// The path of the other pinned namespace.
    pub peer_netns: &'a Path,
    pub mtu: u32,
}

/// The interface and source address of this node's own traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    pub interface: String,
    pub index: u32,
    pub address: IpAddr,
}

impl Links {
    /// Opens a socket in the process's namespace. Needs a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let connection = rtnetlink::new_connection().during(|| "open a netlink socket".into())?;
        Ok(Self::drive(connection, None))
    }

    /// Opens a socket in the namespace pinned at `path`.
    pub async fn open_in(path: &Path) -> Result<Self, Error> {
        let connection = netns::enter(path, rtnetlink::new_connection)
            .await?
            .during(|| format!("open a netlink socket in {}", path.display()))?;
        Ok(Self::drive(connection, Some(path.to_owned())))
    }

    fn drive<A, B>(
        (connection, handle, _): (A, rtnetlink::Handle, B),
        netns: Option<PathBuf>,
    ) -> Self
    where
        A: Future<Output = ()> + Send + 'static,
    {
        let driver = Tasks::new("rtnetlink");
        driver.spawn("rtnetlink", connection);
        Self { handle, netns, _driver: driver }
    }

    pub async fn find(&self, name: &str) -> Result<Option<Link>, Error> {
        let mut answers = Box::pin(self.handle.link().get().match_name(name).execute());
        match answers.try_next().await {
            Ok(message) => Ok(message.map(Link::from)),
            Err(error) if netlink_errno(&error) == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error).during(|| format!("look up {name}")),
        }
    }

    /// Like [`Links::find`], but a missing link is an error.
    pub async fn link(&self, name: &str) -> Result<Link, Error> {
        self.find(name).await?.ok_or_else(|| Error::NoLink(name.to_owned()))
    }

    pub async fn list(&self) -> Result<Vec<Link>, Error> {
        let messages: Vec<LinkMessage> = self
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .during(|| "list links".into())?;
        Ok(messages.into_iter().map(Link::from).collect())
    }

    /// Removes a link by name; a missing one is no error.
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        let Some(link) = self.find(name).await? else { return Ok(()) };
        tolerate(self.handle.link().del(link.index).execute().await, &[libc::ENODEV])
            .during(|| format!("remove {name}"))
    }

    pub async fn set_up(&self, index: u32) -> Result<(), Error> {
        let message = LinkMessageBuilder::<LinkUnspec>::default().index(index).up().build();
        self.handle.link().change(message).execute().await.during(|| format!("set link {index} up"))
    }

    /// Creates both ends with one message. The other end is down: the kernel returns ENOTCONN for
    /// an end that should be up before it has a peer.
    pub async fn create_pair(&self, pair: &Pair<'_>) -> Result<(), Error> {
        let path = pair.peer_netns;
        let netns = File::open(path).during(|| format!("open netns {}", path.display()))?;
        let peer = LinkMessageBuilder::<LinkUnspec>::default()
            .name(pair.peer.to_owned())
            .address(pair.peer_mac.to_vec())
            .mtu(pair.mtu)
            .setns_by_fd(netns.as_raw_fd())
            .build();
        let message = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Veth)
            .name(pair.name.to_owned())
            .address(pair.mac.to_vec())
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .mtu(pair.mtu)
            .up()
            .build();
        let created = self.handle.link().add(message).execute().await;
        let created = created.during(|| format!("create veth {}", pair.name));
        created.map_err(|error| error.names("veth"))
    }

    /// Makes a link a port of a bridge, or removes it from its bridge.
    pub async fn set_controller(&self, index: u32, bridge: Option<u32>) -> Result<(), Error> {
        let builder = LinkMessageBuilder::<LinkUnspec>::default().index(index);
        let message = builder.controller(bridge.unwrap_or(0)).build();
        let changed = self.handle.link().change(message).execute().await;
        changed.during(|| format!("change the bridge of link {index}"))
    }

    pub async fn set_mac(&self, index: u32, mac: &[u8; 6]) -> Result<(), Error> {
        let builder = LinkMessageBuilder::<LinkUnspec>::default().index(index);
        let message = builder.address(mac.to_vec()).build();
        let changed = self.handle.link().change(message).execute().await;
        changed.during(|| format!("change the hardware address of link {index}"))
    }

    /// Sets sysctls in this namespace; see [`sysctl::set`].
    pub async fn sysctls(&self, switches: Vec<(String, String)>) -> Result<(), Error> {
        let set = move || switches.iter().try_for_each(|(name, value)| sysctl::set(name, value));
        netns::enter_or_here(self.netns.as_deref(), set).await?
    }

    /// Adds a permanent neighbour entry for an address on this link.
    pub async fn ensure_neighbour(
        &self,
        index: u32,
        address: IpAddr,
        mac: &[u8; 6],
    ) -> Result<(), Error> {
        let request = self.handle.neighbours().add(index, address).link_layer_address(mac);
        request.replace().execute().await.during(|| format!("add neighbour {address}"))
    }

    pub async fn set_loopback_up(&self) -> Result<(), Error> {
        self.set_up(LOOPBACK).await
    }

    pub async fn addresses(&self) -> Result<Vec<Address>, Error> {
        let messages: Vec<AddressMessage> = self
            .handle
            .address()
            .get()
            .execute()
            .try_collect()
            .await
            .during(|| "list addresses".into())?;
        Ok(messages.iter().filter_map(address_of).collect())
    }

    /// Adds an address to a link, if missing. IPv6 addresses skip duplicate detection: they come
    /// from our own allocation and must work at once.
    pub async fn ensure_address(&self, index: u32, address: IpNet) -> Result<(), Error> {
        let mut request = self.handle.address().add(index, address.addr(), address.prefix_len());
        if address.addr().is_ipv6() {
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        tolerate(request.execute().await, &[libc::EEXIST])
            .during(|| format!("add address {address}"))
    }

    /// Adds an address that this node announces to its neighbours, for which the kernel answers then. It is
    /// marked as ours, and as deprecated, so that no connection of the node itself begins with it.
    pub async fn ensure_announced(&self, index: u32, address: IpAddr) -> Result<(), Error> {
        let net = IpNet::from(address);
        let mut request = self.handle.address().add(index, address, net.prefix_len());
        let message = request.message_mut();
        if address.is_ipv6() {
            message.header.flags |= AddressHeaderFlags::Nodad;
        }
        let mut lifetime = CacheInfo::default();
        (lifetime.ifa_preferred, lifetime.ifa_valid) = (0, u32::MAX);
        message.attributes.push(AddressAttribute::CacheInfo(lifetime));
        message.attributes.push(AddressAttribute::Protocol(ANNOUNCED));
        tolerate(request.execute().await, &[libc::EEXIST])
            .during(|| format!("add the announced address {address}"))
    }

    /// Removes all addresses of [`Links::ensure_announced`], and returns them.
    pub async fn remove_announced(&self) -> Result<Vec<IpAddr>, Error> {
        let mut removed = vec![];
        for held in self.addresses().await?.into_iter().filter(|held| held.announced) {
            self.remove_address(held.link, held.net).await?;
            removed.push(held.net.addr());
        }
        Ok(removed)
    }

    /// Removes an address from a link; a missing one is no error.
    pub async fn remove_address(&self, index: u32, address: IpNet) -> Result<(), Error> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.family = family(&address.addr());
        message.header.prefix_len = address.prefix_len();
        message.attributes.push(AddressAttribute::Local(address.addr()));
        message.attributes.push(AddressAttribute::Address(address.addr()));
        let done = self.handle.address().del(message).execute().await;
        tolerate(done, &[libc::EADDRNOTAVAIL, libc::ENODEV])
            .during(|| format!("remove address {address}"))
    }

    /// Adds an address to `lo`, like the cluster DNS address on every node.
    pub async fn ensure_local_address(&self, address: IpAddr) -> Result<(), Error> {
        self.set_loopback_up().await?;
        self.ensure_address(LOOPBACK, IpNet::from(address)).await
    }

    pub async fn remove_local_address(&self, address: IpAddr) -> Result<(), Error> {
        self.remove_address(LOOPBACK, IpNet::from(address)).await
    }

    /// Sets or replaces the route to `destination`.
    pub async fn ensure_route(&self, destination: IpNet, via: &Via) -> Result<(), Error> {
        let message = self.route_message(destination, via).await?;
        self.handle
            .route()
            .add(message)
            .replace()
            .execute()
            .await
            .during(|| format!("set route {destination} {via:?}"))
    }

    /// Removes the route to `destination` in the main table; a missing one is no error.
    pub async fn remove_route(&self, destination: IpNet) -> Result<(), Error> {
        let mut message = route_to(destination);
        message.header.protocol = RouteProtocol::Unspec;
        message.header.scope = RouteScope::NoWhere;
        message.header.kind = RouteType::Unspec;
        tolerate(self.handle.route().del(message).execute().await, &[libc::ESRCH, libc::ENODEV])
            .during(|| format!("remove route {destination}"))
    }

    /// Makes Service addresses routable for the node's own processes: routing precedes the address
    /// translation of the output hook, so a node without a default route would return ENETUNREACH. True when
    /// a route was needed; it now leads through `link`, the pods' bridge. A route through `lo` would not do:
    /// the kernel sends no refusals from there, so that a Service without endpoints would time out.
    pub async fn ensure_service_route(
        &self,
        service_cidr: IpNet,
        link: &str,
    ) -> Result<bool, Error> {
        let v4 = service_cidr.addr().is_ipv4();
        let routes = self.routes(v4).await?;
        if routes.iter().any(|route| is_default(route) && oif(route) != Some(LOOPBACK)) {
            return Ok(false);
        }
        self.ensure_route(service_cidr, &Via::Link(link.to_owned())).await?;
        Ok(true)
    }

    /// The interface of the default route (lowest metric; IPv4 first) with its primary address. Without a
    /// default route: the first interface that is up and has a global address with a network.
    pub async fn uplink(&self) -> Result<Option<Uplink>, Error> {
        let mut links = self.list().await?;
        // Older kernels list links in no order.
        links.sort_by_key(|link| link.index);
        let addresses = self.addresses().await?;
        let mut candidates = Vec::new();
        for v4 in [true, false] {
            let mut defaults: Vec<_> =
                self.routes(v4).await?.into_iter().filter(is_default).collect();
            defaults.sort_by_key(metric);
            candidates.extend(defaults.iter().filter_map(|route| Some((v4, oif(route)?))));
        }
        for v4 in [true, false] {
            // An address without a network, as on the pods' links, does not count.
            let has_network = |link: &&Link| {
                let wide = |a: &Address| {
                    a.link == link.index && a.net.prefix_len() < a.net.max_prefix_len()
                };
                link.up && addresses.iter().any(|a| wide(a) && a.net.addr().is_ipv4() == v4)
            };
            candidates.extend(links.iter().filter(has_network).map(|link| (v4, link.index)));
        }
        Ok(candidates.into_iter().find_map(|(v4, index)| {
            let link = links.iter().find(|link| link.index == index)?;
            let usable = |a: &&Address| {
                a.link == index && a.global && !a.announced && a.net.addr().is_ipv4() == v4
            };
            let address = addresses.iter().find(usable)?.net.addr();
            Some(Uplink { interface: link.name.clone(), index, address })
        }))
    }

    /// Destinations in the main table that leave by this link, except host routes of its own
    /// addresses and link-local ones.
    pub async fn routes_by(&self, link: u32) -> Result<Vec<IpNet>, Error> {
        let mut found = Vec::new();
        for v4 in [true, false] {
            let ours = |route: &RouteMessage| {
                route.header.table == RouteHeader::RT_TABLE_MAIN
                    && route.header.kind == RouteType::Unicast
                    && route.header.protocol == RouteProtocol::Static
                    && oif(route) == Some(link)
            };
            let routes = self.routes(v4).await?;
            found.extend(routes.iter().filter(|route| ours(route)).filter_map(destination));
        }
        Ok(found)
    }

    /// Destinations of the routes that were made with [`Via::Node`].
    pub async fn routes_by_nodes(&self) -> Result<Vec<IpNet>, Error> {
        let mut found = Vec::new();
        for v4 in [true, false] {
            let routes = self.routes(v4).await?;
            let ours = routes.iter().filter(|route| route.header.protocol == OF_NODES);
            found.extend(ours.filter_map(destination));
        }
        Ok(found)
    }

    /// The link that has this address.
    pub async fn link_of(&self, address: IpAddr) -> Result<Option<Link>, Error> {
        let held = self.addresses().await?.into_iter().find(|held| held.net.addr() == address);
        let Some(held) = held else { return Ok(None) };
        Ok(self.list().await?.into_iter().find(|link| link.index == held.link))
    }

    async fn routes(&self, v4: bool) -> Result<Vec<RouteMessage>, Error> {
        let mut message = RouteMessage::default();
        message.header.address_family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
        self.handle
            .route()
            .get(message)
            .execute()
            .try_collect()
            .await
            .during(|| "list routes".into())
    }

    async fn route_message(&self, destination: IpNet, via: &Via) -> Result<RouteMessage, Error> {
        let mut message = route_to(destination);
        match via {
            Via::Node(gateway) => {
                message.header.protocol = OF_NODES;
                message.attributes.push(RouteAttribute::Gateway((*gateway).into()));
            }
            Via::Gateway(gateway) => {
                message.attributes.push(RouteAttribute::Gateway((*gateway).into()));
            }
            Via::Link(link) => {
                message.header.scope = RouteScope::Link;
                message.attributes.push(RouteAttribute::Oif(self.link(link).await?.index));
            }
            Via::Index(index) => {
                message.header.scope = RouteScope::Link;
                message.attributes.push(RouteAttribute::Oif(*index));
            }
            Via::OnLink { gateway, link } => {
                message.header.flags = RouteFlags::Onlink;
                message.attributes.push(RouteAttribute::Gateway((*gateway).into()));
                message.attributes.push(RouteAttribute::Oif(*link));
            }
        }
        Ok(message)
    }
}

impl From<LinkMessage> for Link {
    fn from(message: LinkMessage) -> Self {
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            mtu: 0,
            mac: Vec::new(),
            up: message.header.flags.contains(LinkFlags::Up),
            controller: None,
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::Address(mac) => link.mac = mac,
                LinkAttribute::Controller(index) => link.controller = Some(index),
                _ => {}
            }
        }
        link
    }
}

fn address_of(message: &AddressMessage) -> Option<Address> {
    // On point-to-point links IFA_ADDRESS is the peer's and IFA_LOCAL is ours; IPv6 has no IFA_LOCAL.
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })?;
    Some(Address {
        link: message.header.index,
        net: IpNet::new(address, message.header.prefix_len).ok()?,
        global: message.header.scope == AddressScope::Universe && !address.is_loopback(),
        announced: message.attributes.contains(&AddressAttribute::Protocol(ANNOUNCED)),
    })
}

fn route_to(destination: IpNet) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(&destination.addr());
    message.header.destination_prefix_length = destination.prefix_len();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::Unicast;
    if destination.prefix_len() > 0 {
        message.attributes.push(RouteAttribute::Destination(destination.network().into()));
    }
    message
}

fn family(address: &IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn is_default(route: &RouteMessage) -> bool {
    route.header.destination_prefix_length == 0
        && route.header.table == RouteHeader::RT_TABLE_MAIN
        && route.header.kind == RouteType::Unicast
}

fn oif(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        RouteAttribute::MultiPath(hops) => hops.first().map(|hop| hop.interface_index),
        _ => None,
    })
}

fn destination(route: &RouteMessage) -> Option<IpNet> {
    use netlink_packet_route::route::RouteAddress;
    let address = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })?;
    IpNet::new(address, route.header.destination_prefix_length).ok()
}

fn metric(route: &RouteMessage) -> u32 {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Priority(priority) => Some(*priority),
            _ => None,
        })
        .unwrap_or(0)
}
