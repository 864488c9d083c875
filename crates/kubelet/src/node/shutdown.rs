//! Graceful node shutdown: pods end in order before the machine shuts down.
//!
//! ```text
//! logind delays the shutdown ◄── lock ── WATCHING ── PrepareForShutdown(true) ──► ENDING
//!                                           ▲                                       │
//!                                           │                    node not ready, new pods rejected
//!                                           │                    ordinary pods end, then critical ones
//!                                           └─── (false): cancelled ◄── lock released ◄─────┘
//! ```
//!
//! In: the configured periods, logind's signals. Out: pods that fail with the shutdown's reason.
//! Invariants: off unless a period is given; the lock is released even if pods do not end.
//! Deviation: logind's configuration is not changed; a warning says what to set there, and the periods
//! apply as configured.
//! Upstream: `pkg/kubelet/nodeshutdown`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use client::EventType;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use release::features::{self, Feature};
use tokio::sync::Notify;

use crate::config::Config;
use crate::names;
use crate::node::logind::Logind;
use crate::node::upkeep::Upkeep;
use crate::reason::Reason;

/// Upstream: nodeShutdownReason, and the message of pods.
const REASON: &str = "Terminated";
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// Upstream: SystemCriticalPriority.
const CRITICAL: i32 = 2_000_000_000;
/// Upstream: dbusReconnectPeriod.
const RECONNECT: Duration = Duration::from_secs(1);
/// Delay before the kubelet looks again for a missing bus.
const ABSENT: Duration = Duration::from_secs(60);

/// The grace period of pods with at least this priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    from: i32,
    period: Duration,
}

/// The configured groups, in the order of their end: low priorities first.
fn configured(config: &Config) -> Vec<Group> {
    if config.shutdown_groups.is_empty() {
        return groups(config.shutdown_grace, config.shutdown_grace_critical);
    }
    let one = |(from, period): &(i32, Duration)| Group { from: *from, period: *period };
    let mut all: Vec<Group> = config.shutdown_groups.iter().map(one).collect();
    all.sort_by_key(|group| group.from);
    all
}

/// How long all groups together may take.
fn longest(groups: &[Group]) -> Duration {
    groups.iter().map(|group| group.period).sum()
}

/// The groups in the order of their end; the critical pods' period is the last part of `total`.
fn groups(total: Duration, critical: Duration) -> Vec<Group> {
    let all = [
        Group { from: 0, period: total.saturating_sub(critical) },
        Group { from: CRITICAL, period: critical.min(total) },
    ];
    all.to_vec()
}

/// The group of a pod: the last one whose minimum priority it reaches, else the first.
fn group_of(groups: &[Group], pod: &Pod) -> usize {
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    groups.iter().rposition(|group| group.from <= priority).unwrap_or(0)
}

/// Watches for shutdowns; never returns.
pub async fn keep(own: Arc<Upkeep>, hurry: Arc<Notify>) {
    let config = &own.node.config;
    let is_off = longest(&configured(config)).is_zero();
    if is_off || !features::enabled(Feature::GracefulNodeShutdown) {
        return;
    }
    let mut was_there = true;
    loop {
        let pause = match Logind::connect(&config.system_bus).await {
            Ok(bus) => {
                was_there = true;
                let ended = follow(&own, &hurry, bus).await;
                if let Err(error) = ended {
                    tracing::warn!(%error, "lost the connection to logind");
                }
                RECONNECT
            }
            Err(error) => {
                if was_there {
                    let bus = config.system_bus.display();
                    tracing::warn!(%bus, %error, "failed to connect to logind: graceful node shutdown is off");
                }
                was_there = false;
                ABSENT
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn follow(own: &Upkeep, hurry: &Notify, mut bus: Logind) -> io::Result<()> {
    let wanted = longest(&configured(&own.node.config));
    let given = bus.longest_delay().await?;
    if given < wanted {
        tracing::warn!(
            "logind delays shutdowns by {} s at most: set InhibitDelayMaxSec={} in \
             /etc/systemd/logind.conf.d/99-kubelet.conf",
            given.as_secs(),
            wanted.as_secs()
        );
    }
    let mut lock = Some(bus.delay_shutdown().await?);
    loop {
        let starts = bus.next().await?;
        own.node.is_shutting_down.send_replace(starts);
        hurry.notify_one();
        if !starts {
            tracing::info!("the shutdown was cancelled");
            if lock.is_none() {
                lock = Some(bus.delay_shutdown().await?);
            }
            continue;
        }
        let text = "Shutdown manager detected shutdown event";
        own.events.about(own.node.reference(), EventType::Normal, "Shutdown", text);
        // If it is cancelled meanwhile, stopped pods stay stopped, and the others go on.
        tokio::select! {
            () = end_pods(own) => {}
            next = bus.next() => {
                own.node.is_shutting_down.send_replace(next?);
                hurry.notify_one();
            }
        }
        lock = None;
        if !*own.node.is_shutting_down.borrow() {
            lock = Some(bus.delay_shutdown().await?);
        }
    }
}

async fn end_pods(own: &Upkeep) {
    let groups = configured(&own.node.config);
    for (index, group) in groups.iter().enumerate() {
        let views = own.pods.views().into_iter().filter(|view| !view.stopped);
        let mine = views.filter_map(|view| view.pod).filter(|pod| group_of(&groups, pod) == index);
        let uids: Vec<String> = mine.map(|pod| names::uid(&pod).to_string()).collect();
        if uids.is_empty() {
            continue;
        }
        tracing::info!(pods = uids.len(), from = group.from, "stopping pods for the node shutdown");
        for uid in &uids {
            own.pods.end_with_node(uid, Reason::new(REASON, MESSAGE), group.period);
        }
        let all = join_all(uids.iter().map(|uid| own.pods.until_stopped(uid)));
        if tokio::time::timeout(group.period, all).await.is_err() {
            tracing::warn!(from = group.from, "pods did not end in time");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn critical_pods_end_last() {
        let seconds = Duration::from_secs;
        let all = groups(seconds(30), seconds(10));
        assert_eq!(all[0].period, seconds(20));
        assert_eq!(all[1].period, seconds(10));
        let mut config = Config::new("n", "/data".into());
        config.shutdown_groups = vec![(1000, seconds(20)), (0, seconds(60)), (5000, seconds(5))];
        let own = configured(&config);
        assert_eq!(own.iter().map(|group| group.from).collect::<Vec<_>>(), [0, 1000, 5000]);
        assert_eq!(longest(&own), seconds(85));
        let check = |priority: Option<i32>, expected: usize| {
            let pod = json!({"spec": {"containers": [], "priority": priority}});
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            assert_eq!(group_of(&all, &pod), expected, "{priority:?}");
        };
        check(None, 0);
        check(Some(-5), 0);
        check(Some(1000), 0);
        check(Some(2_000_000_000), 1);
        check(Some(2_000_001_000), 1);
    }
}
