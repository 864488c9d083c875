//! The target of a connection, in validated parts.
//!
//! In: hosts and ports from API objects, which users and nodes write. Out: URIs, and whether an
//! address may be dialled for a user.
//!
//! Invariant: no URI is built by concatenating such a text. A host or a port that contains `@`,
//! `/`, `?` or `:` could lead to another host.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use http::Uri;
use http::uri::{Authority, Scheme};

/// The longest DNS name.
const NAME_BYTES: usize = 253;

/// An address, or a name that consists of letters, digits, `-`, `_` and single dots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Address(IpAddr),
    Name(String),
}

impl Host {
    /// `None`: the text is neither an address nor a valid name.
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse() {
            return Some(Self::Address(address));
        }
        let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let is_label = |label: &str| !label.is_empty() && label.bytes().all(is_of_name);
        // A dot at the end keeps the resolver from trying search domains.
        let name = text.strip_suffix('.').unwrap_or(text);
        let is_name = text.len() <= NAME_BYTES && name.split('.').all(is_label);
        (is_name && !ends_in_number(name)).then(|| Self::Name(text.to_owned()))
    }
}

/// Whether a resolver may read the name as an address: `127.1`, `2130706433`, `0x7f000001`.
fn ends_in_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    hex.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
        || last.bytes().all(|byte| byte.is_ascii_digit())
}

/// A host and a port that is not 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    host: Host,
    port: u16,
}

impl HostPort {
    /// `None`: host or port is invalid.
    pub fn new(host: &str, port: impl TryInto<u16>) -> Option<Self> {
        let port = port.try_into().ok().filter(|port| *port > 0)?;
        Some(Self { host: Host::parse(host)?, port })
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Another port of the same host.
    ///
    /// # Panics
    /// If the port is 0.
    #[must_use]
    pub fn with_port(self, port: u16) -> Self {
        assert!(port > 0, "callers have parsed the port");
        Self { port, ..self }
    }

    /// The URI of a path (with a leading slash) and a query on this host.
    pub fn uri(&self, scheme: Scheme, path_and_query: &str) -> Result<Uri, http::Error> {
        let authority = Authority::try_from(self.to_string())?;
        let uri = Uri::builder().scheme(scheme).authority(authority);
        uri.path_and_query(path_and_query).build()
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Address(address.ip()), port: address.port() }
    }
}

/// The format of Go's `net.JoinHostPort`.
impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        match host {
            Host::Address(IpAddr::V4(ip)) => write!(f, "{ip}:{port}"),
            Host::Address(IpAddr::V6(ip)) => write!(f, "[{ip}]:{port}"),
            Host::Name(name) => write!(f, "{name}:{port}"),
        }
    }
}

/// Whether packets to this address go to one other machine: it is not loopback, link-local or
/// multicast. An IPv4-mapped IPv6 address counts as its IPv4 address.
/// Upstream: `net.IP.IsGlobalUnicast`.
pub fn is_global_unicast(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let is_near = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_hosts_and_ports_are_refused() {
        let check = |host: &str, port: i64, expected: Option<&str>| {
            let got = HostPort::new(host, port).map(|place| place.to_string());
            assert_eq!(got.as_deref(), expected, "{host:?} {port}");
        };
        check("10.0.0.1", 80, Some("10.0.0.1:80"));
        check("fd00::1", 65_535, Some("[fd00::1]:65535"));
        check("node-1.example_x.com.", 10_250, Some("node-1.example_x.com.:10250"));
        for port in [0, -1, 65_536, 1 << 40] {
            check("10.0.0.1", port, None);
        }
        for host in [
            "",
            ".",
            "a..b",
            "10.0.0.1:80@169.254.169.254",
            "@localhost",
            "a/b",
            "a?b",
            "a#b",
            "a b",
            "a:80",
            "[::1]",
            "fe80::1%eth0",
            "a%2e",
            "ä.example",
            "a\r\nb",
            "2130706433",
            "127.1",
            "0x7f000001",
            "127.0.0.0x1",
        ] {
            check(host, 80, None);
        }
        check(&"a".repeat(254), 80, None);
    }

    #[test]
    fn uris_keep_their_host() {
        let check = |path: &str, expected: Option<&str>| {
            let place = HostPort::new("fd00::1", 443_i32).expect("a place");
            let uri = place.uri(Scheme::HTTPS, path);
            assert_eq!(uri.ok().map(|uri| uri.to_string()).as_deref(), expected, "{path}");
        };
        check("/a/b?c=d", Some("https://[fd00::1]:443/a/b?c=d"));
        check("//evil/x", Some("https://[fd00::1]:443//evil/x"));
        check("/@evil", Some("https://[fd00::1]:443/@evil"));
        check("/a b", None);
    }

    #[test]
    fn global_unicast_excludes_loopback_and_link_local() {
        for (ip, expected) in [
            ("10.42.0.3", true),
            ("8.8.8.8", true),
            ("fd00::3", true),
            ("::ffff:10.0.0.1", true),
            ("127.0.0.1", false),
            ("127.1.2.3", false),
            ("::1", false),
            ("::ffff:127.0.0.1", false),
            ("::ffff:169.254.169.254", false),
            ("169.254.169.254", false),
            ("fe80::1", false),
            ("febf::1", false),
            ("0.0.0.0", false),
            ("::", false),
            ("224.0.0.1", false),
            ("ff02::1", false),
            ("255.255.255.255", false),
        ] {
            assert_eq!(is_global_unicast(ip.parse().expect("an address")), expected, "{ip}");
        }
    }
}
