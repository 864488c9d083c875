//! `cargo xtask test`: everything that decides whether a change may land.
//!
//! In: the work tree. Out: the first failure, or the summary of the end-to-end story as the last
//! lines. Cheap checks come first. Foreign programs are built beside our own build, because
//! that mostly waits for downloads at first.
//!
//! All cargo runs select the whole workspace, so that features unify the same way every time and
//! no dependency is built twice.

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::sh::{self, Outcome, step};
use crate::{conformance, foreign, fuzz, packages, supply, tidy, wire};

pub fn run() -> Outcome {
    timed("packages", packages)?;
    let foreign = start_foreign()?;
    let tested = timed("format", format)
        .and_then(|()| timed("tidy", tidy::run))
        .and_then(|()| timed("packages that the build takes", supply::run))
        .and_then(|()| timed("lints", lints))
        .and_then(|()| timed("tests", tests));
    let Some(build) = foreign else { return tested };
    // Waited for whatever the verdict: a finished build serves the next run.
    let built = timed("foreign programs", || finish(build));
    tested.and(built)?;
    timed("wire", || wire::run(&[]))?;
    timed("fuzz", || fuzz::run(&[]))?;
    timed("smoke", smoke)?;
    timed("end-to-end story", story)
}

/// A headline before, and the time that the step before took.
fn timed(name: &str, work: impl FnOnce() -> Outcome) -> Outcome {
    step(name);
    #[expect(clippy::disallowed_methods, reason = "tells a person how long a step took")]
    let started = Instant::now();
    work()?;
    // The story ends with its own summary: nothing is printed after that.
    if name != "end-to-end story" {
        println!("{name}: {} s", started.elapsed().as_secs());
    }
    Ok(())
}

fn packages() -> Outcome {
    packages::ensure(&[packages::BUILD, packages::TEST])?;
    // Test images are made from packages that are fetched, not installed.
    if sh::is_root() { packages::ensure_lists() } else { Ok(()) }
}

fn format() -> Outcome {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))
}

fn lints() -> Outcome {
    let arguments = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    sh::run(sh::cargo().args(arguments))
}

fn tests() -> Outcome {
    sh::run(sh::cargo().args(["test", "--workspace", "--locked"]))
}

/// The quick specs of upstream's suite, where an earlier `cargo xtask conformance` has built it: that
/// takes longer than everything here together.
fn smoke() -> Outcome {
    if !foreign::has("e2e.test") {
        println!("skipped: the suite is not in the cache (`cargo xtask conformance` builds it)");
        return Ok(());
    }
    conformance::run(&["--list".to_owned(), "smoke".to_owned()])
}

/// The story runs last and alone: it measures time-outs against a quiet machine.
fn story() -> Outcome {
    if !sh::is_root() {
        println!("skipped: needs root");
        return Ok(());
    }
    let mut command = sh::cargo();
    command.args(["test", "--workspace", "--locked", "--test", "e2e"]).env("DECAPOD_E2E", "1");
    sh::run(&mut command)
}

/// Starts the build in the background. `None`, with a line, when this machine cannot build it.
fn start_foreign() -> Outcome<Option<Child>> {
    if !foreign::has_go() && !foreign::has_kubectl() {
        println!("no Go toolchain: kubectl cannot be built, the end-to-end story is skipped");
        return Ok(None);
    }
    let itself = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(itself);
    command.arg("foreign").stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().map(Some).map_err(|error| error.to_string())
}

fn finish(mut build: Child) -> Outcome {
    let status = build.wait().map_err(|error| error.to_string())?;
    if status.success() {
        Ok(())
    } else {
        Err("a foreign program could not be built (see above)".to_owned())
    }
}
