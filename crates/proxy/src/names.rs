//! Names of chains and sets, in upstream's format: a hash, then the purpose. The hash makes similar
//! names look different, and keeps truncated ones unique.
//!
//! `service-ULMVA6XW-ns1/svc1/tcp/p80`, `endpoint-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80`.

use std::net::SocketAddr;

use sha2::{Digest, Sha256};

use crate::services::PortName;

/// The kernel's limit on a name, minus the longest prefix.
const BASE_BYTES: usize = 240;

pub fn service(prefix: &str, name: &PortName) -> String {
    format!("{prefix}-{}", hashed(&path(name)))
}

/// The name of an endpoint's chain, which must not contain colons.
pub fn endpoint(prefix: &str, name: &PortName, to: &SocketAddr) -> String {
    let address = to.ip().to_string().replace(':', ".");
    format!("{prefix}-{}", hashed(&format!("{}__{address}/{}", path(name), to.port())))
}

fn path(name: &PortName) -> String {
    format!("{}/{}/{}/{}", name.namespace, name.service, name.proto.name(), name.port)
}

fn hashed(name: &str) -> String {
    let digest = Sha256::digest(name.as_bytes());
    let mut name = format!("{}-{name}", base32_prefix(&digest));
    if name.len() > BASE_BYTES {
        name.truncate(BASE_BYTES - 3);
        name.push_str("...");
    }
    name
}

/// The first eight characters of the base32 text (RFC 4648): forty bits.
fn base32_prefix(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let bits = bytes.iter().take(5).fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    (0..8).map(|i| ALPHABET[(bits >> (35 - 5 * i) & 31) as usize] as char).collect()
}

#[cfg(test)]
mod tests {
    use net::nft::Proto;

    use super::*;

    #[test]
    fn names_are_upstreams() {
        let name = |namespace: &str, service: &str| PortName {
            namespace: namespace.into(),
            service: service.into(),
            port: "p80".into(),
            proto: Proto::Tcp,
        };
        // The example in upstream's documentation.
        let ns1 = name("ns1", "svc1");
        assert_eq!(super::service("service", &ns1), "service-ULMVA6XW-ns1/svc1/tcp/p80");
        let to = "10.180.0.1:80".parse().expect("an address");
        let expected = "endpoint-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80";
        assert_eq!(endpoint("endpoint", &ns1, &to), expected);
        let to = "[fd00::1]:80".parse().expect("an address");
        assert!(endpoint("endpoint", &ns1, &to).ends_with("tcp/p80__fd00..1/80"));
        let long = super::service("service", &name(&"n".repeat(250), "svc"));
        assert_eq!(long.len(), "service-".len() + BASE_BYTES);
        assert!(long.ends_with("..."));
    }
}
