//! Our standard input, read by a thread that can be stopped.
//!
//! A read of a terminal blocks until the user types, and `tokio`'s would keep the process alive after the
//! command has ended. So a thread polls the input together with a pipe whose other end we hold: dropping
//! that end wakes the thread, and the thread is joined.
//!
//! Invariant: bytes are read only on demand: at most a few chunks are buffered.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::mpsc;

const CHUNK: usize = 32 << 10;
const CHUNKS: usize = 2;

pub struct Stdin {
    chunks: Option<mpsc::Receiver<Vec<u8>>>,
    /// Dropped to stop the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Stdin {
    pub fn open() -> io::Result<Self> {
        Self::over(io::stdin().as_fd().try_clone_to_owned()?)
    }

    fn over(input: OwnedFd) -> io::Result<Self> {
        let (stopped, stop) = nix::unistd::pipe()?;
        let (sender, chunks) = mpsc::channel(CHUNKS);
        let thread = std::thread::Builder::new()
            .name("stdin".into())
            .spawn(move || read(&input, &stopped, &sender))?;
        Ok(Self { chunks: Some(chunks), stop: Some(stop), thread: Some(thread) })
    }

    /// `None` at the end of the input.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        self.chunks.as_mut()?.recv().await
    }
}

impl Drop for Stdin {
    fn drop(&mut self) {
        self.chunks = None;
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

fn read(input: &OwnedFd, stopped: &OwnedFd, sender: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let mut ready = [
            PollFd::new(input.as_fd(), PollFlags::POLLIN),
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        if ready[1].any() == Some(true) {
            return;
        }
        match nix::unistd::read(input, &mut buffer) {
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Ok(0) | Err(_) => return,
            Ok(count) => {
                if sender.blocking_send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn input_ends_with_its_writer_or_its_reader() {
        let (read_end, write_end) = nix::unistd::pipe().expect("a pipe");
        let mut stdin = Stdin::over(read_end).expect("a thread");
        nix::unistd::write(&write_end, b"hello").expect("writes");
        assert_eq!(stdin.next().await.as_deref(), Some(&b"hello"[..]));
        drop(write_end);
        assert_eq!(stdin.next().await, None);

        let (read_end, _write_end) = nix::unistd::pipe().expect("a pipe");
        // There is no writer: the drop must not wait forever.
        drop(Stdin::over(read_end).expect("a thread"));
    }
}
