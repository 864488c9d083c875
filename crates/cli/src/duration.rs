//! Durations as Go writes and reads them: `1h30m`, `300ms`, `0`; and short ones for people.

use std::time::Duration;

/// For `clap`: units are h, m, s, ms, us; a bare number is seconds, as several flags allow.
pub fn parse(text: &str) -> Result<Duration, String> {
    let bad = || format!("invalid duration {text:?}, expected something like 24h, 30m or 45s");
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(bad)?;
        let number: f64 = rest[..unit_at].parse().map_err(|_| bad())?;
        let after = &rest[unit_at..];
        let end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let unit = match &after[..end] {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" => 1e-6,
            _ => return Err(bad()),
        };
        total += number * unit;
        rest = &after[end..];
    }
    Duration::try_from_secs_f64(total).ok().filter(|_| !text.is_empty()).ok_or_else(bad)
}

/// Upstream: `duration.ShortHumanDuration`.
pub fn short(seconds: i64) -> String {
    match seconds {
        s if s < 0 => "<invalid>".into(),
        s if s < 60 => format!("{s}s"),
        s if s < 3600 => format!("{}m", s / 60),
        s if s < 86400 => format!("{}h", s / 3600),
        s if s < 86400 * 365 => format!("{}d", s / 86400),
        s => format!("{}y", s / (86400 * 365)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_gos() {
        for (text, expected) in [
            ("24h", Some(86_400_000)),
            ("1h30m", Some(5_400_000)),
            ("1.5s", Some(1500)),
            ("300ms", Some(300)),
            ("0", Some(0)),
            ("90", Some(90_000)),
            ("", None),
            ("h", None),
            ("5 minutes", None),
            ("-1s", None),
        ] {
            let got = parse(text).ok().map(|duration| duration.as_millis());
            assert_eq!(got, expected, "{text}");
        }
    }

    #[test]
    fn people_read_one_unit() {
        for (seconds, expected) in
            [(-1, "<invalid>"), (59, "59s"), (60, "1m"), (86_399, "23h"), (86_400, "1d")]
        {
            assert_eq!(short(seconds), expected);
        }
    }
}
