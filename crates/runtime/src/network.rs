//! The node's own pod network: its CIDRs, and how a sandbox is connected. CNI plugins replace it ([`crate::cni`]).

use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use net::Links;
use net::pods::{Bridge, PodAttachment, adopt_pod, attach_pod, detach_pod};
use net::shaping::{self, Rates};
use serde::{Deserialize, Serialize};

use crate::bandwidth::Bandwidth;
use crate::ipam::Ipam;
use crate::layout::Layout;

/// Kept on disk, so that pods can start after a restart before the kubelet sends the CIDRs, and so
/// that `destroy_all` knows what to remove.
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

    /// Connects the sandbox and returns its addresses, the first family first. `from_loopback`:
    /// host ports lead into it.
    pub(crate) async fn attach(
        &self,
        ipam: &Ipam,
        sandbox: &str,
        netns: &Path,
        from_loopback: bool,
        bandwidth: Bandwidth,
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
        if bandwidth != Bandwidth::default() {
            let rates = Rates { to_pod: bandwidth.ingress, from_pod: bandwidth.egress };
            shaping::limit(&links, &pod.host_veth, &detour(sandbox), rates)
                .await
                .map_err(failed)?;
        }
        Ok(addresses)
    }

    /// Repairs the links that an earlier process made, possibly of a version that bridged the pods.
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

    /// Before the first pod: creates the bridge with the gateways' addresses, and routes the Services'
    /// addresses through it. The node's own processes use Services whose pods run elsewhere.
    pub(crate) async fn prepare(&self, service_cidrs: &[IpNet]) -> Result<(), cri::Error> {
        let failed = |error: net::Error| {
            cri::Error::Internal(format!("prepare the node's network: {error}"))
        };
        // Pods are routed, also to each other, with or without a kube-proxy.
        net::sysctl::prepare_node(None).await.map_err(failed)?;
        let links = Links::open().map_err(failed)?;
        self.ensure_bridge(&links).await.map_err(failed)?;
        for cidr in service_cidrs {
            links.ensure_service_route(*cidr, &self.bridge).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Before the first pod of CNI plugins: removes the bridge, whose addresses may be those of the plugins'
    /// bridge. Pods that the node's own network connected do not need it. The Services' addresses are routed
    /// through the uplink.
    pub(crate) async fn make_way(&self, service_cidrs: &[IpNet]) -> Result<(), cri::Error> {
        let failed = |error: net::Error| {
            cri::Error::Internal(format!("prepare the node's network: {error}"))
        };
        net::sysctl::prepare_node(None).await.map_err(failed)?;
        let links = Links::open().map_err(failed)?;
        links.remove(&self.bridge).await.map_err(failed)?;
        let Some(uplink) = links.uplink().await.map_err(failed)? else { return Ok(()) };
        for cidr in service_cidrs {
            links.ensure_service_route(*cidr, &uplink.interface).await.map_err(failed)?;
        }
        Ok(())
    }

    pub(crate) async fn detach(&self, ipam: &Ipam, sandbox: &str) -> Result<(), cri::Error> {
        let failed =
            |error: net::Error| cri::Error::Internal(format!("take down the pod network: {error}"));
        let links = Links::open().map_err(failed)?;
        detach_pod(&links, &veth(sandbox)).await.map_err(failed)?;
        shaping::remove(&links, &detour(sandbox)).await.map_err(failed)?;
        Ok(ipam.release(sandbox)?)
    }

    pub(crate) async fn remove_bridge(&self) -> Result<(), net::Error> {
        Links::open()?.remove(&self.bridge).await
    }
}

/// The name of the veth's end on the node. Interface names have at most 15 bytes.
pub(crate) fn veth(sandbox: &str) -> String {
    format!("veth{}", sandbox.get(..10).unwrap_or(sandbox))
}

/// The name of the device through which the limited traffic from a pod goes.
pub(crate) fn detour(sandbox: &str) -> String {
    format!("ifb{}", sandbox.get(..10).unwrap_or(sandbox))
}

/// An address with the prefix length of its network.
fn host(address: IpAddr, network: &IpNet) -> IpNet {
    IpNet::new(address, network.prefix_len())
        .expect("the length is that of a network of its family")
}
