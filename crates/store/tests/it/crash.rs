//! A writing process is killed repeatedly; every acknowledged write must exist.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use store::{Embedded, Options, RangeRequest, Revision};

use crate::lab::{Short, prefix};
use crate::model::number;

const DIR: &str = "STORE_CRASH_DIR";
const WRITERS: usize = 8;

/// The process that is killed: this test, started by the other one.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        // The file is rewritten all the time, so that kills happen during a rewrite, too.
        let options = Options {
            history_age: std::time::Duration::from_millis(1),
            history_revisions: 20,
            slack_bytes: 0,
            ..Options::default()
        };
        let store = Embedded::open(dir.as_ref(), options).expect("it opens");
        let mut writers = tokio::task::JoinSet::new();
        for writer in 0..WRITERS {
            let store = store.clone();
            writers.spawn(async move {
                for i in 0_u64.. {
                    let key = format!("/{writer}/{}", i % 20);
                    let value = format!("{i} {}", "x".repeat((i as usize * 97) % 5000));
                    let revision = Short(&*store).put(&key, value).await;
                    let mut out = std::io::stdout().lock();
                    // The parent reads lines; a write whose line it has read was acknowledged.
                    writeln!(out, "wrote {revision} {key} {i}").expect("the parent reads");
                }
            });
        }
        writers.join_all().await;
    });
}

#[test]
fn kill_loses_no_acknowledged_write() {
    let seed = number("STORE_SEED", 1);
    let mut random = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().expect("a directory");
    let mut written = BTreeMap::new();
    let mut last = Revision(1);
    for round in 0..number("STORE_KILLS", 20) {
        println!("STORE_SEED={seed}, round {round}");
        let acknowledged = write_and_kill(dir.path(), random.usize(1..400));
        for (revision, key, i) in acknowledged {
            assert!(revision > last.0, "the store went back to {revision} from {last}");
            written.insert(key, (revision, i));
        }
        last = check(dir.path(), &written).max(last);
    }
}

/// Revision, key and number of each acknowledged write.
fn write_and_kill(dir: &std::path::Path, lines: usize) -> Vec<(u64, String, u64)> {
    let myself = std::env::current_exe().expect("a test has a file");
    let mut child = Command::new(myself)
        .args(["--exact", "crash::child_that_writes_until_it_is_killed", "--nocapture"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the child starts");
    let out = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut seen = vec![];
    for line in out.lines() {
        let line = line.expect("lines of text");
        let Some(("", write)) = line.split_once("wrote ") else { continue };
        let mut words = write.split(' ');
        // The last line may be incomplete.
        let (Some(revision), Some(key), Some(i)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        if let (Ok(revision), Ok(i)) = (revision.parse(), i.parse()) {
            seen.push((revision, key.to_owned(), i));
        }
        if seen.len() == lines {
            // SIGKILL. Lines still in the pipe were acknowledged as well.
            child.kill().expect("it runs");
        }
    }
    child.wait().expect("it ends");
    assert!(seen.len() >= lines, "the child ended by itself");
    seen
}

fn check(dir: &std::path::Path, written: &BTreeMap<String, (u64, u64)>) -> Revision {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let store = Embedded::open(dir, Options::default()).expect("it opens after the kill");
        let all = Short(&*store).range(RangeRequest::new(prefix("/"))).await;
        for kv in &all.kvs {
            let key = String::from_utf8_lossy(&kv.key);
            let Some((revision, i)) = written.get(&*key) else { continue };
            let value = kv.value.bytes();
            let text = String::from_utf8_lossy(&value);
            let there: u64 = text.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
            assert!(kv.mod_revision.0 >= *revision, "{key}: {} < {revision}", kv.mod_revision);
            assert!(kv.mod_revision.0 > *revision || there == *i, "{key}: {there}, not {i}");
        }
        assert!(written.keys().all(|key| all.kvs.iter().any(|kv| kv.key == *key.as_bytes())));
        let revision = all.revision;
        store.close().await;
        revision
    })
}
