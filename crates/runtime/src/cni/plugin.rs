//! Runs one plugin.
//!
//! In: a command, its environment, and the network's configuration on stdin. Out: what the plugin printed, or its
//! error. A plugin is a foreign program: its time and its output have limits, and when the time is over, its process
//! group is killed.
//! Upstream: `pkg/invoke` of libcni, whose texts users search for.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

/// The limit of each output.
const LARGEST: u64 = 1 << 20;
/// The part of an output that an error shows, in bytes.
const SHOWN: usize = 512;
/// A program that is being written cannot run; the writer gets this time.
const BUSY_RETRY: Duration = Duration::from_secs(1);
const BUSY_RETRIES: u32 = 5;

/// One call, without the configuration.
#[derive(Clone, Debug, Default)]
pub(super) struct Call<'a> {
    pub command: &'static str,
    pub container: &'a str,
    pub netns: &'a str,
    pub interface: &'a str,
    pub args: &'a str,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginError {
    #[error("invalid plugin name: {0}")]
    Name(String),
    #[error("failed to find plugin {0:?} in path [{1}]")]
    NotFound(String, String),
    #[error("netplugin failed with no error message: fork/exec {}: {source}", .path.display())]
    Start { path: PathBuf, source: io::Error },
    /// The plugin's own error.
    #[error("{msg}{}", if .details.is_empty() { String::new() } else { format!("; {}", .details) })]
    Told { code: u32, msg: String, details: String },
    #[error("netplugin failed with no error message: {0}")]
    Silent(String),
    #[error("netplugin failed: {0:?}")]
    Stderr(String),
    #[error("netplugin failed but error parsing its diagnostic message {0:?}: {1}")]
    Rubbish(String, serde_json::Error),
    #[error("the plugin did not answer within {0:?} and was killed")]
    Hung(Duration),
    #[error("the plugin printed more than {LARGEST} bytes")]
    TooMuch,
    #[error("talk to the plugin: {0}")]
    Talk(io::Error),
}

#[derive(Deserialize)]
struct Diagnosis {
    #[serde(default)]
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

/// The plugin's program: the first regular file of that name.
pub(super) fn find(kind: &str, directories: &[PathBuf]) -> Result<PathBuf, PluginError> {
    if kind.contains('/') || matches!(kind, "." | "..") {
        return Err(PluginError::Name(kind.to_owned()));
    }
    let all = directories.iter().map(|directory| directory.join(kind));
    all.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        let shown: Vec<String> = directories.iter().map(|one| one.display().to_string()).collect();
        PluginError::NotFound(kind.to_owned(), shown.join(" "))
    })
}

/// Runs the plugin to its end and returns what it printed.
pub(super) async fn run(
    kind: &str,
    directories: &[PathBuf],
    call: &Call<'_>,
    conf: &[u8],
    limit: Duration,
) -> Result<Vec<u8>, PluginError> {
    let path = find(kind, directories)?;
    let mut child = start(&path, directories, call).await?;
    let group = child.id();
    let done = tokio::time::timeout(limit, talk(&mut child, conf)).await;
    let error = match done {
        Ok(Ok((status, stdout, stderr))) => return judge(status, stdout, &stderr),
        Ok(Err(error)) => error,
        Err(_) => PluginError::Hung(limit),
    };
    kill(group);
    // Reaps the plugin: it was killed, and ends now.
    let _ = child.wait().await;
    Err(error)
}

async fn start(
    path: &Path,
    directories: &[PathBuf],
    call: &Call<'_>,
) -> Result<Child, PluginError> {
    let mut command = Command::new(path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.kill_on_drop(true).process_group(0);
    // Our own settings may be secrets.
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_ours(name)) {
        command.env_remove(name);
    }
    command.env("CNI_COMMAND", call.command);
    command.env("CNI_CONTAINERID", call.container);
    command.env("CNI_NETNS", call.netns);
    command.env("CNI_IFNAME", call.interface);
    command.env("CNI_ARGS", call.args);
    let shown: Vec<String> = directories.iter().map(|one| one.display().to_string()).collect();
    command.env("CNI_PATH", shown.join(":"));
    let mut retries = 0;
    loop {
        match command.spawn() {
            Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) && retries < BUSY_RETRIES => {
                retries += 1;
                tokio::time::sleep(BUSY_RETRY).await;
            }
            Ok(child) => return Ok(child),
            Err(source) => return Err(PluginError::Start { path: path.to_owned(), source }),
        }
    }
}

fn is_ours(name: &std::ffi::OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with("DECAPOD_"))
}

type Answer = (ExitStatus, Vec<u8>, Vec<u8>);

/// Writes, reads and waits side by side: a plugin may print before it has read everything.
async fn talk(child: &mut Child, conf: &[u8]) -> Result<Answer, PluginError> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let write = async {
        let Some(mut stdin) = stdin else { return };
        // A plugin may end without reading; its status says more than a broken pipe.
        let _ = stdin.write_all(conf).await;
        let _ = stdin.shutdown().await;
    };
    let wait = async { child.wait().await.map_err(PluginError::Talk) };
    let read = async { tokio::try_join!(all_of(stdout), all_of(stderr), wait) };
    let (_, read) = tokio::join!(write, read);
    let (stdout, stderr, status) = read?;
    Ok((status, stdout, stderr))
}

async fn all_of(output: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, PluginError> {
    let mut bytes = vec![];
    if let Some(output) = output {
        let mut limited = output.take(LARGEST + 1);
        limited.read_to_end(&mut bytes).await.map_err(PluginError::Talk)?;
    }
    if bytes.len() as u64 > LARGEST { Err(PluginError::TooMuch) } else { Ok(bytes) }
}

fn kill(group: Option<u32>) {
    let Some(group) = group.and_then(|id| i32::try_from(id).ok()).filter(|id| *id > 1) else {
        return;
    };
    // SAFETY: a plain system call. Some process of the group still holds an output open, so the group's id is not
    // used again.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

fn judge(status: ExitStatus, stdout: Vec<u8>, stderr: &[u8]) -> Result<Vec<u8>, PluginError> {
    if status.success() {
        return Ok(stdout);
    }
    if stdout.is_empty() {
        return Err(match stderr.is_empty() {
            true => PluginError::Silent(ended(status)),
            false => PluginError::Stderr(shown(stderr)),
        });
    }
    match serde_json::from_slice::<Diagnosis>(&stdout) {
        Ok(Diagnosis { code, msg, details }) => Err(PluginError::Told { code, msg, details }),
        Err(error) => Err(PluginError::Rubbish(shown(&stdout), error)),
    }
}

/// The end of a process in Go's words.
fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(libc::SIGKILL)) => "signal: killed".into(),
        (None, Some(libc::SIGSEGV)) => "signal: segmentation fault".into(),
        (None, Some(libc::SIGABRT)) => "signal: aborted".into(),
        (None, Some(libc::SIGTERM)) => "signal: terminated".into(),
        (None, Some(signal)) => format!("signal: signal {signal}"),
        (None, None) => status.to_string(),
    }
}

pub(super) fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut end = text.len().min(SHOWN);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
