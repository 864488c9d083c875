//! The kubelet's client certificate: asked for with a bootstrap kubeconfig, then renewed.
//!
//! ```text
//!  kubeconfig is there ──────────────────────────────► client ─► renewal (--rotate-certificates)
//!  it is not ─► bootstrap kubeconfig ─► CSR ─► signed ─► <cert-dir>/kubelet-client-DATE.pem
//!                                                        kubelet-client-current.pem is a link to it
//!                                                        kubeconfig names that link
//! ```
//!
//! With renewal, static pods run while the first certificate is asked for.
//!
//! In: both kubeconfigs and a directory. Out: a client that follows its certificate.
//! Upstream: `pkg/kubelet/certificate/bootstrap`, `client-go/util/certificate`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base::backoff::Backoff;
use base::task::Tasks;
use client::Client;
use pki::{Issued, Kubeconfig};
use transport::{ClientOptions, HttpClient};

use crate::agent::certificates::{Order, obtain, time_left};

/// The link to the certificate in use.
const CURRENT: &str = "kubelet-client-current.pem";
/// The longest pause between requests for the first certificate.
const BOOTSTRAP_CEILING: Duration = Duration::from_secs(5);
/// Clocks jump and machines sleep: a waiting renewal checks the time this often.
const LOOK: Duration = Duration::from_secs(1800);

#[derive(clap::Args, Clone, Debug)]
pub struct Identity {
    /// Credentials of the node; created if --bootstrap-kubeconfig is given
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// Credentials that may ask for the node's certificate
    #[arg(long, value_name = "FILE")]
    bootstrap_kubeconfig: Option<PathBuf>,
    /// Directory of the node's certificates
    #[arg(long, default_value = "/var/lib/kubelet/pki", value_name = "DIRECTORY")]
    pub cert_dir: PathBuf,
    /// Renew the client certificate in time
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    rotate_certificates: bool,
}

impl Identity {
    /// The kubelet's client; a task of `tasks` renews its certificate.
    ///
    /// With `--rotate-certificates` the kubelet does not wait for its first certificate: the API server that
    /// signs it may be one of the kubelet's static pods. Until then the client shows no credentials.
    /// Upstream: buildKubeletClientConfig.
    pub async fn client(&self, node: &str, tasks: &Tasks) -> anyhow::Result<Client> {
        if self.kubeconfig.as_os_str().is_empty() {
            bail!("--kubeconfig is required: a kubelet without an API server is not supported");
        }
        let given =
            self.bootstrap_kubeconfig.as_deref().filter(|path| !path.as_os_str().is_empty());
        let asks = given.filter(|_| !is_usable(&self.kubeconfig)).map(bootstrap_options);
        let asks = asks.transpose()?;
        if let Some(asks) = &asks
            && !self.rotate_certificates
        {
            self.bootstrap(asks, node).await?;
        }
        let asks = asks.filter(|_| self.rotate_certificates);
        let options = match &asks {
            Some(asks) => ClientOptions {
                cert_pem: None,
                key_pem: None,
                token: None,
                source: None,
                ..asks.clone()
            },
            None => crate::kubeconfig::options(&self.kubeconfig, None)?,
        };
        let http =
            HttpClient::new(&options).with_context(|| self.kubeconfig.display().to_string())?;
        let client = Client::over(http.clone(), "kubelet");
        if self.rotate_certificates && (asks.is_some() || options.cert_pem.is_some()) {
            let (this, own, node) = (self.clone(), client.clone(), node.to_owned());
            tasks.spawn("kubelet client certificate", async move {
                this.keep(asks, &http, options, &own, &node).await;
            });
        }
        Ok(client)
    }

    /// Gets the first certificate, if there is none, and renews it.
    async fn keep(
        &self,
        asks: Option<ClientOptions>,
        http: &HttpClient,
        mut options: ClientOptions,
        own: &Client,
        node: &str,
    ) {
        if let Some(asks) = asks {
            let first = async {
                let issued = self.bootstrap(&asks, node).await?;
                options.cert_pem = Some(issued.cert_pem);
                options.key_pem = Some(issued.key_pem);
                http.replace_tls(&options)?;
                anyhow::Ok(())
            };
            if let Err(error) = first.await {
                let error = format!("{error:#}");
                tracing::error!(error, "the kubelet has no client certificate");
                return;
            }
            tracing::info!("got the kubelet's client certificate");
        }
        self.renew(http, options, own, node).await;
    }

    /// Asks until a certificate is signed, and writes it and the kubeconfig.
    async fn bootstrap(&self, asks: &ClientOptions, node: &str) -> anyhow::Result<Issued> {
        let client = Client::over(HttpClient::new(asks)?, "kubelet");
        tracing::info!(node, "requesting the kubelet's client certificate");
        let mut backoff = Backoff::new(Duration::from_secs(1), BOOTSTRAP_CEILING);
        let issued = loop {
            match obtain(&client, &Order::kubelet_client(node)).await {
                Ok(issued) => break issued,
                Err(error) => {
                    let error = format!("{error:?}");
                    tracing::warn!(
                        error,
                        "failed to get the kubelet's client certificate, will retry"
                    );
                    tokio::select! {
                        () = tokio::time::sleep(backoff.step()) => {}
                        () = crate::process::termination() => bail!("stopped before the kubelet had a certificate"),
                    }
                }
            }
        };
        let current = store(&self.cert_dir, &issued)?;
        write_kubeconfig(&self.kubeconfig, asks, &current)?;
        Ok(issued)
    }

    /// Replaces the certificate after four fifths of its life, repeatedly.
    async fn renew(
        &self,
        http: &HttpClient,
        mut options: ClientOptions,
        client: &Client,
        node: &str,
    ) {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
        loop {
            while let Some(wait) = left(&options) {
                tokio::time::sleep(wait.min(LOOK)).await;
            }
            let renewed = async {
                let issued = obtain(client, &Order::kubelet_client(node)).await?;
                store(&self.cert_dir, &issued)?;
                options.cert_pem = Some(issued.cert_pem);
                options.key_pem = Some(issued.key_pem);
                http.replace_tls(&options)?;
                anyhow::Ok(())
            };
            match renewed.await {
                Ok(()) => {
                    backoff.reset();
                    tracing::info!("replaced the kubelet's client certificate");
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(
                        error,
                        "failed to renew the kubelet's client certificate, will retry"
                    );
                    tokio::time::sleep(backoff.step()).await;
                }
            }
        }
    }
}

fn bootstrap_options(path: &Path) -> anyhow::Result<ClientOptions> {
    crate::kubeconfig::options(path, None).with_context(|| {
        format!("failed to run Kubelet: unable to load bootstrap kubeconfig {}", path.display())
    })
}

/// Time until the renewal of the client's certificate is due.
fn left(options: &ClientOptions) -> Option<Duration> {
    let cert_pem = options.cert_pem.clone()?;
    time_left(&Issued { cert_pem, key_pem: String::new() })
}

/// Whether a kubeconfig is there whose client certificate, if it has one, is valid.
/// Upstream: isClientConfigStillValid.
fn is_usable(kubeconfig: &Path) -> bool {
    let Ok(options) = crate::kubeconfig::options(kubeconfig, None) else { return false };
    let Some(pem) = options.cert_pem else { return true };
    let chain = pki::certificates(pem.as_bytes()).unwrap_or_default();
    chain.first().is_some_and(|leaf| leaf.not_after > base::clock::now())
}

/// Writes certificate and key into one file, and lets the link name it.
fn store(directory: &Path, issued: &Issued) -> anyhow::Result<PathBuf> {
    let shown = directory.display();
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {shown}"))?;
    let stamp = base::clock::now().strftime("%Y-%m-%d-%H-%M-%S");
    let file = format!("kubelet-client-{stamp}.pem");
    let text = format!("{}\n{}", issued.cert_pem.trim_end(), issued.key_pem);
    pki::write_private(&directory.join(&file), text.as_bytes(), 0o600)?;
    let (link, fresh) = (directory.join(CURRENT), directory.join(format!("{CURRENT}.new")));
    let _ = std::fs::remove_file(&fresh);
    std::os::unix::fs::symlink(&file, &fresh)
        .and_then(|()| std::fs::rename(&fresh, &link))
        .with_context(|| format!("cannot write {}", link.display()))?;
    Ok(link)
}

fn write_kubeconfig(path: &Path, server: &ClientOptions, current: &Path) -> anyhow::Result<()> {
    let ca = server.ca_pem.clone().unwrap_or_default();
    let mut config = Kubeconfig::with_token(&server.server, &ca, "default-auth", "");
    for user in &mut config.users {
        user.user.token = None;
        user.user.client_certificate = Some(current.to_owned());
        user.user.client_key = Some(current.to_owned());
    }
    config.write(path, 0o600).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubeconfig_names_the_link_to_the_newest_certificate() {
        let root = tempfile::tempdir().expect("a directory");
        let (pki_dir, path) = (root.path().join("pki"), root.path().join("kubelet.conf"));
        assert!(!is_usable(&path));
        let authority = pki::Authority::generate("ca").expect("an authority");
        let order = Order::kubelet_client("n1");
        let issued = authority.issue(&order.profile).expect("signs");
        let current = store(&pki_dir, &issued).expect("stores");
        let server = ClientOptions {
            server: "https://192.0.2.1:6443".into(),
            ca_pem: Some(authority.cert_pem().to_owned()),
            ..ClientOptions::default()
        };
        write_kubeconfig(&path, &server, &current).expect("writes");
        assert!(is_usable(&path));
        let read = crate::kubeconfig::options(&path, None).expect("a kubeconfig");
        assert_eq!(read.server, server.server);
        assert!(read.token.is_none());
        assert!(left(&read).is_some());
        let next = authority.issue(&order.profile).expect("signs");
        store(&pki_dir, &next).expect("stores");
        let read = crate::kubeconfig::options(&path, None).expect("a kubeconfig");
        assert!(read.cert_pem.expect("a certificate").contains(next.cert_pem.trim()));
    }
}
