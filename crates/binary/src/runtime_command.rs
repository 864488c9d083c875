//! `decapod runtime`: the embedded container runtime without a kubelet.
//!
//! In: flags. Out: CRI at a Unix socket, for crictl, for tests, or for another kubelet by its
//! `--container-runtime-endpoint`. Containers run on when the command ends, and the next start finds them.
//! Invariant: a runtime that is served already is not opened a second time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use base::task::Tasks;

use crate::components::SHUTDOWN_LIMIT;

#[derive(clap::Args, Clone, Debug)]
pub struct Runtime {
    /// The socket [default: /run/decapod/cri.sock; with another --data-dir, a directory of its own below
    /// /run/decapod]
    #[arg(long, value_name = "PATH")]
    cri_socket: Option<PathBuf>,
    /// Address ranges of this node's pods, one per family; a kubelet that has a podCIDR tells the runtime its
    /// own
    #[arg(long, value_name = "CIDR")]
    pod_cidr: Option<String>,
}

pub async fn run(flags: Runtime, data_dir: &Path) -> anyhow::Result<()> {
    let usual = runtime::layout::cri_socket(data_dir);
    let socket = flags.cri_socket.unwrap_or_else(|| usual.clone());
    for one in [&usual, &socket] {
        ensure!(
            !cri::server::is_served(one),
            "a process serves {} already: stop it, or choose another --data-dir and --cri-socket",
            one.display()
        );
    }
    let tasks = Tasks::new("runtime");
    let links = net::Links::open().context("cannot talk to the kernel's network")?;
    links.set_loopback_up().await?;
    net::sysctl::prepare_node(None).await?;
    let addresses: Vec<_> = crate::node::primary_address().await.into_iter().collect();
    let mtu = crate::node::pod_mtu(&links, &addresses, None, None).await?;
    let plugins = runtime::CniConfig::usual();
    let runtime = crate::node::open_embedded(data_dir, &[], mtu, plugins, &tasks).await?;
    let runtime: Arc<dyn cri::Runtime> = Arc::new(runtime);
    if let Some(cidr) = &flags.pod_cidr {
        runtime.update_runtime_config(cidr).await.context("--pod-cidr")?;
    }
    crate::node::serve_cri(runtime, socket, &tasks);
    crate::process::wait_for_signal(&[&tasks]).await?;
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    Ok(())
}
