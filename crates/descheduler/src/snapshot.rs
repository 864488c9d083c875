//! The cluster at the start of a cycle: nodes, pods by node, and the objects that a policy asks about.
//!
//! In: lists. Out: look-ups. Cost: one list of each kind for a cycle.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use client::{Client, Kind, ListParams};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use machinery::selector::Selector;

use crate::policy::Policy;
use crate::{Error, listed};

#[derive(Default)]
pub struct Snapshot {
    /// Ready nodes that the policy selects, by name.
    pub nodes: BTreeMap<String, Arc<Node>>,
    /// Pods of all nodes, by node.
    pods: BTreeMap<String, Vec<Arc<Pod>>>,
    /// Pods by the uid of each owner.
    owned: HashMap<String, usize>,
    /// Labels of namespaces.
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// Selectors of budgets, by namespace.
    budgets: HashMap<String, Vec<Selector>>,
    /// Storage classes of claims, by namespace and name.
    claims: HashMap<(String, String), Option<String>>,
    priorities: HashMap<String, i32>,
}

impl Snapshot {
    pub async fn take(client: &Client, policy: &Policy) -> Result<Self, Error> {
        let needs = |of: fn(&crate::evictor::DefaultEvictor) -> bool| {
            policy.profiles.iter().any(|profile| of(&profile.evictor))
        };
        let mut all = Self::of(
            list::<Node>(client, "nodes").await?,
            list::<Pod>(client, "pods").await?,
            &policy.node_selector,
        );
        if needs(|evictor| evictor.selects_namespaces()) {
            for namespace in list::<Namespace>(client, "namespaces").await? {
                let (name, labels) = (namespace.metadata.name, namespace.metadata.labels);
                all.namespaces.insert(name.unwrap_or_default(), labels.unwrap_or_default());
            }
        }
        if needs(|evictor| evictor.needs_budgets()) {
            for budget in list::<PodDisruptionBudget>(client, "poddisruptionbudgets").await? {
                all.add_budget(&budget);
            }
        }
        if needs(|evictor| evictor.needs_claims()) {
            for claim in list::<PersistentVolumeClaim>(client, "persistentvolumeclaims").await? {
                let meta = claim.metadata;
                let key = (meta.namespace.unwrap_or_default(), meta.name.unwrap_or_default());
                let class = claim.spec.and_then(|spec| spec.storage_class_name);
                all.claims.insert(key, class.filter(|class| !class.is_empty()));
            }
        }
        if needs(|evictor| evictor.priority_class().is_some()) {
            for class in list::<PriorityClass>(client, "priorityclasses").await? {
                let name = class.metadata.name.unwrap_or_default();
                all.priorities.insert(name, class.value.unwrap_or(0));
            }
        }
        for profile in &policy.profiles {
            if let Some(class) = profile.evictor.priority_class()
                && !all.priorities.contains_key(class)
            {
                return Err(Error::NoPriorityClass(class.to_owned()));
            }
        }
        Ok(all)
    }

    pub fn of(nodes: Vec<Node>, pods: Vec<Pod>, selector: &Selector) -> Self {
        let mut all = Self::default();
        for node in nodes {
            if is_ready(&node) && selector.matches(node.metadata.labels.as_ref()) {
                all.nodes.insert(name_of(&node).to_owned(), Arc::new(node));
            }
        }
        for pod in pods {
            let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else {
                continue;
            };
            for owner in pod.metadata.owner_references.iter().flatten() {
                *all.owned.entry(owner.uid.clone()).or_default() += 1;
            }
            all.pods.entry(node).or_default().push(Arc::new(pod));
        }
        all
    }

    pub fn add_budget(&mut self, budget: &PodDisruptionBudget) {
        let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        // An invalid selector matches no pod.
        let Ok(selector) = Selector::from_api(selector) else { return };
        let namespace = budget.metadata.namespace.clone().unwrap_or_default();
        self.budgets.entry(namespace).or_default().push(selector);
    }

    /// All pods of a node that have not ended.
    pub fn running(&self, node: &str) -> impl Iterator<Item = &Arc<Pod>> {
        self.all(node).filter(|pod| !matches!(phase(pod), "Succeeded" | "Failed"))
    }

    /// All pods of a node.
    pub fn all(&self, node: &str) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods.get(node).into_iter().flatten()
    }

    pub fn node_of(&self, pod: &Pod) -> Option<&Arc<Node>> {
        self.nodes.get(node_name(pod))
    }

    /// How many pods an owner has.
    pub fn replicas(&self, owner: &str) -> usize {
        self.owned.get(owner).copied().unwrap_or(0)
    }

    pub fn namespace_labels(&self, namespace: &str) -> Option<&BTreeMap<String, String>> {
        self.namespaces.get(namespace)
    }

    pub fn has_budget(&self, pod: &Pod) -> bool {
        let of_namespace = self.budgets.get(namespace(pod)).into_iter().flatten();
        of_namespace.into_iter().any(|selector| selector.matches(pod.metadata.labels.as_ref()))
    }

    /// The storage class of a claim; `None` if it is unknown.
    pub fn storage_class(&self, namespace: &str, claim: &str) -> Option<&str> {
        self.claims.get(&(namespace.to_owned(), claim.to_owned()))?.as_deref()
    }

    pub fn priority(&self, class: &str) -> Option<i32> {
        self.priorities.get(class).copied()
    }
}

async fn list<T: Kind>(client: &Client, what: &'static str) -> Result<Vec<T>, Error> {
    // From the watch cache: a cycle needs no newer state.
    let params = ListParams { resource_version: Some("0".into()), ..ListParams::default() };
    Ok(listed(what, client.api::<T>(None).list(&params).await)?.items)
}

/// Upstream: a node counts unless its condition Ready is something other than True.
fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !conditions.into_iter().any(|one| one.type_ == "Ready" && one.status != "True")
}

pub fn name_of(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

pub fn node_name(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

pub fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}
