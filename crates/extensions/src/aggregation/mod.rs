//! Aggregation: API groups that other servers serve.
//!
//! ```text
//!  APIService objects ► follow ► check (reachable? which resources?) ► conditions
//!                                   └► the snapshot ◄ requests, discovery, OpenAPI
//! ```
//!
//! In: APIServices with a Service, those Services and their EndpointSlices. Out: [`Aggregation`],
//! an [`Aggregator`] that forwards requests with the front proxy's certificate and the user's name
//! in headers. Groups that this server itself serves have APIServices, too: [`local`].
//! Upstream: `k8s.io/kube-aggregator`.
//!
//! Deviation: requests go to an address of the Service's endpoints, not to its cluster IP, so that
//! a server needs no kube-proxy beside it.

mod check;
mod local;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apiserver::Registry;
use apiserver::aggregate::{Aggregator, Remote};
use apiserver::cacher::{CacheEvent, Cursor};
use apiserver::relay::{Onward, relay};
use apiserver::request::UserInfo;
use apiserver::resource::Body;
use arc_swap::ArcSwap;
use async_trait::async_trait;
use base::percent;
use base::task::Tasks;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use machinery::StatusError;
use machinery::status::Reason;
use transport::{ClientError, ClientOptions, HttpClient};

/// The interval between checks of an available server. Upstream: the informers' resync.
const RECHECK: Duration = Duration::from_secs(30);
/// The interval between checks of an unavailable server.
const RETRY: Duration = Duration::from_secs(2);

/// The front proxy's certificate, which authenticates this server to others. Empty if there is none.
#[derive(Clone, Default)]
pub struct Identity {
    pub cert_pem: String,
    pub key_pem: String,
}

/// See the module. Clones share their state.
#[derive(Clone)]
pub struct Aggregation(Arc<Inner>);

struct Inner {
    /// Replaced when the certificate is renewed.
    identity: ArcSwap<Identity>,
    /// The groups of other servers, as of the last check.
    remotes: ArcSwap<Vec<Remote>>,
    /// The servers by group and version. Replaced together with `remotes`.
    backends: ArcSwap<HashMap<(String, String), Backend>>,
    /// Clients by their settings. Each belongs to some APIService; connections outlive checks.
    /// Never held across an await.
    clients: Mutex<HashMap<Trust, HttpClient>>,
}

/// The settings that identify a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Trust {
    /// The name in the server's certificate: `NAME.NAMESPACE.svc`.
    server_name: String,
    /// The authorities in PEM. If empty, the server's certificate is not verified, or no connection is made.
    authorities: Vec<u8>,
    is_lax: bool,
}

/// A server behind an APIService.
#[derive(Clone)]
struct Backend {
    http: HttpClient,
    namespace: String,
    service: String,
    port: i32,
    is_available: bool,
}

impl Aggregation {
    pub fn new(identity: Identity) -> Self {
        Self(Arc::new(Inner {
            identity: ArcSwap::from_pointee(identity),
            remotes: ArcSwap::default(),
            backends: ArcSwap::default(),
            clients: Mutex::default(),
        }))
    }

    /// Takes a renewed certificate. New connections use it.
    pub fn replace_identity(&self, identity: Identity) -> Result<(), ClientError> {
        self.0.identity.store(Arc::new(identity));
        let clients = self.0.clients.lock().expect("no panic under the lock");
        clients.iter().try_for_each(|(trust, client)| client.replace_tls(&self.options(trust)))
    }

    /// Creates the APIServices of this server's groups, and follows all APIServices until the tasks end.
    pub fn start(&self, registry: &Registry, tasks: &Tasks) {
        let (aggregation, followed) = (self.clone(), registry.clone());
        tasks.spawn("aggregation", async move { aggregation.run(followed).await });
        let registry = registry.clone();
        tasks.spawn("local APIServices", async move { local::run(registry).await });
    }

    async fn run(&self, registry: Registry) {
        let mut services = registry.follow::<APIService>().await.1;
        let mut targets = registry.follow::<Service>().await.1;
        let mut slices = registry.follow::<EndpointSlice>().await.1;
        loop {
            let is_settled = match self.refresh(&registry).await {
                Ok(is_settled) => is_settled,
                Err(error) => {
                    tracing::warn!(%error, "failed to check the APIServices");
                    false
                }
            };
            let pause = match (self.0.backends.load().is_empty(), is_settled) {
                // No group is served elsewhere. Only a new APIService changes that.
                (true, true) => None,
                (_, true) => Some(RECHECK),
                (_, false) => Some(RETRY),
            };
            let timer = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = timer => {}
                () = changed::<APIService>(&registry, &mut services, |_| true) => {}
                () = changed::<Service>(&registry, &mut targets, |event| self.concerns(event)) => {}
                () = changed::<EndpointSlice>(&registry, &mut slices, |event| self.concerns(event)) => {}
            }
        }
    }

    /// Reports whether an event concerns a Service (or its EndpointSlices) behind an APIService.
    fn concerns(&self, event: &CacheEvent) -> bool {
        let Some(entry) = event.entry.as_ref().or(event.previous.as_ref()) else { return false };
        let name = entry.label("kubernetes.io/service-name").unwrap_or(&entry.key.name);
        let backends = self.0.backends.load();
        backends.values().any(|one| one.service == name && one.namespace == entry.key.namespace)
    }

    /// Checks all servers. `false` if one is unavailable and needs another check soon.
    async fn refresh(&self, registry: &Registry) -> Result<bool, StatusError> {
        let all = registry.cached::<APIService>("").await?;
        let before = self.0.remotes.load_full();
        let checks =
            all.iter().filter(|one| one.spec.as_ref().is_some_and(|spec| spec.service.is_some()));
        let checks = checks.map(|service| check::check(self, registry, service, &before));
        let outcomes = futures::future::join_all(checks).await;
        let mut remotes = vec![];
        let mut backends = HashMap::new();
        for outcome in outcomes.into_iter().flatten() {
            let key = (outcome.remote.group.clone(), outcome.remote.version.clone());
            backends.insert(key, outcome.backend);
            remotes.push(outcome.remote);
        }
        let is_settled = remotes.iter().all(|remote| remote.is_available);
        let named: HashSet<Trust> = all.iter().filter_map(check::trust_of).collect();
        let mut clients = self.0.clients.lock().expect("no panic under the lock");
        clients.retain(|trust, _| named.contains(trust));
        drop(clients);
        self.0.backends.store(Arc::new(backends));
        if *before != remotes {
            self.0.remotes.store(Arc::new(remotes));
            registry.touch_resources();
        }
        Ok(is_settled)
    }

    /// The client for a server. It stays the same while its settings do.
    fn client(&self, trust: &Trust) -> Result<HttpClient, String> {
        let mut clients = self.0.clients.lock().expect("no panic under the lock");
        if let Some(client) = clients.get(trust) {
            return Ok(client.clone());
        }
        let client = HttpClient::new(&self.options(trust)).map_err(|error| error.to_string())?;
        clients.insert(trust.clone(), client.clone());
        Ok(client)
    }

    fn options(&self, trust: &Trust) -> ClientOptions {
        let authorities = String::from_utf8(trust.authorities.clone());
        let identity = self.0.identity.load();
        let shown = |pem: &String| Some(pem.clone()).filter(|pem| !pem.is_empty());
        ClientOptions {
            ca_pem: authorities.ok().filter(|pem| !pem.is_empty()),
            cert_pem: shown(&identity.cert_pem),
            key_pem: shown(&identity.key_pem),
            server_name: Some(trust.server_name.clone()),
            insecure: trust.is_lax,
            user_agent: Some("kube-aggregator".into()),
            ..ClientOptions::default()
        }
    }
}

/// Returns after a relevant event, or after missed events.
async fn changed<T: k8s_openapi::Resource>(
    registry: &Registry,
    cursor: &mut Cursor,
    concerns: impl Fn(&CacheEvent) -> bool,
) {
    loop {
        match cursor.next().await {
            Ok(events) => {
                if events.iter().any(&concerns) {
                    return;
                }
            }
            Err(_) => {
                *cursor = registry.follow::<T>().await.1;
                return;
            }
        }
    }
}

#[async_trait]
impl Aggregator for Aggregation {
    fn remotes(&self) -> Arc<Vec<Remote>> {
        self.0.remotes.load_full()
    }

    async fn pass(
        &self,
        registry: &Registry,
        user: &UserInfo,
        group: &str,
        version: &str,
        request: Request<Body>,
    ) -> Response<Body> {
        let key = (group.to_owned(), version.to_owned());
        let backend = self.0.backends.load().get(&key).cloned();
        let Some(backend) = backend.filter(|backend| backend.is_available) else {
            return unavailable();
        };
        let Ok(address) = check::endpoint(registry, &backend).await else { return unavailable() };
        let target = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let Ok(uri) = address.uri(http::uri::Scheme::HTTPS, target) else { return unavailable() };
        let headers = user_headers(user);
        let onward = Onward { http: &backend.http, uri, headers, failed: unreachable };
        match relay(registry.tasks(), onward, request).await {
            Ok(response) => response,
            Err(error) => apiserver::codec::error(&apiserver::codec::Accept::JSON, &error),
        }
    }
}

/// As upstream, the answer for an unavailable server is plain text, not a Status.
fn unavailable() -> Response<Body> {
    apiserver::codec::plain(StatusCode::SERVICE_UNAVAILABLE, "service unavailable\n")
}

fn unreachable(error: transport::ClientError) -> StatusError {
    let message = format!("error trying to reach service: {error}");
    StatusError::new(Reason::ServiceUnavailable, message).without_details()
}

/// The headers that tell other servers who the user is.
fn user_headers(user: &UserInfo) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut add = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
            headers.append(name, value);
        }
    };
    add(HeaderName::from_static("x-remote-user"), &user.name);
    if !user.uid.is_empty() {
        add(HeaderName::from_static("x-remote-uid"), &user.uid);
    }
    for group in &user.groups {
        add(HeaderName::from_static("x-remote-group"), group);
    }
    for (key, values) in &user.extra {
        let name = format!("x-remote-extra-{}", escaped(key));
        let Ok(name) = HeaderName::try_from(name) else { continue };
        for value in values {
            add(name.clone(), value);
        }
    }
    headers
}

/// Percent-encodes characters that are invalid in a header's name. Upstream: `headerKeyEscape`.
fn escaped(key: &str) -> String {
    let mut out = String::with_capacity(key.len());
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte);
    percent::encode_but(&mut out, &key.to_ascii_lowercase(), is_token);
    out
}

#[cfg(test)]
mod tests {
    use apiserver::admission::Chain;
    use apiserver::registry::{DeleteOptions, Intent};
    use apiserver::request::Key;
    use apiserver::resource::{Resource, ResourceTable, Settings};
    use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::{
        APIServiceSpec, ServiceReference,
    };

    use super::*;

    fn row<T: k8s_openapi::Resource + 'static>() -> Resource {
        let codec = api::kinds::codec(T::API_VERSION, T::KIND).expect("a known kind");
        let settings = Settings { name_errors: |_| vec![], ..Settings::DEFAULT };
        Resource { settings, ..Resource::of::<T>(codec) }
    }

    #[tokio::test]
    async fn a_client_goes_with_the_last_that_names_its_settings() {
        let rows = [row::<APIService>(), row::<Service>(), row::<EndpointSlice>()];
        let tasks = Tasks::new("test");
        let table = ResourceTable::new(rows);
        let registry = Registry::new(store::Sim::open(), table, Chain::default(), tasks.clone());
        let aggregation = Aggregation::new(Identity::default());
        let ctx = registry.own_context::<APIService>();
        let key = Key::new("", "v1.example.com");
        let mut known = None;
        for (name, is_lax) in [("a", true), ("a", true), ("b", true), ("b", false), ("c", true)] {
            let reference = ServiceReference {
                namespace: Some("ns".into()),
                name: Some(name.into()),
                port: None,
            };
            let mut service = APIService::default();
            service.metadata.name = Some(key.name.clone());
            service.spec = Some(APIServiceSpec {
                group: Some("example.com".into()),
                version: Some("v1".into()),
                service: Some(reference),
                insecure_skip_tls_verify: Some(is_lax),
                ..APIServiceSpec::default()
            });
            let object: Box<dyn machinery::Object> = Box::new(service);
            let intent = match known.replace(name) {
                None => Intent::Create { object },
                Some(_) => Intent::Update { object },
            };
            registry.write(&ctx, &key, intent).await.expect("it is written");
            aggregation.refresh(&registry).await.expect("all are checked");
            let clients = aggregation.0.clients.lock().expect("no panic");
            let settings = clients.keys().map(|trust| (&*trust.server_name, trust.is_lax));
            let expected = format!("{name}.ns.svc");
            assert_eq!(settings.collect::<Vec<_>>(), [(&*expected, is_lax)]);
        }
        let options = DeleteOptions::default();
        registry.write(&ctx, &key, Intent::Delete { options }).await.expect("it is deleted");
        aggregation.refresh(&registry).await.expect("there is nothing to check");
        assert!(aggregation.0.clients.lock().expect("no panic").is_empty());
        tasks.shutdown(Duration::from_secs(5)).await;
    }

    #[test]
    fn users_travel_in_headers() {
        let mut user = UserInfo::new("jane", &["dev", "ops"]);
        user.extra.insert("example.com/scope".into(), vec!["a".into(), "b".into()]);
        let headers = user_headers(&user);
        let all = |name: &str| {
            let values = headers.get_all(name).iter();
            values.map(|value| value.to_str().expect("text").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(all("X-Remote-User"), ["jane"]);
        assert_eq!(all("X-Remote-Group"), ["dev", "ops"]);
        assert_eq!(all("X-Remote-Extra-example.com%2fscope"), ["a", "b"]);
        assert!(headers.get("x-remote-uid").is_none());
    }
}
