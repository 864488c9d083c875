//! The result of a plugin's ADD.
//!
//! In: what the last plugin of a network printed, in any version from 0.1.0 to 1.1.0. Out: the pod's addresses,
//! and what it says about links on the node. The JSON goes to the next plugin without a change.
//! Upstream: `pkg/types/*` of libcni; `createResult` of `containerd/go-cni`; `selectPodIPs` of containerd.

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::config::VERSIONS;
use super::plugin::shown;

/// The parts of a result that the runtime uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Of the pod's own interface, IPv4 first.
    pub addresses: Vec<IpNet>,
    /// Interfaces on the node.
    pub links: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum OutcomeError {
    #[error("failed to unmarshal result {0:?}: {1}")]
    NotJson(String, serde_json::Error),
    #[error("unsupported CNI result version {0:?}")]
    Version(String),
    #[error("invalid interface config: {0}: invalid result")]
    Interface(&'static str),
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default, rename = "cniVersion")]
    version: String,
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    ips: Vec<Ip>,
    /// Results before 0.3.0.
    ip4: Option<OldIp>,
    ip6: Option<OldIp>,
}

#[derive(Deserialize)]
struct Interface {
    name: String,
    #[serde(default)]
    sandbox: String,
}

#[derive(Deserialize)]
struct Ip {
    /// Some plugins print -1 for no interface.
    interface: Option<i64>,
    address: IpNet,
}

#[derive(Deserialize)]
struct OldIp {
    ip: IpNet,
}

/// The printed result as JSON. One without a version has that of the network.
pub(super) fn parse(stdout: &[u8], version: &str) -> Result<Value, OutcomeError> {
    let parsed: Option<Map<String, Value>> = serde_json::from_slice(stdout)
        .map_err(|error| OutcomeError::NotJson(shown(stdout), error))?;
    let mut result = parsed.unwrap_or_default();
    if result.get("cniVersion").and_then(Value::as_str).is_none_or(str::is_empty) {
        result.insert("cniVersion".into(), version.into());
    }
    Ok(Value::Object(result))
}

impl Outcome {
    /// The addresses of the pod's interface of that name.
    pub(super) fn of(result: &Value, interface: &str) -> Result<Self, OutcomeError> {
        let raw = Raw::deserialize(result)
            .map_err(|error| OutcomeError::NotJson(shown(result.to_string().as_bytes()), error))?;
        if !VERSIONS.contains(&raw.version.as_str()) {
            return Err(OutcomeError::Version(raw.version));
        }
        let mut addresses = vec![];
        for ip in &raw.ips {
            let name = match ip.interface {
                None | Some(-1) => interface,
                Some(index) => {
                    let found = usize::try_from(index).ok().and_then(|at| raw.interfaces.get(at));
                    let refused =
                        OutcomeError::Interface("invalid IP configuration (interface number)");
                    found.map(|found| found.name.as_str()).ok_or(refused)?
                }
            };
            if name == interface {
                addresses.push(ip.address);
            }
        }
        addresses.extend(raw.ip4.into_iter().chain(raw.ip6).map(|old| old.ip));
        if let Some(first) = addresses.iter().position(|address| address.addr().is_ipv4()) {
            // The first IPv4 address becomes the pod's own; the others keep their order.
            addresses[..=first].rotate_right(1);
        }
        let on_node = raw.interfaces.into_iter().filter(|one| one.sandbox.is_empty());
        Ok(Self { addresses, links: on_node.map(|one| one.name).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(printed: &str, expected: Result<&[&str], &str>) {
        let outcome =
            parse(printed.as_bytes(), "1.0.0").and_then(|json| Outcome::of(&json, "eth0"));
        match expected {
            Ok(addresses) => {
                let got = outcome.expect("a result").addresses;
                let got: Vec<String> = got.iter().map(|net| net.addr().to_string()).collect();
                assert_eq!(got, addresses, "{printed}");
            }
            Err(part) => {
                let error = outcome.expect_err("refused").to_string();
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn results_of_all_versions_are_read() {
        check(r#"{"ips":[{"address":"10.1.0.2/16"}]}"#, Ok(&["10.1.0.2"]));
        check(
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.2/16"},"ip6":{"ip":"fd00::2/64"}}"#,
            Ok(&["10.1.0.2", "fd00::2"]),
        );
        check(
            r#"{"cniVersion":"0.4.0","interfaces":[{"name":"cni0"},{"name":"eth0","sandbox":"/n"}],
                "ips":[{"version":"6","interface":1,"address":"fd00::2/64"},
                       {"version":"4","interface":1,"address":"10.1.0.2/16","gateway":"10.1.0.1"}]}"#,
            Ok(&["10.1.0.2", "fd00::2"]),
        );
        // Other interfaces of the pod are not its address.
        check(
            r#"{"cniVersion":"1.1.0","interfaces":[{"name":"net1","sandbox":"/n"},{"name":"eth0","sandbox":"/n"}],
                "ips":[{"interface":0,"address":"192.168.9.2/24"},{"interface":1,"address":"10.1.0.2/16"}]}"#,
            Ok(&["10.1.0.2"]),
        );
        check("null", Ok(&[]));
        check("{}", Ok(&[]));
    }

    #[test]
    fn lies_are_refused() {
        check("hello", Err("failed to unmarshal result \"hello\""));
        check("", Err("failed to unmarshal result"));
        check("[1]", Err("failed to unmarshal result"));
        check(r#"{"ips":[{"address":"10.1.0.2"}]}"#, Err("failed to unmarshal result"));
        check(r#"{"ips":[{"address":"10.1.0.999/24"}]}"#, Err("failed to unmarshal result"));
        check(r#"{"cniVersion":"7.0.0"}"#, Err("unsupported CNI result version \"7.0.0\""));
        check(
            r#"{"ips":[{"interface":3,"address":"10.1.0.2/16"}]}"#,
            Err("invalid interface config: invalid IP configuration (interface number)"),
        );
    }
}
