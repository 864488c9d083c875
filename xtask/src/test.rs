//! `cargo xtask test`: every check that a change must pass.
//!
//! In: the work tree. Out: the first failure, or the summary of the end-to-end story as the last
//! lines. Cheap checks come first. Upstream's programs are built in parallel with ours, because that
//! build first waits for downloads.
//!
//! All cargo runs select the whole workspace, so that features unify the same way every time and cargo
//! builds no dependency twice.

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::sh::{self, Outcome, step};
use crate::{conformance, foreign, fuzz, packages, supply, tidy, twin, wire};

pub fn run() -> Outcome {
    timed("packages", packages)?;
    let foreign = start_foreign()?;
    let tested = timed("format", format)
        .and_then(|()| timed("tidy", tidy::run))
        .and_then(|()| timed("packages that the build takes", supply::run))
        .and_then(|()| timed("lints", lints))
        .and_then(|()| timed("tests", tests));
    let Some(build) = foreign else { return tested };
    // Waits even if the tests failed: the next run uses the finished build.
    let built = timed("foreign programs", || finish(build));
    tested.and(built)?;
    timed("wire", || wire::run(&[]))?;
    timed("fuzz", || fuzz::run(&[]))?;
    timed("twin", twin)?;
    timed("smoke", smoke)?;
    timed("end-to-end story", story)
}

/// Prints a headline before a step, and its duration after it.
fn timed(name: &str, work: impl FnOnce() -> Outcome) -> Outcome {
    step(name);
    #[expect(clippy::disallowed_methods, reason = "prints how long a step took")]
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
    // Test images are made from packages that are downloaded, not installed.
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

/// A minute of comparisons with upstream's API server, of a fixed series. It reports: the classes of differences
/// are not all explained yet.
fn twin() -> Outcome {
    twin::run(&["--seed", "1", "--report", "--no-shrink"].map(str::to_owned))
}

/// The quick specs of upstream's suite, if an earlier `cargo xtask conformance` has built it: the build
/// takes longer than all other steps together.
fn smoke() -> Outcome {
    if !foreign::has("e2e.test") {
        println!("skipped: the suite is not in the cache (`cargo xtask conformance` builds it)");
        return Ok(());
    }
    conformance::run(&["--list".to_owned(), "smoke".to_owned()])
}

/// The story runs last and alone: its time-outs need a machine without other load.
fn story() -> Outcome {
    if !sh::is_root() {
        println!("skipped: needs root");
        return Ok(());
    }
    let mut command = sh::cargo();
    command.args(["test", "--workspace", "--locked", "--test", "e2e"]).env("DECAPOD_E2E", "1");
    sh::run(&mut command)
}

/// Starts the build in the background. Prints a line and returns `None` if this machine cannot build it.
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
        Err("one of upstream's programs could not be built (see above)".to_owned())
    }
}
