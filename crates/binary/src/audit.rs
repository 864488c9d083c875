//! The audit log's flags, by upstream's names, and what they make.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use apiserver::audit::log::{Log, Rotation};
use apiserver::audit::webhook::Webhook;
use apiserver::audit::{Audit, Backend, Batching, Mode, Policy, Writer};
use base::task::Tasks;
use clap::ValueEnum;
use transport::{ClientOptions, HttpClient, Token};

#[derive(clap::Args, Clone, Debug)]
pub struct AuditFlags {
    /// Which requests are noted in the audit log
    #[arg(long, value_name = "FILE")]
    audit_policy_file: Option<PathBuf>,
    /// Where the audit log is written; - is standard output
    #[arg(long, value_name = "FILE")]
    audit_log_path: Option<String>,
    /// Days that old audit logs are kept
    #[arg(long, default_value_t = 366)]
    audit_log_maxage: u64,
    /// Old audit logs that are kept; 0 for all
    #[arg(long, default_value_t = 100)]
    audit_log_maxbackup: usize,
    /// Megabytes of an audit log before the next one begins
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
    #[arg(long, default_value_t = 10_000)]
    audit_log_batch_buffer_size: usize,
    #[arg(long, default_value_t = 1)]
    audit_log_batch_max_size: usize,
    /// A kubeconfig that says where audit events are posted
    #[arg(long, value_name = "FILE")]
    audit_webhook_config_file: Option<PathBuf>,
    #[arg(long, default_value = "10s", value_parser = base::duration::parse)]
    audit_webhook_initial_backoff: Duration,
    /// Whether requests wait for the audit webhook
    #[arg(long, value_enum, default_value = "batch")]
    audit_webhook_mode: ModeName,
    #[arg(long, default_value_t = 10_000)]
    audit_webhook_batch_buffer_size: usize,
    #[arg(long, default_value_t = 400)]
    audit_webhook_batch_max_size: usize,
    #[arg(long, default_value = "30s", value_parser = base::duration::parse)]
    audit_webhook_batch_max_wait: Duration,
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    audit_webhook_batch_throttle_enable: bool,
    #[arg(long, default_value_t = 10.0)]
    audit_webhook_batch_throttle_qps: f32,
    #[arg(long, default_value_t = 15)]
    audit_webhook_batch_throttle_burst: u32,
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

impl AuditFlags {
    /// Nothing without a policy.
    pub fn open(&self, tasks: &Tasks) -> anyhow::Result<Option<Arc<Audit>>> {
        let Some(path) = &self.audit_policy_file else { return Ok(None) };
        let text = std::fs::read_to_string(path).with_context(|| {
            format!("failed to read file path {:?}", path.display().to_string())
        })?;
        let policy = Policy::parse(&text).map_err(|error| {
            anyhow::anyhow!("loading audit policy file: {error}: from file {}", path.display())
        })?;
        let mut backends = vec![];
        if let Some(path) = &self.audit_log_path {
            backends.push(self.log(path, tasks)?);
        }
        if let Some(path) = &self.audit_webhook_config_file {
            backends.push(self.webhook(path, tasks)?);
        }
        if backends.is_empty() {
            return Ok(None);
        }
        Ok(Some(Audit::new(policy, backends, tasks.clone())))
    }

    fn log(&self, path: &str, tasks: &Tasks) -> anyhow::Result<Backend> {
        let rotation = Rotation {
            max_megabytes: self.audit_log_maxsize,
            max_backups: self.audit_log_maxbackup,
            max_age_days: self.audit_log_maxage,
            compress: self.audit_log_compress,
        };
        let log = Log::open(path, rotation)
            .with_context(|| format!("ensureLogFile: cannot write the audit log {path}"))?;
        let batching = Batching {
            buffer: self.audit_log_batch_buffer_size,
            max_size: self.audit_log_batch_max_size.max(1),
            max_wait: Duration::ZERO,
            throttle: None,
        };
        let is_legacy = self.audit_log_format == Format::Legacy;
        Ok(Backend::new(Writer::Log(log), self.audit_log_mode.into(), batching, is_legacy, tasks))
    }

    fn webhook(&self, path: &Path, tasks: &Tasks) -> anyhow::Result<Backend> {
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
        let throttle = self.audit_webhook_batch_throttle_enable.then_some((
            self.audit_webhook_batch_throttle_qps,
            self.audit_webhook_batch_throttle_burst,
        ));
        let batching = Batching {
            buffer: self.audit_webhook_batch_buffer_size,
            max_size: self.audit_webhook_batch_max_size.max(1),
            max_wait: self.audit_webhook_batch_max_wait,
            throttle,
        };
        Ok(Backend::new(
            Writer::Webhook(Webhook { http, path: place, initial_backoff }),
            self.audit_webhook_mode.into(),
            batching,
            false,
            tasks,
        ))
    }
}

/// A URL as the server and the place on it.
fn split(url: &str) -> anyhow::Result<(String, String)> {
    let Some((scheme, rest)) = url.split_once("://") else { bail!("{url} is no URL") };
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
}
