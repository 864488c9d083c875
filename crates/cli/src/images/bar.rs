//! The progress of an import or a pull, on standard error while it runs.
//!
//! In: the image store's current step. Out: on a terminal one line, rewritten four times a second; elsewhere
//! a line for each five seconds of waiting, so that a log stays short. A quick step shows nothing.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use runtime::images::progress::{Progress, Step};

use super::size_text;

const ON_TERMINAL: Duration = Duration::from_millis(250);
const ELSEWHERE: Duration = Duration::from_secs(5);
/// Returns to the line's start and clears the line.
const CLEAR: &str = "\r\x1b[K";

/// Shows the progress until it is dropped.
pub struct Bar {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Bar {
    pub fn show(progress: &Progress) -> Self {
        let (end, ended) = mpsc::channel();
        let progress = progress.clone();
        let thread = std::thread::spawn(move || {
            let is_terminal = std::io::stderr().is_terminal();
            draw(&progress, &ended, is_terminal, &mut std::io::stderr());
        });
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        drop(self.end.take());
        // The thread clears its line before the next text is printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn draw(progress: &Progress, ended: &mpsc::Receiver<()>, is_terminal: bool, to: &mut dyn Write) {
    let period = if is_terminal { ON_TERMINAL } else { ELSEWHERE };
    while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
        let Some(step) = progress.now() else { continue };
        let text = text(&step);
        // A closed standard error needs no progress.
        let _ = if is_terminal {
            write!(to, "{CLEAR}{text}").and_then(|()| to.flush())
        } else {
            writeln!(to, "{text}")
        };
    }
    if is_terminal {
        let _ = write!(to, "{CLEAR}").and_then(|()| to.flush());
    }
}

/// "unpack layer 2 of 5: 12.3MB of 40MB, 31 %".
fn text(step: &Step) -> String {
    let Step { name, done, total } = step;
    match (done, total) {
        (0, 0) => format!("{name} ..."),
        (_, 0) => format!("{name}: {}", size_text(*done)),
        _ => {
            let percent = done.saturating_mul(100) / total;
            format!("{name}: {} of {}, {} %", size_text(*done), size_text(*total), percent.min(100))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_tells_its_bytes() {
        let told = |done, total| text(&Step { name: "unpack layer 2 of 5".into(), done, total });
        assert_eq!(told(12_300_000, 40_000_000), "unpack layer 2 of 5: 12.3MB of 40MB, 30 %");
        assert_eq!(told(1_500_000_000, 0), "unpack layer 2 of 5: 1.5GB");
        assert_eq!(told(0, 0), "unpack layer 2 of 5 ...");
        assert_eq!(told(50, 40), "unpack layer 2 of 5: 50B of 40B, 100 %");
    }

    /// Hands over each write.
    struct Written(mpsc::Sender<Vec<u8>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_terminals_line_is_rewritten_and_cleared_at_the_end() {
        let (end, ended) = mpsc::channel();
        let progress = Progress::default();
        progress.begin("read images.tar".into(), 10);
        let (sender, drawn) = mpsc::channel();
        let drawing =
            std::thread::spawn(move || draw(&progress, &ended, true, &mut Written(sender)));
        let mut out = drawn.recv_timeout(Duration::from_secs(60)).expect("a line is drawn");
        drop(end);
        drawing.join().expect("no panic");
        drawn.iter().for_each(|more: Vec<u8>| out.extend(more));
        let out = String::from_utf8(out).expect("text");
        assert!(out.starts_with("\r\x1b[Kread images.tar: 0B of 10B, 0 %"), "{out:?}");
        assert!(out.ends_with(CLEAR), "{out:?}");
    }
}
