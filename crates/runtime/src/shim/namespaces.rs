//! The namespaces of a sandbox that a thread of the node cannot make: users of its own with the
//! network, IPC and names that belong to them, and processes that containers share.
//!
//! The kernel lets no process with threads enter a user namespace, and gives the rights over a
//! network to the user namespace that it was made in. So this process, which has one thread, makes
//! them all, in that order, and waits while the node pins them to files.
//!
//! ```text
//!  here                                            the node
//!  user namespace ── "users" ──────────────────►   writes uid_map and gid_map
//!  root of them  ◄──────────────────── a line ──
//!  network, IPC, names, settings; the init of the shared processes
//!                ── "made <number of the init>" ►   pins /proc/<this>/ns/…
//!  ends          ◄──────────────────── a line ──
//! ```

use std::io::{self, BufRead, Write};

use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid};
use serde::{Deserialize, Serialize};

use super::pause;
use crate::sandbox::Settings;

/// What is to be made; the argument, as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Users of its own, with a network, IPC and names that have these settings.
    pub own: Option<Settings>,
    /// A process namespace with an init.
    pub processes: bool,
}

pub(super) fn run(order: &str) -> i32 {
    match serde_json::from_str(order).map_err(io::Error::from).and_then(make) {
        Ok(()) => 0,
        Err(error) => {
            // The node may be gone.
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

/// Of the user namespace that this process just entered.
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

/// For the node's word. When it is gone, so is what this was for.
fn listen() -> io::Result<()> {
    let mut line = String::new();
    match io::stdin().lock().read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}
