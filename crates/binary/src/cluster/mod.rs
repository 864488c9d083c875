//! Several servers: each runs a member of a real etcd beside it, and joins with one command.
//!
//! ```text
//! first:  --cluster-init               ► etcd of one member, with the embedded store's state
//! others: --server URL --token TOKEN   ► authorities and keys (bundle.rs) ► learner ► voter (join.rs)
//! each start afterwards                ► the member in <data-dir>/etcd, whatever the flags say
//! ```
//!
//! In: flags, the data directory. Out: a running member, and the flags of a datastore that is this etcd.
//! Invariants: etcd is an unmodified program, and its consensus the only one. A member starts only with its
//! own data; a server that was removed does not come back by itself.

mod bundle;
mod commands;
mod join;
mod member;
mod reset;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base::backoff::Backoff;
use etcd::cluster::{Cluster, Refusal};
use pki::etcd::EtcdPki;
use tokio::time::Instant;

use crate::datastore::Datastore;
use crate::flags;
use crate::process::say;

pub use bundle::publish;
pub use commands::MemberCommand;
pub use member::Member;
pub use reset::reset;

/// Written when a server has joined, or was initialized: `--server` has no effect from then on.
const JOINED: &str = "joined";
/// Written when the cluster has removed this server.
const REMOVED: &str = "removed";
/// etcd's client URLs, this server's own first, one a line.
const MEMBERS: &str = "etcd-members";
/// etcd's, for clients and for its peers.
const PORTS: [u16; 2] = [2379, 2380];
/// In the root directory of some file systems.
const LOST_AND_FOUND: &str = "lost+found";
/// For the cluster to accept a new member, and for its data to arrive.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often a running server asks for the list of members.
pub const FOLLOW: Duration = Duration::from_secs(10);

#[derive(clap::Args, Clone, Debug, Default)]
pub struct ClusterFlags {
    /// Keep the state in an etcd that other servers can join, beside this server; moves the embedded
    /// store's state there
    #[arg(long)]
    pub cluster_init: bool,
    /// Join the cluster of this server, for example https://192.168.0.1:6443; with --token
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub server: Vec<String>,
    /// A file with the token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
    /// The etcd program, 3.4 or newer [default: the etcd on the path]
    #[arg(long, value_name = "FILE")]
    pub etcd_binary: Option<PathBuf>,
    /// Make a cluster of this server alone, for a cluster that has lost its majority; then it ends
    #[arg(long, conflicts_with_all = ["cluster_init", "server"])]
    pub cluster_reset: bool,
    /// With --cluster-reset: the state of this snapshot
    #[arg(long, value_name = "FILE", requires = "cluster_reset")]
    pub from_snapshot: Option<PathBuf>,
}

impl ClusterFlags {
    fn check(&self, datastore: &Datastore) -> anyhow::Result<()> {
        if self.cluster_init && !self.server.is_empty() {
            bail!(
                "--cluster-init makes the first server, and --server joins one: give one of them"
            );
        }
        if self.cluster_init && !datastore.endpoints.is_empty() {
            bail!(
                "--cluster-init runs an etcd, and --datastore-endpoint names one: give one of them"
            );
        }
        Ok(())
    }
}

/// This server's place in the etcd.
#[derive(Clone, Debug)]
pub struct Own {
    pub name: String,
    pub address: IpAddr,
    pub data_dir: PathBuf,
}

impl Own {
    pub fn of(flags: &flags::Server, data_dir: &Path, address: IpAddr) -> anyhow::Result<Self> {
        let name = crate::node::name(&flags.node)?;
        Ok(Self { name, address, data_dir: data_dir.to_owned() })
    }

    pub fn etcd(&self) -> PathBuf {
        self.data_dir.join("etcd")
    }

    pub fn client_url(&self) -> String {
        crate::control_plane::url(self.address, PORTS[0])
    }

    pub fn peer_url(&self) -> String {
        crate::control_plane::url(self.address, PORTS[1])
    }

    fn is_member(&self) -> bool {
        self.etcd().join("member/wal").exists()
    }

    /// Whether etcd's directory has data that the next start would use. A mount point that waits for its first
    /// member has none.
    fn has_data(&self) -> bool {
        self.etcd().join("member").exists()
    }

    fn pki(&self) -> anyhow::Result<EtcdPki> {
        Ok(EtcdPki::open_or_create(&self.data_dir.join("pki"))?)
    }

    /// The client URLs that were known last, the own one first.
    pub fn known_urls(&self) -> Vec<String> {
        let own = self.client_url();
        let text = std::fs::read_to_string(self.data_dir.join(MEMBERS)).unwrap_or_default();
        let others = text.lines().filter(|url| **url != own).map(str::to_owned);
        std::iter::once(own.clone()).chain(others).collect()
    }

    pub fn remember(&self, urls: &[String]) -> anyhow::Result<()> {
        let path = self.data_dir.join(MEMBERS);
        Ok(pki::write_private(&path, urls.join("\n").as_bytes(), 0o600)?)
    }

    /// A client of these members.
    pub fn cluster(&self, urls: &[String]) -> anyhow::Result<Cluster> {
        Ok(Cluster::open(&self.options(urls)?)?)
    }

    pub fn options(&self, urls: &[String]) -> anyhow::Result<etcd::Options> {
        let pki = self.pki()?;
        let client = pki.client()?.issued;
        Ok(etcd::Options {
            endpoints: urls.to_vec(),
            ca_pem: Some(pki.ca().cert_pem().as_bytes().to_vec()),
            identity_pem: Some((client.cert_pem.into_bytes(), client.key_pem.into_bytes())),
            ..etcd::Options::default()
        })
    }
}

/// Joins or initializes if the flags say so, and starts the member. The flags then name this etcd as the
/// datastore. `None`: this server runs no etcd.
pub async fn prepare(
    flags: &mut flags::Server,
    data_dir: &Path,
    address: IpAddr,
) -> anyhow::Result<Option<Member>> {
    flags.cluster.check(&flags.datastore)?;
    let own = Own::of(flags, data_dir, address)?;
    refuse_removed(&own)?;
    let is_joining = !flags.cluster.server.is_empty();
    let joined = match is_joining && !data_dir.join(JOINED).exists() {
        true => Some(join::join(flags, &own).await?),
        false => None,
    };
    if is_joining {
        // It is the servers' token; that of nodes came with the bundle.
        flags.token = None;
    }
    if !flags.datastore.endpoints.is_empty() {
        if joined.is_some() {
            mark_joined(&own)?;
        }
        return Ok(None);
    }
    if joined.is_some() || own.is_member() || flags.cluster.cluster_init {
        member::ports_are_free(&own).await?;
    }
    let member = match joined {
        Some(joined) => join::start(flags, &own, &joined).await?,
        None if own.is_member() => Member::start(&own, flags, member::Start::Again)?,
        None if flags.cluster.cluster_init => initialize(flags, &own).await?,
        None => return Ok(None),
    };
    serving(&own, &member).await?;
    mark_joined(&own)?;
    let urls = own.known_urls();
    // Others are known, so that this server goes on if its own member does not.
    let listed = current_urls(&own, &urls).await.unwrap_or(urls);
    own.remember(&listed)?;
    point_at(flags, &own, &listed)?;
    Ok(Some(member))
}

/// The flags of a datastore that is this etcd.
fn point_at(flags: &mut flags::Server, own: &Own, urls: &[String]) -> anyhow::Result<()> {
    let pki = own.pki()?;
    let client = pki.client()?;
    flags.datastore.endpoints = urls.to_vec();
    flags.datastore.is_own = true;
    flags.datastore.ca_file = Some(pki.ca_file());
    flags.datastore.cert_file = Some(client.cert);
    flags.datastore.key_file = Some(client.key);
    Ok(())
}

/// The flags of the etcd of the server with this data directory; `None` if it runs none.
pub fn datastore_of(data_dir: &Path) -> anyhow::Result<Option<Datastore>> {
    let Ok(urls) = std::fs::read_to_string(data_dir.join(MEMBERS)) else { return Ok(None) };
    let pki = EtcdPki::open_or_create(&data_dir.join("pki"))?;
    let client = pki.client()?;
    Ok(Some(Datastore {
        endpoints: urls.lines().map(str::to_owned).collect(),
        ca_file: Some(pki.ca_file()),
        cert_file: Some(client.cert),
        key_file: Some(client.key),
        ..Datastore::default()
    }))
}

/// The client URLs of all voting members, the own one first.
async fn current_urls(own: &Own, known: &[String]) -> anyhow::Result<Vec<String>> {
    let mut members = own.cluster(known)?.members().await?;
    members.retain(|member| !member.is_learner);
    let mut urls = vec![own.client_url()];
    for url in members.into_iter().flat_map(|member| member.client_urls) {
        if !urls.contains(&url) {
            urls.push(url);
        }
    }
    Ok(urls)
}

/// Keeps the file of members up to date: a server that starts while its own member fails uses the others.
pub async fn follow(own: Own) {
    loop {
        tokio::time::sleep(FOLLOW).await;
        let known = own.known_urls();
        match current_urls(&own, &known).await {
            Ok(urls) if urls != known => {
                if let Err(error) = own.remember(&urls) {
                    tracing::warn!(%error, "failed to write the list of etcd's members");
                }
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "failed to list etcd's members"),
        }
    }
}

fn mark_joined(own: &Own) -> anyhow::Result<()> {
    let path = own.data_dir.join(JOINED);
    Ok(pki::write_private(&path, own.name.as_bytes(), 0o600)?)
}

fn refuse_removed(own: &Own) -> anyhow::Result<()> {
    let mark = own.data_dir.join(REMOVED);
    if mark.exists() {
        bail!(
            "this server was removed from its cluster; to join again, delete {} and start with --server and --token",
            mark.display()
        );
    }
    Ok(())
}

/// Keeps the data of a member that the cluster has removed, and makes that known to the next start.
pub fn set_removed(own: &Own) -> anyhow::Result<()> {
    pki::write_private(&own.data_dir.join(REMOVED), own.name.as_bytes(), 0o600)?;
    let _ = std::fs::remove_file(own.data_dir.join(JOINED));
    aside(&own.etcd()).map(drop)
}

/// Moves a directory's content out of the way, and returns its new place: the directory itself is renamed, unless
/// it is a mount point, as of a disk that etcd has for itself. Then the content moves within it.
fn aside(directory: &Path) -> anyhow::Result<PathBuf> {
    let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let old = format!("{name}.old-{}", base::clock::now().strftime("%Y%m%dT%H%M%SZ"));
    let other = directory.with_file_name(&old);
    match std::fs::rename(directory, &other) {
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            let within = directory.join(&old);
            move_within(directory, &within, &format!("{name}.old-"))
                .with_context(|| format!("cannot empty {}", directory.display()))?;
            Ok(within)
        }
        outcome => {
            outcome.with_context(|| format!("cannot rename {}", directory.display()))?;
            Ok(other)
        }
    }
}

/// Moves all entries into a new directory among them; those that an earlier call has moved stay.
fn move_within(directory: &Path, to: &Path, earlier: &str) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let entries: Vec<_> = std::fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    std::fs::DirBuilder::new().mode(0o700).create(to)?;
    for entry in entries {
        let name = entry.file_name();
        if name != LOST_AND_FOUND && !name.to_string_lossy().starts_with(earlier) {
            std::fs::rename(entry.path(), to.join(name))?;
        }
    }
    Ok(())
}

/// The first member. The state of the embedded store moves over, with revisions above all old ones.
async fn initialize(flags: &flags::Server, own: &Own) -> anyhow::Result<Member> {
    let store = own.data_dir.join("store");
    if !store.join("store.redb").exists() {
        return Member::start(own, flags, member::Start::First);
    }
    say("moving the state of the embedded store to etcd");
    let file = own.data_dir.join("moving.db");
    // From an attempt that did not end well.
    let _ = std::fs::remove_file(&file);
    let embedded = store::Embedded::open(&store, store::Options::default())
        .with_context(|| format!("cannot open {}", store.display()))?;
    let saved = cli::snapshot::write(&*embedded, &file).await;
    embedded.close().await;
    saved.context("cannot save the embedded store's state")?;
    let member = reset::filled(flags, own, &file).await?;
    let kept = aside(&store)?;
    let _ = std::fs::remove_file(&file);
    say(&format!("the embedded store is kept in {}", kept.display()));
    Ok(member)
}

/// Waits until the member serves reads of the whole cluster.
async fn serving(own: &Own, member: &Member) -> anyhow::Result<()> {
    let store = etcd::Etcd::open(&own.options(&[own.client_url()])?)?;
    let mut said = Instant::now();
    loop {
        let error = match store.revision().await {
            Ok(_) => break,
            Err(error) => error,
        };
        if let Some(why) = member.has_failed() {
            bail!("etcd does not start: {why}");
        }
        if said.elapsed() > Duration::from_secs(10) {
            tracing::warn!(%error, "etcd does not serve yet, waiting");
            said = Instant::now();
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(200)) => {}
            () = member.removed() => bail!(removed_text(own)),
            () = crate::process::termination() => bail!("stopped while etcd was starting"),
        }
    }
    store.close().await;
    Ok(())
}

/// For a server that learns that it was removed.
pub fn removed_text(own: &Own) -> String {
    format!("the server {} was removed from its cluster", own.name)
}

/// Repeats a change of the members while etcd says that it cannot do it now.
async fn insist<T>(
    what: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, Refusal>,
) -> anyhow::Result<T> {
    let (begun, mut pause) =
        (Instant::now(), Backoff::new(Duration::from_millis(200), Duration::from_secs(2)));
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(Refusal::NotNow(why)) if begun.elapsed() < PATIENCE => {
                tracing::info!(why, "{what}: waiting");
            }
            Err(refusal) => return Err(refusal).with_context(|| what.to_owned()),
        }
        tokio::time::sleep(pause.step()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(directory: &Path) -> Own {
        let address = IpAddr::from([192, 0, 2, 1]);
        Own { name: "n1".into(), address, data_dir: directory.to_owned() }
    }

    #[test]
    fn the_own_member_comes_first() {
        let root = tempfile::tempdir().expect("a directory");
        let own = own(root.path());
        assert_eq!(own.known_urls(), ["https://192.0.2.1:2379"]);
        let urls = ["https://192.0.2.2:2379", "https://192.0.2.1:2379"].map(str::to_owned);
        own.remember(&urls).expect("written");
        assert_eq!(own.known_urls(), ["https://192.0.2.1:2379", "https://192.0.2.2:2379"]);
    }

    #[test]
    fn a_removed_server_does_not_start() {
        let root = tempfile::tempdir().expect("a directory");
        let own = own(root.path());
        std::fs::create_dir_all(own.etcd().join("member/wal")).expect("made");
        mark_joined(&own).expect("written");
        assert!(own.is_member() && refuse_removed(&own).is_ok());
        set_removed(&own).expect("written");
        let why = refuse_removed(&own).expect_err("it was removed").to_string();
        assert!(why.contains("was removed") && why.contains("removed and start"), "{why}");
        assert!(!own.is_member() && !root.path().join(JOINED).exists());
    }

    #[test]
    fn a_mount_point_is_emptied_within() {
        let root = tempfile::tempdir().expect("a directory");
        let own = own(root.path());
        for name in [LOST_AND_FOUND, "etcd.old-before", "member"] {
            assert!(!own.has_data(), "there is nothing of a member yet");
            std::fs::create_dir_all(own.etcd().join(name)).expect("made");
        }
        assert!(own.has_data());
        let to = own.etcd().join("etcd.old-now");
        move_within(&own.etcd(), &to, "etcd.old-").expect("moved");
        let mut left: Vec<_> = std::fs::read_dir(own.etcd())
            .expect("readable")
            .map(|entry| entry.expect("readable").file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["etcd.old-before", "etcd.old-now", LOST_AND_FOUND]);
        assert!(to.join("member").exists() && !own.has_data());
    }

    #[test]
    fn flags_that_exclude_each_other_are_refused() {
        let check = |init: bool, server: &[&str], endpoints: &[&str]| {
            let all = |names: &[&str]| names.iter().map(|one| (*one).to_owned()).collect();
            let flags =
                ClusterFlags { cluster_init: init, server: all(server), ..ClusterFlags::default() };
            flags.check(&Datastore { endpoints: all(endpoints), ..Datastore::default() }).is_ok()
        };
        assert!(check(true, &[], &[]) && check(false, &["https://a"], &["https://b"]));
        assert!(!check(true, &["https://a"], &[]) && !check(true, &[], &["https://b"]));
    }
}
