//! Which sysctls pods may set.
//!
//! In: patterns that the administrator allows, the kernel's version, a pod. Out: admitted, or
//! `SysctlForbidden`. A pattern is a name, or a prefix with `*` at its end.
//! Invariant: every pattern is known to be namespaced.
//! Upstream: `pkg/kubelet/sysctl`, `component-helpers/node/util/sysctl`.

use k8s_openapi::api::core::v1::Pod;

use crate::reason::Reason;

/// Safe sysctls, and the kernel version from which they are namespaced.
const SAFE: [(&str, (u32, u32)); 12] = [
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
];

const LONGEST: usize = 253;

/// Why a pattern is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SysctlError {
    #[error(
        "sysctl {0:?} must have at most {LONGEST} characters: parts of lower case letters, digits, \
         '-' and '_' with '.' or '/' between them, and '*' at the end at most"
    )]
    Pattern(String),
    #[error("the sysctls {0:?} are not known to be namespaced")]
    NotNamespaced(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    Ipc,
    Net,
}

#[derive(Clone, Debug)]
struct Allowed {
    /// With dots between its parts, without `*`.
    name: String,
    is_prefix: bool,
    namespace: Namespace,
}

/// The sysctls that pods of this node may set.
#[derive(Clone, Debug)]
pub struct Sysctls(Vec<Allowed>);

impl Default for Sysctls {
    /// The sysctls that are safe on this machine's kernel.
    fn default() -> Self {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self::safe(&release)
    }
}

impl Sysctls {
    /// The safe sysctls of this machine's kernel, and those of `patterns`.
    pub fn with_unsafe(patterns: &[String]) -> Result<Self, SysctlError> {
        let mut out = Self::default();
        for pattern in patterns {
            out.0.push(allowed(pattern)?);
        }
        Ok(out)
    }

    fn safe(kernel: &str) -> Self {
        let version = kernel_version(kernel);
        let known = SAFE.iter().filter(|(_, since)| *since <= version);
        Self(known.filter_map(|(name, _)| allowed(name).ok()).collect())
    }

    pub(crate) fn check(&self, pod: &Pod) -> Result<(), Reason> {
        let Some(spec) = &pod.spec else { return Ok(()) };
        let wanted = spec.security_context.iter().flat_map(|c| c.sysctls.iter().flatten());
        let is_on_host = |namespace| match namespace {
            Namespace::Ipc => spec.host_ipc == Some(true),
            Namespace::Net => spec.host_network == Some(true),
        };
        for sysctl in wanted {
            let name = with_dots(&sysctl.name);
            let why = match self.namespace_of(&name) {
                None => format!("{name:?} not allowlisted"),
                Some(namespace) if is_on_host(namespace) => {
                    let shown = if namespace == Namespace::Ipc { "IPC" } else { "Net" };
                    format!("{name:?} not allowed with host {shown} enabled")
                }
                Some(_) => continue,
            };
            let message = format!("forbidden sysctl: {why}");
            return Err(Reason::new("SysctlForbidden", message));
        }
        Ok(())
    }

    fn namespace_of(&self, name: &str) -> Option<Namespace> {
        let fits = |one: &&Allowed| match one.is_prefix {
            true => name.starts_with(&one.name),
            false => name == one.name,
        };
        self.0.iter().find(fits).map(|one| one.namespace)
    }
}

fn allowed(pattern: &str) -> Result<Allowed, SysctlError> {
    if !is_pattern(pattern) {
        return Err(SysctlError::Pattern(pattern.to_owned()));
    }
    let plain = with_dots(pattern);
    let name = plain.strip_suffix('*').unwrap_or(&plain);
    let namespace = namespace(name).ok_or_else(|| SysctlError::NotNamespaced(name.to_owned()))?;
    Ok(Allowed { name: name.to_owned(), is_prefix: name.len() < plain.len(), namespace })
}

fn is_pattern(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let inner = |c: char| plain(c) || matches!(c, '-' | '_');
    let ends_well = |part: &str| part.ends_with(plain);
    let (body, has_star) = match text.strip_suffix('*') {
        Some(body) => (body, true),
        None => (text, false),
    };
    let parts: Vec<&str> = body.split(['.', '/']).collect();
    let last = parts.len() - 1;
    let fine = |(at, part): (usize, &&str)| match at == last && has_star {
        // `net.*` and `kernel.msg_*` are patterns.
        true => part.is_empty() || (part.starts_with(plain) && part.chars().all(inner)),
        false => part.starts_with(plain) && ends_well(part) && part.chars().all(inner),
    };
    text.len() <= LONGEST && parts.iter().enumerate().all(fine)
}

/// `net/ipv4/conf/eth0.1/x` is `net.ipv4.conf.eth0/1.x`: if the first separator is a slash, slashes and
/// dots are swapped.
pub fn with_dots(name: &str) -> String {
    if !name.find(['.', '/']).is_some_and(|at| name[at..].starts_with('/')) {
        return name.to_owned();
    }
    let swap = |c| match c {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    name.chars().map(swap).collect()
}

fn namespace(name: &str) -> Option<Namespace> {
    const IPC: [&str; 10] = [
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
        "kernel.shm",
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.msg",
    ];
    if IPC.contains(&name) || name.starts_with("fs.mqueue.") {
        return Some(Namespace::Ipc);
    }
    name.starts_with("net.").then_some(Namespace::Net)
}

/// Major and minor of `6.1.0-18-amd64`; zeros if there are none.
fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(['.', '-', '+']).map(|part| part.trim().parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list(patterns: &[&str]) -> Result<Sysctls, SysctlError> {
        let mut out = Sysctls::safe("6.1.0-18-amd64");
        for pattern in patterns {
            out.0.push(allowed(pattern)?);
        }
        Ok(out)
    }

    #[test]
    fn patterns_name_sysctls_of_namespaces() {
        for fine in [
            "kernel.msg*",
            "kernel.sem",
            "kernel/msg*",
            "kernel/sem",
            "net.*",
            "net.ipv4.conf.eth0/1.x",
            "fs.mqueue.*",
            "net.core.somaxconn",
        ] {
            assert!(list(&[fine]).is_ok(), "{fine}");
        }
        for bad in [
            " kernel.msg*",
            "kernel.msg* ",
            "net.-",
            "net.*.foo",
            "net.*/foo",
            "",
            ".net",
            "net..x",
            "Net.x",
        ] {
            let expected = SysctlError::Pattern(bad.into());
            assert_eq!(list(&[bad]).err(), Some(expected), "{bad}");
        }
        for (bad, name) in [("foo", "foo"), ("foo*", "foo"), ("kernel.*", "kernel."), ("*", "")] {
            let expected = SysctlError::NotNamespaced(name.into());
            assert_eq!(list(&[bad]).err(), Some(expected), "{bad}");
        }
    }

    #[test]
    fn pods_set_safe_and_allowed_sysctls() {
        let known = list(&["kernel.msg*", "kernel.sem", "net.b.*"]).expect("patterns");
        let check = |name: &str, on_host: &[&str], expected: Option<&str>| {
            let mut spec = json!({"containers": [], "securityContext":
                {"sysctls": [{"name": name, "value": "1"}]}});
            for field in on_host {
                spec[*field] = json!(true);
            }
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let expected = expected.map(|why| Reason {
                reason: "SysctlForbidden".into(),
                message: format!("forbidden sysctl: {why}"),
            });
            assert_eq!(known.check(&pod).err(), expected, "{name} {on_host:?}");
        };
        for fine in [
            "kernel.shm_rmid_forced",
            "kernel/shm_rmid_forced",
            "net.ipv4.ip_local_port_range",
            "net.ipv4.tcp_rmem",
            "kernel.msgmax",
            "kernel.sem",
            "kernel/sem",
            "net.b.c",
        ] {
            check(fine, &[], None);
        }
        check("net.core.somaxconn", &[], Some("\"net.core.somaxconn\" not allowlisted"));
        check("net/core/somaxconn", &[], Some("\"net.core.somaxconn\" not allowlisted"));
        check("kernel.shmmax", &[], Some("\"kernel.shmmax\" not allowlisted"));
        let range = "net.ipv4.ip_local_port_range";
        let why = "\"net.ipv4.ip_local_port_range.a\" not allowlisted";
        check(&format!("{range}.a"), &[], Some(why));
        let why = "\"net.ipv4.ip_local_port_range\" not allowed with host Net enabled";
        check(range, &["hostNetwork"], Some(why));
        check(range, &["hostIPC"], None);
        let why = "\"kernel.msgmax\" not allowed with host IPC enabled";
        check("kernel.msgmax", &["hostIPC"], Some(why));
        check("kernel.msgmax", &["hostNetwork"], None);
    }

    #[test]
    fn old_kernels_have_fewer_safe_sysctls() {
        let count = |release: &str| Sysctls::safe(release).0.len();
        assert_eq!(count("6.1.0-18-amd64"), SAFE.len());
        assert_eq!(count("4.14.300\n"), SAFE.len() - 2);
        assert_eq!(count("4.5"), SAFE.len() - 3);
        assert_eq!(count("unknown"), 5);
    }
}
