//! The status of a pod as a kubelet reports it: a strategic merge patch. Pure.
//!
//! In: the pod, the wanted report, the node's and the pod's addresses. Out: the patch's body.
//! Invariant: `lastTransitionTime` moves exactly when a condition's status does; conditions of others stay.
//! Upstream: `kubelet_pods.go` (`generateAPIPodStatus`), `status/generate.go`.

use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::lifecycle::Report;
use crate::pod::{Container, ContainerStatus, Pod};

/// The stage of a pod.
pub struct Place<'a> {
    pub host_ip: &'a str,
    pub pod_ips: &'a [IpAddr],
}

/// A part of a pod's containers, as they are reported.
enum Containers {
    /// They wait for this reason.
    Waiting(&'static str),
    Running {
        restarts: u32,
        is_ready: bool,
    },
    /// They did what they were there for.
    Done,
    Ended {
        restarts: u32,
        code: i32,
    },
    BackOff {
        restarts: u32,
        code: i32,
    },
}

struct Writer<'a> {
    pod: &'a Pod,
    now: String,
}

/// The body of a patch of `pods/NAME/status`.
pub fn patch(pod: &Pod, report: &Report, place: &Place<'_>, now: Timestamp) -> Value {
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now).to_string();
    let writer = Writer { pod, now };
    let mut status = writer.status(report);
    let start = pod.status.start_time.map_or_else(|| writer.now.clone(), |time| time.to_string());
    status.insert("startTime".into(), start.into());
    status.insert("hostIP".into(), place.host_ip.into());
    status.insert("hostIPs".into(), json!([{"ip": place.host_ip}]));
    if let (Some(first), false) = (place.pod_ips.first(), *report == Report::Creating) {
        let all: Vec<Value> = place.pod_ips.iter().map(|ip| json!({"ip": ip})).collect();
        status.insert("podIP".into(), first.to_string().into());
        status.insert("podIPs".into(), all.into());
    }
    if pod.metadata.generation > 0 {
        status.insert("observedGeneration".into(), pod.metadata.generation.into());
    }
    json!({"metadata": {"uid": pod.metadata.uid}, "status": status})
}

impl Writer<'_> {
    fn status(&self, report: &Report) -> Map<String, Value> {
        let (phase, init, main) = match *report {
            Report::Creating | Report::Init(_) => {
                ("Pending", Containers::Waiting("PodInitializing"), self.before_start())
            }
            Report::Running { restarts, is_ready, .. } => {
                ("Running", Containers::Done, Containers::Running { restarts, is_ready })
            }
            Report::BackOff { restarts, code } => {
                ("Running", Containers::Done, Containers::BackOff { restarts, code })
            }
            Report::Ended { code, restarts, .. } => {
                let phase = if code == 0 { "Succeeded" } else { "Failed" };
                (phase, Containers::Done, Containers::Ended { restarts, code })
            }
        };
        let mut status = Map::new();
        status.insert("phase".into(), phase.into());
        status.insert("conditions".into(), self.conditions(report).into());
        status.insert("containerStatuses".into(), self.main(&main, report).into());
        if !self.pod.spec.init_containers.is_empty() {
            status.insert("initContainerStatuses".into(), self.init(&init, report).into());
        }
        if let Report::Ended { reason: Some(reason), .. } = report {
            status.insert("reason".into(), (*reason).into());
            let message = "Pod was active on the node longer than the specified deadline";
            status.insert("message".into(), message.into());
        }
        status
    }

    /// The waiting reason of the main containers.
    fn before_start(&self) -> Containers {
        let has_init = !self.pod.spec.init_containers.is_empty();
        Containers::Waiting(if has_init { "PodInitializing" } else { "ContainerCreating" })
    }

    fn conditions(&self, report: &Report) -> Vec<Value> {
        let is_ended = matches!(report, Report::Ended { .. });
        let has_code =
            |ok: bool| matches!(report, Report::Ended { code, .. } if (*code == 0) == ok);
        let is_initialized = !matches!(report, Report::Creating | Report::Init(_));
        let is_ready = matches!(report, Report::Running { is_ready: true, .. });
        let not_ready = match is_ended {
            true if has_code(true) => "PodCompleted",
            true => "PodFailed",
            false => "ContainersNotReady",
        };
        let reason = |ok: bool, reason: &'static str| (!ok).then_some(reason);
        let has_sandbox = !is_ended && *report != Report::Creating;
        vec![
            self.condition("PodReadyToStartContainers", has_sandbox, None),
            self.condition(
                "Initialized",
                is_initialized,
                reason(is_initialized, "ContainersNotInitialized"),
            ),
            self.condition("Ready", is_ready, reason(is_ready, not_ready)),
            self.condition("ContainersReady", is_ready, reason(is_ready, not_ready)),
        ]
    }

    fn condition(&self, kind: &str, is: bool, reason: Option<&str>) -> Value {
        let status = if is { "True" } else { "False" };
        // Missing fields stay unchanged.
        let known = self.pod.status.condition(kind);
        let changed = known.is_none_or(|known| known.status != status);
        let mut condition = json!({"type": kind, "status": status, "reason": reason});
        if changed {
            condition["lastTransitionTime"] = self.now.clone().into();
            condition["lastProbeTime"] = Value::Null;
        }
        if self.pod.metadata.generation > 0 {
            condition["observedGeneration"] = self.pod.metadata.generation.into();
        }
        condition
    }

    fn main(&self, is: &Containers, report: &Report) -> Vec<Value> {
        let before = |at: usize| self.pod.status.container_statuses.get(at);
        let code = match report {
            Report::Running { code, .. } => *code,
            _ => 0,
        };
        let all = self.pod.spec.containers.iter().enumerate();
        all.map(|(at, container)| self.container(container, is, before(at), code)).collect()
    }

    fn init(&self, is: &Containers, report: &Report) -> Vec<Value> {
        let before = |at: usize| self.pod.status.init_container_statuses.get(at);
        // Sidecars do not count among those that end.
        let mut ending = 0;
        let mut statuses = Vec::new();
        for (at, container) in self.pod.spec.init_containers.iter().enumerate() {
            let runs = Containers::Running { restarts: 0, is_ready: container.is_sidecar() };
            let own = match (container.is_sidecar(), report) {
                (true, Report::Running { .. } | Report::BackOff { .. }) => Some(runs),
                (true, Report::Init(now)) if ending <= *now => Some(runs),
                (false, Report::Init(now)) if ending < *now => Some(Containers::Done),
                (false, Report::Init(now)) if ending == *now => Some(runs),
                _ => None,
            };
            ending += usize::from(!container.is_sidecar());
            statuses.push(self.container(container, own.as_ref().unwrap_or(is), before(at), 0));
        }
        statuses
    }

    /// `code`: how its run before this one ended, where there is a new one.
    fn container(
        &self,
        container: &Container,
        is: &Containers,
        before: Option<&ContainerStatus>,
        code: i32,
    ) -> Value {
        let started = before.and_then(|status| status.state.running.as_ref()?.started_at);
        let id = |restarts: u32| {
            format!("simulated://{}/{}/{restarts}", self.pod.metadata.uid, container.name)
        };
        let over = |code: i32, restarts: u32| {
            let reason = if code == 0 { "Completed" } else { "Error" };
            let started = started.map_or_else(|| self.now.clone(), |time| time.to_string());
            json!({"terminated": {"exitCode": code, "reason": reason, "startedAt": started,
                "finishedAt": self.now, "containerID": id(restarts)}})
        };
        // A list of containers is replaced as a whole: a missing container is removed.
        let kept = before.and_then(|status| status.last_state.terminated.as_ref());
        let kept = kept.map_or_else(|| json!({}), |last| json!({"terminated": last}));
        let (state, last, restarts) = match *is {
            Containers::Waiting(reason) => (json!({"waiting": {"reason": reason}}), kept, 0),
            Containers::Done => (over(0, 0), kept, 0),
            Containers::Ended { restarts, code } => (over(code, restarts), kept, restarts),
            Containers::Running { restarts, .. } => {
                let count = before.map_or(0, |status| status.restart_count);
                let same = started.filter(|_| restarts == count);
                let since = same.map_or_else(|| self.now.clone(), |time| time.to_string());
                let is_new = same.is_none() && started.is_some();
                let last = if is_new { over(code, restarts.saturating_sub(1)) } else { kept };
                (json!({"running": {"startedAt": since}}), last, restarts)
            }
            Containers::BackOff { restarts, code } => {
                let waiting = json!({"waiting": {"reason": "CrashLoopBackOff",
                    "message": "back-off restarting failed container"}});
                (waiting, over(code, restarts), restarts)
            }
        };
        let is_ready = matches!(is, Containers::Done | Containers::Running { is_ready: true, .. });
        let mut status = json!({
            "name": container.name, "image": container.image, "imageID": "", "ready": is_ready,
            "started": matches!(is, Containers::Running { .. }), "restartCount": restarts,
            "state": state, "lastState": last,
        });
        if !matches!(is, Containers::Waiting(_)) {
            status["imageID"] = format!("simulated://{}", container.image).into();
            status["containerID"] = id(restarts).into();
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("in range")
    }

    /// The status after a patch, as the API would store it, for the tested fields.
    fn after(pod: &mut Value, report: &Report, second: i64) -> Value {
        let decoded = Pod::decode(pod.to_string().as_bytes()).expect("a pod");
        let ips = ["10.0.0.5".parse().expect("an address")];
        let place = Place { host_ip: "198.18.0.2", pod_ips: &ips };
        let patch = patch(&decoded, report, &place, at(second));
        crate::testing::merge(pod, &patch);
        pod["status"].clone()
    }

    fn pod() -> Value {
        json!({"metadata": {"uid": "u", "generation": 1},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}],
                "initContainers": [{"name": "a", "image": "i"},
                    {"name": "s", "image": "i", "restartPolicy": "Always"},
                    {"name": "b", "image": "i"}]},
            "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"},
                {"type": "example.com/gate", "status": "True"}]}})
    }

    fn states(status: &Value, list: &str) -> Vec<String> {
        let of = |one: &Value| {
            let state = one["state"].as_object().and_then(|state| state.keys().next().cloned());
            format!("{}:{}", one["name"].as_str().unwrap_or(""), state.unwrap_or_default())
        };
        status[list].as_array().into_iter().flatten().map(of).collect()
    }

    fn condition<'a>(status: &'a Value, kind: &str) -> &'a Value {
        let all = status["conditions"].as_array().expect("conditions");
        all.iter().find(|one| one["type"] == kind).expect(kind)
    }

    #[test]
    fn a_life_is_reported_as_a_kubelet_does() {
        let mut pod = pod();
        let status = after(&mut pod, &Report::Init(0), 1);
        assert_eq!(status["phase"], "Pending");
        assert_eq!(
            (&status["podIP"], &status["hostIP"]),
            (&json!("10.0.0.5"), &json!("198.18.0.2"))
        );
        assert_eq!(
            states(&status, "initContainerStatuses"),
            ["a:running", "s:waiting", "b:waiting"]
        );
        assert_eq!(states(&status, "containerStatuses"), ["c:waiting"]);
        assert_eq!(condition(&status, "Initialized")["status"], "False");
        let status = after(&mut pod, &Report::Init(1), 2);
        let expected = ["a:terminated", "s:running", "b:running"];
        assert_eq!(states(&status, "initContainerStatuses"), expected);
        let runs = Report::Running { restarts: 0, code: 0, is_ready: true };
        let status = after(&mut pod, &runs, 3);
        assert_eq!(status["phase"], "Running");
        let expected = ["a:terminated", "s:running", "b:terminated"];
        assert_eq!(states(&status, "initContainerStatuses"), expected);
        assert_eq!(condition(&status, "Ready")["status"], "True");
        assert_eq!(condition(&status, "Ready")["lastTransitionTime"], at(3).to_string());
        assert_eq!(condition(&status, "example.com/gate")["status"], "True");
        assert_eq!(status["startTime"], at(1).to_string());
        assert_eq!(status["observedGeneration"], 1);
        let ended = Report::Ended { code: 3, restarts: 0, reason: None };
        let status = after(&mut pod, &ended, 9);
        assert_eq!(status["phase"], "Failed");
        let end = &status["containerStatuses"][0]["state"]["terminated"];
        assert_eq!((&end["exitCode"], &end["startedAt"]), (&json!(3), &json!(at(3).to_string())));
        assert_eq!(condition(&status, "Ready")["reason"], "PodFailed");
    }

    #[test]
    fn a_condition_that_stays_keeps_its_time() {
        let mut pod = pod();
        let runs = |is_ready| Report::Running { restarts: 0, code: 0, is_ready };
        after(&mut pod, &runs(false), 1);
        let status = after(&mut pod, &runs(true), 5);
        assert_eq!(condition(&status, "Initialized")["lastTransitionTime"], at(1).to_string());
        assert_eq!(condition(&status, "Ready")["lastTransitionTime"], at(5).to_string());
        let running = &status["containerStatuses"][0]["state"]["running"];
        assert_eq!(running["startedAt"], at(1).to_string());
    }

    #[test]
    fn a_restart_names_the_end_before_it() {
        let mut pod = pod();
        let runs = |restarts| Report::Running { restarts, code: 1, is_ready: true };
        after(&mut pod, &runs(0), 1);
        let status = after(&mut pod, &runs(1), 2);
        let container = &status["containerStatuses"][0];
        assert_eq!(container["restartCount"], 1);
        assert_eq!(container["lastState"]["terminated"]["exitCode"], 1);
        assert_eq!(container["lastState"]["terminated"]["startedAt"], at(1).to_string());
        let status = after(&mut pod, &Report::BackOff { restarts: 1, code: 1 }, 3);
        let container = &status["containerStatuses"][0];
        assert_eq!(container["state"]["waiting"]["reason"], "CrashLoopBackOff");
        assert_eq!(condition(&status, "Ready")["status"], "False");
        let status = after(&mut pod, &runs(2), 13);
        let last = &status["containerStatuses"][0]["lastState"]["terminated"];
        assert_eq!(
            (&last["exitCode"], &last["finishedAt"]),
            (&json!(1), &json!(at(3).to_string()))
        );
    }
}
