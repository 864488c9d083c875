//! The client: `kube`'s over any tower service, and the meaning of its errors.

use std::future::Future;
use std::time::Duration;

use base::backoff::Backoff;
use base::percent;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::BodyExt;
use kube::Api;
use kube::client::Body;
use kube::core::Status;
use serde::de::DeserializeOwned;
use tower::{BoxError, Service, ServiceExt};

use crate::reflector::PARTIAL_LIST;
use crate::request_metrics::Counting;
use crate::resource::Kind;

pub type Error = kube::Error;
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A handle on one API server with one identity. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    kube: kube::Client,
}

impl Client {
    /// A client over `service`, whose requests have a path but no host. `agent` names the component
    /// (`kube-scheduler`): servers take field managers from it. Call it inside a runtime.
    pub fn new<S, B>(service: S, agent: &str) -> Self
    where
        S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self::to(service, agent, "localhost")
    }

    /// The same; `host` is the server's address and port, by which requests are counted.
    pub fn to<S, B>(service: S, agent: &str, host: &str) -> Self
    where
        S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let agent =
            HeaderValue::from_str(&format!("{agent}/{} (linux) decapod", release::KUBERNETES.tag))
                .unwrap_or_else(|_| HeaderValue::from_static("decapod"));
        let service =
            Counting::new(service, host).map_request(move |mut request: Request<Body>| {
                request.headers_mut().entry(header::USER_AGENT).or_insert_with(|| agent.clone());
                request
            });
        Self { kube: kube::Client::new(service, "default") }
    }

    /// A client of a remote server over TLS, by the fields of a resolved kubeconfig.
    pub fn connect(
        options: &transport::ClientOptions,
        agent: &str,
    ) -> std::result::Result<Self, transport::ClientError> {
        Ok(Self::over(transport::HttpClient::new(options)?, agent))
    }

    /// A client over shared connections.
    pub fn over(http: transport::HttpClient, agent: &str) -> Self {
        let host = http.authority().unwrap_or_default().to_owned();
        Self::to(http, agent, &host)
    }

    /// Typed requests on one kind: in a namespace, or in all of them for `None`. The namespace is
    /// ignored for cluster-scoped kinds.
    pub fn api<T: Kind>(&self, namespace: Option<&str>) -> Api<T> {
        T::api(self.kube.clone(), namespace)
    }

    pub fn kube(&self) -> &kube::Client {
        &self.kube
    }

    /// Any request; a response that is not a success becomes [`Error::Api`].
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Body>> {
        let response = self.kube.send(request).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(error_of(response).await)
    }

    /// The body of a GET.
    pub async fn get_raw(&self, path: &str, accept: &str) -> Result<Bytes> {
        let response = self.send(request(Method::GET, path, accept, Bytes::new())?).await?;
        response.into_body().collect_bytes().await
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        decode(&self.get_raw(path, JSON).await?)
    }

    /// A page of a collection, metadata only. `token` is the continue token of the previous
    /// page.
    pub async fn metadata_page<T: DeserializeOwned>(
        &self,
        path: &str,
        limit: usize,
        token: Option<&str>,
    ) -> Result<T> {
        let mut page = format!("{path}?limit={limit}");
        if let Some(token) = token {
            page.push_str(&format!("&continue={}", percent::encode(token)));
        }
        decode(&self.get_raw(&page, PARTIAL_LIST).await?)
    }

    /// Deletes a collection. The answer lists all objects; this call asks for their metadata only.
    pub async fn delete_collection(&self, path: &str, options: impl Into<Bytes>) -> Result<()> {
        let mut request = request(Method::DELETE, path, PARTIAL_LIST, options.into())?;
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
        self.send(request).await?.into_body().collect_bytes().await.map(drop)
    }

    /// A request with a JSON body (or an empty one); `content_type` matters to PATCH.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: impl Into<Bytes>,
    ) -> Result<Bytes> {
        let mut request = request(method, path, JSON, body.into())?;
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        self.send(request).await?.into_body().collect_bytes().await
    }
}

pub(crate) const JSON: &str = "application/json";

pub(crate) fn request(
    method: Method,
    path: &str,
    accept: &str,
    body: Bytes,
) -> Result<Request<Body>> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::ACCEPT, accept)
        .body(Body::from(body))
        .map_err(Error::HttpError)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    machinery::object::from_json(bytes).map_err(Error::SerdeError)
}

async fn error_of(response: Response<Body>) -> Error {
    let code = response.status();
    let body = match response.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return error,
    };
    let mut status = serde_json::from_slice::<Status>(&body)
        .unwrap_or_else(|_| Status::failure(&String::from_utf8_lossy(&body), ""));
    if status.code == 0 {
        status.code = code.as_u16();
    }
    Error::Api(Box::new(status))
}

/// The errors that callers distinguish.
pub trait ErrorExt {
    /// `NotFound`, `Conflict`, …; empty when the server did not answer with a Status.
    fn reason(&self) -> &str;
    fn code(&self) -> u16;

    fn is_not_found(&self) -> bool {
        self.code() == 404
    }

    fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    fn is_conflict(&self) -> bool {
        self.reason() == "Conflict" || (self.code() == 409 && !self.is_already_exists())
    }

    fn is_invalid(&self) -> bool {
        self.code() == 422
    }

    fn is_forbidden(&self) -> bool {
        self.code() == 403
    }

    /// A create in a terminating namespace. Retries are pointless.
    fn is_namespace_terminating(&self) -> bool;

    /// The list or watch must start again.
    fn is_expired(&self) -> bool {
        self.code() == 410 || matches!(self.reason(), "Expired" | "Gone")
    }

    /// The server's message.
    fn text(&self) -> String;
}

impl ErrorExt for Error {
    fn reason(&self) -> &str {
        match self {
            Error::Api(status) => &status.reason,
            _ => "",
        }
    }

    fn code(&self) -> u16 {
        match self {
            Error::Api(status) => status.code,
            _ => 0,
        }
    }

    fn is_namespace_terminating(&self) -> bool {
        let Error::Api(status) = self else {
            return false;
        };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        status.code == 403 && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
    }

    fn text(&self) -> String {
        match self {
            Error::Api(status) => status.message.clone(),
            other => other.to_string(),
        }
    }
}

/// Repeats `attempt` (read, change, write) while it ends in a conflict.
/// Upstream: `retry.DefaultRetry`: five steps from 10 ms with jitter.
pub async fn retry_on_conflict<T, F>(mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let mut backoff =
        Backoff::new(Duration::from_millis(10), Duration::from_millis(80)).with_jitter(0.1);
    for _ in 0..4 {
        match attempt().await {
            Err(error) if error.is_conflict() => tokio::time::sleep(backoff.step()).await,
            done => return done,
        }
    }
    attempt().await
}
