//! The policy file: `DeschedulerPolicy` of `descheduler/v1alpha2`.
//!
//! In: YAML or JSON. Out: profiles with their plugins, or every mistake in one error. Unknown fields are
//! mistakes. Upstream: `pkg/api/v1alpha2`, `pkg/descheduler/policyconfig.go`.

use machinery::selector::Selector;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::evictor::{Args, DefaultEvictor};
use crate::plugins::{self, Plugin, Point};

/// The plugin that filters pods in each profile.
const EVICTOR: &str = "DefaultEvictor";

pub struct Policy {
    pub profiles: Vec<Profile>,
    /// Nodes that take part.
    pub node_selector: Selector,
    pub limits: Limits,
    /// Failed evictions get an event, too.
    pub notes_failures: bool,
    pub grace_period: Option<i64>,
}

/// The most evictions of one cycle.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    pub per_node: Option<usize>,
    pub per_namespace: Option<usize>,
    pub total: Option<usize>,
}

pub struct Profile {
    pub name: String,
    pub evictor: DefaultEvictor,
    plugins: Vec<(Point, &'static str, Box<dyn Plugin>)>,
}

impl Profile {
    pub fn plugins(&self, point: Point) -> impl Iterator<Item = (&'static str, &dyn Plugin)> {
        let of_point = self.plugins.iter().filter(move |(at, ..)| *at == point);
        of_point.map(|(_, name, plugin)| (*name, plugin.as_ref()))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("failed decoding descheduler's policy config: {0}")]
    Syntax(String),
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
}

/// The mistakes of a plugin's arguments.
pub type Mistakes = Vec<String>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    profiles: Vec<ProfileFile>,
    node_selector: Option<String>,
    max_no_of_pods_to_evict_per_node: Option<usize>,
    max_no_of_pods_to_evict_per_namespace: Option<usize>,
    max_no_of_pods_to_evict_total: Option<usize>,
    eviction_failure_event_notification: Option<bool>,
    grace_period_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProfileFile {
    name: String,
    #[serde(default)]
    plugin_config: Vec<PluginConfig>,
    #[serde(default)]
    plugins: Points,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PluginConfig {
    name: String,
    args: Option<Value>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Points {
    presort: Set,
    sort: Set,
    deschedule: Set,
    balance: Set,
    filter: Set,
    preevictionfilter: Set,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Set {
    enabled: Vec<String>,
    /// Read and without effect, as upstream.
    #[serde(rename = "disabled")]
    _disabled: Vec<String>,
}

impl Policy {
    /// # Errors
    /// The file cannot be read as a policy, or plugins or arguments are wrong.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let file: File =
            serde_saphyr::from_str(text).map_err(|error| PolicyError::Syntax(error.to_string()))?;
        if (file.api_version.as_str(), file.kind.as_str())
            != ("descheduler/v1alpha2", "DeschedulerPolicy")
        {
            let (kind, version) = (&file.kind, &file.api_version);
            return Err(PolicyError::Syntax(format!(
                "no kind {kind:?} is registered for version {version:?}; a policy is a DeschedulerPolicy of descheduler/v1alpha2"
            )));
        }
        let mut mistakes = vec![];
        let selector = Selector::parse_labels(file.node_selector.as_deref().unwrap_or_default());
        let node_selector = selector.unwrap_or_else(|error| {
            mistakes.push(format!("nodeSelector: {error}"));
            Selector::nothing()
        });
        let profiles: Vec<Option<Profile>> =
            file.profiles.into_iter().map(|one| profile(one, &mut mistakes)).collect();
        if !mistakes.is_empty() {
            return Err(PolicyError::Invalid(mistakes));
        }
        Ok(Self {
            profiles: profiles.into_iter().flatten().collect(),
            node_selector,
            limits: Limits {
                per_node: file.max_no_of_pods_to_evict_per_node,
                per_namespace: file.max_no_of_pods_to_evict_per_namespace,
                total: file.max_no_of_pods_to_evict_total,
            },
            notes_failures: file.eviction_failure_event_notification.unwrap_or(false),
            grace_period: file.grace_period_seconds,
        })
    }
}

/// A profile, unless it has mistakes.
fn profile(file: ProfileFile, mistakes: &mut Mistakes) -> Option<Profile> {
    let before = mistakes.len();
    let name = &file.name;
    for config in &file.plugin_config {
        if config.name != EVICTOR && plugins::row(&config.name).is_none() {
            let plugin = &config.name;
            mistakes
                .push(format!("in profile {name}: plugin {plugin} in pluginConfig not registered"));
        }
    }
    for (point, set) in [
        ("filter", &file.plugins.filter),
        ("preEvictionFilter", &file.plugins.preevictionfilter),
        ("presort", &file.plugins.presort),
        ("sort", &file.plugins.sort),
    ] {
        let is_filter = point.ends_with("ilter");
        let unknown = set.enabled.iter().filter(|one| !(is_filter && *one == EVICTOR));
        mistakes.extend(unknown.map(|one| unfit(name, point, one)));
    }
    let mut chosen = vec![];
    for (point, set) in
        [(Point::Deschedule, &file.plugins.deschedule), (Point::Balance, &file.plugins.balance)]
    {
        for plugin in &set.enabled {
            match build(&file, point, plugin) {
                Ok((name, built)) => chosen.push((point, name, built)),
                Err(wrong) => mistakes.extend(wrong),
            }
        }
    }
    let args = configured(&file.plugin_config, EVICTOR).flatten();
    let evictor = args_of::<Args>(args).and_then(DefaultEvictor::new);
    let evictor = evictor
        .map_err(|wrong| mistakes.extend(in_profile(name, wrong)))
        .ok()
        .filter(|_| mistakes.len() == before)?;
    Some(Profile { name: file.name, evictor, plugins: chosen })
}

fn build(
    file: &ProfileFile,
    point: Point,
    plugin: &str,
) -> Result<(&'static str, Box<dyn Plugin>), Mistakes> {
    let name = &file.name;
    let row = plugins::row(plugin).filter(|row| row.point == point);
    let row = row.ok_or_else(|| vec![unfit(name, point.name(), plugin)])?;
    let args = configured(&file.plugin_config, plugin).ok_or_else(|| {
        vec![format!("in profile {name}: unable to find {plugin:?} plugin config")]
    })?;
    let built = (row.build)(args).map_err(|wrong| in_profile(name, wrong))?;
    Ok((row.name, built))
}

fn configured<'a>(all: &'a [PluginConfig], plugin: &str) -> Option<Option<&'a Value>> {
    all.iter().find(|one| one.name == plugin).map(|one| one.args.as_ref())
}

fn unfit(profile: &str, point: &str, plugin: &str) -> String {
    format!(
        "profile {profile:?} configures {point} extension point of non-existing plugins: map[{plugin}:{{}}]"
    )
}

fn in_profile(profile: &str, wrong: Mistakes) -> Mistakes {
    wrong.into_iter().map(|one| format!("in profile {profile}: {one}")).collect()
}

/// A plugin's arguments. They may carry `apiVersion` and `kind`, which say nothing.
pub fn args_of<T: DeserializeOwned>(args: Option<&Value>) -> Result<T, Mistakes> {
    let mut args = args.cloned().unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    if let Value::Object(fields) = &mut args {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    serde_json::from_value(args).map_err(|error| vec![error.to_string()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(text: &str) -> String {
        Policy::parse(text).err().map(|error| error.to_string()).unwrap_or_default()
    }

    const HEAD: &str = "apiVersion: descheduler/v1alpha2\nkind: DeschedulerPolicy\n";

    #[test]
    fn a_policy_is_read_with_its_limits() {
        let text = format!(
            "{HEAD}maxNoOfPodsToEvictPerNode: 2\nnodeSelector: a=b\nprofiles:\n- name: p\n  pluginConfig:\n  - name: DefaultEvictor\n    args: {{evictLocalStoragePods: true}}\n  - name: RemoveDuplicates\n  plugins:\n    balance: {{enabled: [RemoveDuplicates]}}\n"
        );
        let policy = Policy::parse(&text).expect("a policy");
        assert_eq!(policy.limits.per_node, Some(2));
        let profile = &policy.profiles[0];
        let names = |point| profile.plugins(point).map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(Point::Balance), ["RemoveDuplicates"]);
        assert!(names(Point::Deschedule).is_empty());
    }

    #[test]
    fn mistakes_are_named() {
        assert!(mistakes("apiVersion: v1\nkind: Pod\n").contains("no kind \"Pod\""));
        assert!(mistakes(&format!("{HEAD}profile: []\n")).contains("unknown field"));
        let of = |rest: &str| mistakes(&format!("{HEAD}profiles:\n- name: p\n{rest}"));
        assert_eq!(
            of("  pluginConfig: [{name: Magic}]\n"),
            "in profile p: plugin Magic in pluginConfig not registered"
        );
        assert_eq!(
            of(
                "  pluginConfig: [{name: PodLifeTime}]\n  plugins: {balance: {enabled: [PodLifeTime]}}\n"
            ),
            "profile \"p\" configures balance extension point of non-existing plugins: map[PodLifeTime:{}]"
        );
        assert_eq!(
            of("  plugins: {deschedule: {enabled: [PodLifeTime]}}\n"),
            "in profile p: unable to find \"PodLifeTime\" plugin config"
        );
        assert_eq!(
            of(
                "  pluginConfig: [{name: PodLifeTime}]\n  plugins: {deschedule: {enabled: [PodLifeTime]}}\n"
            ),
            "in profile p: at least one filtering criterion must be specified (maxPodLifeTimeSeconds, states, conditions, or exitCodes)"
        );
    }
}
