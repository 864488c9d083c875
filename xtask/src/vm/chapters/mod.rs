//! The chapters, in order.
//!
//! In: the machine and the cluster on it. Out: each chapter leaves the cluster of [`work`] behind as it
//! found it, or removes it (the last one).

mod disks;
mod lifecycle;
mod limits;
mod neighbours;
mod power;
mod security;
mod work;

use super::story::Story;
use crate::sh::Outcome;

pub struct Chapter {
    pub name: &'static str,
    /// All chapters after it rest on it.
    pub needed_by_all: bool,
    pub is_short: bool,
    pub tell: fn(&mut Story) -> Outcome,
}

const fn needed(name: &'static str, tell: fn(&mut Story) -> Outcome) -> Chapter {
    Chapter { name, needed_by_all: true, is_short: true, tell }
}

const fn short(name: &'static str, tell: fn(&mut Story) -> Outcome) -> Chapter {
    Chapter { name, needed_by_all: false, is_short: true, tell }
}

const fn long(name: &'static str, tell: fn(&mut Story) -> Outcome) -> Chapter {
    Chapter { name, needed_by_all: false, is_short: false, tell }
}

pub const CHAPTERS: &[Chapter] = &[
    needed("boot", lifecycle::boot),
    needed("install", lifecycle::install),
    needed("main job", work::main_job),
    short("services on the own node", work::services),
    short("cgroups", limits::cgroups),
    long("out of memory", limits::out_of_memory),
    long("swap", limits::swap),
    long("liveness back-off", work::liveness),
    long("apparmor", security::apparmor),
    long("user namespaces", security::users),
    short("restart of the service", lifecycle::restart),
    short("kill of the server", lifecycle::kill),
    short("reboot", lifecycle::reboot),
    long("graceful shutdown", lifecycle::graceful),
    long("disk full", disks::full),
    long("inodes full", disks::inodes),
    long("read-only", disks::read_only),
    long("slow disk", disks::slow),
    long("power cut", power::cuts),
    long("two machines", neighbours::two),
    short("uninstall", lifecycle::uninstall),
];
