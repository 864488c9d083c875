//! Removes this node's pods from another container runtime.
//!
//! In: the data directory, which has the runtime's endpoint. Out: its pods are removed. A pod is ours if
//! the kubelet made a directory for it here: others may use the same runtime.

use std::path::Path;

use anyhow::{Context, Result};
use base::task::Tasks;
use cri::{PodSandbox, RuntimeService};
use runtime::backend::remote::{Endpoints, Remote};

/// The message to print; `None` for a node with the embedded runtime.
pub async fn remove_pods(data_dir: &Path) -> Result<Option<String>> {
    let Some(endpoints) = Endpoints::of_cluster(data_dir)? else { return Ok(None) };
    let at = &endpoints.runtime;
    let remote = match Remote::open(&endpoints, Tasks::new("uninstall")).await {
        Ok(remote) => remote,
        // The runtime may have been removed before.
        Err(error) => return Ok(Some(format!("pods in {at} were not removed: {error}"))),
    };
    let pods = data_dir.join("kubelet/pods");
    let all = remote.list_pod_sandbox(None).await?;
    let ours: Vec<PodSandbox> = all.into_iter().filter(|sandbox| is_of(&pods, sandbox)).collect();
    for PodSandbox { id, .. } in &ours {
        let failed = || format!("cannot remove the pod sandbox {id}");
        remote.stop_pod_sandbox(id).await.with_context(failed)?;
        remote.remove_pod_sandbox(id).await.with_context(failed)?;
    }
    Ok(Some(format!("removed {} pod sandboxes in {at}; its images and network stay", ours.len())))
}

fn is_of(pods: &Path, sandbox: &PodSandbox) -> bool {
    let uid = sandbox.metadata.as_ref().map_or("", |meta| meta.uid.as_str());
    // It must be a name, not a path.
    !matches!(uid, "" | "." | "..") && !uid.contains('/') && pods.join(uid).is_dir()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pods_with_a_directory_are_ours() {
        let pods = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(pods.path().join("u1")).expect("creates");
        let check = |uid: &str, expected: bool| {
            let metadata = Some(cri::PodSandboxMetadata { uid: uid.into(), ..Default::default() });
            let sandbox = PodSandbox { metadata, ..Default::default() };
            assert_eq!(is_of(pods.path(), &sandbox), expected, "{uid}");
        };
        check("u1", true);
        check("u2", false);
        check("", false);
        check("..", false);
        check("../u1", false);
    }
}
