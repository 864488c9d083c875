//! `decapod descheduler`: evicts pods that the scheduler would place elsewhere today, with upstream's flags.
//!
//! In: a policy file, a kubeconfig. Out: one cycle, or one in each interval until a signal; health and
//! metrics on the secure port while cycles repeat. See docs/descheduler.md.
//! Upstream: `sigs.k8s.io/descheduler/cmd/descheduler`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use base::task::Tasks;
use client::election::Leadership;
use descheduler::{Policy, Settings};
use serde_json::json;

use crate::components::{Figures, LeaderElection, lead, until_signal};
use crate::secure_port::{Page, SecurePort};

const NAME: &str = "descheduler";
const PORT: u16 = 10258;

#[derive(clap::Args, Clone, Debug)]
// The flags of the Lease have upstream's defaults for this component.
#[command(
    mut_arg("leader_elect", |flag| flag.default_value("false")),
    mut_arg("leader_elect_lease_duration", |flag| flag.default_value("137s")),
    mut_arg("leader_elect_renew_deadline", |flag| flag.default_value("107s")),
    mut_arg("leader_elect_retry_period", |flag| flag.default_value("26s")),
)]
pub struct Descheduler {
    /// DeschedulerPolicy, descheduler/v1alpha2
    #[arg(long, value_name = "FILE")]
    policy_config_file: PathBuf,
    /// Time between the starts of two cycles; 0: one cycle, then the end
    #[arg(long, default_value = "0s", value_parser = base::duration::parse, value_name = "DURATION")]
    descheduling_interval: Duration,
    /// Report the pods that would be evicted, and evict none
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    dry_run: bool,
    /// Kubeconfig of the cluster [default: <data-dir>/kubeconfig, or $KUBECONFIG]
    #[arg(long, value_name = "FILE", alias = "kubeconfig")]
    client_connection_kubeconfig: Option<PathBuf>,
    /// Serve no health and no metrics
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    disable_metrics: bool,
    #[command(flatten)]
    election: LeaderElection,
    #[command(flatten)]
    serving: SecurePort,
}

impl Descheduler {
    fn policy(&self) -> anyhow::Result<Policy> {
        let name = self.policy_config_file.display();
        let text = std::fs::read_to_string(&self.policy_config_file)
            .with_context(|| format!("failed to read policy config file {name}"))?;
        Policy::parse(&text).with_context(|| name.to_string())
    }

    fn client(&self, data_dir: &Path) -> anyhow::Result<client::Client> {
        let connection = cli::cluster::Connection {
            kubeconfig: self.client_connection_kubeconfig.clone(),
            ..Default::default()
        };
        let path = connection.path(data_dir, std::env::var_os("KUBECONFIG"));
        if !path.exists() {
            bail!("no cluster found: {} does not exist; name it with --kubeconfig", path.display());
        }
        crate::kubeconfig::client(&path, NAME)
    }
}

pub async fn run(flags: Descheduler, data_dir: &Path) -> anyhow::Result<()> {
    let settings = Settings { interval: flags.descheduling_interval, is_dry_run: flags.dry_run };
    let is_single = settings.interval.is_zero();
    ensure!(
        !(flags.election.elects() && is_single),
        "leaderElection must be used with deschedulingInterval: set --descheduling-interval"
    );
    flags.serving.install_tls()?;
    let (policy, client) = (flags.policy()?, flags.client(data_dir)?);
    let own = client.clone();
    until_signal(NAME, async move |tasks: &Tasks| {
        let leadership = Leadership::default();
        if !flags.disable_metrics && !is_single {
            let figures = [client::encode_requests as Figures, descheduler::encode_metrics];
            let elects = flags.election.elects();
            let page = Page::new(NAME, elects, &leadership, json!({}), &figures);
            flags.serving.serve(PORT, &page, tasks).await?;
        }
        let mut outcome = Ok(());
        let work = async |stop| outcome = descheduler::run(client, policy, settings, stop).await;
        lead(own, NAME, &flags.election, leadership, tasks.stop_signal(), work).await?;
        Ok(outcome?)
    })
    .await
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: Descheduler,
    }

    #[test]
    fn defaults_are_upstreams() {
        let line = Line::parse_from(["descheduler", "--policy-config-file", "p.yaml"]);
        assert!(!line.flags.election.elects());
        let lease = line.flags.election.configz(NAME);
        assert_eq!(lease["leaseDuration"], "2m17s");
        assert_eq!(lease["retryPeriod"], "26s");
        assert!(line.flags.descheduling_interval.is_zero());
    }
}
