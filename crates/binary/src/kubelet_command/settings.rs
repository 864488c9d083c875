//! Upstream's flags of the kubelet that `decapod agent` does not have.
//!
//! In: flags, or fields of a KubeletConfiguration as flags. Out: the kubelet's configuration. A flag that is
//! not given leaves the default. Upstream: `cmd/kubelet/app/options`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Taint;
use machinery::quantity::Amount;

use super::fields::FieldFlags;

/// The taint of a node that its cloud has not described yet.
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Settings {
    /// Answer requests without credentials as system:anonymous [default: false, upstream's is true]
    #[arg(long)]
    anonymous_auth: Option<bool>,
    /// Check bearer tokens by TokenReviews [default: true, upstream's is false]
    #[arg(long)]
    authentication_token_webhook: Option<bool>,
    /// Webhook or AlwaysAllow [default: Webhook, upstream's is AlwaysAllow]
    #[arg(long, value_name = "MODE")]
    authorization_mode: Option<String>,
    /// Parent of all pods' cgroups
    #[arg(long, value_name = "CGROUP")]
    cgroup_root: Option<String>,
    /// Create cgroups for pods and QoS classes
    #[arg(long)]
    cgroups_per_qos: Option<bool>,
    /// external: the node is tainted until a cloud controller manager has described it
    #[arg(long, value_name = "NAME")]
    cloud_provider: Option<String>,
    #[arg(long, value_name = "NUMBER")]
    container_log_max_files: Option<usize>,
    /// For example 10Mi
    #[arg(long, value_name = "SIZE")]
    container_log_max_size: Option<String>,
    /// Serve logs, exec, attach and port-forward
    #[arg(long)]
    enable_debugging_handlers: Option<bool>,
    /// Serve the kubelet's API
    #[arg(long)]
    pub enable_server: Option<bool>,
    #[arg(long, value_name = "ADDRESS")]
    healthz_bind_address: Option<IpAddr>,
    /// Port of /healthz; 0: none
    #[arg(long, value_name = "PORT")]
    healthz_port: Option<u16>,
    /// Resources for Kubernetes' own programs, for example cpu=200m,memory=500Mi
    #[arg(long, value_delimiter = ',', value_name = "RESOURCE=QUANTITY")]
    kube_reserved: Vec<String>,
    /// Resources for the system
    #[arg(long, value_delimiter = ',', value_name = "RESOURCE=QUANTITY")]
    system_reserved: Vec<String>,
    #[arg(long, value_parser = base::duration::parse, value_name = "DURATION")]
    minimum_image_ttl_duration: Option<Duration>,
    /// How often the node's status is computed
    #[arg(long, value_parser = base::duration::parse, value_name = "DURATION")]
    node_status_update_frequency: Option<Duration>,
    /// The machine's identifier at the cloud
    #[arg(long, value_name = "ID")]
    provider_id: Option<String>,
    /// Create the Node [default: true]
    #[arg(long)]
    register_node: Option<bool>,
    /// The node's resolv.conf, for pods that do not use the cluster's DNS
    #[arg(long, value_name = "FILE")]
    resolv_conf: Option<PathBuf>,
    /// Pull one image at a time
    #[arg(long)]
    serialize_image_pulls: Option<bool>,
    #[command(flatten)]
    pub fields: FieldFlags,
}

impl Settings {
    pub fn apply(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        self.apply_access(config)?;
        self.apply_node(config)?;
        if let Some(number) = self.container_log_max_files {
            ensure!(
                number >= 2,
                "invalid configuration: containerLogMaxFiles (--container-log-max-files) {number} must be greater than 1"
            );
            config.log_max_files = number;
        }
        if let Some(size) = &self.container_log_max_size {
            config.log_max_bytes = bytes(size).context("--container-log-max-size")?;
        }
        if let Some(age) = self.minimum_image_ttl_duration {
            config.image_min_age = age;
        }
        if self.serialize_image_pulls == Some(true) {
            config.parallel_pulls = 1;
        }
        if let Some(path) = self.resolv_conf.as_ref().filter(|path| !path.as_os_str().is_empty()) {
            config.resolv_conf.clone_from(path);
        }
        if let Some(cgroup) = self.cgroup_root.as_ref().filter(|cgroup| !cgroup.is_empty()) {
            config.cgroup_root.clone_from(cgroup);
        }
        config.cgroups_per_qos = self.cgroups_per_qos.unwrap_or(config.cgroups_per_qos);
        self.fields.apply(config)
    }

    fn apply_access(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        let auth = &mut config.server_auth;
        auth.anonymous = self.anonymous_auth.unwrap_or(auth.anonymous);
        auth.webhook_tokens = self.authentication_token_webhook.unwrap_or(auth.webhook_tokens);
        auth.webhook_authorization = match self.authorization_mode.as_deref() {
            None | Some("") => auth.webhook_authorization,
            Some("Webhook") => true,
            Some("AlwaysAllow") => false,
            Some(other) => bail!("unknown authorization mode {other}"),
        };
        let debugs = self.enable_debugging_handlers.unwrap_or(config.debugging_handlers);
        config.debugging_handlers = debugs;
        if self.enable_server == Some(false) {
            config.server_tls = None;
        }
        if self.healthz_bind_address.is_none() && self.healthz_port.is_none() {
            return Ok(());
        }
        let usual = config.healthz_address.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 10248)));
        let address = self.healthz_bind_address.unwrap_or(usual.ip());
        let port = self.healthz_port.unwrap_or(usual.port());
        config.healthz_address = (port != 0).then_some(SocketAddr::new(address, port));
        Ok(())
    }

    fn apply_node(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        config.register = self.register_node.unwrap_or(config.register);
        let id = self.provider_id.clone().filter(|id| !id.is_empty());
        config.provider_id = id.or(config.provider_id.take());
        wait_for_cloud(self.cloud_provider.as_deref(), config)?;
        if let Some(period) = self.node_status_update_frequency.filter(|it| !it.is_zero()) {
            config.status_check = period;
            // Upstream: without a frequency of its own, every check is reported.
            config.status_report = period;
        }
        config.reserve.kube = amounts(&self.kube_reserved)?;
        config.reserve.system = amounts(&self.system_reserved)?;
        Ok(())
    }
}

/// Taints the node until a cloud controller manager has described it.
pub fn wait_for_cloud(provider: Option<&str>, config: &mut kubelet::Config) -> anyhow::Result<()> {
    match provider {
        None | Some("") => {}
        Some("external") => {
            config.external_cloud = true;
            config.taints.push(Taint {
                key: UNINITIALIZED.into(),
                value: Some("true".into()),
                effect: "NoSchedule".into(),
                ..Taint::default()
            });
        }
        Some(other) => bail!("unknown cloud provider {other:?}: expected external"),
    }
    Ok(())
}

/// The amounts of a list `RESOURCE=QUANTITY`.
fn amounts(pairs: &[String]) -> anyhow::Result<kubelet::Amounts> {
    let mut all = kubelet::Amounts::new();
    for pair in pairs.iter().filter(|pair| !pair.is_empty()) {
        let (name, text) = pair.split_once('=').context("malformed pair, expect string=string")?;
        let name = name.trim();
        ensure!(
            ["cpu", "memory", "ephemeral-storage", "pid"].contains(&name),
            "cannot reserve {name:?} resource"
        );
        let amount = Amount::parse(text.trim());
        let amount = amount.map_err(|error| anyhow::anyhow!("{name}={text}: {error}"))?;
        ensure!(!amount.is_negative(), "resource quantity for {name:?} cannot be negative: {text}");
        let number = if name == "cpu" { amount.milli() } else { amount.units() };
        all.insert(name.to_owned(), number);
    }
    Ok(all)
}

fn bytes(text: &str) -> anyhow::Result<u64> {
    let amount = Amount::parse(text).ok().and_then(|it| u64::try_from(it.units()).ok());
    amount.filter(|bytes| *bytes > 0).with_context(|| format!("invalid size {text:?}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        settings: Settings,
    }

    fn applied(words: &[&str]) -> anyhow::Result<kubelet::Config> {
        let line = Line::try_parse_from(["x"].iter().chain(words)).expect("flags");
        let mut config = kubelet::Config::new("n", "/data".into());
        line.settings.apply(&mut config).map(|()| config)
    }

    #[test]
    fn flags_change_the_configuration() {
        let config = applied(&[
            "--kube-reserved=cpu=100m,memory=1Gi",
            "--system-reserved=cpu=1",
            "--register-node=false",
            "--provider-id=metal://1",
            "--cloud-provider=external",
            "--container-log-max-size=1Mi",
            "--healthz-port=0",
            "--authorization-mode=AlwaysAllow",
        ]);
        let config = config.expect("valid");
        assert_eq!(config.reserve.of("cpu"), 1100);
        assert_eq!(config.reserve.of("memory"), 1 << 30);
        assert!(!config.register && !config.server_auth.webhook_authorization);
        assert_eq!(config.provider_id.as_deref(), Some("metal://1"));
        assert_eq!(config.taints[0].key, UNINITIALIZED);
        assert_eq!(config.log_max_bytes, 1 << 20);
        assert!(config.healthz_address.is_none());
    }

    #[test]
    fn wrong_values_are_refused() {
        let check = |flag: &str, expected: &str| {
            let error = applied(&[flag]).err().expect("a wrong value");
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        };
        check("--kube-reserved=gpu=1", "cannot reserve \"gpu\" resource");
        check("--system-reserved=cpu=-1", "cannot be negative");
        check("--authorization-mode=Magic", "unknown authorization mode Magic");
        check("--cloud-provider=aws", "unknown cloud provider");
        check("--container-log-max-files=1", "must be greater than 1");
    }
}
