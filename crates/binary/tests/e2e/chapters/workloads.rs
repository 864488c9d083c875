//! Typical manifests, unchanged. Each chapter deletes what it created.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::wait;

use crate::story::{LONG, Story};

const DATABASE: &str = include_str!("../manifests/database.yaml");
const REGULAR: &str = include_str!("../manifests/regular.yaml");
const GUESTBOOK: &str = include_str!("../manifests/guestbook.yaml");
const BUSY: &str = include_str!("../manifests/busy.yaml");

/// Several syncs of the autoscaler, 15 s apart, after a window of metrics.
const AUTOSCALING: Duration = Duration::from_secs(150);

pub fn database(story: &mut Story) -> Result<()> {
    story.apply(DATABASE)?;
    story.soon(LONG, "statefulset db", ".status.readyReplicas", "2")?;
    let log = "exec db-1 -- cat /data/log";
    story.shows(log, "db-1 started")?;
    // A pod that is created again has the same name and the same volume.
    story.kubectl("delete pod db-1")?;
    story.soon(LONG, "statefulset db", ".status.readyReplicas", "2")?;
    story.soon_shows(LONG, log, "db-1 started\ndb-1 started")?;
    story.soon(LONG, "pdb db", ".status.disruptionsAllowed", "1")?;
    // Scaling down keeps the volumes.
    story.kubectl("scale statefulset db --replicas=1")?;
    story.soon(LONG, "statefulset db", ".status.replicas", "1")?;
    story.soon(LONG, "pvc data-db-1", ".status.phase", "Bound")?;
    story.kubectl("scale statefulset db --replicas=2")?;
    story.soon_shows(LONG, log, "db-1 started\ndb-1 started\ndb-1 started")?;
    story.kubectl("delete statefulset,service,pdb db")?;
    story.kubectl("delete pvc data-db-0 data-db-1").map(drop)
}

pub fn regular(story: &mut Story) -> Result<()> {
    story.apply(REGULAR)?;
    story.kubectl("create job report-now --from=cronjob/report")?;
    story.soon(LONG, "job report-now", ".status.succeeded", "1")?;
    story.shows("logs job/report-now", "...\nreported")?;
    story.soon(LONG, "daemonset collector", ".status.numberReady", "1")?;
    story.kubectl("delete job report-now")?;
    story.kubectl("delete cronjob report")?;
    story.kubectl("delete daemonset collector").map(drop)
}

pub fn guestbook(story: &mut Story) -> Result<()> {
    story.apply(GUESTBOOK)?;
    for tier in ["store", "application", "pages"] {
        story.kubectl(&format!("rollout status deployment {tier} --timeout=90s"))?;
    }
    let address = format!("{}:30411", story.address);
    wait::until(LONG, "the entries of the store on the pages", || {
        let answer = story.get(&address, "/index.html")?;
        ensure!(answer.body.contains("hello from the store"), "{}", answer.body);
        Ok(())
    })?;
    story.kubectl("delete deployment,service store application pages").map(drop)
}

/// `kubectl top` and an autoscaler, with nothing installed.
pub fn autoscaling(story: &mut Story) -> Result<()> {
    story.apply(BUSY)?;
    story.soon(LONG, "deployment busy", ".status.readyReplicas", "1")?;
    story.soon_shows(
        LONG,
        "top nodes",
        "NAME CPU(cores) CPU(%) MEMORY(bytes) MEMORY(%)\nnode1 *m *% *Mi *%",
    )?;
    let pods = "NAME CPU(cores) MEMORY(bytes)\nbusy-* *m *Mi";
    story.soon_shows(LONG, "top pods -l app=busy", pods)?;
    story.soon(AUTOSCALING, "deployment busy", ".spec.replicas", "3")?;
    story.soon_has_events("busy", &["SuccessfulRescale"])?;
    let active = ".status.conditions[?(@.type==\"ScalingActive\")].reason";
    story.soon(LONG, "hpa busy", active, "ValidMetricFound")?;
    // Without load the autoscaler removes the additional pods.
    story.soon(LONG, "deployment busy", ".status.readyReplicas", "3")?;
    for pod in story.pods("app=busy")? {
        story.kubectl(&format!("exec {pod} -- rm /load"))?;
    }
    story.soon(AUTOSCALING, "deployment busy", ".spec.replicas", "1")?;
    let shown = story.json("get hpa busy")?;
    let metrics = shown["status"]["currentMetrics"].as_array().context("metrics are shown")?;
    ensure!(metrics[0]["resource"]["name"] == "cpu", "{metrics:?}");
    story.kubectl("delete hpa busy")?;
    story.kubectl("delete deployment busy").map(drop)
}
