//! Errors for an invalid time, in Go's words: `parsing time "x" as "2006-01-02T15:04:05Z07:00": cannot
//! parse "x" as "2006"`. Upstream: `time.Parse` with the layouts of `metav1.Time` and `MicroTime`.

/// An element of a layout, and the rest of a text after that element.
type Element = (&'static str, fn(&str) -> Option<&str>);

const SECONDS: &[Element] = &[
    ("2006", |text| digits(text, 4)),
    ("-", |text| text.strip_prefix('-')),
    ("01", |text| digits(text, 2)),
    ("-", |text| text.strip_prefix('-')),
    ("02", |text| digits(text, 2)),
    ("T", |text| text.strip_prefix('T')),
    ("15", |text| digits(text, 2)),
    (":", |text| text.strip_prefix(':')),
    ("04", |text| digits(text, 2)),
    (":", |text| text.strip_prefix(':')),
    ("05", |text| digits(text, 2)),
];
const MICROS: Element = (".000000", |text| digits(text.strip_prefix('.')?, 6));
/// After the seconds there may be a fraction that is not in the layout.
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

/// Positions of numbers, their minimum and maximum, and their names.
const RANGES: &[(usize, u32, u32, &str)] = &[
    (5, 1, 12, "month"),
    (8, 1, 31, "day"),
    (11, 0, 23, "hour"),
    (14, 0, 59, "minute"),
    (17, 0, 59, "second"),
];

/// `None` for a valid time.
pub fn misfit(text: &str, has_micros: bool) -> Option<String> {
    let layout =
        if has_micros { "2006-01-02T15:04:05.000000Z07:00" } else { "2006-01-02T15:04:05Z07:00" };
    let fraction = if has_micros { MICROS } else { FRACTION };
    let mut rest = text;
    for (element, behind) in SECONDS.iter().chain([&fraction, &ZONE]) {
        rest = match behind(rest) {
            Some(rest) => rest,
            None => {
                return Some(format!(
                    "parsing time {text:?} as {layout:?}: cannot parse {rest:?} as {element:?}"
                ));
            }
        };
    }
    for (at, least, most, name) in RANGES {
        let number: u32 = text[*at..*at + 2].parse().ok()?;
        if !(*least..=*most).contains(&number) {
            return Some(format!("parsing time {text:?}: {name} out of range"));
        }
    }
    if !rest.is_empty() {
        return Some(format!("parsing time {text:?}: extra text: {rest:?}"));
    }
    // The form is right: only a day that the month does not have is left.
    (text.parse::<jiff::Timestamp>().is_err())
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
    fn invalid_times_have_gos_errors() {
        let check = |text: &str, has_micros, expected: Option<&str>| {
            assert_eq!(misfit(text, has_micros).as_deref(), expected, "{text}");
        };
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
