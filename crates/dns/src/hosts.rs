//! Names and addresses from a list in the format of `/etc/hosts`.
//!
//! In: lines. Out: look-ups by name and by address. Upstream: CoreDNS' `hosts`: TTL 3600 s by default, addresses of
//! the other family mean that the name exists, an unknown name is SERVFAIL unless the list falls through.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::wire::{Wire, ancestors, from_text};

const TTL: u32 = 3600;

#[derive(Clone, Debug)]
pub struct Hosts {
    by_name: HashMap<Wire, Vec<IpAddr>>,
    by_address: HashMap<IpAddr, Vec<Wire>>,
    pub ttl: u32,
    /// Names that the list does not have are asked elsewhere: all (the root), or those of some zones.
    pub fallthrough: Vec<Wire>,
    /// It answers for these zones.
    pub zones: Vec<Wire>,
    /// It answers for addresses too.
    pub reverse: bool,
}

impl Hosts {
    pub fn new(zones: Vec<Wire>) -> Self {
        Self {
            by_name: HashMap::new(),
            by_address: HashMap::new(),
            ttl: TTL,
            fallthrough: vec![],
            zones,
            reverse: true,
        }
    }

    /// Adds a line; `false` if it is not one of an address and names. Empty lines and comments are fine.
    pub fn add(&mut self, line: &str) -> bool {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let Some(address) = words.next() else { return true };
        // A zone index (`fe80::1%eth0`) means nothing to others.
        let address = address.split('%').next().unwrap_or_default();
        let Ok(address) = address.parse::<IpAddr>() else { return false };
        let mut all = true;
        for name in words {
            let Some(name) = from_text(name) else {
                all = false;
                continue;
            };
            let addresses = self.by_name.entry(name.clone()).or_default();
            if !addresses.contains(&address) {
                addresses.push(address);
                self.by_address.entry(address).or_default().push(name);
            }
        }
        all
    }

    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn concerns(&self, name: &[u8]) -> bool {
        is_below_any(name, &self.zones)
    }

    pub fn falls_through(&self, name: &[u8]) -> bool {
        is_below_any(name, &self.fallthrough)
    }

    pub fn addresses(&self, name: &[u8]) -> Option<&[IpAddr]> {
        self.by_name.get(name).map(Vec::as_slice)
    }

    pub fn names(&self, address: IpAddr) -> &[Wire] {
        if !self.reverse {
            return &[];
        }
        self.by_address.get(&address).map(Vec::as_slice).unwrap_or_default()
    }
}

/// Whether one of the zones has the name. Costs the labels of the name times the zones, which are few.
pub fn is_below_any(name: &[u8], zones: &[Wire]) -> bool {
    ancestors(name).any(|above| zones.iter().any(|zone| **zone == *above))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let mut hosts = Hosts::new(vec![]);
        assert!(hosts.add("10.0.0.1  Node-1 node-1.example. # the first"));
        assert!(hosts.add("fd00::1\tnode-1"));
        assert!(hosts.add("   # nothing"));
        assert!(!hosts.add("node-1 10.0.0.1"));
        let name = |text| from_text(text).expect("a name");
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let all = [ip("10.0.0.1"), ip("fd00::1")];
        assert_eq!(hosts.addresses(&name("node-1")), Some(&all[..]));
        assert_eq!(hosts.addresses(&name("node-2")), None);
        let names = [name("node-1"), name("node-1.example")];
        assert_eq!(hosts.names(ip("10.0.0.1")), names);
        hosts.reverse = false;
        assert!(hosts.names(ip("10.0.0.1")).is_empty());
    }

    #[test]
    fn zones_have_the_names_below() {
        let name = |text| from_text(text).expect("a name");
        let zones = [name("example.com")];
        for (text, expected) in [
            ("example.com", true),
            ("a.example.com", true),
            ("nexample.com", false),
            ("com", false),
        ] {
            assert_eq!(is_below_any(&name(text), &zones), expected, "{text}");
        }
        assert!(is_below_any(&name("com"), &[name("")]));
    }
}
