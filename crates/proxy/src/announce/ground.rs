//! The kernel's side of announcements: addresses on links, packet sockets.
//!
//! In: addresses to take, to let go, to ask for. Out: kernel state, and what other machines say about pools'
//! addresses. An address is on the link whose network it belongs to, else on the link of the default route.
//!
//! Why on the link: the kernel then answers ARP and NDP by itself, also while this process is restarted or
//! upgraded, and a takeover is one netlink message. The node's own ports answer on it too, as on the node's
//! other addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use base::task::Tasks;
use ipnet::IpNet;
use machinery::address_range::AddressRange;
use net::Links;
use net::links::Address;
use net::monitor::Change;
use net::neighbours::{Heard, Mac, Neighbours};
use tokio::sync::mpsc;

use crate::Error;

/// More than a link hears while the node is busy; what does not fit is asked for again.
const QUEUED: usize = 1024;

pub struct Ground {
    links: Links,
    netns: Option<PathBuf>,
    pools: Arc<[AddressRange]>,
    held: Vec<Address>,
    uplink: Option<u32>,
    sockets: HashMap<u32, Arc<Neighbours>>,
    tasks: Tasks,
    news: mpsc::Sender<Heard>,
}

impl Ground {
    pub fn new(
        links: Links,
        netns: Option<PathBuf>,
        pools: &[AddressRange],
        tasks: &Tasks,
    ) -> (Self, mpsc::Receiver<Heard>) {
        let (news, heard) = mpsc::channel(QUEUED);
        let ground = Self {
            links,
            netns,
            pools: pools.into(),
            held: vec![],
            uplink: None,
            sockets: HashMap::new(),
            tasks: tasks.clone(),
            news,
        };
        (ground, heard)
    }

    /// Reads the links' addresses.
    pub async fn look(&mut self) -> Result<(), Error> {
        self.held = self.links.addresses().await?;
        self.uplink = self.links.uplink().await?.map(|uplink| uplink.index);
        Ok(())
    }

    /// The addresses that this node announces, as of the last look. On old kernels, which forget the mark, these
    /// are the addresses of pools without a network.
    pub fn announced(&self) -> BTreeSet<IpAddr> {
        let is_ours = |one: &&Address| {
            let address = one.net.addr();
            let is_single = one.net.prefix_len() == one.net.max_prefix_len();
            one.announced || is_single && self.pools.iter().any(|pool| pool.contains(address))
        };
        self.held.iter().filter(is_ours).map(|one| one.net.addr()).collect()
    }

    /// Whether a change of a link may have cost an address.
    pub fn is_own(&self, change: Change<'_>) -> bool {
        matches!(change, Change::Link(index) if self.sockets.contains_key(&index))
    }

    pub async fn take(&mut self, address: IpAddr) -> Result<(), Error> {
        let Some(index) = self.link_for(address) else { return Err(Error::NoLinkFor(address)) };
        Ok(self.links.ensure_announced(index, address).await?)
    }

    pub async fn let_go(&mut self, address: IpAddr) -> Result<(), Error> {
        let held = self.held.iter().filter(|one| one.net == IpNet::from(address));
        let mut links: BTreeMap<u32, ()> = held.map(|one| (one.link, ())).collect();
        links.extend(self.link_for(address).map(|index| (index, ())));
        for index in links.into_keys() {
            self.links.remove_address(index, IpNet::from(address)).await?;
        }
        Ok(())
    }

    pub async fn announce(&mut self, address: IpAddr) -> Result<(), Error> {
        Ok(self.socket_for(address).await?.announce(address)?)
    }

    pub async fn ask(&mut self, address: IpAddr, at: Option<Mac>) -> Result<(), Error> {
        Ok(self.socket_for(address).await?.ask(address, at)?)
    }

    fn link_for(&self, address: IpAddr) -> Option<u32> {
        let fits = |one: &&Address| {
            one.net.prefix_len() < one.net.max_prefix_len() && one.net.contains(&address)
        };
        self.held.iter().find(fits).map(|one| one.link).or(self.uplink)
    }

    /// The sockets of the address's link, which are opened when they are first needed.
    async fn socket_for(&mut self, address: IpAddr) -> Result<Arc<Neighbours>, Error> {
        let Some(index) = self.link_for(address) else { return Err(Error::NoLinkFor(address)) };
        if let Some(open) = self.sockets.get(&index) {
            return Ok(open.clone());
        }
        let link = self.links.list().await?.into_iter().find(|link| link.index == index);
        let link = link.ok_or(Error::NoLinkFor(address))?;
        let open = Arc::new(Neighbours::open(self.netns.as_deref(), &link).await?);
        let (socket, news, pools) = (open.clone(), self.news.clone(), self.pools.clone());
        self.tasks.spawn_contained("neighbours", async move {
            loop {
                match socket.hear().await {
                    Ok(heard) => {
                        let (Heard::Holder(about, _) | Heard::Question(about, _)) = heard;
                        if pools.iter().any(|pool| pool.contains(about)) {
                            // A full queue loses an answer to a question that is asked again.
                            let _ = news.try_send(heard);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(link = link.name, %error, "stopped listening to ARP and NDP");
                        return;
                    }
                }
            }
        });
        self.sockets.insert(index, open.clone());
        Ok(open)
    }
}
