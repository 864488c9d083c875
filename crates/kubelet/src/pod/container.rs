//! The runtime's configuration of a container.
//!
//! In: the pod, the container, its environment and volumes (prepared before). Out: a CRI
//! `ContainerConfig`, or a `CreateContainerConfigError`.
//! Upstream: `kuberuntime_container.go` generateContainerConfig, `pkg/securitycontext`.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use cri::{
    CDIDevice, Capability, ContainerConfig, ContainerMetadata, Device, HugepageLimit, ImageSpec,
    KeyValue, LinuxContainerConfig, LinuxContainerResources, LinuxContainerSecurityContext, Mount,
    MountPropagation, Signal, SupplementalGroupsPolicy, UserNamespace,
};
use k8s_openapi::api::core::v1::{Container, Pod, SecurityContext, VolumeMount};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use release::features::{self, Feature};

use crate::devices::device_plugins::Extras;
use crate::names;
use crate::pod::amounts::Amounts;
use crate::pod::amounts::amounts;
use crate::pod::expand::{expand, expand_noting};
use crate::pod::observed::Role;
use crate::pod::sandbox::{apparmor, namespaces, seccomp};
use crate::resources::{self, Cfs, cpu_shares};
use crate::volumes::{Mounted, PodDir, mounts};

const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

const TERMINATION_LOG: &str = "/dev/termination-log";

/// The message of a `CreateContainerConfigError`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot find volume {0:?} to mount into container {1:?}")]
    NoVolume(String, String),
    #[error("cannot find volume {0:?} to pass into container {1:?}")]
    NoDevice(String, String),
    #[error(
        "failed to prepare subPath for volumeMount {volume:?} of container {container:?}: {why}"
    )]
    SubPath { volume: String, container: String, why: String },
    #[error("missing value for {0:?}")]
    MissingExpansion(String),
    #[error(
        "container has runAsNonRoot and image will run as root (pod: \"{pod}\", container: {container})"
    )]
    ImageIsRoot { pod: String, container: String },
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is \
         non-root (pod: \"{pod}\", container: {container})"
    )]
    ImageUserUnknown { user: String, pod: String, container: String },
    #[error(
        "container's runAsUser breaks non-root policy (pod: \"{pod}\", container: {container})"
    )]
    UserIsRoot { pod: String, container: String },
    #[error("{0}")]
    Io(String),
}

/// The inputs that the worker prepared.
pub struct Prepared<'a> {
    pub env: Vec<(String, String)>,
    /// Names of CDI devices.
    pub devices: Vec<String>,
    /// Devices and mounts of device plugins; their variables and CDI devices are among those above.
    pub extras: &'a Extras,
    pub volumes: &'a BTreeMap<String, Mounted>,
    /// Image volumes, by volume name.
    pub images: &'a BTreeMap<String, ImageSpec>,
    pub dir: &'a PodDir,
    pub attempt: u32,
    pub image: &'a cri::Image,
    pub node: NodeSettings,
    /// The id of the target container of an ephemeral container.
    pub target: Option<String>,
    /// The pod's user namespace, or the node's.
    pub users: &'a UserNamespace,
}

/// The node's settings that a container's configuration depends on.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeSettings {
    /// The node's memory, for the OOM score.
    pub memory: i64,
    pub cfs: Cfs,
    /// Containers without a seccomp profile get the runtime's default.
    pub seccomp_default: bool,
}

pub fn container_config(
    pod: &Pod,
    role: Role,
    container: &Container,
    prepared: &Prepared<'_>,
) -> Result<ContainerConfig, ConfigError> {
    verify_user(pod, container, prepared.image)?;
    let env: BTreeMap<&str, &str> =
        prepared.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let expanded = |list: &Option<Vec<String>>| -> Vec<String> {
        let lookup = |name: &str| env.get(name).map(|value| value.to_string());
        list.iter().flatten().map(|text| expand(text, lookup)).collect()
    };
    let grace = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds).unwrap_or(30);
    let path = container.termination_message_path.as_deref().unwrap_or(TERMINATION_LOG);
    let policy = container.termination_message_policy.as_deref().unwrap_or("File");
    let named = container.lifecycle.as_ref().and_then(|l| l.stop_signal.as_deref());
    let named = named.filter(|_| features::enabled(Feature::ContainerStopSignals));
    let stop_signal = named.and_then(Signal::from_name).unwrap_or(Signal::RuntimeDefault);
    let annotations = [
        (names::CONTAINER_HASH, names::container_hash(container)),
        (names::RESTART_COUNT, prepared.attempt.to_string()),
        (names::TERMINATION_PATH, path.to_string()),
        (names::TERMINATION_POLICY, policy.to_string()),
        (names::GRACE_PERIOD, grace.to_string()),
    ];
    Ok(ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: container.name.clone(),
            attempt: prepared.attempt,
        }),
        image: Some(ImageSpec {
            image: prepared.image.id.clone(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..ImageSpec::default()
        }),
        command: expanded(&container.command),
        args: expanded(&container.args),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        mounts: all_mounts(container, prepared, &env, path)?,
        devices: all_devices(container, prepared)?,
        cdi_devices: prepared.devices.iter().map(|name| CDIDevice { name: name.clone() }).collect(),
        envs: prepared
            .env
            .iter()
            .map(|(key, value)| KeyValue {
                key: key.clone(),
                value: Bytes::copy_from_slice(value.as_bytes()),
            })
            .collect(),
        labels: labels(pod, container),
        annotations: with_extras(&prepared.extras.annotations, annotations),
        log_path: names::log_file(&container.name, prepared.attempt),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        linux: Some(LinuxContainerConfig {
            resources: Some(resources_for(pod, container, amounts(pod, container), prepared.node)),
            security_context: Some(security(pod, role, container, prepared)),
        }),
        stop_signal: stop_signal as i32,
    })
}

/// Merges both; the kubelet's own win.
fn with_extras<const N: usize>(
    extras: &[(String, String)],
    own: [(&str, String); N],
) -> BTreeMap<String, String> {
    let own = own.map(|(key, value)| (key.to_string(), value));
    extras.iter().cloned().chain(own).collect()
}

fn labels(pod: &Pod, container: &Container) -> BTreeMap<String, String> {
    let pairs = [
        (names::POD_NAME, names::name(pod)),
        (names::POD_NAMESPACE, names::namespace(pod)),
        (names::POD_UID, names::uid(pod)),
        (names::CONTAINER_NAME, container.name.as_str()),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

/// Upstream: verifyRunAsNonRoot.
fn verify_user(pod: &Pod, container: &Container, image: &cri::Image) -> Result<(), ConfigError> {
    let of_pod = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
    let own = container.security_context.as_ref();
    let non_root = own.and_then(|c| c.run_as_non_root).or(of_pod.and_then(|c| c.run_as_non_root));
    if non_root != Some(true) {
        return Ok(());
    }
    let (pod_name, name) = (names::full(pod), container.name.clone());
    let user = own.and_then(|c| c.run_as_user).or(of_pod.and_then(|c| c.run_as_user));
    match (user, &image.uid, image.username.as_str()) {
        (Some(0), _, _) => Err(ConfigError::UserIsRoot { pod: pod_name, container: name }),
        (Some(_), _, _) => Ok(()),
        (None, Some(uid), _) if uid.value != 0 => Ok(()),
        (None, None, user) if !user.is_empty() => {
            Err(ConfigError::ImageUserUnknown { user: user.into(), pod: pod_name, container: name })
        }
        _ => Err(ConfigError::ImageIsRoot { pod: pod_name, container: name }),
    }
}

/// Converts requests and limits to the kernel's numbers.
pub fn resources_for(
    pod: &Pod,
    container: &Container,
    amounts: Amounts,
    node: NodeSettings,
) -> LinuxContainerResources {
    let has_request = resources::request(container.resources.as_ref(), "cpu").is_some();
    let share = if has_request { amounts.cpu_request } else { amounts.cpu_limit };
    LinuxContainerResources {
        cpu_period: node.cfs.period(),
        cpu_quota: node.cfs.quota(amounts.cpu_limit),
        cpu_shares: cpu_shares(share),
        memory_limit_in_bytes: amounts.memory_limit,
        oom_score_adj: resources::oom_score_adj(pod, container, node.memory),
        hugepage_limits: huge_pages(container),
        ..LinuxContainerResources::default()
    }
}

/// The limits of huge pages that the container asks for.
fn huge_pages(container: &Container) -> Vec<HugepageLimit> {
    let limits = container.resources.iter().flat_map(|all| all.limits.iter().flatten());
    let one = |(name, quantity): (&String, &Quantity)| {
        let size = name.strip_prefix("hugepages-")?;
        Some(HugepageLimit {
            page_size: resources::huge_page_size(size)?,
            limit: u64::try_from(resources::units(quantity)).ok()?,
        })
    };
    limits.filter_map(one).collect()
}

fn security(
    pod: &Pod,
    role: Role,
    container: &Container,
    prepared: &Prepared<'_>,
) -> LinuxContainerSecurityContext {
    let of_pod = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
    let none = SecurityContext::default();
    let own = container.security_context.as_ref().unwrap_or(&none);
    let privileged = own.privileged == Some(true);
    let unmasked = privileged || own.proc_mount.as_deref() == Some("Unmasked");
    let paths = |list: &[&str]| match unmasked {
        true => vec![],
        false => list.iter().map(|path| path.to_string()).collect(),
    };
    let mut groups = of_pod.and_then(|c| c.supplemental_groups.clone()).unwrap_or_default();
    groups.extend(of_pod.and_then(|c| c.fs_group));
    let strict = of_pod.and_then(|c| c.supplemental_groups_policy.as_deref()) == Some("Strict");
    let policy =
        if strict { SupplementalGroupsPolicy::Strict } else { SupplementalGroupsPolicy::Merge };
    let profile = own.seccomp_profile.as_ref().or(of_pod.and_then(|c| c.seccomp_profile.as_ref()));
    let armor =
        own.app_armor_profile.as_ref().or(of_pod.and_then(|c| c.app_armor_profile.as_ref()));
    let target = prepared.target.as_deref().filter(|_| role == Role::Ephemeral);
    LinuxContainerSecurityContext {
        capabilities: own.capabilities.as_ref().map(|c| Capability {
            add_capabilities: c.add.clone().unwrap_or_default(),
            drop_capabilities: c.drop.clone().unwrap_or_default(),
            add_ambient_capabilities: vec![],
        }),
        privileged,
        namespace_options: Some(namespaces(pod, target, prepared.users)),
        run_as_user: own.run_as_user.or(of_pod.and_then(|c| c.run_as_user)).map(Into::into),
        run_as_group: own.run_as_group.or(of_pod.and_then(|c| c.run_as_group)).map(Into::into),
        readonly_rootfs: own.read_only_root_filesystem == Some(true),
        supplemental_groups: groups,
        supplemental_groups_policy: policy as i32,
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: paths(&MASKED),
        readonly_paths: paths(&READ_ONLY),
        seccomp: (!privileged).then(|| seccomp(profile, prepared.node.seccomp_default)),
        apparmor: apparmor(armor),
        ..LinuxContainerSecurityContext::default()
    }
}

/// Upstream: makeBlockVolumes.
fn all_devices(container: &Container, prepared: &Prepared<'_>) -> Result<Vec<Device>, ConfigError> {
    let mut out = prepared.extras.devices.clone();
    for device in container.volume_devices.iter().flatten() {
        let volume =
            prepared.volumes.get(&device.name).filter(|volume| volume.is_device).ok_or_else(
                || ConfigError::NoDevice(device.name.clone(), container.name.clone()),
            )?;
        out.push(Device {
            container_path: device.device_path.clone(),
            host_path: volume.path.display().to_string(),
            permissions: if volume.read_only { "r" } else { "mrw" }.into(),
        });
    }
    Ok(out)
}

fn all_mounts(
    container: &Container,
    prepared: &Prepared<'_>,
    env: &BTreeMap<&str, &str>,
    termination_path: &str,
) -> Result<Vec<Mount>, ConfigError> {
    let mut out = prepared.extras.mounts.clone();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        out.push(volume_mount(container, mount, index, prepared, env)?);
    }
    let taken = |path: &str| out.iter().any(|mount: &Mount| mount.container_path == path);
    let file = |path: &str, host: &Path| Mount {
        container_path: path.into(),
        host_path: host.display().to_string(),
        ..Mount::default()
    };
    let mut own = vec![];
    let read_only_root =
        container.security_context.as_ref().and_then(|c| c.read_only_root_filesystem);
    if !taken("/etc/hosts") && prepared.dir.hosts().exists() {
        let mut hosts = file("/etc/hosts", &prepared.dir.hosts());
        hosts.readonly = read_only_root == Some(true);
        own.push(hosts);
    }
    if !termination_path.is_empty() && !taken(termination_path) {
        let host = termination_file(prepared.dir, &container.name, prepared.attempt)
            .map_err(|error| ConfigError::Io(error.to_string()))?;
        own.push(file(termination_path, &host));
    }
    out.extend(own);
    // Upstream: applyPlatformSpecificContainerConfig.
    for mount in &mut out {
        mount.uid_mappings.clone_from(&prepared.users.uids);
        mount.gid_mappings.clone_from(&prepared.users.gids);
    }
    Ok(out)
}

/// Creates a fresh file for this run's termination message, writable by every user.
fn termination_file(
    dir: &PodDir,
    container: &str,
    attempt: u32,
) -> std::io::Result<std::path::PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let home = dir.container(container);
    std::fs::create_dir_all(&home)?;
    let path = home.join(format!("termination-{attempt}"));
    std::fs::write(&path, b"")?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
    Ok(path)
}

fn volume_mount(
    container: &Container,
    mount: &VolumeMount,
    index: usize,
    prepared: &Prepared<'_>,
    env: &BTreeMap<&str, &str>,
) -> Result<Mount, ConfigError> {
    let volume = prepared
        .volumes
        .get(&mount.name)
        .filter(|volume| !volume.is_device)
        .ok_or_else(|| ConfigError::NoVolume(mount.name.clone(), container.name.clone()))?;
    let subpath = match mount.sub_path_expr.as_deref().filter(|expr| !expr.is_empty()) {
        Some(expr) => {
            let lookup = |name: &str| env.get(name).map(|value| value.to_string());
            match expand_noting(expr, lookup) {
                (path, None) => path,
                (_, Some(missing)) => return Err(ConfigError::MissingExpansion(missing)),
            }
        }
        None => mount.sub_path.clone().unwrap_or_default(),
    };
    if let Some(image) = prepared.images.get(&mount.name) {
        return Ok(Mount {
            container_path: absolute(&mount.mount_path),
            readonly: true,
            image: Some(image.clone()),
            image_sub_path: subpath,
            ..Mount::default()
        });
    }
    let host_path = if subpath.is_empty() {
        volume.path.clone()
    } else {
        let target = prepared.dir.subpath(&mount.name, &container.name, index);
        mounts::pin_subpath(&volume.path, &subpath, &target).map_err(|why| {
            ConfigError::SubPath {
                volume: mount.name.clone(),
                container: container.name.clone(),
                why: why.to_string(),
            }
        })?
    };
    let propagation = match mount.mount_propagation.as_deref() {
        Some("HostToContainer") => MountPropagation::HostToContainer,
        Some("Bidirectional") => MountPropagation::Bidirectional,
        _ => MountPropagation::Private,
    };
    let read_only = mount.read_only == Some(true) || volume.read_only;
    let recursive = mount.recursive_read_only.as_deref() == Some("Enabled");
    Ok(Mount {
        container_path: absolute(&mount.mount_path),
        host_path: host_path.display().to_string(),
        readonly: read_only,
        propagation: propagation as i32,
        recursive_read_only: read_only && recursive,
        ..Mount::default()
    })
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_string() } else { format!("/{path}") }
}
