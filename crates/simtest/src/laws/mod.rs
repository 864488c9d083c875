//! Laws that hold at every write, each in one sentence.
//!
//! In: the state after a write, and the write. Out: what is wrong with it. A law excuses what the protocol cannot
//! prevent: a controller acts on a cache that is up to [`WINDOW`] old, and a writer whose answer was lost may
//! write again.

mod api;
mod budgets;
mod jobs;
mod placement;
mod sets;
pub mod watches;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::history::{Event, Lost, State};

/// How old a cache may be: a watch that is tried again after much trouble waits a minute.
pub const WINDOW: Duration = Duration::from_secs(120);

pub struct View<'a> {
    pub state: &'a State,
    pub now: Duration,
    pub lost: &'a [Lost],
    pub upsets: &'a [(Duration, String)],
}

pub trait Law: Send {
    /// The sentence.
    fn name(&self) -> &'static str;
    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String>;
}

pub fn all() -> Vec<Box<dyn Law>> {
    let mut all = api::laws();
    all.extend(sets::laws());
    all.extend(jobs::laws());
    all.extend(budgets::laws());
    all.extend(placement::laws());
    all
}

impl View<'_> {
    fn is_recent(&self, at: Duration) -> bool {
        at + WINDOW >= self.now
    }

    /// How many writes of late their writer does not know of.
    pub fn lost(&self, matches: impl Fn(&str) -> bool) -> u64 {
        let recent = self.lost.iter().rev().take_while(|lost| self.is_recent(lost.at));
        recent.filter(|lost| matches(&lost.request)).count() as u64
    }

    /// Whether a part of this kind was killed or cut off of late.
    pub fn is_upset(&self, kind: &str) -> bool {
        let mut recent = self.upsets.iter().rev().take_while(|(at, _)| self.is_recent(*at));
        recent.any(|(_, part)| part.starts_with(kind))
    }
}

/// The values that something had of late.
#[derive(Default)]
pub struct Recent(BTreeMap<String, Vec<(Duration, u64)>>);

impl Recent {
    pub fn set(&mut self, of: &str, at: Duration, value: u64) {
        let values = self.0.entry(of.to_owned()).or_default();
        if values.last().is_none_or(|(_, last)| *last != value) {
            values.push((at, value));
        }
    }

    fn lately(&self, of: &str, view: &View<'_>) -> impl Iterator<Item = u64> {
        let values = self.0.get(of).map(Vec::as_slice).unwrap_or_default();
        // A value counts until another one is older than the window.
        let first = values.iter().rposition(|(at, _)| !view.is_recent(*at)).unwrap_or(0);
        values[first..].iter().map(|(_, value)| *value)
    }

    pub fn most(&self, of: &str, view: &View<'_>) -> Option<u64> {
        self.lately(of, view).max()
    }

    pub fn least(&self, of: &str, view: &View<'_>) -> Option<u64> {
        self.lately(of, view).min()
    }

    pub fn changed(&self, of: &str, view: &View<'_>) -> bool {
        self.0.get(of).is_some_and(|all| all.last().is_some_and(|(at, _)| view.is_recent(*at)))
    }
}

/// The status of a condition.
pub fn condition(object: &Value, kind: &str) -> Option<String> {
    let all = object["status"]["conditions"].as_array()?;
    let found = all.iter().find(|one| one["type"] == kind)?;
    found["status"].as_str().map(str::to_owned)
}

pub fn is_true(object: &Value, kind: &str) -> bool {
    condition(object, kind).is_some_and(|status| status == "True")
}

pub fn uid(object: &Value) -> &str {
    text(object, "/metadata/uid")
}

pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub fn number(object: &Value, pointer: &str) -> u64 {
    object.pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
}

pub fn is_deleted(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

/// Kind and uid of the controller.
pub fn controller(object: &Value) -> Option<(&str, &str)> {
    let owners = object["metadata"]["ownerReferences"].as_array()?;
    let owner = owners.iter().find(|one| one["controller"] == true)?;
    Some((owner["kind"].as_str()?, owner["uid"].as_str()?))
}

pub fn is_owned_by(object: &Value, owner: &str) -> bool {
    controller(object).is_some_and(|(_, uid)| uid == owner)
}

pub fn is_finished(pod: &Value) -> bool {
    matches!(text(pod, "/status/phase"), "Succeeded" | "Failed")
}

/// Neither ended nor going.
pub fn is_active(pod: &Value) -> bool {
    !is_finished(pod) && !is_deleted(pod)
}

pub fn is_ready(pod: &Value) -> bool {
    is_active(pod) && is_true(pod, "Ready")
}

/// `matchLabels` only: the plans use nothing else.
pub fn selects(selector: &Value, object: &Value) -> bool {
    let wanted = selector.get("matchLabels").unwrap_or(selector);
    let Some(wanted) = wanted.as_object() else { return false };
    let labels = &object["metadata"]["labels"];
    wanted.iter().all(|(name, value)| labels.get(name) == Some(value))
}

/// A number, or a percentage of `of`, rounded up or down.
pub fn share(value: &Value, of: u64, rounds_up: bool) -> u64 {
    if let Some(number) = value.as_u64() {
        return number;
    }
    let percent = value.as_str().and_then(|text| text.strip_suffix('%')?.parse::<u64>().ok());
    let exact = percent.unwrap_or_default() * of;
    if rounds_up { exact.div_ceil(100) } else { exact / 100 }
}

/// A pod that begins to go: its object is removed, or gets a deletion timestamp.
pub fn goes(event: &Event) -> bool {
    let was_going = event.before.as_deref().is_none_or(is_deleted);
    event.key.resource == "pods" && !was_going && event.after.as_deref().is_none_or(is_deleted)
}

pub fn is_created(event: &Event, resource: &str) -> bool {
    event.key.resource == resource && event.before.is_none()
}

/// A law without memory.
pub struct Rule {
    name: &'static str,
    check: fn(&View<'_>, &Event) -> Result<(), String>,
}

impl Law for Rule {
    fn name(&self) -> &'static str {
        self.name
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        (self.check)(view, event)
    }
}

pub fn rule(
    name: &'static str,
    check: fn(&View<'_>, &Event) -> Result<(), String>,
) -> Box<dyn Law> {
    Box::new(Rule { name, check })
}
