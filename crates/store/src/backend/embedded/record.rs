//! One change as it stands in the log on disk. The drawing is in [`super::durable`].

use bytes::Bytes;

use crate::value::plain_len;
use crate::{Event, EventKind, KeyValue, LeaseId, Revision, Value};

/// Where a change stands in the log: its revision, and which change of that revision it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub revision: u64,
    pub index: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub kind: EventKind,
    /// When it was committed, in milliseconds since 1970: history is kept by age.
    pub at: u64,
    pub create: u64,
    pub version: u64,
    pub lease: LeaseId,
    /// The change of the same key before this one, unless this one created it.
    pub previous: Option<Address>,
    pub key: Bytes,
    pub value: Bytes,
}

const HEADER: usize = 49;
const PUT: u8 = 1;
const DELETE: u8 = 2;

impl Record {
    pub fn size(&self) -> usize {
        HEADER + self.key.len() + self.value.len()
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
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
        // Keys are far below 4 GiB: the value limit bounds the request that they came in.
        out.extend((self.key.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.value);
    }
}

/// A record as it lies in a page: nothing is copied until somebody wants the value.
pub(super) struct View<'a> {
    pub kind: EventKind,
    pub at: u64,
    pub create: u64,
    pub version: u64,
    pub lease: LeaseId,
    pub previous: Option<Address>,
    pub key: &'a [u8],
    pub value: &'a [u8],
    /// Never as it lies in a page; see `durable/reading.rs`.
    pub is_packed: bool,
}

impl<'a> View<'a> {
    /// `None` if these bytes are no record.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let eight = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let four = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let kind = match header[0] {
            PUT => EventKind::Put,
            DELETE => EventKind::Delete,
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

    /// How long the value itself is.
    pub fn value_len(&self) -> usize {
        plain_len(self.value, self.is_packed)
    }

    /// The key as this change left it; for a delete just the key and the deleting revision.
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

    fn check(record: &Record) {
        let mut bytes = vec![];
        record.encode(&mut bytes);
        let view = View::decode(&bytes).expect("a record");
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
            assert!(View::decode(&bytes[..cut]).is_none(), "{cut} bytes are no record");
        }
    }

    #[test]
    fn a_record_comes_back_and_a_cut_one_is_refused() {
        let put = Record {
            kind: EventKind::Put,
            at: 1,
            create: 2,
            version: 3,
            lease: -4,
            previous: Some(Address { revision: 5, index: 6 }),
            key: Bytes::from_static(b"key"),
            value: Bytes::from_static(b"value"),
        };
        check(&put);
        check(&Record { previous: None, kind: EventKind::Delete, value: Bytes::new(), ..put });
    }
}
