//! Containers that do not start, and those that are killed repeatedly: how often they are retried, and
//! which events users see.

use cri::Error;
use serde_json::{Value, json};

use crate::api::Api;
use crate::pods::{Bench, condition, container_id, one};

fn waiting(api: &Api, name: &str) -> String {
    let status = api.pod(name)["status"]["containerStatuses"][0].clone();
    status["state"]["waiting"]["reason"].as_str().unwrap_or_default().to_owned()
}

/// The count of events with that reason, whose message contains `about`.
fn told(api: &Api, reason: &str, about: &str) -> i64 {
    let events = api.objects("/events/");
    let ours = events.iter().filter(|event| {
        event["reason"] == reason && event["message"].as_str().is_some_and(|m| m.contains(about))
    });
    ours.map(|event| event["count"].as_i64().unwrap_or(1)).sum()
}

#[tokio::test]
async fn a_missing_command_has_a_growing_back_off() {
    let mut bench = Bench::new();
    let text = "exec: \"/nonexist\": no such file or directory";
    bench.runtime.fail("start_container", Some(Error::Internal(text.into())));
    bench.api.put_pod("a", one("Always"));
    bench.api.until("held back", |api| waiting(api, "a") == "CrashLoopBackOff").await;
    let status = bench.api.pod("a")["status"]["containerStatuses"][0].clone();
    assert_eq!(status["lastState"]["terminated"]["reason"], "StartError");
    assert_eq!(status["restartCount"], 1);
    assert_eq!(bench.count("create_container"), 2, "one more try, then ten seconds of back-off");
    bench.api.until("a word of it", |api| told(api, "Failed", text) > 0).await;
    // Waking the worker does not shorten the back-off.
    let other = bench.api.put_pod("b", one("Always"));
    bench.api.change("/api/v1/namespaces/ns/pods/a", &json!({"metadata": {"labels": {"x": "y"}}}));
    assert!(!other.is_null());
    bench.api.until("the other is tried", |_| bench.count("create_container") == 4).await;
    bench.api.until("told once", |api| told(api, "BackOff", "container c in pod a_") == 1).await;

    bench.api.put_pod("c", one("Never"));
    bench.until_phase("c", "Failed").await;
    let ended = bench.api.pod("c")["status"]["containerStatuses"][0]["state"].clone();
    assert_eq!(ended["terminated"]["exitCode"], 128);
    bench.stop().await;
}

#[tokio::test]
async fn a_failed_pull_has_one_event_for_each_wait() {
    let mut bench = Bench::new();
    bench.runtime.take_image("img:1");
    bench.api.put_pod("a", one("Always"));
    bench.api.until("backs off", |api| waiting(api, "a") == "ImagePullBackOff").await;
    // Events of the runtime cause no further events.
    let change = |n: u8| json!({"metadata": {"labels": {"n": n.to_string()}}});
    (0..5).for_each(|n| {
        bench.api.change("/api/v1/namespaces/ns/pods/a", &change(n));
    });
    bench.api.put_pod("b", json!({"containers": [{"name": "c", "image": "img:2"}]}));
    bench.until_ready("b").await;
    let pulling = "Back-off pulling image \"img:1\"";
    bench.api.until("a word of it", |api| told(api, "BackOff", pulling) > 0).await;
    assert_eq!(told(&bench.api, "BackOff", pulling), 1);
    assert_eq!(told(&bench.api, "Failed", "Error: ErrImagePull"), 1);
    bench.api.until("and", |api| told(api, "Failed", "Error: ImagePullBackOff") == 1).await;
    assert_eq!(bench.runtime.calls().iter().filter(|c| *c == "pull_image img:1").count(), 1);
    bench.stop().await;
}

/// Killed by its probe, started, killed: no exited container is observed in between.
#[tokio::test]
async fn liveness_restarts_have_a_growing_back_off() {
    let mut bench = Bench::new();
    bench.runtime.set_exec(1, "sick");
    let mut spec = one("Always");
    let probe = json!({"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1});
    spec["containers"][0]["livenessProbe"] = probe;
    bench.api.put_pod("a", spec);
    bench.api.until("held back", |api| waiting(api, "a") == "CrashLoopBackOff").await;
    let status = bench.api.pod("a")["status"]["containerStatuses"][0].clone();
    assert_eq!(status["restartCount"], 2, "{status}");
    let text = status["state"]["waiting"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(text.starts_with("back-off 10s restarting failed container=c"), "{text}");
    bench.stop().await;
}

#[tokio::test]
async fn readiness_is_probed_until_the_end() {
    let mut bench = Bench::new();
    let probe = |threshold: i32| json!({"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": threshold});
    let mut spec = one("Always");
    spec["containers"][0]["readinessProbe"] = probe(1);
    spec["containers"][0]["livenessProbe"] = probe(1);
    spec["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 300}}});
    bench.api.put_pod("a", spec);
    bench.until_ready("a").await;
    let id = container_id(&bench.api.pod("a"));
    bench.api.mark_deleted("a", 300);
    let stopping = "Stopping container c";
    bench.api.until("it ends", |api| told(api, "Killing", stopping) == 1).await;
    bench.runtime.set_exec(1, "no good");
    bench.api.until("not ready", |api| condition(&api.pod("a"), "Ready") == "False").await;
    let running = |pod: &Value| {
        let status = &pod["status"];
        (status["phase"].clone(), status["containerStatuses"][0]["state"]["running"].is_object())
    };
    assert_eq!(running(&bench.api.pod("a")), (json!("Running"), true));
    bench.runtime.set_exec(0, "");
    bench.until_ready("a").await;
    assert_eq!(told(&bench.api, "Unhealthy", "Liveness"), 0, "liveness does not matter any more");
    assert_eq!(container_id(&bench.api.pod("a")), id);
    // The grace period is shortened.
    bench.api.mark_deleted("a", 1);
    bench.api.until("gone", |api| api.pod("a").is_null()).await;
    bench.stop().await;
}

#[tokio::test]
async fn unsafe_sysctls_are_forbidden() {
    let mut bench = Bench::new();
    let spec = |name: &str| {
        let mut spec = one("Always");
        spec["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
        spec
    };
    bench.api.put_pod("a", spec("net.core.somaxconn"));
    bench.until_phase("a", "Failed").await;
    let status = bench.api.pod("a")["status"].clone();
    assert_eq!(status["reason"], "SysctlForbidden");
    let why = "forbidden sysctl: \"net.core.somaxconn\" not allowlisted";
    assert_eq!(status["message"], format!("Pod was rejected: {why}"));
    bench.api.until("an event", |api| told(api, "SysctlForbidden", why) == 1).await;
    bench.api.put_pod("b", spec("kernel/shm_rmid_forced"));
    bench.until_ready("b").await;
    bench.stop().await;

    bench.change = |config| {
        let patterns = ["net.core.*".to_owned()];
        config.sysctls =
            decapod_kubelet::Sysctls::with_unsafe(&patterns).expect("they are namespaced");
    };
    bench.start();
    bench.api.put_pod("c", spec("net.core.somaxconn"));
    bench.until_ready("c").await;
    bench.stop().await;
}
