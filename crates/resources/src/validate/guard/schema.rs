//! The schema of a path, and the error for a field name that it does not have.
//!
//! In: a kind, and the steps of the rules from there. Out: a panic for a name that the schema does not
//! have, or, inside [`recorded`], a line for it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::panic::Location;
use std::sync::LazyLock;

use api::facts::{self, Definition};
use machinery::field::Path;

/// Names in the paths of errors that are upstream's and not the schema's: the place, the names there,
/// and why.
pub(super) const SHOWN: &[(&str, &[&str], &str)] = &[
    ("[]admissionregistration.v1.NamedRuleWithOperations", &["operations"], "without an index"),
    ("[]core.v1.VolumeMount", MOUNT, "without an index"),
    ("core.v1.CSIVolumeSource", &["name"], "the reference's name at the volume"),
    ("core.v1.ISCSIPersistentVolumeSource", &["initiatorname"], "in lower case"),
    ("core.v1.ISCSIVolumeSource", &["initiatorname"], "in lower case"),
    ("core.v1.PersistentVolumeSpec", SOURCES, "the names of internal types"),
    ("core.v1.PersistentVolumeSpec", &["persistentvolumesource"], "the internal type's"),
    ("core.v1.PodAffinityTerm", &["namespace"], "each of `namespaces`"),
    ("core.v1.PodExtendedResourceClaimStatus", &["requestName"], "the mapping's at the status"),
    ("core.v1.PodSecurityContext", &["shareProcessNamespace"], "internally it is a part of it"),
    ("core.v1.PodTemplateSpec", &["annotations", "labels"], "those of its metadata"),
    ("core.v1.ProjectedVolumeSource", &["path"], "a source's path at the volume"),
    ("core.v1.ServiceSpec", &["LoadBalancerSourceRanges"], "Go's name"),
    ("core.v1.TopologySpreadConstraint", &["{topologyKey, whenUnsatisfiable}"], "a pair of keys"),
    ("core.v1.Volume", SOURCES, "the names of internal types, and a slip"),
    ("meta.v1.ObjectMeta", &["taints"], "a Node's taints"),
    ("", &["strategy"], "LeaseCandidate's, said twice"),
    ("storage.v1.CSIDriverSpec", &["attachedRequired"], "a slip"),
];

const MOUNT: &[&str] = &["mountPropagation", "recursiveReadOnly", "subPath", "subPathExpr"];
const SOURCES: &[&str] = &["cephFS", "downwarAPI", "persistentDisk", "storageOS"];

/// Names that a rule of several types asks all of them for: the names, the type that has them, and those
/// that do not.
pub(super) const SHARED: &[(&[&str], &str, &[&str])] = &[
    (&["grpc"], "core.v1.Probe", &["core.v1.LifecycleHandler"]),
    (&["sleep"], "core.v1.LifecycleHandler", &["core.v1.Probe"]),
    (&["kind"], "core.v1.Pod", &["core.v1.PodTemplateSpec"]),
    (&["mismatchLabelKeys"], "core.v1.PodAffinityTerm", &["core.v1.TopologySpreadConstraint"]),
    (&["namespace"], "core.v1.TypedObjectReference", &["core.v1.TypedLocalObjectReference"]),
    (&["namespace"], "flowcontrol.v1.ServiceAccountSubject", &["flowcontrol.v1.GroupSubject"]),
    (&["namespace"], "flowcontrol.v1.ServiceAccountSubject", &["flowcontrol.v1.UserSubject"]),
    (&["gitRepo"], "core.v1.Volume", &["core.v1.PersistentVolumeSpec"]),
    (EVENT, "core.v1.Event", &["events.v1.Event"]),
    (&["reportingController"], "events.v1.Event", &["core.v1.Event"]),
    (REPLICAS, "apps.v1.ReplicaSetStatus", STATUSES),
    (ROLLED, "apps.v1.DeploymentStatus", STATUSES),
    (&["currentReplicas"], "apps.v1.StatefulSetStatus", STATUSES),
];

const EVENT: &[&str] = &[
    "count",
    "firstTimestamp",
    "involvedObject",
    "lastTimestamp",
    "message",
    "reportingComponent",
    "source",
];
const REPLICAS: &[&str] = &[
    "availableReplicas",
    "fullyLabeledReplicas",
    "readyReplicas",
    "replicas",
    "terminatingReplicas",
];
const ROLLED: &[&str] = &["collisionCount", "unavailableReplicas", "updatedReplicas"];
const STATUSES: &[&str] = &[
    "apps.v1.DaemonSetStatus",
    "apps.v1.DeploymentStatus",
    "apps.v1.ReplicaSetStatus",
    "apps.v1.StatefulSetStatus",
    "core.v1.ReplicationControllerStatus",
];

#[derive(Clone, Copy)]
pub(crate) enum Of {
    /// Nothing is known of the place, or anything may stand there.
    Any,
    Place(Place),
}

#[derive(Clone, Copy)]
pub(crate) struct Place {
    kind: &'static str,
    /// `[]` for lists, `{}` for maps, empty for the rest.
    shape: &'static str,
    /// Empty for scalars.
    definition: &'static str,
}

/// What a run of rules asked for.
#[derive(Clone, Default)]
pub(super) struct Record {
    /// By definition, name and the rule that asks.
    pub(super) misspelt: BTreeMap<(String, String, &'static Location<'static>), String>,
    pub(super) asked: BTreeSet<&'static Location<'static>>,
}

thread_local! {
    static RECORD: RefCell<Option<Record>> = const { RefCell::new(None) };
}

/// Runs rules and returns what they asked for, with all misspelt names at once.
pub(super) fn recorded(run: impl FnOnce()) -> Record {
    RECORD.set(Some(Record::default()));
    run();
    RECORD.take().unwrap_or_default()
}

type Kinds = HashMap<(String, String), &'static str>;

/// The definitions that rules are about: of the version that is stored, where a kind has several.
fn kinds() -> &'static Kinds {
    static KINDS: LazyLock<Kinds> = LazyLock::new(|| {
        let table = crate::tests::built_in();
        let mut rows: Vec<_> = table.iter().filter(|row| row.is_stored()).collect();
        rows.sort_by_key(|row| row.conversion.is_some());
        let mut kinds = Kinds::new();
        for row in rows {
            if let Some(name) = facts::definition_name(&row.group, &row.version, &row.kind) {
                kinds.entry((row.group.clone(), row.kind.clone())).or_insert(name);
            }
        }
        kinds
    });
    &KINDS
}

impl Of {
    pub(crate) const ANY: Self = Self::Any;

    /// An object of a kind.
    pub(crate) fn kind(group: &str, kind: &str) -> Self {
        let definition = Self::definition_of(group, kind);
        definition.map_or(Self::Any, |definition| {
            Self::Place(Place { kind: definition.name, shape: "", definition: definition.name })
        })
    }

    pub(super) fn definition_of(group: &str, kind: &str) -> Option<Definition> {
        facts::definition(kinds().get(&(group.to_owned(), kind.to_owned()))?)
    }

    /// One step below a place, or several (`template.spec`).
    #[track_caller]
    pub(crate) fn fields(self, names: &str, path: &Path) -> Self {
        let mut of = self;
        for name in names.split('.') {
            of = match of.step(name) {
                Ok(of) => of,
                Err(place) => misspelt(place, name, path),
            };
        }
        asked();
        of
    }

    /// One step below a place. The name may have dots, as those of annotations have.
    #[track_caller]
    pub(crate) fn field(self, name: &str, path: &Path) -> Self {
        asked();
        match self.step(name) {
            Ok(of) => of,
            Err(place) => misspelt(place, name, path),
        }
    }

    /// A name for the path of an error only.
    #[track_caller]
    pub(crate) fn shown(self, names: &str, path: &Path) {
        asked();
        let mut of = self;
        for name in names.split('.') {
            of = match of.step(name) {
                Ok(of) => of,
                Err(place) if place.shows(name) => Self::Any,
                Err(place) => misspelt(place, name, path),
            };
        }
    }

    /// A field whose name comes from the object, so that it may be one that there is not.
    pub(crate) fn named(self, name: &str) -> Self {
        self.step(name).unwrap_or(Self::Any)
    }

    /// An element of a list or of a map.
    pub(crate) fn element(self) -> Self {
        match self {
            Self::Any => Self::Any,
            Self::Place(place) => Self::Place(Place { shape: "", ..place }),
        }
    }

    fn step(self, name: &str) -> Result<Self, Place> {
        let Self::Place(place) = self else { return Ok(Self::Any) };
        match (place.shape, facts::definition(place.definition)) {
            ("{}", _) => Ok(self.element()),
            ("", Some(definition)) if is_free(definition) => Ok(Self::Any),
            ("", Some(definition)) => {
                let Some(field) = definition.field(name) else {
                    return if place.shares(name) { Ok(Self::Any) } else { Err(place) };
                };
                let (shape, definition) = (field.shape, field.definition);
                Ok(Self::Place(Place { kind: place.kind, shape, definition }))
            }
            _ => Err(place),
        }
    }
}

impl Place {
    fn shows(self, name: &str) -> bool {
        let here = self.to_string();
        SHOWN.iter().any(|(place, names, _)| *place == here && names.contains(&name))
    }

    fn shares(self, name: &str) -> bool {
        let here = self.to_string();
        SHARED
            .iter()
            .any(|(names, _, without)| names.contains(&name) && without.contains(&here.as_str()))
    }
}

impl fmt::Display for Place {
    /// `[]core.v1.Container`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.shape, short(self.definition))
    }
}

/// `core.v1.Container` of `io.k8s.api.core.v1.Container`
pub(super) fn short(definition: &str) -> &str {
    definition.rmatch_indices('.').nth(2).map_or(definition, |(at, _)| &definition[at + 1..])
}

/// Does anything go in objects of the definition?
fn is_free(definition: Definition) -> bool {
    definition.fields().next().is_none()
}

/// Notes the place in the rules that asks for a name.
#[track_caller]
fn asked() {
    let at = Location::caller();
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record {
            record.asked.insert(at);
        }
    });
}

#[track_caller]
fn misspelt(place: Place, name: &str, path: &Path) -> Of {
    let (kind, at) = (short(place.kind), Location::caller());
    let of = if place.definition.is_empty() { "a scalar".into() } else { place.to_string() };
    let text = format!("{kind} at {path}: {name:?} is no field of {of}");
    RECORD.with_borrow_mut(|record| match record {
        Some(record) => _ = record.misspelt.entry((of, name.to_owned(), at)).or_insert(text),
        None => panic!("{text} ({at})"),
    });
    Of::Any
}
