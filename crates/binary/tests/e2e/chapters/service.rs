//! The Service of the pods: addresses, names, and pods that get no traffic. Leaves everything as it was.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use testkit::{http, wait};

use crate::expect;
use crate::story::{LONG, Story};

/// With three equal pods, the chance that 60 tries miss one is one in ten billion.
const TRIES: usize = 60;

fn cluster_address(story: &Story) -> Result<String> {
    Ok(format!("{}:80", story.value("service web", ".spec.clusterIP")?))
}

pub fn cluster_ip(story: &mut Story) -> Result<()> {
    let address = cluster_address(story)?;
    wait::until(LONG, "the ClusterIP answers", || story.get(&address, "/"))?;
    let mut seen = BTreeSet::new();
    for _ in 0..TRIES {
        let response = story.get(&address, "/")?;
        ensure!(response.status == 200, "{response:?}");
        seen.insert(response.body.split(' ').next().unwrap_or_default().to_owned());
    }
    let pods: BTreeSet<String> = story.pods("app=web")?.into_iter().collect();
    ensure!(seen == pods, "answers from {seen:?}, pods are {pods:?}");
    Ok(())
}

pub fn node_port(story: &mut Story) -> Result<()> {
    let address = format!("{}:30080", story.address);
    let outside = story.switch.network()?;
    let limit = Duration::from_secs(5);
    wait::until(LONG, "the NodePort answers outside", || {
        http::get_from(&outside, &address, "/", limit)
    })?;
    let inside = story.get(&address, "/")?;
    ensure!(inside.status == 200, "{inside:?}");
    Ok(())
}

pub fn names(story: &mut Story) -> Result<()> {
    for name in
        ["web", "web.default", "web.default.svc.cluster.local", "web.default.svc.cluster.local."]
    {
        let line = format!("exec client -- wget -q -O- http://{name}/");
        let printed = wait::until(LONG, name, || story.kubectl(&line))?;
        expect::like(&printed, "web-* one")?;
    }
    let address = story.value("service web", ".spec.clusterIP")?;
    let printed = story.kubectl("exec client -- nslookup -type=a web.default.svc.cluster.local")?;
    expect::like(&printed, &format!("...\nAddress: {address}"))?;
    let missing =
        story.kubectl("exec client -- nslookup -type=a nothing.default.svc.cluster.local");
    ensure!(missing.is_err(), "{missing:?}");
    // Pod to pod, without a Service.
    let pod = story.first_pod("app=web")?;
    let pod_address = story.value(&format!("pod {pod}"), ".status.podIP")?;
    let printed = story.kubectl(&format!("exec client -- wget -q -O- http://{pod_address}/"))?;
    expect::like(&printed, &format!("{pod} one"))
}

pub fn not_ready(story: &mut Story) -> Result<()> {
    let pod = story.first_pod("app=web")?;
    let address = cluster_address(story)?;
    story.kubectl(&format!("exec {pod} -- touch /tmp/busy"))?;
    story.kubectl(&format!("wait --for=condition=Ready=false pod/{pod} --timeout=90s"))?;
    let rest = story.pods("app=web")?.len() - 1;
    story.soon(LONG, "deployment web", ".status.readyReplicas", &rest.to_string())?;
    // The endpoint's change must reach the kernel; after that the pod gets no request.
    let from_it = || -> Result<usize> {
        let mut count = 0;
        for _ in 0..TRIES {
            count += usize::from(story.get(&address, "/")?.body.starts_with(&pod));
        }
        Ok(count)
    };
    wait::until(LONG, "the pod is out of the Service", || {
        let count = from_it()?;
        ensure!(count == 0, "{count} answers of {TRIES} came from it");
        Ok(())
    })?;
    let count = from_it()?;
    ensure!(count == 0, "{count} answers came from a pod that was out already");
    story.kubectl(&format!("exec {pod} -- rm /tmp/busy"))?;
    story.kubectl(&format!("wait --for=condition=Ready pod/{pod} --timeout=90s"))?;
    wait::until(LONG, "the pod is back in the Service", || {
        ensure!(from_it()? > 0, "no answer from it");
        Ok(())
    })
}
