//! A DER writer with the few types that certificates need. Every function returns a whole element.

use jiff::Timestamp;

pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;
pub(crate) const INTEGER: u8 = 0x02;
pub(crate) const BIT_STRING: u8 = 0x03;
pub(crate) const OCTET_STRING: u8 = 0x04;
pub(crate) const OBJECT_ID: u8 = 0x06;
pub(crate) const UTF8_STRING: u8 = 0x0c;

/// Tag, length, content.
pub(crate) fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(content.len() + 6);
    out.push(tag);
    let length = content.len();
    if length < 0x80 {
        out.push(length as u8);
    } else {
        let bytes = length.to_be_bytes();
        let skip = bytes.iter().take_while(|byte| **byte == 0).count();
        out.push(0x80 | (bytes.len() - skip) as u8);
        out.extend_from_slice(&bytes[skip..]);
    }
    out.extend_from_slice(content);
    out
}

pub(crate) fn sequence(parts: &[Vec<u8>]) -> Vec<u8> {
    element(SEQUENCE, &parts.concat())
}

/// An explicit context tag `[number]` around one element.
pub(crate) fn explicit(number: u8, inner: &[u8]) -> Vec<u8> {
    element(0xa0 | number, inner)
}

/// A primitive implicit context tag `[number]`.
pub(crate) fn implicit(number: u8, content: &[u8]) -> Vec<u8> {
    element(0x80 | number, content)
}

/// The content of the first element of `bytes` if it has this tag, and the bytes after it.
pub(crate) fn split(tag: u8, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x84 => {
            let (number, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (number.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    if found == tag { rest.split_at_checked(length) } else { None }
}

/// An object identifier from its numbers.
pub(crate) fn oid(numbers: &[u64]) -> Vec<u8> {
    let mut content = vec![(numbers[0] * 40 + numbers[1]) as u8];
    for &number in &numbers[2..] {
        let mut groups = vec![(number & 0x7f) as u8];
        let mut rest = number >> 7;
        while rest > 0 {
            groups.push(0x80 | (rest & 0x7f) as u8);
            rest >>= 7;
        }
        content.extend(groups.iter().rev());
    }
    element(0x06, &content)
}

/// A positive integer from big-endian bytes.
pub(crate) fn unsigned(bytes: &[u8]) -> Vec<u8> {
    let skip = bytes.iter().take_while(|byte| **byte == 0).count().min(bytes.len() - 1);
    let mut content = Vec::with_capacity(bytes.len() + 1);
    if bytes[skip] & 0x80 != 0 {
        content.push(0);
    }
    content.extend_from_slice(&bytes[skip..]);
    element(0x02, &content)
}

pub(crate) fn boolean_true() -> Vec<u8> {
    element(0x01, &[0xff])
}

/// A bit string without unused bits.
pub(crate) fn bits(content: &[u8]) -> Vec<u8> {
    element(BIT_STRING, &[&[0], content].concat())
}

/// A bit string of named bits: bit `n` of the standard is bit `n` of `flags`.
pub(crate) fn named_bits(flags: u16) -> Vec<u8> {
    let mut bytes = [0u8; 2];
    for bit in (0..16).filter(|bit| flags & (1 << bit) != 0) {
        bytes[bit / 8] |= 0x80 >> (bit % 8);
    }
    let used = if bytes[1] != 0 { 2 } else { 1 };
    let unused = bytes[used - 1].trailing_zeros().min(7) as u8;
    element(BIT_STRING, &[&[unused], &bytes[..used]].concat())
}

/// UTCTime until 2049, GeneralizedTime later, as RFC 5280 requires.
pub(crate) fn time(at: Timestamp) -> Vec<u8> {
    /// 2050-01-01T00:00:00Z
    const GENERALIZED_FROM: i64 = 2_524_608_000;
    if at.as_second() < GENERALIZED_FROM {
        element(0x17, at.strftime("%y%m%d%H%M%SZ").to_string().as_bytes())
    } else {
        element(0x18, at.strftime("%Y%m%d%H%M%SZ").to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_match_the_standard() {
        let check = |got: Vec<u8>, expected: &[u8]| assert_eq!(got, expected);
        check(oid(&[2, 5, 4, 3]), &[6, 3, 0x55, 4, 3]);
        check(oid(&[1, 2, 840, 10045]), &[6, 5, 0x2a, 0x86, 0x48, 0xce, 0x3d]);
        check(unsigned(&[0, 0, 1]), &[2, 1, 1]);
        check(unsigned(&[0x80]), &[2, 2, 0, 0x80]);
        check(unsigned(&[0]), &[2, 1, 0]);
        check(named_bits(1), &[3, 2, 7, 0x80]);
        check(named_bits(0b101), &[3, 2, 5, 0xa0]);
        check(named_bits(1 << 5 | 1 << 6), &[3, 2, 1, 0x06]);
        assert_eq!(element(4, &[0; 200])[..3], [4, 0x81, 200]);
        assert_eq!(element(4, &[0; 300])[..4], [4, 0x82, 1, 44]);
    }

    #[test]
    fn times_switch_form_in_2050() {
        let check = |second, tag, text: &str| {
            let at = Timestamp::from_second(second).expect("in range");
            assert_eq!(time(at), element(tag, text.as_bytes()));
        };
        check(1_767_225_600, 0x17, "260101000000Z");
        check(2_524_608_000, 0x18, "20500101000000Z");
    }
}
