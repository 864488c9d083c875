//! Opens the state store: the embedded one, or a real etcd if a flag names one.
//!
//! A running server also serves its embedded store on a socket that speaks etcd's API and that only its
//! owner may use. `decapod snapshot` and `decapod store` use that socket.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use apiserver::codec::at_rest::{self, Formats, MediaType};
use apiserver::codec::protobuf::Protobuf;
use base::backoff::Backoff;
use base::task::Tasks;
use bytes::Bytes;
use clap::{Args, ValueEnum};
use store::{Store, Transform, Transformed};
use tokio::time::Instant;

/// Limit for an etcd to answer a command.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a command waits for a server that holds the store but does not answer yet.
const STARTING: Duration = Duration::from_secs(10);
/// Interval at which a waiting server asks its etcd. It logs that less and less often.
const ASK_AGAIN: Duration = Duration::from_secs(1);
const SAY_AGAIN_CEILING: Duration = Duration::from_secs(60);
/// Formats of upstream's objects in an etcd.
const FORMATS: Formats = Formats {
    protobuf: Protobuf(api::protobuf::descriptors),
    modern: extensions::definition::older::modern,
    native: resources::native,
};

#[derive(Args, Clone, Debug, Default)]
pub struct Datastore {
    /// Keep the state in this etcd cluster (https://HOST:2379,...) instead of the embedded store
    #[arg(long = "datastore-endpoint", value_delimiter = ',', value_name = "URL")]
    pub endpoints: Vec<String>,
    /// CA certificates that etcd's certificates are checked against
    #[arg(long = "datastore-cafile", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Client certificate for etcd
    #[arg(long = "datastore-certfile", value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,
    /// Key of the client certificate for etcd
    #[arg(long = "datastore-keyfile", value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
    /// It is the etcd beside this server, whose members come and go
    #[arg(skip)]
    pub is_own: bool,
    #[command(flatten)]
    pub use_of_etcd: UseOfEtcd,
    #[command(flatten)]
    pub history: History,
}

/// Flags that upstream's API server has, too.
#[derive(Args, Clone, Debug, Default)]
pub struct UseOfEtcd {
    /// Format in which built-in kinds are written to etcd; both are read
    #[arg(long, value_enum, default_value = "application/vnd.kubernetes.protobuf")]
    pub storage_media_type: StorageMediaType,
    /// Interval of etcd compaction, by whichever server does it; 0 for never
    #[arg(long, value_parser = cli::duration::parse, default_value = "5m", value_name = "DURATION")]
    pub etcd_compaction_interval: Duration,
    /// How long the start waits for an etcd that does not answer; 0 for no limit
    #[arg(long, value_parser = cli::duration::parse, default_value = "0s", value_name = "DURATION")]
    pub datastore_wait: Duration,
}

/// Flags of the embedded store.
#[derive(Args, Clone, Debug, Default)]
pub struct History {
    /// Start with an empty store in a data directory that has lost its store
    #[arg(long)]
    pub new_store: bool,
    /// Shortest time that the embedded store keeps history, for example 24h [default: 5m]
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    pub store_history: Option<Duration>,
}

/// The store of a command: an etcd, or the data directory's.
#[derive(Args, Clone, Debug, Default)]
pub struct Which {
    /// Use this etcd cluster (https://HOST:2379,...) instead of the data directory's store
    #[arg(long = "datastore-endpoint", value_delimiter = ',', value_name = "URL", global = true)]
    pub endpoints: Vec<String>,
    /// CA certificates that etcd's certificates are checked against
    #[arg(long = "datastore-cafile", value_name = "FILE", global = true)]
    pub ca_file: Option<PathBuf>,
    /// Client certificate for etcd
    #[arg(long = "datastore-certfile", value_name = "FILE", global = true)]
    pub cert_file: Option<PathBuf>,
    /// Key of the client certificate for etcd
    #[arg(long = "datastore-keyfile", value_name = "FILE", global = true)]
    pub key_file: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Snapshot {
    #[command(flatten)]
    which: Which,
    #[command(subcommand)]
    command: cli::snapshot::Command,
}

#[derive(Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct StoreCommand {
    #[command(flatten)]
    which: Which,
    #[command(subcommand)]
    command: cli::store::Command,
}

impl Snapshot {
    pub async fn run(self, data_dir: &Path) -> anyhow::Result<ExitCode> {
        let is_needed = self.command.needs_store(!self.which.endpoints.is_empty());
        let store = if is_needed { Some(self.which.open(data_dir).await?) } else { None };
        let code = self.command.run(data_dir, store.clone(), plain).await;
        close(store).await;
        code
    }
}

impl StoreCommand {
    pub async fn run(self, data_dir: &Path) -> anyhow::Result<ExitCode> {
        let is_needed = self.command.needs_store();
        let store = if is_needed { Some(self.which.open(data_dir).await?) } else { None };
        let code = self.command.run(data_dir, store.clone(), plain).await;
        close(store).await;
        code
    }
}

async fn close(store: Option<Arc<dyn Store>>) {
    if let Some(store) = store {
        store.close().await;
    }
}

/// A value as the registry writes it, decoded from its form at rest.
fn plain(key: &[u8], value: Bytes) -> store::Result<Bytes> {
    at_rest::plain(FORMATS, key, value)
}

impl Which {
    async fn open(&self, data_dir: &Path) -> anyhow::Result<Arc<dyn Store>> {
        if !self.endpoints.is_empty() {
            return connect(&Datastore {
                endpoints: self.endpoints.clone(),
                ca_file: self.ca_file.clone(),
                cert_file: self.cert_file.clone(),
                key_file: self.key_file.clone(),
                ..Datastore::default()
            })
            .await;
        }
        if let Some(own) = crate::cluster::datastore_of(data_dir)? {
            return connect(&own).await;
        }
        let socket = socket(data_dir);
        if tokio::net::UnixStream::connect(&socket).await.is_ok() {
            return at_socket(&socket);
        }
        let directory = data_dir.join("store");
        if !directory.join("store.redb").exists() {
            bail!(
                "there is no store in {}; name another data directory with -d",
                data_dir.display()
            );
        }
        // Only the server decides how much history is kept.
        let options = store::Options {
            history_revisions: u64::MAX / 2,
            history_bytes: u64::MAX,
            ..store::Options::default()
        };
        match store::Embedded::open(&directory, options) {
            Ok(store) => Ok(store),
            // A server that is starting holds the files, but has no socket yet.
            Err(error) => match is_in_use(&directory) {
                true => starting(&socket).await.unwrap_or(Err(error.into())),
                false => Err(error).with_context(|| {
                    format!("cannot open the state store in {}", directory.display())
                }),
            },
        }
    }
}

fn is_in_use(directory: &Path) -> bool {
    let lock = std::fs::File::open(directory.join("lock"));
    lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(std::fs::TryLockError::WouldBlock)))
}

/// The store of a server that answers within [`STARTING`].
async fn starting(socket: &Path) -> Option<anyhow::Result<Arc<dyn Store>>> {
    let answers = async {
        while tokio::net::UnixStream::connect(socket).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(STARTING, answers).await.ok()?;
    Some(at_socket(socket))
}

fn at_socket(socket: &Path) -> anyhow::Result<Arc<dyn Store>> {
    let endpoints = vec![format!("unix://{}", socket.display())];
    Ok(etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() })?)
}

/// Call it before anything else is created in the directory. It creates the store's directory first, so
/// that an incomplete first start does not look like a lost store.
pub fn prepare(flags: &Datastore, data_dir: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    check_not_lost(flags, data_dir)?;
    if !flags.endpoints.is_empty() {
        return Ok(());
    }
    let directory = data_dir.join("store");
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    made.with_context(|| format!("cannot make {}", directory.display()))
}

/// Refuses an empty or missing store in the directory of an existing cluster: with an empty cluster the
/// node would remove its pods.
fn check_not_lost(flags: &Datastore, data_dir: &Path) -> anyhow::Result<()> {
    let file = data_dir.join("store/store.redb");
    let has_store = std::fs::metadata(&file).is_ok_and(|meta| meta.len() > 0);
    if has_store || !flags.endpoints.is_empty() || flags.history.new_store {
        return Ok(());
    }
    let Some(sign) = sign_of_life(data_dir) else { return Ok(()) };
    let place = data_dir.display();
    let what = if file.exists() { "empty" } else { "missing" };
    bail!(
        "{} is {what}, but {sign} says that this data directory has had a cluster: restore a snapshot \
         (decapod -d {place} snapshot list; decapod snapshot restore FILE -d NEWDIR, then copy pki and token there), \
         or begin an empty cluster here with --new-store",
        file.display()
    );
}

/// A file that exists only after a server has served from this directory. Authorities from the user, and a
/// node's images, may exist before.
fn sign_of_life(data_dir: &Path) -> Option<String> {
    const FILES: [&str; 4] = ["kubeconfig", "token", "snapshots", "dns.kubeconfig"];
    let kept = FILES.iter().find(|name| data_dir.join(name).exists());
    if kept.is_some() || data_dir.join("store").exists() {
        return kept.map(|name| (*name).to_owned());
    }
    let brought = |name: &str| ["ca.crt", "front-proxy-ca.crt"].contains(&name);
    let issued = std::fs::read_dir(data_dir.join("pki")).into_iter().flatten().flatten();
    let mut issued = issued
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".crt") && !brought(name));
    issued.next().map(|name| format!("pki/{name}"))
}

/// The socket of a server's store: in the data directory, unless that path is too long for a socket.
fn socket(data_dir: &Path) -> PathBuf {
    /// The kernel's limit is 108 bytes.
    const LONGEST: usize = 100;
    let full = data_dir.canonicalize().unwrap_or_else(|_| data_dir.to_owned());
    let near = full.join("store.sock");
    if near.as_os_str().len() <= LONGEST {
        near
    } else {
        runtime::layout::run_dir(&full).join("store.sock")
    }
}

/// Makes the store available to the commands of this machine, if possible.
pub fn offer(store: &Arc<dyn Store>, data_dir: &Path, tasks: &Tasks) {
    if let Err(error) = serve_socket(store, data_dir, tasks) {
        tracing::warn!(
            error = format!("{error:#}"),
            "failed to serve the store's socket for `decapod snapshot` and `decapod store`"
        );
    }
}

/// Serves the store to the commands of this machine.
fn serve_socket(store: &Arc<dyn Store>, data_dir: &Path, tasks: &Tasks) -> anyhow::Result<()> {
    let path = socket(data_dir);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    }
    let listener = transport::Listener::unix(&path).with_context(|| path.display().to_string())?;
    let options = etcd::server::Options { name: "decapod".into(), ..Default::default() };
    let server = etcd::server::Server::new(store.clone(), options, tasks.clone());
    let stop = tasks.stop_signal();
    tasks.spawn_graceful("store socket", async move {
        transport::serve(listener, None, server, etcd::server::limits(), stop).await;
        // An error means that the file is gone already.
        let _ = std::fs::remove_file(path);
    });
    Ok(())
}

#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub enum StorageMediaType {
    #[value(name = "application/json")]
    Json,
    #[default]
    #[value(name = "application/vnd.kubernetes.protobuf")]
    Protobuf,
}

/// Opens the store; `seal` transforms its values. It waits for an etcd, because machines start in any order
/// after a power cut.
pub async fn open(
    flags: &Datastore,
    data_dir: &Path,
    seal: Arc<dyn Transform>,
    tasks: &Tasks,
) -> anyhow::Result<Arc<dyn Store>> {
    if flags.endpoints.is_empty() {
        let directory = data_dir.join("store");
        let usual = store::Options::default();
        let options = match flags.history.store_history {
            None => usual,
            // A time from the user counts, whatever the disk usage is.
            Some(age) => store::Options { history_age: age, history_bytes: u64::MAX, ..usual },
        };
        let opened = store::Embedded::open(&directory, options)
            .with_context(|| format!("cannot open the state store in {}", directory.display()))?;
        offer(&opened, data_dir, tasks);
        return Ok(Transformed::over(opened, seal));
    }
    let remote = dial(flags)?;
    wait_for(&*remote, flags).await?;
    let interval = flags.use_of_etcd.etcd_compaction_interval;
    if !interval.is_zero() {
        tasks.spawn("etcd compactor", etcd::compactor::run(remote.clone(), interval));
    }
    let writes = match flags.use_of_etcd.storage_media_type {
        StorageMediaType::Json => MediaType::Json,
        StorageMediaType::Protobuf => MediaType::Protobuf,
    };
    let sealed = Transformed::over(remote, seal);
    Ok(at_rest::like_upstream(sealed, FORMATS, writes))
}

/// Often enough that a watch that breaks resumes above the compacted revision.
fn asks_every(compaction: Duration) -> Option<Duration> {
    let several_times = (compaction / 5).max(Duration::from_millis(200));
    (!compaction.is_zero() && compaction < Duration::from_secs(300)).then_some(several_times)
}

/// Connects, and checks that etcd answers.
async fn connect(flags: &Datastore) -> anyhow::Result<Arc<dyn Store>> {
    let remote = dial(flags)?;
    match tokio::time::timeout(PATIENCE, remote.revision()).await {
        Ok(answer) => answer.with_context(|| flags.named())?,
        Err(_) => bail!("{}: no answer within {} seconds", flags.named(), PATIENCE.as_secs()),
    };
    Ok(remote)
}

/// Waits until etcd answers, or for the time of the flag.
async fn wait_for(remote: &dyn Store, flags: &Datastore) -> anyhow::Result<()> {
    let (begun, limit) = (Instant::now(), flags.use_of_etcd.datastore_wait);
    let mut say = Backoff::new(ASK_AGAIN, SAY_AGAIN_CEILING);
    let mut next_word = begun;
    while let Err(error) = remote.revision().await {
        if !limit.is_zero() && begun.elapsed() >= limit {
            return Err(error).with_context(|| flags.named());
        }
        if Instant::now() >= next_word {
            let datastore = flags.endpoints.join(",");
            tracing::warn!(datastore, %error, "the datastore does not answer, waiting");
            next_word = Instant::now() + say.step();
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
    Ok(())
}

impl Datastore {
    fn named(&self) -> String {
        format!("--datastore-endpoint {}", self.endpoints.join(","))
    }
}

/// Does not connect: the first calls do.
fn dial(flags: &Datastore) -> anyhow::Result<Arc<dyn Store>> {
    for endpoint in &flags.endpoints {
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            bail!(
                "--datastore-endpoint {endpoint}: the embedded store and etcd (https://HOST:2379) are supported, databases are not"
            );
        }
    }
    let read = |file: &Option<PathBuf>| match file {
        None => Ok(None),
        Some(path) => {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display())).map(Some)
        }
    };
    let options = etcd::Options {
        endpoints: flags.endpoints.clone(),
        ca_pem: read(&flags.ca_file)?,
        identity_pem: read(&flags.cert_file)?.zip(read(&flags.key_file)?),
        ask_every: asks_every(flags.use_of_etcd.etcd_compaction_interval),
        follow_every: flags.is_own.then_some(crate::cluster::FOLLOW),
        ..Default::default()
    };
    Ok(etcd::Etcd::open(&options)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_lost_its_store_is_refused() {
        let root = tempfile::tempdir().expect("a directory");
        let flags = Datastore::default();
        let check = |flags: &Datastore| check_not_lost(flags, root.path());
        let make = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("one")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        assert!(check(&flags).is_ok(), "an empty directory");
        for brought in ["pki/ca.crt", "pki/ca.key", "pki/front-proxy-ca.crt", "runtime/images/x"] {
            make(brought, "x");
        }
        assert!(check(&flags).is_ok(), "files from the user");
        make("pki/apiserver.crt", "x");
        let why = check(&flags).expect_err("it has had a cluster").to_string();
        for part in
            ["store/store.redb is missing", "pki/apiserver.crt", "snapshot restore", "--new-store"]
        {
            assert!(why.contains(part), "{part}: {why}");
        }
        make("store/store.redb", "");
        assert!(check(&flags).is_ok(), "a first start that did not get far");
        make("kubeconfig", "x");
        let why = check(&flags).expect_err("it has had a cluster").to_string();
        assert!(why.contains("store.redb is empty") && why.contains("kubeconfig"), "{why}");
        let history = History { new_store: true, ..History::default() };
        assert!(check(&Datastore { history, ..Datastore::default() }).is_ok(), "as one wishes");
        let endpoints = vec!["https://127.0.0.1:2379".to_owned()];
        assert!(check(&Datastore { endpoints, ..Datastore::default() }).is_ok(), "it is elsewhere");
        make("store/store.redb", "a store");
        assert!(check(&flags).is_ok());
    }
}
