//! Image names, completed as docker and containerd do: `busybox` is
//! `docker.io/library/busybox:latest`.

use super::{Error, Result};

/// A complete name: `registry/repository[:tag][@digest]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    pub registry: String,
    pub repository: String,
    /// Always set when there is no digest.
    pub tag: Option<String>,
    /// `sha256:<hex>`.
    pub digest: Option<String>,
}

impl Name {
    pub fn parse(text: &str) -> Result<Self> {
        let invalid = || {
            Error::Invalid(format!("couldn't parse image name {text:?}: invalid reference format"))
        };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) if is_digest(digest) => (rest, Some(digest.to_owned())),
            Some(_) => return Err(invalid()),
            None => (text, None),
        };
        let (path, tag) = match rest.rsplit_once(':') {
            // A colon before the last slash starts a port.
            Some((path, tag)) if !tag.contains('/') => (path, Some(tag.to_owned())),
            _ => (rest, None),
        };
        let (registry, repository) = match path.split_once('/') {
            Some((first, rest))
                if first.contains(['.', ':'])
                    || first == "localhost"
                    || first.chars().any(char::is_uppercase) =>
            {
                (first.to_owned(), rest.to_owned())
            }
            _ => ("docker.io".to_owned(), path.to_owned()),
        };
        let registry = if registry == "index.docker.io" { "docker.io".into() } else { registry };
        let repository = if registry == "docker.io" && !repository.contains('/') {
            format!("library/{repository}")
        } else {
            repository
        };
        let good_tag = tag.as_deref().is_none_or(is_tag);
        if !good_tag || !is_registry(&registry) || !repository.split('/').all(is_component) {
            return Err(invalid());
        }
        let tag = match (&tag, &digest) {
            (None, None) => Some("latest".to_owned()),
            _ => tag,
        };
        Ok(Self { registry, repository, tag, digest })
    }

    /// `registry/repository`.
    pub fn bare(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// `registry/repository@digest`.
    pub fn with_digest(&self, digest: &str) -> String {
        format!("{}@{digest}", self.bare())
    }

    /// `registry/repository:tag`, when there is a tag.
    pub fn tagged(&self) -> Option<String> {
        Some(format!("{}:{}", self.bare(), self.tag.as_ref()?))
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => f.write_str(&self.with_digest(digest)),
            (None, Some(tag)) => write!(f, "{}:{tag}", self.bare()),
            (None, None) => f.write_str(&self.bare()),
        }
    }
}

pub fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    })
}

fn is_tag(tag: &str) -> bool {
    (1..=128).contains(&tag.len())
        && !tag.starts_with(['.', '-'])
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// A host with an optional port. It becomes part of a URL, so other characters are refused.
/// Upstream: the reference grammar's `domain`.
fn is_registry(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let is_of_label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(is_of_label)
    };
    let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host.split('.').all(is_label),
    };
    let is_port = |port: &str| {
        port.bytes().all(|byte| byte.is_ascii_digit())
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    };
    is_host && port.is_none_or(is_port)
}

fn is_component(part: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    ends(part.chars().next())
        && ends(part.chars().last())
        && part.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_completed() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(
                Name::parse(text).ok().map(|n| n.to_string()).as_deref(),
                expected,
                "{text}"
            );
        };
        let hex = "a".repeat(64);
        check("busybox", Some("docker.io/library/busybox:latest"));
        check("docker.io/busybox:1.36", Some("docker.io/library/busybox:1.36"));
        check("team/app", Some("docker.io/team/app:latest"));
        check("127.0.0.1:5000/app:v1", Some("127.0.0.1:5000/app:v1"));
        check("localhost/app", Some("localhost/app:latest"));
        check("registry.k8s.io/pause:3.10", Some("registry.k8s.io/pause:3.10"));
        check(&format!("quay.io/a/b@sha256:{hex}"), Some(&format!("quay.io/a/b@sha256:{hex}")));
        check("[fd00::1]:5000/app:v1", Some("[fd00::1]:5000/app:v1"));
        check("Registry/app", Some("Registry/app:latest"));
        for registry in [
            "10.0.0.1:80?",
            "10.0.0.1?x.y",
            "10.0.0.1#x.y",
            "user@10.0.0.1",
            "a.b%2f",
            "a..b",
            "-a.b",
            "a.b:",
            "a.b:0",
            "a.b:65536",
            "a.b:+80",
            "a.b:80:90",
            "[::1",
            "[x]:80",
            "a b.c",
            "a.b\\",
        ] {
            check(&format!("{registry}/app"), None);
        }
        check("Upper", None);
        check("a b", None);
        check("app:", None);
        check("", None);
        check("app@sha256:12", None);
    }
}
