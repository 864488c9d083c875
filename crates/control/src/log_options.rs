//! The options of a pod's log, as its query has them.
//!
//! In: the query. Out: nothing, 400 for an invalid number or time, or 422 for invalid combinations.
//! Upstream: `ValidatePodLogOptions`, before anything is looked up.

use apiserver::request::Key;
use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use release::features::{self, Feature};

const STREAMS: &[&str] = &["All", "Stderr", "Stdout"];
const POSITIVE: &str = "must be greater than 0";

pub(crate) fn check(key: &Key, pairs: &[(String, String)]) -> Result<(), StatusError> {
    let value = |name: &str| pairs.iter().find(|(one, _)| one == name).map(|(_, value)| &**value);
    let number = |name: &str| value(name).map(whole_number).transpose();
    let (tail, limit) = (number("tailLines")?, number("limitBytes")?);
    let (seconds, time) = (number("sinceSeconds")?, value("sinceTime").map(time).transpose()?);
    let mut errors = FieldErrors::default();
    if let Some(lines) = tail.filter(|lines| *lines < 0) {
        let detail = "must be greater than or equal to 0";
        errors.invalid(&Path::new("tailLines"), lines, detail);
    }
    if let Some(bytes) = limit.filter(|bytes| *bytes < 1) {
        errors.invalid(&Path::new("limitBytes"), bytes, POSITIVE);
    }
    match (seconds, time) {
        (Some(_), Some(())) => {
            nowhere(&mut errors, "at most one of `sinceTime` or `sinceSeconds` may be specified");
        }
        (Some(seconds), None) if seconds < 1 => {
            errors.invalid(&Path::new("sinceSeconds"), seconds, POSITIVE);
        }
        _ => {}
    }
    if let Some(stream) = value("stream") {
        check_stream(stream, tail.is_some(), &mut errors);
    }
    match errors.is_empty() {
        true => Ok(()),
        false => Err(StatusError::invalid("", "PodLogOptions", &key.name, errors)),
    }
}

/// One of the two outputs alone is a matter of a gate.
fn check_stream(stream: &str, has_tail: bool, errors: &mut FieldErrors) {
    let path = Path::new("stream");
    if !features::enabled(Feature::PodLogsQuerySplitStreams) {
        errors.forbidden(&path, "may not be specified");
        return;
    }
    if !STREAMS.contains(&stream) {
        errors.not_supported(&path, stream, STREAMS);
    }
    if stream != "All" && has_tail {
        nowhere(errors, "`tailLines` and specific `stream` are mutually exclusive for now");
    }
}

/// Upstream's path of no name, which it shows as `[]`.
fn nowhere(errors: &mut FieldErrors, detail: &str) {
    errors.forbidden(&Path::new(""), detail);
}

/// As Go parses it.
fn whole_number(text: &str) -> Result<i64, StatusError> {
    text.parse().map_err(|error: std::num::ParseIntError| {
        use std::num::IntErrorKind::{NegOverflow, PosOverflow};
        let why = match error.kind() {
            PosOverflow | NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        StatusError::bad_request(format!("strconv.ParseInt: parsing {text:?}: {why}"))
    })
}

fn time(text: &str) -> Result<(), StatusError> {
    let parsed = text.parse::<jiff::Timestamp>();
    parsed.map(|_| ()).map_err(|error| {
        let why = machinery::gotime::misfit(text, false);
        StatusError::bad_request(why.unwrap_or_else(|| error.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelets::parse_query;

    fn check(is_on: bool, query: &str, expected: &str) {
        let gates = features::Gates::DEFAULT.with(Feature::PodLogsQuerySplitStreams, is_on);
        let said =
            features::scoped(gates, || super::check(&Key::new("n", "p"), &parse_query(query)));
        let said = said.map_err(|error| error.message.clone());
        assert_eq!(said.err().unwrap_or_default(), expected, "{query}");
    }

    fn wrong(why: &str) -> String {
        format!("PodLogOptions \"p\" is invalid: {why}")
    }

    #[test]
    fn numbers_and_times_have_limits() {
        for fine in [
            "",
            "tailLines=0",
            "limitBytes=1&sinceSeconds=1",
            "sinceTime=2026-01-01T00:00:00Z",
            "follow=true&container=c",
        ] {
            check(false, fine, "");
        }
        let negative = "tailLines: Invalid value: -1: must be greater than or equal to 0";
        check(false, "tailLines=-1", &wrong(negative));
        let zero = "limitBytes: Invalid value: 0: must be greater than 0";
        check(false, "limitBytes=0", &wrong(zero));
        let zero = "sinceSeconds: Invalid value: 0: must be greater than 0";
        check(false, "sinceSeconds=0", &wrong(zero));
        let both = "[]: Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified";
        check(false, "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z", &wrong(both));
        let text = "strconv.ParseInt: parsing \"x\": invalid syntax";
        check(false, "tailLines=x", text);
        assert!(time("yesterday").is_err());
    }

    #[test]
    fn one_output_alone_has_a_gate() {
        check(false, "follow=true", "");
        check(false, "stream=All", &wrong("stream: Forbidden: may not be specified"));
        check(true, "stream=Stderr", "");
        check(
            true,
            "stream=stderr",
            &wrong(
                "stream: Unsupported value: \"stderr\": supported values: \"All\", \"Stderr\", \"Stdout\"",
            ),
        );
        check(
            true,
            "stream=Stdout&tailLines=3",
            &wrong(
                "[]: Forbidden: `tailLines` and specific `stream` are mutually exclusive for now",
            ),
        );
    }
}
