//! Templates that pods have in common, each kept once.
//!
//! In: pods as they come from the API, each with a copy of its own. Out: the same pods, sharing. Most pods
//! have the labels and the specification of others, and these are most of what the scheduler knows of a pod.
//!
//! Invariants: a pod is equal to what it was; a template lives as long as a pod has it.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Weak};

use crate::pod::{PodInfo, Template};

/// Templates that are compared at most: a DaemonSet's pods look alike, and each names another node.
const ALIKE: usize = 16;

#[derive(Clone, Default)]
pub struct Templates {
    /// By what tells most of them apart.
    known: HashMap<u64, Vec<Weak<Template>>>,
    /// Unused templates are removed after so many new ones.
    room: usize,
}

impl Templates {
    pub fn share(&mut self, pod: &mut PodInfo) {
        let alike = self.known.entry(likeness(&pod.template)).or_default();
        if let Some(same) = alike.iter().filter_map(Weak::upgrade).find(|one| *one == pod.template)
        {
            pod.template = same;
            return;
        }
        alike.retain(|one| one.strong_count() > 0);
        if alike.len() == ALIKE {
            alike.remove(0);
        }
        alike.push(Arc::downgrade(&pod.template));
        match self.room.checked_sub(1) {
            Some(room) => self.room = room,
            None => self.clear(),
        }
    }

    fn clear(&mut self) {
        self.known.retain(|_, alike| alike.iter().any(|one| one.strong_count() > 0));
        self.room = self.known.len();
    }
}

fn likeness(template: &Template) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&template.labels, &template.images, template.priority).hash(&mut hasher);
    (template.requests.milli_cpu, template.requests.memory).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod(name: &str, labels: Value, cpu: &str, tolerations: Value) -> PodInfo {
        let resources = json!({"requests": {"cpu": cpu}});
        let pod = json!({"metadata": {"name": name, "uid": name, "labels": labels}, "spec":
            {"containers": [{"name": "c", "resources": resources}], "tolerations": tolerations}});
        PodInfo::new(&from_value(pod).expect("a pod"))
    }

    #[test]
    fn what_pods_have_in_common_is_kept_once() {
        let mut templates = Templates::default();
        let mut check = |one: &PodInfo, other: &PodInfo, expected: bool| {
            let (mut a, mut b) = (one.clone(), other.clone());
            templates.share(&mut a);
            templates.share(&mut b);
            assert_eq!(Arc::ptr_eq(&a.template, &b.template), expected);
            assert_eq!((&a, &b), (one, other));
        };
        let (plain, none) = (json!({"app": "web"}), json!([]));
        let one = pod("a", plain.clone(), "1", none.clone());
        check(&one, &pod("b", plain.clone(), "1", none.clone()), true);
        check(&one, &pod("b", plain.clone(), "2", none.clone()), false);
        check(&one, &pod("b", json!({"app": "db"}), "1", none.clone()), false);
        check(&one, &pod("b", plain, "1", json!([{"operator": "Exists"}])), false);
        // Templates without pods are removed later.
        for index in 0..100 {
            let labels = json!({"app": index.to_string()});
            templates.share(&mut pod("a", labels, "1", none.clone()));
        }
        assert!(templates.known.len() < 60, "{}", templates.known.len());
    }
}
