//! The string formats that are checked. Upstream: `kube-openapi/pkg/validation/strfmt`.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use regex_lite::Regex;

use super::Kind;

/// The name without dashes, and its check. Kubernetes' own formats keep their dashes.
type Format = (&'static str, fn(&str) -> bool);

const FORMATS: &[Format] = &[
    ("bsonobjectid", |text| text.len() == 24 && is_hex(text)),
    ("uri", is_request_uri),
    ("email", is_email),
    ("hostname", is_hostname),
    ("ipv4", |text| text.contains('.') && sloppy_ip(text)),
    ("ipv6", |text| text.contains(':') && text.parse::<Ipv6Addr>().is_ok()),
    ("cidr", is_cidr),
    ("mac", is_mac),
    ("uuid", |text| is_uuid(text, None, false)),
    ("uuid3", |text| is_uuid(text, Some('3'), false)),
    ("uuid4", |text| is_uuid(text, Some('4'), true)),
    ("uuid5", |text| is_uuid(text, Some('5'), true)),
    ("isbn", |text| is_isbn10(text) || is_isbn13(text)),
    ("isbn10", is_isbn10),
    ("isbn13", is_isbn13),
    ("creditcard", is_credit_card),
    ("ssn", |text| matches(r"^\d{3}[- ]?\d{2}[- ]?\d{4}$", text)),
    ("hexcolor", |text| matches(r"^#?([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$", text)),
    ("rgbcolor", is_rgb_color),
    ("byte", is_base64),
    ("password", |_| true),
    ("date", is_date),
    ("duration", is_duration),
    ("datetime", is_date_time),
    ("k8s-short-name", |text| machinery::names::dns1123_label(text).is_empty()),
    ("k8s-long-name", |text| machinery::names::dns1123_subdomain(text).is_empty()),
];

fn find(format: &str) -> Option<&'static Format> {
    let plain = format.replace('-', "");
    FORMATS.iter().find(|(name, _)| *name == format || *name == plain)
}

/// Reports whether the format applies to this type.
pub fn is_checked(kind: Kind, format: &str) -> bool {
    match kind {
        Kind::Any | Kind::String => find(format).is_some(),
        Kind::Integer => matches!(format, "int32" | "int64"),
        Kind::Number => matches!(format, "float" | "double"),
        _ => false,
    }
}

/// Reports whether the text has the format. Any text matches a format of another type.
pub fn matches_format(format: &str, text: &str) -> bool {
    find(format).is_none_or(|(_, check)| check(text))
}

fn matches(pattern: &str, text: &str) -> bool {
    Regex::new(pattern).is_ok_and(|regex| regex.is_match(text))
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_request_uri(text: &str) -> bool {
    let scheme_end = text.find(':').unwrap_or(0);
    let scheme = &text[..scheme_end];
    let has_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let clean = !text.chars().any(|c| c.is_control() || c == ' ');
    clean && (text.starts_with('/') || (has_scheme && text.len() > scheme_end + 1))
}

/// Upstream: Go's `mail.ParseAddress`, in its common forms: `a@b` and `Name <a@b>`.
fn is_email(text: &str) -> bool {
    let text = text.trim();
    let address = match (text.find('<'), text.ends_with('>')) {
        (Some(start), true) => &text[start + 1..text.len() - 1],
        _ => text,
    };
    let Some((local, domain)) = address.rsplit_once('@') else { return false };
    let is_atom = |part: &str| {
        !part.is_empty()
            && part.split('.').all(|atom| {
                !atom.is_empty()
                    && atom.chars().all(|c| {
                        c.is_alphanumeric() || !c.is_ascii() || "!#$%&'*+-/=?^_`{|}~".contains(c)
                    })
            })
    };
    let quoted = local.len() > 2 && local.starts_with('"') && local.ends_with('"');
    let literal = domain.starts_with('[') && domain.ends_with(']');
    (is_atom(local) || quoted) && (is_atom(domain) || literal)
}

fn is_hostname(text: &str) -> bool {
    if text.is_empty() || text.len() > 255 {
        return false;
    }
    let labels: Vec<&str> = text.split('.').collect();
    let is_label = |label: &&str| {
        let inner = |c: char| c.is_alphanumeric() || c == '-' || !c.is_ascii();
        !label.is_empty()
            && label.len() <= 63
            && label.chars().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let top = labels.last().copied().unwrap_or_default();
    let is_top =
        labels.len() == 1 || (top.chars().count() >= 2 && top.chars().all(|c| c.is_alphabetic()));
    is_top && labels.iter().all(is_label)
}

/// Like Go before 1.17, this accepts leading zeros.
fn sloppy_ip(text: &str) -> bool {
    if text.contains(':') {
        return text.parse::<Ipv6Addr>().is_ok();
    }
    let parts: Vec<&str> = text.split('.').collect();
    let octets: Option<Vec<u8>> = parts
        .iter()
        .map(|part| {
            let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| part.parse::<u32>().ok()).flatten().and_then(|n| u8::try_from(n).ok())
        })
        .collect();
    octets.is_some_and(|octets| {
        octets.len() == 4
            && !Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]).to_string().is_empty()
    })
}

fn is_cidr(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else { return false };
    let limit = if address.contains(':') { 128 } else { 32 };
    let digits = !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit());
    sloppy_ip(address) && digits && length.parse::<u32>().is_ok_and(|length| length <= limit)
}

fn is_mac(text: &str) -> bool {
    let groups = |separator: char, width: usize| {
        let groups: Vec<&str> = text.split(separator).collect();
        let bytes = groups.len() * width / 2;
        matches!(bytes, 6 | 8 | 20)
            && groups.iter().all(|group| group.len() == width && is_hex(group))
    };
    groups(':', 2) || groups('-', 2) || groups('.', 4)
}

fn is_uuid(text: &str, version: Option<char>, has_variant: bool) -> bool {
    static SHAPE: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(
            "^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}$",
        )
        .expect("a valid expression")
    });
    if !SHAPE.is_match(text) {
        return false;
    }
    let digits: Vec<char> = text.chars().filter(|c| *c != '-').collect();
    version.is_none_or(|version| digits[12] == version)
        && (!has_variant || matches!(digits[16].to_ascii_lowercase(), '8' | '9' | 'a' | 'b'))
}

fn is_isbn10(text: &str) -> bool {
    let text: Vec<char> = text.chars().filter(|c| !matches!(c, '-' | ' ')).collect();
    if text.len() != 10 {
        return false;
    }
    let mut sum = 0;
    for (index, c) in text.iter().enumerate() {
        let digit = match c {
            'X' if index == 9 => 10,
            c => match c.to_digit(10) {
                Some(digit) => digit,
                None => return false,
            },
        };
        sum += (index as u32 + 1) * digit;
    }
    sum % 11 == 0
}

fn is_isbn13(text: &str) -> bool {
    let digits: Option<Vec<u32>> =
        text.chars().filter(|c| !matches!(c, '-' | ' ')).map(|c| c.to_digit(10)).collect();
    let Some(digits) = digits.filter(|digits| digits.len() == 13) else { return false };
    let weigh = |(index, digit): (usize, &u32)| if index % 2 == 0 { *digit } else { 3 * digit };
    digits.iter().enumerate().map(weigh).sum::<u32>().is_multiple_of(10)
}

fn is_credit_card(text: &str) -> bool {
    const SHAPE: &str = r"^(?:4[0-9]{12}(?:[0-9]{3})?|5[1-5][0-9]{14}|6(?:011|5[0-9][0-9])[0-9]{12}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}|(?:2131|1800|35\d{3})\d{11})$";
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let luhn = |(index, digit): (usize, u32)| match (index % 2, digit * 2) {
        (0, _) => digit,
        (_, double) => double / 10 + double % 10,
    };
    let sum: u32 = digits.chars().rev().filter_map(|c| c.to_digit(10)).enumerate().map(luhn).sum();
    matches(SHAPE, &digits) && sum.is_multiple_of(10)
}

fn is_rgb_color(text: &str) -> bool {
    let inner = text.strip_prefix("rgb(").and_then(|rest| rest.strip_suffix(')'));
    let Some(inner) = inner else { return false };
    let parts: Vec<&str> = inner.split(',').map(str::trim).collect();
    parts.len() == 3 && parts.iter().all(|part| part.parse::<u8>().is_ok())
}

fn is_base64(text: &str) -> bool {
    const SHAPE: &str =
        "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{4})$";
    matches(SHAPE, text)
}

fn is_date(text: &str) -> bool {
    text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok()
}

fn is_date_time(text: &str) -> bool {
    static TIME: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"^([0-9]{2}):([0-9]{2}):([0-9]{2})(.[0-9]+)?(z|([+-][0-9]{2}:[0-9]{2}))$")
            .expect("a valid expression")
    });
    let text = text.to_lowercase();
    let Some((date, time)) = text.split_once('t') else { return false };
    let Some(found) = TIME.captures(time.split('t').next().unwrap_or_default()) else {
        return false;
    };
    is_date(date) && &found[1] <= "23" && &found[2] <= "59" && &found[3] <= "59"
}

/// Accepts Go's durations (`1h30m`), and numbers with Scala's units (`5 minutes`).
fn is_duration(text: &str) -> bool {
    base::duration::nanos(text).is_ok() || {
        const UNITS: &[&str] = &[
            "ns", "nano", "µs", "us", "micro", "ms", "milli", "s", "sec", "m", "min", "h", "hr",
            "hour", "d", "day", "w", "wk", "week",
        ];
        static PART: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r"(\d+)\s*([A-Za-zµ]+)").expect("a valid expression"));
        let mut parts = PART.captures_iter(text).peekable();
        parts.peek().is_some()
            && parts.any(|part| {
                let unit = part[2].to_lowercase();
                UNITS
                    .iter()
                    .any(|known| *known == unit || (known.len() > 2 && unit.starts_with(known)))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats() {
        let check = |format: &str, good: &[&str], bad: &[&str]| {
            for text in good {
                assert!(matches_format(format, text), "{format}: {text}");
            }
            for text in bad {
                assert!(!matches_format(format, text), "{format}: {text}");
            }
        };
        check(
            "date-time",
            &["2020-01-02T03:04:05Z", "2020-01-02T03:04:05.123+01:00"],
            &["nope", "2020-01-02", "2020-13-02T03:04:05Z"],
        );
        check("date", &["2020-02-29"], &["2021-02-29", "20200101"]);
        check("ipv4", &["1.2.3.4", "01.2.3.4"], &["1.2", "::1", "1.2.3.256"]);
        check("ipv6", &["::1", "fe80::1"], &["1.2.3.4", "x"]);
        check("cidr", &["10.0.0.0/8", "::/0"], &["10.0.0.0", "10.0.0.0/33"]);
        check("uuid", &["123e4567-e89b-12d3-a456-426614174000"], &["x"]);
        check("email", &["a@b", "a.b@c.de"], &["x", "@b", "a b@c"]);
        check("duration", &["1h30m", "1.5s", "5 minutes", "0"], &["x", ""]);
        check("byte", &["aGVsbG8="], &["!", "aGVsbG8"]);
        check("hostname", &["a", "a.example.com"], &["-a", "a..b", ""]);
        check("mac", &["00:00:5e:00:53:01", "0000.5e00.5301"], &["00:00"]);
        check("uri", &["http://a/b", "/a"], &["a", ""]);
        check("isbn10", &["0321751043"], &["0321751044"]);
        check("isbn13", &["978-0321751041"], &["978-0321751042"]);
        check("k8s-short-name", &["a-b"], &["a.b", "A"]);
        assert!(is_checked(Kind::String, "date-time") && !is_checked(Kind::String, "zebra"));
        assert!(is_checked(Kind::Integer, "int32") && !is_checked(Kind::Boolean, "int32"));
    }
}
