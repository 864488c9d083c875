//! `decapod kube-apiserver`: the API server alone, with upstream's main flags.
//!
//! In: flags and PEM files; files that no flag names are found or created in `--cert-dir`
//! (`<data-dir>/pki`). Out: a served API, and a kubeconfig for the administrator if the authority is ours.
//!
//! Deviation: the default of `--authorization-mode` is Node,RBAC, as in any cluster; upstream's default
//! allows everything. `--etcd-servers` may be omitted: the state is then in the embedded store.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use auth::service_account::TokenKeys;
use base::task::Tasks;
use clap::Parser;
use pki::{Issued, Pki};

use crate::access::{Brought, Credentials};
use crate::control_plane;
use crate::process::{prepare_data_dir, say, termination, wait_for_signal};
use crate::server::{advertised, write_kubeconfig};
use crate::{datastore, flags};

#[derive(clap::Args, Clone, Debug)]
pub struct ApiServer {
    /// Port of the API; 0 picks a free one and prints it
    #[arg(long, default_value_t = 6443)]
    secure_port: u16,
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    bind_address: IpAddr,
    /// Address at which others reach the API [default: that of the default route]
    #[arg(long)]
    advertise_address: Option<IpAddr>,
    /// Directory of certificates and keys that no flag names [default: <data-dir>/pki]
    #[arg(long)]
    cert_dir: Option<PathBuf>,
    /// Authorities of clients' certificates, PEM
    #[arg(long, value_name = "FILE")]
    client_ca_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    tls_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_private_key_file: Option<PathBuf>,
    /// Keys that verify service account tokens, PEM
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    service_account_key_file: Vec<PathBuf>,
    /// Key that signs service account tokens, PEM
    #[arg(long, value_name = "FILE")]
    service_account_signing_key_file: Option<PathBuf>,
    /// Accepted issuers of service account tokens; the first one signs
    #[arg(long, value_delimiter = ',', default_value = crate::access::ISSUER)]
    service_account_issuer: Vec<String>,
    /// Audiences of tokens [default: the issuers]
    #[arg(long, value_delimiter = ',')]
    api_audiences: Vec<String>,
    #[arg(long, default_value = "10.0.0.0/24")]
    service_cluster_ip_range: String,
    #[arg(long, default_value = "30000-32767")]
    service_node_port_range: String,
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    etcd_servers: Vec<String>,
    #[arg(long, value_name = "FILE")]
    etcd_cafile: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    etcd_certfile: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    etcd_keyfile: Option<PathBuf>,
    #[command(flatten)]
    use_of_etcd: crate::datastore::UseOfEtcd,
    #[command(flatten)]
    serving: flags::Serving,
    #[command(flatten)]
    pub feature_gates: flags::FeatureGates,
    #[command(flatten)]
    access: crate::access::Access,
    #[command(flatten)]
    settings: crate::api_settings::Settings,
    #[command(flatten)]
    encryption: crate::encryption::EncryptionFlags,
    #[command(flatten)]
    audit: crate::audit::AuditFlags,
    #[arg(long, value_delimiter = ',')]
    enable_admission_plugins: Vec<String>,
    #[arg(long, value_delimiter = ',')]
    disable_admission_plugins: Vec<String>,
    /// File with an AdmissionConfiguration for the plugins
    #[arg(long, value_name = "FILE")]
    admission_control_config_file: Option<PathBuf>,
    /// Client certificate for kubelets, PEM
    #[arg(long, value_name = "FILE", requires = "kubelet_client_key")]
    kubelet_client_certificate: Option<PathBuf>,
    #[arg(long, value_name = "FILE", requires = "kubelet_client_certificate")]
    kubelet_client_key: Option<PathBuf>,
    /// Authorities of kubelets' serving certificates, PEM [default: they are not verified, as upstream]
    #[arg(long, value_name = "FILE")]
    kubelet_certificate_authority: Option<PathBuf>,
    /// Accepted without effect; bootstrap tokens always work
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true)]
    enable_bootstrap_token_auth: Option<Option<bool>>,
    /// Allow privileged containers; `false` makes pods with one invalid [default: true, upstream's is false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    allow_privileged: Option<bool>,
}

pub async fn run(flags: ApiServer, common: flags::Common) -> anyhow::Result<()> {
    let server = flags.as_server()?;
    server.access.check()?;
    server.settings.check()?;
    server.settings.tls.install()?;
    let data_dir = prepare_data_dir(&common.data_dir)?;
    datastore::prepare(&server.datastore, &data_dir)?;
    let directory = flags.cert_dir.clone().unwrap_or_else(|| data_dir.join("pki"));
    let pki = Pki::open_or_create(&directory).context("cannot prepare the certificates")?;
    let credentials = flags.credentials(&pki)?;
    let address = advertised(&server).await?;
    let tasks = Tasks::new("kube-apiserver");
    let starting =
        control_plane::start_with(&server, &data_dir, &pki, &credentials, address, &tasks);
    let control = tokio::select! {
        control = starting => control?,
        () = termination() => {
            say("stopped before the API server was ready");
            return Ok(());
        }
    };
    say(&format!("API server ready at {}", control.url()));
    // With another client authority or another serving certificate our kubeconfig would not work.
    if flags.client_ca_file.is_none() && flags.tls_cert_file.is_none() {
        let kubeconfig = write_kubeconfig(&server, &data_dir, &pki, &control)?;
        say(&format!("kubeconfig: {}", kubeconfig.display()));
    }
    wait_for_signal(&[&tasks, &control.last]).await?;
    say("stopping");
    control.leave().await;
    control.stop(&tasks).await;
    Ok(())
}

impl ApiServer {
    /// The same as flags of `decapod server`, which has the defaults of all others.
    fn as_server(&self) -> anyhow::Result<flags::Server> {
        #[derive(Parser)]
        struct Words {
            #[command(flatten)]
            server: flags::Server,
        }
        let mut words = vec![
            "kube-apiserver".to_owned(),
            "--disable-agent".into(),
            format!("--https-listen-port={}", self.secure_port),
            format!("--bind-address={}", self.bind_address),
            format!("--service-cidr={}", self.service_cluster_ip_range),
            format!("--service-node-port-range={}", self.service_node_port_range),
        ];
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let given = [
            ("advertise-address", self.advertise_address.map(|address| address.to_string())),
            ("allow-privileged", self.allow_privileged.map(|is_allowed| is_allowed.to_string())),
            ("datastore-cafile", path(&self.etcd_cafile)),
            ("datastore-certfile", path(&self.etcd_certfile)),
            ("datastore-keyfile", path(&self.etcd_keyfile)),
        ];
        words.extend(
            given.iter().filter_map(|(name, value)| {
                value.as_ref().map(|value| format!("--{name}={value}"))
            }),
        );
        let lists = [
            ("datastore-endpoint", &self.etcd_servers),
            ("enable-admission-plugins", &self.enable_admission_plugins),
            ("disable-admission-plugins", &self.disable_admission_plugins),
        ];
        for (name, values) in lists {
            words.extend(values.iter().map(|value| format!("--{name}={value}")));
        }
        let mut server = Words::try_parse_from(words)
            .map_err(|error| anyhow::anyhow!(first_line(&error.to_string())))?
            .server;
        self.serving.check()?;
        server.serving = self.serving.clone();
        server.encryption.clone_from(&self.encryption);
        server.datastore.use_of_etcd.clone_from(&self.use_of_etcd);
        server.audit.clone_from(&self.audit);
        // If components run alone, the installer creates the DNS Service.
        server.cluster_dns.clear();
        server.access = self.access.clone();
        server.admission_control_config_file.clone_from(&self.admission_control_config_file);
        server.settings = self.settings.clone();
        Ok(server)
    }

    fn credentials(&self, pki: &Pki) -> anyhow::Result<Credentials> {
        let mut credentials = Credentials::of_cluster(pki, &self.service_account_issuer)?;
        if let Some(path) = &self.client_ca_file {
            credentials.is_of_cluster = false;
            credentials.client_ca_pem = read(path)?;
        }
        let serving = pair(&self.tls_cert_file, &self.tls_private_key_file)?;
        credentials.serving = serving.map(|(issued, cert, key)| Brought { issued, cert, key });
        if let Some((own, cert, key)) =
            pair(&self.kubelet_client_certificate, &self.kubelet_client_key)?
        {
            credentials.kubelet_client = own;
            credentials.kubelet_client_files = Some((cert, key));
        }
        credentials.kubelet_ca_pem =
            self.kubelet_certificate_authority.as_deref().map(read).transpose()?;
        credentials.keys = self.token_keys(pki)?;
        Ok(credentials)
    }

    fn token_keys(&self, pki: &Pki) -> anyhow::Result<TokenKeys> {
        let signing = match &self.service_account_signing_key_file {
            Some(path) => read(path)?,
            None => pki.service_account_key_pem().to_owned(),
        };
        let mut public = String::new();
        for path in &self.service_account_key_file {
            public.push_str(&read(path)?);
            public.push('\n');
        }
        if self.service_account_key_file.is_empty() {
            public = pki.service_account_public_pem().to_owned();
        }
        let (issuers, audiences) =
            (self.service_account_issuer.clone(), self.api_audiences.clone());
        TokenKeys::new(&signing, &public, issuers, audiences)
            .context("the service account keys cannot be used")
    }
}

fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

type Pair = (Issued, PathBuf, PathBuf);

fn pair(cert: &Option<PathBuf>, key: &Option<PathBuf>) -> anyhow::Result<Option<Pair>> {
    let (Some(cert), Some(key)) = (cert, key) else { return Ok(None) };
    let issued = Issued { cert_pem: read(cert)?, key_pem: read(key)? };
    Ok(Some((issued, cert.clone(), key.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: ApiServer,
    }

    #[test]
    fn upstreams_flags_become_ours() {
        let words = [
            "kube-apiserver",
            "--secure-port=7443",
            "--advertise-address=192.0.2.1",
            "--service-cluster-ip-range=10.96.0.0/12",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--enable-bootstrap-token-auth=true",
            "--etcd-servers=https://127.0.0.1:2379",
            "--etcd-compaction-interval=1m0s",
            "--storage-media-type=application/json",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        ];
        let flags = Line::try_parse_from(words).expect("kubeadm's flags").flags;
        let server = flags.as_server().expect("they fit");
        assert_eq!((server.https_listen_port, server.cluster_dns.len()), (7443, 0));
        assert!(server.allow_privileged);
        let strict = Line::try_parse_from(["kube-apiserver", "--allow-privileged=false"]);
        let strict = strict.expect("parses").flags.as_server().expect("fits");
        assert!(!strict.allow_privileged);
        assert_eq!(server.service_cidr[0].to_string(), "10.96.0.0/12");
        assert_eq!(server.datastore.endpoints, ["https://127.0.0.1:2379"]);
        assert_eq!(server.datastore.use_of_etcd.etcd_compaction_interval.as_secs(), 60);
        let directory = tempfile::tempdir().expect("a directory");
        let pki = Pki::open_or_create(directory.path()).expect("certificates");
        let credentials = flags.credentials(&pki).expect("they fit");
        assert_eq!(credentials.keys.issuer(), "https://kubernetes.default.svc.cluster.local");
        assert!(credentials.kubelet_ca_pem.is_none(), "kubeadm's kubelets sign for themselves");
        assert_eq!(server.access.authorization_mode, ["Node", "RBAC"]);
        let bad = Line::try_parse_from(["kube-apiserver", "--authorization-mode=Magic"]);
        let bad = bad.expect("parses").flags.as_server().expect("fits otherwise");
        assert!(bad.access.check().is_err());
        let bad = Line::try_parse_from(["kube-apiserver", "--service-cluster-ip-range=x"]);
        assert!(bad.expect("parses").flags.as_server().is_err());
    }
}
