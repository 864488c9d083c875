//! The framework: extension points as traits, and what runs plugins through them.
//!
//! Upstream: `pkg/scheduler/framework`. A plugin implements the points it needs and registers them
//! in [`Points`]; state that it works out once per pod goes into the [`CycleState`].
//!
//! Invariants: plugins read the cluster and never change it; every rejection has a message for
//! people; scores lie in 0..=100 before weights.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;

use crate::cluster::Cluster;
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::volumes::Volumes;

pub const MAX_SCORE: i64 = 100;

/// Why a node, or all of them, will not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub reasons: Vec<String>,
    /// Removing pods would not help.
    pub unresolvable: bool,
}

impl Rejection {
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reasons: vec![reason.into()], unresolvable: false }
    }

    pub fn unresolvable(reason: impl Into<String>) -> Self {
        Self { reasons: vec![reason.into()], unresolvable: true }
    }
}

/// What plugins remember between points, for one pod.
#[derive(Default)]
pub struct CycleState(HashMap<&'static str, Box<dyn Any + Send + Sync>>);

impl CycleState {
    pub fn put<T: Any + Send + Sync>(&mut self, plugin: &'static str, value: T) {
        self.0.insert(plugin, Box::new(value));
    }

    pub fn get<T: Any>(&self, plugin: &'static str) -> Option<&T> {
        self.0.get(plugin)?.downcast_ref()
    }
}

/// What PreFilter leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Filter,
    /// The plugin's Filter has nothing to say about this pod.
    Skip,
}

/// What happened in the cluster that may let a rejected pod fit.
#[derive(Clone, Debug)]
pub enum ClusterEvent {
    NodeAdded(String),
    NodeUpdated(String),
    NodeRemoved,
    /// A pod got a node, or one with a node changed its labels or requests.
    PodAssigned(Arc<PodInfo>),
    PodRemoved(Arc<PodInfo>),
    /// The waiting pod itself changed.
    PodUpdated,
    NamespaceChanged,
    /// A claim, a volume or a class came or changed.
    VolumesChanged,
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

/// Runs when no node fits: may make room.
pub trait PostFilter: Send + Sync {
    fn post_filter(
        &self,
        framework: &Framework,
        pod: &PodInfo,
        cluster: &Cluster,
        why: &Diagnosis,
    ) -> PostFiltered;
}

pub struct PostFiltered {
    /// Where room will be, after the victims are gone.
    pub nominated: Option<String>,
    pub victims: Vec<Arc<PodInfo>>,
    pub message: String,
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
    fn pre_bind<'a>(&'a self, pod: &'a PodInfo, node: &'a str)
    -> BoxFuture<'a, Result<(), String>>;
}

pub trait Bind: Send + Sync {
    fn bind<'a>(&'a self, pod: &'a PodInfo, node: &'a str) -> BoxFuture<'a, Result<(), String>>;
}

pub trait PostBind: Send + Sync {
    fn post_bind(&self, pod: &PodInfo, node: &str);
}

/// The points of one plugin.
#[derive(Default)]
pub struct Points {
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

/// What a plugin is made with.
pub struct Handle {
    pub client: client::Client,
    /// Claims and volumes; tests without any have none.
    pub volumes: Option<Volumes>,
}

/// A row of the table of plugins.
pub struct Row {
    pub name: &'static str,
    pub weight: i64,
    pub build: fn(&Handle) -> Points,
    /// The queueing hint: whether the event may let a pod fit that this plugin rejected.
    pub helps: fn(&PodInfo, &ClusterEvent) -> bool,
}

struct Plugin {
    row: &'static Row,
    points: Points,
}

/// The plugins of a profile.
pub struct Framework {
    plugins: Vec<Plugin>,
}

/// Why a pod fits nowhere.
#[derive(Clone, Debug, Default)]
pub struct Diagnosis {
    pub nodes: usize,
    /// Said by a PreFilter about all nodes.
    pub general: Option<String>,
    pub rejections: BTreeMap<String, Rejection>,
    /// Who rejected: their hints decide when to try again.
    pub plugins: BTreeSet<&'static str>,
    pub post_filter: String,
}

impl fmt::Display for Diagnosis {
    /// Upstream: `FitError.Error`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
            texts.sort();
            write!(f, " {}.", texts.join(", "))?;
        }
        if !self.post_filter.is_empty() {
            write!(f, " {}", self.post_filter)?;
        }
        Ok(())
    }
}

impl Framework {
    pub fn new(table: &'static [Row], handle: &Handle) -> Self {
        let plugins = table.iter().map(|row| Plugin { row, points: (row.build)(handle) }).collect();
        Self { plugins }
    }

    pub fn rank(&self, pod: &PodInfo) -> i64 {
        let sort = self.plugins.iter().find_map(|plugin| plugin.points.queue_sort.as_ref());
        sort.map_or(0, |sort| sort.rank(pod))
    }

    pub fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), (&'static str, Rejection)> {
        for plugin in &self.plugins {
            if let Some(point) = &plugin.points.pre_enqueue {
                point.pre_enqueue(pod).map_err(|rejection| (plugin.row.name, rejection))?;
            }
        }
        Ok(())
    }

    /// Whether the event may help a pod that `plugins` rejected.
    pub fn helps(
        &self,
        plugins: &BTreeSet<&'static str>,
        pod: &PodInfo,
        event: &ClusterEvent,
    ) -> bool {
        plugins.is_empty()
            || self
                .plugins
                .iter()
                .any(|plugin| plugins.contains(plugin.row.name) && (plugin.row.helps)(pod, event))
    }

    /// The best node for a pod. Pure but for the choice among equals.
    pub fn schedule(&self, pod: &PodInfo, cluster: &Cluster) -> Result<String, Diagnosis> {
        let mut state = CycleState::default();
        let mut diagnosis = Diagnosis { nodes: cluster.nodes().count(), ..Default::default() };
        if diagnosis.nodes == 0 {
            return Err(diagnosis);
        }
        let skipped = match self.pre_filter(&mut state, pod, cluster) {
            Ok(skipped) => skipped,
            Err((plugin, rejection)) => {
                diagnosis.plugins.insert(plugin);
                diagnosis.general = Some(rejection.reasons.join(", "));
                let all = cluster.nodes().map(|node| (node.name.clone(), rejection.clone()));
                diagnosis.rejections = all.collect();
                return Err(diagnosis);
            }
        };
        let mut fitting = vec![];
        for node in cluster.nodes() {
            match self.filter_with_nominated(&state, pod, node, cluster, &skipped) {
                Ok(()) => fitting.push(node),
                Err((plugin, rejection)) => {
                    diagnosis.plugins.insert(plugin);
                    diagnosis.rejections.insert(node.name.clone(), rejection);
                }
            }
        }
        match fitting.as_slice() {
            [] => Err(diagnosis),
            [only] => Ok(only.name.clone()),
            _ => Ok(self.best(&mut state, pod, cluster, &fitting)),
        }
    }

    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<BTreeSet<&'static str>, (&'static str, Rejection)> {
        let mut skipped = BTreeSet::new();
        for plugin in &self.plugins {
            if let Some(point) = &plugin.points.pre_filter {
                match point.pre_filter(state, pod, cluster) {
                    Ok(Next::Filter) => {}
                    Ok(Next::Skip) => {
                        skipped.insert(plugin.row.name);
                    }
                    Err(rejection) => return Err((plugin.row.name, rejection)),
                }
            }
        }
        Ok(skipped)
    }

    fn filter(
        &self,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
        skipped: &BTreeSet<&'static str>,
    ) -> Result<(), (&'static str, Rejection)> {
        for plugin in self.plugins.iter().filter(|plugin| !skipped.contains(plugin.row.name)) {
            if let Some(point) = &plugin.points.filter {
                point.filter(state, pod, node).map_err(|rejection| (plugin.row.name, rejection))?;
            }
        }
        Ok(())
    }

    /// A node must do with the pods that are to come there by preemption, and without.
    fn filter_with_nominated(
        &self,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
        cluster: &Cluster,
        skipped: &BTreeSet<&'static str>,
    ) -> Result<(), (&'static str, Rejection)> {
        let nominated = cluster.nominated_on(&node.name, pod);
        if !nominated.is_empty() {
            let mut fuller = node.clone();
            nominated.into_iter().for_each(|one| fuller.add(one));
            let changed = cluster.with_node(fuller.clone());
            let mut state = CycleState::default();
            let skipped = self.pre_filter(&mut state, pod, &changed)?;
            self.filter(&state, pod, &fuller, &skipped)?;
        }
        self.filter(state, pod, node, skipped)
    }

    /// Whether the pod fits on a node as it would be: for preemption.
    pub fn would_fit(&self, pod: &PodInfo, node: &NodeInfo, cluster: &Cluster) -> bool {
        let changed = cluster.with_node(node.clone());
        let mut state = CycleState::default();
        match self.pre_filter(&mut state, pod, &changed) {
            Ok(skipped) => self.filter(&state, pod, node, &skipped).is_ok(),
            Err(_) => false,
        }
    }

    fn best(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
        nodes: &[&NodeInfo],
    ) -> String {
        let mut totals = vec![0i64; nodes.len()];
        for plugin in &self.plugins {
            let Some(point) = &plugin.points.score else {
                continue;
            };
            if let Some(before) = &plugin.points.pre_score
                && before.pre_score(state, pod, cluster, nodes) == Next::Skip
            {
                continue;
            }
            let mut scores: Vec<_> =
                nodes.iter().map(|node| point.score(state, pod, node, cluster)).collect();
            point.normalize(state, pod, &mut scores);
            for (total, score) in totals.iter_mut().zip(scores) {
                debug_assert!(
                    (0..=MAX_SCORE).contains(&score),
                    "{} scored {score}",
                    plugin.row.name
                );
                *total += score * plugin.row.weight;
            }
        }
        let top = totals.iter().max().copied().unwrap_or(0);
        let equals: Vec<_> =
            nodes.iter().zip(&totals).filter(|(_, total)| **total == top).collect();
        let choice = base::rng::below(equals.len() as u64) as usize;
        equals[choice].0.name.clone()
    }

    pub fn post_filter(
        &self,
        pod: &PodInfo,
        cluster: &Cluster,
        diagnosis: &Diagnosis,
    ) -> Option<PostFiltered> {
        let point = self.plugins.iter().find_map(|plugin| plugin.points.post_filter.as_ref())?;
        Some(point.post_filter(self, pod, cluster, diagnosis))
    }

    pub fn reserve(&self, pod: &PodInfo, node: &str) -> Result<CycleState, Rejection> {
        let mut state = CycleState::default();
        for plugin in &self.plugins {
            if let Some(point) = &plugin.points.reserve
                && let Err(rejection) = point.reserve(&mut state, pod, node)
            {
                self.unreserve(&state, pod, node);
                return Err(rejection);
            }
        }
        Ok(state)
    }

    pub fn unreserve(&self, state: &CycleState, pod: &PodInfo, node: &str) {
        for plugin in self.plugins.iter().rev() {
            if let Some(point) = &plugin.points.reserve {
                point.unreserve(state, pod, node);
            }
        }
    }

    /// Permit, PreBind, Bind, PostBind.
    pub async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), String> {
        for plugin in &self.plugins {
            if let Some(point) = &plugin.points.permit {
                point.permit(pod, node).await.map_err(|rejection| rejection.reasons.join(", "))?;
            }
        }
        for plugin in &self.plugins {
            if let Some(point) = &plugin.points.pre_bind {
                point.pre_bind(pod, node).await?;
            }
        }
        if let Some(point) = self.plugins.iter().find_map(|plugin| plugin.points.bind.as_ref()) {
            point.bind(pod, node).await?;
        }
        for plugin in &self.plugins {
            if let Some(point) = &plugin.points.post_bind {
                point.post_bind(pod, node);
            }
        }
        Ok(())
    }
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
