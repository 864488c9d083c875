//! Services of type LoadBalancer without a cloud, on two nodes and a client beside them: addresses of nodes, and an
//! address of a pool that another node takes over. Leaves nothing behind.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::{http, wait};

use crate::story::{LONG, Story};

/// What a client tries at once; a request to a pod that cannot be reached ends sooner.
const ATTEMPT: Duration = Duration::from_millis(250);
/// Until another node answers for the address.
const TAKEOVER: Duration = Duration::from_secs(3);

/// A Service of the nodes' addresses in front of the Deployment `spread`.
fn of_nodes(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  type: LoadBalancer\n  \
         loadBalancerClass: decapod.io/node\n  allocateLoadBalancerNodePorts: false\n  \
         selector:\n    app: spread\n  ports:\n  - port: 8088\n    targetPort: 80\n"
    )
}

/// Whether a client outside of the cluster gets an answer.
fn answers(story: &Story, address: &str) -> Result<()> {
    let response = http::get_from(&story.switch.network()?, address, "/", ATTEMPT)?;
    ensure!(response.status == 200, "{response:?}");
    Ok(())
}

pub fn on_nodes(story: &mut Story) -> Result<()> {
    let second = story.agent.as_ref().context("the second node did not join")?.address().to_owned();
    story.apply(&of_nodes("balanced"))?;
    let both = format!("{} {second}", story.address);
    let addresses = ".status.loadBalancer.ingress[*].ip";
    story.soon(LONG, "service balanced", addresses, &both)?;
    for address in both.split(' ') {
        let to = format!("{address}:8088");
        wait::until(LONG, &format!("an answer at {to}"), || answers(story, &to))?;
    }
    story.soon_has_events("balanced", &["EnsuringLoadBalancer", "EnsuredLoadBalancer"])?;
    // Another Service wants the same port: it waits until the port is free.
    story.apply(&of_nodes("waiting"))?;
    story.soon_has_events("waiting", &["SyncLoadBalancerFailed"])?;
    let pending = story.kubectl("get service waiting --no-headers")?;
    ensure!(pending.contains("<pending>"), "{pending}");
    let described = story.kubectl("describe service waiting")?;
    ensure!(
        described.contains("8088/TCP of the nodes is used by Service default/balanced"),
        "{described}"
    );
    story.kubectl("delete service balanced --timeout=60s")?;
    story.soon(LONG, "service waiting", addresses, &both)?;
    // A node that load balancers leave out.
    let label = "node.kubernetes.io/exclude-from-external-load-balancers";
    story.kubectl(&format!("label node node2 {label}=true"))?;
    story.soon(LONG, "service waiting", addresses, &story.address)?;
    story.kubectl(&format!("label node node2 {label}-"))?;
    story.soon(LONG, "service waiting", addresses, &both)?;
    // Another type: the finalizer and the addresses go.
    story.kubectl(r#"patch service waiting -p {"spec":{"type":"ClusterIP","loadBalancerClass":null,"allocateLoadBalancerNodePorts":null}}"#)?;
    story.soon(LONG, "service waiting", ".metadata.finalizers", "")?;
    story.soon(LONG, "service waiting", addresses, "")?;
    story.kubectl("delete service waiting").map(drop)
}

/// Whether the second node has an address on a link.
fn second_has(story: &Story, address: &str) -> Result<bool> {
    let agent = story.agent.as_ref().context("the second node did not join")?;
    let shown = agent.host().run("ip", &["-o", "address", "show"])?;
    Ok(shown.contains(&format!(" {address}/32 ")))
}

pub fn of_a_pool(story: &mut Story) -> Result<()> {
    story.kubectl(
        "expose deployment spread --name=pooled --port=80 --target-port=80 --type=LoadBalancer",
    )?;
    // Each node answers with its own pods, so that a lost node costs nothing but its address.
    story.kubectl(r#"patch service pooled -p {"spec":{"externalTrafficPolicy":"Local"}}"#)?;
    let path = ".status.loadBalancer.ingress[0].ip";
    wait::until(LONG, "an address of the pool", || {
        let address = story.value("service pooled", path)?;
        ensure!(address.starts_with("192.168.77.2"), "it is {address:?}");
        Ok(())
    })?;
    let address = story.value("service pooled", path)?;
    let to = format!("{address}:80");
    wait::until(LONG, &format!("an answer at {to}"), || answers(story, &to))?;
    story.soon_has_events("pooled", &["EnsuredLoadBalancer", "nodeAssigned"])?;

    // The announcing node is gone: another one answers.
    let second = story.agent.as_ref().context("the second node did not join")?.address().to_owned();
    let on_second = second_has(story, &address)?;
    let lost = if on_second { second.clone() } else { story.address.clone() };
    story.switch.set_connected(&lost, false)?;
    let began = wait::now();
    let found = wait::until(LONG, "another node answers", || answers(story, &to));
    let took = began.elapsed();
    story.switch.set_connected(&lost, true)?;
    found?;
    ensure!(took < TAKEOVER, "it took {took:?}");
    // The node is back, with its address; the other one lets go.
    wait::until(LONG, "the address is back at its node", || {
        ensure!(
            second_has(story, &address)? == on_second,
            "the second node has it: {}",
            !on_second
        );
        answers(story, &to)
    })?;
    story.kubectl("wait --for=condition=Ready node --all --timeout=90s")?;

    // Without a process the kernel goes on answering.
    if on_second {
        let agent = story.agent.as_mut().context("the second node did not join")?;
        agent.kill()?;
        let kept = answers(story, &to).or_else(|_| answers(story, &to));
        story.agent.as_mut().context("the second node did not join")?.launch()?;
        kept?;
    }
    story.kubectl("delete service pooled --timeout=60s")?;
    wait::until(LONG, "the address is removed", || {
        ensure!(!second_has(story, &address)?, "the second node has it");
        ensure!(answers(story, &to).is_err(), "it answers");
        Ok(())
    })?;
    let Story { agent, server, .. } = story;
    agent.as_mut().context("the second node")?.ready(server)
}
