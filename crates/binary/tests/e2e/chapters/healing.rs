//! Failures and recovery. Leaves `web` with three Ready pods, some of them restarted.

use std::time::Duration;

use anyhow::{Result, ensure};
use testkit::wait;

use crate::processes;
use crate::story::{LONG, Story};

const CRASH: &str = include_str!("../manifests/crash.yaml");
const TOO_BIG: &str = include_str!("../manifests/too-big.yaml");
const MISFIT: &str = include_str!("../manifests/misfit.yaml");

fn restarts(story: &Story, pod: &str) -> Result<u32> {
    let count = story.value(&format!("pod {pod}"), ".status.containerStatuses[0].restartCount")?;
    Ok(count.parse()?)
}

/// Waits until a pod's container has restarted once more and is Ready.
fn soon_restarted(story: &Story, pod: &str, before: u32) -> Result<()> {
    story.soon(
        LONG,
        &format!("pod {pod}"),
        ".status.containerStatuses[0].restartCount",
        &(before + 1).to_string(),
    )?;
    story.kubectl(&format!("wait --for=condition=Ready pod/{pod} --timeout=90s")).map(drop)
}

pub fn killed_process(story: &mut Story) -> Result<()> {
    let pod = story.first_pod("app=web")?;
    let uid = story.value(&format!("pod {pod}"), ".metadata.uid")?;
    let before = restarts(story, &pod)?;
    let old = processes::named(&uid, "nginx")?;
    old.kill()?;
    soon_restarted(story, &pod, before)?;
    ensure!(processes::named(&uid, "nginx")? != old, "the old process still runs");
    let ended = ".status.containerStatuses[0].lastState.terminated.exitCode";
    story.soon(LONG, &format!("pod {pod}"), ended, "137")?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")
}

pub fn deleted_pod(story: &mut Story) -> Result<()> {
    let pod = story.first_pod("app=web")?;
    let started = wait::now();
    story.kubectl(&format!("delete pod {pod}"))?;
    // kubectl waits: the API keeps the pod until its containers have ended, preStop's 2 s included.
    let took = started.elapsed();
    ensure!(
        took >= Duration::from_secs(2),
        "gone after {took:?}, before its preStop hook could end"
    );
    ensure!(took < Duration::from_secs(30), "it took {took:?}: all of its grace period");
    story.soon_has_events(&pod, &["Killing"])?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")?;
    let pods = story.pods("app=web")?;
    ensure!(pods.len() == 3 && !pods.contains(&pod), "{pods:?}");
    Ok(())
}

pub fn liveness(story: &mut Story) -> Result<()> {
    let pod = story.first_pod("app=web")?;
    let before = restarts(story, &pod)?;
    story.kubectl(&format!("exec {pod} -- touch /tmp/dead"))?;
    soon_restarted(story, &pod, before)?;
    story.soon_has_events(&pod, &["Unhealthy", "Killing"])?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")
}

pub fn crash_loop(story: &mut Story) -> Result<()> {
    story.apply(CRASH)?;
    // Restarted at once, then after 10 s: the back-off is visible in between.
    story.soon(
        LONG,
        "pod crash",
        ".status.containerStatuses[0].state.waiting.reason",
        "CrashLoopBackOff",
    )?;
    story.soon_shows(LONG, "logs crash --previous", "about to fail")?;
    wait::until(LONG, "it is restarted twice", || {
        let count = restarts(story, "crash")?;
        ensure!(count >= 2, "{count} restarts");
        Ok(())
    })?;
    story.soon(
        LONG,
        "pod crash",
        ".status.containerStatuses[0].lastState.terminated.exitCode",
        "3",
    )?;
    let started = story.value("pod crash", ".metadata.creationTimestamp")?;
    ensure!(!started.is_empty(), "a pod knows its age");
    story.soon_shows(
        LONG,
        "get pod crash",
        "NAME READY STATUS RESTARTS AGE\ncrash 0/1 CrashLoopBackOff * (* ago) *",
    )?;
    story.soon_has_events("crash", &["BackOff"])?;
    story.kubectl("delete pod crash").map(drop)
}

pub fn does_not_fit(story: &mut Story) -> Result<()> {
    story.apply(TOO_BIG)?;
    story.soon(LONG, "pod too-big", ".status.phase", "Failed")?;
    story.soon(LONG, "pod too-big", ".status.reason", "OutOfcpu")?;
    story.kubectl("delete pod too-big").map(drop)
}

/// A failed pod does not count as a replica: the ReplicaSet creates another one, which also fails here.
pub fn replaces_misfit(story: &mut Story) -> Result<()> {
    story.apply(MISFIT)?;
    let replaced = wait::until(LONG, "a failed pod is replaced", || {
        let list = story.json("get pods -l app=misfit")?;
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        let failed = pods.iter().filter(|pod| pod["status"]["reason"] == "OutOfcpu");
        let failed = failed.filter(|pod| pod["status"]["phase"] == "Failed").count();
        ensure!(failed >= 1 && pods.len() >= 2, "{failed} failed of {}", pods.len());
        Ok(())
    });
    story.kubectl("delete replicaset misfit")?;
    wait::until(LONG, "the failed pods go with their ReplicaSet", || {
        let rest = story.kubectl("get pods -l app=misfit -o name")?;
        ensure!(rest.is_empty(), "{rest}");
        Ok(())
    })?;
    replaced
}
