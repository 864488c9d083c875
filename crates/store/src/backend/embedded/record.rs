//! The format of a change in the log on disk. The layout is in [`super::durable`].
//!
//! Invariant: every returned record matches its checksum, which also covers its address. Records of
//! format 1 have none and are accepted only below the revision at which the store left that format: so a
//! damaged first byte cannot turn a record into the other format.

use bytes::Bytes;

use crate::value::plain_len;
use crate::{Event, EventKind, KeyValue, LeaseId, Revision, Value};

/// The position of a change in the log: its revision, and its index in that revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub revision: u64,
    pub index: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub kind: EventKind,
    /// The time of the commit, in milliseconds since 1970: history is kept by age.
    pub at: u64,
    pub create: u64,
    pub version: u64,
    pub lease: LeaseId,
    /// The previous change of the same key; `None` if this one created it.
    pub previous: Option<Address>,
    pub key: Bytes,
    pub value: Bytes,
}

const HEADER: usize = 49;
const CHECKSUM: usize = 4;
const PUT: u8 = b'P';
const DELETE: u8 = b'D';
/// Format 1: without a checksum.
const PLAIN_PUT: u8 = 1;
const PLAIN_DELETE: u8 = 2;

/// The checksum of a record and its address.
fn checksum(at: Address, record: &[u8]) -> u32 {
    let mut place = [0; 12];
    place[..8].copy_from_slice(&at.revision.to_le_bytes());
    place[8..].copy_from_slice(&at.index.to_le_bytes());
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&place);
    hasher.update(record);
    hasher.finalize()
}

/// Which records may lack a checksum: those below this revision; 0 means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PlainBelow(pub u64);

impl PlainBelow {
    /// `None` if these bytes are no record, or not the record written at that address.
    pub fn decode(self, at: Address, bytes: &[u8]) -> Option<View<'_>> {
        View::read(self.checked(at, bytes)?)
    }

    /// The record without its checksum, after verifying it.
    pub fn checked(self, at: Address, bytes: &[u8]) -> Option<&[u8]> {
        match bytes.first()? {
            &PUT | &DELETE => {
                let (record, sum) = bytes.split_last_chunk::<CHECKSUM>()?;
                (u32::from_le_bytes(*sum) == checksum(at, record)).then_some(record)
            }
            _ => (at.revision < self.0).then_some(bytes),
        }
    }

    /// The same record with a checksum.
    pub fn summed(self, at: Address, bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
        self.decode(at, bytes)?;
        out.clear();
        out.extend_from_slice(bytes);
        let kind = match *bytes.first()? {
            PLAIN_PUT => PUT,
            PLAIN_DELETE => DELETE,
            _ => return Some(()),
        };
        out[0] = kind;
        out.extend(checksum(at, out).to_le_bytes());
        Some(())
    }
}

impl Record {
    pub fn size(&self) -> usize {
        HEADER + self.key.len() + self.value.len() + CHECKSUM
    }

    pub fn encode(&self, at: Address, out: &mut Vec<u8>) {
        out.clear();
        out.reserve(self.size());
        let previous = self.previous.unwrap_or_default();
        out.push(if self.kind == EventKind::Put { PUT } else { DELETE });
        out.extend(self.at.to_le_bytes());
        out.extend(self.create.to_le_bytes());
        out.extend(self.version.to_le_bytes());
        out.extend(self.lease.to_le_bytes());
        out.extend(previous.revision.to_le_bytes());
        out.extend(previous.index.to_le_bytes());
        // Keys are far below 4 GiB: the value limit bounds their request.
        out.extend((self.key.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.value);
        out.extend(checksum(at, out).to_le_bytes());
    }
}

/// A record inside a page: nothing is copied until the value is used.
pub(super) struct View<'a> {
    pub kind: EventKind,
    pub at: u64,
    pub create: u64,
    pub version: u64,
    pub lease: LeaseId,
    pub previous: Option<Address>,
    pub key: &'a [u8],
    pub value: &'a [u8],
    /// Never true for a record in a page; see `durable/reading.rs`.
    pub is_packed: bool,
}

impl<'a> View<'a> {
    /// Parses a record without checksum. `None` if the bytes are none.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let eight = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let four = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let kind = match header[0] {
            PUT | PLAIN_PUT => EventKind::Put,
            DELETE | PLAIN_DELETE => EventKind::Delete,
            _ => return None,
        };
        let previous = Address { revision: eight(33), index: four(41) };
        let (key, value) = rest.split_at_checked(four(45) as usize)?;
        Some(Self {
            kind,
            at: eight(1),
            create: eight(9),
            version: eight(17),
            lease: eight(25) as i64,
            previous: (previous.revision != 0).then_some(previous),
            key,
            value,
            is_packed: false,
        })
    }

    /// The length of the unpacked value.
    pub fn value_len(&self) -> usize {
        plain_len(self.value, self.is_packed)
    }

    /// The key after this change; for a delete only the key and the deleting revision.
    pub fn key_value(&self, at: Address) -> KeyValue {
        KeyValue {
            key: Bytes::copy_from_slice(self.key),
            value: Value::kept(Bytes::copy_from_slice(self.value), self.is_packed),
            create_revision: Revision(self.create),
            mod_revision: Revision(at.revision),
            version: self.version,
            lease: self.lease,
        }
    }

    pub fn event(&self, at: Address, previous: Option<KeyValue>) -> Event {
        Event { kind: self.kind.clone(), kv: self.key_value(at), previous }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Address = Address { revision: 7, index: 1 };
    const SUMMED: PlainBelow = PlainBelow(0);

    fn put() -> Record {
        Record {
            kind: EventKind::Put,
            at: 1,
            create: 2,
            version: 3,
            lease: -4,
            previous: Some(Address { revision: 5, index: 6 }),
            key: Bytes::from_static(b"key"),
            value: Bytes::from_static(b"value"),
        }
    }

    fn delete() -> Record {
        Record { previous: None, kind: EventKind::Delete, value: Bytes::new(), ..put() }
    }

    fn encoded(record: &Record) -> Vec<u8> {
        let mut bytes = vec![];
        record.encode(AT, &mut bytes);
        assert_eq!(bytes.len(), record.size());
        bytes
    }

    /// The record in format 1.
    fn plain(record: &Record) -> Vec<u8> {
        let mut bytes = encoded(record);
        bytes.truncate(bytes.len() - CHECKSUM);
        bytes[0] = if record.kind == EventKind::Put { PLAIN_PUT } else { PLAIN_DELETE };
        bytes
    }

    fn check(record: &Record, bytes: &[u8], plain: PlainBelow) {
        let view = plain.decode(AT, bytes).expect("a record");
        let back = Record {
            kind: view.kind.clone(),
            at: view.at,
            create: view.create,
            version: view.version,
            lease: view.lease,
            previous: view.previous,
            key: Bytes::copy_from_slice(view.key),
            value: Bytes::copy_from_slice(view.value),
        };
        assert_eq!(&back, record);
        for cut in 0..HEADER + record.key.len() {
            assert!(plain.decode(AT, &bytes[..cut]).is_none(), "{cut} bytes are no record");
        }
    }

    #[test]
    fn a_record_is_decoded_and_a_truncated_one_refused() {
        for record in [put(), delete()] {
            check(&record, &encoded(&record), SUMMED);
            check(&record, &plain(&record), PlainBelow(8));
        }
    }

    #[test]
    fn a_record_of_format_1_is_accepted_below_its_limit_and_gets_a_checksum() {
        for record in [put(), delete()] {
            let old = plain(&record);
            assert!(PlainBelow(7).decode(AT, &old).is_none());
            let mut new = vec![];
            PlainBelow(8).summed(AT, &old, &mut new).expect("a record");
            assert_eq!(new, encoded(&record));
            PlainBelow(8).summed(AT, &encoded(&record), &mut new).expect("a record");
            assert_eq!(new, encoded(&record), "a record with a checksum stays unchanged");
        }
    }

    #[test]
    fn flipped_bits_and_other_addresses_are_detected() {
        for record in [put(), delete()] {
            let bytes = encoded(&record);
            for bit in 0..bytes.len() * 8 {
                let mut flipped = bytes.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(PlainBelow(7).decode(AT, &flipped).is_none(), "bit {bit}");
            }
            for at in [Address { revision: 8, ..AT }, Address { index: 0, ..AT }] {
                assert!(SUMMED.decode(at, &bytes).is_none(), "it was not written at {at:?}");
            }
        }
    }
}
