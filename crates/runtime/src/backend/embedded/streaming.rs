//! exec, attach, port-forward. The bytes of exec pass directly between this process and the command.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cri::*;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{mpsc, oneshot};

use super::Embedded;
use super::containers::ContainerEntry;
use crate::backend::io::{PipeInput, Terminal, input_pipe, output_pipe};
use crate::shim::{ExecProcess, Executed};

/// Upstream: output beyond this many bytes is dropped.
const SYNC_OUTPUT_LIMIT: usize = 16 << 20;
/// How long output is read after the command has ended; child processes may hold the pipe.
const SYNC_DRAIN: Duration = Duration::from_secs(2);
const RESIZES: usize = 4;

impl Embedded {
    fn running(&self, id: &str) -> Result<Arc<ContainerEntry>> {
        let entry = self.container(id)?;
        if entry.is_running() {
            Ok(entry)
        } else {
            Err(Error::FailedPrecondition(format!("container {:?} is not running", entry.id)))
        }
    }

    pub(super) async fn run_exec(&self, request: ExecRequest) -> Result<ExecStreams> {
        let entry = self.running(&request.container_id)?;
        if request.cmd.is_empty() {
            return Err(Error::InvalidArgument("no command".into()));
        }
        if request.tty && request.stderr {
            return Err(Error::InvalidArgument("tty and stderr cannot both be true".into()));
        }
        let mut process = ExecProcess {
            args: request.cmd,
            terminal: request.tty,
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            kill_on_hangup: false,
        };
        if request.tty {
            let executed = self.client(&entry).exec(process, Vec::new()).await?;
            return self.terminal_streams(executed, request.stdin, request.stdout);
        }
        let mut theirs = Vec::new();
        let (mut stdin, mut stdout, mut stderr) = (None, None, None);
        if process.stdin {
            let (ours, end) = input_pipe()?;
            stdin = Some(Box::new(ours) as Input);
            theirs.push(end);
        }
        for (wanted, place) in [(process.stdout, &mut stdout), (process.stderr, &mut stderr)] {
            if wanted {
                let (ours, end) = output_pipe()?;
                *place = Some(Box::new(ours) as Output);
                theirs.push(end);
            }
        }
        process.terminal = false;
        let executed = self.client(&entry).exec(process, theirs).await?;
        let exit = self.watch_exit(executed);
        Ok(ExecStreams { stdin, stdout, stderr, resize: None, exit })
    }

    fn terminal_streams(
        &self,
        mut executed: Executed,
        stdin: bool,
        stdout: bool,
    ) -> Result<ExecStreams> {
        let master = executed.terminal.take();
        let master = master.ok_or_else(|| Error::Internal("the process has no terminal".into()))?;
        let terminal = Terminal::new(master)?;
        let resize = self.watch_size(terminal.clone());
        let exit = self.watch_exit(executed);
        Ok(ExecStreams {
            stdin: stdin.then(|| Box::new(terminal.clone()) as Input),
            stdout: stdout.then(|| Box::new(terminal) as Output),
            stderr: None,
            resize: Some(resize),
            exit,
        })
    }

    fn watch_exit(&self, executed: Executed) -> oneshot::Receiver<Result<i32>> {
        let (sender, receiver) = oneshot::channel();
        self.0.tasks.spawn("exec", async move {
            let code = executed.exit_code().await.map_err(Error::from);
            // The caller may be gone.
            let _ = sender.send(code);
        });
        receiver
    }

    fn watch_size(&self, terminal: Terminal) -> mpsc::Sender<TerminalSize> {
        let (sender, mut receiver) = mpsc::channel(RESIZES);
        self.0.tasks.spawn("terminal size", async move {
            while let Some(size) = receiver.recv().await {
                if terminal.resize(size).is_err() {
                    return;
                }
            }
        });
        sender
    }

    pub(super) async fn run_exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse> {
        let entry = self.running(id)?;
        let text = command.join(" ");
        let process = ExecProcess {
            args: command,
            terminal: false,
            stdin: false,
            stdout: true,
            stderr: true,
            kill_on_hangup: true,
        };
        let (stdout, out) = output_pipe()?;
        let (stderr, err) = output_pipe()?;
        let executed = self.client(&entry).exec(process, vec![out, err]).await?;
        let work = async {
            let mut outputs = (Vec::new(), Vec::new());
            let code = {
                let reading = async {
                    tokio::join!(
                        read_all(stdout, &mut outputs.0),
                        read_all(stderr, &mut outputs.1)
                    );
                };
                tokio::pin!(reading);
                let mut exit = std::pin::pin!(executed.exit_code());
                let mut read = false;
                loop {
                    tokio::select! {
                        code = &mut exit => {
                            if !read {
                                // Child processes may still hold the pipe; this does not wait for them.
                                let _ = tokio::time::timeout(SYNC_DRAIN, &mut reading).await;
                            }
                            break code;
                        }
                        () = &mut reading, if !read => read = true,
                    }
                }
            };
            Ok::<_, Error>(ExecSyncResponse {
                stdout: Bytes::from(outputs.0),
                stderr: Bytes::from(outputs.1),
                exit_code: code?,
            })
        };
        match timeout {
            // Dropping the connection kills the command.
            Some(limit) => tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
                Err(Error::DeadlineExceeded(format!("command {text:?} timed out")))
            }),
            None => work.await,
        }
    }

    pub(super) async fn run_attach(&self, request: AttachRequest) -> Result<AttachStreams> {
        let entry = self.running(&request.container_id)?;
        let terminal = entry.config().tty;
        let (mut stdout, mut stderr) = (None, None);
        let (mut out, mut err) = (None, None);
        if request.stdout {
            let (ours, end) = output_pipe()?;
            stdout = Some(Box::new(ours) as Output);
            out = Some(end);
        }
        if request.stderr && !terminal {
            let (ours, end) = output_pipe()?;
            stderr = Some(Box::new(ours) as Output);
            err = Some(end);
        }
        let attached = self.client(&entry).attach(request.stdin, out, err).await?;
        let mut streams = AttachStreams { stdin: None, stdout, stderr, resize: None };
        if let Some(master) = attached.terminal {
            let terminal = Terminal::new(master)?;
            streams.resize = Some(self.watch_size(terminal.clone()));
            streams.stdin = request.stdin.then(|| Box::new(terminal) as Input);
        } else if let Some(end) = attached.stdin {
            streams.stdin = Some(Box::new(PipeInput::new(end)?));
        }
        Ok(streams)
    }

    pub(super) async fn forward(&self, sandbox_id: &str, port: u16) -> Result<Io> {
        let entry = self.sandbox(sandbox_id)?;
        let netns = self.places(&entry.id).net();
        let host = entry.modes().host_network;
        let mut refused = String::new();
        // Tries both loopback addresses, like upstream's `localhost`: a server may listen on one family only.
        for at in [
            SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
        ] {
            let connected = if host {
                tokio::net::TcpStream::connect(at).await.map_err(|error| error.to_string())
            } else {
                net::netns::connect(&netns, at).await.map_err(|error| error.to_string())
            };
            match connected {
                Ok(stream) => return Ok(Box::new(stream)),
                Err(error) if refused.is_empty() => refused = error,
                Err(_) => {}
            }
        }
        Err(Error::Unavailable(format!("failed to connect to localhost:{port}: {refused}")))
    }
}

/// Reads to the end, but keeps at most [`SYNC_OUTPUT_LIMIT`] bytes.
async fn read_all(mut from: impl AsyncRead + Unpin, into: &mut Vec<u8>) {
    let mut buffer = vec![0; 16 << 10];
    // An error on a pipe counts as its end.
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        let room = SYNC_OUTPUT_LIMIT.saturating_sub(into.len());
        into.extend_from_slice(&buffer[..n.min(room)]);
    }
}
