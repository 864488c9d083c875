//! The node's half: runtime, kubelet, proxy, DNS.

use std::net::IpAddr;
use std::path::Path;

use base::task::Tasks;
use pki::Pki;

use crate::control_plane::ControlPlane;
use crate::flags::Server;

/// The address of the interface that the default route leaves by.
pub async fn primary_address() -> Option<IpAddr> {
    let links = net::Links::open().ok()?;
    let uplink = links.uplink().await.ok().flatten()?;
    Some(uplink.address)
}

pub async fn start(
    _flags: &Server,
    _data_dir: &Path,
    _pki: &Pki,
    _control: &ControlPlane,
    _tasks: &Tasks,
) -> anyhow::Result<()> {
    Ok(())
}
