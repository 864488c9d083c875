//! The checks of the Pod Security Standards, levels baseline and restricted, by version, with upstream's
//! messages. Upstream: `k8s.io/pod-security-admission/policy`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EphemeralContainer, Lifecycle, LifecycleHandler, PodSecurityContext,
    PodSpec, Probe, SELinuxOptions, SeccompProfile, SecurityContext, Volume,
};
use machinery::ObjectMeta;

use super::policy::{Level, Mode};

/// A failed check: the general reason, and the details of this pod.
pub(crate) struct Violation {
    pub reason: String,
    detail: String,
}

/// A pod, with the common fields of all its containers.
struct Subject<'a> {
    meta: &'a ObjectMeta,
    spec: &'a PodSpec,
    parts: Vec<Part<'a>>,
}

struct Part<'a> {
    name: &'a str,
    security: Option<&'a SecurityContext>,
    ports: &'a [ContainerPort],
    probes: [Option<&'a Probe>; 3],
    lifecycle: Option<&'a Lifecycle>,
}

type Check = fn(&Subject<'_>) -> Option<Violation>;

/// A check of a level with its revisions, each from a minor version on, and the baseline check that it
/// replaces.
struct Row {
    id: &'static str,
    level: Level,
    versions: &'static [(u32, Check)],
    overrides: &'static str,
}

/// The newest version in which a check changed: later ones are the same.
const NEWEST: u32 = 35;

/// Baseline first, then restricted, each by id: the order of messages.
const CHECKS: &[Row] = &[
    baseline("appArmorProfile", &[(0, app_armor)]),
    baseline("capabilities_baseline", &[(0, capabilities_baseline)]),
    baseline("hostNamespaces", &[(0, host_namespaces)]),
    baseline("hostPathVolumes", &[(0, host_paths)]),
    baseline("hostPorts", &[(0, host_ports)]),
    baseline("hostProbesAndHostLifecycle", &[(34, host_probes)]),
    baseline("privileged", &[(0, privileged)]),
    baseline("procMount", &[(0, proc_mount), (35, |s| unless_own_users(s, proc_mount))]),
    baseline(
        "seLinuxOptions",
        &[(0, |s| se_linux(s, &SE_LINUX[..4])), (31, |s| se_linux(s, &SE_LINUX))],
    ),
    baseline("seccompProfile_baseline", &[(0, seccomp_annotations), (19, seccomp_baseline)]),
    baseline(
        "sysctls",
        &[
            (0, |s| sysctls(s, &SYSCTLS[..5])),
            (27, |s| sysctls(s, &SYSCTLS[..6])),
            (29, |s| sysctls(s, &SYSCTLS[..10])),
            (32, |s| sysctls(s, &SYSCTLS)),
        ],
    ),
    baseline("windowsHostProcess", &[(0, windows_host_process)]),
    restricted(
        "allowPrivilegeEscalation",
        &[(8, escalation), (25, |s| on_linux(s, escalation))],
        "",
    ),
    restricted(
        "capabilities_restricted",
        &[(22, capabilities_restricted), (25, |s| on_linux(s, capabilities_restricted))],
        "capabilities_baseline",
    ),
    restricted("procMount_restricted", &[(35, proc_mount)], "procMount"),
    restricted("restrictedVolumes", &[(0, volumes)], "hostPathVolumes"),
    restricted("runAsNonRoot", &[(0, non_root), (35, |s| unless_own_users(s, non_root))], ""),
    restricted("runAsUser", &[(23, run_as_user), (35, |s| unless_own_users(s, run_as_user))], ""),
    restricted(
        "seccompProfile_restricted",
        &[(19, seccomp_restricted), (25, |s| on_linux(s, seccomp_restricted))],
        "seccompProfile_baseline",
    ),
];

const fn baseline(id: &'static str, versions: &'static [(u32, Check)]) -> Row {
    Row { id, level: Level::Baseline, versions, overrides: "" }
}

const fn restricted(
    id: &'static str,
    versions: &'static [(u32, Check)],
    overrides: &'static str,
) -> Row {
    Row { id, level: Level::Restricted, versions, overrides }
}

/// All failed checks of a pod for a level and version.
pub(crate) fn violations(mode: Mode, meta: &ObjectMeta, spec: &PodSpec) -> Vec<Violation> {
    if mode.level == Level::Privileged {
        return vec![];
    }
    let version = mode.version.unwrap_or(NEWEST).min(NEWEST);
    let active = |row: &Row| row.level <= mode.level && row.versions[0].0 <= version;
    let overridden: Vec<&str> = CHECKS
        .iter()
        .filter(|row| active(row) && row.level == Level::Restricted)
        .map(|row| row.overrides)
        .collect();
    let subject = Subject { meta, spec, parts: parts(spec) };
    CHECKS
        .iter()
        .filter(|row| active(row) && !overridden.contains(&row.id))
        .filter_map(|row| {
            let check = row.versions.iter().rev().find(|(since, _)| *since <= version)?;
            (check.1)(&subject)
        })
        .collect()
}

/// `reason (detail), reason`
pub(crate) fn details(all: &[Violation]) -> String {
    let one = |violation: &Violation| match violation.detail.as_str() {
        "" => violation.reason.clone(),
        detail => format!("{} ({detail})", violation.reason),
    };
    all.iter().map(one).collect::<Vec<_>>().join(", ")
}

pub(crate) fn reasons(all: &[Violation]) -> String {
    all.iter().map(|one| one.reason.as_str()).collect::<Vec<_>>().join(", ")
}

fn parts(spec: &PodSpec) -> Vec<Part<'_>> {
    let init = spec.init_containers.iter().flatten().map(part);
    let main = spec.containers.iter().map(part);
    init.chain(main).chain(spec.ephemeral_containers.iter().flatten().map(ephemeral)).collect()
}

fn part(container: &Container) -> Part<'_> {
    Part {
        name: &container.name,
        security: container.security_context.as_ref(),
        ports: container.ports.as_deref().unwrap_or_default(),
        probes: [
            container.liveness_probe.as_ref(),
            container.readiness_probe.as_ref(),
            container.startup_probe.as_ref(),
        ],
        lifecycle: container.lifecycle.as_ref(),
    }
}

fn ephemeral(container: &EphemeralContainer) -> Part<'_> {
    Part {
        name: &container.name,
        security: container.security_context.as_ref(),
        ports: container.ports.as_deref().unwrap_or_default(),
        probes: [
            container.liveness_probe.as_ref(),
            container.readiness_probe.as_ref(),
            container.startup_probe.as_ref(),
        ],
        lifecycle: container.lifecycle.as_ref(),
    }
}

// Texts.

fn violation(reason: impl Into<String>, detail: String) -> Option<Violation> {
    Some(Violation { reason: reason.into(), detail })
}

fn plural<'a>(one: &'a str, many: &'a str, count: usize) -> &'a str {
    if count == 1 { one } else { many }
}

fn quoted<S: AsRef<str>>(items: impl IntoIterator<Item = S>) -> String {
    let all: Vec<String> = items.into_iter().map(|item| format!("\"{}\"", item.as_ref())).collect();
    all.join(", ")
}

/// `containers "a", "b"`
fn containers(names: &[&str]) -> String {
    format!("{} {}", plural("container", "containers", names.len()), quoted(names))
}

/// `pod and container "a"`
fn setters(pod: bool, names: &[&str]) -> Option<String> {
    let mut all = vec![];
    if pod {
        all.push("pod".to_owned());
    }
    if !names.is_empty() {
        all.push(containers(names));
    }
    (!all.is_empty()).then(|| all.join(" and "))
}

impl<'a> Subject<'a> {
    fn pod(&self) -> Option<&'a PodSecurityContext> {
        self.spec.security_context.as_ref()
    }

    /// Names of the containers for which `is_bad` is true.
    fn bad(&self, mut is_bad: impl FnMut(&Part<'a>) -> bool) -> Vec<&'a str> {
        self.parts.iter().filter(|part| is_bad(part)).map(|part| part.name).collect()
    }

    fn annotation(&self, key: &str) -> Option<&'a str> {
        self.meta.annotations.as_ref()?.get(key).map(String::as_str)
    }
}

/// Validation rejects such settings for Windows pods, so the check skips these.
fn on_linux(subject: &Subject<'_>, check: Check) -> Option<Violation> {
    let windows = subject.spec.os.as_ref().is_some_and(|os| os.name == "windows");
    if windows { None } else { check(subject) }
}

/// Root in a user namespace has no rights outside.
fn unless_own_users(subject: &Subject<'_>, check: Check) -> Option<Violation> {
    if subject.spec.host_users == Some(false) { None } else { check(subject) }
}

// Baseline.

fn app_armor(subject: &Subject<'_>) -> Option<Violation> {
    const PREFIX: &str = "container.apparmor.security.beta.kubernetes.io/";
    let fine = |kind: &str| matches!(kind, "RuntimeDefault" | "Localhost");
    let mut values = BTreeSet::new();
    let pod = subject.pod().and_then(|pod| pod.app_armor_profile.as_ref());
    let pod = pod.is_some_and(|profile| {
        !fine(&profile.type_) && {
            values.insert(profile.type_.clone());
            true
        }
    });
    let bad = subject.bad(|part| {
        let profile = part.security.and_then(|security| security.app_armor_profile.as_ref());
        profile.is_some_and(|profile| {
            !fine(&profile.type_) && {
                values.insert(profile.type_.clone());
                true
            }
        })
    });
    let annotations: Vec<String> = subject
        .meta
        .annotations
        .iter()
        .flatten()
        .filter(|(key, value)| {
            let fine =
                value.is_empty() || *value == "runtime/default" || value.starts_with("localhost/");
            key.starts_with(PREFIX) && !fine
        })
        .map(|(key, value)| format!("{key}={value:?}"))
        .collect();
    let mut who: Vec<String> = setters(pod, &bad).into_iter().collect();
    if !annotations.is_empty() {
        who.push(plural("annotation", "annotations", annotations.len()).into());
    }
    if who.is_empty() {
        return None;
    }
    let values: Vec<String> = values.into_iter().chain(annotations).collect();
    violation(
        plural("forbidden AppArmor profile", "forbidden AppArmor profiles", values.len()),
        format!("{} must not set AppArmor profile type to {}", who.join(" and "), quoted(&values)),
    )
}

const CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// The containers that add other capabilities than `fine`, and these capabilities.
fn added_besides<'a>(subject: &Subject<'a>, fine: &[&str]) -> (Vec<&'a str>, BTreeSet<&'a str>) {
    let mut forbidden = BTreeSet::new();
    let bad = subject.bad(|part| {
        let capabilities = part.security.and_then(|security| security.capabilities.as_ref());
        let added = capabilities.and_then(|capabilities| capabilities.add.as_ref());
        let others: Vec<&str> = added
            .into_iter()
            .flatten()
            .map(String::as_str)
            .filter(|name| !fine.contains(name))
            .collect();
        forbidden.extend(&others);
        !others.is_empty()
    });
    (bad, forbidden)
}

fn capabilities_baseline(subject: &Subject<'_>) -> Option<Violation> {
    let (bad, forbidden) = added_besides(subject, &CAPABILITIES);
    if bad.is_empty() {
        return None;
    }
    let (who, what) = (containers(&bad), quoted(&forbidden));
    violation(
        "non-default capabilities",
        format!("{who} must not include {what} in securityContext.capabilities.add"),
    )
}

fn host_namespaces(subject: &Subject<'_>) -> Option<Violation> {
    let spec = subject.spec;
    let all = [
        (spec.host_network, "hostNetwork=true"),
        (spec.host_pid, "hostPID=true"),
        (spec.host_ipc, "hostIPC=true"),
    ];
    let set: Vec<&str> =
        all.iter().filter(|(set, _)| *set == Some(true)).map(|(_, text)| *text).collect();
    if set.is_empty() { None } else { violation("host namespaces", set.join(", ")) }
}

fn host_paths(subject: &Subject<'_>) -> Option<Violation> {
    let volumes = subject.spec.volumes.iter().flatten();
    let bad: Vec<&str> =
        volumes.filter(|volume| volume.host_path.is_some()).map(|volume| &*volume.name).collect();
    if bad.is_empty() {
        return None;
    }
    let detail = format!("{} {}", plural("volume", "volumes", bad.len()), quoted(&bad));
    violation("hostPath volumes", detail)
}

fn host_ports(subject: &Subject<'_>) -> Option<Violation> {
    let mut ports = BTreeSet::new();
    let bad = subject.bad(|part| {
        let set: Vec<String> = part
            .ports
            .iter()
            .filter_map(|port| port.host_port.filter(|port| *port != 0))
            .map(|port| port.to_string())
            .collect();
        let any = !set.is_empty();
        ports.extend(set);
        any
    });
    if bad.is_empty() {
        return None;
    }
    let listed: Vec<String> = ports.iter().cloned().collect();
    violation(
        "hostPort",
        format!(
            "{} {} {} {}",
            containers(&bad),
            plural("uses", "use", bad.len()),
            plural("hostPort", "hostPorts", ports.len()),
            listed.join(", ")
        ),
    )
}

fn host_probes(subject: &Subject<'_>) -> Option<Violation> {
    let mut hosts = BTreeSet::new();
    let mut bad = BTreeSet::new();
    for part in &subject.parts {
        let probes = part.probes.iter().flatten().flat_map(|probe| {
            let http = probe.http_get.as_ref().and_then(|one| one.host.clone());
            let tcp = probe.tcp_socket.as_ref().and_then(|one| one.host.clone());
            [http, tcp]
        });
        let handlers = part
            .lifecycle
            .into_iter()
            .flat_map(|lifecycle| [lifecycle.post_start.as_ref(), lifecycle.pre_stop.as_ref()]);
        let handlers = handlers.flatten().flat_map(|handler: &LifecycleHandler| {
            let http = handler.http_get.as_ref().and_then(|one| one.host.clone());
            let tcp = handler.tcp_socket.as_ref().and_then(|one| one.host.clone());
            [http, tcp]
        });
        let set: Vec<String> =
            probes.chain(handlers).flatten().filter(|host| !host.is_empty()).collect();
        if !set.is_empty() {
            bad.insert(part.name);
            hosts.extend(set);
        }
    }
    if bad.is_empty() {
        return None;
    }
    let bad: Vec<&str> = bad.into_iter().collect();
    violation(
        "probe or lifecycle host",
        format!(
            "{} {} {} {}",
            containers(&bad),
            plural("uses", "use", bad.len()),
            plural("probe or lifecycle host", "probe or lifecycle hosts", hosts.len()),
            quoted(&hosts)
        ),
    )
}

fn privileged(subject: &Subject<'_>) -> Option<Violation> {
    let bad = subject
        .bad(|part| part.security.and_then(|security| security.privileged).unwrap_or_default());
    if bad.is_empty() {
        return None;
    }
    violation(
        "privileged",
        format!("{} must not set securityContext.privileged=true", containers(&bad)),
    )
}

fn proc_mount(subject: &Subject<'_>) -> Option<Violation> {
    let mut kinds = BTreeSet::new();
    let bad = subject.bad(|part| {
        let kind = part.security.and_then(|security| security.proc_mount.as_deref());
        kind.filter(|kind| *kind != "Default").map(|kind| kinds.insert(kind.to_owned())).is_some()
    });
    if bad.is_empty() {
        return None;
    }
    let (who, what) = (containers(&bad), quoted(&kinds));
    violation("procMount", format!("{who} must not set securityContext.procMount to {what}"))
}

const SE_LINUX: [&str; 5] =
    ["", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"];

fn se_linux(subject: &Subject<'_>, fine: &[&str]) -> Option<Violation> {
    let (mut kinds, mut user, mut role) = (BTreeSet::new(), false, false);
    let mut is_bad = |options: &SELinuxOptions| {
        let set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
        let kind = options.type_.as_deref().unwrap_or_default();
        let odd = !fine.contains(&kind);
        if odd {
            kinds.insert(kind.to_owned());
        }
        user |= set(&options.user);
        role |= set(&options.role);
        odd || set(&options.user) || set(&options.role)
    };
    let pod = subject.pod().and_then(|pod| pod.se_linux_options.as_ref()).is_some_and(&mut is_bad);
    let bad = subject.bad(|part| {
        let options = part.security.and_then(|security| security.se_linux_options.as_ref());
        options.is_some_and(&mut is_bad)
    });
    let who = setters(pod, &bad)?;
    let mut what = vec![];
    if !kinds.is_empty() {
        what.push(format!("{} {}", plural("type", "types", kinds.len()), quoted(&kinds)));
    }
    if user {
        what.push("user may not be set".into());
    }
    if role {
        what.push("role may not be set".into());
    }
    violation(
        "seLinuxOptions",
        format!("{who} set forbidden securityContext.seLinuxOptions: {}", what.join("; ")),
    )
}

fn seccomp_annotations(subject: &Subject<'_>) -> Option<Violation> {
    const POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
    const CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
    let fine = |value: &str| {
        matches!(value, "runtime/default" | "docker/default") || value.starts_with("localhost/")
    };
    let of_parts = subject.parts.iter().map(|part| format!("{CONTAINER}{}", part.name));
    let keys = std::iter::once(POD.to_owned()).chain(of_parts);
    let bad: BTreeSet<String> = keys
        .filter_map(|key| {
            let value = subject.annotation(&key)?;
            (!fine(value)).then(|| format!("{key}={value:?}"))
        })
        .collect();
    if bad.is_empty() {
        return None;
    }
    let listed: Vec<String> = bad.iter().cloned().collect();
    let what = plural("annotation", "annotations", bad.len());
    violation("seccompProfile", format!("forbidden {what} {}", listed.join(", ")))
}

fn is_confined(profile: &SeccompProfile) -> bool {
    matches!(&*profile.type_, "RuntimeDefault" | "Localhost")
}

fn seccomp_baseline(subject: &Subject<'_>) -> Option<Violation> {
    let mut kinds = BTreeSet::new();
    let mut is_bad = |profile: &SeccompProfile| {
        let bad = !is_confined(profile);
        if bad {
            kinds.insert(profile.type_.clone());
        }
        bad
    };
    let pod = subject.pod().and_then(|pod| pod.seccomp_profile.as_ref()).is_some_and(&mut is_bad);
    let bad = subject.bad(|part| {
        let profile = part.security.and_then(|security| security.seccomp_profile.as_ref());
        profile.is_some_and(&mut is_bad)
    });
    let who = setters(pod, &bad)?;
    let what = quoted(&kinds);
    violation(
        "seccompProfile",
        format!("{who} must not set securityContext.seccompProfile.type to {what}"),
    )
}

const SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

fn sysctls(subject: &Subject<'_>, fine: &[&str]) -> Option<Violation> {
    let set = subject.pod().and_then(|pod| pod.sysctls.as_ref()).into_iter().flatten();
    let bad: Vec<&str> =
        set.map(|one| one.name.as_str()).filter(|name| !fine.contains(name)).collect();
    if bad.is_empty() { None } else { violation("forbidden sysctls", bad.join(", ")) }
}

fn windows_host_process(subject: &Subject<'_>) -> Option<Violation> {
    let pod = subject.pod().and_then(|pod| pod.windows_options.as_ref());
    let pod = pod.is_some_and(|options| options.host_process == Some(true));
    let bad = subject.bad(|part| {
        let options = part.security.and_then(|security| security.windows_options.as_ref());
        options.is_some_and(|options| options.host_process == Some(true))
    });
    let who = setters(pod, &bad)?;
    violation(
        "hostProcess",
        format!("{who} must not set securityContext.windowsOptions.hostProcess=true"),
    )
}

// Restricted.

fn escalation(subject: &Subject<'_>) -> Option<Violation> {
    let bad = subject.bad(|part| {
        part.security.and_then(|security| security.allow_privilege_escalation) != Some(false)
    });
    if bad.is_empty() {
        return None;
    }
    violation(
        "allowPrivilegeEscalation != false",
        format!("{} must set securityContext.allowPrivilegeEscalation=false", containers(&bad)),
    )
}

fn capabilities_restricted(subject: &Subject<'_>) -> Option<Violation> {
    let missing = subject.bad(|part| {
        let capabilities = part.security.and_then(|security| security.capabilities.as_ref());
        let dropped = capabilities.and_then(|capabilities| capabilities.drop.as_ref());
        !dropped.is_some_and(|all| all.iter().any(|one| one == "ALL"))
    });
    let (adding, forbidden) = added_besides(subject, &["NET_BIND_SERVICE"]);
    let mut details = vec![];
    if !missing.is_empty() {
        let who = containers(&missing);
        details.push(format!("{who} must set securityContext.capabilities.drop=[\"ALL\"]"));
    }
    if !adding.is_empty() {
        let (who, what) = (containers(&adding), quoted(&forbidden));
        details.push(format!("{who} must not include {what} in securityContext.capabilities.add"));
    }
    if details.is_empty() {
        return None;
    }
    violation("unrestricted capabilities", details.join("; "))
}

fn volumes(subject: &Subject<'_>) -> Option<Violation> {
    let mut kinds = BTreeSet::new();
    let mut bad = vec![];
    for volume in subject.spec.volumes.iter().flatten() {
        if let Some(kind) = restricted_kind(volume) {
            kinds.insert(kind);
            bad.push(volume.name.as_str());
        }
    }
    if bad.is_empty() {
        return None;
    }
    violation(
        "restricted volume types",
        format!(
            "{} {} {} {} {}",
            plural("volume", "volumes", bad.len()),
            quoted(&bad),
            plural("uses", "use", bad.len()),
            plural("restricted volume type", "restricted volume types", kinds.len()),
            quoted(&kinds)
        ),
    )
}

/// The volume's type, if restricted pods may not use it.
fn restricted_kind(volume: &Volume) -> Option<&'static str> {
    let allowed = volume.config_map.is_some()
        || volume.csi.is_some()
        || volume.downward_api.is_some()
        || volume.empty_dir.is_some()
        || volume.ephemeral.is_some()
        || volume.image.is_some()
        || volume.persistent_volume_claim.is_some()
        || volume.projected.is_some()
        || volume.secret.is_some();
    if allowed {
        return None;
    }
    let kinds = [
        (volume.host_path.is_some(), "hostPath"),
        (volume.gce_persistent_disk.is_some(), "gcePersistentDisk"),
        (volume.aws_elastic_block_store.is_some(), "awsElasticBlockStore"),
        (volume.git_repo.is_some(), "gitRepo"),
        (volume.nfs.is_some(), "nfs"),
        (volume.iscsi.is_some(), "iscsi"),
        (volume.glusterfs.is_some(), "glusterfs"),
        (volume.rbd.is_some(), "rbd"),
        (volume.flex_volume.is_some(), "flexVolume"),
        (volume.cinder.is_some(), "cinder"),
        (volume.cephfs.is_some(), "cephfs"),
        (volume.flocker.is_some(), "flocker"),
        (volume.fc.is_some(), "fc"),
        (volume.azure_file.is_some(), "azureFile"),
        (volume.vsphere_volume.is_some(), "vsphereVolume"),
        (volume.quobyte.is_some(), "quobyte"),
        (volume.azure_disk.is_some(), "azureDisk"),
        (volume.photon_persistent_disk.is_some(), "photonPersistentDisk"),
        (volume.portworx_volume.is_some(), "portworxVolume"),
        (volume.scale_io.is_some(), "scaleIO"),
        (volume.storageos.is_some(), "storageos"),
    ];
    Some(kinds.iter().find(|(is, _)| *is).map_or("unknown", |(_, kind)| kind))
}

fn non_root(subject: &Subject<'_>) -> Option<Violation> {
    const REASON: &str = "runAsNonRoot != true";
    let pod = subject.pod().and_then(|pod| pod.run_as_non_root);
    let said = |part: &Part<'_>| part.security.and_then(|security| security.run_as_non_root);
    let explicit = subject.bad(|part| said(part) == Some(false));
    if let Some(who) = setters(pod == Some(false), &explicit) {
        return violation(REASON, format!("{who} must not set securityContext.runAsNonRoot=false"));
    }
    let implicit = subject.bad(|part| pod != Some(true) && said(part).is_none());
    if implicit.is_empty() {
        return None;
    }
    let who = containers(&implicit);
    violation(REASON, format!("pod or {who} must set securityContext.runAsNonRoot=true"))
}

fn run_as_user(subject: &Subject<'_>) -> Option<Violation> {
    let pod = subject.pod().and_then(|pod| pod.run_as_user) == Some(0);
    let bad =
        subject.bad(|part| part.security.and_then(|security| security.run_as_user) == Some(0));
    let who = setters(pod, &bad)?;
    violation("runAsUser=0", format!("{who} must not set runAsUser=0"))
}

fn seccomp_restricted(subject: &Subject<'_>) -> Option<Violation> {
    if let Some(explicit) = seccomp_baseline(subject) {
        return Some(explicit);
    }
    let pod = subject.pod().and_then(|pod| pod.seccomp_profile.as_ref()).is_some();
    let implicit = subject.bad(|part| {
        !pod && part.security.and_then(|security| security.seccomp_profile.as_ref()).is_none()
    });
    if implicit.is_empty() {
        return None;
    }
    let who = containers(&implicit);
    violation(
        "seccompProfile",
        format!(
            "pod or {who} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\""
        ),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(mode: &str, spec: Value, expected: &str) {
        let (level, version) = mode.split_once(':').expect("level and version");
        let mode = Mode {
            level: Level::parse(level).expect("a level"),
            version: super::super::policy::parse_version(version).expect("a version"),
        };
        let spec: PodSpec = serde_json::from_value(spec).expect("a spec");
        assert_eq!(details(&violations(mode, &ObjectMeta::default(), &spec)), expected);
    }

    #[test]
    fn pods_are_checked_by_level_and_version() {
        let plain = json!({"containers": [{"name": "a"}]});
        check("privileged:latest", plain.clone(), "");
        check("baseline:latest", plain.clone(), "");
        check(
            "restricted:latest",
            plain.clone(),
            "allowPrivilegeEscalation != false (container \"a\" must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container \"a\" must set securityContext.capabilities.drop=[\"ALL\"]), runAsNonRoot != true (pod or container \"a\" must set securityContext.runAsNonRoot=true), seccompProfile (pod or container \"a\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")",
        );
        check(
            "restricted:v1.0",
            plain,
            "runAsNonRoot != true (pod or container \"a\" must set securityContext.runAsNonRoot=true)",
        );
        let good = json!({
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "a", "securityContext": {
                "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}],
        });
        check("restricted:latest", good, "");
        let bad = json!({
            "hostNetwork": true, "hostPID": true,
            "securityContext": {"sysctls": [{"name": "a.b", "value": "1"}]},
            "volumes": [{"name": "v", "hostPath": {"path": "/"}}],
            "initContainers": [{"name": "i", "securityContext": {"privileged": true}}],
            "containers": [{"name": "a", "ports": [{"containerPort": 1, "hostPort": 80}],
                "securityContext": {"capabilities": {"add": ["SYS_ADMIN", "CHOWN"]}, "procMount": "Unmasked"}}],
        });
        check(
            "baseline:latest",
            bad,
            "non-default capabilities (container \"a\" must not include \"SYS_ADMIN\" in securityContext.capabilities.add), host namespaces (hostNetwork=true, hostPID=true), hostPath volumes (volume \"v\"), hostPort (container \"a\" uses hostPort 80), privileged (container \"i\" must not set securityContext.privileged=true), procMount (container \"a\" must not set securityContext.procMount to \"Unmasked\"), forbidden sysctls (a.b)",
        );
    }
}
