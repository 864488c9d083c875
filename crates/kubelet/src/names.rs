//! Names that the kubelet writes into the runtime and on disk, so that a restarted kubelet can read
//! them back. All are upstream's.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod};

pub const POD_NAME: &str = "io.kubernetes.pod.name";
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub const POD_UID: &str = "io.kubernetes.pod.uid";
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
pub const TERMINATION_PATH: &str = "io.kubernetes.container.terminationMessagePath";
pub const TERMINATION_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
pub const GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";

/// `file` for static pods; absent or `api` for all others.
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

pub fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

pub fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

/// `web-0_default(uid)`, a pod's name in messages.
pub fn full(pod: &Pod) -> String {
    format!("{}_{}({})", name(pod), namespace(pod), uid(pod))
}

pub fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

pub fn is_static(pod: &Pod) -> bool {
    annotation(pod, CONFIG_SOURCE).is_some_and(|source| source != "api")
}

pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, CONFIG_MIRROR).is_some()
}

/// `<logs>/<ns>_<name>_<uid>`
pub fn log_directory(logs: &Path, pod: &Pod) -> PathBuf {
    logs.join(format!("{}_{}_{}", namespace(pod), name(pod), uid(pod)))
}

/// `<container>/<attempt>.log`, below the pod's directory.
pub fn log_file(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

/// A container is replaced when this changes: only name and image count, as other fields are immutable
/// or applied in place.
pub fn container_hash(container: &Container) -> String {
    let mut text = String::new();
    if let Some(image) = container.image.as_deref().filter(|image| !image.is_empty()) {
        text.push_str(&format!("\"image\":{},", serde_json::Value::from(image)));
    }
    let text = format!("{{{text}\"name\":{}}}", serde_json::Value::from(container.name.as_str()));
    format!("{:x}", fnv32a(text.as_bytes()))
}

fn fnv32a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes() {
        assert_eq!(fnv32a(b"foobar"), 0xbf9c_f968);
        let a = Container { name: "a".into(), image: Some("x".into()), ..Container::default() };
        let mut b = a.clone();
        b.args = Some(vec!["y".into()]);
        assert_eq!(container_hash(&a), container_hash(&b));
        b.image = Some("z".into());
        assert_ne!(container_hash(&a), container_hash(&b));
    }
}
