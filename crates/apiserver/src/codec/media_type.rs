//! The media type that a Content-Type names, read as Go's `mime.ParseMediaType` reads it: names count in
//! any case, parameters must be well-formed, though nobody here asks for one.
//!
//! ```text
//! Application/JSON; charset="utf-8"  →  application/json
//! application/json; utf-8            →  nothing: a parameter has a value
//! ```

/// In lower case; `None` for what is none.
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
            // Upstream lets a last semicolon be.
            return (rest.trim() == ";").then_some(name);
        };
        if seen.contains(&key) {
            return None;
        }
        seen.push(key);
        rest = left;
    }
}

/// One or two tokens, with a slash between.
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

/// `; key=value` at the beginning: the key, and what is behind the value.
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

/// What follows a quoted value, whose first quote is gone already.
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
