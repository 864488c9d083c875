//! The Node authorizer: a kubelet may read what the pods on its node need, and no more.
//!
//! ```text
//! node ◄─┬─ pod ◄── secret, config map, service account, claim ◄── volume
//!        ├─ volume attachment
//!        ├─ resource slice
//!        └─ pod certificate request, if the feature is enabled
//! ```
//!
//! In: pods, persistent volumes, and objects that name their node, mirrored from the watch cache. Out:
//! decisions for users named `system:node:NAME` in group `system:nodes`. Upstream:
//! `plugin/pkg/auth/authorizer/node`.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, RwLock};

use api::nodes::RETIRED_NODES;
use apiserver::Registry;
use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::cacher::Entry;
use apiserver::request::{Key, RequestInfo, UserInfo};
use async_trait::async_trait;
use base::task::Tasks;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::{PersistentVolume, Pod, PodSpec};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use machinery::ObjectMeta;
use machinery::selector::Selector;
use release::features::{self, Feature};

use crate::mirror::{Change, mirror, mirror_if};
use crate::rbac::{bootstrap, rule_allows};

const USER_PREFIX: &str = "system:node:";
const NODES_GROUP: &str = "system:nodes";
const LEASES: &str = "kube-node-lease";
const CERTIFICATES: &str = "certificates.k8s.io";
const CERTIFICATE_REQUESTS: &str = "podcertificaterequests";

/// Kinds whose objects a node may reach through its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Secret,
    ConfigMap,
    ServiceAccount,
    Claim,
    ResourceClaim,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Object {
    kind: Kind,
    namespace: String,
    name: String,
}

/// A pod on a node.
struct PodNode {
    node: String,
    objects: HashSet<Object>,
}

/// A volume: its claim, and the secrets that its driver needs on the node.
struct Volume {
    claim: Object,
    secrets: Vec<Object>,
}

/// Invariant: `users` counts, per object and node, the pods in `pods` that refer to it.
#[derive(Default)]
pub struct Graph {
    pods: HashMap<(String, String), PodNode>,
    users: HashMap<Object, HashMap<String, usize>>,
    volumes: HashMap<String, Volume>,
    /// Volumes that need a secret.
    volume_secrets: HashMap<Object, HashSet<String>>,
    /// Objects with a field for their node, by namespace and name.
    placed: HashMap<Placed, HashMap<Key, String>>,
}

/// Kinds of [`Graph::placed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placed {
    VolumeAttachment,
    ResourceSlice,
    PodCertificateRequest,
}

impl Graph {
    pub fn put_pod(&mut self, pod: &Pod) {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let name = pod.metadata.name.clone().unwrap_or_default();
        self.remove_pod(&namespace, &name);
        let Some(spec) = pod.spec.as_ref() else { return };
        let Some(node) = spec.node_name.clone().filter(|node| !node.is_empty()) else { return };
        // The kubelet itself creates mirror pods, so they must not grant it access.
        let annotations = pod.metadata.annotations.as_ref();
        let is_mirror =
            annotations.is_some_and(|all| all.contains_key("kubernetes.io/config.mirror"));
        let objects = if is_mirror { HashSet::new() } else { references(pod, spec, &namespace) };
        for object in &objects {
            let nodes = self.users.entry(object.clone()).or_default();
            *nodes.entry(node.clone()).or_default() += 1;
        }
        self.pods.insert((namespace, name), PodNode { node, objects });
    }

    pub fn remove_pod(&mut self, namespace: &str, name: &str) {
        let Some(pod) = self.pods.remove(&(namespace.to_owned(), name.to_owned())) else { return };
        for object in &pod.objects {
            let Some(nodes) = self.users.get_mut(object) else { continue };
            if let Some(count) = nodes.get_mut(&pod.node) {
                *count -= 1;
                if *count == 0 {
                    nodes.remove(&pod.node);
                }
            }
            if nodes.is_empty() {
                self.users.remove(object);
            }
        }
    }

    pub fn put_volume(&mut self, volume: &PersistentVolume) {
        let name = volume.metadata.name.clone().unwrap_or_default();
        self.remove_volume(&name);
        let Some(spec) = volume.spec.as_ref() else { return };
        let Some(claim) = &spec.claim_ref else { return };
        let object = |kind, namespace: &Option<String>, name: &Option<String>| Object {
            kind,
            namespace: namespace.clone().unwrap_or_default(),
            name: name.clone().unwrap_or_default(),
        };
        let claim = object(Kind::Claim, &claim.namespace, &claim.name);
        let csi = spec.csi.as_ref();
        let refs = csi.map(|csi| [&csi.node_publish_secret_ref, &csi.node_stage_secret_ref]);
        let secrets: Vec<_> = refs
            .into_iter()
            .flatten()
            .flatten()
            .map(|reference| object(Kind::Secret, &reference.namespace, &reference.name))
            .collect();
        for secret in &secrets {
            self.volume_secrets.entry(secret.clone()).or_default().insert(name.clone());
        }
        self.volumes.insert(name, Volume { claim, secrets });
    }

    pub fn remove_volume(&mut self, name: &str) {
        let Some(volume) = self.volumes.remove(name) else { return };
        for secret in &volume.secrets {
            if let Some(volumes) = self.volume_secrets.get_mut(secret) {
                volumes.remove(name);
                if volumes.is_empty() {
                    self.volume_secrets.remove(secret);
                }
            }
        }
    }

    fn is_used(&self, node: &str, object: &Object) -> bool {
        if self.users.get(object).is_some_and(|nodes| nodes.contains_key(node)) {
            return true;
        }
        let volumes = self.volume_secrets.get(object).into_iter().flatten();
        volumes.into_iter().any(|volume| self.is_volume_used(node, volume))
    }

    fn is_volume_used(&self, node: &str, volume: &str) -> bool {
        self.volumes.get(volume).is_some_and(|volume| self.is_used(node, &volume.claim))
    }

    /// `node` is empty for an object on no node.
    pub fn put_placed(&mut self, kind: Placed, key: Key, node: &str) {
        let nodes = self.placed.entry(kind).or_default();
        match node {
            "" => nodes.remove(&key),
            node => nodes.insert(key, node.to_owned()),
        };
    }

    fn is_placed_on(&self, node: &str, kind: Placed, key: &Key) -> bool {
        let nodes = self.placed.get(&kind);
        nodes.and_then(|nodes| nodes.get(key)).is_some_and(|placed| placed == node)
    }

    fn is_pod_on(&self, node: &str, namespace: &str, name: &str) -> bool {
        let pod = self.pods.get(&(namespace.to_owned(), name.to_owned()));
        pod.is_some_and(|pod| pod.node == node)
    }
}

/// The objects in the pod's namespace that it refers to.
fn references(pod: &Pod, spec: &PodSpec, namespace: &str) -> HashSet<Object> {
    let mut found = HashSet::new();
    let mut add = |kind, name: &str| {
        if !name.is_empty() {
            let object = Object { kind, namespace: namespace.to_owned(), name: name.to_owned() };
            found.insert(object);
        }
    };
    add(Kind::ServiceAccount, spec.service_account_name.as_deref().unwrap_or_default());
    for secret in spec.image_pull_secrets.iter().flatten() {
        add(Kind::Secret, &secret.name);
    }
    container_references(spec, &mut add);
    volume_references(pod, spec, &mut add);
    for claim in
        pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten())
    {
        add(Kind::ResourceClaim, claim.resource_claim_name.as_deref().unwrap_or_default());
    }
    for claim in spec.resource_claims.iter().flatten() {
        add(Kind::ResourceClaim, claim.resource_claim_name.as_deref().unwrap_or_default());
    }
    let extended =
        pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    if let Some(extended) = extended {
        add(Kind::ResourceClaim, &extended.resource_claim_name);
    }
    found
}

fn container_references(spec: &PodSpec, add: &mut impl FnMut(Kind, &str)) {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let containers = containers.map(|one| (&one.env, &one.env_from));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|one| (&one.env, &one.env_from));
    for (env, env_from) in containers.chain(ephemeral) {
        for source in env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            if let Some(key) = &source.secret_key_ref {
                add(Kind::Secret, &key.name);
            }
            if let Some(key) = &source.config_map_key_ref {
                add(Kind::ConfigMap, &key.name);
            }
        }
        for source in env_from.iter().flatten() {
            if let Some(secret) = &source.secret_ref {
                add(Kind::Secret, &secret.name);
            }
            if let Some(map) = &source.config_map_ref {
                add(Kind::ConfigMap, &map.name);
            }
        }
    }
}

fn volume_references(pod: &Pod, spec: &PodSpec, add: &mut impl FnMut(Kind, &str)) {
    for volume in spec.volumes.iter().flatten() {
        if let Some(secret) = &volume.secret {
            add(Kind::Secret, secret.secret_name.as_deref().unwrap_or_default());
        }
        if let Some(map) = &volume.config_map {
            add(Kind::ConfigMap, &map.name);
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            add(Kind::Claim, &claim.claim_name);
        }
        if volume.ephemeral.is_some() {
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            add(Kind::Claim, &format!("{pod}-{}", volume.name));
        }
        if let Some(secret) =
            volume.csi.as_ref().and_then(|csi| csi.node_publish_secret_ref.as_ref())
        {
            add(Kind::Secret, &secret.name);
        }
        let sources =
            volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for source in sources {
            if let Some(secret) = &source.secret {
                add(Kind::Secret, &secret.name);
            }
            if let Some(map) = &source.config_map {
                add(Kind::ConfigMap, &map.name);
            }
        }
    }
}

/// The authorizer. Clones share the graph.
#[derive(Clone)]
pub struct NodeAuthorizer {
    /// Written by the mirrors' tasks, read by every request of a node; never held across an await.
    graph: Arc<RwLock<Graph>>,
    /// The rules that apply to every node.
    rules: Arc<[PolicyRule]>,
}

impl NodeAuthorizer {
    /// Reads the objects of the graph, and follows them with tasks of `tasks`.
    pub async fn start(registry: &Registry, tasks: &Tasks) -> Self {
        let authorizer = Self::new();
        let graph = authorizer.graph.clone();
        // An unscheduled pod is on no node, which the watch cache knows without decoding it.
        let is_placed = |pod: &Entry| pod.field("spec.nodeName") != Some("");
        let pods = mirror_if::<Pod>(registry, tasks, is_placed, move |change| {
            let mut graph = graph.write().expect("no panic under the lock");
            match change {
                Change::Reset(all) => {
                    graph.pods.clear();
                    graph.users.clear();
                    all.iter().for_each(|pod| graph.put_pod(pod));
                }
                Change::Put(pod) => graph.put_pod(&pod),
                Change::Remove(key) => graph.remove_pod(&key.namespace, &key.name),
            }
        });
        let graph = authorizer.graph.clone();
        let volumes = mirror::<PersistentVolume>(registry, tasks, move |change| {
            let mut graph = graph.write().expect("no panic under the lock");
            match change {
                Change::Reset(all) => {
                    graph.volumes.clear();
                    graph.volume_secrets.clear();
                    all.iter().for_each(|volume| graph.put_volume(volume));
                }
                Change::Put(volume) => graph.put_volume(&volume),
                Change::Remove(key) => graph.remove_volume(&key.name),
            }
        });
        let attachments = authorizer.follow_placed::<VolumeAttachment>(
            registry,
            tasks,
            Placed::VolumeAttachment,
            |attachment| &attachment.spec.node_name,
        );
        let slices = authorizer.follow_placed::<ResourceSlice>(
            registry,
            tasks,
            Placed::ResourceSlice,
            |slice| slice.spec.node_name.as_deref().unwrap_or_default(),
        );
        futures::join!(pods, volumes, attachments, slices);
        if features::enabled(Feature::PodCertificateRequest)
            && registry.resources().get(CERTIFICATES, "v1beta1", CERTIFICATE_REQUESTS).is_some()
        {
            let kind = Placed::PodCertificateRequest;
            let follow = authorizer.follow_placed::<PodCertificateRequest>(
                registry,
                tasks,
                kind,
                |request| &request.spec.node_name,
            );
            follow.await;
        }
        authorizer
    }

    /// Follows a kind whose objects name their node.
    async fn follow_placed<T>(
        &self,
        registry: &Registry,
        tasks: &Tasks,
        kind: Placed,
        node: fn(&T) -> &str,
    ) where
        T: k8s_openapi::Metadata<Ty = ObjectMeta> + Clone + Send + Sync + 'static,
    {
        let graph = self.graph.clone();
        let put = move |graph: &mut Graph, object: &T| {
            let ObjectMeta { namespace, name, .. } = object.metadata();
            let key = Key::new(
                namespace.as_deref().unwrap_or_default(),
                name.as_deref().unwrap_or_default(),
            );
            graph.put_placed(kind, key, node(object));
        };
        let apply = move |change: Change<T>| {
            let mut graph = graph.write().expect("no panic under the lock");
            match change {
                Change::Reset(all) => {
                    graph.placed.remove(&kind);
                    all.iter().for_each(|object| put(&mut graph, object));
                }
                Change::Put(object) => put(&mut graph, &object),
                Change::Remove(key) => graph.put_placed(kind, key, ""),
            }
        };
        mirror::<T>(registry, tasks, apply).await;
    }

    fn new() -> Self {
        Self {
            graph: Arc::default(),
            rules: bootstrap::rules_of_cluster_role("system:node").into(),
        }
    }

    /// `Err`: the reason, if there is one to show.
    fn decide(&self, node: &str, request: &RequestInfo) -> Result<(), String> {
        let resource = (request.group.as_str(), request.resource.as_str());
        let sub = request.subresource.as_str();
        if !request.is_resource {
            return Err(String::new());
        }
        match resource {
            ("", "secrets") => readable(request).and(self.related(node, request, Kind::Secret)),
            ("", "configmaps") => {
                readable(request).and(self.related(node, request, Kind::ConfigMap))
            }
            ("", "persistentvolumeclaims") if sub == "status" => {
                let verbs = ["get", "update", "patch"];
                check(
                    verbs.contains(&request.verb.as_str()),
                    "can only get/update/patch this type",
                )?;
                self.related(node, request, Kind::Claim)
            }
            ("", "persistentvolumeclaims") => {
                gettable(request).and(self.related(node, request, Kind::Claim))
            }
            ("", "persistentvolumes") => {
                gettable(request)?;
                let graph = self.graph.read().expect("no panic under the lock");
                check(graph.is_volume_used(node, &request.name), &unrelated(node))
            }
            ("resource.k8s.io", "resourceclaims") => {
                gettable(request).and(self.related(node, request, Kind::ResourceClaim))
            }
            ("", "serviceaccounts") if sub == "token" => {
                let is_fit = request.verb == "create" && !request.name.is_empty();
                check(is_fit, "can only create tokens for individual service accounts")?;
                self.related(node, request, Kind::ServiceAccount)
            }
            ("", "serviceaccounts") => {
                gettable(request).and(self.related(node, request, Kind::ServiceAccount))
            }
            ("", "pods") if sub.is_empty() => self.decide_pods(node, request),
            ("", "nodes") if sub.is_empty() => self.decide_nodes(node, request),
            ("coordination.k8s.io", "leases") => own_lease(node, request),
            ("storage.k8s.io", "csinodes") => own_csi_node(node, request),
            ("storage.k8s.io", "volumeattachments") => {
                gettable(request).and(self.placed(node, request, Placed::VolumeAttachment))
            }
            ("resource.k8s.io", "resourceslices") => self.decide_slices(node, request),
            (CERTIFICATES, CERTIFICATE_REQUESTS) => self.decide_certificates(node, request),
            _ => self.decide_statically(request),
        }
    }

    /// The decision by the rules of every node. Admission limits the rest.
    fn decide_statically(&self, request: &RequestInfo) -> Result<(), String> {
        check(self.rules.iter().any(|rule| rule_allows(rule, request)), "")
    }

    fn decide_pods(&self, node: &str, request: &RequestInfo) -> Result<(), String> {
        match request.verb.as_str() {
            "list" | "watch" if selects_node(request, node) => Ok(()),
            "list" | "watch" if request.name.is_empty() => {
                Err("can only list/watch pods with spec.nodeName field selector".into())
            }
            // A pod of the node may be read by its name, in a list as well.
            "get" | "list" | "watch" => {
                let graph = self.graph.read().expect("no panic under the lock");
                let is_on = graph.is_pod_on(node, &request.namespace, &request.name);
                check(is_on, &unrelated(node))
            }
            _ => self.decide_statically(request),
        }
    }

    /// Admission checks the node of a new slice, and which slices of a collection are deleted.
    fn decide_slices(&self, node: &str, request: &RequestInfo) -> Result<(), String> {
        check(request.subresource.is_empty(), "cannot authorize ResourceSlice subresources")?;
        match request.verb.as_str() {
            "create" => Ok(()),
            "get" | "update" | "patch" | "delete" => {
                self.placed(node, request, Placed::ResourceSlice)
            }
            "list" | "watch" | "deletecollection" => check(
                selects_node(request, node),
                "can only list/watch/deletecollection resourceslices with nodeName field selector",
            ),
            _ => Err("only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection".into()),
        }
    }

    /// Admission checks the pod of a new request.
    fn decide_certificates(&self, node: &str, request: &RequestInfo) -> Result<(), String> {
        check(features::enabled(Feature::PodCertificateRequest), "")?;
        let part = "nodes may not access the status subresource of PodCertificateRequests";
        check(request.subresource.is_empty(), part)?;
        match request.verb.as_str() {
            "create" => Ok(()),
            "get" => {
                gettable(request).and(self.placed(node, request, Placed::PodCertificateRequest))
            }
            "list" | "watch" => check(
                selects_node(request, node),
                "can only list/watch podcertificaterequests with nodeName field selector",
            ),
            verb => Err(format!("nodes may not {verb} podcertificaterequests")),
        }
    }

    fn decide_nodes(&self, node: &str, request: &RequestInfo) -> Result<(), String> {
        match (request.verb.as_str(), request.name.as_str()) {
            ("get" | "list" | "watch", name) if name == node => Ok(()),
            ("get" | "list" | "watch", "") => {
                Err(format!("node '{node}' cannot read all nodes, only its own Node object"))
            }
            ("get" | "list" | "watch", name) => {
                Err(format!("node '{node}' cannot read '{name}', only its own Node object"))
            }
            _ => self.decide_statically(request),
        }
    }

    /// A certificate of a deleted Node allows to read the pods that are left on it, and nothing else.
    fn authorize_retired(&self, attributes: &Attributes) -> Decision {
        let Attributes { user, request } = attributes;
        let node = user.name.strip_prefix(USER_PREFIX).unwrap_or_default();
        let reads_pods = matches!(request.verb.as_str(), "get" | "list" | "watch")
            && (request.group.as_str(), request.resource.as_str()) == ("", "pods")
            && request.subresource.is_empty();
        if reads_pods && !node.is_empty() && self.decide_pods(node, request).is_ok() {
            return Decision::Allow { reason: String::new() };
        }
        let reason = "the Node that this certificate was issued for no longer exists; the machine has to join again with a token";
        Decision::NoOpinion { reason: reason.into() }
    }

    /// Whether the object names this node.
    fn placed(&self, node: &str, request: &RequestInfo, kind: Placed) -> Result<(), String> {
        let graph = self.graph.read().expect("no panic under the lock");
        let key = Key::new(request.namespace.as_str(), request.name.as_str());
        check(graph.is_placed_on(node, kind, &key), &unrelated(node))
    }

    /// Whether a pod on the node refers to the object.
    fn related(&self, node: &str, request: &RequestInfo, kind: Kind) -> Result<(), String> {
        let (namespace, name) = (request.namespace.clone(), request.name.clone());
        let object = Object { kind, namespace, name };
        let graph = self.graph.read().expect("no panic under the lock");
        if graph.is_used(node, &object) { Ok(()) } else { Err(unrelated(node)) }
    }
}

fn check(allowed: bool, why: &str) -> Result<(), String> {
    if allowed { Ok(()) } else { Err(why.to_owned()) }
}

/// Whether the field selector restricts the request to the node.
fn selects_node(request: &RequestInfo, node: &str) -> bool {
    let selector = Selector::parse_fields(&request.field_selector).ok();
    selector.as_ref().and_then(|one| one.exact("spec.nodeName")) == Some(node)
}

/// The verbs that a node may use on its one own object.
const OWN: [&str; 5] = ["get", "create", "update", "patch", "delete"];

fn own_lease(node: &str, request: &RequestInfo) -> Result<(), String> {
    let verb = request.verb.as_str();
    check(OWN.contains(&verb), "can only get, create, update, patch, or delete a node lease")?;
    let place = format!("can only access leases in the {LEASES:?} system namespace");
    check(request.namespace == LEASES, &place)?;
    let name = "can only access node lease with the same name as the requesting node";
    check(verb == "create" || request.name == node, name)
}

fn own_csi_node(node: &str, request: &RequestInfo) -> Result<(), String> {
    let verb = request.verb.as_str();
    check(request.subresource.is_empty(), "cannot authorize CSINode subresources")?;
    check(OWN.contains(&verb), "can only get, create, update, patch, or delete a CSINode")?;
    let name = "can only access CSINode with the same name as the requesting node";
    check(verb == "create" || request.name == node, name)
}

fn unrelated(node: &str) -> String {
    format!("no relationship found between node '{node}' and this object")
}

/// Allows get, list and watch of one named object.
fn readable(request: &RequestInfo) -> Result<(), String> {
    let refuse = |why: &str| Err(why.to_owned());
    match request.verb.as_str() {
        "get" | "list" | "watch" => {}
        _ => return refuse("can only read resources of this type"),
    }
    if !request.subresource.is_empty() {
        return refuse("cannot read subresource");
    }
    if request.name.is_empty() {
        return refuse("can only read namespaced object of this type");
    }
    Ok(())
}

fn gettable(request: &RequestInfo) -> Result<(), String> {
    let refuse = |why: &str| Err(why.to_owned());
    match (request.verb.as_str(), request.subresource.as_str(), request.name.as_str()) {
        ("get", "", "") => refuse("can only get individual resources of this type"),
        ("get", "", _) => Ok(()),
        ("get", ..) => refuse("cannot get subresource"),
        _ => refuse("can only get individual resources of this type"),
    }
}

/// The node's name, if the user is a node.
pub fn node_name(user: &UserInfo) -> Option<&str> {
    user.name.strip_prefix(USER_PREFIX).filter(|_| user.in_group(NODES_GROUP))
}

#[async_trait]
impl Authorizer for NodeAuthorizer {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        if attributes.user.in_group(RETIRED_NODES) {
            return self.authorize_retired(attributes);
        }
        let Some(node) = node_name(&attributes.user) else {
            return Decision::NoOpinion { reason: String::new() };
        };
        if node.is_empty() {
            let reason = format!("unknown node for user {:?}", attributes.user.name);
            return Decision::NoOpinion { reason };
        }
        match self.decide(node, &attributes.request) {
            Ok(()) => Decision::Allow { reason: String::new() },
            Err(reason) => Decision::NoOpinion { reason },
        }
    }

    async fn unresolved(&self, user: &UserInfo, _: &str) -> Option<String> {
        let why = "node authorizer does not support user rule resolution";
        node_name(user).map(|_| why.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use release::features::Gates;
    use serde_json::json;

    use super::*;

    fn authorizer() -> NodeAuthorizer {
        let authorizer = NodeAuthorizer::new();
        let mut graph = authorizer.graph.write().expect("no panic");
        let pod = |node: &str, annotation: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": format!("p{node}"), "namespace": "web", "annotations": {annotation: "x"}},
                "spec": {
                    "nodeName": node,
                    "serviceAccountName": "bot",
                    "containers": [{"name": "c", "env": [
                        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "password", "key": "k"}}},
                    ], "envFrom": [{"configMapRef": {"name": "settings"}}]}],
                    "volumes": [
                        {"name": "v", "persistentVolumeClaim": {"claimName": "data"}},
                        {"name": "t", "projected": {"sources": [{"configMap": {"name": "kube-root-ca.crt"}}]}},
                    ],
                },
            }))
            .expect("a pod")
        };
        graph.put_pod(&pod("n1", "none"));
        graph.put_pod(&pod("n2", "kubernetes.io/config.mirror"));
        let volume = json!({
            "metadata": {"name": "pv"},
            "spec": {
                "claimRef": {"namespace": "web", "name": "data"},
                "csi": {"driver": "d", "volumeHandle": "h",
                        "nodePublishSecretRef": {"namespace": "csi", "name": "login"}},
            },
        });
        graph.put_volume(&serde_json::from_value(volume).expect("a volume"));
        for (kind, namespace) in [
            (Placed::VolumeAttachment, ""),
            (Placed::ResourceSlice, ""),
            (Placed::PodCertificateRequest, "web"),
        ] {
            graph.put_placed(kind, Key::new(namespace, "mine"), "n1");
            graph.put_placed(kind, Key::new(namespace, "other"), "n2");
        }
        drop(graph);
        authorizer
    }

    async fn may(authorizer: &NodeAuthorizer, node: &str, verb: &str, object: &str) -> bool {
        // group/resource/subresource/namespace/name?selector
        let (object, selector) = object.split_once('?').unwrap_or((object, ""));
        let parts: Vec<&str> = object.split('/').collect();
        let [group, resource, subresource, namespace, name] = parts[..] else { panic!("{object}") };
        let request = RequestInfo {
            is_resource: true,
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            namespace: namespace.into(),
            name: name.into(),
            field_selector: selector.into(),
            ..RequestInfo::default()
        };
        let user = UserInfo::new(format!("{USER_PREFIX}{node}"), &[NODES_GROUP]);
        let decision = authorizer.authorize(&Attributes { user, request }).await;
        matches!(decision, Decision::Allow { .. })
    }

    #[tokio::test]
    async fn a_node_reads_what_its_pods_need() {
        let authorizer = authorizer();
        let check = async |verb: &str, object: &str, expected: bool| {
            assert_eq!(may(&authorizer, "n1", verb, object).await, expected, "{verb} {object}");
            // The other node has only a mirror pod, which grants nothing.
            let shared = ["/secrets/", "/configmaps/", "/serviceaccounts/", "persistentvolume"];
            if shared.iter().any(|part| object.contains(part)) {
                assert!(!may(&authorizer, "n2", verb, object).await, "{verb} {object}");
            }
        };
        check("get", "/secrets//web/password", true).await;
        check("watch", "/secrets//web/password", true).await;
        check("list", "/secrets//web/", false).await;
        check("update", "/secrets//web/password", false).await;
        check("get", "/secrets//web/other", false).await;
        check("get", "/secrets//csi/login", true).await;
        check("get", "/configmaps//web/settings", true).await;
        check("get", "/configmaps//web/kube-root-ca.crt", true).await;
        check("get", "/persistentvolumeclaims//web/data", true).await;
        check("get", "/persistentvolumes///pv", true).await;
        check("create", "/serviceaccounts/token/web/bot", true).await;
        check("create", "/serviceaccounts/token/web/other", false).await;
        check("get", "/pods//web/pn1", true).await;
        check("get", "/pods//web/pn2", false).await;
        check("watch", "/pods///", false).await;
        check("watch", "/pods///?spec.nodeName=n1", true).await;
        check("list", "/pods///?spec.nodeName=n2", false).await;
        check("delete", "/pods//web/any", true).await;
        check("patch", "/pods/status/web/pn1", true).await;
        check("get", "/nodes///n1", true).await;
        check("get", "/nodes///n2", false).await;
        check("watch", "/nodes///n1", true).await;
        check("list", "/nodes///", false).await;
        check("create", "/nodes///", true).await;
        check("patch", "/nodes/status//n1", true).await;
        check("update", "coordination.k8s.io/leases//kube-node-lease/n1", true).await;
        check("update", "coordination.k8s.io/leases//kube-node-lease/n2", false).await;
        check("get", "coordination.k8s.io/leases//kube-system/n1", false).await;
        for verb in ["get", "update", "patch", "delete"] {
            check(verb, "resource.k8s.io/resourceslices///mine", true).await;
            check(verb, "resource.k8s.io/resourceslices///other", false).await;
            check(verb, "resource.k8s.io/resourceslices///unknown", false).await;
            check(verb, "resource.k8s.io/resourceslices/x//mine", false).await;
        }
        check("create", "resource.k8s.io/resourceslices///", true).await;
        for verb in ["list", "watch", "deletecollection"] {
            let selected = |by: &str| format!("resource.k8s.io/resourceslices///{by}");
            check(verb, &selected(""), false).await;
            check(verb, &selected("?spec.nodeName=n1"), true).await;
            check(verb, &selected("?spec.nodeName=n2"), false).await;
            check(verb, &selected("?spec.nodeName!=n1"), false).await;
            check(verb, &selected("?spec.driver=n1"), false).await;
        }
        check("get", "storage.k8s.io/volumeattachments///mine", true).await;
        check("get", "storage.k8s.io/volumeattachments///other", false).await;
        check("get", "storage.k8s.io/volumeattachments/status//mine", false).await;
        check("list", "storage.k8s.io/volumeattachments///", false).await;
        check("update", "storage.k8s.io/volumeattachments///mine", false).await;
        check("list", "/services///", true).await;
        check("delete", "apps/deployments//web/a", false).await;
    }

    #[tokio::test]
    async fn a_retired_node_reads_the_pods_that_are_left() {
        let authorizer = authorizer();
        let check = async |verb: &str, resource: &str, name: &str, selector: &str, expected| {
            let request = RequestInfo {
                is_resource: true,
                verb: verb.into(),
                resource: resource.into(),
                namespace: "web".into(),
                name: name.into(),
                field_selector: selector.into(),
                ..RequestInfo::default()
            };
            let user = UserInfo::new("system:node:n1", &[RETIRED_NODES]);
            let decision = authorizer.authorize(&Attributes { user, request }).await;
            let is_allowed = matches!(decision, Decision::Allow { .. });
            assert_eq!(is_allowed, expected, "{verb} {resource} {name} {selector}");
        };
        check("watch", "pods", "", "spec.nodeName=n1", true).await;
        check("list", "pods", "", "spec.nodeName=n2", false).await;
        check("list", "pods", "", "", false).await;
        check("get", "pods", "pn1", "", true).await;
        check("delete", "pods", "pn1", "", false).await;
        check("get", "secrets", "password", "", false).await;
        check("get", "nodes", "n1", "", false).await;
        check("create", "nodes", "", "", false).await;
        check("create", "certificatesigningrequests", "", "", false).await;
    }

    #[tokio::test]
    async fn a_deleted_pod_grants_nothing() {
        let authorizer = authorizer();
        authorizer.graph.write().expect("no panic").remove_pod("web", "pn1");
        assert!(!may(&authorizer, "n1", "get", "/secrets//web/password").await);
        assert!(!may(&authorizer, "n1", "get", "/persistentvolumes///pv").await);
        let graph = authorizer.graph.read().expect("no panic");
        assert!(graph.users.is_empty());
    }

    #[test]
    fn only_members_of_the_group_are_nodes() {
        let check = |user: UserInfo, expected: Option<&str>| assert_eq!(node_name(&user), expected);
        check(UserInfo::new("system:node:a", &[NODES_GROUP]), Some("a"));
        check(UserInfo::new("system:node:a", &[]), None);
        check(UserInfo::new("jane", &[NODES_GROUP]), None);
    }

    #[test]
    fn pod_certificates_need_the_feature_gate() {
        let authorizer = authorizer();
        let pcrs = "certificates.k8s.io/podcertificaterequests";
        for (verb, rest, expected) in [
            ("create", "//web/", true),
            ("create", "/status/web/mine", false),
            ("get", "//web/mine", true),
            ("get", "//web/other", false),
            ("get", "//kube-system/mine", false),
            ("list", "///", false),
            ("list", "///?spec.nodeName=n1", true),
            ("watch", "///?spec.nodeName=n2", false),
            ("update", "//web/mine", false),
            ("delete", "//web/mine", false),
        ] {
            for is_open in [true, false] {
                let gates = Gates::DEFAULT.with(Feature::PodCertificateRequest, is_open);
                let object = format!("{pcrs}{rest}");
                let asked = may(&authorizer, "n1", verb, &object);
                let allowed = features::scoped(gates, || asked.now_or_never().expect("at once"));
                assert_eq!(allowed, is_open && expected, "{verb} {object} {is_open}");
            }
        }
    }
}
