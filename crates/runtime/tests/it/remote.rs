//! The remote backend against a simulated runtime: a gRPC server with scripted answers. The
//! end-to-end story tests real runtimes; these tests cover answers that are hard to provoke.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use bytes::{BufMut, Bytes, BytesMut};
use cri::*;
use decapod_runtime::backend::remote::{Endpoints, Remote};
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use prost::Message;
use testkit::wait::{LONG, found, soon};
use transport::{Body, Incoming, Limits, Listener};

/// The answer of a call: messages, then a status (0 means success); `None` for a call that never ends.
#[derive(Clone, Default)]
struct Answer {
    messages: Vec<Bytes>,
    status: Option<(u32, &'static str)>,
}

fn ok(message: &impl Message) -> Answer {
    Answer { messages: vec![message.encode_to_vec().into()], status: Some((0, "")) }
}

fn failed(code: u32, text: &'static str) -> Answer {
    Answer { messages: vec![], status: Some((code, text)) }
}

/// Answers by name of the call.
type Script = Arc<Mutex<BTreeMap<&'static str, Answer>>>;

struct Paper {
    script: Script,
    server: Tasks,
    client: Tasks,
    directory: tempfile::TempDir,
}

impl Paper {
    fn start() -> Self {
        let script = Script::default();
        let directory = tempfile::tempdir().expect("a directory");
        let paper =
            Self { script, server: Tasks::new("server"), client: Tasks::new("client"), directory };
        let version = VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "paper".into(),
            runtime_version: "1".into(),
            runtime_api_version: "v1".into(),
        };
        paper.says("Version", ok(&version));
        paper.says("ImageFsInfo", ok(&ImageFsInfoResponse::default()));
        serve(&paper.script, &paper.socket(), &paper.server);
        paper
    }

    fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("paper.sock")
    }

    fn says(&self, call: &'static str, answer: Answer) {
        self.script.lock().expect("no panic while held").insert(call, answer);
    }

    async fn remote(&self, timeout: Duration) -> Remote {
        let runtime = format!("unix://{}", self.socket().display());
        let endpoints = Endpoints { runtime, images: None, timeout };
        // Even this time may be too short on a busy machine.
        found("it answers", async || Remote::open(&endpoints, self.client.clone()).await.ok()).await
    }

    async fn end(self) {
        self.client.shutdown(Duration::from_secs(5)).await;
        self.server.shutdown(Duration::from_secs(5)).await;
    }
}

fn serve(script: &Script, socket: &Path, tasks: &Tasks) {
    let listener = Listener::unix(socket).expect("binds");
    let script = script.clone();
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let name = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let answer = script.lock().expect("no panic while held").get(name.as_str()).cloned();
        let answer = answer.unwrap_or(failed(12, "unknown method"));
        async move { Ok::<_, std::convert::Infallible>(respond(answer)) }
    });
    let (limits, stop) = (Limits::default(), tasks.stop_signal());
    tasks.spawn_graceful("serve", transport::serve(listener, None, service, limits, stop));
}

fn respond(answer: Answer) -> Response<Body> {
    let frame = |message: Bytes| {
        let mut bytes = BytesMut::new();
        bytes.put_u8(0);
        bytes.put_u32(u32::try_from(message.len()).expect("short"));
        bytes.put(message);
        Ok::<_, transport::BoxError>(Frame::data(bytes.freeze()))
    };
    let data = futures::stream::iter(answer.messages).map(frame);
    let body = match answer.status {
        None => transport::boxed(StreamBody::new(data.chain(futures::stream::pending()))),
        Some((code, text)) => {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", code.into());
            trailers.insert("grpc-message", HeaderValue::from_static(text));
            let end = futures::stream::iter([Ok(Frame::trailers(trailers))]);
            transport::boxed(StreamBody::new(data.chain(end)))
        }
    };
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert("content-type", kind);
    response
}

#[tokio::test]
async fn statuses_become_errors_that_callers_act_on() {
    let paper = Paper::start();
    let remote = paper.remote(LONG).await;
    let check = async |code: u32, expected: Error| {
        paper.says("ContainerStatus", failed(code, "why"));
        assert_eq!(remote.container_status("c").await, Err(expected), "{code}");
    };
    check(5, Error::NotFound("why".into())).await;
    check(9, Error::FailedPrecondition("why".into())).await;
    check(12, Error::Unimplemented("why".into())).await;
    check(14, Error::Unavailable("why".into())).await;
    check(2, Error::Internal("why".into())).await;
    paper.says("ContainerStatus", ok(&ContainerStatusResponse::default()));
    let unset = Error::Internal("container status is not set".into());
    assert_eq!(remote.container_status("c").await, Err(unset));
    // Removing a missing container succeeds.
    paper.says("RemoveContainer", failed(5, "gone"));
    assert_eq!(remote.remove_container("c").await, Ok(()));
    paper.says("ExecSync", failed(4, "context deadline exceeded"));
    let command = vec!["sleep".to_owned(), "9".to_owned()];
    let timed_out = Error::DeadlineExceeded("command \"sleep 9\" timed out".into());
    let done = remote.exec_sync("c", command, Some(Duration::from_secs(1))).await;
    assert_eq!(done, Err(timed_out));
    // Like containerd before 2.0.
    assert!(matches!(remote.runtime_config().await, Err(Error::Unimplemented(_))));
    paper.end().await;
}

#[tokio::test]
async fn a_call_without_an_answer_times_out() {
    let paper = Paper::start();
    paper.says("Status", Answer::default());
    let remote = paper.remote(Duration::from_millis(200)).await;
    let status = soon("the call ends", remote.status(false)).await;
    assert!(matches!(status, Err(Error::DeadlineExceeded(_))), "{status:?}");
    paper.end().await;
}

fn event(container: &str) -> ContainerEventResponse {
    let container_id = container.to_owned();
    ContainerEventResponse { container_id, ..ContainerEventResponse::default() }
}

#[tokio::test]
async fn events_are_shared_and_end_with_their_stream() {
    let paper = Paper::start();
    let remote = paper.remote(LONG).await;
    assert!(matches!(remote.events().await, Err(Error::Unimplemented(_))));
    let messages = vec![event("a").encode_to_vec().into(), event("b").encode_to_vec().into()];
    paper.says("GetContainerEvents", Answer { messages, status: None });
    let work = async {
        let mut first = remote.events().await.expect("events");
        assert_eq!(first.recv().await.expect("an event").container_id, "a");
        assert_eq!(first.recv().await.expect("an event").container_id, "b");
        // No more events come: a second stream would begin with `a` again.
        let second = remote.events().await.expect("events");
        assert!(second.is_empty());
        // The runtime restarts: both streams end, and the next subscriber gets the new one.
        paper.server.shutdown(Duration::from_millis(50)).await;
        assert!(first.recv().await.is_err());
        drop(second);
        let messages = vec![event("c").encode_to_vec().into()];
        paper.says("GetContainerEvents", Answer { messages, status: None });
        let again = Tasks::new("server");
        serve(&paper.script, &paper.socket(), &again);
        let version = found("it is back", async || remote.version().await.ok()).await;
        assert_eq!(version.runtime_name, "paper");
        let mut third = remote.events().await.expect("events");
        assert_eq!(third.recv().await.expect("an event").container_id, "c");
        again.shutdown(Duration::from_millis(50)).await;
    };
    soon("the story ends", work).await;
    paper.end().await;
}
