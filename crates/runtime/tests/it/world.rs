//! A node for one test: namespaces, a data directory, cgroups, an image of busybox.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use base::task::Tasks;
use cri::*;
use decapod_runtime::images::import::import;
use decapod_runtime::{Config, Embedded};
use futures::FutureExt;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

pub const BUSYBOX: &str = testkit::images::BUSYBOX;
pub use testkit::wait::LONG as LIMIT;

pub struct World {
    pub runtime: Embedded,
    pub config: Config,
    pub directory: PathBuf,
    /// The parent of all cgroups of this test.
    pub cgroup: String,
    pub tasks: Tasks,
}

/// Runs a test on a thread with its own namespaces; threads that it starts share them. Afterwards
/// nothing of the runtime may be left.
pub fn in_world<F: Future<Output = ()>>(test: impl FnOnce(World) -> F + Send) {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let archive = match testkit::images::all() {
        Ok(all) => all[0].clone(),
        Err(error) => {
            println!("skipped: no busybox image: {error:#}");
            return;
        }
    };
    let directory = tempfile::Builder::new().prefix("rt-").tempdir().expect("a directory");
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            own_namespaces();
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let config = config(directory.path());
                let world = World::open(config.clone(), directory.path()).await;
                import(world.runtime.images(), &archive, None).expect("imported");
                let cgroup = world.cgroup.clone();
                let result = AssertUnwindSafe(test(world)).catch_unwind().await;
                let (data, run) = (config.data_dir.clone(), config.run_dir.clone());
                decapod_runtime::destroy_all(&data, &run).await.expect("destroyed");
                decapod_runtime::destroy_all(&data, &run).await.expect("twice is fine");
                if let Err(panic) = result {
                    std::panic::resume_unwind(panic);
                }
                assert_nothing_left(directory.path(), &cgroup);
            });
        });
        if let Err(panic) = running.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Moves the calling thread to new network and mount namespaces.
pub fn own_namespaces() {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("namespaces");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private");
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SHARED, none).expect("shared");
}

pub fn config(directory: &Path) -> Config {
    let mut config = Config::new(directory.join("data"));
    config.run_dir = directory.join("run");
    config.cgroup_root = cgroup_of(directory);
    config.bridge = "deca-test".into();
    config.executable = env!("CARGO_BIN_EXE_shim-host").into();
    config
}

fn cgroup_of(directory: &Path) -> String {
    format!("/{}", directory.file_name().expect("it has a name").to_string_lossy())
}

/// Killed processes take a moment to disappear.
fn assert_nothing_left(directory: &Path, cgroup: &str) {
    let gone = testkit::wait::until(LIMIT, "all is gone", || {
        Ok(nothing_is_left(directory, cgroup).map_err(std::io::Error::other)?)
    });
    if let Err(error) = gone {
        panic!("{error:#}");
    }
}

fn nothing_is_left(directory: &Path, cgroup: &str) -> std::result::Result<(), String> {
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").expect("mounts");
    let ours = directory.to_string_lossy();
    let left: Vec<&str> = mounts.lines().filter(|line| line.contains(ours.as_ref())).collect();
    if !left.is_empty() {
        return Err(format!("{left:#?}"));
    }
    for entry in std::fs::read_dir("/proc").expect("processes").flatten() {
        let line = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        if line.starts_with("decapod-shim") && line.contains(ours.as_ref()) {
            return Err(format!("{} is left: {line}", entry.path().display()));
        }
    }
    let groups = std::fs::read_dir("/sys/fs/cgroup").expect("cgroups").flatten();
    let groups: Vec<PathBuf> =
        groups.map(|entry| entry.path().join(cgroup.trim_start_matches('/'))).collect();
    // The kubelet creates the pods' cgroups; in this test we do.
    groups.iter().for_each(|path| remove_empty(path));
    let rest = [directory.join("data"), directory.join("run")];
    match groups.iter().chain(&rest).find(|path| path.exists()) {
        Some(path) => Err(format!("{} is left", path.display())),
        None => Ok(()),
    }
}

fn remove_empty(path: &Path) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_empty(&entry.path());
        }
    }
    let _ = std::fs::remove_dir(path);
}

impl World {
    pub async fn open(config: Config, directory: &Path) -> Self {
        let tasks = Tasks::new("runtime");
        let runtime = Embedded::open(config.clone(), tasks.clone()).await.expect("opened");
        runtime.update_runtime_config("10.99.0.0/24").await.expect("a network");
        let cgroup = cgroup_of(directory);
        Self { runtime, config, directory: directory.to_owned(), cgroup, tasks }
    }

    /// Simulates a kill: nothing of the old backend is used.
    pub async fn restarted(self) -> Self {
        self.tasks.shutdown(LIMIT).await;
        drop(self.runtime);
        Self::open(self.config, &self.directory).await
    }

    pub fn pod(&self, name: &str) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.into(),
                uid: format!("{name}-uid"),
                namespace: "default".into(),
                attempt: 0,
            }),
            hostname: name.into(),
            log_directory: self.directory.join("logs").join(name).display().to_string(),
            dns_config: Some(DNSConfig {
                servers: vec!["10.43.0.10".into()],
                ..Default::default()
            }),
            labels: BTreeMap::from([("app".into(), name.into())]),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("{}/{name}", self.cgroup),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    /// Creates and starts a pod with one container; returns both ids.
    pub async fn run(&self, name: &str, container: ContainerConfig) -> (String, String) {
        let pod = self.pod(name);
        let sandbox = self.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        let id = self.start(&sandbox, &pod, container).await;
        (sandbox, id)
    }

    pub async fn start(
        &self,
        sandbox: &str,
        pod: &PodSandboxConfig,
        container: ContainerConfig,
    ) -> String {
        let id = self.runtime.create_container(sandbox, container, pod).await.expect("created");
        self.runtime.start_container(&id).await.expect("started");
        id
    }

    /// Waits for the container's exit.
    pub async fn ended(&self, id: &str) -> ContainerStatus {
        let mut events = self.runtime.events().await.expect("events");
        let wait = async {
            loop {
                let status = self.runtime.container_status(id).await.expect("there");
                if status.state() == ContainerState::Exited {
                    return status;
                }
                events.recv().await.expect("an event");
            }
        };
        testkit::wait::soon("the container ends", wait).await
    }

    pub async fn exec(&self, id: &str, script: &str) -> (i32, String) {
        let answer = self.runtime.exec_sync(id, sh(script), Some(LIMIT)).await.expect("exec");
        let text = [answer.stdout, answer.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
        (answer.exit_code, text.concat())
    }

    /// The log's entries as (stream, tag, content).
    pub async fn log(&self, id: &str) -> Vec<(String, String, String)> {
        let status = self.runtime.container_status(id).await.expect("there");
        let text = std::fs::read_to_string(&status.log_path).expect("a log");
        text.lines()
            .map(|line| {
                let mut parts = line.splitn(4, ' ').skip(1).map(str::to_owned);
                let mut next = || parts.next().expect("four parts");
                (next(), next(), next())
            })
            .collect()
    }
}

pub fn namespaces() -> NamespaceOption {
    NamespaceOption { pid: NamespaceMode::Container as i32, ..Default::default() }
}

pub fn sh(script: &str) -> Vec<String> {
    ["/bin/sh", "-c", script].map(str::to_owned).to_vec()
}

/// A container that runs a shell script, configured like the kubelet's.
pub fn container(name: &str, script: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(ImageSpec::named(BUSYBOX)),
        command: sh(script),
        log_path: format!("{name}/0.log"),
        linux: Some(LinuxContainerConfig {
            resources: Some(LinuxContainerResources::default()),
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                seccomp: Some(SecurityProfile::default()),
                masked_paths: vec![
                    "/proc/kcore".into(),
                    "/proc/keys".into(),
                    "/sys/firmware".into(),
                ],
                readonly_paths: vec!["/proc/sys".into()],
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

pub fn with_security(
    mut config: ContainerConfig,
    change: impl FnOnce(&mut LinuxContainerSecurityContext),
) -> ContainerConfig {
    let linux = config.linux.get_or_insert_default();
    change(linux.security_context.get_or_insert_default());
    config
}

/// Polls until the condition holds; for programs that send no events.
pub use testkit::wait::found as eventually;
