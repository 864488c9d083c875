//! CustomResourceDefinitions of other projects, from their Go modules.
//!
//! In: a Go toolchain and the module proxy. Out: a directory of YAML files per project, downloaded once
//! into the cache; none of them is part of this repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::places;

/// A module, and where its CustomResourceDefinitions are.
pub struct Project {
    pub module: &'static str,
    pub version: &'static str,
    /// A directory, or one file.
    place: &'static str,
}

const fn project(module: &'static str, version: &'static str, place: &'static str) -> Project {
    Project { module, version, place }
}

/// Well-known projects, in releases that Go 1.26 reads.
pub const PROJECTS: &[Project] = &[
    project("github.com/argoproj/argo-cd/v3", "v3.1.9", "manifests/crds"),
    project("github.com/argoproj/argo-rollouts", "v1.8.3", "manifests/crds"),
    project("github.com/cert-manager/cert-manager", "v1.21.2", "deploy/crds"),
    project("github.com/external-secrets/external-secrets", "v1.3.2", "config/crds/bases"),
    project("github.com/kedacore/keda/v2", "v2.21.0", "config/crd/bases"),
    project(
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "example/prometheus-operator-crd-full",
    ),
    project("github.com/tektoncd/pipeline", "v1.5.0", "config/300-crds"),
    project("github.com/vmware-tanzu/velero", "v1.18.3", "config/crd/v1/bases"),
    project("istio.io/api", "v1.31.1", "kubernetes/customresourcedefinitions.gen.yaml"),
    project("knative.dev/serving", "v0.51.0", "config/core/300-resources"),
    project("sigs.k8s.io/cluster-api", "v1.14.2", "core/config/crd/bases"),
    project("sigs.k8s.io/gateway-api", "v1.4.1", "config/crd/experimental"),
];

impl Project {
    /// The texts of its definitions, in the order of their files. `None`, with a printed line, if they are
    /// not in the cache and cannot be downloaded.
    pub fn definitions(&self) -> Result<Option<Vec<String>>> {
        let name = format!("{}-{}", self.module.replace('/', "_"), self.version);
        let directory = places::cache()?.join("definitions").join(name);
        if !directory.is_dir()
            && let Err(error) = self.fetch(&directory)
        {
            println!("skipped: {} cannot be downloaded: {error:#}", self.module);
            return Ok(None);
        }
        let mut texts = vec![];
        for file in yaml_files(&directory)? {
            let text =
                std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
            texts.extend(documents(&text));
        }
        ensure!(!texts.is_empty(), "{} contains no definitions", directory.display());
        Ok(Some(texts))
    }

    fn fetch(&self, directory: &Path) -> Result<()> {
        let Some(go) = places::program("go") else { bail!("no Go toolchain") };
        let wanted = format!("{}@{}", self.module, self.version);
        let mut command = Command::new(go);
        command.args(["mod", "download", "-json", &wanted]).env("GOFLAGS", "-mod=mod");
        // A directory outside any module.
        command.current_dir(std::env::temp_dir());
        let output = command.output().context("go")?;
        let told: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let source = match (told["Dir"].as_str(), told["Error"].as_str()) {
            (Some(source), None) => Path::new(source).join(self.place),
            (_, Some(error)) => bail!("{error}"),
            _ => bail!("{}", String::from_utf8_lossy(&output.stderr).trim()),
        };
        let partial = directory.with_extension(format!("partial-{}", std::process::id()));
        std::fs::create_dir_all(&partial).with_context(|| partial.display().to_string())?;
        for file in yaml_files(&source)? {
            let name = file.file_name().context("a file has a name")?;
            // A copy: files of Go's cache are read-only.
            std::fs::write(partial.join(name), std::fs::read(&file)?)?;
        }
        // If two runs do this at once, the first one wins; their results are the same.
        if std::fs::rename(&partial, directory).is_err() {
            std::fs::remove_dir_all(&partial)?;
        }
        Ok(())
    }
}

fn yaml_files(place: &Path) -> Result<Vec<PathBuf>> {
    if place.is_file() {
        return Ok(vec![place.to_owned()]);
    }
    let entries = std::fs::read_dir(place).with_context(|| place.display().to_string())?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    Ok(files)
}

/// The definitions among the documents of a file; others, such as kustomize's, are left out.
fn documents(text: &str) -> Vec<String> {
    let marked = format!("\n{text}\n");
    let all = marked.split("\n---").map(str::to_owned);
    all.filter(|one| one.lines().any(|line| line.trim_end() == "kind: CustomResourceDefinition"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_definitions_are_kept() {
        let one = "kind: CustomResourceDefinition\nmetadata: {}\n";
        for (text, count) in [
            (one.to_owned(), 1),
            (format!("---\n{one}---\n{one}"), 2),
            (format!("# comment\n---\n{one}---\nkind: Kustomization\n"), 1),
            ("resources:\n- kind: CustomResourceDefinition\n".to_owned(), 0),
        ] {
            assert_eq!(documents(&text).len(), count, "{text}");
        }
    }
}
