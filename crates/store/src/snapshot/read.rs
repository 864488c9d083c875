//! Reads a snapshot, ours or a real etcd's, into keys and leases.
//!
//! The file is not trusted: every offset is checked, and no page is read twice, so that a damaged file
//! gives an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::bolt::{
    BRANCH, ELEMENT, HEADER, LEAF, MAGIC, META, META_SIZE, PAGE, TABLE, VERSION, fnv1a,
};
use super::{CHECKSUM, damaged, wire};
use crate::{Error, KeyValue, LeaseId, Result, Revision};

/// The content of a snapshot.
#[derive(Debug)]
pub struct Content {
    /// The store's revision when the snapshot was taken.
    pub revision: Revision,
    /// The live keys, in order.
    pub kvs: Vec<KeyValue>,
    /// Ids and times to live in seconds, in the order of ids.
    pub leases: Vec<(LeaseId, i64)>,
    /// CRC-32C over all tables, as in `etcdutl snapshot status`.
    pub hash: u32,
    /// The size of the database, without the checksum.
    pub size: u64,
}

/// Reads the whole file. `checked`: requires its checksum at the end (the file inside of an etcd's data
/// directory has none).
pub fn read(path: &Path, checked: bool) -> Result<Content> {
    let cannot =
        |error: std::io::Error| Error::unusable(format!("cannot read {}: {error}", path.display()));
    let mut file = File::open(path).map_err(cannot)?;
    let length = file.metadata().map_err(cannot)?.len();
    let has_checksum = length % 512 == CHECKSUM as u64;
    if checked {
        if !has_checksum {
            return Err(damaged("the file has no checksum at its end"));
        }
        check_sum(&mut file, length).map_err(cannot)?.then_some(()).ok_or_else(|| {
            damaged("its checksum does not match; the file was truncated or changed after it was written")
        })?;
    }
    let size = if has_checksum { length - CHECKSUM as u64 } else { length };
    Database::open(file, size)?.content()
}

fn check_sum(file: &mut File, length: u64) -> std::io::Result<bool> {
    let mut sum = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut left = length - CHECKSUM as u64;
    while left > 0 {
        let part = left.min(buffer.len() as u64) as usize;
        file.read_exact(&mut buffer[..part])?;
        sum.update(&buffer[..part]);
        left -= part as u64;
    }
    let mut stored = [0; CHECKSUM];
    file.read_exact(&mut stored)?;
    Ok(sum.finalize()[..] == stored)
}

struct Database {
    file: File,
    size: u64,
    page_size: usize,
    root: u64,
    seen: BTreeSet<u64>,
}

/// Called with a row of a table: its flags, key and value.
type Each<'a> = &'a mut dyn FnMut(u32, &[u8], &[u8]) -> Result<()>;
/// The same without the page's flags.
type EachRow<'a> = dyn FnMut(&[u8], &[u8]) -> Result<()> + 'a;

impl Database {
    fn open(file: File, size: u64) -> Result<Self> {
        // The second meta page follows the first, which may be damaged, on pages of this size.
        let metas = [0, PAGE as u64].into_iter().filter_map(|at| {
            let mut page = [0; HEADER + META_SIZE];
            file.read_exact_at(&mut page, at).ok()?;
            meta(&page)
        });
        let newest = metas.max_by_key(|(transaction, ..)| *transaction);
        let (_, page_size, root) =
            newest.ok_or_else(|| damaged("the file is not an etcd database"))?;
        Ok(Self { file, size, page_size, root, seen: BTreeSet::new() })
    }

    fn content(mut self) -> Result<Content> {
        let mut tables: Vec<(Vec<u8>, Vec<u8>)> = vec![];
        let root = self.page(self.root)?;
        self.walk(root, 0, &mut |flags, key, value| {
            if flags & TABLE != 0 {
                tables.push((key.to_vec(), value.to_vec()));
            }
            Ok(())
        })?;
        let mut reading = Reading::default();
        for (name, place) in &tables {
            reading.hash.add(name);
            self.table(place, &mut |key, value| reading.row(name, key, value))?;
        }
        Ok(reading.finish(self.size))
    }

    /// The rows of a table, which is stored in a page or inside the value itself.
    fn table(&mut self, place: &[u8], each: &mut EachRow<'_>) -> Result<()> {
        let root = u64_at(place, 0)?;
        let page = match root {
            0 => place.get(HEADER..).ok_or_else(|| damaged("a table is truncated"))?.to_vec(),
            page => self.page(page)?,
        };
        self.walk(page, 0, &mut |_, key, value| each(key, value))
    }

    fn page(&mut self, id: u64) -> Result<Vec<u8>> {
        if !self.seen.insert(id) {
            return Err(damaged(format!("page {id} is used twice")));
        }
        let start = id.checked_mul(self.page_size as u64);
        let start = start.filter(|start| start + self.page_size as u64 <= self.size);
        let start = start.ok_or_else(|| damaged(format!("there is no page {id}")))?;
        let read = |length: u64| {
            let mut bytes = vec![0; length as usize];
            self.file.read_exact_at(&mut bytes, start).map_err(damaged)?;
            Ok(bytes)
        };
        let bytes: Vec<u8> = read(self.page_size as u64)?;
        let pages = u64::from(u32_at(&bytes, 12)?) + 1;
        if pages == 1 {
            return Ok(bytes);
        }
        let length = pages * self.page_size as u64;
        if start + length > self.size {
            return Err(damaged(format!("page {id} goes beyond the end")));
        }
        read(length)
    }

    fn walk(&mut self, page: Vec<u8>, depth: usize, each: Each<'_>) -> Result<()> {
        /// No valid tree is this deep: each level at least doubles the size.
        const DEEPEST: usize = 64;
        let flags = u16_at(&page, 8)?;
        let count = usize::from(u16_at(&page, 10)?);
        for i in 0..count {
            let at = HEADER + i * ELEMENT;
            let slice = |offset: usize, size: usize| {
                let start = at.checked_add(offset)?;
                page.get(start..start.checked_add(size)?)
            };
            let cut = || damaged("a row is truncated");
            if flags & LEAF != 0 {
                let number = |k: usize| u32_at(&page, at + 4 * k);
                let (offset, key, value) =
                    (number(1)? as usize, number(2)? as usize, number(3)? as usize);
                let key_bytes = slice(offset, key).ok_or_else(cut)?;
                let value_bytes = slice(offset + key, value).ok_or_else(cut)?;
                each(number(0)?, key_bytes, value_bytes)?;
            } else if flags & BRANCH != 0 && depth < DEEPEST {
                let child = self.page(u64_at(&page, at + 8)?)?;
                self.walk(child, depth + 1, each)?;
            } else {
                return Err(damaged("a page has an unknown type"));
            }
        }
        Ok(())
    }
}

/// Transaction, page size and root of a valid meta page.
fn meta(page: &[u8]) -> Option<(u64, usize, u64)> {
    let body = &page[HEADER..];
    let (magic, version) = (u32_at(body, 0).ok()?, u32_at(body, 4).ok()?);
    let page_size = u32_at(body, 8).ok()? as usize;
    let is_meta = u16_at(page, 8).ok()? & META != 0;
    let is_whole = fnv1a(&body[..META_SIZE - 8]) == u64_at(body, META_SIZE - 8).ok()?;
    let known = magic == MAGIC && version == VERSION && page_size.is_power_of_two();
    let usable = is_meta && is_whole && known && (1024..=65536).contains(&page_size);
    usable.then_some((u64_at(body, 48).ok()?, page_size, u64_at(body, 16).ok()?))
}

#[derive(Default)]
struct Reading {
    hash: Crc32c,
    live: BTreeMap<Bytes, KeyValue>,
    leases: BTreeMap<LeaseId, i64>,
    revision: Revision,
}

impl Reading {
    fn row(&mut self, table: &[u8], key: &[u8], value: &[u8]) -> Result<()> {
        self.hash.add(key);
        self.hash.add(value);
        match table {
            b"key" => {
                let (revision, is_delete) = wire::parse_revision_key(key)
                    .ok_or_else(|| damaged("a key of the table of revisions is invalid"))?;
                self.revision = self.revision.max(revision);
                let kv = wire::parse_key_value(value).ok_or_else(|| {
                    damaged(format!("the value at revision {revision} is invalid"))
                })?;
                // `etcdutl snapshot restore --bump-revision` adds records without a key.
                if is_delete {
                    self.live.remove(&kv.key);
                } else if !kv.key.is_empty() {
                    self.live.insert(kv.key.clone(), kv);
                }
            }
            b"lease" => {
                let (id, ttl) =
                    wire::parse_lease(value).ok_or_else(|| damaged("a lease is invalid"))?;
                self.leases.insert(id, ttl);
            }
            b"meta" if key == b"scheduledCompactRev" || key == b"finishedCompactRev" => {
                let (revision, _) = wire::parse_revision_key(value)
                    .ok_or_else(|| damaged("the compacted revision is invalid"))?;
                self.revision = self.revision.max(revision);
            }
            _ => {}
        }
        Ok(())
    }

    fn finish(self, size: u64) -> Content {
        Content {
            revision: self.revision,
            kvs: self.live.into_values().collect(),
            leases: self.leases.into_iter().collect(),
            hash: self.hash.finish(),
            size,
        }
    }
}

/// CRC-32C by a table of bytes.
struct Crc32c {
    table: [u32; 256],
    state: u32,
}

impl Default for Crc32c {
    fn default() -> Self {
        const POLYNOMIAL: u32 = 0x82F6_3B78;
        let row =
            |byte: usize| (0..8).fold(byte as u32, |crc, _| (crc >> 1) ^ (POLYNOMIAL * (crc & 1)));
        Self { table: std::array::from_fn(row), state: !0 }
    }
}

impl Crc32c {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let index = (self.state ^ u32::from(*byte)) as u8;
            self.state = (self.state >> 8) ^ self.table[usize::from(index)];
        }
    }

    fn finish(&self) -> u32 {
        !self.state
    }
}

fn at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
    part.copied().ok_or_else(|| damaged("a page is truncated"))
}

fn u16_at(bytes: &[u8], offset: usize) -> Result<u16> {
    at(bytes, offset).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], offset: usize) -> Result<u32> {
    at(bytes, offset).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], offset: usize) -> Result<u64> {
    at(bytes, offset).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_castagnolis() {
        let mut crc = Crc32c::default();
        crc.add(b"1234");
        crc.add(b"56789");
        assert_eq!(crc.finish(), 0xE306_9283);
    }
}
