//! What a server brings into its cluster besides the components: the directory of manifests, and add-ons of its own,
//! which `--disable` switches off.
//!
//! In: flags, the data directory. Out: applied manifests; a disabled add-on's objects are removed, and stay away.
//! Upstream: k3s' `--disable`.

use std::path::Path;

use base::task::Tasks;
use client::{Client, DeleteParams, ErrorExt, Preconditions};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::control_plane::ControlPlane;
use crate::flags::Server;
use crate::supervise;

/// The storage class with directories of nodes.
pub const LOCAL_PATH: &str = "local-path";
/// Names that `--disable` accepts besides those of components.
pub const ALL: [&str; 1] = [LOCAL_PATH];
const LOCAL_PATH_PROVISIONER: &str = "decapod.io/local-path";
/// Below the data directory.
const MANIFESTS: &str = "manifests";
const USER: &str = "system:decapod-manifests";

pub fn start(
    flags: &Server,
    data_dir: &Path,
    control: &ControlPlane,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    // Manifests are the administrator's.
    let client = control.client_of(USER, &["system:masters"]);
    if flags.disable.iter().any(|name| name == LOCAL_PATH) {
        let client = client.clone();
        tasks.spawn("disabled add-ons", async move {
            if let Err(error) = remove_local_path(&client).await {
                let error = error.text();
                tracing::warn!(error, "failed to delete the disabled StorageClass local-path");
            }
        });
    }
    let config = manifests::Config {
        client,
        directory: data_dir.join(MANIFESTS),
        server: crate::node::name(&flags.node)?,
    };
    supervise::keep(tasks, "manifests", move |stop| manifests::run(config.clone(), stop));
    Ok(())
}

/// Only the class that an earlier start has made. Its volumes stay, and are removed with their claims.
async fn remove_local_path(client: &Client) -> client::Result<()> {
    let api = client.api::<StorageClass>(None);
    let Some(class) = api.get_opt(LOCAL_PATH).await? else { return Ok(()) };
    if class.provisioner != LOCAL_PATH_PROVISIONER {
        return Ok(());
    }
    let uid = class.metadata.uid.clone();
    let preconditions = Preconditions { uid, resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match api.delete(LOCAL_PATH, &params).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => {
            tracing::info!("deleted the StorageClass local-path, because it is disabled");
            Ok(())
        }
    }
}
