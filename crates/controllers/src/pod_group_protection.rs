//! Keeps a PodGroup that is deleted until none of its pods runs any more.
//!
//! In: PodGroups, pods. Out: PodGroups without the finalizer, which admission sets (plugin PodGroupProtection).
//! Upstream: `pkg/controller/scheduling/podgroupprotection`.
//! Cost: an index finds the pods of a group. A change of a pod decodes that pod; a group is decoded at its end.

use client::{Api, Client, Event, Lister, ObjectKey, Outcome, PostParams, Result, WorkQueue};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;

use crate::descriptor::{Descriptor, Row, Setup, on, or_gone, own};
use crate::pod;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "podgroup-protection-controller",
    account: "podgroup-protection-controller",
    component: "podgroup-protection-controller",
    queue: "podgroupprotection",
    workers: 5,
    new: Controller::new,
    watches: &[&own::<PodGroup>().if_served(), &on(Controller::pod_event)],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";
/// Pods that have not finished, by their PodGroup.
const BY_GROUP: &str = "pod group";

struct Controller {
    client: Client,
    groups: Lister<PodGroup>,
    pods: Lister<Pod>,
}

/// The PodGroup of a pod.
fn group_of(pod: &Pod) -> Option<ObjectKey> {
    let name = pod.spec.as_ref()?.scheduling_group.as_ref()?.pod_group_name.as_ref()?;
    Some(ObjectKey::new(pod.metadata.namespace.as_deref().unwrap_or_default(), name))
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let pods = setup.informer::<Pod>();
        pods.index(BY_GROUP, |pod| {
            let group = group_of(pod).filter(|_| !pod::is_finished(pod));
            group.map(|group| group.to_string()).into_iter().collect()
        });
        let client = setup.client.clone();
        Some(Self { client, groups: setup.lister(), pods: pods.lister() })
    }

    /// Only the end of a pod frees its group.
    fn pod_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<Pod>) {
        let pod = event.object();
        if let Some(group) = group_of(pod)
            && (event.is_deleted() || pod::is_finished(pod))
        {
            queue.add(group);
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let entry = self.groups.entry(key);
        let has = |one: &String| one == FINALIZER;
        let deleted = entry
            .is_some_and(|entry| entry.header.deleting && entry.header.finalizers.iter().any(has));
        if !deleted || self.pods.count_by_index(BY_GROUP, &key.to_string()) > 0 {
            return Ok(Outcome::Done);
        }
        let Some(group) = self.groups.get_key(key) else { return Ok(Outcome::Done) };
        let mut freed = (*group).clone();
        freed.metadata.finalizers.get_or_insert_default().retain(|one| one != FINALIZER);
        let api: Api<PodGroup> = self.client.api(Some(&key.namespace));
        or_gone(api.replace(&key.name, &PostParams::default(), &freed).await)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn a_pod_names_its_group() {
        let check = |spec: Value, expected: Option<&str>| {
            let metadata = json!({"name": "p", "namespace": "ns"});
            let pod = from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod");
            assert_eq!(group_of(&pod).map(|key| key.to_string()).as_deref(), expected);
        };
        check(json!({"containers": [], "schedulingGroup": {"podGroupName": "g"}}), Some("ns/g"));
        check(json!({"containers": [], "schedulingGroup": {}}), None);
        check(json!({"containers": []}), None);
    }
}
