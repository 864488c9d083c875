//! Durations: parsed from flags, and formatted for people.

use std::time::Duration;

/// For `clap`: Go's format, or a number of seconds, as several flags allow.
pub fn parse(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    base::duration::parse(text)
        .map_err(|_| format!("invalid duration {text:?}, expected something like 24h, 30m or 45s"))
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
    fn durations_have_gos_format() {
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
    fn short_durations_have_one_unit() {
        for (seconds, expected) in
            [(-1, "<invalid>"), (59, "59s"), (60, "1m"), (86_399, "23h"), (86_400, "1d")]
        {
            assert_eq!(short(seconds), expected);
        }
    }
}
