//! Images from registries, by `oci-client`: manifest, configuration, and the layers that are not
//! there yet, each checked against its digest.
//!
//! Pulls of the same image at the same time are one pull.

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
/// Without a byte for this long, the registry is taken for dead.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Pieces of a layer that wait for the disk.
const CHUNKS: usize = 8;

type Gate = Arc<tokio::sync::Mutex<()>>;

pub struct Puller {
    store: ImageStore,
    /// Read for each pull: it may be edited.
    registries: Option<PathBuf>,
    /// One gate per name that is being pulled; held for look-ups, never across await.
    gates: Mutex<HashMap<String, Gate>>,
}

impl Puller {
    pub fn new(store: ImageStore, registries: Option<PathBuf>) -> Self {
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
        let registries = Registries::read(self.registries.as_deref())?;
        let mut last = None;
        for endpoint in registries.endpoints(&name.registry, &name.repository)? {
            match self.pull_from(&endpoint, name, auth, &registries).await {
                Ok(record) => return Ok(record),
                Err(error) => {
                    tracing::debug!(image = %name, host = endpoint.host, %error, "no luck here");
                    // A clear answer says more than a host that cannot be reached.
                    if matches!(last, None | Some(Error::Registry(_) | Error::Io { .. })) {
                        last = Some(error);
                    }
                }
            }
        }
        let text = |error: Error| match error {
            Error::NotFound(text) => Error::NotFound(failed(name, &text)),
            Error::Denied(text) => Error::Denied(failed(name, &text)),
            Error::Registry(text) => Error::Registry(failed(name, &text)),
            other => other,
        };
        Err(text(last.unwrap_or_else(|| Error::Registry("no registry to ask".into()))))
    }

    async fn pull_from(
        &self,
        endpoint: &Endpoint,
        name: &Name,
        auth: Option<&AuthConfig>,
        registries: &Registries,
    ) -> Result<ImageRecord> {
        let client = client(endpoint)?;
        let auth = match auth.and_then(|auth| from_kubelet(auth, &endpoint.host)) {
            Some(auth) => auth,
            None => registries.auth(&endpoint.host).map_or(RegistryAuth::Anonymous, from_file),
        };
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
            return Err(Error::Registry(format!("the registry sent {digest}")));
        }
        self.content(&client, &reference, &manifest).await?;
        let (store, name) = (self.store.clone(), name.clone());
        blocking(move || store.adopt(&digest, &[name])).await
    }

    /// The digest that was asked for, and the manifest for this machine.
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

    /// Brings what is missing: the configuration first, since it says which layers we have.
    async fn content(
        &self,
        client: &Client,
        reference: &Reference,
        manifest: &Manifest,
    ) -> Result<()> {
        let config = manifest.config.clone().unwrap_or_default();
        let all = manifest.layers.iter().map(|layer| &layer.digest).chain([&config.digest]);
        if let Some(bad) = all.into_iter().find(|digest| !is_digest(digest)) {
            // Before it is part of a URL.
            return Err(Error::Invalid(format!("{bad:?} is not a digest")));
        }
        if !self.store.has_blob(&config.digest) {
            self.blob(client, reference, &config.digest).await?;
        }
        let file: ConfigFile = self.store.read_json(&config.digest)?;
        for (layer, diff_id) in manifest.layers.iter().zip(&file.rootfs.diff_ids) {
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
        // What ends too early is not what was expected, and is dropped.
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
                // The other side ends early for a reason of its own.
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

/// Work with files: a sync of gigabytes would hold up everybody else of this thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let died = |_| Err(Error::Registry("a thread died".into()));
    tokio::task::spawn_blocking(work).await.unwrap_or_else(died)
}

fn failed(name: &Name, text: &str) -> String {
    format!("failed to pull and unpack image \"{name}\": {text}")
}

fn client(endpoint: &Endpoint) -> Result<Client> {
    // reqwest wants a provider for the whole process; whoever was first is fine.
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

/// `None` when the credentials are for another registry, or say nothing.
fn from_kubelet(auth: &AuthConfig, host: &str) -> Option<RegistryAuth> {
    let server = auth.server_address.trim_start_matches("https://").trim_start_matches("http://");
    let server = server.split('/').next().unwrap_or_default();
    if !server.is_empty() && server != host && !(server == "index.docker.io" && host == "docker.io")
    {
        return None;
    }
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

/// base64 of `username:password`.
fn decode(text: &str) -> Option<RegistryAuth> {
    let bytes = base64::engine::general_purpose::STANDARD.decode(text.trim()).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    Some(RegistryAuth::Basic(user.to_owned(), password.trim_end_matches('\0').to_owned()))
}

fn convert(error: OciDistributionError) -> Error {
    use oci_client::errors::OciErrorCode;
    let text = error.to_string();
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
