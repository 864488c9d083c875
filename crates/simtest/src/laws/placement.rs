//! Laws of nodes and addresses.

use serde_json::Value;

use super::{Law, View, is_finished, rule, text};
use crate::history::Event;

pub fn laws() -> Vec<Box<dyn Law>> {
    vec![
        rule("no pod is bound to a node without room for it", room),
        rule("no two Services have one address or one node port", services),
        rule("no two nodes have one range of addresses", ranges),
    ]
}

/// Thousandths of a processor.
fn cpu(text: &str) -> u64 {
    match text.strip_suffix('m') {
        Some(number) => number.parse().unwrap_or_default(),
        None => text.parse::<u64>().unwrap_or_default() * 1000,
    }
}

fn requested(pod: &Value) -> u64 {
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    containers.map(|one| cpu(text(one, "/resources/requests/cpu"))).sum()
}

fn room(view: &View<'_>, event: &Event) -> Result<(), String> {
    let (Some(was), Some(now)) = (event.before.as_deref(), event.after.as_deref()) else {
        return Ok(());
    };
    let node = text(now, "/spec/nodeName");
    if event.key.resource != "pods" || node.is_empty() || !text(was, "/spec/nodeName").is_empty() {
        return Ok(());
    }
    let Some(object) = view.state.get("minions", "", node) else {
        return Err(format!("{} was bound to {node}, which does not exist", event.key));
    };
    // Another scheduler's binding may be on its way; one whose answer was lost is not counted by its own.
    if view.is_upset("scheduler") || view.lost(|request| request.ends_with("/binding")) > 0 {
        return Ok(());
    }
    let here = |pod: &Value| text(pod, "/spec/nodeName") == node && !is_finished(pod);
    let pods = || view.state.all("pods").filter(|(_, pod)| here(pod));
    let (used, has) = (
        pods().map(|(_, pod)| requested(pod)).sum::<u64>(),
        cpu(text(object, "/status/allocatable/cpu")),
    );
    if used > has {
        return Err(format!("{} was bound to {node}: {used}m of {has}m are requested", event.key));
    }
    let most = text(object, "/status/allocatable/pods").parse().unwrap_or(usize::MAX);
    match pods().count() {
        count if count > most => Err(format!("{} is pod {count} of {most} on {node}", event.key)),
        _ => Ok(()),
    }
}

fn services(view: &View<'_>, event: &Event) -> Result<(), String> {
    let Some(now) = event.after.as_deref().filter(|_| event.key.resource == "services/specs")
    else {
        return Ok(());
    };
    let address = text(now, "/spec/clusterIP");
    if address.is_empty() || address == "None" {
        return Ok(());
    }
    let mut others = view.state.all("services/specs").filter(|(key, _)| **key != event.key);
    match others.find(|(_, other)| text(other, "/spec/clusterIP") == address) {
        Some((other, _)) => Err(format!("{} and {other} have {address}", event.key)),
        None => Ok(()),
    }
}

fn ranges(view: &View<'_>, event: &Event) -> Result<(), String> {
    let Some(now) = event.after.as_deref().filter(|_| event.key.resource == "minions") else {
        return Ok(());
    };
    let range = text(now, "/spec/podCIDR");
    if range.is_empty() {
        return Ok(());
    }
    let mut others = view.state.all("minions").filter(|(key, _)| **key != event.key);
    match others.find(|(_, other)| text(other, "/spec/podCIDR") == range) {
        Some((other, _)) => Err(format!("{} and {other} have {range}", event.key)),
        None => Ok(()),
    }
}
