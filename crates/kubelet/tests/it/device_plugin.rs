//! A device plugin in this process, and a client for the kubelet's sockets: gRPC by hand over HTTP/2.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::task::Tasks;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::driver::PluginInfo;

pub const RESOURCE: &str = "example.com/dongle";

#[derive(Clone, PartialEq, Message)]
struct Register {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    endpoint: String,
    #[prost(string, tag = "3")]
    resource: String,
}

#[derive(Clone, PartialEq, Message)]
struct Options {
    #[prost(bool, tag = "1")]
    pre_start: bool,
    #[prost(bool, tag = "2")]
    preferred: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Device {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    health: String,
}

#[derive(Clone, PartialEq, Message)]
struct Devices {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
struct Ids {
    #[prost(string, repeated, tag = "1")]
    ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct PerContainer {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Ids>,
}

#[derive(Clone, PartialEq, Message)]
struct Paths {
    #[prost(string, tag = "1")]
    container: String,
    #[prost(string, tag = "2")]
    host: String,
}

#[derive(Clone, PartialEq, Message)]
struct Allocated {
    #[prost(btree_map = "string, string", tag = "1")]
    envs: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    mounts: Vec<Paths>,
    #[prost(message, repeated, tag = "3")]
    devices: Vec<Paths>,
    #[prost(btree_map = "string, string", tag = "4")]
    annotations: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "5")]
    cdi: Vec<Name>,
}

#[derive(Clone, PartialEq, Message)]
struct Name {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct AllAllocated {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Allocated>,
}

struct State {
    calls: Vec<String>,
    refuses: bool,
    /// It never answers PreStartContainer.
    hangs: bool,
    endpoint: PathBuf,
}

pub struct Plugin {
    root: PathBuf,
    state: Arc<Mutex<State>>,
    devices: watch::Sender<Vec<Device>>,
    tasks: Tasks,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

fn list(devices: &[(&str, &str)]) -> Vec<Device> {
    let one = |(id, health): &(&str, &str)| Device { id: (*id).into(), health: (*health).into() };
    devices.iter().map(one).collect()
}

impl Plugin {
    /// Listens below the kubelet's directory; not registered yet.
    pub fn new(root: &Path, devices: &[(&str, &str)]) -> Self {
        let endpoint = root.join("device-plugins/dongle.sock");
        let state =
            State { calls: vec![], refuses: false, hangs: false, endpoint: endpoint.clone() };
        let plugin = Self {
            root: root.into(),
            state: Arc::new(Mutex::new(state)),
            devices: watch::channel(list(devices)).0,
            tasks: Tasks::new("plugin"),
        };
        plugin.listen(&endpoint);
        plugin
    }

    fn listen(&self, path: &Path) {
        let listener = UnixListener::bind(path).expect("a socket");
        let (state, devices, group) =
            (self.state.clone(), self.devices.subscribe(), self.tasks.clone());
        self.tasks.spawn("accept", async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (state, devices) = (state.clone(), devices.clone());
                let service = hyper::service::service_fn(move |request| {
                    answer(state.clone(), devices.clone(), request)
                });
                group.spawn("connection", async move {
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
    }

    /// Registers at the kubelet's own socket.
    pub async fn register(&self) -> Result<(), String> {
        register(&self.root, "v1beta1", RESOURCE).await
    }

    /// Registers with a socket in the directory where CSI drivers register, too.
    pub fn show_itself(&self) {
        self.listen(&self.root.join("plugins_registry/dongle-reg.sock"));
    }

    pub fn hide(&self) {
        std::fs::remove_file(self.root.join("plugins_registry/dongle-reg.sock")).expect("removed");
    }

    pub fn lists(&self, devices: &[(&str, &str)]) {
        self.devices.send_replace(list(devices));
    }

    pub fn refuse(&self, refuses: bool) {
        self.state.lock().expect("no panic").refuses = refuses;
    }

    pub fn hang(&self) {
        self.state.lock().expect("no panic").hangs = true;
    }

    pub fn calls(&self) -> Vec<String> {
        self.state.lock().expect("no panic").calls.clone()
    }
}

/// Registers a plugin; returns the kubelet's answer.
pub async fn register(root: &Path, version: &str, resource: &str) -> Result<(), String> {
    let request = Register {
        version: version.into(),
        endpoint: "dongle.sock".into(),
        resource: resource.into(),
    };
    let socket = root.join("device-plugins/kubelet.sock");
    let path = "/v1beta1.Registration/Register";
    ask(&socket, path, &request.encode_to_vec()).await.map(|_| ())
}

/// Sends one call: returns the answer's message, or the text of the error.
pub async fn ask(socket: &Path, path: &str, message: &[u8]) -> Result<Bytes, String> {
    let stream = UnixStream::connect(socket).await.expect("a socket");
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .expect("HTTP/2");
    let tasks = Tasks::new("call");
    tasks.spawn("connection", async move {
        let _ = connection.await;
    });
    let request = Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Full::new(frame(message)))
        .expect("a request");
    let response = sender.send_request(request).await.expect("a response");
    let head = response.headers().clone();
    let body = response.into_body().collect().await.expect("a body");
    let trailers = body.trailers().cloned().unwrap_or_default();
    let bytes = body.to_bytes();
    let header = |name: &str| trailers.get(name).or_else(|| head.get(name)).cloned();
    if header("grpc-status").is_some_and(|code| code == "0") {
        return Ok(bytes.slice(5..));
    }
    let text = header("grpc-message").expect("why not");
    Err(text.to_str().expect("text").replace("%20", " ").replace("%22", "\"").replace("%2C", ","))
}

/// A gRPC message: not compressed, its length, its bytes.
fn frame(message: &[u8]) -> Bytes {
    let mut frame = vec![0];
    frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
    frame.extend_from_slice(message);
    Bytes::from(frame)
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

async fn answer(
    state: Arc<Mutex<State>>,
    devices: watch::Receiver<Vec<Device>>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let body = request.into_body().collect().await.expect("a whole request").to_bytes();
    let body = if call == "ListAndWatch" {
        let mut devices = devices;
        devices.mark_changed();
        let frames = futures::stream::unfold(devices, async |mut devices| {
            devices.changed().await.ok()?;
            let listed = Devices { devices: devices.borrow_and_update().clone() };
            Some((Ok(Frame::data(frame(&listed.encode_to_vec()))), devices))
        });
        StreamBody::new(frames).boxed_unsync()
    } else {
        let hangs = call == "PreStartContainer" && state.lock().expect("no panic").hangs;
        let reply = reply(&mut state.lock().expect("no panic"), &call, &body[5..]);
        if hangs {
            std::future::pending::<()>().await;
        }
        let mut trailers = http::HeaderMap::new();
        let code = if reply.is_some() { "0" } else { "2" };
        trailers.insert("grpc-status", http::HeaderValue::from_static(code));
        trailers.insert("grpc-message", http::HeaderValue::from_static("refused"));
        let message = reply.map(|message| Ok(Frame::data(frame(&message))));
        let frames = message.into_iter().chain([Ok(Frame::trailers(trailers))]);
        StreamBody::new(futures::stream::iter(frames.collect::<Vec<_>>())).boxed_unsync()
    };
    let response = Response::builder().header("content-type", "application/grpc");
    Ok(response.body(body).expect("a response"))
}

/// It prefers the last of its devices.
fn reply(state: &mut State, call: &str, request: &[u8]) -> Option<Vec<u8>> {
    let answer = match call {
        "GetInfo" => PluginInfo {
            kind: "DevicePlugin".into(),
            name: RESOURCE.into(),
            endpoint: state.endpoint.display().to_string(),
            versions: vec!["v1beta1".into()],
        }
        .encode_to_vec(),
        "NotifyRegistrationStatus" => vec![],
        "GetDevicePluginOptions" => Options { pre_start: true, preferred: true }.encode_to_vec(),
        "GetPreferredAllocation" => {
            let asked = PerContainer::decode(request).expect("a request");
            let ids = asked.containers[0].ids.iter().max().cloned();
            PerContainer { containers: vec![Ids { ids: ids.into_iter().collect() }] }
                .encode_to_vec()
        }
        "Allocate" => {
            let asked = PerContainer::decode(request).expect("a request").containers;
            let ids = asked[0].ids.join(",");
            state.calls.push(format!("Allocate {ids}"));
            if state.refuses {
                return None;
            }
            let path =
                |id: &String| Paths { container: format!("/dev/{id}"), host: "/dev/null".into() };
            let pair = |key: &str| [(key.to_owned(), ids.clone())].into();
            let mounts = vec![Paths { container: "/lib/dongle".into(), host: "/lib".into() }];
            let cdi = vec![Name { name: format!("{RESOURCE}={ids}") }];
            let devices = asked[0].ids.iter().map(path).collect();
            let all = Allocated {
                envs: pair("DONGLE"),
                mounts,
                devices,
                annotations: pair("dongle"),
                cdi,
            };
            AllAllocated { containers: vec![all] }.encode_to_vec()
        }
        "PreStartContainer" => {
            let ids = Ids::decode(request).expect("a request").ids.join(",");
            state.calls.push(format!("PreStart {ids}"));
            vec![]
        }
        other => panic!("no call {other}"),
    };
    Some(answer)
}
