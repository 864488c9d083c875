//! Pods that the kubelet started, until the API has their addresses.
//!
//! In: what the kubelet said about a pod of this node, what the API says. Out: what counts. The kubelet knows the
//! addresses of a new sandbox first; the API knows first that a pod is gone.

use std::collections::HashMap;

use client::ObjectKey;

use crate::inbox::PodChange;
use crate::objects::PodFacts;

#[derive(Default)]
pub struct Started(
    /// By key, as a pod of the same name may follow; the UID tells them apart.
    HashMap<ObjectKey, PodFacts>,
);

impl Started {
    pub fn put(&mut self, key: ObjectKey, pod: PodFacts) {
        self.0.insert(key, pod);
    }

    /// The pod as the API has it, with the addresses that the kubelet said until the API has them, too.
    pub fn effective(&mut self, key: &ObjectKey, change: PodChange) -> Option<PodFacts> {
        let Some(started) = self.0.get(key) else {
            return match change {
                PodChange::Seen(pod) => pod,
                PodChange::Deleted(_) => None,
            };
        };
        let is_over = match &change {
            PodChange::Seen(None) => true,
            PodChange::Seen(Some(pod)) => {
                pod.uid == started.uid && (pod.has_ended || pod.addresses == started.addresses)
            }
            // Another UID is of a former pod of this name, or of a static pod's mirror.
            PodChange::Deleted(uid) => *uid == started.uid,
        };
        let kept = started.clone();
        if is_over {
            self.0.remove(key);
        }
        match change {
            PodChange::Seen(pod) if is_over => pod,
            PodChange::Deleted(_) if is_over => None,
            PodChange::Seen(Some(pod)) if pod.uid == kept.uid => {
                Some(PodFacts { labels: pod.labels, ..kept })
            }
            _ => Some(kept),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, address: &str, app: &str) -> PodFacts {
        let addresses = Some(address).filter(|text| !text.is_empty());
        PodFacts {
            uid: uid.into(),
            labels: [("app", app)].into_iter().collect(),
            addresses: addresses
                .map(|text| text.parse().expect("an address"))
                .into_iter()
                .collect(),
            is_local: true,
            ..PodFacts::default()
        }
    }

    /// Which pod counts after the kubelet started `u1` at 10.0.0.1 and the API said something.
    fn check(change: PodChange, expected: Option<PodFacts>, is_kept: bool) {
        let key = ObjectKey::new("default", "web-0");
        let mut started = Started::default();
        started.put(key.clone(), pod("u1", "10.0.0.1", "web"));
        assert_eq!(started.effective(&key, change), expected);
        assert_eq!(started.0.contains_key(&key), is_kept);
    }

    #[test]
    fn the_kubelet_is_first_with_addresses() {
        let here = || Some(pod("u1", "10.0.0.1", "web"));
        check(PodChange::Seen(Some(pod("u1", "", "web"))), here(), true);
        // Labels change at the API alone.
        let changed = pod("u1", "10.0.0.1", "other");
        check(PodChange::Seen(Some(pod("u1", "", "other"))), Some(changed), true);
        // The address of an earlier sandbox.
        check(PodChange::Seen(Some(pod("u1", "10.0.0.9", "web"))), here(), true);
        check(PodChange::Seen(here()), here(), false);
        // The former pod of this name.
        check(PodChange::Seen(Some(pod("u0", "10.0.0.9", "web"))), here(), true);
        check(PodChange::Deleted("u0".into()), here(), true);
    }

    #[test]
    fn the_api_is_first_with_the_end() {
        check(PodChange::Deleted("u1".into()), None, false);
        check(PodChange::Seen(None), None, false);
        let ended = PodFacts { has_ended: true, ..pod("u1", "", "web") };
        check(PodChange::Seen(Some(ended.clone())), Some(ended), false);
    }

    #[test]
    fn other_pods_are_as_the_api_says() {
        let key = ObjectKey::new("default", "elsewhere");
        let mut started = Started::default();
        let seen = started.effective(&key, PodChange::Seen(Some(pod("u", "10.0.0.2", "a"))));
        assert_eq!(seen, Some(pod("u", "10.0.0.2", "a")));
        assert_eq!(started.effective(&key, PodChange::Deleted("u".into())), None);
    }
}
