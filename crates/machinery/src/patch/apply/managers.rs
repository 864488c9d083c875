//! `metadata.managedFields` and what it means: who owns which fields, in which version, since when.
//!
//! Invariant: encoding decoded entries gives the same entries, except those of versions that no longer exist.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, Time};

use super::path::Element;
use super::{FieldsError, Set};

/// More managers of updates than this are taken together, the oldest first.
const MOST_UPDATERS: usize = 10;
/// The manager of those taken together.
const ANCIENT: &str = "ancient-changes";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Apply,
    Update,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// An owner of fields. An applier is one manager for all versions, an updater one for each version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Manager {
    pub name: String,
    pub operation: Operation,
    /// The version of an updater.
    pub api_version: String,
    pub subresource: String,
}

impl Manager {
    pub fn new(name: &str, operation: Operation, api_version: &str, subresource: &str) -> Self {
        let name = if name.is_empty() { "unknown" } else { name };
        let api_version = if operation == Operation::Apply { "" } else { api_version };
        Self {
            name: name.into(),
            operation,
            api_version: api_version.into(),
            subresource: subresource.into(),
        }
    }
}

/// The form in conflicts: `"kubectl" using v1`.
impl fmt::Display for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.name)?;
        if !self.subresource.is_empty() {
            write!(f, " with subresource {:?}", self.subresource)?;
        }
        match self.operation {
            Operation::Update => write!(f, " using {}", self.api_version),
            Operation::Apply => Ok(()),
        }
    }
}

/// The fields of a manager.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    pub set: Set,
    pub api_version: String,
    pub applied: bool,
}

/// All managers of an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Managers {
    pub(super) fields: BTreeMap<Manager, Owned>,
    /// When they last changed something; kept apart, for an entry can come back.
    pub(super) times: BTreeMap<Manager, Time>,
}

impl Managers {
    pub fn decode(entries: &[ManagedFieldsEntry]) -> Result<Self, FieldsError> {
        let mut all = Self::default();
        for (index, entry) in entries.iter().enumerate() {
            let operation = match entry.operation.as_deref() {
                Some("Apply") => Operation::Apply,
                Some("Update") => Operation::Update,
                _ => return Err(FieldsError::Operation),
            };
            let api_version = entry.api_version.as_deref().unwrap_or_default();
            if api_version.is_empty() {
                return Err(FieldsError::NoApiVersion);
            }
            match entry.fields_type.as_deref().unwrap_or_default() {
                "FieldsV1" => {}
                "" => return Err(FieldsError::NoFieldsType(index)),
                other => {
                    return Err(FieldsError::FieldsType { kind: other.into(), index });
                }
            }
            let manager = Manager {
                name: entry.manager.clone().unwrap_or_default(),
                operation,
                api_version: match operation {
                    Operation::Apply => String::new(),
                    Operation::Update => api_version.into(),
                },
                subresource: entry.subresource.clone().unwrap_or_default(),
            };
            let set = match &entry.fields_v1 {
                Some(FieldsV1(fields)) => {
                    Set::from_fields(fields).map_err(|why| FieldsError::Set(Box::new(why)))?
                }
                None => Set::EMPTY,
            };
            match entry.time.clone() {
                Some(time) => all.times.insert(manager.clone(), time),
                None => all.times.remove(&manager),
            };
            let applied = operation == Operation::Apply;
            all.fields.insert(manager, Owned { set, api_version: api_version.into(), applied });
        }
        Ok(all)
    }

    pub fn encode(&self) -> Vec<ManagedFieldsEntry> {
        let mut entries: Vec<ManagedFieldsEntry> = self
            .fields
            .iter()
            .map(|(manager, owned)| {
                let operation = if owned.applied { Operation::Apply } else { manager.operation };
                ManagedFieldsEntry {
                    api_version: Some(owned.api_version.clone()),
                    fields_type: Some("FieldsV1".into()),
                    fields_v1: Some(FieldsV1(owned.set.to_fields())),
                    manager: Some(manager.name.clone()).filter(|name| !name.is_empty()),
                    operation: Some(operation.name().into()),
                    subresource: Some(manager.subresource.clone()).filter(|name| !name.is_empty()),
                    time: self.times.get(manager).cloned(),
                }
            })
            .collect();
        let seconds = |entry: &ManagedFieldsEntry| {
            entry.time.as_ref().map_or(0, |Time(time)| time.as_second())
        };
        entries.sort_unstable_by(|a, b| {
            (a.operation.cmp(&b.operation))
                .then(seconds(a).cmp(&seconds(b)))
                .then_with(|| a.manager.cmp(&b.manager))
                .then_with(|| a.api_version.cmp(&b.api_version))
                .then_with(|| a.subresource.cmp(&b.subresource))
        });
        entries
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Takes the oldest updaters together, a bucket per version, until there are few enough.
    pub(super) fn cap(&mut self) {
        let mut updaters: Vec<Manager> = self
            .fields
            .iter()
            .filter(|(_, owned)| !owned.applied)
            .map(|(manager, _)| manager.clone())
            .collect();
        let mut count = updaters.len();
        if count <= MOST_UPDATERS {
            return;
        }
        let seconds =
            |manager: &Manager| self.times.get(manager).map_or(0, |Time(time)| time.as_second());
        updaters.sort_by_cached_key(|manager| (seconds(manager), manager.clone()));
        let mut firsts: BTreeMap<String, Manager> = BTreeMap::new();
        for manager in updaters {
            if count <= MOST_UPDATERS {
                return;
            }
            let Some(version) = self.fields.get(&manager).map(|owned| owned.api_version.clone())
            else {
                continue;
            };
            let Some(first) = firsts.get(&version) else {
                firsts.insert(version, manager);
                continue;
            };
            let bucket = Manager::new(ANCIENT, Operation::Update, &version, "");
            if !self.fields.contains_key(&bucket)
                && let Some(owned) = self.fields.remove(first)
            {
                self.fields.insert(bucket.clone(), owned);
            }
            // If the bucket is the manager itself, it already has the fields.
            if let Some(owned) = self.fields.remove(&manager)
                && let Some(all) = self.fields.get_mut(&bucket)
            {
                all.set = std::mem::take(&mut all.set).union(owned.set);
            }
            count -= 1;
            match self.times.get(&manager).cloned() {
                Some(time) => self.times.insert(bucket, time),
                None => self.times.remove(&bucket),
            };
        }
    }
}

/// Does the request throw all ownership away: an empty list, or one empty entry?
pub fn is_reset(entries: Option<&[ManagedFieldsEntry]>) -> bool {
    match entries {
        Some([]) => true,
        Some([one]) => *one == ManagedFieldsEntry::default(),
        _ => false,
    }
}

/// A field of another manager, which the applied configuration sets to another value.
#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    pub manager: Manager,
    pub path: Vec<Element>,
}

impl Conflict {
    pub fn field(&self) -> String {
        self.path.iter().map(Element::to_string).collect()
    }
}

/// The message of all conflicts together.
pub fn conflict_message(conflicts: &[Conflict]) -> String {
    if let [one] = conflicts {
        return format!(
            "Apply failed with 1 conflict: conflict with {}: {}",
            one.manager,
            one.field()
        );
    }
    let mut by_manager: BTreeMap<&Manager, Vec<String>> = BTreeMap::new();
    for conflict in conflicts {
        by_manager.entry(&conflict.manager).or_default().push(conflict.field());
    }
    let mut lines = vec![];
    for (manager, fields) in by_manager {
        lines.push(format!("conflicts with {manager}:"));
        lines.extend(fields.iter().map(|field| format!("- {field}")));
    }
    format!("Apply failed with {} conflicts: {}", conflicts.len(), lines.join("\n"))
}

/// The managers of a `Scale`'s replicas among those of its parent, and back again.
///
/// `path` is where the parent has its replicas. Upstream: `ScaleHandler`.
pub mod scale {
    use super::*;

    const API_VERSION: &str = "autoscaling/v1";
    const REPLICAS: &[&str] = &["spec", "replicas"];

    /// The entries of a Scale, from its parent's.
    pub fn from_parent(
        entries: &[ManagedFieldsEntry],
        path: &[&str],
    ) -> Result<Vec<ManagedFieldsEntry>, FieldsError> {
        let parent = Managers::decode(entries)?;
        let wanted = elements(path);
        let mut scale = Managers::default();
        for (manager, owned) in &parent.fields {
            if owned.set.has_path(&wanted) {
                scale.fields.insert(
                    manager.clone(),
                    Owned {
                        set: Set::of_fields(REPLICAS),
                        api_version: API_VERSION.into(),
                        applied: owned.applied,
                    },
                );
                scale.times.extend(parent.times.get(manager).map(|t| (manager.clone(), t.clone())));
            }
        }
        Ok(scale.encode())
    }

    /// The parent's entries after a write to its scale that left `entries` there.
    pub fn to_parent(
        parent: &[ManagedFieldsEntry],
        entries: &[ManagedFieldsEntry],
        path: &[&str],
        api_version: &str,
    ) -> Result<Vec<ManagedFieldsEntry>, FieldsError> {
        let before = Managers::decode(parent)?;
        let mut scale = Managers::decode(entries)?;
        let (wanted, replicas) = (elements(path), Set::of_fields(path));
        let mut after = Managers { fields: BTreeMap::new(), times: before.times };
        for (manager, mut owned) in before.fields {
            if owned.set.has_path(&wanted) && scale.fields.remove(&manager).is_none() {
                owned.set = owned.set.difference(&replicas);
                if owned.set.is_empty() {
                    continue;
                }
            }
            after.fields.insert(manager, owned);
        }
        let shown = elements(REPLICAS);
        for (manager, owned) in scale.fields {
            if owned.set.has_path(&shown) {
                let owned = Owned {
                    set: replicas.clone(),
                    api_version: api_version.into(),
                    applied: owned.applied,
                };
                after.fields.insert(manager, owned);
            }
        }
        Ok(after.encode())
    }

    fn elements(path: &[&str]) -> Vec<Element> {
        path.iter().map(|name| Element::field(name)).collect()
    }
}
