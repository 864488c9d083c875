//! Commands of the administrator: JSON on stdin, text on stdout.
//!
//! In: a program with its arguments and a timeout. Out: its stdout, if it ends with status 0 in time.
//! Invariants: a command that is too slow is killed with its children; its output has at most [`OUTPUT`] bytes.
//! A command runs without a shell.

use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use crate::target::Target;

const OUTPUT: u64 = 64 << 10;
/// Addresses of one load balancer.
const ADDRESSES: usize = 16;
/// The part of a command's stderr that an Event has.
const SAID: usize = 300;

#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("failed to run {program}: {source}")]
    Run { program: String, source: std::io::Error },
    #[error("{program} did not end within {limit:?}")]
    Slow { program: String, limit: Duration },
    #[error("{program} failed: {status}{said}")]
    Failed { program: String, status: String, said: String },
    #[error("{program} printed {answer:?}, expected {expected}")]
    Answer { program: String, answer: String, expected: &'static str },
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Program {
    /// The program and its arguments.
    command: Vec<String>,
    #[serde(default = "half_a_minute", deserialize_with = "duration")]
    timeout: Duration,
}

fn half_a_minute() -> Duration {
    Duration::from_secs(30)
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    base::duration::parse(&text).map_err(serde::de::Error::custom)
}

impl Program {
    pub fn is_empty(&self) -> bool {
        self.command.first().is_none_or(String::is_empty)
    }

    fn name(&self) -> String {
        self.command.first().cloned().unwrap_or_default()
    }

    /// The error for an answer that is not of the expected form.
    pub fn wrong(&self, answer: &str, expected: &'static str) -> CommandError {
        let answer = answer.trim().chars().take(SAID).collect();
        CommandError::Answer { program: self.name(), answer, expected }
    }

    /// Runs the command; returns its stdout.
    pub async fn run(&self, question: &Value) -> Result<String, CommandError> {
        let failed = |source| CommandError::Run { program: self.name(), source };
        let mut command = Command::new(self.name());
        command
            .args(self.command.iter().skip(1))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let child = command.spawn().map_err(failed)?;
        let mut group = Group(child.id());
        let talked = tokio::time::timeout(self.timeout, talk(child, question.to_string())).await;
        let Ok(output) = talked else {
            return Err(CommandError::Slow { program: self.name(), limit: self.timeout });
        };
        // What an ended command has left running, runs on purpose.
        group.0 = None;
        let output = output.map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said: String = said.trim().chars().take(SAID).collect();
        let said = if said.is_empty() { said } else { format!(": {said}") };
        Err(CommandError::Failed { program: self.name(), status: output.status.to_string(), said })
    }
}

/// A process group, killed when this is dropped: also if the caller is dropped while it waits.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        let Some(id) = self.0.and_then(|id| i32::try_from(id).ok()) else { return };
        // A group that has ended already is no error.
        let _ = killpg(Pid::from_raw(id), Signal::SIGKILL);
    }
}

/// Writes the question, reads both streams, waits for the end.
async fn talk(mut child: Child, question: String) -> std::io::Result<Output> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A command may end without reading.
            let _ = stdin.write_all(question.as_bytes()).await;
        }
    };
    let ((), stdout, stderr) = tokio::join!(write, read(stdout), read(stderr));
    Ok(Output { status: child.wait().await?, stdout: stdout?, stderr: stderr? })
}

async fn read(stream: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![];
    if let Some(mut stream) = stream {
        (&mut stream).take(OUTPUT).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// What a command that makes load balancers gets.
pub fn question(operation: &str, cluster: &str, service: &Service, nodes: &[Arc<Target>]) -> Value {
    let (metadata, spec) = (&service.metadata, service.spec.clone().unwrap_or_default());
    let ports = spec.ports.iter().flatten().map(|port| {
        json!({
            "name": port.name.as_deref().unwrap_or_default(),
            "protocol": port.protocol.as_deref().unwrap_or("TCP"),
            "port": port.port,
            "nodePort": port.node_port,
        })
    });
    let nodes = nodes.iter().map(|node| {
        json!({"name": node.name, "providerID": node.provider_id, "addresses": node.addresses})
    });
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let present = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
    let present = present.iter().filter_map(|one| one.ip.as_ref().or(one.hostname.as_ref()));
    json!({
        "operation": operation,
        "cluster": cluster,
        "service": {
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
            "annotations": metadata.annotations.clone().unwrap_or_default(),
            "ports": ports.collect::<Vec<_>>(),
            "ipFamilies": spec.ip_families.unwrap_or_default(),
            "loadBalancerIP": spec.load_balancer_ip.unwrap_or_default(),
            "loadBalancerSourceRanges": spec.load_balancer_source_ranges.unwrap_or_default(),
            "externalTrafficPolicy": spec.external_traffic_policy.unwrap_or_default(),
            "healthCheckNodePort": spec.health_check_node_port.unwrap_or_default(),
            "addresses": present.collect::<Vec<_>>(),
        },
        "nodes": nodes.collect::<Vec<_>>(),
    })
}

/// The addresses in an answer, one on each line; `None`: a line is neither an IP address nor a host name.
pub fn addresses(answer: &str) -> Option<Vec<&str>> {
    let lines: Vec<&str> = answer.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let is_fine = lines.len() <= ADDRESSES && lines.iter().all(|line| is_address(line));
    is_fine.then_some(lines)
}

fn is_address(text: &str) -> bool {
    let is_label = |label: &str| {
        let is_fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        (1..=63).contains(&label.len())
            && label.chars().all(is_fine)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // Four numbers that are no address must not pass as a name.
    let is_name = text.len() <= 253
        && text.split('.').all(is_label)
        && text.chars().any(|c| c.is_ascii_lowercase());
    text.parse::<std::net::IpAddr>().is_ok() || is_name
}
