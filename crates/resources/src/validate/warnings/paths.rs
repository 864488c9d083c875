//! Warnings of files that a volume would write to one path, or below another file.
//! Upstream: `warningsForOverlappingVirtualPaths`.
//!
//! In: the volumes of a valid pod. Out: a warning for each pair, at most [`MOST`] for one volume. Cost: n log n
//! by the files of a volume.

use std::collections::BTreeMap;

use crate::validate::at::At;

/// All warnings of a request are a few KiB; more of them would be cut off.
const MOST: usize = 100;

/// A file of a volume, and the source that it comes from; empty if the volume has just one.
struct File {
    path: String,
    source: String,
}

impl File {
    fn new(path: &At<'_>, source: &str) -> Self {
        Self { path: path.str().trim_end_matches('/').to_owned(), source: source.to_owned() }
    }

    fn shown(&self) -> String {
        match self.source.as_str() {
            "" => format!("{:?}", self.path),
            source => format!("{:?} ({source})", self.path),
        }
    }
}

/// The files of a volume so far, by path.
#[derive(Default)]
struct Known(BTreeMap<String, Vec<usize>>);

impl Known {
    /// The files at this path, above it and below it, in their order.
    fn around(&self, path: &str) -> Vec<usize> {
        let above = path.match_indices('/').map(|(at, _)| &path[..at]);
        let mut found: Vec<usize> =
            above.chain([path]).filter_map(|path| self.0.get(path)).flatten().copied().collect();
        let inside = format!("{path}/");
        let below =
            self.0.range(inside.clone()..).take_while(|(path, _)| path.starts_with(&inside));
        found.extend(below.flat_map(|(_, files)| files));
        found.sort_unstable();
        found
    }

    fn add(&mut self, path: &str, index: usize) {
        if !path.is_empty() {
            self.0.entry(path.to_owned()).or_default().push(index);
        }
    }
}

pub(super) fn overlapping(volumes: &At<'_>, out: &mut Vec<String>) {
    for volume in volumes.items() {
        let name = volume.get("name").str();
        for (field, of_name, what) in [
            ("configMap", "name", "ConfigMap"),
            ("secret", "secretName", "Secret"),
            ("downwardAPI", "", "DownwardAPI"),
        ] {
            let source = volume.get(field);
            let title = match of_name {
                "" => what.to_owned(),
                of_name => format!("{what} {:?}", source.get(of_name).str()),
            };
            told(name, &title, items(&source, ""), out);
        }
        let sources = volume.get("projected.sources");
        for source in sources.items() {
            if source.is_empty() {
                out.push(format!("volume {name:?} (Projected) has no sources provided"));
            }
        }
        told(name, "Projected", sources.items().flat_map(|source| projected(&source)), out);
    }
}

fn items(source: &At<'_>, title: &str) -> Vec<File> {
    source.get("items").items().map(|item| File::new(&item.get("path"), title)).collect()
}

fn projected(source: &At<'_>) -> Vec<File> {
    for (field, what) in [("configMap", "ConfigMap"), ("secret", "Secret")] {
        if source.get(field).has("items") {
            let one = source.get(field);
            return items(&one, &format!("{what} {:?}", one.get("name").str()));
        }
    }
    if source.get("downwardAPI").has("items") {
        return items(&source.get("downwardAPI"), "DownwardAPI");
    }
    if source.has("serviceAccountToken") {
        return vec![File::new(&source.get("serviceAccountToken.path"), "ServiceAccountToken")];
    }
    let bundle = source.get("clusterTrustBundle");
    if bundle.is_set() {
        let by = if bundle.has("name") { "name" } else { "signerName" };
        let title = format!("ClusterTrustBundle {:?}", bundle.get(by).str());
        return vec![File::new(&bundle.get("path"), &title)];
    }
    let certificate = source.get("podCertificate");
    [
        ("certificateChainPath", "PodCertificate chain"),
        ("keyPath", "PodCertificate key"),
        ("credentialBundlePath", "PodCertificate credential bundle"),
    ]
    .into_iter()
    .map(|(field, title)| File::new(&certificate.get(field), title))
    .filter(|file| !file.path.is_empty())
    .collect()
}

fn told(volume: &str, title: &str, files: impl IntoIterator<Item = File>, out: &mut Vec<String>) {
    let (mut files_before, mut known): (Vec<File>, Known) = Default::default();
    let most = out.len() + MOST;
    for file in files {
        let around = if file.path.is_empty() { vec![] } else { known.around(&file.path) };
        for other in around.into_iter().map(|index| &files_before[index]) {
            if out.len() == most {
                return;
            }
            out.push(format!(
                "volume {volume:?} ({title}): overlapping paths: {} with {}",
                file.shown(),
                other.shown()
            ));
        }
        known.add(&file.path, files_before.len());
        files_before.push(file);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge;

    #[test]
    fn pairs_are_named() {
        let volumes = json!({"volumes": [
            {"name": "a", "configMap": {"name": "c", "items": [{"key": "x", "path": "p"}, {"key": "y", "path": "p/q"}, {"key": "z", "path": "pq"}]}},
            {"name": "b", "projected": {"sources": [{"secret": {"name": "s", "items": [{"key": "k", "path": "token"}]}}, {"serviceAccountToken": {"path": "token"}}, {}]}},
        ]});
        let mut out = vec![];
        judge(&volumes, |at| overlapping(&at.get("volumes"), &mut out));
        assert_eq!(
            out,
            [
                "volume \"a\" (ConfigMap \"c\"): overlapping paths: \"p/q\" with \"p\"",
                "volume \"b\" (Projected) has no sources provided",
                "volume \"b\" (Projected): overlapping paths: \"token\" (ServiceAccountToken) with \"token\" (Secret \"s\")",
            ]
        );
    }
}
