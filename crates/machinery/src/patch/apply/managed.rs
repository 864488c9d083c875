//! Writes and their owners: what a write makes of `metadata.managedFields`, and apply itself.
//!
//! In: the object before and after (or the applied configuration), both as [`Node`]s in the version of
//! the request and without their managedFields, and the entries. Out: the new entries, and what
//! apply makes of the object.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, Time};
use serde_json::Value;

use super::managers::{Conflict, Manager, Managers, Operation, Owned, is_reset};
use super::merge::{merge, remove, with_parents};
use super::node::Node;
use super::path::{Element, equal};
use super::types::{Atom, Elements, MapType, Type, TypeRef};
use super::validate::misfit;
use super::walk::{Comparison, extract};
use super::{FieldsError, Resets, Set};

/// The owner of fields that were set before the first apply.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
/// The applier that takes over from client-side apply.
const KUBECTL: &str = "kubectl";
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// An annotation that does not fit is left out. Upstream: 256 KiB for all together.
const ANNOTATIONS_LIMIT: usize = 256 << 10;

/// An object before anything is written.
fn nothing<'x, N: Node + 'x>() -> &'x N {
    &N::zeros()[0]
}

/// Fields without an owner.
static STRIPPED: LazyLock<Set> = LazyLock::new(|| {
    let metadata = [
        "name",
        "namespace",
        "creationTimestamp",
        "selfLink",
        "uid",
        "clusterName",
        "generation",
        "managedFields",
        "resourceVersion",
    ];
    let top = [&["apiVersion"][..], &["kind"], &["metadata"]];
    let top = top.iter().map(|path| Set::of_fields(path));
    let below = metadata.iter().map(|name| Set::of_fields(&["metadata", name]));
    top.chain(below).fold(Set::EMPTY, Set::union)
});

/// The versions that a kind is served in.
pub trait Versions {
    fn type_of(&self, api_version: &str) -> TypeRef;
    /// The tree in another version; `None` if that version is no longer served.
    fn convert(&self, tree: &Value, from: &str, to: &str) -> Result<Option<Value>, FieldsError>;
    fn resets(&self) -> Resets;
}

/// A write, as far as ownership goes.
pub struct Write<'a> {
    pub versions: &'a dyn Versions,
    pub api_version: &'a str,
    /// Empty for the object itself.
    pub subresource: &'a str,
    /// The field manager from the query or the User-Agent.
    pub manager: &'a str,
    pub now: Time,
}

/// The result of an apply.
pub struct Applied {
    pub object: Value,
    pub entries: Vec<ManagedFieldsEntry>,
}

/// Why an apply failed.
#[derive(Debug, PartialEq)]
pub enum ApplyError {
    Conflicts(Vec<Conflict>),
    Failed(FieldsError),
}

impl From<FieldsError> for ApplyError {
    fn from(why: FieldsError) -> Self {
        Self::Failed(why)
    }
}

impl Write<'_> {
    /// The entries after a create, update or patch that made `after` of `before` (`None`: it is new);
    /// `sent` are those that the request had.
    pub fn update<N: Node>(
        &self,
        before: Option<(&N, &[ManagedFieldsEntry])>,
        after: &N,
        sent: Option<&[ManagedFieldsEntry]>,
    ) -> Result<Vec<ManagedFieldsEntry>, FieldsError> {
        let stored = before.map_or(&[][..], |(_, entries)| entries);
        let managers = self.decoded(stored, sent);
        // Removed ownership comes back only with the next apply.
        if managers.is_empty() && before.is_some() {
            return Ok(vec![]);
        }
        let before = before.map_or_else(nothing, |(before, _)| before);
        Ok(self.updated(before, after, managers, self.manager)?.encode())
    }

    /// Clients that know nothing of managedFields do not delete them; nor do writes to subresources.
    fn decoded(
        &self,
        stored: &[ManagedFieldsEntry],
        sent: Option<&[ManagedFieldsEntry]>,
    ) -> Managers {
        let stored = || Managers::decode(stored).unwrap_or_default();
        if !self.subresource.is_empty() {
            return stored();
        }
        if is_reset(sent) {
            return Managers::default();
        }
        match Managers::decode(sent.unwrap_or_default()) {
            Ok(managers) if !managers.is_empty() => managers,
            _ => stored(),
        }
    }

    fn updated<N: Node>(
        &self,
        before: &N,
        after: &N,
        managers: Managers,
        name: &str,
    ) -> Result<Managers, FieldsError> {
        let mut managers = self.reconciled(managers);
        let own = match self.take_over(before, after, &mut managers, None, true) {
            Ok(changes) => changes.modified.union(changes.added).difference(&STRIPPED),
            Err(ApplyError::Failed(why)) => return Err(why),
            Err(ApplyError::Conflicts(_)) => unreachable!("updates are forced"),
        };
        if !own.is_empty() {
            let manager = Manager::new(name, Operation::Update, self.api_version, self.subresource);
            let previous = managers.fields.remove(&manager);
            let set = previous.map_or(Set::EMPTY, |owned| owned.set).union(own);
            managers.fields.insert(
                manager.clone(),
                Owned { set, api_version: self.api_version.into(), applied: false },
            );
            managers.times.insert(manager, self.now.clone());
        }
        managers.cap();
        Ok(managers)
    }

    /// Removes changed and deleted fields from all managers but `own`, and returns the changes in the
    /// version of the request. Without `force`, fields of other managers are conflicts.
    fn take_over<N: Node>(
        &self,
        before: &N,
        after: &N,
        managers: &mut Managers,
        own: Option<&Manager>,
        force: bool,
    ) -> Result<Comparison, ApplyError> {
        let mut known: BTreeMap<String, Option<Comparison>> = BTreeMap::new();
        let here = self.compared(before, after, self.api_version);
        known.insert(self.api_version.to_owned(), Some(here));
        for owned in others(&managers.fields, own).map(|(_, owned)| owned) {
            if !known.contains_key(&owned.api_version) {
                let changes = self.compared_in(before, after, &owned.api_version)?;
                known.insert(owned.api_version.clone(), changes);
            }
        }
        let changes = |owned: &Owned| known.get(&owned.api_version).and_then(Option::as_ref);
        if !force {
            let mut conflicts = vec![];
            for (manager, owned) in others(&managers.fields, own) {
                let Some(changes) = changes(owned) else { continue };
                let changed = changes.modified.clone().union(changes.added.clone());
                let set = owned.set.clone().intersection(&changed);
                conflicts.extend(
                    set.paths().into_iter().map(|path| Conflict { manager: manager.clone(), path }),
                );
            }
            if !conflicts.is_empty() {
                return Err(ApplyError::Conflicts(conflicts));
            }
        }
        managers.fields.retain(|manager, owned| {
            if Some(manager) != own {
                let Some(changes) = changes(owned) else { return false };
                let set = std::mem::take(&mut owned.set);
                let set = set.difference(&changes.modified).difference(&changes.added);
                owned.set = set.difference(&changes.removed);
            }
            !owned.set.is_empty()
        });
        Ok(known.remove(self.api_version).flatten().unwrap_or_default())
    }

    fn compared<N: Node>(&self, before: &N, after: &N, api_version: &str) -> Comparison {
        let of = self.versions.type_of(api_version);
        let resets = self.versions.resets();
        Comparison::of(before, after, of.get()).map(|set| resets.apply_to(set))
    }

    fn compared_in<N: Node>(
        &self,
        before: &N,
        after: &N,
        api_version: &str,
    ) -> Result<Option<Comparison>, FieldsError> {
        let there =
            |tree: &N| self.versions.convert(&tree.to_value(), self.api_version, api_version);
        let (Some(before), Some(after)) = (there(before)?, there(after)?) else { return Ok(None) };
        Ok(Some(self.compared(&before, &after, api_version)))
    }

    /// Sets that were written when lists or maps were granular that are atomic now.
    fn reconciled(&self, mut managers: Managers) -> Managers {
        for owned in managers.fields.values_mut() {
            let of = self.versions.type_of(&owned.api_version);
            owned.set = reconciled(std::mem::take(&mut owned.set), of.get());
        }
        managers
    }

    /// Server-side apply. `configuration` is of the version of the request.
    pub fn apply(
        &self,
        live: Option<(&Value, &[ManagedFieldsEntry])>,
        configuration: &Value,
        force: bool,
    ) -> Result<Applied, ApplyError> {
        let of = self.versions.type_of(self.api_version);
        let (live, entries) = live.unwrap_or((nothing(), &[]));
        if let Some(why) = misfit(configuration, of.get()) {
            let object = described(configuration);
            return Err(FieldsError::Misfit { object, why }.into());
        }
        let managers =
            Managers::decode(entries).map_err(|why| FieldsError::Decode(Box::new(why)))?;
        let managers = match managers.is_empty() {
            true => self.updated(nothing(), live, managers, BEFORE_FIRST_APPLY)?,
            false => managers,
        };
        let applied = self.applied(live, configuration, managers.clone(), force);
        let applied = match applied {
            Err(ApplyError::Conflicts(conflicts)) if self.manager == KUBECTL => {
                match self.allowed(live) {
                    None => Err(ApplyError::Conflicts(conflicts)),
                    Some(allowed) => {
                        let left: Vec<Conflict> = conflicts
                            .into_iter()
                            .filter(|conflict| !allowed.has_path(&conflict.path))
                            .collect();
                        match left.is_empty() {
                            true => self.applied(live, configuration, managers, true),
                            false => Err(ApplyError::Conflicts(left)),
                        }
                    }
                }
            }
            other => other,
        };
        let (mut object, managers) = applied?;
        if self.manager == KUBECTL {
            set_last_applied(&mut object, configuration);
        }
        Ok(Applied { object, entries: managers.encode() })
    }

    fn applied(
        &self,
        live: &Value,
        configuration: &Value,
        managers: Managers,
        force: bool,
    ) -> Result<(Value, Managers), ApplyError> {
        let of = self.versions.type_of(self.api_version);
        let mut managers = self.reconciled(managers);
        let object = merge(live, configuration, of.get())
            .map_err(|why| FieldsError::Merge(Box::new(why)))?;
        let set = self.versions.resets().apply_to(extract(configuration, of.get()));
        let manager = Manager::new(self.manager, Operation::Apply, "", self.subresource);
        let owned = Owned { set, api_version: self.api_version.into(), applied: true };
        let last = managers.fields.insert(manager.clone(), owned);
        let object = match last {
            Some(last) if !last.set.is_empty() => self
                .pruned(object, &managers, &last)
                .map_err(|why| FieldsError::Prune(Box::new(why)))?,
            _ => object,
        };
        self.take_over(live, &object, &mut managers, Some(&manager), force)?;
        if let Some(owned) = managers.fields.get_mut(&manager) {
            owned.set = std::mem::take(&mut owned.set).difference(&STRIPPED);
            if owned.set.is_empty() {
                managers.fields.remove(&manager);
            }
        }
        // An apply that changes nothing gets no time.
        if !equal(live, &object) {
            managers.times.insert(manager, self.now.clone());
        }
        Ok((object, managers))
    }

    /// Removes the fields that the manager applied last time, does not apply now, and that no other manager owns.
    fn pruned(
        &self,
        merged: Value,
        managers: &Managers,
        last: &Owned,
    ) -> Result<Value, FieldsError> {
        let version = &*last.api_version;
        let Some(there) = self.in_version(&merged, self.api_version, version)? else {
            return Ok(merged);
        };
        let of = self.versions.type_of(version);
        let gone = with_parents(&last.set, Some(of.get()));
        let mut pruned = without(&there, &gone, of.get());
        let mut by_version: BTreeMap<&str, Set> = BTreeMap::new();
        for owned in managers.fields.values() {
            let set = by_version.entry(&owned.api_version).or_default();
            *set = std::mem::take(set).union(owned.set.clone());
        }
        let first = by_version.remove(version).map(|set| (version, set));
        let mut at = version;
        for (version, owned) in first.into_iter().chain(by_version) {
            let (Some(merged), Some(shown)) = (
                self.in_version(&there, last.api_version.as_str(), version)?,
                self.in_version(&pruned, at, version)?,
            ) else {
                continue;
            };
            let of = self.versions.type_of(version);
            let set = |tree: &Value| with_parents(&extract(tree, of.get()), Some(of.get()));
            let owned = with_parents(&owned, Some(of.get()));
            let gone = set(&merged).difference(&set(&shown)).difference(&owned);
            (pruned, at) = (without(&merged, &gone, of.get()), version);
        }
        // Fields that the manager did not own before stay.
        let Some(shown) = self.in_version(&pruned, at, version)? else { return Ok(merged) };
        let set = |tree: &Value| with_parents(&extract(tree, of.get()), Some(of.get()));
        let gone = set(&there).difference(&set(&shown));
        let pruned =
            without(&there, &gone.intersection(&with_parents(&last.set, Some(of.get()))), of.get());
        Ok(self.in_version(&pruned, version, self.api_version)?.unwrap_or(merged))
    }

    fn in_version(&self, tree: &Value, from: &str, to: &str) -> Result<Option<Value>, FieldsError> {
        if from == to { Ok(Some(tree.clone())) } else { self.versions.convert(tree, from, to) }
    }

    /// Fields that client-side apply set last and that are still so: kubectl may take them over.
    fn allowed(&self, live: &Value) -> Option<Set> {
        let text = live["metadata"]["annotations"][LAST_APPLIED].as_str()?;
        let last: Value = serde_json::from_str(text).ok()?;
        if last["apiVersion"].as_str() != Some(self.api_version) {
            return None;
        }
        let of = self.versions.type_of(self.api_version);
        if misfit(&last, of.get()).is_some() {
            return None;
        }
        let changes = Comparison::of(&last, live, of.get());
        let set = extract(&last, of.get()).difference(&changes.modified);
        Some(set.difference(&changes.added).difference(&changes.removed))
    }
}

fn others<'a>(
    fields: &'a BTreeMap<Manager, Owned>,
    own: Option<&'a Manager>,
) -> impl Iterator<Item = (&'a Manager, &'a Owned)> {
    fields.iter().filter(move |(manager, _)| Some(*manager) != own)
}

fn without(tree: &Value, gone: &Set, of: &Type) -> Value {
    remove(tree, gone, of).unwrap_or_else(|| Value::Object(Default::default()))
}

/// `NAMESPACE/NAME; GROUP/VERSION, Kind=KIND`, as upstream describes objects in errors.
pub fn described(tree: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &tree["metadata"];
    format!(
        "{}/{}; {}",
        text(&metadata["namespace"]),
        text(&metadata["name"]),
        group_version_kind(tree)
    )
}

/// `apps/v1, Kind=Deployment`; the core group is `/v1`.
pub fn group_version_kind(tree: &Value) -> String {
    let api_version = tree["apiVersion"].as_str().unwrap_or_default();
    let kind = tree["kind"].as_str().unwrap_or_default();
    let slash = if api_version.contains('/') { "" } else { "/" };
    format!("{slash}{api_version}, Kind={kind}")
}

/// Keeps client-side apply's annotation true where there is one.
fn set_last_applied(object: &mut Value, configuration: &Value) {
    let Some(Value::Object(annotations)) =
        object.get_mut("metadata").and_then(|metadata| metadata.get_mut("annotations"))
    else {
        return;
    };
    if annotations.get(LAST_APPLIED).and_then(Value::as_str).is_none_or(str::is_empty) {
        return;
    }
    let mut configuration = configuration.clone();
    if let Some(Value::Object(annotations)) =
        configuration.get_mut("metadata").and_then(|metadata| metadata.get_mut("annotations"))
    {
        annotations.remove(LAST_APPLIED);
    }
    annotations.insert(LAST_APPLIED.into(), format!("{configuration}\n").into());
    let size = |(key, value): (&String, &Value)| key.len() + value.as_str().map_or(0, str::len);
    if annotations.iter().map(size).sum::<usize>() > ANNOTATIONS_LIMIT {
        annotations.remove(LAST_APPLIED);
    }
}

/// The set in the current type: fields below an atomic field become that field.
fn reconciled(set: Set, of: &Type) -> Set {
    let mut out = Set::EMPTY;
    for (element, member, below) in set.into_nodes() {
        if below.is_empty() {
            out.push(element, member, below);
            continue;
        }
        let of = match (of.first(), &element) {
            (Atom::Map(map), _) if is_deduced(map) => None,
            (Atom::Map(map), Element::Field(name)) => map.field(name),
            (Atom::Map(map), _) => map.rest.as_ref().map(TypeRef::get),
            (Atom::List(list), _) => Some(list.element.get()),
            _ => None,
        };
        match of {
            Some(of) if is_atomic(of) => out.push(element, true, Set::EMPTY),
            Some(of) => out.push(element, member, reconciled(below, of)),
            None => out.push(element, member, below),
        }
    }
    out
}

fn is_atomic(of: &Type) -> bool {
    match of.first() {
        Atom::Map(map) => map.atomic && !is_deduced(map),
        Atom::List(list) => list.elements == Elements::Atomic,
        _ => false,
    }
}

/// The type does not describe the fields of such a map.
fn is_deduced(map: &MapType) -> bool {
    map.fields.is_empty() && matches!(map.rest, Some(TypeRef::Deduced))
}
