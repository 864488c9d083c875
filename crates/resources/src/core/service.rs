//! Services: their addresses and node ports are the server's to give.
//!
//! A cluster IP is taken by creating the IPAddress object of its name, so that the store decides
//! races and `kubectl get ipaddresses` shows what is taken. A node port is a claim of the registry's,
//! decided by the store too; Services of before there were claims get theirs at first use.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use apiserver::Registry;
use apiserver::registry::{DeleteOptions, Intent};
use apiserver::request::{Key, RequestContext};
use apiserver::resource::Allocator;
use async_trait::async_trait;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{
    ClientIPConfig, Service, ServicePort, ServiceSpec, SessionAffinityConfig,
};
use k8s_openapi::api::networking::v1::{IPAddress, IPAddressSpec, ParentReference, ServiceCIDR};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::field::{FieldErrors, Path};
use machinery::status::Reason;
use machinery::{Object, ObjectMeta, StatusError};
use tokio::sync::OnceCell;

use super::families;
use crate::connect::{PROXY_VERBS, Target, to};
use crate::defaults::fill;
use crate::kind::{
    Fields, Hooks, Kind, Made, Rules, STATUS, Sub, Updates, age, field, name, spec_and_status, wide,
};
use crate::print::{labels, or_none};
use crate::validate::guard::Of;
use crate::validate::service::addresses;
use crate::validate::{self, at::judged};

/// Upstream's default of `--service-node-port-range`.
const DEFAULT_PORTS: RangeInclusive<u16> = 30_000..=32_767;
/// Random picks before the range is searched in order.
const TRIES: usize = 16;
/// The label that says who took an address, and what it says of ours.
pub const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
pub const ALLOCATOR: &str = "ipallocator.k8s.io";
/// How long a write may take from its address to its Service, in seconds.
pub const SETTLED: i64 = 60;
/// Seconds that ClientIP affinity lasts, unless said otherwise.
const AFFINITY_SECONDS: i32 = 10_800;

pub(crate) static KIND: Kind<Service> = Kind {
    short: &["svc"],
    categories: &["all"],
    storage: Some("services/specs"),
    subresources: &[
        STATUS,
        Sub {
            name: "proxy",
            kind: Some(("", "v1", "ServiceProxyOptions")),
            verbs: PROXY_VERBS,
            behaviour: Made::Wired(|wiring| to(Target::ServiceProxy, wiring)),
        },
    ],
    default: |service| {
        service.status.get_or_insert_default().load_balancer.get_or_insert_default();
        default_spec(service.spec.get_or_insert_default());
        default_ip_modes(service);
    },
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: validate::service::create,
        update: Some(validate::service::update),
        parts: &[("status", validate::status::service)],
        name: validate::service::name,
        create_on_update: true,
        ..Rules::NONE
    },
    warns_on_update: Updates::All,
    warnings: Some(validate::warnings::service),
    status_warnings: Some(validate::warnings::addresses::load_balancer),
    returns_deleted: true,
    columns: &[
        name(),
        field("Type", "string", "api.core.v1.ServiceSpec.type", |service| kind(service).into()),
        field("Cluster-IP", "string", "api.core.v1.ServiceSpec.clusterIP", |service| {
            let ip = service.spec.as_ref().and_then(|spec| spec.cluster_ip.clone());
            or_none(ip.unwrap_or_default()).into()
        }),
        field("External-IP", "string", "api.core.v1.ServiceSpec.externalIPs", |service| {
            external_ip(service).into()
        }),
        field("Port(s)", "string", "api.core.v1.ServiceSpec.ports", |service| {
            let all = service.spec.as_ref().and_then(|spec| spec.ports.as_deref());
            or_none(ports(all.unwrap_or_default())).into()
        }),
        age(),
        wide(field("Selector", "string", "api.core.v1.ServiceSpec.selector", |service| {
            labels(service.spec.as_ref().and_then(|spec| spec.selector.as_ref())).into()
        })),
    ],
    fields: Fields::Of(&[
        ("spec.clusterIP", |service| {
            let ip = service.spec.as_ref().and_then(|spec| spec.cluster_ip.clone());
            ip.unwrap_or_default()
        }),
        ("spec.type", |service| kind(service).into()),
    ]),
    hooks: &Life,
    allocator: Some(|wiring| {
        let node_ports = wiring.map_or(DEFAULT_PORTS, |wiring| wiring.node_ports.clone());
        Arc::new(Addresses { node_ports, known: OnceCell::new() })
    }),
    ..Kind::BASE
};

struct Life;

impl Hooks<Service> for Life {
    fn prepare_create(&self, _ctx: &RequestContext, service: &mut Service) {
        // Upstream: `normalizeClusterIPs`. A client that writes the list must write both.
        let spec = service.spec.get_or_insert_default();
        if spec.cluster_ips.is_none() {
            spec.cluster_ips = spec.cluster_ip.clone().map(|ip| vec![ip]);
        }
    }

    fn prepare_update(&self, _ctx: &RequestContext, service: &mut Service, old: &Service) {
        carry_allocations(service.spec.get_or_insert_default(), old.spec.as_ref());
        default_ip_modes(service);
    }
}

/// Gives Services their cluster IPs and node ports.
struct Addresses {
    node_ports: RangeInclusive<u16>,
    /// Set when all Services that existed before have their claims.
    known: OnceCell<()>,
}

#[async_trait]
impl Allocator for Addresses {
    async fn settle(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        let (service, old) =
            (object.expect_mut::<Service>(), old.map(|old| old.expect::<Service>()));
        if ctx.subresource == "status" || kind(service) == "ExternalName" {
            return Ok(());
        }
        let old_spec = old.and_then(|old| old.spec.as_ref());
        let spec = service.spec.get_or_insert_default();
        if !families::keeps(spec, old_spec) {
            families::infer_policy(spec, old_spec);
            let mut errors = wrong_addresses(service, old);
            if errors.is_empty() {
                let there = families::of_cluster(&service_cidrs(registry).await?);
                let spec = service.spec.get_or_insert_default();
                errors = families::choose(spec, old_spec, &there);
            }
            if !errors.is_empty() {
                return Err(StatusError::invalid("", "Service", service.name(), errors));
            }
        }
        match old {
            Some(_) => families::distinct_node_ports(service),
            None => Ok(()),
        }
    }

    async fn allocate(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        if ctx.subresource == "status" {
            return Ok(());
        }
        let (service, old) =
            (object.expect_mut::<Service>(), old.map(|old| old.expect::<Service>()));
        self.known.get_or_try_init(|| settle(registry)).await?;
        self.allocate_addresses(registry, ctx, service).await?;
        self.allocate_ports(registry, ctx, service, old).await
    }

    async fn release(&self, registry: &Registry, had: &dyn Object, now: Option<&dyn Object>) {
        let (had, now) = (had.expect::<Service>(), now.map(|now| now.expect::<Service>()));
        let kept: BTreeSet<&str> = now.into_iter().flat_map(addresses_of).collect();
        for ip in addresses_of(had).filter(|ip| !kept.contains(ip)) {
            release_address(registry, ip, had).await;
        }
        let kept: BTreeSet<u16> = now.into_iter().flat_map(ports_of).collect();
        for port in ports_of(had).filter(|port| !kept.contains(port)) {
            registry.release_claim(&claim_of(port), &owner(had)).await;
        }
    }

    async fn abandoned(&self, registry: &Registry, service: &dyn Object) {
        match registry.find::<Service>(service.namespace(), service.name()).await {
            Ok(there) => {
                let there = there.as_ref().map(|there| there as &dyn Object);
                self.release(registry, service, there).await;
            }
            // The next Service that wants the address, or the repair (`addresses.rs`), releases it.
            Err(error) => tracing::warn!(
                service = service.name(), %error, "failed to release the addresses of a failed write; the repair releases them"
            ),
        }
    }
}

/// Errors of the addresses and families that a Service requests.
fn wrong_addresses(service: &Service, old: Option<&Service>) -> FieldErrors {
    let tree = service.to_value();
    let old = old.map(|old| old.to_value());
    judged(Of::kind("", "Service"), &tree, old.as_ref(), |new, before| {
        addresses(new, old.is_some().then_some(before));
    })
}

fn kind(service: &Service) -> &str {
    service.spec.as_ref().and_then(|spec| spec.type_.as_deref()).unwrap_or("ClusterIP")
}

fn has_node_ports(kind: &str) -> bool {
    matches!(kind, "NodePort" | "LoadBalancer")
}

fn default_spec(spec: &mut ServiceSpec) {
    fill(&mut spec.type_, "ClusterIP");
    fill(&mut spec.session_affinity, "None");
    let kind = spec.type_.clone().unwrap_or_default();
    if spec.session_affinity.as_deref() == Some("None") {
        spec.session_affinity_config = None;
    } else if spec.session_affinity.as_deref() == Some("ClientIP") {
        let config: &mut SessionAffinityConfig =
            spec.session_affinity_config.get_or_insert_default();
        let config: &mut ClientIPConfig = config.client_ip.get_or_insert_default();
        config.timeout_seconds.get_or_insert(AFFINITY_SECONDS);
    }
    for port in spec.ports.iter_mut().flatten() {
        fill(&mut port.protocol, "TCP");
        let unset = |target: &mut IntOrString| match target {
            IntOrString::Int(number) => *number == 0,
            IntOrString::String(name) => name.is_empty(),
        };
        port.target_port.take_if(unset);
        port.target_port.get_or_insert(IntOrString::Int(port.port));
        port.node_port.take_if(|port| *port == 0);
        port.name.take_if(|name| name.is_empty());
    }
    if kind != "ExternalName" {
        spec.internal_traffic_policy.get_or_insert_with(|| "Cluster".into());
    }
    let is_external = spec.external_ips.as_ref().is_some_and(|ips| !ips.is_empty());
    if has_node_ports(&kind) || kind == "ClusterIP" && is_external {
        fill(&mut spec.external_traffic_policy, "Cluster");
    }
    if kind == "LoadBalancer" {
        spec.allocate_load_balancer_node_ports.get_or_insert(true);
    }
    spec.publish_not_ready_addresses.take_if(|publish| !*publish);
    spec.selector.take_if(|selector| selector.is_empty());
    spec.cluster_ip.take_if(|ip| ip.is_empty());
}

/// The default of `ipMode`: nodes treat the load balancer's addresses as virtual IPs.
fn default_ip_modes(service: &mut Service) {
    if kind(service) != "LoadBalancer" {
        return;
    }
    let balancer = service.status.as_mut().and_then(|status| status.load_balancer.as_mut());
    for ingress in balancer.into_iter().flat_map(|one| one.ingress.iter_mut().flatten()) {
        if ingress.ip.as_ref().is_some_and(|ip| !ip.is_empty()) {
            fill(&mut ingress.ip_mode, "VIP");
        }
    }
}

/// Drops fields that only the old type has, unless the client sets them again. Upstream has the same
/// rule for each field.
fn drop_fields_of_old_type(spec: &mut ServiceSpec, old: &ServiceSpec) {
    let (new_type, old_type) =
        [&*spec, old].map(|spec| spec.type_.clone().unwrap_or_default()).into();
    if has_node_ports(&old_type) && !has_node_ports(&new_type) {
        let had = numbers_of(old);
        for port in spec.ports.iter_mut().flatten() {
            port.node_port.take_if(|port| had.contains(port));
        }
    }
    let is_reached = |spec: &ServiceSpec, kind: &str| {
        has_node_ports(kind)
            || kind == "ClusterIP" && spec.external_ips.as_ref().is_some_and(|ips| !ips.is_empty())
    };
    if is_reached(old, &old_type) && !is_reached(spec, &new_type) {
        spec.external_traffic_policy
            .take_if(|now| old.external_traffic_policy.as_ref() == Some(now));
    }
    if old_type == "LoadBalancer" && new_type != "LoadBalancer" {
        spec.allocate_load_balancer_node_ports
            .take_if(|now| old.allocate_load_balancer_node_ports == Some(*now));
        spec.load_balancer_class.take_if(|now| old.load_balancer_class.as_ref() == Some(now));
        spec.health_check_node_port.take_if(|now| old.health_check_node_port == Some(*now));
    }
}

/// An update that leaves addresses and ports out keeps those it had.
fn carry_allocations(spec: &mut ServiceSpec, old: Option<&ServiceSpec>) {
    let Some(old) = old else { return };
    let kind = spec.type_.clone().unwrap_or_default();
    drop_fields_of_old_type(spec, old);
    if kind == "ExternalName" {
        (spec.cluster_ip, spec.cluster_ips) = (None, None);
        (spec.ip_families, spec.ip_family_policy) = (None, None);
        return;
    }
    carry_addresses(spec, old);
    if spec.ip_families.is_none() {
        spec.ip_families = old.ip_families.clone();
    }
    if spec.ip_family_policy.is_none() {
        spec.ip_family_policy = old.ip_family_policy.clone();
    }
    if needs_health_port(spec) && needs_health_port(old) {
        spec.health_check_node_port =
            spec.health_check_node_port.filter(|port| *port != 0).or(old.health_check_node_port);
    }
    carry_node_ports(spec, old);
}

/// The first address has a name of its own: who changes that one means the list, too.
/// Upstream: `patchAllocatedValues`, `normalizeClusterIPs`.
fn carry_addresses(spec: &mut ServiceSpec, old: &ServiceSpec) {
    if old.type_.as_deref() != Some("ExternalName") {
        spec.cluster_ip = spec.cluster_ip.take().or_else(|| old.cluster_ip.clone());
        spec.cluster_ips = spec.cluster_ips.take().or_else(|| old.cluster_ips.clone());
    }
    if spec.cluster_ip != old.cluster_ip && spec.cluster_ips == old.cluster_ips {
        spec.cluster_ips = spec.cluster_ip.clone().map(|ip| vec![ip]);
    }
}

/// A port is the one that had its name, whatever else of it changed, unless another port has taken its
/// number. Upstream: `patchAllocatedValues`.
fn carry_node_ports(spec: &mut ServiceSpec, old: &ServiceSpec) {
    let wants = |spec: &ServiceSpec| match spec.type_.as_deref() {
        Some("NodePort") => true,
        Some("LoadBalancer") => spec.allocate_load_balancer_node_ports != Some(false),
        _ => false,
    };
    if !wants(spec) || !wants(old) {
        return;
    }
    let taken = numbers_of(spec);
    let had: HashMap<&str, i32> = (old.ports.iter().flatten())
        .map(|port| (name_of(port), port.node_port.unwrap_or_default()))
        .collect();
    for port in spec.ports.iter_mut().flatten().filter(|port| port.node_port.is_none()) {
        let number = had.get(name_of(port)).copied();
        port.node_port = number.filter(|number| *number != 0 && !taken.contains(number));
    }
}

fn name_of(port: &ServicePort) -> &str {
    port.name.as_deref().unwrap_or_default()
}

fn numbers_of(spec: &ServiceSpec) -> BTreeSet<i32> {
    spec.ports.iter().flatten().filter_map(|port| port.node_port).collect()
}

impl Addresses {
    async fn allocate_addresses(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        service: &mut Service,
    ) -> Result<(), StatusError> {
        if kind(service) == "ExternalName" {
            return Ok(());
        }
        let cidrs = service_cidrs(registry).await?;
        let (namespace, name) = (service.namespace().to_owned(), service.name().to_owned());
        let spec = service.spec.get_or_insert_default();
        let wanted = spec.ip_families.clone().unwrap_or_default();
        if spec.cluster_ip.as_deref() == Some("None") {
            spec.cluster_ips = Some(vec!["None".into()]);
            return Ok(());
        }
        let mut given = spec.cluster_ips.clone().unwrap_or_default();
        for (index, family) in wanted.iter().enumerate() {
            let asked = given.get(index).cloned();
            let of_family = cidrs.iter().filter(|cidr| families::family_of(&cidr.addr()) == family);
            let ranges: Vec<IpNet> = of_family.copied().collect();
            let parent = (namespace.as_str(), name.as_str());
            let ip = take_address(registry, ctx, parent, asked.as_deref(), &ranges).await?;
            match given.get_mut(index) {
                Some(slot) => *slot = ip,
                None => given.push(ip),
            }
        }
        spec.cluster_ip = given.first().cloned();
        spec.cluster_ips = Some(given);
        Ok(())
    }

    async fn allocate_ports(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        service: &mut Service,
        old: Option<&Service>,
    ) -> Result<(), StatusError> {
        let owner = owner(service);
        let name = service.name().to_owned();
        let wants = has_node_ports(kind(service))
            && service.spec.as_ref().and_then(|spec| spec.allocate_load_balancer_node_ports)
                != Some(false);
        let had: BTreeSet<u16> = old.into_iter().flat_map(ports_of).collect();
        let mut mine: BTreeSet<u16> = BTreeSet::new();
        let spec = service.spec.get_or_insert_default();
        let is_new = old.is_none();
        // In a new Service a port of several protocols has one number: the one that is asked for.
        let requested: Vec<(i32, i32)> = (spec.ports.iter().flatten().filter(|_| is_new))
            .filter_map(|port| Some((port.port, port.node_port.filter(|number| *number != 0)?)))
            .collect();
        let mut of_port: HashMap<i32, i32> = HashMap::new();
        for (index, port) in spec.ports.iter_mut().flatten().enumerate() {
            // None is also written as 0.
            let own = port.node_port.filter(|port| *port != 0);
            if own.is_none() && !wants {
                continue;
            }
            let shared = of_port.get(&port.port).copied();
            if let Some(number) = shared.filter(|number| own.is_none_or(|own| own == *number)) {
                port.node_port = Some(number);
                continue;
            }
            let of_others = requested.iter().find(|one| one.0 == port.port && shared.is_none());
            let number = match of_others.map(|one| one.1).or(own) {
                Some(asked) => {
                    let known = u16::try_from(asked).ok().filter(|port| match is_new {
                        true => mine.contains(port),
                        false => had.contains(port) || mine.contains(port),
                    });
                    let taken = match known {
                        Some(_) if is_new => Err("provided port is already allocated".to_owned()),
                        Some(known) => Ok(known),
                        None => self.take_port(registry, ctx, asked, &owner).await?,
                    };
                    taken.map_err(|problem| refused_port(&name, index, asked, &problem))?
                }
                None => self.free_port(registry, ctx, &mine, &owner).await?,
            };
            mine.insert(number);
            port.node_port = Some(number.into());
            if is_new && shared.is_none() {
                of_port.insert(port.port, number.into());
            }
        }
        self.allocate_health_port(registry, ctx, spec, (&had, &mine), &owner).await?;
        Ok(())
    }

    /// The port that load balancers ask whether the Service has pods on a node.
    async fn allocate_health_port(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        spec: &mut ServiceSpec,
        (had, mine): (&BTreeSet<u16>, &BTreeSet<u16>),
        owner: &str,
    ) -> Result<(), StatusError> {
        if !needs_health_port(spec) {
            return Ok(());
        }
        let Some(asked) = spec.health_check_node_port.filter(|port| *port != 0) else {
            let free = self.free_port(registry, ctx, mine, owner).await?;
            spec.health_check_node_port = Some(free.into());
            return Ok(());
        };
        if health_port(spec).is_some_and(|port| had.contains(&port)) {
            return Ok(());
        }
        let taken = self.take_port(registry, ctx, asked, owner).await?;
        taken.map(|_| ()).map_err(|problem| {
            StatusError::internal(format!(
                "failed to allocate requested HealthCheck NodePort {asked}: {problem}"
            ))
        })
    }

    /// A number as a port, if nodes may have it.
    fn node_port(&self, number: i32) -> Option<u16> {
        u16::try_from(number).ok().filter(|port| self.node_ports.contains(port))
    }

    /// Claims the requested port, or returns why it cannot be used.
    async fn take_port(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        asked: i32,
        owner: &str,
    ) -> Result<Result<u16, String>, StatusError> {
        let Some(port) = self.node_port(asked) else {
            let (low, high) = (self.node_ports.start(), self.node_ports.end());
            return Ok(Err(format!(
                "provided port is not in the valid range. The range of valid ports is {low}-{high}"
            )));
        };
        let is_mine = claim(registry, ctx, port, owner).await?;
        Ok(if is_mine { Ok(port) } else { Err("provided port is already allocated".to_owned()) })
    }

    /// Any port that is free, taken for the owner.
    async fn free_port(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        mine: &BTreeSet<u16>,
        owner: &str,
    ) -> Result<u16, StatusError> {
        let size = u64::from(self.node_ports.end() - self.node_ports.start()) + 1;
        let random = (0..TRIES).map(|_| self.node_ports.start() + base::rng::below(size) as u16);
        for port in random.chain(self.node_ports.clone()) {
            if !mine.contains(&port) && claim(registry, ctx, port, owner).await? {
                return Ok(port);
            }
        }
        Err(StatusError::internal("failed to allocate a nodePort: range is full"))
    }
}

fn refused_port(name: &str, index: usize, asked: i32, problem: &str) -> StatusError {
    let path = Path::new("spec").child("ports").index(index).child("nodePort");
    let mut errors = FieldErrors::default();
    errors.invalid(&path, asked, problem);
    StatusError::invalid("", "Service", name, errors)
}

/// What a Service is called in claims.
fn owner(service: &Service) -> String {
    format!("{}/{}", service.namespace(), service.name())
}

fn claim_of(port: u16) -> String {
    format!("nodeports/{port}")
}

/// Takes a port; a dry run only looks whether another Service has it.
async fn claim(
    registry: &Registry,
    ctx: &RequestContext,
    port: u16,
    owner_name: &str,
) -> Result<bool, StatusError> {
    if ctx.dry_run {
        let all = registry.cached::<Service>("").await?;
        let others = all.iter().filter(|service| owner(service) != owner_name);
        return Ok(!others.flat_map(ports_of).any(|taken| taken == port));
    }
    let holds = |other: String| async move {
        let (namespace, name) = other.split_once('/').unwrap_or_default();
        let service = registry.find::<Service>(namespace, name).await?;
        Ok(service.is_some_and(|service| ports_of(&service).any(|taken| taken == port)))
    };
    registry.claim(&claim_of(port), owner_name, holds).await
}

/// Claims for Services that were written before there were claims, or by others.
async fn settle(registry: &Registry) -> Result<(), StatusError> {
    for service in registry.cached::<Service>("").await? {
        for port in ports_of(&service) {
            let holds = |_| std::future::ready(Ok(true));
            if !registry.claim(&claim_of(port), &owner(&service), holds).await? {
                tracing::warn!(port, service = owner(&service), "two Services have this node port");
            }
        }
    }
    Ok(())
}

fn ports_of(service: &Service) -> impl Iterator<Item = u16> + '_ {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    ports
        .filter_map(|port| port.node_port)
        .filter_map(|port| u16::try_from(port).ok())
        .filter(|port| *port > 0)
        .chain(service.spec.iter().filter_map(health_port))
}

/// Load balancers ask a port of each node whether the Service has pods there.
fn needs_health_port(spec: &ServiceSpec) -> bool {
    spec.type_.as_deref() == Some("LoadBalancer")
        && spec.external_traffic_policy.as_deref() == Some("Local")
}

fn health_port(spec: &ServiceSpec) -> Option<u16> {
    spec.health_check_node_port
        .and_then(|port| u16::try_from(port).ok())
        .filter(|port| *port > 0 && needs_health_port(spec))
}

pub async fn service_cidrs(registry: &Registry) -> Result<Vec<IpNet>, StatusError> {
    let all = registry.cached::<ServiceCIDR>("").await?;
    let texts = all
        .iter()
        .flat_map(|one| one.spec.iter())
        .flat_map(|spec| spec.cidrs.clone().unwrap_or_default());
    Ok(texts.filter_map(|text| text.parse().ok()).collect())
}

/// Takes the address that was asked for, or any free one of the ranges.
async fn take_address(
    registry: &Registry,
    ctx: &RequestContext,
    parent: (&str, &str),
    asked: Option<&str>,
    ranges: &[IpNet],
) -> Result<String, StatusError> {
    if let Some(asked) = asked {
        let outside = asked
            .parse::<IpAddr>()
            .ok()
            .is_none_or(|ip| !ranges.iter().any(|range| range.contains(&ip)));
        let problem = if outside {
            Some(format!(
                "failed to allocate IP {asked}: the provided network does not match the current range"
            ))
        } else if ctx.dry_run || reserve(registry, asked, parent).await? {
            None
        } else {
            Some(format!("failed to allocate IP {asked}: provided IP is already allocated"))
        };
        let Some(problem) = problem else { return Ok(asked.to_owned()) };
        let mut errors = FieldErrors::default();
        errors.invalid(&Path::new("spec").child("clusterIPs"), [asked], &problem);
        return Err(StatusError::invalid("", "Service", parent.1, errors));
    }
    for candidate in candidates(ranges) {
        if ctx.dry_run || reserve(registry, &candidate, parent).await? {
            return Ok(candidate);
        }
    }
    Err(StatusError::internal("failed to allocate a serviceIP: range is full"))
}

/// A few random hosts of the ranges, then all in order (of IPv6 as many as anybody could use).
/// Upstream leaves the first addresses of a range to those who ask for one.
fn candidates(ranges: &[IpNet]) -> impl Iterator<Item = String> + '_ {
    let random = ranges.iter().flat_map(|range| {
        let bits = u32::from(range.max_prefix_len() - range.prefix_len()).min(16);
        let size = 1u64 << bits;
        let reserved = (size / 16).clamp(1, 256).min(size - 1);
        (0..TRIES).filter_map(move |_| nth(range, reserved + base::rng::below(size - reserved)))
    });
    let ordered = ranges.iter().flat_map(|range| range.hosts().take(1 << 16));
    random
        .filter(|ip| ranges.iter().any(|range| range.broadcast() != *ip))
        .chain(ordered)
        .map(|ip| ip.to_string())
}

fn nth(range: &IpNet, index: u64) -> Option<IpAddr> {
    match range.network() {
        IpAddr::V4(ip) => Some(IpAddr::V4((u32::from(ip) + u32::try_from(index).ok()?).into())),
        IpAddr::V6(ip) => Some(IpAddr::V6((u128::from(ip) + u128::from(index)).into())),
    }
}

fn reference_to((namespace, name): (&str, &str)) -> ParentReference {
    ParentReference {
        group: None,
        resource: "services".into(),
        namespace: Some(namespace.into()),
        name: name.into(),
    }
}

/// Takes the address; `false` when another Service has it.
async fn reserve(registry: &Registry, ip: &str, parent: (&str, &str)) -> Result<bool, StatusError> {
    if create_address(registry, ip, parent).await? {
        return Ok(true);
    }
    match registry.find::<IPAddress>("", ip).await? {
        Some(address) if is_for(&address, parent) => Ok(true),
        Some(address) if is_abandoned(registry, &address).await? => {
            delete_address(registry, &address).await;
            create_address(registry, ip, parent).await
        }
        _ => Ok(false),
    }
}

/// `false` when there is one.
pub async fn create_address(
    registry: &Registry,
    ip: &str,
    parent: (&str, &str),
) -> Result<bool, StatusError> {
    let ctx = registry.own_context::<IPAddress>();
    let family = ip.parse::<IpAddr>().map(|ip| families::family_of(&ip)).unwrap_or("IPv4");
    let labels = [("ipaddress.kubernetes.io/ip-family", family), (MANAGED_BY, ALLOCATOR)];
    let object = IPAddress {
        metadata: ObjectMeta {
            name: Some(ip.into()),
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
            ..ObjectMeta::default()
        },
        spec: IPAddressSpec { parent_ref: reference_to(parent) },
    };
    let intent = Intent::Create { object: Box::new(object) };
    match registry.write(&ctx, &Key::new("", ip), intent).await {
        Ok(_) => Ok(true),
        Err(error) if error.is(Reason::AlreadyExists) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_for(address: &IPAddress, (namespace, name): (&str, &str)) -> bool {
    let reference = &address.spec.parent_ref;
    reference.namespace.as_deref() == Some(namespace) && reference.name == name
}

/// Was it taken for a Service that does not have it, longer ago than any write takes?
pub async fn is_abandoned(registry: &Registry, address: &IPAddress) -> Result<bool, StatusError> {
    let reference = &address.spec.parent_ref;
    let is_service =
        reference.group.as_deref().is_none_or(str::is_empty) && reference.resource == "services";
    let created = address.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let age = created.map(|created| base::clock::now().duration_since(created));
    if !is_service || age.is_none_or(|age| age.as_secs() < SETTLED) {
        return Ok(false);
    }
    let namespace = reference.namespace.as_deref().unwrap_or_default();
    let service = registry.find::<Service>(namespace, &reference.name).await?;
    Ok(!service.is_some_and(|one| addresses_of(&one).any(|ip| ip == address.name())))
}

async fn release_address(registry: &Registry, ip: &str, had: &Service) {
    match registry.find::<IPAddress>("", ip).await {
        Ok(Some(address)) if is_for(&address, (had.namespace(), had.name())) => {
            delete_address(registry, &address).await;
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(ip, %error, "failed to release the cluster IP"),
    }
}

/// Deletes exactly this object, not a newer one with the same name.
pub async fn delete_address(registry: &Registry, address: &IPAddress) {
    let options = DeleteOptions {
        precondition_uid: address.metadata.uid.clone(),
        ..DeleteOptions::default()
    };
    let (ctx, key) = (registry.own_context::<IPAddress>(), Key::new("", address.name()));
    match registry.write(&ctx, &key, Intent::Delete { options }).await {
        Err(error) if !error.is(Reason::NotFound) && !error.is(Reason::Conflict) => {
            let ip = address.name();
            tracing::warn!(ip, %error, "failed to release the cluster IP");
        }
        _ => {}
    }
}

/// Is it of a kind that has cluster IPs?
pub fn has_addresses(service: &Service) -> bool {
    kind(service) != "ExternalName"
}

pub fn addresses_of(service: &Service) -> impl Iterator<Item = &str> {
    let ips = service.spec.iter().flat_map(|spec| spec.cluster_ips.iter().flatten());
    ips.map(String::as_str).filter(|ip| !matches!(*ip, "" | "None"))
}

fn external_ip(service: &Service) -> String {
    let spec = service.spec.clone().unwrap_or_default();
    let external = spec.external_ips.unwrap_or_default();
    match spec.type_.as_deref() {
        Some("ExternalName") => spec.external_name.unwrap_or_default(),
        Some("LoadBalancer") => {
            let status =
                service.status.clone().unwrap_or_default().load_balancer.unwrap_or_default();
            let ingress = status.ingress.unwrap_or_default().into_iter();
            let mut all: Vec<String> = ingress.filter_map(|one| one.ip.or(one.hostname)).collect();
            all.extend(external);
            if all.is_empty() { "<pending>".into() } else { all.join(",") }
        }
        _ => or_none(external.join(",")),
    }
}

fn ports(ports: &[ServicePort]) -> String {
    let one = |port: &ServicePort| {
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        match port.node_port {
            Some(node) if node > 0 => format!("{}:{node}/{protocol}", port.port),
            _ => format!("{}/{protocol}", port.port),
        }
    };
    ports.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
pub(crate) mod tests {
    use apiserver::admission::Chain;
    use apiserver::resource::ResourceTable;
    use base::task::Tasks;
    use serde_json::{Value, from_value, json};

    use super::*;
    use crate::Wiring;

    /// A registry of Services and what they are given addresses from.
    pub(crate) async fn registry() -> Registry {
        let registry = registry_of(&["services", "ipaddresses", "servicecidrs"]).await;
        let cidr = json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/24"]}});
        let cidr: ServiceCIDR = from_value(cidr).expect("a range");
        let ctx = registry.own_context::<ServiceCIDR>();
        let intent = Intent::Create { object: Box::new(cidr) };
        registry.write(&ctx, &Key::new("", "kubernetes"), intent).await.expect("written");
        registry
    }

    pub(crate) async fn registry_of(kept: &[&str]) -> Registry {
        let facts: Arc<dyn machinery::patch::Schema> = Arc::new(api::facts::Facts);
        let wiring = Wiring { node_ports: 30_000..=30_001, ..crate::tests::wiring() };
        let rows = crate::RESOURCES.iter().map(|kind| kind.row(Some(&wiring)));
        let rows = rows.map(|row| row.build(Some(facts.clone())));
        let rows = rows.filter(|row| {
            kept.contains(&row.plural.as_str()) || (&*row.group, &*row.kind) == ("", "Service")
        });
        let store = store::Sim::open();
        let table = ResourceTable::new(rows);
        Registry::new(store, table, Chain::default(), Tasks::new("test"))
    }

    pub(crate) async fn write(registry: &Registry, intent: Intent) -> Result<Service, StatusError> {
        let ctx = registry.own_context::<Service>();
        let key = match &intent {
            Intent::Create { object } | Intent::Update { object } => Key::new("ns", object.name()),
            _ => unreachable!("only these are tried"),
        };
        let written = registry.write(&ctx, &key, intent).await?;
        Ok(written.object.object()?.expect::<Service>().clone())
    }

    pub(crate) fn service(name: &str, spec: Value) -> Box<Service> {
        let service = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec});
        Box::new(from_value(service).expect("a Service"))
    }

    async fn taken(registry: &Registry) -> usize {
        registry.cached::<IPAddress>("").await.expect("readable").len()
    }

    #[tokio::test]
    async fn a_write_that_fails_keeps_nothing_and_an_update_gives_back_once_it_is_written() {
        let registry = registry().await;
        let of_port =
            |port: i32| json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
        let create = |name, spec| Intent::Create { object: service(name, spec) };
        let first = write(&registry, create("a", of_port(30_000))).await.expect("written");
        assert_eq!(taken(&registry).await, 1);
        for port in [30_000, 40_000] {
            let refused = write(&registry, create("b", of_port(port))).await.expect_err("refused");
            assert!(refused.message.contains("provided port"), "{refused}");
            assert_eq!(taken(&registry).await, 1);
        }
        // An update that comes too late does not give away what the Service has.
        let mut late = first.clone();
        let spec = late.spec.as_mut().expect("a spec");
        *spec = from_value(json!({"type": "ExternalName", "externalName": "x.example"}))
            .expect("a spec");
        late.metadata.resource_version = Some("1".into());
        let refused = write(&registry, Intent::Update { object: Box::new(late.clone()) }).await;
        assert!(refused.expect_err("too late").is(Reason::Conflict));
        assert_eq!(taken(&registry).await, 1);
        let refused = write(&registry, create("b", of_port(30_000))).await.expect_err("refused");
        assert!(refused.message.contains("already allocated"), "{refused}");
        late.metadata.resource_version = first.metadata.resource_version.clone();
        write(&registry, Intent::Update { object: Box::new(late) }).await.expect("written");
        assert_eq!(taken(&registry).await, 0);
        write(&registry, create("b", of_port(30_000))).await.expect("the port is free");
    }

    /// Those that are no port at all, too: whatever is kept was claimed.
    #[tokio::test]
    async fn a_number_outside_of_the_range_is_nobodys() {
        let registry = registry().await;
        let of_port =
            |port: i32| json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
        let create = Intent::Create { object: service("there", of_port(30_000)) };
        let there = write(&registry, create).await.expect("written");
        for port in [100_000, 65_536 + 30_000, -5, 29_999, 30_002, i32::MIN] {
            let mut changed = there.clone();
            changed.spec = service("there", of_port(port)).spec;
            changed.spec.get_or_insert_default().cluster_ip =
                there.spec.as_ref().and_then(|spec| spec.cluster_ip.clone());
            for intent in [
                Intent::Create { object: service("new", of_port(port)) },
                Intent::Update { object: Box::new(changed) },
            ] {
                let refused = write(&registry, intent).await.expect_err("refused");
                let expected = format!(
                    "spec.ports[0].nodePort: Invalid value: {port}: provided port is not in the valid range. The range of valid ports is 30000-30001"
                );
                assert_eq!(refused.code, 422, "{port}: {refused}");
                assert!(refused.message.contains(&expected), "{port}: {refused}");
            }
        }
        // 0 is none.
        let free = Intent::Create { object: service("zero", of_port(0)) };
        let spec = write(&registry, free).await.expect("written").spec.expect("a spec");
        assert_eq!(spec.ports.expect("ports")[0].node_port, Some(30_001));
    }

    #[tokio::test]
    async fn addresses_that_a_stop_left_behind_are_found() {
        let registry = registry().await;
        let parent = ("ns", "gone");
        let age = async |seconds| {
            let found = registry.find::<IPAddress>("", "10.96.0.9").await.expect("readable");
            let mut address = found.expect("there");
            let created = base::clock::now() - jiff::SignedDuration::from_secs(seconds);
            address.metadata.creation_timestamp = Some(machinery::Time(created));
            is_abandoned(&registry, &address).await.expect("readable")
        };
        assert!(create_address(&registry, "10.96.0.9", parent).await.expect("written"));
        assert!(!age(1).await, "its Service may be on its way");
        assert!(age(61).await);
        let spec = json!({"clusterIP": "10.96.0.9", "ports": [{"port": 80}]});
        let mine = Intent::Create { object: service("gone", spec) };
        write(&registry, mine).await.expect("it is its own");
        assert!(!age(61).await);
    }

    #[tokio::test]
    async fn a_new_service_has_one_number_for_all_protocols_of_a_port() {
        let registry = registry().await;
        let port = |name: &str, port: i32, protocol: &str| json!({"name": name, "port": port, "protocol": protocol});
        let mut ports = [port("a", 53, "UDP"), port("b", 53, "TCP")];
        let numbers = async |name: &str, ports: &[Value]| {
            let spec = json!({"type": "NodePort", "ports": ports});
            let written = write(&registry, Intent::Create { object: service(name, spec) }).await;
            let ports = written.expect("written").spec.and_then(|spec| spec.ports);
            let all = ports.into_iter().flatten().filter_map(|port| port.node_port);
            all.collect::<Vec<i32>>()
        };
        let given = numbers("free", &ports).await;
        assert_eq!(given[0], given[1]);
        // There are two.
        let other = 60_001 - given[0];
        ports[1]["nodePort"] = other.into();
        let given = numbers("asked", &ports).await;
        assert_eq!(given, [other; 2], "the one that is asked for is everybody's");
    }

    #[test]
    fn ports_keep_their_numbers_by_their_names() {
        let spec =
            |ports: Value| json!({"type": "NodePort", "clusterIP": "10.0.0.1", "ports": ports});
        let old = spec(json!([{"name": "a", "port": 80, "nodePort": 30001},
            {"name": "b", "port": 81, "nodePort": 30002}]));
        for (sent, expected) in [
            // Whatever else of it changed.
            (
                json!([{"name": "b", "port": 9000}, {"name": "a", "port": 80}]),
                json!([{"name": "b", "port": 9000, "nodePort": 30002},
                    {"name": "a", "port": 80, "nodePort": 30001}]),
            ),
            (json!([{"name": "c", "port": 80}]), json!([{"name": "c", "port": 80}])),
            // Another one took it.
            (
                json!([{"name": "a", "port": 80}, {"name": "c", "port": 82, "nodePort": 30001}]),
                json!([{"name": "a", "port": 80}, {"name": "c", "port": 82, "nodePort": 30001}]),
            ),
        ] {
            check(old.clone(), spec(sent), spec(expected));
        }
    }

    /// An update to `sent` of a Service that was `old`: what is left of `sent`'s fields.
    fn check(old: Value, sent: Value, expected: Value) {
        let [old, mut spec] =
            [old, sent].map(|spec| from_value::<ServiceSpec>(spec).expect("a spec"));
        carry_allocations(&mut spec, Some(&old));
        assert_eq!(serde_json::to_value(&spec).expect("JSON"), expected);
    }

    #[test]
    fn fields_of_the_old_type_go_with_it() {
        let port = |node_port: Value| json!([{"port": 80, "nodePort": node_port}]);
        let old = json!({"type": "NodePort", "clusterIP": "10.0.0.1", "ports": port(30001.into()),
            "externalTrafficPolicy": "Cluster"});
        let mut sent = old.clone();
        sent["type"] = "ExternalName".into();
        sent["externalName"] = "foo.example.com".into();
        let expected = json!({"type": "ExternalName", "externalName": "foo.example.com",
            "ports": [{"port": 80}]});
        check(old.clone(), sent.clone(), expected);
        // Fields that the client sets again stay, and are validated.
        sent["ports"] = port(30002.into());
        sent["externalTrafficPolicy"] = "Local".into();
        let expected = json!({"type": "ExternalName", "externalName": "foo.example.com",
            "ports": port(30002.into()), "externalTrafficPolicy": "Local"});
        check(old, sent, expected);
    }
}
