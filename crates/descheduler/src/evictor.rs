//! Which pods may be evicted at all: the plugin `DefaultEvictor`, which each profile has.
//!
//! In: its arguments, a pod, the snapshot. Out: yes or no. Upstream: `framework/plugins/defaultevictor`.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use machinery::selector::Selector;
use serde::Deserialize;

use crate::cycle::Cycle;
use crate::fit;
use crate::policy::Mistakes;
use crate::snapshot::{Snapshot, namespace, phase};

const EVICT: &str = "descheduler.alpha.kubernetes.io/evict";
pub const PREFER_NO_EVICTION: &str = "descheduler.alpha.kubernetes.io/prefer-no-eviction";
const MIRROR: &str = "kubernetes.io/config.mirror";
const SOURCE: &str = "kubernetes.io/config.source";
/// Upstream: `SystemCriticalPriority`.
const SYSTEM_CRITICAL: i32 = 2_000_000_000;

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
enum Protection {
    PodsWithLocalStorage,
    DaemonSetPods,
    SystemCriticalPods,
    FailedBarePods,
    PodsWithPVC,
    PodsWithoutPDB,
    PodsWithResourceClaims,
}

use Protection::{
    DaemonSetPods, FailedBarePods, PodsWithLocalStorage, PodsWithPVC, PodsWithResourceClaims,
    PodsWithoutPDB, SystemCriticalPods,
};

const DEFAULT: [Protection; 4] =
    [PodsWithLocalStorage, SystemCriticalPods, FailedBarePods, DaemonSetPods];
const EXTRA: [Protection; 3] = [PodsWithPVC, PodsWithoutPDB, PodsWithResourceClaims];

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Args {
    node_selector: String,
    label_selector: Option<LabelSelector>,
    namespace_label_selector: Option<LabelSelector>,
    priority_threshold: Option<Threshold>,
    node_fit: bool,
    min_replicas: usize,
    min_pod_age: Option<String>,
    no_eviction_policy: Option<NoEviction>,
    pod_protections: Protections,
    evict_local_storage_pods: bool,
    evict_daemon_set_pods: bool,
    evict_system_critical_pods: bool,
    ignore_pvc_pods: bool,
    ignore_pods_without_pdb: bool,
    evict_failed_bare_pods: bool,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Threshold {
    value: Option<i32>,
    name: String,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
enum NoEviction {
    Preferred,
    Mandatory,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Protections {
    extra_enabled: Vec<Protection>,
    default_disabled: Vec<Protection>,
    config: Option<ProtectionsConfig>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct ProtectionsConfig {
    #[serde(rename = "PodsWithPVC")]
    claims: Option<ClaimsConfig>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct ClaimsConfig {
    protected_storage_classes: Vec<StorageClassName>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StorageClassName {
    name: String,
}

pub struct DefaultEvictor {
    protections: Vec<Protection>,
    /// None: claims of all classes are protected.
    classes: Vec<String>,
    labels: Selector,
    namespace_labels: Option<Selector>,
    threshold: Threshold,
    /// Nodes on which a pod must fit, with `nodeFit`.
    fits: Option<Selector>,
    min_replicas: usize,
    min_age: Option<jiff::SignedDuration>,
    honors_preference: bool,
}

impl DefaultEvictor {
    pub fn new(args: Args) -> Result<Self, Mistakes> {
        let protections = args.protections()?;
        let selector = |given: Option<&LabelSelector>| match given {
            Some(given) => Selector::from_api(Some(given)),
            None => Ok(Selector::everything()),
        };
        let wrong = |error: &dyn std::fmt::Display| {
            vec![format!("failed to get label selectors from strategy's params: {error}")]
        };
        let labels = selector(args.label_selector.as_ref()).map_err(|error| wrong(&error))?;
        let names = selector(args.namespace_label_selector.as_ref()).map_err(|e| wrong(&e))?;
        let nodes = Selector::parse_labels(&args.node_selector).map_err(|error| wrong(&error))?;
        let min_age = args.min_pod_age.as_deref().map(|text| {
            let wrong = |_| vec![format!("minPodAge: {text:?} is not a duration")];
            let age = base::duration::parse(text).map_err(|e| wrong(e.to_string()))?;
            jiff::SignedDuration::try_from(age).map_err(|e| wrong(e.to_string()))
        });
        let threshold = args.priority_threshold.unwrap_or_default();
        if threshold.value.is_some() && !threshold.name.is_empty() {
            let wrong =
                "priority threshold misconfigured, only one of priorityThreshold fields can be set";
            return Err(vec![wrong.into()]);
        }
        let config = args.pod_protections.config.and_then(|config| config.claims);
        let classes = config.unwrap_or_default().protected_storage_classes;
        if let Some(at) = classes.iter().position(|class| class.name.is_empty()) {
            return Err(vec![format!(
                "PodProtections.Config.PodsWithPVC.ProtectedStorageClasses[{at}] name cannot be empty"
            )]);
        }
        Ok(Self {
            protections,
            classes: classes.into_iter().map(|class| class.name).collect(),
            labels,
            namespace_labels: (!names.is_everything()).then_some(names),
            threshold,
            fits: args.node_fit.then_some(nodes),
            min_replicas: args.min_replicas,
            min_age: min_age.transpose()?,
            honors_preference: args.no_eviction_policy == Some(NoEviction::Mandatory),
        })
    }

    pub fn selects_namespaces(&self) -> bool {
        self.namespace_labels.is_some()
    }

    pub fn needs_budgets(&self) -> bool {
        self.protects(PodsWithoutPDB)
    }

    pub fn needs_claims(&self) -> bool {
        self.protects(PodsWithPVC) && !self.classes.is_empty()
    }

    /// The PriorityClass whose value is the threshold.
    pub fn priority_class(&self) -> Option<&str> {
        let name = self.threshold.name.as_str();
        (!name.is_empty() && self.protects(SystemCriticalPods)).then_some(name)
    }

    fn protects(&self, protection: Protection) -> bool {
        self.protections.contains(&protection)
    }

    /// The extension point Filter: whether the pod may be evicted for its own sake.
    pub fn may_go(&self, pod: &Pod, all: &Snapshot, now: Timestamp) -> bool {
        let annotations = pod.metadata.annotations.as_ref();
        let has = |key: &str| annotations.is_some_and(|all| all.contains_key(key));
        if has(EVICT) {
            return true;
        }
        let is_static =
            annotations.and_then(|all| all.get(SOURCE)).is_some_and(|from| from != "api");
        !(self.honors_preference && has(PREFER_NO_EVICTION)
            || has(MIRROR)
            || is_static
            || pod.metadata.deletion_timestamp.is_some())
            && self.is_unprotected(pod, all)
            && self.labels.matches(pod.metadata.labels.as_ref())
            && self.has_replicas(pod, all)
            && self.is_old(pod, now)
    }

    fn is_unprotected(&self, pod: &Pod, all: &Snapshot) -> bool {
        let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
        let is_bare_kept =
            owners.is_empty() && (self.protects(FailedBarePods) || phase(pod) != "Failed");
        let Some(spec) = &pod.spec else { return false };
        let volumes = spec.volumes.as_deref().unwrap_or_default();
        let is_local =
            || volumes.iter().any(|one| one.host_path.is_some() || one.empty_dir.is_some());
        !(is_bare_kept
            || self.is_important(spec.priority, all)
            || self.protects(PodsWithLocalStorage) && is_local()
            || self.protects(DaemonSetPods) && owners.iter().any(|one| one.kind == "DaemonSet")
            || self.protects(PodsWithPVC) && self.has_protected_claim(pod, all)
            || self.protects(PodsWithoutPDB) && !all.has_budget(pod)
            || self.protects(PodsWithResourceClaims)
                && spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()))
    }

    fn is_important(&self, priority: Option<i32>, all: &Snapshot) -> bool {
        if !self.protects(SystemCriticalPods) {
            return false;
        }
        let named = self.priority_class().and_then(|class| all.priority(class));
        let threshold = self.threshold.value.or(named).unwrap_or(SYSTEM_CRITICAL);
        priority.is_some_and(|is| is >= SYSTEM_CRITICAL || is >= threshold)
    }

    /// A claim without a known class is protected.
    fn has_protected_claim(&self, pod: &Pod, all: &Snapshot) -> bool {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let mut claims = volumes.filter_map(|one| one.persistent_volume_claim.as_ref());
        claims.any(|claim| {
            self.classes.is_empty()
                || all
                    .storage_class(namespace(pod), &claim.claim_name)
                    .is_none_or(|class| self.classes.iter().any(|one| one == class))
        })
    }

    fn has_replicas(&self, pod: &Pod, all: &Snapshot) -> bool {
        match pod.metadata.owner_references.as_deref() {
            Some([owner]) if self.min_replicas > 1 => all.replicas(&owner.uid) >= self.min_replicas,
            _ => true,
        }
    }

    fn is_old(&self, pod: &Pod, now: Timestamp) -> bool {
        let Some(least) = self.min_age else { return true };
        let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
        started.is_some_and(|started| now.duration_since(started.0) >= least)
    }

    /// The extension point PreEvictionFilter: whether the pod has somewhere to go.
    pub fn may_move(&self, pod: &Pod, cycle: &Cycle<'_>) -> bool {
        let fits = self.fits.as_ref().is_none_or(|selector| {
            let mut nodes = cycle.snapshot.nodes.values();
            nodes.any(|node| {
                selector.matches(node.metadata.labels.as_ref())
                    && fit::elsewhere(&cycle.snapshot, pod, node)
            })
        });
        fits && self.namespace_labels.as_ref().is_none_or(|selector| {
            let labels = cycle.snapshot.namespace_labels(namespace(pod));
            labels.is_some() && selector.matches(labels)
        })
    }
}

impl Args {
    /// The protections in force: the lists, or the older switches.
    fn protections(&self) -> Result<Vec<Protection>, Mistakes> {
        let lists = &self.pod_protections;
        let switches = [
            (PodsWithLocalStorage, !self.evict_local_storage_pods, true),
            (DaemonSetPods, !self.evict_daemon_set_pods, true),
            (SystemCriticalPods, !self.evict_system_critical_pods, true),
            (FailedBarePods, !self.evict_failed_bare_pods, true),
            (PodsWithPVC, self.ignore_pvc_pods, false),
            (PodsWithoutPDB, self.ignore_pods_without_pdb, false),
        ];
        if lists.extra_enabled.is_empty() && lists.default_disabled.is_empty() {
            return Ok(switches.iter().filter(|(_, is_on, _)| *is_on).map(|one| one.0).collect());
        }
        let mut mistakes = vec![];
        if switches.iter().any(|(_, is_on, usual)| is_on != usual) {
            mistakes.push("cannot use Deprecated fields alongside PodProtections.ExtraEnabled or PodProtections.DefaultDisabled".to_owned());
        }
        for (list, name, valid) in [
            (&lists.extra_enabled, "ExtraEnabled", &EXTRA[..]),
            (&lists.default_disabled, "DefaultDisabled", &DEFAULT[..]),
        ] {
            let invalid = list.iter().filter(|one| !valid.contains(one));
            mistakes.extend(invalid.map(|one| {
                let words: Vec<_> = valid.iter().map(|one| format!("{one:?}")).collect();
                let words = words.join(" ");
                format!("invalid pod protection policy in {name}: \"{one:?}\". Valid options are: [{words}]")
            }));
            if list.iter().enumerate().any(|(at, one)| list[..at].contains(one)) {
                mistakes.push(format!("PodProtections.{name} contains duplicate entries"));
            }
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let kept = DEFAULT.into_iter().filter(|one| !lists.default_disabled.contains(one));
        Ok(kept.chain(lists.extra_enabled.iter().copied()).collect())
    }
}
