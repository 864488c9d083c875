//! Evicted pods get a grace period of one second, whatever their spec says.

use std::time::Duration;

use serde_json::{Value, json};

use crate::api::Api;
use crate::pods::{Bench, container_id, one};

fn patient() -> Value {
    let mut spec = one("Always");
    spec["terminationGracePeriodSeconds"] = json!(3600);
    spec
}

/// The number of eviction events in the API.
fn told(api: &Api) -> i64 {
    let counts = api.objects("/events/").into_iter();
    counts.filter(|e| e["reason"] == "Evicted").map(|e| e["count"].as_i64().unwrap_or(1)).sum()
}

fn check_grace(bench: &Bench, id: &str) {
    let calls = bench.runtime.calls();
    let stop = calls.iter().find_map(|call| call.strip_prefix(&format!("stop_container {id} ")));
    let seconds = stop.and_then(|seconds| seconds.parse::<u64>().ok());
    assert!(seconds.is_some_and(|seconds| seconds <= 1), "{calls:?}");
}

#[tokio::test]
async fn an_eviction_for_memory_has_a_short_grace_period() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", patient());
    bench.until_ready("a").await;
    let id = container_id(&bench.api.pod("a"));
    bench.stop().await;
    // Its sandbox does not stop, so the pod stays, and with it the memory pressure.
    let stuck = cri::Error::Internal("busy".into());
    bench.runtime.fail("stop_pod_sandbox", Some(stuck));
    bench.change = |config| {
        let hard = Some([("memory.available".to_owned(), "99%".to_owned())].into());
        let maps =
            decapod_kubelet::EvictionMaps { hard, ..decapod_kubelet::EvictionMaps::default() };
        config.eviction.thresholds =
            decapod_kubelet::parse_thresholds(&maps, false).expect("valid");
        config.eviction_interval = Duration::from_millis(50);
    };
    bench.start();
    let tries = |bench: &Bench| bench.count("stop_pod_sandbox");
    bench.api.until("it is retried", |_| tries(&bench) >= 2).await;
    check_grace(&bench, &id);
    bench.api.until("it is told", |api| told(api) > 0).await;
    assert_eq!(told(&bench.api), 1, "{:?}", bench.api.events());
    bench.runtime.fail("stop_pod_sandbox", None);
    bench.until_phase("a", "Failed").await;
    let status = bench.api.pod("a")["status"].clone();
    assert_eq!(status["reason"], "Evicted");
    let text = status["message"].as_str().expect("a message");
    assert!(text.starts_with("The node was low on resource: memory. "), "{text}");
    bench.stop().await;
}

#[tokio::test]
async fn a_pod_above_its_size_limit_is_evicted() {
    let mut bench = Bench::new();
    bench.stop().await;
    bench.change = |config| config.eviction_interval = Duration::from_millis(50);
    bench.start();
    let mut spec = patient();
    spec["volumes"] = json!([{"name": "v", "emptyDir": {"sizeLimit": "16Ki"}}]);
    let pod = bench.api.put_pod("a", spec);
    bench.until_ready("a").await;
    let id = container_id(&bench.api.pod("a"));
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let volume = format!("kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/v/big");
    std::fs::write(bench.dir.path().join(volume), vec![1; 1 << 20]).expect("written");
    bench.until_phase("a", "Failed").await;
    check_grace(&bench, &id);
    let status = bench.api.pod("a")["status"].clone();
    let text = "Usage of EmptyDir volume \"v\" exceeds the limit \"16Ki\". ";
    assert_eq!((&status["reason"], &status["message"]), (&json!("Evicted"), &json!(text)));
    bench.api.until("it is told", |api| told(api) > 0).await;
    assert_eq!(told(&bench.api), 1, "{:?}", bench.api.events());
    bench.stop().await;
}
