//! DRA drivers that registered on this node, and the removal of their ResourceSlices.
//!
//! A driver may have several plugins for a while, e.g. during an update: the newest is called.
//! Upstream: `pkg/kubelet/cm/dra/plugin`. Deviation: a driver's slices are deleted when its plugin
//! unregisters, not when a connection breaks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use client::ErrorExt;
use http::Method;

use super::messages::{Claim, PrepareAnswer, Prepared, Request, UnprepareAnswer, Unprepared};
use super::{Devices, DraError};
use crate::plugins::rpc::{Rpc, RpcError};
use crate::volumes::csi::messages::PluginInfo;

/// Half of a kubelet's retry period. Upstream: `defaultClientCallTimeout`.
const LIMIT: Duration = Duration::from_secs(45);
/// How long a driver may be away before its ResourceSlices are deleted.
const ABSENCE: Duration = Duration::from_secs(30);
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(300)];

/// One version of the protocol: the service's name and its methods.
struct Service {
    name: &'static str,
    prepare: &'static str,
    unprepare: &'static str,
}

macro_rules! service {
    ($version:literal) => {
        Service {
            name: concat!($version, ".DRAPlugin"),
            prepare: concat!(
                "/k8s.io.kubelet.pkg.apis.dra.",
                $version,
                ".DRAPlugin/NodePrepareResources"
            ),
            unprepare: concat!(
                "/k8s.io.kubelet.pkg.apis.dra.",
                $version,
                ".DRAPlugin/NodeUnprepareResources"
            ),
        }
    };
}

/// Newest first.
static SERVICES: [Service; 2] = [service!("v1"), service!("v1beta1")];

pub struct Driver {
    endpoint: PathBuf,
    service: &'static Service,
    rpc: Rpc,
}

impl Driver {
    pub async fn prepare(&self, claims: &[Claim]) -> Result<BTreeMap<String, Prepared>, RpcError> {
        let request = Request { claims: claims.to_vec() };
        let answer: PrepareAnswer = self.rpc.call(self.service.prepare, request, LIMIT).await?;
        Ok(answer.claims)
    }

    pub async fn unprepare(
        &self,
        claims: &[Claim],
    ) -> Result<BTreeMap<String, Unprepared>, RpcError> {
        let request = Request { claims: claims.to_vec() };
        let answer: UnprepareAnswer = self.rpc.call(self.service.unprepare, request, LIMIT).await?;
        Ok(answer.claims)
    }
}

/// A registered plugin.
pub struct Registered {
    name: String,
    endpoint: PathBuf,
}

/// The first version in the plugin's list that the kubelet supports.
fn choose(versions: &[String]) -> Result<&'static Service, DraError> {
    if versions.is_empty() {
        return Err(DraError::NoVersions);
    }
    let known = |version: &String| SERVICES.iter().find(|service| service.name == version);
    versions.iter().find_map(known).ok_or_else(|| {
        let quoted = |all: Vec<String>| format!("[{}]", all.join(" "));
        let theirs = versions.iter().map(|version| format!("{version:?}")).collect();
        let ours = SERVICES.iter().map(|service| format!("{:?}", service.name)).collect();
        DraError::Versions { theirs: quoted(theirs), ours: quoted(ours) }
    })
}

impl Devices {
    pub fn register(&self, info: &PluginInfo, socket: &Path) -> Result<Registered, DraError> {
        let name = &info.name;
        let endpoint = match info.endpoint.as_str() {
            "" => socket,
            endpoint => Path::new(endpoint),
        };
        let shown = endpoint.display();
        let service = choose(&info.supported_versions).map_err(|why| DraError::Validation {
            driver: name.clone(),
            endpoint: shown.to_string(),
            why: Box::new(why),
        })?;
        let rpc = Rpc::new(endpoint).map_err(DraError::Registration)?;
        let mut drivers = self.drivers();
        let all = drivers.entry(name.clone()).or_default();
        if all.iter().any(|known| known.endpoint == endpoint) {
            let (endpoint, driver) = (shown.to_string(), name.clone());
            return Err(DraError::Registered { endpoint, driver });
        }
        let endpoint = endpoint.to_owned();
        all.push(Arc::new(Driver { endpoint: endpoint.clone(), service, rpc }));
        tracing::info!(driver = name, endpoint = %endpoint.display(), "registered the DRA driver");
        Ok(Registered { name: name.clone(), endpoint })
    }

    /// Removes the plugin. True if its driver has no other.
    pub fn unregister(&self, plugin: &Registered) -> bool {
        tracing::info!(driver = plugin.name, "unregistered the DRA driver's plugin");
        let mut drivers = self.drivers();
        let Some(all) = drivers.get_mut(&plugin.name) else { return false };
        all.retain(|one| one.endpoint != plugin.endpoint);
        if all.is_empty() {
            drivers.remove(&plugin.name);
        }
        !drivers.contains_key(&plugin.name)
    }

    /// Deletes the driver's ResourceSlices of this node, unless it registers again in time.
    pub async fn take_down(&self, plugin: &Registered) {
        tokio::time::sleep(ABSENCE).await;
        if !self.drivers().contains_key(&plugin.name) {
            self.delete_slices(Some(&plugin.name)).await;
        }
    }

    /// Deletes the slices of one driver, or of all.
    async fn delete_slices(&self, driver: Option<&str>) {
        let node = &self.node_name;
        let driver = driver.map(|name| format!(",spec.driver={name}")).unwrap_or_default();
        let selector = format!("spec.nodeName={node}{driver}").replace('=', "%3D");
        let path = format!(
            "/apis/resource.k8s.io/v1/resourceslices?fieldSelector={}",
            selector.replace(',', "%2C")
        );
        let mut backoff = Backoff::new(RETRY[0], RETRY[1]).with_jitter(0.2);
        loop {
            let sent = self.client.call(Method::DELETE, &path, "application/json", String::new());
            match sent.await {
                Ok(_) => return,
                Err(error) if error.is_not_found() => return,
                Err(error) => {
                    tracing::debug!(error = error.text(), "failed to delete ResourceSlices");
                }
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }
}

/// Deletes all ResourceSlices of this node at start, when no driver has registered yet.
pub async fn keep_slices(devices: Arc<Devices>) {
    devices.delete_slices(None).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugins_first_supported_service_is_chosen() {
        let check = |versions: &[&str], expected: Result<&str, &str>| {
            let all: Vec<String> = versions.iter().map(|text| text.to_string()).collect();
            let found = choose(&all).map(|service| service.name);
            assert_eq!(found.map_err(|why| why.to_string()), expected.map_err(str::to_owned));
        };
        check(&["v1.DRAPlugin", "v1beta1.DRAPlugin"], Ok("v1.DRAPlugin"));
        check(&["v1beta1.DRAPlugin"], Ok("v1beta1.DRAPlugin"));
        check(&[], Err("empty list of supported gRPC services (aka supported versions)"));
        check(
            &["1.0.0"],
            Err(
                "none of services supported by the plugin ([\"1.0.0\"]) are supported by the kubelet ([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])",
            ),
        );
    }
}
