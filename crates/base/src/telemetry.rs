//! Logs: `tracing` events as lines for people, or as JSON for machines. One line per event that a
//! person can act on; the filter comes from `DECAPOD_LOG`, else from the caller's default. Colours are
//! for terminals, and not where `NO_COLOR` is set (no-color.org).

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Sends the process's events to standard error. Later calls in one process change nothing.
pub fn init(format: LogFormat, default_filter: &str) {
    let filter =
        EnvFilter::try_from_env("DECAPOD_LOG").unwrap_or_else(|_| EnvFilter::new(default_filter));
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && !is_plain);
    // An error means that a subscriber is set already, as in tests with several servers.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
