//! Creates the sandbox namespaces that a thread of the node cannot create: a user namespace with
//! the network, IPC and UTS namespaces that it owns, and a shared PID namespace.
//!
//! The kernel lets no multi-threaded process enter a user namespace. And a network namespace
//! belongs to the user namespace in which it was created. So this single-threaded process creates
//! them all, in that order, and waits while the node pins them to files.
//!
//! ```text
//!  here                                            the node
//!  user namespace ── "users" ──────────────────►   writes uid_map and gid_map
//!  becomes root  ◄──────────────────── a line ──
//!  network, IPC, UTS, settings; the init of the shared PID namespace
//!                ── "made <pid of the init>" ───►   pins /proc/<this>/ns/…
//!  ends          ◄──────────────────── a line ──
//! ```

use std::io::{self, BufRead, Write};

use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid};
use serde::{Deserialize, Serialize};

use super::pause;
use crate::sandbox::Settings;

/// The namespaces to create; passed as JSON in the arguments.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Order {
    /// A user namespace, with network, IPC and UTS namespaces that get these settings.
    pub own: Option<Settings>,
    /// A PID namespace with an init.
    pub processes: bool,
}

pub(super) fn run(order: &str) -> i32 {
    match serde_json::from_str(order).map_err(io::Error::from).and_then(make) {
        Ok(()) => 0,
        Err(error) => {
            // The node process may be gone.
            let _ = say(&format!("error {error}"));
            1
        }
    }
}

fn make(order: Order) -> io::Result<()> {
    let _ = nix::unistd::setsid();
    if let Some(settings) = &order.own {
        unshare(CloneFlags::CLONE_NEWUSER)?;
        say("users")?;
        listen()?;
        become_root()?;
        let wanted = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
        unshare(wanted)?;
        settings.apply()?;
    }
    let init = if order.processes { pause::start()? } else { 0 };
    say(&format!("made {init}"))?;
    listen()
}

/// Becomes root in the user namespace that this process just entered.
pub(super) fn become_root() -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    Ok(())
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout();
    // An answer is one line.
    writeln!(out, "{}", line.replace('\n', " "))?;
    out.flush()
}

/// Waits for a line from the node; fails when the node process is gone.
fn listen() -> io::Result<()> {
    let mut line = String::new();
    match io::stdin().lock().read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}
