//! The backend's side of the shim's socket. The first exchange of each call is short and blocks a
//! blocking thread, because descriptors travel with it. Long waits are asynchronous.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

use super::namespaces::Order;
use super::protocol::{self, Answer, Call, ExecProcess, ExitRecord, Request, VERSION};
use super::{Report, SHIM_NAME, StartedRecord};

/// Starting a process in a busy container on a busy machine may take long.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
const START_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No shim answers on this socket.
    #[error("no shim: {0}")]
    Gone(io::Error),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Io(#[from] io::Error),
}

pub(crate) type Started = StartedRecord;

pub(crate) struct Client {
    socket: PathBuf,
}

/// Resolves when the container ends.
pub(crate) struct Wait(tokio::net::UnixStream);

/// A running exec. Dropping it closes the connection to the shim.
pub(crate) struct Executed {
    pub terminal: Option<OwnedFd>,
    connection: tokio::net::UnixStream,
}

pub(crate) struct Attached {
    pub stdin: Option<OwnedFd>,
    pub terminal: Option<OwnedFd>,
}

impl Client {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    pub(crate) async fn status(&self) -> Result<i32, Error> {
        let (answer, _, _) = self.call(Call::Status, Vec::new()).await?;
        Ok(answer.pid.unwrap_or(0))
    }

    pub(crate) async fn kill(&self, signal: i32, everything: bool) -> Result<(), Error> {
        self.call(Call::Kill { signal, everything }, Vec::new()).await.map(|_| ())
    }

    pub(crate) async fn reopen_log(&self) -> Result<(), Error> {
        self.call(Call::ReopenLog, Vec::new()).await.map(|_| ())
    }

    /// Returns when the shim has the request, so that a later exit is not missed.
    pub(crate) async fn wait(&self) -> Result<Wait, Error> {
        let socket = self.socket.clone();
        let connection = blocking(move || {
            let connection = connect(&socket)?;
            protocol::send(&connection, &Request { version: VERSION, call: Call::Wait }, &[])?;
            Ok(connection)
        })
        .await?;
        Ok(Wait(into_async(connection)?))
    }

    /// `streams`: the descriptors 0, 1 and 2 that `process` asks for.
    pub(crate) async fn exec(
        &self,
        process: ExecProcess,
        streams: Vec<OwnedFd>,
    ) -> Result<Executed, Error> {
        let (answer, fds, connection) = self.call(Call::Exec { process }, streams).await?;
        let terminal = take("terminal", &answer, fds);
        Ok(Executed { terminal, connection: into_async(connection)? })
    }

    pub(crate) async fn attach(
        &self,
        stdin: bool,
        stdout: Option<OwnedFd>,
        stderr: Option<OwnedFd>,
    ) -> Result<Attached, Error> {
        let call = Call::Attach { stdin, stdout: stdout.is_some(), stderr: stderr.is_some() };
        let fds = stdout.into_iter().chain(stderr).collect();
        let (answer, mut fds, _) = self.call(call, fds).await?;
        let mut attached = Attached { stdin: None, terminal: None };
        for name in answer.descriptors.iter().rev() {
            match name.as_str() {
                "stdin" => attached.stdin = fds.pop(),
                "terminal" => attached.terminal = fds.pop(),
                _ => drop(fds.pop()),
            }
        }
        Ok(attached)
    }

    async fn call(
        &self,
        call: Call,
        fds: Vec<OwnedFd>,
    ) -> Result<(Answer, Vec<OwnedFd>, UnixStream), Error> {
        let socket = self.socket.clone();
        let (answer, fds, connection) = blocking(move || {
            let connection = connect(&socket)?;
            let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
            let sent = protocol::send(&connection, &Request { version: VERSION, call }, &raw);
            sent.map_err(Error::Gone)?;
            // Only the process may hold them from here on.
            drop(fds);
            let (answer, fds) = protocol::receive::<Answer>(&connection).map_err(|error| {
                match error.kind() {
                    // The shim ended during the request.
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                        Error::Gone(error)
                    }
                    _ => Error::Io(error),
                }
            })?;
            Ok((answer, fds, connection))
        })
        .await?;
        match answer.error {
            Some(text) if answer.ended => Err(Error::Gone(io::Error::other(text))),
            Some(text) => Err(Error::Refused(text)),
            None => Ok((answer, fds, connection)),
        }
    }
}

impl Wait {
    /// `None` when the shim died without an answer.
    pub(crate) async fn exit(mut self) -> Option<ExitRecord> {
        read_answer(&mut self.0).await.ok()?.exit
    }
}

impl Executed {
    pub(crate) async fn exit_code(mut self) -> Result<i32, Error> {
        let answer = read_answer(&mut self.connection).await?;
        answer.code.ok_or_else(|| Error::Io(io::Error::other("the shim gave no exit code")))
    }
}

/// Starts a shim and waits for its report on the container.
pub(crate) async fn spawn_shim(
    executable: &Path,
    config: &Path,
    errors: std::fs::File,
) -> Result<Started, Error> {
    let mut child = Command::new(executable)
        .arg0(SHIM_NAME)
        .arg("container")
        .arg(config)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()?;
    let stdout =
        child.stdout.take().ok_or_else(|| io::Error::other("the shim has no standard output"))?;
    let mut line = String::new();
    let mut reader = BufReader::new(stdout);
    let read = tokio::time::timeout(START_TIMEOUT, reader.read_line(&mut line)).await;
    // The child is not awaited here: it outlives this process, or tokio reaps it.
    match read {
        Err(_) => {
            // The shim made no progress for minutes; nothing would own its container.
            let _ = child.start_kill();
            Err(Error::Io(io::Error::new(
                io::ErrorKind::TimedOut,
                "the shim did not report the container's start in time",
            )))
        }
        Ok(Err(error)) => Err(error.into()),
        Ok(Ok(_)) => {
            let report: Report = serde_json::from_str(&line).map_err(|_| {
                io::Error::other("the shim died before it reported the container's start")
            })?;
            match (report.started, report.error) {
                (Some(started), None) => Ok(started),
                (_, error) => {
                    // Reaped at once: a caller that starts many must not collect zombies.
                    let _ = child.wait().await;
                    Err(Error::Refused(error.unwrap_or_else(|| "unknown error".into())))
                }
            }
        }
    }
}

/// Creates namespaces in a separate process. `users` gets its pid when its user namespace awaits the id maps.
/// `made` gets the pid and the init's pid (0 without an init) when the namespaces can be pinned.
pub(crate) async fn make_namespaces(
    executable: &Path,
    order: &Order,
    users: impl Fn(u32) -> io::Result<()>,
    made: impl Fn(u32, i32) -> io::Result<()>,
) -> io::Result<()> {
    let mut child = Command::new(executable)
        .arg0(SHIM_NAME)
        .arg("namespaces")
        .arg(serde_json::to_string(order)?)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let ended = || io::Error::other("the process that creates the namespaces died");
    let pid = child.id().ok_or_else(ended)?;
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(ended());
    };
    let mut lines = BufReader::new(output).lines();
    let talk = async {
        while let Some(line) = lines.next_line().await? {
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("users", _) => users(pid)?,
                ("made", init) => made(pid, init.parse().unwrap_or(0))?,
                ("error", text) => return Err(io::Error::other(text.to_owned())),
                _ => return Err(ended()),
            }
            input.write_all(b"\n").await?;
            if line.starts_with("made") {
                return Ok(());
            }
        }
        Err(ended())
    };
    tokio::time::timeout(START_TIMEOUT, talk).await??;
    // Reaped at once: a caller that starts many must not collect zombies.
    child.wait().await.map(|_| ())
}

fn connect(socket: &Path) -> Result<UnixStream, Error> {
    let connection = UnixStream::connect(socket).map_err(Error::Gone)?;
    connection.set_read_timeout(Some(CALL_TIMEOUT))?;
    connection.set_write_timeout(Some(CALL_TIMEOUT))?;
    Ok(connection)
}

fn into_async(connection: UnixStream) -> io::Result<tokio::net::UnixStream> {
    connection.set_nonblocking(true)?;
    tokio::net::UnixStream::from_std(connection)
}

async fn read_answer(connection: &mut tokio::net::UnixStream) -> io::Result<Answer> {
    let length = connection.read_u32().await?;
    let mut body = vec![0; length.min(1 << 20) as usize];
    connection.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}

fn take(name: &str, answer: &Answer, fds: Vec<OwnedFd>) -> Option<OwnedFd> {
    let at = answer.descriptors.iter().position(|n| n == name)?;
    fds.into_iter().nth(at)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(Error::Io(io::Error::other("a blocking task panicked"))))
}
