//! The content store and the index of images.
//!
//! Several processes may use the store at once (`decapod images import` beside a running node). So
//! each look-up reads the index from disk, and changes hold a file lock. Garbage collection runs
//! only while no process adds content.
//!
//! The blob of a layer is removed after unpacking: containers use the directory, and the manifest
//! still lists the blob's digest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::config::{ConfigFile, Descriptor, ImageConfig, Manifest, for_us};
use super::name::{Name, is_digest};
use super::progress::Progress;
use super::{During, Error, Result, unpack};
use crate::files;
use crate::layout::hex;

/// The limit on manifests and configurations. Layers are limited by the disk only.
const JSON_LIMIT: u64 = 16 << 20;
/// The length of layer directory names in older versions' stores.
const SHORT: usize = 16;

/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct ImageStore {
    root: PathBuf,
    progress: Progress,
}

/// One image, identified by the digest of its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// `sha256:<hex>` of the configuration.
    pub id: String,
    /// Complete names with tags.
    pub tags: Vec<String>,
    /// Complete names with the digest of the manifest (or index) that was requested.
    pub digests: Vec<String>,
    pub manifest: String,
    /// Diff ids, lowest first.
    pub layers: Vec<String>,
    pub size: u64,
    pub config: ImageConfig,
    /// The kubelet does not garbage-collect it.
    #[serde(default)]
    pub pinned: bool,
}

#[derive(Default, Serialize, Deserialize)]
struct Index {
    images: BTreeMap<String, ImageRecord>,
}

/// While this exists, content that no image names yet is not collected.
pub struct Ingest(#[expect(dead_code, reason = "held for its drop")] Flock<File>);

impl ImageStore {
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        for directory in ["blobs/sha256", "layers", "leases"] {
            fs::create_dir_all(root.join(directory))
                .during(|| format!("create {}", root.display()))?;
        }
        Ok(Self { root, progress: Progress::default() })
    }

    /// Keeps images from the kubelet's garbage collection, or no longer.
    pub fn pin(&self, ids: &[String], is_pinned: bool) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        self.change(|index| {
            for (_, image) in index.images.iter_mut().filter(|(id, _)| ids.contains(id)) {
                image.pinned = is_pinned;
            }
        })
    }

    /// How far this store's import or pull is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    pub fn list(&self) -> Result<Vec<ImageRecord>> {
        Ok(self.read_index()?.images.into_values().collect())
    }

    /// Finds by id (or its prefix), by tag or by digest.
    pub fn find(&self, reference: &str) -> Result<Option<ImageRecord>> {
        let mut index = self.read_index()?;
        if let Some(record) = index.images.remove(reference) {
            return Ok(Some(record));
        }
        let bare = reference.strip_prefix("sha256:").unwrap_or(reference);
        if bare.len() >= 12 && bare.bytes().all(|b| b.is_ascii_hexdigit()) {
            let start = format!("sha256:{bare}");
            if let Some(id) = index.images.keys().find(|id| id.starts_with(&start)).cloned() {
                return Ok(index.images.remove(&id));
            }
        }
        let Ok(name) = Name::parse(reference) else { return Ok(None) };
        let text = name.to_string();
        Ok(index.images.into_values().find(|r| r.tags.contains(&text) || r.digests.contains(&text)))
    }

    /// Removes a name or, for an id, the image with all its names. False when nothing matched.
    pub fn remove(&self, reference: &str) -> Result<bool> {
        let Some(record) = self.find(reference)? else { return Ok(false) };
        self.change(|index| {
            let by_name = Name::parse(reference).map(|name| name.to_string()).unwrap_or_default();
            let Some(entry) = index.images.get_mut(&record.id) else { return };
            let named = entry.tags.contains(&by_name) || entry.digests.contains(&by_name);
            entry.tags.retain(|tag| *tag != by_name);
            entry.digests.retain(|digest| *digest != by_name);
            // Upstream: an image without a tag is removed, even if digests name it.
            if !named || entry.tags.is_empty() {
                index.images.remove(&record.id);
            }
        })?;
        self.collect()?;
        Ok(true)
    }

    pub fn ingest(&self) -> Result<Ingest> {
        Ok(Ingest(self.lock("content.lock", FlockArg::LockShared)?))
    }

    /// Keeps an image's layers while a container uses them, even if the image is removed.
    pub fn lease(&self, container: &str, reference: &str) -> Result<Option<ImageRecord>> {
        // No collection runs between the look-up and the record of the lease.
        let _ingest = self.ingest()?;
        let Some(record) = self.find(reference)? else { return Ok(None) };
        let path = self.root.join("leases").join(container);
        files::write_json(&path, &record.layers).during(|| format!("write {}", path.display()))?;
        Ok(Some(record))
    }

    /// Ends [`ImageStore::lease`], if it still exists.
    pub fn release(&self, container: &str) -> Result<()> {
        let leases = self.root.join("leases");
        let volumes = (0..).map(|index| leases.join(Self::volume_lease(container, index)));
        for path in std::iter::once(leases.join(container)).chain(volumes) {
            match fs::remove_file(&path) {
                Ok(()) => {}
                // A container's own lease may be gone already. The volumes' leases are numbered, so
                // one may follow.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    if path.file_name().is_some_and(|name| name != container) {
                        break;
                    }
                }
                Err(error) => return Err(error).during(|| format!("remove {}", path.display())),
            }
        }
        Ok(())
    }

    /// The name of the lease of a container's image volume. It ends with the container's own lease.
    pub fn volume_lease(container: &str, index: usize) -> String {
        format!("{container}.{index}")
    }

    fn leased(&self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        let directory = self.root.join("leases");
        for entry in fs::read_dir(&directory).during(|| format!("list {}", directory.display()))? {
            let path = entry.during(|| format!("list {}", directory.display()))?.path();
            let layers: Option<Vec<String>> =
                files::read_json(&path).during(|| format!("read {}", path.display()))?;
            all.extend(layers.unwrap_or_default());
        }
        Ok(all)
    }

    /// Always a path inside the store: an invalid digest yields a path that does not exist.
    pub fn blob(&self, digest: &str) -> PathBuf {
        self.root.join("blobs/sha256").join(hex_of(digest))
    }

    pub fn has_blob(&self, digest: &str) -> bool {
        is_digest(digest) && self.blob(digest).is_file()
    }

    /// Stores `content` and returns its digest. Fails when `expected` differs.
    pub fn put_blob(&self, mut content: impl Read, expected: Option<&str>) -> Result<String> {
        let mut partial = self.partial_blob()?;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let n = content.read(&mut buffer).during(|| "read content".into())?;
            if n == 0 {
                return partial.finish(expected);
            }
            partial.write(&buffer[..n])?;
        }
    }

    /// Starts a blob that is written in chunks.
    pub fn partial_blob(&self) -> Result<PartialBlob> {
        let path = self.root.join("blobs").join(format!(".{}", base::rng::alphanumeric(16)));
        let file = File::create(&path).during(|| format!("create {}", path.display()))?;
        Ok(PartialBlob { store: self.clone(), path, file, hash: Sha256::new(), finished: false })
    }

    /// Reads a small blob and checks its hash.
    pub fn read_blob(&self, digest: &str) -> Result<Vec<u8>> {
        let invalid = |what: &str| Error::Invalid(format!("content {digest}: {what}"));
        if !is_digest(digest) {
            return Err(invalid("not a digest"));
        }
        let file = File::open(self.blob(digest)).during(|| format!("open content {digest}"))?;
        let mut bytes = Vec::new();
        file.take(JSON_LIMIT)
            .read_to_end(&mut bytes)
            .during(|| format!("read content {digest}"))?;
        if format!("sha256:{}", hex(&Sha256::digest(&bytes))) != digest {
            return Err(invalid("is damaged or too long"));
        }
        Ok(bytes)
    }

    pub fn read_json<T: serde::de::DeserializeOwned>(&self, digest: &str) -> Result<T> {
        serde_json::from_slice(&self.read_blob(digest)?)
            .map_err(|error| Error::Invalid(format!("content {digest}: {error}")))
    }

    pub fn layer(&self, diff_id: &str) -> PathBuf {
        self.layers_dir().join(hex_of(diff_id))
    }

    /// The layer's directory in older stores: the first 64 bits of its digest, which two layers may share.
    fn short_layer(&self, diff_id: &str) -> PathBuf {
        let hex = hex_of(diff_id);
        self.layers_dir().join(hex.get(..SHORT).unwrap_or(hex))
    }

    /// Renames layers of an older version's store to their full digest, where their owner is
    /// unambiguous. Containers that use them are not affected: mounts do not depend on names.
    pub fn name_layers_wholly(&self) -> Result<()> {
        let directory = self.layers_dir();
        let entries =
            fs::read_dir(&directory).during(|| format!("list {}", directory.display()))?;
        let is_short = |name: &std::ffi::OsStr| {
            let name = name.as_encoded_bytes();
            name.len() == SHORT && name.iter().all(u8::is_ascii_hexdigit)
        };
        if !entries.flatten().any(|entry| is_short(&entry.file_name())) {
            return Ok(());
        }
        // No process adds or removes content meanwhile.
        let _alone = self.lock("content.lock", FlockArg::LockExclusive)?;
        let mut owners: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
        let images = self.read_index()?.images.into_values().flat_map(|record| record.layers);
        for diff_id in images.chain(self.leased()?) {
            owners.entry(self.short_layer(&diff_id)).or_default().insert(diff_id);
        }
        for (short, of) in owners.iter().filter(|(short, _)| short.is_dir()) {
            match of.first().filter(|_| of.len() == 1).map(|diff_id| self.layer(diff_id)) {
                Some(whole) if whole.exists() => {}
                Some(whole) => {
                    fs::rename(short, &whole).during(|| format!("rename {}", short.display()))?;
                }
                None => tracing::warn!(
                    layers = ?of,
                    "layers with the same digest prefix shared one directory: pull their images again"
                ),
            }
        }
        Ok(())
    }

    pub fn layers_dir(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub fn has_layer(&self, diff_id: &str) -> bool {
        is_digest(diff_id) && self.layer(diff_id).is_dir()
    }

    /// Follows an index to the manifest for this machine. All of them must be in the store.
    pub fn resolve_manifest(&self, digest: &str) -> Result<(String, Manifest)> {
        let mut digest = digest.to_owned();
        // An index may name an index, up to this depth.
        for _ in 0..4 {
            let manifest: Manifest = self.read_json(&digest)?;
            if manifest.config.is_some() {
                return Ok((digest, manifest));
            }
            let next = for_us(&manifest.manifests).ok_or_else(|| {
                let (os, architecture) = super::config::Platform::ours();
                Error::Invalid(format!("no match for platform {os}/{architecture} in the image"))
            })?;
            digest.clone_from(&next.digest);
        }
        Err(Error::Invalid(format!("content {digest}: an index of indexes")))
    }

    /// Unpacks the layers of a stored manifest, and records the image. `digest` is the requested
    /// one (possibly of an index). `names` may be empty.
    pub fn adopt(&self, digest: &str, names: &[Name]) -> Result<ImageRecord> {
        let (manifest_digest, manifest) = self.resolve_manifest(digest)?;
        let config = manifest.config.clone().unwrap_or_default();
        let file: ConfigFile = self.read_json(&config.digest)?;
        let diff_ids = file.rootfs.diff_ids;
        if diff_ids.len() != manifest.layers.len() {
            return Err(Error::Invalid(format!(
                "image {digest}: layers and diff ids differ in number"
            )));
        }
        let foreign = manifest.layers.iter().map(|layer| &layer.digest).chain(&diff_ids);
        if let Some(bad) = foreign.into_iter().find(|digest| !is_digest(digest)) {
            return Err(Error::Invalid(format!("image {digest}: {bad:?} is not a digest")));
        }
        // A malicious manifest may list the blobs of other images as its layers: those are kept.
        let images = self.read_index()?.images.into_values();
        let mut kept: BTreeSet<String> = images.flat_map(|r| [r.id, r.manifest]).collect();
        kept.extend([config.digest.clone(), manifest_digest.clone(), digest.to_owned()]);
        let count = diff_ids.len();
        for (index, (layer, diff_id)) in manifest.layers.iter().zip(&diff_ids).enumerate() {
            self.progress.begin(format!("unpack layer {} of {count}", index + 1), layer.size);
            self.unpack_layer(layer, diff_id, !kept.contains(&layer.digest))?;
        }
        self.progress.begin("write to disk".to_owned(), 0);
        self.sync_layers()?;
        let size = config.size + manifest.layers.iter().map(|layer| layer.size).sum::<u64>();
        let record = ImageRecord {
            id: config.digest.clone(),
            tags: names.iter().filter_map(Name::tagged).collect(),
            digests: names.iter().map(|name| name.with_digest(digest)).collect(),
            manifest: manifest_digest,
            layers: diff_ids,
            size,
            config: file.config.unwrap_or_default(),
            pinned: false,
        };
        self.add(record)
    }

    /// `spent`: the archive can be removed after unpacking.
    fn unpack_layer(&self, layer: &Descriptor, diff_id: &str, spent: bool) -> Result<()> {
        if !self.has_layer(diff_id) {
            let blob = self.blob(&layer.digest);
            let file = File::open(&blob).during(|| format!("open layer {}", layer.digest))?;
            let file = self.progress.counted(file);
            unpack::layer(file, diff_id, &self.layers_dir(), &self.layer(diff_id))?;
        }
        if !spent {
            return Ok(());
        }
        match fs::remove_file(self.blob(&layer.digest)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).during(|| format!("remove layer {}", layer.digest))
            }
            _ => Ok(()),
        }
    }

    /// Syncs the layers before the index names them, so that a power failure cannot leave empty
    /// files. The next start removes layers that the index does not name.
    fn sync_layers(&self) -> Result<()> {
        let layers = self.layers_dir();
        let opened = File::open(&layers).during(|| format!("open {}", layers.display()))?;
        nix::unistd::syncfs(&opened)
            .map_err(io::Error::from)
            .during(|| format!("sync {}", layers.display()))
    }

    fn add(&self, record: ImageRecord) -> Result<ImageRecord> {
        self.change(|index| {
            for other in index.images.values_mut() {
                // A name belongs to one image only.
                other.tags.retain(|tag| !record.tags.contains(tag));
            }
            let entry = index.images.entry(record.id.clone()).or_default();
            let mut merged = record.clone();
            for (ours, theirs) in
                [(&mut merged.tags, &entry.tags), (&mut merged.digests, &entry.digests)]
            {
                let all: BTreeSet<String> = ours.drain(..).chain(theirs.iter().cloned()).collect();
                ours.extend(all);
            }
            merged.pinned |= entry.pinned;
            *entry = merged.clone();
            merged
        })
    }

    /// Removes blobs and layers that no image and no container uses. Does nothing while a process
    /// adds content.
    pub fn collect(&self) -> Result<()> {
        let Some(_alone) = self.try_lock("content.lock")? else { return Ok(()) };
        let index = self.read_index()?;
        // A program of an older version may run beside this one, or be installed again.
        let places = |diff_id: &String| [self.layer(diff_id), self.short_layer(diff_id)];
        let mut keep: BTreeSet<PathBuf> = self.leased()?.iter().flat_map(places).collect();
        for record in index.images.values() {
            keep.insert(self.blob(&record.id));
            keep.insert(self.blob(&record.manifest));
            keep.extend(record.layers.iter().flat_map(places));
        }
        for directory in
            [self.root.join("blobs/sha256"), self.root.join("blobs"), self.layers_dir()]
        {
            let entries =
                fs::read_dir(&directory).during(|| format!("list {}", directory.display()))?;
            for path in entries.flatten().map(|entry| entry.path()) {
                if keep.contains(&path) || path.ends_with("blobs/sha256") {
                    continue;
                }
                let removed =
                    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.during(|| format!("remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    pub fn used(&self) -> (u64, u64) {
        disk_usage(&self.root)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn read_index(&self) -> Result<Index> {
        let path = self.root.join("index.json");
        let index = files::read_json(&path).during(|| "read the index of images".into())?;
        Ok(index.unwrap_or_default())
    }

    fn change<T>(&self, change: impl FnOnce(&mut Index) -> T) -> Result<T> {
        let _alone = self.lock("index.lock", FlockArg::LockExclusive)?;
        let mut index = self.read_index()?;
        let result = change(&mut index);
        let path = self.root.join("index.json");
        serde_json::to_vec(&index)
            .map_err(io::Error::from)
            .and_then(|bytes| files::write_durable(&path, &bytes))
            .during(|| "write the index of images".into())?;
        Ok(result)
    }

    fn lock_file(&self, name: &str) -> Result<File> {
        let path = self.root.join(name);
        OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .during(|| format!("open {}", path.display()))
    }

    fn lock(&self, name: &str, kind: FlockArg) -> Result<Flock<File>> {
        Flock::lock(self.lock_file(name)?, kind)
            .map_err(|(_, errno)| io::Error::from(errno))
            .during(|| format!("lock {name}"))
    }

    fn try_lock(&self, name: &str) -> Result<Option<Flock<File>>> {
        match Flock::lock(self.lock_file(name)?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Some(lock)),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(io::Error::from(errno)).during(|| format!("lock {name}")),
        }
    }
}

fn hex_of(digest: &str) -> &str {
    digest.strip_prefix("sha256:").filter(|_| is_digest(digest)).unwrap_or("invalid")
}

/// A blob that is being written. Dropping it unfinished removes its file.
pub struct PartialBlob {
    store: ImageStore,
    path: PathBuf,
    file: File,
    hash: Sha256,
    finished: bool,
}

impl PartialBlob {
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).during(|| "write content".into())
    }

    pub fn finish(mut self, expected: Option<&str>) -> Result<String> {
        let digest = format!("sha256:{}", hex(&std::mem::take(&mut self.hash).finalize()));
        if let Some(expected) = expected.filter(|expected| *expected != digest) {
            return Err(Error::Invalid(format!("content is {digest}, not {expected}")));
        }
        self.file.sync_data().during(|| "write content".into())?;
        fs::rename(&self.path, self.store.blob(&digest)).during(|| "store content".into())?;
        self.finished = true;
        Ok(digest)
    }
}

impl Drop for PartialBlob {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Bytes and inodes below a directory.
pub(crate) fn disk_usage(root: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let (mut bytes, mut inodes) = (0, 0);
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            // A file that disappears meanwhile does not count.
            let Ok(about) = entry.metadata() else { continue };
            bytes += about.blocks() * 512;
            inodes += 1;
            if about.is_dir() {
                left.push(entry.path());
            }
        }
    }
    (bytes, inodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff_id(start: &str, rest: char) -> String {
        format!("sha256:{start}{}", rest.to_string().repeat(64 - start.len()))
    }

    fn store_with(images: &[(&str, &[&str])]) -> (tempfile::TempDir, ImageStore) {
        let directory = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(directory.path()).expect("opened");
        for (id, layers) in images {
            let layers = layers.iter().map(|layer| (*layer).to_owned()).collect();
            let record = ImageRecord { id: (*id).into(), layers, ..ImageRecord::default() };
            store.add(record).expect("added");
        }
        (directory, store)
    }

    #[test]
    fn layers_with_the_same_digest_prefix_stay_separate() {
        let (_directory, store) = store_with(&[]);
        let (one, two) = (diff_id("0123456789abcdef", '1'), diff_id("0123456789abcdef", '2'));
        fs::create_dir(store.layer(&one)).expect("made");
        assert!(store.has_layer(&one) && !store.has_layer(&two));
    }

    /// A manifest with one layer that the store already has, so that its archive is not read.
    fn adopt_with_archive(store: &ImageStore, archive: &str) -> Result<ImageRecord> {
        let layer = diff_id("", 'a');
        fs::create_dir_all(store.layer(&layer)).expect("made");
        let put = |value: serde_json::Value| {
            let text = value.to_string();
            (store.put_blob(text.as_bytes(), None).expect("stored"), text.len())
        };
        let (config, size) = put(serde_json::json!({"os": "linux", "architecture": "amd64",
            "rootfs": {"type": "layers", "diff_ids": [layer]}, "made for": archive}));
        let (manifest, _) = put(serde_json::json!({"schemaVersion": 2,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config, "size": size},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": archive, "size": 1}]}));
        store.adopt(&manifest, &[])
    }

    #[test]
    fn a_manifest_removes_nothing_but_its_own_archives() {
        let (directory, store) = store_with(&[]);
        let precious = directory.path().join("precious");
        fs::write(&precious, "text").expect("written");
        let absolute = precious.display();
        for name in [
            format!("sha256:{absolute}"),
            "sha256:../../precious".to_owned(),
            absolute.to_string(),
            "../precious".to_owned(),
            String::new(),
        ] {
            let error = adopt_with_archive(&store, &name).expect_err("refused").to_string();
            assert!(error.contains("is not a digest"), "{error}");
            assert!(store.blob(&name).starts_with(store.root()));
            assert!(store.layer(&name).starts_with(store.root()));
            assert!(precious.exists(), "{name} led to it");
        }
        let own = store.put_blob(&b"an archive"[..], None).expect("stored");
        let image = adopt_with_archive(&store, &own).expect("adopted");
        assert!(!store.has_blob(&own), "it is unpacked");
        // Another image's configuration is not this image's archive.
        adopt_with_archive(&store, &image.id).expect("adopted");
        assert!(store.has_blob(&image.id));
    }

    #[test]
    fn layers_of_an_older_store_get_their_whole_names() {
        let [a, b, twin, leased] = [("a", '0'), ("b", '1'), ("b", '2'), ("c", '0')]
            .map(|(c, r)| diff_id(&c.repeat(16), r));
        let images: &[(&str, &[&str])] = &[("sha256:1", &[&a, &b]), ("sha256:2", &[&a, &twin])];
        let (_directory, store) = store_with(images);
        files::write_json(&store.root().join("leases/container"), &[&leased]).expect("a lease");
        for short in ["a", "b", "c", "d"] {
            let place = store.layers_dir().join(short.repeat(16));
            fs::create_dir(&place).expect("made");
            fs::write(place.join("file"), short).expect("written");
        }
        // A program of an older version may be running: collection keeps everything that it uses.
        store.collect().expect("collected");
        let names = || {
            let entries = fs::read_dir(store.layers_dir()).expect("listed").flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.collect::<BTreeSet<_>>()
        };
        assert_eq!(names(), BTreeSet::from(["a", "b", "c"].map(|c| c.repeat(16))));
        for _ in 0..2 {
            store.name_layers_wholly().expect("named");
            for (layer, content) in [(&a, "a"), (&leased, "c")] {
                let read = fs::read_to_string(store.layer(layer).join("file"));
                assert_eq!(read.expect("it is there"), content);
            }
            // The owner of this directory is ambiguous.
            assert!(!store.has_layer(&b) && !store.has_layer(&twin));
            assert_eq!(names().len(), 3);
        }
        store.release("container").expect("released");
        store.collect().expect("collected");
        assert!(store.has_layer(&a) && !store.has_layer(&leased));
    }
}
