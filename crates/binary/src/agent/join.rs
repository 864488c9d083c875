//! Joins a cluster: from a URL and a token to identities and the cluster's settings.
//!
//! Every step is retried until the server answers. An answer that a retry cannot change ends the program
//! with one line.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use base::backoff::Backoff;
use client::{Api, Client, ErrorExt, PostParams};
use ipnet::IpNet;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::ConfigMap;
use machinery::address_range::AddressRange;
use pki::{Certificate, Component, Issued, JoinToken, Kubeconfig};
use rustls::CertificateError;
use transport::{ClientOptions, HttpClient, Token};

use super::certificates::{self, Home, Order};
use super::{Machine, connect};
use crate::flags::{self, Backend};
use crate::process::say;

const CA: &str = "ca.crt";
const SETTINGS: &str = "cluster.json";
/// The cluster's authority; readable without authentication.
const CLUSTER_INFO: &str = "/api/v1/namespaces/kube-public/configmaps/cluster-info";
/// Longest time that a joined node waits at its start for new settings.
const NEWS: Duration = Duration::from_secs(5);

/// Everything that a joined node needs.
pub struct Joined {
    pub ca_pem: String,
    pub settings: Settings,
    pub kubelet: Member,
    pub proxy: Member,
    pub dns: Option<Member>,
}

/// An identity of this node.
pub struct Member {
    pub order: Order,
    pub issued: Issued,
    pub http: HttpClient,
}

/// Why a step failed.
#[derive(Debug)]
pub enum Trouble {
    /// A retry may succeed.
    Later(String),
    /// The credentials are not accepted.
    Unauthorized,
    Final(anyhow::Error),
}

impl From<anyhow::Error> for Trouble {
    fn from(error: anyhow::Error) -> Self {
        Self::Final(error)
    }
}

impl From<Trouble> for anyhow::Error {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Later(text) => anyhow::anyhow!(text),
            Trouble::Unauthorized => anyhow::anyhow!("the credentials are not accepted"),
            Trouble::Final(error) => error,
        }
    }
}

impl From<client::Error> for Trouble {
    fn from(error: client::Error) -> Self {
        match refused_certificate(&error) {
            // The clock may be corrected later.
            Some(refusal) if is_of_time(&refusal) => return Self::Later(of_time(&refusal)),
            Some(_) => {
                return Self::Final(anyhow::anyhow!(
                    "its certificate is not from the authority of this node's cluster"
                ));
            }
            None => {}
        }
        match error.code() {
            401 => Self::Unauthorized,
            // Also 403 and 404: a server that just started has not written its first objects yet.
            _ => Self::Later(reason(&error)),
        }
    }
}

/// The innermost cause: `Connection refused` rather than the names of layers.
fn reason(error: &client::Error) -> String {
    if error.code() != 0 {
        return error.text();
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// The error of the server's certificate, if the handshake failed because of it.
fn refused_certificate(error: &(dyn std::error::Error + 'static)) -> Option<CertificateError> {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = cause {
        // An I/O error does not return its inner error from `source`.
        let carried = current.downcast_ref::<std::io::Error>().and_then(|io| io.get_ref());
        let tls = carried.and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if let Some(rustls::Error::InvalidCertificate(refusal)) = tls {
            return Some(refusal.clone());
        }
        cause = current.source();
    }
    None
}

fn is_of_time(refusal: &CertificateError) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(refusal, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}

/// The message for an expired or not yet valid certificate: usually this machine's clock is wrong.
fn of_time(refusal: &CertificateError) -> String {
    let is_early = matches!(
        refusal,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }
    );
    let what = if is_early { "is not valid yet" } else { "has expired" };
    let now = base::clock::now();
    format!(
        "its certificate {what}, by the clock of this machine, which says {now:.0}: is it right?"
    )
}

/// The options of a client with a certificate.
pub fn options(server: &str, ca_pem: &str, issued: &Issued) -> ClientOptions {
    ClientOptions {
        server: server.to_owned(),
        ca_pem: Some(ca_pem.to_owned()),
        cert_pem: Some(issued.cert_pem.clone()),
        key_pem: Some(issued.key_pem.clone()),
        ..ClientOptions::default()
    }
}

/// Waits for the server without limit; joins once. The node's components then use the balancer's `url`.
pub async fn join(
    flags: &flags::Agent,
    server: &str,
    url: &str,
    home: &Home,
    machine: &Machine,
) -> anyhow::Result<Joined> {
    let token = flags.join_token()?;
    let ca_pem = authority(server, home, token.as_ref()).await?;
    let order = Order::kubelet_client(&machine.name);
    let mut stored = home.stored(&order, &ca_pem);
    let (issued, settings) = loop {
        let is_stored = stored.is_some();
        let issued = match stored.take() {
            Some(issued) => issued,
            None => bootstrap(server, &ca_pem, home, &order, token.as_ref()).await?,
        };
        let client = Client::over(connect(server, &ca_pem, &issued)?, "decapod-agent");
        match settings(server, home, &client).await {
            Ok(settings) => break (issued, settings),
            // The cluster no longer accepts the certificate: join again.
            Err(Trouble::Unauthorized) if is_stored && token.is_some() => {}
            Err(Trouble::Unauthorized) => bail!(
                "the server {server} does not accept this node's certificate; join again with --token"
            ),
            Err(trouble) => return Err(trouble.into()),
        }
    };
    let kubelet = Member { http: connect(url, &ca_pem, &issued)?, order, issued };
    let of_node = Client::over(kubelet.http.clone(), "decapod-agent");
    let component = async |component: Component| {
        let order = Order::component(component, &machine.name);
        let order = order.context("nodes have proxies and DNS servers")?;
        let issued = match home.stored(&order, &ca_pem) {
            Some(issued) => issued,
            None => {
                let issued =
                    patiently(server, async || certificates::obtain(&of_node, &order).await);
                let issued = issued.await?;
                home.store(&order, &issued)?;
                issued
            }
        };
        anyhow::Ok(Member { http: connect(url, &ca_pem, &issued)?, order, issued })
    };
    let proxy = component(Component::Proxy).await?;
    let dns = match settings.runs("dns") && !settings.cluster_dns.is_empty() {
        true => Some(component(Component::Dns).await?),
        false => None,
    };
    Ok(Joined { ca_pem, settings, kubelet, proxy, dns })
}

fn said_by(server: &str, error: anyhow::Error) -> anyhow::Error {
    error.context(format!("the server {server}"))
}

/// Retries until the server answers, and prints why it waits.
async fn patiently<T>(
    server: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, Trouble>,
) -> Result<T, anyhow::Error> {
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
    let mut said = String::new();
    loop {
        match attempt().await {
            Err(Trouble::Later(why)) => {
                if why != said {
                    say(&format!("waiting for the server {server}: {why}"));
                    said = why;
                }
                tokio::time::sleep(backoff.step()).await;
            }
            Err(trouble) => return Err(said_by(server, trouble.into())),
            Ok(done) => return Ok(done),
        }
    }
}

/// The cluster's authority, PEM: the one of an earlier start, or the one that the server shows, whose hash
/// must match the token.
async fn authority(server: &str, home: &Home, token: Option<&JoinToken>) -> anyhow::Result<String> {
    let wanted = token.and_then(|token| token.ca_hash);
    if let Some(known) = home.read(CA) {
        let pem = successor(server, &known).await.unwrap_or_else(|| known.clone());
        let all = pki::certificates(pem.as_bytes());
        let all = all.with_context(|| home.directory().display().to_string())?;
        if wanted.is_some_and(|hash| all.iter().all(|one| one.fingerprint() != hash)) {
            bail!(
                "the token belongs to another cluster than this node; `decapod uninstall` removes the node from its cluster"
            );
        }
        if pem != known {
            home.write(CA, &pem)?;
            say(&format!("the server {server} has a new certificate authority"));
        }
        return Ok(pem);
    }
    if token.is_none() {
        bail!("this node has not joined yet: it needs --token or --token-file");
    }
    shown(server, wanted).await
}

/// The authority of a server, PEM, whose hash must match the token.
pub async fn authority_of(server: &str, token: &JoinToken) -> anyhow::Result<String> {
    shown(server, token.ca_hash).await
}

/// The authority that the server shows. This client sends no secret, and the hash is checked.
async fn shown(server: &str, wanted: Option<[u8; 32]>) -> anyhow::Result<String> {
    let anyone =
        ClientOptions { server: server.into(), insecure: true, ..ClientOptions::default() };
    let client = Client::new(HttpClient::new(&anyone)?, "decapod-agent");
    let info: ConfigMap = patiently(server, async || Ok(client.get(CLUSTER_INFO).await?)).await?;
    let pem = shown_authority(&info)
        .with_context(|| format!("the server {server} shows no authority in cluster-info"))?;
    let found = first_certificate(&pem)?.fingerprint();
    let hex = |hash: &[u8]| hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    match wanted {
        Some(hash) if hash != found => bail!(
            "the server {server} does not belong to the cluster of the token: its authority's hash is {}, the token's {}",
            hex(&found),
            hex(&hash)
        ),
        Some(_) => {}
        None => tracing::warn!(
            sha256 = hex(&found),
            "the token contains no hash of the cluster's authority: trusting the authority that the server shows"
        ),
    }
    Ok(pem)
}

/// The authority that the server shows now, if the known authority authenticates the server; `None` if
/// the server does not answer.
async fn successor(server: &str, known: &str) -> Option<String> {
    let trusting = ClientOptions {
        server: server.into(),
        ca_pem: Some(known.to_owned()),
        ..ClientOptions::default()
    };
    let client = Client::new(HttpClient::new(&trusting).ok()?, "decapod-agent");
    let info = tokio::time::timeout(NEWS, client.get::<ConfigMap>(CLUSTER_INFO)).await;
    shown_authority(&info.ok()?.ok()?).filter(|shown| first_certificate(shown).is_ok())
}

fn shown_authority(info: &ConfigMap) -> Option<String> {
    let text = info.data.as_ref()?.get("kubeconfig")?;
    let config: Kubeconfig = serde_saphyr::from_str(text).ok()?;
    let data = config.clusters.first()?.cluster.certificate_authority_data.clone()?;
    let cluster = pki::kubeconfig::Cluster {
        certificate_authority_data: Some(data),
        ..pki::kubeconfig::Cluster::default()
    };
    let alone = Kubeconfig::new("shown", cluster, pki::kubeconfig::User::default());
    alone.resolve(None, std::path::Path::new("/")).ok()?.ca_pem
}

fn first_certificate(pem: &str) -> anyhow::Result<Certificate> {
    let all = pki::certificates(pem.as_bytes())?;
    all.into_iter().next().context("the authority contains no certificate")
}

/// Gets the kubelet's client certificate with the token.
async fn bootstrap(
    server: &str,
    ca_pem: &str,
    home: &Home,
    order: &Order,
    token: Option<&JoinToken>,
) -> anyhow::Result<Issued> {
    let Some(token) = token else {
        bail!("this node has no valid certificate: it needs --token or --token-file to join again");
    };
    let http = HttpClient::new(&ClientOptions {
        server: server.to_owned(),
        ca_pem: Some(ca_pem.to_owned()),
        token: Some(Token::fixed(token.bootstrap().to_string())),
        ..ClientOptions::default()
    })?;
    let client = Client::over(http, "decapod-agent");
    let asked = async || match certificates::obtain(&client, order).await {
        Err(Trouble::Unauthorized) => {
            Err(Trouble::Final(anyhow::anyhow!("it does not accept the token")))
        }
        other => other,
    };
    let issued = patiently(server, asked).await?;
    // From here on the node is a member of this cluster.
    home.write(CA, ca_pem)?;
    home.forget_components()?;
    home.store(order, &issued)?;
    say(&format!("joined the cluster at {server}"));
    Ok(issued)
}

/// The server's flags that concern nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    pub cluster_cidrs: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    pub cluster_dns: Vec<IpAddr>,
    pub cluster_domain: String,
    /// Pools whose addresses nodes announce.
    pub load_balancer_pools: Vec<AddressRange>,
    /// None: the default, which makes way for CNI plugins.
    pub backend: Option<Backend>,
    disabled: Vec<String>,
}

impl Settings {
    /// Names and values of flags.
    pub fn of_server(flags: &flags::Server) -> BTreeMap<String, String> {
        fn list<T: ToString>(all: &[T]) -> String {
            all.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        }
        [
            ("cluster-cidr", list(&flags.cluster_cidr)),
            ("service-cidr", list(&flags.service_cidr)),
            ("cluster-dns", list(&flags.cluster_dns)),
            ("cluster-domain", flags.cluster_domain.clone()),
            ("load-balancer-pool", list(flags.announced_pools())),
            ("disable", list(&flags.disable)),
            ("backend", flags.backend.map(|backend| backend.to_string()).unwrap_or_default()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }

    fn parse(data: &BTreeMap<String, String>) -> anyhow::Result<Self> {
        fn list<T: std::str::FromStr>(
            data: &BTreeMap<String, String>,
            key: &str,
        ) -> anyhow::Result<Vec<T>> {
            let text = data.get(key).map_or("", String::as_str);
            let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
            let parsed: Option<Vec<T>> = parts.map(|part| part.parse().ok()).collect();
            parsed.with_context(|| format!("the cluster's {key} is {text:?}"))
        }
        let backend = match data.get("backend").map_or("", String::as_str) {
            "" => None,
            name => Some(Backend::parse(name).map_err(anyhow::Error::msg)?),
        };
        Ok(Self {
            backend,
            cluster_cidrs: list(data, "cluster-cidr")?,
            service_cidrs: list(data, "service-cidr")?,
            cluster_dns: list(data, "cluster-dns")?,
            cluster_domain: data.get("cluster-domain").context("no cluster-domain")?.clone(),
            load_balancer_pools: list(data, "load-balancer-pool")?,
            disabled: list(data, "disable")?,
        })
    }

    pub fn runs(&self, component: &str) -> bool {
        !self.disabled.iter().any(|name| name == component)
    }
}

/// Whether the server says that the certificate belongs to a deleted Node.
async fn is_retired(client: &Client) -> bool {
    let api: Api<SelfSubjectReview> = client.api(None);
    let answer = api.create(&PostParams::default(), &SelfSubjectReview::default()).await;
    let groups = answer.ok().and_then(|review| review.status?.user_info?.groups);
    groups.is_some_and(|groups| groups.iter().any(|group| group == api::nodes::RETIRED_NODES))
}

/// The current settings; if the server does not answer, those of the last start.
async fn settings(server: &str, home: &Home, client: &Client) -> Result<Settings, Trouble> {
    let path =
        format!("/api/v1/namespaces/kube-system/configmaps/{}", control::bootstrap::CLUSTER_CONFIG);
    let ask = async || -> Result<BTreeMap<String, String>, Trouble> {
        match client.get::<ConfigMap>(&path).await {
            Ok(settings) => Ok(settings.data.unwrap_or_default()),
            // The certificate is valid, but its Node was deleted.
            Err(error) if error.code() == 403 && is_retired(client).await => {
                Err(Trouble::Unauthorized)
            }
            Err(error) => Err(error.into()),
        }
    };
    let parse = |data| Settings::parse(&data).context("the cluster's settings");
    let known: Option<BTreeMap<String, String>> =
        home.read(SETTINGS).and_then(|text| serde_json::from_str(&text).ok());
    let data = match known {
        Some(known) => {
            let answer = tokio::time::timeout(NEWS, ask()).await;
            match answer.unwrap_or_else(|_| Err(Trouble::Later("no answer".into()))) {
                Err(Trouble::Later(why)) => {
                    say(&format!(
                        "the server {server} does not answer ({why}): using the settings of the last start"
                    ));
                    return Ok(parse(known)?);
                }
                Err(Trouble::Final(error)) => return Err(said_by(server, error).into()),
                answer => answer?,
            }
        }
        None => patiently(server, ask).await?,
    };
    let settings = parse(data.clone())?;
    home.write(SETTINGS, &serde_json::json!(data).to_string())?;
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_clock_is_not_reported_as_a_wrong_authority() {
        let check = |refusal: CertificateError, expected: Option<&str>| {
            let tls = rustls::Error::InvalidCertificate(refusal);
            let found = refused_certificate(&std::io::Error::other(tls)).expect("a certificate");
            let told = is_of_time(&found).then(|| of_time(&found));
            match expected {
                None => assert_eq!(told, None),
                Some(part) => {
                    assert!(told.as_deref().is_some_and(|told| told.contains(part)), "{told:?}")
                }
            }
        };
        check(
            CertificateError::NotValidYet,
            Some("is not valid yet, by the clock of this machine"),
        );
        check(CertificateError::Expired, Some("has expired, by the clock of this machine"));
        check(CertificateError::UnknownIssuer, None);
        check(CertificateError::BadSignature, None);
        let other = std::io::Error::other("Connection refused");
        assert_eq!(refused_certificate(&other), None);
    }

    #[test]
    fn settings_survive_their_way_through_the_cluster() {
        let data = [
            ("cluster-cidr", "10.42.0.0/16"),
            ("service-cidr", "10.43.0.0/16,fd43::/112"),
            ("cluster-dns", "10.43.0.10"),
            ("cluster-domain", "cluster.local"),
            ("load-balancer-pool", "10.0.0.240-10.0.0.250,fd00::/112"),
            ("disable", "dns"),
        ];
        let mut data: BTreeMap<String, String> =
            data.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let settings = Settings::parse(&data).expect("fit");
        assert_eq!((settings.service_cidrs.len(), settings.load_balancer_pools.len()), (2, 2));
        assert!(!settings.runs("dns") && settings.runs("kube-proxy"));
        data.insert("cluster-dns".into(), "nonsense".into());
        assert!(Settings::parse(&data).is_err());
    }
}
