//! Static pods: manifests in a directory on this node, no API needed.
//!
//! In: files (YAML or JSON, one pod each), watched by inotify. Out: pods with upstream's names, uids and
//! annotations, so that mirrors can be matched.
//! Invariant: the same file gives the same uid, other content another uid.
//! Upstream: `pkg/kubelet/config/{file,common}.go`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::watch::FileWatch;
use k8s_openapi::api::core::v1::Pod;
use sha2::{Digest, Sha256};

use crate::names;

/// Where a static pod comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    File,
    Http,
}

/// Why a manifest is no pod.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("{0}")]
    Yaml(#[from] serde_saphyr::Error),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("expected a v1 Pod, found {0} {1}")]
    Kind(serde_json::Value, serde_json::Value),
    #[error("{0}: Required value")]
    Missing(&'static str),
}

/// How often files are read again without an inotify event (network file systems send none).
const RESCAN: Duration = Duration::from_secs(60);
/// An editor writes a file in steps: wait until the changes settle.
const SETTLE: Duration = Duration::from_millis(50);

/// Reads all manifests. An invalid file is logged and skipped.
pub fn read_all(path: &Path, node_name: &str) -> BTreeMap<String, Pod> {
    let mut files: Vec<PathBuf> = match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) if path.is_file() => vec![path.to_path_buf()],
        Err(_) => vec![],
    };
    files.sort_unstable();
    let mut out = BTreeMap::new();
    for file in files {
        let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with('.') || !file.is_file() {
            continue;
        }
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "failed to read the manifest");
                continue;
            }
        };
        match parse(&text, &file, node_name) {
            Ok(pod) => {
                out.insert(names::uid(&pod).to_string(), pod);
            }
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "failed to parse the manifest as a pod")
            }
        }
    }
    out
}

/// Parses a manifest as a pod of this node.
fn parse(text: &str, file: &Path, node_name: &str) -> Result<Pod, ManifestError> {
    let value = serde_saphyr::from_str(text)?;
    of_value(value, Source::File, &format!("file:{}", file.display()), node_name)
}

/// A pod of this node; `origin` is part of its uid.
pub fn of_value(
    value: serde_json::Value,
    source: Source,
    origin: &str,
    node_name: &str,
) -> Result<Pod, ManifestError> {
    if value["kind"] != "Pod" || value["apiVersion"] != "v1" {
        return Err(ManifestError::Kind(value["apiVersion"].clone(), value["kind"].clone()));
    }
    let mut pod: Pod = serde_json::from_value(value)?;
    if pod.spec.as_ref().is_none_or(|spec| spec.containers.is_empty()) {
        return Err(ManifestError::Missing("spec.containers"));
    }
    if pod.metadata.name.as_deref().unwrap_or_default().is_empty() {
        return Err(ManifestError::Missing("metadata.name"));
    }
    of_node(&mut pod, source, origin, node_name)?;
    Ok(pod)
}

/// A pod of the kubelet's own process as a static pod of this node: the same content has the same uid.
pub fn own_pod(mut pod: Pod, node_name: &str) -> serde_json::Result<Pod> {
    of_node(&mut pod, Source::File, "process", node_name)?;
    Ok(pod)
}

/// Manifests and the pods of the process. A manifest's pod replaces one of the process that has its name.
pub fn with_own(mut pods: BTreeMap<String, Pod>, own: &[Pod]) -> BTreeMap<String, Pod> {
    for pod in own {
        let same = |other: &Pod| {
            names::name(other) == names::name(pod)
                && names::namespace(other) == names::namespace(pod)
        };
        if !pods.values().any(same) {
            pods.insert(names::uid(pod).to_string(), pod.clone());
        }
    }
    pods
}

/// Gives a pod its name on this node, its uid, annotations and defaults.
fn of_node(pod: &mut Pod, source: Source, origin: &str, node_name: &str) -> serde_json::Result<()> {
    let given = pod.metadata.name.clone().unwrap_or_default();
    let mut digest = Sha256::new();
    digest.update(format!("host:{node_name}\n{origin}\n"));
    digest.update(serde_json::to_vec(&pod)?);
    let hash: String =
        digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    pod.metadata.uid.get_or_insert_with(|| hash.clone());
    pod.metadata.name = Some(format!("{given}-{}", node_name.to_lowercase()));
    pod.metadata.namespace.get_or_insert_with(|| "default".into());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(names::CONFIG_HASH.into(), hash);
    let told = match source {
        Source::File => "file",
        Source::Http => "http",
    };
    annotations.insert(names::CONFIG_SOURCE.into(), told.into());
    annotations.insert(names::CONFIG_SEEN.into(), base::clock::now().to_string());
    set_defaults(pod, node_name);
    Ok(())
}

/// Sets the defaults of the API server that the kubelet relies on.
fn set_defaults(pod: &mut Pod, node_name: &str) {
    let Some(spec) = &mut pod.spec else { return };
    spec.node_name = Some(node_name.into());
    let text = |slot: &mut Option<String>, value: &str| {
        slot.get_or_insert_with(|| value.to_string());
    };
    text(&mut spec.restart_policy, "Always");
    text(&mut spec.dns_policy, "ClusterFirst");
    text(&mut spec.scheduler_name, "default-scheduler");
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.enable_service_links.get_or_insert(true);
    spec.security_context.get_or_insert_default();
    // Upstream: static pods tolerate every NoExecute taint.
    let tolerations = spec.tolerations.get_or_insert_default();
    if !tolerations.iter().any(|t| t.key.is_none() && t.effect.as_deref() == Some("NoExecute")) {
        tolerations.push(k8s_openapi::api::core::v1::Toleration {
            operator: Some("Exists".into()),
            effect: Some("NoExecute".into()),
            ..Default::default()
        });
    }
    let all = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    for container in all {
        text(&mut container.termination_message_path, "/dev/termination-log");
        text(&mut container.termination_message_policy, "File");
        let image = container.image.clone().unwrap_or_default();
        let latest = image.ends_with(":latest") || !image.contains(':');
        text(&mut container.image_pull_policy, if latest { "Always" } else { "IfNotPresent" });
        for port in container.ports.iter_mut().flatten() {
            text(&mut port.protocol, "TCP");
        }
    }
    pod.status.get_or_insert_default().phase.get_or_insert_with(|| "Pending".into());
}

/// The mirror pod to create in the API.
pub fn mirror_of(pod: &Pod, node_uid: Option<&str>, node_name: &str) -> Pod {
    let mut mirror = pod.clone();
    let hash = names::annotation(pod, names::CONFIG_HASH).unwrap_or_default().to_string();
    mirror.metadata.uid = None;
    mirror.metadata.resource_version = None;
    mirror.metadata.annotations.get_or_insert_default().insert(names::CONFIG_MIRROR.into(), hash);
    if let Some(uid) = node_uid {
        mirror.metadata.owner_references = Some(vec![machinery::OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: node_name.into(),
            uid: uid.into(),
            controller: Some(true),
            ..Default::default()
        }]);
    }
    mirror.status = None;
    mirror
}

/// Calls `changed` with all static pods, now and after every change. Never returns.
pub async fn watch(path: PathBuf, node_name: String, changed: impl Fn(BTreeMap<String, Pod>)) {
    let open = || FileWatch::directory_and_writes(&path).ok();
    let mut events = open();
    let mut last: Option<BTreeMap<String, Pod>> = None;
    loop {
        let now = read_all(&path, &node_name);
        let same = last.as_ref().is_some_and(|last| last.keys().eq(now.keys()));
        if !same {
            changed(now.clone());
            last = Some(now);
        }
        match &events {
            Some(watcher) => {
                tokio::select! {
                    () = watcher.changed() => tokio::time::sleep(SETTLE).await,
                    () = tokio::time::sleep(RESCAN) => {}
                }
            }
            // The directory may appear later.
            None => {
                tokio::time::sleep(Duration::from_secs(5)).await;
                events = open();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  namespace: kube-system\n\
                       spec:\n  containers:\n  - name: c\n    image: nginx\n";

    #[test]
    fn manifests_become_pods_of_this_node() {
        let pod = parse(POD, Path::new("/m/web.yaml"), "Node1").expect("a pod");
        assert_eq!(names::name(&pod), "web-node1");
        assert_eq!(names::namespace(&pod), "kube-system");
        assert!(names::is_static(&pod) && names::uid(&pod).len() == 32);
        let again = parse(POD, Path::new("/m/web.yaml"), "Node1").expect("a pod");
        assert_eq!(names::uid(&pod), names::uid(&again));
        let other = parse(&POD.replace("nginx", "nginx:2"), Path::new("/m/web.yaml"), "Node1");
        assert_ne!(names::uid(&pod), names::uid(&other.expect("a pod")));
        let mirror = mirror_of(&pod, Some("node-uid"), "Node1");
        assert!(names::is_mirror(&mirror) && mirror.metadata.uid.is_none());
        let own = own_pod(serde_saphyr::from_str(POD).expect("a pod"), "Node1").expect("a pod");
        assert!(names::is_static(&own) && names::uid(&own) != names::uid(&pod));
        let none = with_own(BTreeMap::new(), std::slice::from_ref(&own));
        assert!(none.keys().eq([names::uid(&own)]));
        let manifest = BTreeMap::from([(names::uid(&pod).to_string(), pod.clone())]);
        assert!(with_own(manifest, &[own]).keys().eq([names::uid(&pod)]), "a manifest goes first");
        assert!(parse("kind: Service\napiVersion: v1\n", Path::new("x"), "n").is_err());
    }

    #[tokio::test]
    async fn changes_are_detected() {
        let dir = tempfile::tempdir().expect("a directory");
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let watching = watch(dir.path().into(), "n".into(), move |pods| {
            let _ = tell.send(pods.len());
        });
        let test = async {
            let mut next = async || testkit::wait::soon("a change", told.recv()).await;
            assert_eq!(next().await, Some(0));
            std::fs::write(dir.path().join("a.yaml"), POD).expect("written");
            assert_eq!(next().await, Some(1));
            std::fs::remove_file(dir.path().join("a.yaml")).expect("removed");
            assert_eq!(next().await, Some(0));
        };
        tokio::select! {
            () = watching => panic!("it never ends"),
            () = test => {}
        }
    }
}
