//! Volumes that are paths of the node: the checks of their types, and the events of failures.

use serde_json::{Value, json};

use crate::pods::{Bench, container_id, one};

/// The spec of a pod whose container mounts this volume.
fn with_volume(mut volume: Value) -> Value {
    let mut spec = one("Always");
    spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    volume["name"] = "v".into();
    spec["volumes"] = json!([volume]);
    spec
}

fn of_host(path: &str, kind: &str) -> Value {
    with_volume(json!({"hostPath": {"path": path, "type": kind}}))
}

/// The spec of a pod with a claim bound to a volume of this kind.
fn of_claim(bench: &Bench, name: &str, volume: Value) -> Value {
    let mut spec = json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}});
    for (key, value) in volume.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
    let volume = json!({"metadata": {"name": name}, "spec": spec});
    bench.api.put(&format!("/api/v1/persistentvolumes/{name}"), volume);
    let claim =
        json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"volumeName": name}});
    bench.api.put(&format!("/api/v1/namespaces/ns/persistentvolumeclaims/{name}"), claim);
    with_volume(json!({"persistentVolumeClaim": {"claimName": name}}))
}

async fn told(bench: &Bench, reason: &str, message: &str) {
    let expected = (reason.to_owned(), message.to_owned());
    bench.api.until(message, |api| api.events().contains(&expected)).await;
}

fn mounts(bench: &Bench, pod: &str, path: &str) -> bool {
    let config = bench.runtime.container_config(&container_id(&bench.api.pod(pod)));
    config.is_some_and(|config| config.mounts.iter().any(|mount| mount.host_path == path))
}

#[tokio::test]
async fn host_paths_match_their_type() {
    let mut bench = Bench::new();
    let dir = bench.dir.path().join("host");
    let dir = dir.display().to_string();
    let cases = [
        ("char", "/dev/null", "CharDevice", None),
        ("not-block", "/dev/null", "BlockDevice", Some("a block device")),
        ("not-char", "/dev", "CharDevice", Some("a character device")),
        ("not-file", "/dev/null", "File", Some("a file")),
        ("not-dir", "/dev/null", "Directory", Some("a directory")),
        ("made", &dir, "DirectoryOrCreate", None),
        ("not-socket", "/dev", "Socket", Some("a socket file")),
        ("any", "/dev/null", "", None),
    ];
    for (name, path, kind, expected) in cases {
        bench.api.put_pod(name, of_host(path, kind));
        match expected {
            None => {
                bench.until_ready(name).await;
                assert!(mounts(&bench, name, path), "{name}");
            }
            Some(what) => {
                let why = format!("hostPath type check failed: {path} is not {what}");
                let text = format!("MountVolume.SetUp failed for volume \"v\" : {why}");
                told(&bench, "FailedMount", &text).await;
            }
        }
    }
    bench.stop().await;
}

#[tokio::test]
async fn persistent_volumes_of_paths() {
    let mut bench = Bench::new();
    let dir = bench.dir.path().join("there");
    std::fs::create_dir(&dir).expect("a directory");
    let (dir, none) = (dir.display().to_string(), bench.dir.path().join("none"));
    let none = none.display().to_string();
    let failed = |pv: &str, step: &str, why: &str| {
        format!("MountVolume.{step} failed for volume {pv:?} : {why}")
    };

    let host = |path: &str, kind: &str| json!({"hostPath": {"path": path, "type": kind}});
    let spec = of_claim(&bench, "wrong", host("/dev/null", "Directory"));
    bench.api.put_pod("wrong", spec);
    let why = "hostPath type check failed: /dev/null is not a directory";
    told(&bench, "FailedMount", &failed("wrong", "SetUp", why)).await;
    let spec = of_claim(&bench, "right", host(&dir, "Directory"));
    bench.api.put_pod("right", spec);
    bench.until_ready("right").await;
    assert!(mounts(&bench, "right", &dir));

    // Only for the built-in provisioner the kubelet creates the directory.
    let local = |path: &str| json!({"local": {"path": path}});
    let spec = of_claim(&bench, "absent", local(&none));
    bench.api.put_pod("absent", spec);
    let why = format!("path {none:?} does not exist");
    told(&bench, "FailedMount", &failed("absent", "NewMounter initialization", &why)).await;
    let spec = of_claim(&bench, "char", local("/dev/null"));
    bench.api.put_pod("char", spec);
    let why = "only directory and block device are supported";
    told(&bench, "FailedMount", &failed("char", "NewMounter initialization", why)).await;
    let spec = of_claim(&bench, "ours", local(&none));
    let ours = json!({"metadata": {"annotations":
        {"pv.kubernetes.io/provisioned-by": "decapod.io/local-path"}}});
    bench.api.change("/api/v1/persistentvolumes/ours", &ours);
    bench.api.put_pod("ours", spec);
    bench.until_ready("ours").await;

    // A hostPath cannot be a block device.
    let mut spec = of_claim(
        &bench,
        "block",
        json!({"volumeMode": "Block",
        "hostPath": {"path": "/dev/null"}}),
    );
    spec["containers"][0]["volumeMounts"] = json!(null);
    spec["containers"][0]["volumeDevices"] = json!([{"name": "v", "devicePath": "/dev/v"}]);
    bench.api.put_pod("block", spec);
    let text = "MapVolume.FindMapperPluginBySpec failed to find BlockVolumeMapper plugin. Volume plugin is nil. for volume \"block\" ";
    told(&bench, "FailedMapVolume", text).await;
    bench.stop().await;
}
