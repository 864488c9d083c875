//! What all controllers together keep in memory for a pod.
//!
//! Counted by an allocator, in bytes that are still allocated, on the thread of the test: other tests and the load
//! of the machine change nothing. The test's API server is in the same process; it is counted alone first. In a server
//! the packed pod and its header belong to the watch cache.
//!
//! Invariant: a view that keeps decoded pods, of which each takes 8 KB and more, is over the limit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::testing::Live;

/// More than an informer keeps decoded, so that the difference has none of those.
const SIZES: [usize; 2] = [300, 900];
/// Until everything that the pods lead to is done.
const CALM: Duration = Duration::from_secs(60);
const PODS: &str = "/api/v1/pods";

thread_local! {
    /// Bytes that this thread has allocated and not freed.
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: usize, sign: isize) {
    // A thread that ends may free after its counter is gone.
    let _ = LIVE.try_with(|live| live.set(live.get() + sign * bytes as isize));
}

// SAFETY: every call is the system allocator's, with the same arguments. The counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: the pointer came from `alloc`, so from the system allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A pod as admission leaves it: with the token's volume.
fn pod(index: usize, owner: &str) -> Value {
    let name = format!("p{index}");
    let variables: Vec<Value> = (0..20)
        .map(|n| json!({"name": format!("VARIABLE_{n}"), "value": "y".repeat(40)}))
        .collect();
    let sources = json!([
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]);
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": {"app": "web"},
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "containers": [{"name": "c", "env": variables, "resources": {"requests": {"cpu": "10m"}}}],
            "volumes": [{"name": "kube-api-access", "projected": {"sources": sources}}]},
        "status": {"phase": "Pending"}});
    if !owner.is_empty() {
        pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": owner,
            "name": "owner", "uid": "owner", "controller": true}]);
    }
    pod
}

/// The bytes that controllers keep because of so many pods.
async fn kept(pods: usize, owner: &str) -> isize {
    let live = Live::default();
    for index in 0..pods {
        live.put(PODS, pod(index, owner));
    }
    let before = LIVE.get();
    let tasks = Tasks::new("test");
    let informers = start(|_| live.client(), &[], Options::default(), &tasks);
    tokio::time::sleep(CALM).await;
    let kept = LIVE.get() - before;
    tasks.shutdown(Duration::from_secs(5)).await;
    drop(informers);
    kept
}

#[tokio::test(start_paused = true)]
async fn controllers_keep_no_decoded_pods() {
    let check = async |owner: &str, limit: isize| {
        let [few, many] = SIZES;
        let grown = kept(many, owner).await - kept(few, owner).await;
        let each = grown / (many - few) as isize;
        assert!((1..=limit).contains(&each), "{each} bytes for a pod of {owner:?}");
    };
    check("", 4000).await;
    check("ReplicaSet", 4000).await;
    check("DaemonSet", 4000).await;
    check("StatefulSet", 8000).await;
    check("Job", 8000).await;
}
