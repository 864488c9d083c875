//! An observer of the cluster: who holds the Leases, and which servers say that they are ready.
//!
//! In: connections. Out: what it read, with times. It asks several times a second, because it must notice how
//! long something took; a watch would depend on the server that fails.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use base::task::Tasks;
use serde_json::Value;

use super::link::{Ask, Link};
use super::load::{Sample, Way, Writer};
use crate::wait;

const EVERY: Duration = Duration::from_millis(200);
const ANSWER: Duration = Duration::from_secs(3);
pub const LEASES: [&str; 2] = ["kube-scheduler", "kube-controller-manager"];
/// A server that is ready and refuses every write for this long does not tell the truth.
const LIES: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Seen {
    /// Changes of each Lease's holder.
    holders: [Vec<(Instant, String)>; 2],
    /// Answers of each server's `/readyz`.
    ready: [Vec<Sample>; 3],
}

pub struct Observer {
    seen: Arc<Mutex<Seen>>,
    tasks: Tasks,
}

impl Observer {
    /// `any` leads to a server that lives, `each` to one server.
    pub fn start(any: Arc<Link>, each: [Arc<Link>; 3]) -> Self {
        let (seen, tasks) = (Arc::<Mutex<Seen>>::default(), Tasks::new("observer"));
        for (number, name) in LEASES.into_iter().enumerate() {
            let (seen, link) = (seen.clone(), any.clone());
            let path = format!("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/{name}");
            tasks.spawn("lease", async move {
                loop {
                    if let Some(holder) = holder(&link, &path).await {
                        let mut seen = lock(&seen);
                        let all = &mut seen.holders[number];
                        if all.last().is_none_or(|(_, last)| *last != holder) {
                            all.push((wait::now(), holder));
                        }
                    }
                    tokio::time::sleep(EVERY).await;
                }
            });
        }
        for (number, link) in each.into_iter().enumerate() {
            let seen = seen.clone();
            tasks.spawn("readiness", async move {
                loop {
                    let begun = wait::now();
                    let answer = link.ask(Ask::get("/readyz", ANSWER)).await;
                    let is_good = answer.is_ok_and(|answer| answer.status == 200);
                    let sample = Sample { begun, ended: wait::now(), is_good };
                    lock(&seen).ready[number].push(sample);
                    tokio::time::sleep(EVERY).await;
                }
            });
        }
        Self { seen, tasks }
    }

    /// The host that holds a Lease.
    pub fn holder(&self, lease: usize) -> Option<String> {
        let seen = lock(&self.seen);
        let (_, identity) = seen.holders[lease].last()?;
        Some(identity.split('_').next().unwrap_or_default().to_owned())
    }

    /// The time from `since` until another one held the Lease.
    pub fn taken_over(&self, lease: usize, since: Instant) -> Option<Duration> {
        let seen = lock(&self.seen);
        let all = &seen.holders[lease];
        let before = all.iter().rev().find(|(at, _)| *at <= since).map(|(_, holder)| holder);
        let is_other = |holder: &String| !holder.is_empty() && Some(holder) != before;
        let next = all.iter().find(|(at, holder)| *at > since && is_other(holder))?;
        Some(next.0 - since)
    }

    /// The time from `since` until a server first said that it is not ready, or did not answer.
    pub fn not_ready_after(&self, server: usize, since: Instant) -> Option<Duration> {
        let seen = lock(&self.seen);
        let first = seen.ready[server].iter().find(|one| one.ended > since && !one.is_good)?;
        Some(first.ended - since)
    }

    /// Times in which a server said that it was ready, and yet none of its writes succeeded.
    pub fn lies(&self, writers: &[Writer]) -> Vec<String> {
        let seen = lock(&self.seen);
        let mut all = vec![];
        for (number, ready) in seen.ready.iter().enumerate() {
            let direct = writers.iter().filter(|writer| writer.way == Way::Direct(number));
            let writes: Vec<&Sample> = direct.flat_map(|writer| &writer.samples).collect();
            if let Some(span) = longest_lie(ready, &writes)
                && span >= LIES
            {
                all.push(format!("server {number} was ready for {span:?} while all writes failed"));
            }
        }
        all
    }

    pub async fn stop(&self) {
        self.tasks.shutdown(ANSWER).await;
    }
}

/// The longest time between two good writes in which writes failed and every answer said "ready". Pure.
fn longest_lie(ready: &[Sample], writes: &[&Sample]) -> Option<Duration> {
    let mut longest = None;
    let mut failing: Option<(Instant, Instant)> = None;
    let mut all: Vec<&Sample> = writes.to_vec();
    all.sort_by_key(|sample| sample.ended);
    for write in all {
        if write.is_good {
            failing = None;
            continue;
        }
        let (begun, _) = *failing.get_or_insert((write.begun, write.ended));
        let within = ready.iter().filter(|one| one.begun >= begun && one.ended <= write.ended);
        let mut count = 0;
        let is_lie = within.inspect(|_| count += 1).all(|one| one.is_good) && count > 0;
        if is_lie {
            longest = longest.max(Some(write.ended - begun));
        }
    }
    longest
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().expect("no panic under the lock")
}

async fn holder(link: &Link, path: &str) -> Option<String> {
    let answer = link.ask(Ask::get(path, ANSWER)).await.ok()?;
    let lease: Value = serde_json::from_slice(&answer.body).ok()?;
    Some(lease["spec"]["holderIdentity"].as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_without_writes_is_a_lie() {
        let start = wait::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let sample = |begun, ended, is_good| Sample { begun: at(begun), ended: at(ended), is_good };
        let check = |ready: &[Sample], writes: &[Sample], expected: Option<u64>| {
            let writes: Vec<&Sample> = writes.iter().collect();
            assert_eq!(longest_lie(ready, &writes), expected.map(Duration::from_secs));
        };
        let good = [sample(1, 2, true), sample(5, 6, true), sample(9, 10, true)];
        check(&good, &[sample(0, 10, false), sample(10, 20, false)], Some(20));
        check(&good, &[sample(0, 10, false), sample(10, 11, true)], Some(10));
        check(&good, &[sample(0, 1, true), sample(1, 2, true)], None);
        check(&[sample(1, 2, true), sample(3, 4, false)], &[sample(0, 10, false)], None);
        check(&[], &[sample(0, 10, false)], None);
    }
}
