//! The log of a server, written to standard error and kept for the log files of its own pods.
//!
//! In: `tracing` events. Out: the same lines as [`base::telemetry`] prints, and the newest of them for
//! [`runtime::Lines`]. They take at most [`KEPT_BYTES`]; the oldest are dropped first.
//! Invariant: a log call waits for no disk: a task writes the files.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, LazyLock, Mutex};

use async_trait::async_trait;
use base::telemetry::LogFormat;
use runtime::{Line, Lines};
use tokio::sync::Notify;
use tracing::Metadata;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The limit of the lines that wait for their file.
const KEPT_BYTES: usize = 256 << 10;

static KEPT: LazyLock<Arc<Kept>> = LazyLock::new(Arc::default);

/// As [`base::telemetry::init`], and keeps the lines.
pub fn init(format: LogFormat, default_filter: &str) {
    let filter =
        EnvFilter::try_from_env("DECAPOD_LOG").unwrap_or_else(|_| EnvFilter::new(default_filter));
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Standard)
        .with_ansi(io::stderr().is_terminal() && !is_plain);
    // An error means that a subscriber is set already.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}

/// The lines of this process.
pub fn lines() -> Arc<dyn Lines> {
    KEPT.clone()
}

#[derive(Default)]
struct Kept {
    /// Guards the queue; held for single changes.
    waiting: Mutex<Waiting>,
    changed: Notify,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Line>,
    bytes: usize,
}

impl Kept {
    fn add(&self, target: &str, text: &str) {
        let line = Line { at: base::clock::now(), target: target.to_owned(), text: plain(text) };
        let mut waiting = self.waiting.lock().expect("no panic while held");
        waiting.bytes += line.text.len();
        waiting.lines.push_back(line);
        while waiting.bytes > KEPT_BYTES
            && let Some(oldest) = waiting.lines.pop_front()
        {
            waiting.bytes -= oldest.text.len();
        }
        drop(waiting);
        self.changed.notify_one();
    }
}

#[async_trait]
impl Lines for Kept {
    async fn take(&self) -> Vec<Line> {
        loop {
            let taken = std::mem::take(&mut *self.waiting.lock().expect("no panic while held"));
            if !taken.lines.is_empty() {
                return taken.lines.into();
            }
            self.changed.notified().await;
        }
    }
}

/// The line without its newline and without the escape sequences of colours.
fn plain(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text.trim_end_matches('\n'));
    while let Some((before, after)) = rest.split_once("\x1b[") {
        out.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    out
}

/// Standard error, and the kept lines.
struct Standard;

struct Sink(String);

impl<'a> MakeWriter<'a> for Standard {
    type Writer = Sink;

    fn make_writer(&'a self) -> Sink {
        Sink(String::new())
    }

    fn make_writer_for(&'a self, about: &Metadata<'_>) -> Sink {
        Sink(about.target().to_owned())
    }
}

impl Write for Sink {
    /// Called once for each event, with its whole line.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        KEPT.add(&self.0, &String::from_utf8_lossy(bytes));
        io::stderr().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_newest_lines_are_kept_without_colours() {
        let kept = Kept::default();
        kept.add("old", &"x".repeat(KEPT_BYTES));
        kept.add("scheduler::queue", "\x1b[2mnow\x1b[0m \x1b[32m INFO\x1b[0m bound\n");
        let lines = kept.take().await;
        assert_eq!(lines.len(), 1, "the oldest line had no room");
        assert_eq!(lines[0].target, "scheduler::queue");
        assert_eq!(lines[0].text, "now  INFO bound");
    }
}
