//! Checks that kinds of several groups share.

use std::collections::HashSet;

use machinery::names;
use serde_json::Value;

use super::at::At;

/// Upstream declares these rules: their errors show no value.
pub(crate) fn immutable(at: &At<'_>, old: &At<'_>) {
    if at.value != old.value {
        at.invalid_as(Value::Null, "field is immutable");
    }
}

/// Conditions that a kind has checked. Upstream: `metav1validation.ValidateConditions`.
pub(crate) fn conditions(at: &At<'_>) {
    const REASON_FORM: &str = "a condition reason must start with alphabetic character, optionally followed by a string of alphanumeric characters or '_,:', and must end with an alphanumeric character or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName',  or 'ReasonA,ReasonB',  or 'ReasonA:ReasonB', regex used for validation is '[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?')";
    const REASON: usize = 1 << 10;
    const MESSAGE: usize = 32 << 10;
    let mut seen = HashSet::new();
    for one in at.items() {
        let kind = one.get("type");
        if !seen.insert(kind.str()) {
            kind.duplicate();
        }
        kind.name(names::qualified_name);
        one.get("status").one_of(&["False", "True", "Unknown"]);
        let generation = one.get("observedGeneration");
        if generation.int() < 0 {
            generation.invalid("must be greater than or equal to zero");
        }
        let time = one.get("lastTransitionTime");
        if !time.is_set() || time.str().starts_with("0001-01-01T00:00:00") {
            time.required("");
        }
        let reason = one.get("reason");
        if reason.need() && !is_condition_reason(reason.str()) {
            reason.invalid(REASON_FORM);
        }
        for (field, most) in [("reason", REASON), ("message", MESSAGE)] {
            if one.get(field).str().len() > most {
                one.get(field).too_long(most);
            }
        }
    }
}

fn is_condition_reason(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ',' | ':');
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && text.chars().all(inner)
}

/// `1.2.3-rc.1+build`
pub(crate) fn is_version(text: &str) -> bool {
    let (text, build) = text.split_once('+').map_or((text, None), |(text, b)| (text, Some(b)));
    let (core, pre) = text.split_once('-').map_or((text, None), |(core, pre)| (core, Some(pre)));
    let is_number = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let is_word = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    core.split('.').count() == 3
        && core.split('.').all(is_number)
        && pre.is_none_or(|pre| {
            pre.split('.').all(|part| is_word(part) && (!is_digits(part) || is_number(part)))
        })
        && build.is_none_or(|build| build.split('.').all(is_word))
}
