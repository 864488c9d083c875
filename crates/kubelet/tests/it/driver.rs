//! A CSI driver with its registrar, in this process: gRPC by hand over HTTP/2 on two unix sockets.
//! Its "volumes" are directories with a file that records the request.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::task::Tasks;
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::UnixListener;

pub const NAME: &str = "fake.csi.example.com";

pub const STAGES: i32 = 1;
pub const EXPANDS: i32 = 3;

type Texts = BTreeMap<String, String>;

/// The answer to GetInfo of a plugin of any kind.
#[derive(Clone, PartialEq, Message)]
pub struct PluginInfo {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub endpoint: String,
    #[prost(string, repeated, tag = "4")]
    pub versions: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Registered {
    #[prost(bool, tag = "1")]
    ok: bool,
    #[prost(string, tag = "2")]
    error: String,
}

#[derive(Clone, PartialEq, Message)]
struct Topology {
    #[prost(btree_map = "string, string", tag = "1")]
    segments: Texts,
}

#[derive(Clone, PartialEq, Message)]
struct NodeInfo {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(int64, tag = "2")]
    limit: i64,
    #[prost(message, optional, tag = "3")]
    topology: Option<Topology>,
}

#[derive(Clone, PartialEq, Message)]
struct Kind {
    #[prost(int32, tag = "1")]
    kind: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Capability {
    #[prost(message, optional, tag = "1")]
    rpc: Option<Kind>,
}

#[derive(Clone, PartialEq, Message)]
struct Capabilities {
    #[prost(message, repeated, tag = "1")]
    all: Vec<Capability>,
}

/// Whether a file system or a block device is requested.
#[derive(Clone, PartialEq, Message)]
pub struct Wanted {
    #[prost(message, optional, tag = "1")]
    pub block: Option<()>,
    #[prost(message, optional, tag = "2")]
    pub mount: Option<()>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Stage {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub publish_context: Texts,
    #[prost(string, tag = "3")]
    pub path: String,
    #[prost(message, optional, tag = "4")]
    pub wanted: Option<Wanted>,
    #[prost(btree_map = "string, string", tag = "5")]
    pub secrets: Texts,
    #[prost(btree_map = "string, string", tag = "6")]
    pub context: Texts,
}

#[derive(Clone, PartialEq, Message)]
pub struct Publish {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub publish_context: Texts,
    #[prost(string, tag = "3")]
    pub staged: String,
    #[prost(string, tag = "4")]
    pub path: String,
    #[prost(message, optional, tag = "5")]
    pub wanted: Option<Wanted>,
    #[prost(bool, tag = "6")]
    pub read_only: bool,
    #[prost(btree_map = "string, string", tag = "7")]
    pub secrets: Texts,
    #[prost(btree_map = "string, string", tag = "8")]
    pub context: Texts,
}

/// The request of the calls that undo, and of the one that expands.
#[derive(Clone, PartialEq, Message)]
struct Place {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    path: String,
}

#[derive(Clone, PartialEq, Message)]
struct Usage {
    #[prost(int64, tag = "1")]
    available: i64,
    #[prost(int64, tag = "2")]
    total: i64,
    #[prost(int64, tag = "3")]
    used: i64,
    #[prost(int32, tag = "4")]
    unit: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Stats {
    #[prost(message, repeated, tag = "1")]
    usage: Vec<Usage>,
}

/// A claim in a DRA driver's request.
#[derive(Clone, PartialEq, Message)]
struct DeviceClaim {
    #[prost(string, tag = "1")]
    namespace: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceClaims {
    #[prost(message, repeated, tag = "1")]
    claims: Vec<DeviceClaim>,
}

#[derive(Clone, PartialEq, Message)]
struct Device {
    #[prost(string, repeated, tag = "1")]
    requests: Vec<String>,
    #[prost(string, tag = "2")]
    pool: String,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(string, repeated, tag = "4")]
    ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Prepared {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
struct AllPrepared {
    #[prost(btree_map = "string, message", tag = "1")]
    claims: BTreeMap<String, Prepared>,
}

#[derive(Default)]
struct State {
    endpoint: String,
    /// It is a DRA driver, not a CSI driver.
    has_devices: bool,
    abilities: BTreeSet<i32>,
    calls: Vec<String>,
    stages: Vec<Stage>,
    publishes: Vec<Publish>,
    /// The kubelet's notifications about the registration.
    told: Vec<(bool, String)>,
    /// Calls of these names are refused.
    refuse: BTreeMap<String, &'static str>,
}

pub struct Driver {
    root: PathBuf,
    state: Arc<Mutex<State>>,
    tasks: Tasks,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

fn listen(path: &Path, state: &Arc<Mutex<State>>, tasks: &Tasks) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
    let listener = UnixListener::bind(path).expect("a socket");
    let (shared, group) = (state.clone(), tasks.clone());
    tasks.spawn("accept", async move {
        while let Ok((stream, _)) = listener.accept().await {
            let shared = shared.clone();
            let service =
                hyper::service::service_fn(move |request| answer(shared.clone(), request));
            group.spawn("connection", async move {
                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
}

impl Driver {
    /// Serves below the kubelet's directory; not registered yet.
    pub fn new(root: &Path, abilities: &[i32]) -> Self {
        let endpoint = root.join("plugins").join(NAME).join("csi.sock");
        let state = State {
            endpoint: endpoint.display().to_string(),
            abilities: abilities.iter().copied().collect(),
            ..State::default()
        };
        let (state, tasks) = (Arc::new(Mutex::new(state)), Tasks::new("driver"));
        listen(&endpoint, &state, &tasks);
        Self { root: root.into(), state, tasks }
    }

    /// A DRA driver: device `d1` for requests named `r1`, `d2` for those named `r2`.
    pub fn of_devices(root: &Path) -> Self {
        let driver = Self::new(root, &[]);
        driver.state().has_devices = true;
        driver
    }

    fn registry(&self) -> PathBuf {
        self.root.join("plugins_registry").join(format!("{NAME}-reg.sock"))
    }

    pub fn register(&self) {
        listen(&self.registry(), &self.state, &self.tasks);
    }

    pub fn leave(&self) {
        std::fs::remove_file(self.registry()).expect("removed");
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic")
    }

    pub fn refuse(&self, call: &str, code: Option<&'static str>) {
        let mut state = self.state();
        match code {
            Some(code) => state.refuse.insert(call.into(), code),
            None => state.refuse.remove(call),
        };
    }

    /// Calls about volumes, in order.
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }

    pub fn told(&self) -> Vec<(bool, String)> {
        self.state().told.clone()
    }

    pub fn last_stage(&self) -> Stage {
        self.state().stages.last().cloned().expect("it staged")
    }

    pub fn last_publish(&self) -> Publish {
        self.state().publishes.last().cloned().expect("it published")
    }
}

type Frames = std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>;
type Body = StreamBody<futures::stream::Iter<Frames>>;

async fn answer(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let body = request.into_body().collect().await.expect("a whole request").to_bytes();
    let message = reply(&mut state.lock().expect("no panic"), &call, &body[5..]);
    let mut trailers = http::HeaderMap::new();
    let mut frames = vec![];
    let code = match message {
        Ok(message) => {
            // A gRPC message: not compressed, its length, its bytes.
            let mut frame = vec![0];
            frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
            frame.extend_from_slice(&message);
            frames.push(Ok(Frame::data(Bytes::from(frame))));
            "0"
        }
        Err(code) => {
            trailers.insert("grpc-message", http::HeaderValue::from_static("refused"));
            code
        }
    };
    trailers.insert("grpc-status", http::HeaderValue::from_static(code));
    frames.push(Ok(Frame::trailers(trailers)));
    let response = Response::builder().header("content-type", "application/grpc");
    Ok(response.body(StreamBody::new(futures::stream::iter(frames))).expect("a response"))
}

fn make(path: &str) {
    std::fs::create_dir_all(path).expect("made");
    std::fs::write(Path::new(path).join("volume"), "x").expect("written");
}

/// The number of the device that it "publishes": a loop device that need not exist.
pub const DEVICE: (u64, u64) = (7, 201);

fn make_device(path: &str) {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    if !Path::new(path).exists() {
        let mode = Mode::from_bits_truncate(0o660);
        mknod(path, SFlag::S_IFBLK, mode, makedev(DEVICE.0, DEVICE.1)).expect("a device");
    }
}

fn remove(path: &str) {
    let path = Path::new(path);
    if path.is_dir() {
        std::fs::remove_dir_all(path).expect("removed");
    } else if path.exists() {
        std::fs::remove_file(path).expect("removed");
    }
}

/// The devices of each requested claim; none for unprepare.
fn devices(state: &mut State, call: &str, request: &[u8]) -> Vec<u8> {
    let asked = DeviceClaims::decode(request).expect("a request").claims;
    let verb = call.trim_start_matches("Node").trim_end_matches("Resources");
    let device = |number: u8| Device {
        requests: vec![format!("r{number}")],
        pool: "pool".into(),
        name: format!("d{number}"),
        ids: vec![format!("example.com/gpu=d{number}")],
    };
    let devices = if verb == "Prepare" { vec![device(1), device(2)] } else { vec![] };
    state.calls.extend(asked.iter().map(|one| format!("{verb} {} {}", one.name, one.uid)));
    let prepared = asked.into_iter().map(|one| (one.uid, Prepared { devices: devices.clone() }));
    AllPrepared { claims: prepared.collect() }.encode_to_vec()
}

fn reply(state: &mut State, call: &str, request: &[u8]) -> Result<Vec<u8>, &'static str> {
    let is_volumes = call.ends_with("Volume");
    if is_volumes {
        state.calls.push(call.trim_start_matches("Node").to_string());
    }
    if let Some(code) = state.refuse.get(call) {
        return Err(code);
    }
    let answer = match call {
        "GetInfo" if state.has_devices => PluginInfo {
            kind: "DRAPlugin".into(),
            name: NAME.into(),
            endpoint: state.endpoint.clone(),
            versions: vec!["v1.DRAPlugin".into(), "v1beta1.DRAPlugin".into()],
        }
        .encode_to_vec(),
        "NodePrepareResources" | "NodeUnprepareResources" => devices(state, call, request),
        "GetInfo" => PluginInfo {
            kind: "CSIPlugin".into(),
            name: NAME.into(),
            endpoint: state.endpoint.clone(),
            versions: vec!["1.0.0".into()],
        }
        .encode_to_vec(),
        "NotifyRegistrationStatus" => {
            let told = Registered::decode(request).expect("a request");
            state.told.push((told.ok, told.error));
            vec![]
        }
        "NodeGetInfo" => {
            let segments = [("topology.example.com/zone".to_string(), "z1".to_string())].into();
            NodeInfo { id: "node-7".into(), limit: 5, topology: Some(Topology { segments }) }
                .encode_to_vec()
        }
        "NodeGetCapabilities" => {
            let one = |kind: &i32| Capability { rpc: Some(Kind { kind: *kind }) };
            Capabilities { all: state.abilities.iter().map(one).collect() }.encode_to_vec()
        }
        "NodeStageVolume" => {
            let stage = Stage::decode(request).expect("a request");
            make(&stage.path);
            state.stages.push(stage);
            vec![]
        }
        "NodePublishVolume" => {
            let publish = Publish::decode(request).expect("a request");
            match publish.wanted.as_ref().and_then(|wanted| wanted.block) {
                Some(()) => make_device(&publish.path),
                None => make(&publish.path),
            }
            state.publishes.push(publish);
            vec![]
        }
        "NodeUnstageVolume" | "NodeUnpublishVolume" => {
            remove(&Place::decode(request).expect("a request").path);
            vec![]
        }
        "NodeExpandVolume" => vec![],
        "NodeGetVolumeStats" => {
            let bytes = Usage { available: 70, total: 100, used: 30, unit: 1 };
            let inodes = Usage { available: 7, total: 10, used: 3, unit: 2 };
            Stats { usage: vec![bytes, inodes] }.encode_to_vec()
        }
        other => panic!("no call {other}"),
    };
    Ok(answer)
}
