//! The query of a request: names and values, percent-decoded, in the order given.

#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// A pair that cannot be read is left out. Upstream: Go's `URL.Query`, to which a semicolon parts
    /// nothing, and is an error.
    pub fn parse(text: &str) -> Self {
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (decode(name), decode(value))
        };
        let is_pair = |part: &&str| !part.is_empty() && !part.contains(';') && is_escaped(part);
        Self(text.split('&').filter(is_pair).map(pair).collect())
    }

    pub fn of(uri: &http::Uri) -> Self {
        Self::parse(uri.query().unwrap_or_default())
    }

    pub fn first(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Absent, empty and unreadable are all no. Upstream: `Convert_Slice_string_To_bool`, for which
    /// anything but `false` and `0` (also nothing, as in `?watch`) is yes.
    pub fn flag(&self, name: &str) -> bool {
        self.first(name)
            .is_some_and(|text| !matches!(text.to_ascii_lowercase().as_str(), "false" | "0"))
    }

    pub fn optional_flag(&self, name: &str) -> Option<bool> {
        self.first(name).map(|_| self.flag(name))
    }
}

/// Has each percent sign its two digits?
fn is_escaped(text: &str) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_hexdigit();
    let mut rest = text.as_bytes().split(|byte| *byte == b'%').skip(1);
    rest.all(|behind| behind.len() >= 2 && behind[..2].iter().all(is_digit))
}

/// As Go's `strconv.ParseBool`.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Undoes `%41` and `+`. What is no escape stays as it is.
pub fn decode(text: &str) -> String {
    decode_with(text, true)
}

/// As [`decode`], for path segments, where `+` is a plus.
pub fn decode_path(text: &str) -> String {
    decode_with(text, false)
}

fn decode_with(text: &str, plus_is_space: bool) -> String {
    if !text.contains(['%', '+']) {
        return text.to_owned();
    }
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| bytes.get(at + 1..at + 3))
            .flatten()
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (escaped, bytes[at]) {
            (Some(byte), _) => {
                out.push(byte);
                at += 3;
                continue;
            }
            (None, b'+') if plus_is_space => out.push(b' '),
            (None, byte) => out.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_and_values() {
        let query = Query::parse("labelSelector=a%3Db+c&watch&dryRun=All&dryRun=&x=%zz");
        assert_eq!(query.first("labelSelector"), Some("a=b c"));
        assert!(query.flag("watch"));
        assert!(!query.flag("absent"));
        assert!(!Query::parse("watch=0").flag("watch"));
        assert_eq!(query.all("dryRun").collect::<Vec<_>>(), ["All", ""]);
        assert_eq!(query.first("x"), None);
        assert_eq!(decode_path("a+b%2Fc"), "a+b/c");
    }

    #[test]
    fn pairs_that_cannot_be_read_are_left_out() {
        for (text, expected) in [
            ("limit=1", Some("1")),
            ("x=%zz&limit=2", Some("2")),
            ("limit=%zz", None),
            ("limit=1;watch=true", None),
            ("limit=%3", None),
            ("limit=%+1", None),
            ("limit=%33", Some("3")),
            ("limit=1%25", Some("1%")),
        ] {
            assert_eq!(Query::parse(text).first("limit"), expected, "{text}");
        }
    }
}
