//! ARP and NDP between two machines on one wire, with their kernels.

use std::net::IpAddr;
use std::time::Duration;

use net::links::Pair;
use net::neighbours::{Heard, Mac, Neighbours};
use net::{Links, pods};

use crate::lab::{Netns, ip, net, skipped};

/// A message that comes at all comes in a moment.
const MOMENT: Duration = Duration::from_millis(200);

struct Machine {
    _netns: Netns,
    links: Links,
    index: u32,
    mac: Mac,
    sockets: Neighbours,
}

impl Machine {
    async fn new(netns: Netns, addresses: &[&str]) -> Self {
        let links = Links::open_in(&netns.path).await.expect("netlink");
        let eth0 = links.link("eth0").await.expect("plugged");
        links.set_up(eth0.index).await.expect("up");
        for address in addresses {
            links.ensure_address(eth0.index, net(address)).await.expect("an address");
        }
        let sockets = Neighbours::open(Some(&netns.path), &eth0).await.expect("packet sockets");
        let mac = Mac::try_from(eth0.mac.as_slice()).expect("Ethernet");
        Self { _netns: netns, links, index: eth0.index, mac, sockets }
    }

    /// Two machines, each with one end of a wire.
    async fn pair() -> (Self, Self) {
        let (here, there) = (Netns::new(), Netns::new());
        let links = Links::open_in(&here.path).await.expect("netlink");
        let (mac, peer_mac) = (pods::mac_of(&ip("10.0.0.1")), pods::mac_of(&ip("10.0.0.2")));
        let pair = Pair {
            name: "eth0",
            mac: &mac,
            peer: "eth0",
            peer_mac: &peer_mac,
            peer_netns: &there.path,
            mtu: 1500,
        };
        links.create_pair(&pair).await.expect("a wire");
        let here = Self::new(here, &["192.168.60.1/24", "fd60::1/64"]).await;
        (here, Self::new(there, &["192.168.60.2/24", "fd60::2/64"]).await)
    }

    /// Whether this is heard soon. Other messages, as those of the kernels, do not count.
    async fn hears(&self, wanted: Heard) -> bool {
        let listen = async { while self.sockets.hear().await.expect("a message") != wanted {} };
        tokio::time::timeout(MOMENT, listen).await.is_ok()
    }

    /// Asks until a host has the address.
    async fn finds(&self, address: IpAddr, at: Option<Mac>, holder: Mac) {
        testkit::wait::found(&format!("an answer for {address}"), async || {
            self.sockets.ask(address, at).expect("sent");
            self.hears(Heard::Holder(address, holder)).await.then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_machine_learns_who_has_an_address() {
    if skipped() {
        return;
    }
    let (here, there) = Machine::pair().await;
    for address in [ip("192.168.60.240"), ip("fd60::240")] {
        let holder = Heard::Holder(address, there.mac);
        here.sockets.ask(address, None).expect("sent");
        assert!(!here.hears(holder).await, "nobody has {address}");
        there.links.ensure_announced(there.index, address).await.expect("added");
        there.links.ensure_announced(there.index, address).await.expect("twice is once");
        here.finds(address, None, there.mac).await;
        here.finds(address, Some(there.mac), there.mac).await;
        there.sockets.announce(address).expect("sent");
        assert!(here.hears(holder).await, "{address} is announced");
        here.sockets.ask(address, None).expect("sent");
        assert!(there.hears(Heard::Question(address, here.mac)).await, "{address} is asked for");
    }
    let held = there.links.addresses().await.expect("addresses");
    assert_eq!(held.iter().filter(|one| one.announced).count(), 2, "{held:?}");
    let uplink = there.links.uplink().await.expect("links").expect("an uplink");
    assert_eq!(uplink.address, ip("192.168.60.2"), "announced addresses are not the node's own");
    assert_eq!(there.links.remove_announced().await.expect("removed").len(), 2);
    for address in [ip("192.168.60.240"), ip("fd60::240")] {
        here.sockets.ask(address, None).expect("sent");
        assert!(!here.hears(Heard::Holder(address, there.mac)).await, "{address} is gone");
    }
}
