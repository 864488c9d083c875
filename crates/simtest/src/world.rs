//! One round: the plan is carried out, faults end, everything comes to rest.
//!
//! ```text
//!  boot ─► steps, faults on ─► faults off, parts up, nodes well ─► settles within LIMIT ─► REST without a write
//!                 │ laws at each write                                  │ model                  │
//!                 └─────────────────────── the first violation ends the round ───────────────────┘
//! ```
//!
//! In: a [`Plan`]. Out: a [`Report`]. Invariant: the report depends on the plan alone.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use base::task::Tasks;
use serde::{Deserialize, Serialize};
use tokio::runtime::Builder;
use tokio::time::Instant;

pub use crate::cluster::prepare;
use crate::cluster::{Cluster, FLEETS, NODES_OF_FLEET};
use crate::history::History;
use crate::laws::watches::Observers;
use crate::plan::{Act, Plan};
use crate::user::User;
use crate::{entropy, laws, rest};

/// Futures of debug builds are large.
const STACK: usize = 64 << 20;
/// In virtual time: until nodes are ready.
const BOOT: Duration = Duration::from_secs(120);
/// From the end of faults until everything is as it should be. Queues' back-off, tolerations of 300 s, back-off
/// of containers and Jobs are within it.
const LIMIT: Duration = Duration::from_secs(1_800);
/// Then nothing is written for so long.
const REST: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_secs(2);
const TAIL: usize = 160;
/// In real time: a round that takes so long hangs.
const PATIENCE: Duration = Duration::from_secs(600);

/// What a round came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub seed: u64,
    pub scenario: String,
    /// Of all writes, with their times.
    pub hash: String,
    pub writes: u64,
    pub requests: u64,
    pub virtual_seconds: u64,
    pub injected: BTreeMap<String, u64>,
    pub failure: Option<Failure>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    pub law: String,
    pub text: String,
    pub trace: String,
}

/// Carries the plan out.
///
/// # Errors
/// If the round does not come to an end.
pub fn run(plan: &Plan, trace_lines: Option<usize>) -> anyhow::Result<Report> {
    let plan = plan.clone();
    alone(plan.seed, move || Box::pin(async move { World::round(&plan, trace_lines).await }))
}

type Work<T> = Pin<Box<dyn Future<Output = anyhow::Result<T>>>>;

/// Runs work on a thread of its own, whose time, randomness and order of maps derive from the seed.
pub fn alone<T: Send + 'static>(
    seed: u64,
    work: impl FnOnce() -> Work<T> + Send + 'static,
) -> anyhow::Result<T> {
    let round = move || {
        entropy::seed(seed);
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build()?;
        let done = runtime.block_on(async {
            let _world = base::sim::enter(seed);
            work().await
        });
        runtime.shutdown_background();
        done
    };
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("round".into()).stack_size(STACK);
    let thread = thread.spawn(move || drop(tell.send(round())))?;
    let done = match told.recv_timeout(PATIENCE) {
        Err(RecvTimeoutError::Timeout) => anyhow::bail!("the round does not end"),
        done => done,
    };
    // The caller may fork: then it has one thread.
    if let Err(panic) = thread.join() {
        anyhow::bail!("the round panicked: {}", panic_text(&*panic));
    }
    done?
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Something that was taken away, and when it comes back.
struct Missing {
    at: Instant,
    what: Back,
}

enum Back {
    Part(String),
    Node(String),
}

struct World {
    cluster: Cluster,
    user: User,
    history: History,
    missing: Vec<Missing>,
}

impl World {
    async fn round(plan: &Plan, trace_lines: Option<usize>) -> anyhow::Result<Report> {
        let history = History::new(laws::all());
        let panics = history.clone();
        std::panic::set_hook(Box::new(move |panic| panics.violate_by_panic(panic.to_string())));
        let cluster = Cluster::start(plan.seed, &plan.faults, history.clone()).await?;
        let user = User { client: cluster.user(), history: history.clone() };
        let mut world = Self { cluster, user, history: history.clone(), missing: vec![] };
        let tasks = Tasks::new("observers");
        if world.boot().await? {
            let observers = Observers::start(&world.cluster.network, &history, &tasks);
            world.follow(plan).await?;
            world.heal().await?;
            world.settle().await;
            if history.violation().is_none() {
                observers.compare(&history);
            }
        }
        let violation = history.violation();
        let failure = violation.map(|violation| Failure {
            law: violation.law.to_owned(),
            text: violation.text,
            trace: history.tail(trace_lines.unwrap_or(TAIL)),
        });
        if failure.is_none() && trace_lines.is_some() {
            println!("{}", history.tail(trace_lines.unwrap_or(TAIL)));
        }
        let injected = world.cluster.network.injected();
        Ok(Report {
            seed: plan.seed,
            scenario: plan.scenario.clone(),
            hash: history.hash(),
            writes: history.writes(),
            requests: world.cluster.network.requests(),
            virtual_seconds: history.elapsed().as_secs(),
            injected: injected.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
            failure,
        })
    }

    /// Starts all parts; whether the nodes became ready.
    async fn boot(&mut self) -> anyhow::Result<bool> {
        for name in self.cluster.names() {
            self.cluster.start_part(&name)?;
        }
        let nodes = FLEETS.len() * NODES_OF_FLEET;
        let are_ready = |history: &History| {
            let state = history.state();
            let ready = state.all("minions").filter(|(_, node)| rest::is_usable(node)).count();
            ready == nodes && state.get("serviceaccounts", "default", "default").is_some()
        };
        let begun = Instant::now();
        while !are_ready(&self.history) {
            if begun.elapsed() > BOOT || self.history.violation().is_some() {
                self.history
                    .violate("a cluster starts", format!("no {nodes} ready nodes after {BOOT:?}"));
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(true)
    }

    /// The plan's steps, with faults on.
    async fn follow(&mut self, plan: &Plan) -> anyhow::Result<()> {
        let begun = Instant::now();
        self.cluster.network.set_active(true);
        let mut steps = plan.steps.iter().peekable();
        while begun.elapsed() < plan.calm_at && self.history.violation().is_none() {
            let next = steps.peek().map_or(plan.calm_at, |step| step.at.min(plan.calm_at));
            let due = self.missing.iter().map(|missing| missing.at).min();
            let at = (begun + next).min(due.unwrap_or(begun + next)).min(Instant::now() + LOOK);
            tokio::time::sleep_until(at).await;
            self.bring_back(Instant::now()).await?;
            while let Some(step) = steps.next_if(|step| begun + step.at <= Instant::now()) {
                self.perform(&step.act).await;
            }
        }
        Ok(())
    }

    async fn perform(&mut self, act: &Act) {
        let back_at = |lasts: &Duration| Instant::now() + *lasts;
        match act {
            Act::Kill { part, lasts } => {
                self.cluster.kill(part);
                self.missing.push(Missing { at: back_at(lasts), what: Back::Part(part.clone()) });
            }
            Act::CutOff { part, lasts } => {
                self.history.upset(part, "cut off");
                self.cluster.network.cut_off(part, *lasts);
            }
            Act::Silence { node, lasts } => {
                self.history.upset(node, "silent");
                self.user.silence(node, true).await;
                self.missing.push(Missing { at: back_at(lasts), what: Back::Node(node.clone()) });
            }
            act => self.user.perform(act).await,
        }
    }

    /// What is due by now.
    async fn bring_back(&mut self, now: Instant) -> anyhow::Result<()> {
        let all = std::mem::take(&mut self.missing).into_iter();
        let (due, rest): (Vec<Missing>, Vec<Missing>) = all.partition(|one| one.at <= now);
        self.missing = rest;
        for Missing { what, .. } in due {
            match what {
                Back::Part(name) => {
                    self.history.remark(format!("starts: {name}"));
                    self.cluster.start_part(&name)?;
                }
                Back::Node(name) => self.user.silence(&name, false).await,
            }
        }
        Ok(())
    }

    /// No more faults: all parts run, all nodes are well and take pods.
    async fn heal(&mut self) -> anyhow::Result<()> {
        if self.history.violation().is_some() {
            return Ok(());
        }
        self.cluster.network.set_active(false);
        self.history.remark("faults end");
        let all = std::mem::take(&mut self.missing);
        self.missing = all.into_iter().map(|one| Missing { at: Instant::now(), ..one }).collect();
        self.bring_back(Instant::now()).await?;
        let names: Vec<String> =
            self.history.state().all("minions").map(|(key, _)| key.name.clone()).collect();
        for name in names {
            self.user.cordon(&name, false).await;
        }
        Ok(())
    }

    /// Waits until the state is what the model says, and then for a time without writes.
    async fn settle(&self) {
        let begun = Instant::now();
        while self.history.violation().is_none() {
            let differences = rest::differences(&self.history.state(), base::clock::now());
            if differences.is_empty() && self.history.quiet() > LOOK * 5 {
                // If a quota is used up, controllers never stop trying, and report it.
                let is_full = !rest::full_namespaces(&self.history.state()).is_empty();
                if !is_full {
                    self.rest().await;
                }
                return;
            }
            if begun.elapsed() > LIMIT {
                let why = if differences.is_empty() {
                    "there are still writes".into()
                } else {
                    differences.join("\n")
                };
                return self.history.violate("everything converges", why);
            }
            let pause = if begun.elapsed() > LIMIT / 6 { LOOK * 5 } else { LOOK };
            tokio::time::sleep(pause).await;
        }
    }

    async fn rest(&self) {
        let begun = Instant::now();
        while begun.elapsed() < REST && self.history.violation().is_none() {
            if self.history.quiet() < begun.elapsed() {
                let text = "something was written although everything is as it should be: see the trace's last line";
                return self.history.violate("at rest nothing is written", text.into());
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
