//! Percent-encoding: of paths, queries, and names of headers. RFC 3986, and HTML's forms.
//!
//! Invariant: text that is no valid escape, such as `%+1`, stays unchanged.

/// For one segment of a path or one value of a query.
pub fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    encode_but(&mut out, text, |byte| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte));
    out
}

/// Appends a text in which only some bytes, ASCII all of them, stay as they are.
pub fn encode_but(out: &mut String, text: &str, stays: impl Fn(u8) -> bool) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        if byte.is_ascii() && stays(byte) {
            out.push(char::from(byte));
        } else {
            let digits = [byte >> 4, byte & 15].map(|half| DIGITS[usize::from(half)]);
            out.extend(['%'].into_iter().chain(digits.map(char::from)));
        }
    }
}

/// Undoes `%41`, as in paths and headers.
pub fn decode(text: &str) -> String {
    decoded(text, false)
}

/// As [`decode`], but a text with a percent sign that is none of an escape stays whole.
pub fn decode_whole(text: &str) -> String {
    if is_escaped(text) { decode(text) } else { text.to_owned() }
}

/// As [`decode`], of queries, where `+` is a space.
pub fn decode_query(text: &str) -> String {
    decoded(text, true)
}

/// Has each percent sign its two digits?
pub fn is_escaped(text: &str) -> bool {
    let mut rest = text.as_bytes().split(|byte| *byte == b'%').skip(1);
    rest.all(|behind| escaped(behind).is_some())
}

/// The byte of two hexadecimal digits.
fn escaped(digits: &[u8]) -> Option<u8> {
    let half = |digit: u8| char::from(digit).to_digit(16).and_then(|half| u8::try_from(half).ok());
    match digits {
        [high, low, ..] => Some(half(*high)? << 4 | half(*low)?),
        _ => None,
    }
}

fn decoded(text: &str, plus_is_space: bool) -> String {
    if !text.contains(['%', '+']) {
        return text.to_owned();
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        let byte = escaped(behind).filter(|_| *first == b'%');
        rest = if byte.is_some() { &behind[2..] } else { behind };
        out.push(match first {
            b'+' if plus_is_space => b' ',
            _ => byte.unwrap_or(*first),
        });
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_encoded_comes_back() {
        for (text, expected) in [
            ("", ""),
            ("plain-_.~09AZaz", "plain-_.~09AZaz"),
            ("a b+c/d", "a%20b%2Bc%2Fd"),
            ("100%", "100%25"),
            ("é", "%C3%A9"),
        ] {
            assert_eq!(encode(text), expected);
            assert_eq!((decode(expected), decode_query(expected)), (text.into(), text.into()));
            assert!(is_escaped(expected));
        }
        let mut out = "x-".to_owned();
        encode_but(&mut out, "é/a", |_| true);
        assert_eq!(out, "x-%C3%A9/a");
    }

    #[test]
    fn what_is_no_escape_stays() {
        let check = |text: &str, path: &str, query: &str| {
            assert_eq!((decode(text), decode_query(text)), (path.into(), query.into()), "{text}");
        };
        check("a+b%2fc", "a+b/c", "a b/c");
        check("%2B+", "++", "+ ");
        for text in ["%", "%4", "%zz", "%-1", "x%", "%é", "%4é"] {
            check(text, text, text);
            assert!(!is_escaped(text), "{text}");
        }
        // Rust reads signs in numbers; in escapes there are none.
        check("%+1", "%+1", "% 1");
        check("%%41", "%A", "%A");
        check("%ff", "\u{fffd}", "\u{fffd}");
    }

    #[test]
    fn an_escape_that_is_none_spoils_the_others() {
        for (text, expected) in [
            ("", ""),
            ("a%2fb%3A", "a/b:"),
            ("a+b", "a+b"),
            ("a%2fb%", "a%2fb%"),
            ("a%2fb%zz", "a%2fb%zz"),
            ("%%41", "%%41"),
        ] {
            assert_eq!(decode_whole(text), expected, "{text}");
        }
    }
}
