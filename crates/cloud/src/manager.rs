//! The table of the cloud's controllers, and the one place that starts them.
//!
//! In: a provider, options, clients. Out: controllers that run until they are stopped.
//! Invariant: a controller writes with its own client; all read from shared caches.
//! Upstream: `cloud-provider/app`.

use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, EventRecorder, Informers};
use ipnet::IpNet;

use crate::provider::Provider;
use crate::{lifecycle, metrics, node, route, service};

/// Less than the time between a lost lease and another's: see [`client::election`].
const ENDING: Duration = Duration::from_secs(4);

/// Flags that the controllers read.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--cluster-name`
    pub cluster: String,
    /// `--cluster-cidr`
    pub cluster_cidrs: Vec<IpNet>,
    /// `--configure-cloud-routes`
    pub configure_routes: bool,
    /// `--node-monitor-period`: how often the cloud is asked about nodes that are not Ready.
    pub node_monitor_period: Duration,
    /// `--node-status-update-frequency`: how often the addresses of all nodes are compared.
    pub node_status_update_frequency: Duration,
    /// `--route-reconciliation-period`
    pub route_reconciliation_period: Duration,
    /// `--concurrent-service-syncs`
    pub service_syncs: usize,
    /// `--concurrent-node-syncs`
    pub node_syncs: usize,
    /// `--concurrent-node-status-updates`
    pub node_status_updates: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cluster: "kubernetes".into(),
            cluster_cidrs: vec![],
            configure_routes: true,
            node_monitor_period: Duration::from_secs(5),
            node_status_update_frequency: Duration::from_secs(300),
            route_reconciliation_period: Duration::from_secs(10),
            service_syncs: 1,
            node_syncs: 1,
            node_status_updates: 1,
        }
    }
}

/// `--cluster-cidr` cannot be used. Upstream: `app/core.go`.
#[derive(Debug, thiserror::Error)]
pub enum WrongCidr {
    #[error("invalid CIDR address: {0}")]
    Syntax(String),
    #[error(
        "len of ClusterCIDRs==2 and they are not configured as dual stack (at least one from each IPFamily"
    )]
    NotDualStack,
    #[error("length of clusterCIDRs is:{0} more than max allowed of 2")]
    TooMany(usize),
}

impl Options {
    /// The ranges of `--cluster-cidr`; an empty text is none.
    pub fn parse_cidrs(text: &str) -> Result<Vec<IpNet>, WrongCidr> {
        let words = text.trim().split(',').map(str::trim).filter(|word| !word.is_empty());
        let parse = |word: &str| word.parse().map_err(|_| WrongCidr::Syntax(word.to_owned()));
        let cidrs: Vec<IpNet> = words.map(parse).collect::<Result<_, _>>()?;
        let is_ipv4 = |cidr: &IpNet| cidr.addr().is_ipv4();
        match cidrs.as_slice() {
            [] | [_] => Ok(cidrs),
            [one, other] if is_ipv4(one) != is_ipv4(other) => Ok(cidrs),
            [_, _] => Err(WrongCidr::NotDualStack),
            more => Err(WrongCidr::TooMany(more.len())),
        }
    }
}

/// The context of a controller.
#[derive(Clone)]
pub struct Context {
    /// With the controller's own identity.
    pub client: Client,
    /// Shared by all controllers.
    pub informers: Informers,
    /// With the controller's name as source.
    pub events: EventRecorder,
    pub tasks: Tasks,
    pub options: Arc<Options>,
    pub provider: Arc<dyn Provider>,
}

/// Why a controller does not start. None of these ends the process.
#[derive(Debug, thiserror::Error)]
pub enum Unable {
    #[error("cloud provider does not support instances")]
    NoInstances,
    #[error("the cloud provider does not support external load balancers")]
    NoLoadBalancers,
    #[error("--configure-cloud-routes is false")]
    RoutesAreOff,
    #[error("--configure-cloud-routes is set, but cloud provider does not support routes")]
    NoRoutes,
    #[error("--cluster-cidr is empty: no route belongs to the cluster")]
    NoClusterCidr,
}

/// The row of a controller.
struct Row {
    /// As in `--controllers`.
    name: &'static str,
    /// The name before v1.29, which `--controllers` and metrics have as well.
    alias: &'static str,
    /// The service account in kube-system that `--use-service-account-credentials` gives it.
    account: &'static str,
    /// The source of its events.
    component: &'static str,
    /// Whether the provider and the flags leave it something to do.
    check: fn(&dyn Provider, &Options) -> Result<(), Unable>,
    /// Subscribes and spawns; returns at once.
    start: fn(Context),
}

const CONTROLLERS: &[Row] = &[
    Row {
        name: "cloud-node-controller",
        alias: "cloud-node",
        account: "node-controller",
        component: "cloud-node-controller",
        check: node::check,
        start: node::start,
    },
    Row {
        name: "cloud-node-lifecycle-controller",
        alias: "cloud-node-lifecycle",
        account: "node-controller",
        component: "cloud-node-lifecycle-controller",
        check: lifecycle::check,
        start: lifecycle::start,
    },
    Row {
        name: "service-lb-controller",
        alias: "service",
        account: "service-controller",
        component: "service-controller",
        check: service::check,
        start: service::start,
    },
    Row {
        name: "node-route-controller",
        alias: "route",
        account: "route-controller",
        component: "route_controller",
        check: route::check,
        start: route::start,
    },
];

impl Row {
    /// Whether `--controllers` selects it: `*` for all, `-name` to leave one out. Empty means all.
    fn is_enabled(&self, selection: &[String]) -> bool {
        let is_own = |word: &str| word == self.name || word == self.alias;
        let named = selection.iter().any(|word| is_own(word));
        let excluded = selection.iter().any(|word| word.strip_prefix('-').is_some_and(is_own));
        named || (!excluded && (selection.is_empty() || selection.iter().any(|word| word == "*")))
    }
}

/// `--controllers` names a controller that does not exist. Upstream's text.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0:?} is not in the list of known controllers")]
pub struct UnknownController(String);

/// Checks the words of `--controllers`.
pub fn known(selection: &[String]) -> Result<(), UnknownController> {
    let names_one = |word: &&String| {
        let word = word.strip_prefix('-').unwrap_or(word);
        word == "*" || CONTROLLERS.iter().any(|row| row.name == word || row.alias == word)
    };
    match selection.iter().find(|word| !names_one(word)) {
        Some(wrong) => Err(UnknownController(wrong.strip_prefix('-').unwrap_or(wrong).to_owned())),
        None => Ok(()),
    }
}

/// The names of the selected controllers that the provider can serve.
pub fn able(selection: &[String], provider: &dyn Provider, options: &Options) -> Vec<&'static str> {
    rows(selection)
        .filter(|row| (row.check)(provider, options).is_ok())
        .map(|row| row.name)
        .collect()
}

fn rows(selection: &[String]) -> impl Iterator<Item = &'static Row> {
    CONTROLLERS.iter().filter(|row| row.is_enabled(selection))
}

/// Runs the selected controllers until `stop`. `client_for` gives a client for an identity:
/// `cloud-controller-manager` for the shared caches and events, then each controller's account.
pub async fn run(
    client_for: impl Fn(&str) -> Client,
    selection: &[String],
    provider: Arc<dyn Provider>,
    options: Options,
    stop: Stop,
) {
    let tasks = Tasks::new("cloud-controller-manager");
    let _bound = tasks.bound();
    let client = client_for("cloud-controller-manager");
    let informers = Informers::new(client.clone(), tasks.clone());
    let events = EventRecorder::new(client, &tasks, "cloud-controller-manager", None);
    let options = Arc::new(options);
    provider.start(&tasks);
    for row in rows(selection) {
        if let Err(why) = (row.check)(&*provider, &options) {
            tracing::warn!(controller = row.name, reason = %why, "controller not started");
            continue;
        }
        (row.start)(Context {
            client: client_for(row.account),
            informers: informers.clone(),
            events: events.for_component(row.component),
            tasks: tasks.clone(),
            options: options.clone(),
            provider: provider.clone(),
        });
        metrics::runs(row.alias);
        tracing::info!(controller = row.name, "controller started");
    }
    let group = tasks.stop_signal();
    tokio::select! {
        () = stop.wait() => {}
        () = group.wait() => tracing::error!("controllers stopped: a task panicked"),
    }
    tasks.shutdown(ENDING).await;
    metrics::stopped();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn the_flag_selects_controllers_by_both_names() {
        let check = |text: &str, expected: &[&str]| {
            known(&words(text)).expect("names");
            let found: Vec<_> = rows(&words(text)).map(|row| row.name).collect();
            assert_eq!(found, expected, "{text}");
        };
        let all: Vec<_> = CONTROLLERS.iter().map(|row| row.name).collect();
        check("", &all);
        check("*", &all);
        check("*,-service,-node-route-controller", &all[..2]);
        check("route", &["node-route-controller"]);
        assert_eq!(known(&words("*,-nodes")), Err(UnknownController("nodes".to_owned())));
    }

    #[test]
    fn controllers_without_work_do_not_start() {
        let fake = crate::testing::Fake::default();
        let check = |options: Options, expected: usize| {
            assert_eq!(able(&[], &fake, &options).len(), expected, "{options:?}");
        };
        check(Options::default(), 3);
        let cluster_cidrs = Options::parse_cidrs("10.0.0.0/16").expect("a range");
        let options = Options { cluster_cidrs, ..Options::default() };
        check(options.clone(), 4);
        check(Options { configure_routes: false, ..options }, 3);
    }

    #[test]
    fn cluster_cidrs_are_one_of_each_family() {
        let check = |text: &str, expected: Result<usize, &str>| {
            let parsed = Options::parse_cidrs(text).map(|all| all.len());
            assert_eq!(parsed.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
        };
        check("", Ok(0));
        check("10.0.0.0/16, fd00::/48", Ok(2));
        check(
            "10.0.0.0/16,10.1.0.0/16",
            Err(
                "len of ClusterCIDRs==2 and they are not configured as dual stack (at least one from each IPFamily",
            ),
        );
        check(
            "10.0.0.0/16,fd00::/48,fd01::/48",
            Err("length of clusterCIDRs is:3 more than max allowed of 2"),
        );
        check("10.0.0.0", Err("invalid CIDR address: 10.0.0.0"));
    }
}
