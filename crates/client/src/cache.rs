//! The cache of an informer: packed objects with small headers.
//!
//! In: whole objects as JSON, or the server's own entries if it runs in this process. Out: headers for selection,
//! JSON for decoding.
//! Invariants: keyed by (namespace, name) in order; every index agrees with the entries.
//! A typed pod of 5.8 KB is 42 KB in memory, so typed objects live only in a bounded LRU. JSON repeats
//! names: packed it takes a third, and unpacking takes a tenth of the time of decoding.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lru::LruCache;
use machinery::{OwnerReference, Pairs};
use serde::Deserialize;
use transport::local::Object;

/// Objects kept decoded, per kind.
const DECODED: NonZeroUsize = NonZeroUsize::new(256).expect("positive");

/// Namespace (empty for cluster scope) and name. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl ObjectKey {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// The key of an object.
    pub fn of(meta: &machinery::ObjectMeta) -> Self {
        Self::new(
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        )
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The metadata that controllers select by.
#[derive(Clone, Debug)]
pub struct Header {
    pub key: ObjectKey,
    pub uid: Arc<str>,
    pub resource_version: String,
    pub generation: i64,
    pub labels: Pairs,
    pub owners: Vec<OwnerReference>,
    pub finalizers: Vec<String>,
    /// Has a deletion timestamp.
    pub deleting: bool,
}

impl Header {
    /// The owner that controls the object.
    pub fn controller(&self) -> Option<&OwnerReference> {
        self.owners.iter().find(|owner| owner.controller == Some(true))
    }
}

/// One object: its header and its encoded form (nothing in metadata-only informers).
#[derive(Clone)]
pub struct Entry {
    pub header: Arc<Header>,
    body: Encoded,
    /// Unique among all states of all objects in this process.
    id: u64,
}

#[derive(Clone)]
enum Encoded {
    Nothing,
    Packed(Box<[u8]>),
    /// The server's entry, and the position of `managedFields` in it.
    Shared(Arc<dyn Object>, Range<u32>),
}

/// The header of a server's entry, derived once for all readers.
struct Noted {
    header: Arc<Header>,
    owners: Range<u32>,
    id: u64,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.header.fmt(f)
    }
}

/// The next entry's id.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl Entry {
    pub fn parse(json: &[u8], metadata_only: bool) -> Result<Self, serde_json::Error> {
        let noted = Noted::of(json)?;
        let body = match metadata_only {
            true => Encoded::Nothing,
            false if noted.owners.is_empty() => Encoded::Packed(pack(json)),
            false => Encoded::Packed(pack(&without(json, &noted.owners))),
        };
        Ok(Self { header: noted.header, body, id: noted.id })
    }

    /// An entry that refers to the server's. Nothing is copied, and the header is read once for all readers.
    pub fn share(object: Arc<dyn Object>, metadata_only: bool) -> Result<Self, serde_json::Error> {
        let known = object.note().get().cloned();
        let noted = match known.map(Arc::downcast::<Noted>) {
            Some(Ok(noted)) => noted,
            // Two readers may do this at once. Then one of them keeps a header of its own.
            _ => {
                let made = Arc::new(Noted::of(&object.json())?);
                let kept = object.note().get_or_init(|| made.clone());
                kept.clone().downcast().unwrap_or(made)
            }
        };
        let body = match metadata_only {
            true => Encoded::Nothing,
            false => Encoded::Shared(object, noted.owners.clone()),
        };
        Ok(Self { header: noted.header.clone(), body, id: noted.id })
    }

    /// The object without `managedFields`.
    pub fn json(&self) -> Vec<u8> {
        match &self.body {
            Encoded::Nothing => Vec::new(),
            Encoded::Packed(packed) => lz4_flex::block::decompress_size_prepended(packed)
                .expect("what was packed here can be unpacked"),
            Encoded::Shared(object, owners) => without(&object.json(), owners),
        }
    }
}

impl Noted {
    fn of(json: &[u8]) -> Result<Self, serde_json::Error> {
        let Partial { metadata } = serde_json::from_slice(json)?;
        let owners = metadata.managed_fields.map_or(0..0, |owners| {
            let start = owners.get().as_ptr() as usize - json.as_ptr() as usize;
            // The API's limit for one object is far below 4 GiB.
            start as u32..(start + owners.get().len()) as u32
        });
        let header = Header {
            key: ObjectKey { namespace: metadata.namespace.into(), name: metadata.name.into() },
            uid: metadata.uid.into(),
            resource_version: metadata.resource_version,
            generation: metadata.generation,
            labels: metadata.labels,
            owners: metadata.owner_references.unwrap_or_default(),
            finalizers: metadata.finalizers.unwrap_or_default(),
            deleting: metadata.deletion_timestamp.is_some(),
        };
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Self { header: Arc::new(header), owners, id })
    }
}

fn pack(json: &[u8]) -> Box<[u8]> {
    lz4_flex::block::compress_prepend_size(json).into()
}

/// The object with null in place of `managedFields`. No controller reads them, they are half of many
/// objects, and servers keep them when an update omits them.
fn without(json: &[u8], owners: &Range<u32>) -> Vec<u8> {
    if owners.is_empty() {
        return json.to_vec();
    }
    [&json[..owners.start as usize], b"null", &json[owners.end as usize..]].concat()
}

#[derive(Deserialize)]
struct Partial<'a> {
    #[serde(borrow)]
    metadata: PartialMeta<'a>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PartialMeta<'a> {
    name: String,
    namespace: String,
    uid: String,
    resource_version: String,
    generation: i64,
    labels: Pairs,
    owner_references: Option<Vec<OwnerReference>>,
    finalizers: Option<Vec<String>>,
    deletion_timestamp: Option<String>,
    #[serde(borrow)]
    managed_fields: Option<&'a serde_json::value::RawValue>,
}

/// Values of one object under which an index finds it.
pub(crate) type Extract = Arc<dyn Fn(&Entry) -> Vec<String> + Send + Sync>;

/// Invariant: `keys` and `values` are inverse to each other, so that an entry leaves without being
/// decoded again.
struct Index {
    extract: Extract,
    keys: HashMap<String, BTreeSet<ObjectKey>>,
    /// Objects without a value are omitted.
    values: HashMap<ObjectKey, Box<[String]>>,
}

impl Index {
    /// Replaces the entry of the same key. Most changes keep the values.
    fn put(&mut self, entry: &Entry) {
        let new = (self.extract)(entry).into_boxed_slice();
        let key = &entry.header.key;
        if self.values.get(key).map_or(&[][..], |old| old) == &*new {
            return;
        }
        self.remove(key);
        for value in &new {
            self.keys.entry(value.clone()).or_default().insert(key.clone());
        }
        if !new.is_empty() {
            self.values.insert(key.clone(), new);
        }
    }

    fn remove(&mut self, key: &ObjectKey) {
        for value in self.values.remove(key).iter().flatten() {
            if let Some(set) = self.keys.get_mut(value) {
                set.remove(key);
                if set.is_empty() {
                    self.keys.remove(value);
                }
            }
        }
    }
}

/// Entries and indexes. One writer: the reflector's task.
#[derive(Default)]
pub(crate) struct Cache {
    entries: BTreeMap<ObjectKey, Arc<Entry>>,
    by_owner: HashMap<Arc<str>, BTreeSet<ObjectKey>>,
    indexes: BTreeMap<&'static str, Index>,
}

impl Cache {
    pub(crate) fn get(&self, key: &ObjectKey) -> Option<&Arc<Entry>> {
        self.entries.get(key)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.entries.values()
    }

    pub(crate) fn in_namespace<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Arc<Entry>> {
        self.entries
            .range(ObjectKey::new(namespace, "")..)
            .map(|(_, entry)| entry)
            .take_while(move |entry| &*entry.header.key.namespace == namespace)
    }

    pub(crate) fn by_owner<'a>(&'a self, uid: &str) -> impl Iterator<Item = &'a Arc<Entry>> {
        self.by_owner.get(uid).into_iter().flatten().filter_map(|key| self.entries.get(key))
    }

    pub(crate) fn by_index<'a>(
        &'a self,
        name: &str,
        value: &str,
    ) -> impl Iterator<Item = &'a Arc<Entry>> {
        let keys = self.indexes.get(name).and_then(|index| index.keys.get(value));
        keys.into_iter().flatten().filter_map(|key| self.entries.get(key))
    }

    /// Idempotent by name.
    pub(crate) fn add_index(&mut self, name: &'static str, extract: Extract) {
        if self.indexes.contains_key(name) {
            return;
        }
        let mut index = Index { extract, keys: HashMap::new(), values: HashMap::new() };
        for entry in self.entries.values() {
            index.put(entry);
        }
        self.indexes.insert(name, index);
    }

    /// Puts an entry; returns the one that it replaces.
    pub(crate) fn put(&mut self, entry: Arc<Entry>) -> Option<Arc<Entry>> {
        let old = self.entries.insert(entry.header.key.clone(), entry.clone());
        if let Some(old) = &old {
            self.disown(old);
        }
        for owner in &entry.header.owners {
            let set = self.by_owner.entry(owner.uid.as_str().into()).or_default();
            set.insert(entry.header.key.clone());
        }
        for index in self.indexes.values_mut() {
            index.put(&entry);
        }
        old
    }

    pub(crate) fn remove(&mut self, key: &ObjectKey) -> Option<Arc<Entry>> {
        let old = self.entries.remove(key)?;
        self.disown(&old);
        for index in self.indexes.values_mut() {
            index.remove(key);
        }
        Some(old)
    }

    fn disown(&mut self, entry: &Entry) {
        for owner in &entry.header.owners {
            if let Some(set) = self.by_owner.get_mut(owner.uid.as_str()) {
                set.remove(&entry.header.key);
                if set.is_empty() {
                    self.by_owner.remove(owner.uid.as_str());
                }
            }
        }
    }
}

/// A cache that grows to its limit. `LruCache::new` allocates all memory at once.
pub(crate) fn bounded<K: Hash + Eq, V>(most: NonZeroUsize) -> LruCache<K, V> {
    let mut cache = LruCache::unbounded();
    cache.resize(most);
    cache
}

/// Recently decoded entries. Both states of a change are decoded once for all handlers that ask.
pub(crate) struct Decoded {
    /// Guards the LRU order; held for a lookup or an insert, never while decoding.
    recent: Mutex<LruCache<u64, Arc<dyn Any + Send + Sync>>>,
    /// How many entries were decoded.
    count: AtomicU64,
}

impl Decoded {
    pub(crate) fn new() -> Self {
        Self { recent: Mutex::new(bounded(DECODED)), count: AtomicU64::new(0) }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The typed object of an entry. `None`, with a log line, if it does not decode.
    pub(crate) fn get<T: crate::Kind>(&self, entry: &Entry) -> Option<Arc<T>> {
        let known = self.recent().get(&entry.id).cloned();
        if let Some(Ok(object)) = known.map(Arc::downcast::<T>) {
            return Some(object);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let object: Arc<T> = match machinery::object::from_json(&entry.json()) {
            Ok(object) => Arc::new(object),
            Err(error) => {
                let key = &entry.header.key;
                tracing::error!(kind = T::KIND, %key, %error, "failed to decode an object");
                return None;
            }
        };
        self.recent().put(entry.id, object.clone());
        Some(object)
    }

    /// Removes a replaced entry, which is never read again.
    pub(crate) fn forget(&self, entry: &Entry) {
        self.recent().pop(&entry.id);
    }

    fn recent(&self) -> std::sync::MutexGuard<'_, LruCache<u64, Arc<dyn Any + Send + Sync>>> {
        self.recent.lock().expect("no panic while held")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_fields_are_not_kept() {
        let check = |json: &str, expected: &str| {
            let entry = Entry::parse(json.as_bytes(), false).expect("an object");
            assert_eq!(String::from_utf8_lossy(&entry.json()), expected);
        };
        check(
            r#"{"metadata":{"name":"a","managedFields":[{"fieldsV1":{"f:x":{}}}],"uid":"u"},"managedFields":[1]}"#,
            r#"{"metadata":{"name":"a","managedFields":null,"uid":"u"},"managedFields":[1]}"#,
        );
        check(r#"{"metadata":{"name":"a"},"x":{}}"#, r#"{"metadata":{"name":"a"},"x":{}}"#);
        let long = format!(r#"{{"metadata":{{"name":"a"}},"x":"{}"}}"#, "ä".repeat(70_000));
        check(&long, &long);
        let metadata = Entry::parse(long.as_bytes(), true).expect("an object");
        assert!(metadata.json().is_empty());
    }
}
