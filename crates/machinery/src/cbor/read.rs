//! CBOR to JSON. Go's library looks at all of a body's syntax first and at its meaning then: so do we,
//! because their error messages differ.

use std::borrow::Cow;
use std::collections::HashSet;

use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD, Engine};
use jiff::Timestamp;
use serde_json::Number;

use super::{Error, Major};

/// Arrays, maps and tags nest no deeper than this: JSON that `serde_json` reads (127 levels) under the
/// tag of a whole object. Upstream: 10,000.
const MAX_DEPTH: usize = 128;

const BREAK: u8 = 0xff;
/// The argument of a head whose items end with a [`BREAK`].
const INDEFINITE: u8 = 31;

const TAG_TIME_TEXT: u64 = 0;
const TAG_TIME_SECONDS: u64 = 1;
const TAG_POSITIVE_BIGNUM: u64 = 2;
const TAG_NEGATIVE_BIGNUM: u64 = 3;
const TAG_BASE64_URL: u64 = 21;
const TAG_BASE64: u64 = 22;
const TAG_BASE16: u64 = 23;

/// The one item that `body` is, as JSON.
pub fn to_json(body: &[u8]) -> Result<Vec<u8>, Error> {
    let mut syntax = Reader { body, at: 0, later: None };
    if body.is_empty() {
        return Err(Error::Malformed("EOF".into()));
    }
    syntax.skip(0)?;
    if syntax.at < body.len() {
        return Err(malformed(format!(
            "cbor: {} bytes of extraneous data starting at index {}",
            body.len() - syntax.at,
            syntax.at
        )));
    }
    let mut out = Vec::with_capacity(body.len() + body.len() / 2);
    Reader { body, at: 0, later: None }.value(&mut out)?;
    Ok(out)
}

fn malformed(why: impl Into<String>) -> Error {
    Error::Malformed(why.into())
}

fn inadmissible(why: impl Into<String>) -> Error {
    Error::Inadmissible(why.into())
}

/// The content of a head.
#[derive(Clone, Copy)]
struct Head {
    major: Major,
    /// The low five bits of the first byte.
    info: u8,
    argument: u64,
}

impl Head {
    fn is_indefinite(self) -> bool {
        self.info == INDEFINITE
    }
}

struct Reader<'a> {
    body: &'a [u8],
    at: usize,
    /// What the tag around says that bytes should look like as text.
    later: Option<fn(&[u8]) -> String>,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: u64) -> Result<&'a [u8], Error> {
        let rest = &self.body[self.at..];
        let length = usize::try_from(length).ok().filter(|length| *length <= rest.len());
        let taken = &rest[..length.ok_or_else(|| malformed("unexpected EOF"))?];
        self.at += taken.len();
        Ok(taken)
    }

    fn head(&mut self) -> Result<Head, Error> {
        let first = self.take(1)?[0];
        let (major, info) = (Major::of(first), first & 0x1f);
        let argument = match info {
            0..24 => u64::from(info),
            24..=27 => {
                let bytes = self.take(1 << (info - 24))?;
                bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
            }
            INDEFINITE if major == Major::Simple => {
                return Err(malformed(r#"cbor: unexpected "break" code"#));
            }
            INDEFINITE
                if matches!(major, Major::Bytes | Major::Text | Major::Array | Major::Map) =>
            {
                0
            }
            _ => {
                return Err(malformed(format!(
                    "cbor: invalid additional information {info} for type {}",
                    major.name()
                )));
            }
        };
        let head = Head { major, info, argument };
        if let Some(what) = float(head).and_then(no_number) {
            return Err(malformed(format!(
                "cbor: data item of cbor type {} is not accepted by protocol: floating-point {what}",
                major.name()
            )));
        }
        if !matches!(major, Major::Positive | Major::Negative | Major::Tag | Major::Simple)
            && i64::try_from(argument).is_err()
        {
            let is_string = matches!(major, Major::Bytes | Major::Text);
            return Err(malformed(format!(
                "cbor: {} length {argument} is too large, {}integer overflow",
                major.name(),
                if is_string { "causing " } else { "it would cause " }
            )));
        }
        if major == Major::Simple && info == 24 && argument < 32 {
            return Err(malformed(format!(
                "cbor: invalid simple value {argument} for type {}",
                major.name()
            )));
        }
        Ok(head)
    }

    /// Is it the end of what has no length? Then that is taken.
    fn is_over(&mut self) -> bool {
        let is_over = self.body.get(self.at) == Some(&BREAK);
        self.at += usize::from(is_over);
        is_over
    }

    /// Checks the next item's syntax.
    fn skip(&mut self, depth: usize) -> Result<(), Error> {
        let head = self.head()?;
        let nests = matches!(head.major, Major::Tag | Major::Array | Major::Map);
        if nests && depth == MAX_DEPTH {
            return Err(malformed(format!("cbor: exceeded max nested level {MAX_DEPTH}")));
        }
        match head.major {
            Major::Positive | Major::Negative | Major::Simple => Ok(()),
            Major::Bytes | Major::Text => self.string(head).map(|_| ()),
            Major::Tag => self.skip(depth + 1),
            Major::Array | Major::Map => {
                let items = if head.major == Major::Map { 2 } else { 1 };
                let mut left = head.argument;
                while if head.is_indefinite() { !self.is_over() } else { left > 0 } {
                    left = left.saturating_sub(1);
                    for _ in 0..items {
                        self.skip(depth + 1)?;
                    }
                }
                Ok(())
            }
        }
    }

    /// The bytes after the head of a string: one piece, or all until the break.
    fn string(&mut self, head: Head) -> Result<Cow<'a, [u8]>, Error> {
        if !head.is_indefinite() {
            return self.take(head.argument).map(Cow::Borrowed);
        }
        let name = head.major.name();
        let mut whole = vec![];
        while !self.is_over() {
            let piece = self.head()?;
            if piece.major != head.major {
                return Err(malformed(format!(
                    "cbor: wrong element type {} for indefinite-length {name}",
                    piece.major.name()
                )));
            }
            if piece.is_indefinite() {
                return Err(malformed(format!(
                    "cbor: indefinite-length {name} chunk is not definite-length"
                )));
            }
            whole.extend_from_slice(self.take(piece.argument)?);
        }
        Ok(whole.into())
    }

    /// Appends the next item as JSON.
    fn value(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        let head = self.head()?;
        match head.major {
            Major::Positive | Major::Negative => put_integer(out, head),
            Major::Bytes | Major::Text => {
                let bytes = self.string(head)?;
                match self.later.filter(|_| head.major == Major::Bytes) {
                    Some(encoded) => put_string(out, &encoded(&bytes)),
                    None => put_string(out, &text(head, &bytes)?),
                }
                Ok(())
            }
            Major::Array => self.array(head, out),
            Major::Map => self.map(head, out),
            Major::Tag => self.tagged(head.argument, out),
            Major::Simple => put_simple(out, head),
        }
    }

    fn array(&mut self, head: Head, out: &mut Vec<u8>) -> Result<(), Error> {
        let mut count = 0;
        out.push(b'[');
        while if head.is_indefinite() { !self.is_over() } else { count < head.argument } {
            if count > 0 {
                out.push(b',');
            }
            self.value(out)?;
            count += 1;
        }
        out.push(b']');
        Ok(())
    }

    fn map(&mut self, head: Head, out: &mut Vec<u8>) -> Result<(), Error> {
        let mut keys = HashSet::new();
        let is_whole = out.is_empty();
        out.push(b'{');
        while if head.is_indefinite() {
            !self.is_over()
        } else {
            (keys.len() as u64) < head.argument
        } {
            if !keys.is_empty() {
                out.push(b',');
            }
            let key = self.key()?;
            put_string(out, &key);
            out.push(b':');
            self.value(out)?;
            let index = keys.len();
            if let Some(key) = keys.replace(key) {
                let why =
                    format!("cbor: found duplicate map key {key:?} at map element index {index}");
                return Err(if is_whole { malformed(why) } else { inadmissible(why) });
            }
        }
        out.push(b'}');
        Ok(())
    }

    /// A text, whether it is checked to be one or not.
    fn key(&mut self) -> Result<Cow<'a, str>, Error> {
        let head = self.head()?;
        if !matches!(head.major, Major::Bytes | Major::Text) {
            return Err(misfit(head.major, "string", None));
        }
        match self.string(head)? {
            Cow::Borrowed(bytes) => text(head, bytes),
            Cow::Owned(bytes) => Ok(Cow::Owned(text(head, &bytes)?.into_owned())),
        }
    }

    fn tagged(&mut self, tag: u64, out: &mut Vec<u8>) -> Result<(), Error> {
        let later: fn(&[u8]) -> String = match tag {
            TAG_POSITIVE_BIGNUM | TAG_NEGATIVE_BIGNUM => {
                return Err(malformed(
                    "cbor: data item of cbor type tag is not accepted by protocol: bignum",
                ));
            }
            TAG_TIME_TEXT | TAG_TIME_SECONDS => {
                let head = self.head()?;
                put_string(out, &self.time(tag, head)?);
                return Ok(());
            }
            TAG_BASE64_URL => |bytes| BASE64_URL_SAFE_NO_PAD.encode(bytes),
            TAG_BASE64 => |bytes| BASE64_STANDARD.encode(bytes),
            TAG_BASE16 => |bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
            _ => return self.value(out),
        };
        // It holds for all bytes inside, but for those under another such tag.
        let around = self.later.replace(later);
        let written = self.value(out);
        self.later = around;
        written
    }

    fn time(&mut self, tag: u64, head: Head) -> Result<String, Error> {
        let content = match (tag, head.major) {
            (TAG_TIME_TEXT, Major::Text) => {
                let bytes = self.string(head)?;
                let text = text(head, &bytes)?;
                let cannot = |why: jiff::Error| {
                    inadmissible(format!("cbor: cannot set {text} for time.Time: {why}"))
                };
                text.parse::<Timestamp>().map_err(cannot)?;
                return Ok(text.into_owned());
            }
            (TAG_TIME_SECONDS, Major::Positive) => head.argument as f64,
            (TAG_TIME_SECONDS, Major::Negative) => -1.0 - head.argument as f64,
            (TAG_TIME_SECONDS, Major::Simple) if float(head).is_some() => {
                float(head).unwrap_or_default()
            }
            (_, major) => {
                let wanted = if tag == TAG_TIME_TEXT {
                    "text string"
                } else {
                    "integer or floating-point number"
                };
                return Err(inadmissible(format!(
                    "cbor: tag number {tag} must be followed by {wanted}, got {}",
                    major.name()
                )));
            }
        };
        let (seconds, nanos) = (content.floor(), (content - content.floor()) * 1e9);
        Timestamp::new(seconds as i64, nanos as i32).map(|time| time.to_string()).map_err(|_| {
            inadmissible("cbor: decoded time cannot be represented in RFC3339 format with sub-second precision")
        })
    }
}

fn misfit(major: Major, wanted: &str, why: Option<String>) -> Error {
    let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
    inadmissible(format!(
        "cbor: cannot unmarshal {} into Go value of type {wanted}{why}",
        major.name()
    ))
}

/// Byte strings are unchecked texts: invalid UTF-8 in them is replaced, as Go's JSON does.
fn text<'a>(head: Head, bytes: &'a [u8]) -> Result<Cow<'a, str>, Error> {
    if head.major == Major::Bytes {
        return Ok(String::from_utf8_lossy(bytes));
    }
    let text = std::str::from_utf8(bytes);
    text.map(Cow::Borrowed).map_err(|_| inadmissible("cbor: invalid UTF-8 string"))
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a Vec takes all bytes");
}

fn put_integer(out: &mut Vec<u8>, head: Head) -> Result<(), Error> {
    let is_negative = head.major == Major::Negative;
    let sign = if is_negative { "-" } else { "" };
    let value = u128::from(head.argument) + u128::from(is_negative);
    if head.argument > i64::MAX as u64 {
        let why = format!("{sign}{value} overflows Go's int64");
        return Err(misfit(head.major, "int64", Some(why)));
    }
    out.extend_from_slice(format!("{sign}{value}").as_bytes());
    Ok(())
}

fn put_simple(out: &mut Vec<u8>, head: Head) -> Result<(), Error> {
    if let Some(value) = float(head) {
        // `1.0` stays a float, so that reading gives the written value.
        let number = Number::from_f64(value).expect("others are malformed");
        out.extend_from_slice(number.to_string().as_bytes());
        return Ok(());
    }
    let word: &[u8] = match head.argument {
        20 => b"false",
        21 => b"true",
        22 => b"null",
        other => {
            return Err(inadmissible(format!(
                "cbor: data item of cbor type {} is not accepted by protocol: simple value {other} is not recognized",
                head.major.name()
            )));
        }
    };
    out.extend_from_slice(word);
    Ok(())
}

/// The form of a float that JSON does not have.
fn no_number(value: f64) -> Option<&'static str> {
    match value {
        _ if value.is_nan() => Some("NaN"),
        _ if value.is_infinite() => Some("infinity"),
        _ => None,
    }
}

/// The float that a head holds, if it is one's.
fn float(head: Head) -> Option<f64> {
    match head.info {
        _ if head.major != Major::Simple => None,
        25 => Some(half(head.argument as u16)),
        26 => Some(f64::from(f32::from_bits(head.argument as u32))),
        27 => Some(f64::from_bits(head.argument)),
        _ => None,
    }
}

fn half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    sign * match exponent {
        0 => fraction * 2_f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (fraction + 1024.0) * 2_f64.powi(exponent - 25),
    }
}
