//! Chooses the cluster, and sends requests to it.
//!
//! In: a kubeconfig (`--kubeconfig`, `KUBECONFIG`, or the one in the data directory) and flags that
//! override it. Out: [`Cluster`], whose requests return JSON trees, streams, or a [`Failure`] with
//! kubectl's texts.
//!
//! `--data-dir` wins over `KUBECONFIG`, because it names a cluster explicitly. JSON trees are used instead
//! of typed objects, because the commands work for any kind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::percent;
use bytes::Bytes;
use client::exec::Plugin;
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::BodyExt;
use serde_json::Value;
use transport::{ClientError, ClientOptions, CredentialSource, HttpClient, Token};

use crate::failure::{ApiStatus, Failure, Result, own};

pub const JSON: &str = "application/json";
/// The server's default data directory.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/decapod";
/// The maximum size of a watch event, or of a line of JSON.
const LINE_LIMIT: usize = 64 << 20;

// Flags that select the cluster and the user. (A doc comment would become the help text of every command
// that has them.)
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Connection {
    /// Path to the kubeconfig file to use
    #[arg(long, global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// The name of the kubeconfig context to use
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// The address and port of the Kubernetes API server
    #[arg(short = 's', long, global = true)]
    pub server: Option<String>,
    /// Bearer token for authentication to the API server
    #[arg(long, global = true, hide_env_values = true)]
    pub token: Option<String>,
    /// If true, the server's certificate will not be checked for validity
    #[arg(long, global = true)]
    pub insecure_skip_tls_verify: bool,
    /// Username to impersonate for the operation
    #[arg(long = "as", value_name = "USER", global = true)]
    pub impersonate: Option<String>,
    /// Group to impersonate for the operation, can be repeated
    #[arg(long = "as-group", value_name = "GROUP", global = true)]
    pub impersonate_group: Vec<String>,
    /// If present, the namespace scope for this CLI request
    #[arg(short = 'n', long, global = true)]
    pub namespace: Option<String>,
}

/// In an unreadable directory, it is unknown whether the file exists.
fn is_denied(error: &std::io::Error, path: &Path) -> bool {
    let denied = |error: &std::io::Error| error.kind() == std::io::ErrorKind::PermissionDenied;
    denied(error) || path.try_exists().is_err_and(|error| denied(&error))
}

/// A connection to one API server.
#[derive(Clone)]
pub struct Cluster {
    pub http: HttpClient,
    pub server: String,
    /// The default namespace of commands.
    pub namespace: String,
    pub ca_pem: Option<String>,
    headers: Vec<(&'static str, HeaderValue)>,
}

impl Connection {
    pub fn open(&self, data_dir: &Path) -> Result<Cluster> {
        let path = self.path(data_dir, std::env::var_os("KUBECONFIG"));
        let credentials = match pki::Kubeconfig::read(&path) {
            Ok(config) => {
                let directory = path.parent().unwrap_or(Path::new("."));
                let resolved = config.resolve(self.context.as_deref(), directory);
                resolved.map_err(|error| own(format!("{}: {error}", path.display())))?
            }
            Err(pki::Error::File { source, .. }) if is_denied(&source, &path) => {
                return Err(own(format!(
                    "cannot read {}: permission denied; it is its owner's (mostly root's): use sudo, or a copy of your own with --kubeconfig",
                    path.display()
                )));
            }
            Err(_) if self.server.is_some() && !path.exists() => pki::Credentials::default(),
            Err(_) if !path.exists() => {
                return Err(own(format!(
                    "no cluster found: {} does not exist (start one with `decapod server`, or name it with --data-dir or --kubeconfig)",
                    path.display()
                )));
            }
            Err(error) => return Err(own(error.to_string())),
        };
        let directory = path.parent().unwrap_or(Path::new("."));
        let plugin = credentials.exec.filter(|_| self.token.is_none());
        let plugin = plugin.map(|exec| Plugin::new(&exec.config, exec.cluster, directory));
        let plugin = plugin.transpose().map_err(|error| own(error.to_string()))?;
        let server = self.server.clone().unwrap_or(credentials.server);
        let options = ClientOptions {
            server: server.clone(),
            ca_pem: credentials.ca_pem.clone(),
            cert_pem: credentials.client_cert_pem,
            key_pem: credentials.client_key_pem,
            insecure: self.insecure_skip_tls_verify || credentials.insecure_skip_tls_verify,
            server_name: credentials.tls_server_name,
            token: self.token.clone().or(credentials.token).map(Token::fixed),
            user_agent: Some(format!("decapod-kubectl/{}", release::KUBERNETES.tag)),
            source: plugin.map(|plugin| Arc::new(plugin) as Arc<dyn CredentialSource>),
        };
        let http = HttpClient::new(&options).map_err(|error| own(error.to_string()))?;
        let namespace = self.namespace.clone().or(credentials.namespace);
        Ok(Cluster {
            http,
            server,
            namespace: namespace.filter(|name| !name.is_empty()).unwrap_or("default".into()),
            ca_pem: credentials.ca_pem,
            headers: self.headers()?,
        })
    }

    /// The kubeconfig that is meant.
    pub fn path(&self, data_dir: &Path, environment: Option<std::ffi::OsString>) -> PathBuf {
        if let Some(path) = &self.kubeconfig {
            return path.clone();
        }
        let own = data_dir.join("kubeconfig");
        if data_dir != Path::new(DEFAULT_DATA_DIR) {
            return own;
        }
        let listed: Vec<PathBuf> = environment
            .iter()
            .flat_map(std::env::split_paths)
            .filter(|path| !path.as_os_str().is_empty())
            .collect();
        listed.iter().find(|path| path.exists()).or(listed.first()).cloned().unwrap_or(own)
    }

    fn headers(&self) -> Result<Vec<(&'static str, HeaderValue)>> {
        let user = self.impersonate.iter().map(|user| ("impersonate-user", user));
        let groups = self.impersonate_group.iter().map(|group| ("impersonate-group", group));
        user.chain(groups)
            .map(|(name, value)| {
                let bad = |_| own(format!("{value:?} cannot be impersonated"));
                Ok((name, HeaderValue::from_bytes(value.as_bytes()).map_err(bad)?))
            })
            .collect()
    }
}

impl Cluster {
    /// Sends a request; the body of the answer is not read yet. Prints the server's warnings.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        accept: &str,
        body: Option<(&str, Vec<u8>)>,
    ) -> Result<Response<transport::Body>> {
        let mut request =
            Request::builder().method(method).uri(path).header(header::ACCEPT, accept);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let body = match body {
            Some((content_type, bytes)) => {
                request = request.header(header::CONTENT_TYPE, content_type);
                transport::full(bytes)
            }
            None => transport::empty(),
        };
        let request = request.body(body).map_err(|error| own(error.to_string()))?;
        let response =
            self.http.request(request).await.map_err(|error| self.unreachable(&error))?;
        for warning in response.headers().get_all(header::WARNING) {
            if let Some(text) = warning.to_str().ok().and_then(warning_text) {
                eprintln!("Warning: {text}");
            }
        }
        let code = response.status();
        let response = response.map(transport::boxed);
        if code.is_success() {
            return Ok(response);
        }
        let bytes = collect(response.into_body()).await?;
        Err(Failure::Status(Box::new(ApiStatus::of(code, &bytes))))
    }

    pub async fn get_raw(&self, path: &str, accept: &str) -> Result<Bytes> {
        collect(self.send(Method::GET, path, accept, None).await?.into_body()).await
    }

    pub async fn get(&self, path: &str) -> Result<Value> {
        decode(&self.get_raw(path, JSON).await?)
    }

    pub async fn get_as(&self, path: &str, accept: &str) -> Result<Value> {
        decode(&self.get_raw(path, accept).await?)
    }

    /// Sends a request with a body; `content_type` is for PATCH.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Vec<u8>,
    ) -> Result<Value> {
        let response = self.send(method, path, JSON, Some((content_type, body))).await?;
        decode(&collect(response.into_body()).await?)
    }

    /// Streams a body line by line.
    pub async fn lines(&self, path: &str, accept: &str) -> Result<Lines> {
        let response = self.send(Method::GET, path, accept, None).await?;
        Ok(Lines { body: response.into_body(), buffer: vec![], ended: false })
    }

    /// Upstream: the first message is for refused connections only.
    fn unreachable(&self, error: &ClientError) -> Failure {
        let text = error.to_string();
        if text.contains("refused") {
            let address = self.server.split("://").last().unwrap_or_default();
            return Failure::Plain(format!(
                "The connection to the server {address} was refused - did you specify the right host or port?"
            ));
        }
        Failure::Plain(format!("Unable to connect to the server: {text}"))
    }
}

/// A streamed body, split into lines.
pub struct Lines {
    body: transport::Body,
    buffer: Vec<u8>,
    ended: bool,
}

impl Lines {
    /// The next line with its newline; the last one may have none. `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        let mut looked_at = 0;
        loop {
            if let Some(at) = self.buffer[looked_at..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(looked_at + at + 1);
                return Ok(Some(std::mem::replace(&mut self.buffer, rest)));
            }
            looked_at = self.buffer.len();
            if self.ended || looked_at > LINE_LIMIT {
                let last = std::mem::take(&mut self.buffer);
                return Ok((!last.is_empty()).then_some(last));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                // A broken stream is treated like a finished one: the received lines are valid.
                Some(Err(_)) | None => self.ended = true,
            }
        }
    }
}

async fn collect(body: transport::Body) -> Result<Bytes> {
    match body.collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => Err(own(format!("the answer broke off: {error}"))),
    }
}

pub fn decode(bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|error| own(format!("the answer is not JSON: {error}")))
}

/// Parses `299 - "text"`, quoted as in HTTP.
fn warning_text(header: &str) -> Option<String> {
    let (_, quoted) = header.split_once('"')?;
    let text = quoted.strip_suffix('"').unwrap_or(quoted);
    Some(text.replace("\\\"", "\"").replace("\\\\", "\\"))
}

/// A path with a query; empty values are left out.
pub fn with_query(path: &str, pairs: &[(&str, &str)]) -> String {
    let mut out = path.to_owned();
    let mut separator = if path.contains('?') { '&' } else { '?' };
    for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
        out.push(separator);
        out.push_str(name);
        out.push('=');
        out.push_str(&percent::encode(value));
        separator = '&';
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_kubeconfig_wins() {
        let check =
            |flag: Option<&str>, data_dir: &str, environment: Option<&str>, expected: &str| {
                let connection =
                    Connection { kubeconfig: flag.map(Into::into), ..Connection::default() };
                let got = connection.path(Path::new(data_dir), environment.map(Into::into));
                assert_eq!(got, Path::new(expected));
            };
        check(Some("/a"), "/data", Some("/b"), "/a");
        check(None, "/data", Some("/b"), "/data/kubeconfig");
        check(None, DEFAULT_DATA_DIR, Some("/nowhere/b:/nowhere/c"), "/nowhere/b");
        check(None, DEFAULT_DATA_DIR, Some(""), "/var/lib/decapod/kubeconfig");
        check(None, DEFAULT_DATA_DIR, None, "/var/lib/decapod/kubeconfig");
    }

    #[test]
    fn queries_are_escaped() {
        let got = with_query("/api", &[("a", "x=y,z"), ("b", ""), ("c", "1")]);
        assert_eq!(got, "/api?a=x%3Dy%2Cz&c=1");
        assert_eq!(with_query("/api?x=1", &[("a", "b")]), "/api?x=1&a=b");
    }

    #[test]
    fn warnings_are_unquoted() {
        assert_eq!(warning_text(r#"299 - "say \"no\"""#).as_deref(), Some("say \"no\""));
        assert_eq!(warning_text("299 -"), None);
    }
}
