//! The media type of a Content-Type, parsed as Go's `mime.ParseMediaType` does: names ignore case, and
//! parameters must be well-formed, although they are ignored here.
//!
//! ```text
//! Application/JSON; charset="utf-8"  →  application/json
//! application/json; utf-8            →  nothing: a parameter needs a value
//! ```

/// In lower case; `None` for an invalid media type.
pub fn parse(text: &str) -> Option<String> {
    let (name, mut rest) = text.split_at(text.find(';').unwrap_or(text.len()));
    let name = name.trim().to_ascii_lowercase();
    if !is_media_type(&name) {
        return None;
    }
    let mut seen: Vec<String> = vec![];
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Some(name);
        }
        let Some((key, left)) = parameter(rest) else {
            // Upstream accepts a trailing semicolon.
            return (rest.trim() == ";").then_some(name);
        };
        if seen.contains(&key) {
            return None;
        }
        seen.push(key);
        rest = left;
    }
}

/// One or two tokens, separated by a slash.
fn is_media_type(name: &str) -> bool {
    let is_token = |text: &str| !text.is_empty() && text.bytes().all(is_token_byte);
    match name.split_once('/') {
        Some((kind, sub)) => is_token(kind) && is_token(sub),
        None => is_token(name),
    }
}

fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"()<>@,;:\\\"/[]?=".contains(&byte)
}

/// `; key=value` at the beginning: the key, and the rest after the value.
fn parameter(text: &str) -> Option<(String, &str)> {
    let text = text.strip_prefix(';')?.trim_start();
    let (key, text) = token(text)?;
    let text = text.trim_start().strip_prefix('=')?.trim_start();
    let rest = match text.strip_prefix('"') {
        Some(quoted) => behind_quote(quoted)?,
        None => token(text)?.1,
    };
    Some((key.to_ascii_lowercase(), rest))
}

fn token(text: &str) -> Option<(&str, &str)> {
    let end = text.bytes().position(|byte| !is_token_byte(byte)).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// The rest after a quoted value, whose first quote was consumed.
fn behind_quote(text: &str) -> Option<&str> {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return text.get(at + 1..),
            b'\r' | b'\n' => return None,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn types_are_read_as_go_does() {
        for (text, expected) in [
            ("application/json", Some("application/json")),
            (" Application/JSON ", Some("application/json")),
            ("application/json; charset=utf-8", Some("application/json")),
            ("application/json;charset=\"a;b\\\"\" ; x=y", Some("application/json")),
            ("application/json;", Some("application/json")),
            ("*/*", Some("*/*")),
            ("json", Some("json")),
            ("application/json;utf-8", None),
            ("application/json;a=b;A=c", None),
            ("application/json;a=\"b", None),
            ("application/json, application/yaml", None),
            ("application/", None),
            ("/", None),
            (";a=b", None),
            ("", None),
            ("\u{80}", None),
        ] {
            assert_eq!(super::parse(text).as_deref(), expected, "{text:?}");
        }
    }
}
