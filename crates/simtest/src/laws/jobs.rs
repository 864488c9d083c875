//! Laws of Jobs.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{
    Law, Recent, View, controller, is_active, is_created, is_owned_by, is_true, number, text, uid,
};
use crate::history::Event;

pub fn laws() -> Vec<Box<dyn Law>> {
    vec![Box::<Parallelism>::default(), Box::<Counts>::default(), Box::<Finished>::default()]
}

fn is_over(job: &Value) -> bool {
    is_true(job, "Complete") || is_true(job, "Failed")
}

#[derive(Default)]
struct Parallelism(Recent);

impl Law for Parallelism {
    fn name(&self) -> &'static str {
        "a Job runs no more pods than its parallelism"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let Some(now) = event.after.as_deref() else { return Ok(()) };
        if event.key.resource == "jobs" {
            let suspended = now["spec"]["suspend"] == true;
            let most = if suspended { 0 } else { number(now, "/spec/parallelism") };
            self.0.set(uid(now), view.now, most);
        }
        let owner = controller(now).filter(|(kind, _)| *kind == "Job");
        let Some((_, owner)) = owner.filter(|_| is_created(event, "pods")) else { return Ok(()) };
        let pods = view.state.within("pods", &event.key.namespace);
        let there =
            pods.filter(|(_, pod)| is_owned_by(pod, owner) && is_active(pod)).count() as u64;
        let lost = view.lost(|request| request.starts_with("POST") && request.ends_with("/pods"));
        let most = self.0.most(owner, view).unwrap_or_default() + lost;
        match there > most {
            true => Err(format!("{}: {there} active pods, {most} allowed", event.key)),
            false => Ok(()),
        }
    }
}

/// The pods of a Job that ended, by uid.
#[derive(Default)]
struct Ended {
    succeeded: BTreeSet<String>,
    other: BTreeSet<String>,
}

#[derive(Default)]
struct Counts(BTreeMap<String, Ended>);

impl Law for Counts {
    fn name(&self) -> &'static str {
        "a Job counts each pod once, and its counts never fall"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let _ = view;
        let shown = event.after.as_deref().or(event.before.as_deref());
        let Some(shown) = shown else { return Ok(()) };
        if event.key.resource == "pods" {
            let Some((_, owner)) = controller(shown).filter(|(kind, _)| *kind == "Job") else {
                return Ok(());
            };
            let ended = self.0.entry(owner.to_owned()).or_default();
            match text(shown, "/status/phase") {
                "Succeeded" => ended.succeeded.insert(uid(shown).to_owned()),
                // Failed, deleted, or lost with its node.
                _ => ended.other.insert(uid(shown).to_owned()),
            };
            return Ok(());
        }
        let (Some(was), "jobs") = (event.before.as_deref(), event.key.resource.as_str()) else {
            return Ok(());
        };
        let known = self.0.get(uid(shown));
        let succeeded = number(shown, "/status/succeeded");
        let seen = known.map_or(0, |ended| ended.succeeded.len() as u64);
        if succeeded > seen {
            return Err(format!("{}: {succeeded} succeeded, {seen} pods did", event.key));
        }
        let failed = number(shown, "/status/failed");
        let seen = known.map_or(0, |ended| ended.other.len() as u64);
        if failed > seen {
            return Err(format!("{}: {failed} failed, {seen} pods can have", event.key));
        }
        if number(was, "/status/succeeded") > succeeded {
            return Err(format!("{}: succeeded fell to {succeeded}", event.key));
        }
        let completions = number(shown, "/spec/completions");
        if is_true(shown, "Complete") && completions > succeeded {
            return Err(format!("{}: complete with {succeeded} of {completions}", event.key));
        }
        Ok(())
    }
}

/// Jobs that are over.
#[derive(Default)]
struct Finished(BTreeSet<String>);

impl Law for Finished {
    fn name(&self) -> &'static str {
        "a Job that is over stays so, and creates no pods"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let _ = view;
        let Some(now) = event.after.as_deref() else { return Ok(()) };
        if event.key.resource == "jobs" {
            if is_over(now) {
                self.0.insert(uid(now).to_owned());
            } else if self.0.contains(uid(now)) {
                return Err(format!("{} was over", event.key));
            }
        }
        let owner = controller(now).filter(|(kind, _)| *kind == "Job");
        match owner.filter(|_| is_created(event, "pods")) {
            Some((_, owner)) if self.0.contains(owner) => {
                Err(format!("{}: its Job is over", event.key))
            }
            _ => Ok(()),
        }
    }
}
