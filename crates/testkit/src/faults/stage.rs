//! What a scene works with, and the judgement of what clients saw.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::runtime::Runtime;

use super::history::Outcome;
use super::link::Link;
use super::load::{Findings, Load, Plan, Way, Writer};
use super::observer::Observer;
use super::pods::{Exec, Pods, scratch};
use super::scenes::{IN_FLIGHT, Scene};
use super::trio::Trio;
use crate::wait;

/// Load before the fault, and after it.
const CALM: Duration = Duration::from_secs(4);
const WATCHERS_OF_A_LINK: usize = 10;

#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Writes a second.
    pub rate: u32,
    pub watches: usize,
    /// For a machine that has other work: what took too long is told, and is no failure.
    pub is_lenient: bool,
}

pub struct Stage<'a> {
    pub trio: &'a mut Trio,
    pub observer: Observer,
    notes: Vec<String>,
    breaches: Vec<String>,
    /// Moments after which clients may have waited.
    marks: Vec<Instant>,
}

impl Stage<'_> {
    pub fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    pub fn limit(&mut self, took: Duration, limit: Duration, what: &str) {
        if took > limit {
            self.breaches.push(format!("{what}: {took:.1?}, the limit is {limit:?}"));
        }
    }

    /// A fault happens now.
    pub fn mark(&mut self) {
        self.marks.push(wait::now());
    }

    /// Waits; fails if a server's process ends meanwhile.
    pub fn lasts(&mut self, span: Duration) -> Result<()> {
        wait::throughout(span, "all servers live", || self.trio.all_live())
    }

    /// The same while one server is ended.
    pub fn lasts_without(&mut self, at: usize, span: Duration) -> Result<()> {
        wait::throughout(span, "the other servers live", || self.trio.live_without(at))
    }

    pub fn settled(&self) -> Result<()> {
        self.trio.settled()
    }
}

/// The result of a scene: its row in the table, and what is wrong.
pub struct Verdict {
    pub row: String,
    pub wrong: Vec<String>,
    /// What took longer than its limit.
    pub late: Vec<String>,
    /// How long each writer at a balancer waited at most after each mark.
    pub waits: Vec<Duration>,
}

/// Connections of writers, watches and the observer.
fn plan(trio: &Trio, amount: Amount, tasks: &base::task::Tasks) -> Result<Plan> {
    let api = trio.api()?;
    let link = |places| Link::new(&api, places, tasks);
    let mut writers = vec![];
    for number in 0..IN_FLIGHT {
        writers.push((Way::Balanced, link(vec![trio.balanced(number % 2)?])));
    }
    for at in 0..3 {
        writers.push((Way::Direct(at), link(vec![trio.direct(at)?])));
    }
    let mut watchers = vec![];
    for number in 0..amount.watches.div_ceil(WATCHERS_OF_A_LINK) {
        let places = match number % 2 {
            0 => vec![trio.balanced(number / 2 % 2)?],
            _ => turned(trio, number / 2)?,
        };
        watchers.push(link(places));
    }
    let observer = link(turned(trio, 0)?);
    Ok(Plan { writers, watchers, watches: amount.watches, rate: amount.rate, observer })
}

/// All servers, from the one with this number.
fn turned(trio: &Trio, first: usize) -> Result<Vec<super::link::Place>> {
    (0..3).map(|step| trio.direct((first + step) % 3)).collect()
}

/// Plays one scene under load and judges it.
pub fn play(
    runtime: &Runtime,
    trio: &mut Trio,
    pods: &Pods,
    scene: &Scene,
    amount: Amount,
) -> Result<Verdict> {
    let links = base::task::Tasks::new("links");
    let api = trio.api()?;
    let each = |at| anyhow::Ok(Link::new(&api, vec![trio.direct(at)?], &links));
    let each = [each(0)?, each(1)?, each(2)?];
    let any = Link::new(&api, turned(trio, 1)?, &links);
    let planned = plan(trio, amount, &links)?;
    let files = scratch()?;
    let exec = Exec::start(trio, files.path())?;
    let (load, observer) = runtime.block_on(async {
        pods.create();
        let observer = Observer::start(any, each);
        anyhow::Ok((Load::start(planned).await?, observer))
    })?;
    let mut stage = Stage { trio, observer, notes: vec![], breaches: vec![], marks: vec![] };
    let played = act(&mut stage, scene);
    let Stage { trio, observer, notes, breaches, marks } = stage;
    if played.is_err() {
        mend(trio)?;
    }
    let exec = exec.end()?;
    let (findings, ran) = runtime.block_on(async {
        let findings = load.stop().await;
        observer.stop().await;
        let ran = pods.check().await;
        links.shutdown(CALM).await;
        (findings, ran)
    });
    let findings = findings?;
    let (mut wrong, made) = ran;
    wrong.extend(played.err().map(|error| format!("{error:#}")));
    wrong.extend(observer.lies(&findings.writers));
    Ok(judge(scene, &findings, wrong, Told { notes, late: breaches, marks, exec, pods: made }))
}

/// What the scene and its helpers told.
struct Told {
    notes: Vec<String>,
    late: Vec<String>,
    marks: Vec<Instant>,
    exec: String,
    pods: usize,
}

fn act(stage: &mut Stage, scene: &Scene) -> Result<()> {
    stage.lasts(CALM)?;
    stage.mark();
    (scene.play)(stage)?;
    stage.trio.heal()?;
    stage.settled()?;
    stage.lasts(CALM)
}

/// Brings the cluster back after a scene that failed.
fn mend(trio: &mut Trio) -> Result<()> {
    trio.heal()?;
    for at in 0..3 {
        if trio.has_ended(at)? {
            trio.start_again(at)?;
        }
    }
    trio.settled()
}

fn judge(scene: &Scene, findings: &Findings, mut wrong: Vec<String>, mut told: Told) -> Verdict {
    wrong.extend(findings.history.check());
    let balanced = || findings.writers.iter().filter(|writer| writer.way == Way::Balanced);
    let failed = |writers: &mut dyn Iterator<Item = &Writer>| -> (usize, usize) {
        let samples: Vec<_> = writers.flat_map(|writer| &writer.samples).collect();
        (samples.iter().filter(|sample| !sample.is_good).count(), samples.len())
    };
    let (failures, all) = failed(&mut balanced());
    let (direct, of_direct) =
        failed(&mut findings.writers.iter().filter(|writer| writer.way != Way::Balanced));
    let retries: usize = balanced().map(|writer| writer.retries).sum();
    let waits: Vec<Duration> = told
        .marks
        .iter()
        .enumerate()
        .flat_map(|(number, mark)| {
            let until = told.marks.get(number + 1).copied();
            balanced().map(move |writer| longest_wait(writer, *mark, until))
        })
        .collect();
    let pause = waits.iter().max().copied().unwrap_or_default();
    if pause > scene.pause {
        told.late.push(format!("a writer waited {pause:.1?}, the limit is {:?}", scene.pause));
    }
    if scene.failures.is_some_and(|limit| failures > limit) {
        wrong.push(format!("{failures} writes failed at balancers: {}", reasons(findings)));
    }
    let watches = findings.history.watches.values().map(Vec::len).sum::<usize>();
    let ends = findings.watches;
    let row = format!(
        "| {} | {failures} of {all} | {retries} | {direct} of {of_direct} | {pause:.1?} | {watches}, {}+{}+{} | {} | {} | {} |",
        scene.about,
        ends.with_bookmark,
        ends.without,
        ends.broken,
        told.pods,
        told.exec,
        told.notes.join("; ")
    );
    Verdict { row, wrong, late: told.late, waits }
}

/// The longest time between two acknowledged writes, among those that end after `from`. Pure.
fn longest_wait(writer: &Writer, from: Instant, until: Option<Instant>) -> Duration {
    let good: Vec<Instant> =
        writer.samples.iter().filter(|one| one.is_good).map(|one| one.ended).collect();
    let ends = |at: &Instant| *at >= from && until.is_none_or(|until| *at <= until);
    let pairs = good.windows(2).filter(|pair| ends(&pair[1]));
    pairs.map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

/// Why writes failed, each reason once.
fn reasons(findings: &Findings) -> String {
    let mut all: Vec<&str> = findings
        .history
        .attempts
        .iter()
        .filter_map(|attempt| match &attempt.outcome {
            Outcome::Unknown(why) | Outcome::Refused(why) => Some(why.as_str()),
            Outcome::Acknowledged(_) => None,
        })
        .collect();
    all.sort_unstable();
    all.dedup();
    all.truncate(5);
    all.join("; ")
}

/// The header of the table of verdicts.
pub const HEADER: &str = "| fault | failed at balancers | repeated | failed at a server | longest wait | watches; ends with a bookmark, without, broken | pods | exec | notes |\n|---|---|---|---|---|---|---|---|---|\n";

/// Refuses a binary that is not there.
pub fn check(binary: &Path) -> Result<()> {
    if !binary.is_file() {
        bail!("{} is no file", binary.display());
    }
    Ok(())
}
