//! The configuration of a fleet: groups of nodes, rules for pods, failures by the clock.
//!
//! In: flags and a YAML file. Out: [`Config`], checked, or an error that names the field.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use ipnet::IpNet;
use machinery::names;
use machinery::quantity::Amount;
use machinery::selector::Selector;
use serde::Deserialize;

use crate::settings::{Mode, PodSettings, Span, fraction};

/// Nodes of one process.
const MOST_NODES: usize = 50_000;
/// Upstream's kubelet: every 10 s. Deviation: 20 s where there are many nodes, as each renewal is a write.
/// A node is not ready after 50 s without one.
const LEASE: Duration = Duration::from_secs(10);
const LEASE_OF_MANY: Duration = Duration::from_secs(20);
const MANY: usize = 1000;
/// Upstream: nodeStatusReportFrequency.
const STATUS: Duration = Duration::from_secs(300);
/// The address range that RFC 2544 sets aside for measuring: it is on no network.
const ADDRESSES: &str = "198.18.0.0/15";
/// RFC 6598's, for pods of nodes without a range of their own.
const POD_ADDRESSES: &str = "100.64.0.0/10";
const NAME: &str = "sim";
const FLEET: &str = "default";

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{0}")]
    Yaml(String),
    #[error("{field}: {why}")]
    Invalid { field: String, why: String },
}

fn invalid(field: impl Into<String>, why: impl Into<String>) -> ConfigError {
    ConfigError::Invalid { field: field.into(), why: why.into() }
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub fleet: String,
    pub lease_interval: Duration,
    pub status_interval: Duration,
    pub addresses: IpNet,
    pub pod_addresses: IpNet,
    pub nodes: Vec<NodeGroup>,
    pub pods: Vec<PodRule>,
    pub failures: Vec<Failure>,
}

/// The values of flags, which win over the file.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub fleet: Option<String>,
    pub nodes: Option<usize>,
    pub lease_interval: Option<Duration>,
    pub status_interval: Option<Duration>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct File {
    fleet: Option<String>,
    lease_interval: Option<Span>,
    status_interval: Option<Span>,
    addresses: Option<IpNet>,
    pod_addresses: Option<IpNet>,
    nodes: Vec<NodeGroup>,
    pods: Vec<RuleOfFile>,
    failures: Vec<FailureOfFile>,
}

/// Nodes that are alike.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NodeGroup {
    /// Nodes are called NAME-00000 and so on.
    pub name: String,
    pub count: usize,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub capacity: BTreeMap<String, String>,
    pub allocatable: BTreeMap<String, String>,
    pub region: Option<String>,
    /// Nodes are in these in turn.
    pub zones: Vec<String>,
    pub instance_type: Option<String>,
}

impl NodeGroup {
    pub fn node_name(&self, index: usize) -> String {
        format!("{}-{index:05}", self.name)
    }
}

#[derive(Clone, Debug, Default, serde::Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Taint {
    pub key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    pub effect: String,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RuleOfFile {
    r#match: MatchOfFile,
    then: PodSettings,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct MatchOfFile {
    namespaces: Vec<String>,
    labels: String,
    owner: Option<String>,
    share: Option<u32>,
}

/// The behaviour of matching pods.
#[derive(Clone, Debug)]
pub struct PodRule {
    /// Empty: all.
    namespaces: Vec<String>,
    labels: Selector,
    /// The kind of the controller.
    owner: Option<String>,
    /// Percent of the pods that match.
    share: u32,
    settings: PodSettings,
}

impl PodRule {
    fn matches(&self, pod: &client::Header) -> bool {
        let namespace = &*pod.key.namespace;
        (self.namespaces.is_empty() || self.namespaces.iter().any(|one| one == namespace))
            && self.labels.matches_pairs(&pod.labels)
            && self
                .owner
                .as_ref()
                .is_none_or(|kind| pod.controller().is_some_and(|owner| owner.kind == *kind))
            && is_in_share(&pod.uid, self.share)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FailureOfFile {
    mode: Mode,
    #[serde(default)]
    labels: String,
    share: Option<u32>,
    after: Span,
    r#for: Option<Span>,
}

/// Nodes that fail at a time after the start.
#[derive(Clone, Debug)]
pub struct Failure {
    mode: Mode,
    labels: Selector,
    /// Percent of the nodes that match.
    share: u32,
    after: Duration,
    /// `None`: for good.
    until: Option<Duration>,
}

fn is_in_share(text: &str, percent: u32) -> bool {
    fraction(text) * 100.0 < f64::from(percent)
}

impl Config {
    /// Parses a file's text, if there is one, and the flags.
    pub fn new(file: Option<&str>, flags: &Flags) -> Result<Self, ConfigError> {
        let file: File = match file {
            Some(text) if !text.trim().is_empty() => {
                serde_saphyr::from_str(text).map_err(|why| ConfigError::Yaml(why.to_string()))?
            }
            _ => File::default(),
        };
        let nodes = groups(file.nodes, flags.nodes)?;
        let count: usize = nodes.iter().map(|group| group.count).sum();
        let usual = if count > MANY { LEASE_OF_MANY } else { LEASE };
        let span = |flag: Option<Duration>, file: Option<Span>, usual: Duration| {
            flag.or(file.map(|span| span.0)).unwrap_or(usual)
        };
        let range = |given: Option<IpNet>, usual: &str| {
            given.unwrap_or_else(|| usual.parse().expect("a constant range"))
        };
        let config = Self {
            fleet: flags.fleet.clone().or(file.fleet).unwrap_or_else(|| FLEET.to_owned()),
            lease_interval: span(flags.lease_interval, file.lease_interval, usual),
            status_interval: span(flags.status_interval, file.status_interval, STATUS),
            addresses: range(file.addresses, ADDRESSES),
            pod_addresses: range(file.pod_addresses, POD_ADDRESSES),
            nodes,
            pods: numbered("pods", file.pods, rule)?,
            failures: numbered("failures", file.failures, failure)?,
        };
        config.check()?;
        Ok(config)
    }

    /// How many nodes there are to be.
    pub fn count(&self) -> usize {
        self.nodes.iter().map(|group| group.count).sum()
    }

    fn check(&self) -> Result<(), ConfigError> {
        if self.fleet.is_empty() {
            return Err(invalid("fleet", "must have a name"));
        }
        if let Some(why) = names::label_value(&self.fleet).into_iter().next() {
            return Err(invalid("fleet", format!("{:?}: {why}", self.fleet)));
        }
        for (field, span) in
            [("leaseInterval", self.lease_interval), ("statusInterval", self.status_interval)]
        {
            if span < Duration::from_secs(1) {
                return Err(invalid(field, "must be a second at least"));
            }
        }
        let room =
            1_u128 << (self.addresses.max_prefix_len() - self.addresses.prefix_len()).min(100);
        let count = self.count();
        if room < count as u128 + 2 {
            let why = format!("{} has no room for {count} nodes", self.addresses);
            return Err(invalid("addresses", why));
        }
        Ok(())
    }

    /// The settings of the first rule that matches a pod.
    pub fn settings(&self, pod: &client::Header) -> Option<&PodSettings> {
        self.pods.iter().find(|rule| rule.matches(pod)).map(|rule| &rule.settings)
    }

    /// How the failures have a node so long after the start, and when that changes.
    pub fn failure(
        &self,
        name: &str,
        labels: Option<&BTreeMap<String, String>>,
        elapsed: Duration,
    ) -> (Mode, Option<Duration>) {
        let mut next: Option<Duration> = None;
        let mut found = Mode::Well;
        for (index, failure) in self.failures.iter().enumerate() {
            // Each failure has its own share of the nodes.
            let chance = format!("{index}/{name}");
            if !failure.labels.matches(labels) || !is_in_share(&chance, failure.share) {
                continue;
            }
            let begun = elapsed >= failure.after;
            let ended = failure.until.is_some_and(|until| elapsed >= until);
            if begun && !ended && found == Mode::Well {
                found = failure.mode;
            }
            let change = if begun { failure.until } else { Some(failure.after) };
            let wait = change.filter(|at| *at > elapsed).map(|at| at - elapsed);
            next = [next, wait].into_iter().flatten().min();
        }
        (found, next)
    }
}

fn numbered<F, T>(
    name: &str,
    of_file: Vec<F>,
    read: fn(F, &str) -> Result<T, ConfigError>,
) -> Result<Vec<T>, ConfigError> {
    let all = of_file.into_iter().enumerate();
    all.map(|(index, one)| read(one, &format!("{name}[{index}]"))).collect()
}

fn rule(rule: RuleOfFile, field: &str) -> Result<PodRule, ConfigError> {
    if rule.then.exit_code.is_some_and(|code| !(0..=255).contains(&code)) {
        return Err(invalid(format!("{field}.then.exitCode"), "must be in 0..=255"));
    }
    Ok(PodRule {
        namespaces: rule.r#match.namespaces,
        labels: selector(&rule.r#match.labels, &format!("{field}.match.labels"))?,
        owner: rule.r#match.owner,
        share: share(rule.r#match.share, &format!("{field}.match.share"))?,
        settings: rule.then,
    })
}

fn failure(failure: FailureOfFile, field: &str) -> Result<Failure, ConfigError> {
    let after = failure.after.0;
    Ok(Failure {
        mode: failure.mode,
        labels: selector(&failure.labels, &format!("{field}.labels"))?,
        share: share(failure.share, &format!("{field}.share"))?,
        after,
        until: failure.r#for.map(|span| after + span.0),
    })
}

fn selector(text: &str, field: &str) -> Result<Selector, ConfigError> {
    Selector::parse_labels(text).map_err(|why| invalid(field, why.to_string()))
}

fn share(given: Option<u32>, field: &str) -> Result<u32, ConfigError> {
    match given.unwrap_or(100) {
        percent @ 1..=100 => Ok(percent),
        other => Err(invalid(field, format!("{other} is no percentage in 1..=100"))),
    }
}

fn groups(of_file: Vec<NodeGroup>, of_flag: Option<usize>) -> Result<Vec<NodeGroup>, ConfigError> {
    let mut groups = match (of_file.is_empty(), of_flag) {
        (false, Some(_)) => {
            return Err(invalid("nodes", "the file says how many there are; leave out --nodes"));
        }
        (true, count) => {
            let count = count.unwrap_or(0);
            vec![NodeGroup { name: NAME.to_owned(), count, ..NodeGroup::default() }]
        }
        (false, None) => of_file,
    };
    let mut names = HashSet::new();
    for (index, group) in groups.iter_mut().enumerate() {
        let field = |name: &str| format!("nodes[{index}].{name}");
        if group.name.is_empty() {
            group.name = NAME.to_owned();
        }
        if !names.insert(group.name.clone()) {
            return Err(invalid(field("name"), format!("{} is used twice", group.name)));
        }
        check_group(group, &field)?;
        complete(group);
    }
    let count: usize = groups.iter().map(|group| group.count).sum();
    if count > MOST_NODES {
        return Err(invalid("nodes", format!("{count} are more than {MOST_NODES}")));
    }
    Ok(groups)
}

fn check_group(group: &NodeGroup, field: &dyn Fn(&str) -> String) -> Result<(), ConfigError> {
    if let Some(why) = names::dns1123_subdomain(&group.node_name(0)).into_iter().next() {
        return Err(invalid(field("name"), format!("{:?}: {why}", group.name)));
    }
    for (name, list) in [("capacity", &group.capacity), ("allocatable", &group.allocatable)] {
        for (resource, amount) in list {
            if Amount::parse(amount).is_err() {
                let why = format!("{amount:?} is no quantity");
                return Err(invalid(format!("{}.{resource}", field(name)), why));
            }
        }
    }
    let effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
    if let Some(taint) = group.taints.iter().find(|taint| !effects.contains(&&*taint.effect)) {
        let why = format!("effect {:?}: expected one of {}", taint.effect, effects.join(", "));
        return Err(invalid(field("taints"), why));
    }
    Ok(())
}

/// The capacity that nothing was said about.
fn complete(group: &mut NodeGroup) {
    for (name, amount) in
        [("cpu", "16"), ("memory", "64Gi"), ("ephemeral-storage", "100Gi"), ("pods", "110")]
    {
        group.capacity.entry(name.to_owned()).or_insert_with(|| amount.to_owned());
    }
    for (name, amount) in &group.capacity {
        group.allocatable.entry(name.clone()).or_insert_with(|| amount.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
fleet: big
leaseInterval: 15s
nodes:
- name: gpu
  count: 3
  labels: {pool: gpu}
  taints: [{key: gpu, effect: NoSchedule}]
  capacity: {cpu: "96", nvidia.com/gpu: "8"}
  zones: [a, b]
- name: plain
  count: 2
pods:
- match: {namespaces: [batch], labels: "app in (a,b)", owner: Job}
  then: {startDelay: 2s, runFor: 1m}
- then: {startDelay: 1s}
failures:
- {after: 5m, for: 2m, share: 50, mode: silent}
- {after: 1h, mode: slow=3s, labels: pool=gpu}
"#;

    fn header(namespace: &str, labels: &str, owner: &str) -> std::sync::Arc<client::Header> {
        let json = format!(
            r#"{{"metadata":{{"namespace":"{namespace}","name":"p","uid":"u","labels":{labels},
            "ownerReferences":[{{"apiVersion":"v1","kind":"{owner}","name":"o","uid":"o","controller":true}}]}}}}"#
        );
        client::Entry::parse(json.as_bytes(), true).expect("an object").header
    }

    #[test]
    fn a_file_is_read() {
        let config = Config::new(Some(FILE), &Flags::default()).expect("valid");
        assert_eq!(config.fleet, "big");
        assert_eq!(config.lease_interval, Duration::from_secs(15));
        assert_eq!(config.status_interval, STATUS);
        assert_eq!(config.nodes[0].node_name(2), "gpu-00002");
        assert_eq!(config.nodes[0].capacity["cpu"], "96");
        assert_eq!(config.nodes[0].allocatable["nvidia.com/gpu"], "8");
        assert_eq!(config.nodes[1].capacity["memory"], "64Gi");
        let delay = |namespace, labels, owner| {
            let settings = config.settings(&header(namespace, labels, owner));
            settings.and_then(|settings| settings.start_delay).map(|span| span.0.as_secs())
        };
        assert_eq!(delay("batch", r#"{"app":"a"}"#, "Job"), Some(2));
        assert_eq!(delay("batch", r#"{"app":"c"}"#, "Job"), Some(1));
        assert_eq!(delay("batch", r#"{"app":"a"}"#, "ReplicaSet"), Some(1));
        assert_eq!(delay("other", r#"{"app":"a"}"#, "Job"), Some(1));
    }

    #[test]
    fn failures_begin_and_end_by_the_clock() {
        let config = Config::new(Some(FILE), &Flags::default()).expect("valid");
        let gpu = BTreeMap::from([("pool".to_owned(), "gpu".to_owned())]);
        let names: Vec<String> = (0..1000).map(|index| format!("n-{index}")).collect();
        let silent = |minutes: u64| {
            let elapsed = Duration::from_secs(minutes * 60);
            let is = |name: &&String| config.failure(name, None, elapsed).0 == Mode::Silent;
            names.iter().filter(is).count()
        };
        assert_eq!((silent(0), silent(4), silent(7), silent(100)), (0, 0, 0, 0));
        assert!((400..600).contains(&silent(5)), "{}", silent(5));
        let at =
            |minutes: u64| config.failure("n-1", Some(&gpu), Duration::from_secs(minutes * 60));
        assert_eq!(at(61), (Mode::Slow(Duration::from_secs(3)), None));
        assert_eq!(at(59), (Mode::Well, Some(Duration::from_secs(60))));
    }

    #[test]
    fn the_interval_of_leases_depends_on_how_many_there_are() {
        let interval = |nodes| {
            let flags = Flags { nodes: Some(nodes), ..Flags::default() };
            Config::new(None, &flags).expect("valid").lease_interval.as_secs()
        };
        assert_eq!((interval(1000), interval(1001)), (10, 20));
        let flags = Flags { lease_interval: Some(LEASE), nodes: Some(5000), ..Flags::default() };
        assert_eq!(Config::new(None, &flags).expect("valid").lease_interval, LEASE);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |file: &str, nodes: Option<usize>, expected: &str| {
            let flags = Flags { nodes, ..Flags::default() };
            let why = Config::new(Some(file), &flags).expect_err(file).to_string();
            assert!(why.contains(expected), "{file}: {why}");
        };
        check("nodes: [{count: 1}]", Some(2), "nodes: the file says how many");
        check("nodes: [{count: 1}, {count: 1}]", None, "nodes[1].name: sim is used twice");
        check("nodes: [{name: A_, count: 1}]", None, "nodes[0].name: \"A_\": ");
        check("nodes: [{capacity: {cpu: many}}]", None, "nodes[0].capacity.cpu: \"many\"");
        check("nodes: [{taints: [{key: a, effect: No}]}]", None, "expected one of NoSchedule");
        check("nodes: [{count: 50001}]", None, "50001 are more than 50000");
        check("addresses: 198.18.0.0/30", Some(3), "has no room for 3 nodes");
        check("leaseInterval: 10ms", None, "leaseInterval: must be a second");
        check("leaseInterval: 10", None, "missing unit");
        check("fleet: a b", None, "fleet: \"a b\": ");
        check("pods: [{match: {labels: 'a in b'}}]", None, "pods[0].match.labels");
        check("pods: [{match: {share: 0}}]", None, "pods[0].match.share: 0 is no percentage");
        check("pods: [{then: {exitCode: 300}}]", None, "pods[0].then.exitCode");
        check("failures: [{after: 1s, mode: dead}]", None, "unknown setting \"dead\"");
        check("colour: red", None, "colour");
    }
}
