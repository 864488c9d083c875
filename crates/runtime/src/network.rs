//! The pod network of this node: which networks it has, and how a sandbox gets into them.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use net::Links;
use net::pods::{Bridge, PodAttachment, adopt_pod, attach_pod, detach_pod};
use serde::{Deserialize, Serialize};

use crate::ipam::Ipam;
use crate::layout::Layout;

/// On disk, so that pods start after a restart before the kubelet has said anything, and so that
/// `destroy_all` knows what to take down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetworkState {
    pub cidrs: Vec<IpNet>,
    pub bridge: String,
    pub mtu: u32,
}

impl NetworkState {
    pub(crate) fn read(layout: &Layout) -> io::Result<Option<Self>> {
        crate::files::read_json(&layout.data.join("network.json"))
    }

    pub(crate) fn write(&self, layout: &Layout) -> io::Result<()> {
        crate::files::write_json(&layout.data.join("network.json"), self)
    }

    /// Connects the sandbox and returns its addresses, the first family first. `from_loopback`: ports
    /// of the node lead into it.
    pub(crate) async fn attach(
        &self,
        ipam: &Ipam,
        sandbox: &str,
        netns: &Path,
        from_loopback: bool,
    ) -> Result<Vec<IpAddr>, cri::Error> {
        let failed =
            |error: net::Error| cri::Error::Internal(format!("set up the pod network: {error}"));
        let mut addresses = Vec::new();
        for cidr in &self.cidrs {
            addresses.push(ipam.allocate(cidr, sandbox)?);
        }
        let links = Links::open().map_err(failed)?;
        self.ensure_bridge(&links).await.map_err(failed)?;
        let pod = self.attachment(sandbox, netns, &addresses, from_loopback);
        attach_pod(&links, &pod).await.map_err(failed)?;
        Ok(addresses)
    }

    /// What an earlier process connected, perhaps one of a version that switched.
    pub(crate) async fn adopt(
        &self,
        sandbox: &str,
        netns: &Path,
        addresses: &[IpAddr],
        from_loopback: bool,
    ) -> Result<bool, net::Error> {
        let pod = self.attachment(sandbox, netns, addresses, from_loopback);
        adopt_pod(&Links::open()?, &pod).await
    }

    fn attachment(
        &self,
        sandbox: &str,
        netns: &Path,
        addresses: &[IpAddr],
        from_loopback: bool,
    ) -> PodAttachment {
        let own = self.cidrs.iter().filter(|cidr| {
            addresses.iter().any(|address| address.is_ipv4() == cidr.addr().is_ipv4())
        });
        PodAttachment {
            netns: netns.into(),
            host_veth: veth(sandbox),
            addresses: addresses.to_vec(),
            gateways: own.map(Ipam::gateway).collect(),
            mtu: self.mtu,
            from_loopback,
        }
    }

    async fn ensure_bridge(&self, links: &Links) -> Result<(), net::Error> {
        let addresses: Vec<IpNet> =
            self.cidrs.iter().map(|cidr| host(Ipam::gateway(cidr), cidr)).collect();
        Bridge::ensure(links, &self.bridge, &addresses, self.mtu).await.map(|_| ())
    }

    /// Makes the bridge, which holds the gateways' addresses, and the Services' addresses routable by way of it, before the first pod:
    /// the node's own processes use Services whose pods run elsewhere.
    pub(crate) async fn prepare(&self, service_cidrs: &[IpNet]) -> Result<(), cri::Error> {
        let failed = |error: net::Error| {
            cri::Error::Internal(format!("prepare the node's network: {error}"))
        };
        // Pods are routed, also to each other, with a kube-proxy or without.
        net::sysctl::prepare_node(None).await.map_err(failed)?;
        let links = Links::open().map_err(failed)?;
        self.ensure_bridge(&links).await.map_err(failed)?;
        for cidr in service_cidrs {
            links.ensure_service_route(*cidr, &self.bridge).await.map_err(failed)?;
        }
        Ok(())
    }

    pub(crate) async fn detach(&self, ipam: &Ipam, sandbox: &str) -> Result<(), cri::Error> {
        let failed =
            |error: net::Error| cri::Error::Internal(format!("take down the pod network: {error}"));
        let links = Links::open().map_err(failed)?;
        detach_pod(&links, &veth(sandbox)).await.map_err(failed)?;
        Ok(ipam.release(sandbox)?)
    }

    pub(crate) async fn remove_bridge(&self) -> Result<(), net::Error> {
        Links::open()?.remove(&self.bridge).await
    }
}

/// The node's end of the pair; interface names have at most 15 bytes.
pub(crate) fn veth(sandbox: &str) -> String {
    format!("veth{}", sandbox.get(..10).unwrap_or(sandbox))
}

/// An address with its network's length.
fn host(address: IpAddr, network: &IpNet) -> IpNet {
    IpNet::new(address, network.prefix_len())
        .expect("the length is that of a network of its family")
}
