//! The query of a request: names and values, percent-decoded, in order.

use base::percent;

#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// An invalid pair is ignored. Upstream: Go's `URL.Query`, in which a semicolon is no separator but an
    /// error.
    pub fn parse(text: &str) -> Self {
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (percent::decode_query(name), percent::decode_query(value))
        };
        let is_pair =
            |part: &&str| !part.is_empty() && !part.contains(';') && percent::is_escaped(part);
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

    /// Missing, empty and invalid values are false. Upstream: `Convert_Slice_string_To_bool`, where any value
    /// but
    /// `false` and `0` is true, also an empty one (`?watch`).
    pub fn flag(&self, name: &str) -> bool {
        self.first(name)
            .is_some_and(|text| !matches!(text.to_ascii_lowercase().as_str(), "false" | "0"))
    }

    pub fn optional_flag(&self, name: &str) -> Option<bool> {
        self.first(name).map(|_| self.flag(name))
    }
}

/// Like Go's `strconv.ParseUint`, with its errors.
pub fn parse_unsigned(text: &str) -> Result<u64, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let why = if is_number { "value out of range" } else { "invalid syntax" };
    let number = text.parse().ok().filter(|_| is_number);
    number.ok_or_else(|| format!("strconv.ParseUint: parsing {text:?}: {why}"))
}

/// Like Go's `strconv.ParseBool`.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
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
    }

    #[test]
    fn numbers_have_no_sign() {
        for (text, expected) in [
            ("7", Ok(7)),
            ("+7", Err("invalid syntax")),
            ("-7", Err("invalid syntax")),
            ("", Err("invalid syntax")),
            ("18446744073709551616", Err("value out of range")),
        ] {
            let error = |why| format!("strconv.ParseUint: parsing {text:?}: {why}");
            assert_eq!(parse_unsigned(text), expected.map_err(error));
        }
    }

    #[test]
    fn invalid_pairs_are_ignored() {
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
