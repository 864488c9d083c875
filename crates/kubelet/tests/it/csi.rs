//! Volumes of CSI drivers, from a driver's registration to the last pod's end.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::driver::{DEVICE, Driver, EXPANDS, NAME, STAGES};
use crate::pods::{Bench, container_id, one};

const CSI_NODE: &str = "/apis/storage.k8s.io/v1/csinodes/n1";
const NODE: &str = "/api/v1/nodes/n1";
const UNIQUE: &str = "kubernetes.io/csi/fake.csi.example.com^h1";

fn kubelet(bench: &Bench) -> PathBuf {
    bench.dir.path().join("kubelet")
}

fn put_driver(bench: &Bench, mut spec: Value) {
    if spec["volumeLifecycleModes"].is_null() {
        // The API's default.
        spec["volumeLifecycleModes"] = json!(["Persistent"]);
    }
    let object = json!({"metadata": {"name": NAME}, "spec": spec});
    bench.api.put(&format!("/apis/storage.k8s.io/v1/csidrivers/{NAME}"), object);
}

/// Puts a claim with its volume, and returns the spec of a pod that uses it.
fn put_claim(bench: &Bench, csi: Value) -> Value {
    let mut source = json!({"driver": NAME, "volumeHandle": "h1"});
    for (key, value) in csi.as_object().into_iter().flatten() {
        source[key] = value.clone();
    }
    let volume = json!({"metadata": {"name": "pv1"}, "spec": {"csi": source,
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}}});
    bench.api.put("/api/v1/persistentvolumes/pv1", volume);
    let claim = json!({"metadata": {"name": "claim", "namespace": "ns"},
        "spec": {"volumeName": "pv1"}, "status": {"capacity": {"storage": "1Gi"}}});
    bench.api.put("/api/v1/namespaces/ns/persistentvolumeclaims/claim", claim);
    with_volume(json!({"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}))
}

fn with_volume(volume: Value) -> Value {
    let mut spec = one("Always");
    spec["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    spec["volumes"] = json!([volume]);
    spec
}

async fn registered(bench: &Bench, driver: &Driver) {
    bench.api.until("the registry", |_| kubelet(bench).join("plugins_registry").exists()).await;
    driver.register();
    bench.api.until("registered", |_| driver.told().contains(&(true, String::new()))).await;
}

#[tokio::test]
async fn drivers_register_and_unregister() {
    let mut bench = Bench::new();
    bench.api.until("a CSINode", |api| api.get(CSI_NODE).is_some()).await;
    let empty = bench.api.get(CSI_NODE).expect("an object");
    assert_eq!(empty["metadata"]["ownerReferences"][0]["kind"], "Node");
    let driver = Driver::new(&kubelet(&bench), &[]);
    driver.refuse("NodeGetInfo", Some("13"));
    bench.api.until("the registry", |_| kubelet(&bench).join("plugins_registry").exists()).await;
    driver.register();
    bench.api.until("refused", |_| !driver.told().is_empty()).await;
    let text = "RegisterPlugin error -- plugin registration failed with err: rpc error: code = \
                Internal desc = refused";
    assert_eq!(driver.told()[0], (false, text.to_string()));
    driver.refuse("NodeGetInfo", None);
    bench.api.until("registered", |_| driver.told().contains(&(true, String::new()))).await;
    let expected = json!([{"name": NAME, "nodeID": "node-7",
        "topologyKeys": ["topology.example.com/zone"], "allocatable": {"count": 5}}]);
    assert_eq!(bench.api.get(CSI_NODE).expect("an object")["spec"]["drivers"], expected);
    let node = bench.api.get(NODE).expect("a node");
    assert_eq!(node["metadata"]["labels"]["topology.example.com/zone"], "z1");
    let ids = format!("{{\"{NAME}\":\"node-7\"}}");
    assert_eq!(node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"], ids);

    // A kubelet that stops removes nothing.
    bench.stop().await;
    assert_eq!(bench.api.get(CSI_NODE).expect("an object")["spec"]["drivers"], expected);
    bench.start();
    bench.api.until("again", |_| driver.told().len() >= 3).await;
    driver.leave();
    bench
        .api
        .until("the driver is removed", |api| {
            api.get(CSI_NODE).is_some_and(|one| one["spec"]["drivers"] == json!([]))
        })
        .await;
    bench
        .api
        .until("its id is removed", |api| {
            let node = api.get(NODE).unwrap_or_default();
            node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"].is_null()
        })
        .await;
    bench.stop().await;
}

#[tokio::test]
async fn a_claims_volume_is_attached_staged_published_and_unmounted() {
    let mut bench = Bench::new();
    let driver = Driver::new(&kubelet(&bench), &[STAGES]);
    put_driver(&bench, json!({"attachRequired": true, "podInfoOnMount": true}));
    let secret = |name: &str| json!({"metadata": {"name": name}, "data": {"key": "djE="}});
    bench.api.put("/api/v1/namespaces/csi/secrets/one", secret("one"));
    let reference = json!({"namespace": "csi", "name": "one"});
    let spec =
        put_claim(&bench, json!({"nodeStageSecretRef": reference, "volumeAttributes": {"a": "b"}}));
    registered(&bench, &driver).await;
    bench.api.put_pod("a", spec.clone());
    bench
        .api
        .until("in use", |api| {
            api.get(NODE).is_some_and(|node| node["status"]["volumesInUse"] == json!([UNIQUE]))
        })
        .await;
    assert_eq!(driver.calls(), Vec::<String>::new(), "it is not attached yet");
    let id = attachment_id();
    let attachment = json!({"metadata": {"name": id}, "status": {"attached": true,
        "attachmentMetadata": {"device": "/dev/x"}}});
    bench.api.put(&format!("/apis/storage.k8s.io/v1/volumeattachments/{id}"), attachment);
    let attached = json!({"status": {"volumesAttached": [{"name": UNIQUE, "devicePath": ""}]}});
    bench.api.change(NODE, &attached);
    bench.until_ready("a").await;
    assert_eq!(driver.calls(), ["StageVolume", "PublishVolume"]);
    let stage = driver.last_stage();
    assert_eq!((stage.id.as_str(), stage.secrets["key"].as_str()), ("h1", "v1"));
    assert_eq!(stage.publish_context["device"], "/dev/x");
    let publish = driver.last_publish();
    assert_eq!(publish.staged, stage.path);
    assert_eq!(publish.context["a"], "b");
    assert_eq!(publish.context["csi.storage.k8s.io/pod.name"], "a");
    assert_eq!(publish.context["csi.storage.k8s.io/ephemeral"], "false");
    let config = bench.runtime.container_config(&container_id(&bench.api.pod("a")));
    let config = config.expect("a container");
    assert!(config.mounts.iter().any(|mount| mount.host_path == publish.path), "{config:?}");

    // Another pod shares the staged volume. A restarted kubelet repeats the calls.
    bench.api.put_pod("b", spec);
    bench.until_ready("b").await;
    bench.stop().await;
    bench.start();
    bench.api.until("asked again", |_| driver.calls().len() >= 6).await;
    let calls = driver.calls();
    assert_eq!(calls.iter().filter(|call| *call == "StageVolume").count(), 2, "{calls:?}");

    bench.api.mark_deleted("a", 1);
    bench.api.until("gone", |api| api.pod("a").is_null()).await;
    let calls = driver.calls();
    assert!(!calls.contains(&"UnstageVolume".into()), "b still uses it: {calls:?}");
    // While the volume cannot be unpublished, the pod stays.
    driver.refuse("NodeUnpublishVolume", Some("14"));
    bench.api.mark_deleted("b", 1);
    bench.api.until("refused", |_| driver.calls().len() > calls.len() + 1).await;
    assert!(!bench.api.pod("b").is_null());
    driver.refuse("NodeUnpublishVolume", None);
    bench.api.until("gone", |api| api.pod("b").is_null()).await;
    unstaged(&bench, &driver).await;
    bench
        .api
        .until("not in use", |api| {
            api.get(NODE).is_some_and(|node| node["status"]["volumesInUse"].is_null())
        })
        .await;
    let place = kubelet(&bench).join("plugins/kubernetes.io/csi").join(NAME);
    let is_empty = |_: &crate::api::Api| std::fs::read_dir(&place).is_ok_and(|d| d.count() == 0);
    bench.api.until("its files are gone", is_empty).await;
    bench.stop().await;
}

#[tokio::test]
async fn a_volume_that_was_staged_and_never_published_is_unstaged() {
    // A final error, and one after which the driver may still have published.
    for code in ["13", "4"] {
        let mut bench = Bench::new();
        let driver = Driver::new(&kubelet(&bench), &[STAGES]);
        put_driver(&bench, json!({"attachRequired": false}));
        let spec = put_claim(&bench, json!({}));
        registered(&bench, &driver).await;
        driver.refuse("NodePublishVolume", Some(code));
        bench.api.put_pod("a", spec);
        let calls = |call: &str| driver.calls().iter().filter(|one| *one == call).count();
        bench.api.until("it tries again", |_| calls("PublishVolume") > 1).await;
        assert_eq!(calls("UnstageVolume"), 0, "the pod still needs it: {:?}", driver.calls());
        bench.api.mark_deleted("a", 1);
        bench.api.until("gone", |api| api.pod("a").is_null()).await;
        assert_eq!(driver.calls().last().map(String::as_str), Some("UnstageVolume"));
        assert_eq!(calls("UnstageVolume"), 1, "{:?}", driver.calls());
        let place = kubelet(&bench).join("plugins/kubernetes.io/csi").join(NAME);
        assert_eq!(std::fs::read_dir(place).expect("a directory").count(), 0);
        bench.stop().await;
    }
}

/// Waits until UnstageVolume is the driver's last call.
async fn unstaged(bench: &Bench, driver: &Driver) {
    let is_last = |calls: Vec<String>| calls.last().is_some_and(|call| call == "UnstageVolume");
    bench.api.until("unstaged", |_| is_last(driver.calls())).await;
}

/// The attach-detach controller's name of the object.
fn attachment_id() -> String {
    use std::fmt::Write;
    let digest = <sha2::Sha256 as sha2::Digest>::digest(format!("h1{NAME}n1"));
    digest.iter().fold("csi-".to_string(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[tokio::test]
async fn an_inline_volume() {
    let mut bench = Bench::new();
    let driver = Driver::new(&kubelet(&bench), &[STAGES]);
    let volume = json!({"name": "data", "csi": {"driver": NAME, "readOnly": true,
        "volumeAttributes": {"size": "1"}}});
    bench.api.put_pod("a", with_volume(volume));
    let told = |text: &'static str| {
        move |api: &crate::api::Api| {
            api.events().iter().any(|event| event.0 == "FailedMount" && event.1.contains(text))
        }
    };
    bench
        .api
        .until(
            "no object",
            told("volume mode \"Ephemeral\" not supported by driver fake.csi.example.com (no CSIDriver object)"),
        )
        .await;
    put_driver(
        &bench,
        json!({"attachRequired": false, "podInfoOnMount": true,
            "volumeLifecycleModes": ["Ephemeral"], "tokenRequests": [{"audience": "aud"}]}),
    );
    bench
        .api
        .until(
            "no driver",
            told(
                "driver name fake.csi.example.com not found in the list of registered CSI drivers",
            ),
        )
        .await;
    registered(&bench, &driver).await;
    bench.until_ready("a").await;
    let publish = driver.last_publish();
    assert_eq!(driver.calls(), ["PublishVolume"], "nothing is staged");
    assert!(publish.id.starts_with("csi-") && publish.read_only, "{publish:?}");
    assert_eq!(publish.context["csi.storage.k8s.io/ephemeral"], "true");
    assert_eq!(
        publish.context["csi.storage.k8s.io/serviceAccount.tokens"],
        r#"{"aud":{"expirationTimestamp":"2126-01-01T00:00:00Z","token":"a-token"}}"#
    );
    let node = bench.api.get(NODE).expect("a node");
    assert!(node["status"]["volumesInUse"].is_null(), "it needs no attaching");

    // A pod is deleted while no kubelet runs: the next one unmounts its volume.
    bench.stop().await;
    bench.runtime.exit(&container_id(&bench.api.pod("a")), 0);
    bench.api.remove("/api/v1/namespaces/ns/pods/a").expect("a pod");
    bench.start();
    bench.api.until("given back", |_| driver.calls().len() == 2).await;
    assert_eq!(driver.calls()[1], "UnpublishVolume");
    bench
        .api
        .until("its files are gone", |_| {
            std::fs::read_dir(kubelet(&bench).join("pods")).is_ok_and(|d| d.count() == 0)
        })
        .await;
    bench.stop().await;
}

/// The path of the container's device, with its permissions.
fn device(bench: &Bench, pod: &str) -> Option<(PathBuf, String, String)> {
    let config = bench.runtime.container_config(&container_id(&bench.api.pod(pod)))?;
    let device = config.devices.first()?;
    let host = PathBuf::from(&device.host_path);
    Some((host, device.container_path.clone(), device.permissions.clone()))
}

#[tokio::test]
async fn a_claims_device_reaches_the_container() {
    use std::os::unix::fs::MetadataExt;
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let mut bench = Bench::new();
    let driver = Driver::new(&kubelet(&bench), &[STAGES, EXPANDS]);
    put_driver(&bench, json!({"attachRequired": false, "podInfoOnMount": true}));
    let mut spec = put_claim(&bench, json!({"fsType": "ext4"}));
    let block = json!({"spec": {"volumeMode": "Block", "capacity": {"storage": "2Gi"}}});
    bench.api.change("/api/v1/persistentvolumes/pv1", &block);
    registered(&bench, &driver).await;
    bench.api.put_pod("wrong", spec.clone());
    bench
        .api
        .until("a mount of it is refused", |api| {
            let text = "volume data has volumeMode Block, but is specified in volumeMounts";
            api.events().iter().any(|event| event.1.contains(text))
        })
        .await;
    bench.api.mark_deleted("wrong", 1);
    spec["containers"][0].as_object_mut().expect("an object").remove("volumeMounts");
    spec["containers"][0]["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/xvda"}]);
    bench.api.put_pod("a", spec.clone());
    bench.until_ready("a").await;
    let (stage, publish) = (driver.last_stage(), driver.last_publish());
    let plugin = kubelet(&bench).join("plugins/kubernetes.io/csi/volumeDevices");
    assert_eq!(PathBuf::from(&stage.path), plugin.join("staging/pv1"));
    assert_eq!(publish.staged, stage.path);
    for wanted in [&stage.wanted, &publish.wanted] {
        let wanted = wanted.clone().unwrap_or_default();
        assert!(wanted.block.is_some() && wanted.mount.is_none(), "{wanted:?}");
    }
    assert_eq!(publish.context["csi.storage.k8s.io/pod.name"], "a");
    let (link, inside, permissions) = device(&bench, "a").expect("a device");
    assert!(link.ends_with("volumeDevices/kubernetes.io~csi/pv1"), "{link:?}");
    assert_eq!(std::fs::read_link(&link).expect("a link"), PathBuf::from(&publish.path));
    let number = std::fs::metadata(&link).expect("a device").rdev();
    assert_eq!(number, nix::sys::stat::makedev(DEVICE.0, DEVICE.1));
    assert_eq!((inside.as_str(), permissions.as_str()), ("/dev/xvda", "mrw"));
    bench
        .api
        .until("events", |api| {
            let has = |text: &str| api.events().iter().any(|event| event.1.contains(text));
            has("MapVolume.MapPodDevice succeeded for volume \"pv1\" volumeMapPath")
                && has("MountVolume.NodeExpandVolume succeeded for volume \"pv1\" n1")
        })
        .await;

    // Another pod may only read; a restarted kubelet unmounts the first one's volume.
    spec["volumes"][0]["persistentVolumeClaim"]["readOnly"] = json!(true);
    bench.api.put_pod("b", spec);
    bench.until_ready("b").await;
    assert_eq!(device(&bench, "b").expect("a device").2, "r");
    assert_eq!(driver.calls().iter().filter(|call| *call == "StageVolume").count(), 1);
    bench.stop().await;
    bench.start();
    bench.api.mark_deleted("a", 1);
    bench.api.until("gone", |api| api.pod("a").is_null()).await;
    assert!(!driver.calls().contains(&"UnstageVolume".into()), "b still uses it");
    bench.api.mark_deleted("b", 1);
    bench.api.until("gone", |api| api.pod("b").is_null()).await;
    unstaged(&bench, &driver).await;
    let has_files = |one: std::fs::DirEntry| {
        std::fs::read_dir(one.path()).is_ok_and(|mut files| files.next().is_some())
    };
    bench
        .api
        .until("its files are gone", |_| {
            !std::fs::read_dir(&plugin).expect("a directory").flatten().any(has_files)
        })
        .await;
    bench.stop().await;
}

#[tokio::test]
async fn a_volume_that_grew_is_expanded() {
    let mut bench = Bench::new();
    let driver = Driver::new(&kubelet(&bench), &[STAGES, EXPANDS]);
    put_driver(&bench, json!({"attachRequired": false}));
    let spec = put_claim(&bench, json!({}));
    let grown = json!({"spec": {"capacity": {"storage": "2Gi"}}});
    bench.api.change("/api/v1/persistentvolumes/pv1", &grown);
    registered(&bench, &driver).await;
    bench.api.put_pod("a", spec);
    bench.until_ready("a").await;
    let claim = "/api/v1/namespaces/ns/persistentvolumeclaims/claim";
    bench
        .api
        .until("the claim shows the new size", |api| {
            api.get(claim).is_some_and(|one| one["status"]["capacity"]["storage"] == "2Gi")
        })
        .await;
    assert_eq!(driver.calls()[..3], ["StageVolume", "PublishVolume", "ExpandVolume"]);
    bench
        .api
        .until("an event", |api| {
            let text = "MountVolume.NodeExpandVolume succeeded for volume \"pv1\" n1";
            api.events().iter().any(|event| event.1 == text)
        })
        .await;
    bench.stop().await;
}
