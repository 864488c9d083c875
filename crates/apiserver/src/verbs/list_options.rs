//! The options of list, watch and deletecollection, from the query.
//! Upstream: `k8s.io/apimachinery/pkg/apis/meta/internalversion` and its validation.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use machinery::selector::{Requirement, Selector, Test};
use machinery::status::Reason;
use release::features::{self, Feature};

use super::Call;
use super::options::finish;
use crate::query::{Query, parse_unsigned};
use crate::registry::ListOptions;
use crate::resource::Resource;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    List,
    Watch,
}

pub(crate) fn read(call: &Call, purpose: For) -> Result<ListOptions, StatusError> {
    let mut options = parse(&call.query)?;
    check(&options, purpose)?;
    check_fields(&call.row, &options.fields)?;
    check_version(&options, purpose)?;
    // A path that names one object (`/watch/…/pods/NAME`) selects it.
    if !call.info.name.is_empty() && options.fields.exact("metadata.name").is_none() {
        let test = Test::In(vec![call.info.name.clone()]);
        options.fields.requirements.push(Requirement { key: "metadata.name".into(), test });
    }
    // Any state is acceptable, so upstream answers from its cache, without pages.
    if purpose == For::List && options.resource_version.as_deref() == Some("0") {
        options.limit = 0;
    }
    Ok(options)
}

pub fn parse(query: &Query) -> Result<ListOptions, StatusError> {
    let text = |name: &str| query.first(name).filter(|text| !text.is_empty());
    let labels = Selector::parse_labels(text("labelSelector").unwrap_or_default())
        .map_err(|error| StatusError::bad_request(error.0))?;
    let fields = Selector::parse_fields(text("fieldSelector").unwrap_or_default())
        .map_err(|error| StatusError::bad_request(error.0))?;
    let timeout = number(query.first("timeoutSeconds"))?;
    Ok(ListOptions {
        labels,
        fields,
        resource_version: text("resourceVersion").map(str::to_owned),
        resource_version_match: text("resourceVersionMatch").map(str::to_owned),
        limit: number(query.first("limit"))?
            .and_then(|limit| usize::try_from(limit).ok())
            .unwrap_or_default(),
        continue_token: text("continue").map(str::to_owned),
        timeout: timeout.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs),
        allow_bookmarks: query.flag("allowWatchBookmarks"),
        send_initial_events: query.optional_flag("sendInitialEvents"),
    })
}

fn number(text: Option<&str>) -> Result<Option<i64>, StatusError> {
    let Some(text) = text else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let why = if is_number { "value out of range" } else { "invalid syntax" };
        StatusError::bad_request(format!("strconv.ParseInt: parsing {text:?}: {why}"))
    })
}

fn check(options: &ListOptions, purpose: For) -> Result<(), StatusError> {
    let mut errors = FieldErrors::default();
    match purpose {
        For::List => check_list(options, &mut errors),
        For::Watch => check_watch(options, &mut errors),
    }
    finish("ListOptions", errors)
}

fn check_list(options: &ListOptions, errors: &mut FieldErrors) {
    let path = Path::new("resourceVersionMatch");
    let has_continue = options.continue_token.is_some();
    let version_match = options.resource_version_match.as_deref();
    if let Some(text) = version_match {
        let version = options.resource_version.as_deref();
        if version.is_none() {
            errors.forbidden(
                &path,
                "resourceVersionMatch is forbidden unless resourceVersion is provided",
            );
        }
        if has_continue {
            errors.forbidden(&path, "resourceVersionMatch is forbidden when continue is provided");
        }
        if !matches!(text, "Exact" | "NotOlderThan") {
            errors.not_supported(&path, text, &["Exact", "NotOlderThan", ""]);
        }
        if text == "Exact" && version == Some("0") {
            errors.forbidden(
                &path,
                "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
            );
        }
    }
    if options.send_initial_events.is_some() {
        let path = Path::new("sendInitialEvents");
        errors.forbidden(&path, "sendInitialEvents is forbidden for list");
    }
}

fn check_watch(options: &ListOptions, errors: &mut FieldErrors) {
    let path = Path::new("resourceVersionMatch");
    let has_continue = options.continue_token.is_some();
    let version_match = options.resource_version_match.as_deref();
    if options.send_initial_events.is_some() && !features::enabled(Feature::WatchList) {
        errors.forbidden(
            &Path::new("sendInitialEvents"),
            "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled",
        );
    }
    if options.send_initial_events.is_some() && version_match != Some("NotOlderThan") {
        errors.forbidden(
            &path,
            "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
        );
    }
    if let Some(text) = version_match {
        if options.send_initial_events.is_none() {
            errors.forbidden(
                &path,
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            );
        }
        if text != "NotOlderThan" {
            errors.not_supported(&path, text, &["NotOlderThan"]);
        }
    }
    // A watch of any state is one with initial events, to upstream: it has a match.
    let of_any = matches!(options.resource_version.as_deref(), None | Some("0"))
        && options.send_initial_events.is_none()
        && features::enabled(Feature::WatchList);
    if has_continue && (version_match.is_some() || of_any) {
        errors.forbidden(&path, "resourceVersionMatch is forbidden when continue is provided");
    }
}

fn check_fields(row: &Resource, fields: &Selector) -> Result<(), StatusError> {
    for requirement in &fields.requirements {
        let name = requirement.key.as_str();
        if matches!(name, "metadata.name" | "metadata.namespace") || row.fields.contains(name) {
            continue;
        }
        return Err(StatusError::bad_request(row.fields.unknown(name)));
    }
    Ok(())
}

fn check_version(options: &ListOptions, purpose: For) -> Result<(), StatusError> {
    let Some(version) = options.resource_version.as_deref() else { return Ok(()) };
    let token = options.continue_token.as_deref().filter(|_| purpose == For::List);
    if let Some(token) = token {
        // The registry refuses an invalid token.
        let is_readable = URL_SAFE_NO_PAD
            .decode(token.trim_end_matches('='))
            .is_ok_and(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).is_ok());
        return match is_readable && version != "0" {
            true => Err(StatusError::bad_request(
                "specifying resource version is not allowed when using continue",
            )),
            false => Ok(()),
        };
    }
    let Err(why) = parse_unsigned(version) else { return Ok(()) };
    let why = format!("resourceVersion: Invalid value: {version:?}: {why}");
    Err(match purpose {
        For::List => StatusError::bad_request(format!("invalid resource version: {why}")),
        For::Watch => StatusError::new(Reason::Unknown, why),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(query: &str, purpose: For) -> Option<(u16, String)> {
        let outcome = parse(&Query::parse(query)).and_then(|options| {
            check(&options, purpose).and_then(|()| check_version(&options, purpose))
        });
        outcome.err().map(|error| (error.code, error.message.clone()))
    }

    #[test]
    fn options_are_refused_in_upstreams_words() {
        use For::{List, Watch};
        for (query, purpose, code, message) in [
            ("limit=", List, 400, r#"strconv.ParseInt: parsing "": invalid syntax"#),
            (
                "limit=99999999999999999999",
                List,
                400,
                r#"strconv.ParseInt: parsing "99999999999999999999": value out of range"#,
            ),
            (
                "continue=x",
                Watch,
                422,
                r#"ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden when continue is provided"#,
            ),
            ("limit=abc", List, 400, r#"strconv.ParseInt: parsing "abc": invalid syntax"#),
            (
                "labelSelector=a%3D%3D%3Db",
                List,
                400,
                "unable to parse requirement: found '=', expected: identifier",
            ),
            ("fieldSelector=abc", List, 400, "invalid selector: 'abc'; can't understand 'abc'"),
            (
                "resourceVersionMatch=Exact",
                List,
                422,
                r#"ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"#,
            ),
            (
                "resourceVersionMatch=X&resourceVersion=1",
                List,
                422,
                r#"ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Unsupported value: "X": supported values: "Exact", "NotOlderThan", """#,
            ),
            (
                "sendInitialEvents=true",
                List,
                422,
                r#"ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"#,
            ),
            (
                "resourceVersion=-1",
                List,
                400,
                r#"invalid resource version: resourceVersion: Invalid value: "-1": strconv.ParseUint: parsing "-1": invalid syntax"#,
            ),
            (
                "resourceVersion=abc",
                Watch,
                500,
                r#"resourceVersion: Invalid value: "abc": strconv.ParseUint: parsing "abc": invalid syntax"#,
            ),
        ] {
            assert_eq!(refusal(query, purpose), Some((code, message.to_owned())), "{query}");
        }
        assert_eq!(
            refusal("sendInitialEvents=true&resourceVersionMatch=NotOlderThan", Watch),
            None
        );
        assert_eq!(refusal("resourceVersion=0&limit=500", List), None);
    }
}
