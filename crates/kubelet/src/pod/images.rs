//! Pulls the images of containers.
//!
//! In: a container's image and policy, pull secrets. Out: the image, or a waiting reason
//! (`ErrImagePull`, `ImagePullBackOff`, `ErrImageNeverPull`, `InvalidImageName`), and events.
//! Invariant: at most `parallel_pulls` pulls run on the node.
//! Upstream: `pkg/kubelet/images/image_manager.go`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::EventType;
use cri::{AuthConfig, Image, ImageSpec, Runtime};
use k8s_openapi::api::core::v1::{Container, Secret};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::bucket::Bucket;
use crate::config::Rate;
use crate::pod::backoff::{self, Delays};
use crate::pod::holds::NotStarted;

/// How long `ErrImagePull` is shown before `ImagePullBackOff` replaces it.
const SHOWN: Duration = Duration::from_secs(1);

pub struct Images {
    runtime: Arc<dyn Runtime>,
    permits: Semaphore,
    /// The limit of pulls a second.
    bucket: Option<Bucket>,
    /// Pull failures by pod uid and image.
    delays: Mutex<Failures>,
}

#[derive(Default)]
struct Failures {
    delays: Delays,
    /// The time and error of the last failure.
    last: BTreeMap<String, (jiff::Timestamp, String)>,
}

/// Sends an event; the caller adds the container.
pub type Tell<'a> = &'a (dyn Fn(EventType, &str, String) + Send + Sync);

impl Images {
    pub fn new(runtime: Arc<dyn Runtime>, parallel: usize, rate: Rate) -> Self {
        let bucket = rate.map(|(rate, burst)| Bucket::new(rate, burst, Instant::now()));
        let permits = Semaphore::new(parallel.clamp(1, Semaphore::MAX_PERMITS));
        Self { runtime, permits, bucket, delays: Mutex::default() }
    }

    /// The container's image, pulled if the policy requires it.
    pub async fn ensure(
        &self,
        pod_uid: &str,
        container: &Container,
        secrets: &[Arc<Secret>],
        sandbox: &cri::PodSandboxConfig,
        tell: Tell<'_>,
    ) -> Result<Image, NotStarted> {
        let named = container.image.as_deref().unwrap_or_default();
        let Some(full) = with_default_tag(named) else {
            let message = format!(
                "Failed to apply default image tag {named:?}: couldn't parse image name {named:?}: \
                 invalid reference format"
            );
            tell(EventType::Warning, "InspectFailed", message.clone());
            return Err(NotStarted::until("InvalidImageName", message, None));
        };
        let policy = policy(container, &full);
        let spec =
            ImageSpec { user_specified_image: named.into(), ..ImageSpec::named(full.clone()) };
        let present = self.runtime.image_status(&spec).await.map_err(|error| {
            let message = format!("Failed to inspect image {full:?}: {error}");
            tell(EventType::Warning, "InspectFailed", message.clone());
            NotStarted::until("ImageInspectError", message, Some(backoff::FIRST))
        })?;
        match (policy, present) {
            ("Never", None) => {
                let message =
                    format!("Container image {named:?} is not present with pull policy of Never");
                tell(EventType::Warning, "ErrImageNeverPull", message.clone());
                // An administrator may import it.
                let retry_in = Some(backoff::FIRST);
                Err(NotStarted::until("ErrImageNeverPull", message, retry_in))
            }
            ("Never" | "IfNotPresent", Some(image)) => {
                let text = format!(
                    "Container image {named:?} already present on machine and can be accessed by the pod"
                );
                tell(EventType::Normal, "Pulled", text);
                Ok(image)
            }
            _ => self.pull(pod_uid, named, &spec, secrets, sandbox, tell).await,
        }
    }

    async fn pull(
        &self,
        pod_uid: &str,
        named: &str,
        spec: &ImageSpec,
        secrets: &[Arc<Secret>],
        sandbox: &cri::PodSandboxConfig,
        tell: Tell<'_>,
    ) -> Result<Image, NotStarted> {
        let key = format!("{pod_uid}_{named}");
        if let Some((left, error)) = self.waiting(&key) {
            let message = match error.is_empty() {
                true => format!("Back-off pulling image {named:?}"),
                false => format!("Back-off pulling image {named:?}: ErrImagePull: {error}"),
            };
            tell(EventType::Normal, "BackOff", format!("Back-off pulling image {named:?}"));
            // An administrator may import it meanwhile.
            let retry_in = Some(left.min(backoff::FIRST));
            return Err(NotStarted::until("ImagePullBackOff", message, retry_in));
        }
        let queued = base::clock::now();
        tell(EventType::Normal, "Pulling", format!("Pulling image {named:?}"));
        let permit = self.permits.acquire().await;
        let begun = base::clock::now();
        let image = match self.bucket.as_ref().is_none_or(|one| one.allows(Instant::now())) {
            true => self.fetch(spec, secrets, sandbox).await,
            false => Err(cri::Error::Unavailable("pull QPS exceeded".into())),
        };
        drop(permit);
        match image {
            Ok(image) => {
                let now = base::clock::now();
                let text = format!(
                    "Successfully pulled image {named:?} in {} ({} including waiting). Image size: {} bytes.",
                    millis(now, begun),
                    millis(now, queued),
                    image.size
                );
                tell(EventType::Normal, "Pulled", text);
                self.forget(&key);
                Ok(image)
            }
            Err(error) => {
                let described = format!(
                    "failed to pull image {named:?}: rpc error: code = {} desc = {error}",
                    error.code()
                );
                let text = format!("Failed to pull image {named:?}: {described}");
                tell(EventType::Warning, "Failed", text);
                self.failed(&key, &described);
                // The early retry does not pull: it changes the reason to ImagePullBackOff.
                let retry_in = Some(SHOWN);
                Err(NotStarted::until("ErrImagePull", described, retry_in))
            }
        }
    }

    /// Pulls with each matching credential until one works.
    async fn fetch(
        &self,
        spec: &ImageSpec,
        secrets: &[Arc<Secret>],
        sandbox: &cri::PodSandboxConfig,
    ) -> cri::Result<Image> {
        let mut tries: Vec<Option<AuthConfig>> =
            credentials(secrets, &spec.image).into_iter().map(Some).collect();
        if tries.is_empty() {
            tries.push(None);
        }
        let mut outcome = Err(cri::Error::Internal("no attempt".into()));
        for auth in tries {
            outcome = self.runtime.pull_image(spec, auth, Some(sandbox)).await;
            if outcome.is_ok() {
                break;
            }
        }
        let by_id = ImageSpec::named(outcome?);
        if let Ok(Some(image)) = self.runtime.image_status(&by_id).await {
            return Ok(image);
        }
        let named = self.runtime.image_status(spec).await?;
        named.ok_or_else(|| cri::Error::NotFound("the pulled image is gone".into()))
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, Failures> {
        self.delays.lock().expect("no panic while held")
    }

    fn waiting(&self, key: &str) -> Option<(Duration, String)> {
        let failures = self.failures();
        let now = base::clock::now();
        let (last, error) = failures.last.get(key)?;
        let left = failures.delays.remaining(key, *last, now)?;
        Some((left, error.clone()))
    }

    fn failed(&self, key: &str, error: &str) {
        let mut failures = self.failures();
        let now = base::clock::now();
        failures.last.insert(key.to_string(), (now, error.to_string()));
        failures.delays.step(key, now, now);
    }

    fn forget(&self, key: &str) {
        let mut failures = self.failures();
        failures.last.remove(key);
        failures.delays.forget(|known| known != key);
    }

    /// Forgets the failures of a deleted pod.
    pub fn forget_pod(&self, uid: &str) {
        let prefix = format!("{uid}_");
        let mut failures = self.failures();
        failures.last.retain(|key, _| !key.starts_with(&prefix));
        failures.delays.forget(|key| !key.starts_with(&prefix));
    }
}

fn millis(now: jiff::Timestamp, then: jiff::Timestamp) -> String {
    let took = Duration::try_from(now.duration_since(then)).unwrap_or_default();
    let took = Duration::from_millis(took.as_millis() as u64);
    if took < Duration::from_secs(1) {
        return format!("{}ms", took.as_millis());
    }
    if took < Duration::from_secs(60) {
        return format!("{}s", took.as_millis() as f64 / 1000.0);
    }
    base::duration::show(took)
}

/// The pull policy: as in the spec, else by tag.
fn policy<'a>(container: &'a Container, full: &str) -> &'a str {
    match container.image_pull_policy.as_deref().filter(|p| !p.is_empty()) {
        Some(policy) => policy,
        None if full.ends_with(":latest") => "Always",
        None => "IfNotPresent",
    }
}

/// `nginx` → `nginx:latest`; `None` for an invalid image name.
pub fn with_default_tag(image: &str) -> Option<String> {
    let name_ok = |name: &str| {
        !name.is_empty()
            && !name.starts_with(['/', '-', '.', ':'])
            && !name.ends_with(['/', ':', '-'])
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-/:[]".contains(c))
    };
    if let Some((name, digest)) = image.split_once('@') {
        let hex = digest.split_once(':')?.1;
        let ok = name_ok(name) && hex.len() >= 32 && hex.chars().all(|c| c.is_ascii_hexdigit());
        return ok.then(|| image.to_string());
    }
    if !name_ok(image) {
        return None;
    }
    let last = image.rsplit('/').next().unwrap_or(image);
    let path =
        if last.contains(':') { image.rsplit_once(':').map_or(image, |p| p.0) } else { image };
    let repository = match path.split_once('/') {
        Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => rest,
        _ => path,
    };
    if repository.chars().any(|c| c.is_ascii_uppercase()) {
        return None;
    }
    Some(if last.contains(':') { image.to_string() } else { format!("{image}:latest") })
}

/// The credentials in `secrets` for the image's registry.
fn credentials(secrets: &[Arc<Secret>], image: &str) -> Vec<AuthConfig> {
    let mut out = vec![];
    for secret in secrets {
        let data = |key: &str| secret.data.as_ref().and_then(|data| data.get(key)).map(|v| &v.0);
        let modern = data(".dockerconfigjson")
            .and_then(|bytes| serde_json::from_slice::<serde_json::Value>(bytes).ok())
            .and_then(|mut tree| Some(tree.get_mut("auths")?.take()));
        let old = || data(".dockercfg").and_then(|bytes| serde_json::from_slice(bytes).ok());
        let Some(serde_json::Value::Object(auths)) = modern.or_else(old) else { continue };
        for (server, entry) in auths {
            if matches_registry(&server, image) {
                out.extend(auth_of(&server, &entry));
            }
        }
    }
    out
}

fn matches_registry(server: &str, image: &str) -> bool {
    let server = server.trim_start_matches("https://").trim_start_matches("http://");
    let server = server.trim_end_matches('/');
    let (host, path) = server.split_once('/').unwrap_or((server, ""));
    let first = image.split('/').next().unwrap_or_default();
    let qualified = image.contains('/') && (first.contains(['.', ':']) || first == "localhost");
    let image_host = if qualified { first } else { "docker.io" };
    let docker =
        |host: &str| matches!(host, "docker.io" | "index.docker.io" | "registry-1.docker.io");
    let same = host == image_host
        || (docker(host) && docker(image_host))
        || host.strip_prefix("*.").is_some_and(|suffix| {
            image_host.split_once('.').is_some_and(|(_, rest)| rest == suffix)
        });
    let path = path.trim_start_matches("v1").trim_start_matches("v2").trim_matches('/');
    let image_path = if qualified { image.split_once('/').map_or("", |p| p.1) } else { image };
    same && (path.is_empty() || image_path.starts_with(path))
}

fn auth_of(server: &str, entry: &serde_json::Value) -> Option<AuthConfig> {
    use base64::Engine;
    let text = |key: &str| entry.get(key).and_then(|v| v.as_str()).unwrap_or_default().to_string();
    let mut auth = AuthConfig {
        username: text("username"),
        password: text("password"),
        server_address: server.to_string(),
        identity_token: text("identitytoken"),
        ..AuthConfig::default()
    };
    if auth.username.is_empty() {
        let decoded = base64::engine::general_purpose::STANDARD.decode(text("auth")).ok()?;
        let decoded = String::from_utf8(decoded).ok()?;
        let (user, password) = decoded.split_once(':')?;
        auth.username = user.into();
        auth.password = password.into();
    }
    Some(auth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags() {
        let check = |image: &str, expected: Option<&str>| {
            assert_eq!(with_default_tag(image).as_deref(), expected, "{image}");
        };
        check("nginx", Some("nginx:latest"));
        check("nginx:1.27", Some("nginx:1.27"));
        check("localhost:5000/a/b", Some("localhost:5000/a/b:latest"));
        check("", None);
        check("Upper/case", None);
        check("a b", None);
        let digest = format!("a@sha256:{}", "0".repeat(64));
        check(&digest, Some(&digest));
    }

    #[test]
    fn registries() {
        let check = |server: &str, image: &str, expected: bool| {
            assert_eq!(matches_registry(server, image), expected, "{server} {image}");
        };
        check("https://index.docker.io/v1/", "nginx:latest", true);
        check("registry.example.com", "registry.example.com/a:1", true);
        check("registry.example.com", "other.example.com/a:1", false);
        check("*.example.com", "other.example.com/a:1", true);
        check("registry.example.com/team", "registry.example.com/team/a:1", true);
        check("registry.example.com/team", "registry.example.com/b/a:1", false);
        check("127.0.0.1:5000", "127.0.0.1:5000/x:1", true);
    }

    #[test]
    fn secrets_become_credentials() {
        let secret: Secret =
            serde_json::from_value(serde_json::json!({"data": {".dockerconfigjson":
            base64::Engine::encode(&base64::engine::general_purpose::STANDARD,
                r#"{"auths":{"r.io":{"auth":"dTpw"},"x.io":{"username":"a","password":"b"}}}"#)}}))
            .expect("a secret");
        let found = credentials(&[Arc::new(secret)], "r.io/app:1");
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].username.as_str(), found[0].password.as_str()), ("u", "p"));
    }
}
