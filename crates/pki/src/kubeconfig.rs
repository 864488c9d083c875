//! Kubeconfig files: reading, writing, and resolving a context to a server and credentials.
//!
//! Invariant: unknown fields are kept, so that other programs can use a file that was read and written again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::file::{self, write_private};
use crate::{Error, Issued, malformed};

type Rest = BTreeMap<String, Value>;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Kubeconfig {
    #[serde(rename = "apiVersion", default = "api_version")]
    pub api_version: String,
    #[serde(default = "kind")]
    pub kind: String,
    #[serde(default)]
    pub clusters: Vec<NamedCluster>,
    #[serde(default)]
    pub users: Vec<NamedUser>,
    #[serde(default)]
    pub contexts: Vec<NamedContext>,
    #[serde(default)]
    pub current_context: String,
    #[serde(flatten)]
    pub rest: Rest,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NamedCluster {
    pub name: String,
    #[serde(default)]
    pub cluster: Cluster,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cluster {
    #[serde(default)]
    pub server: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_server_name: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure_skip_tls_verify: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_authority: Option<PathBuf>,
    /// Base64 of PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_authority_data: Option<String>,
    #[serde(flatten)]
    pub rest: Rest,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NamedUser {
    pub name: String,
    #[serde(default)]
    pub user: User,
}

#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct User {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_certificate: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_certificate_data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_key_data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    #[serde(rename = "tokenFile", skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// A credential plugin, which the connecting client runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<Value>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// Omits credentials, to keep them out of logs.
impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("User")
            .field("client_certificate", &self.client_certificate)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NamedContext {
    pub name: String,
    #[serde(default)]
    pub context: Context,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Context {
    #[serde(default)]
    pub cluster: String,
    #[serde(default)]
    pub user: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// A resolved context: everything that a client needs to connect.
#[derive(Clone, Default, PartialEq)]
pub struct Credentials {
    pub server: String,
    /// PEM of the trusted authorities; `None`: the server's certificate cannot be checked.
    pub ca_pem: Option<String>,
    pub tls_server_name: Option<String>,
    pub insecure_skip_tls_verify: bool,
    pub client_cert_pem: Option<String>,
    pub client_key_pem: Option<String>,
    pub token: Option<String>,
    pub namespace: Option<String>,
    /// A credential plugin, if the file has no other credentials.
    pub exec: Option<Exec>,
}

/// A credential plugin: its configuration from the file, and the cluster information that it gets.
#[derive(Clone, PartialEq)]
pub struct Exec {
    pub config: Value,
    pub cluster: Value,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Kubeconfig {
    /// One cluster, one user, one context, all called `name`.
    pub fn new(name: &str, cluster: Cluster, user: User) -> Self {
        let context = Context { cluster: name.into(), user: name.into(), ..Context::default() };
        Self {
            api_version: api_version(),
            kind: kind(),
            clusters: vec![NamedCluster { name: name.into(), cluster }],
            users: vec![NamedUser { name: name.into(), user }],
            contexts: vec![NamedContext { name: name.into(), context }],
            current_context: name.into(),
            rest: Rest::new(),
        }
    }

    /// A component's usual file: embedded authority, certificate and key.
    pub fn with_certificate(server: &str, ca_pem: &str, user: &str, issued: &Issued) -> Self {
        let credentials = User {
            client_certificate_data: Some(STANDARD.encode(&issued.cert_pem)),
            // Also converts a key from an earlier version.
            client_key_data: Some(STANDARD.encode(crate::private_key_pem(&issued.key_pem))),
            ..User::default()
        };
        Self::named(server, ca_pem, user, credentials)
    }

    /// A file whose user has a bearer token.
    pub fn with_token(server: &str, ca_pem: &str, user: &str, token: &str) -> Self {
        let credentials = User { token: Some(token.to_owned()), ..User::default() };
        Self::named(server, ca_pem, user, credentials)
    }

    fn named(server: &str, ca_pem: &str, user: &str, credentials: User) -> Self {
        let cluster = Cluster {
            server: server.to_owned(),
            certificate_authority_data: Some(STANDARD.encode(ca_pem)),
            ..Cluster::default()
        };
        let mut out = Self::new("default", cluster, credentials);
        out.users[0].name = user.to_owned();
        out.contexts[0].context.user = user.to_owned();
        out
    }

    pub fn parse(yaml: &str) -> Result<Self, Error> {
        serde_saphyr::from_str(yaml).map_err(|error| malformed("kubeconfig", error))
    }

    pub fn to_yaml(&self) -> Result<String, Error> {
        // Values stay on one line, as kubectl writes them: scripts extract them with grep and awk.
        let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
        serde_saphyr::to_string_with_options(self, options)
            .map_err(|error| malformed("kubeconfig", error))
    }

    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = file::read(path)?.ok_or_else(|| Error::File {
            path: path.display().to_string(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Self::parse(&text).map_err(|error| malformed(path.display().to_string(), error))
    }

    /// Replaces the file. `mode` is 0600 unless the user chose another.
    pub fn write(&self, path: &Path, mode: u32) -> Result<(), Error> {
        write_private(path, self.to_yaml()?.as_bytes(), mode)
    }

    /// Adds this file's cluster to another file under `name` and keeps the other clusters. The
    /// context becomes the current one, as with kind. `None` if the other file has only this
    /// cluster: then this file replaces it.
    pub fn merged_into(&self, there: &Self, name: &str) -> Option<Self> {
        let (cluster, user) = (self.clusters.first()?, self.users.first()?);
        let is_ours = |one: &NamedCluster| {
            one.name == cluster.name && one.cluster.server == cluster.cluster.server
        };
        if there.clusters.iter().all(is_ours) {
            return None;
        }
        let mut all = there.clone();
        all.clusters.retain(|one| one.name != name);
        all.users.retain(|one| one.name != name);
        all.contexts.retain(|one| one.name != name);
        let own = Self::new(name, cluster.cluster.clone(), user.user.clone());
        all.clusters.extend(own.clusters);
        all.users.extend(own.users);
        all.contexts.extend(own.contexts);
        all.current_context = name.to_owned();
        Some(all)
    }

    /// The credentials of `context` (or of the current one). Relative paths start at `directory`,
    /// the file's own.
    pub fn resolve(&self, context: Option<&str>, directory: &Path) -> Result<Credentials, Error> {
        let missing =
            |what: &str, name: &str| malformed("kubeconfig", format!("no {what} named {name:?}"));
        let name = context.unwrap_or(&self.current_context);
        let context = &self
            .contexts
            .iter()
            .find(|entry| entry.name == name)
            .ok_or_else(|| missing("context", name))?
            .context;
        let cluster = self.clusters.iter().find(|entry| entry.name == context.cluster);
        let cluster = &cluster.ok_or_else(|| missing("cluster", &context.cluster))?.cluster;
        let nobody = User::default();
        let user = match self.users.iter().find(|entry| entry.name == context.user) {
            Some(entry) => &entry.user,
            None if context.user.is_empty() => &nobody,
            None => return Err(missing("user", &context.user)),
        };
        let load = |data: &Option<String>, path: &Option<PathBuf>| embedded(data, path, directory);
        let token = match (&user.token, &user.token_file) {
            // Upstream: the file wins, because it may be rotated.
            (_, Some(path)) => {
                embedded(&None, &Some(path.clone()), directory)?.map(|t| t.trim().to_owned())
            }
            (token, None) => token.clone(),
        };
        let ca_pem = load(&cluster.certificate_authority_data, &cluster.certificate_authority)?;
        let client_cert_pem = load(&user.client_certificate_data, &user.client_certificate)?;
        let is_known = token.is_some() || client_cert_pem.is_some();
        let exec = user.exec.as_ref().filter(|_| !is_known).map(|config| Exec {
            config: config.clone(),
            cluster: told(cluster, ca_pem.as_deref()),
        });
        Ok(Credentials {
            server: cluster.server.clone(),
            ca_pem,
            exec,
            tls_server_name: cluster.tls_server_name.clone(),
            insecure_skip_tls_verify: cluster.insecure_skip_tls_verify,
            client_cert_pem,
            client_key_pem: load(&user.client_key_data, &user.client_key)?,
            token,
            namespace: context.namespace.clone(),
        })
    }
}

/// The cluster information for credential plugins: `ExecCredential.spec.cluster`.
fn told(cluster: &Cluster, ca_pem: Option<&str>) -> Value {
    const EXTENSION: &str = "client.authentication.k8s.io/exec";
    let mut told = serde_json::json!({ "server": cluster.server });
    if let Some(name) = &cluster.tls_server_name {
        told["tls-server-name"] = name.as_str().into();
    }
    if cluster.insecure_skip_tls_verify {
        told["insecure-skip-tls-verify"] = true.into();
    }
    if let Some(pem) = ca_pem {
        told["certificate-authority-data"] = STANDARD.encode(pem).into();
    }
    if let Some(proxy) = cluster.rest.get("proxy-url") {
        told["proxy-url"] = proxy.clone();
    }
    let extensions = cluster.rest.get("extensions").and_then(Value::as_array);
    let own = extensions.into_iter().flatten().find(|one| one["name"] == EXTENSION);
    told["config"] = own.map_or(Value::Null, |one| one["extension"].clone());
    told
}

/// Data embedded in the file; it overrides a path.
fn embedded(
    data: &Option<String>,
    path: &Option<PathBuf>,
    directory: &Path,
) -> Result<Option<String>, Error> {
    if let Some(data) = data.as_deref().filter(|data| !data.is_empty()) {
        let bytes =
            STANDARD.decode(data.trim()).map_err(|error| malformed("kubeconfig data", error))?;
        return String::from_utf8(bytes)
            .map(Some)
            .map_err(|error| malformed("kubeconfig data", error));
    }
    let Some(path) = path.as_deref().filter(|path| !path.as_os_str().is_empty()) else {
        return Ok(None);
    };
    let path = directory.join(path);
    match file::read(&path)? {
        Some(text) => Ok(Some(text)),
        None => Err(malformed(path.display().to_string(), "no such file")),
    }
}

fn api_version() -> String {
    "v1".to_owned()
}

fn kind() -> String {
    "Config".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOREIGN: &str = r"
apiVersion: v1
kind: Config
preferences: {colors: true}
clusters:
- cluster:
    certificate-authority: ca.crt
    proxy-url: http://proxy:3128
    server: https://10.0.0.1:6443
  name: prod
contexts:
- context: {cluster: prod, user: jane, namespace: web}
  name: prod
current-context: prod
users:
- name: jane
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: login
      args: [-x]
      env: null
    as: admin
";

    #[test]
    fn unknown_fields_survive() {
        let config = Kubeconfig::parse(FOREIGN).expect("parses");
        let again = Kubeconfig::parse(&config.to_yaml().expect("writes")).expect("parses");
        assert_eq!(config, again);
        assert_eq!(again.rest["preferences"]["colors"], true);
        assert_eq!(again.clusters[0].cluster.rest["proxy-url"], "http://proxy:3128");
        assert_eq!(again.users[0].user.rest["as"], "admin");
        let exec = again.users[0].user.exec.as_ref().expect("kept");
        assert_eq!(exec["args"][0], "-x");
    }

    #[test]
    fn values_have_one_line_and_the_key_has_upstreams_form() {
        let issued = crate::Authority::generate("ca")
            .and_then(|ca| ca.issue(&crate::Profile::client("admin", &["system:masters"])))
            .expect("issued");
        let config = Kubeconfig::with_certificate("https://h:6443", "CA", "admin", &issued);
        let yaml = config.to_yaml().expect("writes");
        let value = |name: &str| {
            let line = yaml.lines().find(|line| line.trim_start().starts_with(name));
            let (_, value) = line.and_then(|line| line.split_once(": ")).expect("a line");
            String::from_utf8(STANDARD.decode(value).expect("base64")).expect("text")
        };
        assert_eq!(value("client-certificate-data"), issued.cert_pem);
        assert!(value("client-key-data").starts_with("-----BEGIN EC PRIVATE KEY-----"), "{yaml}");
        assert_eq!(value("certificate-authority-data"), "CA");
        assert_eq!(Kubeconfig::parse(&yaml).expect("parses"), config);
    }

    #[test]
    fn other_clusters_of_a_file_stay() {
        let foreign = Kubeconfig::parse(FOREIGN).expect("parses");
        let own = Kubeconfig::with_token("https://h:6443", "CA", "me", "1");
        let merged = own.merged_into(&foreign, "decapod").expect("another one is there");
        let names: Vec<_> = merged.clusters.iter().map(|one| one.name.as_str()).collect();
        assert_eq!((names, merged.current_context.as_str()), (vec!["prod", "decapod"], "decapod"));
        let resolved = merged.resolve(None, Path::new("/")).expect("resolves");
        assert_eq!(resolved.token.as_deref(), Some("1"));
        assert_eq!(merged.rest["preferences"]["colors"], true);
        // The next start changes only its own entries.
        let renewed = Kubeconfig::with_token("https://h:6443", "CA", "me", "2");
        let again = renewed.merged_into(&merged, "decapod").expect("the other is still there");
        assert_eq!(again.clusters, merged.clusters);
        assert_eq!(again.contexts, merged.contexts);
        assert_eq!(again.users.len(), 2);
        assert!(own.merged_into(&own, "decapod").is_none(), "its own file is replaced");
        let empty = Kubeconfig::parse("kind: Config").expect("parses");
        assert!(own.merged_into(&empty, "decapod").is_none(), "so is an empty one");
    }

    #[test]
    fn a_context_resolves_to_credentials() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let config = Kubeconfig::parse(FOREIGN).expect("parses");
        assert!(config.resolve(None, root.path()).is_err(), "the authority's file is missing");
        std::fs::write(root.path().join("ca.crt"), "PEM").expect("writes");
        let got = config.resolve(None, root.path()).expect("resolves");
        assert_eq!((got.ca_pem.as_deref(), got.namespace.as_deref()), (Some("PEM"), Some("web")));
        let exec = got.exec.expect("a plugin");
        let expected = serde_json::json!({"server": "https://10.0.0.1:6443", "config": null,
            "certificate-authority-data": "UEVN", "proxy-url": "http://proxy:3128"});
        assert_eq!((&exec.config["command"], exec.cluster), (&"login".into(), expected));
        assert!(config.resolve(Some("other"), root.path()).is_err());
    }

    #[test]
    fn written_files_are_private_and_read_back() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().expect("a temporary directory");
        let path = root.path().join("admin.conf");
        let config = Kubeconfig::with_token("https://[::1]:6443", "CA", "me", "123456");
        config.write(&path, 0o600).expect("writes");
        let mode = std::fs::metadata(&path).expect("exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let got =
            Kubeconfig::read(&path).expect("reads").resolve(None, root.path()).expect("resolves");
        assert_eq!(got.token.as_deref(), Some("123456"));
        assert_eq!(got.server, "https://[::1]:6443");
        assert_eq!(got.ca_pem.as_deref(), Some("CA"));
    }
}
