//! Load balancers without a cloud: gives Services of type LoadBalancer the addresses of nodes, or an address of
//! a pool. The proxies of the nodes serve these addresses; `proxy/src/announce` makes pools' addresses known.
//!
//! In: Services, Nodes, EndpointSlices (for `externalTrafficPolicy: Local`), the pools of the server's flags.
//! Out: `status.loadBalancer`, the finalizer, events.
//!
//! ```text
//!  Service ─► Wish ─┬► Nodes: Ports (one Service per port) ─► addresses of chosen nodes ─┐
//!                   └► Pools: one address per family, shared if asked ───────────────────┴► status
//! ```
//!
//! Upstream: `cloud-provider/controllers/service` for the finalizer, the events and the clean-up; k3s' ServiceLB
//! for the addresses of nodes; MetalLB for pools.
//!
//! Invariant: ports and addresses are given out by one worker, from memory, so that two Services never get the
//! same one. What Services had before a restart is noted before the first decision.
//! Cost: a change of a Service decodes that Service. A Node that starts or stops being chosen, or changes its
//! addresses, wakes the Services that have nodes' addresses, whose status lists them all. A slice wakes a Service
//! whose policy is Local.

mod pools;
mod ports;
mod refusal;
mod wish;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};

use api::load_balancers::Member;
use client::{
    Api, Event, EventType, Lister, ObjectKey, Outcome, Patch, PatchParams, RawEvent, Result, View,
    WorkQueue,
};
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use self::pools::Pools;
use self::ports::Ports;
use self::refusal::Refusal;
use self::wish::{FINALIZER, Places, Source, Wish};
use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on, on_metadata, or_gone};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "service-lb",
    account: "service-lb",
    component: "service-controller",
    queue: "service_lb",
    // Ports and addresses are given out one after the other.
    workers: 1,
    new: Controller::new,
    watches: &[
        &on(|this: &Controller, queue, event| this.service_event(queue, event)),
        &on(|this: &Controller, queue, event| this.node_event(queue, event)),
        &on_metadata::<EndpointSlice, _, _>(|this: &Controller, queue, event| {
            this.slice_event(queue, event);
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// EndpointSlices by their Service, those of other controllers as well.
const BY_SERVICE: &str = "load balancer's service";

struct Controller {
    context: Context,
    services: Lister<Service>,
    slices: Lister<EndpointSlice>,
    places: View<Places>,
    has_pools: bool,
    queue: WorkQueue<ObjectKey>,
    /// Guards who has what; held for a decision, never across a request.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    wishes: HashMap<ObjectKey, Wish>,
    /// Services that want nodes' addresses.
    on_nodes: BTreeSet<ObjectKey>,
    members: BTreeMap<Box<str>, Member>,
    /// The number of nodes with the label that limits load balancers to them.
    enabled: usize,
    ports: Ports,
    pools: Pools,
    /// The last failure of each pending Service, so that it becomes an event once.
    said: HashMap<ObjectKey, Refusal>,
}

impl State {
    /// Notes what a Service wants. Returns the Services that should try again.
    fn wish(&mut self, key: &ObjectKey, wish: Option<Wish>) -> Vec<ObjectKey> {
        let source = wish.as_ref().map(|wish| wish.source);
        let mut woken = vec![];
        if source != Some(Source::Nodes) && self.on_nodes.remove(key) {
            woken.extend(self.ports.leave(key));
        }
        if source != Some(Source::Pools) {
            woken.extend(self.pools.leave(key));
        }
        let Some(wish) = wish else {
            self.wishes.remove(key);
            self.said.remove(key);
            return woken;
        };
        match wish.source {
            Source::Nodes => {
                self.on_nodes.insert(key.clone());
                woken.extend(self.ports.want(key, &wish));
            }
            Source::Pools => self.pools.note(key, &wish),
        }
        self.wishes.insert(key.clone(), wish);
        woken
    }

    /// The addresses for the Service, or why there are none; and the Services that should try again.
    fn decide(
        &mut self,
        key: &ObjectKey,
        wish: &Wish,
        places: Option<&BTreeSet<Box<str>>>,
    ) -> (std::result::Result<Vec<IpAddr>, Refusal>, Vec<ObjectKey>) {
        match wish.source {
            Source::Pools => self.pools.assign(key, wish),
            Source::Nodes => match self.ports.take(key) {
                Ok(()) => (Ok(self.addresses(&wish.families, places)), vec![]),
                Err((refusal, woken)) => (Err(refusal), woken),
            },
        }
    }

    /// The addresses of the chosen nodes, of the first family first, in the order of names.
    fn addresses(&self, families: &[bool], only: Option<&BTreeSet<Box<str>>>) -> Vec<IpAddr> {
        let chosen = || {
            let only_enabled = self.enabled > 0;
            let chosen = self.members.iter().filter(move |(_, one)| one.is_chosen(only_enabled));
            chosen.filter(move |(name, _)| only.is_none_or(|only| only.contains(*name)))
        };
        let of = |is_ipv4: &bool| {
            let is_ipv4 = *is_ipv4;
            chosen().filter_map(move |(_, member)| member.address(is_ipv4))
        };
        families.iter().flat_map(of).collect()
    }

    /// Notes a Node. Returns whether the addresses of load balancers may have changed.
    fn member(&mut self, name: &str, member: Option<Member>) -> bool {
        let had_any = self.enabled > 0;
        let is_enabled = member.as_ref().is_some_and(Member::is_enabled);
        let old = match member.clone() {
            Some(new) => self.members.insert(name.into(), new),
            None => self.members.remove(name),
        };
        self.enabled -= usize::from(old.as_ref().is_some_and(Member::is_enabled));
        self.enabled += usize::from(is_enabled);
        let has_any = self.enabled > 0;
        let seen = |one: Option<&Member>, only_enabled| {
            let chosen = one.filter(|one| one.is_chosen(only_enabled));
            chosen.map(|one| (one.address(true), one.address(false)))
        };
        had_any != has_any || seen(old.as_ref(), had_any) != seen(member.as_ref(), has_any)
    }
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let options = setup.options.load_balancer.as_ref()?;
        let slices = setup.informer::<EndpointSlice>();
        slices.index_headers(BY_SERVICE, |header| {
            wish::service_of(header).map(|key| key.to_string()).into_iter().collect()
        });
        let state = State {
            ports: Ports::new(options.reserved_ports.clone()),
            pools: Pools::new(&options.pools),
            ..State::default()
        };
        Some(Self {
            context: setup.context.clone(),
            services: setup.lister(),
            places: slices.view(),
            slices: slices.lister(),
            has_pools: !state.pools.is_empty(),
            queue: setup.queue.clone(),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn service_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<Service>) {
        let (key, service) = (event.key(), event.object());
        let wish = Wish::of(service, self.has_pools).filter(|_| !event.is_deleted());
        let concerns = wish.is_some() || wish::needs_cleanup(service);
        let woken = self.state().wish(&key, wish);
        woken.into_iter().for_each(|other| queue.add(other));
        if concerns {
            queue.add(key);
        }
    }

    fn node_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<Node>) {
        let member = (!event.is_deleted()).then(|| Member::of(event.object()));
        let mut state = self.state();
        if state.member(&event.key().name, member) {
            state.on_nodes.iter().for_each(|key| queue.add(key.clone()));
        }
    }

    fn slice_event(&self, queue: &WorkQueue<ObjectKey>, event: &RawEvent) {
        let Some(key) = wish::service_of(&event.entry().header) else { return };
        let is_local = |wish: &Wish| wish.is_local && wish.source == Source::Nodes;
        if self.state().wishes.get(&key).is_some_and(is_local) {
            queue.add(key);
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(service) = self.services.get_key(key) else { return Ok(Outcome::Done) };
        if wish::needs_cleanup(&service) {
            return self.clean_up(key, &service).await;
        }
        let Some(wish) = Wish::of(&service, self.has_pools) else { return Ok(Outcome::Done) };
        let places = (wish.is_local && wish.source == Source::Nodes).then(|| self.places(key));
        let (decided, woken) = self.state().decide(key, &wish, places.as_ref());
        woken.into_iter().for_each(|other| self.queue.add(other));
        let addresses = match decided {
            Ok(addresses) => {
                self.state().said.remove(key);
                addresses
            }
            Err(refusal) => {
                self.refuse(key, &service, refusal);
                vec![]
            }
        };
        self.write(key, &service, &addresses).await
    }

    /// The nodes with ready endpoints of a Service.
    fn places(&self, key: &ObjectKey) -> BTreeSet<Box<str>> {
        let slices = self.slices.entries_by_index(BY_SERVICE, &key.to_string());
        let places = slices.iter().filter_map(|entry| self.places.get(&entry.header.key));
        places.flat_map(|places| places.nodes.clone()).collect()
    }

    fn refuse(&self, key: &ObjectKey, service: &Service, refusal: Refusal) {
        let message =
            format!("Error syncing load balancer: failed to ensure load balancer: {refusal}");
        if self.state().said.insert(key.clone(), refusal.clone()) != Some(refusal) {
            self.say(service, EventType::Warning, "SyncLoadBalancerFailed", message);
        }
    }

    fn say(&self, about: &Service, kind: EventType, reason: &str, message: impl Into<String>) {
        self.context.events.event(about, kind, reason, message);
    }

    /// Writes the finalizer and the addresses, if they differ.
    async fn write(
        &self,
        key: &ObjectKey,
        service: &Service,
        addresses: &[IpAddr],
    ) -> Result<Outcome> {
        let wanted: Vec<LoadBalancerIngress> = addresses.iter().map(entry).collect();
        let old = wish::ingress(service);
        let has_finalizer = has_finalizer(service);
        let is_pending = self.state().said.contains_key(key);
        if has_finalizer && old == wanted.as_slice() {
            return Ok(Outcome::Done);
        }
        if !has_finalizer {
            self.say(service, EventType::Normal, "EnsuringLoadBalancer", "Ensuring load balancer");
        }
        let mut patch = json!({"status": {"loadBalancer": {"ingress": wanted}}});
        if !has_finalizer {
            patch["metadata"] = json!({"finalizers": [FINALIZER]});
        }
        let written = self.patch(key, &patch).await?;
        if addresses.is_empty() && !is_pending {
            let message = "There are no available nodes for LoadBalancer";
            self.say(service, EventType::Warning, "UnAvailableLoadBalancer", message);
        } else if old.is_empty() && !addresses.is_empty() {
            self.say(service, EventType::Normal, "EnsuredLoadBalancer", "Ensured load balancer");
        } else if !addresses.is_empty() {
            let message = "Updated load balancer with new hosts";
            self.say(service, EventType::Normal, "UpdatedLoadBalancer", message);
        }
        Ok(written)
    }

    /// Upstream removes the finalizer from Services that are deleted or have another type.
    async fn clean_up(&self, key: &ObjectKey, service: &Service) -> Result<Outcome> {
        if !wish::ingress(service).is_empty() {
            self.say(service, EventType::Normal, "DeletingLoadBalancer", "Deleting load balancer");
        }
        let patch = json!({
            "metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]},
            "status": {"loadBalancer": {"ingress": null}},
        });
        let written = self.patch(key, &patch).await?;
        self.say(service, EventType::Normal, "DeletedLoadBalancer", "Deleted load balancer");
        Ok(written)
    }

    async fn patch(&self, key: &ObjectKey, patch: &Value) -> Result<Outcome> {
        let api: Api<Service> = self.context.client.api(Some(&key.namespace));
        let patch = Patch::Strategic(patch);
        or_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
    }
}

fn has_finalizer(service: &Service) -> bool {
    let finalizers = service.metadata.finalizers.as_ref();
    finalizers.is_some_and(|all| all.iter().any(|one| one == FINALIZER))
}

/// Mode VIP: packets keep the address, and the proxies of all nodes translate it.
fn entry(address: &IpAddr) -> LoadBalancerIngress {
    LoadBalancerIngress {
        ip: Some(address.to_string()),
        ip_mode: Some("VIP".into()),
        ..LoadBalancerIngress::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    fn member(number: u8, ready: &str, labels: Value) -> Member {
        let node = json!({"metadata": {"name": "n", "labels": labels}, "status": {
            "conditions": [{"type": "Ready", "status": ready}], "addresses": [
                {"type": "InternalIP", "address": format!("10.0.0.{number}")},
                {"type": "InternalIP", "address": format!("fd00::{number}")}]}});
        Member::of(&from_value(node).expect("a Node"))
    }

    fn addresses(state: &State, families: &[bool], only: Option<&[&str]>) -> Vec<String> {
        let only = only.map(|all| all.iter().map(|name| Box::from(*name)).collect());
        let found = state.addresses(families, only.as_ref());
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn chosen_nodes_are_listed_by_family() {
        let mut state = State::default();
        assert!(state.member("a", Some(member(1, "True", json!({})))));
        assert!(state.member("b", Some(member(2, "True", json!({})))));
        assert!(!state.member("c", Some(member(3, "False", json!({})))), "not Ready");
        assert!(!state.member("a", Some(member(1, "True", json!({"x": "y"})))), "nothing new");
        assert_eq!(addresses(&state, &[true], None), ["10.0.0.1", "10.0.0.2"]);
        let both = ["fd00::1", "fd00::2", "10.0.0.1", "10.0.0.2"];
        assert_eq!(addresses(&state, &[false, true], None), both);
        assert_eq!(addresses(&state, &[true], Some(&["b", "c"])), ["10.0.0.2"]);
        assert_eq!(addresses(&state, &[true], Some(&[])), [""; 0]);
        // A label on one node leaves out the others.
        let label = json!({"decapod.io/enable-lb": "true"});
        assert!(state.member("b", Some(member(2, "True", label))));
        assert_eq!(addresses(&state, &[true], None), ["10.0.0.2"]);
        assert!(state.member("b", None));
        assert_eq!(addresses(&state, &[true], None), ["10.0.0.1"]);
        assert!(state.member("a", Some(member(1, "Unknown", json!({})))));
        assert_eq!(addresses(&state, &[true], None), [""; 0]);
    }

    #[test]
    fn a_service_may_move_between_nodes_and_pools() {
        let wish = |class: &str| {
            let service = json!({"metadata": {"name": "s"}, "spec": {"type": "LoadBalancer",
                "loadBalancerClass": class, "ports": [{"port": 80}]}});
            Wish::of(&from_value(service).expect("a Service"), true)
        };
        let pools = Pools::new(&["10.9.0.1".parse().expect("a range")]);
        let mut state = State { pools, ..State::default() };
        state.member("a", Some(member(1, "True", json!({}))));
        let keys = ["a", "b"].map(|name| ObjectKey::new("ns", name));
        let decided = |state: &mut State, key: &ObjectKey, class: &str| {
            let wish = wish(class).expect("it wants one");
            let woken = state.wish(key, Some(wish.clone()));
            let (decided, more) = state.decide(key, &wish, None);
            (decided.is_ok(), [woken, more].concat())
        };
        assert_eq!(decided(&mut state, &keys[0], "decapod.io/node"), (true, vec![]));
        assert_eq!(decided(&mut state, &keys[1], "decapod.io/node"), (false, vec![]));
        let (is_given, woken) = decided(&mut state, &keys[0], "decapod.io/pool");
        assert!(is_given);
        assert_eq!(woken, [keys[1].clone()], "its port on nodes is free");
        assert!(state.wish(&keys[0], None).is_empty());
        assert!(decided(&mut state, &keys[1], "decapod.io/pool").0);
    }
}
