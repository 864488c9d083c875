//! The cluster's DNS: settings of the ConfigMap `coredns-custom`, metrics. Leaves everything as it was.

use anyhow::{Context, Result, ensure};
use testkit::wait;

use crate::expect;
use crate::story::{LONG, Story};

const CUSTOM: &str = include_str!("../manifests/coredns-custom.yaml");
const MAP: &str = "-n kube-system configmap coredns-custom";

fn looks_up(story: &Story, name: &str) -> Result<String> {
    story.kubectl(&format!("exec client -- nslookup -type=a {name}"))
}

fn has(story: &Story, name: &str, address: &str) -> Result<()> {
    expect::like(&looks_up(story, name)?, &format!("...\nAddress: {address}"))
}

pub fn by_settings(story: &mut Story) -> Result<()> {
    story.apply(CUSTOM)?;
    // The nodes' DNS servers hear of it by a watch.
    wait::until(LONG, "a list of hosts", || has(story, "printer.story.example.", "192.0.2.77"))?;
    has(story, "db.corp.example.", "192.0.2.78")?;
    let web = story.value("service web", ".spec.clusterIP")?;
    has(story, "shop.story.example.", &web)?;
    has(story, "web.default.svc.cluster.local", &web)?;
    wait::until(LONG, "an Event for the line that is not supported", || {
        let events = story.kubectl(
            "-n kube-system get events --field-selector involvedObject.name=coredns-custom",
        )?;
        let has = events.contains("UnsupportedSettings") && events.contains("template");
        ensure!(has, "{events}");
        Ok(())
    })?;
    story.kubectl(&format!("delete {MAP}"))?;
    wait::until(LONG, "the list is gone", || {
        let gone = looks_up(story, "printer.story.example.").is_err();
        ensure!(gone, "the name still answers");
        Ok(())
    })
}

pub fn metrics(story: &mut Story) -> Result<()> {
    let dns = story.value("-n kube-system service kube-dns", ".spec.clusterIP")?;
    let address = format!("{dns}:9153");
    for path in ["/health", "/ready"] {
        let page = story.get(&address, path)?;
        ensure!(page.status == 200 && page.body == "OK", "{path}: {page:?}");
    }
    let count = |story: &Story| -> Result<u64> {
        let page = story.get(&address, "/metrics")?.body;
        let lines = page.lines().filter(|l| l.starts_with("coredns_dns_requests_total{"));
        let counts = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
        Some(counts.sum()).filter(|sum| *sum > 0).with_context(|| page.clone())
    };
    has(story, "web.default.svc.cluster.local", &story.value("service web", ".spec.clusterIP")?)?;
    let before = count(story)?;
    looks_up(story, "web.default.svc.cluster.local")?;
    ensure!(count(story)? > before, "a query is counted");
    Ok(())
}
