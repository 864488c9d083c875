//! Builds the `config.json` for the shim from a CRI container and its image.
//!
//! Pure, except that it inspects host paths (mount sources, devices). User and group are resolved by the
//! caller. Upstream: containerd's `container_create_linux.go`, the defaults of its CRI plugin.

mod capabilities;
mod mounts;
pub(crate) mod seccomp;
pub(crate) mod stage;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cri::{ContainerConfig, LinuxContainerSecurityContext, NamespaceMode, Result};
use serde_json::{Value, json};

pub(crate) use mounts::is_shown_file;

use crate::images::config::ImageConfig;
use crate::images::user::User;
use crate::users::Mappings;

pub(crate) const DEFAULT_PATH: &str =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a container takes from its pod.
pub(crate) struct PodFacts {
    /// Pinned namespaces; `None` means the host's.
    pub net: Option<PathBuf>,
    pub uts: Option<PathBuf>,
    pub ipc: Option<PathBuf>,
    pub pid: PidNamespace,
    pub resolv_conf: PathBuf,
    pub hostname_file: PathBuf,
    pub hostname: String,
    pub shm: PathBuf,
    pub cgroup_parent: String,
    pub users: Option<Users>,
}

/// The pod's user namespace.
pub(crate) struct Users {
    pub mappings: Mappings,
    /// The path of the pinned user namespace.
    pub namespace: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PidNamespace {
    Own,
    Host,
    Of(PathBuf),
}

pub(crate) struct Request<'a> {
    pub id: &'a str,
    pub config: &'a ContainerConfig,
    pub image: &'a ImageConfig,
    pub user: &'a User,
    pub pod: &'a PodFacts,
    pub rootfs: &'a Path,
    pub cgroups_v2: bool,
    /// With cgroup version 1: the container's own cgroup in each hierarchy, and the hierarchy's names.
    pub cgroup_mounts: Vec<(PathBuf, Vec<String>)>,
    pub apparmor: Option<String>,
    /// The lowest `oom_score_adj` that this process may set.
    pub lowest_oom_score: i64,
}

/// The container's cgroup, below the pod's.
pub(crate) fn cgroup_path(parent: &str, id: &str) -> String {
    format!("/{}/{id}", parent.trim_matches('/')).replace("//", "/")
}

pub(crate) fn build(request: &Request<'_>) -> Result<Value> {
    let linux = request.config.linux.clone().unwrap_or_default();
    let security = linux.security_context.clone().unwrap_or_default();
    let capabilities = capabilities::of(&security)?;
    let seccomp =
        seccomp::section(security.seccomp.as_ref(), security.privileged, &capabilities.bounding)?;
    let mounts = mounts::all(request, &security)?;
    let propagation = mounts::root_propagation(request.config);
    let mut spec = json!({
        "ociVersion": "1.2.0",
        "process": process(request, &linux, &security, &capabilities)?,
        "root": {"path": request.rootfs, "readonly": security.readonly_rootfs},
        "mounts": mounts,
        "linux": {
            "namespaces": namespaces(request.pod, request.cgroups_v2),
            "cgroupsPath": cgroup_path(&request.pod.cgroup_parent, request.id),
            "resources": resources(request.config, security.privileged)?,
            "devices": devices(request.config, security.privileged)?.0,
            "maskedPaths": security.masked_paths,
            "readonlyPaths": read_only_paths(request, &security),
            "rootfsPropagation": propagation,
            "seccomp": seccomp,
        },
    });
    if let Some(users) = &request.pod.users {
        spec["linux"]["uidMappings"] = users.mappings.uids.section();
        spec["linux"]["gidMappings"] = users.mappings.gids.section();
    }
    Ok(spec)
}

/// With version 1, the directory of the hierarchies is read-only when each hierarchy is.
fn read_only_paths(request: &Request<'_>, security: &LinuxContainerSecurityContext) -> Vec<String> {
    let mut paths = security.readonly_paths.clone();
    if !security.privileged && mounts::shows_hierarchies(request) {
        paths.push(mounts::CGROUPS.into());
    }
    paths
}

/// Host and container paths of the devices in the configuration.
pub(crate) fn device_paths(config: &ContainerConfig) -> Vec<(PathBuf, PathBuf)> {
    let privileged = config
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .is_some_and(|security| security.privileged);
    let own = config
        .devices
        .iter()
        .map(|device| (device.host_path.clone().into(), device.container_path.clone().into()));
    let all = if privileged { mounts::host_devices() } else { vec![] };
    own.chain(all.into_iter().map(|path| (path.clone(), path))).collect()
}

fn process(
    request: &Request<'_>,
    linux: &cri::LinuxContainerConfig,
    security: &LinuxContainerSecurityContext,
    capabilities: &capabilities::Capabilities,
) -> Result<Value> {
    let args = command(request.config, request.image)?;
    let mut process = json!({
        "terminal": request.config.tty,
        "user": {
            "uid": request.user.uid,
            "gid": request.user.gid,
            "additionalGids": request.user.groups,
        },
        "args": args,
        "env": environment(request),
        "cwd": working_directory(request.config, request.image),
        "capabilities": capabilities.section(request.user.uid == 0),
    });
    if security.no_new_privs && !security.privileged {
        // Never `false`: the shim's `container` module explains when the filter is loaded.
        process["noNewPrivileges"] = true.into();
    }
    if let Some(profile) = &request.apparmor {
        process["apparmorProfile"] = profile.as_str().into();
    }
    if let Some(resources) = &linux.resources {
        let score = resources.oom_score_adj.clamp(request.lowest_oom_score.min(1000), 1000);
        process["oomScoreAdj"] = score.into();
    }
    Ok(process)
}

/// The pod's command replaces the image's entrypoint and arguments. The pod's arguments replace the image's.
fn command(config: &ContainerConfig, image: &ImageConfig) -> Result<Vec<String>> {
    let (mut all, arguments) = if config.command.is_empty() {
        let arguments = if config.args.is_empty() { &image.cmd } else { &config.args };
        (image.entrypoint.clone(), arguments)
    } else {
        (config.command.clone(), &config.args)
    };
    all.extend(arguments.iter().cloned());
    if all.is_empty() {
        return Err(cri::Error::InvalidArgument("no command specified".into()));
    }
    Ok(all)
}

fn working_directory(config: &ContainerConfig, image: &ImageConfig) -> String {
    [&config.working_dir, &image.working_dir]
        .into_iter()
        .find(|directory| !directory.is_empty())
        .map_or_else(|| "/".to_owned(), Clone::clone)
}

/// The image's variables, overridden by the pod's, in order. `PATH`, `HOSTNAME` and `HOME` are always set.
fn environment(request: &Request<'_>) -> Vec<String> {
    let mut all: Vec<(String, String)> = Vec::new();
    let mut put = |name: &str, value: &str, replace: bool| match all
        .iter_mut()
        .find(|(known, _)| known == name)
    {
        Some(entry) if replace => value.clone_into(&mut entry.1),
        Some(_) => {}
        None => all.push((name.to_owned(), value.to_owned())),
    };
    put("PATH", DEFAULT_PATH, true);
    if request.config.tty {
        put("TERM", "xterm", true);
    }
    put("HOSTNAME", &request.pod.hostname, true);
    for entry in &request.image.env {
        let (name, value) = entry.split_once('=').unwrap_or((entry, ""));
        put(name, value, true);
    }
    for entry in &request.config.envs {
        put(&entry.key, &String::from_utf8_lossy(&entry.value), true);
    }
    put("HOME", &request.user.home, false);
    all.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}

fn namespaces(pod: &PodFacts, cgroups_v2: bool) -> Value {
    let mut all = vec![json!({"type": "mount"})];
    let user = pod.users.as_ref().map(|users| users.namespace.clone());
    for (kind, path) in
        [("user", &user), ("network", &pod.net), ("uts", &pod.uts), ("ipc", &pod.ipc)]
    {
        if let Some(path) = path {
            all.push(json!({"type": kind, "path": path}));
        }
    }
    match &pod.pid {
        PidNamespace::Own => all.push(json!({"type": "pid"})),
        PidNamespace::Of(path) => all.push(json!({"type": "pid", "path": path})),
        PidNamespace::Host => {}
    }
    if cgroups_v2 {
        all.push(json!({"type": "cgroup"}));
    }
    Value::Array(all)
}

fn resources(config: &ContainerConfig, privileged: bool) -> Result<Value> {
    let wanted = config.linux.as_ref().and_then(|l| l.resources.clone()).unwrap_or_default();
    let positive = |n: i64| (n > 0).then_some(n);
    let text = |s: &str| (!s.is_empty()).then(|| s.to_owned());
    let mut cpu = serde_json::Map::new();
    for (key, value) in
        [("shares", positive(wanted.cpu_shares)), ("period", positive(wanted.cpu_period))]
    {
        if let Some(value) = value {
            cpu.insert(key.into(), value.into());
        }
    }
    if wanted.cpu_quota != 0 {
        cpu.insert("quota".into(), wanted.cpu_quota.into());
    }
    for (key, value) in [("cpus", text(&wanted.cpuset_cpus)), ("mems", text(&wanted.cpuset_mems))] {
        if let Some(value) = value {
            cpu.insert(key.into(), value.into());
        }
    }
    let mut all = json!({"cpu": cpu, "devices": devices(config, privileged)?.1});
    if let Some(bytes) = positive(wanted.memory_limit_in_bytes) {
        all["memory"] = json!({"limit": bytes});
        if let Some(swap) = positive(wanted.memory_swap_limit_in_bytes) {
            all["memory"]["swap"] = swap.into();
        }
    }
    if !wanted.hugepage_limits.is_empty() {
        let limits = wanted.hugepage_limits.iter();
        let limits = limits.map(|one| json!({"pageSize": one.page_size, "limit": one.limit}));
        all["hugepageLimits"] = Value::Array(limits.collect());
    }
    if !wanted.unified.is_empty() {
        all["unified"] = json!(wanted.unified);
    }
    Ok(all)
}

/// The device nodes to create, and the device cgroup rules.
fn devices(config: &ContainerConfig, privileged: bool) -> Result<(Vec<Value>, Vec<Value>)> {
    let mut nodes = Vec::new();
    let mut rules = vec![json!({"allow": privileged, "access": "rwm"})];
    let mut seen = BTreeSet::new();
    for device in &config.devices {
        let node = mounts::device(Path::new(&device.host_path), Path::new(&device.container_path))
            .map_err(|error| {
                cri::Error::InvalidArgument(format!("device {}: {error}", device.host_path))
            })?;
        rules.push(json!({"allow": true, "type": node["type"], "major": node["major"],
            "minor": node["minor"], "access": device.permissions}));
        seen.insert(device.container_path.clone());
        nodes.push(node);
    }
    if privileged {
        for path in mounts::host_devices() {
            if !seen.contains(path.to_string_lossy().as_ref()) {
                // A device may disappear meanwhile.
                nodes.extend(mounts::device(&path, &path));
            }
        }
    }
    Ok((nodes, rules))
}

/// The PID namespace mode of a container's `NamespaceOption`.
pub(crate) fn pid_mode(config: &ContainerConfig) -> (NamespaceMode, String) {
    let options = config
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .and_then(|security| security.namespace_options.as_ref());
    match options {
        Some(options) => (options.pid(), options.target_id.clone()),
        None => (NamespaceMode::Container, String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_merge_as_the_pod_says() {
        let check = |pod: [&[&str]; 2], image: [&[&str]; 2], expected: Option<&[&str]>| {
            let own = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
            let config =
                ContainerConfig { command: own(pod[0]), args: own(pod[1]), ..Default::default() };
            let image =
                ImageConfig { entrypoint: own(image[0]), cmd: own(image[1]), ..Default::default() };
            assert_eq!(command(&config, &image).ok(), expected.map(own));
        };
        let image: [&[&str]; 2] = [&["e"], &["c"]];
        check([&[], &[]], image, Some(&["e", "c"]));
        check([&[], &["a"]], image, Some(&["e", "a"]));
        check([&["x"], &[]], image, Some(&["x"]));
        check([&["x"], &["a"]], image, Some(&["x", "a"]));
        check([&[], &[]], [&[], &[]], None);
    }

    #[test]
    fn cgroups_are_below_the_pods() {
        assert_eq!(cgroup_path("/kubepods/pod1", "c"), "/kubepods/pod1/c");
        assert_eq!(cgroup_path("", "c"), "/c");
    }
}
