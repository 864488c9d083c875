//! Network policies: what they allow and forbid, from a pod's first packet on, while the server is killed, and
//! after another program flushed the rules. Leaves everything as it was.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::{http, wait};

use crate::processes;
use crate::story::{LONG, Story};

const POLICIES: &str = include_str!("../manifests/policies.yaml");
/// A request that is not answered in this time was dropped.
const SILENCE: Duration = Duration::from_secs(2);
const TABLE: &str = "decapod-network-policies";

/// The network of a pod of the namespace, which is reachable without a server.
fn network(story: &Story, pod: &str) -> Result<File> {
    let uid = story.value(&format!("-n fenced pod {pod}"), ".metadata.uid")?;
    let process = processes::of_pod(&uid)?.into_iter().next().context("the pod has no process")?;
    Ok(File::open(format!("/proc/{}/ns/net", process.id))?)
}

fn answers(from: &File, address: &str) -> Result<()> {
    let answer = http::get_from(from, address, "/", SILENCE)?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(())
}

fn is_silent(from: &File, address: &str) -> Result<()> {
    ensure!(http::get_from(from, address, "/", SILENCE).is_err(), "{address} answered");
    Ok(())
}

pub fn are_enforced(story: &mut Story) -> Result<()> {
    story.apply(POLICIES)?;
    story.kubectl("-n fenced wait --for=condition=Ready pod --all --timeout=90s")?;
    let server = format!("{}:80", story.value("-n fenced pod server", ".status.podIP")?);
    let service = format!("{}:80", story.value("-n fenced service server", ".spec.clusterIP")?);
    let web = format!("{}:80", story.value("service web", ".spec.clusterIP")?);
    let (friend, stranger) = (network(story, "friend")?, network(story, "stranger")?);
    wait::until(LONG, "a friend reaches the server", || answers(&friend, &server))?;
    wait::until(LONG, "also by its Service", || answers(&friend, &service))?;
    is_silent(&stranger, &server)?;
    is_silent(&stranger, &service)?;
    is_silent(&friend, &web)?;
    let outside = story.kubectl(&format!("exec client -- timeout 3 wget -q -O- http://{server}/"));
    ensure!(outside.is_err(), "another namespace's pod: {outside:?}");
    // The node itself, as with probes.
    ensure!(story.get(&server, "/")?.status == 200);
    let names =
        story.kubectl("-n fenced exec friend -- nslookup -type=a server.fenced.svc.cluster.local");
    ensure!(names.is_ok(), "{names:?}");
    let names = story.kubectl("-n fenced exec stranger -- timeout 3 nslookup -type=a server");
    ensure!(names.is_err(), "{names:?}");
    first_packets(story, &server)
}

/// A pod's first command already meets its policies, allowed or not.
fn first_packets(story: &Story, server: &str) -> Result<()> {
    // The shell is the first process, which SIGTERM of `timeout` would not end.
    for (name, role, phase) in [("early", "friend", "Succeeded"), ("late", "foe", "Failed")] {
        let manifest = format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: fenced, labels: \
             {{role: {role}}}}}, spec: {{restartPolicy: Never, terminationGracePeriodSeconds: 1, \
             containers: [{{name: shell, image: 'busybox:1.35', command: [sh, -c, \
             'timeout 5 wget -q -O /dev/null http://{server}/ || exit 1']}}]}}}}"
        );
        story.apply(&manifest)?;
        story.soon(LONG, &format!("-n fenced pod {name}"), ".status.phase", phase)?;
    }
    Ok(())
}

pub fn outlive_the_server(story: &mut Story) -> Result<()> {
    let server = format!("{}:80", story.value("-n fenced pod server", ".status.podIP")?);
    let (friend, stranger) = (network(story, "friend")?, network(story, "stranger")?);
    for moment in [0, 100, 300] {
        story.server.kill()?;
        is_silent(&stranger, &server)?;
        answers(&friend, &server)?;
        story.server.launch()?;
        // While it starts, nothing is open for a moment.
        wait::throughout(Duration::from_millis(moment), "nothing opens", || {
            is_silent(&stranger, &server)
        })?;
        story.server.kill()?;
        story.server.start()?;
        is_silent(&stranger, &server)?;
    }
    answers(&friend, &server)?;
    story.kubectl("wait --for=condition=Ready node/node1 --timeout=90s")?;
    Ok(())
}

pub fn return_after_a_flush(story: &mut Story) -> Result<()> {
    if story.server.host().run("nft", &["--version"]).is_err() {
        println!("skipped: no nft program");
        return Ok(());
    }
    let server = format!("{}:80", story.value("-n fenced pod server", ".status.podIP")?);
    let (friend, stranger) = (network(story, "friend")?, network(story, "stranger")?);
    story.server.host().run("nft", &["flush", "ruleset"])?;
    wait::until(LONG, "the rules are back", || {
        story.server.host().run("nft", &["list", "table", "ip", TABLE])
    })?;
    wait::until(LONG, "a stranger gets nothing", || is_silent(&stranger, &server))?;
    answers(&friend, &server)?;
    // Without policies there are no rules, and nothing is forbidden.
    story.kubectl("-n fenced delete networkpolicies --all")?;
    wait::until(LONG, "all pods reach each other", || answers(&stranger, &server))?;
    wait::until(LONG, "no table is left", || {
        let listed = story.server.host().run("nft", &["list", "table", "ip", TABLE]);
        ensure!(listed.is_err(), "{listed:?}");
        Ok(())
    })?;
    story.kubectl("delete namespace fenced")?;
    Ok(())
}
