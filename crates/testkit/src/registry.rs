//! A real image registry on a host's loopback: Debian's `docker-registry`, unpacked, not installed.
//!
//! In: a host and OCI archives. Out: an address to pull from.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::host::Host;
use crate::{http, images, places, wait};

pub const ADDRESS: &str = "127.0.0.1:5000";

pub struct Registry {
    process: Child,
}

impl Registry {
    /// Starts an empty registry and waits until it answers. Drop it before its host.
    pub fn start(host: &Host) -> Result<Self> {
        Self::start_at(host, &host.directory().join("registry/data"))
    }

    /// The same with a data directory that may contain images.
    pub fn start_at(host: &Host, data: &Path) -> Result<Self> {
        let directory = host.directory().join("registry");
        fs::create_dir_all(&directory)?;
        let config = directory.join("config.yml");
        let text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {ADDRESS}\n",
            data.display()
        );
        fs::write(&config, text)?;
        let log = fs::File::create(directory.join("log"))?;
        let mut command = host.command(program()?);
        command.arg("serve").arg(&config).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let registry = Self { process: host.spawn(&mut command)? };
        let network = host.network()?;
        wait::until(wait::LONG, "the registry answers", || {
            http::get_from(&network, ADDRESS, "/v2/", wait::LONG)
        })?;
        Ok(registry)
    }

    /// Pushes the content of an OCI archive, under a repository and a tag.
    pub fn push(&self, host: &Host, archive: &Path, repository: &str, tag: &str) -> Result<()> {
        let files = read_archive(archive)?;
        let index: Value = serde_json::from_slice(file(&files, "index.json")?)?;
        let top = &index["manifests"][0];
        let push = Push { files: &files, repository };
        host.in_network(|| push.manifest(top, tag))?
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

type Files = BTreeMap<String, Vec<u8>>;

struct Push<'a> {
    files: &'a Files,
    repository: &'a str,
}

impl Push<'_> {
    /// A registry accepts a manifest only after everything that it references.
    fn manifest(&self, descriptor: &Value, reference: &str) -> Result<()> {
        let bytes = self.blob(descriptor)?;
        let manifest: Value = serde_json::from_slice(bytes)?;
        for part in manifest["manifests"].as_array().into_iter().flatten() {
            self.manifest(part, part["digest"].as_str().context("a digest")?)?;
        }
        let layers = manifest["layers"].as_array().into_iter().flatten();
        for part in layers.chain(manifest.get("config")) {
            self.upload(part)?;
        }
        let kind = descriptor["mediaType"].as_str().context("a media type")?;
        let path = format!("/v2/{}/manifests/{reference}", self.repository);
        self.put(&path, kind, bytes)
    }

    fn upload(&self, descriptor: &Value) -> Result<()> {
        let start = format!("/v2/{}/blobs/uploads/", self.repository);
        let answer = http::send("POST", ADDRESS, &start, "text/plain", b"", wait::LONG)?;
        let location =
            answer.location.with_context(|| format!("no place to upload: {}", answer.body))?;
        let path = location.split_once(ADDRESS).map_or(location.as_str(), |(_, path)| path);
        let joint = if path.contains('?') { '&' } else { '?' };
        let digest = descriptor["digest"].as_str().context("a digest")?;
        self.put(
            &format!("{path}{joint}digest={digest}"),
            "application/octet-stream",
            self.blob(descriptor)?,
        )
    }

    fn put(&self, path: &str, kind: &str, bytes: &[u8]) -> Result<()> {
        let answer = http::send("PUT", ADDRESS, path, kind, bytes, wait::LONG)?;
        ensure!(answer.status == 201, "PUT {path}: {} {}", answer.status, answer.body);
        Ok(())
    }

    fn blob(&self, descriptor: &Value) -> Result<&[u8]> {
        let digest = descriptor["digest"].as_str().context("a digest")?;
        file(self.files, &format!("blobs/{}", digest.replace(':', "/")))
    }
}

fn file<'a>(files: &'a Files, name: &str) -> Result<&'a [u8]> {
    files.get(name).map(Vec::as_slice).with_context(|| format!("no {name} in the archive"))
}

fn read_archive(path: &Path) -> Result<Files> {
    let mut files = Files::new();
    for entry in tar::Archive::new(fs::File::open(path)?).entries()? {
        let mut entry = entry?;
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        files.insert(entry.path()?.to_string_lossy().into_owned(), bytes);
    }
    Ok(files)
}

/// The registry's program, downloaded once.
fn program() -> Result<PathBuf> {
    let directory = places::cache()?;
    fs::create_dir_all(&directory)?;
    let path = directory.join("docker-registry");
    if !path.is_file() {
        let packages = images::unpack_packages(&["docker-registry"])?;
        let partial = directory.join(format!("docker-registry.{}", std::process::id()));
        fs::copy(packages.path().join("usr/bin/docker-registry"), &partial)?;
        fs::rename(&partial, &path)?;
    }
    Ok(path)
}
