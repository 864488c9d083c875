//! The framework: extension points as traits, and what runs plugins through them.
//!
//! Upstream: `pkg/scheduler/framework`. A plugin implements the points it needs and registers them
//! in [`ExtensionPoints`]; state that it works out once per pod goes into the [`CycleState`].
//!
//! Invariants: plugins read the cluster and never change it; every rejection has a message for
//! people; scores lie in 0..=100 before weights.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base::metrics::Timer;
use futures::future::BoxFuture;

use crate::cluster::{Cluster, WhatIf};
use crate::config::{Args, ConfigError, Point, Profile};
use crate::error::BindError;
pub use crate::error::Rejection;
pub use crate::event::ClusterEvent;
use crate::families;
use crate::node::NodeInfo;
use crate::objects::Objects;
use crate::pod::PodInfo;
use crate::volumes::Volumes;

pub const MAX_SCORE: i64 = 100;

/// The state of plugins between extension points, for one pod. It is a list: few plugins use it, and filters read it for every node.
#[derive(Default)]
pub struct CycleState(Vec<(&'static str, Box<dyn Any + Send + Sync>)>);

impl CycleState {
    pub fn put<T: Any + Send + Sync>(&mut self, plugin: &'static str, value: T) {
        self.0.retain(|(known, _)| *known != plugin);
        self.0.push((plugin, Box::new(value)));
    }

    pub fn get<T: Any>(&self, plugin: &'static str) -> Option<&T> {
        self.0.iter().find(|(known, _)| *known == plugin)?.1.downcast_ref()
    }
}

/// What PreFilter leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Filter,
    /// The plugin's Filter has nothing to say about this pod.
    Skip,
}

impl Next {
    /// Filter if there is something to say.
    pub fn only_if(has_something: bool) -> Self {
        if has_something { Self::Filter } else { Self::Skip }
    }
}

pub trait QueueSort: Send + Sync {
    /// Lower goes first; equals keep the order of arrival.
    fn rank(&self, pod: &PodInfo) -> i64;
}

pub trait PreEnqueue: Send + Sync {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection>;
}

pub trait PreFilter: Send + Sync {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<Next, Rejection>;
}

pub trait Filter: Send + Sync {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection>;
}

/// Runs when no node fits, and may preempt pods.
pub trait PostFilter: Send + Sync {
    fn post_filter(
        &self,
        framework: &Framework,
        pod: &PodInfo,
        cluster: &Cluster,
        why: &Diagnosis,
    ) -> PostFiltered;
}

#[derive(Default)]
pub struct PostFiltered {
    /// The node with room after its victims are deleted.
    pub nominated: Option<String>,
    pub victims: Vec<Arc<PodInfo>>,
    pub message: String,
    /// To be written before the pod is reported.
    pub work: Option<BoxFuture<'static, ()>>,
}

pub trait PreScore: Send + Sync {
    /// `nodes` are those that fit.
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
        nodes: &[&NodeInfo],
    ) -> Next;
}

pub trait Score: Send + Sync {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo, cluster: &Cluster) -> i64;

    /// Brings raw scores to 0..=100.
    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _scores: &mut [i64]) {}
}

pub trait Reserve: Send + Sync {
    fn reserve(&self, state: &mut CycleState, pod: &PodInfo, node: &str) -> Result<(), Rejection>;
    fn unreserve(&self, state: &CycleState, pod: &PodInfo, node: &str);
}

pub trait Permit: Send + Sync {
    fn permit<'a>(
        &'a self,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Result<(), Rejection>>;
}

pub trait PreBind: Send + Sync {
    fn pre_bind<'a>(
        &'a self,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Result<(), BindError>>;

    /// The pod is not bound: undoes changes that other pods would miss.
    fn take_back<'a>(&'a self, _pod: &'a PodInfo, _node: &'a str) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }
}

pub trait Bind: Send + Sync {
    fn bind<'a>(&'a self, pod: &'a PodInfo, node: &'a str) -> BoxFuture<'a, Result<(), BindError>>;
}

pub trait PostBind: Send + Sync {
    fn post_bind(&self, pod: &PodInfo, node: &str);
}

/// The extension points of one plugin.
#[derive(Default)]
pub struct ExtensionPoints {
    pub queue_sort: Option<Arc<dyn QueueSort>>,
    pub pre_enqueue: Option<Arc<dyn PreEnqueue>>,
    pub pre_filter: Option<Arc<dyn PreFilter>>,
    pub filter: Option<Arc<dyn Filter>>,
    pub post_filter: Option<Arc<dyn PostFilter>>,
    pub pre_score: Option<Arc<dyn PreScore>>,
    pub score: Option<Arc<dyn Score>>,
    pub reserve: Option<Arc<dyn Reserve>>,
    pub permit: Option<Arc<dyn Permit>>,
    pub pre_bind: Option<Arc<dyn PreBind>>,
    pub bind: Option<Arc<dyn Bind>>,
    pub post_bind: Option<Arc<dyn PostBind>>,
}

/// The parts that plugins are built with.
#[derive(Clone)]
pub struct Handle {
    pub client: client::Client,
    /// Claims, volumes and what else plugins look up; tests may do without.
    pub volumes: Option<Volumes>,
    pub objects: Option<Objects>,
    /// The arguments of the profile's plugins.
    pub args: Args,
}

/// A row of the table of plugins.
pub struct Row {
    pub name: &'static str,
    /// The weight in the default profile; 0 for a plugin that does not score.
    pub weight: i64,
    pub build: fn(&Handle) -> ExtensionPoints,
    /// The queueing hint: whether the event may let a pod fit that this plugin rejected.
    pub hint: fn(&PodInfo, &ClusterEvent) -> bool,
}

type Named<T> = Vec<(&'static str, Arc<T>)>;

/// A plugin that scores.
struct Scorer {
    name: &'static str,
    weight: i64,
    before: Option<Arc<dyn PreScore>>,
    score: Arc<dyn Score>,
}

/// The plugins of a profile, by point, in the order in which they run.
pub struct Framework {
    queue_sort: Named<dyn QueueSort>,
    pre_enqueue: Named<dyn PreEnqueue>,
    pre_filter: Named<dyn PreFilter>,
    filter: Named<dyn Filter>,
    post_filter: Named<dyn PostFilter>,
    scorers: Vec<Scorer>,
    reserve: Named<dyn Reserve>,
    permit: Named<dyn Permit>,
    pre_bind: Named<dyn PreBind>,
    bind: Named<dyn Bind>,
    post_bind: Named<dyn PostBind>,
    hints: BTreeMap<&'static str, fn(&PodInfo, &ClusterEvent) -> bool>,
    /// Share of the nodes that is enough, in percent; 0: the more there are, the smaller.
    percentage: usize,
    /// The index of the node at which the next search starts.
    start: AtomicUsize,
    /// The profile's name, for metrics.
    profile: String,
}

/// The plugins of one point: each that has it, in the profile's order.
macro_rules! at {
    ($built:ident, $profile:ident, $point:ident, $field:ident) => {{
        let has = |name: &str| $built.get(name).map(|(_, points)| points.$field.is_some());
        let order = $profile.choices.at(Point::$point, has)?;
        let made = order.iter().filter_map(|one| {
            let (row, points) = $built.get(one.name.as_str())?;
            Some((row.name, points.$field.clone()?))
        });
        made.collect()
    }};
}

/// Why a pod fits nowhere.
#[derive(Clone, Debug, Default)]
pub struct Diagnosis {
    pub nodes: usize,
    /// Said by a PreFilter about all nodes.
    pub general: Option<String>,
    pub rejections: BTreeMap<String, Rejection>,
    /// The plugins that rejected the pod: their queueing hints decide when it is tried again.
    pub plugins: BTreeSet<&'static str>,
    pub post_filter: String,
    /// The attempt could not be made.
    pub error: Option<Box<str>>,
}

impl fmt::Display for Diagnosis {
    /// Upstream: `FitError.Error`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(error) = &self.error {
            return f.write_str(error);
        }
        if self.nodes == 0 {
            return f.write_str("no nodes available to schedule pods");
        }
        write!(f, "0/{} nodes are available:", self.nodes)?;
        if let Some(general) = &self.general {
            write!(f, " {general}.")?;
        } else {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            for reason in self.rejections.values().flat_map(|one| &one.reasons) {
                *counts.entry(reason).or_default() += 1;
            }
            let mut texts: Vec<_> =
                counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
            texts.sort_unstable();
            write!(f, " {}.", texts.join(", "))?;
        }
        if !self.post_filter.is_empty() {
            write!(f, " {}", self.post_filter)?;
        }
        Ok(())
    }
}

impl Framework {
    /// Builds the plugins of `table` that the profile names. Errors have upstream's words.
    pub fn new(
        table: &'static [Row],
        profile: &Profile,
        handle: &Handle,
    ) -> Result<Self, ConfigError> {
        let handle = Handle { args: profile.args.clone(), ..handle.clone() };
        let wanted = profile.choices.names();
        let rows = table.iter().filter(|row| wanted.contains(row.name));
        let built: HashMap<&str, (&'static Row, ExtensionPoints)> =
            rows.map(|row| (row.name, (row, (row.build)(&handle)))).collect();
        let framework = Self {
            pre_filter: at!(built, profile, PreFilter, pre_filter),
            filter: at!(built, profile, Filter, filter),
            post_filter: at!(built, profile, PostFilter, post_filter),
            reserve: at!(built, profile, Reserve, reserve),
            scorers: scorers(&built, profile)?,
            pre_bind: at!(built, profile, PreBind, pre_bind),
            bind: at!(built, profile, Bind, bind),
            post_bind: at!(built, profile, PostBind, post_bind),
            permit: at!(built, profile, Permit, permit),
            pre_enqueue: at!(built, profile, PreEnqueue, pre_enqueue),
            queue_sort: at!(built, profile, QueueSort, queue_sort),
            hints: built.values().map(|(row, _)| (row.name, row.hint)).collect(),
            percentage: profile.percentage,
            start: AtomicUsize::new(0),
            profile: profile.name.clone(),
        };
        if let Some(why) = profile.args.fit_refused.as_ref() {
            let plugin = "NodeResourcesFit";
            if framework.hints.contains_key(plugin) {
                return Err(ConfigError(format!("initializing plugin {plugin:?}: {why}")));
            }
        }
        let name = &profile.name;
        let sorts = framework.queue_sort.len();
        if sorts != 1 {
            return Err(ConfigError(format!(
                "only one queue sort plugin required for profile with scheduler name {name:?}, but got {sorts}"
            )));
        }
        if framework.bind.is_empty() {
            return Err(ConfigError(format!(
                "at least one bind plugin is needed for profile with scheduler name {name:?}"
            )));
        }
        Ok(framework)
    }

    /// The Score plugins and their weights.
    pub fn weights(&self) -> Vec<(&'static str, i64)> {
        self.scorers.iter().map(|one| (one.name, one.weight)).collect()
    }

    /// All plugins of the profile.
    pub fn plugins(&self) -> BTreeSet<&'static str> {
        self.hints.keys().copied().collect()
    }

    pub fn rank(&self, pod: &PodInfo) -> i64 {
        self.queue_sort.first().map_or(0, |(_, sort)| sort.rank(pod))
    }

    pub fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), (&'static str, Rejection)> {
        for (name, point) in &self.pre_enqueue {
            point.pre_enqueue(pod).map_err(|rejection| (*name, rejection))?;
        }
        Ok(())
    }

    /// Whether the event may help a pod that `plugins` rejected.
    pub fn is_worth_requeuing(
        &self,
        plugins: &BTreeSet<&'static str>,
        pod: &PodInfo,
        event: &ClusterEvent,
    ) -> bool {
        plugins.is_empty()
            || plugins
                .iter()
                .filter_map(|plugin| self.hints.get(plugin))
                .any(|hint| hint(pod, event))
    }

    /// The best node for a pod. Pure but for the choice among equals.
    pub fn schedule(&self, pod: &PodInfo, cluster: &Cluster) -> Result<String, Diagnosis> {
        self.candidates(pod, cluster).map(|nodes| choose(nodes).to_owned())
    }

    /// The nodes that fit, with their scores.
    pub fn candidates<'a>(
        &self,
        pod: &PodInfo,
        cluster: &'a Cluster,
    ) -> Result<Vec<(&'a str, i64)>, Diagnosis> {
        let mut state = CycleState::default();
        let mut diagnosis = Diagnosis { nodes: cluster.count(), ..Default::default() };
        if diagnosis.nodes == 0 {
            return Err(diagnosis);
        }
        let timer = Timer::start();
        let skipped = self.pre_filter(&mut state, pod, cluster);
        for (name, _) in &self.pre_filter {
            families::evaluated("PreFilter", name, &self.profile, 1);
        }
        let rejected =
            |broken| if broken { families::ERROR } else { families::UNSCHEDULABLE_STATUS };
        let outcome =
            skipped.as_ref().err().map_or(families::SUCCESS, |(_, one)| rejected(one.broken));
        families::point("PreFilter", &self.profile, outcome, timer);
        let skipped = match skipped {
            Ok(skipped) => skipped,
            Err((plugin, rejection)) => {
                diagnosis.plugins.insert(plugin);
                let why = rejection.reasons.join(", ");
                if rejection.broken {
                    diagnosis.error =
                        Some(format!("running PreFilter plugin {plugin:?}: {why}").into());
                }
                diagnosis.general = Some(why);
                let all = cluster.nodes().map(|node| (node.name.clone(), rejection.clone()));
                diagnosis.rejections = all.collect();
                return Err(diagnosis);
            }
        };
        let filters = self.active(&skipped);
        let enough = self.enough(diagnosis.nodes);
        let mut fitting = vec![];
        let start = self.start.load(Ordering::Relaxed);
        let mut looked = 0;
        let mut counts = Counts::new(self, &filters);
        // From where the last look ended: with many nodes not all are looked at.
        for node in cluster.nodes_from(start) {
            looked += 1;
            match self.filter_with_nominated(&state, pod, node, cluster, &filters) {
                Ok(()) => fitting.push(node),
                Err((plugin, rejection)) => {
                    counts.rejected(plugin);
                    diagnosis.plugins.insert(plugin);
                    if rejection.broken {
                        let why = rejection.reasons.join(", ");
                        diagnosis.error =
                            Some(format!("running {plugin:?} filter plugin: {why}").into());
                        return Err(diagnosis);
                    }
                    diagnosis.rejections.insert(node.name.clone(), rejection);
                }
            }
            if fitting.len() >= enough {
                break;
            }
        }
        self.start.store((start + looked) % diagnosis.nodes, Ordering::Relaxed);
        counts.finish(fitting.len());
        match fitting.as_slice() {
            [] => Err(diagnosis),
            [only] => Ok(vec![(&only.name, 0)]),
            _ => Ok(self.scored(&mut state, pod, cluster, &fitting)),
        }
    }

    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<BTreeSet<&'static str>, (&'static str, Rejection)> {
        let mut skipped = BTreeSet::new();
        let is_sampled = families::is_sampled();
        for (name, point) in &self.pre_filter {
            let timer = is_sampled.then(Timer::start);
            let outcome = point.pre_filter(state, pod, cluster);
            if let Some(timer) = timer {
                let status = match &outcome {
                    Ok(Next::Filter) => families::SUCCESS,
                    Ok(Next::Skip) => families::SKIP,
                    Err(_) => families::UNSCHEDULABLE_STATUS,
                };
                families::plugin("PreFilter", name, status, timer);
            }
            match outcome {
                Ok(Next::Filter) => {}
                Ok(Next::Skip) => {
                    skipped.insert(*name);
                }
                Err(rejection) => return Err((name, rejection)),
            }
        }
        Ok(skipped)
    }

    /// The filters that have something to say about the pod.
    fn active(&self, skipped: &BTreeSet<&'static str>) -> Vec<&(&'static str, Arc<dyn Filter>)> {
        self.filter.iter().filter(|(name, _)| !skipped.contains(name)).collect()
    }

    /// How many nodes that fit are enough. Upstream: `numFeasibleNodesToFind`.
    fn enough(&self, nodes: usize) -> usize {
        /// All of so few are looked at.
        const FEW: usize = 100;
        const LEAST_PERCENT: usize = 5;
        if nodes < FEW {
            return nodes;
        }
        let percent = match self.percentage {
            0 => 50usize.saturating_sub(nodes / 125).max(LEAST_PERCENT),
            percent => percent,
        };
        (nodes * percent / 100).max(FEW)
    }

    /// A node must do with the pods that are to come there by preemption, and without.
    fn filter_with_nominated(
        &self,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
        cluster: &Cluster,
        filters: &[&(&'static str, Arc<dyn Filter>)],
    ) -> Result<(), (&'static str, Rejection)> {
        let nominated = cluster.nominated_on(&node.name, pod);
        if !nominated.is_empty() {
            let mut fuller = cluster.what_if(node);
            nominated.into_iter().for_each(|one| fuller.add(one));
            self.filter_anew(pod, &fuller)?;
        }
        filter(filters, state, pod, node)
    }

    /// Whether the pod fits on a node as it would be, with the pods that are to come there by preemption
    /// and without: for preemption itself.
    pub fn would_fit(&self, pod: &PodInfo, what_if: &mut WhatIf) -> bool {
        let node = what_if.node();
        let mut nominated = what_if.cluster().nominated_on(&node.name, pod);
        nominated.retain(|one| !node.pods.contains_key(&one.uid));
        if !nominated.is_empty() {
            nominated.iter().for_each(|one| what_if.add(one.clone()));
            let fits = self.filter_anew(pod, what_if).is_ok();
            nominated.iter().for_each(|one| what_if.remove(&one.uid));
            if !fits {
                return false;
            }
        }
        self.filter_anew(pod, what_if).is_ok()
    }

    fn filter_anew(
        &self,
        pod: &PodInfo,
        what_if: &WhatIf,
    ) -> Result<(), (&'static str, Rejection)> {
        let mut state = CycleState::default();
        let skipped = self.pre_filter(&mut state, pod, what_if.cluster())?;
        filter(&self.active(&skipped), &state, pod, what_if.node())
    }

    fn scored<'a>(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
        nodes: &[&'a NodeInfo],
    ) -> Vec<(&'a str, i64)> {
        let mut totals = vec![0i64; nodes.len()];
        let (whole, is_sampled) = (Timer::start(), families::is_sampled());
        for scorer in &self.scorers {
            if let Some(before) = &scorer.before {
                families::evaluated("PreScore", scorer.name, &self.profile, 1);
                if before.pre_score(state, pod, cluster, nodes) == Next::Skip {
                    continue;
                }
            }
            families::evaluated("Score", scorer.name, &self.profile, nodes.len());
            let timer = is_sampled.then(Timer::start);
            let point = &scorer.score;
            let mut scores: Vec<_> =
                nodes.iter().map(|node| point.score(state, pod, node, cluster)).collect();
            point.normalize(state, pod, &mut scores);
            for (total, score) in totals.iter_mut().zip(scores) {
                debug_assert!((0..=MAX_SCORE).contains(&score), "{} scored {score}", scorer.name);
                *total += score * scorer.weight;
            }
            if let Some(timer) = timer {
                families::plugin("Score", scorer.name, families::SUCCESS, timer);
            }
        }
        families::point("Score", &self.profile, families::SUCCESS, whole);
        nodes.iter().map(|node| node.name.as_str()).zip(totals).collect()
    }

    pub fn post_filter(
        &self,
        pod: &PodInfo,
        cluster: &Cluster,
        diagnosis: &Diagnosis,
    ) -> PostFiltered {
        let mut all = PostFiltered::default();
        let mut messages = vec![];
        let timer = Timer::start();
        for (_, point) in &self.post_filter {
            let one = point.post_filter(self, pod, cluster, diagnosis);
            all.work = all.work.or(one.work);
            if one.nominated.is_some() {
                families::point("PostFilter", &self.profile, families::SUCCESS, timer);
                return PostFiltered { work: all.work, ..one };
            }
            messages.extend(Some(one.message).filter(|message| !message.is_empty()));
        }
        families::point("PostFilter", &self.profile, families::UNSCHEDULABLE_STATUS, timer);
        PostFiltered { message: messages.join(", "), ..all }
    }

    pub fn reserve(&self, pod: &PodInfo, node: &str) -> Result<CycleState, Rejection> {
        let mut state = CycleState::default();
        let timer = Timer::start();
        for (_, point) in &self.reserve {
            if let Err(rejection) = point.reserve(&mut state, pod, node) {
                families::point("Reserve", &self.profile, families::UNSCHEDULABLE_STATUS, timer);
                self.unreserve(&state, pod, node);
                return Err(rejection);
            }
        }
        families::point("Reserve", &self.profile, families::SUCCESS, timer);
        Ok(state)
    }

    pub fn unreserve(&self, state: &CycleState, pod: &PodInfo, node: &str) {
        for (_, point) in self.reserve.iter().rev() {
            point.unreserve(state, pod, node);
        }
    }

    /// Undoes PreBind.
    pub async fn take_back(&self, pod: &PodInfo, node: &str) {
        for (_, point) in self.pre_bind.iter().rev() {
            point.take_back(pod, node).await;
        }
    }

    /// Permit and PreBind.
    pub async fn pre_bind(&self, pod: &PodInfo, node: &str) -> Result<(), BindError> {
        let timer = Timer::start();
        let permitted = self.permit(pod, node).await;
        let status = families::status(&permitted, families::UNSCHEDULABLE_STATUS);
        families::point("Permit", &self.profile, status, timer);
        if !self.permit.is_empty() {
            families::permitted(permitted.is_ok(), timer);
        }
        permitted?;
        let timer = Timer::start();
        let prepared = self.prepare(pod, node).await;
        let status = families::status(&prepared, families::ERROR);
        families::point("PreBind", &self.profile, status, timer);
        prepared
    }

    async fn permit(&self, pod: &PodInfo, node: &str) -> Result<(), BindError> {
        for (_, point) in &self.permit {
            point.permit(pod, node).await.map_err(BindError::Rejected)?;
        }
        Ok(())
    }

    async fn prepare(&self, pod: &PodInfo, node: &str) -> Result<(), BindError> {
        for (_, point) in &self.pre_bind {
            point.pre_bind(pod, node).await?;
        }
        Ok(())
    }

    pub async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), BindError> {
        let Some((_, point)) = self.bind.first() else { return Ok(()) };
        let timer = Timer::start();
        let bound = point.bind(pod, node).await;
        let status = families::status(&bound, families::ERROR);
        families::point("Bind", &self.profile, status, timer);
        bound
    }

    pub fn post_bind(&self, pod: &PodInfo, node: &str) {
        for (_, point) in &self.post_bind {
            point.post_bind(pod, node);
        }
    }
}

/// How often the filters of one attempt ran: a filter runs on each node that the ones before it accept.
struct Counts<'a> {
    framework: &'a Framework,
    timer: Timer,
    /// By filter: its name, and the nodes that it rejected.
    rejected: Vec<(&'static str, usize)>,
}

impl<'a> Counts<'a> {
    fn new(framework: &'a Framework, filters: &[&(&'static str, Arc<dyn Filter>)]) -> Self {
        let rejected = filters.iter().map(|(name, _)| (*name, 0)).collect();
        Self { framework, timer: Timer::start(), rejected }
    }

    fn rejected(&mut self, plugin: &str) {
        let known = self.rejected.iter_mut().find(|(name, _)| *name == plugin);
        known.into_iter().for_each(|(_, count)| *count += 1);
    }

    fn finish(self, fitting: usize) {
        let profile = &self.framework.profile;
        let mut runs = fitting;
        for (name, rejected) in self.rejected.iter().rev() {
            runs += rejected;
            families::evaluated("Filter", name, profile, runs);
        }
        let is_fitting =
            if fitting > 0 { families::SUCCESS } else { families::UNSCHEDULABLE_STATUS };
        families::point("Filter", profile, is_fitting, self.timer);
    }
}

fn scorers(
    built: &HashMap<&str, (&'static Row, ExtensionPoints)>,
    profile: &Profile,
) -> Result<Vec<Scorer>, ConfigError> {
    let before: Named<dyn PreScore> = at!(built, profile, PreScore, pre_score);
    let has = |name: &str| built.get(name).map(|(_, points)| points.score.is_some());
    let order = profile.choices.at(Point::Score, has)?;
    let made = order.iter().filter_map(|one| {
        let (row, points) = built.get(one.name.as_str())?;
        let before = before.iter().find(|(name, _)| *name == row.name);
        Some(Scorer {
            name: row.name,
            weight: if one.weight == 0 { 1 } else { one.weight },
            before: before.map(|(_, point)| point.clone()),
            score: points.score.clone()?,
        })
    });
    Ok(made.collect())
}

fn filter(
    filters: &[&(&'static str, Arc<dyn Filter>)],
    state: &CycleState,
    pod: &PodInfo,
    node: &NodeInfo,
) -> Result<(), (&'static str, Rejection)> {
    for (name, point) in filters {
        point.filter(state, pod, node).map_err(|rejection| (*name, rejection))?;
    }
    Ok(())
}

/// Picks one of the nodes with the best score at random.
pub fn choose<N>(nodes: Vec<(N, i64)>) -> N {
    let top = nodes.iter().map(|(_, total)| *total).max().unwrap_or(0);
    let mut equals: Vec<N> =
        nodes.into_iter().filter(|(_, total)| *total == top).map(|(name, _)| name).collect();
    let choice = base::rng::below(equals.len() as u64) as usize;
    equals.swap_remove(choice)
}

/// Scales scores so that the highest is 100; `reverse` makes the lowest best.
/// Upstream: `DefaultNormalizeScore`.
pub fn normalize(scores: &mut [i64], reverse: bool) {
    let max = scores.iter().copied().max().unwrap_or(0);
    for score in scores {
        *score = match (max, reverse) {
            (0, true) => MAX_SCORE,
            (0, false) => 0,
            (_, true) => MAX_SCORE - MAX_SCORE * *score / max,
            (_, false) => MAX_SCORE * *score / max,
        };
    }
}
