//! Addresses and address ranges. Upstream: `k8s.io/apimachinery/pkg/util/validation/ip.go`.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use machinery::field::Path;
use release::features::{self, Feature};

use super::at::At;

const NO_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
const NO_CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";

/// As Go's older parser reads it: leading zeros are decimal.
pub(crate) fn sloppy(text: &str) -> Option<IpAddr> {
    if let Ok(ip) = text.parse::<Ipv6Addr>() {
        return Some(ip.into());
    }
    let parts: Vec<&str> = text.split('.').collect();
    if parts.len() != 4 {
        return None;
    }
    let mut octets = [0; 4];
    for (octet, part) in octets.iter_mut().zip(parts) {
        if part.is_empty() || part.len() > 4 || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *octet = part.parse::<u8>().ok()?;
    }
    Some(Ipv4Addr::from(octets).into())
}

fn is_mapped(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some())
}

/// An address in a field that is older than today's rules.
pub(crate) fn legacy(at: &At<'_>) {
    let Some(ip) = sloppy(at.str()) else { return at.invalid_text(NO_IP) };
    if !features::enabled(Feature::StrictIPCIDRValidation) {
        return;
    }
    if at.str().parse::<IpAddr>().is_err() {
        at.invalid("must not have leading 0s");
    }
    if is_mapped(&ip) {
        at.invalid("must not be an IPv4-mapped IPv6 address");
    }
}

/// As [`legacy`], but what was there before may stay.
pub(crate) fn legacy_unless(at: &At<'_>, before: &HashSet<&str>) {
    if !before.contains(at.str()) {
        legacy(at);
    }
}

/// An address in its one canonical form.
pub(crate) fn canonical(path: &Path, text: &str, at: &At<'_>) {
    let wrong = |detail: &str| at.errors().invalid(path, text, detail);
    match sloppy(text) {
        None => wrong(NO_IP),
        Some(_) if text.parse::<IpAddr>().is_err() => wrong("must not have leading 0s"),
        Some(ip) if is_mapped(&ip) => wrong("must not be an IPv4-mapped IPv6 address"),
        Some(ip) if ip.to_string() != text => {
            wrong(&format!("must be in canonical form ({:?})", ip.to_string()));
        }
        Some(_) => {}
    }
}

pub(super) fn sloppy_cidr(text: &str) -> Option<IpNet> {
    let (ip, length) = text.split_once('/')?;
    if length.is_empty() || !length.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    IpNet::new(sloppy(ip)?, length.parse().ok()?).ok()
}

/// A range in a field that is older than today's rules.
pub(crate) fn legacy_cidr(at: &At<'_>) {
    judge_cidr(at, false);
}

pub(crate) fn canonical_cidr(at: &At<'_>) {
    judge_cidr(at, true);
}

fn judge_cidr(at: &At<'_>, wants_canonical: bool) {
    let text = at.str();
    let Some(net) = sloppy_cidr(text) else { return at.invalid_text(NO_CIDR) };
    if !wants_canonical && !features::enabled(Feature::StrictIPCIDRValidation) {
        return;
    }
    // The type's own parser takes leading zeros.
    let has_zeros = text.split_once('/').is_none_or(|(ip, length)| {
        ip.parse::<IpAddr>().is_err() || length.len() > 1 && length.starts_with('0')
    });
    if has_zeros {
        at.invalid("must not have leading 0s in IP or prefix length");
    } else if is_mapped(&net.addr()) {
        at.invalid("must not have an IPv4-mapped IPv6 address");
    } else if net.addr() != net.network() {
        at.invalid("must not have bits set beyond the prefix length");
    } else if wants_canonical && net.to_string() != text {
        at.invalid(&format!("must be in canonical form ({:?})", net.to_string()));
    }
}

pub(crate) fn cidr_of(text: &str) -> Option<IpNet> {
    sloppy_cidr(text)
}

/// An address that traffic can go to.
pub(crate) fn endpoint(at: &At<'_>) {
    let Some(ip) = sloppy(at.str()) else {
        return at.invalid_text("must be a valid IP address");
    };
    if ip.is_unspecified() {
        at.invalid(&format!("may not be unspecified ({})", at.str()));
    }
    if ip.is_loopback() {
        at.invalid("may not be in the loopback range (127.0.0.0/8, ::1/128)");
    }
    let (local, multicast) = match ip {
        IpAddr::V4(ip) => (ip.is_link_local(), ip.octets()[..3] == [224, 0, 0]),
        IpAddr::V6(ip) => {
            (ip.segments()[0] & 0xffc0 == 0xfe80, ip.segments()[0] & 0xff0f == 0xff02)
        }
    };
    if local {
        at.invalid("may not be in the link-local range (169.254.0.0/16, fe80::/10)");
    }
    if multicast {
        at.invalid("may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)");
    }
}

/// More than one of a family, or more than two?
pub(crate) fn is_dual_stack(families: impl Iterator<Item = bool>) -> bool {
    let all: Vec<bool> = families.collect();
    all.len() <= 2 && (all.len() < 2 || all[0] != all[1])
}
