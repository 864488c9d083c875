//! Tells the service manager the state of this process: sd_notify(3), in a datagram.
//!
//! In: `NOTIFY_SOCKET`, a path or an abstract name with `@` in front; `WATCHDOG_USEC` and `WATCHDOG_PID`. Out:
//! lines `NAME=VALUE`. Without a service manager nothing is sent.
//!
//! Invariant: telling never blocks and never fails its caller. A service manager that misses a message sees the
//! next one, or restarts the process by its watchdog.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::LazyLock;
use std::time::Duration;

/// What the service manager may know.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State<'a> {
    /// The start is complete.
    Ready,
    /// The process ends on purpose.
    Stopping,
    /// The watchdog's time begins again.
    Alive,
    /// A line for `systemctl status`.
    Status(&'a str),
}

static MANAGER: LazyLock<Option<Manager>> = LazyLock::new(|| {
    let address = std::env::var("NOTIFY_SOCKET").ok().filter(|address| !address.is_empty())?;
    let manager = Manager::at(&address);
    if manager.is_none() {
        tracing::warn!(address, "failed to open the service manager's socket (NOTIFY_SOCKET)");
    }
    manager
});

/// Whether a service manager listens.
pub fn is_managed() -> bool {
    MANAGER.is_some()
}

pub fn tell(states: &[State]) {
    if let Some(manager) = MANAGER.as_ref() {
        manager.tell(states);
    }
}

/// How often to tell [`State::Alive`]: twice in the watchdog's time.
pub fn watchdog() -> Option<Duration> {
    let variable = |name: &str| std::env::var(name).ok();
    period(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"), std::process::id())
}

/// Upstream: sd_watchdog_enabled(3).
fn period(micros: Option<String>, of: Option<String>, own: u32) -> Option<Duration> {
    let is_ours = of.is_none_or(|pid| pid.parse() == Ok(own));
    let micros: u64 = micros?.parse().ok().filter(|micros| *micros > 0)?;
    is_ours.then(|| Duration::from_micros(micros) / 2)
}

struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl Manager {
    fn at(address: &str) -> Option<Self> {
        let address = match address.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(address),
        };
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, address: address.ok()? })
    }

    fn tell(&self, states: &[State]) {
        let lines: Vec<String> = states.iter().map(|state| state.line()).collect();
        if let Err(error) = self.socket.send_to_addr(lines.join("\n").as_bytes(), &self.address) {
            tracing::debug!(%error, "failed to send to the service manager");
        }
    }
}

impl State<'_> {
    fn line(self) -> String {
        match self {
            Self::Ready => "READY=1".to_owned(),
            Self::Stopping => "STOPPING=1".to_owned(),
            Self::Alive => "WATCHDOG=1".to_owned(),
            Self::Status(text) => format!("STATUS={}", text.replace('\n', " ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_sockets_get_the_lines() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("notify").display().to_string();
        let name = format!("decapod-test-{}", base::rng::uuid());
        let by_name = SocketAddr::from_abstract_name(&name).expect("an address");
        let at_path = UnixDatagram::bind(&path).expect("bound");
        let at_name = UnixDatagram::bind_addr(&by_name).expect("bound");
        for (listener, address) in [(at_path, path), (at_name, format!("@{name}"))] {
            let manager = Manager::at(&address).expect("a socket");
            manager.tell(&[State::Ready, State::Status("two\nlines")]);
            manager.tell(&[State::Alive]);
            manager.tell(&[State::Stopping]);
            let mut buffer = [0; 100];
            for expected in ["READY=1\nSTATUS=two lines", "WATCHDOG=1", "STOPPING=1"] {
                let length = listener.recv(&mut buffer).expect("a datagram");
                assert_eq!(std::str::from_utf8(&buffer[..length]), Ok(expected));
            }
            drop(listener);
            // The listener is gone.
            manager.tell(&[State::Alive]);
        }
    }

    #[test]
    fn the_watchdog_is_told_twice_in_its_time() {
        let text = |text: &str| Some(text.to_owned());
        let second = Some(Duration::from_secs(1));
        assert_eq!(period(text("2000000"), None, 7), second);
        assert_eq!(period(text("2000000"), text("7"), 7), second);
        assert_eq!(period(text("2000000"), text("8"), 7), None);
        assert_eq!(period(text("0"), None, 7), None);
        assert_eq!(period(text("x"), None, 7), None);
        assert_eq!(period(None, None, 7), None);
    }
}
