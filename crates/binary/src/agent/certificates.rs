//! Certificates that the cluster signs for this node: requested with a CertificateSigningRequest, kept in
//! files, renewed in time.
//!
//! ```text
//!  <data-dir>/agent/NAME.pem: certificate and key in one file, so that they always match
//! ```
//!
//! Upstream: `client-go/util/certificate`, the kubelet's `certificate/bootstrap`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base::backoff::Backoff;
use base::task::Tasks;
use client::{Api, Client, Informers, PostParams};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use pki::{Component, Issued, KeyPair, Profile};
use tokio::sync::Notify;

use super::join::Trouble;

/// After this time without an answer the log says that a person may have to approve the request.
const PATIENCE: Duration = Duration::from_secs(15);
/// Clocks jump and machines sleep: a waiting renewal checks the time this often.
const LOOK: Duration = Duration::from_secs(1800);
/// An earlier version wrote the first form.
const KEY_BEGINS: [&str; 2] = ["-----BEGIN PRIVATE KEY-----", "-----BEGIN EC PRIVATE KEY-----"];

/// A certificate to request.
pub struct Order {
    file: &'static str,
    signer: &'static str,
    usage: &'static str,
    pub profile: Profile,
    /// The kubelet's own, for its metrics.
    shown_as: Option<kubelet::Certificate>,
}

impl Order {
    pub fn kubelet_client(node: &str) -> Self {
        Self {
            file: "kubelet-client",
            signer: "kubernetes.io/kube-apiserver-client-kubelet",
            usage: "client auth",
            profile: pki::Identity::node(node).profile(),
            shown_as: Some(kubelet::Certificate::Client),
        }
    }

    pub fn kubelet_server(node: &str, addresses: &[IpAddr]) -> Self {
        let names = [node.to_owned()].into_iter().chain(addresses.iter().map(IpAddr::to_string));
        Self {
            file: "kubelet-server",
            signer: "kubernetes.io/kubelet-serving",
            usage: "server auth",
            profile: pki::Identity::node(node).profile().with_sans(names),
            shown_as: Some(kubelet::Certificate::Serving),
        }
    }

    /// `None` for a component that nodes do not run.
    pub fn component(component: Component, node: &str) -> Option<Self> {
        Some(Self {
            file: component.file_name(),
            signer: "kubernetes.io/kube-apiserver-client",
            usage: "client auth",
            profile: component.on_node(node)?.profile(),
            shown_as: None,
        })
    }

    /// Tells the kubelet's metrics when this certificate expires.
    fn show(&self, issued: &Issued) {
        let chain = pki::certificates(issued.cert_pem.as_bytes()).unwrap_or_default();
        if let (Some(of), Some(cert)) = (self.shown_as, chain.first()) {
            kubelet::certificate_expires(of, cert.not_after);
        }
    }

    /// The user name in the certificate.
    pub fn user(&self) -> &str {
        &self.profile.common_name
    }
}

/// Whether a client certificate contains the UID of its Node. One without it is for joining: it lives an
/// hour, and ends when another machine registers the Node.
pub fn is_bound(issued: &Issued) -> bool {
    let chain = pki::certificates(issued.cert_pem.as_bytes()).unwrap_or_default();
    chain.first().is_some_and(|cert| cert.uid.is_some())
}

/// The agent's own directory.
pub struct Home(PathBuf);

impl Home {
    pub fn open(directory: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        Ok(Self(directory.to_owned()))
    }

    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// The text of a file; `None` if it does not exist.
    pub fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.0.join(name)).ok()
    }

    pub fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        Ok(pki::write_private(&self.0.join(name), text.as_bytes(), 0o600)?)
    }

    /// Removes the components' certificates: they belong to an earlier Node.
    pub fn forget_components(&self) -> anyhow::Result<()> {
        for component in [Component::Proxy, Component::Dns] {
            let path = self.0.join(format!("{}.pem", component.file_name()));
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The certificate of an earlier start, if it is for this order and authority and still valid.
    pub fn stored(&self, order: &Order, ca_pem: &str) -> Option<Issued> {
        let text = self.read(&format!("{}.pem", order.file))?;
        let begin = KEY_BEGINS.iter().find_map(|begin| text.find(begin))?;
        let (cert_pem, key_pem) = text.split_at_checked(begin)?;
        let chain = pki::certificates(cert_pem.as_bytes()).ok()?;
        let (cert, between) = chain.split_first()?;
        let mut authorities = pki::certificates(ca_pem.as_bytes()).ok()?;
        authorities.extend(between.iter().cloned());
        let key = KeyPair::from_pem(key_pem).ok()?;
        let fits = cert.public_key_info() == pki::public_key_info(&key)
            && cert.common_name == order.profile.common_name
            && cert.organizations == order.profile.organizations
            && order.profile.sans.iter().all(|san| cert.sans.contains(san))
            && cert.not_after > base::clock::now()
            && authorities.iter().any(|authority| cert.is_issued_by(authority));
        fits.then(|| Issued { cert_pem: cert_pem.to_owned(), key_pem: key_pem.to_owned() })
    }

    pub fn store(&self, order: &Order, issued: &Issued) -> anyhow::Result<()> {
        let text = format!("{}\n{}", issued.cert_pem.trim_end(), issued.key_pem);
        self.write(&format!("{}.pem", order.file), &text)
    }
}

/// Requests a certificate and waits until it is signed.
pub async fn obtain(client: &Client, order: &Order) -> Result<Issued, Trouble> {
    let (request, key_pem) = pki::new_request(&order.profile).map_err(anyhow::Error::from)?;
    let mut csr = CertificateSigningRequest {
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.into_bytes()),
            signer_name: order.signer.into(),
            usages: Some(vec!["digital signature".into(), order.usage.into()]),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    };
    csr.metadata.generate_name = Some("node-csr-".into());
    let api: Api<CertificateSigningRequest> = client.api(None);
    let created = api.create(&PostParams::default(), &csr).await?;
    let name = created.metadata.name.unwrap_or_default();
    let tasks = Tasks::new("certificate request");
    let signed = wait_for(client, &name, &tasks);
    tokio::pin!(signed);
    let answer = match tokio::time::timeout(PATIENCE, &mut signed).await {
        Ok(answer) => answer,
        Err(_) => {
            tracing::warn!(
                request = name,
                "waiting until the certificate request is approved and signed; see kubectl get csr"
            );
            signed.await
        }
    };
    tasks.shutdown(Duration::from_secs(1)).await;
    Ok(Issued { cert_pem: answer?, key_pem })
}

async fn wait_for(client: &Client, name: &str, tasks: &Tasks) -> Result<String, Trouble> {
    let informers = Informers::new(client.clone(), tasks.clone());
    let own = format!("metadata.name={name}");
    let requests = informers.scoped::<CertificateSigningRequest>(None, &own, "");
    let changed = Arc::new(Notify::new());
    let tell = changed.clone();
    requests.subscribe_raw(move |_| tell.notify_one());
    loop {
        changed.notified().await;
        let Some(csr) = requests.lister().get("", name) else { continue };
        let Some(status) = &csr.status else { continue };
        if let Some(ByteString(pem)) = &status.certificate {
            let pem = String::from_utf8(pem.clone());
            return Ok(pem.context("the signed certificate is not valid UTF-8")?);
        }
        let refusal = status.conditions.iter().flatten().find(|c| c.type_ != "Approved");
        if let Some(refusal) = refusal {
            let why = refusal.message.as_deref().unwrap_or_default();
            let text = match refusal.type_.as_str() {
                "Denied" if !why.is_empty() => why.to_owned(),
                kind => format!("the certificate request {name} is {kind}: {why}"),
            };
            return Err(Trouble::Final(anyhow::anyhow!(text)));
        }
    }
}

/// Replaces a certificate after four fifths of its life, repeatedly; `first` is the certificate in use, if
/// any.
pub async fn keep(
    home: &Home,
    client: &Client,
    order: &Order,
    first: Option<Issued>,
    apply: impl Fn(&Issued) -> anyhow::Result<()>,
) {
    let mut known = first;
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
    loop {
        if let Some(known) = &known {
            order.show(known);
        }
        while let Some(wait) = known.as_ref().and_then(time_left) {
            tokio::time::sleep(wait.min(LOOK)).await;
        }
        let replaced = async {
            let issued = obtain(client, order).await?;
            home.store(order, &issued)?;
            apply(&issued)?;
            anyhow::Ok(issued)
        };
        match replaced.await {
            Ok(issued) => {
                tracing::info!(certificate = order.file, "replaced the certificate");
                known = Some(issued);
                backoff.reset();
            }
            Err(error) => {
                if let Some(of) = order.shown_as {
                    kubelet::certificate_not_renewed(of);
                }
                tracing::warn!(
                    certificate = order.file,
                    error = format!("{error:#}"),
                    "failed to renew the certificate, will retry"
                );
                tokio::time::sleep(backoff.step()).await;
            }
        }
    }
}

/// Time until the renewal is due; `None` if it is due.
pub fn time_left(issued: &Issued) -> Option<Duration> {
    let cert = pki::certificates(issued.cert_pem.as_bytes()).ok()?.into_iter().next()?;
    let left = cert.renew_at().as_second() - base::clock::now().as_second();
    u64::try_from(left).ok().filter(|left| *left > 0).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent of an earlier version, whose proxy had the same name on all nodes, requests its own.
    #[test]
    fn a_certificate_of_another_name_is_not_used() {
        let directory = tempfile::tempdir().expect("a directory");
        let home = Home::open(directory.path()).expect("a directory");
        let authority = pki::Authority::generate("ca").expect("an authority");
        let order = Order::component(Component::Proxy, "n1").expect("nodes have it");
        assert_eq!(order.user(), "system:kube-proxy:n1");
        assert!(Order::component(Component::Scheduler, "n1").is_none());
        let before = authority.issue(&Component::Proxy.profile()).expect("signs");
        home.store(&order, &before).expect("stores");
        assert!(home.stored(&order, authority.cert_pem()).is_none());
        let own = authority.issue(&order.profile).expect("signs");
        home.store(&order, &own).expect("stores");
        assert!(home.stored(&order, authority.cert_pem()).is_some_and(|own| !is_bound(&own)));
        for _ in 0..2 {
            home.forget_components().expect("removes");
            assert!(home.stored(&order, authority.cert_pem()).is_none());
        }
    }

    #[test]
    fn a_stored_certificate_is_used_while_it_fits() {
        let directory = tempfile::tempdir().expect("a directory");
        let home = Home::open(directory.path()).expect("a directory");
        let authority = pki::Authority::generate("ca").expect("an authority");
        let address = [IpAddr::from([10, 0, 0, 7])];
        let order = Order::kubelet_server("n1", &address);
        assert!(home.stored(&order, authority.cert_pem()).is_none());
        let mut profile = order.profile.clone();
        profile.usages = vec![pki::Usage::Server];
        let issued = authority.issue(&profile).expect("signs");
        home.store(&order, &issued).expect("stores");
        let again = home.stored(&order, authority.cert_pem()).expect("fits");
        assert_eq!(again.key_pem, issued.key_pem);
        assert!(time_left(&again).is_some());
        let check = |order: Order, ca: &str| assert!(home.stored(&order, ca).is_none());
        check(Order::kubelet_server("n2", &address), authority.cert_pem());
        check(Order::kubelet_server("n1", &[IpAddr::from([10, 0, 0, 8])]), authority.cert_pem());
        let other = pki::Authority::generate("ca").expect("an authority");
        check(order, other.cert_pem());
    }
}
