//! Ctrl-C on a working server.

use anyhow::{Context, Result, ensure};
use testkit::wait;

use crate::support::{LONG, Server};

/// Components end before the API server does, so none of them logs an error.
#[test]
fn a_stopped_server_prints_only_stopping() -> Result<()> {
    let mut server = Server::start(&[])?;
    let api = server.api()?;
    // The controllers work.
    wait::until(LONG, "a service account", || {
        let answer = api.get("/api/v1/namespaces/default/serviceaccounts/default", LONG)?;
        ensure!(answer.status == 200, "{}", answer.body);
        Ok(())
    })?;
    // The scheduler works, which logs it once.
    wait::until(LONG, "the scheduler", || {
        ensure!(server.log().contains("scheduling"), "{}", server.log());
        Ok(())
    })?;
    // A watch that does not end by itself.
    let (seen, first) = std::sync::mpsc::channel();
    let watcher = std::thread::spawn(move || {
        let _ = api.stream("/api/v1/namespaces?watch=1", LONG, |_| seen.send(()).is_ok());
    });
    first.recv_timeout(LONG).context("an event")?;
    let status = server.stop()?;
    drop(first);
    ensure!(watcher.join().is_ok(), "the watcher panicked");
    let log = server.log();
    let (_, end) = log.split_once("stopping\n").with_context(|| log.clone())?;
    ensure!(status.success() && end.is_empty(), "{status}:\n{end}");
    server.complains_of_nothing_but(&[])
}
