//! Requests that are not meant to be long end after a minute, or after the time that they name.
//! Upstream: `WithRequestDeadline`, `WithTimeoutForNonLongRunningRequests`.

use std::time::Duration;

use http::Uri;
use machinery::StatusError;
use machinery::status::Reason;

use super::in_flight::is_long_running;
use crate::request::RequestInfo;
use crate::serve::Shared;
use crate::verbs::query::Query;

/// How long a request may take. `timeout` of the query shortens it, and never lengthens it.
pub fn of(shared: &Shared, info: &RequestInfo, uri: &Uri) -> Result<Duration, StatusError> {
    let most = shared.options.request_timeout;
    if is_long_running(info) || uri.query().is_none() {
        return Ok(most);
    }
    let query = Query::of(uri);
    let Some(text) = query.first("timeout").filter(|text| !text.is_empty()) else {
        return Ok(most);
    };
    let wanted = parse(text).map_err(|why| {
        let message = format!("invalid timeout specified in the request URL - time: {why}");
        StatusError::bad_request(message).without_details()
    })?;
    // None, or a negative one, is no wish.
    Ok(wanted.filter(|wanted| !wanted.is_zero()).map_or(most, |wanted| wanted.min(most)))
}

pub async fn limit<T>(
    time: Duration,
    info: &RequestInfo,
    work: impl Future<Output = Result<T, StatusError>>,
) -> Result<T, StatusError> {
    if is_long_running(info) {
        return work.await;
    }
    match tokio::time::timeout(time, work).await {
        Ok(outcome) => outcome,
        Err(_) => Err(StatusError::new(
            Reason::Timeout,
            "Timeout: request did not complete within the allotted timeout",
        )),
    }
}

/// As Go's `time.ParseDuration`, with its errors; nothing for a negative one.
pub fn parse(text: &str) -> Result<Option<Duration>, String> {
    const UNITS: &[(&str, f64)] = &[
        ("ns", 1e-9),
        ("us", 1e-6),
        ("µs", 1e-6),
        ("μs", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
    ];
    /// Of 64 bits of nanoseconds.
    const LONGEST: f64 = 9_223_372_036.0;
    let invalid = || format!("invalid duration {text:?}");
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if unsigned == "0" {
        return Ok(Some(Duration::ZERO));
    }
    if unsigned.is_empty() {
        return Err(invalid());
    }
    let (mut rest, mut seconds) = (unsigned, 0.0);
    while !rest.is_empty() {
        let is_digit = |c: char| c.is_ascii_digit() || c == '.';
        let end = rest.find(|c| !is_digit(c)).unwrap_or(rest.len());
        let number: f64 = rest[..end].parse().map_err(|_| invalid())?;
        rest = &rest[end..];
        let end = rest.find(is_digit).unwrap_or(rest.len());
        let unit = &rest[..end];
        if unit.is_empty() {
            return Err(format!("missing unit in duration {text:?}"));
        }
        let known = UNITS.iter().find(|(name, _)| *name == unit);
        let (_, scale) =
            known.ok_or_else(|| format!("unknown unit {unit:?} in duration {text:?}"))?;
        seconds += number * scale;
        rest = &rest[end..];
    }
    if seconds > LONGEST {
        return Err(invalid());
    }
    Ok((!text.starts_with('-')).then(|| Duration::from_secs_f64(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let check = |text: &str, expected: Result<Option<u64>, &str>| {
            let got = parse(text).map(|time| time.map(|time| time.as_millis() as u64));
            assert_eq!(got, expected.map_err(str::to_owned), "{text}");
        };
        check("1s", Ok(Some(1000)));
        check("1h1m1.5s", Ok(Some(3_661_500)));
        check("250ms", Ok(Some(250)));
        check("0", Ok(Some(0)));
        check("-5s", Ok(None));
        check("5", Err("missing unit in duration \"5\""));
        check("5x", Err("unknown unit \"x\" in duration \"5x\""));
        check("abc", Err("invalid duration \"abc\""));
        check("-", Err("invalid duration \"-\""));
        check("9999999999h", Err("invalid duration \"9999999999h\""));
    }
}
