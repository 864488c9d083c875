//! Decides which certificates of nodes are valid: those of an existing Node.
//!
//! ```text
//!  join token ─► certificate of an hour, no UID ─► registers the Node ─► certificates with its UID
//!                     valid until another                 valid as long as
//!                     certificate registers the Node,     the Node with this UID
//!                     or the Node is deleted              exists
//! ```
//!
//! In: Nodes, mirrored from the watch cache; the certificate. Out: a verdict for each request.
//! A certificate that is no longer valid still gives the user's name, but no group except
//! [`api::nodes::RETIRED_NODES`]: so the kubelet sees that its pods are deleted, and stops them.
//!
//! Invariants: nothing is written, so all servers of a store agree, also after restarts; the deletion of
//! a Node ends every certificate with its UID at once. A certificate without a UID that is valid for a
//! year comes from an administrator or an earlier version; like upstream, it is not restricted.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use api::nodes;
use apiserver::Registry;
use apiserver::request::UserInfo;
use base::task::Tasks;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use machinery::Object;
use pki::{Certificate, Identity};

use crate::mirror::{Change, mirror};

/// A certificate with at most this lifetime was issued for a join token. Includes the minutes by which its
/// start is backdated, and some for rounding.
const SHORT: Duration = Duration::from_secs(pki::JOIN_LIFETIME.as_secs() + 600);

/// Clones share the index.
#[derive(Clone, Default)]
pub struct NodeCertificates {
    /// Written by the mirror's task, read by every request of a node; never held across an await.
    index: Arc<RwLock<Index>>,
}

#[derive(Default)]
struct Index {
    registered: HashMap<String, Registered>,
    /// When Nodes were deleted, for as long as a join token's certificate may be valid.
    deleted: HashMap<String, Timestamp>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Registered {
    uid: String,
    /// The credential that registered it, if known.
    by: Option<String>,
}

/// The relevant fields of a node's certificate.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    node: String,
    is_kubelet: bool,
    uid: Option<String>,
    issued: Timestamp,
    is_short: bool,
    credential: String,
}

impl Shown {
    /// `None` for certificates of other users.
    pub(crate) fn of(certificate: &Certificate, credential: &str) -> Option<Self> {
        let Certificate { common_name, organizations, not_before, not_after, .. } = certificate;
        let node = Identity::node_of(common_name, organizations)?;
        let lifetime = not_after.duration_since(*not_before).unsigned_abs();
        Some(Self {
            is_kubelet: *common_name == Identity::node(node).user,
            node: node.to_owned(),
            uid: certificate.uid.clone(),
            issued: *not_before + pki::BACKDATE,
            is_short: lifetime <= SHORT,
            credential: credential.to_owned(),
        })
    }
}

impl NodeCertificates {
    /// Reads all Nodes, and follows them with a task of `tasks`.
    pub async fn start(registry: &Registry, tasks: &Tasks) -> Self {
        let own = Self::default();
        let index = own.index.clone();
        mirror::<Node>(registry, tasks, move |change| {
            let mut index = index.write().expect("no panic under the lock");
            let now = base::clock::now();
            match change {
                Change::Reset(all) => index.replace(all, now),
                Change::Put(node) => index.put(&node),
                Change::Remove(key) => index.remove(&key.name, now),
            }
        })
        .await;
        own
    }

    /// Whether the certificate is valid.
    pub(crate) fn count(&self, shown: &Shown) -> bool {
        self.index.read().expect("no panic under the lock").count(shown)
    }

    /// Changes the user of a certificate whose Node is deleted.
    pub(crate) fn retire(user: &mut UserInfo) {
        user.groups = vec![nodes::RETIRED_NODES.to_owned()];
    }
}

impl Index {
    fn put(&mut self, node: &Node) {
        let annotations = node.metadata.annotations.as_ref();
        let by = annotations.and_then(|all| all.get(nodes::REGISTERED_BY)).cloned();
        let registered = Registered { uid: node.uid().to_owned(), by };
        self.registered.insert(node.name().to_owned(), registered);
    }

    fn remove(&mut self, name: &str, now: Timestamp) {
        if self.registered.remove(name).is_some() {
            self.deleted.retain(|_, at| *at + SHORT > now);
            self.deleted.insert(name.to_owned(), now);
        }
    }

    fn replace(&mut self, all: Vec<Node>, now: Timestamp) {
        let gone = self.registered.keys().filter(|name| !all.iter().any(|one| one.name() == *name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.remove(&name, now);
        }
        all.iter().for_each(|node| self.put(node));
    }

    fn count(&self, shown: &Shown) -> bool {
        let registered = self.registered.get(&shown.node);
        if let Some(uid) = &shown.uid {
            return registered.is_some_and(|node| node.uid == *uid);
        }
        if !shown.is_short {
            return true;
        }
        let is_before = |at: &Timestamp| shown.issued.as_second() < at.as_second();
        if self.deleted.get(&shown.node).is_some_and(is_before) {
            return false;
        }
        // If two machines joined with the same name, the one that registered the Node keeps it.
        let by = registered.and_then(|node| node.by.as_ref());
        !shown.is_kubelet || by.is_none_or(|by| *by == shown.credential)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const HOUR: Duration = pki::JOIN_LIFETIME;
    const YEAR: Duration = pki::LEAF_LIFETIME;

    fn node(name: &str, uid: &str, by: Option<&str>) -> Node {
        let annotations = by.map(|by| json!({ nodes::REGISTERED_BY: by })).unwrap_or_default();
        let meta = json!({"name": name, "uid": uid, "annotations": annotations});
        serde_json::from_value(json!({ "metadata": meta })).expect("a node")
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).expect("in range")
    }

    fn shown(user: &str, uid: Option<&str>, lifetime: Duration, credential: &str) -> Shown {
        let group = match user.starts_with("system:node:") {
            true => "system:nodes",
            false => "decapod:kube-proxies",
        };
        let authority = pki::Authority::generate("ca").expect("keys can be made");
        let profile = pki::Profile { lifetime, ..pki::Profile::client(user, &[group]) };
        let issued = authority.issue(&profile).expect("signs");
        let mut cert = pki::certificates(issued.cert_pem.as_bytes()).expect("parses").remove(0);
        cert.uid = uid.map(str::to_owned);
        let shown = Shown::of(&cert, credential).expect("a node's");
        Shown { issued: at(0), ..shown }
    }

    #[test]
    fn a_certificate_ends_with_its_node() {
        let mut index = Index::default();
        let bound = shown("system:node:a", Some("1"), YEAR, "c1");
        let proxy = shown("system:kube-proxy:a", Some("1"), YEAR, "c2");
        let own = shown("system:node:a", None, YEAR, "c3");
        assert!(!index.count(&bound) && !index.count(&proxy) && index.count(&own));
        index.put(&node("a", "1", None));
        assert!(index.count(&bound) && index.count(&proxy) && index.count(&own));
        index.remove("a", at(5));
        assert!(!index.count(&bound) && !index.count(&proxy) && index.count(&own));
        // Another machine joins with the same name: earlier certificates stay refused.
        index.put(&node("a", "2", None));
        assert!(!index.count(&bound) && !index.count(&proxy));
        assert!(index.count(&shown("system:node:a", Some("2"), YEAR, "c4")));
    }

    #[test]
    fn a_join_certificate_belongs_to_the_machine_that_registered() {
        let mut index = Index::default();
        let first = shown("system:node:a", None, HOUR, "c1");
        let second = shown("system:node:a", None, HOUR, "c2");
        let proxy = shown("system:kube-proxy:a", None, HOUR, "c3");
        assert!(index.count(&first) && index.count(&second));
        index.put(&node("a", "1", Some("c1")));
        assert!(index.count(&first) && !index.count(&second) && index.count(&proxy));
        index.replace(vec![], at(5));
        assert!(!index.count(&first) && !index.count(&second) && !index.count(&proxy));
        let later = Shown { issued: at(6), ..second.clone() };
        assert!(index.count(&later), "it was issued after the deletion");
        // The server's own node registers without a credential: no certificate has its name.
        index.put(&node("a", "2", Some("")));
        assert!(!index.count(&later));
    }

    #[test]
    fn deletions_are_forgotten_with_the_last_join_certificate() {
        let mut index = Index::default();
        for (name, when) in [("a", 0), ("b", 10_000)] {
            index.put(&node(name, "1", None));
            index.remove(name, at(when));
        }
        assert_eq!(index.deleted.keys().collect::<Vec<_>>(), ["b"]);
    }
}
