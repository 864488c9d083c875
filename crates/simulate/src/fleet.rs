//! The hollow kubelets: one queue of nodes and Leases, one of pods, for all of them.
//!
//! ```text
//!  watch of Nodes of the fleet ─► nodes ─► register · report · renew ─┐
//!  watch of bound pods ─────────► pods  ─► lifecycle::next ───────────┴─► API
//!            ▲ a deadline is a delayed key of the same queue
//! ```
//!
//! Invariants: a node or pod without anything to do costs a place in a queue and no task; no step looks at
//! all nodes or all pods; a silent node's pods are left alone.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::log_limit::LogLimit;
use base::task::Tasks;
use client::{
    Client, Error, ErrorExt, Informers, Lister, ObjectKey, Outcome, RawEvent, WorkQueue,
    spawn_workers,
};
use http::Method;
use k8s_openapi::api::core::v1::{Node, Pod as ApiPod};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::config::Config;
use crate::lifecycle::{self, Report, Stage, Step};
use crate::node;
use crate::pod::Pod;
use crate::settings::{Behaviour, Mode, PodSettings};
use crate::state::{Seen, State};
use crate::status::{self, Place};

/// Requests at one time.
const NODE_WORKERS: usize = 64;
const POD_WORKERS: usize = 32;
/// After a request that failed, and as much again by chance.
const AGAIN: Duration = Duration::from_secs(1);
/// Before a pod that found no address looks again.
const NO_ADDRESS: Duration = Duration::from_secs(10);
/// Upstream: a Lease is renewed within 4 % of its interval.
const LEASE_JITTER: f64 = 0.04;
/// Renewals are due at multiples of this: those that are sent together share a commit of the store, a frame
/// and a wake-up. More at once would hold up other requests.
const BEAT: Duration = Duration::from_millis(500);
const JSON: &str = "application/json";
const MERGE: &str = "application/strategic-merge-patch+json";
const NODES: &str = "/api/v1/nodes";

/// The requests to a node's worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum NodeKey {
    Node(Arc<str>),
    Lease(Arc<str>),
}

#[derive(Clone)]
pub struct Fleet(Arc<Inner>);

struct Inner {
    client: Client,
    config: Config,
    begun: Instant,
    lister: Lister<Node>,
    nodes: WorkQueue<NodeKey>,
    pods: WorkQueue<ObjectKey>,
    /// Guards the state; held for a few map operations, never across await.
    state: Mutex<State>,
    said: LogLimit<&'static str>,
}

/// The part of an answer that is read.
#[derive(Deserialize)]
struct Written {
    metadata: Version,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    resource_version: String,
}

impl Fleet {
    /// Starts everything as tasks of `tasks`. Nodes and pods that exist are known before anything is done.
    pub async fn start(client: Client, config: Config, state: State, tasks: &Tasks) -> Self {
        let informers = Informers::new(client.clone(), tasks.clone());
        let own = format!("{}={}", node::LABEL, config.fleet);
        let nodes = informers.scoped::<Node>(None, "", &own);
        let pods = informers.scoped::<ApiPod>(None, "spec.nodeName!=", "");
        let fleet = Self(Arc::new(Inner {
            client,
            config,
            begun: Instant::now(),
            lister: nodes.lister(),
            nodes: WorkQueue::new("simulated_nodes"),
            pods: WorkQueue::new("simulated_pods"),
            state: Mutex::new(state),
            said: LogLimit::default(),
        }));
        nodes.synced().await;
        let watching = fleet.clone();
        nodes.subscribe_raw(move |event| watching.see_node(event));
        for node in fleet.0.lister.list(None, &machinery::selector::Selector::everything()) {
            fleet.adopt(&node);
        }
        fleet.want();
        let watching = fleet.clone();
        pods.subscribe_raw(move |event| watching.see_pod(event));
        pods.synced().await;
        let own = fleet.clone();
        spawn_workers(tasks, &fleet.0.nodes, NODE_WORKERS, move |key| {
            let fleet = own.clone();
            async move { fleet.of_node(key).await }
        });
        let own = fleet.clone();
        spawn_workers(tasks, &fleet.0.pods, POD_WORKERS, move |key| {
            let fleet = own.clone();
            async move { fleet.of_pod(&key).await }
        });
        fleet
    }

    /// Nodes that are not registered yet.
    pub fn left(&self) -> usize {
        self.state().wanted.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("no panic while held")
    }

    /// Notes which Nodes have to be registered.
    fn want(&self) {
        let mut state = self.state();
        for (at, group) in self.0.config.nodes.iter().enumerate() {
            for index in 0..group.count {
                let name: Arc<str> = group.node_name(index).into();
                if state.node(&name).is_none() {
                    state.wanted.insert(name.clone(), (at, index));
                    self.0.nodes.add(NodeKey::Node(name));
                }
            }
        }
    }

    fn see_node(&self, event: &RawEvent) {
        self.0.nodes.add(NodeKey::Node(event.entry().header.key.name.clone()));
    }

    fn see_pod(&self, event: &RawEvent) {
        let key = &event.entry().header.key;
        match event {
            RawEvent::Applied { new, .. } => {
                self.state().see_pod(new);
                self.0.pods.add(key.clone());
            }
            RawEvent::Deleted(_) => self.state().forget_pod(key),
        }
    }

    async fn of_node(&self, key: NodeKey) -> Result<Outcome, Error> {
        let (what, result) = match key {
            NodeKey::Lease(name) => ("renew a Lease", self.renew(&name).await),
            NodeKey::Node(name) => match self.0.lister.get("", &name) {
                Some(node) => ("report a node's status", self.run_node(&node).await),
                None => ("register a node", self.without_node(&name).await),
            },
        };
        Ok(result.unwrap_or_else(|error| self.again(what, &error)))
    }

    /// Says what failed, but not for each of thousands, and when it is tried again.
    fn again(&self, what: &'static str, error: &Error) -> Outcome {
        if let Some(unsaid) = self.0.said.ask(what) {
            let error = error.text();
            tracing::warn!(error, unsaid, "failed to {what}, trying again");
        }
        Outcome::After(AGAIN + AGAIN.mul_f64(base::rng::unit()))
    }

    /// Registers a wanted Node; forgets a deleted one, as a running kubelet does.
    async fn without_node(&self, name: &Arc<str>) -> Result<Outcome, Error> {
        let wanted = self.state().wanted.get(name).copied();
        let Some((group, index)) = wanted else {
            self.state().forget_node(name);
            return Ok(Outcome::Done);
        };
        let Some(ip) = self.state().take_node_address() else { return Ok(self.no_address()) };
        let (group, fleet) = (&self.0.config.nodes[group], &self.0.config.fleet);
        let now = base::clock::now();
        let body = node::registered(group, index, fleet, &ip.to_string(), now).to_string();
        let created = self.0.client.call(Method::POST, NODES, JSON, body).await;
        match created {
            Ok(_) => {}
            Err(error) if error.is_already_exists() => {
                tracing::error!(
                    node = &**name,
                    fleet,
                    "a Node of this name exists and is not of this fleet: it is left alone"
                );
            }
            Err(error) => {
                self.state().give_back_node_address(ip);
                return Err(error);
            }
        }
        self.state().wanted.remove(name);
        Ok(Outcome::Done)
    }

    fn no_address(&self) -> Outcome {
        if self.0.said.ask("address").is_some() {
            tracing::warn!("no address is left in the range, waiting for one");
        }
        Outcome::After(NO_ADDRESS)
    }

    /// Notes a Node; its mode, and when that changes by itself. `None` without an address.
    fn adopt(&self, node: &Node) -> Option<(Mode, Option<Duration>)> {
        let name: Arc<str> = node.metadata.name.as_deref().unwrap_or_default().into();
        let (mode, change) = self.mode(node, &name);
        let mut state = self.state();
        let known = state.node(&name).map(|known| known.ip.clone());
        let ip = match node::address(node).map(str::to_owned).or(known) {
            Some(ip) => ip,
            None => state.take_node_address()?.to_string(),
        };
        let spec = node.spec.as_ref();
        let ranges = spec.and_then(|spec| spec.pod_cidrs.as_ref()).into_iter().flatten();
        let seen = Seen {
            uid: node.metadata.uid.clone().unwrap_or_default(),
            mode,
            ip,
            pod_ranges: ranges.filter_map(|range| range.parse().ok()).collect(),
            // Reports of many nodes are spread over the interval.
            reported_before: self.0.config.status_interval.mul_f64(base::rng::unit()),
        };
        if state.see_node(&name, seen) {
            let pods = state.pods_of(&name);
            drop(state);
            pods.into_iter().for_each(|key| self.0.pods.add(key));
            self.0.nodes.add(NodeKey::Lease(name));
        }
        Some((mode, change))
    }

    fn mode(&self, node: &Node, name: &str) -> (Mode, Option<Duration>) {
        let labels = node.metadata.labels.as_ref();
        let by_clock = self.0.config.failure(name, labels, self.0.begun.elapsed());
        let Some(text) = node::annotation(node) else { return by_clock };
        match Mode::parse(text) {
            Ok(mode) => (mode, None),
            Err(why) => {
                if self.0.said.ask("annotation").is_some() {
                    tracing::warn!(node = name, %why, "failed to parse the annotation of the node");
                }
                by_clock
            }
        }
    }

    async fn run_node(&self, node: &Node) -> Result<Outcome, Error> {
        let Some((mode, change)) = self.adopt(node) else { return Ok(self.no_address()) };
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let wait = |time: Option<Duration>| time.map_or(Outcome::Done, Outcome::After);
        if mode == Mode::Silent {
            return Ok(wait(change));
        }
        let version = node.metadata.resource_version.as_deref();
        let version = version.and_then(|version| version.parse::<u64>().ok()).unwrap_or(0);
        let interval = self.0.config.status_interval;
        let (ip, reported, floor) = match self.state().node(name) {
            Some(known) => (known.ip.clone(), known.reported, known.floor),
            None => return Ok(Outcome::Done),
        };
        let now = base::clock::now();
        let patch = if version < floor {
            None // our own write is on its way to us
        } else if !node::is_complete(node) {
            self.0.config.nodes.first().map(|group| node::completion(node, group, &ip, now))
        } else if reported.elapsed() >= interval || !node::says(node, mode) {
            Some(node::heartbeat(node, mode, now))
        } else {
            None
        };
        if let Some(patch) = patch {
            let written = self.patch(&format!("{NODES}/{name}/status"), &patch).await?;
            if let Some(known) = self.state().node(name) {
                (known.reported, known.floor) = (Instant::now(), written);
            }
        }
        let reported = self.state().node(name).map(|known| known.reported.elapsed());
        let next = reported.map(|before| interval.saturating_sub(before).max(AGAIN));
        Ok(wait([next, change].into_iter().flatten().min()))
    }

    async fn renew(&self, name: &Arc<str>) -> Result<Outcome, Error> {
        let (uid, version) = match self.state().node(name) {
            Some(known) if known.mode != Mode::Silent => (known.uid.clone(), known.lease.clone()),
            _ => return Ok(Outcome::Done),
        };
        let written = self.write_lease(name, &uid, version.as_deref()).await;
        let is_first = version.is_none();
        let version = match written {
            Ok(version) => Some(version),
            // Another client wrote or deleted it: it is read again.
            Err(error) if error.is_conflict() || error.is_not_found() => None,
            Err(error) => return Err(error),
        };
        let is_written = version.is_some();
        if let Some(known) = self.state().node(name) {
            known.lease = version.map(String::into_boxed_str);
        }
        let interval = self.0.config.lease_interval;
        Ok(match (is_written, is_first) {
            (false, _) => Outcome::Backoff,
            // Renewals of many nodes are spread over the interval.
            (true, true) => Outcome::After(self.to_beat(interval.mul_f64(base::rng::unit()))),
            (true, false) => {
                let jitter = 1.0 + LEASE_JITTER * base::rng::unit();
                Outcome::After(self.to_beat(interval.mul_f64(jitter)))
            }
        })
    }

    /// So long, and on to the next beat.
    fn to_beat(&self, delay: Duration) -> Duration {
        let passed = self.0.begun.elapsed();
        let beats = (passed + delay).as_nanos().div_ceil(BEAT.as_nanos());
        let due = BEAT.saturating_mul(u32::try_from(beats).unwrap_or(u32::MAX));
        due.saturating_sub(passed)
    }

    /// The resource version of what was written.
    async fn write_lease(
        &self,
        name: &str,
        uid: &str,
        version: Option<&str>,
    ) -> Result<String, Error> {
        let all = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", node::LEASES);
        let one = format!("{all}/{name}");
        let body =
            |version: Option<&str>| node::lease(name, uid, version, base::clock::now()).to_string();
        let client = &self.0.client;
        let version = match version {
            Some(version) => version.to_owned(),
            None => match client.call(Method::POST, &all, JSON, body(None)).await {
                Ok(created) => return version_of(&created),
                Err(error) if error.is_already_exists() => {
                    version_of(&client.get_raw(&one, JSON).await?)?
                }
                Err(error) => return Err(error),
            },
        };
        version_of(&client.call(Method::PUT, &one, JSON, body(Some(&version))).await?)
    }

    /// The resource version of what a patch made.
    async fn patch(&self, path: &str, patch: &Value) -> Result<u64, Error> {
        let answer = self.0.client.call(Method::PATCH, path, MERGE, patch.to_string()).await?;
        Ok(version_of(&answer)?.parse().unwrap_or(0))
    }

    async fn of_pod(&self, key: &ObjectKey) -> Result<Outcome, Error> {
        let result = self.run_pod(key).await;
        Ok(match result {
            Ok(outcome) => outcome,
            // It is gone, or another one has its name: the watch tells.
            Err(error) if error.is_not_found() || error.is_conflict() => Outcome::Done,
            Err(error) => self.again("report a pod's status", &error),
        })
    }

    async fn run_pod(&self, key: &ObjectKey) -> Result<Outcome, Error> {
        let Some((pod, does, host_ip)) = self.look_at(key) else { return Ok(Outcome::Done) };
        let (now, stage) = (base::clock::now(), Stage::of(&pod));
        let since = self.state().since(key, stage, &pod, now);
        match lifecycle::next(&pod, &does, since, now) {
            Step::Wait(wait) => {
                if stage == Stage::Ended {
                    self.state().release(key);
                }
                Ok(wait.map_or(Outcome::Done, Outcome::After))
            }
            Step::Report(report) => self.report(key, &pod, &report, &host_ip).await,
            Step::Remove => {
                let options = format!(
                    r#"{{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0,"preconditions":{{"uid":"{}"}}}}"#,
                    pod.metadata.uid
                );
                self.0.client.call(Method::DELETE, &path_of(key), JSON, options).await?;
                Ok(Outcome::Done)
            }
        }
    }

    /// A pod that may be acted upon, what it does, and the address of its node.
    fn look_at(&self, key: &ObjectKey) -> Option<(Pod, Behaviour, String)> {
        let (entry, floor, mode, ip) = {
            let mut state = self.state();
            let pod = state.pod(key)?;
            let (entry, floor, node) = (pod.entry.clone(), pod.floor, pod.node.clone());
            let known = state.node(&node)?;
            (entry, floor, known.mode, known.ip.clone())
        };
        let pod = Pod::decode(&entry.json()).ok()?;
        if mode == Mode::Silent || pod.version() < floor {
            return None;
        }
        let own = pod.metadata.annotations.as_deref().map(PodSettings::parse).transpose();
        let own = own.unwrap_or_else(|why| {
            if self.0.said.ask("pod's annotation").is_some() {
                tracing::warn!(pod = %key, %why, "failed to parse the annotation of the pod");
            }
            None
        });
        let mut settings = own.unwrap_or_default();
        if let Some(rule) = self.0.config.settings(&entry.header) {
            settings = settings.or(rule);
        }
        let is_of_job = entry.header.controller().is_some_and(|owner| owner.kind == "Job");
        let does = settings.resolve(&pod.metadata.uid, is_of_job, mode);
        Some((pod, does, ip))
    }

    async fn report(
        &self,
        key: &ObjectKey,
        pod: &Pod,
        report: &Report,
        host_ip: &str,
    ) -> Result<Outcome, Error> {
        let pod_ips = match (pod.spec.host_network, report) {
            (true, _) => Some(host_ip.parse().into_iter().collect()),
            (false, Report::Creating) => Some(Vec::new()),
            // A pod that ends before its start gets no address.
            (false, Report::Ended { .. }) if pod.status.pod_ip.is_empty() => Some(Vec::new()),
            (false, _) => self.state().addresses(key),
        };
        let Some(pod_ips) = pod_ips else { return Ok(self.no_address()) };
        let place = Place { host_ip, pod_ips: &pod_ips };
        let body = status::patch(pod, report, &place, base::clock::now());
        let written = self.patch(&format!("{}/status", path_of(key)), &body).await?;
        if let Some(state) = self.state().pod(key) {
            state.floor = written;
        }
        Ok(Outcome::Done)
    }
}

fn path_of(key: &ObjectKey) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", key.namespace, key.name)
}

fn version_of(json: &[u8]) -> Result<String, Error> {
    let written: Written = serde_json::from_slice(json).map_err(Error::SerdeError)?;
    Ok(written.metadata.resource_version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Flags;
    use crate::testing::Fake;
    use serde_json::json;

    const LEASE_0: &str =
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/sim-00000";
    const NODE_0: &str = "/api/v1/nodes/sim-00000";
    const POD: &str = "/api/v1/namespaces/d/pods/a";

    /// Three nodes, registered, in a world of their own.
    async fn start(fake: &Fake, file: &str, tasks: &Tasks) -> Fleet {
        let flags = Flags { nodes: Some(3), ..Flags::default() };
        let config = Config::new(Some(file), &flags).expect("valid");
        let state = State::new(config.addresses, config.pod_addresses).expect("ranges");
        let fleet = Fleet::start(fake.client(), config, state, tasks).await;
        pass(5).await;
        assert_eq!(fleet.left(), 0);
        fleet
    }

    async fn pass(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    fn bind(fake: &Fake, name: &str, spec: Value, metadata: Value) -> String {
        let path = format!("/api/v1/namespaces/d/pods/{name}");
        let now = base::clock::now_seconds().to_string();
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": "d", "name": name, "generation": 1},
            "spec": {"nodeName": "sim-00000", "restartPolicy": "Always",
                "containers": [{"name": "c", "image": "i"}]},
            "status": {"phase": "Pending", "conditions":
                [{"type": "PodScheduled", "status": "True", "lastTransitionTime": now}]},
        });
        crate::testing::merge(&mut pod, &json!({"spec": spec, "metadata": metadata}));
        fake.merge(&path, &pod);
        path
    }

    fn ready(node: &Value) -> Value {
        let conditions = node["status"]["conditions"].as_array().expect("conditions");
        conditions.iter().find(|one| one["type"] == "Ready").expect("Ready")["status"].clone()
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_register_renew_and_report() {
        let (_world, fake, tasks) = (base::sim::enter(1), Fake::default(), Tasks::new("test"));
        start(&fake, "", &tasks).await;
        let node = fake.get(NODE_0).expect("registered");
        assert_eq!(node["metadata"]["labels"][node::LABEL], "default");
        assert_eq!(ready(&node), "True");
        pass(600).await;
        let renewals = fake.writes("PUT /apis/coordination");
        assert!((165..=183).contains(&renewals), "{renewals} renewals of three nodes in 605 s");
        let reports = fake.writes("PATCH /api/v1/nodes");
        assert!((6..=9).contains(&reports), "{reports} reports of three nodes in 605 s");
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_starts_ends_and_goes_with_one_write_each() {
        let (_world, fake, tasks) = (base::sim::enter(2), Fake::default(), Tasks::new("test"));
        start(&fake, "", &tasks).await;
        fake.merge(NODE_0, &json!({"spec": {"podCIDRs": ["10.1.0.0/24"]}}));
        pass(1).await;
        bind(&fake, "a", json!({}), json!({}));
        pass(1).await;
        let pod = fake.get(POD).expect("there");
        assert_eq!(
            (&pod["status"]["phase"], &pod["status"]["podIP"]),
            (&json!("Running"), &json!("10.1.0.2"))
        );
        assert_eq!(
            pod["status"]["hostIP"],
            fake.get(NODE_0).expect("there")["status"]["addresses"][0]["address"]
        );
        assert_eq!(fake.writes("/pods/a"), 1);
        let end = (base::clock::now_seconds() + Duration::from_secs(30)).to_string();
        fake.merge(
            POD,
            &json!({"metadata": {"deletionTimestamp": end, "deletionGracePeriodSeconds": 30}}),
        );
        pass(1).await;
        assert_eq!(fake.get(POD), None);
        assert_eq!(fake.writes("/pods/a"), 3);
        let job = json!({"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "j", "controller": true}]});
        let path = bind(&fake, "job", json!({"restartPolicy": "Never"}), job);
        pass(4).await;
        assert_eq!(fake.get(&path).expect("there")["status"]["phase"], "Running");
        pass(2).await;
        assert_eq!(fake.get(&path).expect("there")["status"]["phase"], "Succeeded");
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_loop_waits_longer_each_time() {
        let (_world, fake, tasks) = (base::sim::enter(3), Fake::default(), Tasks::new("test"));
        start(&fake, "", &tasks).await;
        bind(&fake, "a", json!({}), json!({"annotations": {"decapod.io/simulate": "crash-loop"}}));
        let restarts = || {
            let pod = fake.get(POD).expect("there");
            pod["status"]["containerStatuses"][0]["restartCount"].as_u64().expect("a number")
        };
        for (seconds, expected) in [(2, 1), (9, 1), (3, 2), (15, 2), (8, 3)] {
            pass(seconds).await;
            assert_eq!(restarts(), expected, "after {seconds} s more");
        }
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_node_does_nothing_and_comes_back() {
        let (_world, fake, tasks) = (base::sim::enter(4), Fake::default(), Tasks::new("test"));
        start(&fake, "", &tasks).await;
        let say = |text: Value| {
            fake.merge(NODE_0, &json!({"metadata": {"annotations": {"decapod.io/simulate": text}}}))
        };
        say(json!("silent"));
        pass(11).await;
        let renewed = || fake.get(LEASE_0).expect("there")["spec"]["renewTime"].clone();
        let before = renewed();
        // The same write as the node lifecycle controller's.
        fake.merge(
            NODE_0,
            &json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}),
        );
        bind(&fake, "a", json!({}), json!({}));
        pass(60).await;
        assert_eq!((renewed(), fake.writes("/pods/a")), (before.clone(), 0));
        say(Value::Null);
        pass(12).await;
        assert_ne!(renewed(), before);
        assert_eq!(ready(&fake.get(NODE_0).expect("there")), "True");
        assert_eq!(fake.get(POD).expect("there")["status"]["phase"], "Running");
        say(json!("not-ready"));
        pass(1).await;
        assert_eq!(ready(&fake.get(NODE_0).expect("there")), "False");
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn failures_of_a_file_begin_and_end() {
        let (_world, fake, tasks) = (base::sim::enter(5), Fake::default(), Tasks::new("test"));
        let file = "failures: [{after: 1m, for: 1m, mode: not-ready}]";
        start(&fake, file, &tasks).await;
        for (seconds, expected) in [(50, "True"), (10, "False"), (50, "False"), (10, "True")] {
            pass(seconds).await;
            assert_eq!(ready(&fake.get(NODE_0).expect("there")), expected);
        }
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_of_others_are_left_alone_and_those_of_the_fleet_are_taken_over() {
        let (_world, fake, tasks) = (base::sim::enter(6), Fake::default(), Tasks::new("test"));
        let labels = json!({node::LABEL: "default"});
        let node = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
        fake.merge("/api/v1/nodes/scaled-up", &node("scaled-up"));
        start(&fake, "", &tasks).await;
        let path = "/api/v1/nodes/scaled-up";
        let scaled = fake.get(path).expect("there");
        assert_eq!(
            (ready(&scaled), &scaled["status"]["capacity"]["pods"]),
            (json!("True"), &json!("110"))
        );
        fake.remove(NODE_0);
        pass(30).await;
        assert_eq!(fake.get(NODE_0), None);
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_was_away_is_served_again() {
        let (_world, fake, tasks) = (base::sim::enter(7), Fake::default(), Tasks::new("test"));
        start(&fake, "", &tasks).await;
        fake.set_away(true);
        pass(60).await;
        bind(&fake, "a", json!({}), json!({}));
        fake.set_away(false);
        let before = fake.writes("PUT /apis/coordination");
        // A watch is tried again half a minute and more later when the server was away for long.
        pass(90).await;
        assert!(fake.writes("PUT /apis/coordination") >= before + 20);
        assert_eq!(fake.get(POD).expect("there")["status"]["phase"], "Running");
        tasks.shutdown(Duration::from_secs(1)).await;
    }
}
