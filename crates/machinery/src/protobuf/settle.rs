//! Go's habits in JSON: which empty fields an object shows, how it writes quantities and times.
//!
//! In: the JSON of an object, from a client or from a Rust struct. Out: the JSON that Go's struct of the
//! same kind would make of it. What Go leaves out when empty is left out (`hostNetwork: false`), what
//! it always writes is there (`status: {}`, `rules: null`), quantities have their canonical form
//! (`1000m` is `1`), times are in UTC. The table of messages tells all that, for Go's protobuf
//! follows the same structs.
//!
//! ```text
//! {"spec":{"hostNetwork":false},"x":1}  →  {"spec":{"containers":null},"x":1,"status":{}}
//! ```
//!
//! Invariants: one pass over the bytes, no tree; fields that the table does not know and values of a
//! wrong type pass unchanged: the decoder behind this refuses them with a better message.

use k8s_openapi::jiff::Timestamp;

use super::descriptors::{Descriptors, Field, Kind, MessageId, Shape};
use super::{MAX_DEPTH, scalar};
use crate::{gotime, quantity};

/// Why an object cannot be: a quantity or a time that is none, in upstream's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsettled {
    /// No JSON; the parser behind this says more.
    #[error("malformed JSON")]
    Malformed,
    #[error("{0}")]
    Value(String),
}

/// A field that says something by being empty and not absent, until it is stored: its message and
/// name, and what stands there meanwhile where it is empty.
pub type Telling = (MessageId, &'static str, &'static str);

impl Descriptors {
    /// The JSON that Go's struct of this message would write for `json`.
    pub fn settle(&self, message: MessageId, json: &[u8]) -> Result<Vec<u8>, Unsettled> {
        self.settle_but(message, json, &[])
    }

    /// The same, but the fields of `telling` stay where they are empty.
    pub fn settle_but(
        &self,
        message: MessageId,
        json: &[u8],
        telling: &[Telling],
    ) -> Result<Vec<u8>, Unsettled> {
        let out = Vec::with_capacity(json.len() + json.len() / 8);
        let mut scan = Scan { table: self, telling, json, at: 0, out };
        scan.space();
        scan.message(message, 0)?;
        Ok(scan.out)
    }

    /// Appends the fields that are always there.
    fn write_always(
        &self,
        message: MessageId,
        seen: &[&'static str],
        is_first: &mut bool,
        out: &mut Vec<u8>,
    ) {
        for field in self.fields(message) {
            if let (Shape::Inline, Kind::Message(inner)) = (field.shape, field.kind) {
                self.write_always(inner, seen, is_first, out);
                continue;
            }
            if seen.contains(&field.name) || !is_always_there(field) {
                continue;
            }
            if !std::mem::take(is_first) {
                out.push(b',');
            }
            out.push(b'"');
            out.extend_from_slice(field.name.as_bytes());
            out.extend_from_slice(b"\":");
            self.write_zero(field, out);
        }
    }

    fn write_zero(&self, field: &Field, out: &mut Vec<u8>) {
        match field.shape {
            _ if field.pointer => out.extend_from_slice(b"null"),
            Shape::List | Shape::Map => out.extend_from_slice(b"null"),
            _ => self.write_zero_of(field.kind, out),
        }
    }

    /// What `null` is read as where a value of the kind must be.
    fn write_zero_of(&self, kind: Kind, out: &mut Vec<u8>) {
        let text: &[u8] = match kind {
            Kind::Message(message) => {
                out.push(b'{');
                self.write_always(message, &[], &mut true, out);
                b"}"
            }
            Kind::String => b"\"\"",
            Kind::Bool => b"false",
            Kind::Int32 | Kind::Int64 | Kind::Double | Kind::IntOrString => b"0",
            Kind::Quantity => b"\"0\"",
            Kind::Duration => b"\"0s\"",
            _ => b"null",
        };
        out.extend_from_slice(text);
    }

    fn field(&self, message: MessageId, name: &[u8]) -> Option<&Field> {
        let fields = self.fields(message);
        let own = fields
            .iter()
            .find(|field| field.shape != Shape::Inline && field.name.as_bytes() == name);
        own.or_else(|| {
            fields.iter().find_map(|field| match (field.shape, field.kind) {
                (Shape::Inline, Kind::Message(inner)) => self.field(inner, name),
                _ => None,
            })
        })
    }
}

/// To Go a struct is never empty, `omitempty` or not.
fn is_always_there(field: &Field) -> bool {
    let is_struct = field.shape == Shape::Single
        && matches!(
            field.kind,
            Kind::Message(_)
                | Kind::Time
                | Kind::MicroTime
                | Kind::Quantity
                | Kind::IntOrString
                | Kind::Duration
        );
    !field.omit_empty || (is_struct && !field.pointer && !field.omit_zero)
}

struct Scan<'a> {
    table: &'a Descriptors,
    telling: &'a [Telling],
    json: &'a [u8],
    at: usize,
    out: Vec<u8>,
}

impl<'a> Scan<'a> {
    fn peek(&self) -> Result<u8, Unsettled> {
        self.json.get(self.at).copied().ok_or(Unsettled::Malformed)
    }

    fn space(&mut self) {
        while self.json.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), Unsettled> {
        if self.peek()? != byte {
            return Err(Unsettled::Malformed);
        }
        self.at += 1;
        self.space();
        Ok(())
    }

    /// A string with its quotes.
    fn string(&mut self) -> Result<&'a [u8], Unsettled> {
        let start = self.at;
        if self.peek()? != b'"' {
            return Err(Unsettled::Malformed);
        }
        self.at += 1;
        loop {
            match self.peek()? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        Ok(&self.json[start..self.at])
    }

    /// Copies one value of any type unchanged.
    fn skip(&mut self) -> Result<&'a [u8], Unsettled> {
        let start = self.at;
        let mut depth = 0usize;
        loop {
            match self.peek()? {
                b'"' => {
                    self.string()?;
                }
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1).ok_or(Unsettled::Malformed)?;
                    self.at += 1;
                }
                byte if depth > 0 && (byte == b',' || byte == b':') => self.at += 1,
                byte if byte.is_ascii_whitespace() => self.space(),
                _ => {
                    let rest = &self.json[self.at..];
                    let end = rest.iter().position(|byte| b",:]}\" \t\r\n".contains(byte));
                    let length = end.unwrap_or(rest.len());
                    if length == 0 {
                        return Err(Unsettled::Malformed);
                    }
                    self.at += length;
                }
            }
            if depth == 0 {
                let value = &self.json[start..self.at];
                self.space();
                return Ok(value);
            }
        }
    }

    fn copy(&mut self) -> Result<(), Unsettled> {
        let value = self.skip()?;
        self.out.extend_from_slice(value);
        Ok(())
    }

    /// The members of an object, each with its key written.
    fn members(
        &mut self,
        mut member: impl FnMut(&mut Self, &'a [u8], bool) -> Result<bool, Unsettled>,
    ) -> Result<bool, Unsettled> {
        self.expect(b'{')?;
        self.out.push(b'{');
        let mut is_first = true;
        while self.peek()? != b'}' {
            let key = self.string()?;
            self.space();
            self.expect(b':')?;
            if member(self, key, is_first)? {
                is_first = false;
            }
            self.space();
            if self.peek()? == b',' {
                self.expect(b',')?;
            }
        }
        self.expect(b'}')?;
        Ok(is_first)
    }

    fn key(&mut self, key: &[u8], is_first: bool) {
        if !is_first {
            self.out.push(b',');
        }
        self.out.extend_from_slice(key);
        self.out.push(b':');
    }

    fn message(&mut self, message: MessageId, depth: usize) -> Result<(), Unsettled> {
        if depth > MAX_DEPTH || self.peek()? != b'{' {
            return self.copy();
        }
        let table = self.table;
        let mut seen: Vec<&'static str> = vec![];
        let mut is_first = self.members(|scan, key, is_first| {
            let Some(field) = table.field(message, &key[1..key.len() - 1]) else {
                scan.key(key, is_first);
                scan.copy()?;
                return Ok(true);
            };
            let before = scan.out.len();
            scan.key(key, is_first);
            let start = scan.out.len();
            scan.field(field, depth + 1)?;
            if let Some(shown) = scan.telling_text(message, field, start) {
                scan.out.truncate(start);
                scan.out.extend_from_slice(shown.as_bytes());
                seen.push(field.name);
                return Ok(true);
            }
            if is_left_out(field, &scan.out[start..]) {
                scan.out.truncate(before);
                return Ok(false);
            }
            if scan.out[start..] == *b"null" || is_empty_collection(field, &scan.out[start..]) {
                scan.out.truncate(start);
                table.write_zero(field, &mut scan.out);
            }
            seen.push(field.name);
            Ok(true)
        })?;
        self.table.write_always(message, &seen, &mut is_first, &mut self.out);
        self.out.push(b'}');
        Ok(())
    }

    /// The text for a field that is present but empty, where empty differs from absent.
    fn telling_text(
        &self,
        message: MessageId,
        field: &Field,
        start: usize,
    ) -> Option<&'static str> {
        if !matches!(&self.out[start..], b"[]" | b"{}") {
            return None;
        }
        let is_it = |telling: &&Telling| (telling.0, telling.1) == (message, field.name);
        self.telling.iter().find(is_it).map(|telling| telling.2)
    }

    fn field(&mut self, field: &Field, depth: usize) -> Result<(), Unsettled> {
        match (field.shape, self.peek()?) {
            (Shape::List, b'[') => {
                self.expect(b'[')?;
                self.out.push(b'[');
                let mut is_first = true;
                while self.peek()? != b']' {
                    if !std::mem::take(&mut is_first) {
                        self.out.push(b',');
                    }
                    self.element(field.kind, depth)?;
                    self.space();
                    if self.peek()? == b',' {
                        self.expect(b',')?;
                    }
                }
                self.expect(b']')?;
                self.out.push(b']');
                Ok(())
            }
            (Shape::Map, b'{') => {
                self.members(|scan, key, is_first| {
                    scan.key(key, is_first);
                    scan.element(field.kind, depth)?;
                    Ok(true)
                })?;
                self.out.push(b'}');
                Ok(())
            }
            (Shape::List | Shape::Map, _) => self.copy(),
            _ => self.one(field.kind, depth),
        }
    }

    /// A value of a list or map: there is no room for `null` in those of Go's structs.
    fn element(&mut self, kind: Kind, depth: usize) -> Result<(), Unsettled> {
        if !self.json[self.at..].starts_with(b"null") {
            return self.one(kind, depth);
        }
        self.skip()?;
        self.table.write_zero_of(kind, &mut self.out);
        Ok(())
    }

    fn one(&mut self, kind: Kind, depth: usize) -> Result<(), Unsettled> {
        match kind {
            Kind::Message(message) => self.message(message, depth),
            Kind::OrList(message) | Kind::OrBool(message) | Kind::OrStrings(message) => {
                self.message(message, depth)
            }
            Kind::Quantity => {
                let raw = self.skip()?;
                self.out.extend_from_slice(&canonical_quantity(raw)?);
                Ok(())
            }
            Kind::Time | Kind::MicroTime => {
                let raw = self.skip()?;
                self.out.extend_from_slice(&canonical_time(raw, kind == Kind::MicroTime)?);
                Ok(())
            }
            _ => self.copy(),
        }
    }
}

/// Is it nothing, or empty as a value of the field's own type is? What is empty otherwise is of a
/// wrong one.
fn is_empty(field: &Field, value: &[u8]) -> bool {
    let empty: &[&[u8]] = match (field.shape, field.kind) {
        (Shape::Map, _) => &[b"{}"],
        (Shape::List, _) | (_, Kind::Strings) => &[b"[]"],
        (_, Kind::Message(_)) => &[b"{}"],
        (_, Kind::String | Kind::Bytes) => &[b"\"\""],
        (_, Kind::Bool) => &[b"false"],
        (_, Kind::Int32 | Kind::Int64 | Kind::IntOrString) => &[b"0"],
        (_, Kind::Double) => &[b"0", b"0.0"],
        _ => &[],
    };
    value == b"null" || empty.contains(&value)
}

fn is_empty_collection(field: &Field, value: &[u8]) -> bool {
    matches!(field.shape, Shape::List | Shape::Map) && is_empty(field, value)
}

/// Would Go leave the field out?
fn is_left_out(field: &Field, value: &[u8]) -> bool {
    if field.pointer {
        return field.omit_empty && value == b"null";
    }
    let is_collection = matches!(field.shape, Shape::List | Shape::Map);
    match field.kind {
        _ if is_collection => field.omit_empty && is_empty(field, value),
        Kind::Message(_) => field.omit_zero && is_empty(field, value),
        Kind::Time | Kind::MicroTime | Kind::Quantity | Kind::IntOrString | Kind::Duration => {
            field.omit_zero && is_empty(field, value)
        }
        // Embedded JSON of any shape counts, unless there is none.
        Kind::Raw => field.omit_empty && value == b"null",
        _ => field.omit_empty && is_empty(field, value),
    }
}

fn canonical_quantity(raw: &[u8]) -> Result<Vec<u8>, Unsettled> {
    let text = std::str::from_utf8(raw).map_err(|_| Unsettled::Malformed)?;
    if text == "null" || text.starts_with(['{', '[', 't', 'f']) {
        return Ok(raw.to_vec());
    }
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    let canonical =
        quantity::canonical(text.trim()).map_err(|error| Unsettled::Value(error.to_string()))?;
    Ok(format!("\"{canonical}\"").into_bytes())
}

/// The beginning of the year 1: no time at all, to Go.
const ZERO_TIME: i64 = -62_135_596_800;

fn canonical_time(raw: &[u8], micro: bool) -> Result<Vec<u8>, Unsettled> {
    let text = std::str::from_utf8(raw).map_err(|_| Unsettled::Malformed)?;
    let Some(text) = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) else {
        return Ok(raw.to_vec());
    };
    if let Some(why) = gotime::misfit(text, micro) {
        return Err(Unsettled::Value(why));
    }
    // The decoder behind this refuses values that cannot be read.
    let Ok(time) = gotime::plain(text).parse::<Timestamp>() else { return Ok(raw.to_vec()) };
    if time.as_second() == ZERO_TIME {
        return Ok(b"null".to_vec());
    }
    Ok(format!("\"{}\"", scalar::time_text(time, micro)).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "@p\tv1\nInner\n\t1\ta\tstring\t?\n\t2\tmust\tint32\nThing\n\t1\tname\tstring\n\t2\ton\tbool\t?\n\t3\tsize\tquantity\n\t4\tlist\t[]Inner\n\t5\tinner\tInner\t?\n\t6\tmaybe\tInner\t*?\n\t7\ttags\t{}string\t?\n\t8\tat\ttime\t?0\n\t9\tseen\tmicrotime\t*?\n\t10\tcount\tint64\t*?\n\t11\tlimits\t{}quantity\t?\n\t12\textra\t{}strings\t?\n";

    fn settle(json: &str) -> Result<String, String> {
        let table = Descriptors::parse(TABLE, "v1");
        let message = table.kind("v1", "Thing").expect("a message");
        let out = table.settle(message, json.as_bytes()).map_err(|error| error.to_string())?;
        Ok(String::from_utf8(out).expect("text"))
    }

    #[test]
    fn writes_as_go_does() {
        for (json, expected) in [
            ("{}", r#"{"name":"","size":"0","list":null,"inner":{"must":0}}"#),
            (
                r#" { "name" : "x" , "on": false, "list": [ {"a":""} ], "inner": {"must":3}, "size": 1000 } "#,
                r#"{"name":"x","list":[{"must":0}],"inner":{"must":3},"size":"1k"}"#,
            ),
            (
                r#"{"name":"x","size":"1","list":[null],"inner":{"must":1},"tags":{"a":null},"limits":{"cpu":null}}"#,
                r#"{"name":"x","size":"1","list":[{"must":0}],"inner":{"must":1},"tags":{"a":""},"limits":{"cpu":"0"}}"#,
            ),
            (
                r#"{"name":"x","size":"1000m","list":[],"inner":{"must":1},"maybe":{},"tags":{},"extra":{},"count":0,"zz":[1,{"b":""}]}"#,
                r#"{"name":"x","size":"1","list":null,"inner":{"must":1},"maybe":{"must":0},"count":0,"zz":[1,{"b":""}]}"#,
            ),
            (
                r#"{"name":"x","size":"1","inner":{"must":1},"list":null,"at":"0001-01-01T00:00:00Z"}"#,
                r#"{"name":"x","size":"1","inner":{"must":1},"list":null}"#,
            ),
            (
                r#"{"name":null,"size":"0.5","list":[{"must":1}],"inner":{"must":1},"at":"2026-01-02T03:04:05.9+01:00","seen":"2026-01-02T03:04:05.000006Z","limits":{"cpu":"0.1"}}"#,
                r#"{"name":"","size":"500m","list":[{"must":1}],"inner":{"must":1},"at":"2026-01-02T02:04:05Z","seen":"2026-01-02T03:04:05.000006Z","limits":{"cpu":"100m"}}"#,
            ),
        ] {
            assert_eq!(settle(json).as_deref(), Ok(expected), "{json}");
            assert_eq!(settle(expected).as_deref(), Ok(expected), "twice");
        }
    }

    #[test]
    fn a_telling_field_stays_empty() {
        let table = Descriptors::parse(TABLE, "v1");
        let message = table.kind("v1", "Thing").expect("a message");
        for (json, expected) in [
            (r#"{"list":[]}"#, r#"{"list":[],"name":"","size":"0","inner":{"must":0}}"#),
            (r#"{"list":null}"#, r#"{"list":null,"name":"","size":"0","inner":{"must":0}}"#),
            ("{}", r#"{"name":"","size":"0","list":null,"inner":{"must":0}}"#),
        ] {
            let out = table.settle_but(message, json.as_bytes(), &[(message, "list", "[]")]);
            assert_eq!(out.as_deref(), Ok(expected.as_bytes()), "{json}");
        }
        let of_tags = |json: &str| {
            let telling = [(message, "tags", r#"{"a":{}}"#)];
            let out = table.settle_but(message, json.as_bytes(), &telling).expect("a thing");
            String::from_utf8(out).expect("text").contains(r#""tags":{"a":{}}"#)
        };
        assert!(of_tags(r#"{"tags":{}}"#));
        assert!(!of_tags(r#"{"tags":null}"#));
        assert!(!of_tags("{}"));
    }

    #[test]
    fn refuses_what_is_no_quantity_and_no_time() {
        for (json, expected) in [
            (
                r#"{"size":"1x"}"#,
                "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
            ),
            (
                r#"{"seen":"2026-01-02T03:04:05Z"}"#,
                r#"parsing time "2026-01-02T03:04:05Z" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "Z" as ".000000""#,
            ),
            ("{", "malformed JSON"),
            (r#"{"name""#, "malformed JSON"),
        ] {
            assert_eq!(settle(json).err().as_deref(), Some(expected), "{json}");
        }
    }

    #[test]
    fn wrong_types_pass() {
        for json in [r#""text""#, "[1]"] {
            assert_eq!(settle(json).as_deref(), Ok(json));
        }
        let wrong = [
            r#""name":5"#,
            r#""list":"x""#,
            r#""tags":[]"#,
            r#""inner":[{}]"#,
            r#""on":0"#,
            r#""limits":"""#,
            r#""extra":[]"#,
            r#""at":{}"#,
        ];
        let out = settle(&format!("{{{}}}", wrong.join(","))).expect("settles");
        for wrong in wrong {
            assert!(out.contains(wrong), "{wrong}: {out}");
        }
    }
}
