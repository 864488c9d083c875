//! Imports images from a tar file: an OCI layout or the output of `docker save`; plain, gzip or zstd.
//!
//! One pass over the archive stores its content. Then its index (or docker's `manifest.json`) lists
//! the images.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use tar::{Archive, EntryType};

use super::config::{Descriptor, Manifest};
use super::name::{Name, is_digest};
use super::store::{ImageRecord, ImageStore};
use super::{During, Error, Result, unpack};

const MEMORY_LIMIT: u64 = 16 << 20;
/// Annotations that name an image in an index, the complete name first.
const FULL_NAME: &str = "io.containerd.image.name";
const REFERENCE_NAME: &str = "org.opencontainers.image.ref.name";

/// The content of an archive, by path: small files in memory, others as blobs.
#[derive(Default)]
struct Contents {
    small: BTreeMap<PathBuf, Vec<u8>>,
    blobs: BTreeMap<PathBuf, (String, u64)>,
    links: BTreeMap<PathBuf, PathBuf>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: PathBuf,
    repo_tags: Option<Vec<String>>,
    layers: Vec<PathBuf>,
}

/// Imports every image of the archive that fits this machine. `name` applies when the archive names
/// no image. Blocks.
pub fn import(store: &ImageStore, archive: &Path, name: Option<&str>) -> Result<Vec<ImageRecord>> {
    let file = File::open(archive).during(|| format!("open {}", archive.display()))?;
    let _ingest = store.ingest()?;
    let size = file.metadata().during(|| format!("read {}", archive.display()))?.len();
    store.progress().begin(format!("read {}", archive.display()), size);
    let contents = read(store, file)?;
    let docker = contents.docker_images()?;
    let mut imported = match contents.small.get(Path::new("index.json")) {
        Some(index) => from_index(store, index, &docker, name)?,
        None => from_docker(store, &contents, &docker, name)?,
    };
    if imported.is_empty() {
        return Err(Error::Invalid(format!(
            "{} contains no image for this machine",
            archive.display()
        )));
    }
    imported.dedup_by(|a, b| a.id == b.id);
    Ok(imported)
}

fn read(store: &ImageStore, file: File) -> Result<Contents> {
    let mut contents = Contents::default();
    let mut archive = Archive::new(unpack::decompress(store.progress().counted(file))?);
    for entry in archive.entries().during(|| "read the archive".into())? {
        let mut entry = entry.during(|| "read the archive".into())?;
        let path: PathBuf = entry
            .path()
            .during(|| "read the archive".into())?
            .components()
            .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
            .collect();
        match entry.header().entry_type() {
            EntryType::Regular => contents.add(store, path, &mut entry)?,
            EntryType::Symlink | EntryType::Link => {
                if let Ok(Some(target)) = entry.link_name() {
                    contents.links.insert(path, target.into_owned());
                }
            }
            _ => {}
        }
    }
    Ok(contents)
}

impl Contents {
    fn add<R: Read>(
        &mut self,
        store: &ImageStore,
        path: PathBuf,
        entry: &mut tar::Entry<'_, R>,
    ) -> Result<()> {
        let size = entry.size();
        let hex = path.strip_prefix("blobs/sha256").ok().and_then(Path::to_str);
        if let Some(hex) = hex {
            let digest = format!("sha256:{hex}");
            if !is_digest(&digest) {
                return Err(Error::Invalid(format!(
                    "{} does not have a digest as its name",
                    path.display()
                )));
            }
            store.put_blob(&mut *entry, Some(&digest))?;
            self.blobs.insert(path, (digest, size));
        } else if path.extension().is_some_and(|e| e == "json") && size <= MEMORY_LIMIT {
            let mut bytes = Vec::new();
            entry
                .take(MEMORY_LIMIT)
                .read_to_end(&mut bytes)
                .during(|| "read the archive".into())?;
            self.small.insert(path, bytes);
        } else if path.extension().is_some_and(|e| e == "tar") {
            let digest = store.put_blob(entry, None)?;
            self.blobs.insert(path, (digest, size));
        }
        Ok(())
    }

    fn docker_images(&self) -> Result<Vec<DockerImage>> {
        let Some(bytes) = self.small.get(Path::new("manifest.json")) else { return Ok(Vec::new()) };
        serde_json::from_slice(bytes)
            .map_err(|error| Error::Invalid(format!("manifest.json: {error}")))
    }

    /// The blob at a path. Follows links.
    fn blob(&self, path: &Path) -> Option<&(String, u64)> {
        let mut path = path.to_owned();
        for _ in 0..8 {
            if let Some(blob) = self.blobs.get(&path) {
                return Some(blob);
            }
            let target = self.links.get(&path)?;
            let mut next = path.parent().unwrap_or(Path::new("")).to_owned();
            for part in target.components() {
                match part {
                    Component::ParentDir => {
                        next.pop();
                    }
                    Component::Normal(name) => next.push(name),
                    _ => {}
                }
            }
            path = next;
        }
        None
    }
}

fn from_index(
    store: &ImageStore,
    index: &[u8],
    docker: &[DockerImage],
    name: Option<&str>,
) -> Result<Vec<ImageRecord>> {
    let index: Manifest = serde_json::from_slice(index)
        .map_err(|error| Error::Invalid(format!("index.json: {error}")))?;
    let mut imported = Vec::new();
    let single = index.manifests.len() == 1;
    for entry in &index.manifests {
        // Skips attestations and images for other platforms; an entry without a platform may be an index.
        if entry
            .platform
            .as_ref()
            .is_some_and(|p| !p.is_ours() && p.os != "unknown" && !p.os.is_empty())
            || entry.platform.as_ref().is_some_and(|p| p.os == "unknown")
        {
            continue;
        }
        let names = names_of(entry, if single { docker } else { &[] }, name)?;
        imported.push(store.adopt(&entry.digest, &names)?);
    }
    Ok(imported)
}

fn names_of(
    entry: &Descriptor,
    docker: &[DockerImage],
    fallback: Option<&str>,
) -> Result<Vec<Name>> {
    if let Some(full) = entry.annotations.get(FULL_NAME) {
        return Ok(vec![Name::parse(full)?]);
    }
    let tags: Vec<&String> =
        docker.iter().flat_map(|image| image.repo_tags.iter().flatten()).collect();
    if !tags.is_empty() {
        return tags.into_iter().map(|tag| Name::parse(tag)).collect();
    }
    match (entry.annotations.get(REFERENCE_NAME), fallback) {
        // Some tools write the complete name.
        (Some(reference), _) if reference.contains('/') || reference.contains(':') => {
            Ok(vec![Name::parse(reference)?])
        }
        (Some(tag), Some(name)) if !name.contains([':', '@']) => {
            Ok(vec![Name::parse(&format!("{name}:{tag}"))?])
        }
        (_, Some(name)) => Ok(vec![Name::parse(name)?]),
        // Only a tag, used as the image's name.
        (Some(tag), None) => Ok(vec![Name::parse(tag)?]),
        (None, None) => Ok(Vec::new()),
    }
}

/// Docker's older format has no manifest: this creates one.
fn from_docker(
    store: &ImageStore,
    contents: &Contents,
    images: &[DockerImage],
    name: Option<&str>,
) -> Result<Vec<ImageRecord>> {
    let mut imported = Vec::new();
    for image in images {
        let missing =
            |path: &Path| Error::Invalid(format!("{} is missing from the archive", path.display()));
        let descriptor = |media_type: &str, digest: &str, size: u64| Descriptor {
            media_type: media_type.into(),
            digest: digest.into(),
            size,
            ..Default::default()
        };
        let config = match (contents.small.get(&image.config), contents.blob(&image.config)) {
            (Some(bytes), _) => {
                let digest = store.put_blob(bytes.as_slice(), None)?;
                descriptor("application/vnd.oci.image.config.v1+json", &digest, bytes.len() as u64)
            }
            (None, Some((digest, size))) => {
                descriptor("application/vnd.oci.image.config.v1+json", digest, *size)
            }
            (None, None) => return Err(missing(&image.config)),
        };
        let layers = image.layers.iter().map(|path| {
            let (digest, size) = contents.blob(path).ok_or_else(|| missing(path))?;
            Ok(descriptor("application/vnd.oci.image.layer.v1.tar", digest, *size))
        });
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": layers.collect::<Result<Vec<_>>>()?,
        });
        let digest = store.put_blob(manifest.to_string().as_bytes(), None)?;
        let tags: Vec<&str> = match &image.repo_tags {
            Some(tags) if !tags.is_empty() => tags.iter().map(String::as_str).collect(),
            _ => name.into_iter().collect(),
        };
        let names = tags.into_iter().map(Name::parse).collect::<Result<Vec<_>>>()?;
        imported.push(store.adopt(&digest, &names)?);
    }
    Ok(imported)
}
