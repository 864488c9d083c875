//! Manifests: `-f FILE`, `-f DIRECTORY`, `-f URL`, `-f -`.
//!
//! In: names. Out: one [`Manifest`] per object, with its resource.

use std::path::{Path, PathBuf};

use manifests::{documents, flatten};
use serde_json::Value;

use super::resources::{Catalog, Resource};
use crate::cluster::Cluster;
use crate::failure::{Result, own};

const EXTENSIONS: &[&str] = &["json", "yaml", "yml"];
/// The maximum depth of directories; it also ends loops of links.
const DEPTH: usize = 32;

#[derive(Clone, Debug)]
pub struct Manifest {
    pub resource: Resource,
    /// From the manifest; `None` for cluster scope.
    pub namespace: Option<String>,
    pub name: String,
    pub object: Value,
    /// For messages: the file, or STDIN.
    pub source: String,
}

pub async fn read(
    cluster: &Cluster,
    catalog: &Catalog,
    names: &[String],
    recursive: bool,
) -> Result<Vec<Manifest>> {
    let mut out = vec![];
    for name in names {
        for (source, text) in texts(name, recursive).await? {
            let documents = documents(&text)
                .map_err(|error| own(format!("error parsing {source}: {error}")))?;
            for document in documents {
                for object in flatten(document) {
                    out.push(place(cluster, catalog, object, &source)?);
                }
            }
        }
    }
    if out.is_empty() {
        return Err(own("no objects passed"));
    }
    Ok(out)
}

fn place(
    cluster: &Cluster,
    catalog: &Catalog,
    mut object: Value,
    source: &str,
) -> Result<Manifest> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let name = text(&object["metadata"]["name"]);
    let own_namespace = text(&object["metadata"]["namespace"]);
    for (value, what) in [(&kind, "kind"), (&version, "apiVersion")] {
        if value.is_empty() {
            return Err(own(format!(
                "error validating {source:?}: error validating data: {what} not set; if you choose to ignore these errors, turn validation off with --validate=false"
            )));
        }
    }
    let resource = catalog.by_kind(&version, &kind).ok_or_else(|| {
        own(format!(
            "resource mapping not found for name: {name:?} namespace: {own_namespace:?} from {source:?}: no matches for kind {kind:?} in version {version:?}\nensure CRDs are installed first"
        ))
    })?;
    let namespace = resource.namespaced.then(|| match own_namespace.as_str() {
        "" => cluster.namespace.clone(),
        name => name.to_owned(),
    });
    if let Some(namespace) = &namespace {
        object["metadata"]["namespace"] = namespace.clone().into();
    }
    if name.is_empty() && text(&object["metadata"]["generateName"]).is_empty() {
        return Err(own(format!(
            "error when retrieving current configuration of {source:?}: resource name may not be empty"
        )));
    }
    Ok(Manifest { resource: resource.clone(), namespace, name, object, source: source.into() })
}

async fn texts(name: &str, recursive: bool) -> Result<Vec<(String, String)>> {
    if name == "-" {
        let text = std::io::read_to_string(std::io::stdin())
            .map_err(|error| own(format!("standard input: {error}")))?;
        return Ok(vec![("STDIN".into(), text)]);
    }
    if name.starts_with("http://") || name.starts_with("https://") {
        return Ok(vec![(name.into(), download(name).await?)]);
    }
    let path = Path::new(name);
    let about =
        std::fs::metadata(path).map_err(|_| own(format!("the path {name:?} does not exist")))?;
    let files = if about.is_dir() { directory(path, recursive, DEPTH)? } else { vec![path.into()] };
    if files.is_empty() {
        return Err(own(format!(
            "error reading [{name}]: recognized file extensions are [.json .yaml .yml]"
        )));
    }
    let read = |file: PathBuf| {
        let source = file.display().to_string();
        let text =
            std::fs::read_to_string(&file).map_err(|error| own(format!("{source}: {error}")));
        text.map(|text| (source, text))
    };
    files.into_iter().map(read).collect()
}

fn directory(path: &Path, recursive: bool, depth: usize) -> Result<Vec<PathBuf>> {
    let failed = |error| own(format!("{}: {error}", path.display()));
    let mut entries: Vec<PathBuf> = std::fs::read_dir(path)
        .map_err(failed)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()
        .map_err(failed)?;
    entries.sort_unstable();
    let mut files = vec![];
    for entry in entries {
        if entry.is_dir() {
            if recursive && depth > 0 {
                files.extend(directory(&entry, recursive, depth - 1)?);
            }
        } else if entry
            .extension()
            .and_then(|e| e.to_str())
            .is_some_and(|e| EXTENSIONS.contains(&e))
        {
            files.push(entry);
        }
    }
    Ok(files)
}

/// Downloads a file; follows a few redirects, which raw files often have.
async fn download(url: &str) -> Result<String> {
    use http_body_util::{BodyExt, Limited};
    const LIMIT: usize = 64 << 20;
    let failed =
        |error: &dyn std::fmt::Display| own(format!("unable to read URL {url:?}: {error}"));
    let http = transport::HttpClient::new(&transport::ClientOptions::default())
        .map_err(|error| failed(&error))?;
    let mut at = url.to_owned();
    for _ in 0..10 {
        let request = http::Request::get(&at).body(transport::empty()).map_err(|e| failed(&e))?;
        let response = http.request(request).await.map_err(|error| failed(&error))?;
        let code = response.status();
        let location = response.headers().get(http::header::LOCATION).and_then(|l| l.to_str().ok());
        if let Some(location) = location.filter(|_| code.is_redirection()) {
            at = location.to_owned();
            continue;
        }
        if !code.is_success() {
            return Err(own(format!(
                "unable to read URL {url:?}, server reported {code}, status code={}",
                code.as_u16()
            )));
        }
        let body = Limited::new(response.into_body(), LIMIT).collect().await;
        let bytes = body.map_err(|error| failed(&error))?.to_bytes();
        return String::from_utf8(bytes.into()).map_err(|error| failed(&error));
    }
    Err(failed(&"too many redirections"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_hold_manifests() {
        let root = tempfile::tempdir().expect("a temporary directory");
        for name in ["b.yaml", "a.json", "x.txt", "sub/c.yml"] {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("creates");
            std::fs::write(path, "{}").expect("writes");
        }
        let names = |recursive| -> Vec<String> {
            let files = directory(root.path(), recursive, DEPTH).expect("reads");
            let relative = |path: &PathBuf| {
                path.strip_prefix(root.path()).expect("inside").display().to_string()
            };
            files.iter().map(relative).collect()
        };
        assert_eq!(names(false), ["a.json", "b.yaml"]);
        assert_eq!(names(true), ["a.json", "b.yaml", "sub/c.yml"]);
    }
}
