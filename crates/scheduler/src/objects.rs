//! The objects that plugins look up, other than pods, nodes and volumes.
//!
//! In: informers. Out: budgets for preemption, the selectors that pods are spread by unless they say
//! how, drivers' limits per node.

use std::collections::BTreeMap;
use std::sync::Arc;

use client::{Informer, Informers, Selectors, View, Whole};
use k8s_openapi::api::apps::v1::{ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{ReplicationController, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::storage::v1::CSINode;
use machinery::Pairs;
use machinery::selector::Selector;

use crate::claims::Claims;
use crate::pod::PodInfo;

/// A service without a selector selects no pod. Pure.
fn of_service(service: &Service) -> Selector {
    let wanted = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    wanted.filter(|wanted| !wanted.is_empty()).map_or_else(Selector::nothing, Selector::from_map)
}

#[derive(Clone)]
pub struct Objects {
    budgets: Informer<PodDisruptionBudget>,
    all_budgets: View<Whole<PodDisruptionBudget>>,
    services: Informer<Service>,
    service_selectors: Selectors,
    replica_sets: Informer<ReplicaSet>,
    stateful_sets: Informer<StatefulSet>,
    controllers: Informer<ReplicationController>,
    csi_nodes: Informer<CSINode>,
    /// For devices.
    pub claims: Claims,
}

impl Objects {
    pub fn new(informers: &Informers) -> Self {
        let services = informers.of();
        let budgets: Informer<PodDisruptionBudget> = informers.of();
        Self {
            all_budgets: budgets.view(),
            budgets,
            service_selectors: Selectors::of(&services, of_service),
            services,
            replica_sets: informers.of(),
            stateful_sets: informers.of(),
            controllers: informers.of(),
            csi_nodes: informers.of(),
            claims: Claims::new(informers),
        }
    }

    pub async fn synced(&self) {
        self.budgets.synced().await;
        self.services.synced().await;
        self.replica_sets.synced().await;
        self.stateful_sets.synced().await;
        self.controllers.synced().await;
        self.csi_nodes.synced().await;
        self.claims.synced().await;
    }

    /// Hears of what nodes' storage drivers can do.
    pub fn subscribe_drivers(&self, wake: impl Fn() + Send + Sync + 'static) {
        self.csi_nodes.subscribe_raw(move |_| wake());
    }

    pub fn budgets(&self, namespace: &str) -> Vec<Arc<PodDisruptionBudget>> {
        self.all_budgets.objects(Some(namespace))
    }

    pub fn csi_node(&self, name: &str) -> Option<Arc<CSINode>> {
        self.csi_nodes.lister().get("", name)
    }

    /// The pods that belong together with this one: those of its services and of its controller.
    /// Upstream: `helper.DefaultSelector`.
    pub fn siblings(&self, pod: &PodInfo) -> Option<Selector> {
        let namespace = &*pod.key.namespace;
        let mut labels: BTreeMap<String, String> = BTreeMap::new();
        let own: Pairs = pod.labels.iter().collect();
        for service in self.service_selectors.matching(namespace, &[&own]) {
            let wanted = self.service_selectors.get(&service).unwrap_or_default();
            for one in &wanted.requirements {
                // A service demands one value of each label: the one that the pod has.
                let value = pod.labels.get(&one.key).cloned().unwrap_or_default();
                labels.insert(one.key.clone(), value);
            }
        }
        let mut selector = Selector::from_map(&labels);
        let (kind, name) = pod.owner.as_ref().map_or(("", ""), |(kind, name)| (kind, name));
        let of_owner = match kind {
            "ReplicaSet" => self.replica_sets.lister().get(namespace, name).and_then(|set| {
                Selector::from_api(set.spec.as_ref().map(|spec| &spec.selector)).ok()
            }),
            "StatefulSet" => self.stateful_sets.lister().get(namespace, name).and_then(|set| {
                Selector::from_api(set.spec.as_ref().map(|spec| &spec.selector)).ok()
            }),
            "ReplicationController" => self
                .controllers
                .lister()
                .get(namespace, name)
                .and_then(|one| Some(Selector::from_map(one.spec.as_ref()?.selector.as_ref()?))),
            _ => None,
        };
        selector.requirements.extend(of_owner.into_iter().flat_map(|one| one.requirements));
        Some(selector).filter(|selector| !selector.is_everything())
    }
}
