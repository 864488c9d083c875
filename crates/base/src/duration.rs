//! Durations as Go writes and reads them, which is how Kubernetes has them in objects, flags and
//! configuration files. Pure.
//!
//! In and out: `1h30m`, `1.5s`, `300ms`, `0`. Upstream: Go's `time.ParseDuration` and
//! `Duration.String`, with their errors. Whole numbers stay exact: only a fraction is rounded.

use std::time::Duration;

const UNITS: &[(&str, i64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A duration in nanoseconds, which may be negative.
///
/// # Errors
/// Go's, as `time: missing unit in duration "5"`; also for more than 292 years.
pub fn nanos(text: &str) -> Result<i64, String> {
    let invalid = || format!("time: invalid duration {text:?}");
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total = 0_i64;
    while !rest.is_empty() {
        let is_digit = |c: char| c.is_ascii_digit() || c == '.';
        let end = rest.find(|c| !is_digit(c)).unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        let end = tail.find(is_digit).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        if !number.contains(|c: char| c.is_ascii_digit()) {
            return Err(invalid());
        }
        if unit.is_empty() {
            return Err(format!("time: missing unit in duration {text:?}"));
        }
        let known = UNITS.iter().find(|(name, _)| *name == unit);
        let (_, scale) =
            known.ok_or_else(|| format!("time: unknown unit {unit:?} in duration {text:?}"))?;
        let part = product(number, *scale).ok_or_else(invalid)?;
        total = total.checked_add(part).ok_or_else(invalid)?;
        rest = tail;
    }
    Ok(sign * total)
}

fn product(number: &str, scale: i64) -> Option<i64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = if whole.is_empty() { 0 } else { whole.parse::<i64>().ok()? };
    let fraction: f64 = match fraction {
        "" => 0.0,
        digits => format!("0.{digits}").parse().ok()?,
    };
    whole.checked_mul(scale)?.checked_add((fraction * scale as f64).round() as i64)
}

/// A duration that is not negative.
///
/// # Errors
/// As [`nanos`], and for a negative one.
pub fn parse(text: &str) -> Result<Duration, String> {
    let nanos = u64::try_from(nanos(text)?)
        .map_err(|_| format!("time: duration {text:?} must not be negative"))?;
    Ok(Duration::from_nanos(nanos))
}

/// `1h0m1.5s`, `1.5ms`, `0s`.
pub fn text(nanos: i64) -> String {
    let (sign, total) = (if nanos < 0 { "-" } else { "" }, nanos.unsigned_abs());
    let decimal = |value: u64, unit: u64, digits: usize| {
        let text = format!("{}.{:0digits$}", value / unit, value % unit);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match total {
        0 => "0s".into(),
        1..1_000 => format!("{sign}{total}ns"),
        1_000..1_000_000 => format!("{sign}{}µs", decimal(total, 1_000, 3)),
        1_000_000..1_000_000_000 => format!("{sign}{}ms", decimal(total, 1_000_000, 6)),
        _ => {
            const MINUTE: u64 = 60_000_000_000;
            let (minutes, rest) = (total / MINUTE, total % MINUTE);
            let seconds = decimal(rest, 1_000_000_000, 9);
            match (minutes / 60, minutes % 60) {
                (0, 0) => format!("{sign}{seconds}s"),
                (0, minutes) => format!("{sign}{minutes}m{seconds}s"),
                (hours, minutes) => format!("{sign}{hours}h{minutes}m{seconds}s"),
            }
        }
    }
}

/// [`text`] of a duration that is not negative.
pub fn show(duration: Duration) -> String {
    text(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
}

/// A duration for people: `5s`, `3m20s`, `47h`, `3d4h`, `2y`.
/// Upstream: `HumanDuration` of `k8s.io/apimachinery/pkg/util/duration`.
pub fn human(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let two = |big: i64, big_unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{big_unit}"),
        small => format!("{big}{big_unit}{small}{small_unit}"),
    };
    let s = seconds;
    match s {
        ..-1 => "<invalid>".into(),
        -1..0 => "0s".into(),
        0..120 => format!("{s}s"),
        120..600 => two(s / MINUTE, "m", s % MINUTE, "s"),
        600..10_800 => format!("{}m", s / MINUTE),
        10_800..28_800 => two(s / HOUR, "h", s % HOUR / MINUTE, "m"),
        28_800..172_800 => format!("{}h", s / HOUR),
        172_800..691_200 => two(s / DAY, "d", s % DAY / HOUR, "h"),
        691_200..63_072_000 => format!("{}d", s / DAY),
        63_072_000..252_288_000 => two(s / YEAR, "y", s % YEAR / DAY, "d"),
        _ => format!("{}y", s / YEAR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for (nanos, written) in [
            (0, "0s"),
            (1, "1ns"),
            (1_500, "1.5µs"),
            (2_000_000, "2ms"),
            (-1_500_000_000, "-1.5s"),
            (90_000_000_000, "1m30s"),
            (3_600_000_000_000, "1h0m0s"),
        ] {
            assert_eq!(text(nanos), written);
            assert_eq!(super::nanos(written), Ok(nanos), "{written}");
        }
    }

    #[test]
    fn others_are_read_or_refused_as_go_does() {
        let check = |text: &str, expected: Result<i64, &str>| {
            let expected = expected.map_err(|why| format!("time: {why}"));
            assert_eq!(nanos(text), expected, "{text}");
        };
        check("0", Ok(0));
        check("-0", Ok(0));
        check("+5s", Ok(5_000_000_000));
        check(".5s", Ok(500_000_000));
        check("1.s", Ok(1_000_000_000));
        check("1h1m1.5s", Ok(3_661_500_000_000));
        check("", Err("invalid duration \"\""));
        check("+", Err("invalid duration \"+\""));
        check("abc", Err("invalid duration \"abc\""));
        check(".s", Err("invalid duration \".s\""));
        check("1.2.3s", Err("invalid duration \"1.2.3s\""));
        check("9999999999h", Err("invalid duration \"9999999999h\""));
        check("5", Err("missing unit in duration \"5\""));
        check("5x", Err("unknown unit \"x\" in duration \"5x\""));
        assert_eq!(show(Duration::from_secs(80)), "1m20s");
        assert_eq!(parse("-5s"), Err("time: duration \"-5s\" must not be negative".into()));
    }

    #[test]
    fn durations_read_as_upstreams() {
        for (seconds, expected) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (601, "10m"),
            (10_800, "3h"),
            (10_860, "3h1m"),
            (30_000, "8h"),
            (172_800, "2d"),
            (180_000, "2d2h"),
            (700_000, "8d"),
            (63_072_000, "2y"),
            (-5, "<invalid>"),
        ] {
            assert_eq!(human(seconds), expected, "{seconds}");
        }
    }
}
