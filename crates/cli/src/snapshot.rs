//! `decapod snapshot`: saves the state into one file, and restores it.
//!
//! In: a store (a running server's through its socket, an etcd, or the files of a stopped server) and
//! files. Out: files, and information about them. The format is [`store::snapshot`]'s.
//!
//! Invariants: a file with its final name is complete, on disk, and was read back; a restore never
//! overwrites an existing store, and continues above every revision that clients may have seen.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use jiff::Timestamp;
use serde_json::json;
use store::snapshot::Content;
use store::{KeyRange, Op, RangeRequest, Revision, Store, Txn};

use crate::grid::Grid;

/// The default prefix of names, similar to k3s'.
pub const PREFIX: &str = "decapod-snapshot";
/// By how many revisions a restored store is ahead of its snapshot by default. Upstream: etcd's
/// documentation recommends this for `etcdutl snapshot restore --bump-revision`.
const BUMP: u64 = 1_000_000_000;
/// The maximum number of writes to bring a running etcd above the snapshot's revision: only writes raise it.
const MOST_WRITES: u64 = 2_000_000;
/// Concurrent writes to an etcd.
const WRITERS: usize = 64;
/// By how many revisions an etcd is brought above the snapshot.
const MARGIN: u64 = 1000;

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Write all live data into one file, while the server runs
    Save(Save),
    /// Check a snapshot and show its content
    Status(Status),
    /// List the snapshots of a directory
    #[command(visible_alias = "ls")]
    List(List),
    /// Create a new data directory from a snapshot, or fill an empty etcd (--datastore-endpoint)
    Restore(Restore),
}

#[derive(clap::Args, Clone, Debug)]
pub struct Save {
    /// The prefix of the file's name; the time follows
    #[arg(long, default_value = PREFIX)]
    pub name: String,
    /// The directory for the file [default: <data-dir>/snapshots]
    #[arg(long, value_name = "DIR")]
    pub snapshot_dir: Option<PathBuf>,
    /// The file to write, instead of --name and --snapshot-dir
    pub file: Option<PathBuf>,
}

#[derive(clap::Args, Clone, Debug)]
pub struct Status {
    pub file: PathBuf,
    /// table or json
    #[arg(short = 'o', long, default_value = "table")]
    pub output: String,
}

#[derive(clap::Args, Clone, Debug)]
pub struct List {
    /// The directory to list [default: <data-dir>/snapshots]
    #[arg(long, value_name = "DIR")]
    pub snapshot_dir: Option<PathBuf>,
}

#[derive(clap::Args, Clone, Debug)]
pub struct Restore {
    pub file: PathBuf,
    /// By how much the new store's revision is above the snapshot's: more than the number of writes
    /// after the snapshot
    #[arg(long, default_value_t = BUMP, value_name = "REVISIONS")]
    pub bump_revision: u64,
    /// Accept a file without checksum: one copied from an etcd's data directory
    #[arg(long)]
    pub skip_hash_check: bool,
}

/// Converts a stored value to the embedded store's plain form.
pub type Plain = fn(&[u8], Bytes) -> store::Result<Bytes>;

impl Command {
    /// Whether it needs a running store.
    pub fn needs_store(&self, has_endpoint: bool) -> bool {
        match self {
            Self::Save(_) => true,
            Self::Restore(_) => has_endpoint,
            Self::Status(_) | Self::List(_) => false,
        }
    }

    pub async fn run(
        self,
        data_dir: &Path,
        store: Option<Arc<dyn Store>>,
        plain: Plain,
    ) -> Result<ExitCode> {
        match (self, store) {
            (Self::Save(save), Some(store)) => {
                let file = match save.file {
                    Some(file) => file,
                    None => {
                        let directory = save.snapshot_dir.unwrap_or(directory(data_dir));
                        directory.join(file_name(&save.name, base::clock::now()))
                    }
                };
                let content = write(&*store, &file).await?;
                println!("{}: {}", file.display(), summary(&content));
            }
            (Self::Status(status), _) => print!("{}", status.text()?),
            (Self::List(list), _) => {
                print!("{}", list_text(&list.snapshot_dir.unwrap_or(directory(data_dir)))?);
            }
            (Self::Restore(restore), Some(store)) => restore.fill_etcd(&store).await?,
            (Self::Restore(restore), None) => restore.make_directory(data_dir, plain)?,
            (Self::Save(_), None) => bail!("there is no store to save"),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The default directory of snapshots.
pub fn directory(data_dir: &Path) -> PathBuf {
    data_dir.join("snapshots")
}

/// `decapod-snapshot-20261121T203000Z.db`: names sort by time.
pub fn file_name(prefix: &str, now: Timestamp) -> String {
    format!("{prefix}-{}.db", now.strftime("%Y%m%dT%H%M%SZ"))
}

fn summary(content: &Content) -> String {
    format!("revision {}, {} keys, {} bytes", content.revision, content.kvs.len(), content.size)
}

/// Writes a snapshot into `file`: first under another name; after a sync and a check it gets its final
/// one.
pub async fn write(store: &dyn Store, file: &Path) -> Result<Content> {
    if file.exists() {
        bail!("{} exists already", file.display());
    }
    let directory = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    make_private(&directory)
        .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    let part = file.with_extension("part");
    let written = write_part(store, &part).await;
    let content = written.and_then(|()| Ok(store::snapshot::read(&part, true)?));
    let content = match content {
        Ok(content) => content,
        Err(error) => {
            // The incomplete file is useless; a failure to remove it does not matter.
            let _ = std::fs::remove_file(&part);
            return Err(error);
        }
    };
    std::fs::rename(&part, file)
        .and_then(|()| File::open(&directory)?.sync_all())
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(content)
}

fn make_private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

async fn write_part(store: &dyn Store, part: &Path) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let cannot = || format!("cannot write {}", part.display());
    let mut options = std::fs::OpenOptions::new();
    let opened = options.write(true).create(true).truncate(true).mode(0o600).open(part);
    let mut file = opened.with_context(cannot)?;
    let mut snapshot = store.snapshot().await.context("cannot take a snapshot")?;
    while let Some(chunk) = snapshot.chunks.recv().await {
        file.write_all(&chunk.context("the snapshot broke off")?).with_context(cannot)?;
    }
    file.sync_all().with_context(cannot)
}

/// Removes all but the newest `keep` snapshots with this prefix.
pub fn prune(directory: &Path, prefix: &str, keep: usize) -> Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = snapshots(directory)?
        .into_iter()
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let stamp = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('-'));
            stamp.is_some_and(|stamp| stamp.len() == "20261121T203000Z.db".len())
        })
        .collect();
    let excess = names.len().saturating_sub(keep);
    names.truncate(excess);
    for path in &names {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(names)
}

/// The files, by name.
fn snapshots(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.with_context(|| format!("cannot read {}", directory.display()))?,
    };
    let mut found = vec![];
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "db") {
            found.push(path);
        }
    }
    found.sort_unstable();
    Ok(found)
}

impl Status {
    fn text(&self) -> Result<String> {
        let content = store::snapshot::read(&self.file, true)
            .with_context(|| format!("{}", self.file.display()))?;
        if self.output == "json" {
            let text = json!({
                "hash": content.hash,
                "revision": content.revision.0,
                "totalKey": content.kvs.len(),
                "totalSize": content.size,
            });
            return Ok(format!("{text}\n"));
        }
        let headers = ["HASH", "REVISION", "TOTAL KEYS", "TOTAL SIZE"].map(str::to_owned);
        let row = vec![
            format!("{:x}", content.hash),
            content.revision.to_string(),
            content.kvs.len().to_string(),
            format!("{} bytes", content.size),
        ];
        Ok(Grid::default().render(&[headers.to_vec(), row]))
    }
}

fn list_text(directory: &Path) -> Result<String> {
    let mut lines =
        vec![["NAME", "REVISION", "KEYS", "SIZE", "CREATED"].map(str::to_owned).to_vec()];
    for path in snapshots(directory)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let meta = path.metadata().with_context(|| format!("cannot read {}", path.display()))?;
        let created = meta.modified().ok().and_then(|time| Timestamp::try_from(time).ok());
        let created =
            created.map_or("<unknown>".into(), |at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let (revision, keys) = match store::snapshot::read(&path, true) {
            Ok(content) => (content.revision.to_string(), content.kvs.len().to_string()),
            Err(_) => ("<damaged>".into(), "-".into()),
        };
        lines.push(vec![name, revision, keys, meta.len().to_string(), created]);
    }
    Ok(Grid::default().render(&lines))
}

/// Fills an empty etcd with a snapshot, through its API.
pub async fn fill(store: &Arc<dyn Store>, file: &Path) -> Result<()> {
    let restore = Restore { file: file.to_owned(), bump_revision: BUMP, skip_hash_check: false };
    restore.fill_etcd(store).await
}

impl Restore {
    fn read(&self) -> Result<Content> {
        store::snapshot::read(&self.file, !self.skip_hash_check)
            .with_context(|| format!("{}", self.file.display()))
    }

    fn mark(&self, content: &Content) -> String {
        let at = base::clock::now_seconds().to_string();
        let file = self.file.display().to_string();
        json!({ "from": file, "revision": content.revision.0, "at": at }).to_string()
    }

    /// Creates `store` under the data directory, where a server expects it.
    fn make_directory(&self, data_dir: &Path, plain: Plain) -> Result<()> {
        let mut content = self.read()?;
        for kv in &mut content.kvs {
            kv.value = plain(&kv.key, kv.value.bytes())?.into();
        }
        let revision = Revision(content.revision.0 + self.bump_revision.max(1));
        let directory = data_dir.join("store");
        make_private(data_dir).with_context(|| format!("cannot make {}", data_dir.display()))?;
        store::backend::embedded::restore(&directory, &content, revision, &self.mark(&content))?;
        println!(
            "{}: {}; it continues at revision {revision}",
            directory.display(),
            summary(&content)
        );
        if !data_dir.join("pki").exists() {
            println!(
                "certificates and keys are not in a snapshot: copy pki and token of the old data directory to {} so that nodes and service accounts stay known",
                data_dir.display()
            );
        }
        Ok(())
    }

    /// Uses etcd's API, so that it may be a running cluster.
    async fn fill_etcd(&self, store: &Arc<dyn Store>) -> Result<()> {
        let content = self.read()?;
        let all = RangeRequest::new(KeyRange::prefix(&b"/registry/"[..]));
        let there = store.range(RangeRequest { count_only: true, ..all }).await?;
        if there.count > 0 {
            bail!(
                "there are {} keys under /registry/ already; restore into an empty etcd",
                there.count
            );
        }
        let wanted = content.revision.0 + MARGIN;
        let missing = wanted.saturating_sub(there.revision.0);
        if missing > MOST_WRITES {
            bail!(
                "this etcd is at revision {} and would need {missing} writes to get above the snapshot's {}; restore with `etcdutl snapshot restore --bump-revision {BUMP} --mark-compacted {}` instead, the file is etcd's own format",
                there.revision,
                content.revision,
                self.file.display()
            );
        }
        let mark = Bytes::from(self.mark(&content));
        let key = Bytes::from_static(store::backend::embedded::MARK.as_bytes());
        let filler = move |_| Op::Put { key: key.clone(), value: mark.clone(), lease: 0 };
        println!("{missing} writes bring etcd above revision {}", content.revision);
        in_parallel(store, (0..missing).map(filler)).await?;
        for (id, ttl) in &content.leases {
            match store.lease_grant_as(*id, *ttl).await {
                Ok(()) | Err(store::Error::LeaseExists(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let known = |id: i64| content.leases.iter().any(|(lease, _)| *lease == id);
        let puts = content.kvs.iter().map(|kv| Op::Put {
            key: kv.key.clone(),
            value: kv.value.bytes(),
            lease: if known(kv.lease) { kv.lease } else { 0 },
        });
        let puts: Vec<Op> = puts.collect();
        in_parallel(store, puts.into_iter()).await?;
        let present = store.revision().await?;
        // Clients with an older revision must list again.
        store.compact(present).await?;
        println!("etcd has all {} keys, at revision {present}", content.kvs.len());
        Ok(())
    }
}

/// Runs each op as a separate transaction, some concurrently.
async fn in_parallel(store: &Arc<dyn Store>, ops: impl Iterator<Item = Op>) -> Result<()> {
    use futures::{StreamExt, TryStreamExt};
    futures::stream::iter(ops)
        .map(|op| async move { store.txn(Txn { success: vec![op], ..Txn::default() }).await })
        .buffer_unordered(WRITERS)
        .try_for_each(|_| std::future::ready(Ok(())))
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use store::{Embedded, Options, Sim};

    fn put(key: &str, value: &str, lease: i64) -> Txn {
        let op = Op::Put { key: key.to_owned().into(), value: value.to_owned().into(), lease };
        Txn { success: vec![op], ..Txn::default() }
    }

    async fn all(store: &dyn Store) -> Vec<store::KeyValue> {
        let range = RangeRequest::new(KeyRange::prefix(&b"/registry/"[..]));
        store.range(range).await.expect("readable").kvs
    }

    fn restore(file: &Path) -> Restore {
        Restore { file: file.to_owned(), bump_revision: BUMP, skip_hash_check: false }
    }

    /// Saves a store with a lease, a deleted key and a key that was written twice.
    async fn saved(file: &Path) -> (Arc<dyn Store>, Content) {
        let store = Sim::open();
        let lease = store.lease_grant(3600).await.expect("granted");
        for i in 0..50 {
            let key = format!("/registry/pods/default/{i}");
            store.txn(put(&key, "1", if i % 2 == 0 { lease } else { 0 })).await.expect("written");
        }
        store.txn(put("/registry/pods/default/7", "2", 0)).await.expect("written");
        let gone = KeyRange::one(&b"/registry/pods/default/8"[..]);
        let delete = Txn { success: vec![Op::DeleteRange { range: gone }], ..Txn::default() };
        store.txn(delete).await.expect("deleted");
        let content = write(&*store, file).await.expect("saved");
        (store, content)
    }

    #[tokio::test]
    async fn a_restored_directory_is_complete_and_continues_above() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a.db");
        let (store, content) = saved(&file).await;
        let data_dir = dir.path().join("new");
        restore(&file).make_directory(&data_dir, |_, value| Ok(value)).expect("restored");
        let again = restore(&file).make_directory(&data_dir, |_, value| Ok(value));
        assert!(again.is_err_and(|error| error.to_string().contains("already")));
        let new = Embedded::open(&data_dir.join("store"), Options::default()).expect("opens");
        assert_eq!(all(&*new).await, all(&*store).await);
        let revision = new.revision().await.expect("open");
        assert_eq!(revision.0, content.revision.0 + BUMP);
        let old = RangeRequest {
            revision: Some(content.revision),
            ..RangeRequest::new(KeyRange::prefix(&b"/"[..]))
        };
        let old = new.range(old).await;
        assert!(matches!(old, Err(store::Error::Compacted { .. })), "{old:?}");
        let leases = new.leases().await.expect("open");
        assert_eq!((leases.len(), leases[0].keys.len()), (1, 24));
        let next = new.txn(put("/registry/a", "", 0)).await.expect("written").revision;
        assert_eq!(next.0, revision.0 + 1);
        new.close().await;
        let found = store::backend::embedded::verify(&data_dir.join("store")).expect("whole");
        assert_eq!(found.keys, 51);
    }

    #[tokio::test]
    async fn an_etcd_is_brought_above_the_snapshot() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a.db");
        let (store, content) = saved(&file).await;
        let target = Sim::open();
        restore(&file).fill_etcd(&target).await.expect("restored");
        let values = |kvs: Vec<store::KeyValue>| -> Vec<_> {
            kvs.into_iter().map(|kv| (kv.key, kv.value, kv.lease)).collect()
        };
        let restored = all(&*target).await;
        assert!(restored.iter().all(|kv| kv.mod_revision > content.revision));
        assert_eq!(values(restored), values(all(&*store).await));
        assert!(restore(&file).fill_etcd(&target).await.is_err(), "it is not empty");
    }

    #[tokio::test]
    async fn the_newest_are_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Sim::open();
        let mut now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        for _ in 0..4 {
            write(&*store, &dir.path().join(file_name("s", now))).await.expect("saved");
            now += jiff::SignedDuration::from_secs(60);
        }
        write(&*store, &dir.path().join("s-mine.db")).await.expect("saved");
        let gone = prune(dir.path(), "s", 2).expect("pruned");
        assert_eq!(gone.len(), 2);
        let names: Vec<String> = snapshots(dir.path())
            .expect("readable")
            .iter()
            .map(|path| path.file_name().expect("a name").to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["s-20260101T000200Z.db", "s-20260101T000300Z.db", "s-mine.db"]);
        assert!(list_text(dir.path()).expect("listed").contains("s-mine.db"));
    }
}
