//! Single components under upstream's names, with upstream's main flags. Each one can be replaced by
//! upstream's program, or replace it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use base::task::{Stop, Tasks};
use client::election::{Election, Ended, Leadership, Timing};
use client::{Client, Informers};
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::secure_port::{Page, SecurePort};

/// How long a component may take to end.
pub const SHUTDOWN_LIMIT: Duration = Duration::from_secs(4);

/// The Lease for which candidates compete, with upstream's flags.
#[derive(clap::Args, Clone, Debug)]
pub struct LeaderElection {
    /// Work only while holding the Lease
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = true, action = clap::ArgAction::Set)]
    leader_elect: bool,
    #[arg(long, default_value = "15s", value_parser = base::duration::parse, value_name = "DURATION")]
    leader_elect_lease_duration: Duration,
    #[arg(long, default_value = "10s", value_parser = base::duration::parse, value_name = "DURATION")]
    leader_elect_renew_deadline: Duration,
    #[arg(long, default_value = "2s", value_parser = base::duration::parse, value_name = "DURATION")]
    leader_elect_retry_period: Duration,
    /// Only leases
    #[arg(long, default_value = "leases", value_parser = ["leases"])]
    leader_elect_resource_lock: String,
    /// Name of the Lease [default: the component's]
    #[arg(long, value_name = "NAME")]
    leader_elect_resource_name: Option<String>,
    #[arg(long, default_value = "kube-system", value_name = "NAMESPACE")]
    leader_elect_resource_namespace: String,
}

impl LeaderElection {
    pub fn elects(&self) -> bool {
        self.leader_elect
    }

    /// # Errors
    /// Upstream's, if the times do not fit.
    fn timing(&self) -> anyhow::Result<Timing> {
        let timing = Timing {
            lease: self.leader_elect_lease_duration,
            renew_deadline: self.leader_elect_renew_deadline,
            retry: self.leader_elect_retry_period,
        };
        anyhow::ensure!(
            timing.lease > timing.renew_deadline,
            "leaderElection.leaseDuration: Invalid value: {:?}: LeaseDuration must be greater than RenewDeadline",
            timing.lease
        );
        anyhow::ensure!(
            timing.renew_deadline > timing.retry,
            "leaderElection.renewDeadline: Invalid value: {:?}: RenewDeadline must be greater than RetryPeriod",
            timing.renew_deadline
        );
        anyhow::ensure!(
            !timing.retry.is_zero(),
            "leaderElection.retryPeriod: Invalid value: 0s: must be greater than zero"
        );
        Ok(timing)
    }

    /// Upstream's `LeaderElectionConfiguration`.
    pub fn configz(&self, component: &str) -> Value {
        let text = |time: Duration| {
            base::duration::text(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX))
        };
        json!({
            "leaderElect": self.leader_elect,
            "leaseDuration": text(self.leader_elect_lease_duration),
            "renewDeadline": text(self.leader_elect_renew_deadline),
            "retryPeriod": text(self.leader_elect_retry_period),
            "resourceLock": self.leader_elect_resource_lock,
            "resourceName": self.leader_elect_resource_name.as_deref().unwrap_or(component),
            "resourceNamespace": self.leader_elect_resource_namespace,
        })
    }
}

/// Writes metrics.
pub type Figures = fn(&mut String);

#[derive(clap::Args, Clone, Debug)]
pub struct Scheduler {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// Address of the API server; it overrides the kubeconfig's
    #[arg(long, value_name = "URL")]
    master: Option<String>,
    /// KubeSchedulerConfiguration: profiles, plugins and their arguments, extenders
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    election: LeaderElection,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    serving: SecurePort,
}

impl Scheduler {
    const PORT: u16 = 10259;

    /// Upstream's `KubeSchedulerConfiguration`: the file, with defaults for missing fields.
    fn configz(&self, config: &scheduler::Config) -> anyhow::Result<Value> {
        let mut all = json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": self.election.configz("kube-scheduler"),
            "clientConnection": {"kubeconfig": self.kubeconfig},
            "podInitialBackoffSeconds": config.first_backoff.as_secs(),
            "podMaxBackoffSeconds": config.last_backoff.as_secs(),
            "profiles": [{"schedulerName": scheduler::config::DEFAULT_NAME}],
        });
        if let Some(file) = read(self.config.as_deref())? {
            let said: serde_json::Map<String, Value> = serde_saphyr::from_str(&file)?;
            // The flags decide about leaderElection.
            let own = ["leaderElection", "clientConnection"];
            for (key, value) in said.into_iter().filter(|(key, _)| !own.contains(&key.as_str())) {
                all[key] = value;
            }
        }
        Ok(json!({"componentconfig": all}))
    }
}

pub async fn scheduler(flags: Scheduler) -> anyhow::Result<()> {
    const NAME: &str = "kube-scheduler";
    flags.serving.install_tls()?;
    let client = client_of(&flags.kubeconfig, flags.master.as_deref(), NAME)?;
    let config = scheduler_config(flags.config.as_deref(), &client)?;
    let configz = flags.configz(&config)?;
    let own = client.clone();
    until_signal(NAME, async move |tasks: &Tasks| {
        let leadership = Leadership::default();
        let figures =
            [client::encode_queues as Figures, client::encode_requests, scheduler::encode_metrics];
        let page = Page::new(NAME, flags.election.elects(), &leadership, configz, &figures);
        // A scheduler that waits for the lease cannot be behind.
        let behind = Arc::new(AtomicBool::new(false));
        let seen = behind.clone();
        page.readyz().add("sched-handler-sync", move || match seen.load(Ordering::Acquire) {
            true => Err("handlers are not fully synchronized".into()),
            false => Ok(()),
        });
        flags.serving.serve(Scheduler::PORT, &page, tasks).await?;
        let work = async |stop| {
            behind.store(true, Ordering::Release);
            let informers = Informers::new(client.clone(), tasks.clone());
            let working = scheduler::run_with(informers.clone(), client, config, stop);
            let following = async {
                informers.synced().await;
                behind.store(false, Ordering::Release);
            };
            // Polled in this order: the first starts the informers that the second waits for.
            tokio::join!(biased; working, following);
        };
        lead(own, NAME, &flags.election, leadership, tasks.stop_signal(), work).await
    })
    .await
}

/// The scheduler's configuration, checked before anything runs.
pub fn scheduler_config(
    file: Option<&Path>,
    client: &client::Client,
) -> anyhow::Result<scheduler::Config> {
    let Some(file) = file else { return Ok(scheduler::Config::default()) };
    let name = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let config = scheduler::Config::parse(&text).with_context(|| format!("{name}"))?;
    scheduler::check(client, &config).map_err(|why| anyhow::anyhow!("{name}: {why}"))?;
    Ok(config)
}

#[derive(clap::Args, Clone, Debug)]
pub struct Proxy {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// Address of the API server; it overrides the kubeconfig's
    #[arg(long, value_name = "URL")]
    master: Option<String>,
    /// primary, or the networks whose addresses serve node ports
    #[arg(long, value_delimiter = ',', value_name = "CIDR")]
    nodeport_addresses: Vec<String>,
    /// The node's name [default: the host name]
    #[arg(long)]
    hostname_override: Option<String>,
    #[arg(long, value_delimiter = ',')]
    cluster_cidr: Vec<IpNet>,
    /// nftables; iptables and ipvs are accepted, but nftables is used
    #[arg(long, default_value = "nftables")]
    proxy_mode: String,
    #[arg(long, default_value = "0.0.0.0:10256")]
    healthz_bind_address: SocketAddr,
    #[arg(long, default_value = "127.0.0.1:10249")]
    metrics_bind_address: SocketAddr,
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    masquerade_all: bool,
    /// KubeProxyConfiguration; flags win
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
}

pub async fn proxy(flags: Proxy) -> anyhow::Result<()> {
    match flags.proxy_mode.as_str() {
        "nftables" => {}
        "iptables" | "ipvs" => tracing::warn!(
            mode = flags.proxy_mode,
            "this proxy mode is not supported, using nftables"
        ),
        other => anyhow::bail!("--proxy-mode {other}: expected nftables, iptables or ipvs"),
    }
    let named =
        crate::flags::Node { node_name: flags.hostname_override, ..crate::flags::Node::default() };
    let config = proxy::Config {
        node_name: crate::node::name(&named)?,
        cluster_cidrs: flags.cluster_cidr,
        healthz_bind: Some(flags.healthz_bind_address),
        metrics_bind: Some(flags.metrics_bind_address),
        masquerade_all: flags.masquerade_all,
        nodeport_addresses: nodeport_addresses(&flags.nodeport_addresses)?,
        ..proxy::Config::default()
    };
    let client = client_of(&flags.kubeconfig, flags.master.as_deref(), "kube-proxy")?;
    until_signal("kube-proxy", async move |tasks: &Tasks| {
        Ok(proxy::run(client, config, tasks.stop_signal()).await?)
    })
    .await
}

/// # Errors
/// Upstream's, for other words than `primary` and networks.
pub fn nodeport_addresses(given: &[String]) -> anyhow::Result<proxy::NodePortAddresses> {
    match given {
        [] => Ok(proxy::NodePortAddresses::Primary),
        [one] if one == "primary" => Ok(proxy::NodePortAddresses::Primary),
        all => {
            let parse = |text: &String| {
                text.parse::<IpNet>().with_context(|| {
                    format!("NodePortAddresses: Invalid value: {text:?}: must be a valid IP block")
                })
            };
            Ok(proxy::NodePortAddresses::Within(all.iter().map(parse).collect::<Result<_, _>>()?))
        }
    }
}

/// A client for the kubeconfig; `--master` overrides its server.
fn client_of(kubeconfig: &Path, master: Option<&str>, agent: &str) -> anyhow::Result<Client> {
    let options = crate::kubeconfig::options(kubeconfig, master)?;
    let http = transport::HttpClient::new(&options);
    let http = http.with_context(|| kubeconfig.display().to_string())?;
    Ok(Client::over(http, agent))
}

pub fn read(path: Option<&Path>) -> anyhow::Result<Option<String>> {
    let read =
        |path: &Path| std::fs::read_to_string(path).with_context(|| path.display().to_string());
    path.map(read).transpose()
}

/// Runs `work` while this process holds the Lease of the flags, which has the component's name by default.
pub async fn lead<F: Future<Output = ()>>(
    client: Client,
    name: &str,
    flags: &LeaderElection,
    leadership: Leadership,
    stop: Stop,
    work: impl FnOnce(Stop) -> F,
) -> anyhow::Result<()> {
    let timing = flags.timing()?;
    if !flags.elects() {
        work(stop).await;
        return Ok(());
    }
    let host = nix::unistd::gethostname().context("cannot read the host's name")?;
    let lease = flags.leader_elect_resource_name.as_deref().unwrap_or(name);
    let namespace = &flags.leader_elect_resource_namespace;
    let election = Election::new(client, namespace, lease, &host.to_string_lossy());
    let election = Election { leadership, timing, ..election };
    match election.run(stop, work).await {
        // A process that lost its lease must not continue: it ends, as upstream's.
        Ended::Lost => anyhow::bail!("leaderelection lost"),
        Ended::Stopped | Ended::Finished => Ok(()),
    }
}

/// Runs one component until it ends or a signal stops it.
pub async fn until_signal(
    name: &'static str,
    work: impl AsyncFnOnce(&Tasks) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let tasks = Tasks::new(name);
    let running = work(&tasks);
    tokio::pin!(running);
    let outcome = tokio::select! {
        outcome = &mut running => outcome,
        () = crate::process::termination() => {
            tasks.stop();
            let limit = tokio::time::timeout(SHUTDOWN_LIMIT, running).await;
            limit.with_context(|| format!("{name} did not stop in time"))?
        }
    };
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    outcome
}
