//! The first minute: the node, the API's surface, images. Leaves the test images imported.

use anyhow::{Result, ensure};
use testkit::images;

use crate::story::{LONG, Story};

pub fn node_ready(story: &mut Story) -> Result<()> {
    story.soon_shows(
        LONG,
        "get nodes",
        "NAME STATUS ROLES AGE VERSION\n\
         node1 Ready * * v1.36.*",
    )?;
    story.soon(LONG, "serviceaccount default", ".metadata.name", "default")?;
    let address =
        story.value("node node1", ".status.addresses[?(@.type=='InternalIP')].address")?;
    ensure!(address == story.address, "the node's address is {address}");
    Ok(())
}

pub fn api_surface(story: &mut Story) -> Result<()> {
    story.shows(
        "version",
        "Client Version: v1.36.*\nKustomize Version: *\nServer Version: v1.36.*",
    )?;
    story.shows(
        "get namespaces",
        "NAME STATUS AGE\n\
         default Active *\n\
         kube-node-lease Active *\n\
         kube-public Active *\n\
         kube-system Active *",
    )?;
    story.shows(
        "get service kubernetes",
        "NAME TYPE CLUSTER-IP EXTERNAL-IP PORT(S) AGE\n\
         kubernetes ClusterIP 10.43.0.1 <none> 443/TCP *",
    )?;
    story.soon_shows(LONG, "get leases -n kube-node-lease", "NAME HOLDER AGE\nnode1 node1 *")
}

/// One machine is one node: a second server or agent with its own directory gets an error that names the
/// first.
pub fn second_node(story: &mut Story) -> Result<()> {
    let other = story.server.host().directory().join("other").display().to_string();
    let binary = story.binary.display().to_string();
    let refused = |words: &[&str], part: &str| -> Result<()> {
        let words = [words, &["--data-dir", &other]].concat();
        let told = story.server.host().run(&binary, &words).err().map(|error| format!("{error:#}"));
        let told = told.unwrap_or_default();
        ensure!(told.contains(part), "{words:?}: {told}");
        Ok(())
    };
    let taken = "(the kubelet's server) is taken: the node of this machine belongs to process";
    refused(&["server", "--https-listen-port", "7443"], taken)?;
    refused(&["agent", "--server", "https://127.0.0.1:6443", "--token", "x"], taken)?;
    refused(&["server", "--node-name", "Foo_Bar"], "choose another with --node-name")?;
    refused(&["server", "--node-ip", "192.0.2.77"], "is not an address of this machine")?;
    std::fs::remove_dir_all(other)?;
    Ok(())
}

pub fn images(story: &mut Story) -> Result<()> {
    for archive in images::all()? {
        story.server.decapod(&["images", "import", &archive.display().to_string()])?;
    }
    let list = story.server.decapod(&["images", "list"])?;
    for (name, tag) in [("busybox", "1.35"), ("nginx", "1.22"), ("nginx", "1.23")] {
        let known = list.lines().any(|line| line.contains(name) && line.contains(tag));
        ensure!(known, "{name} {tag} is missing in:\n{list}");
    }
    Ok(())
}
