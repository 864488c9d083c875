//! The faults, one function each. A scene harms the cluster, waits, and undoes the harm; what clients saw is
//! judged afterwards.
//!
//! Not made here, for want of a way without other machines: a disk that is slow but not silent (an etcd that is
//! frozen for 200 ms of each 250 ms stands for it).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};

use super::observer::LEASES;
use super::stage::Stage;
use super::trio::{DELAY, NAMES};
use crate::wait;

/// A fault, and what clients may notice.
pub struct Scene {
    pub name: &'static str,
    pub about: &'static str,
    pub play: fn(&mut Stage) -> Result<()>,
    /// The longest time that a writer at a balancer may wait for a write.
    pub pause: Duration,
    /// Writes at balancers that may fail: those in flight. `None`: the majority is away, and any may.
    pub failures: Option<usize>,
}

/// How long a fault lasts that ends by itself.
const LASTS: Duration = Duration::from_secs(15);
const SHORT: Duration = Duration::from_secs(5);
/// Upstream's lease duration and one retry period.
const TAKE_OVER: Duration = Duration::from_secs(17);
const HAND_OVER: Duration = Duration::from_secs(2);
const FROZEN: Duration = Duration::from_millis(200);
const THAWED: Duration = Duration::from_millis(50);

const fn scene(
    name: &'static str,
    about: &'static str,
    play: fn(&mut Stage) -> Result<()>,
    pause: u64,
    failures: Option<usize>,
) -> Scene {
    Scene { name, about, play, pause: Duration::from_secs(pause), failures }
}

/// In the order of their play. A write in flight at each of the balancers' writers may fail when its server dies.
pub const SCENES: &[Scene] = &[
    scene("rolling", "all three restarted, one after the other", rolling, 2, Some(0)),
    scene("leaders-stop", "the server with both Leases stopped", leaders_stop, 2, Some(0)),
    scene(
        "leaders-killed",
        "the server with both Leases killed",
        leaders_killed,
        5,
        Some(IN_FLIGHT),
    ),
    scene("etcd-killed", "etcd's leader killed", etcd_killed, 5, Some(IN_FLIGHT)),
    scene("etcd-frozen", "etcd's leader frozen for 15 s", etcd_frozen, 5, Some(IN_FLIGHT)),
    scene(
        "server-frozen",
        "a server and its etcd frozen for 15 s",
        server_frozen,
        5,
        Some(IN_FLIGHT),
    ),
    scene("one-cut", "the leader's machine cut off for 15 s", one_cut, 5, Some(IN_FLIGHT)),
    scene("two-cut", "two machines cut off for 12 s", two_cut, 25, None),
    scene("deaf", "etcd's leader hears no peer for 15 s, and speaks", deaf, 5, Some(IN_FLIGHT)),
    scene(
        "no-etcd",
        "a server reaches nodes, and no other member of etcd",
        no_etcd,
        10,
        Some(IN_FLIGHT),
    ),
    scene("no-nodes", "a server reaches etcd, and no node", no_nodes, 5, Some(IN_FLIGHT)),
    scene("stutter", "etcd's leader frozen for 200 of each 250 ms", stutter, 5, Some(IN_FLIGHT)),
    scene("full-disk", "the disk of one member full for 15 s", full_disk, 5, Some(IN_FLIGHT)),
    scene("reset-refused", "--cluster-reset while others run", reset_refused, 5, Some(IN_FLIGHT)),
    scene("power", "all three killed at once, then started", power, 60, None),
    scene("failover", "the server in use killed, six times", failover, 5, None),
];

/// Writers at balancers.
pub const IN_FLIGHT: usize = 14;

fn rolling(stage: &mut Stage) -> Result<()> {
    for (at, name) in NAMES.iter().enumerate() {
        let begun = wait::now();
        let stopped = stage.trio.stop(at)?;
        let started = stage.trio.start_again(at)?;
        stage.note(format!("{name}: stopped in {stopped:.1?}, ready after {started:.1?}"));
        let not_ready = stage.observer.not_ready_after(at, begun);
        ensure!(not_ready.is_some(), "{name} never said that it was not ready");
        if at == 2 {
            ensure!(stopped >= DELAY, "it stopped after {stopped:?}, before the delay was over");
            stage.note(format!("its /readyz failed after {:.1?}", not_ready.context("seen")?));
        }
        stage.settled()?;
    }
    Ok(())
}

/// The server that holds both Leases; if they are apart, the scheduler's.
fn holder(stage: &Stage) -> Result<usize> {
    wait::until(wait::LONG, "the Leases are held", || {
        let name = stage.observer.holder(0).context("not read yet")?;
        NAMES.iter().position(|one| *one == name).with_context(|| format!("{name:?} holds it"))
    })
}

fn taken_over(
    stage: &mut Stage,
    at: usize,
    limit: Duration,
    end: fn(&mut Stage, usize) -> Result<()>,
) -> Result<()> {
    let begun = wait::now();
    let held: Vec<usize> = (0..LEASES.len())
        .filter(|lease| stage.observer.holder(*lease).as_deref() == Some(NAMES[at]))
        .collect();
    end(stage, at)?;
    for lease in held {
        let took = wait::until(wait::LONG, "another one holds the Lease", || {
            stage.observer.taken_over(lease, begun).context("none does")
        })?;
        stage.note(format!("{} taken over after {took:.1?}", LEASES[lease]));
        stage.limit(took, limit, LEASES[lease]);
    }
    stage.trio.start_again(at)?;
    stage.settled()
}

fn leaders_stop(stage: &mut Stage) -> Result<()> {
    let at = holder(stage)?;
    // The Leases are handed over before the delay of the third server, not after it.
    taken_over(stage, at, HAND_OVER, |stage, at| stage.trio.stop(at).map(drop))
}

fn leaders_killed(stage: &mut Stage) -> Result<()> {
    let at = holder(stage)?;
    taken_over(stage, at, TAKE_OVER, |stage, at| stage.trio.kill(at))
}

fn etcd_killed(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    stage.trio.signal_etcd(at, Signal::SIGKILL)?;
    stage.lasts(SHORT)?;
    stage.settled()
}

fn etcd_frozen(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    stage.trio.signal_etcd(at, Signal::SIGSTOP)?;
    stage.lasts(LASTS)
}

fn server_frozen(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    stage.trio.signal_both(at, Signal::SIGSTOP)?;
    stage.lasts(LASTS)
}

fn one_cut(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    stage.trio.cut(at, true)?;
    stage.lasts(LASTS)
}

fn two_cut(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    let other = (at + 1) % 3;
    stage.trio.cut(at, true)?;
    stage.trio.cut(other, true)?;
    let begun = wait::now();
    stage.lasts(Duration::from_secs(12))?;
    let left = 3 - at - other;
    let not_ready = stage.observer.not_ready_after(left, begun);
    ensure!(not_ready.is_some(), "{} was ready without a majority", NAMES[left]);
    stage.note(format!("the third was not ready after {:.1?}", not_ready.context("seen")?));
    Ok(())
}

fn deaf(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    stage.trio.deafen(at)?;
    stage.lasts(LASTS)
}

fn no_etcd(stage: &mut Stage) -> Result<()> {
    let at = stage.trio.leader()?;
    let begun = wait::now();
    stage.trio.cut_from_etcd(at)?;
    stage.lasts(LASTS)?;
    let not_ready = stage.observer.not_ready_after(at, begun);
    ensure!(not_ready.is_some(), "{} was ready without etcd", NAMES[at]);
    stage.note(format!("it was not ready after {:.1?}", not_ready.context("seen")?));
    Ok(())
}

fn no_nodes(stage: &mut Stage) -> Result<()> {
    stage.trio.cut_from_nodes(0)?;
    stage.lasts(LASTS)
}

fn stutter(stage: &mut Stage) -> Result<()> {
    let etcd = stage.trio.servers[stage.trio.leader()?].etcd()?;
    let begun = wait::now();
    while begun.elapsed() < LASTS {
        kill(etcd, Signal::SIGSTOP)?;
        stage.lasts(FROZEN)?;
        kill(etcd, Signal::SIGCONT)?;
        stage.lasts(THAWED)?;
    }
    Ok(())
}

fn full_disk(stage: &mut Stage) -> Result<()> {
    stage.trio.fill_disk()?;
    stage.lasts(LASTS)?;
    // A member whose WAL has room left works on, so the scene kills it: it cannot start on a full disk.
    stage.trio.signal_etcd(2, Signal::SIGKILL)?;
    stage.lasts(LASTS)?;
    stage.note("its etcd was killed meanwhile, and could not start".into());
    stage.trio.heal()?;
    stage.settled()
}

fn reset_refused(stage: &mut Stage) -> Result<()> {
    stage.trio.stop(1)?;
    let told = stage.trio.offline(1, &["--cluster-reset"])?;
    ensure!(told.contains("other servers of this cluster still run"), "it said: {told}");
    let directory = super::pods::scratch()?;
    let file = directory.path().join("snapshot.db").display().to_string();
    stage.trio.servers[0].server.decapod(&["snapshot", "save", &file])?;
    let told = stage.trio.offline(1, &["--cluster-reset", "--from-snapshot", &file])?;
    ensure!(told.contains("other servers of this cluster still run"), "it said: {told}");
    stage.trio.start_again(1)?;
    stage.settled()
}

fn power(stage: &mut Stage) -> Result<()> {
    for at in 0..3 {
        stage.trio.kill(at)?;
    }
    let begun = wait::now();
    // The last one first, and none waits for another.
    for at in [2, 0, 1] {
        stage.trio.servers[at].server.launch()?;
    }
    stage.settled()?;
    stage.note(format!("whole again after {:.1?}", begun.elapsed()));
    Ok(())
}

fn failover(stage: &mut Stage) -> Result<()> {
    for round in 0..6 {
        let at = round % 3;
        stage.mark();
        stage.trio.kill(at)?;
        stage.lasts_without(at, SHORT)?;
        stage.trio.start_again(at)?;
        stage.settled()?;
    }
    Ok(())
}
