//! Laws of the API itself.

use serde_json::Value;

use super::{Law, View, is_deleted, is_finished, rule, text};
use crate::history::Event;

pub fn laws() -> Vec<Box<dyn Law>> {
    vec![
        Box::new(Growing(1)),
        rule("a replacement happens at the resourceVersion that it names", at_its_version),
        rule("uid and creationTimestamp of an object never change", identity),
        rule("an object that is being deleted stays so until it is gone", deletion),
        rule("a generation never falls", generation),
        rule("a pod stays on its node, and its end is final", pods),
        rule("an object is created in a namespace that exists", in_namespace),
    ]
}

struct Growing(u64);

impl Law for Growing {
    fn name(&self) -> &'static str {
        "revisions grow"
    }

    fn see(&mut self, _: &View<'_>, event: &Event) -> Result<(), String> {
        let before = std::mem::replace(&mut self.0, event.revision);
        match event.revision >= before && event.was < event.revision {
            true => Ok(()),
            false => Err(format!("{} at {} after {before}", event.key, event.revision)),
        }
    }
}

/// Both states of a change.
fn both(event: &Event) -> Option<(&Value, &Value)> {
    Some((event.before.as_deref()?, event.after.as_deref()?)).filter(|(_, now)| now.is_object())
}

fn at_its_version(_: &View<'_>, event: &Event) -> Result<(), String> {
    let Some(wanted) = event.actor.version.filter(|_| both(event).is_some()) else { return Ok(()) };
    // A request may write other objects besides its own.
    let is_own = event.actor.request.contains(&format!("/{}", event.key.name));
    match is_own && wanted != event.was {
        true => Err(format!("{} was at {}, the request named {wanted}", event.key, event.was)),
        false => Ok(()),
    }
}

fn identity(_: &View<'_>, event: &Event) -> Result<(), String> {
    let Some((was, now)) = both(event) else { return Ok(()) };
    for field in ["/metadata/uid", "/metadata/creationTimestamp"] {
        if text(was, field) != text(now, field) {
            return Err(format!(
                "{} {field}: {} → {}",
                event.key,
                text(was, field),
                text(now, field)
            ));
        }
    }
    Ok(())
}

fn deletion(_: &View<'_>, event: &Event) -> Result<(), String> {
    match both(event) {
        Some((was, now)) if is_deleted(was) && !is_deleted(now) => {
            Err(format!("{} lost its deletionTimestamp", event.key))
        }
        _ => Ok(()),
    }
}

fn generation(_: &View<'_>, event: &Event) -> Result<(), String> {
    let Some((was, now)) = both(event) else { return Ok(()) };
    let of = |object: &Value| object["metadata"]["generation"].as_u64().unwrap_or_default();
    match of(now) < of(was) {
        true => Err(format!("{}: {} → {}", event.key, of(was), of(now))),
        false => Ok(()),
    }
}

fn pods(_: &View<'_>, event: &Event) -> Result<(), String> {
    let Some((was, now)) = both(event).filter(|_| event.key.resource == "pods") else {
        return Ok(());
    };
    let node = text(was, "/spec/nodeName");
    if !node.is_empty() && node != text(now, "/spec/nodeName") {
        return Err(format!("{} left {node}", event.key));
    }
    let phase = text(was, "/status/phase");
    if is_finished(was) && phase != text(now, "/status/phase") {
        return Err(format!("{} was {phase}", event.key));
    }
    Ok(())
}

fn in_namespace(view: &View<'_>, event: &Event) -> Result<(), String> {
    let (key, is_new) = (&event.key, event.before.is_none());
    // Before the first namespaces there are the first objects of all.
    let is_boot = event.actor.part.is_empty();
    match is_new && !is_boot && !key.namespace.is_empty() {
        true if view.state.get("namespaces", "", &key.namespace).is_none() => {
            Err(format!("{key}: there is no such namespace"))
        }
        _ => Ok(()),
    }
}
