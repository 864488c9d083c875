//! The audit log: who requested what, the decision, and the result.
//!
//! In: requests as they pass the filters (see [`Trail`]), a [`Policy`]. Out: `audit.k8s.io/v1`
//! events, to a log and a webhook.
//!
//! ```text
//! authenticated ► RequestReceived ► … ► head ► ResponseStarted (long) ► body ► ResponseComplete
//!                                        └► panic ► Panic
//! ```
//!
//! Invariants: without a policy the cost is one check of an `Option`. Secrets appear only if the policy
//! records objects. Events of one request are in order.
//!
//! Deviation: after a protocol switch (exec, attach, port-forward) ResponseComplete is sent with the
//! response's headers, not at the end of the stream.

pub mod backend;
mod event;
pub mod log;
mod policy;
mod trail;
pub mod webhook;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::task::Tasks;
use bytes::Bytes;
use jiff::Timestamp;

pub use backend::{Backend, Batching, Mode, Truncation, Writer};
pub use policy::{Level, Policy, Stage, Verdict};
pub(crate) use trail::{AuditId, Trail, failed_authentication, follow};

use event::Event;

/// The policy and the backends of a server.
pub struct Audit {
    policy: Policy,
    backends: Vec<Backend>,
    tasks: Tasks,
    events: AtomicU64,
    rejected: AtomicU64,
    too_large: backend::Lost,
    levels: [AtomicU64; 4],
}

impl Audit {
    pub fn new(policy: Policy, backends: Vec<Backend>, tasks: Tasks) -> Arc<Self> {
        let (events, rejected, too_large, levels) = Default::default();
        Arc::new(Self { policy, backends, tasks, events, rejected, too_large, levels })
    }

    /// Whether the request may continue.
    async fn emit(&self, event: &Event, stage: Stage, now: Timestamp) -> bool {
        self.events.fetch_add(1, Ordering::Relaxed);
        let whole = Bytes::from(event.json(stage, now));
        let mut without_objects: Option<Bytes> = None;
        let mut goes_on = true;
        for backend in &self.backends {
            let mut json = whole.clone();
            if backend.refuses(&json) && event.level >= Level::Request {
                let cut = || Bytes::from(event.without_objects().json(stage, now));
                json = without_objects.get_or_insert_with(cut).clone();
            }
            if backend.refuses(&json) {
                let why = "event is too large even after truncating";
                self.too_large.note(1, "truncate", why);
                continue;
            }
            let bytes = if backend.is_legacy { event.legacy(stage).into() } else { json };
            goes_on &= backend.take(bytes).await;
        }
        goes_on
    }

    /// For the end of a request, where no code can wait.
    fn emit_later(self: &Arc<Self>, event: Event, stage: Stage) {
        let (audit, now) = (self.clone(), base::clock::now());
        self.tasks.spawn_graceful("audit event", async move {
            audit.emit(&event, stage, now).await;
        });
    }

    fn note_level(&self, level: Level) {
        self.levels[level as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Upstream's families, for `/metrics`.
    pub fn metrics(&self, out: &mut String) {
        let mut family = |name: &str, help: &str, samples: &[(String, u64)]| {
            let _ = write!(out, "# HELP {name} [ALPHA] {help}\n# TYPE {name} counter\n");
            for (labels, number) in samples {
                let _ = writeln!(out, "{name}{labels} {number}");
            }
        };
        let none = String::new;
        family(
            "apiserver_audit_event_total",
            "Counter of audit events generated and sent to the audit backend.",
            &[(none(), count(&self.events))],
        );
        let levels = Level::ALL.map(|level| {
            let labels = format!("{{level=\"{}\"}}", level.name());
            (labels, count(&self.levels[level as usize]))
        });
        family(
            "apiserver_audit_level_total",
            "Counter of policy levels for audit events (1 per request).",
            &levels,
        );
        let lost = self
            .backends
            .iter()
            .map(|backend| (format!("{{plugin=\"{}\"}}", backend.name()), backend.lost()));
        let has_limit = self.backends.iter().any(Backend::truncates);
        let too_large = ("{plugin=\"truncate\"}".to_owned(), self.too_large.count());
        let lost = lost.chain(has_limit.then_some(too_large));
        family(
            "apiserver_audit_error_total",
            "Counter of audit events that failed to be audited properly. Plugin identifies the plugin affected by the error.",
            &lost.collect::<Vec<_>>(),
        );
        family(
            "apiserver_audit_requests_rejected_total",
            "Counter of apiserver requests rejected due to an error in audit logging backend.",
            &[(none(), count(&self.rejected))],
        );
    }
}

fn count(number: &AtomicU64) -> u64 {
    number.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests;
