//! `registries.yaml`, in k3s' format: the mirrors of registries, with credentials and certificates.
//!
//! ```yaml
//! mirrors:
//!   docker.io:
//!     endpoint: ["http://10.0.0.1:5000", "https://mirror.example"]
//!     rewrite: {"^library/(.*)": "copies/$1"}
//!   "*":
//!     endpoint: ["https://mirror.example"]
//! configs:
//!   "10.0.0.1:5000":
//!     auth: {username: u, password: p}
//!     tls: {ca_file: /etc/ca.pem, insecure_skip_verify: false}
//! ```
//!
//! Mirrors are tried in order, then the registry itself. A rewrite changes the repository for
//! mirrors only. A registry on loopback uses HTTP unless its `tls` is configured.
//! Upstream: containerd's `registryEndpoints`, `defaultScheme`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{During, Error, Result};

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Registries {
    mirrors: BTreeMap<String, Mirror>,
    configs: BTreeMap<String, Host>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Mirror {
    endpoint: Vec<String>,
    rewrite: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Host {
    auth: Option<Auth>,
    tls: Option<Tls>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct Auth {
    pub username: String,
    pub password: String,
    /// base64 of `username:password`.
    pub auth: String,
    pub identity_token: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Tls {
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    pub insecure_skip_verify: bool,
}

/// One server to pull an image from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `host[:port]`.
    pub host: String,
    pub plain_http: bool,
    pub repository: String,
    pub tls: Tls,
}

impl std::fmt::Debug for Auth {
    /// Omits the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Auth").field("username", &self.username).finish_non_exhaustive()
    }
}

/// A file for all clusters of the machine.
const SHARED: &str = "/etc/decapod/registries.yaml";

/// Where a node looks for its registries file: in its data directory, then in the machine's.
pub fn places(data_dir: &Path) -> Vec<PathBuf> {
    vec![data_dir.join("registries.yaml"), SHARED.into()]
}

impl Registries {
    /// Reads the first of the files that exists. Without a file there are no mirrors.
    pub fn read(paths: &[PathBuf]) -> Result<Self> {
        for path in paths {
            let bytes = crate::files::read(path).during(|| format!("read {}", path.display()))?;
            let Some(bytes) = bytes else { continue };
            let text = String::from_utf8_lossy(&bytes);
            if text.trim().is_empty() {
                return Ok(Self::default());
            }
            return serde_saphyr::from_str(&text)
                .map_err(|error| Error::Invalid(format!("{}: {error}", path.display())));
        }
        Ok(Self::default())
    }

    pub fn endpoints(&self, registry: &str, repository: &str) -> Result<Vec<Endpoint>> {
        let mut all = Vec::new();
        if let Some(mirror) = self.mirrors.get(registry).or_else(|| self.mirrors.get("*")) {
            for text in &mirror.endpoint {
                let (host, plain_http) = parse_endpoint(text)?;
                let repository = mirror.rewritten(repository)?;
                all.push(Endpoint { tls: self.tls(&host), host, plain_http, repository });
            }
        }
        let tls = self.tls(registry);
        let speaks_tls = self.configs.get(registry).is_some_and(|config| config.tls.is_some());
        let own = Endpoint {
            host: registry.to_owned(),
            plain_http: is_local(registry) && !speaks_tls,
            repository: repository.to_owned(),
            tls,
        };
        // A mirror entry for the registry itself sets how to reach it.
        if !all.iter().any(|e| e.host == own.host && e.repository == own.repository) {
            all.push(own);
        }
        Ok(all)
    }

    pub fn auth(&self, host: &str) -> Option<&Auth> {
        self.configs.get(host)?.auth.as_ref()
    }

    fn tls(&self, host: &str) -> Tls {
        self.configs.get(host).and_then(|config| config.tls.clone()).unwrap_or_default()
    }
}

impl Mirror {
    fn rewritten(&self, repository: &str) -> Result<String> {
        for (pattern, replacement) in &self.rewrite {
            let pattern = regex_lite::Regex::new(pattern).map_err(|error| {
                Error::Invalid(format!("registries: rewrite {pattern:?}: {error}"))
            })?;
            if pattern.is_match(repository) {
                return Ok(pattern.replace_all(repository, replacement.as_str()).into_owned());
            }
        }
        Ok(repository.to_owned())
    }
}

/// Whether `host[:port]` is this machine's loopback.
fn is_local(registry: &str) -> bool {
    let host = match registry.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|c| c.is_ascii_digit()) => host,
        _ => registry,
    };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// `[scheme://]host[:port][/v2]`.
fn parse_endpoint(text: &str) -> Result<(String, bool)> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("https", text));
    let host = rest.trim_end_matches('/');
    let host = host.strip_suffix("/v2").unwrap_or(host);
    match scheme {
        "http" | "https" if !host.is_empty() && !host.contains('/') => {
            Ok((host.to_owned(), scheme == "http"))
        }
        _ => Err(Error::Invalid(format!(
            "registries: endpoint {text:?} is not http(s)://host[:port]"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_file_that_exists_counts() {
        let directory = tempfile::tempdir().expect("a directory");
        let places = ["own.yaml", "shared.yaml"].map(|name| directory.path().join(name));
        let check = |expected: &[&str]| {
            let read = Registries::read(&places).expect("valid");
            let mirrors: Vec<&str> = read.mirrors.keys().map(String::as_str).collect();
            assert_eq!(mirrors, expected);
        };
        check(&[]);
        std::fs::write(&places[1], "mirrors: {shared.example: {endpoint: []}}").expect("written");
        check(&["shared.example"]);
        // Created while the node runs.
        std::fs::write(&places[0], "mirrors: {own.example: {endpoint: []}}").expect("written");
        check(&["own.example"]);
        std::fs::write(&places[0], "\n").expect("written");
        check(&[]);
    }

    #[test]
    fn mirrors_come_first_and_rewrite() {
        let registries: Registries = serde_saphyr::from_str(
            r#"
mirrors:
  docker.io:
    endpoint: ["http://127.0.0.1:5000/v2", "mirror.example"]
    rewrite: {"^library/(.*)": "copies/$1"}
  "127.0.0.1:5500":
    endpoint: ["http://127.0.0.1:5500"]
configs:
  mirror.example:
    auth: {username: u, password: p}
    tls: {insecure_skip_verify: true}
  "localhost:5001":
    tls: {ca_file: /etc/ca.pem}
"#,
        )
        .expect("valid");
        let check = |registry: &str, repository: &str, expected: &[(&str, bool, &str)]| {
            let got = registries.endpoints(registry, repository).expect("valid");
            let got: Vec<_> = got
                .iter()
                .map(|e| (e.host.as_str(), e.plain_http, e.repository.as_str()))
                .collect();
            assert_eq!(got, expected);
        };
        check(
            "docker.io",
            "library/busybox",
            &[
                ("127.0.0.1:5000", true, "copies/busybox"),
                ("mirror.example", false, "copies/busybox"),
                ("docker.io", false, "library/busybox"),
            ],
        );
        check("127.0.0.1:5500", "app", &[("127.0.0.1:5500", true, "app")]);
        check("quay.io", "a/b", &[("quay.io", false, "a/b")]);
        for local in ["localhost", "localhost:5000", "127.0.0.2:5000", "[::1]:5000"] {
            check(local, "a", &[(local, true, "a")]);
        }
        check("localhost:5001", "a", &[("localhost:5001", false, "a")]);
        check("localhost.example", "a", &[("localhost.example", false, "a")]);
        assert_eq!(registries.auth("mirror.example").expect("there").username, "u");
        assert!(parse_endpoint("ftp://x").is_err());
    }
}
