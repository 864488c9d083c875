//! The network: an address for others, the node's name, firewalls beside us.

use super::Report;
use super::machine::Machine;

const OPEN: &str = "open TCP 6443 (server) and 10250, UDP 8472, and allow traffic of pods and Services (10.42.0.0/16, 10.43.0.0/16)";

pub async fn check(machine: &Machine, report: &mut Report) {
    address(report).await;
    let name = machine.name.to_lowercase();
    match machinery::names::dns1123_subdomain(&name).first() {
        None => report.ok("node name", name),
        Some(wrong) => report.missing(
            "node name",
            format!("{name:?} cannot be used: {wrong}"),
            "change the host name, or give --node-name",
        ),
    }
    match machine.number("/proc/sys/net/ipv4/ip_forward") {
        Some(1) => report.ok("forwarding", "on"),
        Some(_) => report.ok("forwarding", "off, the start turns it on"),
        None => report.missing("forwarding", "not known", "a node needs IPv4"),
    }
    let ufw = machine.read("/etc/ufw/ufw.conf").unwrap_or_default();
    if ufw.lines().any(|line| line.trim() == "ENABLED=yes") {
        report.warning("firewall", "ufw is enabled", OPEN);
    }
    if machine.exists("/run/firewalld") || runs("firewalld") {
        report.warning("firewall", "firewalld runs", OPEN);
    }
}

async fn address(report: &mut Report) {
    let uplink = match net::Links::open() {
        Ok(links) => links.uplink().await.ok().flatten(),
        Err(_) => None,
    };
    match uplink {
        Some(uplink) => report.ok("address", format!("{} ({})", uplink.address, uplink.interface)),
        None => report.warning(
            "address",
            "no default route",
            "other machines need an address of this one: give --node-ip",
        ),
    }
}

fn runs(program: &str) -> bool {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        std::fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim() == program)
    })
}
