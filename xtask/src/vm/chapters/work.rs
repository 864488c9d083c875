//! The main job: a Deployment behind a Service, and a client beside it. Leaves both running.

use crate::sh::Outcome;
use crate::vm::story::{self, Story};

const MAIN: &str = include_str!("main.yaml");
const LIVENESS: &str = include_str!("liveness.yaml");

pub fn main_job(story: &mut Story) -> Outcome {
    story::import(&story.machine)?;
    story.apply(MAIN)?;
    let took = story.settled()?;
    story.note(format!("apply to two ready pods: {:.1} s", took.as_secs_f32()));
    story.soon_field(60, "pod client", "{.status.phase}", "Running")?;
    story.soon(10, "logs client", "hello")?;
    story.soon(10, "exec client -- cat /etc/hostname", "client")?;
    let address = service(story)?;
    // busybox's resolver is the judge: the name as programs ask for it.
    let line = format!(
        "exec client -- nslookup -type=a web.default.svc.cluster.local | grep -c {address}"
    );
    story.soon(20, &line, "1").map(drop)
}

/// Pods reach Services whose endpoints are on their own node, with and without the module that makes
/// bridged packets pass the node's rules.
pub fn services(story: &mut Story) -> Outcome {
    let address = service(story)?;
    for module in ["modprobe -r br_netfilter", "modprobe br_netfilter"] {
        story.machine.sh(module)?;
        let tries = "for i in 1 2 3 4 5 6 7 8 9 10; do printf 'GET / HTTP/1.0\\r\\n\\r\\n' \
             | nc -w 5 ADDRESS 80; done | grep -c ^web-";
        let line = format!(
            "exec client -- sh -c {}",
            crate::vm::machine::quoted(&tries.replace("ADDRESS", &address))
        );
        let answers = story.kubectl(&line)?;
        story.note(format!("after {module}: {answers} of 10 requests from a pod answered"));
        if answers != "10" {
            return Err(format!("after {module}: {answers} of 10 requests answered"));
        }
    }
    story.machine.sh("modprobe -r br_netfilter")?;
    let from_node = format!(
        "curl -sf -m 5 http://{address}/ && curl -sf -m 5 http://10.0.2.15:30080/
         if curl -s -m 5 http://127.0.0.1:30080/; then exit 1; fi"
    );
    story.machine.until(20, "the Service answers the node", &from_node).map(drop)
}

pub fn service(story: &Story) -> Outcome<String> {
    story.field("service web", "{.spec.clusterIP}")
}

/// Containers that a failed probe stops start again with growing pauses.
pub fn liveness(story: &mut Story) -> Outcome {
    story.apply(LIVENESS)?;
    let waiting = "{.status.containerStatuses[0].state.waiting.reason}";
    story.soon_field(60, "pod sick", waiting, "CrashLoopBackOff")?;
    let message =
        story.field("pod sick", "{.status.containerStatuses[0].state.waiting.message}")?;
    let count = story.field("pod sick", "{.status.containerStatuses[0].restartCount}")?;
    story.note(format!("after {count} restarts: {message}"));
    story.soon_field(120, "pod sick", "{.status.containerStatuses[0].restartCount}", "3")?;
    story.soon_field(60, "pod sick", waiting, "CrashLoopBackOff")?;
    let message =
        story.field("pod sick", "{.status.containerStatuses[0].state.waiting.message}")?;
    story.kubectl("delete pod sick --wait=false")?;
    // 10 s, 20 s, 40 s: three restarts later the pause is the third.
    match message.starts_with("back-off 40s restarting failed container=sick") {
        true => Ok(()),
        false => Err(format!("after three restarts: {message}")),
    }
}
