//! What this node's rules follow from: all pods' labels and addresses, namespaces' labels, policies.
//!
//! ```text
//!  policies that select a pod of this node ─► its profile (one for each direction; equal ones are shared)
//!       └► classes (who may) ─► groups (sets of the addresses that some peers select)
//!  any pod ─► the peers that select it ─► its addresses in their groups
//! ```
//!
//! In: one change at a time. Out: [`Live`], whose journal has the elements and chains that changed.
//!
//! Cost: a pod's change looks at the peers that share a label with it, and touches its own elements; a pod of
//! this node also at the policies of its namespace that share a label with it. A policy's change looks at
//! this node's pods of its namespace. Peers that come into use look once through the pods of their namespaces,
//! and so does a change of a namespace's labels. Groups exist only while a pod of this node uses them.
//!
//! Invariant: the rules are those of a fresh model that was told the same objects.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use client::ObjectKey;
use ipnet::IpNet;
use machinery::Pairs;
use machinery::selector::Selector;
use net::nft::{Element, Ip, Proto, Ruleset, Set, Type, Value, Verdict};

use crate::index::Index;
use crate::live::Live;
use crate::objects::{
    Direction, Namespaces, Peer, PodFacts, PodPeer, PolicyFacts, Ports, RuleFacts,
};
use crate::rules::{self, Class, FAMILIES, HAIRPIN, LOCAL_PODS, Profile, Resolved, TABLE};

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

pub struct Model {
    live: Live,
    pods: BTreeMap<ObjectKey, PodFacts>,
    namespaces: HashMap<String, Pairs>,
    /// The labels of a namespace that is not known.
    unlabelled: Pairs,
    policies: BTreeMap<ObjectKey, Arc<PolicyFacts>>,
    /// Which policies select a pod; the scope is their namespace.
    selecting: Index<ObjectKey>,
    /// The pods of this node that have addresses.
    local: BTreeMap<ObjectKey, Local>,
    /// The pod of an address. If two pods have it, the later one counts, because the first has ended.
    owners: HashMap<IpAddr, ObjectKey>,
    /// Peers in use, by their canonical text.
    peers: HashMap<String, UsedPeer>,
    matching: Index<String>,
    groups: HashMap<String, Group>,
    /// How many pods besides the first give a group the same member.
    extra: HashMap<(String, Member), u32>,
    profiles: HashMap<String, (Arc<Profile>, usize)>,
    /// Users of chains of classes, by name.
    classes: HashMap<String, usize>,
    blocks: HashMap<String, usize>,
}

#[derive(Default)]
struct Local {
    addresses: Vec<IpAddr>,
    /// The profiles' names, by direction; `None`: not isolated.
    profiles: [Option<String>; 2],
}

struct UsedPeer {
    peer: PodPeer,
    groups: BTreeSet<String>,
}

/// A set of the kernel, filled with what some terms select.
struct Group {
    terms: Vec<Term>,
    users: usize,
}

struct Term {
    peer: String,
    /// `None`: all ports; the members are addresses alone.
    port: Option<(Proto, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Member {
    Address(IpAddr),
    Port(IpAddr, Proto, u16),
}

impl Default for Model {
    fn default() -> Self {
        Self {
            live: Live::new(rules::frame(&[])),
            pods: BTreeMap::new(),
            namespaces: HashMap::new(),
            unlabelled: Pairs::default(),
            policies: BTreeMap::new(),
            selecting: Index::default(),
            local: BTreeMap::new(),
            owners: HashMap::new(),
            peers: HashMap::new(),
            matching: Index::default(),
            groups: HashMap::new(),
            extra: HashMap::new(),
            profiles: HashMap::new(),
            classes: HashMap::new(),
            blocks: HashMap::new(),
        }
    }
}

impl Model {
    pub fn has_policies(&self) -> bool {
        !self.policies.is_empty()
    }

    pub fn rules(&self) -> &Ruleset {
        self.live.rules()
    }

    pub fn live(&mut self) -> &mut Live {
        &mut self.live
    }

    /// This node's pod CIDRs: the packets of their unknown pods are dropped.
    pub fn put_cidrs(&mut self, cidrs: &[IpNet]) {
        for ip in FAMILIES {
            for (name, chain) in rules::guards(cidrs, ip) {
                self.live.put_chain(ip.family(), TABLE, &name, chain);
            }
        }
    }

    /// `None`: the pod is gone, or not on the pod network.
    pub fn put_pod(&mut self, key: &ObjectKey, pod: Option<PodFacts>) {
        if self.pods.get(key) == pod.as_ref() {
            return;
        }
        self.contribute(key, false);
        let is_local = pod.as_ref().is_some_and(|pod| pod.is_local);
        match pod {
            Some(pod) => self.pods.insert(key.clone(), pod),
            None => self.pods.remove(key),
        };
        self.contribute(key, true);
        if is_local || self.local.contains_key(key) {
            self.refresh(key);
        }
    }

    /// The labels of a namespace; `None`: it is gone.
    pub fn put_namespace(&mut self, name: &str, labels: Option<Pairs>) {
        if self.namespaces.get(name) == labels.as_ref() {
            return;
        }
        let pods = self.pods_in(name);
        pods.iter().for_each(|key| self.contribute(key, false));
        match labels {
            Some(labels) => self.namespaces.insert(name.to_owned(), labels),
            None => self.namespaces.remove(name),
        };
        pods.iter().for_each(|key| self.contribute(key, true));
    }

    pub fn put_policy(&mut self, key: &ObjectKey, policy: Option<PolicyFacts>) {
        let policy = policy.map(Arc::new);
        let old = self.policies.get(key).cloned();
        if old == policy {
            return;
        }
        if let Some(old) = &old {
            self.selecting.remove(&key.namespace, &old.pods, key);
            self.policies.remove(key);
        }
        if let Some(new) = &policy {
            self.selecting.insert(&key.namespace, &new.pods, key.clone());
            self.policies.insert(key.clone(), new.clone());
        }
        let is_selected = |labels: &Pairs| {
            let both = old.iter().chain(&policy);
            both.into_iter().any(|policy| policy.pods.matches_pairs(labels))
        };
        let own = self.local.range(ObjectKey::new(&key.namespace, "")..);
        let own = own.take_while(|(pod, _)| pod.namespace == key.namespace);
        let selected = own
            .filter(|(pod, _)| self.pods.get(*pod).is_some_and(|facts| is_selected(&facts.labels)));
        let selected: Vec<ObjectKey> = selected.map(|(pod, _)| pod.clone()).collect();
        selected.iter().for_each(|pod| self.refresh(pod));
    }

    fn pods_in(&self, namespace: &str) -> Vec<ObjectKey> {
        let from = self.pods.range(ObjectKey::new(namespace, "")..);
        let own = from.take_while(|(key, _)| &*key.namespace == namespace);
        own.map(|(key, _)| key.clone()).collect()
    }

    /// Gives a pod of this node the rules of its policies, or takes them away.
    fn refresh(&mut self, key: &ObjectKey) {
        let pod = self.pods.get(key).filter(|pod| pod.is_local && !pod.addresses.is_empty());
        let addresses = pod.map(|pod| pod.addresses.clone()).unwrap_or_default();
        let wanted = pod.map(|pod| DIRECTIONS.map(|direction| self.profile(key, pod, direction)));
        let profiles = match wanted {
            Some(wanted) => wanted.map(|profile| profile.map(|profile| self.acquire(profile))),
            None => [None, None],
        };
        let old = self.local.remove(key).unwrap_or_default();
        for address in &old.addresses {
            if !addresses.contains(address) && self.owners.get(address) == Some(key) {
                self.owners.remove(address);
                self.place(*address, None);
            }
        }
        for address in &addresses {
            // A pod that already had the address does not take it back from a later pod.
            if !old.addresses.contains(address) {
                self.owners.insert(*address, key.clone());
            }
            if self.owners.get(address) == Some(key) {
                self.place(*address, Some(&profiles));
            }
        }
        for profile in old.profiles.into_iter().flatten() {
            self.release(&profile);
        }
        if !addresses.is_empty() {
            self.local.insert(key.clone(), Local { addresses, profiles });
        }
    }

    /// The elements of a local pod's address.
    fn place(&mut self, address: IpAddr, profiles: Option<&[Option<String>; 2]>) {
        let family = Ip::of(&address).family();
        let one = Value::Ip(address);
        let plain = || profiles.map(|_| Element::default());
        self.live.set_element(family, TABLE, LOCAL_PODS, vec![one.clone()], plain());
        let pair = vec![one.clone(), one.clone()];
        self.live.set_element(family, TABLE, HAIRPIN, pair, plain());
        for (index, direction) in DIRECTIONS.into_iter().enumerate() {
            let profile = profiles.and_then(|profiles| profiles[index].clone());
            let element = profile.map(|profile| Element {
                verdict: Some(Verdict::Jump(profile)),
                ..Element::default()
            });
            let map = rules::isolated(direction);
            self.live.set_element(family, TABLE, map, vec![one.clone()], element);
        }
    }

    /// What a pod's policies allow; `None`: no policy isolates it in that direction.
    fn profile(&self, key: &ObjectKey, pod: &PodFacts, direction: Direction) -> Option<Profile> {
        let candidates: BTreeSet<&ObjectKey> =
            self.selecting.candidates(&key.namespace, &pod.labels).collect();
        let policies = candidates.into_iter().filter_map(|policy| self.policies.get(policy));
        let selecting = policies.filter(|policy| policy.pods.matches_pairs(&pod.labels));
        let mut isolating = selecting.filter_map(|policy| policy.rules(direction)).peekable();
        isolating.peek()?;
        let (mut resolved, mut named, mut peers) = (Vec::new(), BTreeSet::new(), BTreeMap::new());
        for rule in isolating.flatten() {
            let class = class(rule, &mut peers);
            let ports = match (&rule.ports, direction) {
                (None, _) => None,
                (Some(ports), Direction::Ingress) => Some(numbers(ports, Some(pod))),
                (Some(ports), Direction::Egress) => {
                    for port in ports {
                        let Ports::Named(name) = &port.which else { continue };
                        let of = destinations(&class, &mut peers);
                        named.extend(of.into_iter().map(|peer| (peer, port.proto, name.clone())));
                    }
                    Some(numbers(ports, None))
                }
            };
            resolved.push(Resolved { class, ports });
        }
        Some(Profile::new(direction, &resolved, named, peers))
    }

    /// Returns the profile's name.
    fn acquire(&mut self, profile: Profile) -> String {
        let name = profile.name();
        if let Some((_, users)) = self.profiles.get_mut(&name) {
            *users += 1;
            return name;
        }
        for class in profile.classes() {
            self.acquire_class(class, &profile);
        }
        if let Some(set) = profile.named_set() {
            let terms = profile.named.iter().map(|(peer, proto, port)| Term {
                peer: peer.clone(),
                port: Some((*proto, port.clone())),
            });
            self.acquire_group(&set, terms.collect(), &profile.peers);
        }
        for ip in FAMILIES {
            if let Some((map, set)) = profile.ports_map() {
                self.live.put_set(ip.family(), TABLE, &map, set);
            }
            self.live.put_chain(ip.family(), TABLE, &name, profile.rules(ip));
        }
        self.profiles.insert(name.clone(), (Arc::new(profile), 1));
        name
    }

    fn release(&mut self, name: &str) {
        let Entry::Occupied(mut entry) = self.profiles.entry(name.to_owned()) else { return };
        entry.get_mut().1 -= 1;
        if entry.get().1 > 0 {
            return;
        }
        let (profile, _) = entry.remove();
        for ip in FAMILIES {
            self.live.remove_chain(ip.family(), TABLE, name);
            if let Some((map, _)) = profile.ports_map() {
                self.live.remove_set(ip.family(), TABLE, &map);
            }
        }
        for class in profile.classes() {
            self.release_class(class, profile.direction);
        }
        if let Some(set) = profile.named_set() {
            self.release_group(&set);
        }
    }

    fn acquire_class(&mut self, class: &Class, profile: &Profile) {
        let Some(chain) = class.chain(profile.direction) else { return };
        if !first(&mut self.classes, &chain) {
            return;
        }
        for peers in class.groups() {
            let terms = peers.iter().map(|peer| Term { peer: peer.clone(), port: None });
            self.acquire_group(&rules::pods_set(&peers), terms.collect(), &profile.peers);
        }
        if let Some(set) = class.blocks_set()
            && first(&mut self.blocks, &set)
        {
            for ip in FAMILIES {
                let blocks = rules::blocks_set(&class.blocks, ip);
                self.live.put_set(ip.family(), TABLE, &set, blocks);
            }
        }
        for ip in FAMILIES {
            let rules = class.rules(profile.direction, ip);
            self.live.put_chain(ip.family(), TABLE, &chain, rules);
        }
    }

    fn release_class(&mut self, class: &Class, direction: Direction) {
        let Some(chain) = class.chain(direction) else { return };
        if !last(&mut self.classes, &chain) {
            return;
        }
        for ip in FAMILIES {
            self.live.remove_chain(ip.family(), TABLE, &chain);
        }
        for peers in class.groups() {
            self.release_group(&rules::pods_set(&peers));
        }
        if let Some(set) = class.blocks_set()
            && last(&mut self.blocks, &set)
        {
            for ip in FAMILIES {
                self.live.remove_set(ip.family(), TABLE, &set);
            }
        }
    }

    fn acquire_group(&mut self, name: &str, terms: Vec<Term>, known: &BTreeMap<String, PodPeer>) {
        if let Some(group) = self.groups.get_mut(name) {
            group.users += 1;
            return;
        }
        let comment: Vec<&str> = terms.iter().map(|term| term.peer.as_str()).collect();
        let comment = Some(comment.join(" | "));
        let ports = [Type::InetProto, Type::InetService];
        let ports = ports.into_iter().filter(|_| terms.iter().any(|term| term.port.is_some()));
        let ports: Vec<Type> = ports.collect();
        for ip in FAMILIES {
            let key = [ip.addr_type()].into_iter().chain(ports.clone()).collect();
            let set = Set { key, comment: comment.clone(), ..Set::default() };
            self.live.put_set(ip.family(), TABLE, name, set);
        }
        let mut pods = BTreeSet::new();
        for term in &terms {
            let Some(peer) = known.get(&term.peer) else { continue };
            let used = self.peers.entry(term.peer.clone()).or_insert_with(|| {
                self.matching.insert(scope(peer), &peer.pods, term.peer.clone());
                UsedPeer { peer: peer.clone(), groups: BTreeSet::new() }
            });
            used.groups.insert(name.to_owned());
            pods.extend(self.selected(peer));
        }
        self.groups.insert(name.to_owned(), Group { terms, users: 1 });
        for pod in pods {
            let matched = self.matched(&pod);
            for member in self.members(name, &pod, &matched) {
                self.count(name, member, true);
            }
        }
    }

    fn release_group(&mut self, name: &str) {
        let Entry::Occupied(mut entry) = self.groups.entry(name.to_owned()) else { return };
        entry.get_mut().users -= 1;
        if entry.get().users > 0 {
            return;
        }
        let group = entry.remove();
        for ip in FAMILIES {
            self.live.remove_set(ip.family(), TABLE, name);
        }
        self.extra.retain(|(of, _), _| of != name);
        for term in group.terms {
            let Entry::Occupied(mut used) = self.peers.entry(term.peer) else { continue };
            used.get_mut().groups.remove(name);
            if used.get().groups.is_empty() {
                let (text, gone) = used.remove_entry();
                self.matching.remove(scope(&gone.peer), &gone.peer.pods, &text);
            }
        }
    }

    /// The pods that a peer selects.
    fn selected(&self, peer: &PodPeer) -> Vec<ObjectKey> {
        let pods = match &peer.namespaces {
            Namespaces::Named(name) => self.pods_in(name),
            Namespaces::Matching(selector) => {
                let taken = self.inhabited().into_iter().filter(|name| {
                    selector.matches_pairs(self.namespaces.get(name).unwrap_or(&self.unlabelled))
                });
                taken.flat_map(|name| self.pods_in(&name)).collect()
            }
        };
        let matches = |key: &ObjectKey| {
            self.pods.get(key).is_some_and(|pod| peer.pods.matches_pairs(&pod.labels))
        };
        pods.into_iter().filter(matches).collect()
    }

    /// The namespaces that have pods.
    fn inhabited(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut next = self.pods.keys().next();
        while let Some(key) = next {
            found.push(key.namespace.to_string());
            // The first key of any later namespace.
            let after = ObjectKey::new(&format!("{}\0", key.namespace), "");
            next = self.pods.range(after..).next().map(|(key, _)| key);
        }
        found
    }

    /// The peers in use that select a pod.
    fn matched(&self, key: &ObjectKey) -> BTreeSet<String> {
        let Some(pod) = self.pods.get(key).filter(|pod| !pod.addresses.is_empty()) else {
            return BTreeSet::new();
        };
        let namespace = self.namespaces.get(&*key.namespace).unwrap_or(&self.unlabelled);
        let candidates = self.matching.candidates(&key.namespace, &pod.labels);
        let selecting = candidates.filter(|text| {
            let used = self.peers.get(*text);
            used.is_some_and(|used| used.peer.selects(key, namespace, &pod.labels))
        });
        selecting.cloned().collect()
    }

    /// What a pod gives to a group, if these peers select it.
    fn members(
        &self,
        group: &str,
        key: &ObjectKey,
        matched: &BTreeSet<String>,
    ) -> BTreeSet<Member> {
        let (Some(group), Some(pod)) = (self.groups.get(group), self.pods.get(key)) else {
            return BTreeSet::new();
        };
        let terms = group.terms.iter().filter(|term| matched.contains(&term.peer));
        let mut members = BTreeSet::new();
        for term in terms {
            for address in &pod.addresses {
                match &term.port {
                    None => members.extend([Member::Address(*address)]),
                    Some((proto, name)) => members.extend(
                        pod.numbers(*proto, name).map(|n| Member::Port(*address, *proto, n)),
                    ),
                }
            }
        }
        members
    }

    /// Adds a pod's addresses to the groups that select it, or takes them out.
    fn contribute(&mut self, key: &ObjectKey, is_added: bool) {
        let matched = self.matched(key);
        let used = matched.iter().filter_map(|text| self.peers.get(text));
        let groups: BTreeSet<String> = used.flat_map(|used| used.groups.iter().cloned()).collect();
        for group in groups {
            for member in self.members(&group, key, &matched) {
                self.count(&group, member, is_added);
            }
        }
    }

    fn count(&mut self, group: &str, member: Member, is_added: bool) {
        let (family, key) = member.key();
        let place = (group.to_owned(), member);
        if is_added {
            match self.live.has_element(family, TABLE, group, &key) {
                true => *self.extra.entry(place).or_default() += 1,
                false => {
                    let element = Some(Element::default());
                    self.live.set_element(family, TABLE, group, key, element);
                }
            }
            return;
        }
        match self.extra.get_mut(&place) {
            Some(extra) if *extra > 1 => *extra -= 1,
            Some(_) => drop(self.extra.remove(&place)),
            None => self.live.set_element(family, TABLE, group, key, None),
        }
    }
}

impl Member {
    fn key(&self) -> (net::nft::Family, Vec<Value>) {
        match self {
            Self::Address(address) => (Ip::of(address).family(), vec![Value::Ip(*address)]),
            Self::Port(address, proto, port) => {
                let key = vec![Value::Ip(*address), Value::Proto(*proto), Value::Port(*port)];
                (Ip::of(address).family(), key)
            }
        }
    }
}

/// The scope of a peer in the index: its namespace, or all.
fn scope(peer: &PodPeer) -> &str {
    match &peer.namespaces {
        Namespaces::Named(name) => name,
        Namespaces::Matching(_) => "",
    }
}

/// The peers of a rule, which are added to `known`.
fn class(rule: &RuleFacts, known: &mut BTreeMap<String, PodPeer>) -> Class {
    let Some(peers) = &rule.peers else { return Class { any: true, ..Class::default() } };
    let mut class = Class::default();
    for peer in peers {
        match peer {
            Peer::Pods(peer) => {
                let text = peer.canonical();
                known.insert(text.clone(), peer.clone());
                class.peers.insert(text);
            }
            Peer::Block(block) => {
                class.blocks.insert(block.clone());
            }
        }
    }
    class
}

/// The pods that an egress rule is about, for its named ports: with no peers, all of them. Blocks have no
/// named ports.
fn destinations(class: &Class, known: &mut BTreeMap<String, PodPeer>) -> BTreeSet<String> {
    if !class.any {
        return class.peers.clone();
    }
    let everybody = PodPeer {
        namespaces: Namespaces::Matching(Selector::everything()),
        pods: Selector::everything(),
    };
    let text = everybody.canonical();
    known.insert(text.clone(), everybody);
    [text].into()
}

/// Ports as numbers. Names are those of the destination: of `pod`, or left out.
fn numbers(ports: &[crate::objects::PortFacts], pod: Option<&PodFacts>) -> Vec<(Proto, u16, u16)> {
    let mut found = Vec::new();
    for port in ports {
        match &port.which {
            Ports::Range(first, last) => found.push((port.proto, *first, *last)),
            Ports::Named(name) => {
                let numbers = pod.into_iter().flat_map(|pod| pod.numbers(port.proto, name));
                found.extend(numbers.map(|number| (port.proto, number, number)));
            }
        }
    }
    found
}

/// Counts a user; true for the first.
fn first(users: &mut HashMap<String, usize>, name: &str) -> bool {
    let count = users.entry(name.to_owned()).or_default();
    *count += 1;
    *count == 1
}

/// Discounts a user; true for the last.
fn last(users: &mut HashMap<String, usize>, name: &str) -> bool {
    let Some(count) = users.get_mut(name) else { return false };
    *count -= 1;
    let is_last = *count == 0;
    if is_last {
        users.remove(name);
    }
    is_last
}
