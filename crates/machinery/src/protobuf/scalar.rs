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

/// A double as Go's JSON has it: whole ones without a fraction.
pub fn double(value: f64) -> Option<Value> {
    const EXACT: f64 = 9e15;
    if value.fract() == 0.0 && value.abs() < EXACT {
        return Some((value as i64).into());
    }
    Number::from_f64(value).map(Value::Number)
}
