//! The file of the provider `metal`. Pure, except for reading.
//!
//! ```yaml
//! region: berlin                      # of machines that have no region
//! machines:
//! - name: rack1-a                     # the Node's name
//!   zone: rack1
//!   type: r650
//!   addresses:
//!   - {type: InternalIP, address: 10.0.0.4}
//! power: {command: [/usr/local/bin/power], timeout: 10s}
//! loadBalancers: {command: [/usr/local/bin/balancer], timeout: 1m}
//! ```
//!
//! Invariants: unknown fields are errors; names and provider IDs are unique.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use k8s_openapi::api::core::v1::NodeAddress;
use serde::Deserialize;

use super::PREFIX;
use super::command::Program;
use crate::provider::{Metadata, OpenError};

const TYPES: [&str; 5] = ["InternalIP", "ExternalIP", "Hostname", "InternalDNS", "ExternalDNS"];

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Inventory {
    #[serde(default)]
    pub region: String,
    pub machines: Vec<Machine>,
    /// Prints whether a machine is on or off. Without it no machine counts as shut down.
    pub power: Option<Program>,
    /// Makes load balancers. Without it another controller serves Services of type LoadBalancer.
    pub load_balancers: Option<Program>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Machine {
    /// The Node's name; not needed with a provider ID.
    #[serde(default)]
    pub name: String,
    /// `metal://NAME` by default. The kubelet's `--provider-id`, if it has one.
    #[serde(default, rename = "providerID")]
    provider_id: String,
    #[serde(default)]
    zone: String,
    #[serde(default)]
    region: String,
    #[serde(default, rename = "type")]
    instance_type: String,
    #[serde(default)]
    addresses: Vec<NodeAddress>,
    /// Further labels of the Node.
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

impl Machine {
    pub fn id(&self) -> String {
        match self.provider_id.as_str() {
            "" => format!("{PREFIX}{}", self.name),
            id => id.to_owned(),
        }
    }

    /// The provider ID decides if both have one, otherwise the name.
    fn is(&self, node: &str, id: &str) -> bool {
        match id.is_empty() || self.provider_id.is_empty() {
            true => !self.name.is_empty() && self.name == node,
            false => self.provider_id == id,
        }
    }
}

impl Inventory {
    pub fn read(path: &Path) -> Result<Self, OpenError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| OpenError::Read { path: path.to_owned(), source })?;
        let invalid = |reason| OpenError::Invalid { path: path.to_owned(), reason };
        let inventory: Self =
            serde_saphyr::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        match inventory.mistake() {
            Some(mistake) => Err(invalid(mistake)),
            None => Ok(inventory),
        }
    }

    /// The first mistake, with its place in the file.
    fn mistake(&self) -> Option<String> {
        let (mut names, mut ids) = (BTreeSet::new(), BTreeSet::new());
        for (index, machine) in self.machines.iter().enumerate() {
            let at = format!("machines[{index}]");
            if machine.name.is_empty() && machine.provider_id.is_empty() {
                return Some(format!("{at}: name or providerID is required"));
            }
            if !machine.name.is_empty() && !names.insert(machine.name.as_str()) {
                return Some(format!("{at}.name: {:?} is there twice", machine.name));
            }
            if !ids.insert(machine.id()) {
                return Some(format!("{at}.providerID: {:?} is there twice", machine.id()));
            }
            for (number, one) in machine.addresses.iter().enumerate() {
                let at = format!("{at}.addresses[{number}]");
                if !TYPES.contains(&one.type_.as_str()) {
                    return Some(format!(
                        "{at}.type: {:?}: expected one of {}",
                        one.type_,
                        TYPES.join(", ")
                    ));
                }
                let is_ip = one.address.parse::<std::net::IpAddr>().is_ok();
                if one.type_.ends_with("IP") && !is_ip {
                    return Some(format!("{at}.address: {:?} is no IP address", one.address));
                }
            }
        }
        let programs = [("power", &self.power), ("loadBalancers", &self.load_balancers)];
        let empty = programs.iter().find(|(_, one)| one.as_ref().is_some_and(Program::is_empty));
        empty.map(|(name, _)| format!("{name}.command: a program is required"))
    }

    /// The machine of a Node.
    pub fn machine(&self, node: &str, id: &str) -> Option<&Machine> {
        self.machines.iter().find(|machine| machine.is(node, id))
    }

    pub fn metadata(&self, machine: &Machine) -> Metadata {
        let region = Some(&machine.region).filter(|region| !region.is_empty());
        Metadata {
            provider_id: machine.id(),
            instance_type: machine.instance_type.clone(),
            addresses: machine.addresses.clone(),
            zone: machine.zone.clone(),
            region: region.unwrap_or(&self.region).clone(),
            labels: machine.labels.clone(),
        }
    }
}
