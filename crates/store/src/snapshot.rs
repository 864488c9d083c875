//! A snapshot: all live data of a store at one revision in one file, with its leases, and a checksum.
//!
//! The format is etcd's own (a bbolt database followed by its SHA-256, described in `docs/store.md`), so
//! that snapshots can be exchanged: `etcdutl snapshot status` reads our files and `etcdutl snapshot
//! restore` makes an etcd from them; [`read`] also reads files of a real etcd.
//!
//! In: live values at one revision, shared, not copied. Out: bytes in order; the size is known
//! before the first byte, so that the file can be streamed.
//!
//! Invariants: the file contains no history: its revision counts as compacted, so that a client with an
//! older revision gets an error instead of incomplete history. Only data covered by the checksum is
//! trusted.

mod bolt;
mod read;
mod wire;

use std::io::{self, Write};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

pub use read::{Content, read};

use crate::{Error, KeyValue, LeaseId, Result, Revision, Value};
use bolt::{Item, Layout};

/// The size of a chunk: the same as etcd's.
const CHUNK: usize = 32 << 10;
/// Chunks that may wait for a slow reader.
const AHEAD: usize = 4;
const CHECKSUM: usize = 32;

/// A snapshot that is being sent.
pub struct Snapshot {
    pub revision: Option<Revision>,
    /// The size of the whole file, if the store knows it in advance.
    pub size: Option<u64>,
    pub chunks: mpsc::Receiver<Result<Bytes>>,
}

/// The content of the file.
pub struct Image {
    revision: Revision,
    /// By revision, and within a revision in key order.
    kvs: Vec<KeyValue>,
    leases: Vec<(LeaseId, i64)>,
}

impl Image {
    pub fn new(revision: Revision, mut kvs: Vec<KeyValue>, leases: Vec<(LeaseId, i64)>) -> Self {
        kvs.sort_unstable_by(|a, b| (a.mod_revision, &a.key).cmp(&(b.mod_revision, &b.key)));
        Self { revision, kvs, leases }
    }

    fn layout(&self) -> Layout {
        let mut index = 0;
        let mut last = Revision(0);
        let keys = self.kvs.iter().map(|kv| {
            index = if kv.mod_revision == last { index + 1 } else { 0 };
            last = kv.mod_revision;
            let size = wire::key_value_size(kv);
            Item { key: wire::revision_key(kv.mod_revision, index).to_vec(), size }
        });
        let mut keys: Vec<Item> = keys.collect();
        if last < self.revision {
            // The newest change was a delete. etcd's files contain it, and determine their revision by it.
            let mut key = wire::revision_key(self.revision, 0).to_vec();
            key.push(wire::DELETED);
            keys.push(Item { key, size: wire::key_value_size(&marker()) });
        }
        let mut leases: Vec<(Vec<u8>, Vec<u8>)> = self
            .leases
            .iter()
            .map(|(id, ttl)| (id.to_be_bytes().to_vec(), wire::lease(*id, *ttl)))
            .collect();
        leases.sort_unstable();
        Layout::new(keys, leases, wire::meta(self.revision))
    }

    /// Streams the file from a thread that may block.
    pub fn stream(self) -> Snapshot {
        let layout = self.layout();
        let size = layout.size() + CHECKSUM as u64;
        let (sender, chunks) = mpsc::channel(AHEAD);
        let revision = self.revision;
        let write = move || {
            let pipe = Pipe { sender, chunk: Vec::with_capacity(CHUNK) };
            // An error means that the reader has gone.
            let _ = self.write(&layout, pipe);
        };
        // Not awaited: it ends with its reader.
        drop(tokio::task::spawn_blocking(write));
        Snapshot { revision: Some(revision), size: Some(size), chunks }
    }

    fn write(&self, layout: &Layout, out: impl Write) -> io::Result<()> {
        let mut out = Summed { out, sum: Sha256::new() };
        let mut value = vec![];
        layout.write(&mut out, &mut |index, to| {
            value.clear();
            let marker = marker();
            wire::key_value(self.kvs.get(index).unwrap_or(&marker), &mut value);
            to.extend_from_slice(&value);
        })?;
        let sum = out.sum.finalize();
        out.out.write_all(&sum)?;
        out.out.flush()
    }
}

/// A delete of a key that never existed.
fn marker() -> KeyValue {
    KeyValue {
        key: Bytes::from_static(b"/decapod/snapshot"),
        value: Value::default(),
        create_revision: Revision(0),
        mod_revision: Revision(0),
        version: 0,
        lease: 0,
    }
}

struct Summed<W> {
    out: W,
    sum: Sha256,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write_all(bytes)?;
        self.sum.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes bytes to a channel, in chunks.
struct Pipe {
    sender: mpsc::Sender<Result<Bytes>>,
    chunk: Vec<u8>,
}

impl Pipe {
    fn send(&mut self) -> io::Result<()> {
        let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK));
        if chunk.is_empty() {
            return Ok(());
        }
        self.sender.blocking_send(Ok(chunk.into())).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let some = bytes.len().min(CHUNK - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..some]);
        if self.chunk.len() == CHUNK {
            self.send()?;
        }
        Ok(some)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

fn damaged(what: impl std::fmt::Display) -> Error {
    Error::unusable(format!("the snapshot is damaged: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn kv(key: String, value: Vec<u8>, at: u64, lease: LeaseId) -> KeyValue {
        KeyValue {
            key: key.into(),
            value: value.into(),
            create_revision: Revision(at),
            mod_revision: Revision(at),
            version: 1,
            lease,
        }
    }

    fn save(image: &Image, path: &Path) {
        let mut bytes = vec![];
        let layout = image.layout();
        image.write(&layout, &mut bytes).expect("memory");
        assert_eq!(bytes.len() as u64, layout.size() + CHECKSUM as u64, "the size was known");
        std::fs::write(path, bytes).expect("the directory is ours");
    }

    fn check(count: u64, size: usize, leases: i64) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("db");
        // Two keys per revision; some values are larger than a page.
        let kvs: Vec<KeyValue> = (0..count)
            .map(|i| {
                let value = vec![b'x'; (i as usize * 37) % (size + 1)];
                kv(format!("/k/{i:06}"), value, 2 + i / 2, (i % 3) as i64)
            })
            .collect();
        let leases: Vec<(LeaseId, i64)> = (1..=leases).map(|id| (id, id * 10)).collect();
        let revision = Revision(count + 5);
        save(&Image::new(revision, kvs.clone(), leases.clone()), &path);
        let content = read(&path, true).expect("what was written is read");
        assert_eq!(content.revision, revision);
        assert_eq!(content.kvs, kvs);
        assert_eq!(content.leases, leases);
    }

    #[test]
    fn a_snapshot_can_be_read() {
        check(0, 0, 0);
        check(1, 10, 1);
        check(200, 100, 3);
        check(3000, 20_000, 2);
        check(60_000, 3, 5000);
    }

    #[test]
    fn flipped_bits_and_truncated_files_are_detected() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("db");
        let kvs = (0..100).map(|i| kv(format!("/{i}"), vec![b'v'; 100], 2 + i, 0)).collect();
        save(&Image::new(Revision(101), kvs, vec![]), &path);
        let whole = std::fs::read(&path).expect("written");
        for at in (0..whole.len()).step_by(997) {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            std::fs::write(&path, bytes).expect("ours");
            assert!(read(&path, true).is_err(), "bit at {at}");
            // Without the checksum the result does not matter, but it must not panic or loop forever.
            drop(read(&path, false));
        }
        std::fs::write(&path, &whole[..whole.len() / 2]).expect("ours");
        assert!(read(&path, true).is_err());
    }
}
