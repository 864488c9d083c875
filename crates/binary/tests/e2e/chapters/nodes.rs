//! A second node: it joins, runs pods, loses its server, is cut off, comes back and leaves. Leaves one
//! node, and everything else as it was.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::nodes::Agent;
use testkit::{http, wait};

use crate::expect;
use crate::processes;
use crate::story::{LONG, Story};

const SPREAD: &str = include_str!("../manifests/spread.yaml");
const REPLICAS: usize = 4;
/// With four equal pods, the chance that 100 tries miss one is one in a million million.
const TRIES: usize = 100;
const REQUEST: Duration = Duration::from_secs(20);

fn agent(story: &mut Story) -> Result<&mut Agent> {
    story.agent.as_mut().context("the second node did not join")
}

pub fn wrong_tokens(story: &mut Story) -> Result<()> {
    let agent = Agent::new(&mut story.switch, &story.server, "stray", &story.binary, &[])?;
    let token = std::fs::read_to_string(story.server.data_directory().join("token"))?;
    let (hash, _) = token.trim().split_once("::").context("a token has two parts")?;
    let url = story.server.url()?;
    let data = agent.data_directory().display().to_string();
    let cases = [
        (format!("{hash}::wrong"), url.clone(), "it does not accept the token"),
        (
            format!("K10{}::wrong", "0".repeat(64)),
            url.clone(),
            "does not belong to the cluster of the token",
        ),
        ("K10nonsense::wrong".into(), url, "the hash must be 64 hex digits"),
        (
            token.trim().to_owned(),
            "192.168.77.1:6443".into(),
            "expected a URL, for example https://",
        ),
    ];
    for (token, url, wanted) in cases {
        let mut command = agent.host().command(&story.binary);
        command.args(["agent", "--data-dir", &data, "--server", &url, "--token", &token]);
        let output = agent.host().output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let complaint: Vec<&str> =
            said.lines().filter(|line| line.starts_with("decapod: ")).collect();
        ensure!(output.status.code() == Some(1), "{token} ended with {}", output.status);
        ensure!(complaint.len() == 1 && complaint[0].contains(wanted), "{token}: {said}");
    }
    Ok(())
}

pub fn joins(story: &mut Story) -> Result<()> {
    let mut agent = Agent::new(&mut story.switch, &story.server, "node2", &story.binary, &[])?;
    agent.launch()?;
    agent.ready(&story.server)?;
    agent.import_images()?;
    story.agent = Some(agent);
    story.shows(
        "get nodes",
        "NAME STATUS ROLES AGE VERSION\nnode1 Ready * * v1.36.*\nnode2 Ready * * v1.36.*",
    )?;
    // The kubelet, the proxy and the DNS request certificates twice: to join, and with the Node's UID. The
    // kubelet's server requests once. All are approved automatically.
    wait::until(LONG, "certificate requests are approved and issued", || {
        let printed = story.kubectl("get csr --no-headers")?;
        let issued = printed.lines().filter(|line| line.contains("Approved,Issued")).count();
        ensure!(issued == printed.lines().count() && issued == 7, "{printed}");
        Ok(())
    })
}

pub fn spread(story: &mut Story) -> Result<()> {
    story.apply(SPREAD)?;
    story.kubectl("rollout status deployment/spread --timeout=90s")?;
    story.kubectl("wait --for=condition=Ready pod/far --timeout=90s")?;
    for node in ["node1", "node2"] {
        let count = pods_on(story, node)?.len();
        ensure!(count == REPLICAS / 2, "{count} pods on {node}");
    }
    Ok(())
}

/// A new authority while everything runs: the agent, its pods and an old kubeconfig keep working, and the
/// agent accepts the new authority when it restarts.
pub fn new_authority(story: &mut Story) -> Result<()> {
    let before = story.server.api()?;
    let said = story.server.decapod(&["certificate", "rotate-ca"])?;
    ensure!(said.contains("replaced: ca, front-proxy-ca"), "{said}");
    story.server.stop(LONG)?;
    story.server.start()?;
    let answer = story.server.host().in_network(|| before.get("/readyz", REQUEST))??;
    ensure!(answer.status == 200, "the kubeconfig of before: {answer:?}");
    let lease = |story: &Story| story.value("lease node2 -n kube-node-lease", ".spec.renewTime");
    let renewed = lease(story)?;
    wait::until(LONG, "the agent goes on", || {
        ensure!(lease(story)? != renewed, "its Lease is not renewed");
        Ok(())
    })?;
    let pod = pods_on(story, "node2")?.into_iter().next().context("a pod there")?;
    story.kubectl(&format!("exec {pod} -- true"))?;
    agent(story)?.stop(LONG)?;
    agent(story)?.launch()?;
    let Story { agent, server, .. } = story;
    agent.as_mut().context("the second node")?.ready(server)?;
    let log = agent.as_ref().map(Agent::log).unwrap_or_default();
    ensure!(log.contains("has a new certificate authority"), "{log}");
    story.kubectl(&format!("exec {pod} -- true")).map(drop)
}

/// Names of the Deployment's pods on a node that are not terminating.
fn pods_on(story: &Story, node: &str) -> Result<Vec<String>> {
    let list =
        story.json(&format!("get pods -l app=spread --field-selector spec.nodeName={node}"))?;
    let items = list["items"].as_array().context("a list has items")?;
    let alive = items.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(alive.filter_map(|pod| Some(pod["metadata"]["name"].as_str()?.to_owned())).collect())
}

fn all_pods(story: &Story) -> Result<BTreeSet<String>> {
    Ok(story.pods("app=spread")?.into_iter().collect())
}

/// The pods that answer many requests.
fn answers(ask: impl Fn() -> Result<http::Response>) -> Result<BTreeSet<String>> {
    let mut seen = BTreeSet::new();
    for _ in 0..TRIES {
        let response = ask()?;
        ensure!(response.status == 200, "{response:?}");
        seen.insert(response.body.split(' ').next().unwrap_or_default().to_owned());
    }
    Ok(seen)
}

pub fn traffic(story: &mut Story) -> Result<()> {
    let pods = all_pods(story)?;
    let service = format!("{}:80", story.value("service spread", ".spec.clusterIP")?);
    let (second, outside) = (agent(story)?.host().network()?, story.switch.network()?);
    let first = story.server.host().network()?;
    // Pod to pod, both ways; the answer is longer than one packet if requested.
    for (from, to) in [("client", "node2"), ("far", "node1")] {
        let pod = pods_on(story, to)?.into_iter().next().context("a pod there")?;
        let address = story.value(&format!("pod {pod}"), ".status.podIP")?;
        let line = format!("exec {from} -- wget -q -O- http://{address}/");
        let printed =
            wait::until(LONG, "a pod of the other node answers", || story.kubectl(&line))?;
        expect::like(&printed, &format!("{pod} *"))?;
    }
    let node_port = format!("{}:30090", agent(story)?.address());
    let cases = [
        ("the ClusterIP on the first node", &first, service.clone()),
        ("the ClusterIP on the second node", &second, service),
        ("the NodePort of the second node, from outside", &outside, node_port),
        (
            "the NodePort of the first node, from outside",
            &outside,
            format!("{}:30090", story.address),
        ),
    ];
    for (what, network, address) in cases {
        wait::until(LONG, what, || {
            let seen = answers(|| http::get_from(network, &address, "/", REQUEST))?;
            ensure!(seen == pods, "answers from {seen:?}, pods are {pods:?}");
            Ok(())
        })?;
    }
    let line = "exec far -- wget -q -O- http://spread.default.svc.cluster.local/";
    let printed = wait::until(LONG, "a name answers on the second node", || story.kubectl(line))?;
    expect::like(&printed, "spread-* *")
}

pub fn streams(story: &mut Story) -> Result<()> {
    story.soon_shows(LONG, "logs far", "started")?;
    story.shows("exec far -- echo hello", "hello")?;
    let printed = story.server.kubectl_in_terminal(&["exec", "-it", "far", "--", "tty"])?;
    ensure!(printed.contains("/dev/"), "{printed}");
    let pod = pods_on(story, "node2")?.into_iter().next().context("a pod there")?;
    let what = format!("pod/{pod}");
    let forward =
        story.server.kubectl_in_background("far-forward", &["port-forward", &what, "18090:80"])?;
    let response = wait::until(LONG, "the forwarded port answers", || {
        story.get("127.0.0.1:18090", "/").with_context(|| forward.output().unwrap_or_default())
    })?;
    ensure!(response.status == 200 && response.body.starts_with(&pod), "{response:?}");
    Ok(())
}

/// The server dies; the node keeps working, even after its own restart.
pub fn without_a_server(story: &mut Story) -> Result<()> {
    let pod = pods_on(story, "node2")?.into_iter().next().context("a pod there")?;
    let uid = story.value(&format!("pod {pod}"), ".metadata.uid")?;
    let service = format!("{}:80", story.value("service spread", ".spec.clusterIP")?);
    let restarts = ".status.containerStatuses[0].restartCount";
    let network = agent(story)?.host().network()?;
    story.server.kill()?;

    let old = processes::named(&uid, "nginx")?;
    old.kill()?;
    let new = wait::until(LONG, "the container is started again without a server", || {
        let new = processes::named(&uid, "nginx")?;
        ensure!(new != old, "the old process still runs");
        Ok(new)
    })?;
    let names = |what: &str| {
        wait::until(LONG, what, || {
            let name = "spread.default.svc.cluster.local";
            testkit::load::resolve_from(&network, "10.43.0.10:53", name)
        })
    };
    names("names answer without a server")?;
    wait::until(LONG, "the Service answers without a server", || {
        http::get_from(&network, &service, "/", REQUEST)
    })?;

    // The agent restarts, and reaches no server.
    let second = agent(story)?;
    second.kill()?;
    second.launch()?;
    wait::until(LONG, "the node starts with what it knows", || {
        let log = second.log();
        ensure!(log.contains("using the settings of the last start"), "{log}");
        Ok(())
    })?;
    ensure!(processes::named(&uid, "nginx")? == new, "the restart of the agent touched a pod");
    http::get_from(&network, &service, "/", REQUEST)?;
    names("names answer after the restart")?;

    story.server.start()?;
    story.soon(LONG, &format!("pod {pod}"), restarts, "1")?;
    story.kubectl("wait --for=condition=Ready node/node2 --timeout=90s")?;
    story.kubectl(&format!("wait --for=condition=Ready pod/{pod} --timeout=90s"))?;
    ensure!(processes::named(&uid, "nginx")? == new, "the container was not adopted");
    story.soon(LONG, "deployment spread", ".status.readyReplicas", &REPLICAS.to_string())?;
    story.soon_shows(LONG, "exec far -- echo back", "back")
}

const READY: &str = ".status.conditions[?(@.type=='Ready')].status";

pub fn cut_off(story: &mut Story) -> Result<()> {
    let stale = story.json("get pods --field-selector spec.nodeName=node2")?;
    let uids: Vec<String> = stale["items"]
        .as_array()
        .context("a list has items")?
        .iter()
        .filter_map(|pod| Some(pod["metadata"]["uid"].as_str()?.to_owned()))
        .collect();
    let address = agent(story)?.address().to_owned();
    story.switch.set_connected(&address, false)?;
    story.soon(LONG, "node node2", READY, "Unknown")?;
    story.shows("get node node2", "NAME STATUS ROLES AGE VERSION\nnode2 NotReady * * v1.36.*")?;
    wait::until(LONG, "the pods run on the first node", || {
        let (there, here) = (pods_on(story, "node2")?, pods_on(story, "node1")?);
        ensure!(there.is_empty() && here.len() == REPLICAS, "{there:?} there, {here:?} here");
        Ok(())
    })?;
    story.soon(LONG, "deployment spread", ".status.readyReplicas", &REPLICAS.to_string())?;

    story.switch.set_connected(&address, true)?;
    story.soon(LONG, "node node2", READY, "True")?;
    wait::until(LONG, "stale pods are gone", || {
        let rest =
            story.kubectl("get pods -l app=spread --field-selector spec.nodeName=node2 -o name")?;
        ensure!(rest.is_empty(), "{rest}");
        // `far` tolerates an unreachable node for five minutes: it was never evicted.
        let running = uids.iter().filter(|uid| processes::named(uid, "nginx").is_ok()).count();
        ensure!(running == 0, "{running} stale pods still run");
        Ok(())
    })?;
    story.kubectl("wait --for=condition=Ready pod/far --timeout=90s")?;
    story.soon_shows(LONG, "exec far -- echo back", "back")
}

/// Its certificates end with its Node. It joins again with the token, on the same data directory.
pub fn joins_again(story: &mut Story) -> Result<()> {
    let before = story.value("node node2", ".metadata.uid")?;
    story.kubectl("delete node node2")?;
    agent(story)?.stop(LONG)?;
    agent(story)?.launch()?;
    let Story { agent, server, .. } = story;
    agent.as_mut().context("the second node")?.ready(server)?;
    ensure!(story.value("node node2", ".metadata.uid")? != before, "it is the same Node");
    // Logs and exec work: the serving certificate is trusted, and the kubelet may read its pods.
    story.kubectl("run again --image=busybox:1.35 --overrides={\"spec\":{\"nodeName\":\"node2\"}} --command -- sleep 3600")?;
    story.kubectl("wait --for=condition=Ready pod/again --timeout=90s")?;
    story.soon_shows(LONG, "exec again -- echo here", "here")?;
    story.kubectl("delete pod again --now").map(drop)
}

pub fn leaves(story: &mut Story) -> Result<()> {
    story.kubectl("delete deployment,service spread")?;
    story.kubectl("delete pod far --ignore-not-found")?;
    let mut second = story.agent.take().context("the second node did not join")?;
    let status = second.stop(LONG)?;
    ensure!(status.success(), "the agent ended with {status}");
    let printed = second.decapod(&["uninstall"])?;
    ensure!(!second.data_directory().exists(), "the data directory is there:\n{printed}");
    for (what, wanted) in super::ending::TRACES {
        let found = second.host().run("sh", &["-c", what])?;
        ensure!(found == *wanted, "{what}: {found}\n{printed}");
    }
    story.kubectl("delete node node2")?;
    wait::until(LONG, "the road to the second node is gone", || {
        let links = story.server.host().run("ip", &["-o", "link"])?;
        ensure!(!links.contains("decapod.1"), "{links}");
        Ok(())
    })
}
