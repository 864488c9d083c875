//! Detects changes in a runtime that sends no events.
//!
//! In: the runtime's lists, once a second. Out: wake-ups of the workers whose sandboxes or containers
//! changed. Two calls a second for any number of pods; the worker reads the details.
//! Upstream: `pkg/kubelet/pleg/generic.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use base::metrics::Timer;

use crate::names;
use crate::node::families;
use crate::pod::set::PodSet;

/// Upstream: genericPlegRelistPeriod.
const PERIOD: Duration = Duration::from_secs(1);

/// The states of a pod's sandboxes and containers, by id.
type States = BTreeMap<String, i32>;
/// By the pod's uid.
type World = BTreeMap<String, States>;

/// Runs until a call of the runtime fails.
pub async fn follow(runtime: &dyn cri::Runtime, set: &PodSet) -> cri::Error {
    let mut last: Option<Timer> = None;
    let mut known = match list(runtime).await {
        Ok(world) => world,
        Err(error) => return error,
    };
    // Changes from before the first list.
    set.wake(None);
    loop {
        tokio::time::sleep(PERIOD).await;
        let timer = Timer::start();
        let now = match list(runtime).await {
            Ok(world) => world,
            Err(error) => return error,
        };
        families::relisted(timer.elapsed(), last.replace(timer).map(|last| last.elapsed()));
        for uid in changed(&known, &now) {
            set.wake(Some(uid));
        }
        known = now;
    }
}

async fn list(runtime: &dyn cri::Runtime) -> cri::Result<World> {
    let mut world = World::new();
    for sandbox in runtime.list_pod_sandbox(None).await? {
        if let Some(meta) = sandbox.metadata {
            world.entry(meta.uid).or_default().insert(sandbox.id, sandbox.state);
        }
    }
    for mut container in runtime.list_containers(None).await? {
        if let Some(uid) = container.labels.remove(names::POD_UID) {
            world.entry(uid).or_default().insert(container.id, container.state);
        }
    }
    Ok(world)
}

fn changed<'a>(before: &'a World, now: &'a World) -> BTreeSet<&'a str> {
    let uids = before.keys().chain(now.keys()).map(String::as_str);
    uids.filter(|uid| before.get(*uid) != now.get(*uid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_pods_are_woken() {
        let world = |pods: &[(&str, &[(&str, i32)])]| -> World {
            let states = |all: &[(&str, i32)]| -> States {
                all.iter().map(|(id, state)| (id.to_string(), *state)).collect()
            };
            pods.iter().map(|(uid, all)| (uid.to_string(), states(all))).collect()
        };
        let before = world(&[("same", &[("a", 1)]), ("ended", &[("b", 1)]), ("gone", &[("c", 2)])]);
        let now = world(&[("same", &[("a", 1)]), ("ended", &[("b", 2)]), ("new", &[("d", 0)])]);
        assert_eq!(Vec::from_iter(changed(&before, &now)), ["ended", "gone", "new"]);
        assert!(changed(&now, &now).is_empty());
    }
}
