//! `decapod etcd`: etcd's v3 API, served from an embedded store of one member.
//!
//! In: etcd's own flags, or its configuration file (`--config-file`), whose keys are the same names.
//! Out: listeners for clients and for metrics. Flags for elections and peers are accepted and have no
//! effect, because there is one member; more than one is refused.
//!
//! Deviation: `--auto-compaction-*` is the time that the store keeps its history, so there is no
//! compaction task; the quota counts the bytes of the records, not of the file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::Tasks;
use etcd::server::{ONE_MEMBER, Options, Server};
use serde_json::Value;
use transport::Listener;
use transport::tls::{ClientCerts, Identity, ServerTls};

use crate::flags::push_setting;
use crate::process::{prepare_data_dir, say, termination};

/// Time for requests and commits at the end.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// etcd's flags that have no effect with one member, and whether they may have no value.
const WITHOUT_EFFECT: &[(&str, bool)] = &[
    ("allowed-cn", false),
    ("allowed-hostname", false),
    ("auth-token", false),
    ("auto-tls", true),
    ("backend-batch-interval", false),
    ("backend-batch-limit", false),
    ("bcrypt-cost", false),
    ("cipher-suites", false),
    ("client-cert-file", false),
    ("client-crl-file", false),
    ("client-key-file", false),
    ("compact-hash-check-enabled", true),
    ("compact-hash-check-time", false),
    ("cors", false),
    ("discovery", false),
    ("discovery-fallback", false),
    ("discovery-srv", false),
    ("election-timeout", false),
    ("enable-grpc-gateway", true),
    ("enable-log-rotation", true),
    ("enable-pprof", true),
    ("enable-v2", true),
    ("feature-gates", false),
    ("force-new-cluster", true),
    ("grpc-keepalive-interval", false),
    ("grpc-keepalive-min-time", false),
    ("grpc-keepalive-timeout", false),
    ("heartbeat-interval", false),
    ("host-whitelist", false),
    ("initial-cluster-state", false),
    ("initial-cluster-token", false),
    ("initial-election-tick-advance", true),
    ("listen-peer-urls", false),
    ("log-format", false),
    ("log-rotation-config-json", false),
    ("log-level", false),
    ("log-outputs", false),
    ("logger", false),
    ("max-concurrent-streams", false),
    ("max-snapshots", false),
    ("max-wals", false),
    ("metrics", false),
    ("peer-auto-tls", true),
    ("peer-cert-file", false),
    ("peer-client-cert-auth", true),
    ("peer-key-file", false),
    ("peer-trusted-ca-file", false),
    ("pre-vote", true),
    ("proxy", false),
    ("self-signed-cert-validity", false),
    ("snapshot-count", false),
    ("socket-reuse-address", true),
    ("socket-reuse-port", true),
    ("strict-reconfig-check", true),
    ("tls-max-version", false),
    ("tls-min-version", false),
    ("v2-deprecation", false),
    ("wal-dir", false),
    ("warning-apply-duration", false),
    ("watch-progress-notify-interval", false),
];
/// Prefix of etcd's flags that change with its versions.
const EXPERIMENTAL: &str = "experimental-";

#[derive(clap::Args, Clone, Debug)]
pub struct Etcd {
    /// etcd's configuration file; its keys are the flags' names
    #[arg(long, value_name = "FILE")]
    pub config_file: Option<PathBuf>,
    #[arg(long, env = "ETCD_NAME", default_value = "default")]
    pub name: String,
    /// URLs to listen on for clients
    #[arg(
        long,
        env = "ETCD_LISTEN_CLIENT_URLS",
        value_delimiter = ',',
        default_value = "http://localhost:2379"
    )]
    pub listen_client_urls: Vec<String>,
    /// URLs that the member list shows to clients [default: those of --listen-client-urls]
    #[arg(long, env = "ETCD_ADVERTISE_CLIENT_URLS", value_delimiter = ',')]
    pub advertise_client_urls: Vec<String>,
    /// URLs that the member list shows to peers
    #[arg(
        long,
        env = "ETCD_INITIAL_ADVERTISE_PEER_URLS",
        value_delimiter = ',',
        default_value = "http://localhost:2380"
    )]
    pub initial_advertise_peer_urls: Vec<String>,
    /// NAME=URL of this member only
    #[arg(long, env = "ETCD_INITIAL_CLUSTER")]
    pub initial_cluster: Option<String>,
    /// Additional URLs, for /metrics and /health only
    #[arg(long, env = "ETCD_LISTEN_METRICS_URLS", value_delimiter = ',')]
    pub listen_metrics_urls: Vec<String>,
    /// Certificate of the server
    #[arg(long, env = "ETCD_CERT_FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,
    #[arg(long, env = "ETCD_KEY_FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
    /// Accept only clients with a certificate
    #[arg(
        long,
        env = "ETCD_CLIENT_CERT_AUTH",
        action = clap::ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = false,
        default_missing_value = "true"
    )]
    pub client_cert_auth: bool,
    /// Authorities of clients' certificates
    #[arg(long, env = "ETCD_TRUSTED_CA_FILE")]
    pub trusted_ca_file: Option<PathBuf>,
    /// periodic or revision
    #[arg(long, env = "ETCD_AUTO_COMPACTION_MODE", default_value = "periodic")]
    pub auto_compaction_mode: String,
    /// How much history is kept: hours, a duration such as 5m, or a number of revisions; 0 keeps all
    #[arg(long, env = "ETCD_AUTO_COMPACTION_RETENTION", default_value = "0")]
    pub auto_compaction_retention: String,
    /// Limit for the bytes of records; above it only deletes are accepted; 0 is no limit
    #[arg(
        long,
        env = "ETCD_QUOTA_BACKEND_BYTES",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub quota_backend_bytes: i64,
    #[arg(long, env = "ETCD_MAX_TXN_OPS", default_value_t = 128)]
    pub max_txn_ops: usize,
    #[arg(long, env = "ETCD_MAX_REQUEST_BYTES", default_value_t = 1_572_864)]
    pub max_request_bytes: usize,
    /// Acknowledge writes before they are on the disk: a power loss may lose them
    #[arg(
        long,
        action = clap::ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = false,
        default_missing_value = "true"
    )]
    pub unsafe_no_fsync: bool,
}

pub async fn run(flags: Etcd, data_dir: &Path) -> anyhow::Result<()> {
    one_member(flags.initial_cluster.as_deref(), &flags.name)?;
    let data_dir = prepare_data_dir(data_dir)?;
    let directory = data_dir.join("store");
    let store = store::Embedded::open(&directory, flags.store_options()?)
        .with_context(|| format!("cannot open the state store in {}", directory.display()))?;
    let advertised = match flags.advertise_client_urls.is_empty() {
        true => flags.listen_client_urls.clone(),
        false => flags.advertise_client_urls.clone(),
    };
    let options = Options {
        name: flags.name.clone(),
        client_urls: advertised,
        peer_urls: flags.initial_advertise_peer_urls.clone(),
        quota_bytes: u64::try_from(flags.quota_backend_bytes).ok().filter(|bytes| *bytes > 0),
        needs_certificate: flags.client_cert_auth,
        pages_only: false,
        request_limit: flags.max_request_bytes,
        max_ops: flags.max_txn_ops,
    };
    let tasks = Tasks::new("etcd");
    let server = Server::new(store.clone(), options, tasks.clone());
    crate::datastore::offer(&store, &data_dir, &tasks);
    for url in &flags.listen_client_urls {
        flags.listen(url, server.clone(), &tasks).await?;
    }
    for url in &flags.listen_metrics_urls {
        flags.listen(url, server.pages_only(), &tasks).await?;
    }
    say(&format!("serving etcd's v3 API as {}", flags.name));
    termination().await;
    say("stopping");
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    store.close().await;
    Ok(())
}

impl Etcd {
    fn store_options(&self) -> anyhow::Result<store::Options> {
        let everything = store::Options {
            history_bytes: u64::MAX,
            history_revisions: u64::MAX / 2,
            sync: !self.unsafe_no_fsync,
            ..store::Options::default()
        };
        let text = self.auto_compaction_retention.trim();
        let number = text.parse::<u64>().ok();
        if number == Some(0) || text.is_empty() {
            return Ok(everything);
        }
        let wrong = || format!("--auto-compaction-retention {text}");
        match (self.auto_compaction_mode.as_str(), number) {
            ("revision", Some(revisions)) => Ok(store::Options {
                history_age: Duration::ZERO,
                history_revisions: revisions,
                ..everything
            }),
            // A bare number is hours.
            ("periodic", Some(hours)) => Ok(store::Options {
                history_age: Duration::from_secs(hours * 3600),
                history_revisions: 1,
                ..everything
            }),
            ("periodic", None) => {
                let age = cli::duration::parse(text).map_err(anyhow::Error::msg);
                let history_age = age.with_context(wrong)?;
                Ok(store::Options { history_age, history_revisions: 1, ..everything })
            }
            ("revision", None) => bail!("{}: expected a number of revisions", wrong()),
            (mode, _) => bail!("--auto-compaction-mode {mode}: expected periodic or revision"),
        }
    }

    async fn listen(&self, url: &str, server: Server, tasks: &Tasks) -> anyhow::Result<()> {
        let (listener, is_tls) = listener(url).await?;
        let tls = if is_tls { Some(self.tls().with_context(|| url.to_owned())?) } else { None };
        let at = listener.local_addr().map_or(url.to_owned(), |address| address.to_string());
        say(&format!("listening on {at}"));
        let stop = tasks.stop_signal();
        tasks.spawn_graceful("listener", async move {
            transport::serve(listener, tls, server, etcd::server::limits(), stop).await;
        });
        Ok(())
    }

    fn tls(&self) -> anyhow::Result<ServerTls> {
        let (Some(cert), Some(key)) = (&self.cert_file, &self.key_file) else {
            bail!("https needs --cert-file and --key-file");
        };
        let read = |path: &Path| {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let identity = Identity::from_pem(&read(cert)?, &read(key)?)?;
        let clients = match (&self.trusted_ca_file, self.client_cert_auth) {
            (Some(ca), _) => ClientCerts::Verify(read(ca)?),
            (None, true) => bail!("--client-cert-auth needs --trusted-ca-file"),
            (None, false) => ClientCerts::Ignore,
        };
        Ok(transport::tls::server_tls(&identity, &clients)?)
    }
}

/// Binds a URL such as `https://127.0.0.1:2379` or `unix:///run/etcd.sock`; also returns whether it is TLS.
async fn listener(url: &str) -> anyhow::Result<(Listener, bool)> {
    let wrong = || format!("cannot listen on {url}; expected http(s)://HOST:PORT");
    let url = url.trim();
    let (scheme, rest) = url.split_once("://").with_context(wrong)?;
    if scheme == "unix" {
        let listener = Listener::unix(Path::new(rest)).with_context(wrong)?;
        return Ok((listener, false));
    }
    if scheme != "http" && scheme != "https" {
        bail!(wrong());
    }
    let address = tokio::net::lookup_host(rest.trim_end_matches('/')).await.with_context(wrong)?;
    // If localhost has two addresses: the one that clients try first.
    let mut addresses: Vec<SocketAddr> = address.collect();
    addresses.sort_by_key(|address| address.is_ipv6());
    let address = *addresses.first().with_context(wrong)?;
    Ok((Listener::tcp(address).await.with_context(wrong)?, scheme == "https"))
}

/// Refuses a cluster of several members, and one without this member.
fn one_member(initial_cluster: Option<&str>, name: &str) -> anyhow::Result<()> {
    let Some(text) = initial_cluster else { return Ok(()) };
    let mut names: Vec<&str> = text
        .split(',')
        .filter_map(|member| Some(member.trim().split_once('=')?.0.trim()))
        .collect();
    names.sort_unstable();
    names.dedup();
    match names[..] {
        [only] if only == name => Ok(()),
        [only] => bail!("--initial-cluster names {only:?}, --name is {name:?}"),
        [] => bail!("--initial-cluster {text:?}: expected NAME=URL"),
        _ => bail!("--initial-cluster names {} members: {ONE_MEMBER}", names.len()),
    }
}

/// For `decapod etcd`: the arguments, with those of its configuration file in front, and without those
/// that have no effect.
pub fn with_config_file(arguments: Vec<String>) -> anyhow::Result<Vec<String>> {
    // The flags of all commands may come first, with their values.
    let mut at = 1;
    while arguments.get(at).is_some_and(|word| word.starts_with('-')) {
        at += if arguments[at].contains('=') { 1 } else { 2 };
    }
    if arguments.get(at).is_none_or(|word| word != "etcd") {
        return Ok(arguments);
    }
    let (before, after) = arguments.split_at(at + 1);
    let after = effective(after);
    let mut extra = vec![];
    if let Some(path) = config_path(&after) {
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let settings: serde_json::Map<String, Value> =
            serde_saphyr::from_str(&text).with_context(|| {
                format!("{path} is not a configuration file of etcd: expected a YAML map")
            })?;
        extra = effective(&words(settings).with_context(|| path.clone())?);
        // The command line wins.
        extra.retain(|setting| {
            let (name, _) = setting.split_once('=').unwrap_or((setting, ""));
            let given = |word: &String| {
                word.split('=').next() == Some(name) || name == "--data-dir" && word == "-d"
            };
            !arguments.iter().any(given)
        });
    }
    Ok([before, &extra, &after].concat())
}

fn config_path(arguments: &[String]) -> Option<String> {
    let at = arguments.iter().position(|argument| argument.starts_with("--config-file"))?;
    match arguments[at].split_once('=') {
        Some((_, path)) => Some(path.to_owned()),
        None => arguments.get(at + 1).cloned(),
    }
}

/// The file's settings as flags. Client and peer security are nested maps.
fn words(settings: serde_json::Map<String, Value>) -> anyhow::Result<Vec<String>> {
    let mut all = vec![];
    for (key, value) in settings {
        match (key.as_str(), value) {
            (_, Value::Null) => {}
            ("client-transport-security", Value::Object(inner)) => all.extend(words(inner)?),
            ("peer-transport-security", Value::Object(inner)) => {
                for (name, _) in inner {
                    tracing::debug!(name, "the setting for peers' security has no effect");
                }
            }
            (_, Value::Bool(is)) => all.push(format!("--{key}={is}")),
            (_, Value::String(text)) if text.is_empty() => {}
            (_, value) => push_setting(&mut all, &key, value).with_context(|| key.clone())?,
        }
    }
    Ok(all)
}

/// Removes flags that have no effect, and their values.
fn effective(arguments: &[String]) -> Vec<String> {
    let mut kept = vec![];
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let name = argument.strip_prefix("--").unwrap_or_default();
        let (name, has_value) = match name.split_once('=') {
            Some((name, _)) => (name, true),
            None => (name, false),
        };
        let known = WITHOUT_EFFECT.iter().find(|(known, _)| *known == name);
        let is_experimental = name.starts_with(EXPERIMENTAL);
        if known.is_none() && !is_experimental {
            kept.push(argument.clone());
        } else if !has_value && known.is_some_and(|(_, alone)| !alone) {
            arguments.next();
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_and_no_more() {
        let check = |cluster: &str, expected: Option<&str>| {
            let got = one_member(Some(cluster), "a").err().map(|error| error.to_string());
            match expected {
                None => assert_eq!(got, None, "{cluster}"),
                Some(part) => assert!(got.as_ref().is_some_and(|g| g.contains(part)), "{got:?}"),
            }
        };
        check("a=http://h:2380", None);
        check(" a = http://h:2380 , a=http://i:2380 ", None);
        check("a=http://h:2380, b=http://i:2380", Some("use etcd itself for more than one"));
        check("b=http://h:2380", Some("--name"));
        check("", Some("NAME=URL"));
    }

    #[test]
    fn a_configuration_file_becomes_flags() {
        let text = "name: infra0\ndata-dir: /var/lib/x\nsnapshot-count: 10000\n\
                    listen-client-urls: http://127.0.0.1:1\nquota-backend-bytes: 4096\n\
                    initial-cluster:\nauto-compaction-retention: \"5\"\n\
                    client-transport-security:\n  cert-file: c.pem\n  client-cert-auth: true\n\
                    peer-transport-security:\n  cert-file: p.pem\nself-signed-cert-validity: \n";
        let settings = serde_saphyr::from_str(text).expect("YAML");
        let mut got = effective(&words(settings).expect("flags"));
        got.sort();
        assert_eq!(
            got,
            [
                "--auto-compaction-retention=5",
                "--cert-file=c.pem",
                "--client-cert-auth=true",
                "--data-dir=/var/lib/x",
                "--listen-client-urls=http://127.0.0.1:1",
                "--name=infra0",
                "--quota-backend-bytes=4096",
            ]
        );
    }

    #[test]
    fn flags_without_effect_are_removed_with_their_value() {
        let check = |given: &[&str], expected: &[&str]| {
            let given: Vec<String> = given.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(effective(&given), expected);
        };
        check(
            &["--name", "a", "--logger", "zap", "--pre-vote", "--snapshot-count=5"],
            &["--name", "a"],
        );
        check(&["--experimental-x=1", "--unsafe-no-fsync"], &["--unsafe-no-fsync"]);
    }
}
