//! Computes the ruleset from Services, endpoints and facts about the node: a pure function, with
//! the structure of upstream's nftables mode.
//!
//! ```text
//!  nat prerouting, output ─► services ─ ip.proto.port in @service-ips ──┬► service-…  (cluster)
//!                                └ node's address, port in              ├► local-…    (this node)
//!                                  @service-nodeports ──► external-… ───┘      │
//!                                     (marks, short-circuits)                  ▼ at random, or by
//!                                                                   endpoint-…   affinity
//!                                                                     └► dnat
//!  filter input, forward, output (new connections) ─► service-endpoints-check (no endpoints),
//!                                                     cluster-ips-check (unused addresses, ports),
//!                                                     untranslated-check (a change of rules)
//!  nat postrouting ─► masquerading (marked packets)
//! ```
//!
//! Cost per packet does not depend on the number of services: one map lookup, one chain.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::nft::{
    BaseChain, ChainKind, Element, Field, Hook, Ip, Op, Policy, Ruleset, Set, Stmt, Table, Type,
    Value, Verdict, ct_state,
};

use crate::endpoints::{self, Endpoint, Place, Usable};
use crate::names;
use crate::services::ServicePort;

/// Upstream's name: if both proxies run, each replaces the other's rules.
pub const TABLE: &str = "kube-proxy";
/// Our own table: masquerades traffic from this node's pods that leaves the cluster.
pub const POD_TABLE: &str = "decapod-pods";
/// Packets with this bit are masqueraded in postrouting.
const MASQUERADE_MARK: u32 = 0x4000;
/// `RTN_LOCAL`: an address of this node.
const LOCAL: u32 = 2;
const AFFINITY_SET_SIZE: u32 = 65_535;

/// The inputs of the rules besides the Services and endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub node: String,
    pub zone: Option<String>,
    /// This node's pod CIDRs.
    pub pod_cidrs: Vec<IpNet>,
    /// All pods' CIDRs: traffic from other sources is masqueraded.
    pub cluster_cidrs: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    pub node_ports: NodePorts,
    pub masquerade_all: bool,
}

/// The addresses on which node ports answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePorts {
    /// Every address of the node except loopback.
    All,
    Only(Vec<IpAddr>),
}

impl Default for NodePorts {
    fn default() -> Self {
        Self::Only(Vec::new())
    }
}

/// The ruleset for this node.
pub fn ruleset<S, E>(services: &[S], slices: &[E], facts: &Facts) -> Ruleset
where
    S: Borrow<Service>,
    E: Borrow<EndpointSlice>,
{
    let mut ruleset = Ruleset::default();
    for ip in [Ip::V4, Ip::V6] {
        let mut family = Family { ip, facts, table: Table::default() };
        family.frame();
        family.node_port_addresses();
        let mut ports: BTreeMap<_, ServicePort> = BTreeMap::new();
        for service in services {
            let of = ServicePort::of(service.borrow(), ip);
            ports.extend(of.into_iter().map(|port| (port.name.clone(), port)));
        }
        let all = endpoints::collect(slices, ip, &facts.node);
        let place = Place { node: &facts.node, zone: facts.zone.as_deref() };
        for (name, port) in &ports {
            let endpoints = all.get(name).map(Vec::as_slice).unwrap_or_default();
            family.service(port, &Usable::of(port, endpoints, place));
        }
        ruleset.tables.insert((ip.family(), TABLE.to_owned()), family.table);
        if let Some(table) = pod_masquerade(ip, facts) {
            ruleset.tables.insert((ip.family(), POD_TABLE.to_owned()), table);
        }
    }
    ruleset
}

/// Pods use their node's address outside of the cluster, where their own addresses have no route.
fn pod_masquerade(ip: Ip, facts: &Facts) -> Option<Table> {
    let ours: Vec<_> = of_family(&facts.pod_cidrs, ip).collect();
    let inside: Vec<_> = of_family(&facts.cluster_cidrs, ip).collect();
    if ours.is_empty() || inside.is_empty() {
        return None;
    }
    let mut table =
        Table { comment: Some("pod traffic that leaves the cluster".into()), ..Table::default() };
    let chain = "nat-postrouting";
    table.chain(chain).base = base(ChainKind::Nat, Hook::Postrouting, 100);
    let multicast = if ip == Ip::V4 { "224.0.0.0/4" } else { "ff00::/8" };
    let multicast: IpNet = multicast.parse().expect("a literal network");
    for net in inside.into_iter().chain([multicast]) {
        let stays = Stmt::InNet { field: Field::Daddr(ip), op: Op::Eq, net };
        table.rule(chain, vec![stays, Stmt::Verdict(Verdict::Return)]);
    }
    for net in ours {
        let from = Stmt::InNet { field: Field::Saddr(ip), op: Op::Eq, net };
        table.rule(chain, vec![from, Stmt::Masquerade { fully_random: true }]);
    }
    Some(table)
}

/// The kube-proxy table of one family during its construction.
struct Family<'a> {
    ip: Ip,
    facts: &'a Facts,
    table: Table,
}

/// The chain names of one service port, and the targets of its traffic.
struct Paths {
    cluster: String,
    local: String,
    external: String,
    firewall: String,
    /// The target chain of the cluster IP; none without endpoints.
    internal_to: Option<String>,
    /// The target of the external chain; none without endpoints.
    external_to: Option<String>,
}

impl Family<'_> {
    /// Adds everything that does not depend on Services.
    fn frame(&mut self) {
        self.table.comment = Some("rules for kube-proxy".into());
        self.sets();
        self.base_chains();
        self.checks();
        let mark = MASQUERADE_MARK;
        let t = &mut self.table;
        t.rule("mark-for-masquerade", vec![Stmt::MarkOr(mark)]);
        let unmarked = Stmt::NoBit { field: Field::Mark, bits: mark };
        t.rule("masquerading", vec![unmarked, Stmt::Verdict(Verdict::Return)]);
        t.rule("masquerading", vec![Stmt::MarkXor(mark)]);
        t.rule("masquerading", vec![Stmt::Masquerade { fully_random: true }]);
        let vmap = Stmt::Vmap { key: self.address_key(), map: "service-ips".into() };
        self.table.rule("services", vec![vmap]);
        let vmap = Stmt::Vmap { key: port_key(), map: "service-nodeports".into() };
        self.node_port_rule("services", vec![vmap]);
    }

    fn sets(&mut self) {
        let address = vec![self.ip.addr_type()];
        let service = vec![self.ip.addr_type(), Type::InetProto, Type::InetService];
        let port = service[1..].to_vec();
        let mut put = |name: &str, key: &[Type], map: bool, comment: &str| {
            let comment = Some(comment.to_owned());
            let set = Set { key: key.to_vec(), map, comment, ..Set::default() };
            self.table.sets.insert(name.to_owned(), set);
        };
        put("cluster-ips", &address, false, "Active ClusterIPs");
        put("nodeport-ips", &address, false, "IPs that accept NodePort traffic");
        let comment = "ClusterIP, ExternalIP and LoadBalancer IP traffic";
        put("service-ips", &service, true, comment);
        put("service-nodeports", &port, true, "NodePort traffic");
        let comment = "vmap to drop or reject packets to services with no endpoints";
        put("no-endpoint-services", &service, true, comment);
        let comment = "vmap to drop or reject packets to service nodeports with no endpoints";
        put("no-endpoint-nodeports", &port, true, comment);
        let comment = "destinations that are subject to LoadBalancerSourceRanges";
        put("firewall-ips", &service, true, comment);
        put("active-services", &service, false, "ClusterIP traffic that leads somewhere");
        put("active-nodeports", &port, false, "NodePort traffic that leads somewhere");
    }

    fn base_chains(&mut self) {
        use ChainKind::{Filter, Nat};
        let bases = [
            ("filter-prerouting-pre-dnat", Filter, Hook::Prerouting, -110),
            ("filter-output-pre-dnat", Filter, Hook::Output, -110),
            ("filter-input", Filter, Hook::Input, 0),
            ("filter-forward", Filter, Hook::Forward, 0),
            ("filter-output", Filter, Hook::Output, 0),
            ("nat-prerouting", Nat, Hook::Prerouting, -100),
            ("nat-output", Nat, Hook::Output, -100),
            ("nat-postrouting", Nat, Hook::Postrouting, 100),
        ];
        for (name, kind, hook, priority) in bases {
            self.table.chain(name).base = base(kind, hook, priority);
        }
        // The firewall matches the client's original destination, so it comes before the
        // translation. The refusals come after it, where only untranslated packets are left.
        let new = Stmt::AnyBit { field: Field::CtState, bits: ct_state::NEW };
        let jumps = [
            ("filter-input", "nodeport-endpoints-check", true),
            ("filter-input", "service-endpoints-check", true),
            ("filter-input", "untranslated-check", true),
            ("filter-forward", "service-endpoints-check", true),
            ("filter-forward", "untranslated-check", true),
            ("filter-forward", "cluster-ips-check", true),
            ("filter-output", "service-endpoints-check", true),
            ("filter-output", "untranslated-check", true),
            ("filter-output", "cluster-ips-check", true),
            ("filter-prerouting-pre-dnat", "firewall-check", true),
            ("filter-output-pre-dnat", "firewall-check", true),
            ("nat-output", "services", false),
            ("nat-prerouting", "services", false),
            ("nat-postrouting", "masquerading", false),
        ];
        for (from, to, only_new) in jumps {
            self.table.chain(to);
            let matches = only_new.then(|| new.clone());
            self.table.rule(from, matches.into_iter().chain([Stmt::jump(to)]).collect());
        }
    }

    fn checks(&mut self) {
        let key = self.address_key();
        let vmap = |map: &str| Stmt::Vmap { key: key.clone(), map: map.into() };
        self.table.rule("service-endpoints-check", vec![vmap("no-endpoint-services")]);
        self.table.rule("firewall-check", vec![vmap("firewall-ips")]);
        let to_map = Stmt::Vmap { key: port_key(), map: "no-endpoint-nodeports".into() };
        self.node_port_rule("nodeport-endpoints-check", vec![to_map]);
        self.untranslated_check();
        self.table.rule("reject-chain", vec![Stmt::Reject]);
        // Deviation: the cluster DNS address is an address of every node, and belongs to no Service of ours.
        let check = "cluster-ips-check";
        let own = Stmt::equals(Field::FibDaddrType, Value::Number(LOCAL));
        self.table.rule(check, vec![own, Stmt::Verdict(Verdict::Return)]);
        let daddr = Field::Daddr(self.ip);
        let set = "cluster-ips".to_owned();
        let known = Stmt::InSet { key: vec![daddr.clone()], op: Op::Eq, set };
        self.table
            .rule(check, vec![known, Stmt::Reject])
            .comment("Reject traffic to invalid ports of ClusterIPs");
        let facts = self.facts;
        for net in of_family(&facts.service_cidrs, self.ip) {
            let field = daddr.clone();
            let unused = vec![Stmt::InNet { field, op: Op::Eq, net }, Stmt::Verdict(Verdict::Drop)];
            let rule = self.table.rule(check, unused);
            rule.comment("Drop traffic to unallocated ClusterIPs");
        }
    }

    fn address_key(&self) -> Vec<Field> {
        vec![Field::Daddr(self.ip), Field::L4proto, Field::Dport]
    }

    /// Drops packets that a change of the ruleset left untranslated: such a packet may meet old
    /// rules with new maps. Refusing it would fail a request without need; after a drop the
    /// client's next attempt succeeds. Deviation: upstream refuses such packets.
    fn untranslated_check(&mut self) {
        let drop = Stmt::Verdict(Verdict::Drop);
        let in_set = |key, set: &str| Stmt::InSet { key, op: Op::Eq, set: set.to_owned() };
        let service = in_set(self.address_key(), "active-services");
        let chain = "untranslated-check";
        self.table.rule(chain, vec![service, drop.clone()]);
        self.node_port_rule(chain, vec![in_set(port_key(), "active-nodeports"), drop]);
    }

    /// A rule for packets to the node ports' addresses.
    fn node_port_rule(&mut self, chain: &str, then: Vec<Stmt>) {
        let mut stmts = Vec::new();
        match self.facts.node_ports {
            NodePorts::All => {
                let loopback = if self.ip == Ip::V4 { "127.0.0.0/8" } else { "::1/128" };
                let net = loopback.parse().expect("a literal network");
                stmts.push(Stmt::equals(Field::FibDaddrType, Value::Number(LOCAL)));
                stmts.push(Stmt::InNet { field: Field::Daddr(self.ip), op: Op::Ne, net });
            }
            NodePorts::Only(_) => {
                let key = vec![Field::Daddr(self.ip)];
                stmts.push(Stmt::InSet { key, op: Op::Eq, set: "nodeport-ips".into() });
            }
        }
        stmts.extend(then);
        self.table.rule(chain, stmts);
    }

    fn node_port_addresses(&mut self) {
        let NodePorts::Only(addresses) = &self.facts.node_ports else { return };
        for address in addresses.iter().filter(|address| Ip::of(address) == self.ip) {
            let key = vec![Value::Ip(*address)];
            self.table.element("nodeport-ips", key, Element::default());
        }
    }

    fn service(&mut self, port: &ServicePort, usable: &Usable<'_>) {
        let key = vec![Value::Ip(port.cluster_ip)];
        self.table.element("cluster-ips", key, Element::default());
        let paths = Paths::of(port, usable);
        self.dispatch(port, usable, &paths);
        if let Some(to) = &paths.internal_to {
            self.mark_foreign(port, to);
        }
        if port.is_external() && usable.any {
            self.external(port, usable, &paths);
        }
        if !port.source_ranges.is_empty() && !port.load_balancer_ips.is_empty() {
            self.firewall(port, &paths.firewall);
        }
        if port.uses_cluster_endpoints() && !usable.cluster.is_empty() {
            self.spread(port, &paths.cluster, &usable.cluster);
        }
        if port.uses_local_endpoints() && !usable.local.is_empty() {
            self.spread(port, &paths.local, &usable.local);
        }
        for endpoint in &usable.reachable {
            self.endpoint(port, endpoint);
        }
    }

    /// Adds the map elements that lead to the Service's chains or to a refusal.
    fn dispatch(&mut self, port: &ServicePort, usable: &Usable<'_>, paths: &Paths) {
        // Without endpoints on any node: rejects. With endpoints on other nodes only, and policy
        // Local: drops, like a node that does not know the Service.
        let refusal = if usable.any { Verdict::Drop } else { Verdict::Goto("reject-chain".into()) };
        match &paths.internal_to {
            Some(chain) => {
                self.lead("service-ips", port, port.cluster_ip, chain);
                let key = key(port.cluster_ip, port);
                self.table.element("active-services", key, Element::default());
            }
            None => self.refuse(port, port.cluster_ip, &refusal),
        }
        for address in port.external_ips.iter().chain(&port.load_balancer_ips) {
            if usable.any {
                self.lead("service-ips", port, *address, &paths.external);
            }
            if paths.external_to.is_none() {
                self.refuse(port, *address, &refusal);
            }
        }
        if !port.source_ranges.is_empty() {
            for address in &port.load_balancer_ips {
                self.lead("firewall-ips", port, *address, &paths.firewall);
            }
        }
        if let Some(node_port) = port.node_port {
            let key = vec![Value::Proto(port.name.proto), Value::Port(node_port)];
            if usable.any {
                let verdict = Verdict::Goto(paths.external.clone());
                self.table.element("service-nodeports", key.clone(), to(verdict, port));
            }
            // An endpoint on the node itself may have the same port; its packets need no translation.
            let same = |e: &&Endpoint| e.address.port() == node_port;
            if paths.external_to.is_none() {
                self.table.element("no-endpoint-nodeports", key, to(refusal, port));
            } else if !usable.reachable.iter().any(same) {
                self.table.element("active-nodeports", key, Element::default());
            }
        }
    }

    fn lead(&mut self, map: &str, port: &ServicePort, address: IpAddr, chain: &str) {
        let verdict = Verdict::Goto(chain.to_owned());
        self.table.element(map, key(address, port), to(verdict, port));
    }

    fn refuse(&mut self, port: &ServicePort, address: IpAddr, verdict: &Verdict) {
        let element = to(verdict.clone(), port);
        self.table.element("no-endpoint-services", key(address, port), element);
    }

    /// Masquerades clients other than pods: their answers must come back through this node.
    fn mark_foreign(&mut self, port: &ServicePort, chain: &str) {
        let mut stmts = vec![
            Stmt::equals(Field::Daddr(self.ip), Value::Ip(port.cluster_ip)),
            Stmt::Dport { proto: port.name.proto, port: port.port },
        ];
        if !self.facts.masquerade_all {
            let nets: Vec<_> = of_family(&self.facts.cluster_cidrs, self.ip).collect();
            if nets.is_empty() {
                return;
            }
            let field = || Field::Saddr(self.ip);
            let outside = |net| Stmt::InNet { field: field(), op: Op::Ne, net };
            stmts.extend(nets.into_iter().map(outside));
        }
        stmts.push(Stmt::jump("mark-for-masquerade"));
        self.table.rule(chain, stmts);
    }

    /// Adds the chain for node ports and external addresses.
    fn external(&mut self, port: &ServicePort, usable: &Usable<'_>, paths: &Paths) {
        let chain = paths.external.as_str();
        let t = &mut self.table;
        if !port.external_local {
            // The endpoint may be on another node, so the answer must come back through this node.
            t.rule(chain, vec![Stmt::jump("mark-for-masquerade")]);
        } else if !usable.cluster.is_empty() {
            // Pods and nodes of the cluster may use all endpoints, as they could through another node.
            for net in of_family(&self.facts.cluster_cidrs, self.ip) {
                let pods = Stmt::InNet { field: Field::Saddr(self.ip), op: Op::Eq, net };
                t.rule(chain, vec![pods, Stmt::goto(&paths.cluster)])
                    .comment("short-circuit pod traffic");
            }
            let own = Stmt::equals(Field::FibSaddrType, Value::Number(LOCAL));
            t.rule(chain, vec![own.clone(), Stmt::jump("mark-for-masquerade")])
                .comment("masquerade local traffic");
            t.rule(chain, vec![own, Stmt::goto(&paths.cluster)])
                .comment("short-circuit local traffic");
        }
        t.chain(chain);
        if let Some(to) = &paths.external_to {
            t.rule(chain, vec![Stmt::goto(to)]);
        }
    }

    fn firewall(&mut self, port: &ServicePort, chain: &str) {
        for net in &port.source_ranges {
            let field = Field::Saddr(self.ip);
            let from = Stmt::InNet { field, op: Op::Eq, net: *net };
            self.table.rule(chain, vec![from, Stmt::Verdict(Verdict::Return)]);
        }
        self.table.rule(chain, vec![Stmt::Verdict(Verdict::Drop)]);
    }

    /// Adds rules that choose the client's previous endpoint, or a random one.
    fn spread(&mut self, port: &ServicePort, chain: &str, endpoints: &[&Endpoint]) {
        let chain_of = |e: &Endpoint| names::endpoint("endpoint", &port.name, &e.address);
        if port.affinity.is_some() {
            for endpoint in endpoints {
                let set = names::endpoint("affinity", &port.name, &endpoint.address);
                let key = vec![Field::Saddr(self.ip)];
                let known = Stmt::InSet { key, op: Op::Eq, set };
                self.table.rule(chain, vec![known, Stmt::goto(&chain_of(endpoint))]);
            }
        }
        let verdict = |e: &&Endpoint| Verdict::Goto(chain_of(e));
        let numbered = endpoints.iter().map(verdict).zip(0..);
        let entries = numbered.map(|(verdict, n)| (Value::Number(n), verdict)).collect();
        let key = Field::Random(endpoints.len() as u32);
        self.table.rule(chain, vec![Stmt::VmapInline { key, entries }]);
    }

    fn endpoint(&mut self, port: &ServicePort, endpoint: &Endpoint) {
        let chain = names::endpoint("endpoint", &port.name, &endpoint.address);
        let saddr = Field::Saddr(self.ip);
        // An endpoint that connects to itself must see another source address than its own.
        let itself = Stmt::equals(saddr.clone(), Value::Ip(endpoint.address.ip()));
        self.table.rule(&chain, vec![itself, Stmt::jump("mark-for-masquerade")]);
        if port.affinity.is_some() {
            let name = names::endpoint("affinity", &port.name, &endpoint.address);
            let set = Set {
                key: vec![self.ip.addr_type()],
                dynamic: true,
                timeout: port.affinity,
                size: Some(AFFINITY_SET_SIZE),
                ..Set::default()
            };
            self.table.sets.insert(name.clone(), set);
            self.table.rule(&chain, vec![Stmt::Update { set: name, key: vec![saddr] }]);
        }
        let proto = Stmt::equals(Field::L4proto, Value::Proto(port.name.proto));
        self.table.rule(&chain, vec![proto, Stmt::Dnat(endpoint.address)]);
    }
}

impl Paths {
    fn of(port: &ServicePort, usable: &Usable<'_>) -> Self {
        let cluster = names::service("service", &port.name);
        let local = names::service("local", &port.name);
        let policy = |is_local: bool| {
            let (chain, endpoints) =
                if is_local { (&local, &usable.local) } else { (&cluster, &usable.cluster) };
            (!endpoints.is_empty()).then(|| chain.clone())
        };
        Self {
            internal_to: policy(port.internal_local),
            external_to: policy(port.external_local),
            external: names::service("external", &port.name),
            firewall: names::service("firewall", &port.name),
            cluster,
            local,
        }
    }
}

fn port_key() -> Vec<Field> {
    vec![Field::L4proto, Field::Dport]
}

fn key(address: IpAddr, port: &ServicePort) -> Vec<Value> {
    vec![Value::Ip(address), Value::Proto(port.name.proto), Value::Port(port.port)]
}

/// A map element, with the service port's name in upstream's format.
fn to(verdict: Verdict, port: &ServicePort) -> Element {
    let name = &port.name;
    let tail = if name.port.is_empty() { String::new() } else { format!(":{}", name.port) };
    let comment = format!("{}/{}{tail}", name.namespace, name.service);
    Element { verdict: Some(verdict), comment: Some(comment), ..Element::default() }
}

fn base(kind: ChainKind, hook: Hook, priority: i32) -> Option<BaseChain> {
    Some(BaseChain { kind, hook, priority, policy: Policy::Accept })
}

fn of_family(nets: &[IpNet], ip: Ip) -> impl Iterator<Item = IpNet> + '_ {
    nets.iter().copied().filter(move |net| Ip::of(&net.addr()) == ip)
}
