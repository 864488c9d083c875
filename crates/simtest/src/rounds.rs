//! Many rounds, each in a process of its own.
//!
//! In: plans. Out: their reports, in order. A round is a child that is forked off after [`crate::prepare`]: what
//! a process counts over its lifetime (tokio's runtimes, metrics, lazy statics) is the same for each, so that a
//! seed gives the same run alone and among others. A child that dies or hangs fails its own round only.
//!
//! Invariant: the process that forks has one thread.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};

use anyhow::Context;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe};

use crate::plan::Plan;
use crate::world::{self, Failure, Report};

/// Attempts of [`shrink`].
const ATTEMPTS: usize = 120;

struct Child {
    pid: Pid,
    output: File,
    plan: Plan,
}

/// Runs each plan, `jobs` at a time, until `tell` says that it was enough.
///
/// # Errors
/// If no process can be made.
pub fn run(
    plans: impl IntoIterator<Item = Plan>,
    jobs: usize,
    trace_lines: Option<usize>,
    mut tell: impl FnMut(&Plan, Report) -> bool,
) -> anyhow::Result<()> {
    let mut running = VecDeque::new();
    let mut plans = plans.into_iter();
    let mut goes_on = true;
    loop {
        while goes_on && running.len() < jobs.max(1) {
            let Some(plan) = plans.next() else { break };
            running.push_back(start(plan, trace_lines)?);
        }
        let Some(child) = running.pop_front() else { return Ok(()) };
        let (plan, report) = finish(child)?;
        goes_on &= tell(&plan, report);
    }
}

fn start(plan: Plan, trace_lines: Option<usize>) -> anyhow::Result<Child> {
    let (read, write) = pipe()?;
    std::io::stdout().flush()?;
    // SAFETY: this process has one thread, so that no lock is held by another.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            drop(write);
            Ok(Child { pid: child, output: read.into(), plan })
        }
        ForkResult::Child => {
            let report = world::run(&plan, trace_lines).unwrap_or_else(|error| {
                broken(&plan, "a round comes to its end", error.to_string())
            });
            let text = serde_json::to_vec(&report).unwrap_or_default();
            let written =
                File::from(write).write_all(&text).and_then(|()| std::io::stdout().flush());
            // SAFETY: it ends the process at once; nothing of the parent's is flushed twice.
            unsafe { libc::_exit(i32::from(written.is_err())) }
        }
    }
}

fn finish(mut child: Child) -> anyhow::Result<(Plan, Report)> {
    let mut text = Vec::new();
    child.output.read_to_end(&mut text)?;
    let status = waitpid(child.pid, None).context("the round's process is ours")?;
    let plan = child.plan;
    let report =
        serde_json::from_slice(&text).ok().filter(|_| matches!(status, WaitStatus::Exited(_, 0)));
    let report = report.unwrap_or_else(|| {
        broken(&plan, "a round does not kill its process", format!("{status:?}"))
    });
    Ok((plan, report))
}

fn broken(plan: &Plan, law: &str, text: String) -> Report {
    let failure = Failure { law: law.to_owned(), text, trace: String::new() };
    Report {
        seed: plan.seed,
        scenario: plan.scenario.clone(),
        failure: Some(failure),
        ..Report::default()
    }
}

/// A smaller plan that violates the same law: fewer faults, then fewer steps.
///
/// # Errors
/// If no process can be made.
pub fn shrink(plan: &Plan, law: &str) -> anyhow::Result<Plan> {
    let mut best = plan.clone();
    let mut attempts = 0;
    let mut fails = |plan: &Plan| -> anyhow::Result<bool> {
        attempts += 1;
        let (_, report) = finish(start(plan.clone(), None)?)?;
        Ok(attempts < ATTEMPTS && report.failure.is_some_and(|failure| failure.law == law))
    };
    for fault in plan.faults.clone() {
        let mut smaller = best.clone();
        smaller.faults.remove(&fault);
        if fails(&smaller)? {
            best = smaller;
        }
    }
    let mut size = best.steps.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        while at < best.steps.len() {
            let mut smaller = best.clone();
            smaller.steps.drain(at..(at + size).min(smaller.steps.len()));
            if fails(&smaller)? {
                best = smaller;
            } else {
                at += size;
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
    Ok(best)
}
