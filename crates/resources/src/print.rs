//! Cells of Table answers, as upstream's printers write them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use machinery::{LabelSelector, Object, Time};
use serde_json::Value;

/// How long an object has been there.
pub(crate) fn age(object: &dyn Object) -> Value {
    since(object.meta().creation_timestamp.as_ref()).into()
}

pub(crate) fn since(time: Option<&Time>) -> String {
    match time {
        None => "<unknown>".into(),
        Some(Time(time)) => human_duration(base::clock::now().as_second() - time.as_second()),
    }
}

/// `5s`, `3m20s`, `47h`, `3d4h`, `2y`. Upstream: `k8s.io/apimachinery/pkg/util/duration`.
pub(crate) fn human_duration(seconds: i64) -> String {
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

/// `a=b,c=d`, or `<none>`.
pub(crate) fn labels(map: Option<&BTreeMap<String, String>>) -> String {
    let pairs: Vec<String> =
        map.into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    or_none(pairs.join(","))
}

pub(crate) fn selector(selector: Option<&LabelSelector>) -> String {
    match machinery::selector::Selector::from_api(selector) {
        Ok(parsed) if selector.is_some() => or_none(parsed.to_string()),
        _ => "<none>".into(),
    }
}

pub(crate) fn or_none(text: String) -> String {
    if text.is_empty() { "<none>".into() } else { text }
}

/// The names of containers.
pub(crate) fn names(containers: &[Container]) -> String {
    containers.iter().map(|one| one.name.as_str()).collect::<Vec<_>>().join(",")
}

/// The images of containers.
pub(crate) fn images(containers: &[Container]) -> String {
    let images = containers.iter().map(|one| one.image.as_deref().unwrap_or_default());
    images.collect::<Vec<_>>().join(",")
}

/// The first three of a list, and how many more there are.
pub(crate) fn first_three(mut all: Vec<String>) -> String {
    const SHOWN: usize = 3;
    let more = all.len().saturating_sub(SHOWN);
    all.truncate(SHOWN);
    let text = all.join(",");
    if more > 0 { format!("{text} + {more} more...") } else { text }
}

#[cfg(test)]
mod tests {
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
            assert_eq!(super::human_duration(seconds), expected, "{seconds}");
        }
    }
}
