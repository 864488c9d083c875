//! A rolling update under load, and back. Leaves `web` at its first version.

use anyhow::{Context, Result, ensure};
use testkit::load::Hammer;
use testkit::wait;

use crate::story::{LONG, Story};

pub fn pause_and_resume(story: &mut Story) -> Result<()> {
    let address = format!("{}:80", story.value("service web", ".spec.clusterIP")?);
    story.shows("rollout pause deployment/web", "deployment.apps/web paused")?;
    story.kubectl("set image deployment/web nginx=nginx:1.23")?;
    let generation = story.value("deployment web", ".metadata.generation")?;
    story.soon(LONG, "deployment web", ".status.observedGeneration", &generation)?;
    let reason = ".status.conditions[?(@.type=='Progressing')].reason";
    story.soon(LONG, "deployment web", reason, "DeploymentPaused")?;
    let updated = story.value("deployment web", ".status.updatedReplicas")?;
    ensure!(updated.is_empty() || updated == "0", "{updated} pods were updated meanwhile");
    let answer = story.get(&address, "/")?;
    ensure!(answer.body.ends_with(" one\n"), "{answer:?}");
    story.shows("rollout resume deployment/web", "deployment.apps/web resumed")?;
    story.kubectl("rollout status deployment/web --timeout=120s")?;
    soon_answers(story, &address, " two\n")?;
    story.kubectl("rollout undo deployment/web")?;
    story.kubectl("rollout status deployment/web --timeout=120s")?;
    let kinds = "get pods -l app=web -o custom-columns=:.kind --no-headers";
    story.soon_shows(LONG, kinds, "Pod\nPod\nPod")?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")
}

/// The API shows the end of the rollout a moment before the kernel drops the last old endpoint.
fn soon_answers(story: &Story, address: &str, end: &str) -> Result<()> {
    wait::until(LONG, "the new version answers", || {
        let answer = story.get(address, "/")?;
        ensure!(answer.body.ends_with(end), "{answer:?}");
        Ok(())
    })
}

pub fn update_and_undo(story: &mut Story) -> Result<()> {
    let address = format!("{}:80", story.value("service web", ".spec.clusterIP")?);
    let available =
        ["get", "deployment", "web", "-w", "-o", "jsonpath={.status.availableReplicas}{\"\\n\"}"];
    let available = story.server.kubectl_in_background("available", &available)?;
    let hammer = Hammer::get(story.server.host().network()?, &address, "/");
    story
        .shows("set image deployment/web nginx=nginx:1.23", "deployment.apps/web image updated")?;
    story.kubectl("rollout status deployment/web --timeout=120s")?;
    soon_answers(story, &address, " two\n")?;
    story.shows(
        "rollout history deployment/web",
        "deployment.apps/web\nREVISION CHANGE-CAUSE\n1 <none>\n2 <none>",
    )?;
    story.shows("rollout undo deployment/web", "deployment.apps/web rolled back")?;
    story.kubectl("rollout status deployment/web --timeout=120s")?;
    story.shows("rollout restart deployment/web", "deployment.apps/web restarted")?;
    story.kubectl("rollout status deployment/web --timeout=120s")?;
    let report = hammer.stop();
    ensure!(
        report.failures.is_empty(),
        "{} of {} requests failed: {:?}",
        report.failures.len(),
        report.count,
        report.failures
    );
    ensure!(report.count > 100, "the hammer made only {} requests", report.count);
    let printed = available.output()?;
    let lowest = printed.lines().map(|line| line.trim().parse::<u32>().unwrap_or(0)).min();
    let lowest = lowest.context("the watch printed something")?;
    ensure!(lowest >= 3, "only {lowest} pods were available at a time");
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")?;
    // The rollout is complete before the last old pod is gone.
    let kinds = "get pods -l app=web -o custom-columns=:.kind --no-headers";
    story.soon_shows(LONG, kinds, "Pod\nPod\nPod")?;
    story.soon(LONG, "deployment web", ".spec.template.spec.containers[0].image", "nginx:1.22")?;
    let merged = story.first_pod("app=web")?;
    story.shows(&format!("exec {merged} -- ls /usr/share/nginx"), "old\nonly-in-one")
}
