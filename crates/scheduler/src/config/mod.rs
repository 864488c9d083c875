//! The scheduler's configuration: a KubeSchedulerConfiguration file, or the defaults.
//!
//! In: YAML or JSON. Out: [`Config`]: profiles with their plugins and arguments, extenders, backoff.
//! Everything that upstream refuses is refused here, before anything runs; what it accepts
//! (unknown names among the disabled) is accepted.
//! Upstream: `pkg/scheduler/apis/config`.

mod args;
mod profile;

use std::time::Duration;

use machinery::field::{FieldErrors, Path};
use serde::Deserialize;
use serde_json::Value;

use args::Unread;
pub use args::{Args, ResourceWeight, Scoring, Strategy};
pub use profile::{Choices, Chosen, Point, Profile, Set};

use profile::PluginsFile;

const API_VERSION: &str = "kubescheduler.config.k8s.io/v1";
const KIND: &str = "KubeSchedulerConfiguration";
pub const DEFAULT_NAME: &str = "default-scheduler";

#[derive(Clone, Debug)]
pub struct Config {
    /// At least one; names differ.
    pub profiles: Vec<Profile>,
    pub extenders: Vec<Extender>,
    pub first_backoff: Duration,
    pub last_backoff: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            profiles: vec![Profile::default()],
            extenders: vec![],
            first_backoff: Duration::from_secs(1),
            last_backoff: Duration::from_secs(10),
        }
    }
}

/// Why a configuration cannot be used, in words for its author.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// An HTTP extender.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Extender {
    pub url_prefix: String,
    pub filter_verb: String,
    pub preempt_verb: String,
    pub prioritize_verb: String,
    pub weight: i64,
    pub bind_verb: String,
    #[serde(rename = "enableHTTPS")]
    pub enable_https: bool,
    pub tls_config: Option<ExtenderTls>,
    pub http_timeout: Option<String>,
    /// It knows the nodes: names do.
    pub node_cache_capable: bool,
    /// Only pods that ask for these concern it; empty: all do.
    pub managed_resources: Vec<ManagedResource>,
    /// Pods are scheduled without it while it is away.
    pub ignorable: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ExtenderTls {
    pub insecure: bool,
    pub server_name: String,
    pub cert_file: String,
    pub key_file: String,
    pub ca_file: String,
    pub cert_data: String,
    pub key_data: String,
    pub ca_data: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ManagedResource {
    pub name: String,
    /// Only the extender checks whether it fits.
    #[serde(default)]
    pub ignored_by_scheduler: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    parallelism: Option<i64>,
    percentage_of_nodes_to_score: Option<i64>,
    pod_initial_backoff_seconds: Option<i64>,
    pod_max_backoff_seconds: Option<i64>,
    #[serde(default)]
    profiles: Vec<ProfileFile>,
    #[serde(default)]
    extenders: Vec<Extender>,
}

/// Fields about the process and not its decisions: accepted, but flags set them.
const OF_THE_PROCESS: [&str; 5] = [
    "leaderElection",
    "clientConnection",
    "enableProfiling",
    "enableContentionProfiling",
    "delayCacheUntilActive",
];

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ProfileFile {
    scheduler_name: Option<String>,
    percentage_of_nodes_to_score: Option<i64>,
    plugins: PluginsFile,
    plugin_config: Vec<PluginConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginConfig {
    name: String,
    #[serde(default)]
    args: Value,
}

impl Config {
    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let wrong = |why: String| ConfigError(format!("strict decoding error: {why}"));
        let mut tree: Value =
            serde_saphyr::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if let Some(fields) = tree.as_object_mut() {
            fields.retain(|name, _| !OF_THE_PROCESS.contains(&name.as_str()));
        }
        let file: File = serde_json::from_value(tree).map_err(|error| wrong(error.to_string()))?;
        if (file.api_version.as_str(), file.kind.as_str()) != (API_VERSION, KIND) {
            return Err(ConfigError(format!(
                "no kind {:?} is registered for version {:?}",
                file.kind, file.api_version
            )));
        }
        let mut errors = file.numbers();
        let (first, last) = file.backoff();
        let general = file.percentage_of_nodes_to_score;
        let mut unknown = vec![];
        let profiles = profiles(file.profiles, general, &mut errors, &mut unknown)?;
        if !unknown.is_empty() {
            return Err(wrong(unknown.join(", ")));
        }
        let config = Self {
            profiles,
            extenders: extenders(file.extenders, &mut errors),
            first_backoff: Duration::from_secs(first.max(0).unsigned_abs()),
            last_backoff: Duration::from_secs(last.max(0).unsigned_abs()),
        };
        match errors.as_slice() {
            [] => Ok(config),
            [one] => Err(ConfigError(one.clone())),
            several => Err(ConfigError(format!("[{}]", several.join(", ")))),
        }
    }
}

fn share(path: &str, value: Option<i64>, errors: &mut Vec<String>) {
    if let Some(value) = value.filter(|value| !(0..=100).contains(value)) {
        errors.push(format!("{path}: Invalid value: {value}: not in valid range [0-100]"));
    }
}

impl File {
    fn backoff(&self) -> (i64, i64) {
        (self.pod_initial_backoff_seconds.unwrap_or(1), self.pod_max_backoff_seconds.unwrap_or(10))
    }

    fn numbers(&self) -> Vec<String> {
        let mut errors = vec![];
        if let Some(parallelism) = self.parallelism.filter(|value| *value <= 0) {
            let why = "should be an integer value greater than zero";
            errors.push(format!("parallelism: Invalid value: {parallelism}: {why}"));
        }
        share("percentageOfNodesToScore", self.percentage_of_nodes_to_score, &mut errors);
        let (first, last) = self.backoff();
        if first <= 0 {
            let path = "podInitialBackoffSeconds";
            errors.push(format!("{path}: Invalid value: {first}: must be greater than 0"));
        }
        if last < first {
            let why = "must be greater than or equal to PodInitialBackoffSeconds";
            errors.push(format!("podMaxBackoffSeconds: Invalid value: {last}: {why}"));
        }
        errors
    }
}

/// `general`: the percentage of nodes for profiles that set none; `unknown`: the unknown fields.
fn profiles(
    files: Vec<ProfileFile>,
    general: Option<i64>,
    errors: &mut Vec<String>,
    unknown: &mut Vec<String>,
) -> Result<Vec<Profile>, ConfigError> {
    let files = if files.is_empty() { vec![ProfileFile::default()] } else { files };
    let is_only = files.len() == 1;
    let mut profiles: Vec<Profile> = vec![];
    for (index, file) in files.into_iter().enumerate() {
        let path = format!("profiles[{index}]");
        let name = match file.scheduler_name {
            None if is_only => DEFAULT_NAME.to_owned(),
            name => name.unwrap_or_default(),
        };
        if name.is_empty() {
            errors.push(format!("{path}.schedulerName: Required value"));
        }
        if let Some(at) = profiles.iter().position(|one| one.name == name) {
            let known = format!("profiles[{at}].schedulerName");
            errors.push(format!("{path}.schedulerName: Duplicate value: {known:?}"));
        }
        let percentage = file.percentage_of_nodes_to_score;
        share(&format!("{path}.percentageOfNodesToScore"), percentage, errors);
        let mut args = Args::default();
        let mut seen = std::collections::BTreeSet::new();
        for (at, one) in file.plugin_config.into_iter().enumerate() {
            let path = format!("{path}.pluginConfig[{at}]");
            if !seen.insert(one.name.clone()) {
                errors.push(format!("{path}: Duplicate value: {:?}", one.name));
            }
            let mut wrong = FieldErrors::default();
            let place = Path::default().named(&format!("{path}.args"));
            match args.set(&one.name, one.args, &place, &mut wrong) {
                Ok(()) => errors.extend(wrong.0.iter().map(ToString::to_string)),
                Err(Unread::Strict(why)) => unknown.push(format!("decoding .{path}: {why}")),
                Err(Unread::Wrong(why)) => {
                    return Err(ConfigError(format!("decoding .{path}: {why}")));
                }
            }
        }
        let percentage = percentage.or(general).and_then(|value| usize::try_from(value).ok());
        let percentage = percentage.unwrap_or_default();
        profiles.push(Profile { name, choices: file.plugins.merged(), args, percentage });
    }
    let sorts = |profile: &Profile| profile.choices.of(Point::QueueSort).clone();
    for (index, profile) in profiles.iter().enumerate().skip(1) {
        if sorts(profile) != sorts(&profiles[0]) {
            let why = "must be the same for all profiles";
            errors.push(format!("profiles[{index}].plugins.queueSort: Invalid value: {why}"));
        }
    }
    Ok(profiles)
}

fn extenders(all: Vec<Extender>, errors: &mut Vec<String>) -> Vec<Extender> {
    let mut managed = std::collections::BTreeSet::new();
    for (index, one) in all.iter().enumerate() {
        let path = format!("extenders[{index}]");
        if !one.prioritize_verb.is_empty() && one.weight <= 0 {
            let why = "must have a positive weight applied to it";
            errors.push(format!("{path}.weight: Invalid value: {}: {why}", one.weight));
        }
        for (at, resource) in one.managed_resources.iter().enumerate() {
            let path = format!("{path}.managedResources[{at}].name");
            let name = &resource.name;
            if !name.contains('/') || name.starts_with("kubernetes.io/") {
                let why = "is an invalid extended resource name";
                errors.push(format!("{path}: Invalid value: {name:?}: {why}"));
            }
            if !managed.insert(name.clone()) {
                let why = "duplicate extender managed resource name";
                errors.push(format!("{path}: Invalid value: {name:?}: {why}"));
            }
        }
    }
    let binders = all.iter().filter(|one| !one.bind_verb.is_empty()).count();
    if binders > 1 {
        errors.push(format!(
            "extenders: Invalid value: \"found {binders} extenders implementing bind\": only one extender can implement bind"
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rest: &str) -> Result<Config, String> {
        let head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n";
        Config::parse(&format!("{head}{rest}")).map_err(|error| error.0)
    }

    /// The error of the file, or an empty text.
    fn check(rest: &str, expected: &str) {
        let found = parse(rest).map(drop).err().unwrap_or_default();
        assert!(
            if expected.is_empty() { found.is_empty() } else { found.contains(expected) },
            "{rest}\n{found}"
        );
    }

    #[test]
    fn files_are_read_as_upstream_reads_them() {
        check("", "");
        check("leaderElection: {leaderElect: false}\nclientConnection: {qps: 100}\n", "");
        check("foo: 1\n", "unknown field");
        check("parallelism: 0\n", "parallelism: Invalid value: 0: should be an integer value");
        check(
            "podInitialBackoffSeconds: 5\npodMaxBackoffSeconds: 2\n",
            "podMaxBackoffSeconds: Invalid value: 2: must be greater than or equal to",
        );
        check("profiles: [{schedulerName: a}, {schedulerName: b}]\n", "");
        check("profiles: [{schedulerName: a}, {}]\n", "profiles[1].schedulerName: Required value");
        check(
            "profiles: [{schedulerName: a}, {schedulerName: a}]\n",
            "profiles[1].schedulerName: Duplicate value: \"profiles[0].schedulerName\"",
        );
        check(
            "extenders: [{urlPrefix: 'http://a', prioritizeVerb: p}]\n",
            "extenders[0].weight: Invalid value: 0: must have a positive weight applied to it",
        );
        check(
            "extenders: [{urlPrefix: a, bindVerb: b}, {urlPrefix: c, bindVerb: b}]\n",
            "only one extender can implement bind",
        );
        let old =
            "apiVersion: kubescheduler.config.k8s.io/v1beta3\nkind: KubeSchedulerConfiguration\n";
        let error = Config::parse(old).expect_err("an old version").0;
        assert_eq!(
            error,
            "no kind \"KubeSchedulerConfiguration\" is registered for version \"kubescheduler.config.k8s.io/v1beta3\""
        );
        assert_eq!(parse("").expect("defaults").profiles[0].name, DEFAULT_NAME);
    }

    #[test]
    fn arguments_are_checked() {
        let args = |name: &str, args: &str| {
            format!("profiles: [{{pluginConfig: [{{name: {name}, args: {args}}}]}}]\n")
        };
        check(&args("Unknown", "{any: thing}"), "");
        check(&args("NodeResourcesFit", "{scoringStrategy: {type: MostAllocated}}"), "");
        check(&args("NodeResourcesFit", "{kind: NodeResourcesFitArgs}"), "");
        let at = "profiles[0].pluginConfig[0].args";
        let cases = [
            (
                "InterPodAffinity",
                "{hardPodAffinityWeight: 101}",
                "hardPodAffinityWeight: Invalid value: 101: not in valid range [0, 100]",
            ),
            (
                "DefaultPreemption",
                "{minCandidateNodesPercentage: 200}",
                "minCandidateNodesPercentage: Invalid value: 200: not in valid range [0, 100]",
            ),
            (
                "DefaultPreemption",
                "{minCandidateNodesAbsolute: -1}",
                "minCandidateNodesAbsolute: Invalid value: -1: not in valid range [0, inf)",
            ),
            (
                "DynamicResources",
                "{filterTimeout: -1s}",
                "filterTimeout: Invalid value: \"-1s\": must be zero or positive",
            ),
            (
                "DynamicResources",
                "{bindingTimeout: 500ms}",
                "bindingTimeout: Invalid value: \"500ms\": must be at least 1 second",
            ),
            (
                "NodeResourcesBalancedAllocation",
                "{resources: [{name: cpu, weight: 2}]}",
                "resources[0].weight: Invalid value: 2: must be 1",
            ),
            (
                "PodTopologySpread",
                "{defaultingType: Other}",
                "defaultingType: Unsupported value: \"Other\": supported values: \"System\", \"List\"",
            ),
            (
                "VolumeBinding",
                "{bindTimeoutSeconds: -1}",
                "bindTimeoutSeconds: Invalid value: -1: invalid BindTimeoutSeconds, should not be a negative value",
            ),
            (
                "VolumeBinding",
                "{shape: [{utilization: 0, score: 10}]}",
                "shape: Invalid value: [{\"Utilization\":0,\"Score\":10}]: unexpected field `shape`, remove it or turn on the feature gate StorageCapacityScoring",
            ),
        ];
        for (plugin, text, expected) in cases {
            check(&args(plugin, text), &format!("{at}.{expected}"));
        }
        let both = args(
            "DefaultPreemption",
            "{minCandidateNodesPercentage: 0, minCandidateNodesAbsolute: 0}",
        );
        check(
            &both,
            &format!(
                "[{at}.minCandidateNodesPercentage: Invalid value: 0: cannot be zero at the same time as minCandidateNodesAbsolute, {at}.minCandidateNodesAbsolute: Invalid value: 0: cannot be zero at the same time as minCandidateNodesPercentage]"
            ),
        );
        let twice = args(
            "PodTopologySpread",
            "{defaultingType: List, defaultConstraints: [
            {maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule},
            {maxSkew: 0, topologyKey: zone, whenUnsatisfiable: DoNotSchedule, labelSelector: {}}]}",
        );
        let path = format!("{at}.defaultConstraints[1]");
        check(
            &twice,
            &format!(
                "[{path}.maxSkew: Invalid value: 0: not in valid range (0, inf), {path}.labelSelector: Forbidden: constraint must not define a selector, as they deduced for each pod, {path}: Duplicate value: \"{{zone, DoNotSchedule}}\"]"
            ),
        );
    }

    #[test]
    fn arguments_that_cannot_be_read_are_told_as_upstream_tells_them() {
        let one = |name: &str, args: &str| {
            let config = format!("{{name: {name}, args: {args}}}");
            parse(&format!("profiles: [{{pluginConfig: [{config}]}}]\n")).map(drop).unwrap_err()
        };
        assert_eq!(
            one("NodeResourcesFit", "{foo: 1}"),
            "strict decoding error: decoding .profiles[0].pluginConfig[0]: strict decoding error: decoding args for plugin NodeResourcesFit: strict decoding error: unknown field \"foo\""
        );
        assert_eq!(
            one("DynamicResources", "{kind: VolumeBindingArgs}"),
            "decoding .profiles[0].pluginConfig[0]: args for plugin DynamicResources were not of type DynamicResourcesArgs.kubescheduler.config.k8s.io, got VolumeBindingArgs.kubescheduler.config.k8s.io"
        );
        assert_eq!(
            one("DynamicResources", "{filterTimeout: soon}"),
            "decoding .profiles[0].pluginConfig[0]: decoding args for plugin DynamicResources: time: invalid duration \"soon\""
        );
    }

    #[test]
    fn timeouts_of_devices_are_taken_over() {
        let args = |text: &str| {
            let config = format!("{{name: DynamicResources, args: {text}}}");
            let file = parse(&format!("profiles: [{{pluginConfig: [{config}]}}]\n"));
            file.expect("a file").profiles.remove(0).args
        };
        let second = Duration::from_secs(1);
        assert_eq!(args("{}").filter_timeout, None);
        assert_eq!(args("{filterTimeout: 0s}").filter_timeout, Some(None));
        assert_eq!(args("{filterTimeout: 1s}").filter_timeout, Some(Some(second)));
        assert_eq!(args("{bindingTimeout: 1s}").binding_timeout, Some(second));
    }
}
