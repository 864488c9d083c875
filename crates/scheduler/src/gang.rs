//! Pods that are of use together only: all of a group get nodes, or none.
//!
//! In: pods with the label of a PodGroup that says how many there must be (`spec.minMember`).
//! Out: their bindings, held back until there are enough; given up together when one fits nowhere or
//! the rest do not come in time.
//!
//! ```text
//!  siblings too few ► wait ── a sibling comes ──┐
//!                                               ▼
//!             fits ► assumed, held back ── enough ► all are bound
//!                        └── one fits nowhere, or a minute passed ► all wait again
//! ```
//!
//! Upstream: the Coscheduling plugin of scheduler-plugins. A label without a PodGroup means nothing.

use std::collections::HashMap;
use std::time::Duration;

use client::{Client, ErrorExt};
use serde::Deserialize;
use tokio::time::Instant;

use crate::framework::{ClusterEvent, ExtensionPoints, Row};
use crate::pod::PodInfo;

pub const LABEL: &str = "scheduling.x-k8s.io/pod-group";
pub const NAME: &str = "Coscheduling";
const WAIT: Duration = Duration::from_secs(60);
/// How long what a PodGroup said is believed.
const FRESH: Duration = Duration::from_secs(3);

pub const ROW: Row = Row {
    name: NAME,
    weight: 0,
    build: |_| ExtensionPoints::default(),
    hint: |pod, event| match event {
        ClusterEvent::PodAdded(other) => Group::of(other) == Group::of(pod),
        ClusterEvent::NodeAdded(_)
        | ClusterEvent::NodeUpdated { .. }
        | ClusterEvent::PodChanged { .. }
        | ClusterEvent::PodRemoved(_)
        | ClusterEvent::PodUpdated => true,
        _ => false,
    },
};

/// A group's place.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    pub namespace: String,
    pub name: String,
}

impl Group {
    pub fn of(pod: &PodInfo) -> Option<Self> {
        let name = pod.labels.get(LABEL).filter(|name| !name.is_empty())?;
        Some(Self { namespace: pod.key.namespace.to_string(), name: name.clone() })
    }
}

/// The members of groups that have a node each and wait for the others. `T` is what binds one.
pub struct Gangs<T>(HashMap<Group, Held<T>>);

struct Held<T> {
    members: Vec<T>,
    until: Instant,
}

impl<T> Default for Gangs<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Gangs<T> {
    /// One more has a node. All of them, if with the `bound` ones they are enough.
    pub fn hold(&mut self, group: &Group, member: T, bound: usize, least: usize) -> Vec<T> {
        let until = Instant::now() + WAIT;
        let held = self.0.entry(group.clone()).or_insert(Held { members: vec![], until });
        held.members.push(member);
        match held.members.len() + bound >= least {
            true => self.release(group),
            false => vec![],
        }
    }

    pub fn release(&mut self, group: &Group) -> Vec<T> {
        self.0.remove(group).map(|held| held.members).unwrap_or_default()
    }

    /// Takes out members that are gone meanwhile.
    pub fn drop_if(&mut self, gone: impl Fn(&T) -> bool) -> Vec<T> {
        let mut out = vec![];
        for held in self.0.values_mut() {
            out.extend(held.members.extract_if(.., |one| gone(one)));
        }
        self.0.retain(|_, held| !held.members.is_empty());
        out
    }

    /// The members whose time is up, and when to look again.
    pub fn expired(&mut self, now: Instant) -> (Vec<T>, Option<Instant>) {
        let over: Vec<Group> = self
            .0
            .iter()
            .filter(|(_, held)| held.until <= now)
            .map(|(group, _)| group.clone())
            .collect();
        let members = over.iter().flat_map(|group| self.release(group)).collect();
        (members, self.0.values().map(|held| held.until).min())
    }
}

/// Reads PodGroups, and remembers them for a moment.
pub struct Groups {
    client: Client,
    known: tokio::sync::Mutex<HashMap<Group, (Instant, usize)>>,
}

#[derive(Deserialize)]
struct PodGroup {
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(default)]
    min_member: usize,
}

impl Groups {
    pub fn new(client: Client) -> Self {
        Self { client, known: Default::default() }
    }

    /// The minimum number of members; 0 if there is no such PodGroup.
    pub async fn least(&self, group: &Group) -> client::Result<usize> {
        let now = Instant::now();
        {
            let mut known = self.known.lock().await;
            known.retain(|_, (at, _)| now - *at < FRESH);
            if let Some((_, least)) = known.get(group) {
                return Ok(*least);
            }
        }
        let Group { namespace, name } = group;
        let path =
            format!("/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{namespace}/podgroups/{name}");
        let least = match self.client.get::<PodGroup>(&path).await {
            Ok(found) => found.spec.min_member,
            Err(error) if error.is_not_found() => 0,
            Err(error) => return Err(error),
        };
        self.known.lock().await.insert(group.clone(), (now, least));
        Ok(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn members_go_together_or_not_at_all() {
        let group = |name: &str| Group { namespace: "ns".into(), name: name.into() };
        let mut gangs = Gangs::default();
        assert!(gangs.hold(&group("a"), 1, 0, 3).is_empty());
        assert!(gangs.hold(&group("b"), 7, 0, 2).is_empty());
        assert!(gangs.hold(&group("a"), 2, 0, 3).is_empty());
        assert_eq!(gangs.hold(&group("a"), 3, 0, 3), [1, 2, 3]);
        // Bound members count, too.
        assert_eq!(gangs.hold(&group("a"), 4, 3, 3), [4]);
        let (over, next) = gangs.expired(Instant::now());
        assert!(over.is_empty() && next == Some(Instant::now() + WAIT));
        tokio::time::advance(WAIT).await;
        assert_eq!(gangs.expired(Instant::now()), (vec![7], None));
        gangs.hold(&group("c"), 8, 0, 3);
        gangs.hold(&group("c"), 9, 0, 3);
        assert_eq!(gangs.drop_if(|one| *one == 8), [8]);
        assert_eq!(gangs.release(&group("c")), [9]);
    }
}
