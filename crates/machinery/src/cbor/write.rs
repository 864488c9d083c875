//! JSON to CBOR, in one pass and without a tree.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{MAGIC, Major};

/// What stands behind a head of one byte, and how much: 1, 2, 4 or 8 bytes.
const NEXT_1: u8 = 24;
const NEXT_2: u8 = 25;
const NEXT_4: u8 = 26;
const NEXT_8: u8 = 27;

const FALSE: u8 = 0xf4;
const TRUE: u8 = 0xf5;
const NULL: u8 = 0xf6;

/// A whole object, under the tag that says what it is.
///
/// # Errors
/// The nesting limit of JSON's reader. The server's own is JSON, but may be nested deeper than that goes.
pub fn object(json: &[u8]) -> serde_json::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(json.len());
    out.extend_from_slice(MAGIC);
    from_json(json, &mut out)?;
    Ok(out)
}

/// One item of a sequence (RFC 8742): an event with the object that it is about.
/// Fails as [`object`] does.
pub fn watch_frame(event: &str, json: &[u8]) -> serde_json::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(json.len() + 32);
    out.extend_from_slice(MAGIC);
    map_head(&mut out, 2);
    put_text(&mut out, "type");
    put_text(&mut out, event);
    put_text(&mut out, "object");
    out.extend_from_slice(MAGIC);
    from_json(json, &mut out)?;
    Ok(out)
}

/// Appends the value that `json` is, with no tag. Fails as [`object`] does.
pub fn from_json(json: &[u8], out: &mut Vec<u8>) -> serde_json::Result<()> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    Item(out).deserialize(&mut reader)
}

/// The beginning of a map of `pairs` keys and values.
fn map_head(out: &mut Vec<u8>, pairs: usize) {
    put_head(out, Major::Map, pairs as u64);
}

/// The beginning of an array of `items`.
pub fn array_head(out: &mut Vec<u8>, items: usize) {
    put_head(out, Major::Array, items as u64);
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_head(out, Major::Bytes, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

/// A head in its shortest form.
fn put_head(out: &mut Vec<u8>, major: Major, value: u64) {
    let major = (major as u8) << 5;
    if value < u64::from(NEXT_1) {
        out.push(major | value as u8);
    } else if let Ok(value) = u8::try_from(value) {
        out.extend([major | NEXT_1, value]);
    } else if let Ok(value) = u16::try_from(value) {
        out.push(major | NEXT_2);
        out.extend(value.to_be_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        out.push(major | NEXT_4);
        out.extend(value.to_be_bytes());
    } else {
        out.push(major | NEXT_8);
        out.extend(value.to_be_bytes());
    }
}

/// A float in the least width that keeps its value.
fn put_float(out: &mut Vec<u8>, value: f64) {
    let major = (Major::Simple as u8) << 5;
    let single = value as f32;
    if f64::from(single) != value {
        out.push(major | NEXT_8);
        out.extend(value.to_be_bytes());
    } else if let Some(half) = half(single) {
        out.push(major | NEXT_2);
        out.extend(half.to_be_bytes());
    } else {
        out.push(major | NEXT_4);
        out.extend(single.to_be_bytes());
    }
}

/// The bits of a float of 16 (5 of exponent, 10 of fraction), if it is exactly that.
fn half(value: f32) -> Option<u16> {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let exponent = (bits >> 23 & 0xff) as i32 - 127;
    let fraction = bits & 0x7f_ffff;
    match exponent {
        _ if value == 0.0 => Some(sign),
        -14..=15 if fraction.trailing_zeros() >= 13 => {
            Some(sign | ((exponent + 15) as u16 * 0x400) | (fraction >> 13) as u16)
        }
        // Below the least exponent the leading one is written, too, and moves to the right.
        -24..=-15 => {
            let whole = fraction | 0x80_0000;
            let shift = (-1 - exponent) as u32;
            (whole.trailing_zeros() >= shift).then(|| sign | (whole >> shift) as u16)
        }
        _ => None,
    }
}

/// Appends the given value.
struct Item<'a>(&'a mut Vec<u8>);

impl<'de> DeserializeSeed<'de> for Item<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Item<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.0.push(NULL);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.0.push(if value { TRUE } else { FALSE });
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        match u64::try_from(value) {
            Ok(value) => put_head(self.0, Major::Positive, value),
            Err(_) => put_head(self.0, Major::Negative, !value.cast_unsigned()),
        }
        Ok(())
    }

    /// Go decodes numbers beyond `int64` as floats.
    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        match i64::try_from(value) {
            Ok(_) => put_head(self.0, Major::Positive, value),
            Err(_) => put_float(self.0, value as f64),
        }
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        put_float(self.0, value);
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        put_text(self.0, text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let start = self.0.len();
        let mut count = 0;
        while items.next_element_seed(Item(&mut *self.0))?.is_some() {
            count += 1;
        }
        put_head_before(self.0, start, Major::Array, count);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let start = self.0.len();
        let mut count = 0;
        while map.next_key_seed(Item(&mut *self.0))?.is_some() {
            map.next_value_seed(Item(&mut *self.0))?;
            count += 1;
        }
        put_head_before(self.0, start, Major::Map, count);
        Ok(())
    }
}

/// JSON does not say how many follow; the head is put in front of them when that is known.
fn put_head_before(out: &mut Vec<u8>, start: usize, major: Major, count: u64) {
    let end = out.len();
    put_head(out, major, count);
    let length = out.len() - end;
    out[start..].rotate_right(length);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_what_a_half_can_say() {
        for (value, expected) in [
            (0.0, Some(0)),
            (-0.0, Some(0x8000)),
            (1.0, Some(0x3c00)),
            (1.5, Some(0x3e00)),
            (65_504.0, Some(0x7bff)),
            (-4.0, Some(0xc400)),
            (6.103_515_6e-5, Some(0x0400)),
            (5.960_464_5e-8, Some(0x0001)),
            (6.097_555e-5, Some(0x03ff)),
            (65_520.0, None),
            (1.1, None),
            (2.980_232_2e-8, None),
            (f32::MAX, None),
            (f32::MIN_POSITIVE / 4.0, None),
        ] {
            assert_eq!(half(value), expected, "{value}");
        }
    }
}
