//! A value as it is kept in memory: as it is, or packed (LZ4).
//!
//! In: the bytes that somebody put. Out: the same bytes. JSON says the same names again and again:
//! packed it takes a third, for some 1.5 µs of processor time per KiB, once for each write; to
//! unpack it takes a fifth of that. Whoever keeps many values keeps these, and unpacks one when it is
//! looked at; clones share what is kept, so that the store and the caches over it have one copy.
//!
//! ```text
//! packed  0            4
//!         ├────────────┼───────────┐     the length is that of the value, little endian
//!         │ length u32 │ LZ4 block │
//!         └────────────┴───────────┘
//! ```
//!
//! Invariant: what is packed was packed here, in this process: it never comes from a disk or a wire,
//! and neither knows of it.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;

use bytes::Bytes;
use lz4_flex::block::{self, CompressTable};

/// Shorter ones are not worth it.
const LEAST: usize = 256;
/// What longer ones are packed with is not kept for the next: that would be more than a few pages.
const USUAL: usize = 32 << 10;
const LENGTH: usize = size_of::<u32>();

/// Bytes of which there may be many. Compares as the bytes that it stands for.
#[derive(Clone, Default)]
pub struct Value {
    kept: Bytes,
    is_packed: bool,
}

impl Value {
    /// What lies in memory somewhere, shared.
    pub(crate) fn kept(kept: Bytes, is_packed: bool) -> Self {
        Self { kept, is_packed }
    }

    /// The same value, packed if that saves something.
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

    /// The value itself: shared where it is kept as it is, unpacked anew where not.
    pub fn bytes(&self) -> Bytes {
        if !self.is_packed {
            return self.kept.clone();
        }
        let mut out = vec![];
        self.write_to(&mut out);
        out.into()
    }

    /// Appends the value itself.
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

    /// How long the value itself is.
    pub fn len(&self) -> usize {
        plain_len(&self.kept, self.is_packed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it takes in memory.
    pub fn size(&self) -> usize {
        self.kept.len()
    }

    /// How the value begins, as far as it can be told without unpacking it: a block begins with a
    /// byte whose upper half counts what stands behind it as it is, 15 for "and more than that".
    pub fn head(&self) -> &[u8] {
        if !self.is_packed {
            return &self.kept;
        }
        let block = &self.kept[LENGTH..];
        match block.first().map_or(0, |token| usize::from(token >> 4)) {
            // One byte at least says how many more.
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

    /// Whether both are one piece of memory: nothing is compared.
    pub fn is_shared_with(&self, other: &Self) -> bool {
        self.kept.as_ptr() == other.kept.as_ptr() && self.kept.len() == other.kept.len()
    }

    /// What is kept, and whether it is packed.
    pub(crate) fn parts(&self) -> (&[u8], bool) {
        (&self.kept, self.is_packed)
    }

    fn plain(&self) -> Cow<'_, [u8]> {
        if self.is_packed { Cow::Owned(self.bytes().into()) } else { Cow::Borrowed(&self.kept) }
    }
}

/// Gives the value to `take` as it is to be kept, and whether that is packed: not where it is short,
/// or does not get shorter by an eighth.
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

/// What packing needs besides the value. A thread has one: to make it anew for each value would cost
/// as much as a short one's packing.
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

/// How long the value is that is kept so.
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

    /// Text of this length that says the same names again and again.
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
    fn a_value_is_what_was_put() {
        for length in [0, 1, 255, 256, 4096, 65_534, 65_535, 65_536, 1_000_000] {
            check(&names(length), length >= LEAST);
            check(&noise(length), false);
            check(&vec![b'x'; length], length >= LEAST);
        }
        // Noise in front of what can be packed.
        check(&[noise(700), names(3000)].concat(), true);
    }

    #[test]
    fn how_a_value_begins_is_told() {
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
    fn values_are_equal_as_their_bytes_are() {
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
