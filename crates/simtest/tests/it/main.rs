//! Fixed seeds of the simulation: the same run each time, and no violated law.
//!
//! `SIMTEST_SEED` and `SIMTEST_ROUNDS` choose others. The program runs as a process of its own, because rounds are
//! forked off a process with one thread.

use std::process::Command;

fn simulate(arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_decapod-simtest"));
    let output = command.args(arguments).output().expect("the program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}\n{text}\n{errors}");
}

#[test]
fn a_deployment_runs_in_virtual_time() {
    simulate(&["--scenario", "calm", "--seed", "1", "--rounds", "2", "--twice"]);
}

#[test]
fn a_seed_gives_the_same_writes_twice() {
    simulate(&["--seed", "1", "--rounds", "2", "--twice", "--jobs", "2"]);
}

#[test]
fn no_law_is_violated() {
    let of = |name: &str, usual: &str| std::env::var(name).unwrap_or_else(|_| usual.to_owned());
    let (seed, rounds) = (of("SIMTEST_SEED", "1000"), of("SIMTEST_ROUNDS", "12"));
    simulate(&["--seed", &seed, "--rounds", &rounds, "--jobs", "2", "--quiet"]);
}
