//! Timestamps and durations.

use cel_parser::common::ast::operators as op;
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp, Zoned};

use super::Answer;
use crate::value::Value;

pub fn call(name: &str, of: &[Value]) -> Answer {
    match (name, of) {
        ("timestamp", [Value::Timestamp(_)]) | ("duration", [Value::Duration(_)]) => {
            Some(Ok(of[0].clone()))
        }
        ("timestamp", [Value::String(text)]) => {
            Some(text.parse().map(Value::Timestamp).map_err(|_| {
                format!("parsing time {text:?} as \"2006-01-02T15:04:05Z07:00\": cannot parse")
            }))
        }
        ("timestamp", [Value::Int(seconds)]) => {
            Some(Timestamp::from_second(*seconds).map(Value::Timestamp).map_err(|e| e.to_string()))
        }
        ("duration", [Value::String(text)]) => {
            Some(base::duration::nanos(text).map(Value::Duration))
        }
        (_, [Value::Timestamp(time), zone @ ..]) => of_time(name, *time, zone),
        (_, [Value::Duration(nanos)]) => Some(Ok(Value::Int(match name {
            "getHours" => nanos / 3_600_000_000_000,
            "getMinutes" => nanos / 60_000_000_000,
            "getSeconds" => nanos / 1_000_000_000,
            "getMilliseconds" => nanos / 1_000_000,
            _ => return None,
        }))),
        _ => None,
    }
}

fn of_time(name: &str, time: Timestamp, zone: &[Value]) -> Answer {
    let zone = match zone {
        [] => TimeZone::UTC,
        [Value::String(name)] => match parse_zone(name) {
            Some(zone) => zone,
            None => return Some(Err(format!("unknown time zone {name}"))),
        },
        _ => return None,
    };
    let at: Zoned = time.to_zoned(zone);
    Some(Ok(Value::Int(i64::from(match name {
        "getFullYear" => i32::from(at.year()),
        "getMonth" => i32::from(at.month()) - 1,
        "getDate" => i32::from(at.day()),
        "getDayOfMonth" => i32::from(at.day()) - 1,
        "getDayOfWeek" => i32::from(at.weekday().to_sunday_zero_offset()),
        "getDayOfYear" => i32::from(at.day_of_year()) - 1,
        "getHours" => i32::from(at.hour()),
        "getMinutes" => i32::from(at.minute()),
        "getSeconds" => i32::from(at.second()),
        "getMilliseconds" => i32::from(at.millisecond()),
        _ => return None,
    }))))
}

fn parse_zone(name: &str) -> Option<TimeZone> {
    if matches!(name, "UTC" | "Z" | "") {
        return Some(TimeZone::UTC);
    }
    let (sign, rest) = match name.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, name.strip_prefix('+').unwrap_or(name)),
    };
    if let Some((hours, minutes)) = rest.split_once(':') {
        let seconds = hours.parse::<i32>().ok()? * 3600 + minutes.parse::<i32>().ok()? * 60;
        return Offset::from_seconds(sign * seconds).ok().map(TimeZone::fixed);
    }
    TimeZone::get(name).ok()
}

pub fn arithmetic(name: &str, a: &Value, b: &Value) -> Answer {
    let moved = |time: &Timestamp, nanos: i64| {
        let moved = time.checked_add(SignedDuration::from_nanos(nanos));
        moved.map(Value::Timestamp).map_err(|_| "timestamp overflow".to_owned())
    };
    let overflow = || "duration overflow".to_owned();
    Some(match (name, a, b) {
        (op::ADD, Value::Timestamp(time), Value::Duration(nanos))
        | (op::ADD, Value::Duration(nanos), Value::Timestamp(time)) => moved(time, *nanos),
        (op::SUBSTRACT, Value::Timestamp(time), Value::Duration(nanos)) => {
            moved(time, nanos.saturating_neg())
        }
        (op::SUBSTRACT, Value::Timestamp(a), Value::Timestamp(b)) => {
            let nanos = a.as_nanosecond() - b.as_nanosecond();
            i64::try_from(nanos).map(Value::Duration).map_err(|_| overflow())
        }
        (op::ADD, Value::Duration(a), Value::Duration(b)) => {
            a.checked_add(*b).map(Value::Duration).ok_or_else(overflow)
        }
        (op::SUBSTRACT, Value::Duration(a), Value::Duration(b)) => {
            a.checked_sub(*b).map(Value::Duration).ok_or_else(overflow)
        }
        _ => return None,
    })
}

/// Formats durations like protobuf: `5400s`.
pub fn show_duration(nanos: i64) -> String {
    let (seconds, rest) = (nanos / 1_000_000_000, (nanos % 1_000_000_000).abs());
    if rest == 0 {
        return format!("{seconds}s");
    }
    let sign = if nanos < 0 && seconds == 0 { "-" } else { "" };
    let fraction = format!("{rest:09}");
    format!("{sign}{seconds}.{}s", fraction.trim_end_matches('0'))
}
