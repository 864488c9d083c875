//! Addresses out of a range, one for each pod or node that wants one. Pure.
//!
//! Invariant: an address is given to one at a time. The next free one after the last given is taken, so that
//! an address rests before it is used again, as an allocator of a network plugin does.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Offsets of one range and, for nodes with two families, of a second one in step.
#[derive(Debug)]
pub struct Pool {
    ranges: Vec<IpNet>,
    /// One above the last offset that may be given.
    end: u128,
    used: BTreeSet<u128>,
    next: u128,
}

/// The network's own address and the gateway's.
const KEPT: u128 = 2;

impl Pool {
    /// `None` without a range.
    pub fn new(ranges: Vec<IpNet>) -> Option<Self> {
        let room = |range: &IpNet| 1_u128 << (range.max_prefix_len() - range.prefix_len()).min(100);
        // The last address is the broadcast's.
        let end = ranges.iter().map(room).min()?.saturating_sub(1);
        Some(Self { ranges, end, used: BTreeSet::new(), next: KEPT })
    }

    pub fn ranges(&self) -> &[IpNet] {
        &self.ranges
    }

    /// An offset that is free; `None` if there is none left.
    pub fn take(&mut self) -> Option<u128> {
        if self.used.len() as u128 >= self.end.saturating_sub(KEPT) {
            return None;
        }
        while self.used.contains(&self.next) || self.next >= self.end {
            self.next = if self.next >= self.end { KEPT } else { self.next + 1 };
        }
        let found = self.next;
        self.used.insert(found);
        self.next += 1;
        Some(found)
    }

    /// An address that something has already; `None` if it is not of this range.
    pub fn note(&mut self, address: IpAddr) -> Option<u128> {
        let range = self.ranges.iter().find(|range| range.contains(&address))?;
        let offset = number(address) - number(range.network());
        self.used.insert(offset);
        Some(offset)
    }

    pub fn give_back(&mut self, offset: u128) {
        self.used.remove(&offset);
    }

    /// The addresses of an offset, one for each range.
    pub fn at(&self, offset: u128) -> Vec<IpAddr> {
        self.ranges.iter().map(|range| above(range.network(), offset)).collect()
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

fn above(network: IpAddr, offset: u128) -> IpAddr {
    match network {
        IpAddr::V4(network) => {
            let offset = u32::try_from(offset).unwrap_or(u32::MAX);
            Ipv4Addr::from(u32::from(network).saturating_add(offset)).into()
        }
        IpAddr::V6(network) => Ipv6Addr::from(u128::from(network).saturating_add(offset)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(ranges: &[&str]) -> Pool {
        let ranges = ranges.iter().map(|range| range.parse().expect("a range")).collect();
        Pool::new(ranges).expect("a range")
    }

    #[test]
    fn each_address_is_given_once() {
        let mut pool = pool(&["10.0.0.0/29"]);
        assert_eq!(pool.note("10.0.0.3".parse().expect("an address")), Some(3));
        assert_eq!(pool.note("10.0.1.3".parse().expect("an address")), None);
        let given: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(given, [2, 4, 5, 6]);
        pool.give_back(4);
        pool.give_back(3);
        assert_eq!((pool.take(), pool.take(), pool.take()), (Some(3), Some(4), None));
    }

    #[test]
    fn two_families_go_in_step() {
        let mut pool = pool(&["10.0.1.0/24", "fd00::/64"]);
        let offset = pool.take().expect("free");
        let addresses: Vec<String> = pool.at(offset).iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["10.0.1.2", "fd00::2"]);
        assert_eq!(pool.note("fd00::9".parse().expect("an address")), Some(9));
        assert!(Pool::new(Vec::new()).is_none());
    }

    #[test]
    fn a_range_without_room_gives_nothing() {
        assert_eq!(pool(&["10.0.0.1/32"]).take(), None);
        assert_eq!(pool(&["10.0.0.0/31"]).take(), None);
    }
}
