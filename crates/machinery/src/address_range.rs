//! Ranges of IP addresses, as users write them: `10.0.0.240-10.0.0.250`, `10.0.0.240-250`, `fd00::/112`, `10.0.0.7`.
//!
//! In: text. Out: the first and the last address, which belong to the range. Pure.
//! Invariant: both are of one family, and the first is not above the last.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    first: IpAddr,
    last: IpAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRange {
    #[error("expected FIRST-LAST, a CIDR or an address")]
    Format,
    #[error("the first address is above the last one, or of another family")]
    Order,
}

impl AddressRange {
    pub fn is_ipv4(&self) -> bool {
        self.first.is_ipv4()
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.is_ipv4()
            && (bits(self.first)..=bits(self.last)).contains(&bits(address))
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }

    /// The address with this number; the first one has 0.
    pub fn nth(&self, number: u128) -> Option<IpAddr> {
        let sum = bits(self.first).checked_add(number).filter(|sum| *sum <= bits(self.last))?;
        Some(match self.first {
            // The sum is between two addresses of 32 bits.
            IpAddr::V4(_) => Ipv4Addr::from_bits(sum as u32).into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(sum).into(),
        })
    }

    /// The number of an address in the range.
    pub fn number_of(&self, address: IpAddr) -> Option<u128> {
        self.contains(address).then(|| bits(address) - bits(self.first))
    }

    /// A network without the addresses that no host has: IPv4's network and broadcast addresses, and IPv6's
    /// address of all routers.
    fn of_network(network: IpAddr, length: u8) -> Option<Self> {
        let width: u32 = if network.is_ipv4() { 32 } else { 128 };
        let host = width.checked_sub(u32::from(length))?;
        let mask = 1u128.checked_shl(host).unwrap_or(0).wrapping_sub(1);
        let (first, last) = (bits(network) & !mask, bits(network) | mask);
        let (low, high) = match (network.is_ipv4(), host) {
            (_, 0 | 1) => (first, last),
            (true, _) => (first + 1, last - 1),
            (false, _) => (first + 1, last),
        };
        let all = match network {
            IpAddr::V4(_) => Self {
                first: Ipv4Addr::from_bits(low as u32).into(),
                last: Ipv4Addr::from_bits(high as u32).into(),
            },
            IpAddr::V6(_) => Self {
                first: Ipv6Addr::from_bits(low).into(),
                last: Ipv6Addr::from_bits(high).into(),
            },
        };
        Some(all)
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

impl FromStr for AddressRange {
    type Err = InvalidRange;

    fn from_str(text: &str) -> Result<Self, InvalidRange> {
        let address = |text: &str| text.trim().parse::<IpAddr>().map_err(|_| InvalidRange::Format);
        if let Some((network, length)) = text.split_once('/') {
            let length = length.trim().parse().map_err(|_| InvalidRange::Format)?;
            return Self::of_network(address(network)?, length).ok_or(InvalidRange::Format);
        }
        let Some((first, last)) = text.split_once('-') else {
            let only = address(text)?;
            return Ok(Self { first: only, last: only });
        };
        let first = address(first)?;
        // `10.0.0.240-250`: the last octet alone.
        let last = match (first, last.trim().parse::<u8>()) {
            (IpAddr::V4(v4), Ok(octet)) => {
                let [a, b, c, _] = v4.octets();
                IpAddr::from([a, b, c, octet])
            }
            _ => address(last)?,
        };
        let is_ordered = first.is_ipv4() == last.is_ipv4() && bits(first) <= bits(last);
        is_ordered.then_some(Self { first, last }).ok_or(InvalidRange::Order)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(to, "{}", self.first),
            false => write!(to, "{}-{}", self.first, self.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed() {
        let check = |text: &str, expected: Result<&str, InvalidRange>| {
            let parsed = text.parse::<AddressRange>().map(|range| range.to_string());
            assert_eq!(parsed, expected.map(ToOwned::to_owned), "{text}");
        };
        check("192.168.1.240-192.168.1.250", Ok("192.168.1.240-192.168.1.250"));
        check("192.168.1.240-250", Ok("192.168.1.240-192.168.1.250"));
        check("10.0.0.7", Ok("10.0.0.7"));
        check("10.0.0.0/30", Ok("10.0.0.1-10.0.0.2"));
        check("10.0.0.7/32", Ok("10.0.0.7"));
        check("10.0.0.6/31", Ok("10.0.0.6-10.0.0.7"));
        check("fd00::/112", Ok("fd00::1-fd00::ffff"));
        check("::/0", Ok("::1-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"));
        check("fd00::1 - fd00::5", Ok("fd00::1-fd00::5"));
        check("10.0.0.9-10.0.0.1", Err(InvalidRange::Order));
        check("10.0.0.9-3", Err(InvalidRange::Order));
        check("10.0.0.9-fd00::1", Err(InvalidRange::Order));
        for wrong in ["", "x", "10.0.0.0/33", "10.0.0.0/x", "10.0.0.1-x", "-"] {
            check(wrong, Err(InvalidRange::Format));
        }
    }

    #[test]
    fn addresses_have_numbers() {
        let range: AddressRange = "10.0.0.254-10.0.1.1".parse().expect("a range");
        let address = |text: &str| -> IpAddr { text.parse().expect("an address") };
        assert_eq!(range.nth(2), Some(address("10.0.1.0")));
        assert_eq!((range.nth(3), range.nth(4)), (Some(address("10.0.1.1")), None));
        assert_eq!(range.number_of(address("10.0.1.1")), Some(3));
        assert_eq!(range.number_of(address("10.0.1.2")), None);
        assert_eq!(range.number_of(address("::a00:100")), None, "another family");
        let other: AddressRange = "10.0.1.1-10.0.1.9".parse().expect("a range");
        assert!(range.overlaps(&other) && other.overlaps(&range));
        assert!(!range.overlaps(&"10.0.1.2".parse().expect("a range")));
    }
}
