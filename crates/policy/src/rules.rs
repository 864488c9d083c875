//! The rules that policies become.
//!
//! ```text
//!  forward ─┬ answers, related ─► accept            input ─┬ loopback, answers, related, NDP ─► accept
//!           ├ a pod to itself ─► accept                    ├ this node's CIDR, no known pod ─► drop
//!           ├ this node's CIDR, no known pod ─► drop       └ saddr in @egress-pods ─► egress-…
//!           ├ saddr in @egress-pods ─► egress-…
//!           └ daddr in @ingress-pods ─► ingress-…
//!
//!  ingress-… (a profile: equal rules of any number of pods)
//!      protocol . port in @ports-… ─► from-…  ┐
//!      ranges of ports ─► from-…              ├─ saddr in @pods-…, in @blocks-… ─► return, else drop
//!      everything else ─► from-… or drop      ┘
//! ```
//!
//! What the node itself sends passes neither chain: probes always reach their pods. Only the first direction
//! of a connection is checked, with each of its packets, so that a new policy also ends what it forbids.
//! Addresses are those of the endpoints: Services are translated before.
//!
//! Cost of a packet: a look-up of the pod, one of the port, and one for each peer that may use that port, at most
//! nine, however many policies and pods there are; ranges of ports add a comparison each.
//! In: plain data. Out: chains and sets. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use net::nft::{
    BaseChain, Chain, ChainKind, Element, Field, Hook, Ip, Op, Policy, Proto, Rule, Ruleset, Set,
    Stmt, Table, Type, Value, Verdict, ct_state,
};
use sha2::{Digest, Sha256};

use crate::objects::{Block, Direction, PodPeer};

/// Our tables, one for each family.
pub const TABLE: &str = "decapod-network-policies";
pub const FAMILIES: [Ip; 2] = [Ip::V4, Ip::V6];
/// The pods of this node.
pub const LOCAL_PODS: &str = "local-pods";
/// Each of them twice: as the source and as the destination of a packet to itself.
pub const HAIRPIN: &str = "hairpin";
/// The greatest number of peers of a class that have a set each.
const OWN_SETS: usize = 8;
const PROTOCOLS: [Proto; 3] = [Proto::Tcp, Proto::Udp, Proto::Sctp];
/// After the refusals of kube-proxy, so that a Service without endpoints is refused, not silent.
const PRIORITY: i32 = 10;
/// Neighbour discovery: router and neighbour solicitations and advertisements, redirects.
const NEIGHBOURS: [u8; 5] = [133, 134, 135, 136, 137];

/// The allowed senders or receivers, as a union. A peer is identified by its canonical text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Class {
    pub any: bool,
    pub peers: BTreeSet<String>,
    pub blocks: BTreeSet<Block>,
}

/// Named ports of pods: the peer, the protocol, the name.
pub type NamedTerm = (String, Proto, String);

/// The rules of a pod in one direction. Pods with equal rules share one.
#[derive(Debug)]
pub struct Profile {
    pub direction: Direction,
    /// Ranges of ports without overlaps, by protocol.
    pub segments: Vec<(Proto, u16, u16, Class)>,
    /// For all other packets.
    pub rest: Class,
    pub named: BTreeSet<NamedTerm>,
    /// The peers behind the canonical texts.
    pub peers: BTreeMap<String, PodPeer>,
}

/// A rule whose ports are numbers.
#[derive(Default)]
pub struct Resolved {
    pub class: Class,
    /// `None`: every port and protocol.
    pub ports: Option<Vec<(Proto, u16, u16)>>,
}

impl Class {
    fn add(&mut self, other: &Self) {
        self.any |= other.any;
        self.peers.extend(other.peers.iter().cloned());
        self.blocks.extend(other.blocks.iter().cloned());
    }

    /// A class that takes anyone needs nothing else.
    fn settled(self) -> Self {
        if self.any { Self { any: true, ..Self::default() } } else { self }
    }

    fn is_empty(&self) -> bool {
        !self.any && self.peers.is_empty() && self.blocks.is_empty()
    }

    /// The name of the chain, if there is one.
    pub fn chain(&self, direction: Direction) -> Option<String> {
        let prefix = match direction {
            Direction::Ingress => "from",
            Direction::Egress => "to",
        };
        let has_chain = !self.any && !self.is_empty();
        has_chain.then(|| hashed(prefix, &format!("{:?} {:?}", self.peers, self.blocks)))
    }

    /// The sets of its pods, as the peers in each. Few peers have a set each, which other classes share; many
    /// have one together, so that a packet's cost has a limit.
    pub fn groups(&self) -> Vec<BTreeSet<String>> {
        match self.peers.len() {
            0 => vec![],
            1..=OWN_SETS => self.peers.iter().map(|peer| [peer.clone()].into()).collect(),
            _ => vec![self.peers.clone()],
        }
    }

    pub fn blocks_set(&self) -> Option<String> {
        (!self.blocks.is_empty()).then(|| hashed("blocks", &format!("{:?}", self.blocks)))
    }

    fn verdict(&self, direction: Direction) -> Verdict {
        match self.chain(direction) {
            Some(chain) => Verdict::Goto(chain),
            None if self.any => Verdict::Return,
            None => Verdict::Drop,
        }
    }

    /// The chain that lets the class through and drops everybody else.
    pub fn rules(&self, direction: Direction, ip: Ip) -> Chain {
        let field = match direction {
            Direction::Ingress => Field::Saddr(ip),
            Direction::Egress => Field::Daddr(ip),
        };
        let groups = self.groups();
        let sets = groups.iter().map(pods_set).chain(self.blocks_set());
        let allowed = sets.map(|set| {
            let known = Stmt::InSet { key: vec![field.clone()], op: Op::Eq, set };
            rule(vec![known, Stmt::Verdict(Verdict::Return)])
        });
        let rules = allowed.chain([rule(vec![Stmt::Verdict(Verdict::Drop)])]).collect();
        Chain { rules, ..Chain::default() }
    }
}

pub fn pods_set(peers: &BTreeSet<String>) -> String {
    hashed("pods", &format!("{peers:?}"))
}

impl Profile {
    pub fn new(
        direction: Direction,
        rules: &[Resolved],
        named: BTreeSet<NamedTerm>,
        peers: BTreeMap<String, PodPeer>,
    ) -> Self {
        let mut rest = Class::default();
        rules.iter().filter(|rule| rule.ports.is_none()).for_each(|rule| rest.add(&rule.class));
        let rest = rest.settled();
        let segments = PROTOCOLS.iter().flat_map(|proto| {
            let found = segments(*proto, rules, &rest);
            found.into_iter().map(|(first, last, class)| (*proto, first, last, class))
        });
        let segments = segments.collect();
        Self { direction, segments, rest, named, peers }
    }

    /// The name of the profile's chain. Equal rules have equal names.
    pub fn name(&self) -> String {
        let prefix = match self.direction {
            Direction::Ingress => "ingress",
            Direction::Egress => "egress",
        };
        hashed(prefix, &format!("{:?} {:?} {:?}", self.segments, self.rest, self.named))
    }

    /// The map of its single ports, if there are any.
    pub fn ports_map(&self) -> Option<(String, Set)> {
        let single = self.segments.iter().filter(|(_, first, last, _)| first == last);
        let elements: BTreeMap<_, _> = single
            .map(|(proto, port, _, class)| {
                let verdict = Some(class.verdict(self.direction));
                let key = vec![Value::Proto(*proto), Value::Port(*port)];
                (key, Element { verdict, ..Element::default() })
            })
            .collect();
        let key = vec![Type::InetProto, Type::InetService];
        let set = Set { key, map: true, elements, ..Set::default() };
        (!set.elements.is_empty()).then(|| (format!("ports-{}", self.name()), set))
    }

    pub fn named_set(&self) -> Option<String> {
        (!self.named.is_empty()).then(|| hashed("named", &format!("{:?}", self.named)))
    }

    /// Its classes: those with a chain of their own.
    pub fn classes(&self) -> impl Iterator<Item = &Class> {
        let all = self.segments.iter().map(|(.., class)| class).chain([&self.rest]);
        all.filter(|class| class.chain(self.direction).is_some())
    }

    pub fn rules(&self, ip: Ip) -> Chain {
        let mut rules = Vec::new();
        let port = [Field::L4proto, Field::Dport];
        if let Some(set) = self.named_set() {
            let key = [Field::Daddr(ip)].into_iter().chain(port.clone()).collect();
            let known = Stmt::InSet { key, op: Op::Eq, set };
            rules.push(rule(vec![known, Stmt::Verdict(Verdict::Return)]));
        }
        if let Some((map, _)) = self.ports_map() {
            rules.push(rule(vec![Stmt::Vmap { key: port.to_vec(), map }]));
        }
        for (proto, first, last, class) in self.segments.iter().filter(|s| s.1 != s.2) {
            let matches = match (*first, *last) {
                (0, u16::MAX) => Stmt::equals(Field::L4proto, Value::Proto(*proto)),
                (first, last) => Stmt::DportIn { proto: *proto, first, last },
            };
            rules.push(rule(vec![matches, Stmt::Verdict(class.verdict(self.direction))]));
        }
        rules.push(rule(vec![Stmt::Verdict(self.rest.verdict(self.direction))]));
        Chain { rules, ..Chain::default() }
    }
}

/// Cuts the ports of a protocol where a rule begins or ends. Parts that are like `rest` are left out.
fn segments(proto: Proto, rules: &[Resolved], rest: &Class) -> Vec<(u16, u16, Class)> {
    let ranges: Vec<(u16, u16, &Class)> = rules
        .iter()
        .flat_map(|rule| rule.ports.iter().flatten().map(|port| (port, &rule.class)))
        .filter(|((of, ..), _)| *of == proto)
        .map(|((_, first, last), class)| (*first, *last, class))
        .collect();
    let mut starts: BTreeSet<u16> = ranges.iter().map(|(first, ..)| *first).collect();
    starts.extend(ranges.iter().filter_map(|(_, last, _)| last.checked_add(1)));
    let starts: Vec<u16> = starts.into_iter().collect();
    let mut found: Vec<(u16, u16, Class)> = Vec::new();
    for (index, first) in starts.iter().enumerate() {
        let last = starts.get(index + 1).map_or(u16::MAX, |next| next - 1);
        let mut class = rest.clone();
        let covering = ranges.iter().filter(|(from, to, _)| from <= first && last <= *to);
        covering.for_each(|(.., other)| class.add(other));
        let class = class.settled();
        match found.last_mut() {
            Some((_, end, before)) if *before == class && end.checked_add(1) == Some(*first) => {
                *end = last;
            }
            _ => found.push((*first, last, class)),
        }
    }
    found.retain(|(.., class)| class != rest);
    found
}

/// The set of the addresses in some blocks.
pub fn blocks_set(blocks: &BTreeSet<Block>, ip: Ip) -> Set {
    let elements = ranges(blocks, ip).into_iter().map(|(first, last)| {
        let last = Some(Value::Ip(address(last, ip)));
        (vec![Value::Ip(address(first, ip))], Element { last, ..Element::default() })
    });
    let elements = elements.collect();
    Set { key: vec![ip.addr_type()], interval: true, elements, ..Set::default() }
}

/// The union of the blocks without their exceptions: ranges in order that do not touch each other.
fn ranges(blocks: &BTreeSet<Block>, ip: Ip) -> Vec<(u128, u128)> {
    let mut found = Vec::new();
    for block in blocks.iter().filter(|block| Ip::of(&block.cidr.addr()) == ip) {
        let (mut from, end) = span(&block.cidr);
        let mut holes: Vec<_> = block.except.iter().map(span).collect();
        holes.sort_unstable();
        let mut is_over = false;
        for (first, last) in holes {
            if first > from && !is_over {
                found.push((from, (first - 1).min(end)));
            }
            match last.checked_add(1) {
                Some(next) if next <= end => from = from.max(next),
                _ => is_over = true,
            }
        }
        if !is_over && from <= end {
            found.push((from, end));
        }
    }
    found.sort_unstable();
    let mut merged: Vec<(u128, u128)> = Vec::new();
    for (first, last) in found {
        match merged.last_mut() {
            Some((_, end)) if end.checked_add(1).is_none_or(|next| first <= next) => {
                *end = (*end).max(last);
            }
            _ => merged.push((first, last)),
        }
    }
    merged
}

fn span(net: &IpNet) -> (u128, u128) {
    (number(&net.network()), number(&net.broadcast()))
}

fn number(address: &IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u32::from(*v4).into(),
        IpAddr::V6(v6) => u128::from(*v6),
    }
}

fn address(number: u128, ip: Ip) -> IpAddr {
    match ip {
        Ip::V4 => Ipv4Addr::from(number as u32).into(),
        Ip::V6 => Ipv6Addr::from(number).into(),
    }
}

/// The map of the pods that are isolated in a direction.
pub fn isolated(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "ingress-pods",
        Direction::Egress => "egress-pods",
    }
}

/// Both tables without pods and policies.
pub fn frame(cidrs: &[IpNet]) -> Ruleset {
    let mut rules = Ruleset::default();
    for ip in FAMILIES {
        let table = rules.table(ip.family(), TABLE);
        table.comment = Some("NetworkPolicies of this node's pods".into());
        let addresses = || Set { key: vec![ip.addr_type()], ..Set::default() };
        table.sets.insert(LOCAL_PODS.into(), addresses());
        let pair = vec![ip.addr_type(), ip.addr_type()];
        table.sets.insert(HAIRPIN.into(), Set { key: pair, ..Set::default() });
        for direction in [Direction::Ingress, Direction::Egress] {
            table.sets.insert(isolated(direction).into(), Set { map: true, ..addresses() });
        }
        base_chains(table, ip);
        for (name, chain) in guards(cidrs, ip) {
            table.chains.insert(name, chain);
        }
    }
    rules
}

fn base_chains(table: &mut Table, ip: Ip) {
    let vmap = |field: Field, direction| {
        vec![Stmt::Vmap { key: vec![field], map: isolated(direction).into() }]
    };
    let accept = || Stmt::Verdict(Verdict::Accept);
    let any = |bits| Stmt::AnyBit { field: Field::CtState, bits };
    let reply = Stmt::equals(Field::CtDirection, Value::Byte(1));
    for (chain, hook) in [("forward", Hook::Forward), ("input", Hook::Input)] {
        let kind = ChainKind::Filter;
        let base = BaseChain { kind, hook, priority: PRIORITY, policy: Policy::Accept };
        table.chain(chain).base = Some(base);
        if hook == Hook::Input {
            let name = Value::Name("lo".into());
            table.rule(chain, vec![Stmt::equals(Field::Iifname, name), accept()]);
        }
        table.rule(chain, vec![any(ct_state::ESTABLISHED), reply.clone(), accept()]);
        table.rule(chain, vec![any(ct_state::RELATED), accept()]);
        if hook == Hook::Input && ip == Ip::V6 {
            table.rule(chain, vec![Stmt::Icmpv6In(NEIGHBOURS.to_vec()), accept()]);
        }
    }
    let key = vec![Field::Saddr(ip), Field::Daddr(ip)];
    let itself = Stmt::InSet { key, op: Op::Eq, set: HAIRPIN.into() };
    table.rule("forward", vec![itself, accept()]);
    for (chain, guard) in [
        ("forward", "unknown-source"),
        ("input", "unknown-source"),
        ("forward", "unknown-destination"),
    ] {
        table.rule(chain, vec![Stmt::jump(guard)]);
    }
    table.rule("forward", vmap(Field::Saddr(ip), Direction::Egress));
    table.rule("input", vmap(Field::Saddr(ip), Direction::Egress));
    table.rule("forward", vmap(Field::Daddr(ip), Direction::Ingress));
}

/// The chains that drop packets from and to addresses of this node's pod CIDRs whose pods are not known yet:
/// their policies are not known either.
pub fn guards(cidrs: &[IpNet], ip: Ip) -> [(String, Chain); 2] {
    let cidrs: Vec<IpNet> =
        cidrs.iter().filter(|net| Ip::of(&net.addr()) == ip).map(IpNet::trunc).collect();
    let sides = [("unknown-source", Field::Saddr(ip)), ("unknown-destination", Field::Daddr(ip))];
    sides.map(|(name, field)| {
        let rules = cidrs.iter().map(|net| {
            let within = Stmt::InNet { field: field.clone(), op: Op::Eq, net: *net };
            let key = vec![field.clone()];
            let unknown = Stmt::InSet { key, op: Op::Ne, set: LOCAL_PODS.into() };
            rule(vec![within, unknown, Stmt::Verdict(Verdict::Drop)])
        });
        (name.to_owned(), Chain { rules: rules.collect(), ..Chain::default() })
    })
}

fn rule(stmts: Vec<Stmt>) -> Rule {
    Rule { stmts, comment: None }
}

/// A name by content: 80 bits of SHA-256 keep different contents apart.
fn hashed(prefix: &str, content: &str) -> String {
    let digest = Sha256::digest(content.as_bytes());
    let hex: String = digest.iter().take(10).map(|byte| format!("{byte:02x}")).collect();
    format!("{prefix}-{hex}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_ranges_that_do_not_touch() {
        let check = |blocks: &[(&str, &[&str])], ip: Ip, expected: &[(&str, &str)]| {
            let net = |text: &str| text.parse::<IpNet>().expect("a network");
            let blocks = blocks.iter().map(|(cidr, except)| Block {
                cidr: net(cidr),
                except: except.iter().map(|text| net(text)).collect(),
            });
            let found: Vec<(String, String)> = ranges(&blocks.collect(), ip)
                .into_iter()
                .map(|(a, b)| (address(a, ip).to_string(), address(b, ip).to_string()))
                .collect();
            let found: Vec<(&str, &str)> =
                found.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            assert_eq!(found, expected);
        };
        check(&[("0.0.0.0/0", &[])], Ip::V4, &[("0.0.0.0", "255.255.255.255")]);
        check(&[("0.0.0.0/0", &[])], Ip::V6, &[]);
        check(
            &[("10.0.0.0/8", &["10.1.0.0/16", "10.0.0.0/24"])],
            Ip::V4,
            &[("10.0.1.0", "10.0.255.255"), ("10.2.0.0", "10.255.255.255")],
        );
        check(&[("10.0.0.0/8", &["10.255.0.0/16"])], Ip::V4, &[("10.0.0.0", "10.254.255.255")]);
        // Another block fills the hole, and neighbours become one.
        check(
            &[("10.0.0.0/24", &["10.0.0.128/25"]), ("10.0.0.128/25", &[]), ("10.0.1.0/24", &[])],
            Ip::V4,
            &[("10.0.0.0", "10.0.1.255")],
        );
        check(
            &[("255.0.0.0/8", &["255.255.255.0/24"])],
            Ip::V4,
            &[("255.0.0.0", "255.255.254.255")],
        );
        check(
            &[("fd00::/8", &["fd00::/9"])],
            Ip::V6,
            &[("fd80::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
        );
        check(
            &[("10.0.0.0/8", &["10.1.0.0/16", "10.1.2.0/24"])],
            Ip::V4,
            &[("10.0.0.0", "10.0.255.255"), ("10.2.0.0", "10.255.255.255")],
        );
    }

    #[test]
    fn ports_are_cut_where_rules_begin_and_end() {
        let of = |peer: &str| Class { peers: [peer.to_owned()].into(), ..Class::default() };
        let rule = |peer: &str, ports: &[(u16, u16)]| Resolved {
            class: of(peer),
            ports: Some(ports.iter().map(|(a, b)| (Proto::Tcp, *a, *b)).collect()),
        };
        let rules =
            [rule("a", &[(80, 90)]), rule("b", &[(85, 85), (91, 91)]), rule("a", &[(91, 100)])];
        let check = |rest: &Class, expected: &[(u16, u16, &str)]| {
            let found = segments(Proto::Tcp, &rules, rest);
            let found: Vec<(u16, u16, String)> = found
                .into_iter()
                .map(|(first, last, class)| {
                    let peers: Vec<&str> = class.peers.iter().map(String::as_str).collect();
                    (first, last, peers.join(""))
                })
                .collect();
            let expected: Vec<(u16, u16, String)> =
                expected.iter().map(|(a, b, c)| (*a, *b, (*c).to_owned())).collect();
            assert_eq!(found, expected);
        };
        check(
            &Class::default(),
            &[(80, 84, "a"), (85, 85, "ab"), (86, 90, "a"), (91, 91, "ab"), (92, 100, "a")],
        );
        check(&of("a"), &[(85, 85, "ab"), (91, 91, "ab")]);
        check(&Class { any: true, ..Class::default() }, &[]);
        assert!(segments(Proto::Udp, &rules, &Class::default()).is_empty());
    }
}
