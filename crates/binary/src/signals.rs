//! A thread that waits for SIGTERM and SIGINT, and ensures that the process ends.
//!
//! ```text
//! signal ─► handler ─► pipe ─► thread ─► termination(): the runtime stops what runs
//!                                │
//!                                └─► a second signal, or END: the process ends at once
//! ```
//!
//! Invariant: the process ends within 10 s of the first signal (and `--shutdown-delay-duration`), even if
//! its runtimes hang: the thread waits only for the pipe. Acknowledged writes of the store are on the disk by then, so that an
//! immediate end loses nothing.
//! Deviation: upstream waits up to a minute for its requests; a service manager kills after 90 s.

use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use tokio::sync::watch;

/// Longest time from the first signal to the end.
const END: Duration = Duration::from_millis(9500);
/// The thread only makes system calls and writes a line.
const STACK: usize = 64 << 10;
/// Exit code of a shell for a process that a signal has ended.
const BY_SIGNAL: i32 = 128;

/// The file descriptor that the handler writes to.
static PIPE: AtomicI32 = AtomicI32::new(-1);
static ASKED: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::Sender::new(false));

/// Milliseconds in addition to [`END`].
static DELAY: AtomicU64 = AtomicU64::new(0);

/// Allows a stop to take longer, for a server that serves on after the signal.
pub fn extend(delay: Duration) {
    DELAY.store(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX), Ordering::Release);
}

/// Resolves at SIGINT or SIGTERM. Only after [`heed`].
pub async fn termination() {
    // The sender is static, so this cannot fail.
    let _ = ASKED.subscribe().wait_for(|is_asked| *is_asked).await;
}

/// From here on the signals no longer end the process immediately.
pub fn heed() -> io::Result<()> {
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
    let watching = move || watch_over(&reader, END);
    std::thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(watching)?;
    let action =
        SigAction::new(SigHandler::Handler(on_signal), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler is async-signal-safe: it loads an atomic and writes to a pipe.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

extern "C" fn on_signal(signal: i32) {
    let (descriptor, byte) = (PIPE.load(Ordering::Acquire), signal as u8);
    let errno = Errno::last_raw();
    // SAFETY: the byte lives here, and the descriptor is open as long as the process lives. If the pipe is
    // full, the thread has enough bytes to read.
    unsafe { nix::libc::write(descriptor, (&raw const byte).cast(), 1) };
    Errno::set_raw(errno);
}

fn watch_over(pipe: &OwnedFd, end: Duration) {
    let Some(first) = next(pipe, PollTimeout::NONE) else { return };
    ASKED.send_replace(true);
    crate::notify::tell(&[crate::notify::State::Stopping]);
    let end = end.saturating_add(Duration::from_millis(DELAY.load(Ordering::Acquire)));
    let limit = PollTimeout::try_from(end).unwrap_or(PollTimeout::MAX);
    match next(pipe, limit) {
        Some(second) => eprintln!("decapod: signal {second} after {first}: exiting at once"),
        None => eprintln!("decapod: not stopped {} ms after the signal, exiting", end.as_millis()),
    }
    // SAFETY: the call does not return. Unlike `exit`, it waits for no lock and no destructor.
    unsafe { nix::libc::_exit(BY_SIGNAL + i32::from(first)) }
}

/// The next signal within the limit.
fn next(pipe: &OwnedFd, limit: PollTimeout) -> Option<u8> {
    loop {
        let mut waits = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waits, limit) {
            Ok(0) => return None,
            // The handler may run in this thread, too.
            Err(Errno::EINTR) => {}
            Err(error) => {
                eprintln!("decapod: cannot wait for signals on {}: {error}", pipe.as_raw_fd());
                return None;
            }
            Ok(_) => {
                let mut byte = [0];
                if nix::unistd::read(pipe, &mut byte) == Ok(1) {
                    return Some(byte[0]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    use testkit::wait;

    use super::*;

    /// Set in the child process of the test.
    const SUBJECT: &str = "DECAPOD_TEST_SIGNALS";

    /// All threads of its runtime are blocked.
    #[test]
    fn a_busy_process() {
        if std::env::var_os(SUBJECT).is_none() {
            return;
        }
        heed().expect("signals are heeded");
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).enable_all().build().expect("a runtime");
        let _entered = runtime.enter();
        let tasks = base::task::Tasks::new("busy");
        static BUSY: AtomicUsize = AtomicUsize::new(0);
        for _ in 0..8 {
            tasks.spawn("busy", async {
                BUSY.fetch_add(1, Ordering::Relaxed);
                loop {
                    std::hint::spin_loop();
                }
            });
        }
        // A task that has not begun obeys the stop.
        let busy = wait::until(wait::LONG, "both threads are busy", || {
            anyhow::ensure!(BUSY.load(Ordering::Relaxed) == 2, "they are not");
            Ok(())
        });
        busy.expect("in time");
        println!("\nbusy");
        runtime.block_on(async {
            termination().await;
            tasks.shutdown(Duration::from_secs(3600)).await;
        });
    }

    /// Runs this program again as the process above.
    fn busy() -> Child {
        let mut command = Command::new(std::env::current_exe().expect("the program"));
        command.args(["--exact", "--nocapture", "signals::tests::a_busy_process"]);
        command.env(SUBJECT, "1").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().expect("it starts");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        assert!(output.lines().any(|line| line.expect("text") == "busy"));
        child
    }

    fn signal(child: &Child, signal: Signal) {
        kill(Pid::from_raw(child.id().cast_signed()), signal).expect("it is ours");
    }

    fn ends(mut child: Child) -> Option<i32> {
        let ended = wait::until(wait::LONG, "it ends", || {
            anyhow::Context::context(child.try_wait()?, "it still runs")
        });
        if ended.is_err() {
            let _ = child.kill();
        }
        ended.expect("in time").code()
    }

    #[test]
    fn a_busy_process_ends_within_ten_seconds() {
        let child = busy();
        let begun = wait::now();
        signal(&child, Signal::SIGTERM);
        assert_eq!(ends(child), Some(BY_SIGNAL + Signal::SIGTERM as i32));
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_second_signal_ends_it_at_once() {
        let child = busy();
        let begun = wait::now();
        signal(&child, Signal::SIGINT);
        // The kernel merges two pending signals: the second is sent after the first was handled.
        signal(&child, Signal::SIGTERM);
        assert!(ends(child).is_some());
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}
