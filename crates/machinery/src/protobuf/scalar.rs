//! Messages whose JSON is one word: times, durations; and numbers as Go writes them.

use jiff::Timestamp;
use serde_json::{Number, Value};

use super::Error;
use super::wire::{Reader, Wire, put_number};

/// Seconds and nanoseconds; no content at all is Go's zero time, `null` in JSON.
pub fn read_time(bytes: &[u8], is_micro: bool) -> Result<Value, Error> {
    let (mut seconds, mut nanos) = (0, 0);
    let mut reader = Reader(bytes);
    while let Some((number, wire)) = reader.field()? {
        match (number, wire) {
            (1, Wire::Varint(value)) => seconds = value.cast_signed(),
            (2, Wire::Varint(value)) => nanos = value as i32,
            _ => {}
        }
    }
    if seconds == 0 && nanos == 0 {
        return Ok(Value::Null);
    }
    let kept = if is_micro { nanos / 1000 * 1000 } else { 0 };
    let time = Timestamp::new(seconds, kept)
        .map_err(|error| Error::Value { field: "seconds", why: error.to_string() })?;
    Ok(time_text(time, is_micro).into())
}

/// A time as Go's JSON has it.
pub fn time_text(time: Timestamp, is_micro: bool) -> String {
    let format = if is_micro { "%Y-%m-%dT%H:%M:%S.%6fZ" } else { "%Y-%m-%dT%H:%M:%SZ" };
    time.strftime(format).to_string()
}

pub fn write_time(out: &mut Vec<u8>, text: &str, is_micro: bool) -> Result<(), String> {
    let time: Timestamp = text.parse().map_err(|error: jiff::Error| error.to_string())?;
    let nanos = time.subsec_nanosecond();
    // jiff's fraction has the sign of the whole, Go's is never negative.
    let (seconds, nanos) = match nanos {
        ..0 => (time.as_second() - 1, nanos + 1_000_000_000),
        _ => (time.as_second(), nanos),
    };
    put_number(out, 1, seconds);
    put_number(out, 2, if is_micro { i64::from(nanos / 1000 * 1000) } else { 0 });
    Ok(())
}

/// Go's `Duration.String`: `1h0m1.5s`, `1.5ms`, `0s`.
pub fn duration_text(nanos: i64) -> String {
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

/// Go's `time.ParseDuration`.
pub fn duration_nanos(text: &str) -> Option<i64> {
    const UNITS: &[(&str, f64)] = &[
        ("ns", 1.0),
        ("us", 1e3),
        ("µs", 1e3),
        ("μs", 1e3),
        ("ms", 1e6),
        ("s", 1e9),
        ("m", 60e9),
        ("h", 3600e9),
    ];
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(0);
    }
    let mut total = 0_i64;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit)?;
        if !number.contains(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let whole = if whole.is_empty() { 0 } else { whole.parse::<i64>().ok()? };
        let fraction: f64 =
            if fraction.is_empty() { 0.0 } else { format!("0.{fraction}").parse().ok()? };
        // Scales are whole numbers: only the fraction is rounded.
        let part =
            whole.checked_mul(*scale as i64)?.checked_add((fraction * scale).round() as i64)?;
        total = total.checked_add(part)?;
        rest = tail;
    }
    (!text.is_empty()).then_some(sign * total)
}

/// A double as Go's JSON has it: whole ones without a fraction.
pub fn double(value: f64) -> Option<Value> {
    const EXACT: f64 = 9e15;
    if value.fract() == 0.0 && value.abs() < EXACT {
        return Some((value as i64).into());
    }
    Number::from_f64(value).map(Value::Number)
}
