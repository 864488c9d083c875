//! Cells of Table answers, as upstream's printers write them.

use std::collections::BTreeMap;

use base::duration;
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
        Some(Time(time)) => duration::human(base::clock::now().as_second() - time.as_second()),
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
