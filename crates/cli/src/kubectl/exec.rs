//! `kubectl exec`: runs a command in a container, over the WebSocket remote command protocol.
//!
//! The command's exit code becomes ours. With `-it`, the terminal is in raw mode during the command, and
//! its size follows the window. Upstream: `kubectl/pkg/cmd/exec`.

use std::os::fd::AsFd;

use base::percent;
use nix::sys::termios::{self, SetArg, Termios};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};
use transport::channels::{self, CLIENT_PROTOCOLS, ClientSession, Streams, TerminalSize};
use transport::ws::{self, HandshakeError};

use super::console::Console;
use super::pods;
use super::stdin::Stdin;
use crate::cluster::Cluster;
use crate::failure::{ApiStatus, Failure, Result, own};

/// The timeout of closing the connection.
const GOODBYE: std::time::Duration = std::time::Duration::from_secs(5);

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Exec {
    /// POD or TYPE/NAME
    pub target: String,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
    /// Container name
    #[arg(short = 'c', long)]
    pub container: Option<String>,
    /// Pass stdin to the container
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Stdin is a TTY
    #[arg(short = 't', long)]
    pub tty: bool,
    /// Only print output from the remote session
    #[arg(short = 'q', long)]
    pub quiet: bool,
}

impl Exec {
    pub async fn run(self, cluster: &Cluster, console: &Console) -> Result<()> {
        let found = pods::behind(cluster, &self.target).await?;
        let pod = found.first().ok_or_else(|| own("no pod found"))?;
        let phase = pod["status"]["phase"].as_str().unwrap_or_default();
        if matches!(phase, "Succeeded" | "Failed") {
            return Err(own(format!(
                "cannot exec into a container in a completed pod; current phase is {phase}"
            )));
        }
        let container = match &self.container {
            Some(name) => {
                pods::check_container(pod, name)?;
                name.clone()
            }
            None => pods::default_container(pod, console, self.quiet)?,
        };
        let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stdin());
        let tty = self.tty && self.stdin && is_terminal;
        if self.tty && !tty && !self.quiet {
            console.note("Unable to use a TTY - input is not a terminal or the right kind of file");
        }
        let streams = Streams { stdin: self.stdin, stdout: true, stderr: !tty, tty };
        let path = self.path(cluster, pods::name(pod), &container, streams);
        let (socket, protocol) =
            ws::connect(&cluster.http, &path, CLIENT_PROTOCOLS).await.map_err(refused)?;
        let (session, pump) = channels::client(socket, &protocol, streams);
        let raw = if tty { Some(RawTerminal::enter()?) } else { None };
        let outcome = drive(pump, talk(session, console)).await;
        drop(raw);
        finish(&outcome?)
    }

    fn path(&self, cluster: &Cluster, pod: &str, container: &str, streams: Streams) -> String {
        let mut path = format!(
            "{}/exec?container={}",
            pods::path(&cluster.namespace, pod),
            percent::encode(container)
        );
        for word in &self.command {
            path.push_str(&format!("&command={}", percent::encode(word)));
        }
        let Streams { stdin, stdout, stderr, tty } = streams;
        for (name, is_wanted) in
            [("stdin", stdin), ("stdout", stdout), ("stderr", stderr), ("tty", tty)]
        {
            if is_wanted {
                path.push_str(&format!("&{name}=true"));
            }
        }
        path
    }
}

/// Runs the session together with its pump. After the command's end the server closes the connection;
/// after a failure of ours (our output cannot be written) the connection is dropped.
async fn drive<T>(
    pump: impl Future<Output = std::io::Result<()>>,
    talk: impl Future<Output = Result<T>>,
) -> Result<T> {
    futures::pin_mut!(pump, talk);
    match futures::future::select(pump, talk).await {
        futures::future::Either::Left((_, talk)) => talk.await,
        futures::future::Either::Right((outcome, pump)) => {
            if outcome.is_ok() {
                let _ = tokio::time::timeout(GOODBYE, pump).await;
            }
            outcome
        }
    }
}

fn refused(error: HandshakeError) -> Failure {
    match error {
        HandshakeError::Refused(response) => {
            Failure::Status(Box::new(ApiStatus::of(response.status(), response.body())))
        }
        other => own(other.to_string()),
    }
}

/// Copies bytes between the session and our own streams until the command ends.
async fn talk(mut session: ClientSession, console: &Console) -> Result<Vec<u8>> {
    let (stdout, stderr) = (session.stdout.take(), session.stderr.take());
    let output = async {
        let out = copy(stdout, async |bytes| console.print(bytes));
        let err = copy(stderr, async |bytes| console.error(bytes));
        futures::future::try_join(out, err).await.map(drop)
    };
    let input = async {
        if let Some(mut pipe) = session.stdin.take() {
            let mut stdin = Stdin::open()?;
            while let Some(bytes) = stdin.next().await {
                if pipe.write_all(&bytes).await.is_err() {
                    break;
                }
            }
            // Dropping the pipe closes the command's input.
        }
        Ok::<_, Failure>(())
    };
    let resize = async {
        if let Some(sizes) = &session.resize {
            let mut changes = signal(SignalKind::window_change())?;
            while let Some(size) = terminal_size() {
                if sizes.send(size).await.is_err() || changes.recv().await.is_none() {
                    break;
                }
            }
        }
        Ok::<_, Failure>(())
    };
    let status = session.status;
    let end = async {
        let broke = |_| own("the connection broke before the command ended");
        let status = async { status.await.map_err(broke) };
        futures::future::try_join(status, output).await.map(|(status, ())| status)
    };
    let beside = futures::future::try_join(input, resize);
    futures::pin_mut!(end, beside);
    match futures::future::select(end, beside).await {
        futures::future::Either::Left((status, _)) => status,
        futures::future::Either::Right((Err(error), _)) => Err(error),
        futures::future::Either::Right((Ok(_), end)) => end.await,
    }
}

async fn copy(
    from: Option<impl AsyncRead + Unpin>,
    mut write: impl AsyncFnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let Some(mut from) = from else { return Ok(()) };
    let mut buffer = vec![0; 32 << 10];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return Ok(()),
            Ok(count) => write(&buffer[..count]).await?,
        }
    }
}

/// Converts the Status that ends a session: success, an exit code, or an error of the runtime.
fn finish(status: &[u8]) -> Result<()> {
    let value: Value = serde_json::from_slice(status).unwrap_or_default();
    if value["status"] == "Success" {
        return Ok(());
    }
    let causes = value["details"]["causes"].as_array().into_iter().flatten();
    let code = causes
        .filter(|cause| cause["reason"] == "ExitCode")
        .find_map(|cause| cause["message"].as_str()?.parse::<i64>().ok());
    if let Some(code) = code.filter(|_| value["reason"] == "NonZeroExitCode") {
        let text = format!("command terminated with exit code {code}");
        // The exit code of a process has eight bits.
        return Err(Failure::Exit((code & 0xff) as u8, text));
    }
    let message = value["message"].as_str().map(str::to_owned);
    Err(own(message.unwrap_or_else(|| String::from_utf8_lossy(status).into_owned())))
}

/// Restores the terminal when dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> Result<Self> {
        let failed = |errno: nix::Error| own(format!("failed to set up the terminal: {errno}"));
        let stdin = std::io::stdin();
        let before = termios::tcgetattr(&stdin).map_err(failed)?;
        let mut raw = before.clone();
        termios::cfmakeraw(&mut raw);
        termios::tcsetattr(&stdin, SetArg::TCSANOW, &raw).map_err(failed)?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A failure on a terminal that is gone does not matter.
        let _ = termios::tcsetattr(std::io::stdin(), SetArg::TCSADRAIN, &self.0);
    }
}

nix::ioctl_read_bad!(get_window_size, nix::libc::TIOCGWINSZ, nix::libc::winsize);

fn terminal_size() -> Option<TerminalSize> {
    use std::os::fd::AsRawFd;
    let mut size = nix::libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    let stdin = std::io::stdin();
    // SAFETY: the descriptor is open and the pointer is to a winsize that outlives the call.
    unsafe { get_window_size(stdin.as_fd().as_raw_fd(), &mut size) }.ok()?;
    Some(TerminalSize { width: size.ws_col, height: size.ws_row })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_commands_exit_code_is_ours() {
        let check = |status: Value, code: u8, lines: &[&str]| {
            let outcome = finish(status.to_string().as_bytes());
            match outcome {
                Ok(()) => assert_eq!(code, 0),
                Err(error) => {
                    assert_eq!(
                        (error.exit_code(), error.lines()),
                        (code, lines.iter().map(|l| (*l).to_owned()).collect())
                    );
                }
            }
        };
        check(json!({"status":"Success"}), 0, &[]);
        check(
            json!({"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}),
            7,
            &["command terminated with exit code 7"],
        );
        check(json!({"status":"Failure","message":"no such file"}), 1, &["error: no such file"]);
    }

    #[test]
    fn the_command_is_in_the_path() {
        let exec =
            Exec { command: vec!["sh".into(), "-c".into(), "a b".into()], ..Exec::default() };
        let cluster = super::super::tests::cluster("http://127.0.0.1:1");
        let streams = Streams { stdin: true, stdout: true, ..Streams::default() };
        assert_eq!(
            exec.path(&cluster, "p", "c", streams),
            "/api/v1/namespaces/default/pods/p/exec?container=c&command=sh&command=-c&command=a%20b&stdin=true&stdout=true"
        );
    }
}
