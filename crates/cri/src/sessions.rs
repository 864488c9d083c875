//! exec, attach and port-forward: connects the runtime's streams to the client's.
//!
//! In: a session from `transport::remote`, streams from the runtime. Out: nothing; the returned
//! futures run until either side ends. The kubelet's server and the runtime's own ([`crate::server`]) use
//! them. Upstream: `k8s.io/streaming`.

use std::io;
use std::pin::pin;
use std::sync::Arc;

use base::task::Tasks;
use futures::future::{Either, select};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use transport::channels::{ServerSession, TerminalSize};
use transport::remote::{Forward, Forwards};
use transport::{LINGER, carry};

use crate::{AttachStreams, ExecStreams, Runtime};

/// The Status that ends an exec.
fn exit_status(outcome: Result<i32, String>) -> Vec<u8> {
    let status = match outcome {
        Ok(0) => json!({"metadata": {}, "status": "Success"}),
        Ok(code) => json!({
            "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": format!("command terminated with non-zero exit code: exit status {code}"),
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        Err(error) => json!({
            "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
            "message": format!("Internal error occurred: {error}"),
            "details": {"causes": [{"message": error}]},
        }),
    };
    status.to_string().into_bytes()
}

async fn copy_out(from: Option<impl AsyncRead + Unpin>, to: Option<impl AsyncWrite + Unpin>) {
    if let (Some(mut from), Some(mut to)) = (from, to) {
        // Either side may close first; both end this stream.
        let _ = tokio::io::copy(&mut from, &mut to).await;
        let _ = to.shutdown().await;
    }
}

async fn resize(
    from: Option<mpsc::Receiver<TerminalSize>>,
    to: Option<mpsc::Sender<crate::TerminalSize>>,
) {
    if let (Some(mut from), Some(to)) = (from, to) {
        while let Some(size) = from.recv().await {
            let size = crate::TerminalSize { width: size.width, height: size.height };
            if to.send(size).await.is_err() {
                return;
            }
        }
    }
}

/// Connects a running command to its client, and reports its exit status.
pub async fn exec(session: ServerSession, streams: Result<ExecStreams, crate::Error>) {
    let ServerSession { stdin, stdout, stderr, resize: sizes, status } = session;
    let streams = match streams {
        Ok(streams) => streams,
        Err(error) => {
            drop((stdin, stdout, stderr));
            // A client that has disconnected needs no answer.
            let _ = status.send(exit_status(Err(error.to_string())));
            return;
        }
    };
    let input = async {
        tokio::join!(copy_out(stdin, streams.stdin), resize(sizes, streams.resize));
        std::future::pending::<()>().await
    };
    let output = async {
        tokio::join!(copy_out(streams.stdout, stdout), copy_out(streams.stderr, stderr));
    };
    // All output comes before the status, because a client reads up to the status.
    let finished = async {
        let (_, exit) = tokio::join!(output, streams.exit);
        exit
    };
    let exit = tokio::select! {
        exit = finished => exit,
        () = input => return,
    };
    let outcome = match exit {
        Ok(Ok(code)) => Ok(code),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the command's end was not seen".into()),
    };
    let _ = status.send(exit_status(outcome));
}

/// The effect of the end of a client's input on an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputEnd {
    /// It ends the container's input; the client goes on reading.
    Container,
    /// It ends this client's session: the container's input stays open for the next client.
    Client,
}

impl InputEnd {
    /// Upstream: the runtimes' attach, which handle `stdinOnce`.
    pub fn of(stdin_once: bool, tty: bool) -> Self {
        if stdin_once && !tty { Self::Container } else { Self::Client }
    }
}

/// Connects a container's own streams to a client.
pub async fn attach(
    session: ServerSession,
    streams: Result<AttachStreams, crate::Error>,
    input_end: InputEnd,
) {
    let ServerSession { stdin, stdout, stderr, resize: sizes, status } = session;
    let outcome = match streams {
        Err(error) => Err(error.to_string()),
        Ok(streams) => {
            let ends = input_end == InputEnd::Client && stdin.is_some() && streams.stdin.is_some();
            let input = async {
                copy_out(stdin, streams.stdin).await;
                if !ends {
                    std::future::pending::<()>().await;
                }
            };
            let sizes = async {
                resize(sizes, streams.resize).await;
                std::future::pending::<()>().await
            };
            let output = async {
                tokio::join!(copy_out(streams.stdout, stdout), copy_out(streams.stderr, stderr));
            };
            tokio::select! {
                () = output => {}
                () = input => {}
                () = sizes => {}
            }
            Ok(0)
        }
    };
    let _ = status.send(exit_status(outcome));
}

/// Forwards the connections of a client's session until it ends. `pump` drives the session.
pub async fn forward_all(
    runtime: Arc<dyn Runtime>,
    sandbox: String,
    mut forwards: Forwards,
    pump: impl Future<Output = io::Result<()>> + Send,
    tasks: Tasks,
) {
    // Closed when the client's session is over.
    let (session, is_open) = tokio::sync::watch::channel(());
    let pump = async move {
        let pumped = pump.await;
        drop(session);
        pumped
    };
    let work = async {
        while let Some(one) = forwards.recv().await {
            let mut is_open = is_open.clone();
            let gone = async move { while is_open.changed().await.is_ok() {} };
            let connection = forward(runtime.clone(), sandbox.clone(), one, gone);
            tasks.spawn_contained("forwarded-connection", connection);
        }
    };
    // An error is the client's: it has left.
    let _ = tokio::join!(pump, work);
}

/// Forwards one connection, until the pod's side ends; `client_gone` resolves when the client's session
/// is over.
async fn forward(
    runtime: Arc<dyn Runtime>,
    sandbox: String,
    one: Forward,
    client_gone: impl Future<Output = ()>,
) {
    let Forward { port, data, mut error } = one;
    let told = match runtime.port_forward(&sandbox, port).await {
        // Connections may end with a reset; then the client's stream just closes. A runtime in another
        // process reports a refused connection as text, in place of the first byte.
        Ok(pod) => match join(data, pod, client_gone).await {
            Err(why) if why.kind() == io::ErrorKind::Other => Some(why.to_string()),
            _ => None,
        },
        Err(why) => Some(format!("error forwarding port {port} to pod {sandbox}: {why}")),
    };
    if let Some(text) = told {
        // The client may have disconnected; there is no other receiver.
        let _ = error.write_all(text.as_bytes()).await;
        let _ = error.shutdown().await;
    }
}

/// Copies both ways. The pod's end ends the connection: its output still arrives, and a client that
/// leaves its half open delays nothing. A client's half-close is only passed on, because the pod may still
/// answer, unless the client has disconnected.
async fn join(
    client: impl AsyncRead + AsyncWrite,
    pod: impl AsyncRead + AsyncWrite,
    client_gone: impl Future<Output = ()>,
) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let (from_pod, to_pod) = tokio::io::split(pod);
    let up = pin!(carry(from_client, to_pod));
    let down = pin!(carry(from_pod, to_client));
    match select(up, down).await {
        Either::Left((_, down)) => {
            let gone = async {
                client_gone.await;
                tokio::time::sleep(LINGER).await;
            };
            tokio::select! {
                ended = down => ended,
                () = gone => Ok(()),
            }
        }
        Either::Right((ended, up)) => {
            let _ = tokio::time::timeout(LINGER, up).await;
            ended
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// The client's half-close is passed on, and a late answer of the pod arrives.
    #[tokio::test(start_paused = true)]
    async fn a_forwarded_connection_ends_with_the_pod() {
        let (near, client) = tokio::io::duplex(4);
        let (far, mut pod) = tokio::io::duplex(4);
        let joined = tokio::time::timeout(LINGER * 10, join(near, far, std::future::pending()));
        let (mut from_join, mut to_join) = tokio::io::split(client);
        let ask = async {
            to_join.write_all(b"a question").await.expect("writes");
            to_join.shutdown().await.expect("ends");
        };
        // After the client's half-close, even a late answer arrives.
        let reply = async {
            let mut question = String::new();
            pod.read_to_string(&mut question).await.expect("reads");
            tokio::time::sleep(LINGER * 3).await;
            pod.write_all(b"an answer").await.expect("writes");
            drop(pod);
            question
        };
        let mut answer = String::new();
        let ((), question, read, joined) =
            tokio::join!(ask, reply, from_join.read_to_string(&mut answer), joined);
        read.expect("reads");
        assert_eq!((question.as_str(), answer.as_str()), ("a question", "an answer"));
        joined.expect("the connection ends by itself").expect("no error");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_does_not_keep_a_connection_open() {
        let (near, mut client) = tokio::io::duplex(4);
        let (far, mut pod) = tokio::io::duplex(4);
        let talk = async {
            pod.write_all(b"that is all").await.expect("writes");
            drop(pod);
        };
        let mut heard = String::new();
        let joined = tokio::time::timeout(LINGER * 10, join(near, far, std::future::pending()));
        let ((), read, joined) = tokio::join!(talk, client.read_to_string(&mut heard), joined);
        read.expect("reads");
        assert_eq!(heard, "that is all");
        joined.expect("the connection ends by itself").expect("no error");
        // A disconnected client is not waited for, either.
        let (near, client) = tokio::io::duplex(4);
        let (far, _pod) = tokio::io::duplex(4);
        drop(client);
        let joined = tokio::time::timeout(LINGER * 10, join(near, far, std::future::ready(())));
        joined.await.expect("the connection ends by itself").expect("no error");
    }

    /// Whether an attach ends with the client's input; its container only reads.
    #[tokio::test(start_paused = true)]
    async fn an_attach_ends_with_its_input_if_the_containers_stays_open() {
        for (stdin_once, tty, expected) in
            [(true, false, false), (true, true, true), (false, false, true), (false, true, true)]
        {
            let (near, mut client) = tokio::io::duplex(64);
            let (input, mut container) = tokio::io::duplex(64);
            let (output, _silent) = tokio::io::duplex(64);
            let (status, ended) = tokio::sync::oneshot::channel();
            let session = ServerSession {
                stdin: Some(near),
                stdout: Some(tokio::io::duplex(64).0),
                stderr: None,
                resize: None,
                status,
            };
            let streams = AttachStreams {
                stdin: Some(Box::new(input)),
                stdout: Some(Box::new(output)),
                stderr: None,
                resize: None,
            };
            let attached = attach(session, Ok(streams), InputEnd::of(stdin_once, tty));
            let talk = async {
                client.write_all(b"all").await.expect("writes");
                drop(client);
                let mut heard = [0; 3];
                container.read_exact(&mut heard).await.expect("reads");
            };
            let both = async { tokio::join!(attached, talk) };
            let is_over = tokio::time::timeout(LINGER, both).await.is_ok();
            assert_eq!(is_over, expected, "{stdin_once} {tty}");
            assert_eq!(ended.await.is_ok(), expected);
        }
    }

    #[test]
    fn exit_codes_become_statuses() {
        let read = |outcome| -> serde_json::Value {
            serde_json::from_slice(&exit_status(outcome)).expect("JSON")
        };
        assert_eq!(read(Ok(0))["status"], "Success");
        let failed = read(Ok(7));
        assert_eq!(failed["details"]["causes"][0]["message"], "7");
        assert_eq!(failed["message"], "command terminated with non-zero exit code: exit status 7");
        assert_eq!(read(Err("x".into()))["code"], 500);
    }
}
