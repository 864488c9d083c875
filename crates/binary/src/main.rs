//! Decapod: parses the command line and wires the components. Nothing else happens here.

mod components;
mod control_plane;
mod dns;
mod flags;
mod kubeconfig;
mod node;
mod server;
mod token;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Kubernetes in one binary.
#[derive(Parser)]
#[command(name = "decapod", version, disable_help_subcommand = true)]
struct Arguments {
    #[command(flatten)]
    common: flags::Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a control plane and, unless --disable-agent, a node
    Server(Box<flags::Server>),
    /// The controllers alone
    KubeControllerManager(components::ControllerManager),
    /// The scheduler alone
    KubeScheduler(components::Scheduler),
    /// The Services' proxy alone
    KubeProxy(components::Proxy),
    /// A node's kubelet alone
    Kubelet(components::Kubelet),
    /// Answer the cluster's names; every node runs this by itself
    Dns(dns::Dns),
}

fn main() -> ExitCode {
    // A container's shim is this program too. It must not have threads, so it comes first.
    if runtime::shim::is_shim_invocation() {
        runtime::shim::shim_main();
    }
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("decapod: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> anyhow::Result<()> {
    let arguments = flags::with_config_file(std::env::args().collect())?;
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are no failures; anything else is, with exit code 1.
            let code = i32::from(error.use_stderr());
            error.print()?;
            std::process::exit(code);
        }
    };
    base::telemetry::init(arguments.common.log_format, "info");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build()?;
    runtime.block_on(async {
        match arguments.command {
            Command::Server(flags) => server::run(*flags, arguments.common).await,
            Command::KubeControllerManager(flags) => components::controller_manager(flags).await,
            Command::KubeScheduler(flags) => components::scheduler(flags).await,
            Command::KubeProxy(flags) => components::proxy(flags).await,
            Command::Kubelet(flags) => components::kubelet(flags, &arguments.common.data_dir).await,
            Command::Dns(flags) => dns::run(flags).await,
        }
    })
}
