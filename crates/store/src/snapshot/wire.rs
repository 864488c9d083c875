//! etcd's records inside a snapshot. Field numbers and key shapes are etcd's.

use bytes::Bytes;

use crate::{KeyValue, LeaseId, Revision, Value};

/// The version of etcd with these tables.
const STORAGE_VERSION: &[u8] = b"3.6.0";

/// The last byte of the key of a delete.
pub const DELETED: u8 = b't';

/// `revision _ index`, big endian: the order of keys is the order of history.
pub fn revision_key(revision: Revision, index: u64) -> [u8; 17] {
    let mut key = [b'_'; 17];
    key[..8].copy_from_slice(&revision.0.to_be_bytes());
    key[9..].copy_from_slice(&index.to_be_bytes());
    key
}

/// Parses such a key: its revision, and whether it marks a delete.
pub fn parse_revision_key(key: &[u8]) -> Option<(Revision, bool)> {
    let is_delete = match key.len() {
        17 => false,
        18 if key[17] == DELETED => true,
        _ => return None,
    };
    let revision = u64::from_be_bytes(key[..8].try_into().ok()?);
    (key[8] == b'_').then_some((Revision(revision), is_delete))
}

/// The required rows of the table `meta`.
pub fn meta(revision: Revision) -> Vec<(Vec<u8>, Vec<u8>)> {
    let row = |name: &str, value: &[u8]| (name.as_bytes().to_vec(), value.to_vec());
    let compacted = revision_key(revision, 0);
    vec![
        row("confState", br#"{"voters":[1],"auto_leave":false}"#),
        row("consistent_index", &revision.0.to_be_bytes()),
        row("finishedCompactRev", &compacted),
        row("scheduledCompactRev", &compacted),
        row("storageVersion", STORAGE_VERSION),
        row("term", &1_u64.to_be_bytes()),
    ]
}

fn varint(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn varint_size(number: u64) -> usize {
    (64 - (number | 1).leading_zeros() as usize).div_ceil(7)
}

/// Appends a number with a field number below 16; zero is omitted.
fn number(field: u8, number: u64, out: &mut Vec<u8>) {
    if number != 0 {
        out.push(field << 3);
        varint(number, out);
    }
}

fn bytes(field: u8, bytes: &[u8], out: &mut Vec<u8>) {
    if !bytes.is_empty() {
        out.push((field << 3) | 2);
        varint(bytes.len() as u64, out);
        out.extend_from_slice(bytes);
    }
}

/// Unpacks the value only here, where it is written.
fn value(value: &Value, out: &mut Vec<u8>) {
    if !value.is_empty() {
        out.push((5 << 3) | 2);
        varint(value.len() as u64, out);
        value.write_to(out);
    }
}

pub fn key_value(kv: &KeyValue, out: &mut Vec<u8>) {
    bytes(1, &kv.key, out);
    number(2, kv.create_revision.0, out);
    number(3, kv.mod_revision.0, out);
    number(4, kv.version, out);
    value(&kv.value, out);
    number(6, kv.lease as u64, out);
}

pub fn key_value_size(kv: &KeyValue) -> usize {
    let number = |n: u64| if n == 0 { 0 } else { 1 + varint_size(n) };
    let bytes = |size: usize| if size == 0 { 0 } else { 1 + varint_size(size as u64) + size };
    bytes(kv.key.len())
        + number(kv.create_revision.0)
        + number(kv.mod_revision.0)
        + number(kv.version)
        + bytes(kv.value.len())
        + number(kv.lease as u64)
}

pub fn lease(id: LeaseId, ttl_seconds: i64) -> Vec<u8> {
    let mut out = vec![];
    number(1, id as u64, &mut out);
    number(2, ttl_seconds as u64, &mut out);
    out
}

/// A field's content in a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message; `None` if the bytes are invalid.
fn fields<'a>(mut rest: &'a [u8], mut each: impl FnMut(u64, Field<'a>)) -> Option<()> {
    while !rest.is_empty() {
        let tag = take_varint(&mut rest)?;
        let field = match tag & 7 {
            0 => Field::Number(take_varint(&mut rest)?),
            2 => {
                let size = usize::try_from(take_varint(&mut rest)?).ok()?;
                let (bytes, after) = rest.split_at_checked(size)?;
                rest = after;
                Field::Bytes(bytes)
            }
            _ => return None,
        };
        each(tag >> 3, field);
    }
    Some(())
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

pub fn parse_key_value(message: &[u8]) -> Option<KeyValue> {
    let mut kv = KeyValue {
        key: Bytes::new(),
        value: Value::default(),
        create_revision: Revision(0),
        mod_revision: Revision(0),
        version: 0,
        lease: 0,
    };
    fields(message, |field, value| match (field, value) {
        (1, Field::Bytes(bytes)) => kv.key = Bytes::copy_from_slice(bytes),
        (2, Field::Number(n)) => kv.create_revision = Revision(n),
        (3, Field::Number(n)) => kv.mod_revision = Revision(n),
        (4, Field::Number(n)) => kv.version = n,
        (5, Field::Bytes(bytes)) => kv.value = Bytes::copy_from_slice(bytes).into(),
        (6, Field::Number(n)) => kv.lease = n as i64,
        _ => {}
    })?;
    Some(kv)
}

pub fn parse_lease(message: &[u8]) -> Option<(LeaseId, i64)> {
    let mut lease = (0, 0);
    fields(message, |field, value| match (field, value) {
        (1, Field::Number(n)) => lease.0 = n as i64,
        (2, Field::Number(n)) => lease.1 = n as i64,
        _ => {}
    })?;
    Some(lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_decoded_and_its_size_was_known() {
        for lease in [0, 1, -1, i64::MAX] {
            let kv = KeyValue {
                key: Bytes::from_static(b"/registry/a"),
                value: Value::from(vec![7; 300]).packed(),
                create_revision: Revision(2),
                mod_revision: Revision(1 << 40),
                version: 128,
                lease,
            };
            let mut out = vec![];
            key_value(&kv, &mut out);
            assert_eq!(out.len(), key_value_size(&kv));
            assert_eq!(parse_key_value(&out), Some(kv));
            assert!(parse_key_value(&out[..40]).is_none());
        }
        assert_eq!(parse_lease(&super::lease(-5, 60)), Some((-5, 60)));
    }

    #[test]
    fn revision_keys_are_decoded() {
        let key = revision_key(Revision(7), 3);
        assert_eq!(parse_revision_key(&key), Some((Revision(7), false)));
        let marked = [&key[..], b"t"].concat();
        assert_eq!(parse_revision_key(&marked), Some((Revision(7), true)));
        assert_eq!(parse_revision_key(b"short"), None);
    }
}
