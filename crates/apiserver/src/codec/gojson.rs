//! Go's view of JSON: errors in the words of Go's `encoding/json`, and duplicate fields of objects.
//!
//! In: bytes. Out: the paths of duplicate fields, or the error that clients of upstream know. This scanner
//! only checks; serde decodes. It has its own stack, so that hostile nesting uses no thread stack.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// Upstream: `encoding/json`'s maximum nesting depth.
const MAX_DEPTH: usize = 10_000;
/// Only this many duplicates are listed.
const MAX_DUPLICATES: usize = 100;

/// Checks the whole text. Returns the paths of duplicates, such as `metadata.name`, in order.
pub fn check(bytes: &[u8]) -> Result<Vec<String>, String> {
    let mut scanner = Scanner::new(bytes);
    scanner.run()?;
    Ok(scanner.duplicates.into_iter().map(|(path, _)| path).collect())
}

/// Warnings about fields in the order of the text: duplicates (at their second place), and `unknown` ones.
/// The second of a pair says whether the field is unknown.
pub fn in_order(bytes: &[u8], unknown: Vec<String>) -> Vec<(String, bool)> {
    let mut scanner = Scanner::new(bytes);
    scanner.watched = unknown.iter().map(|path| (path.clone(), None)).collect();
    if scanner.run().is_err() {
        return vec![];
    }
    let place = |path: &String| scanner.watched.get(path).copied().flatten().unwrap_or(usize::MAX);
    let mut all: Vec<(usize, (String, bool))> =
        unknown.iter().map(|path| (place(path), (path.clone(), true))).collect();
    all.extend(scanner.duplicates.into_iter().map(|(path, at)| (at, (path, false))));
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, note)| note).collect()
}

/// The text with `0` instead of every number `-0`, which is an integer for Go but not for serde; `None` if
/// there is none. The text must be valid JSON.
pub fn without_negative_zeros(bytes: &[u8]) -> Option<Vec<u8>> {
    let ends = |byte: Option<&u8>| byte.is_none_or(|byte| b",]} \t\r\n".contains(byte));
    let (mut out, mut is_text, mut is_escaped, mut found) = (vec![], false, false, false);
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b'-' if !is_text && bytes.get(at + 1) == Some(&b'0') && ends(bytes.get(at + 2)) => {
                found = true;
                continue;
            }
            _ => {}
        }
        out.push(*byte);
    }
    found.then_some(out)
}

/// Like Go, replaces each byte of invalid UTF-8, and each unpaired half of a surrogate pair, with the
/// replacement character.
pub fn as_utf8(bytes: &[u8]) -> Cow<'_, [u8]> {
    if std::str::from_utf8(bytes).is_ok() {
        return whole_surrogates(Cow::Borrowed(bytes));
    }
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        out.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    whole_surrogates(Cow::Owned(out.into_bytes()))
}

/// Replaces the escapes of lone surrogates, in place: all escapes have one length.
fn whole_surrogates(mut text: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    const LENGTH: usize = 6;
    let unit = |text: &[u8], at: usize| {
        let digits = text.get(at..at + LENGTH)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut at = 0;
    while let Some(next) = text[at..].iter().position(|byte| *byte == b'\\') {
        at += next;
        match unit(&text, at) {
            // Not an escape of this kind: the next letter is part of it.
            None => at += 2,
            Some(0xd800..0xdc00) if matches!(unit(&text, at + LENGTH), Some(0xdc00..0xe000)) => {
                at += 2 * LENGTH;
            }
            Some(0xd800..0xe000) => {
                text.to_mut()[at..at + LENGTH].copy_from_slice(b"\\ufffd");
                at += LENGTH;
            }
            Some(_) => at += LENGTH,
        }
        if at >= text.len() {
            break;
        }
    }
    text
}

enum Frame {
    Object { keys: HashSet<String>, key: String },
    Array { index: usize },
}

struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Frame>,
    /// With the position of the second.
    duplicates: Vec<(String, usize)>,
    /// Paths whose first position is wanted.
    watched: HashMap<String, Option<usize>>,
}

const LOOKING_FOR_VALUE: &str = "looking for beginning of value";
const LOOKING_FOR_KEY: &str = "looking for beginning of object key string";

impl<'a> Scanner<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, stack: vec![], duplicates: vec![], watched: HashMap::new() }
    }

    fn run(&mut self) -> Result<(), String> {
        loop {
            // A value begins here.
            let opened = self.value()?;
            if opened && self.enter()? {
                continue;
            }
            // A value ended: the next character decides whether another begins.
            if !self.leave()? {
                break;
            }
        }
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.unexpected("after top-level value")),
        }
    }

    /// Consumes a scalar (false) or the opening bracket of a container (true).
    fn value(&mut self) -> Result<bool, String> {
        match self.peek() {
            None => Err(end_of_input()),
            Some(open @ (b'{' | b'[')) => {
                if self.stack.len() >= MAX_DEPTH {
                    return Err(self.unexpected("exceeded max depth"));
                }
                self.at += 1;
                self.stack.push(match open {
                    b'{' => Frame::Object { keys: HashSet::new(), key: String::new() },
                    _ => Frame::Array { index: 0 },
                });
                Ok(true)
            }
            Some(b'"') => self.string().map(|_| false),
            Some(b't') => self.literal("true").map(|()| false),
            Some(b'f') => self.literal("false").map(|()| false),
            Some(b'n') => self.literal("null").map(|()| false),
            Some(b'-' | b'0'..=b'9') => self.number().map(|()| false),
            Some(_) => Err(self.unexpected(LOOKING_FOR_VALUE)),
        }
    }

    /// After an opening bracket: true if a value follows, false if the container is empty.
    fn enter(&mut self) -> Result<bool, String> {
        let next = self.peek();
        match (self.stack.last(), next) {
            (_, None) => Err(end_of_input()),
            (Some(Frame::Object { .. }), Some(b'}')) | (Some(Frame::Array { .. }), Some(b']')) => {
                self.at += 1;
                self.stack.pop();
                Ok(false)
            }
            (Some(Frame::Object { .. }), Some(_)) => self.key().map(|()| true),
            _ => Ok(true),
        }
    }

    /// After a value: closes the containers that end here; true if another value follows.
    fn leave(&mut self) -> Result<bool, String> {
        loop {
            let next = self.peek();
            let Some(frame) = self.stack.last_mut() else { return Ok(false) };
            match (frame, next) {
                (_, None) => return Err(end_of_input()),
                (Frame::Object { .. }, Some(b',')) => {
                    self.at += 1;
                    self.key()?;
                    return Ok(true);
                }
                (Frame::Array { index }, Some(b',')) => {
                    *index += 1;
                    self.at += 1;
                    return Ok(true);
                }
                (Frame::Object { .. }, Some(b'}')) | (Frame::Array { .. }, Some(b']')) => {
                    self.at += 1;
                    self.stack.pop();
                }
                (Frame::Object { .. }, Some(_)) => {
                    return Err(self.unexpected("after object key:value pair"));
                }
                (Frame::Array { .. }, Some(_)) => {
                    return Err(self.unexpected("after array element"));
                }
            }
        }
    }

    fn key(&mut self) -> Result<(), String> {
        match self.peek() {
            None => return Err(end_of_input()),
            Some(b'"') => {}
            Some(_) => return Err(self.unexpected(LOOKING_FOR_KEY)),
        }
        let name = self.string()?;
        let is_new = match self.stack.last_mut() {
            Some(Frame::Object { keys, key }) => {
                key.clone_from(&name);
                keys.insert(name)
            }
            _ => true,
        };
        if !is_new && self.duplicates.len() < MAX_DUPLICATES {
            let path = self.path();
            if !self.duplicates.iter().any(|(known, _)| *known == path) {
                self.duplicates.push((path, self.at));
            }
        }
        if !self.watched.is_empty() {
            let path = self.path();
            let at = self.at;
            if let Some(place) = self.watched.get_mut(&path) {
                place.get_or_insert(at);
            }
        }
        match self.peek() {
            None => Err(end_of_input()),
            Some(b':') => {
                self.at += 1;
                Ok(())
            }
            Some(_) => Err(self.unexpected("after object key")),
        }
    }

    fn path(&self) -> String {
        let mut path = String::new();
        for frame in &self.stack {
            match frame {
                Frame::Object { key, .. } => {
                    if !path.is_empty() {
                        path.push('.');
                    }
                    path.push_str(key);
                }
                Frame::Array { index } => path.push_str(&format!("[{index}]")),
            }
        }
        path
    }

    fn string(&mut self) -> Result<String, String> {
        let start = self.at;
        self.at += 1;
        let mut escaped = false;
        loop {
            match self.bytes.get(self.at) {
                None => return Err(end_of_input()),
                Some(b'"') => break,
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(0..0x20) => return Err(self.unexpected("in string literal")),
                Some(_) => self.at += 1,
            }
        }
        self.at += 1;
        let quoted = &self.bytes[start..self.at];
        if escaped {
            return Ok(serde_json::from_slice(quoted).unwrap_or_default());
        }
        Ok(String::from_utf8_lossy(&quoted[1..quoted.len() - 1]).into_owned())
    }

    fn escape(&mut self) -> Result<(), String> {
        self.at += 1;
        match self.bytes.get(self.at) {
            None => return Err(end_of_input()),
            Some(b'u') => {
                for _ in 0..4 {
                    self.at += 1;
                    match self.bytes.get(self.at) {
                        None => return Err(end_of_input()),
                        Some(byte) if byte.is_ascii_hexdigit() => {}
                        Some(_) => {
                            return Err(self.unexpected("in \\u hexadecimal character escape"));
                        }
                    }
                }
            }
            Some(b'b' | b'f' | b'n' | b'r' | b't' | b'\\' | b'/' | b'"') => {}
            Some(_) => return Err(self.unexpected("in string escape code")),
        }
        self.at += 1;
        Ok(())
    }

    fn literal(&mut self, word: &str) -> Result<(), String> {
        for expected in word.bytes() {
            match self.bytes.get(self.at) {
                None => return Err(end_of_input()),
                Some(byte) if *byte == expected => self.at += 1,
                Some(_) => {
                    let expected = char::from(expected);
                    return Err(
                        self.unexpected(&format!("in literal {word} (expecting '{expected}')"))
                    );
                }
            }
        }
        Ok(())
    }

    fn number(&mut self) -> Result<(), String> {
        if self.bytes[self.at] == b'-' {
            self.at += 1;
        }
        match self.bytes.get(self.at) {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits(),
            None => return Err(end_of_input()),
            Some(_) => return Err(self.unexpected("in numeric literal")),
        }
        if self.bytes.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.some_digits("after decimal point in numeric literal")?;
        }
        if let Some(b'e' | b'E') = self.bytes.get(self.at) {
            self.at += 1;
            if let Some(b'+' | b'-') = self.bytes.get(self.at) {
                self.at += 1;
            }
            self.some_digits("in exponent of numeric literal")?;
        }
        Ok(())
    }

    fn digits(&mut self) {
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
    }

    fn some_digits(&mut self, context: &str) -> Result<(), String> {
        match self.bytes.get(self.at) {
            None => Err(end_of_input()),
            Some(byte) if byte.is_ascii_digit() => {
                self.digits();
                Ok(())
            }
            Some(_) => Err(self.unexpected(context)),
        }
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\t' | b'\r' | b'\n') = self.bytes.get(self.at) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied()
    }

    fn unexpected(&self, context: &str) -> String {
        let byte = self.bytes.get(self.at).copied().unwrap_or_default();
        format!("invalid character {} {context}", quoted(byte))
    }
}

fn end_of_input() -> String {
    "unexpected end of JSON input".into()
}

/// A byte as Go quotes it in these messages.
fn quoted(byte: u8) -> String {
    match byte {
        b'\'' => r"'\''".into(),
        b'"' => "'\"'".into(),
        b'\n' => r"'\n'".into(),
        b'\t' => r"'\t'".into(),
        b'\r' => r"'\r'".into(),
        b'\\' => r"'\\'".into(),
        0..0x20 | 0x7f => format!("'\\x{byte:02x}'"),
        _ => format!("'{}'", char::from(byte)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_gos_words() {
        for (text, expected) in [
            ("", "unexpected end of JSON input"),
            ("{'a':1}", r"invalid character '\'' looking for beginning of object key string"),
            ("apiVersion: v1", "invalid character 'a' looking for beginning of value"),
            (r#"{"a":NaN}"#, "invalid character 'N' looking for beginning of value"),
            (r#"{"a":01}"#, "invalid character '1' after object key:value pair"),
            (r#"{"a":1} xyz"#, "invalid character 'x' after top-level value"),
            ("[1 2]", "invalid character '2' after array element"),
            ("[1,]", "invalid character ']' looking for beginning of value"),
            ("tru ", "invalid character ' ' in literal true (expecting 'e')"),
            ("\u{1f}", r"invalid character '\x1f' looking for beginning of value"),
            (r#"{"a" 1}"#, "invalid character '1' after object key"),
        ] {
            assert_eq!(check(text.as_bytes()), Err(expected.to_owned()), "{text}");
        }
        let deep = "[".repeat(11_000);
        assert_eq!(check(deep.as_bytes()), Err("invalid character '[' exceeded max depth".into()));
    }

    #[test]
    fn invalid_utf8_is_replaced() {
        assert_eq!(&*as_utf8(b"a\xffb\xe2\x82"), "a\u{fffd}b\u{fffd}\u{fffd}".as_bytes());
        assert!(matches!(as_utf8("ä".as_bytes()), Cow::Borrowed(_)));
        for (text, expected) in [
            (r#""\ud800""#, r#""\ufffd""#),
            (r#""x\ud800y\udc00z\ud83d\ude00""#, r#""x\ufffdy\ufffdz\ud83d\ude00""#),
            (r#""\ud800\ud800\udc00""#, r#""\ufffd\ud800\udc00""#),
            (r#""\\ud800 \n \u00e4 \uD8""#, r#""\\ud800 \n \u00e4 \uD8""#),
            (r#""\"#, r#""\"#),
        ] {
            assert_eq!(String::from_utf8_lossy(&as_utf8(text.as_bytes())), expected);
        }
    }

    #[test]
    fn negative_zeros_lose_their_sign() {
        let check = |text: &str, expected: Option<&str>| {
            let got = without_negative_zeros(text.as_bytes());
            assert_eq!(got.as_deref(), expected.map(str::as_bytes), "{text}");
        };
        check(r#"{"a":-0,"b":[-0, -0.5],"c":"-0"}"#, Some(r#"{"a":0,"b":[0, -0.5],"c":"-0"}"#));
        check(r#"{"a":"\"-0,","b":-01}"#, None);
    }

    #[test]
    fn duplicates_are_found_by_their_path() {
        let text = r#"{"m":{"n":1,"n":2},"l":[{"k":1},{"k":1,"k":[]}],"e":{},"a":[]}"#;
        assert_eq!(check(text.as_bytes()), Ok(vec!["m.n".to_owned(), "l[1].k".to_owned()]));
        assert_eq!(check(br#" {"a":{"b":-1.5e+3,"c":"\u0041\n"}} "#), Ok(vec![]));
    }
}
