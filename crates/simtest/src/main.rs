//! Rounds of the simulation from the command line: see [`decapod_simtest`].
//!
//! In: `--seed N --rounds N --scenario NAME`. Out: a line for each round; of a failed one the violated law, the
//! writes before it, and the command that repeats it.

use std::collections::BTreeMap;
use std::process::ExitCode;

use decapod_simtest::{Plan, Report, SCENARIOS, prepare, rounds};

const USAGE: &str = "\
usage: decapod-simtest [--seed N] [--rounds N] [--scenario NAME] [--jobs N]
                       [--twice] [--shrink] [--trace N] [--stop] [--quiet]

  --seed N         the first seed [default: 1]
  --rounds N       how many seeds [default: 1]
  --scenario NAME  what users do; each seed chooses one without it
  --jobs N         rounds at one time [default: 1]
  --twice          run each seed twice, and compare the hashes of all writes
  --shrink         look for a smaller plan that fails the same way
  --trace N        print the last N lines of the trace, also of rounds that succeed
  --stop           start no more rounds after the first failure
  --quiet          print failures and the sum only";

#[derive(Default)]
struct Flags {
    seed: u64,
    rounds: u64,
    scenario: Option<String>,
    jobs: usize,
    twice: bool,
    shrink: bool,
    trace: Option<usize>,
    stop: bool,
    quiet: bool,
}

impl Flags {
    fn parse(mut words: impl Iterator<Item = String>) -> Option<Self> {
        let mut flags = Self { seed: 1, rounds: 1, jobs: 1, ..Self::default() };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--seed" => flags.seed = words.next()?.parse().ok()?,
                "--rounds" => flags.rounds = words.next()?.parse().ok()?,
                "--jobs" => flags.jobs = words.next()?.parse().ok()?,
                "--trace" => flags.trace = Some(words.next()?.parse().ok()?),
                "--scenario" => {
                    let name = words.next()?;
                    flags.scenario = Some(name).filter(|name| SCENARIOS.contains(&&**name));
                    flags.scenario.as_ref()?;
                }
                "--twice" => flags.twice = true,
                "--shrink" => flags.shrink = true,
                "--stop" => flags.stop = true,
                "--quiet" => flags.quiet = true,
                _ => return None,
            }
        }
        Some(flags)
    }
}

#[derive(Default)]
struct Sum {
    rounds: u64,
    failures: Vec<(Plan, Report)>,
    writes: u64,
    requests: u64,
    virtual_seconds: u64,
    injected: BTreeMap<String, u64>,
    /// Of each seed's first run.
    hashes: BTreeMap<u64, String>,
    unequal: Vec<u64>,
}

impl Sum {
    fn add(&mut self, plan: &Plan, report: Report, is_quiet: bool) {
        self.rounds += 1;
        self.writes += report.writes;
        self.requests += report.requests;
        self.virtual_seconds += report.virtual_seconds;
        for (name, count) in &report.injected {
            *self.injected.entry(name.clone()).or_default() += count;
        }
        let known = self.hashes.entry(report.seed).or_insert_with(|| report.hash.clone());
        if *known != report.hash {
            self.unequal.push(report.seed);
        }
        let Report { seed, scenario, hash, writes, virtual_seconds, .. } = &report;
        if let Some(failure) = &report.failure {
            println!(
                "seed {seed} {scenario}: VIOLATED {}\n{}\n{}",
                failure.law, failure.trace, failure.text
            );
            println!("faults: {:?}", plan.faults);
            println!("repeat: cargo xtask simulate --seed {seed} --scenario {scenario}\n");
            self.failures.push((plan.clone(), report));
        } else if !is_quiet {
            println!("seed {seed} {scenario}: {hash}, {writes} writes in {virtual_seconds} s");
        }
    }

    fn print(&self) {
        let hours = self.virtual_seconds as f64 / 3600.0;
        println!(
            "{} rounds, {} failures; {hours:.1} virtual hours, {} requests, {} writes",
            self.rounds,
            self.failures.len(),
            self.requests,
            self.writes
        );
        let faults: Vec<String> =
            self.injected.iter().map(|(name, count)| format!("{name} {count}")).collect();
        println!("faults: {}", faults.join(", "));
        if !self.failures.is_empty() {
            let failed = |(plan, report): &(Plan, Report)| {
                let law = report.failure.as_ref().map(|failure| failure.law.clone());
                format!("  {} {}: {}", plan.seed, plan.scenario, law.unwrap_or_default())
            };
            println!("{}", self.failures.iter().map(failed).collect::<Vec<_>>().join("\n"));
        }
        if !self.unequal.is_empty() {
            println!("NOT DETERMINISTIC: seeds {:?}", self.unequal);
        }
    }
}

fn main() -> ExitCode {
    let Some(flags) = Flags::parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}\nscenarios: {}", SCENARIOS.join(", "));
        return ExitCode::from(2);
    };
    match run(&flags) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> anyhow::Result<bool> {
    prepare()?;
    let seeds = flags.seed..flags.seed + flags.rounds;
    let times = if flags.twice { 2 } else { 1 };
    let scenario = flags.scenario.as_deref();
    let plans = seeds.flat_map(|seed| std::iter::repeat_n(seed, times));
    let plans = plans.map(|seed| Plan::new(seed, scenario));
    let mut sum = Sum::default();
    rounds::run(plans, flags.jobs, flags.trace, |plan, report| {
        sum.add(plan, report, flags.quiet);
        !flags.stop || sum.failures.is_empty()
    })?;
    sum.print();
    if let (true, Some((plan, report))) = (flags.shrink, sum.failures.first()) {
        let law = report.failure.as_ref().map(|failure| failure.law.clone()).unwrap_or_default();
        let small = rounds::shrink(plan, &law)?;
        println!("smallest plan found: faults {:?}", small.faults);
        small.steps.iter().for_each(|step| println!("  {:?} {:?}", step.at, step.act));
        let lines = flags.trace.unwrap_or(120);
        rounds::run([small], 1, Some(lines), |_, report| {
            if let Some(failure) = report.failure {
                println!("{}\n{}\n{}", failure.trace, failure.law, failure.text);
            }
            true
        })?;
    }
    Ok(sum.failures.is_empty() && sum.unequal.is_empty())
}
