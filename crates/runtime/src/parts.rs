//! The server's own components, shown as containers: they run in this process, and their pods have no process
//! of their own.
//!
//! ```text
//!  kubelet ─► WithParts ─┬─ pod of a component: sandbox and container in memory, its log a file
//!                        └─ every other pod ─► the node's runtime
//! ```
//!
//! In: the node's runtime, the components, the lines of this process' log. Out: a runtime for the kubelet,
//! which treats such pods as all static pods: workers, statuses, mirrors, logs.
//!
//! Invariants: nothing is executed for these containers. A command gets an answer that this process makes as
//! text, or is refused; attach and port-forward are refused. So who may exec into a pod of kube-system gets
//! no process on this machine. Only the pod uids that the server chose are such pods: the API chooses the
//! uids of all others.
//!
//! Cost: a table of four rows; a line of the log is one append to a file.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use cri::*;
use jiff::Timestamp;
use tokio::sync::{Notify, oneshot};

/// The kubelet's label with a pod's uid.
const POD_UID: &str = "io.kubernetes.pod.uid";
/// So many lines wait for the log file of a container that has not started.
const WAITING: usize = 1000;

/// A component of this process.
#[derive(Clone)]
pub struct Part {
    /// Its container, and the program that its commands name.
    pub name: &'static str,
    /// 32 hexadecimal digits.
    pub pod_uid: String,
    /// The image that its pod names. No store has it.
    pub image: String,
    /// The crates whose log lines are its own. The first part gets the lines that are no other's.
    pub crates: &'static [&'static str],
    /// The output of a command, without the program's name; `None`: the command is refused.
    pub answer: fn(&str, &[&str]) -> Option<String>,
}

/// A line of the process' log, without colours and without its newline.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub at: Timestamp,
    /// The module that wrote it.
    pub target: String,
    pub text: String,
}

/// The log of this process, for one reader.
#[async_trait]
pub trait Lines: Send + Sync {
    /// Waits for lines and takes them all.
    async fn take(&self) -> Vec<Line>;
}

/// A runtime that also has the containers of this process' components.
pub struct WithParts {
    inner: Arc<dyn Runtime>,
    own: Arc<Own>,
}

struct Own {
    parts: Vec<Part>,
    /// Guards the tables; held for single changes and look-ups.
    world: Mutex<World>,
    /// Notified when a container starts: its log file is known.
    started: Notify,
}

#[derive(Default)]
struct World {
    next: u64,
    sandboxes: BTreeMap<String, PodSandboxStatus>,
    containers: BTreeMap<String, Held>,
}

struct Held {
    status: ContainerStatus,
    sandbox: String,
    part: usize,
}

impl WithParts {
    /// Begins to write the process' log to the containers' files, as a task of `tasks`.
    pub fn new(
        inner: Arc<dyn Runtime>,
        parts: Vec<Part>,
        lines: Arc<dyn Lines>,
        tasks: &Tasks,
    ) -> Self {
        let own = Own { parts, world: Mutex::default(), started: Notify::new() };
        let own = Arc::new(own);
        tasks.spawn("logs of components", write_logs(own.clone(), lines));
        Self { inner, own }
    }
}

impl Own {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("no panic while the world is held")
    }

    fn part_of_pod(&self, uid: &str) -> Option<usize> {
        self.parts.iter().position(|part| part.pod_uid == uid)
    }

    fn has_sandbox(&self, id: &str) -> bool {
        self.world().sandboxes.contains_key(id)
    }

    fn has_container(&self, id: &str) -> bool {
        self.world().containers.contains_key(id)
    }

    /// Whether a list with this selector is about a pod of a component alone.
    fn is_own(&self, selector: &BTreeMap<String, String>) -> bool {
        selector.get(POD_UID).is_some_and(|uid| self.part_of_pod(uid).is_some())
    }

    fn has_image(&self, image: &ImageSpec) -> Option<Image> {
        let part = self.parts.iter().find(|part| part.image == image.image)?;
        Some(Image {
            id: part.image.clone(),
            repo_tags: vec![part.image.clone()],
            spec: Some(ImageSpec::named(part.image.clone())),
            pinned: true,
            ..Image::default()
        })
    }

    /// The output of a command in a container; `None`: the container is not ours.
    fn answer(&self, id: &str, command: &[String]) -> Option<Result<String>> {
        let world = self.world();
        let held = world.containers.get(id)?;
        if held.status.state() != ContainerState::Running {
            return Some(Err(Error::FailedPrecondition(format!("container {id} is not running"))));
        }
        let part = &self.parts[held.part];
        drop(world);
        let program = command.first().map(|path| path.rsplit('/').next().unwrap_or_default());
        let words: Vec<&str> = command.iter().skip(1).map(String::as_str).collect();
        let output = program
            .filter(|program| *program == part.name)
            .and_then(|_| (part.answer)(part.name, &words));
        Some(output.ok_or_else(|| {
            let (name, command) = (part.name, command.join(" "));
            Error::PermissionDenied(format!(
                "cannot run {command:?}: {name} is a part of the process decapod server and has no container; \
                 only \"{name} --help\" and \"{name} --version\" are answered"
            ))
        }))
    }

    fn refused(&self, what: &str) -> Error {
        Error::PermissionDenied(format!(
            "{what} is not possible: the component is a part of the process decapod server and has no container"
        ))
    }
}

impl World {
    /// 64 hexadecimal digits, as other runtimes have.
    fn new_id(&mut self, uid: &str) -> String {
        self.next += 1;
        format!("{uid}{:032x}", self.next)
    }

    fn end(&mut self, id: &str) {
        if let Some(held) = self.containers.get_mut(id)
            && held.status.state() == ContainerState::Running
        {
            held.status.set_state(ContainerState::Exited);
            held.status.reason = "Completed".into();
            held.status.finished_at = now();
        }
    }

    fn end_of_sandbox(&mut self, sandbox: &str) {
        let inside = self.containers.iter().filter(|(_, held)| held.sandbox == sandbox);
        let ids: Vec<String> = inside.map(|(id, _)| id.clone()).collect();
        ids.iter().for_each(|id| self.end(id));
    }

    fn list_sandboxes(&self, filter: &PodSandboxFilter) -> Vec<PodSandbox> {
        let fits = |status: &&PodSandboxStatus| {
            (filter.id.is_empty() || filter.id == status.id)
                && filter.state.as_ref().is_none_or(|wanted| wanted.state == status.state)
                && selects(&filter.label_selector, &status.labels)
        };
        let all = self.sandboxes.values().filter(fits).cloned();
        all.map(|status| PodSandbox {
            id: status.id,
            metadata: status.metadata,
            state: status.state,
            created_at: status.created_at,
            labels: status.labels,
            annotations: status.annotations,
            runtime_handler: status.runtime_handler,
        })
        .collect()
    }

    fn list_containers(&self, filter: &ContainerFilter) -> Vec<Container> {
        let fits = |held: &&Held| {
            let status = &held.status;
            (filter.id.is_empty() || filter.id == status.id)
                && (filter.pod_sandbox_id.is_empty() || filter.pod_sandbox_id == held.sandbox)
                && filter.state.as_ref().is_none_or(|wanted| wanted.state == status.state)
                && selects(&filter.label_selector, &status.labels)
        };
        let shown = |held: &Held| {
            let status = held.status.clone();
            Container {
                id: status.id,
                pod_sandbox_id: held.sandbox.clone(),
                metadata: status.metadata,
                image: status.image,
                image_id: status.image_ref.clone(),
                image_ref: status.image_ref,
                state: status.state,
                created_at: status.created_at,
                labels: status.labels,
                annotations: status.annotations,
            }
        };
        self.containers.values().filter(fits).map(shown).collect()
    }
}

fn now() -> i64 {
    i64::try_from(base::clock::now().as_nanosecond()).unwrap_or(i64::MAX)
}

fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(name, value)| labels.get(name) == Some(value))
}

/// Writes the process' log to the files of the containers, each line to its component's. Never returns.
async fn write_logs(own: Arc<Own>, lines: Arc<dyn Lines>) {
    let mut waiting: Vec<Vec<Line>> = own.parts.iter().map(|_| vec![]).collect();
    loop {
        tokio::select! {
            lines = lines.take() => {
                for line in lines {
                    waiting[part_of_line(&own.parts, &line.target)].push(line);
                }
            }
            () = own.started.notified() => {}
        }
        for (part, lines) in waiting.iter_mut().enumerate() {
            match log_of(&own, part) {
                Some(path) => append(&path, &std::mem::take(lines)).await,
                None => drop(lines.drain(..lines.len().saturating_sub(WAITING))),
            }
        }
    }
}

/// `decapod_scheduler::queue` is a module of the crate `decapod_scheduler`.
fn part_of_line(parts: &[Part], target: &str) -> usize {
    let name = target.split("::").next().unwrap_or_default();
    parts.iter().position(|part| part.crates.contains(&name)).unwrap_or(0)
}

fn log_of(own: &Own, part: usize) -> Option<PathBuf> {
    let world = own.world();
    let held = world
        .containers
        .values()
        .find(|held| held.part == part && held.status.state() == ContainerState::Running)?;
    Some(held.status.log_path.clone().into())
}

/// Appends lines in the format of CRI. The file is opened each time: the kubelet may have renamed it.
async fn append(path: &Path, lines: &[Line]) {
    let mut text = String::new();
    for Line { at, text: line, .. } in lines {
        for line in line.lines() {
            text.push_str(&format!("{at:.9} stderr F {line}\n"));
        }
    }
    let path = path.to_owned();
    // A line that cannot be written is on standard error: a warning about it would be the next such line.
    let _ = tokio::task::spawn_blocking(move || {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        file.write_all(text.as_bytes())
    })
    .await;
}

#[async_trait]
impl RuntimeService for WithParts {
    async fn version(&self) -> Result<VersionResponse> {
        self.inner.version().await
    }

    async fn status(&self, verbose: bool) -> Result<StatusResponse> {
        self.inner.status(verbose).await
    }

    async fn runtime_config(&self) -> Result<LinuxRuntimeConfiguration> {
        self.inner.runtime_config().await
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> Result<()> {
        self.inner.update_runtime_config(pod_cidr).await
    }

    async fn run_pod_sandbox(&self, config: PodSandboxConfig, handler: &str) -> Result<String> {
        let uid = config.metadata.as_ref().map(|data| data.uid.clone()).unwrap_or_default();
        if self.own.part_of_pod(&uid).is_none() {
            return self.inner.run_pod_sandbox(config, handler).await;
        }
        let mut world = self.own.world();
        let id = world.new_id(&uid);
        let options =
            NamespaceOption { network: NamespaceMode::Node as i32, ..NamespaceOption::default() };
        let status = PodSandboxStatus {
            id: id.clone(),
            metadata: config.metadata,
            state: PodSandboxState::Ready as i32,
            created_at: now(),
            linux: Some(LinuxPodSandboxStatus {
                namespaces: Some(Namespace { options: Some(options) }),
            }),
            labels: config.labels,
            annotations: config.annotations,
            ..PodSandboxStatus::default()
        };
        world.sandboxes.insert(id.clone(), status);
        Ok(id)
    }

    async fn stop_pod_sandbox(&self, id: &str) -> Result<()> {
        if !self.own.has_sandbox(id) {
            return self.inner.stop_pod_sandbox(id).await;
        }
        let mut world = self.own.world();
        world.end_of_sandbox(id);
        if let Some(status) = world.sandboxes.get_mut(id) {
            status.set_state(PodSandboxState::NotReady);
        }
        Ok(())
    }

    async fn remove_pod_sandbox(&self, id: &str) -> Result<()> {
        if !self.own.has_sandbox(id) {
            return self.inner.remove_pod_sandbox(id).await;
        }
        let mut world = self.own.world();
        world.sandboxes.remove(id);
        world.containers.retain(|_, held| held.sandbox != id);
        Ok(())
    }

    async fn pod_sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        let known = self.own.world().sandboxes.get(id).cloned();
        match known {
            Some(status) => Ok(status),
            None => self.inner.pod_sandbox_status(id).await,
        }
    }

    async fn list_pod_sandbox(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>> {
        let wanted = filter.clone().unwrap_or_default();
        let mut all = self.own.world().list_sandboxes(&wanted);
        if !self.own.is_own(&wanted.label_selector) {
            all.extend(self.inner.list_pod_sandbox(filter).await?);
        }
        Ok(all)
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let uid = sandbox_config.metadata.as_ref().map(|data| data.uid.clone()).unwrap_or_default();
        let part = self.own.part_of_pod(&uid).filter(|_| self.own.has_sandbox(sandbox_id));
        let Some(part) = part else {
            return self.inner.create_container(sandbox_id, config, sandbox_config).await;
        };
        let mut world = self.own.world();
        let id = world.new_id(&uid);
        let log = Path::new(&sandbox_config.log_directory).join(&config.log_path);
        let status = ContainerStatus {
            id: id.clone(),
            metadata: config.metadata,
            state: ContainerState::Created as i32,
            created_at: now(),
            image: config.image,
            image_ref: self.own.parts[part].image.clone(),
            labels: config.labels,
            annotations: config.annotations,
            log_path: log.display().to_string(),
            ..ContainerStatus::default()
        };
        world.containers.insert(id.clone(), Held { status, sandbox: sandbox_id.to_owned(), part });
        Ok(id)
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        if !self.own.has_container(id) {
            return self.inner.start_container(id).await;
        }
        if let Some(held) = self.own.world().containers.get_mut(id) {
            held.status.set_state(ContainerState::Running);
            held.status.started_at = now();
        }
        self.own.started.notify_one();
        Ok(())
    }

    async fn stop_container(&self, id: &str, timeout: Duration) -> Result<()> {
        if !self.own.has_container(id) {
            return self.inner.stop_container(id, timeout).await;
        }
        self.own.world().end(id);
        Ok(())
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        if !self.own.has_container(id) {
            return self.inner.remove_container(id).await;
        }
        self.own.world().containers.remove(id);
        Ok(())
    }

    async fn list_containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>> {
        let wanted = filter.clone().unwrap_or_default();
        let mut all = self.own.world().list_containers(&wanted);
        if !self.own.is_own(&wanted.label_selector) {
            all.extend(self.inner.list_containers(filter).await?);
        }
        Ok(all)
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        let known = self.own.world().containers.get(id).map(|held| held.status.clone());
        match known {
            Some(status) => Ok(status),
            None => self.inner.container_status(id).await,
        }
    }

    async fn update_container_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()> {
        match self.own.has_container(id) {
            true => Ok(()),
            false => self.inner.update_container_resources(id, resources).await,
        }
    }

    async fn reopen_container_log(&self, id: &str) -> Result<()> {
        match self.own.has_container(id) {
            true => Ok(()),
            false => self.inner.reopen_container_log(id).await,
        }
    }

    async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse> {
        match self.own.answer(id, &command) {
            Some(answer) => {
                Ok(ExecSyncResponse { stdout: answer?.into(), ..ExecSyncResponse::default() })
            }
            None => self.inner.exec_sync(id, command, timeout).await,
        }
    }

    async fn exec(&self, request: ExecRequest) -> Result<ExecStreams> {
        let Some(answer) = self.own.answer(&request.container_id, &request.cmd) else {
            return self.inner.exec(request).await;
        };
        let text = answer?;
        // A terminal's newline only moves down.
        let text = if request.tty { text.replace('\n', "\r\n") } else { text };
        let (tell, exit) = oneshot::channel();
        // The receiver is returned below.
        let _ = tell.send(Ok(0));
        Ok(ExecStreams {
            stdin: request.stdin.then(|| Box::new(tokio::io::sink()) as Input),
            stdout: request.stdout.then(|| Box::new(Cursor::new(text.into_bytes())) as Output),
            stderr: request.stderr.then(|| Box::new(tokio::io::empty()) as Output),
            resize: None,
            exit,
        })
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachStreams> {
        match self.own.has_container(&request.container_id) {
            true => Err(self.own.refused("attach")),
            false => self.inner.attach(request).await,
        }
    }

    async fn port_forward(&self, sandbox_id: &str, port: u16) -> Result<Io> {
        match self.own.has_sandbox(sandbox_id) {
            true => Err(self.own.refused("port-forward")),
            false => self.inner.port_forward(sandbox_id, port).await,
        }
    }

    async fn container_stats(&self, id: &str) -> Result<ContainerStats> {
        self.inner.container_stats(id).await
    }

    async fn list_container_stats(
        &self,
        filter: Option<ContainerStatsFilter>,
    ) -> Result<Vec<ContainerStats>> {
        self.inner.list_container_stats(filter).await
    }

    async fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats> {
        self.inner.pod_sandbox_stats(id).await
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<PodSandboxStatsFilter>,
    ) -> Result<Vec<PodSandboxStats>> {
        self.inner.list_pod_sandbox_stats(filter).await
    }

    async fn events(&self) -> Result<Events> {
        self.inner.events().await
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }
}

#[async_trait]
impl ImageService for WithParts {
    async fn list_images(&self, filter: Option<ImageFilter>) -> Result<Vec<Image>> {
        self.inner.list_images(filter).await
    }

    async fn image_status(&self, image: &ImageSpec) -> Result<Option<Image>> {
        match self.own.has_image(image) {
            Some(image) => Ok(Some(image)),
            None => self.inner.image_status(image).await,
        }
    }

    async fn pull_image(
        &self,
        image: &ImageSpec,
        auth: Option<AuthConfig>,
        sandbox_config: Option<&PodSandboxConfig>,
    ) -> Result<String> {
        self.inner.pull_image(image, auth, sandbox_config).await
    }

    async fn remove_image(&self, image: &ImageSpec) -> Result<()> {
        self.inner.remove_image(image).await
    }

    async fn image_fs_info(&self) -> Result<ImageFsInfoResponse> {
        self.inner.image_fs_info().await
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::Fake;

    struct Silent;

    #[async_trait]
    impl Lines for Silent {
        async fn take(&self) -> Vec<Line> {
            std::future::pending().await
        }
    }

    const UID: &str = "0123456789abcdef0123456789abcdef";

    fn part(name: &'static str, uid: &str, crates: &'static [&'static str]) -> Part {
        let answer = |program: &str, words: &[&str]| {
            (words == ["--help"]).then(|| format!("{program} --a-flag\n"))
        };
        let image = format!("localhost/decapod/{name}:v1");
        Part { name, pod_uid: uid.to_owned(), image, crates, answer }
    }

    fn sandbox(uid: &str, logs: &Path) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata { uid: uid.into(), ..Default::default() }),
            labels: BTreeMap::from([(POD_UID.to_owned(), uid.to_owned())]),
            log_directory: logs.display().to_string(),
            ..Default::default()
        }
    }

    async fn started(runtime: &WithParts, uid: &str, logs: &Path) -> (String, String) {
        let config = sandbox(uid, logs);
        let pod = runtime.run_pod_sandbox(config.clone(), "").await.expect("a sandbox");
        let container = ContainerConfig { log_path: "0.log".into(), ..Default::default() };
        let id = runtime.create_container(&pod, container, &config).await.expect("a container");
        runtime.start_container(&id).await.expect("it starts");
        (pod, id)
    }

    #[tokio::test]
    async fn components_are_containers_that_run_nothing() {
        let (fake, tasks) = (Fake::new(), Tasks::new("test"));
        let parts = vec![part("kube-apiserver", UID, &[])];
        let runtime = WithParts::new(Arc::new(fake.clone()), parts, Arc::new(Silent), &tasks);
        let dir = tempfile::tempdir().expect("a directory");
        let (pod, id) = started(&runtime, UID, dir.path()).await;
        let (_, other) = started(&runtime, "another", dir.path()).await;
        assert_eq!(fake.calls().len(), 3, "the other pod is the inner runtime's");
        let all = runtime.list_containers(None).await.expect("a list");
        assert_eq!(all.len(), 2);
        let running = runtime.container_status(&id).await.expect("a status");
        assert_eq!(running.state(), ContainerState::Running);

        let run = async |id: &str, words: &[&str]| {
            let cmd = words.iter().map(|word| (*word).to_owned()).collect();
            let ask =
                ExecRequest { container_id: id.into(), cmd, stdout: true, ..Default::default() };
            let mut streams = runtime.exec(ask).await?;
            let mut text = String::new();
            let mut output = streams.stdout.take().expect("stdout was asked for");
            output.read_to_string(&mut text).await.expect("text");
            assert_eq!(streams.exit.await.expect("an end"), Ok(0));
            Ok::<_, Error>(text)
        };
        let help = run(&id, &["/usr/local/bin/kube-apiserver", "--help"]).await;
        assert_eq!(help.as_deref(), Ok("kube-apiserver --a-flag\n"));
        for refused in [&["sh"][..], &["kube-apiserver"], &["kube-apiserver", "--help", "x"], &[]] {
            let error = run(&id, refused).await.expect_err("nothing runs");
            assert!(matches!(error, Error::PermissionDenied(_)), "{error}");
        }
        assert_eq!(fake.calls().len(), 3, "no command reached the inner runtime");
        let ask = AttachRequest { container_id: id.clone(), ..Default::default() };
        assert!(runtime.attach(ask).await.is_err() && runtime.port_forward(&pod, 1).await.is_err());

        runtime.stop_pod_sandbox(&pod).await.expect("it stops");
        let ended = runtime.container_status(&id).await.expect("a status");
        assert_eq!(ended.state(), ContainerState::Exited);
        runtime.remove_pod_sandbox(&pod).await.expect("it is removed");
        let left = runtime.list_containers(None).await.expect("a list");
        assert!(left.iter().map(|one| &one.id).eq([&other]), "{left:?}");
    }

    #[tokio::test]
    async fn each_line_is_in_the_log_of_its_component() {
        let parts = [part("kube-apiserver", UID, &[]), part("kube-scheduler", "b", &["scheduler"])];
        assert_eq!(part_of_line(&parts, "scheduler::queue"), 1);
        assert_eq!(part_of_line(&parts, "schedulers"), 0);
        assert_eq!(part_of_line(&parts, "apiserver::audit"), 0);
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("0.log");
        let at = "2026-01-02T03:04:05.6Z".parse().expect("a time");
        let line = Line { at, target: "scheduler".into(), text: "one\ntwo".into() };
        append(&path, &[line]).await;
        let text = std::fs::read_to_string(&path).expect("written");
        assert_eq!(
            text,
            "2026-01-02T03:04:05.600000000Z stderr F one\n2026-01-02T03:04:05.600000000Z stderr F two\n"
        );
    }
}
