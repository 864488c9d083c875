//! Image archives: the OCI layout and the older docker archive.
//!
//! ```text
//! OCI layout                        docker archive
//!   oci-layout                        manifest.json   config and layers by path
//!   index.json    ─► manifest(s)      <config>.json
//!   blobs/sha256/<digest>             <layer>/layer.tar
//! ```

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Layer;

/// The parts of an image.
pub struct Image {
    name: String,
    layers: Vec<Layer>,
    command: Vec<String>,
    entrypoint: Vec<String>,
    user: String,
}

#[derive(Clone, Copy, Debug)]
pub enum Compression {
    Plain,
    Gzip,
    Zstd,
}

impl Image {
    /// `name` is a full reference with a tag.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            layers: Vec::new(),
            command: Vec::new(),
            entrypoint: Vec::new(),
            user: String::new(),
        }
    }

    pub fn layer(mut self, layer: Layer) -> Self {
        self.layers.push(layer);
        self
    }

    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.entrypoint = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Name or number, optionally with a group after a colon.
    pub fn user(mut self, user: &str) -> Self {
        self.user = user.to_owned();
        self
    }

    fn config(&self, architecture: &str, plain: &[Vec<u8>]) -> Value {
        json!({
            "architecture": architecture,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "Cmd": self.command,
                "Entrypoint": self.entrypoint,
                "User": self.user,
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "WorkingDir": "/",
            },
            "rootfs": {
                "type": "layers",
                "diff_ids": plain.iter().map(|bytes| digest(bytes)).collect::<Vec<_>>(),
            },
        })
    }
}

/// Writes one archive with a manifest per platform, under an index if there are several.
pub fn write_oci_layout(path: &Path, images: &[(&str, &Image)], how: Compression) -> Result<()> {
    let mut archive = Archive::create(path)?;
    archive.add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let mut manifests = Vec::new();
    for (architecture, image) in images {
        let mut descriptor = oci_manifest(&mut archive, architecture, image, how)?;
        descriptor["platform"] = json!({"architecture": architecture, "os": "linux"});
        manifests.push(descriptor);
    }
    let name = &images.first().context("an archive holds at least one image")?.1.name;
    let mut top = match manifests.len() {
        1 => manifests.remove(0),
        _ => {
            let kind = "application/vnd.oci.image.index.v1+json";
            let index = json!({"schemaVersion": 2, "mediaType": kind, "manifests": manifests});
            archive.blob(kind, index.to_string().as_bytes())?
        }
    };
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    top["annotations"] =
        json!({"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag});
    let index = json!({"schemaVersion": 2, "manifests": [top]});
    archive.add("index.json", index.to_string().as_bytes())?;
    archive.finish()
}

fn oci_manifest(
    archive: &mut Archive,
    architecture: &str,
    image: &Image,
    how: Compression,
) -> Result<Value> {
    let plain = image.plain_layers()?;
    let mut layers = Vec::new();
    for bytes in &plain {
        layers.push(archive.blob(how.media_type(), &how.apply(bytes)?)?);
    }
    let config = image.config(architecture, &plain).to_string();
    let config = archive.blob("application/vnd.oci.image.config.v1+json", config.as_bytes())?;
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers});
    archive.blob(kind, manifest.to_string().as_bytes())
}

/// Writes the format of older versions of `docker save`.
pub fn write_docker_archive(path: &Path, image: &Image) -> Result<()> {
    let mut archive = Archive::create(path)?;
    let plain = image.plain_layers()?;
    let mut layers = Vec::new();
    for bytes in &plain {
        let name = format!("{}/layer.tar", hex(bytes));
        archive.add(&name, bytes)?;
        layers.push(name);
    }
    let config = image.config("amd64", &plain).to_string();
    let config_name = format!("{}.json", hex(config.as_bytes()));
    archive.add(&config_name, config.as_bytes())?;
    let short = image.name.strip_prefix("docker.io/library/").unwrap_or(&image.name);
    let manifest = json!([{"Config": config_name, "RepoTags": [short], "Layers": layers}]);
    archive.add("manifest.json", manifest.to_string().as_bytes())?;
    archive.finish()
}

impl Image {
    fn plain_layers(&self) -> Result<Vec<Vec<u8>>> {
        self.layers.iter().map(Layer::bytes).collect()
    }
}

impl Compression {
    fn apply(self, bytes: &[u8]) -> Result<Vec<u8>> {
        match self {
            Self::Plain => Ok(bytes.to_vec()),
            Self::Gzip => {
                let level = flate2::Compression::fast();
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
                encoder.write_all(bytes)?;
                Ok(encoder.finish()?)
            }
            Self::Zstd => Ok(zstd::encode_all(bytes, 3)?),
        }
    }

    fn media_type(self) -> &'static str {
        match self {
            Self::Plain => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }
}

struct Archive(tar::Builder<File>, std::collections::BTreeSet<String>);

impl Archive {
    fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("{}", path.display()))?;
        Ok(Self(tar::Builder::new(file), Default::default()))
    }

    /// Adds a file. A name that exists already has the same content (names are digests) and is skipped.
    fn add(&mut self, name: &str, content: &[u8]) -> Result<()> {
        if !self.1.insert(name.to_owned()) {
            return Ok(());
        }
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(0);
        self.0.append_data(&mut header, name, content)?;
        Ok(())
    }

    fn blob(&mut self, media_type: &str, content: &[u8]) -> Result<Value> {
        self.add(&format!("blobs/sha256/{}", hex(content)), content)?;
        Ok(json!({"mediaType": media_type, "digest": digest(content), "size": content.len()}))
    }

    fn finish(self) -> Result<()> {
        self.0.into_inner()?.sync_all()?;
        Ok(())
    }
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(bytes))
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
