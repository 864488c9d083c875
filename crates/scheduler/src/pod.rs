//! A pod as the scheduler sees it: what decisions need, worked out once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use client::ObjectKey;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    NodeSelector, Pod, PodAffinityTerm, PodSpec, PreferredSchedulingTerm, Toleration,
    TopologySpreadConstraint,
};
use machinery::selector::{Selector, Test};

use crate::extended;
use crate::resources::{self, Resources};
use api::node_selectors;

/// The labels of namespaces by name.
pub type Namespaces = HashMap<String, BTreeMap<String, String>>;

#[derive(Clone, Debug, PartialEq)]
pub struct PodInfo {
    pub key: ObjectKey,
    pub uid: String,
    pub node_name: String,
    pub nominated: String,
    pub created: Option<Timestamp>,
    pub started: Option<Timestamp>,
    pub deleting: bool,
    pub finished: bool,
    /// Names of the claims that it mounts.
    pub claims: Vec<String>,
    /// Its claims for devices.
    pub device_claims: Vec<ClaimName>,
    /// Kind and name of its controller.
    pub owner: Option<(String, String)>,
    pub generation: i64,
    /// The rest, which pods of one owner have in common: kept once ([`crate::templates`]).
    pub template: Arc<Template>,
}

/// The fields of a pod that come from its template.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    pub labels: BTreeMap<String, String>,
    pub scheduler: String,
    pub priority: i32,
    pub preempts: bool,
    pub gates: Vec<String>,
    pub requests: Resources,
    /// With defaults, for scoring.
    pub nonzero: Resources,
    pub ports: Vec<HostPort>,
    pub node_selector: BTreeMap<String, String>,
    pub node_affinity: Option<NodeSelector>,
    pub node_preferences: Vec<PreferredSchedulingTerm>,
    pub tolerations: Vec<Toleration>,
    pub affinity: Vec<Term>,
    pub anti_affinity: Vec<Term>,
    pub preferred_affinity: Vec<(i32, Term)>,
    pub preferred_anti_affinity: Vec<(i32, Term)>,
    pub spread: Vec<Spread>,
    pub images: Vec<String>,
    pub disks: Vec<Disk>,
    /// The containers that request extended resources that devices may provide.
    pub extended: Vec<extended::Container>,
    /// The features that its node must declare.
    pub needs: Vec<&'static str>,
}

impl Deref for PodInfo {
    type Target = Template;

    fn deref(&self) -> &Template {
        &self.template
    }
}

/// The name of a ResourceClaim, if it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimName {
    /// The pod says it.
    Given(String),
    /// It was made for the pod.
    Made(String),
    /// It is yet to be made.
    Awaited,
    /// None is needed.
    None,
}

impl ClaimName {
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Given(name) | Self::Made(name) => Some(name),
            Self::Awaited | Self::None => None,
        }
    }

    fn all_of(pod: &Pod) -> Vec<Self> {
        let entries = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let named = entries.map(|entry| {
            if let Some(name) = &entry.resource_claim_name {
                return Self::Given(name.clone());
            }
            let status = pod.status.as_ref();
            let mut known =
                status.into_iter().flat_map(|one| one.resource_claim_statuses.iter().flatten());
            match known.find(|one| one.name == entry.name) {
                None => Self::Awaited,
                Some(one) => one.resource_claim_name.clone().map_or(Self::None, Self::Made),
            }
        });
        named.collect()
    }
}

/// A disk that a pod names itself, which nodes cannot share at will.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    pub id: String,
    /// Pods that only read it get along.
    pub read_only: bool,
}

impl Disk {
    pub fn conflicts(&self, other: &Self) -> bool {
        self.id == other.id && !(self.read_only && other.read_only)
    }
}

fn controller(pod: &Pod) -> Option<(String, String)> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let owner = owners.into_iter().find(|owner| owner.controller == Some(true))?;
    Some((owner.kind.clone(), owner.name.clone()))
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    pub ip: String,
    pub protocol: String,
    pub port: i32,
}

impl HostPort {
    /// An unspecified address takes the port on all.
    pub fn conflicts(&self, other: &Self) -> bool {
        const ANY: &str = "0.0.0.0";
        let addresses = self.ip == ANY || other.ip == ANY || self.ip == other.ip;
        addresses && self.port == other.port && self.protocol == other.protocol
    }
}

/// A term of pod (anti-)affinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    pub topology_key: String,
    selector: Selector,
    namespaces: BTreeSet<String>,
    namespace_selector: Option<Selector>,
}

impl Term {
    fn new(term: &PodAffinityTerm, own_namespace: &str) -> Self {
        let mut namespaces: BTreeSet<_> = term.namespaces.iter().flatten().cloned().collect();
        let namespace_selector = term.namespace_selector.as_ref();
        if namespaces.is_empty() && namespace_selector.is_none() {
            namespaces.insert(own_namespace.into());
        }
        let parse = |selector| Selector::from_api(Some(selector)).unwrap_or(Selector::nothing());
        Self {
            topology_key: term.topology_key.clone(),
            selector: term.label_selector.as_ref().map_or(Selector::nothing(), parse),
            namespaces,
            namespace_selector: namespace_selector.map(parse),
        }
    }

    /// Whether it may match pods of this namespace, independent of the namespace's labels.
    pub fn may_match(&self, pod: &PodInfo) -> bool {
        let in_namespace = self.namespaces.contains(&*pod.key.namespace);
        (in_namespace || self.namespace_selector.is_some())
            && self.selector.matches(Some(&pod.labels))
    }

    /// Whatever it is asked about: its selector is absent.
    pub fn matches_nothing(&self) -> bool {
        self.selector == Selector::nothing()
    }

    /// Whether the term depends on labels of namespaces.
    pub fn selects_namespaces(&self) -> bool {
        self.namespace_selector.is_some()
    }

    pub fn matches(&self, pod: &PodInfo, namespaces: &Namespaces) -> bool {
        let namespace = &*pod.key.namespace;
        let in_namespace = self.namespaces.contains(namespace)
            || self
                .namespace_selector
                .as_ref()
                .is_some_and(|one| one.matches(namespaces.get(namespace)));
        in_namespace && self.selector.matches(Some(&pod.labels))
    }
}

impl Hash for Term {
    /// The hash of all fields of a term: tenants may have terms that differ in one value only.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.topology_key.hash(state);
        self.namespaces.hash(state);
        hash_selector(&self.selector, state);
        if let Some(selector) = &self.namespace_selector {
            hash_selector(selector, state);
        }
    }
}

fn hash_selector<H: Hasher>(selector: &Selector, state: &mut H) {
    state.write_usize(selector.requirements.len());
    for requirement in &selector.requirements {
        requirement.key.hash(state);
        std::mem::discriminant(&requirement.test).hash(state);
        match &requirement.test {
            Test::In(values) | Test::NotIn(values) => values.hash(state),
            Test::GreaterThan(limit) | Test::LessThan(limit) => limit.hash(state),
            Test::Exists | Test::DoesNotExist => {}
        }
    }
}

/// A topology spread constraint.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    pub max_skew: i32,
    pub topology_key: String,
    pub hard: bool,
    pub selector: Selector,
    pub min_domains: i32,
    /// Leave out nodes that the pod's node affinity leaves out.
    pub honors_affinity: bool,
    pub honors_taints: bool,
}

impl Spread {
    pub fn new(one: &TopologySpreadConstraint, selector: Selector) -> Self {
        Self {
            max_skew: one.max_skew,
            topology_key: one.topology_key.clone(),
            hard: one.when_unsatisfiable == "DoNotSchedule",
            selector,
            min_domains: one.min_domains.unwrap_or(1),
            honors_affinity: one.node_affinity_policy.as_deref() != Some("Ignore"),
            honors_taints: one.node_taints_policy.as_deref() == Some("Honor"),
        }
    }
}

impl PodInfo {
    pub fn new(pod: &Pod) -> Self {
        let empty = PodSpec::default();
        let spec = pod.spec.as_ref().unwrap_or(&empty);
        let meta = &pod.metadata;
        let key = ObjectKey::of(meta);
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        let nominated = status.and_then(|status| status.nominated_node_name.clone());
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            node_name: spec.node_name.clone().unwrap_or_default(),
            nominated: nominated.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0),
            started: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            deleting: meta.deletion_timestamp.is_some(),
            finished: matches!(phase, Some("Succeeded" | "Failed")),
            claims: claims_of(&key.name, spec),
            device_claims: ClaimName::all_of(pod),
            owner: controller(pod),
            generation: meta.generation.unwrap_or(0),
            template: Arc::new(Template::new(pod, spec, &key.namespace)),
            key,
        }
    }

    /// Whether the node's labels are what the pod demands.
    pub fn selects(&self, name: &str, labels: &BTreeMap<String, String>) -> bool {
        node_selectors::selects(&self.node_selector, self.node_affinity.as_ref(), name, labels)
    }

    /// Whether something that scheduling depends on differs; a status written by us does not.
    pub fn differs_in_spec(&self, other: &Self) -> bool {
        let plain = |pod: &Self| Self {
            nominated: String::new(),
            started: None,
            finished: false,
            deleting: false,
            ..pod.clone()
        };
        plain(self) != plain(other)
    }
}

impl Template {
    fn new(pod: &Pod, spec: &PodSpec, namespace: &str) -> Self {
        let affinity = spec.affinity.clone().unwrap_or_default();
        let node = affinity.node_affinity.unwrap_or_default();
        let with = affinity.pod_affinity.unwrap_or_default();
        let against = affinity.pod_anti_affinity.unwrap_or_default();
        let term = |term: PodAffinityTerm| Term::new(&term, namespace);
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        Self {
            scheduler: spec.scheduler_name.clone().unwrap_or_else(|| "default-scheduler".into()),
            priority: spec.priority.unwrap_or(0),
            preempts: spec.preemption_policy.as_deref() != Some("Never"),
            gates: spec.scheduling_gates.iter().flatten().map(|gate| gate.name.clone()).collect(),
            requests: resources::of_pod(spec),
            nonzero: resources::nonzero_of_pod(spec),
            ports: host_ports(spec),
            node_selector: spec.node_selector.clone().unwrap_or_default(),
            node_affinity: node.required_during_scheduling_ignored_during_execution,
            node_preferences: node
                .preferred_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            affinity: required(with.required_during_scheduling_ignored_during_execution, term),
            anti_affinity: required(
                against.required_during_scheduling_ignored_during_execution,
                term,
            ),
            preferred_affinity: preferred(
                with.preferred_during_scheduling_ignored_during_execution,
                term,
            ),
            preferred_anti_affinity: preferred(
                against.preferred_during_scheduling_ignored_during_execution,
                term,
            ),
            spread: spreads(spec, &labels),
            images: spec
                .containers
                .iter()
                .filter_map(|one| one.image.as_deref())
                .map(full_image)
                .collect(),
            disks: disks_of(spec),
            extended: extended::of_pod(spec),
            needs: api::declared::needs(spec),
            labels,
        }
    }
}

fn required(
    terms: Option<Vec<PodAffinityTerm>>,
    make: impl Fn(PodAffinityTerm) -> Term,
) -> Vec<Term> {
    terms.unwrap_or_default().into_iter().map(make).collect()
}

fn preferred(
    terms: Option<Vec<k8s_openapi::api::core::v1::WeightedPodAffinityTerm>>,
    make: impl Fn(PodAffinityTerm) -> Term,
) -> Vec<(i32, Term)> {
    terms
        .unwrap_or_default()
        .into_iter()
        .map(|one| (one.weight, make(one.pod_affinity_term)))
        .collect()
}

fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|one| one.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|one| one.ports.iter().flatten());
    ports
        .filter(|port| port.host_port.unwrap_or(0) > 0)
        .map(|port| HostPort {
            ip: port
                .host_ip
                .clone()
                .filter(|ip| !ip.is_empty())
                .unwrap_or_else(|| "0.0.0.0".into()),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
            port: port.host_port.unwrap_or(0),
        })
        .collect()
}

fn spreads(spec: &PodSpec, labels: &BTreeMap<String, String>) -> Vec<Spread> {
    let constraints = spec.topology_spread_constraints.iter().flatten();
    constraints
        .map(|one| {
            let selector = one.label_selector.as_ref();
            let parsed = Selector::from_api(selector).unwrap_or(Selector::nothing());
            let keys = one.match_label_keys.iter().flatten();
            let pinned: BTreeMap<_, _> =
                keys.filter_map(|key| Some((key.clone(), labels.get(key)?.clone()))).collect();
            let mut selector = parsed;
            // The server merges them, too, unless a gate is closed.
            for one in Selector::from_map(&pinned).requirements {
                if !selector.requirements.contains(&one) {
                    selector.requirements.push(one);
                }
            }
            Spread::new(one, selector)
        })
        .collect()
}

/// An image's name with a tag, as nodes report it.
fn full_image(image: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or(image);
    if last.contains(':') || last.contains('@') { image.into() } else { format!("{image}:latest") }
}

/// Names of the claims that a pod mounts, its ephemeral ones among them.
fn claims_of(pod: &str, spec: &PodSpec) -> Vec<String> {
    let volumes = spec.volumes.iter().flatten();
    volumes
        .filter_map(|volume| {
            let named = volume.persistent_volume_claim.as_ref().map(|one| one.claim_name.clone());
            let own = || format!("{pod}-{}", volume.name);
            named.or_else(|| volume.ephemeral.as_ref().map(|_| own()))
        })
        .collect()
}

/// The disks that a pod names itself. Upstream: `isVolumeConflict`.
fn disks_of(spec: &PodSpec) -> Vec<Disk> {
    let volumes = spec.volumes.iter().flatten();
    volumes
        .filter_map(|volume| {
            if let Some(one) = &volume.gce_persistent_disk {
                let read_only = one.read_only.unwrap_or_default();
                return Some(Disk { id: format!("gce {}", one.pd_name), read_only });
            }
            if let Some(one) = &volume.aws_elastic_block_store {
                return Some(Disk { id: format!("aws {}", one.volume_id), read_only: false });
            }
            if let Some(one) = &volume.iscsi {
                let read_only = one.read_only.unwrap_or_default();
                return Some(Disk { id: format!("iscsi {}", one.iqn), read_only });
            }
            let one = volume.rbd.as_ref()?;
            let pool = one.pool.as_deref().unwrap_or("rbd");
            let read_only = one.read_only.unwrap_or_default();
            Some(Disk { id: format!("rbd {pool}/{}", one.image), read_only })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::{DefaultHasher, Hash, Hasher};

    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn terms_that_differ_have_hashes_that_differ() {
        let hash = |selector: &Value, spaces: &Value| {
            let term = json!({"topologyKey": "zone", "labelSelector": selector,
                "namespaceSelector": spaces});
            let mut hasher = DefaultHasher::new();
            Term::new(&from_value(term).unwrap(), "ns").hash(&mut hasher);
            hasher.finish()
        };
        let test = |operator: &str, values: &[&str]| {
            let values = Some(values).filter(|values| !values.is_empty());
            json!({"matchExpressions": [{"key": "tenant", "operator": operator, "values": values}]})
        };
        let selectors = [
            test("NotIn", &["a"]),
            test("NotIn", &["b"]),
            test("NotIn", &["a", "b"]),
            test("In", &["a"]),
            test("Exists", &[]),
            test("DoesNotExist", &[]),
            json!({}),
        ];
        let pairs = selectors.iter().flat_map(|one| selectors.iter().map(move |two| (one, two)));
        let hashes: HashSet<u64> = pairs.map(|(one, two)| hash(one, two)).collect();
        assert_eq!(hashes.len(), selectors.len() * selectors.len());
    }
}
