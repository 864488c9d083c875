//! Reads the runtime's state as [`Observed`].
//!
//! In: the runtime, a pod's uid. Out: the pod's sandboxes and containers, found by the kubelet's labels.
//! Exited containers get their termination messages.
//! Upstream: `kuberuntime_manager.go` GetPodStatus, getPodContainerStatuses.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use cri::{
    ContainerFilter, ContainerState, ContainerStatus, NamespaceMode, PodSandboxFilter,
    PodSandboxState, PodSandboxStatus, Runtime,
};
use jiff::Timestamp;
use nix::fcntl::OFlag;

use crate::names;
use crate::pod::observed::{Observed, ObservedContainer, ObservedSandbox, State};

/// Upstream: the limits of the message file and of the fallback from the log.
const MESSAGE_BYTES: u64 = 4096;
const FALLBACK_BYTES: u64 = 2048;
const FALLBACK_LINES: usize = 80;

fn by_uid(uid: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(names::POD_UID.to_string(), uid.to_string())])
}

/// The state of one pod.
pub async fn observe(runtime: &dyn Runtime, uid: &str) -> cri::Result<Observed> {
    let mut out = Observed::default();
    let filter = PodSandboxFilter { label_selector: by_uid(uid), ..PodSandboxFilter::default() };
    for sandbox in runtime.list_pod_sandbox(Some(filter)).await? {
        match runtime.pod_sandbox_status(&sandbox.id).await {
            Ok(status) => out.sandboxes.push(sandbox_of(&status)),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let filter = ContainerFilter { label_selector: by_uid(uid), ..ContainerFilter::default() };
    for container in runtime.list_containers(Some(filter)).await? {
        match runtime.container_status(&container.id).await {
            Ok(status) => out.containers.push(container_of(&container.pod_sandbox_id, status)),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    out.sort();
    Ok(out)
}

fn time(nanoseconds: i64) -> Option<Timestamp> {
    (nanoseconds > 0).then(|| Timestamp::from_nanosecond(i128::from(nanoseconds)).ok()).flatten()
}

fn sandbox_of(status: &PodSandboxStatus) -> ObservedSandbox {
    let options = status.linux.as_ref().and_then(|l| l.namespaces.as_ref()?.options.as_ref());
    let mut ips: Vec<IpAddr> = vec![];
    if let Some(network) = &status.network {
        let more = network.additional_ips.iter().map(|ip| ip.ip.as_str());
        ips.extend(
            std::iter::once(network.ip.as_str())
                .chain(more)
                .filter_map(|ip| ip.parse::<IpAddr>().ok()),
        );
    }
    ObservedSandbox {
        id: status.id.clone(),
        attempt: status.metadata.as_ref().map_or(0, |m| m.attempt),
        ready: status.state() == PodSandboxState::Ready,
        host_network: options.map(|o| o.network() == NamespaceMode::Node),
        created_at: time(status.created_at),
        ips,
    }
}

fn container_of(sandbox_id: &str, status: ContainerStatus) -> ObservedContainer {
    let state = match status.state() {
        ContainerState::Created => State::Created,
        ContainerState::Running => State::Running,
        ContainerState::Exited => State::Exited,
        ContainerState::Unknown => State::Unknown,
    };
    let stop_signal = status.stop_signal().name();
    let annotation = |key: &str| status.annotations.get(key).map(String::as_str);
    let mut message = status.message.clone();
    if state == State::Exited
        && let Some(own) = termination_message(&status)
    {
        message = if message.is_empty() { own } else { format!("{message}: {own}") };
    }
    let (name, attempt) =
        status.metadata.as_ref().map(|m| (m.name.clone(), m.attempt)).unwrap_or_default();
    let image = status.image.as_ref();
    let shown = image.map(|spec| match spec.user_specified_image.as_str() {
        "" => spec.image.clone(),
        named => named.to_string(),
    });
    ObservedContainer {
        attempt: annotation(names::RESTART_COUNT).and_then(|n| n.parse().ok()).unwrap_or(attempt),
        hash: annotation(names::CONTAINER_HASH).unwrap_or_default().to_string(),
        grace_period: annotation(names::GRACE_PERIOD).and_then(|n| n.parse().ok()),
        id: status.id,
        name,
        sandbox_id: sandbox_id.to_string(),
        state,
        created_at: time(status.created_at),
        started_at: time(status.started_at),
        finished_at: time(status.finished_at),
        exit_code: status.exit_code,
        reason: status.reason,
        message,
        image: shown.unwrap_or_default(),
        image_id: status.image_ref,
        log_path: status.log_path,
        stop_signal,
        resources: status.resources.and_then(|all| all.linux),
        user: status
            .user
            .and_then(|u| u.linux)
            .map(|user| (user.uid, user.gid, user.supplemental_groups)),
    }
}

/// The container's termination message, or the log's tail if the policy asks for it.
fn termination_message(status: &ContainerStatus) -> Option<String> {
    let path = status.annotations.get(names::TERMINATION_PATH)?;
    let mount = status.mounts.iter().find(|mount| mount.container_path == *path);
    if let Some(text) = mount.and_then(|m| head(Path::new(&m.host_path), MESSAGE_BYTES))
        && !text.is_empty()
    {
        return Some(text);
    }
    let fallback = status.annotations.get(names::TERMINATION_POLICY)?;
    if fallback == "FallbackToLogsOnError" && status.exit_code != 0 {
        return log_tail(&PathBuf::from(&status.log_path));
    }
    None
}

fn head(path: &Path, limit: u64) -> Option<String> {
    let mut bytes = vec![];
    open(path)?.take(limit).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Opens a file that a pod may have created, without blocking: opening a FIFO would wait for its writer.
fn open(path: &Path) -> Option<File> {
    let flags = (OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// The last lines of a CRI log, without timestamps.
fn log_tail(path: &Path) -> Option<String> {
    let mut file = open(path)?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(16 << 10))).ok()?;
    let mut bytes = vec![];
    file.take(16 << 10).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let entry = |line| {
        let mut fields = str::splitn(line, 4, ' ').skip(2);
        Some((fields.next()?, fields.next()?))
    };
    let lines: Vec<(&str, &str)> = text.lines().filter_map(entry).collect();
    let mut out = String::new();
    for (tag, line) in &lines[lines.len().saturating_sub(FALLBACK_LINES)..] {
        out.push_str(line);
        // A partial entry has no newline of its own.
        if tag.split(':').next() != Some("P") {
            out.push('\n');
        }
    }
    let cut = out.len().saturating_sub(FALLBACK_BYTES as usize);
    let cut = (cut..out.len()).find(|at| out.is_char_boundary(*at)).unwrap_or(cut);
    Some(out[cut..].to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_from_the_file_or_the_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, log) = (dir.path().join("t"), dir.path().join("l"));
        std::fs::write(
            &log,
            "2026-01-01T00:00:00Z stdout F one\n2026-01-01T00:00:01Z stderr F two\n",
        )
        .expect("written");
        let check = |written: &str, policy: &str, exit_code: i32, expected: Option<&str>| {
            std::fs::write(&file, written).expect("written");
            let annotations =
                [(names::TERMINATION_PATH, "/dev/t"), (names::TERMINATION_POLICY, policy)];
            let status = ContainerStatus {
                exit_code,
                log_path: log.display().to_string(),
                annotations: annotations.map(|(k, v)| (k.to_string(), v.to_string())).into(),
                mounts: vec![cri::Mount {
                    container_path: "/dev/t".into(),
                    host_path: file.display().to_string(),
                    ..cri::Mount::default()
                }],
                ..ContainerStatus::default()
            };
            assert_eq!(termination_message(&status).as_deref(), expected);
        };
        check("bye", "File", 0, Some("bye"));
        check("", "File", 1, None);
        check("", "FallbackToLogsOnError", 0, None);
        check("", "FallbackToLogsOnError", 1, Some("one\ntwo\n"));
        check("own", "FallbackToLogsOnError", 1, Some("own"));
        std::fs::write(&log, "2026-01-01T00:00:00Z stdout P DONE\n").expect("written");
        check("", "FallbackToLogsOnError", 1, Some("DONE"));
    }

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = |name: &str| directory.path().join(name);
        std::fs::write(place("file"), "bye").expect("written");
        std::os::unix::fs::symlink(place("file"), place("link")).expect("made");
        nix::unistd::mkfifo(&place("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("made");
        assert_eq!(head(&place("file"), 2).as_deref(), Some("by"));
        for name in ["link", "fifo", "", "none"] {
            assert_eq!(head(&place(name), 2), None, "{name}");
        }
    }
}
