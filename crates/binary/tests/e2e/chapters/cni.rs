//! CNI: the reference plugins connect the pods of the embedded runtime. On its own host; leaves nothing.
//!
//! The node has no network of its own (`--backend none`) and waits for a configuration. The plugins' files are in
//! the host's directory: other hosts of this machine have the same file system.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use testkit::cluster::Server;
use testkit::host::Host;
use testkit::switch::Switch;
use testkit::{containerd, images, wait};

use crate::story::{LONG, Story};

const NODE: &str = "node node1";
const READY: &str = ".status.conditions[?(@.type=='Ready')]";
const PODS: &str = include_str!("../manifests/cni.yaml");
const NOT_READY: &str = "container runtime network not ready: NetworkReady=false \
     reason:NetworkPluginNotReady message:Network plugin returns error: cni plugin not initialized";

pub fn connects_pods(told: &mut Story) -> Result<()> {
    let plugins = match containerd::plugins() {
        Ok(plugins) => plugins.display().to_string(),
        Err(error) => {
            println!("skipped: no CNI plugins here: {error:#}");
            return Ok(());
        }
    };
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    // The plugins' pods are on a bridge.
    host.filter_bridges(true)?;
    let address = switch.connect(&host)?;
    let conf = host.directory().join("net.d");
    let arguments = [
        &["--node-name", "node1", "--node-ip", &address, "--backend", "none"][..],
        &["--cni-conf-dir", &conf.display().to_string(), "--cni-bin-dir", &plugins],
    ];
    let server = Server::new(host, &told.binary, &arguments.concat())?;
    let binary = told.binary.clone();
    let mut story =
        Story { switch, agent: None, server, binary, address, static_manifests: PathBuf::new() };
    let outcome = tell(&mut story, &conf);
    outcome.with_context(|| story.report())
}

fn tell(story: &mut Story, conf: &Path) -> Result<()> {
    story.server.start()?;
    let archive = images::all()?[0].display().to_string();
    story.server.decapod(&["images", "import", &archive])?;
    story.soon(LONG, NODE, &format!("{READY}.message"), NOT_READY)?;
    // The directory is created after the start, as a plugin's DaemonSet does.
    fs::create_dir(conf)?;
    let reservations = story.server.host().directory().join("reservations");
    fs::write(conf.join("10-pods.conflist"), network(&reservations))?;
    story.soon(LONG, NODE, &format!("{READY}.status"), "True")?;
    story.soon(LONG, "serviceaccount default", ".metadata.name", "default")?;
    story.apply(PODS)?;
    for pod in ["server", "client"] {
        story.soon(LONG, &format!("pod {pod}"), ".status.phase", "Running")?;
    }
    let address = story.value("pod server", ".status.podIP")?;
    ensure!(address.starts_with("10.77.0."), "{address} is not one of the plugins' addresses");
    traffic(story, &address)?;
    let limited = story.server.host().run("tc", &["qdisc", "show"])?;
    ensure!(limited.contains("tbf"), "the plugin bandwidth made no filter:\n{limited}");
    // A new process finds the pods as they are.
    story.server.kill()?;
    story.server.start()?;
    story.soon(LONG, NODE, &format!("{READY}.status"), "True")?;
    ensure!(story.value("pod server", ".status.podIP")? == address, "another address");
    ensure!(story.value("pod server", ".status.containerStatuses[0].restartCount")? == "0");
    traffic(story, &address)?;
    broken(story, conf)?;
    deletion(story, &reservations)
}

/// The node's own host ports lead to pods of plugins, because no plugin of the network does.
fn traffic(story: &Story, address: &str) -> Result<()> {
    story.soon_shows(LONG, &format!("exec client -- wget -qO- http://{address}/"), "hello")?;
    let port = format!("{}:8088", story.address);
    wait::until(LONG, "the host port answers", || {
        let answer = story.get(&port, "/")?;
        ensure!(answer.status == 200 && answer.body.contains("hello"), "{answer:?}");
        Ok(())
    })
}

/// A network whose plugin is missing: the pod's event and the node say so.
fn broken(story: &Story, conf: &Path) -> Result<()> {
    let network = r#"{"cniVersion": "1.0.0", "name": "broken", "plugins": [{"type": "no-such"}]}"#;
    fs::write(conf.join("05-broken.conflist"), network)?;
    let log = "CNI plugins set up the network of new pods";
    wait::until(LONG, "the new configuration is read", || {
        let log_text = story.server.log();
        let read = log_text.lines().any(|line| line.contains(log) && line.contains("broken"));
        ensure!(read, "{log_text}");
        Ok(())
    })?;
    // Placed by hand: the node becomes NotReady, too.
    let place = r#"--overrides={"spec":{"nodeName":"node1"}}"#;
    story.kubectl(&format!("run late --image=busybox:1.35 --restart=Never {place} -- true"))?;
    let what = "get events --field-selector involvedObject.name=late,reason=FailedCreatePodSandBox";
    let expected =
        "plugin type=\"no-such\" failed (add): failed to find plugin \"no-such\" in path";
    wait::until(LONG, "an event names the plugin", || {
        let events = story.kubectl(&format!("{what} -o jsonpath={{.items[*].message}}"))?;
        ensure!(events.contains(expected), "{events}");
        Ok(())
    })?;
    fs::remove_file(conf.join("05-broken.conflist"))?;
    story.soon(LONG, "pod late", ".status.phase", "Succeeded")
}

/// Deleted pods leave no address and no link.
fn deletion(story: &Story, reservations: &Path) -> Result<()> {
    story.kubectl("delete pod server client late")?;
    wait::until(LONG, "no pod's address and link is left", || {
        let held =
            fs::read_dir(reservations.join("pods"))?.flatten().map(|entry| entry.file_name());
        let held: Vec<_> = held.filter(|name| name.to_string_lossy().starts_with("10.")).collect();
        ensure!(held.is_empty(), "{held:?}");
        let links = story.server.host().run("ip", &["-o", "link"])?;
        ensure!(!links.contains("veth") && !links.contains(": bwp"), "{links}");
        Ok(())
    })
}

fn network(reservations: &Path) -> String {
    let ipam = serde_json::json!({
        "type": "host-local",
        "dataDir": reservations,
        "ranges": [[{"subnet": "10.77.0.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    });
    let bridge = serde_json::json!({
        "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "ipam": ipam,
    });
    let tuning = serde_json::json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}});
    let bandwidth = serde_json::json!({"type": "bandwidth", "capabilities": {"bandwidth": true}});
    let plugins = [bridge, tuning, bandwidth];
    serde_json::json!({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}).to_string()
}
