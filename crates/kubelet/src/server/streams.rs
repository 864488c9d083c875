//! exec, attach and port-forward: the runtime's streams joined to the client's.
//!
//! In: a session from `transport::remote`, streams from the runtime. Out: nothing; the returned
//! futures run until either side ends. Upstream: `pkg/kubelet/server/{remotecommand,portforward}`.

use std::sync::Arc;

use cri::{AttachStreams, ExecStreams, Runtime};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use transport::channels::{ServerSession, TerminalSize};
use transport::remote::Forward;

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
        // Either side may go first; both are the end of this stream.
        let _ = tokio::io::copy(&mut from, &mut to).await;
        let _ = to.shutdown().await;
    }
}

async fn resize(
    from: Option<mpsc::Receiver<TerminalSize>>,
    to: Option<mpsc::Sender<cri::TerminalSize>>,
) {
    if let (Some(mut from), Some(to)) = (from, to) {
        while let Some(size) = from.recv().await {
            let size = cri::TerminalSize { width: size.width, height: size.height };
            if to.send(size).await.is_err() {
                return;
            }
        }
    }
}

/// Joins a running command to its client and tells how it ended.
pub async fn exec(session: ServerSession, streams: Result<ExecStreams, cri::Error>) {
    let ServerSession { stdin, stdout, stderr, resize: sizes, status } = session;
    let streams = match streams {
        Ok(streams) => streams,
        Err(error) => {
            drop((stdin, stdout, stderr));
            // The client may be gone; nobody else wants to know.
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
    // All output first, then the end: a client reads to the status.
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

/// Joins a container's own streams to a client.
pub async fn attach(session: ServerSession, streams: Result<AttachStreams, cri::Error>) {
    let ServerSession { stdin, stdout, stderr, resize: sizes, status } = session;
    let outcome = match streams {
        Err(error) => Err(error.to_string()),
        Ok(streams) => {
            let input = async {
                tokio::join!(copy_out(stdin, streams.stdin), resize(sizes, streams.resize));
                std::future::pending::<()>().await
            };
            let output = async {
                tokio::join!(copy_out(streams.stdout, stdout), copy_out(streams.stderr, stderr));
            };
            tokio::select! {
                () = output => Ok(0),
                () = input => return,
            }
        }
    };
    let _ = status.send(exit_status(outcome));
}

/// One forwarded connection.
pub async fn forward(runtime: Arc<dyn Runtime>, sandbox: String, one: Forward) {
    let Forward { port, mut data, mut error } = one;
    match runtime.port_forward(&sandbox, port).await {
        Ok(mut pod) => {
            // Resets are how connections end; the client sees its stream close. A runtime that is
            // another process tells of a refusal in words, in place of the first byte.
            if let Err(why) = tokio::io::copy_bidirectional(&mut data, &mut pod).await
                && why.kind() == std::io::ErrorKind::Other
            {
                let _ = error.write_all(why.to_string().as_bytes()).await;
                let _ = error.shutdown().await;
            }
        }
        Err(why) => {
            let text = format!("error forwarding port {port} to pod {sandbox}: {why}");
            let _ = error.write_all(text.as_bytes()).await;
            let _ = error.shutdown().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_statuses() {
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
