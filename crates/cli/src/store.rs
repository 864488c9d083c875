//! `decapod store`: shows the state store's content and status.
//!
//! In: a store (a running server's through its socket, an etcd, or the files of a stopped server). Out:
//! text. Only `verify` reads the files themselves, and only if no process has them open.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use jiff::Timestamp;
use serde_json::json;
use store::{KeyRange, RangeRequest, Revision};

use crate::grid::Grid;
use crate::snapshot::Plain;

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Show size, revisions, number of keys, and the duration of commits
    Status(Status),
    /// Compact history below a revision
    Compact(Compact),
    /// Read and check all data on disk; the server must not run
    Verify,
    /// Print the value of a key
    Get(Get),
}

#[derive(clap::Args, Clone, Debug)]
pub struct Status {
    /// table or json
    #[arg(short = 'o', long, default_value = "table")]
    pub output: String,
}

#[derive(clap::Args, Clone, Debug)]
pub struct Compact {
    /// The revision to compact to [default: the present one]
    #[arg(long)]
    pub revision: Option<u64>,
}

#[derive(clap::Args, Clone, Debug)]
pub struct Get {
    /// For example /registry/pods/default/web
    pub key: String,
    /// Read the state at this revision
    #[arg(long)]
    pub revision: Option<u64>,
    /// List the keys with this prefix
    #[arg(long)]
    pub prefix: bool,
}

impl Command {
    /// Whether it needs a running store.
    pub fn needs_store(&self) -> bool {
        !matches!(self, Self::Verify)
    }

    pub async fn run(
        self,
        data_dir: &Path,
        store: Option<Arc<dyn store::Store>>,
        plain: Plain,
    ) -> Result<ExitCode> {
        let Some(store) = store else {
            print!("{}", verify(data_dir)?);
            return Ok(ExitCode::SUCCESS);
        };
        match self {
            Self::Status(status) => print!("{}", status.text(&*store).await?),
            Self::Compact(compact) => {
                let present = store.revision().await?;
                let revision = compact.revision.map_or(present, Revision);
                store.compact(revision).await?;
                println!("history begins at revision {revision} now");
            }
            Self::Get(get) => return get.run(&*store, plain).await,
            Self::Verify => {
                bail!("verify reads only the files of a store that no process has open")
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn verify(data_dir: &Path) -> Result<String> {
    let directory = data_dir.join("store");
    let found = store::backend::embedded::verify(&directory)?;
    Ok(format!(
        "{}: {} records, {} keys, revisions {} to {}: all in order\n",
        directory.display(),
        found.records,
        found.keys,
        found.floor,
        found.revision
    ))
}

impl Status {
    async fn text(&self, store: &dyn store::Store) -> Result<String> {
        let now = store.status().await?;
        let leases = store.leases().await?.len();
        let commits: u64 = now.commits.counts.iter().sum();
        let mean = now.commits.sum_seconds * 1000.0 / commits.max(1) as f64;
        let floor = now.floor.map_or("unknown".to_owned(), |floor| floor.to_string());
        if self.output == "json" {
            let text = json!({
                "backend": now.backend,
                "revision": now.revision.0,
                "oldestRevision": now.floor.map(|floor| floor.0),
                "keys": now.keys,
                "leases": leases,
                "diskBytes": now.disk_bytes,
                "usedBytes": now.used_bytes,
                "commits": commits,
                "meanCommitMilliseconds": mean,
                "alarms": now.alarms,
            });
            return Ok(format!("{text}\n"));
        }
        let mut rows = vec![
            ("BACKEND", now.backend),
            ("REVISION", now.revision.to_string()),
            ("OLDEST REVISION", floor),
            ("KEYS", now.keys.to_string()),
            ("LEASES", leases.to_string()),
            ("BYTES ON DISK", now.disk_bytes.to_string()),
            ("BYTES IN USE", now.used_bytes.to_string()),
        ];
        if commits > 0 {
            rows.push(("COMMITS", format!("{commits}, {mean:.1} ms each")));
        }
        rows.extend(now.alarms.into_iter().map(|alarm| ("ALARM", alarm)));
        let rows: Vec<Vec<String>> =
            rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
        Ok(Grid::default().render(&rows))
    }
}

impl Get {
    async fn run(self, store: &dyn store::Store, plain: Plain) -> Result<ExitCode> {
        let key = self.key.clone().into_bytes();
        let range = if self.prefix { KeyRange::prefix(key) } else { KeyRange::one(key) };
        let request =
            RangeRequest { revision: self.revision.map(Revision), ..RangeRequest::new(range) };
        let kvs = store.range(request).await?.kvs;
        if self.prefix {
            for kv in &kvs {
                println!("{}", String::from_utf8_lossy(&kv.key));
            }
            return Ok(ExitCode::SUCCESS);
        }
        let Some(kv) = kvs.into_iter().next() else {
            let when = self.revision.map_or(String::new(), |at| format!(" at revision {at}"));
            bail!("there is no key {}{when}", self.key);
        };
        // To standard error, so that the value can be piped.
        eprintln!(
            "created at revision {}, changed at {}, version {}, lease {}",
            kv.create_revision, kv.mod_revision, kv.version, kv.lease
        );
        let value = plain(&kv.key, kv.value.bytes())?;
        println!("{}", String::from_utf8_lossy(&value));
        Ok(ExitCode::SUCCESS)
    }
}

/// Parses a time: RFC 3339, or how long ago.
pub fn past(text: &str) -> std::result::Result<Timestamp, String> {
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(at);
    }
    let ago = crate::duration::parse(text).map_err(|_| {
        format!(
            "{text:?} is not a time; expected e.g. 2026-01-31T12:00:00Z, or how long ago, e.g. 10m"
        )
    })?;
    base::clock::now().checked_sub(ago).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_absolute_or_ago() {
        let at = past("2026-01-31T12:00:00Z").expect("a time");
        assert_eq!(at.to_string(), "2026-01-31T12:00:00Z");
        let before = base::clock::now().as_second();
        let at = past("1h").expect("a duration").as_second() + 3600;
        assert!((before..=base::clock::now().as_second()).contains(&at), "{at}, not {before}");
        assert!(past("yesterday").is_err());
    }

    #[tokio::test]
    async fn status_shows_the_backend() {
        let store = store::Sim::open();
        let text = Status { output: "table".into() }.text(&*store).await.expect("text");
        assert!(text.contains("BACKEND") && text.contains("simulated"), "{text}");
        let text = Status { output: "json".into() }.text(&*store).await.expect("text");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&value["revision"], &value["oldestRevision"]), (&json!(1), &json!(1)));
    }
}
