//! The kubelet's HTTPS server: logs, exec, attach, port-forward, pods, statistics, health.
//!
//! ```text
//! TLS ─► authenticate, authorize (auth) ─► route by the first path segment ─► handler
//!                                   │ /exec /attach /portForward: 101, then streams in a task
//!                                   └ /containerLogs: a body that grows
//! ```
//!
//! In: requests, mostly proxied by the API server. Out: upstream's answers, with its texts.
//! Invariant: the server changes no pod; it reads the pod set and calls the runtime.
//! Upstream: `pkg/kubelet/server/server.go`.

mod auth;
mod cadvisor;
pub mod context;
mod kernel_counts;
mod logs;
mod readings;
mod stats;
mod summary;
mod system_logs;

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base::percent;
use base::task::Tasks;
use bytes::Bytes;
use cri::sessions as streams;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::StreamBody;
use hyper::body::Frame;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use transport::channels::Streams;
use transport::{Body, ConnectionInfo, Incoming, Limits, Listener, remote};

use crate::names;
use crate::pod::observed::{ObservedContainer, State, all_containers};
use crate::pod::set::PodSet;
use crate::pod::worker::View;
use auth::{Auth, Refusal};
use context::Context;

#[derive(Clone)]
pub struct Server(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    pods: Arc<PodSet>,
    auth: Auth,
    /// CPU rates since the last summary.
    rates: readings::Rates,
    tasks: Tasks,
}

type Answer = Result<Response<Body>, Refusal>;

impl Server {
    pub fn new(context: Arc<Context>, pods: Arc<PodSet>, tasks: Tasks) -> Self {
        let config = &context.node.config;
        let auth = Auth::new(context.client.clone(), config.server_auth.clone(), &config.node_name);
        Self(Arc::new(Inner { context, pods, auth, rates: Default::default(), tasks }))
    }

    /// Serves the whole API over TLS.
    pub fn listen(&self, listener: Listener) {
        let Some(tls) = self.0.context.node.config.server_tls.clone() else { return };
        let own = self.clone();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let own = own.clone();
            async move { Ok::<_, Infallible>(own.answer(request).await) }
        });
        let stop = self.0.tasks.stop_signal();
        let serving = transport::serve(listener, Some(tls), service, Limits::default(), stop);
        self.0.tasks.spawn_graceful("kubelet-server", serving);
    }

    /// Serves only `/healthz`, without TLS, on a local address.
    pub fn listen_health(&self, listener: Listener) {
        let service = tower::service_fn(move |request: Request<Incoming>| async move {
            let known =
                matches!(request.uri().path(), "/healthz" | "/healthz/ping" | "/livez" | "/readyz");
            let answer = if known {
                text(StatusCode::OK, "ok")
            } else {
                text(StatusCode::NOT_FOUND, "404 page not found\n")
            };
            Ok::<_, Infallible>(answer)
        });
        let stop = self.0.tasks.stop_signal();
        let serving = transport::serve(listener, None, service, Limits::default(), stop);
        self.0.tasks.spawn_graceful("kubelet-healthz", serving);
    }

    /// Serves pods, figures and health without TLS and without authentication (`readOnlyPort`).
    pub fn listen_read_only(&self, listener: Listener) {
        let own = self.clone();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let own = own.clone();
            async move { Ok::<_, Infallible>(own.answer_anyone(request).await) }
        });
        let stop = self.0.tasks.stop_signal();
        let serving = transport::serve(listener, None, service, Limits::default(), stop);
        self.0.tasks.spawn_graceful("kubelet-read-only", serving);
    }

    async fn answer_anyone(&self, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path().to_string();
        let is_known = is_read_only(request.method(), &path);
        let done = match is_known {
            true => self.route(request, &path).await,
            false => Err((StatusCode::NOT_FOUND, "404 page not found\n".into())),
        };
        done.unwrap_or_else(|(status, message)| text(status, &message))
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let info = request.extensions().get::<ConnectionInfo>().cloned().unwrap_or_default();
        let path = request.uri().path().to_string();
        let allowed = self.0.auth.check(&info, request.headers(), request.method(), &path).await;
        let done = match allowed {
            Ok(_) => self.route(request, &path).await,
            Err(refusal) => Err(refusal),
        };
        done.unwrap_or_else(|(status, message)| text(status, &message))
    }

    async fn route(&self, request: Request<Incoming>, path: &str) -> Answer {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let query = Query::parse(request.uri().query().unwrap_or_default());
        let debug = self.0.context.node.config.debugging_handlers;
        match parts.as_slice() {
            ["healthz" | "livez" | "readyz", ..] => Ok(text(StatusCode::OK, "ok")),
            ["pods"] => Ok(self.pods()),
            ["runningpods"] if debug => Ok(self.running_pods()),
            ["configz"] => Ok(self.configz()),
            ["stats", "summary"] => {
                Ok(summary::summary(&self.0.context, &self.0.pods, &self.0.rates).await)
            }
            ["metrics"] => Ok(stats::metrics(&self.0.pods, &self.0.context).await),
            ["metrics", "resource"] => {
                Ok(stats::resource_metrics(&self.0.context, &self.0.pods).await)
            }
            ["metrics", "cadvisor"] => Ok(cadvisor::metrics(&self.0.context, &self.0.pods).await),
            ["metrics", "probes"] => Ok(stats::probes(&self.0.context.metrics.probes)),
            ["containerLogs", namespace, pod, container] if debug => {
                self.logs(namespace, pod, container, &query).await
            }
            ["run", namespace, pod, container] | ["run", namespace, pod, _, container]
                if debug && request.method() == Method::POST =>
            {
                self.run(namespace, pod, container, &query).await
            }
            ["exec", namespace, pod, container] | ["exec", namespace, pod, _, container]
                if debug =>
            {
                self.exec(request, namespace, pod, container, &query)
            }
            ["attach", namespace, pod, container] | ["attach", namespace, pod, _, container]
                if debug =>
            {
                self.attach(request, namespace, pod, container, &query)
            }
            ["logs", ..] if debug && matches!(*request.method(), Method::GET | Method::HEAD) => {
                system_logs::serve(system_logs::DIRECTORY, path).await
            }
            ["portForward", namespace, pod] | ["portForward", namespace, pod, _] if debug => {
                self.port_forward(request, namespace, pod, &query)
            }
            _ => Err((StatusCode::NOT_FOUND, "404 page not found\n".into())),
        }
    }

    fn pods(&self) -> Response<Body> {
        let items = self.0.pods.views().into_iter().filter_map(|view| {
            let mut pod = Pod::clone(view.pod.as_ref()?);
            pod.status = Some(view.status);
            let mut tree = serde_json::to_value(pod).ok()?;
            // Items of a list have no kind.
            tree.as_object_mut()?.retain(|key, _| key != "apiVersion" && key != "kind");
            Some(tree)
        });
        let items: Vec<Value> = items.collect();
        json_answer(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
    }

    fn running_pods(&self) -> Response<Body> {
        let items = self.0.pods.views().into_iter().filter_map(|view| {
            let pod = view.pod.as_ref()?;
            let running: Vec<Value> = view
                .observed
                .running()
                .map(|c| json!({"name": c.name, "image": c.image_id, "resources": {}}))
                .collect();
            (!running.is_empty()).then(|| {
                json!({"metadata": {"name": names::name(pod), "namespace": names::namespace(pod),
                    "uid": names::uid(pod), "creationTimestamp": null},
                    "spec": {"containers": running}, "status": {}})
            })
        });
        let items: Vec<Value> = items.collect();
        json_answer(
            &json!({"kind": "PodList", "apiVersion": "v1", "metadata": ListMeta::default(), "items": items}),
        )
    }

    fn configz(&self) -> Response<Body> {
        let config = &self.0.context.node.config;
        let dns: Vec<String> = config.cluster_dns.iter().map(ToString::to_string).collect();
        let mut all = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "staticPodPath": config.pod_manifest_path,
            "address": config.bind_address.ip().to_string(),
            "port": config.bind_address.port(),
            "authentication": {
                "webhook": {"enabled": config.server_auth.webhook_tokens},
                "anonymous": {"enabled": config.server_auth.anonymous}},
            "authorization": {"mode":
                if config.server_auth.webhook_authorization { "Webhook" } else { "AlwaysAllow" }},
            "clusterDomain": config.cluster_domain,
            "clusterDNS": dns,
            "maxPods": config.max_pods,
            "cgroupDriver": match config.cgroup_driver {
                cri::CgroupDriver::Systemd => "systemd",
                _ => "cgroupfs",
            },
            "cgroupsPerQOS": config.cgroups_per_qos,
            "resolvConf": config.resolv_conf,
            "nodeStatusUpdateFrequency": format!("{}s", config.status_check.as_secs()),
            "nodeStatusReportFrequency": base::duration::show(config.status_report),
            "nodeLeaseDurationSeconds": config.lease_duration.as_secs(),
            "imageMinimumGCAge": base::duration::show(config.image_min_age),
            "imageGCHighThresholdPercent": config.image_gc_high,
            "imageGCLowThresholdPercent": config.image_gc_low,
            "containerLogMaxSize": format!("{}Mi", config.log_max_bytes >> 20),
            "containerLogMaxFiles": config.log_max_files,
            "enableDebuggingHandlers": config.debugging_handlers,
            "shutdownGracePeriod": base::duration::show(config.shutdown_grace),
            "shutdownGracePeriodCriticalPods":
                base::duration::show(config.shutdown_grace_critical),
            "makeIPTablesUtilChains": false,
            "failSwapOn": config.fails_on_swap,
        });
        if let (Some(all), Value::Object(more)) = (all.as_object_mut(), limits_shown(config)) {
            all.extend(more);
        }
        json_answer(&json!({ "kubeletconfig": all }))
    }

    fn pod(&self, namespace: &str, name: &str) -> Result<View, Refusal> {
        self.0.pods.find(namespace, name).ok_or_else(|| {
            (StatusCode::NOT_FOUND, format!("pod does not exist: {name}_{namespace}\n"))
        })
    }

    fn running(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Result<ObservedContainer, Refusal> {
        let view = self.pod(namespace, pod)?;
        let found = view
            .observed
            .containers
            .iter()
            .find(|c| c.name == container && c.state == State::Running);
        found.cloned().ok_or_else(|| {
            (StatusCode::NOT_FOUND, format!("container not found (\"{container}\")\n"))
        })
    }

    fn exec(
        &self,
        request: Request<Incoming>,
        namespace: &str,
        pod: &str,
        container: &str,
        query: &Query,
    ) -> Answer {
        let target = self.running(namespace, pod, container)?;
        let command = query.all("command");
        let streams = query.streams();
        let runtime = self.0.context.runtime.clone();
        let (session, pump, response) = self.command(request, streams)?;
        let ask = cri::ExecRequest {
            container_id: target.id,
            cmd: command,
            tty: streams.tty,
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr && !streams.tty,
        };
        self.0.tasks.spawn_contained("exec", async move {
            let work = async { streams::exec(session, runtime.exec(ask).await).await };
            let _ = tokio::join!(pump, work);
        });
        Ok(response)
    }

    fn attach(
        &self,
        request: Request<Incoming>,
        namespace: &str,
        pod: &str,
        container: &str,
        query: &Query,
    ) -> Answer {
        let view = self.pod(namespace, pod)?;
        let target = self.running(namespace, pod, container)?;
        let spec = view.pod.as_ref().and_then(|p| p.spec.clone()).unwrap_or_default();
        let described = container_of(&spec, container);
        let tty = described.as_ref().is_some_and(|c| c.tty == Some(true));
        let stdin_once = described.as_ref().is_some_and(|c| c.stdin_once == Some(true));
        let input_end = streams::InputEnd::of(stdin_once, tty);
        let streams = Streams { tty, ..query.streams() };
        let runtime = self.0.context.runtime.clone();
        let (session, pump, response) = self.command(request, streams)?;
        let ask = cri::AttachRequest {
            container_id: target.id,
            tty,
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr && !tty,
        };
        self.0.tasks.spawn_contained("attach", async move {
            let work =
                async { streams::attach(session, runtime.attach(ask).await, input_end).await };
            let _ = tokio::join!(pump, work);
        });
        Ok(response)
    }

    fn command(
        &self,
        mut request: Request<Incoming>,
        streams: Streams,
    ) -> Result<
        (
            transport::channels::ServerSession,
            impl Future<Output = std::io::Result<()>> + Send + use<>,
            Response<Body>,
        ),
        Refusal,
    > {
        if !(streams.stdin || streams.stdout || streams.stderr) {
            let text = "you must specify at least 1 of stdin, stdout, stderr";
            return Err((StatusCode::BAD_REQUEST, text.into()));
        }
        let accepted = remote::accept_command(request.headers());
        let (response, accepted) = accepted.map_err(handshake)?;
        let accepted =
            accepted.ok_or((StatusCode::FORBIDDEN, "no common subprotocol".to_string()))?;
        let io = transport::server_io(&mut request);
        let (session, pump) = remote::command(accepted, io, streams);
        Ok((session, pump, response.map(|()| transport::empty())))
    }

    fn port_forward(
        &self,
        mut request: Request<Incoming>,
        namespace: &str,
        pod: &str,
        query: &Query,
    ) -> Answer {
        let view = self.pod(namespace, pod)?;
        let sandbox = view.observed.ready_sandbox().map(|s| s.id.clone());
        let sandbox = sandbox.ok_or_else(|| {
            (StatusCode::NOT_FOUND, format!("pod does not exist: {pod}_{namespace}\n"))
        })?;
        let ports: Vec<u16> = query
            .all("port")
            .iter()
            .flat_map(|p| p.split(','))
            .filter_map(|p| p.parse().ok())
            .collect();
        let (response, accepted) = remote::accept_forward(request.headers()).map_err(handshake)?;
        let accepted =
            accepted.ok_or((StatusCode::FORBIDDEN, "no common subprotocol".to_string()))?;
        let io = transport::server_io(&mut request);
        let (forwards, pump) = remote::forwards(accepted, io, ports);
        let (runtime, tasks) = (self.0.context.runtime.clone(), self.0.tasks.clone());
        let work = streams::forward_all(runtime, sandbox, forwards, pump, tasks);
        self.0.tasks.spawn_contained("port-forward", work);
        Ok(response.map(|()| transport::empty()))
    }

    async fn run(&self, namespace: &str, pod: &str, container: &str, query: &Query) -> Answer {
        let target = self.running(namespace, pod, container)?;
        let command = query.all("cmd").join(" ");
        let command = command.split_whitespace().map(str::to_string).collect();
        match self.0.context.runtime.exec_sync(&target.id, command, None).await {
            Ok(done) => {
                let mut out = done.stdout.to_vec();
                out.extend_from_slice(&done.stderr);
                Ok(text(StatusCode::OK, &String::from_utf8_lossy(&out)))
            }
            Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
        }
    }

    async fn logs(&self, namespace: &str, pod: &str, container: &str, query: &Query) -> Answer {
        let options = query.log_options()?;
        let view = self
            .pod(namespace, pod)
            .map_err(|_| (StatusCode::NOT_FOUND, format!("pod {pod:?} does not exist\n")))?;
        let run = log_source(&view, pod, container, &options)?;
        let directory =
            view.pod.as_ref().map(|p| names::log_directory(&self.0.context.node.config.log_dir, p));
        let path = directory.unwrap_or_default().join(&run.log_path);
        let (out, chunks) = mpsc::channel::<Bytes>(64);
        let runtime = self.0.context.runtime.clone();
        let is_running = run.state == State::Running;
        let options = logs::Options { follow: options.follow && is_running, ..options };
        self.0.tasks.spawn_contained("logs", async move {
            let ended = until_ended(&*runtime, &run.id);
            if let Err(error) = logs::send(&path, &options, &out, ended).await {
                let text = format!(
                    "failed to try resolving symlinks in path {:?}: {error}",
                    path.display().to_string()
                );
                let _ = out.send(text.into()).await;
            }
        });
        let frames =
            ReceiverStream::new(chunks).map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
        let mut response = Response::new(transport::boxed(StreamBody::new(frames)));
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
        Ok(response)
    }
}

/// Resolves when the container no longer runs.
async fn until_ended(runtime: &dyn cri::Runtime, id: &str) {
    let running = async || {
        let status = runtime.container_status(id).await;
        status.is_ok_and(|s| s.state() == cri::ContainerState::Running)
    };
    let mut events = runtime.events().await;
    while running().await {
        let wait = std::time::Duration::from_secs(2);
        match &mut events {
            Ok(receiver) => loop {
                use tokio::sync::broadcast::error::RecvError;
                match receiver.recv().await {
                    Ok(event) if event.container_id == id => break,
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => {
                        events = Err(cri::Error::Unavailable("the runtime is unavailable".into()));
                        break;
                    }
                }
            },
            Err(_) => tokio::time::sleep(wait).await,
        }
    }
}

fn container_of(spec: &PodSpec, name: &str) -> Option<k8s_openapi::api::core::v1::Container> {
    all_containers(spec).into_iter().map(|(_, c)| c).find(|c| c.name == name)
}

/// Chooses the run of the container that has the requested log. Upstream: validateContainerLogStatus.
fn log_source(
    view: &View,
    pod: &str,
    container: &str,
    options: &logs::Options,
) -> Result<ObservedContainer, Refusal> {
    let bad = |text: String| (StatusCode::BAD_REQUEST, text);
    let spec = view.pod.as_ref().and_then(|p| p.spec.clone()).unwrap_or_default();
    if container_of(&spec, container).is_none() {
        let text = format!("container {container:?} not found in pod {pod:?}");
        return Err((StatusCode::NOT_FOUND, text));
    }
    let mut runs = view.observed.containers.iter().filter(|c| c.name == container);
    let newest = runs.next();
    if options.previous {
        return runs.next().cloned().ok_or_else(|| {
            bad(format!("previous terminated container {container:?} in pod {pod:?} not found"))
        });
    }
    match newest {
        Some(run) if run.state != State::Created => Ok(run.clone()),
        _ => {
            let lists = [&view.status.init_container_statuses, &view.status.container_statuses];
            let status = lists.into_iter().flatten().flatten().find(|s| s.name == container);
            let waiting = status.and_then(|s| s.state.as_ref()?.waiting.as_ref());
            let reason =
                waiting.and_then(|w| w.reason.clone()).unwrap_or("ContainerCreating".into());
            let is_image = matches!(
                reason.as_str(),
                "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" | "InvalidImageName"
            );
            let how = match is_image {
                true => "trying and failing to pull image".into(),
                false => reason,
            };
            Err(bad(format!("container {container:?} in pod {pod:?} is waiting to start: {how}")))
        }
    }
}

fn handshake(error: transport::ws::HandshakeError) -> Refusal {
    (StatusCode::BAD_REQUEST, error.to_string())
}

pub(super) fn text(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = Response::new(transport::full(message.to_string()));
    *response.status_mut() = status;
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

pub(super) fn json_answer(tree: &Value) -> Response<Body> {
    let mut response = Response::new(transport::full(tree.to_string()));
    let kind = header::HeaderValue::from_static("application/json");
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, kind);
    response
}

/// A decoded query string.
struct Query(HashMap<String, Vec<String>>);

impl Query {
    fn parse(text: &str) -> Self {
        let mut out: HashMap<String, Vec<String>> = HashMap::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            out.entry(percent::decode_query(key)).or_default().push(percent::decode_query(value));
        }
        Self(out)
    }

    fn all(&self, key: &str) -> Vec<String> {
        self.0.get(key).cloned().unwrap_or_default()
    }

    fn one(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.first().map(String::as_str).filter(|value| !value.is_empty())
    }

    fn is(&self, key: &str) -> bool {
        self.one(key).is_some_and(|value| matches!(value, "1" | "true" | "True" | "t"))
    }

    /// Accepts the API server's names, and the short ones of the kubelet's direct clients.
    fn streams(&self) -> Streams {
        Streams {
            stdin: self.is("input") || self.is("stdin"),
            stdout: self.is("output") || self.is("stdout"),
            stderr: self.is("error") || self.is("stderr"),
            tty: self.is("tty"),
        }
    }

    fn log_options(&self) -> Result<logs::Options, Refusal> {
        let bad = |text: String| (StatusCode::UNPROCESSABLE_ENTITY, text);
        let number = |key: &str| match self.one(key) {
            None => Ok(None),
            Some(value) => {
                value.parse::<i64>().map(Some).map_err(|_| bad(format!("invalid {key}: {value}\n")))
            }
        };
        let tail = number("tailLines")?.and_then(|n| u64::try_from(n).ok());
        let limit_bytes = number("limitBytes")?.and_then(|n| u64::try_from(n).ok());
        let since = match (number("sinceSeconds")?, self.one("sinceTime")) {
            (Some(seconds), _) => {
                let ago = std::time::Duration::from_secs(seconds.max(0) as u64);
                Some(base::clock::now() - ago)
            }
            (None, Some(time)) => {
                Some(time.parse().map_err(|_| bad(format!("invalid sinceTime: {time}\n")))?)
            }
            (None, None) => None,
        };
        let stream = match self.one("stream") {
            Some("Stdout") => Some("stdout"),
            Some("Stderr") => Some("stderr"),
            _ => None,
        };
        Ok(logs::Options {
            follow: self.is("follow"),
            timestamps: self.is("timestamps"),
            previous: self.is("previous"),
            tail,
            since,
            limit_bytes,
            stream,
        })
    }
}

/// Binds an address of a server.
pub async fn bind(address: SocketAddr) -> Result<Listener, crate::error::Error> {
    Listener::tcp(address)
        .await
        .map_err(|source| crate::error::Error::Listen { address: address.to_string(), source })
}

/// The settings of limits and policies, for `/configz`.
fn limits_shown(config: &crate::Config) -> Value {
    let period = Duration::from_micros(config.limits.cfs.period.max(0) as u64);
    json!({
        "podsPerCore": config.pods_per_core,
        "podPidsLimit": config.limits.pod_pids.unwrap_or(-1),
        "cpuCFSQuota": config.limits.cfs.is_on,
        "cpuCFSQuotaPeriod":
            base::duration::show(period),
        "seccompDefault": config.limits.seccomp_default,
        "cpuManagerPolicy":
            if config.managers.static_cpus.is_some() { "static" } else { "none" },
        "cpuManagerReconcilePeriod": base::duration::show(config.managers.reconcile_period),
        "memoryManagerPolicy": if config.managers.static_memory { "Static" } else { "None" },
        "topologyManagerPolicy": config.managers.topology.name(),
        "topologyManagerScope": if config.managers.aligns_pods { "pod" } else { "container" },
        "evictionPressureTransitionPeriod":
            base::duration::show(config.eviction.transition),
        "imageMaximumGCAge": base::duration::show(config.image_max_age),
        "containerLogMaxWorkers": config.log_workers,
        "containerLogMonitorInterval": base::duration::show(config.log_interval),
        "serializeImagePulls": config.parallel_pulls == 1,
        "readOnlyPort": config.read_only_address.map_or(0, |address| address.port()),
    })
}

/// The paths of the server without authentication. Upstream: InstallDefaultHandlers.
fn is_read_only(method: &Method, path: &str) -> bool {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    let is_known = matches!(first, "healthz" | "livez" | "readyz" | "pods" | "stats" | "metrics");
    is_known && matches!(*method, Method::GET | Method::HEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let query = Query::parse("command=sh&command=-c&command=echo%20a+b&stdin=1&tty=true");
        assert_eq!(query.all("command"), ["sh", "-c", "echo a b"]);
        let streams = query.streams();
        assert!(streams.stdin && streams.tty && !streams.stdout);
        let options = Query::parse("follow=true&tailLines=10&stream=Stderr").log_options();
        let options = options.expect("options");
        assert!(options.follow && options.tail == Some(10) && options.stream == Some("stderr"));
        assert!(Query::parse("tailLines=x").log_options().is_err());
    }
}
