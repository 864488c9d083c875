//! `kill -9` of the server at seeded moments, under load. Leaves everything as it was.
//!
//! Invariant: pods, their Service and DNS do not notice, the same containers are adopted, and no
//! acknowledged write is lost. The seed is printed; `DECAPOD_SEED` repeats a run, and `DECAPOD_KILLS`
//! sets the number of kills.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::load::{Hammer, Writers};
use testkit::wait;

use crate::processes::{self, Process};
use crate::story::{LONG, Story};

const KILLS: u64 = 50;
/// Latest moment of a kill after the server is ready.
const LATEST_MILLISECONDS: u64 = 300;

pub fn at_any_moment(story: &mut Story) -> Result<()> {
    let seed = number("DECAPOD_SEED").unwrap_or(20_260_101);
    let kills = number("DECAPOD_KILLS").unwrap_or(KILLS);
    println!("killing the server {kills} times, seed {seed}");
    let before = Snapshot::take(story)?;
    let address = format!("{}:80", story.value("service web", ".spec.clusterIP")?);
    let network = || story.server.host().network();
    let service = Hammer::get(network()?, &address, "/");
    let names = Hammer::resolve(network()?, "10.43.0.10:53", "web.default.svc.cluster.local");
    let writers = Writers::start(network()?, story.api()?, 2);
    let killed = kill_again_and_again(story, seed, kills);
    let (service, names, written) = (service.stop(), names.stop(), writers.stop());
    killed?;
    story.kubectl("wait --for=condition=Ready node/node1 --timeout=90s")?;
    ensure!(
        service.failures.is_empty(),
        "Service: {} of {} failed: {:?}",
        service.failures.len(),
        service.count,
        service.failures
    );
    ensure!(
        names.failures.is_empty(),
        "DNS: {} of {} failed: {:?}",
        names.failures.len(),
        names.count,
        names.failures
    );
    nothing_lost(story, &written)?;
    wait::until(LONG, "the same containers are adopted", || {
        before.compare(&Snapshot::take(story)?)
    })?;
    println!(
        "{} requests, {} look-ups, {} acknowledged writes",
        service.count,
        names.count,
        written.len()
    );
    // By name kubectl deletes only five objects a second.
    let all = "/api/v1/namespaces/default/configmaps?labelSelector=load%3Dyes";
    story.kubectl(&format!("delete --raw {all}")).map(drop)
}

fn kill_again_and_again(story: &mut Story, seed: u64, kills: u64) -> Result<()> {
    let mut state = seed | 1;
    for round in 0..kills {
        // xorshift: the seed determines the moment.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let moment = Duration::from_millis(state % LATEST_MILLISECONDS);
        wait::throughout(moment, "the server runs until killed", || {
            story.server.process_id().map(drop).context("it is not there")
        })?;
        story.server.kill()?;
        story.server.start().with_context(|| format!("after kill {round} (seed {seed})"))?;
    }
    Ok(())
}

fn nothing_lost(story: &Story, written: &[String]) -> Result<()> {
    let list = story.kubectl("get configmaps -l load=yes -o name")?;
    let found: BTreeSet<&str> =
        list.lines().filter_map(|line| line.strip_prefix("configmap/")).collect();
    let lost: Vec<&String> = written.iter().filter(|name| !found.contains(name.as_str())).collect();
    ensure!(
        lost.is_empty(),
        "{} of {} acknowledged writes are lost: {lost:?}",
        lost.len(),
        written.len()
    );
    ensure!(!written.is_empty(), "no write was acknowledged");
    Ok(())
}

/// Pods, the restart counts of their containers, and the first process of each.
#[derive(Debug, PartialEq)]
struct Snapshot {
    restarts: String,
    processes: BTreeSet<Process>,
}

impl Snapshot {
    fn take(story: &Story) -> Result<Self> {
        let path = "{range .items[*]}{.metadata.uid} {.status.containerStatuses[0].restartCount}{\"\\n\"}{end}";
        let restarts = story.server.kubectl(&[
            "get",
            "pods",
            "--sort-by=.metadata.uid",
            "-o",
            &format!("jsonpath={path}"),
        ])?;
        let mut all = BTreeSet::new();
        for line in restarts.lines() {
            let uid = line.split(' ').next().unwrap_or_default();
            // Short-lived processes (probes, `sleep` of the client) come and go.
            all.extend(
                processes::of_pod(uid)?.into_iter().filter(|process| process.name == "nginx"),
            );
        }
        Ok(Self { restarts, processes: all })
    }

    fn compare(&self, later: &Self) -> Result<()> {
        ensure!(self == later, "before: {self:?}\nafter: {later:?}");
        Ok(())
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}
