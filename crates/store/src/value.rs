//! A value in memory: unchanged, or packed (LZ4).
//!
//! In: the bytes that were put. Out: the same bytes. JSON repeats names: packed, it takes a third, for
//! some 1.5 µs of processor time per KiB, once per write; unpacking takes a fifth of that. Stores and
//! caches keep these values, and unpack one when it is used; clones share memory, so that the store and
//! the caches above it have one copy.
//!
//! ```text
//! packed  0            4
//!         ├────────────┼───────────┐     the length is that of the value, little endian
//!         │ length u32 │ LZ4 block │
//!         └────────────┴───────────┘
//! ```
//!
//! Invariant: packed bytes were packed in this process: they never come from a disk or the network, and
//! never go there.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;

use bytes::Bytes;
use lz4_flex::block::{self, CompressTable};

/// The minimum length for packing.
const LEAST: usize = 256;
/// The buffer for longer values is not kept for reuse, because it would take many pages.
const USUAL: usize = 32 << 10;
const LENGTH: usize = size_of::<u32>();

/// A value's bytes, for large numbers of values. Compares by the unpacked bytes.
#[derive(Clone, Default)]
pub struct Value {
    kept: Bytes,
    is_packed: bool,
}

impl Value {
    /// Bytes in their in-memory form, shared.
    pub(crate) fn kept(kept: Bytes, is_packed: bool) -> Self {
        Self { kept, is_packed }
    }

    /// The same value, packed if that saves space.
    pub fn packed(self) -> Self {
        if self.is_packed {
            return self;
        }
        let exact = |kept: &[u8], is_packed: bool| is_packed.then(|| Bytes::copy_from_slice(kept));
        match keep(&self.kept, exact) {
            Some(kept) => Self { kept, is_packed: true },
            None => self,
        }
    }

    pub fn is_packed(&self) -> bool {
        self.is_packed
    }

    /// The unpacked value: shared if it is not packed, else unpacked at each call.
    pub fn bytes(&self) -> Bytes {
        if !self.is_packed {
            return self.kept.clone();
        }
        let mut out = vec![];
        self.write_to(&mut out);
        out.into()
    }

    /// Appends the unpacked value.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        if !self.is_packed {
            return out.extend_from_slice(&self.kept);
        }
        let start = out.len();
        out.resize(start + self.len(), 0);
        let unpacked = block::decompress_into(&self.kept[LENGTH..], &mut out[start..]);
        let size = unpacked.expect("what was packed here can be unpacked");
        assert_eq!(size, self.len(), "it has the length that it had");
    }

    /// The length of the unpacked value.
    pub fn len(&self) -> usize {
        plain_len(&self.kept, self.is_packed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its size in memory.
    pub fn size(&self) -> usize {
        self.kept.len()
    }

    /// The beginning of the value, as far as it is visible without unpacking: a block starts with a byte
    /// whose upper half counts the literal bytes that follow; 15 means "and more".
    pub fn head(&self) -> &[u8] {
        if !self.is_packed {
            return &self.kept;
        }
        let block = &self.kept[LENGTH..];
        match block.first().map_or(0, |token| usize::from(token >> 4)) {
            // At least one byte with the additional count follows.
            15 => {
                let (mut at, mut count) = (1, 15);
                while let Some(more) = block.get(at) {
                    (at, count) = (at + 1, count + usize::from(*more));
                    if *more < 255 {
                        break;
                    }
                }
                block.get(at..at + count).unwrap_or_default()
            }
            count => block.get(1..1 + count).unwrap_or_default(),
        }
    }

    pub fn starts_with(&self, head: &[u8]) -> bool {
        let known = self.head();
        if known.len() >= head.len() || known != &head[..known.len()] {
            return known.starts_with(head);
        }
        self.bytes().starts_with(head)
    }

    /// Whether both share memory; no bytes are compared.
    pub fn is_shared_with(&self, other: &Self) -> bool {
        self.kept.as_ptr() == other.kept.as_ptr() && self.kept.len() == other.kept.len()
    }

    /// The bytes in their in-memory form, and whether they are packed.
    pub(crate) fn parts(&self) -> (&[u8], bool) {
        (&self.kept, self.is_packed)
    }

    fn plain(&self) -> Cow<'_, [u8]> {
        if self.is_packed { Cow::Owned(self.bytes().into()) } else { Cow::Borrowed(&self.kept) }
    }
}

/// Calls `take` with the value in its in-memory form, and whether that is packed: it is not if the value is
/// short, or would shrink by less than an eighth.
pub(crate) fn keep<R>(value: &[u8], take: impl FnOnce(&[u8], bool) -> R) -> R {
    thread_local! {
        static USED: RefCell<Packer> = RefCell::default();
    }
    match value.len() {
        ..LEAST => take(value, false),
        LEAST..USUAL => USED.with_borrow_mut(|packer| packer.keep(value, take)),
        _ => Packer::default().keep(value, take),
    }
}

/// Reusable memory for packing, one per thread: allocating it for each value would cost as much as
/// packing a short one.
#[derive(Default)]
struct Packer {
    table: CompressTable,
    out: Vec<u8>,
}

impl Packer {
    fn keep<R>(&mut self, value: &[u8], take: impl FnOnce(&[u8], bool) -> R) -> R {
        let room = LENGTH + block::get_maximum_output_size(value.len());
        if self.out.len() < room {
            self.out.resize(room, 0);
        }
        let (length, block) = self.out.split_at_mut(LENGTH);
        // Values have a limit far below 4 GiB.
        length.copy_from_slice(&(value.len() as u32).to_le_bytes());
        let size = block::compress_into_with_table(value, block, &mut self.table);
        let packed = &self.out[..LENGTH + size.expect("there is room for all of it")];
        let is_worth_it = packed.len() <= value.len() - value.len() / 8;
        if is_worth_it { take(packed, true) } else { take(value, false) }
    }
}

/// The unpacked length of a value in in-memory form.
pub(crate) fn plain_len(kept: &[u8], is_packed: bool) -> usize {
    if !is_packed {
        return kept.len();
    }
    let length = kept[..LENGTH].try_into().expect("four bytes");
    u32::from_le_bytes(length) as usize
}

impl<T: Into<Bytes>> From<T> for Value {
    fn from(bytes: T) -> Self {
        Self { kept: bytes.into(), is_packed: false }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        let same = self.is_packed == other.is_packed && self.kept == other.kept;
        same || (self.len() == other.len() && self.plain() == other.plain())
    }
}

impl Eq for Value {}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for Value {
    fn eq(&self, other: &T) -> bool {
        *self.plain() == *other.as_ref()
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text of this length with many repeated names.
    fn names(length: usize) -> Vec<u8> {
        let line =
            |n: usize| format!(r#"{{"name":"number-{n}","terminationMessagePath":"/dev"}},"#);
        let text = (0..).flat_map(|n| line(n).into_bytes());
        text.take(length).collect()
    }

    fn noise(length: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(length as u64);
        (0..length).map(|_| random.u8(..)).collect()
    }

    fn check(plain: &[u8], is_packed: bool) {
        let value = Value::from(plain.to_vec()).packed();
        assert_eq!(value.is_packed(), is_packed, "{} bytes", plain.len());
        assert!(value.size() <= plain.len() && is_packed == (value.size() < plain.len()));
        assert_eq!((value.len(), value.is_empty()), (plain.len(), plain.is_empty()));
        assert_eq!(value.bytes(), plain);
        let mut out = b"before".to_vec();
        value.write_to(&mut out);
        assert_eq!(out, [b"before", plain].concat());
        assert!(plain.starts_with(value.head()));
        assert_eq!(value, *plain);
        assert_eq!(value, Value::from(plain.to_vec()));
        assert!(value.clone().packed().is_shared_with(&value));
    }

    #[test]
    fn a_value_keeps_its_bytes() {
        for length in [0, 1, 255, 256, 4096, 65_534, 65_535, 65_536, 1_000_000] {
            check(&names(length), length >= LEAST);
            check(&noise(length), false);
            check(&vec![b'x'; length], length >= LEAST);
        }
        // Noise before compressible data.
        check(&[noise(700), names(3000)].concat(), true);
    }

    #[test]
    fn the_beginning_of_a_value_is_visible() {
        let check = |plain: Vec<u8>| {
            let value = Value::from(plain.clone()).packed();
            for length in [0, 1, 8, 15, 16, 270, 271, 300, plain.len()] {
                let head = &plain[..length.min(plain.len())];
                assert!(value.starts_with(head), "{length} of {}", plain.len());
                let other = [head, b"\0"].concat();
                assert_eq!(value.starts_with(&other), plain.starts_with(&other), "{length}");
            }
            assert!(!value.starts_with(b"k8s:enc:"));
            value
        };
        check(names(200));
        check(vec![b'x'; 5000]);
        let value = check(names(5000));
        assert!(value.is_packed() && value.head().len() > 8);
        check([noise(400), names(5000)].concat());
        check(noise(5000));
    }

    #[test]
    fn values_compare_by_their_bytes() {
        let all = [names(0), names(300), names(3000), noise(300), vec![b'x'; 300]];
        for one in &all {
            for other in &all {
                let (a, b) = (Value::from(one.clone()), Value::from(other.clone()).packed());
                assert_eq!(a == b, one == other);
                assert_eq!(a.packed() == b, one == other);
            }
        }
    }
}
