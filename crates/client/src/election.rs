//! Leader election by Lease: of several candidates one leads.
//!
//! Upstream: `client-go/tools/leaderelection`: 15 s lease, 10 s to renew, a try every 2 s; the
//! observed renewal is timed by the local clock, so clocks may differ; `leaseTransitions` counts
//! changes of holder.
//!
//! Invariant: the work of a leader is dropped before anybody else may hold the lease.

use std::future::Future;
use std::time::Duration;

use base::task::Stop;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use machinery::{MicroTime, ObjectMeta};
use tokio::time::Instant;

use crate::client::{Client, ErrorExt, Result};
use crate::{Api, PostParams};

/// Added to the time between tries, as a share of it.
const JITTER: f64 = 1.2;

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub lease: Duration,
    pub renew_deadline: Duration,
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { lease: seconds(15), renew_deadline: seconds(10), retry: seconds(2) }
    }
}

/// One candidate.
pub struct Election {
    pub client: Client,
    pub namespace: String,
    pub name: String,
    /// Unique among candidates: upstream's is `<host>_<uuid>`.
    pub identity: String,
    pub timing: Timing,
    /// False where no second candidate can exist (an embedded store): the lease is taken once and
    /// not renewed, which saves a durable write every two seconds.
    pub renews: bool,
}

/// Why [`Election::run`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Stopped,
    /// The lease could not be renewed in time; the work was dropped.
    Lost,
    /// The work ended by itself.
    Finished,
}

/// What was seen of the lease, and when.
struct Observed {
    lease: Lease,
    at: Instant,
}

impl Election {
    pub fn new(client: Client, namespace: &str, name: &str, host: &str) -> Self {
        Self {
            client,
            namespace: namespace.into(),
            name: name.into(),
            identity: format!("{host}_{}", base::rng::uuid()),
            timing: Timing::default(),
            renews: true,
        }
    }

    /// Waits for the lease, runs `work` while it is held, and gives the lease back at the end.
    pub async fn run<F: Future<Output = ()>>(&self, stop: Stop, work: impl FnOnce() -> F) -> Ended {
        let mut observed = None;
        if stop.or(self.acquire(&mut observed)).await.is_none() {
            return Ended::Stopped;
        }
        tracing::info!(lease = self.name, identity = self.identity, "became leader");
        let ended = tokio::select! {
            biased;
            () = stop.wait() => Ended::Stopped,
            () = self.keep(&mut observed), if self.renews => Ended::Lost,
            () = work() => Ended::Finished,
        };
        if ended == Ended::Lost {
            tracing::error!(lease = self.name, "leadership lost");
        } else {
            self.release(&mut observed).await;
        }
        ended
    }

    async fn acquire(&self, observed: &mut Option<Observed>) {
        loop {
            match self.attempt(observed).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) if error.is_conflict() || error.is_already_exists() => {}
                Err(error) => {
                    tracing::warn!(lease = self.name, error = error.text(), "cannot take the lease")
                }
            }
            tokio::time::sleep(self.pause(observed.as_ref())).await;
        }
    }

    /// Until the next try. A lease that is somebody else's is looked at every retry span, and at the
    /// moment when it is over: a leader that dies is followed within the lease's length and one span.
    /// Deviation: upstream's looks come after up to 2.2 spans, and none knows of the end.
    fn pause(&self, observed: Option<&Observed>) -> Duration {
        let valid = observed.and_then(|seen| {
            let spec = seen.lease.spec.as_ref()?;
            let holder = spec.holder_identity.as_deref().filter(|holder| !holder.is_empty())?;
            let length = u64::try_from(spec.lease_duration_seconds?).ok()?;
            let left = Duration::from_secs(length).checked_sub(seen.at.elapsed())?;
            (holder != self.identity && !left.is_zero()).then_some(left)
        });
        match valid {
            Some(left) => left.min(self.timing.retry),
            // Contended, or in trouble: not all at once.
            None => self.timing.retry.mul_f64(1.0 + JITTER * base::rng::unit()),
        }
    }

    /// Returns when the lease was not renewed within the deadline.
    async fn keep(&self, observed: &mut Option<Observed>) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(self.timing.retry).await;
            let deadline = renewed + self.timing.renew_deadline;
            match tokio::time::timeout_at(deadline, self.attempt(observed)).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => {
                    // Somebody else holds it: there is nothing to wait for.
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(
                        lease = self.name,
                        error = error.text(),
                        "cannot renew the lease"
                    );
                }
                Err(_) => return,
            }
            if renewed.elapsed() >= self.timing.renew_deadline {
                return;
            }
        }
    }

    /// Takes or renews the lease; false if it is somebody else's.
    async fn attempt(&self, observed: &mut Option<Observed>) -> Result<bool> {
        let api: Api<Lease> = self.client.api(Some(&self.namespace));
        let now = MicroTime(base::clock::now());
        let Some(lease) = api.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    namespace: Some(self.namespace.clone()),
                    ..Default::default()
                },
                spec: Some(self.holding(LeaseSpec::default(), now)),
            };
            let lease = api.create(&PostParams::default(), &lease).await?;
            *observed = Some(Observed { lease, at: Instant::now() });
            return Ok(true);
        };
        if observed.as_ref().is_none_or(|seen| seen.lease.spec != lease.spec) {
            *observed = Some(Observed { lease: lease.clone(), at: Instant::now() });
        }
        let seen_at = observed.as_ref().map_or_else(Instant::now, |seen| seen.at);
        let Some(spec) = take(lease.spec.unwrap_or_default(), &self.identity, seen_at.elapsed())
        else {
            return Ok(false);
        };
        let lease = Lease { spec: Some(self.holding(spec, now)), ..lease };
        let lease = api.replace(&self.name, &PostParams::default(), &lease).await?;
        *observed = Some(Observed { lease, at: Instant::now() });
        Ok(true)
    }

    fn holding(&self, spec: LeaseSpec, now: MicroTime) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(self.timing.lease.as_secs() as i32),
            acquire_time: Some(spec.acquire_time.unwrap_or_else(|| now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(spec.lease_transitions.unwrap_or(0)),
            ..spec
        }
    }

    /// Upstream: `ReleaseOnCancel`: an empty holder and a lease of one second.
    async fn release(&self, observed: &mut Option<Observed>) {
        let Some(Observed { lease, .. }) = observed.take() else {
            return;
        };
        let spec = lease.spec.unwrap_or_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return;
        }
        let now = MicroTime(base::clock::now());
        let lease = Lease {
            spec: Some(LeaseSpec {
                holder_identity: Some(String::new()),
                lease_duration_seconds: Some(1),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                ..spec
            }),
            ..lease
        };
        let api: Api<Lease> = self.client.api(Some(&self.namespace));
        let write = async { api.replace(&self.name, &PostParams::default(), &lease).await };
        match tokio::time::timeout(self.timing.retry, write).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::debug!(lease = self.name, error = error.text(), "lease not released")
            }
            Err(_) => tracing::debug!(lease = self.name, "lease not released in time"),
        }
    }
}

/// The spec to continue from if `identity` may hold the lease, `None` if another's is valid.
/// Pure. `unchanged` is for how long nobody renewed it, by our clock.
fn take(spec: LeaseSpec, identity: &str, unchanged: Duration) -> Option<LeaseSpec> {
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    if holder == identity {
        return Some(spec);
    }
    let duration = Duration::from_secs(spec.lease_duration_seconds.unwrap_or(0).max(0) as u64);
    if !holder.is_empty() && unchanged < duration {
        return None;
    }
    let transitions = spec.lease_transitions.unwrap_or(0) + 1;
    Some(LeaseSpec { acquire_time: None, lease_transitions: Some(transitions), ..spec })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_when_free_or_expired() {
        let held = |holder: &str| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            lease_transitions: Some(3),
            ..Default::default()
        };
        let check = |holder: &str, seconds: u64, expected: Option<i32>| {
            let taken = take(held(holder), "me", Duration::from_secs(seconds));
            assert_eq!(
                taken.map(|spec| spec.lease_transitions.unwrap()),
                expected,
                "{holder} {seconds}"
            );
        };
        check("me", 0, Some(3));
        check("other", 14, None);
        check("other", 15, Some(4));
        check("", 0, Some(4));
    }
}
