//! Upstream's flags of kube-apiserver about requests, tokens, TLS and shutdown. `decapod server` has their
//! defaults.
//!
//! In: flags. Out: settings of the API server's parts, checked as upstream checks them.
//! Upstream: `pkg/controlplane/apiserver/options`, `apiserver/pkg/server/options`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use apiserver::serve::Browsers;
use auth::service_account::Lifetimes;
use pki::{Issued, San};
use transport::tls::{ClientCerts, Identity, Listeners, ServerTls};

const HOUR: Duration = Duration::from_secs(3600);

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Settings {
    /// Kinds of node addresses for connections to kubelets, the preferred first [default:
    /// InternalIP,Hostname,InternalDNS,ExternalDNS,ExternalIP]
    #[arg(long, value_delimiter = ',', value_name = "TYPE")]
    kubelet_preferred_address_types: Vec<String>,
    /// Client certificate for aggregated API servers, PEM; watched for changes
    #[arg(long, value_name = "FILE", requires = "proxy_client_key_file")]
    pub proxy_client_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE", requires = "proxy_client_cert_file")]
    pub proxy_client_key_file: Option<PathBuf>,
    /// How long Events are kept; 0s: always [default: 1h]
    #[arg(long, value_parser = base::duration::parse, value_name = "DURATION")]
    event_ttl: Option<Duration>,
    /// Share of HTTP/2 requests after which a client must open another connection, up to 0.02
    #[arg(long, value_name = "SHARE")]
    goaway_chance: Option<f64>,
    /// Longest lifetime of a service account token: from 1h to 2^32 seconds
    #[arg(long, value_parser = base::duration::parse, value_name = "DURATION")]
    service_account_max_token_expiration: Option<Duration>,
    /// Let pods' tokens of an hour live for a year, for old clients [default: true]
    #[arg(long)]
    service_account_extend_token_expiration: Option<bool>,
    /// Where others find the keys of service account tokens [default: <server>/openid/v1/jwks]
    #[arg(long, value_name = "URL")]
    service_account_jwks_uri: Option<String>,
    #[command(flatten)]
    pub tls: TlsFlags,
    /// CERT,KEY or CERT,KEY:NAME,…: another certificate for clients that ask for these names; may be repeated
    #[arg(long, value_name = "FILES")]
    tls_sni_cert_key: Vec<String>,
    /// Origins whose scripts may read answers: regular expressions
    #[arg(long, value_delimiter = ',', value_name = "REGEX")]
    cors_allowed_origins: Vec<String>,
    /// Directives of the header Strict-Transport-Security: max-age=SECONDS, includeSubDomains, preload
    #[arg(long, value_delimiter = ',', value_name = "DIRECTIVE")]
    strict_transport_security_directives: Vec<String>,
    /// Objects that a DELETE of a collection deletes at the same time [default: 1]
    #[arg(long, value_name = "NUMBER")]
    delete_collection_workers: Option<usize>,
}

/// TLS of all listeners of a component.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct TlsFlags {
    /// VersionTLS12 or VersionTLS13
    #[arg(long, value_name = "VERSION")]
    tls_min_version: Option<String>,
    /// Suites of TLS 1.2 by Go's names [default: all with forward secrecy and AEAD]
    #[arg(long, value_delimiter = ',', value_name = "SUITE")]
    tls_cipher_suites: Vec<String>,
}

impl TlsFlags {
    /// Sets them for the process, before it listens.
    pub fn install(&self) -> anyhow::Result<()> {
        let version = self.tls_min_version.as_deref().unwrap_or_default();
        let listeners = Listeners::new(version, &self.tls_cipher_suites);
        listeners.map_err(anyhow::Error::msg)?.install();
        Ok(())
    }
}

impl Settings {
    pub fn check(&self) -> anyhow::Result<()> {
        let chance = self.goaway_chance();
        ensure!(
            (0.0..=0.02).contains(&chance),
            "--goaway-chance can not be less than 0 or greater than 0.02"
        );
        let most = Duration::from_secs(1 << 32);
        if let Some(time) = self.service_account_max_token_expiration.filter(|it| !it.is_zero()) {
            ensure!(
                (HOUR..=most).contains(&time),
                "the service-account-max-token-expiration must be between 1 hour and 2^32 seconds"
            );
        }
        if let Some(uri) = self.service_account_jwks_uri.as_deref().filter(|uri| !uri.is_empty())
            && !uri.starts_with("https://")
        {
            bail!("service-account-jwks-uri requires https scheme, parsed as: {uri}");
        }
        self.browsers().map(|_| ())
    }

    pub fn goaway_chance(&self) -> f64 {
        self.goaway_chance.unwrap_or_default()
    }

    pub fn event_ttl(&self) -> Duration {
        self.event_ttl.unwrap_or(HOUR)
    }

    pub fn delete_workers(&self) -> usize {
        self.delete_collection_workers.unwrap_or(1)
    }

    pub fn lifetimes(&self) -> Lifetimes {
        let longest = self.service_account_max_token_expiration.filter(|it| !it.is_zero());
        Lifetimes {
            longest_seconds: longest.and_then(|it| i64::try_from(it.as_secs()).ok()),
            extends: self.service_account_extend_token_expiration.unwrap_or(true),
        }
    }

    pub fn jwks_uri(&self, server: &str) -> String {
        let given = self.service_account_jwks_uri.clone().filter(|uri| !uri.is_empty());
        given.unwrap_or_else(|| format!("{server}/openid/v1/jwks"))
    }

    pub fn browsers(&self) -> anyhow::Result<Browsers> {
        let (origins, directives) =
            (&self.cors_allowed_origins, &self.strict_transport_security_directives);
        Browsers::new(origins, directives).map_err(anyhow::Error::msg)
    }

    pub fn kubelets(&self, kubelets: control::Kubelets) -> control::Kubelets {
        match self.kubelet_preferred_address_types.as_slice() {
            [] => kubelets,
            given => kubelets.preferring(given.to_vec()),
        }
    }

    /// The client certificate for aggregated API servers, if flags name one.
    pub fn proxy_client(&self) -> anyhow::Result<Option<Issued>> {
        let (Some(cert), Some(key)) = (&self.proxy_client_cert_file, &self.proxy_client_key_file)
        else {
            return Ok(None);
        };
        Ok(Some(Issued { cert_pem: read(cert)?, key_pem: read(key)? }))
    }

    /// The listener's settings for its own certificate and those of `--tls-sni-cert-key`.
    pub fn listener(&self, issued: &Issued) -> anyhow::Result<Arc<Listener>> {
        let named = self.tls_sni_cert_key.iter().map(|text| Named::parse(text));
        let named: Vec<Named> = named.collect::<anyhow::Result<_>>()?;
        Listener::new(issued, named).map(Arc::new)
    }
}

/// A certificate for clients that ask for a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Empty: the names of the certificate.
    names: Vec<String>,
}

impl Named {
    /// From `CERT,KEY:NAME,…`.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let (files, names) = match text.split_once(':') {
            Some((files, names)) => {
                (files, names.split(',').map(|name| name.trim().to_owned()).collect())
            }
            None => (text, vec![]),
        };
        let (cert, key) = files.split_once(',').with_context(|| {
            format!(
                "--tls-sni-cert-key {text}: expected comma separated certificate and key file paths"
            )
        })?;
        Ok(Self { cert: cert.trim().into(), key: key.trim().into(), names })
    }

    fn issued(&self) -> anyhow::Result<Issued> {
        Ok(Issued { cert_pem: read(&self.cert)?, key_pem: read(&self.key)? })
    }

    fn load(&self) -> anyhow::Result<(Vec<String>, Identity)> {
        let issued = self.issued()?;
        let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem)
            .with_context(|| self.cert.display().to_string())?;
        if !self.names.is_empty() {
            return Ok((self.names.clone(), identity));
        }
        let leaf = pki::certificates(issued.cert_pem.as_bytes())?.into_iter().next();
        let sans = leaf.map(|leaf| leaf.sans).unwrap_or_default();
        let names = sans.iter().filter_map(|san| match san {
            San::Dns(name) => Some(name.clone()),
            _ => None,
        });
        Ok((names.collect(), identity))
    }
}

/// TLS of the API server's listener, with its certificates.
pub struct Listener {
    pub tls: ServerTls,
    named: Vec<Named>,
    /// The certificate for all other names; locked while settings are made of it.
    usual: Mutex<Issued>,
}

impl Listener {
    fn new(issued: &Issued, named: Vec<Named>) -> anyhow::Result<Self> {
        let tls = transport::tls::server_tls(&identity(issued)?, &ClientCerts::Request)?;
        let listener = Self { tls, named, usual: Mutex::new(issued.clone()) };
        listener.replace(issued)?;
        Ok(listener)
    }

    /// Uses another certificate from now on.
    pub fn replace(&self, issued: &Issued) -> anyhow::Result<()> {
        let mut usual = self.usual.lock().expect("no panic under the lock");
        self.apply(issued)?;
        *usual = issued.clone();
        Ok(())
    }

    fn apply(&self, usual: &Issued) -> anyhow::Result<()> {
        let named = self.named.iter().map(Named::load).collect::<anyhow::Result<Vec<_>>>()?;
        let identity = identity(usual)?;
        let config =
            transport::tls::server_config_by_name(&identity, &named, &ClientCerts::Request)?;
        self.tls.store(Arc::new(config));
        Ok(())
    }

    /// Follows the files of the certificates by name.
    pub fn follow(self: &Arc<Self>, rotation: &crate::rotation::Rotation) -> anyhow::Result<()> {
        for one in &self.named {
            let listener = self.clone();
            let apply = move |_: &Issued| {
                let usual = listener.usual.lock().expect("no panic under the lock");
                listener.apply(&usual)
            };
            rotation.files(&one.cert, &one.key, &one.issued()?, apply);
        }
        Ok(())
    }
}

fn identity(issued: &Issued) -> anyhow::Result<Identity> {
    Ok(Identity::from_pem(&issued.cert_pem, &issued.key_pem)?)
}

fn read(path: &std::path::Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
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

    fn settings(words: &[&str]) -> Settings {
        Line::try_parse_from(["x"].iter().chain(words)).expect("flags").settings
    }

    #[test]
    fn wrong_values_are_upstreams_errors() {
        let check = |words: &[&str], expected: &str| {
            let found = settings(words).check().err().map(|error| error.to_string());
            assert!(found.as_deref().unwrap_or_default().contains(expected), "{words:?} {found:?}");
            assert_eq!(found.is_none(), expected.is_empty(), "{words:?}");
        };
        check(&[], "");
        check(&["--goaway-chance=0.02"], "");
        check(
            &["--goaway-chance=0.1"],
            "--goaway-chance can not be less than 0 or greater than 0.02",
        );
        check(
            &["--service-account-max-token-expiration=1m"],
            "must be between 1 hour and 2^32 seconds",
        );
        check(
            &["--service-account-jwks-uri=http://a"],
            "requires https scheme, parsed as: http://a",
        );
        check(&["--cors-allowed-origins=a"], "does not pin to start/end");
        check(&["--strict-transport-security-directives=x"], "allowed values");
    }

    #[test]
    fn settings_have_upstreams_defaults() {
        let usual = settings(&[]);
        assert_eq!(usual.event_ttl(), HOUR);
        assert!(usual.lifetimes().extends && usual.lifetimes().longest_seconds.is_none());
        assert_eq!(usual.jwks_uri("https://a:1"), "https://a:1/openid/v1/jwks");
        let given = settings(&[
            "--event-ttl=5m",
            "--service-account-max-token-expiration=2h",
            "--service-account-extend-token-expiration=false",
            "--service-account-jwks-uri=https://b/keys",
        ]);
        assert_eq!(given.event_ttl(), Duration::from_secs(300));
        assert_eq!(given.lifetimes().longest_seconds, Some(7200));
        assert!(!given.lifetimes().extends);
        assert_eq!(given.jwks_uri("https://a:1"), "https://b/keys");
    }

    #[test]
    fn certificates_by_name_are_read_from_their_files() {
        let named = Named::parse("/a.crt,/a.key:x,*.y").expect("valid");
        assert_eq!(named.names, ["x", "*.y"]);
        let directory = tempfile::tempdir().expect("a directory");
        let pki = pki::Pki::open_or_create(directory.path()).expect("certificates");
        let profile = pki::Profile::server("other", vec![San::parse("other.example")]);
        let issued = pki.ensure("other", &profile).expect("issued");
        let (cert, key) = (directory.path().join("o.crt"), directory.path().join("o.key"));
        std::fs::write(&cert, &issued.cert_pem).expect("written");
        std::fs::write(&key, &issued.key_pem).expect("written");
        let flag = format!("--tls-sni-cert-key={},{}", cert.display(), key.display());
        let settings = settings(&[&flag]);
        assert!(settings.listener(&issued).is_ok());
        let (names, _) =
            Named::parse(&settings.tls_sni_cert_key[0]).and_then(|one| one.load()).expect("loaded");
        assert_eq!(names, ["other.example"]);
        std::fs::remove_file(&key).expect("removed");
        assert!(settings.listener(&issued).is_err());
    }
}
