//! Errors of the kernel's network: a system call, a netlink answer, a missing link.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{action}: {source}")]
    System { action: String, source: io::Error },
    #[error("{action}{}: {source}", needs(.source))]
    Netlink { action: String, source: rtnetlink::Error },
    #[error("the kernel module {module} is not there and cannot be loaded: {action}")]
    NoModule { module: &'static str, action: String },
    #[error("no network interface {0:?}")]
    NoLink(String),
    #[error("{0}")]
    Invalid(String),
    #[error("the thread working in a network namespace died")]
    Worker,
}

/// A hint at the capability that the refused process lacks.
fn needs(error: &rtnetlink::Error) -> &'static str {
    match netlink_errno(error) {
        Some(libc::EPERM) => " (needs the capability CAP_NET_ADMIN)",
        _ => "",
    }
}

impl Error {
    /// The kernel's error number, if the kernel failed the call.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } => source.raw_os_error(),
            Self::Netlink { source, .. } => netlink_errno(source),
            Self::NoLink(_) => Some(libc::ENODEV),
            Self::NoModule { .. } => Some(libc::EOPNOTSUPP),
            Self::Invalid(_) | Self::Worker => None,
        }
    }

    /// Names the kernel module that is missing, if the kernel does not know this kind of object.
    pub(crate) fn names(self, module: &'static str) -> Self {
        let is_unknown = self.errno() == Some(libc::EOPNOTSUPP);
        match self {
            Self::Netlink { action, .. } if is_unknown => Self::NoModule { module, action },
            other => other,
        }
    }
}

pub(crate) fn netlink_errno(error: &rtnetlink::Error) -> Option<i32> {
    match error {
        rtnetlink::Error::NetlinkError(message) => Some(message.raw_code().abs()),
        _ => None,
    }
}

/// Adds the failed action to an error.
pub(crate) trait During<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::System { action: action(), source })
    }
}

impl<T> During<T> for nix::Result<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|errno| Error::System { action: action(), source: errno.into() })
    }
}

impl<T> During<T> for Result<T, rtnetlink::Error> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Netlink { action: action(), source })
    }
}

/// Treats these error numbers as success: the wanted state exists already.
pub(crate) fn tolerate(
    result: Result<(), rtnetlink::Error>,
    errnos: &[i32],
) -> Result<(), rtnetlink::Error> {
    match result {
        Err(error) if netlink_errno(&error).is_some_and(|n| errnos.contains(&n)) => Ok(()),
        other => other,
    }
}
