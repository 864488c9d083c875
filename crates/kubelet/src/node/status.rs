//! The node object and its lease.
//!
//! In: machine facts, the runtime's status and images. Out: a registered Node, status patches when
//! something changed (and every few minutes), a renewed Lease.
//!
//! ```text
//! register (create, or adopt what exists) ─► check every 10 s ─► changed? or 5 min? ─► patch
//!                                                 ▲ at once when the runtime or network changes
//! lease: every 10 s, 40 s long
//! ```
//!
//! Invariant: `lastTransitionTime` moves exactly when a condition's status does.
//! Upstream: `kubelet_node_status.go`, `nodestatus/setters.go`, `component-helpers/lease`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Stop;
use client::{Client, ErrorExt, EventType, PostParams};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints,
    NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus, NodeSwapStatus,
    NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::{MicroTime, ObjectMeta, OwnerReference, Time};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::{Config, KUBELET_VERSION};
use crate::devices::device_plugins::{Amounts, DevicePlugins};
use crate::managers::machine::huge_page_resource;
use crate::node::eviction::threshold::Condition;
use crate::node::machine::{Disk, Machine};
use crate::node::reserve::allocatable;
use crate::node::this::ThisNode;
use crate::pod::events::Events;
use crate::resources::{ResourceList, bytes_quantity, count_quantity, is_extended, units};
use crate::volumes::csi::Csi;

const SHUTTING_DOWN: &str = "node is shutting down";
const MAX_NAMES: usize = 5;
/// Upstream: maxWaitForContainerRuntime.
const RUNTIME_SILENCE: Duration = Duration::from_secs(30);
const RUNTIME_RETRY: Duration = Duration::from_secs(2);

/// The results of the checks.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Why the node is not ready; empty when it is ready.
    pub not_ready: String,
    /// What the eviction loop found.
    pub pressure: Vec<Condition>,
    pub images: Vec<ContainerImage>,
    pub handlers: Vec<NodeRuntimeHandler>,
    pub runtime_version: String,
    /// The unique names of attached volumes that pods of this node use.
    pub volumes_in_use: Vec<String>,
    /// The runtime did not answer the status call.
    pub runtime_is_silent: bool,
    /// The amounts of device plugins.
    pub plugins: Amounts,
}

impl Health {
    pub async fn check(runtime: &dyn cri::Runtime, config: &Config, network: &str) -> Self {
        let mut out = Self::default();
        let mut problems = vec![];
        match runtime.status(false).await {
            Ok(status) => {
                let conditions = status.status.unwrap_or_default();
                for (kind, label) in [
                    (cri::RUNTIME_READY, "container runtime"),
                    (cri::NETWORK_READY, "container runtime network"),
                ] {
                    if let Some(c) = conditions.condition(kind).filter(|c| !c.status) {
                        problems.push(format!(
                            "{label} not ready: {kind}=false reason:{} message:{}",
                            c.reason, c.message
                        ));
                    }
                }
                out.handlers = status.runtime_handlers.iter().map(handler).collect();
            }
            Err(error) => {
                tracing::debug!(%error, "failed to get the container runtime's status");
                out.runtime_is_silent = true;
                problems.push("container runtime is down".into());
            }
        }
        if problems.is_empty() && !network.is_empty() {
            problems.push(format!("container runtime network not ready: {network}"));
        }
        out.not_ready = problems.join(", ");
        if let Ok(version) = runtime.version().await {
            out.runtime_version = format!("{}://{}", version.runtime_name, version.runtime_version);
        }
        let listed = runtime.list_images(None).await;
        out.images = listed.map(|all| images(all, config.status_images)).unwrap_or_default();
        out
    }
}

impl Health {
    /// A node that shuts down is not ready, whatever else is true.
    fn tell_shutdown(&mut self, is_on: bool) {
        // A silent runtime keeps the earlier text, which may say so already.
        if is_on && !self.not_ready.contains(SHUTTING_DOWN) {
            let before = Some(self.not_ready.as_str()).filter(|text| !text.is_empty());
            let all: Vec<&str> = before.into_iter().chain([SHUTTING_DOWN]).collect();
            self.not_ready = all.join(", ");
        }
    }

    /// Combines these findings with newer ones. A runtime that restarts is silent for some seconds: until
    /// `silence` is over, its earlier status and images stay.
    fn followed_by(self, mut fresh: Self, silence: Duration) -> Self {
        if !fresh.runtime_is_silent {
            return fresh;
        }
        if silence < RUNTIME_SILENCE {
            fresh.not_ready = self.not_ready;
        }
        fresh.images = self.images;
        fresh.handlers = self.handlers;
        fresh.runtime_version = self.runtime_version;
        fresh
    }
}

fn handler(handler: &cri::RuntimeHandler) -> NodeRuntimeHandler {
    let features = handler.features.clone().unwrap_or_default();
    NodeRuntimeHandler {
        name: Some(handler.name.clone()).filter(|n| !n.is_empty()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(features.recursive_read_only_mounts),
            user_namespaces: Some(features.user_namespaces),
        }),
    }
}

/// The largest images first, because the scheduler's image locality prefers them.
fn images(mut all: Vec<cri::Image>, most: Option<usize>) -> Vec<ContainerImage> {
    all.sort_unstable_by(|a, b| b.size.cmp(&a.size).then_with(|| a.id.cmp(&b.id)));
    let one = |image: cri::Image| {
        let names = image.repo_digests.into_iter().chain(image.repo_tags).take(MAX_NAMES);
        ContainerImage { names: Some(names.collect()), size_bytes: Some(image.size as i64) }
    };
    all.into_iter().take(most.unwrap_or(usize::MAX)).map(one).collect()
}

/// The node object to register.
pub fn initial(config: &Config, machine: &Machine, health: &Health, now: Timestamp) -> Node {
    let mut labels: BTreeMap<String, String> = [
        ("kubernetes.io/hostname", config.hostname.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", machine.architecture),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", machine.architecture),
    ]
    .map(|(key, value)| (key.to_string(), value.to_string()))
    .into();
    labels.extend(config.labels.clone());
    let attached = "volumes.kubernetes.io/controller-managed-attach-detach";
    let annotations = [(attached.to_string(), "true".to_string())].into_iter();
    let annotations = annotations.chain(provided_node_ip(config)).collect();
    Node {
        metadata: ObjectMeta {
            name: Some(config.node_name.clone()),
            labels: Some(labels),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: config.provider_id.clone(),
            taints: Some(config.taints.clone()).filter(|t| !t.is_empty()),
            ..NodeSpec::default()
        }),
        status: Some(status(config, machine, health, None, now)),
    }
}

/// The annotation that tells a cloud controller manager which addresses an administrator chose.
fn provided_node_ip(config: &Config) -> Option<(String, String)> {
    let ips: Vec<String> = config.node_ips.iter().map(ToString::to_string).collect();
    let is_told = config.external_cloud && config.node_ip_is_given && !ips.is_empty();
    is_told.then(|| ("alpha.kubernetes.io/provided-node-ip".to_owned(), ips.join(",")))
}

/// The addresses that a cloud controller manager decides on: from the second report on the kubelet leaves them.
fn cloud_addresses(config: &Config, before: Option<&NodeStatus>) -> Option<Vec<NodeAddress>> {
    let present = before.filter(|_| config.external_cloud)?.addresses.clone();
    present.filter(|addresses| !addresses.is_empty())
}

/// The current status; `before` gives the transition times.
pub fn status(
    config: &Config,
    machine: &Machine,
    health: &Health,
    before: Option<&NodeStatus>,
    now: Timestamp,
) -> NodeStatus {
    let mut capacity = capacity(config, machine);
    capacity.extend(advertised(before));
    capacity.extend(counts(&health.plugins.capacity));
    let mut allocatable = allocatable(config, &capacity);
    allocatable.extend(counts(&health.plugins.allocatable));
    let mut addresses: Vec<NodeAddress> = config
        .node_ips
        .iter()
        .map(|ip| NodeAddress { type_: "InternalIP".into(), address: ip.to_string() })
        .collect();
    addresses.push(NodeAddress { type_: "Hostname".into(), address: config.hostname.clone() });
    let addresses = cloud_addresses(config, before).unwrap_or(addresses);
    NodeStatus {
        capacity: Some(capacity),
        allocatable: Some(allocatable),
        addresses: Some(addresses),
        conditions: Some(conditions(health, before, now)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(config.bind_address.port()) }),
        }),
        node_info: Some(NodeSystemInfo {
            architecture: machine.architecture.into(),
            boot_id: machine.boot_id.clone(),
            container_runtime_version: health.runtime_version.clone(),
            kernel_version: machine.kernel.clone(),
            kube_proxy_version: String::new(),
            kubelet_version: KUBELET_VERSION.into(),
            machine_id: machine.machine_id.clone(),
            operating_system: "linux".into(),
            os_image: machine.os_image.clone(),
            swap: (machine.swap > 0).then_some(NodeSwapStatus { capacity: Some(machine.swap) }),
            system_uuid: machine.system_uuid.clone(),
        }),
        images: Some(health.images.clone()).filter(|images| !images.is_empty()),
        runtime_handlers: Some(health.handlers.clone()).filter(|handlers| !handlers.is_empty()),
        volumes_in_use: Some(health.volumes_in_use.clone()).filter(|all| !all.is_empty()),
        declared_features: api::declared::declared(),
        ..NodeStatus::default()
    }
}

/// The machine's resources, without those of plugins.
pub fn capacity(config: &Config, machine: &Machine) -> ResourceList {
    let disk = Disk::of(&config.root_dir).unwrap_or_default();
    let kibibytes = |bytes: u64| Quantity(format!("{}Ki", bytes / 1024));
    let of_cpus = config.pods_per_core.saturating_mul(machine.cpus);
    let pods = Some(of_cpus).filter(|of_cpus| *of_cpus > 0).unwrap_or(i64::MAX);
    let mut out = ResourceList::from([
        ("cpu".into(), Quantity(machine.cpus.to_string())),
        ("memory".into(), kibibytes(machine.memory.max(0) as u64)),
        ("ephemeral-storage".into(), kibibytes(disk.bytes)),
        ("hugepages-1Gi".into(), Quantity("0".into())),
        ("hugepages-2Mi".into(), Quantity("0".into())),
        ("pods".into(), Quantity(config.max_pods.min(pods).to_string())),
    ]);
    for (size, bytes) in machine.hardware.huge_pages() {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        out.insert(huge_page_resource(size), bytes_quantity(bytes));
    }
    out
}

/// Extended resources in the node's capacity.
fn advertised(before: Option<&NodeStatus>) -> impl Iterator<Item = (String, Quantity)> {
    let all = before.and_then(|status| status.capacity.clone()).into_iter().flatten();
    all.filter(|(name, _)| is_extended(name))
}

fn counts(all: &BTreeMap<String, i64>) -> impl Iterator<Item = (String, Quantity)> {
    all.iter().map(|(name, count)| (name.clone(), count_quantity(*count)))
}

fn conditions(health: &Health, before: Option<&NodeStatus>, now: Timestamp) -> Vec<NodeCondition> {
    let pressure = |kind: &str, is: bool, reasons: [&str; 2], messages: [&str; 2]| {
        let at = usize::from(is);
        (kind.to_string(), is, reasons[at].to_string(), messages[at].to_string())
    };
    let ready = health.not_ready.is_empty();
    let computed = [
        pressure(
            "MemoryPressure",
            health.pressure.contains(&Condition::Memory),
            ["KubeletHasSufficientMemory", "KubeletHasInsufficientMemory"],
            [
                "kubelet has sufficient memory available",
                "kubelet has insufficient memory available",
            ],
        ),
        pressure(
            "DiskPressure",
            health.pressure.contains(&Condition::Disk),
            ["KubeletHasNoDiskPressure", "KubeletHasDiskPressure"],
            ["kubelet has no disk pressure", "kubelet has disk pressure"],
        ),
        pressure(
            "PIDPressure",
            health.pressure.contains(&Condition::Pid),
            ["KubeletHasSufficientPID", "KubeletHasInsufficientPID"],
            ["kubelet has sufficient PID available", "kubelet has insufficient PID available"],
        ),
        pressure(
            "Ready",
            ready,
            ["KubeletNotReady", "KubeletReady"],
            [&health.not_ready, "kubelet is posting ready status"],
        ),
    ];
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    computed
        .into_iter()
        .map(|(kind, is, reason, message)| {
            let status = if is { "True" } else { "False" };
            let old = before.and_then(|b| b.conditions.iter().flatten().find(|c| c.type_ == kind));
            let since =
                old.filter(|old| old.status == status).and_then(|o| o.last_transition_time.clone());
            NodeCondition {
                type_: kind,
                status: status.into(),
                reason: Some(reason),
                message: Some(message),
                last_heartbeat_time: Some(Time(now)),
                last_transition_time: since.or(Some(Time(now))),
            }
        })
        .collect()
}

/// True if the two differ in more than heartbeats.
pub fn differs(old: Option<&NodeStatus>, new: &NodeStatus) -> bool {
    let Some(old) = old else { return true };
    let quiet = |status: &NodeStatus| {
        let mut status = status.clone();
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
        // Others may add conditions (NetworkUnavailable).
        status.conditions.iter_mut().flatten().for_each(|c| c.last_transition_time = None);
        status
    };
    let (old, new) = (quiet(old), quiet(new));
    let ours =
        |all: &NodeStatus, c: &NodeCondition| all.conditions.iter().flatten().any(|o| o == c);
    new.conditions.iter().flatten().any(|condition| !ours(&old, condition))
        || NodeStatus { conditions: None, ..comparable(&old) }
            != NodeStatus { conditions: None, ..comparable(&new) }
}

/// The parts of the status that the kubelet owns.
fn comparable(status: &NodeStatus) -> NodeStatus {
    NodeStatus {
        capacity: status.capacity.clone(),
        allocatable: status.allocatable.clone(),
        addresses: status.addresses.clone(),
        daemon_endpoints: status.daemon_endpoints.clone(),
        node_info: status.node_info.clone(),
        images: status.images.clone(),
        runtime_handlers: status.runtime_handlers.clone(),
        volumes_in_use: status.volumes_in_use.clone(),
        declared_features: status.declared_features.clone(),
        ..NodeStatus::default()
    }
}

/// What the reports to the API need.
pub struct Reporter {
    pub node: Arc<ThisNode>,
    pub client: Client,
    pub runtime: Arc<dyn cri::Runtime>,
    pub events: Events,
    pub csi: Arc<Csi>,
    pub device_plugins: Arc<DevicePlugins>,
}

/// Registers the node and keeps its status up to date. `hurry` requests a check at once.
pub async fn keep_status(own: Arc<Reporter>, hurry: Arc<Notify>, first: Health) {
    let mut health = first;
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(7));
    if own.node.config.register {
        loop {
            match register(&own, &health).await {
                Ok(node) => {
                    own.node.remember(node);
                    break;
                }
                Err(error) => {
                    tracing::debug!(error = error.text(), "failed to register the node");
                    tokio::time::sleep(backoff.step()).await;
                }
            }
        }
        tracing::info!(node = own.node.config.node_name, "registered the node");
    }
    let mut reported = Instant::now();
    let mut heard = Instant::now();
    let mut first_round = true;
    loop {
        if !first_round {
            // There is no event when a runtime is back.
            let pause = match health.runtime_is_silent {
                true => RUNTIME_RETRY,
                false => own.node.config.status_check,
            };
            tokio::select! {
                () = hurry.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
            let network = own.node.network.borrow().clone();
            let fresh = Health::check(&*own.runtime, &own.node.config, &network).await;
            if !fresh.runtime_is_silent {
                heard = Instant::now();
            }
            health = health.followed_by(fresh, heard.elapsed());
        }
        first_round = false;
        health.volumes_in_use = own.csi.in_use();
        health.plugins = own.device_plugins.amounts();
        health.pressure = own.node.pressure.borrow().clone();
        health.tell_shutdown(*own.node.is_shutting_down.borrow());
        let due = reported.elapsed() >= own.node.config.status_report;
        match report(&own, &health, due).await {
            Ok(true) => reported = Instant::now(),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(error = error.text(), "failed to update the node's status")
            }
        }
        let node = own.node.object();
        let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref());
        own.device_plugins.told(|resource| {
            capacity.and_then(|all| all.get(resource)).is_some_and(|amount| units(amount) == 0)
        });
    }
}

/// Creates the node, or adopts the existing one: our labels are set, others stay.
async fn register(own: &Reporter, health: &Health) -> client::Result<Node> {
    let config = &own.node.config;
    let nodes = own.client.api::<Node>(None);
    let wanted = initial(config, &own.node.machine, health, base::clock::now());
    match nodes.create(&PostParams::default(), &wanted).await {
        Ok(node) => {
            let text = "Starting kubelet.";
            own.events.about(own.node.reference(), EventType::Normal, "Starting", text);
            Ok(node)
        }
        Err(error) if error.is_already_exists() => {
            let existing = nodes.get(&config.node_name).await?;
            let existing = reset_extended(own, existing).await?;
            let old = existing.metadata.labels.clone().unwrap_or_default();
            let ours = wanted.metadata.labels.clone().unwrap_or_default();
            let missing: BTreeMap<_, _> =
                ours.into_iter().filter(|(key, value)| old.get(key) != Some(value)).collect();
            let told = existing.metadata.annotations.clone().unwrap_or_default();
            let annotations: BTreeMap<_, _> = provided_node_ip(config)
                .into_iter()
                .filter(|(key, value)| told.get(key) != Some(value))
                .collect();
            if missing.is_empty() && annotations.is_empty() {
                return Ok(existing);
            }
            let patch = json!({"metadata": {"labels": missing, "annotations": annotations}});
            let path = format!("/api/v1/nodes/{}", config.node_name);
            let kind = "application/strategic-merge-patch+json";
            let sent = own.client.call(Method::PATCH, &path, kind, patch.to_string()).await?;
            Ok(serde_json::from_slice(&sent).unwrap_or(existing))
        }
        Err(error) => Err(error),
    }
}

/// Without a record of devices, the extended resources of the existing node come from another machine.
/// Upstream: `ShouldResetExtendedResourceCapacity`.
async fn reset_extended(own: &Reporter, existing: Node) -> client::Result<Node> {
    let told: ResourceList = advertised(existing.status.as_ref()).collect();
    if !own.device_plugins.is_new || told.values().all(|amount| units(amount) == 0) {
        return Ok(existing);
    }
    let none: ResourceList = told.into_keys().map(|name| (name, Quantity("0".into()))).collect();
    let patch = json!({"status": {"capacity": none, "allocatable": none}});
    let path = format!("/api/v1/nodes/{}/status", own.node.config.node_name);
    let kind = "application/strategic-merge-patch+json";
    let sent = own.client.call(Method::PATCH, &path, kind, patch.to_string()).await?;
    Ok(serde_json::from_slice(&sent).unwrap_or(existing))
}

/// Writes the status if it changed or is due; true if it was written.
async fn report(own: &Reporter, health: &Health, due: bool) -> client::Result<bool> {
    let known = own.node.object();
    let now = base::clock::now();
    let fresh = status(&own.node.config, &own.node.machine, health, known.status.as_ref(), now);
    if !due && !differs(known.status.as_ref(), &fresh) {
        return Ok(false);
    }
    tell_changes(own, &known, &fresh);
    let mut fields = serde_json::to_value(&fresh).map_err(client::Error::SerdeError)?;
    let old = known.status.as_ref();
    match cloud_addresses(&own.node.config, old).is_some() {
        // The cloud controller manager may have written others since our last read.
        true => drop(fields.as_object_mut().and_then(|fields| fields.remove("addresses"))),
        false => replace_addresses(&mut fields),
    }
    let amounts = [
        ("capacity", old.and_then(|old| old.capacity.as_ref()), &fresh.capacity),
        ("allocatable", old.and_then(|old| old.allocatable.as_ref()), &fresh.allocatable),
    ];
    for (field, old, new) in amounts {
        fields[field] = amounts_patch(old, new.as_ref());
    }
    if fresh.volumes_in_use.is_none() {
        fields["volumesInUse"] = Value::Null;
    }
    let path = format!("/api/v1/nodes/{}/status", own.node.config.node_name);
    let kind = "application/strategic-merge-patch+json";
    let patch = json!({"status": fields}).to_string();
    let answer = own.client.call(Method::PATCH, &path, kind, patch).await?;
    if let Ok(node) = serde_json::from_slice::<Node>(&answer) {
        own.node.remember(node);
    }
    Ok(true)
}

/// The amounts that differ; removed ones are null. Amounts that others have written since our last read
/// stay.
fn amounts_patch(old: Option<&ResourceList>, new: Option<&ResourceList>) -> Value {
    let none = ResourceList::new();
    let (old, new) = (old.unwrap_or(&none), new.unwrap_or(&none));
    let gone = old.keys().filter(|name| !new.contains_key(*name));
    let gone = gone.map(|name| (name.clone(), Value::Null));
    let news = new.iter().filter(|(name, amount)| old.get(*name) != Some(*amount));
    gone.chain(news.map(|(name, amount)| (name.clone(), json!(amount)))).collect()
}

/// The API merges addresses by type; ours replace them all. Upstream: fixupPatchForNodeStatusAddresses.
fn replace_addresses(fields: &mut Value) {
    if let Some(Value::Array(addresses)) = fields.get_mut("addresses") {
        addresses.push(json!({"$patch": "replace"}));
    }
}

fn tell_changes(own: &Reporter, known: &Node, fresh: &NodeStatus) {
    let old = known.status.as_ref();
    let was = |kind: &str| {
        let all = old.and_then(|s| s.conditions.as_ref());
        all.and_then(|all| all.iter().find(|c| c.type_ == kind)).map(|c| c.status.clone())
    };
    for condition in fresh.conditions.iter().flatten() {
        if was(&condition.type_).as_deref() == Some(condition.status.as_str()) {
            continue;
        }
        let name = &own.node.config.node_name;
        let reason = match (condition.type_.as_str(), condition.status.as_str()) {
            ("Ready", "True") => "NodeReady",
            ("Ready", _) => "NodeNotReady",
            _ => match condition.reason.as_deref() {
                Some(reason) => &format!("NodeHas{}", reason.trim_start_matches("KubeletHas")),
                None => continue,
            },
        };
        let text = format!("Node {name} status is now: {reason}");
        own.events.about(own.node.reference(), EventType::Normal, reason, text);
    }
}

/// Renews the node's lease until `stop`.
pub async fn keep_lease(own: Arc<Reporter>, stop: Stop) {
    let config = &own.node.config;
    let interval = config.lease_duration / 4;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(7));
    let mut lease: Option<Lease> = None;
    while !stop.is_raised() {
        let wait = match renew(&own, lease.take()).await {
            Ok(renewed) => {
                lease = Some(renewed);
                backoff.reset();
                // Upstream: 4 % of jitter, so that nodes do not renew at the same time.
                interval.mul_f64(1.0 + 0.04 * base::rng::unit())
            }
            Err(error) => {
                tracing::debug!(error = error.text(), "failed to renew the node's lease");
                backoff.step()
            }
        };
        if stop.or(tokio::time::sleep(wait)).await.is_none() {
            return;
        }
    }
}

async fn renew(own: &Reporter, known: Option<Lease>) -> client::Result<Lease> {
    let name = &own.node.config.node_name;
    let leases = own.client.api::<Lease>(Some("kube-node-lease"));
    let base = match known {
        Some(lease) => Some(lease),
        None => match leases.get(name).await {
            Ok(lease) => Some(lease),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        },
    };
    let now = MicroTime(base::clock::now());
    let (mut lease, exists) = match base {
        Some(lease) => (lease, true),
        None => (Lease::default(), false),
    };
    lease.metadata.name = Some(name.clone());
    lease.metadata.namespace = Some("kube-node-lease".into());
    let node = own.node.object();
    if let Some(uid) = node.metadata.uid.clone()
        && lease.metadata.owner_references.as_ref().is_none_or(Vec::is_empty)
    {
        lease.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: name.clone(),
            uid,
            ..OwnerReference::default()
        }]);
    }
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    spec.holder_identity = Some(name.clone());
    spec.lease_duration_seconds = Some(own.node.config.lease_duration.as_secs() as i32);
    spec.renew_time = Some(now);
    match exists {
        true => leases.replace(name, &PostParams::default(), &lease).await,
        false => leases.create(&PostParams::default(), &lease).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine { cpus: 2, memory: 8 << 30, architecture: "amd64", ..Machine::default() }
    }

    #[test]
    fn a_silent_runtime_is_down_after_a_while() {
        let well = Health { runtime_version: "c://1".into(), ..Health::default() };
        let silent = Health {
            runtime_is_silent: true,
            not_ready: "container runtime is down".into(),
            ..Health::default()
        };
        let check = |silence: u64, expected: &str| {
            let told = well.clone().followed_by(silent.clone(), Duration::from_secs(silence));
            assert_eq!(told.not_ready, expected, "after {silence} s");
            assert_eq!(told.runtime_version, "c://1");
        };
        check(10, "");
        check(29, "");
        check(30, "container runtime is down");
        assert_eq!(silent.followed_by(well, Duration::ZERO).not_ready, "");
    }

    #[test]
    fn extended_resources_come_from_plugins_or_from_the_api() {
        let config = Config::new("n1", "/tmp".into());
        let told = json!({"capacity": {"example.com/own": "4", "example.com/dongle": "9",
            "cpu": "64"}, "allocatable": {"example.com/own": "1"}});
        let before: NodeStatus = serde_json::from_value(told).expect("a status");
        let of = |count: i64| [("example.com/dongle".to_owned(), count)].into();
        let plugins = Amounts { capacity: of(2000), allocatable: of(1999) };
        let health = Health { plugins, ..Health::default() };
        let now = Timestamp::from_second(100).expect("in range");
        let fresh = status(&config, &machine(), &health, Some(&before), now);
        let (capacity, allocatable) = (fresh.capacity.unwrap(), fresh.allocatable.unwrap());
        let check = |name: &str, expected: [&str; 2]| {
            assert_eq!([capacity[name].0.as_str(), allocatable[name].0.as_str()], expected);
        };
        check("example.com/own", ["4", "4"]);
        check("example.com/dongle", ["2k", "1999"]);
        check("cpu", ["2", "2"]);
    }

    #[test]
    fn a_cloud_decides_on_addresses() {
        let mut config = Config::new("n1", "/tmp".into());
        config.node_ips = vec!["10.0.0.1".parse().expect("an address")];
        let now = Timestamp::from_second(100).expect("in range");
        let health = Health::default();
        let found = |config: &Config, before: serde_json::Value| {
            let before: NodeStatus = serde_json::from_value(before).expect("a status");
            let fresh = status(config, &machine(), &health, Some(&before), now);
            fresh.addresses.unwrap().into_iter().map(|one| one.address).collect::<Vec<_>>()
        };
        let clouds = json!({"addresses": [{"type": "ExternalIP", "address": "203.0.113.1"}]});
        assert_eq!(found(&config, clouds.clone()), ["10.0.0.1", "n1"]);
        config.external_cloud = true;
        assert_eq!(found(&config, clouds), ["203.0.113.1"]);
        assert_eq!(found(&config, json!({})), ["10.0.0.1", "n1"], "until the cloud has said");
        let annotation = "alpha.kubernetes.io/provided-node-ip";
        let annotations = |config: &Config| {
            initial(config, &machine(), &health, now).metadata.annotations.unwrap()
        };
        assert!(!annotations(&config).contains_key(annotation));
        config.node_ip_is_given = true;
        assert_eq!(annotations(&config)[annotation], "10.0.0.1");
    }

    /// Resources that are removed from the capacity leave the allocatable, too.
    #[test]
    fn allocatable_follows_capacity() {
        let config = Config::new("n1", "/tmp".into());
        let now = Timestamp::from_second(100).expect("in range");
        let of = |before: &NodeStatus| {
            status(&config, &machine(), &Health::default(), Some(before), now)
        };
        let own = "example.com/own".to_owned();
        let mut before = of(&NodeStatus::default());
        before.capacity.as_mut().unwrap().insert(own.clone(), Quantity("4".into()));
        let mut fresh = of(&before);
        let patch = |field: fn(&NodeStatus) -> Option<&ResourceList>,
                     old: &NodeStatus,
                     new: &NodeStatus| amounts_patch(field(old), field(new));
        let allocatable = |status: &NodeStatus| status.allocatable.clone();
        assert_eq!(patch(|s| s.capacity.as_ref(), &before, &fresh), json!({}), "its writer's");
        assert_eq!(patch(|s| s.allocatable.as_ref(), &before, &fresh), json!({&own: "4"}));
        assert!(!differs(Some(&fresh), &of(&fresh)));

        fresh.capacity.as_mut().unwrap().remove(&own);
        let mut after = of(&fresh);
        assert!(!allocatable(&after).unwrap().contains_key(&own));
        assert!(differs(Some(&fresh), &after));
        assert_eq!(patch(|s| s.allocatable.as_ref(), &fresh, &after), json!({&own: null}));
        // The API's status after that patch.
        fresh.allocatable.as_mut().unwrap().remove(&own);
        after = of(&fresh);
        assert!(!differs(Some(&fresh), &after), "no second patch");
    }

    #[test]
    fn a_node_registers_with_upstreams_fields() {
        let config = Config::new("n1", "/tmp".into());
        let at = |second| Timestamp::from_second(second).expect("in range");
        let node = initial(&config, &machine(), &Health::default(), at(100));
        let labels = node.metadata.labels.as_ref().expect("labels");
        assert_eq!(labels["kubernetes.io/hostname"], "n1");
        let first = node.status.as_ref().expect("a status");
        let ready = first.conditions.iter().flatten().find(|c| c.type_ == "Ready").expect("Ready");
        assert_eq!(
            (ready.status.as_str(), ready.reason.as_deref()),
            ("True", Some("KubeletReady"))
        );
        assert_eq!(first.allocatable.as_ref().expect("allocatable")["memory"].0, "8092Mi");
        assert_eq!(first.capacity.as_ref().expect("capacity")["memory"].0, "8388608Ki");

        let later = status(&config, &machine(), &Health::default(), Some(first), at(200));
        assert!(!differs(Some(first), &later), "heartbeats alone change nothing");
        let sick = Health { not_ready: "why".into(), ..Health::default() };
        let later = status(&config, &machine(), &sick, Some(first), at(300));
        assert!(differs(Some(first), &later));
        let transitions: Vec<i64> = later
            .conditions
            .iter()
            .flatten()
            .filter_map(|c| c.last_transition_time.as_ref().map(|t| t.0.as_second()))
            .collect();
        assert_eq!(transitions, [100, 100, 100, 300]);
    }
}
