//! The life of pods, from binding to deletion.

use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use decapod_kubelet as kubelet;
use kubelet::Config;
use runtime::Fake;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::wait::LONG;

use crate::api::Api;

pub struct Bench {
    pub api: Api,
    pub runtime: Fake,
    pub dir: TempDir,
    kubelet: Option<Tasks>,
    /// Changes the settings of the next start.
    pub change: fn(&mut Config),
}

impl Bench {
    pub fn new() -> Self {
        let api = Api::new();
        let service = json!({"metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {"clusterIP": "10.43.0.1", "ports": [{"name": "https", "port": 443}]}});
        api.put("/api/v1/namespaces/default/services/kubernetes", service);
        let dir = tempfile::tempdir().expect("a directory");
        let mut bench = Self { api, runtime: Fake::new(), dir, kubelet: None, change: |_| {} };
        bench.start();
        bench
    }

    pub fn start(&mut self) {
        let mut config = Config::new("n1", self.dir.path().into());
        config.node_ips = vec!["192.168.7.1".parse().expect("an address")];
        config.healthz_address = None;
        config.cgroups_per_qos = false;
        config.may_mount = false;
        // The usage of the machine that runs the tests must not matter.
        config.eviction.thresholds.clear();
        config.image_gc_high = 100;
        config.shutdown_grace = Duration::from_secs(40);
        config.shutdown_grace_critical = Duration::from_secs(20);
        config.system_bus = self.dir.path().join("bus");
        config.pod_manifest_path = Some(self.dir.path().join("manifests"));
        std::fs::create_dir_all(self.dir.path().join("manifests")).expect("a directory");
        (self.change)(&mut config);
        let tasks = Tasks::new("bench");
        let stop = tasks.stop_signal();
        let (client, runtime) = (self.api.client(), Arc::new(self.runtime.clone()));
        tasks.spawn_graceful("kubelet", async move {
            kubelet::run(client, runtime, config, stop).await.expect("it runs");
        });
        self.kubelet = Some(tasks);
    }

    pub async fn stop(&mut self) {
        if let Some(tasks) = self.kubelet.take() {
            testkit::wait::soon("it stops by itself", tasks.shutdown(2 * LONG)).await;
        }
    }

    /// Events are sent concurrently with the work.
    async fn until_events(&self, wanted: &[&str]) {
        let are_there = |api: &Api| {
            let reasons: Vec<String> = api.events().into_iter().map(|event| event.0).collect();
            wanted.iter().all(|one| reasons.iter().any(|reason| reason == one))
        };
        self.api.until(&format!("events {wanted:?}"), are_there).await;
    }

    pub fn count(&self, call: &str) -> usize {
        self.runtime.calls().iter().filter(|c| c.starts_with(call)).count()
    }

    pub async fn until_phase(&self, name: &str, phase: &str) {
        self.api
            .until(&format!("{name} {phase}"), |api| api.pod(name)["status"]["phase"] == phase)
            .await;
    }

    pub async fn until_ready(&self, name: &str) {
        self.api
            .until(&format!("{name} ready"), |api| condition(&api.pod(name), "Ready") == "True")
            .await;
    }
}

pub fn condition(pod: &Value, kind: &str) -> String {
    let all = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = all.iter().find(|c| c["type"] == kind);
    found.and_then(|c| c["status"].as_str()).unwrap_or("none").to_string()
}

pub fn container_id(pod: &Value) -> String {
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap_or_default();
    id.rsplit('/').next().unwrap_or_default().to_string()
}

pub fn one(policy: &str) -> Value {
    json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "c", "image": "img:1"}]})
}

#[tokio::test]
async fn a_pod_runs_restarts_and_is_deleted() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", one("Always"));
    bench.until_ready("a").await;
    let pod = bench.api.pod("a");
    assert_eq!(pod["status"]["podIP"], "10.42.0.3");
    let conditions = pod["status"]["conditions"].as_array().expect("conditions");
    assert!(conditions.iter().all(|c| c["reason"].is_null() && c["message"].is_null()), "{pod}");
    assert_eq!(pod["status"]["hostIP"], "192.168.7.1");
    assert_eq!(pod["status"]["qosClass"], "BestEffort");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    bench
        .api
        .until("a ready node with a lease", |api| {
            let node = api.get("/api/v1/nodes/n1").unwrap_or_default();
            let lease = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1";
            condition(&node, "Ready") == "True" && api.get(lease).is_some()
        })
        .await;

    // The container crashes: restarted at once the first time, then with back-off.
    bench.runtime.exit(&container_id(&pod), 1);
    bench
        .api
        .until("restarted", |api| {
            let status = api.pod("a")["status"]["containerStatuses"][0].clone();
            status["restartCount"] == 1 && status["ready"] == true
        })
        .await;
    let second = bench.api.pod("a");
    assert_eq!(second["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"], 1);
    bench.runtime.exit(&container_id(&second), 2);
    // The back-off ends after ten seconds, however late the test looks.
    let mut held = Value::Null;
    bench
        .api
        .until("held back", |api| {
            held = api.pod("a");
            let status = &held["status"]["containerStatuses"][0];
            status["state"]["waiting"]["reason"] == "CrashLoopBackOff"
        })
        .await;
    let waiting = &held["status"]["containerStatuses"][0]["state"]["waiting"];
    let text = waiting["message"].as_str().expect("a message");
    assert!(text.starts_with("back-off 10s restarting failed container=c pod=a_ns("), "{text}");
    assert_eq!(condition(&held, "Ready"), "False");

    bench.api.mark_deleted("a", 30);
    bench.api.until("gone", |api| api.pod("a").is_null()).await;
    assert!(bench.runtime.calls().iter().any(|c| c.starts_with("remove_pod_sandbox")));
    bench
        .api
        .until("its files are gone", |_| {
            std::fs::read_dir(bench.dir.path().join("kubelet/pods")).is_ok_and(|d| d.count() == 0)
        })
        .await;
    bench.until_events(&["Pulled", "Created", "Started", "BackOff"]).await;
    bench.stop().await;
}

#[tokio::test]
async fn a_restarted_kubelet_adopts_running_pods() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", one("Always"));
    bench.until_ready("a").await;
    let before = bench.api.pod("a");
    bench.stop().await;
    let calls = bench.runtime.calls().len();
    // A change while no kubelet runs: the next one must see it.
    bench.api.put_pod("b", one("Always"));
    bench.start();
    bench.until_ready("b").await;
    let after = bench.api.pod("a");
    assert_eq!(container_id(&before), container_id(&after));
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    let new: Vec<String> = bench.runtime.calls().split_off(calls);
    assert!(!new.iter().any(|c| c.starts_with("stop_") || c.starts_with("remove_")), "{new:?}");
    bench.stop().await;
}

#[tokio::test]
async fn pods_are_restarted_while_the_api_is_down() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", one("Always"));
    bench.until_ready("a").await;
    let id = container_id(&bench.api.pod("a"));
    bench.api.set_down(true);
    bench.runtime.exit(&id, 1);
    bench.api.until("restarted all the same", |_| bench.count("start_container") == 2).await;
    bench.api.set_down(false);
    bench
        .api
        .until("and reported later", |api| {
            api.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1
        })
        .await;
    bench.stop().await;
}

/// An API server gives up a patch after too many conflicts: that says nothing about the pod.
#[tokio::test]
async fn a_status_after_a_conflict_is_written_again() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", one("Never"));
    bench.until_ready("a").await;
    let id = container_id(&bench.api.pod("a"));
    bench.api.lose_races(3);
    bench.runtime.exit(&id, 3);
    bench.until_phase("a", "Failed").await;
    assert_eq!(bench.api.races_to_lose(), 0);
    let status = bench.api.pod("a")["status"]["containerStatuses"][0].clone();
    assert_eq!(status["state"]["terminated"]["exitCode"], 3);

    // Another pod of that name: the old status is not written.
    bench.api.put_pod("b", one("Always"));
    bench.until_ready("b").await;
    let old = container_id(&bench.api.pod("b"));
    bench.api.lose_races(1);
    bench.api.remove("/api/v1/namespaces/ns/pods/b");
    bench.api.put_pod("b", one("Always"));
    bench.until_ready("b").await;
    assert_ne!(container_id(&bench.api.pod("b")), old);
    bench.stop().await;
}

/// The runtime is not up when the kubelet starts, like containerd after a reboot.
#[tokio::test]
async fn orphans_are_stopped_once_the_runtime_answers() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", one("Always"));
    bench.until_ready("a").await;
    bench.stop().await;
    bench.api.remove("/api/v1/namespaces/ns/pods/a");
    bench.runtime.fail("list_pod_sandbox", Some(cri::Error::Unavailable("not up".into())));
    bench.start();
    bench.api.until("it has tried", |_| bench.runtime.refusals("list_pod_sandbox") > 0).await;
    assert_eq!(bench.count("stop_pod_sandbox"), 0);
    bench.runtime.fail("list_pod_sandbox", None);
    bench.api.until("stopped", |_| bench.count("remove_pod_sandbox") > 0).await;
    bench.stop().await;
}

#[tokio::test]
async fn pods_whose_containers_exit() {
    let mut bench = Bench::new();
    bench.api.put_pod("ok", one("Never"));
    bench.api.put_pod("bad", one("Never"));
    bench.until_ready("ok").await;
    bench.until_ready("bad").await;
    bench.runtime.exit(&container_id(&bench.api.pod("ok")), 0);
    bench.runtime.exit(&container_id(&bench.api.pod("bad")), 3);
    bench.until_phase("ok", "Succeeded").await;
    bench.until_phase("bad", "Failed").await;
    let bad = bench.api.pod("bad");
    assert_eq!(bad["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 3);
    bench.api.until("sandboxes stop", |_| bench.count("stop_pod_sandbox") >= 2).await;
    assert_eq!(condition(&bench.api.pod("ok"), "Initialized"), "True");
    bench.stop().await;
}

#[tokio::test]
async fn pods_that_do_not_fit_fail() {
    let mut bench = Bench::new();
    let mut spec = one("Always");
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": "4000"}});
    bench.api.put_pod("big", spec);
    bench.until_phase("big", "Failed").await;
    let status = bench.api.pod("big")["status"].clone();
    assert_eq!(status["reason"], "OutOfcpu");
    let text = status["message"].as_str().expect("a message");
    assert!(
        text.starts_with(
            "Pod was rejected: Node didn't have enough resource: cpu, requested: 4000000, used: 0"
        ),
        "{text}"
    );
    assert!(status["containerStatuses"].is_null());
    assert_eq!(bench.count("run_pod_sandbox"), 0);
    bench.stop().await;
}

#[tokio::test]
async fn volumes_and_env_wait_for_their_objects_and_follow_them() {
    let mut bench = Bench::new();
    let mut spec = one("Always");
    spec["volumes"] = json!([{"name": "cfg", "configMap": {"name": "m"}}]);
    spec["containers"][0]["volumeMounts"] = json!([{"name": "cfg", "mountPath": "/cfg"}]);
    spec["containers"][0]["env"] = json!([
        {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
        {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]);
    let pod = bench.api.put_pod("a", spec);
    bench
        .api
        .until("a complaint", |api| {
            api.events().iter().any(|(reason, message)| {
                reason == "FailedMount"
                    && message
                        == "MountVolume.SetUp failed for volume \"cfg\" : configmap \"m\" not found"
            })
        })
        .await;
    let map =
        |value: &str| json!({"metadata": {"name": "m", "namespace": "ns"}, "data": {"k": value}});
    bench.api.put("/api/v1/namespaces/ns/configmaps/m", map("one"));
    bench.until_ready("a").await;
    let config =
        bench.runtime.container_config(&container_id(&bench.api.pod("a"))).expect("a config");
    let env = |name: &str| {
        let pair = config.envs.iter().find(|pair| pair.key == name);
        pair.map(|pair| String::from_utf8_lossy(&pair.value).into_owned())
    };
    assert_eq!(env("K").as_deref(), Some("one"));
    assert_eq!(env("ME"), bench.api.pod("a")["status"]["podIP"].as_str().map(str::to_string));
    assert_eq!(env("KUBERNETES_SERVICE_HOST").as_deref(), Some("10.43.0.1"));
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let file =
        bench.dir.path().join(format!("kubelet/pods/{uid}/volumes/kubernetes.io~configmap/cfg/k"));
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "one");
    bench.api.put("/api/v1/namespaces/ns/configmaps/m", map("two"));
    bench
        .api
        .until("the file follows", |_| std::fs::read_to_string(&file).is_ok_and(|t| t == "two"))
        .await;
    bench.stop().await;
}

#[tokio::test]
async fn a_volume_that_cannot_be_updated_does_not_stop_the_others() {
    let mut bench = Bench::new();
    let mut spec = one("Always");
    spec["volumes"] = json!([{"name": "cfg", "configMap": {"name": "m"}},
        {"name": "key", "secret": {"secretName": "s"}}]);
    let path = |kind: &str, name: &str| format!("/api/v1/namespaces/ns/{kind}/{name}");
    let object = |name: &str, data: Value| json!({"metadata": {"name": name, "namespace": "ns"}, "data": data});
    bench.api.put(&path("configmaps", "m"), object("m", json!({"k": "v"})));
    bench.api.put(&path("secrets", "s"), object("s", json!({"k": "b25l"})));
    let pod = bench.api.put_pod("a", spec);
    bench.until_ready("a").await;
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let volumes = bench.dir.path().join(format!("kubelet/pods/{uid}/volumes"));
    let key = volumes.join("kubernetes.io~secret/key/k");
    let has = |text: &str| std::fs::read_to_string(&key).is_ok_and(|known| known == text);
    assert!(has("one"));

    bench.api.remove(&path("configmaps", "m"));
    bench.api.put(&path("secrets", "s"), object("s", json!({"k": "dHdv"})));
    bench.api.until("the volume behind it follows", |_| has("two")).await;
    let text = "MountVolume.SetUp failed for volume \"cfg\" : configmap \"m\" not found";
    let event = ("FailedMount".to_string(), text.to_string());
    bench.api.until("a complaint", |api| api.events().contains(&event)).await;

    // The restarted container gets the existing files.
    bench.runtime.exit(&container_id(&bench.api.pod("a")), 1);
    bench
        .api
        .until("restarted", |api| {
            let status = api.pod("a")["status"]["containerStatuses"][0].clone();
            status["restartCount"] == 1 && status["ready"] == true
        })
        .await;
    assert!(volumes.join("kubernetes.io~configmap/cfg/k").exists());
    bench.stop().await;
}

#[tokio::test]
async fn failing_probes() {
    let mut bench = Bench::new();
    let probe = |threshold: i32| json!({"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": threshold});
    bench.runtime.set_exec(1, "no good");
    let mut spec = one("Always");
    spec["containers"][0]["readinessProbe"] = probe(1);
    bench.api.put_pod("unready", spec);
    bench.until_phase("unready", "Running").await;
    bench
        .api
        .until("unhealthy", |api| {
            api.events().contains(&("Unhealthy".into(), "Readiness probe failed: no good".into()))
        })
        .await;
    assert_eq!(condition(&bench.api.pod("unready"), "Ready"), "False");
    bench.runtime.set_exec(0, "");
    bench.until_ready("unready").await;

    bench.runtime.set_exec(1, "sick");
    let mut spec = one("Always");
    spec["containers"][0]["livenessProbe"] = probe(1);
    bench.api.put_pod("sick", spec);
    bench
        .api
        .until("restarted", |api| {
            api.pod("sick")["status"]["containerStatuses"][0]["restartCount"] == 1
        })
        .await;
    let killing = "Container c failed liveness probe, will be restarted";
    let killing = ("Killing".to_owned(), killing.to_owned());
    bench.api.until("an event of it", |api| api.events().contains(&killing)).await;
    bench.stop().await;
}

#[tokio::test]
async fn init_containers_run_first() {
    let mut bench = Bench::new();
    let mut spec = one("Always");
    spec["initContainers"] = json!([{"name": "i", "image": "img:1"}]);
    bench.api.put_pod("a", spec);
    let init_id = |api: &Api| {
        let id = api.pod("a")["status"]["initContainerStatuses"][0]["containerID"].clone();
        id.as_str().and_then(|id| id.rsplit('/').next()).map(str::to_string)
    };
    bench.api.until("init runs", |api| init_id(api).is_some()).await;
    assert_eq!(bench.api.pod("a")["status"]["phase"], "Pending");
    assert_eq!(bench.count("create_container"), 1);
    bench.runtime.exit(&init_id(&bench.api).expect("an id"), 0);
    bench.until_ready("a").await;
    assert_eq!(condition(&bench.api.pod("a"), "Initialized"), "True");
    bench.stop().await;
}

#[tokio::test]
async fn images_that_cannot_be_pulled() {
    let mut bench = Bench::new();
    bench.runtime.take_image("img:1");
    bench.api.put_pod("a", one("Always"));
    let waiting = |api: &Api| {
        let status = api.pod("a")["status"]["containerStatuses"][0].clone();
        status["state"]["waiting"]["reason"].as_str().unwrap_or_default().to_string()
    };
    bench
        .api
        .until("a reason", |api| {
            waiting(api) == "ErrImagePull" || waiting(api) == "ImagePullBackOff"
        })
        .await;
    assert_eq!(bench.api.pod("a")["status"]["phase"], "Pending");
    bench.until_events(&["Pulling"]).await;
    bench.api.mark_deleted("a", 0);
    bench.api.until("gone", |api| api.pod("a").is_null()).await;
    bench.stop().await;
}

const MANIFEST: &str = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  namespace: ns\nspec:\n  \
                        containers:\n  - name: c\n    image: img:1\n";

#[tokio::test]
async fn static_pods_have_mirrors() {
    let mut bench = Bench::new();
    let file = bench.dir.path().join("manifests/web.yaml");
    std::fs::write(&file, MANIFEST).expect("written");
    bench.until_ready("web-n1").await;
    let first = bench.api.pod("web-n1");
    assert!(first["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string());
    // The mirror is deleted: it is recreated, and the container is not touched.
    bench.api.remove("/api/v1/namespaces/ns/pods/web-n1");
    bench.until_ready("web-n1").await;
    assert_eq!(container_id(&first), container_id(&bench.api.pod("web-n1")));
    assert_eq!(bench.count("create_container"), 1);
    std::fs::remove_file(&file).expect("removed");
    bench.api.until("gone", |api| api.pod("web-n1").is_null()).await;
    bench.api.until("stopped", |_| bench.count("remove_pod_sandbox") == 1).await;
    bench.stop().await;
}

#[tokio::test]
async fn forced_deletion_and_orphans() {
    let mut bench = Bench::new();
    bench.api.put_pod("a", one("Always"));
    bench.until_ready("a").await;
    bench.api.remove("/api/v1/namespaces/ns/pods/a");
    bench.api.until("stopped", |_| bench.count("remove_pod_sandbox") == 1).await;
    bench.api.put_pod("b", one("Always"));
    bench.until_ready("b").await;
    bench.stop().await;
    // Deleted while no kubelet ran: the next one cleans up.
    bench.api.remove("/api/v1/namespaces/ns/pods/b");
    bench.start();
    bench.api.until("stopped", |_| bench.count("remove_pod_sandbox") == 2).await;
    bench.stop().await;
}

/// Replaces the resources of the pod's container, like the `resize` subresource.
fn resize(api: &Api, name: &str, resources: Value) {
    let mut pod = api.pod(name);
    let generation = pod["metadata"]["generation"].as_i64().unwrap_or(1) + 1;
    pod["metadata"]["generation"] = json!(generation);
    pod["spec"]["containers"][0]["resources"] = resources;
    api.put(&format!("/api/v1/namespaces/ns/pods/{name}"), pod);
}

/// Whether the status shows these requests, and no resize is in progress.
fn has_requests(pod: &Value, requests: &Value) -> bool {
    let status = &pod["status"]["containerStatuses"][0];
    let over =
        ["PodResizePending", "PodResizeInProgress"].iter().all(|c| condition(pod, c) == "none");
    status["allocatedResources"] == *requests
        && status["resources"]["requests"] == *requests
        && over
        && pod["status"]["observedGeneration"] == pod["metadata"]["generation"]
}

#[tokio::test]
async fn resources_change_in_place() {
    let mut bench = Bench::new();
    let mut spec = one("Always");
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": "100m", "memory": "10Mi"}});
    spec["containers"][0]["resizePolicy"] =
        json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    bench.api.put_pod("a", spec);
    bench.until_ready("a").await;
    let requests = json!({"cpu": "200m", "memory": "10Mi"});
    resize(&bench.api, "a", json!({"requests": requests}));
    bench.api.until("200m", |api| has_requests(&api.pod("a"), &requests)).await;
    assert_eq!(bench.count("update_container_resources"), 1);
    assert_eq!(bench.api.pod("a")["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(bench.api.pod("a")["status"]["allocatedResources"], requests);

    // The next kubelet knows the actuated resources: it has nothing to do.
    bench.stop().await;
    bench.start();
    let requests = json!({"cpu": "200m", "memory": "20Mi"});
    resize(&bench.api, "a", json!({"requests": requests}));
    bench
        .api
        .until("restarted with more memory", |api| {
            let pod = api.pod("a");
            has_requests(&pod, &requests)
                && pod["status"]["containerStatuses"][0]["restartCount"] == 1
        })
        .await;
    assert_eq!(bench.count("update_container_resources"), 1);
    bench.until_events(&["ResizeStarted", "ResizeCompleted"]).await;
    bench.stop().await;
}

#[tokio::test]
async fn a_resize_waits_for_room() {
    let mut bench = Bench::new();
    let asks = |cpu: &str| json!({"requests": {"cpu": cpu}});
    for (name, cpu) in [("a", "100m"), ("b", "200m")] {
        let mut spec = one("Always");
        spec["containers"][0]["resources"] = asks(cpu);
        bench.api.put_pod(name, spec);
        bench.until_ready(name).await;
    }
    let node = bench.api.get("/api/v1/nodes/n1").expect("a node");
    let all = node["status"]["allocatable"]["cpu"].as_str().expect("cpu").to_string();
    resize(&bench.api, "a", asks(&all));
    bench
        .api
        .until("deferred", |api| {
            let pod = api.pod("a");
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|c| c["type"] == "PodResizePending" && c["reason"] == "Deferred")
        })
        .await;
    let status = bench.api.pod("a")["status"].clone();
    assert_eq!(status["containerStatuses"][0]["allocatedResources"], json!({"cpu": "100m"}));
    assert_eq!(bench.count("update_container_resources"), 0);
    bench.api.mark_deleted("b", 0);
    bench.api.until("room", |api| has_requests(&api.pod("a"), &json!({"cpu": all}))).await;
    bench.stop().await;
}

#[tokio::test]
async fn a_force_deleted_pod_takes_no_room() {
    let mut bench = Bench::new();
    let node = |bench: &Bench| bench.api.get("/api/v1/nodes/n1").unwrap_or(Value::Null);
    bench.api.until("a node", |_| !node(&bench)["status"]["allocatable"]["cpu"].is_null()).await;
    let all = node(&bench)["status"]["allocatable"]["cpu"].clone();
    let mut spec = one("Always");
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": all}});
    bench.api.put_pod("old", spec.clone());
    bench.until_ready("old").await;
    // Its end takes time, because the runtime fails to stop it.
    bench.runtime.fail("stop_pod_sandbox", Some(cri::Error::Internal("busy".into())));
    bench.api.remove("/api/v1/namespaces/ns/pods/old");
    bench.api.put_pod("new", spec);
    bench.until_ready("new").await;
    bench.runtime.fail("stop_pod_sandbox", None);
    bench.stop().await;
}

#[tokio::test]
async fn an_unsupported_user_namespace_is_an_error() {
    let mut bench = Bench::new();
    let mut spec = one("Always");
    spec["hostUsers"] = json!(false);
    bench.api.put_pod("a", spec);
    bench
        .api
        .until("a complaint", |api| {
            api.events().iter().any(|(reason, message)| {
                reason == "FailedCreatePodSandBox" && message.contains("spec.hostUsers: false")
            })
        })
        .await;
    assert_eq!(bench.count("run_pod_sandbox"), 0);
    bench.stop().await;
}

#[tokio::test]
async fn a_pod_keeps_its_user_namespace() {
    let mut bench = Bench::new();
    bench.runtime.set_user_namespaces(true);
    let mut spec = one("Always");
    bench.api.put_pod("shared", spec.clone());
    spec["hostUsers"] = json!(false);
    bench.api.put_pod("a", spec.clone());
    bench.until_ready("a").await;
    bench.api.put_pod("b", spec);
    bench.until_ready("b").await;
    bench.until_ready("shared").await;
    let users = |bench: &Bench, pod: &str| {
        let id = container_id(&bench.api.pod(pod));
        let config = bench.runtime.container_config(&id).expect("a config");
        let security = config.linux.expect("there").security_context.expect("there");
        let users = security.namespace_options.expect("there").userns_options.expect("there");
        // All mounts have the same mappings.
        assert!(config.mounts.iter().all(|mount| mount.uid_mappings == users.uids));
        assert!(config.mounts.iter().all(|mount| mount.gid_mappings == users.gids));
        users
    };
    assert_eq!(users(&bench, "shared").mode(), cri::NamespaceMode::Node);
    assert_eq!(users(&bench, "shared").uids, []);
    let of_a = users(&bench, "a");
    assert_eq!(of_a.mode(), cri::NamespaceMode::Pod);
    let of_b = users(&bench, "b");
    for range in [&of_a.uids[0], &of_b.uids[0]] {
        assert!(range.host_id >= 65536 && range.host_id.is_multiple_of(65536), "{range:?}");
        assert_eq!((range.container_id, range.length), (0, 65536));
    }
    assert_ne!(of_a.uids, of_b.uids);
    // A restarted kubelet knows the mappings; they are removed with the pod.
    bench.stop().await;
    bench.start();
    bench.until_ready("b").await;
    let restarted = container_id(&bench.api.pod("b"));
    bench.runtime.exit(&restarted, 1);
    bench
        .api
        .until("b anew", |api| {
            let id = container_id(&api.pod("b"));
            id != restarted && !id.is_empty()
        })
        .await;
    bench.until_ready("b").await;
    assert_eq!(users(&bench, "b"), of_b);
    let uid = bench.api.pod("a")["metadata"]["uid"].as_str().unwrap_or_default().to_string();
    let file = bench.dir.path().join("kubelet/pods").join(uid).join("userns");
    assert!(file.exists());
    bench.api.mark_deleted("a", 0);
    bench.api.until("a gone", |api| api.get("/api/v1/namespaces/ns/pods/a").is_none()).await;
    assert!(!file.exists());
    bench.stop().await;
}

/// The pod's resources are not free before its sidecars have ended.
#[tokio::test]
async fn a_pod_is_not_over_while_a_sidecar_runs() {
    let mut bench = Bench::new();
    let mut spec = one("Never");
    spec["initContainers"] = json!([
        {"name": "s", "image": "img:1", "restartPolicy": "Always"},
        {"name": "i", "image": "img:1"}]);
    bench.api.put_pod("a", spec);
    let init = |api: &Api, at: usize| api.pod("a")["status"]["initContainerStatuses"][at].clone();
    let runs = |api: &Api| !init(api, 1)["state"]["running"].is_null();
    bench.api.until("the second runs", runs).await;
    let busy = || Some(cri::Error::Internal("busy".into()));
    bench.runtime.fail("stop_container", busy());
    bench.runtime.fail("stop_pod_sandbox", busy());
    let id = init(&bench.api, 1)["containerID"].clone();
    let id = id.as_str().and_then(|id| id.rsplit('/').next()).expect("an id");
    bench.runtime.exit(id, 1);
    let ended = |api: &Api| init(api, 1)["state"]["terminated"]["exitCode"] == 1;
    bench.api.until("it ended", ended).await;
    assert_eq!(bench.api.pod("a")["status"]["phase"], "Pending");
    bench.api.until("it is to stop", |_| bench.count("stop_pod_sandbox") > 0).await;
    assert_eq!(bench.api.pod("a")["status"]["phase"], "Pending");
    bench.runtime.fail("stop_container", None);
    bench.runtime.fail("stop_pod_sandbox", None);
    bench.until_phase("a", "Failed").await;
    assert!(init(&bench.api, 0)["state"]["running"].is_null());
    bench.stop().await;
}
