//! API Priority and Fairness: no client's requests crowd out those of others.
//!
//! In: FlowSchemas and PriorityLevelConfigurations, which another crate reads ([`Fairness::configure`]), and
//! requests. Out: a [`Place`] per request that may run, headers with its schema and level, refusals with
//! a Retry-After.
//!
//! ```text
//!  request ► classify ► level ► queue? ► place ► … ► dropped: the next one's turn
//!            schema     seats    shuffle sharding, fair queuing
//! ```
//!
//! Invariants: a place is returned exactly once, by its drop. A waiting request that is dropped leaves its
//! queue. There is no background work while no request waits: the first request after a period adjusts the
//! limits, and a task serves a level only while requests wait there. Upstream: `pkg/util/flowcontrol`.

mod classify;
mod demand;
mod dump;
mod estimate;
mod numbers;
mod queues;
mod retry;
mod shares;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use arc_swap::ArcSwap;
use base::task::Tasks;
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

pub use classify::{Distinguisher, FlowSchema, PathRule, ResourceRule, Rule, Subject};
pub use estimate::{Stored, WatchGuard, Watches, work};
pub use queues::{Handling, Work};

use crate::request::{RequestInfo, UserInfo};
use numbers::Numbers;
use queues::{Arrival, Flow, Queues, Running, Ticket};
use retry::RetryAfter;
use shares::{Claim, Limits};

/// How often limits are adjusted to the demand.
const ADJUSTMENT_PERIOD: Duration = Duration::from_secs(10);
/// The level and schema of administrators, and those of requests that no other schema matches.
pub const EXEMPT: &str = "exempt";
pub const CATCH_ALL: &str = "catch-all";
/// A request of default width never takes more than this fraction of its level.
const WIDEST_PART: f64 = 0.15;

/// A PriorityLevelConfiguration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriorityLevel {
    pub name: String,
    pub uid: String,
    pub handling: Handling,
    pub shares: u32,
    pub lendable_percent: u32,
    pub borrowing_percent: Option<u32>,
}

/// The whole configuration. Schemas with a missing level are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    pub schemas: Vec<FlowSchema>,
    pub levels: Vec<PriorityLevel>,
}

/// See the module. Clones share the state.
#[derive(Clone)]
pub struct Fairness(Arc<Inner>);

struct Inner {
    /// Total seats of all limited levels.
    seats: u32,
    tasks: Tasks,
    plan: ArcSwap<Plan>,
    /// The last configuration, and the time of the last adjustment. Locked to change the plan and limits,
    /// always before the lock of a level's queues.
    settings: Mutex<Settings>,
    watches: Watches,
    started: Instant,
}

struct Settings {
    config: Config,
    adjusted: Instant,
    fair_fraction: f64,
}

/// An active configuration.
#[derive(Default)]
struct Plan {
    /// In matching order.
    schemas: Vec<Schema>,
    levels: BTreeMap<String, Arc<Level>>,
}

struct Schema {
    spec: FlowSchema,
    level: Arc<Level>,
    numbers: Arc<Mutex<Numbers>>,
}

/// A level as configured.
struct Level {
    spec: PriorityLevel,
    limits: Limits,
    /// Maximum seats of a request in this level; 0 for no maximum.
    widest: u32,
    live: Arc<Live>,
}

/// The part of a level that survives a new configuration.
struct Live {
    /// Locked for short decisions; never held across an await.
    queues: Mutex<Queues>,
    retry: Mutex<RetryAfter>,
    /// Removed from the configuration, but not empty yet.
    is_leaving: AtomicBool,
    /// Whether a task serves the waiting requests, and its wake-up signal.
    is_tended: AtomicBool,
    news: Notify,
}

impl Live {
    fn new(handling: Handling, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            queues: Mutex::new(Queues::new(handling, now)),
            retry: Mutex::default(),
            is_leaving: AtomicBool::new(false),
            is_tended: AtomicBool::new(false),
            news: Notify::new(),
        })
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().expect("no panic under the lock")
    }
}

/// The schema of a request.
pub struct Class {
    plan: Arc<Plan>,
    schema: usize,
}

impl Class {
    fn schema(&self) -> &Schema {
        &self.plan.schemas[self.schema]
    }

    pub fn schema_uid(&self) -> &str {
        &self.schema().spec.uid
    }

    pub fn level_uid(&self) -> &str {
        &self.schema().level.spec.uid
    }

    pub fn widest(&self) -> u32 {
        self.schema().level.widest
    }

    fn is_exempt(&self) -> bool {
        self.schema().level.spec.handling == Handling::Exempt
    }
}

/// No seat is free; retry after this many seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub retry_after: u64,
}

impl Fairness {
    pub fn new(seats: u32, tasks: Tasks) -> Self {
        let now = Instant::now();
        let settings = Settings { config: Config::default(), adjusted: now, fair_fraction: 0.0 };
        let this = Self(Arc::new(Inner {
            seats,
            tasks,
            plan: ArcSwap::default(),
            settings: Mutex::new(settings),
            watches: Watches::default(),
            started: now,
        }));
        this.configure(Config::default());
        this
    }

    /// Changes the configuration. Requests in flight stay in their level.
    pub fn configure(&self, config: Config) {
        let now = Instant::now();
        let mut settings = self.0.settings();
        let old = self.0.plan.load_full();
        let plan = self.0.plan_of(&config, &old, now);
        settings.config = config;
        self.0.plan.store(Arc::new(plan));
        self.0.adjust(&mut settings, now);
    }

    pub fn watches(&self) -> &Watches {
        &self.0.watches
    }

    pub fn classify(&self, info: &RequestInfo, user: &UserInfo) -> Class {
        let plan = self.0.plan.load_full();
        let found = plan.schemas.iter().position(|schema| schema.spec.matches(info, user));
        let is_catch_all = |schema: &Schema| schema.spec.name == CATCH_ALL;
        let schema = found
            .or_else(|| plan.schemas.iter().position(is_catch_all))
            .expect("every plan has the catch-all schema");
        Class { plan, schema }
    }

    /// Waits for a place, for at most `patience`.
    pub async fn enter(
        &self,
        class: &Class,
        info: &RequestInfo,
        user: &UserInfo,
        work: Work,
        patience: Duration,
    ) -> Result<Place, Refused> {
        let schema = class.schema();
        let now = Instant::now();
        if !class.is_exempt() {
            self.0.adjust_when_due(now);
        }
        let flow = flow_of(schema, info, user);
        let arrival = schema.level.live.queues().arrive(&flow, work, now);
        let place = |running| Place {
            inner: self.0.clone(),
            level: schema.level.clone(),
            numbers: schema.numbers.clone(),
            running: Some(running),
            started: Instant::now(),
        };
        let waited = match arrival {
            Arrival::Runs(running) => Ok(place(running)),
            Arrival::Refused(reason) => Err(reason),
            Arrival::Waits { ticket, granted } => {
                schema.numbers().waiting(1, work.widest());
                let waiting = Waiter { level: &schema.level, ticket: Some(ticket), granted };
                let left = Left { numbers: &schema.numbers, seats: work.widest() };
                self.0.tend(&schema.level.live);
                let granted = waiting.wait(now + patience).await;
                drop(left);
                granted.map(place).ok_or("time-out")
            }
        };
        self.note(class, now, &waited);
        waited.map_err(|_| Refused { retry_after: schema.level.refuse(self.second()) })
    }

    fn note(&self, class: &Class, since: Instant, waited: &Result<Place, &'static str>) {
        let schema = class.schema();
        let mut numbers = schema.numbers();
        if !class.is_exempt() {
            numbers.waited(waited.is_ok(), since.elapsed());
        }
        match waited {
            Ok(place) => numbers.dispatched(place.seats()),
            Err(reason) => numbers.rejected(reason),
        }
    }

    /// Seconds since the process started.
    fn second(&self) -> u64 {
        self.0.started.elapsed().as_secs()
    }
}

impl Schema {
    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().expect("no panic under the lock")
    }
}

impl Level {
    fn refuse(&self, second: u64) -> u64 {
        self.live.retry.lock().expect("no panic under the lock").refuse(second)
    }
}

/// The flow of a request; it matters only if there are several queues.
fn flow_of(schema: &Schema, info: &RequestInfo, user: &UserInfo) -> Flow {
    let Handling::Queue { queues: 2.., .. } = schema.level.spec.handling else {
        return Flow { schema: schema.spec.name.clone(), ..Flow::default() };
    };
    let distinguisher = schema.spec.flow(info, user);
    let digest = Sha256::new()
        .chain_update(&schema.spec.name)
        .chain_update([0])
        .chain_update(&distinguisher)
        .finalize();
    let mut start = [0; 8];
    start.copy_from_slice(&digest[..8]);
    Flow { schema: schema.spec.name.clone(), distinguisher, hash: u64::from_le_bytes(start) }
}

impl Inner {
    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().expect("no panic under the lock")
    }

    /// Makes the plan of a configuration. Levels keep their state; removed ones stay until they are empty.
    fn plan_of(&self, config: &Config, old: &Plan, now: Instant) -> Plan {
        let mut specs: BTreeMap<String, (PriorityLevel, bool)> = BTreeMap::new();
        for (name, level) in &old.levels {
            if !level.live.queues().is_idle() {
                specs.insert(name.clone(), (level.spec.clone(), true));
            }
        }
        for mandatory in [exempt_level(), catch_all_level()] {
            specs.insert(mandatory.name.clone(), (mandatory, false));
        }
        for level in &config.levels {
            specs.insert(level.name.clone(), (level.clone(), false));
        }
        let sum = specs.values().map(|(level, _)| level.shares).sum();
        let mut levels = BTreeMap::new();
        for (name, (spec, is_leaving)) in specs {
            let live = old.levels.get(&name).map(|level| level.live.clone());
            let live = live.unwrap_or_else(|| Live::new(spec.handling, now));
            live.is_leaving.store(is_leaving, Ordering::Relaxed);
            levels.insert(name, Arc::new(self.level(spec, sum, live)));
        }
        Plan { schemas: self.schemas(config, old, &levels), levels }
    }

    fn level(&self, spec: PriorityLevel, sum: u32, live: Arc<Live>) -> Level {
        let (lendable, borrowing) = (spec.lendable_percent, spec.borrowing_percent);
        let limits = Limits::of(self.seats, spec.shares, sum, lendable, borrowing);
        let widest = match spec.handling {
            Handling::Queue { hand_size, .. } => {
                let part = (f64::from(limits.nominal) * WIDEST_PART).ceil() as u32;
                part.min(limits.nominal / hand_size.max(1)).max(1)
            }
            _ => 0,
        };
        Level { spec, limits, widest, live }
    }

    fn schemas(
        &self,
        config: &Config,
        old: &Plan,
        levels: &BTreeMap<String, Arc<Level>>,
    ) -> Vec<Schema> {
        let is_served =
            |schema: &&FlowSchema| config.levels.iter().any(|level| level.name == schema.level);
        let mut specs: Vec<FlowSchema> = config.schemas.iter().filter(is_served).cloned().collect();
        for mandatory in [exempt_schema(), catch_all_schema()] {
            if !specs.iter().any(|schema| schema.name == mandatory.name) {
                specs.push(mandatory);
            }
        }
        specs.sort_unstable_by(|a, b| (a.precedence, &a.name).cmp(&(b.precedence, &b.name)));
        let schema = |spec: FlowSchema| {
            let is_same =
                |one: &&Schema| one.spec.name == spec.name && one.spec.level == spec.level;
            let numbers = old.schemas.iter().find(is_same).map(|one| one.numbers.clone());
            let level = levels.get(&spec.level).expect("checked above").clone();
            Schema { spec, level, numbers: numbers.unwrap_or_default() }
        };
        specs.into_iter().map(schema).collect()
    }

    fn adjust_when_due(&self, now: Instant) {
        let mut settings = self.settings();
        if now >= settings.adjusted + ADJUSTMENT_PERIOD {
            self.adjust(&mut settings, now);
        }
    }

    /// Ends a period: adjusts the limits to its demand.
    fn adjust(&self, settings: &mut Settings, now: Instant) {
        settings.adjusted = now;
        let plan = self.plan.load();
        let claim = |level: &Arc<Level>| {
            let mut queues = level.live.queues();
            let demand = queues.demand.end_period(now);
            let is_exempt = level.spec.handling == Handling::Exempt;
            (Claim { is_exempt, limits: level.limits, demand }, queues.limit())
        };
        let (claims, current): (Vec<_>, Vec<_>) = plan.levels.values().map(claim).unzip();
        let (limits, fair_fraction) = shares::adjust(&claims, &current);
        settings.fair_fraction = fair_fraction;
        for (level, limit) in plan.levels.values().zip(limits) {
            level.live.queues().configure(level.spec.handling, limit, now);
        }
    }

    /// Starts a task that serves the waiting requests of a level, until there are none.
    fn tend(self: &Arc<Self>, live: &Arc<Live>) {
        if live.is_tended.swap(true, Ordering::AcqRel) {
            live.news.notify_one();
            return;
        }
        let (this, live) = (self.clone(), live.clone());
        self.tasks.spawn("priority and fairness", async move {
            loop {
                let due = this.settings().adjusted + ADJUSTMENT_PERIOD;
                let wake = {
                    let queues = live.queues();
                    if queues.waiting() == 0 {
                        // Under the lock: the next waiting request sees that no task runs, and starts one.
                        live.is_tended.store(false, Ordering::Release);
                        return;
                    }
                    queues.next_release().map_or(due, |release| release.min(due))
                };
                tokio::select! {
                    () = tokio::time::sleep_until(wake) => {}
                    () = live.news.notified() => {}
                }
                let now = Instant::now();
                this.adjust_when_due(now);
                live.queues().tick(now);
            }
        });
    }

    fn finish(self: &Arc<Self>, level: &Level, running: Running) {
        let mut queues = level.live.queues();
        queues.finish(running, Instant::now());
        let lingers = queues.waiting() > 0 && queues.next_release().is_some();
        let is_idle = queues.is_idle();
        drop(queues);
        if lingers {
            level.live.news.notify_one();
        }
        if is_idle && level.live.is_leaving.load(Ordering::Relaxed) {
            let this = Fairness(self.clone());
            let config = self.settings().config.clone();
            this.configure(config);
        }
    }
}

/// A waiting request. Dropping it before it has its seats removes it from the queue.
struct Waiter<'a> {
    level: &'a Level,
    ticket: Option<Ticket>,
    granted: oneshot::Receiver<Running>,
}

impl Waiter<'_> {
    async fn wait(mut self, until: Instant) -> Option<Running> {
        let outcome = tokio::time::timeout_at(until, &mut self.granted).await;
        if let Ok(Ok(running)) = outcome {
            self.ticket = None;
            return Some(running);
        }
        let ticket = self.ticket.take()?;
        let mut queues = self.level.live.queues();
        // The seats may have been granted between the deadline and the lock.
        if let Ok(running) = self.granted.try_recv() {
            return Some(running);
        }
        queues.leave(ticket, true, Instant::now());
        None
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let now = Instant::now();
        let mut queues = self.level.live.queues();
        match self.granted.try_recv() {
            Ok(running) => queues.finish(running, now),
            Err(_) => queues.leave(ticket, false, now),
        }
    }
}

/// Counts waiting requests, also those whose client disconnects.
struct Left<'a> {
    numbers: &'a Mutex<Numbers>,
    seats: u32,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.numbers.lock().expect("no panic under the lock").waiting(-1, self.seats);
    }
}

/// The right to run; its drop returns the seats.
pub struct Place {
    inner: Arc<Inner>,
    level: Arc<Level>,
    numbers: Arc<Mutex<Numbers>>,
    running: Option<Running>,
    started: Instant,
}

impl Place {
    fn seats(&self) -> u32 {
        self.running.as_ref().map_or(0, Running::seats)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let seats = self.seats();
        let mut numbers = self.numbers.lock().expect("no panic under the lock");
        numbers.finished(seats, self.started.elapsed());
        drop(numbers);
        if let Some(running) = self.running.take() {
            self.inner.finish(&self.level, running);
        }
    }
}

fn exempt_level() -> PriorityLevel {
    PriorityLevel {
        name: EXEMPT.into(),
        uid: String::new(),
        handling: Handling::Exempt,
        shares: 0,
        lendable_percent: 0,
        borrowing_percent: None,
    }
}

fn catch_all_level() -> PriorityLevel {
    PriorityLevel {
        name: CATCH_ALL.into(),
        handling: Handling::Reject,
        shares: 5,
        ..exempt_level()
    }
}

/// The built-in schema, which exists before the objects and whatever they contain.
fn exempt_schema() -> FlowSchema {
    everything(EXEMPT, 1, &["system:masters"])
}

fn catch_all_schema() -> FlowSchema {
    let distinguisher = Distinguisher::ByUser;
    let everybody = &["system:unauthenticated", "system:authenticated"];
    FlowSchema { distinguisher, ..everything(CATCH_ALL, 10_000, everybody) }
}

fn everything(name: &str, precedence: i32, groups: &[&str]) -> FlowSchema {
    let any = || vec!["*".to_owned()];
    let rule = Rule {
        subjects: groups.iter().map(|group| Subject::Group((*group).to_owned())).collect(),
        resources: vec![ResourceRule {
            verbs: any(),
            groups: any(),
            resources: any(),
            cluster_scope: true,
            namespaces: any(),
        }],
        paths: vec![PathRule { verbs: any(), paths: any() }],
    };
    FlowSchema {
        name: name.into(),
        uid: String::new(),
        precedence,
        level: name.into(),
        distinguisher: Distinguisher::None,
        rules: vec![rule],
    }
}

#[cfg(test)]
mod tests;
