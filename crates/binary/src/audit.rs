//! Upstream's flags for auditing, and the backends that they configure.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use apiserver::audit::log::{Log, Rotation};
use apiserver::audit::webhook::Webhook;
use apiserver::audit::{Audit, Backend, Batching, Mode, Policy, Truncation, Writer};
use base::task::Tasks;
use clap::ValueEnum;
use transport::{ClientOptions, HttpClient, Token};

/// The only supported version of events.
const VERSION: &str = "audit.k8s.io/v1";
const MAX_BATCH: usize = 10 << 20;
const MAX_EVENT: usize = 100 << 10;

#[derive(clap::Args, Clone, Debug)]
pub struct AuditFlags {
    /// Policy that says which requests are recorded
    #[arg(long, value_name = "FILE")]
    audit_policy_file: Option<PathBuf>,
    /// File of the audit log; - is standard output
    #[arg(long, value_name = "FILE")]
    audit_log_path: Option<String>,
    /// Days that old audit logs are kept
    #[arg(long, default_value_t = 366)]
    audit_log_maxage: u64,
    /// Old audit logs that are kept; 0 for all
    #[arg(long, default_value_t = 100)]
    audit_log_maxbackup: usize,
    /// Megabytes after which a new audit log begins; 0 for one log
    #[arg(long, default_value_t = 100)]
    audit_log_maxsize: u64,
    /// Compress old audit logs
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    audit_log_compress: bool,
    #[arg(long, value_enum, default_value = "json")]
    audit_log_format: Format,
    /// Whether requests wait for the audit log
    #[arg(long, value_enum, default_value = "blocking")]
    audit_log_mode: ModeName,
    #[arg(long, value_name = "VERSION", default_value = VERSION)]
    audit_log_version: String,
    #[arg(long, default_value_t = 10_000)]
    audit_log_batch_buffer_size: usize,
    #[arg(long, default_value_t = 1)]
    audit_log_batch_max_size: usize,
    #[arg(long, default_value = "0s", value_parser = base::duration::parse)]
    audit_log_batch_max_wait: Duration,
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    audit_log_batch_throttle_enable: bool,
    #[arg(long, default_value_t = 0.0)]
    audit_log_batch_throttle_qps: f32,
    #[arg(long, default_value_t = 0)]
    audit_log_batch_throttle_burst: u32,
    /// Remove the objects from events that are too large, and drop events that are still too large
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    audit_log_truncate_enabled: bool,
    /// Maximum bytes of a batch
    #[arg(long, default_value_t = MAX_BATCH)]
    audit_log_truncate_max_batch_size: usize,
    /// Maximum bytes of an event
    #[arg(long, default_value_t = MAX_EVENT)]
    audit_log_truncate_max_event_size: usize,
    /// Kubeconfig of the server that gets audit events
    #[arg(long, value_name = "FILE")]
    audit_webhook_config_file: Option<PathBuf>,
    #[arg(long, alias = "audit-webhook-batch-initial-backoff", default_value = "10s", value_parser = base::duration::parse)]
    audit_webhook_initial_backoff: Duration,
    #[arg(long, value_name = "VERSION", default_value = VERSION)]
    audit_webhook_version: String,
    /// Whether requests wait for the audit webhook
    #[arg(long, value_enum, default_value = "batch")]
    audit_webhook_mode: ModeName,
    #[arg(long, default_value_t = 10_000)]
    audit_webhook_batch_buffer_size: usize,
    #[arg(long, default_value_t = 400)]
    audit_webhook_batch_max_size: usize,
    #[arg(long, default_value = "30s", value_parser = base::duration::parse)]
    audit_webhook_batch_max_wait: Duration,
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set)]
    audit_webhook_batch_throttle_enable: bool,
    #[arg(long, default_value_t = 10.0)]
    audit_webhook_batch_throttle_qps: f32,
    #[arg(long, default_value_t = 15)]
    audit_webhook_batch_throttle_burst: u32,
    /// Remove the objects from events that are too large, and drop events that are still too large
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    audit_webhook_truncate_enabled: bool,
    /// Maximum bytes of a batch
    #[arg(long, default_value_t = MAX_BATCH)]
    audit_webhook_truncate_max_batch_size: usize,
    /// Maximum bytes of an event
    #[arg(long, default_value_t = MAX_EVENT)]
    audit_webhook_truncate_max_event_size: usize,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Format {
    Json,
    Legacy,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum ModeName {
    Batch,
    Blocking,
    BlockingStrict,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Batch => Self::Batch,
            ModeName::Blocking => Self::Blocking,
            ModeName::BlockingStrict => Self::BlockingStrict,
        }
    }
}

/// The flags that both backends have.
struct Settings<'a> {
    plugin: &'a str,
    mode: ModeName,
    version: &'a str,
    batching: Batching,
    truncates: bool,
    truncation: Truncation,
}

impl Settings<'_> {
    /// Upstream: `validateBackendBatchOptions` and the checks after it.
    fn check(&self) -> anyhow::Result<()> {
        let plugin = self.plugin;
        if matches!(self.mode, ModeName::Batch) {
            let Batching { buffer, max_size, throttle, .. } = &self.batching;
            for (what, value) in [("buffer size", *buffer), ("max batch size", *max_size)] {
                ensure!(
                    value > 0,
                    "invalid audit batch {plugin} {what} 0, must be a positive number"
                );
            }
            if let Some((qps, burst)) = *throttle {
                let wrong = [("QPS", qps, qps > 0.0), ("burst", burst as f32, burst > 0)];
                for (what, value, is_right) in wrong {
                    ensure!(
                        is_right,
                        "invalid audit batch {plugin} throttle {what} {value}, must be a positive number"
                    );
                }
            }
        }
        let Truncation { max_event, max_batch } = self.truncation;
        ensure!(
            max_event > 0,
            "invalid audit truncate {plugin} max event size 0, must be a positive number"
        );
        ensure!(
            max_batch >= max_event,
            "invalid audit truncate {plugin} max batch size {max_batch}, must be greater than max event size ({max_event})"
        );
        let version = self.version;
        ensure!(
            version == VERSION,
            "--audit-{plugin}-version {version}: invalid group version, allowed versions are [{VERSION}]"
        );
        Ok(())
    }

    fn backend(self, writer: Writer, is_legacy: bool, tasks: &Tasks) -> Backend {
        let truncation = self.truncates.then_some(self.truncation);
        Backend::new(writer, self.mode.into(), self.batching, is_legacy, truncation, tasks)
    }
}

impl AuditFlags {
    /// The flags that a person looks for, as they were given.
    pub fn shown(&self) -> Vec<String> {
        let policy = self.audit_policy_file.as_ref().map(|path| path.display().to_string());
        let given =
            [("audit-policy-file", policy), ("audit-log-path", self.audit_log_path.clone())];
        given.into_iter().filter_map(|(flag, value)| Some(format!("--{flag}={}", value?))).collect()
    }

    /// `None` without a policy. The backends' tasks belong to `last`, which ends after `tasks`: the last
    /// request is recorded by then.
    pub fn open(&self, tasks: &Tasks, last: &Tasks) -> anyhow::Result<Option<Arc<Audit>>> {
        let (log, webhook) = (self.log_settings(), self.webhook_settings());
        if self.audit_log_path.is_some() {
            log.check()?;
        }
        if self.audit_webhook_config_file.is_some() {
            webhook.check()?;
        }
        let Some(path) = &self.audit_policy_file else {
            tracing::info!("audit is off: there is no --audit-policy-file");
            return Ok(None);
        };
        let text = std::fs::read_to_string(path).with_context(|| {
            format!("failed to read file path {:?}", path.display().to_string())
        })?;
        let policy = Policy::parse(&text).map_err(|error| {
            anyhow::anyhow!("loading audit policy file: {error}: from file {}", path.display())
        })?;
        let mut backends = vec![];
        if let Some(path) = &self.audit_log_path {
            let is_legacy = self.audit_log_format == Format::Legacy;
            backends.push(log.backend(self.log(path)?, is_legacy, last));
        }
        if let Some(path) = &self.audit_webhook_config_file {
            backends.push(webhook.backend(self.webhook(path)?, false, last));
        }
        if backends.is_empty() {
            tracing::warn!("audit is off: there is no --audit-log-path and no webhook");
            return Ok(None);
        }
        tracing::info!(
            policy = %path.display(),
            log = self.audit_log_path.as_deref().unwrap_or_default(),
            webhook = self.audit_webhook_config_file.is_some(),
            "audit is on"
        );
        Ok(Some(Audit::new(policy, backends, tasks.clone())))
    }

    fn log_settings(&self) -> Settings<'_> {
        let throttle = (self.audit_log_batch_throttle_qps, self.audit_log_batch_throttle_burst);
        Settings {
            plugin: "log",
            mode: self.audit_log_mode,
            version: &self.audit_log_version,
            batching: Batching {
                buffer: self.audit_log_batch_buffer_size,
                max_size: self.audit_log_batch_max_size,
                max_wait: self.audit_log_batch_max_wait,
                throttle: self.audit_log_batch_throttle_enable.then_some(throttle),
            },
            truncates: self.audit_log_truncate_enabled,
            truncation: Truncation {
                max_event: self.audit_log_truncate_max_event_size,
                max_batch: self.audit_log_truncate_max_batch_size,
            },
        }
    }

    fn webhook_settings(&self) -> Settings<'_> {
        let qps = self.audit_webhook_batch_throttle_qps;
        let throttle = (qps, self.audit_webhook_batch_throttle_burst);
        Settings {
            plugin: "webhook",
            mode: self.audit_webhook_mode,
            version: &self.audit_webhook_version,
            batching: Batching {
                buffer: self.audit_webhook_batch_buffer_size,
                max_size: self.audit_webhook_batch_max_size,
                max_wait: self.audit_webhook_batch_max_wait,
                throttle: self.audit_webhook_batch_throttle_enable.then_some(throttle),
            },
            truncates: self.audit_webhook_truncate_enabled,
            truncation: Truncation {
                max_event: self.audit_webhook_truncate_max_event_size,
                max_batch: self.audit_webhook_truncate_max_batch_size,
            },
        }
    }

    fn log(&self, path: &str) -> anyhow::Result<Writer> {
        let rotation = Rotation {
            max_megabytes: self.audit_log_maxsize,
            max_backups: self.audit_log_maxbackup,
            max_age_days: self.audit_log_maxage,
            compress: self.audit_log_compress,
        };
        let log = Log::open(path, rotation)
            .with_context(|| format!("ensureLogFile: cannot write the audit log {path}"))?;
        Ok(Writer::Log(Arc::new(log)))
    }

    fn webhook(&self, path: &Path) -> anyhow::Result<Writer> {
        let named = || format!("--audit-webhook-config-file {}", path.display());
        let config = pki::Kubeconfig::read(path).with_context(named)?;
        let credentials =
            config.resolve(None, path.parent().unwrap_or(Path::new("."))).with_context(named)?;
        let (server, place) = split(&credentials.server).with_context(named)?;
        let http = HttpClient::new(&ClientOptions {
            server,
            ca_pem: credentials.ca_pem,
            cert_pem: credentials.client_cert_pem,
            key_pem: credentials.client_key_pem,
            insecure: credentials.insecure_skip_tls_verify,
            server_name: credentials.tls_server_name,
            token: credentials.token.map(Token::fixed),
            user_agent: None,
            source: None,
        })
        .with_context(named)?;
        let initial_backoff = self.audit_webhook_initial_backoff;
        Ok(Writer::Webhook(Webhook { http, path: place, initial_backoff }))
    }
}

/// Splits a URL into the server and the path.
fn split(url: &str) -> anyhow::Result<(String, String)> {
    let Some((scheme, rest)) = url.split_once("://") else { bail!("{url} is not a URL") };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    Ok((format!("{scheme}://{host}"), format!("/{path}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_from_servers() {
        for (url, server, path) in [
            (
                "https://audit.example.com:8443/k8s?x=1",
                "https://audit.example.com:8443",
                "/k8s?x=1",
            ),
            ("http://127.0.0.1:9", "http://127.0.0.1:9", "/"),
        ] {
            assert_eq!(split(url).expect("a URL"), (server.into(), path.into()));
        }
        assert!(split("audit").is_err());
    }

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: AuditFlags,
    }

    #[test]
    fn settings_are_checked_in_upstreams_words() {
        use clap::Parser;
        let check = |words: &str, expected: &str| {
            let words = ["x", "--audit-webhook-config-file=/none", "--audit-log-path=/none/log"]
                .into_iter()
                .chain(words.split_whitespace());
            let flags = Line::try_parse_from(words).expect("flags").flags;
            let tasks = Tasks::new("test");
            let error = flags.open(&tasks, &tasks).err().map(|error| error.to_string());
            assert_eq!(error.unwrap_or_default(), expected);
        };
        check("", "");
        check(
            "--audit-webhook-truncate-max-event-size=0",
            "invalid audit truncate webhook max event size 0, must be a positive number",
        );
        check(
            "--audit-log-truncate-enabled --audit-log-truncate-max-batch-size=5",
            "invalid audit truncate log max batch size 5, must be greater than max event size (102400)",
        );
        check(
            "--audit-webhook-batch-max-size=0",
            "invalid audit batch webhook max batch size 0, must be a positive number",
        );
        check("--audit-webhook-mode=blocking --audit-webhook-batch-max-size=0", "");
        check(
            "--audit-log-mode=batch --audit-log-batch-throttle-enable",
            "invalid audit batch log throttle QPS 0, must be a positive number",
        );
        check(
            "--audit-log-version=audit.k8s.io/v1beta1",
            "--audit-log-version audit.k8s.io/v1beta1: invalid group version, allowed versions are [audit.k8s.io/v1]",
        );
    }
}
