//! Arguments of plugins, typed and checked.
//!
//! In: the arguments of each plugin in a file. Out: [`Args`], or upstream's errors: unknown fields
//! ([`Unread`]) before invalid values.
//! Upstream: `types_pluginargs.go`, `validation_pluginargs.go`.

use std::time::Duration;

use k8s_openapi::api::core::v1::{NodeAffinity, TopologySpreadConstraint};
use machinery::field::{FieldErrors, Path};
use machinery::names;
use serde::Deserialize;
use serde_json::{Value, json};

/// The arguments of all plugins of a profile.
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
    /// The timeout of the search for devices on one node. `Some(None)`: the file sets no timeout.
    pub filter_timeout: Option<Option<Duration>>,
    /// How long devices may take to be made ready, if a file says it.
    pub binding_timeout: Option<Duration>,
    /// What NodeResourcesFit refuses when it is made: upstream looks at its arguments no sooner.
    pub fit_refused: Option<String>,
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
            filter_timeout: None,
            binding_timeout: None,
            fit_refused: None,
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
    /// ExtensionPoints of utilization (percent) and score (0..=10).
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

/// Why a file's arguments cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub enum Unread {
    /// Unknown fields: one error lists them all.
    Strict(String),
    /// They are something else altogether.
    Wrong(String),
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Fit {
    ignored_resources: Vec<String>,
    ignored_resource_groups: Vec<String>,
    scoring_strategy: Option<ScoringFile>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ScoringFile {
    #[serde(rename = "type")]
    kind: String,
    resources: Vec<ResourceWeight>,
    requested_to_capacity_ratio: Option<Ratio>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Ratio {
    shape: Vec<ShapePoint>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ShapePoint {
    utilization: i32,
    score: i32,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Balanced {
    resources: Vec<ResourceWeight>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Affinity {
    hard_pod_affinity_weight: Option<i32>,
    ignore_preferred_terms_of_existing_pods: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Preemption {
    min_candidate_nodes_percentage: Option<i32>,
    min_candidate_nodes_absolute: Option<i32>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Nodes {
    added_affinity: Option<NodeAffinity>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Topology {
    default_constraints: Vec<TopologySpreadConstraint>,
    defaulting_type: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Volumes {
    bind_timeout_seconds: Option<i64>,
    shape: Option<Vec<ShapePoint>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Devices {
    filter_timeout: Option<Timeout>,
    binding_timeout: Option<Timeout>,
}

/// As Go writes it, in nanoseconds.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct Timeout(i64);

impl TryFrom<String> for Timeout {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        base::duration::nanos(&text).map(Self)
    }
}

impl Timeout {
    fn shown(self) -> String {
        base::duration::text(self.0)
    }

    fn duration(self) -> Duration {
        Duration::from_nanos(self.0.max(0).unsigned_abs())
    }
}

type Read = fn(&mut Args, Value, &Path, &mut FieldErrors) -> Result<(), serde_json::Error>;

/// The plugins that have arguments.
const READERS: &[(&str, Read)] = &[
    ("DefaultPreemption", Args::read_preemption),
    ("DynamicResources", Args::read_devices),
    ("InterPodAffinity", Args::read_affinity),
    ("NodeAffinity", Args::read_nodes),
    ("NodeResourcesBalancedAllocation", Args::read_balanced),
    ("NodeResourcesFit", Args::read_fit),
    ("PodTopologySpread", Args::read_topology),
    ("VolumeBinding", Args::read_volumes),
];

impl Args {
    /// Reads the arguments of one plugin from a file. Unknown plugins may have any arguments.
    pub(super) fn set(
        &mut self,
        plugin: &str,
        mut args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), Unread> {
        let Some((_, read)) = READERS.iter().find(|(name, _)| *name == plugin) else {
            return Ok(());
        };
        if args.is_null() {
            args = json!({});
        }
        if let Some(fields) = args.as_object_mut() {
            fields.remove("apiVersion");
            let kind = fields.remove("kind");
            let own = format!("{plugin}Args");
            let group = "kubescheduler.config.k8s.io";
            if let Some(kind) = kind.as_ref().and_then(Value::as_str).filter(|kind| *kind != own) {
                return Err(Unread::Wrong(format!(
                    "args for plugin {plugin} were not of type {own}.{group}, got {kind}.{group}"
                )));
            }
        }
        read(self, args, path, errors).map_err(|error| {
            let (head, why) = (format!("decoding args for plugin {plugin}"), error.to_string());
            match why.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
                Some((name, _)) => {
                    let why = format!("strict decoding error: unknown field {name:?}");
                    Unread::Strict(format!("strict decoding error: {head}: {why}"))
                }
                None => Unread::Wrong(format!("{head}: {why}")),
            }
        })
    }

    fn read_preemption(
        &mut self,
        args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Preemption = serde_json::from_value(args)?;
        let share = file.min_candidate_nodes_percentage.unwrap_or(10);
        let least = file.min_candidate_nodes_absolute.unwrap_or(100);
        let at = ["minCandidateNodesPercentage", "minCandidateNodesAbsolute"];
        let paths = at.map(|name| path.child(name));
        if !(0..=100).contains(&share) {
            errors.invalid(&paths[0], share, "not in valid range [0, 100]");
        }
        if least < 0 {
            errors.invalid(&paths[1], least, "not in valid range [0, inf)");
        }
        if share == 0 && least == 0 {
            for (path, other) in paths.iter().zip(at.iter().rev()) {
                errors.invalid(path, 0, &format!("cannot be zero at the same time as {other}"));
            }
        }
        self.min_candidates_percentage = usize::try_from(share).unwrap_or_default();
        self.min_candidates = usize::try_from(least).unwrap_or_default();
        Ok(())
    }

    fn read_devices(
        &mut self,
        args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Devices = serde_json::from_value(args)?;
        if let Some(limit) = file.filter_timeout {
            if limit.0 < 0 {
                let path = path.child("filterTimeout");
                errors.invalid(&path, limit.shown(), "must be zero or positive");
            }
            self.filter_timeout = Some((limit.0 > 0).then(|| limit.duration()));
        }
        if let Some(limit) = file.binding_timeout {
            if limit.duration() < Duration::from_secs(1) {
                let path = path.child("bindingTimeout");
                errors.invalid(&path, limit.shown(), "must be at least 1 second");
            }
            self.binding_timeout = Some(limit.duration());
        }
        Ok(())
    }

    fn read_affinity(
        &mut self,
        args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Affinity = serde_json::from_value(args)?;
        let weight = file.hard_pod_affinity_weight.unwrap_or(1);
        if !(0..=100).contains(&weight) {
            let path = path.child("hardPodAffinityWeight");
            errors.invalid(&path, weight, "not in valid range [0, 100]");
        }
        self.hard_pod_affinity_weight = weight.into();
        self.ignore_preferred_terms_of_existing_pods = file.ignore_preferred_terms_of_existing_pods;
        Ok(())
    }

    fn read_nodes(
        &mut self,
        args: Value,
        _: &Path,
        _: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Nodes = serde_json::from_value(args)?;
        self.added_affinity = file.added_affinity;
        Ok(())
    }

    fn read_balanced(
        &mut self,
        args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Balanced = serde_json::from_value(args)?;
        let resources = or_usual(file.resources);
        for (index, one) in resources.iter().enumerate() {
            let path = path.child("resources").index(index);
            if resources[..index].iter().any(|known| known.name == one.name) {
                errors.duplicate(&path.child("name"), &one.name);
            }
            if one.weight != 1 {
                errors.invalid(&path.child("weight"), one.weight, "must be 1");
            }
        }
        self.balanced = resources;
        Ok(())
    }

    fn read_fit(
        &mut self,
        args: Value,
        _: &Path,
        _: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Fit = serde_json::from_value(args)?;
        let mut errors = FieldErrors::default();
        let root = Path::default();
        for (index, name) in file.ignored_resources.iter().enumerate() {
            check_label(name, &root.child("ignoredResources").index(index), &mut errors);
        }
        for (index, group) in file.ignored_resource_groups.iter().enumerate() {
            let path = root.child("ignoredResourceGroups").index(index);
            if group.contains('/') {
                errors.invalid(&path, group, "resource group name can't contain '/'");
            }
            check_label(group, &path, &mut errors);
        }
        if let Some(scoring) = file.scoring_strategy {
            self.fit = scoring.checked(&root.child("scoringStrategy"), &mut errors);
        }
        self.ignored_resources = file.ignored_resources;
        self.ignored_groups = file.ignored_resource_groups;
        self.fit_refused = Some(joined(&errors)).filter(|why| !why.is_empty());
        Ok(())
    }

    fn read_topology(
        &mut self,
        args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Topology = serde_json::from_value(args)?;
        let all = file.default_constraints;
        let kind = path.child("defaultingType");
        match file.defaulting_type.as_str() {
            "List" => {}
            "" | "System" if all.is_empty() => {}
            "" | "System" => {
                errors.invalid(&kind, "System", "when .defaultConstraints are not empty");
            }
            other => errors.not_supported(&kind, other, &["System", "List"]),
        }
        for index in 0..all.len() {
            check_constraint(&all, index, &path.child("defaultConstraints"), errors);
        }
        self.default_spread = (file.defaulting_type == "List").then_some(all);
        Ok(())
    }

    fn read_volumes(
        &mut self,
        args: Value,
        path: &Path,
        errors: &mut FieldErrors,
    ) -> Result<(), serde_json::Error> {
        let file: Volumes = serde_json::from_value(args)?;
        if let Some(seconds) = file.bind_timeout_seconds {
            if seconds < 0 {
                let why = "invalid BindTimeoutSeconds, should not be a negative value";
                errors.invalid(&path.child("bindTimeoutSeconds"), seconds, why);
            }
            self.bind_timeout = Duration::from_secs(seconds.max(0).unsigned_abs());
        }
        if let Some(shape) = file.shape {
            // As upstream's own type reads, which has no names for JSON.
            let point = |one: &ShapePoint| {
                format!("{{\"Utilization\":{},\"Score\":{}}}", one.utilization, one.score)
            };
            let shown: Vec<String> = shape.iter().map(point).collect();
            let shown = format!("[{}]", shown.join(","));
            let why = "unexpected field `shape`, remove it or turn on the feature gate StorageCapacityScoring";
            errors.invalid_shown(&path.child("shape"), Some(&shown), why);
        }
        Ok(())
    }
}

/// As upstream tells several.
pub(super) fn joined(errors: &FieldErrors) -> String {
    match errors.0.as_slice() {
        [] => String::new(),
        [one] => one.to_string(),
        several => {
            let texts: Vec<String> = several.iter().map(ToString::to_string).collect();
            format!("[{}]", texts.join(", "))
        }
    }
}

fn check_label(name: &str, path: &Path, errors: &mut FieldErrors) {
    for why in names::qualified_name(name) {
        errors.invalid(path, name, &why);
    }
}

/// Nothing said, or a weight of nought, is taken for the usual.
fn or_usual(mut resources: Vec<ResourceWeight>) -> Vec<ResourceWeight> {
    if resources.is_empty() {
        return usual();
    }
    for one in &mut resources {
        if one.weight == 0 {
            one.weight = 1;
        }
    }
    resources
}

impl ScoringFile {
    fn checked(self, path: &Path, errors: &mut FieldErrors) -> Scoring {
        const KNOWN: [&str; 3] = ["LeastAllocated", "MostAllocated", "RequestedToCapacityRatio"];
        if !KNOWN.contains(&self.kind.as_str()) {
            errors.not_supported(&path.child("type"), &self.kind, &KNOWN);
        }
        let resources = or_usual(self.resources);
        for (index, one) in resources.iter().enumerate() {
            if !(1..=100).contains(&one.weight) {
                let path = path.child("resources").index(index).child("weight");
                let why = format!("resource weight of {} not in valid range (0, 100]", one.name);
                errors.invalid(&path, one.weight, &why);
            }
        }
        let at = path.child("requestedToCapacityRatio");
        let strategy = match (self.kind.as_str(), self.requested_to_capacity_ratio) {
            ("RequestedToCapacityRatio", Some(ratio)) => {
                check_shape(&ratio.shape, &at.child("shape"), errors);
                let points = ratio.shape.iter();
                let points = points.map(|one| (one.utilization.into(), one.score.into()));
                Strategy::RequestedToCapacityRatio(points.collect())
            }
            ("RequestedToCapacityRatio", None) => {
                errors.required(&at, "must be specified when type is RequestedToCapacityRatio");
                Strategy::LeastAllocated
            }
            (kind, ratio) => {
                if ratio.is_some() {
                    errors.forbidden(&at, "must be nil when type is not RequestedToCapacityRatio");
                }
                match kind {
                    "MostAllocated" => Strategy::MostAllocated,
                    _ => Strategy::LeastAllocated,
                }
            }
        };
        Scoring { strategy, resources }
    }
}

fn check_shape(points: &[ShapePoint], path: &Path, errors: &mut FieldErrors) {
    if points.is_empty() {
        return errors.required(path, "at least one point must be specified");
    }
    let falls = |pair: &[ShapePoint]| pair[0].utilization >= pair[1].utilization;
    if let Some(index) = points.windows(2).position(falls) {
        let path = path.index(index + 1).child("utilization");
        let why = "values must be sorted in increasing order";
        errors.invalid(&path, points[index + 1].utilization, why);
    }
    for (index, point) in points.iter().enumerate() {
        let path = path.index(index);
        for (name, value, most) in
            [("utilization", point.utilization, 100), ("score", point.score, 10)]
        {
            if !(0..=most).contains(&value) {
                let why = format!("not in valid range [0, {most}]");
                errors.invalid(&path.child(name), value, &why);
            }
        }
    }
}

fn check_constraint(
    all: &[TopologySpreadConstraint],
    index: usize,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let (one, path) = (&all[index], path.index(index));
    if one.max_skew <= 0 {
        errors.invalid(&path.child("maxSkew"), one.max_skew, "not in valid range (0, inf)");
    }
    let key = path.child("topologyKey");
    match one.topology_key.as_str() {
        "" => errors.required(&key, "can not be empty"),
        name => check_label(name, &key, errors),
    }
    let action = path.child("whenUnsatisfiable");
    match one.when_unsatisfiable.as_str() {
        "" => errors.required(&action, "can not be empty"),
        "DoNotSchedule" | "ScheduleAnyway" => {}
        other => errors.not_supported(&action, other, &["DoNotSchedule", "ScheduleAnyway"]),
    }
    if one.label_selector.is_some() {
        let why = "constraint must not define a selector, as they deduced for each pod";
        errors.forbidden(&path.child("labelSelector"), why);
    }
    let same = |other: &TopologySpreadConstraint| {
        other.topology_key == one.topology_key && other.when_unsatisfiable == one.when_unsatisfiable
    };
    if all[..index].iter().any(same) {
        let shown = format!("{{{}, {}}}", one.topology_key, one.when_unsatisfiable);
        errors.duplicate(&path, shown);
    }
}
