//! Errors for an invalid time, in Go's words: `parsing time "x" as "2006-01-02T15:04:05Z07:00": cannot
//! parse "x" as "2006"`. Upstream: `time.Parse` with the layouts of `metav1.Time` and `MicroTime`.

use k8s_openapi::jiff::Timestamp;

/// An element of a layout, and how a text goes on behind one that fits.
type Element = (&'static str, fn(&str) -> Option<&str>);

const SECONDS: &[Element] = &[
    ("2006", |text| digits(text, 4)),
    ("-", |text| text.strip_prefix('-')),
    ("01", |text| digits(text, 2)),
    ("-", |text| text.strip_prefix('-')),
    ("02", |text| digits(text, 2)),
    ("T", |text| text.strip_prefix('T')),
    // One digit is enough.
    ("15", |text| digits(text, 2).or_else(|| digits(text, 1))),
    (":", |text| text.strip_prefix(':')),
    ("04", |text| digits(text, 2)),
    (":", |text| text.strip_prefix(':')),
    ("05", |text| digits(text, 2)),
];
const MICROS: Element = (".000000", |text| digits(text.strip_prefix(['.', ','])?, 6));
/// Behind seconds there may be a fraction that the layout does not name.
const FRACTION: Element = ("", |text| {
    let rest = text.strip_prefix(['.', ',']).filter(|rest| rest.starts_with(is_digit));
    Some(rest.map_or(text, |rest| rest.trim_start_matches(is_digit)))
});
const ZONE: Element = ("Z07:00", |text| {
    if let Some(rest) = text.strip_prefix('Z') {
        return Some(rest);
    }
    let rest = text.strip_prefix(['+', '-'])?;
    digits(digits(rest, 2)?.strip_prefix(':')?, 2)
});

/// The elements whose range is checked as they are read: least and greatest values, and names. The day follows
/// at the end, when the month is known.
const RANGES: &[(&str, u32, u32, &str)] = &[
    ("01", 1, 12, "month"),
    ("15", 0, 23, "hour"),
    ("04", 0, 59, "minute"),
    ("05", 0, 59, "second"),
];
/// Digits of a fraction that count.
const NANOS: usize = 9;

/// A time that fits, as others read it: two digits of an hour, a point, and no more than nine digits
/// behind it.
pub fn plain(text: &str) -> String {
    let hour = if text.get(12..13) == Some(":") { "0" } else { "" };
    let (date, rest) = text.split_at_checked(11).unwrap_or((text, ""));
    let whole = format!("{date}{hour}{rest}");
    let Some((seconds, behind)) = whole.split_at_checked(19) else { return whole };
    let Some(behind) = behind.strip_prefix(['.', ',']) else { return whole };
    let end = behind.find(|c| !is_digit(c)).unwrap_or(behind.len());
    format!("{seconds}.{}{}", &behind[..end.min(NANOS)], &behind[end..])
}

/// Nothing for a time.
pub fn misfit(text: &str, has_micros: bool) -> Option<String> {
    let layout =
        if has_micros { "2006-01-02T15:04:05.000000Z07:00" } else { "2006-01-02T15:04:05Z07:00" };
    let fraction = if has_micros { MICROS } else { FRACTION };
    let mut rest = text;
    for (element, behind) in SECONDS.iter().chain([&fraction, &ZONE]) {
        let Some(left) = behind(rest) else {
            return Some(format!(
                "parsing time {text:?} as {layout:?}: cannot parse {rest:?} as {element:?}"
            ));
        };
        let read = &rest[..rest.len() - left.len()];
        if let Some((_, least, most, name)) = RANGES.iter().find(|range| range.0 == *element)
            && !(*least..=*most).contains(&read.parse().ok()?)
        {
            return Some(format!("parsing time {text:?}: {name} out of range"));
        }
        rest = left;
    }
    if !rest.is_empty() {
        return Some(format!("parsing time {text:?}: extra text: {rest:?}"));
    }
    // The form is right: days that a month does not have are left.
    (plain(text).parse::<Timestamp>().is_err())
        .then(|| format!("parsing time {text:?}: day out of range"))
}

fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
}

fn digits(text: &str, count: usize) -> Option<&str> {
    let (number, rest) = text.split_at_checked(count)?;
    number.chars().all(is_digit).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misfits_are_told_as_go_tells_them() {
        let check = |text: &str, has_micros, expected: Option<&str>| {
            assert_eq!(misfit(text, has_micros).as_deref(), expected, "{text}");
        };
        check("2026-01-02T3:04:05Z", false, None);
        check("2026-01-02T03:04:05,000001Z", true, None);
        check("2026-01-02T03:04:05.123456789123Z", false, None);
        check(
            "2026-01-02T03:04:60Z",
            false,
            Some("parsing time \"2026-01-02T03:04:60Z\": second out of range"),
        );
        assert_eq!(plain("2026-01-02T3:04:05,1234567891Z"), "2026-01-02T03:04:05.123456789Z");
        assert_eq!(plain("2026-01-02T03:04:05Z"), "2026-01-02T03:04:05Z");
        check("2026-01-02T03:04:05Z", false, None);
        check("2026-01-02T03:04:05.7+02:00", false, None);
        check("2026-01-02T03:04:05.000000Z", true, None);
        check(
            "",
            false,
            Some(r#"parsing time "" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "2006""#),
        );
        check(
            "2026-01-02T03:04:05Z",
            true,
            Some(
                r#"parsing time "2026-01-02T03:04:05Z" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "Z" as ".000000""#,
            ),
        );
        check(
            "2026-01-02",
            false,
            Some(
                r#"parsing time "2026-01-02" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "T""#,
            ),
        );
        check(
            "2026-13-02T03:04:05Z",
            false,
            Some(r#"parsing time "2026-13-02T03:04:05Z": month out of range"#),
        );
        // A number is judged before the rest of the text.
        check(
            "2026-01-02T25:04:05Z",
            true,
            Some(r#"parsing time "2026-01-02T25:04:05Z": hour out of range"#),
        );
        check(
            "2026-02-30T03:04:05Z",
            false,
            Some(r#"parsing time "2026-02-30T03:04:05Z": day out of range"#),
        );
        check(
            "2026-01-02T03:04:05Zx",
            false,
            Some(r#"parsing time "2026-01-02T03:04:05Zx": extra text: "x""#),
        );
    }
}
