//! Ports of a server and a node, and who has them.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};

use super::Report;

const ALL: [u8; 4] = [0, 0, 0, 0];
const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
const TCP: [([u8; 4], u16, &str); 5] = [
    (ALL, 6443, "the API (server)"),
    (ALL, 10250, "the kubelet's server"),
    (LOOPBACK, 10248, "the kubelet's health"),
    (ALL, 10256, "kube-proxy's health"),
    (LOOPBACK, 10249, "kube-proxy's metrics"),
];
const VXLAN: u16 = 8472;

pub fn check(data_dir: &Path, report: &mut Report) {
    let noted = std::fs::read_to_string(data_dir.join("decapod.pid")).unwrap_or_default();
    let ours = noted.trim().parse().ok();
    for (address, port, purpose) in TCP {
        let check = format!("port {port}");
        let Err(error) = TcpListener::bind(SocketAddr::from((address, port))) else {
            report.ok(&check, format!("free, for {purpose}"));
            continue;
        };
        if error.kind() != std::io::ErrorKind::AddrInUse {
            report.warning(&check, format!("not known: {error}"), "run this check as root");
            continue;
        }
        match owner(port) {
            Some(owner) if Some(owner.pid) == ours => report.ok(&check, "Decapod has it"),
            owner => report.missing(
                &check,
                format!(
                    "taken by {}",
                    owner.map_or_else(|| "another process".into(), |owner| owner.text())
                ),
                format!("stop that process; {purpose} needs the port"),
            ),
        }
    }
    // The kernel's own VXLAN device takes it, too; a server with one node does not need it.
    let vxlan = format!("port {VXLAN}/udp");
    match UdpSocket::bind(SocketAddr::from((ALL, VXLAN))) {
        Ok(_) => report.ok(&vxlan, "free, for pods of other nodes"),
        Err(_) => report.ok(&vxlan, "taken, by this or another overlay network"),
    }
}

/// The process that listens on a port, if we may see it.
pub fn owner_of(port: u16) -> Option<String> {
    owner(port).map(|owner| owner.text())
}

struct Owner {
    pid: u32,
    line: String,
}

impl Owner {
    fn text(&self) -> String {
        format!("process {} ({})", self.pid, self.line)
    }
}

fn owner(port: u16) -> Option<Owner> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    let text = tables.into_iter().flatten().collect::<String>();
    let sockets: Vec<PathBuf> = text
        .lines()
        .filter_map(|line| listener(line, port))
        .map(|inode| format!("socket:[{inode}]").into())
        .collect();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut owners = processes.filter_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let mut files = std::fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let has =
            files.any(|file| std::fs::read_link(file.path()).is_ok_and(|to| sockets.contains(&to)));
        let line = std::fs::read(process.path().join("cmdline")).ok().filter(|_| has)?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned();
        Some(Owner { pid, line })
    });
    owners.next()
}

/// The inode of a line of `/proc/net/tcp` if it is a listener on that port.
fn listener(line: &str, port: u16) -> Option<&str> {
    const LISTEN: &str = "0A";
    let mut words = line.split_whitespace().skip(1);
    let (_, local) = words.next()?.rsplit_once(':')?;
    let is_listening = words.nth(1)? == LISTEN;
    let inode = words.nth(5)?;
    (is_listening && u16::from_str_radix(local, 16).ok()? == port).then_some(inode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_port_is_named() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let owner = owner_of(port).expect("it is us");
        assert!(owner.starts_with(&format!("process {} (", std::process::id())), "{owner}");
    }
}
