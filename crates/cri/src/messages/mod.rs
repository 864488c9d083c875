//! CRI's messages, with upstream's field numbers. Fields that only Windows or obsolete clients use
//! are absent (decoding skips them).
//!
//! Enumerations are `i32` fields, as on the wire. Each has a getter of the same name that returns
//! the enum (`status.state()`), or the default for an unknown number.

mod container;
mod image;
mod runtime;
mod sandbox;
mod stats;

pub use container::*;
pub use image::*;
pub use runtime::*;
pub use sandbox::*;
pub use stats::*;

/// Condition types of [`RuntimeStatus`].
pub const RUNTIME_READY: &str = "RuntimeReady";
pub const NETWORK_READY: &str = "NetworkReady";

impl From<i64> for Int64Value {
    fn from(value: i64) -> Self {
        Self { value }
    }
}

impl From<u64> for UInt64Value {
    fn from(value: u64) -> Self {
        Self { value }
    }
}

impl ImageSpec {
    pub fn named(image: impl Into<String>) -> Self {
        Self { image: image.into(), ..Default::default() }
    }
}

impl std::fmt::Debug for AuthConfig {
    /// Omits the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthConfig")
            .field("username", &self.username)
            .field("server_address", &self.server_address)
            .finish_non_exhaustive()
    }
}

impl Signal {
    /// The kernel's number on Linux (x86, Arm, RISC-V); `None` for the runtime's default.
    pub fn number(self) -> Option<i32> {
        let standard = match self {
            Self::RuntimeDefault => return None,
            Self::Sighup => 1,
            Self::Sigint => 2,
            Self::Sigquit => 3,
            Self::Sigill => 4,
            Self::Sigtrap => 5,
            Self::Sigabrt | Self::Sigiot => 6,
            Self::Sigbus => 7,
            Self::Sigfpe => 8,
            Self::Sigkill => 9,
            Self::Sigusr1 => 10,
            Self::Sigsegv => 11,
            Self::Sigusr2 => 12,
            Self::Sigpipe => 13,
            Self::Sigalrm => 14,
            Self::Sigterm => 15,
            Self::Sigstkflt => 16,
            Self::Sigchld | Self::Sigcld => 17,
            Self::Sigcont => 18,
            Self::Sigstop => 19,
            Self::Sigtstp => 20,
            Self::Sigttin => 21,
            Self::Sigttou => 22,
            Self::Sigurg => 23,
            Self::Sigxcpu => 24,
            Self::Sigxfsz => 25,
            Self::Sigvtalrm => 26,
            Self::Sigprof => 27,
            Self::Sigwinch => 28,
            Self::Sigio | Self::Sigpoll => 29,
            Self::Sigpwr => 30,
            Self::Sigsys => 31,
            Self::Sigrtmin => 34,
            Self::Sigrtmax => 64,
            _ => 0,
        };
        if standard != 0 {
            return Some(standard);
        }
        let name = self.name();
        let tail = |prefix: &str| name.strip_prefix(prefix)?.parse::<i32>().ok();
        tail("SIGRTMIN+").map(|n| 34 + n).or_else(|| tail("SIGRTMAX-").map(|n| 64 - n))
    }

    /// The API's name: `SIGTERM`, `SIGRTMIN+3`; empty for the runtime's default.
    pub fn name(self) -> String {
        if self == Self::RuntimeDefault {
            return String::new();
        }
        format!("{self:?}").to_ascii_uppercase().replace("PLUS", "+").replace("MINUS", "-")
    }

    /// The first signal with that number; some numbers have two names.
    pub fn from_number(number: i32) -> Option<Self> {
        (0..=65).filter_map(|n| Self::try_from(n).ok()).find(|one| one.number() == Some(number))
    }

    /// The inverse of [`Signal::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        (0..=65).filter_map(|n| Self::try_from(n).ok()).find(|signal| signal.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// Bytes of another client: field 1 metadata, 8 linux, an unknown field 200.
    #[test]
    fn messages_have_upstreams_numbers_and_skip_unknown_fields() {
        let config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "p".into(),
                attempt: 2,
                ..Default::default()
            }),
            linux: Some(LinuxPodSandboxConfig { cgroup_parent: "/k".into(), ..Default::default() }),
            ..Default::default()
        };
        let mut bytes = config.encode_to_vec();
        assert_eq!(bytes, [0x0a, 5, 0x0a, 1, b'p', 0x20, 2, 0x42, 4, 0x0a, 2, b'/', b'k']);
        bytes.extend([0xc0, 0x0c, 1]);
        assert_eq!(PodSandboxConfig::decode(&bytes[..]), Ok(config));
    }

    #[test]
    fn signals_have_the_kernels_numbers() {
        let check = |name: &str, number| {
            assert_eq!(Signal::from_name(name).map(Signal::number), Some(number), "{name}");
        };
        check("", None);
        check("SIGTERM", Some(15));
        check("SIGRTMIN+3", Some(37));
        check("SIGRTMAX-1", Some(63));
        check("SIGRTMAX", Some(64));
        for (number, expected) in [
            (15, Some(Signal::Sigterm)),
            (6, Some(Signal::Sigabrt)),
            (37, Some(Signal::Sigrtminplus3)),
            (63, Some(Signal::Sigrtmaxminus1)),
            (0, None),
            (33, None),
        ] {
            assert_eq!(Signal::from_number(number), expected, "{number}");
        }
    }

    #[test]
    fn credentials_are_not_printed() {
        let auth = AuthConfig { password: "hush".into(), ..Default::default() };
        assert!(!format!("{auth:?}").contains("hush"));
    }
}
