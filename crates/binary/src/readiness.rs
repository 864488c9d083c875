//! Reports to the service manager: when the start is complete, and that the process still answers.
//!
//! ```text
//! API server ─► /readyz ─► Node Ready (or PATIENCE) ─► READY=1 ─► every half watchdog: a request ─► WATCHDOG=1
//! ```
//!
//! In: the node's name, a client that may read it, an address that must answer. Out: messages of
//! [`crate::notify`]. Without a service manager nothing runs.
//!
//! Invariants: an answer of any kind proves life, because a restart mends neither a datastore nor a request; a
//! node that stays NotReady does not keep the machine's boot waiting. Cost: one watch of one Node, one request
//! for each half of the watchdog's time.
//! Upstream: the kubelet's watchdog. Deviation: k3s is ready before its node is.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use client::{Client, Informers};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::Notify;
use transport::{ClientOptions, HttpClient};

use crate::control_plane::{self, ControlPlane};
use crate::flags;
use crate::notify::{self, State};

/// How long the start waits for the node.
const PATIENCE: Duration = Duration::from_secs(90);
/// Between two looks at `/readyz`, at the start only.
const READYZ: Duration = Duration::from_millis(200);
/// The kubelet's health: see [`crate::preflight`].
const KUBELET: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10248);

/// A node whose readiness is part of the start.
pub struct OfNode {
    pub name: String,
    pub client: Client,
}

/// `decapod server`; `node` is `None` for a control plane alone.
pub fn of_server(
    flags: &flags::Server,
    control: &ControlPlane,
    node: Option<OfNode>,
    tasks: &Tasks,
) {
    if !notify::is_managed() {
        return;
    }
    let address = match flags.bind_address {
        address if address.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        address => address,
    };
    let probe = Probe { server: control_plane::url(address, control.port), path: "/livez" };
    let (url, client) = (control.url(), control.client(pki::Component::Admin));
    let group = tasks.clone();
    tasks.spawn("service manager", async move {
        notify::tell(&[State::Status("starting: the API server is not ready yet")]);
        while client.get_raw("/readyz", "text/plain").await.is_err() {
            tokio::time::sleep(READYZ).await;
        }
        settle(&format!("the API server is ready at {url}"), node, &group).await;
        probe.keep(false).await;
    });
}

/// `decapod agent`.
pub fn of_agent(node: OfNode, tasks: &Tasks) {
    if !notify::is_managed() {
        return;
    }
    let probe = Probe { server: format!("http://{KUBELET}"), path: "/healthz" };
    let group = tasks.clone();
    tasks.spawn("service manager", async move {
        settle("the agent runs", Some(node), &group).await;
        probe.keep(true).await;
    });
}

/// Waits for the node, within limits, and tells that the start is complete.
async fn settle(so_far: &str, node: Option<OfNode>, tasks: &Tasks) {
    let Some(OfNode { name, client }) = node else {
        notify::tell(&[State::Ready, State::Status(so_far)]);
        return;
    };
    let text = format!("{so_far}; starting: node {name} is not Ready yet");
    notify::tell(&[State::Status(&text)]);
    let ready = format!("{so_far}; node {name} was Ready at the start");
    let node = Readiness::watch(client, &name);
    if tokio::time::timeout(PATIENCE, node.wait()).await.is_ok() {
        notify::tell(&[State::Ready, State::Status(&ready)]);
        return;
    }
    tracing::warn!(node = name, ?PATIENCE, "the node is not Ready; the start does not wait longer");
    let text = format!("{so_far}; node {name} is not Ready, see: kubectl describe node {name}");
    notify::tell(&[State::Ready, State::Status(&text)]);
    tasks.spawn("node readiness", async move {
        node.wait().await;
        notify::tell(&[State::Status(&ready)]);
    });
}

/// Follows one Node until it is Ready.
struct Readiness {
    seen: Arc<Notify>,
    /// Ends the watch.
    _life: base::task::Bound,
}

impl Readiness {
    fn watch(client: Client, name: &str) -> Self {
        let life = Tasks::new("node readiness");
        let informers = Informers::new(client, life.clone());
        let own = informers.scoped::<Node>(None, &format!("metadata.name={name}"), "");
        let seen = Arc::new(Notify::new());
        let tell = seen.clone();
        own.subscribe(move |event| {
            if !event.is_deleted() && is_ready(event.object()) {
                tell.notify_one();
            }
        });
        Self { seen, _life: life.bound() }
    }

    async fn wait(&self) {
        self.seen.notified().await;
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// A request that proves that this process answers.
struct Probe {
    server: String,
    path: &'static str,
}

impl Probe {
    /// With `may_begin_late`, the process is alive also while nothing has answered yet.
    async fn keep(&self, may_begin_late: bool) {
        let Some(period) = notify::watchdog() else { return };
        let mut has_answered = !may_begin_late;
        loop {
            // The answer and the pause together must fit into the watchdog's time.
            let begun = tokio::time::Instant::now();
            let asked = tokio::time::timeout(period * 3 / 4, self.ask()).await;
            let is_answered = asked.unwrap_or(false);
            has_answered |= is_answered;
            if is_answered || !has_answered {
                notify::tell(&[State::Alive]);
            } else {
                let Self { server, path } = self;
                tracing::warn!(
                    server,
                    path,
                    "no answer; the service manager's watchdog is not told"
                );
            }
            tokio::time::sleep_until(begun + period).await;
        }
    }

    /// Whether any answer came.
    async fn ask(&self) -> bool {
        // It sends no credentials, so it trusts every certificate.
        let options =
            ClientOptions { server: self.server.clone(), insecure: true, ..Default::default() };
        let Ok(http) = HttpClient::new(&options) else { return false };
        let Ok(request) = http::Request::get(self.path).body(transport::empty()) else {
            return false;
        };
        http.request(request).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_node_is_ready_by_its_condition() {
        let check = |conditions: serde_json::Value, expected: bool| {
            let node = json!({"metadata": {"name": "n"}, "status": {"conditions": conditions}});
            assert_eq!(is_ready(&from_value(node).expect("a node")), expected);
        };
        check(json!([{"type": "Ready", "status": "True"}]), true);
        check(json!([{"type": "Ready", "status": "False"}]), false);
        check(json!([{"type": "MemoryPressure", "status": "True"}]), false);
        check(json!([]), false);
    }
}
