//! `/healthz`, `/livez`, `/readyz`: named checks, single or together.
//!
//! Parts of the process add checks by name, in the order of the output. Work that must happen once after
//! the start (upstream: post-start hooks) is a [`Hook`]. `?verbose` lists all checks, `?exclude=NAME`
//! excludes some, `/readyz/NAME` runs one. `/metrics/slis` counts the results of whole paths. Upstream:
//! `apiserver/pkg/server/healthz`, `component-base/metrics/prometheus/slis`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use base::metrics::process;
use futures::future::BoxFuture;
use http::{Response, StatusCode};

use crate::codec;
use crate::metrics::{family, labels, samples};
use crate::query::Query;
use crate::resource::Body;

/// The message of a hook that is not done.
const NOT_FINISHED: &str = "not finished";
/// A check that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(5);

type Check = Arc<dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

#[derive(Clone)]
struct Named {
    name: String,
    check: Check,
    /// Only for readiness: a server that shuts down should get no requests, but must not be killed.
    readiness_only: bool,
}

/// The checks of a server. Clones share them.
#[derive(Clone)]
pub struct Health {
    /// Copied before checks run, so the lock is never held across an await.
    checks: Arc<RwLock<Vec<Named>>>,
    is_shutting_down: Arc<AtomicBool>,
    /// By check and path. The lock is never held across an await.
    results: Arc<Mutex<BTreeMap<(String, String), Results>>>,
}

/// The results of a check so far.
#[derive(Clone, Copy, Default)]
struct Results {
    succeeds: bool,
    successes: u64,
    errors: u64,
}

/// Work that must happen once. The check fails until [`Hook::done`].
#[derive(Clone)]
pub struct Hook(Arc<AtomicBool>);

impl Hook {
    pub fn done(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Default for Health {
    fn default() -> Self {
        let health = Self::bare();
        health.add("ping", || Ok(()));
        health.add("log", || Ok(()));
        health
    }
}

impl Health {
    /// Without any check, for programs other than the API server.
    pub fn bare() -> Self {
        Self { checks: Arc::default(), is_shutting_down: Arc::default(), results: Arc::default() }
    }

    pub fn add(&self, name: &str, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.add_async(name, move || {
            let outcome = check();
            Box::pin(async move { outcome })
        });
    }

    pub fn add_async(
        &self,
        name: &str,
        check: impl Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync + 'static,
    ) {
        self.push(Named { name: name.into(), check: Arc::new(check), readiness_only: false });
    }

    /// `poststarthook/NAME`, which fails until the hook is done.
    pub fn hook(&self, name: &str) -> Hook {
        self.once(&format!("poststarthook/{name}"), false)
    }

    /// A check that fails until its hook is done, on `/readyz` only or on all three paths.
    pub fn once(&self, name: &str, readiness_only: bool) -> Hook {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        let check: Check = Arc::new(move || {
            let is_done = seen.load(Ordering::Acquire);
            Box::pin(async move { if is_done { Ok(()) } else { Err(NOT_FINISHED.into()) } })
        });
        self.push(Named { name: name.into(), check, readiness_only });
        Hook(done)
    }

    fn push(&self, named: Named) {
        self.checks.write().expect("no panic under the lock").push(named);
    }

    /// From now on `/readyz` fails: load balancers use other servers while requests drain.
    pub fn begin_shutdown(&self) {
        self.is_shutting_down.store(true, Ordering::Release);
    }

    /// Whether all checks of `/readyz` pass.
    pub async fn is_ready(&self) -> bool {
        let checks = self.select("readyz");
        let outcomes = futures::future::join_all(checks.iter().map(run)).await;
        outcomes.iter().all(Result::is_ok)
    }

    /// Answers `/healthz[/NAME]`, `/livez` and `/readyz`; `None` for other paths.
    pub async fn serve(&self, path: &str, query: &Query) -> Option<Response<Body>> {
        let mut parts = path.trim_matches('/').splitn(2, '/');
        let probe =
            parts.next().filter(|probe| matches!(*probe, "healthz" | "livez" | "readyz"))?;
        let checks = self.select(probe);
        match parts.next() {
            None => Some(self.all(probe, &checks, query).await),
            Some(name) => Some(match checks.iter().find(|check| check.name == name) {
                None => codec::page_not_found(),
                Some(check) => match run(check).await {
                    Ok(()) => codec::text(StatusCode::OK, "ok"),
                    Err(why) => failed(format!("internal server error: {why}\n")),
                },
            }),
        }
    }

    fn select(&self, probe: &str) -> Vec<Named> {
        let is_ready = probe == "readyz";
        let mut checks = self.checks.read().expect("no panic under the lock").clone();
        checks.retain(|check| is_ready || !check.readiness_only);
        if is_ready {
            let down = self.is_shutting_down.clone();
            let check: Check = Arc::new(move || {
                let is_down = down.load(Ordering::Acquire);
                Box::pin(async move {
                    if is_down { Err("process is shutting down".into()) } else { Ok(()) }
                })
            });
            checks.push(Named { name: "shutdown".into(), check, readiness_only: true });
        }
        checks
    }

    async fn all(&self, probe: &str, checks: &[Named], query: &Query) -> Response<Body> {
        let excluded: Vec<&str> = query.all("exclude").flat_map(|names| names.split(',')).collect();
        let mut lines = String::new();
        let mut failing = vec![];
        let outcomes = futures::future::join_all(checks.iter().map(async |check| {
            if excluded.contains(&check.name.as_str()) { None } else { Some(run(check).await) }
        }));
        for (check, outcome) in checks.iter().zip(outcomes.await) {
            let name = &check.name;
            if let Some(outcome) = &outcome {
                self.note(name, probe, outcome.is_ok());
            }
            match outcome {
                None => lines.push_str(&format!("[+]{name} excluded: ok\n")),
                Some(Ok(())) => lines.push_str(&format!("[+]{name} ok\n")),
                Some(Err(why)) => {
                    lines.push_str(&format!("[-]{name} failed: reason withheld\n"));
                    failing.push((name.as_str(), why));
                }
            }
        }
        let unknown: Vec<String> = excluded
            .iter()
            .filter(|name| !checks.iter().any(|check| check.name == **name))
            .map(|name| format!("{name:?}"))
            .collect();
        if !unknown.is_empty() {
            let names = unknown.join(",");
            lines.push_str(&format!(
                "warn: some health checks cannot be excluded: no matches for {names}\n"
            ));
        }
        if !failing.is_empty() {
            log_failing(probe, &failing);
            return failed(format!("{lines}{probe} check failed\n"));
        }
        match query.first("verbose") {
            Some(_) => codec::plain(StatusCode::OK, format!("{lines}{probe} check passed\n")),
            None => codec::plain(StatusCode::OK, "ok"),
        }
    }

    fn note(&self, name: &str, probe: &str, succeeds: bool) {
        let mut results = self.results.lock().expect("no panic under the lock");
        let results = results.entry((name.to_owned(), probe.to_owned())).or_default();
        results.succeeds = succeeds;
        results.successes += u64::from(succeeds);
        results.errors += u64::from(!succeeds);
    }

    /// `/metrics/slis` of a server, whose paths may have different checks.
    pub fn slis<'a>(all: impl IntoIterator<Item = &'a Self>) -> String {
        const LAST: &str = "kubernetes_healthcheck";
        const TOTAL: &str = "kubernetes_healthchecks_total";
        let of = |health: &Self| health.results.lock().expect("no panic under the lock").clone();
        let results: BTreeMap<_, _> = all.into_iter().flat_map(of).collect();
        let mut out = String::new();
        family(&mut out, LAST, "gauge", "[STABLE] 1 where a health check last succeeded, else 0.");
        for ((name, probe), results) in &results {
            let labels = labels([("name", name.as_str()), ("type", probe)]);
            samples(&mut out, LAST, [(&labels, u8::from(results.succeeds))]);
        }
        family(&mut out, TOTAL, "counter", "[STABLE] Outcomes of health checks.");
        for ((name, probe), results) in &results {
            for (status, count) in [("error", results.errors), ("success", results.successes)] {
                let labels = labels([("name", name.as_str()), ("status", status), ("type", probe)]);
                if count > 0 {
                    samples(&mut out, TOTAL, [(&labels, count)]);
                }
            }
        }
        process::encode_start(&mut out);
        out
    }
}

/// One line for one probe. Failed probes of a starting server are only a debug line.
fn log_failing(probe: &str, failing: &[(&str, String)]) {
    let checks = failing.iter().map(|(name, why)| format!("{name}: {why}"));
    let checks = checks.collect::<Vec<_>>().join("; ");
    if failing.iter().all(|(_, why)| why == NOT_FINISHED) {
        tracing::debug!(checks, "{probe} check failed");
    } else {
        tracing::info!(checks, "{probe} check failed");
    }
}

async fn run(named: &Named) -> Result<(), String> {
    match tokio::time::timeout(PATIENCE, (named.check)()).await {
        Ok(outcome) => outcome,
        Err(_) => Err(format!("no answer within {} seconds", PATIENCE.as_secs())),
    }
}

fn failed(text: String) -> Response<Body> {
    codec::plain(StatusCode::INTERNAL_SERVER_ERROR, text)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    async fn ask(health: &Health, path: &str, query: &str) -> (u16, String) {
        let response = health.serve(path, &Query::parse(query)).await.expect("a health path");
        let code = response.status().as_u16();
        let body = response.into_body().collect().await.expect("no errors").to_bytes();
        (code, String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn checks_answer_one_by_one_and_together() {
        let health = Health::default();
        let hook = health.hook("rbac/bootstrap-roles");
        let failing = "[+]ping ok\n[+]log ok\n[-]poststarthook/rbac/bootstrap-roles failed: reason withheld\nlivez check failed\n";
        assert_eq!(ask(&health, "/livez", "").await, (500, failing.into()));
        assert_eq!(
            ask(&health, "/livez", "exclude=poststarthook/rbac/bootstrap-roles").await,
            (200, "ok".into())
        );
        hook.done();
        assert_eq!(ask(&health, "/livez", "exclude=nope").await, (200, "ok".into()));
        assert_eq!(ask(&health, "/healthz/ping", "verbose").await, (200, "ok".into()));
        assert_eq!(ask(&health, "/readyz/nope", "").await, (404, "404 page not found\n".into()));
        assert!(
            ask(&health, "/readyz", "verbose")
                .await
                .1
                .ends_with("[+]shutdown ok\nreadyz check passed\n")
        );
        health.begin_shutdown();
        assert_eq!(ask(&health, "/readyz", "").await.0, 500);
        assert_eq!(ask(&health, "/livez", "").await.0, 200);
        // Only requests for whole paths count, not those with exclusions or for one check.
        let slis = Health::slis([&health]);
        let hook = "poststarthook/rbac/bootstrap-roles";
        for line in [
            format!("kubernetes_healthcheck{{name=\"{hook}\",type=\"livez\"}} 1"),
            format!(
                "kubernetes_healthchecks_total{{name=\"{hook}\",status=\"error\",type=\"livez\"}} 1"
            ),
            format!(
                "kubernetes_healthchecks_total{{name=\"{hook}\",status=\"success\",type=\"livez\"}} 2"
            ),
            "kubernetes_healthcheck{name=\"shutdown\",type=\"readyz\"} 0".into(),
        ] {
            assert!(slis.lines().any(|one| one == line), "{line} in {slis}");
        }
        assert!(!slis.contains("healthz") && slis.contains("process_start_time_seconds"));
    }
}
