//! Arguments of plugins, typed and checked.
//!
//! Upstream: `types_pluginargs.go`, `validation_pluginargs.go`.

use std::time::Duration;

use k8s_openapi::api::core::v1::{NodeAffinity, TopologySpreadConstraint};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Of all plugins of a profile.
#[derive(Clone, Debug)]
pub struct Args {
    pub fit: Scoring,
    /// Resources that NodeResourcesFit leaves to others: names, and prefixes of names.
    pub ignored_resources: Vec<String>,
    pub ignored_groups: Vec<String>,
    pub balanced: Vec<ResourceWeight>,
    pub hard_pod_affinity_weight: i64,
    pub ignore_preferred_terms_of_existing_pods: bool,
    pub min_candidates_percentage: usize,
    pub min_candidates: usize,
    pub added_affinity: Option<NodeAffinity>,
    /// `None`: upstream's own.
    pub default_spread: Option<Vec<TopologySpreadConstraint>>,
    /// Deviation: a minute, not ten, unless a file says otherwise: it takes a writer meanwhile, and
    /// the pod is tried again after it.
    pub bind_timeout: Duration,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            fit: Scoring { strategy: Strategy::LeastAllocated, resources: usual() },
            ignored_resources: vec![],
            ignored_groups: vec![],
            balanced: usual(),
            hard_pod_affinity_weight: 1,
            ignore_preferred_terms_of_existing_pods: false,
            min_candidates_percentage: 10,
            min_candidates: 100,
            added_affinity: None,
            default_spread: None,
            bind_timeout: Duration::from_secs(60),
        }
    }
}

/// How NodeResourcesFit scores.
#[derive(Clone, Debug, PartialEq)]
pub struct Scoring {
    pub strategy: Strategy,
    pub resources: Vec<ResourceWeight>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Strategy {
    LeastAllocated,
    MostAllocated,
    /// Points of utilization (percent) and score (0..=10).
    RequestedToCapacityRatio(Vec<(i64, i64)>),
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResourceWeight {
    pub name: String,
    #[serde(default)]
    pub weight: i64,
}

fn usual() -> Vec<ResourceWeight> {
    let one = |name: &str| ResourceWeight { name: name.into(), weight: 1 };
    vec![one("cpu"), one("memory")]
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Fit {
    #[serde(rename = "apiVersion")]
    _api_version: Value,
    #[serde(rename = "kind")]
    _kind: Value,
    ignored_resources: Vec<String>,
    ignored_resource_groups: Vec<String>,
    scoring_strategy: ScoringFile,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ScoringFile {
    #[serde(rename = "type")]
    kind: String,
    resources: Vec<ResourceWeight>,
    requested_to_capacity_ratio: Ratio,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Ratio {
    shape: Vec<ShapePoint>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapePoint {
    #[serde(default)]
    utilization: i64,
    #[serde(default)]
    score: i64,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Others {
    #[serde(rename = "apiVersion")]
    _api_version: Value,
    #[serde(rename = "kind")]
    _kind: Value,
    resources: Option<Vec<ResourceWeight>>,
    hard_pod_affinity_weight: Option<i64>,
    ignore_preferred_terms_of_existing_pods: Option<bool>,
    min_candidate_nodes_percentage: Option<i64>,
    min_candidate_nodes_absolute: Option<i64>,
    added_affinity: Option<NodeAffinity>,
    default_constraints: Option<Vec<TopologySpreadConstraint>>,
    defaulting_type: Option<String>,
    bind_timeout_seconds: Option<i64>,
    shape: Option<Value>,
}

/// Which fields each plugin has.
const FIELDS: &[(&str, &[&str])] = &[
    ("NodeResourcesBalancedAllocation", &["resources"]),
    ("InterPodAffinity", &["hardPodAffinityWeight", "ignorePreferredTermsOfExistingPods"]),
    ("DefaultPreemption", &["minCandidateNodesPercentage", "minCandidateNodesAbsolute"]),
    ("NodeAffinity", &["addedAffinity"]),
    ("PodTopologySpread", &["defaultConstraints", "defaultingType"]),
    ("VolumeBinding", &["bindTimeoutSeconds", "shape"]),
];

impl Args {
    /// Takes over what a file says about one plugin. Plugins that nobody knows may have any.
    pub(super) fn set(&mut self, plugin: &str, args: Value, path: &str, errors: &mut Vec<String>) {
        if plugin == "NodeResourcesFit" {
            if let Some(fit) = read::<Fit>(args, path, errors) {
                self.set_fit(fit, path, errors);
            }
            return;
        }
        let Some((_, fields)) = FIELDS.iter().find(|(name, _)| *name == plugin) else { return };
        let given = args.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        for name in given.filter(|name| !["apiVersion", "kind"].contains(name)) {
            if !fields.contains(&name) {
                errors.push(format!("{path}: strict decoding error: unknown field {name:?}"));
                return;
            }
        }
        if let Some(others) = read::<Others>(args, path, errors) {
            self.set_others(others, path, errors);
        }
    }

    fn set_fit(&mut self, fit: Fit, path: &str, errors: &mut Vec<String>) {
        let path = format!("{path}.scoringStrategy");
        let scoring = fit.scoring_strategy;
        let points: Vec<(i64, i64)> = scoring
            .requested_to_capacity_ratio
            .shape
            .iter()
            .map(|point| (point.utilization, point.score))
            .collect();
        let strategy = match scoring.kind.as_str() {
            "" | "LeastAllocated" => Strategy::LeastAllocated,
            "MostAllocated" => Strategy::MostAllocated,
            "RequestedToCapacityRatio" => {
                let path = format!("{path}.requestedToCapacityRatio.shape");
                check_shape(&points, &path, errors);
                Strategy::RequestedToCapacityRatio(points)
            }
            other => {
                let known = "\"LeastAllocated\", \"MostAllocated\", \"RequestedToCapacityRatio\"";
                errors.push(format!(
                    "{path}.type: Unsupported value: {other:?}: supported values: {known}"
                ));
                return;
            }
        };
        let resources = weights(scoring.resources, &format!("{path}.resources"), errors);
        self.fit = Scoring { strategy, resources };
        self.ignored_resources = fit.ignored_resources;
        self.ignored_groups = fit.ignored_resource_groups;
    }

    fn set_others(&mut self, others: Others, path: &str, errors: &mut Vec<String>) {
        let mut number = |name: &str, value: Option<i64>, range: std::ops::RangeInclusive<i64>| {
            let value = value?;
            if !range.contains(&value) {
                let (from, to) = (range.start(), range.end());
                let why = format!("not in valid range [{from}-{to}]");
                errors.push(format!("{path}.{name}: Invalid value: {value}: {why}"));
            }
            Some(value)
        };
        let weight = number("hardPodAffinityWeight", others.hard_pod_affinity_weight, 0..=100);
        let share =
            number("minCandidateNodesPercentage", others.min_candidate_nodes_percentage, 0..=100);
        let least =
            number("minCandidateNodesAbsolute", others.min_candidate_nodes_absolute, 0..=i64::MAX);
        let timeout = number("bindTimeoutSeconds", others.bind_timeout_seconds, 0..=i64::MAX);
        let positive = |value: i64| usize::try_from(value).unwrap_or_default();
        self.hard_pod_affinity_weight = weight.unwrap_or(self.hard_pod_affinity_weight);
        self.min_candidates_percentage = share.map_or(self.min_candidates_percentage, positive);
        self.min_candidates = least.map_or(self.min_candidates, positive);
        if let Some(seconds) = timeout {
            self.bind_timeout = Duration::from_secs(seconds.max(0).unsigned_abs());
        }
        if let Some(ignore) = others.ignore_preferred_terms_of_existing_pods {
            self.ignore_preferred_terms_of_existing_pods = ignore;
        }
        if let Some(resources) = others.resources {
            self.balanced = weights(resources, &format!("{path}.resources"), errors);
        }
        self.added_affinity = others.added_affinity.or(self.added_affinity.take());
        // Of VolumeBinding: for a gate that is closed.
        drop(others.shape);
        let listed = others.default_constraints.unwrap_or_default();
        match others.defaulting_type.as_deref() {
            Some("List") => self.default_spread = Some(listed),
            None | Some("System") if listed.is_empty() => {}
            None | Some("System") => {
                let why = "when .defaultingType is \"System\", must be empty";
                errors.push(format!("{path}.defaultConstraints: Invalid value: {why}"));
            }
            Some(other) => errors.push(format!(
                "{path}.defaultingType: Unsupported value: {other:?}: supported values: \"List\", \"System\""
            )),
        }
    }
}

fn read<T: DeserializeOwned + Default>(
    args: Value,
    path: &str,
    errors: &mut Vec<String>,
) -> Option<T> {
    if args.is_null() {
        return Some(T::default());
    }
    match serde_json::from_value(args) {
        Ok(args) => Some(args),
        Err(error) => {
            errors.push(format!("{path}: strict decoding error: {error}"));
            None
        }
    }
}

fn weights(
    resources: Vec<ResourceWeight>,
    path: &str,
    errors: &mut Vec<String>,
) -> Vec<ResourceWeight> {
    if resources.is_empty() {
        return usual();
    }
    let checked = resources.into_iter().enumerate().map(|(index, mut one)| {
        // Nought is taken for nothing said.
        if one.weight == 0 {
            one.weight = 1;
        }
        if !(1..=100).contains(&one.weight) {
            let why = format!("resource weight of {} not in valid range [1, 100]", one.name);
            errors.push(format!("{path}[{index}].weight: Invalid value: {}: {why}", one.weight));
        }
        one
    });
    checked.collect()
}

fn check_shape(points: &[(i64, i64)], path: &str, errors: &mut Vec<String>) {
    if points.is_empty() {
        errors.push(format!("{path}: Required value: at least one point must be specified"));
    }
    for (index, (utilization, score)) in points.iter().enumerate() {
        let at = format!("{path}[{index}]");
        let out_of = |most| format!("not in valid range [0-{most}]");
        if !(0..=100).contains(utilization) {
            let why = out_of(100);
            errors.push(format!("{at}.utilization: Invalid value: {utilization}: {why}"));
        }
        if !(0..=10).contains(score) {
            errors.push(format!("{at}.score: Invalid value: {score}: {}", out_of(10)));
        }
        if index > 0 && *utilization <= points[index - 1].0 {
            let why = "utilization values must be sorted in increasing order";
            errors.push(format!("{at}.utilization: Invalid value: {utilization}: {why}"));
        }
    }
}
