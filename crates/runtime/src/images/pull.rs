//! Pulls images from registries with `oci-client`: manifest, configuration and missing layers. Each
//! is checked against its digest.
//!
//! Concurrent pulls of one image share one pull.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use cri::AuthConfig;
use futures::TryStreamExt;
use oci_client::client::{Certificate, CertificateEncoding, ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};

use super::config::{ConfigFile, Manifest, for_us};
use super::name::{Name, is_digest};
use super::registries::{Auth, Endpoint, Registries};
use super::store::{ImageRecord, ImageStore};
use super::{During, Error, Result};

const MANIFEST_TYPES: &[&str] = &[
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// A registry that sends no byte for this long counts as dead.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// How many chunks of a layer may wait for the disk.
const CHUNKS: usize = 8;

type Gate = Arc<tokio::sync::Mutex<()>>;

pub struct Puller {
    store: ImageStore,
    /// Read for each pull, because administrators may edit it.
    /// Read at each pull; the first that exists counts.
    registries: Vec<PathBuf>,
    /// One gate per image that is being pulled. The lock is held for look-ups, never across await.
    gates: Mutex<HashMap<String, Gate>>,
}

impl Puller {
    pub fn new(store: ImageStore, registries: Vec<PathBuf>) -> Self {
        Self { store, registries, gates: Mutex::default() }
    }

    pub async fn pull(&self, image: &str, auth: Option<AuthConfig>) -> Result<ImageRecord> {
        let name = Name::parse(image)?;
        let gate = self.gate(&name);
        let _alone = gate.lock().await;
        let result = self.pull_from_any(&name, auth.as_ref()).await;
        self.gates.lock().expect("no panic while the gates are held").remove(&name.to_string());
        result
    }

    fn gate(&self, name: &Name) -> Gate {
        let mut gates = self.gates.lock().expect("no panic while the gates are held");
        gates.entry(name.to_string()).or_default().clone()
    }

    async fn pull_from_any(&self, name: &Name, auth: Option<&AuthConfig>) -> Result<ImageRecord> {
        let registries = Registries::read(&self.registries)?;
        let mut failures = vec![];
        for endpoint in registries.endpoints(&name.registry, &name.repository)? {
            match self.pull_from(&endpoint, name, auth, &registries).await {
                Ok(record) => return Ok(record),
                Err(error) => failures.push((endpoint.host, error)),
            }
        }
        Err(told(name, failures))
    }

    async fn pull_from(
        &self,
        endpoint: &Endpoint,
        name: &Name,
        auth: Option<&AuthConfig>,
        registries: &Registries,
    ) -> Result<ImageRecord> {
        let client = client(endpoint)?;
        let auth = credentials(auth, &endpoint.host, &name.registry, registries);
        let (host, repository) = (endpoint.host.clone(), endpoint.repository.clone());
        let reference = match (&name.digest, &name.tag) {
            (Some(digest), _) => Reference::with_digest(host, repository, digest.clone()),
            (None, tag) => Reference::with_tag(
                host,
                repository,
                tag.clone().unwrap_or_else(|| "latest".into()),
            ),
        };
        let store = self.store.clone();
        let _ingest = blocking(move || store.ingest()).await?;
        let (digest, manifest) = self.manifest(&client, &reference, &auth).await?;
        if name.digest.as_ref().is_some_and(|wanted| *wanted != digest) {
            return Err(Error::Registry(format!(
                "the registry sent a manifest with digest {digest}"
            )));
        }
        self.content(&client, &reference, &manifest).await?;
        let (store, name) = (self.store.clone(), name.clone());
        blocking(move || store.adopt(&digest, &[name])).await
    }

    /// The digest of the request, and the manifest for this machine.
    async fn manifest(
        &self,
        client: &Client,
        reference: &Reference,
        auth: &RegistryAuth,
    ) -> Result<(String, Manifest)> {
        let fetch = async |reference: &Reference| -> Result<(String, Manifest)> {
            let (bytes, _) =
                client.pull_manifest_raw(reference, auth, MANIFEST_TYPES).await.map_err(convert)?;
            let (store, expected) = (self.store.clone(), reference.digest().map(str::to_owned));
            let put = blocking(move || store.put_blob(&bytes[..], expected.as_deref()));
            let digest = put.await?;
            Ok((digest.clone(), self.store.read_json(&digest)?))
        };
        let (asked, mut manifest) = fetch(reference).await?;
        let mut hops = 0;
        while manifest.config.is_none() {
            let next = for_us(&manifest.manifests).filter(|_| hops < 4).ok_or_else(|| {
                let (os, architecture) = super::config::Platform::ours();
                Error::NotFound(format!("no match for platform {os}/{architecture} in manifest"))
            })?;
            if !is_digest(&next.digest) {
                return Err(Error::Invalid(format!("{:?} is not a digest", next.digest)));
            }
            let (registry, repository) = (reference.registry(), reference.repository());
            let next = Reference::with_digest(
                registry.to_owned(),
                repository.to_owned(),
                next.digest.clone(),
            );
            (_, manifest) = fetch(&next).await?;
            hops += 1;
        }
        Ok((asked, manifest))
    }

    /// Fetches missing content. The configuration comes first: its diff ids show which layers exist.
    async fn content(
        &self,
        client: &Client,
        reference: &Reference,
        manifest: &Manifest,
    ) -> Result<()> {
        let config = manifest.config.clone().unwrap_or_default();
        let all = manifest.layers.iter().map(|layer| &layer.digest).chain([&config.digest]);
        if let Some(bad) = all.into_iter().find(|digest| !is_digest(digest)) {
            // Checked before it becomes part of a URL.
            return Err(Error::Invalid(format!("{bad:?} is not a digest")));
        }
        if !self.store.has_blob(&config.digest) {
            self.blob(client, reference, &config.digest).await?;
        }
        let file: ConfigFile = self.store.read_json(&config.digest)?;
        let count = manifest.layers.len();
        let layers = manifest.layers.iter().zip(&file.rootfs.diff_ids).enumerate();
        for (index, (layer, diff_id)) in layers {
            let step = format!("download layer {} of {count}", index + 1);
            self.store.progress().begin(step, layer.size);
            if !self.store.has_layer(diff_id) && !self.store.has_blob(&layer.digest) {
                self.blob(client, reference, &layer.digest).await?;
            }
        }
        Ok(())
    }

    async fn blob(&self, client: &Client, reference: &Reference, digest: &str) -> Result<()> {
        let mut stream = client.pull_blob_stream(reference, digest).await.map_err(convert)?.stream;
        let mut partial = self.store.partial_blob()?;
        let (chunks, mut coming) = tokio::sync::mpsc::channel::<Bytes>(CHUNKS);
        let expected = digest.to_owned();
        // A short download fails the digest check and is dropped.
        let writing = blocking(move || {
            while let Some(bytes) = coming.blocking_recv() {
                partial.write(&bytes)?;
            }
            partial.finish(Some(&expected)).map(|_| ())
        });
        let reading = async {
            while let Some(bytes) =
                stream.try_next().await.during(|| format!("download {digest}"))?
            {
                self.store.progress().add(bytes.len());
                // The writer stopped early and reports its own error.
                if chunks.send(bytes).await.is_err() {
                    break;
                }
            }
            drop(chunks);
            Ok(())
        };
        let (read, written) = tokio::join!(reading, writing);
        read.and(written)
    }
}

/// Runs file work on another thread: syncing gigabytes would block this one.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let died = |_| Err(Error::Registry("a blocking task panicked".into()));
    tokio::task::spawn_blocking(work).await.unwrap_or_else(died)
}

/// One error from the answers of all endpoints. Its kind is the most specific one: a refusal says
/// more than an unreachable endpoint.
fn told(name: &Name, failures: Vec<(String, Error)>) -> Error {
    let is_several = failures.len() > 1;
    let texts: Vec<String> = failures
        .iter()
        .map(
            |(host, error)| if is_several { format!("{host}: {error}") } else { error.to_string() },
        )
        .collect();
    let text = match texts.join("; ") {
        none if none.is_empty() => "no registry endpoint is configured".to_owned(),
        text => text,
    };
    let text = format!("failed to pull and unpack image \"{name}\": {text}");
    let mut clear = failures.into_iter().map(|(_, error)| error);
    match clear.find(|error| !matches!(error, Error::Registry(_) | Error::Io { .. })) {
        Some(Error::NotFound(_)) => Error::NotFound(text),
        Some(Error::Denied(_)) => Error::Denied(text),
        Some(Error::Invalid(_)) => Error::Invalid(text),
        _ => Error::Registry(text),
    }
}

/// The error with its causes: only the causes tell an unknown host from a refused connection or an
/// untrusted certificate.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = cause.source();
    }
    text
}

fn client(endpoint: &Endpoint) -> Result<Client> {
    // reqwest needs a process-wide provider; an existing one is fine.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    if endpoint.tls.cert_file.is_some() {
        return Err(Error::Invalid("registries: client certificates are not supported".into()));
    }
    let mut extra_root_certificates = Vec::new();
    if let Some(path) = &endpoint.tls.ca_file {
        let data = std::fs::read(path).during(|| format!("read {}", path.display()))?;
        extra_root_certificates.push(Certificate { encoding: CertificateEncoding::Pem, data });
    }
    let config = ClientConfig {
        protocol: if endpoint.plain_http { ClientProtocol::Http } else { ClientProtocol::Https },
        accept_invalid_certificates: endpoint.tls.insecure_skip_verify,
        extra_root_certificates,
        connect_timeout: Some(CONNECT_TIMEOUT),
        read_timeout: Some(READ_TIMEOUT),
        user_agent: concat!("decapod/", env!("CARGO_PKG_VERSION")),
        ..Default::default()
    };
    Ok(Client::new(config))
}

/// The first that exists: the pod's credentials for this host, the host's configured ones, and the
/// pod's credentials for the image's registry, which this host mirrors. Upstream: containerd sends
/// the kubelet's credentials to every mirror.
fn credentials(
    auth: Option<&AuthConfig>,
    host: &str,
    registry: &str,
    registries: &Registries,
) -> RegistryAuth {
    let brought = |place: &str| auth.filter(|auth| is_for(auth, place)).and_then(from_kubelet);
    brought(host)
        .or_else(|| registries.auth(host).map(from_file))
        .or_else(|| brought(registry))
        .unwrap_or(RegistryAuth::Anonymous)
}

/// The server address is optional: the kubelet chose the credentials by the image's name.
fn is_for(auth: &AuthConfig, host: &str) -> bool {
    let server = auth.server_address.trim_start_matches("https://").trim_start_matches("http://");
    let server = server.split('/').next().unwrap_or_default();
    let is_docker =
        |host: &str| matches!(host, "docker.io" | "index.docker.io" | "registry-1.docker.io");
    let is_pattern = server
        .strip_prefix("*.")
        .is_some_and(|suffix| host.split_once('.').is_some_and(|(_, rest)| rest == suffix));
    server.is_empty() || server == host || is_pattern || (is_docker(server) && is_docker(host))
}

/// `None` when the credentials are empty.
fn from_kubelet(auth: &AuthConfig) -> Option<RegistryAuth> {
    if !auth.username.is_empty() {
        return Some(RegistryAuth::Basic(auth.username.clone(), auth.password.clone()));
    }
    if !auth.auth.is_empty() {
        return decode(&auth.auth);
    }
    let token = [&auth.registry_token, &auth.identity_token].into_iter().find(|t| !t.is_empty())?;
    Some(RegistryAuth::Bearer(token.clone()))
}

fn from_file(auth: &Auth) -> RegistryAuth {
    if !auth.username.is_empty() {
        return RegistryAuth::Basic(auth.username.clone(), auth.password.clone());
    }
    if !auth.identity_token.is_empty() {
        return RegistryAuth::Bearer(auth.identity_token.clone());
    }
    decode(&auth.auth).unwrap_or(RegistryAuth::Anonymous)
}

/// Decodes base64 of `username:password`.
fn decode(text: &str) -> Option<RegistryAuth> {
    let bytes = base64::engine::general_purpose::STANDARD.decode(text.trim()).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    Some(RegistryAuth::Basic(user.to_owned(), password.trim_end_matches('\0').to_owned()))
}

fn convert(error: OciDistributionError) -> Error {
    use oci_client::errors::OciErrorCode;
    let text = chain(&error);
    match &error {
        OciDistributionError::ImageManifestNotFoundError(_)
        | OciDistributionError::ServerError { code: 404, .. } => Error::NotFound(text),
        OciDistributionError::RegistryError { envelope, .. } => {
            let code = envelope.errors.first().map(|error| &error.code);
            match code {
                Some(
                    OciErrorCode::ManifestUnknown
                    | OciErrorCode::NameUnknown
                    | OciErrorCode::BlobUnknown
                    | OciErrorCode::NotFound,
                ) => Error::NotFound(text),
                Some(OciErrorCode::Denied | OciErrorCode::Unauthorized) => Error::Denied(text),
                _ => Error::Registry(text),
            }
        }
        OciDistributionError::UnauthorizedError { .. }
        | OciDistributionError::AuthenticationFailure(_) => Error::Denied(text),
        _ => Error::Registry(text),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A registry with one image without layers, which requires `u:p`.
    struct Registry {
        answers: BTreeMap<String, (String, Vec<u8>)>,
    }

    impl Registry {
        fn new() -> Self {
            let digest = |bytes: &[u8]| {
                use sha2::Digest;
                let digest = sha2::Sha256::digest(bytes);
                let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("sha256:{hex}")
            };
            let (os, architecture) = super::super::config::Platform::ours();
            let config = serde_json::json!({"os": os, "architecture": architecture,
                "config": {}, "rootfs": {"type": "layers", "diff_ids": []}});
            let config = config.to_string().into_bytes();
            let kind = "application/vnd.oci.image.manifest.v1+json";
            let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": kind, "layers": [],
                "config": {"mediaType": "application/vnd.oci.image.config.v1+json",
                    "digest": digest(&config), "size": config.len()}});
            let manifest = manifest.to_string().into_bytes();
            let blob = format!("/v2/app/blobs/{}", digest(&config));
            let answers = BTreeMap::from([
                ("/v2/".to_owned(), ("application/json".to_owned(), b"{}".to_vec())),
                ("/v2/app/manifests/v1".to_owned(), (kind.to_owned(), manifest)),
                (blob, ("application/octet-stream".to_owned(), config)),
            ]);
            Self { answers }
        }

        async fn serve(self, listener: TcpListener) {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = self.answer(stream).await;
            }
        }

        async fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
            let mut request = vec![];
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await?);
            }
            let request = String::from_utf8_lossy(&request).into_owned();
            let path = request.split(' ').nth(1).unwrap_or_default();
            let (status, more, body) = if !request.contains("Basic dTpw") {
                (401, "WWW-Authenticate: Basic realm=\"x\"".to_owned(), vec![])
            } else {
                match self.answers.get(path) {
                    Some((kind, body)) => (200, format!("Content-Type: {kind}"), body.clone()),
                    None => (404, "X-None: none".to_owned(), vec![]),
                }
            };
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status} X\r\n{more}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&body).await?;
            stream.shutdown().await
        }
    }

    fn secret(server: &str) -> AuthConfig {
        AuthConfig {
            username: "u".into(),
            password: "p".into(),
            server_address: server.into(),
            ..AuthConfig::default()
        }
    }

    async fn on_loopback() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        (listener, address)
    }

    #[tokio::test]
    async fn pull_secrets_go_to_the_registry_and_to_its_mirrors() {
        let (listener, address) = on_loopback().await;
        let directory = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(directory.path().join("images")).expect("a store");
        let mirrors = directory.path().join("registries.yaml");
        let text = format!(
            "mirrors:\n  \"{address}\":\n    endpoint: [\"http://{address}\"]\n  private.example:\n    endpoint: [\"http://{address}\"]\n"
        );
        std::fs::write(&mirrors, text).expect("written");
        let plain = Puller::new(store.clone(), vec![]);
        let mirrored = Puller::new(store, vec![mirrors]);
        let work = async {
            let image = format!("{address}/app:v1");
            for puller in [&plain, &mirrored] {
                for server in ["", &address, &format!("http://{address}/v2/")] {
                    puller.pull(&image, Some(secret(server))).await.expect(server);
                }
            }
            let private = "private.example/app:v1";
            let pulled = mirrored.pull(private, Some(secret("private.example"))).await;
            pulled.expect("by the mirror");
            let refused = plain.pull(&image, Some(secret("other.example"))).await;
            assert!(matches!(refused, Err(Error::Denied(_))), "{refused:?}");
        };
        tokio::select! {
            () = Registry::new().serve(listener) => {}
            () = work => {}
        }
    }

    #[tokio::test]
    async fn errors_give_the_reason_of_each_endpoint() {
        let (listener, closed) = on_loopback().await;
        drop(listener);
        let directory = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(directory.path().join("images")).expect("a store");
        let refused = Puller::new(store, vec![]).pull(&format!("{closed}/app:v1"), None).await;
        let text = refused.expect_err("nobody listens").to_string();
        assert!(text.contains("Connection refused"), "{text}");

        let name = Name::parse("r.example/app:v1").expect("a name");
        let unreachable = || Error::Registry("no route".into());
        let both = vec![("a:1".into(), Error::Denied("401".into())), ("b".into(), unreachable())];
        let error = told(&name, both);
        let expected =
            "failed to pull and unpack image \"r.example/app:v1\": a:1: 401; b: no route";
        assert_eq!(error.to_string(), expected);
        assert!(matches!(error, Error::Denied(_)));
        let error = told(&name, vec![("b".into(), unreachable())]);
        assert!(error.to_string().ends_with("\": no route") && matches!(error, Error::Registry(_)));
    }

    #[test]
    fn credentials_match_their_server() {
        let check = |server: &str, host: &str, expected: bool| {
            assert_eq!(is_for(&secret(server), host), expected, "{server} {host}");
        };
        check("", "r.example", true);
        check("https://index.docker.io/v1/", "docker.io", true);
        check("https://r.example/v2/", "r.example", true);
        check("*.example", "r.example", true);
        check("r.example", "r.example:5000", false);
        check("other.example", "r.example", false);
    }
}
