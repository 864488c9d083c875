//! A KMS v2 plugin on a unix socket: gRPC by hand over HTTP/2. Its "encryption" prepends its key's name
//! to the reversed bytes.

use std::collections::BTreeMap;
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

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    healthz: String,
    #[prost(string, tag = "3")]
    key_id: String,
}

/// Encrypt requests and Decrypt responses: one field of bytes.
#[derive(Clone, PartialEq, Message)]
struct OneBytes {
    #[prost(bytes = "vec", tag = "1")]
    bytes: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct DecryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    ciphertext: Vec<u8>,
    #[prost(string, tag = "3")]
    key_id: String,
    #[prost(btree_map = "string, bytes", tag = "4")]
    annotations: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct EncryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    key_id: String,
    #[prost(btree_map = "string, bytes", tag = "3")]
    annotations: BTreeMap<String, Vec<u8>>,
}

#[derive(Default)]
struct State {
    key: String,
    health: String,
    sealed: usize,
    opened: usize,
}

pub struct Plugin {
    path: PathBuf,
    state: Arc<Mutex<State>>,
    tasks: Tasks,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Plugin {
    pub async fn start(directory: &Path, key: &str) -> Self {
        let path = directory.join("kms.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let state = State { key: key.into(), health: "ok".into(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let tasks = Tasks::new("plugin");
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
        Self { path, state, tasks }
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.path.display())
    }

    pub fn set_key(&self, key: &str) {
        self.state.lock().expect("no panic").key = key.into();
    }

    pub fn set_health(&self, health: &str) {
        self.state.lock().expect("no panic").health = health.into();
    }

    /// The numbers of sealed and opened seeds.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state.lock().expect("no panic");
        (state.sealed, state.opened)
    }
}

type Body = StreamBody<futures::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

async fn answer(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let body = request.into_body().collect().await.expect("a whole request").to_bytes();
    let message = reply(&mut state.lock().expect("no panic"), &call, &body[5..]);
    // A gRPC message: not compressed, its length, its bytes.
    let mut frame = vec![0];
    frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
    frame.extend_from_slice(&message);
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let frames = vec![Ok(Frame::data(Bytes::from(frame))), Ok(Frame::trailers(trailers))];
    let response = Response::builder().header("content-type", "application/grpc");
    Ok(response.body(StreamBody::new(futures::stream::iter(frames))).expect("a response"))
}

fn reply(state: &mut State, call: &str, request: &[u8]) -> Vec<u8> {
    let annotation = || BTreeMap::from([("kek.example.com".to_owned(), b"1".to_vec())]);
    match call {
        "Status" => {
            let (healthz, key_id) = (state.health.clone(), state.key.clone());
            StatusResponse { version: "v2".into(), healthz, key_id }.encode_to_vec()
        }
        "Encrypt" => {
            state.sealed += 1;
            let mut ciphertext = OneBytes::decode(request).expect("a request").bytes;
            ciphertext.reverse();
            ciphertext.extend_from_slice(state.key.as_bytes());
            let (key_id, annotations) = (state.key.clone(), annotation());
            EncryptResponse { ciphertext, key_id, annotations }.encode_to_vec()
        }
        "Decrypt" => {
            state.opened += 1;
            let request = DecryptRequest::decode(request).expect("a request");
            assert_eq!(request.annotations, annotation(), "what Encrypt gave comes back");
            let sealed = request.ciphertext.strip_suffix(request.key_id.as_bytes());
            let mut bytes = sealed.expect("sealed under this key").to_vec();
            bytes.reverse();
            OneBytes { bytes }.encode_to_vec()
        }
        other => panic!("no call {other}"),
    }
}
