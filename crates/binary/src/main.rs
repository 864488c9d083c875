//! Decapod: parses the command line and connects the components. It does nothing else.

mod access;
mod addons;
mod agent;
mod api_server;
mod api_settings;
mod audit;
mod authority;
mod cloud_controller_manager;
mod cluster;
mod command_line;
mod component_args;
mod component_config;
mod components;
mod config_file;
mod control_plane;
mod control_plane_node;
mod controller_manager;
mod datastore;
mod descheduler;
mod dns;
mod encryption;
mod etcd_server;
mod flags;
/// A short run of the targets of `fuzz/`.
#[cfg(test)]
#[path = "../../../fuzz/targets.rs"]
mod fuzz;
mod help;
mod install;
mod kept_log;
mod kubeconfig;
mod kubelet_command;
mod node;
mod notify;
mod own_pods;
mod preflight;
mod presence;
mod process;
mod readiness;
mod rotation;
mod runtime_command;
mod secure_port;
mod server;
mod signals;
mod simulate;
mod snapshots;
mod supervise;
mod token;
mod token_signer;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Stack of a worker. An object may be 127 levels deep, and parsing a schema takes tens of kilobytes per
/// level: the default of two megabytes was too small once. Unused stack takes no memory.
const STACK: usize = 16 << 20;

/// Kubernetes in one binary.
#[derive(Parser)]
#[command(name = "decapod", version, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    common: flags::Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a control plane and, unless --disable-agent, a node
    #[command(after_help = settings_help())]
    Server(Box<flags::Server>),
    /// Run a node of a cluster whose server runs elsewhere
    #[command(after_help = settings_help())]
    Agent(Box<flags::Agent>),
    /// Talk to the cluster as kubectl does
    Kubectl(Box<cli::kubectl::Kubectl>),
    /// Import, list, pull and remove images of this node
    Images(cli::images::Images),
    /// Create and list join tokens
    Token(cli::token::Token),
    /// Save, inspect and restore the state
    Snapshot(datastore::Snapshot),
    /// Inspect, compact and verify the state store
    Store(datastore::StoreCommand),
    /// List, remove and promote the servers whose etcd keeps the state
    Member(cluster::MemberCommand),
    /// Serve etcd's v3 API from a store of one member
    Etcd(Box<etcd_server::Etcd>),
    /// Check and replace certificates: check, rotate, rotate-ca
    Certificate(cli::certificate::CertificateCommand),
    /// Keep Secrets encrypted in the store: status, enable, disable, rotate, reencrypt
    SecretsEncrypt(cli::secrets_encrypt::SecretsEncrypt),
    /// Say what this machine has and lacks for a node
    CheckConfig(cli::check_config::CheckConfig),
    /// Make Decapod a service of this machine, or upgrade it: `decapod install server -- --tls-san NAME`
    Install(Box<cli::install::Install>),
    /// Stop everything that Decapod runs and remove all its files
    Uninstall(cli::uninstall::Uninstall),
    /// Run only the API server
    #[command(after_help = release::features::help())]
    KubeApiserver(Box<api_server::ApiServer>),
    /// Run only the controllers
    #[command(after_help = release::features::help())]
    KubeControllerManager(Box<controller_manager::ControllerManager>),
    /// Run only the scheduler
    #[command(after_help = release::features::help())]
    KubeScheduler(Box<components::Scheduler>),
    /// Run only the Service proxy
    #[command(after_help = release::features::help())]
    KubeProxy(Box<components::Proxy>),
    /// Run only a node's kubelet
    #[command(after_help = release::features::help())]
    Kubelet(Box<kubelet_command::Kubelet>),
    /// Run only the embedded container runtime, for crictl or for another kubelet
    Runtime(runtime_command::Runtime),
    /// Run only the cloud controllers: machines of a file (metal), or Hetzner Cloud
    CloudControllerManager(Box<cloud_controller_manager::CloudControllerManager>),
    /// Evict pods that the scheduler would place elsewhere today
    Descheduler(Box<descheduler::Descheduler>),
    /// Run nodes without machines, thousands in one process, to test schedulers, operators and autoscalers
    Simulate(simulate::Simulate),
    /// Run the cluster's DNS server; every node starts it automatically
    Dns(dns::Dns),
    /// Print the version
    Version,
    /// Print a script that completes commands and flags: source <(decapod completion bash)
    Completion {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

fn settings_help() -> String {
    let sources = "Each flag is also a key of the configuration file and a variable: --node-name, node-name, \
                   DECAPOD_NODE_NAME.";
    format!("{sources}\n\n{}", release::features::help())
}

fn main() -> ExitCode {
    // A container's shim is this program too. It must have no threads, so this check comes first.
    if runtime::shim::is_shim_invocation() {
        runtime::shim::shim_main();
    }
    match start() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("decapod: {}", process::told(&error));
            ExitCode::FAILURE
        }
    }
}

fn start() -> anyhow::Result<ExitCode> {
    let arguments = by_link(std::env::args().collect());
    let mut line = match command_line::component(&arguments) {
        Some((component, front, words)) => match component.parse(&front, &words) {
            Ok(line) => line,
            Err(error) => {
                eprintln!("Error: {error}\nSee '{} --help' for usage", component.name);
                return Ok(ExitCode::FAILURE);
            }
        },
        None => command_line::CommandLine { words: arguments, ..Default::default() },
    };
    if let Some(code) = line.answer()? {
        return Ok(code);
    }
    let arguments = etcd_server::with_config_file(line.words.clone())?;
    let arguments = config_file::with_settings(arguments)?;
    let arguments = component_args::expanded(arguments, &mut line)?;
    let mut program = help::arrange(Arguments::command(), &arguments);
    let matches = program.try_get_matches_from_mut(arguments);
    let parsed = matches.and_then(|matches| Arguments::from_arg_matches(&matches));
    let mut arguments = match parsed.map_err(|error| error.format(&mut program)) {
        Ok(arguments) => arguments,
        Err(error) => {
            error.print()?;
            // Help and version are not failures; anything else is.
            return Ok(if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
    };
    let format = line.log_format.unwrap_or(arguments.common.log_format);
    let filter = line.log_filter().unwrap_or_else(|| arguments.command.log_filter());
    match &arguments.command {
        Command::Server(flags) if !flags.disable_agent => kept_log::init(format, filter),
        _ => base::telemetry::init(format, filter),
    }
    line.tell();
    match &mut arguments.command {
        Command::Server(flags) => component_args::settle_server(flags)?,
        Command::Agent(flags) => component_args::settle_node(&mut flags.node)?,
        _ => {}
    }
    if let Some(gates) = arguments.command.feature_gates() {
        gates.install()?;
    }
    if arguments.command.runs_long() {
        signals::heed()?;
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime =
        runtime.enable_all().worker_threads(workers()).thread_stack_size(STACK).build()?;
    runtime.block_on(run(arguments))
}

/// A link with the name of a user's command is this command.
fn by_link(mut arguments: Vec<String>) -> Vec<String> {
    let name = arguments.first().map(|program| program.rsplit('/').next().unwrap_or_default());
    if name == Some("kubectl") {
        arguments.insert(1, "kubectl".to_owned());
    }
    arguments
}

/// One thread per processor, within limits: with only one, a blocked thread would stop everything, and
/// each waiting thread costs some memory.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, |there| there.get().clamp(2, 16))
}

impl Command {
    fn feature_gates(&self) -> Option<&flags::FeatureGates> {
        match self {
            Self::Server(flags) => Some(&flags.feature_gates),
            Self::Agent(flags) => Some(&flags.feature_gates),
            Self::KubeApiserver(flags) => Some(&flags.feature_gates),
            Self::KubeControllerManager(flags) => Some(&flags.feature_gates),
            Self::CloudControllerManager(flags) => Some(&flags.feature_gates),
            Self::KubeScheduler(flags) => Some(&flags.feature_gates),
            Self::KubeProxy(flags) => Some(&flags.feature_gates),
            Self::Kubelet(flags) => Some(&flags.feature_gates),
            _ => None,
        }
    }

    /// Whether the command runs until it is stopped.
    fn runs_long(&self) -> bool {
        matches!(
            self,
            Self::Server(_)
                | Self::Agent(_)
                | Self::KubeApiserver(_)
                | Self::KubeControllerManager(_)
                | Self::CloudControllerManager(_)
                | Self::KubeScheduler(_)
                | Self::KubeProxy(_)
                | Self::Kubelet(_)
                | Self::Runtime(_)
                | Self::Etcd(_)
                | Self::Descheduler(_)
                | Self::Simulate(_)
                | Self::Dns(_)
        )
    }

    /// A user who types a command wants its output, not its log.
    fn log_filter(&self) -> &'static str {
        match self {
            Self::Kubectl(_) | Self::Images(_) | Self::Token(_) | Self::Uninstall(_) => "warn",
            Self::Install(_) | Self::CheckConfig(_) => "warn",
            Self::Snapshot(_) | Self::Store(_) | Self::Member(_) => "warn",
            Self::Certificate(_) | Self::SecretsEncrypt(_) => "warn",
            _ => "info",
        }
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let data_dir = arguments.common.data_dir.clone();
    match arguments.command {
        Command::Kubectl(command) => return command.run(&data_dir).await,
        Command::Images(command) => return command.run(&data_dir).await,
        Command::Token(command) => return command.run(&data_dir).await,
        Command::Snapshot(command) => return command.run(&data_dir).await,
        Command::Store(command) => return command.run(&data_dir).await,
        Command::Member(command) => return command.run(&data_dir).await,
        Command::Certificate(command) => return command.run(&data_dir).await,
        Command::SecretsEncrypt(command) => return command.run(&data_dir).await,
        Command::Uninstall(command) => {
            return command.run(&data_dir, config_file::data_dir().as_deref()).await;
        }
        Command::CheckConfig(command) => return command.run(&data_dir).await,
        Command::Install(command) => install::run(&command)?,
        Command::Server(flags) => server::run(*flags, arguments.common).await?,
        Command::Agent(flags) => agent::run(*flags, arguments.common).await?,
        Command::KubeApiserver(flags) => api_server::run(*flags, arguments.common).await?,
        Command::KubeControllerManager(flags) => controller_manager::run(*flags).await?,
        Command::KubeScheduler(flags) => components::scheduler(*flags).await?,
        Command::KubeProxy(flags) => components::proxy(*flags).await?,
        Command::Kubelet(flags) => kubelet_command::run(*flags, &data_dir).await?,
        Command::Runtime(flags) => runtime_command::run(flags, &data_dir).await?,
        Command::CloudControllerManager(flags) => cloud_controller_manager::run(*flags).await?,
        Command::Etcd(flags) => etcd_server::run(*flags, &data_dir).await?,
        Command::Descheduler(flags) => descheduler::run(*flags, &data_dir).await?,
        Command::Simulate(flags) => simulate::run(flags, &data_dir).await?,
        Command::Dns(flags) => dns::run(flags).await?,
        Command::Version => print!("{}", Arguments::command().render_version()),
        Command::Completion { shell } => {
            let (mut command, mut script) = (Arguments::command(), vec![]);
            clap_complete::generate(shell, &mut command, "decapod", &mut script);
            // Written in one piece: the generator panics if the reader ends early.
            std::io::stdout().write_all(&script)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
