//! What this machine is, in the names that Go gave the field: nodes, images and versions use them; and
//! how its processors are shared among threads.

/// The operating system's.
pub const OS: &str = "linux";

/// The processor architecture's.
pub const ARCHITECTURE: &str = match std::env::consts::ARCH.as_bytes() {
    b"x86_64" => "amd64",
    b"aarch64" => "arm64",
    b"powerpc64" => "ppc64le",
    _ => std::env::consts::ARCH,
};

/// Lowers the priority of the calling thread, and of what is started from it, by so much.
pub fn yield_to_others(niceness: i32) -> std::io::Result<()> {
    set_priority((priority_of(0)? + niceness).min(LEAST))
}

/// For a process that was started from a thread of lower priority, and is not of that thread's work: the
/// priority of its parent's first thread. To be called before there are other threads.
pub fn take_priority_of_parent() -> std::io::Result<()> {
    set_priority(priority_of(nix::unistd::getppid().as_raw().cast_unsigned())?)
}

/// The kernel's least priority.
const LEAST: i32 = 19;

/// Of a thread by its number; 0 is the calling one.
fn priority_of(thread: u32) -> std::io::Result<i32> {
    nix::errno::Errno::clear();
    // SAFETY: the call takes numbers and touches no memory.
    let priority = unsafe { nix::libc::getpriority(nix::libc::PRIO_PROCESS as _, thread) };
    // -1 is a priority, too.
    match nix::errno::Errno::last_raw() {
        0 => Ok(priority),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn set_priority(niceness: i32) -> std::io::Result<()> {
    // SAFETY: as above.
    match unsafe { nix::libc::setpriority(nix::libc::PRIO_PROCESS as _, 0, niceness) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Both, as versions tell it: `linux/amd64`.
pub fn platform() -> String {
    format!("{OS}/{ARCHITECTURE}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_yields_alone() {
        let before = priority_of(0).expect("a priority");
        let yielding = std::thread::spawn(|| {
            yield_to_others(3).expect("lower is allowed");
            priority_of(0).expect("a priority")
        });
        let lower = yielding.join().expect("no panic");
        assert_eq!(lower, (before + 3).min(LEAST));
        assert_eq!(priority_of(0).expect("a priority"), before);
    }
}
