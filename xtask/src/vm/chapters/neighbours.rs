//! A second machine joins: pods of different nodes reach each other (VXLAN) and the Services of both, and
//! the second machine comes back after a reboot. Leaves the cluster as it was.

use crate::sh::Outcome;
use crate::vm::machine::{Hardware, Machine, quoted};
use crate::vm::story::{self, Story};

const AFAR: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: afar}\nspec:\n  nodeName: node2\n  \
     terminationGracePeriodSeconds: 1\n  containers:\n  \
     - {name: afar, image: 'IMAGE', command: [sleep, '1000000']}\n";

/// Both get an interface on a network of their own, which QEMU makes of a multicast address on the
/// loopback interface; its port tells runs apart.
pub fn two(story: &mut Story) -> Outcome {
    let port = 20_000 + std::process::id() % 20_000;
    let between = format!("socket,mcast=239.111.7.7:{port},localaddr=127.0.0.1");
    let hardware = |name, story: &Story| Hardware {
        name,
        memory: 1024,
        between: Some(between.clone()),
        ..story.hardware()
    };
    let accelerator = story.machine.accelerator();
    let server = Machine::start(&story.image, hardware("node1", story), accelerator)?;
    let mut agent = Machine::start(&story.image, hardware("node2", story), accelerator)?;
    for (machine, address) in [(&server, "10.99.0.1"), (&agent, "10.99.0.2")] {
        machine.sh(&format!("ip link set eth1 up; ip address replace {address}/24 dev eth1"))?;
        let network = format!("[Match]\\nName=eth1\\n[Network]\\nAddress={address}/24\\n");
        machine.sh(&format!("printf '{network}' >/etc/systemd/network/15-between.network"))?;
    }
    story::install(&server, "server --node-ip 10.99.0.1 --advertise-address 10.99.0.1")?;
    server.sh("systemctl enable --now decapod")?;
    server.until(90, "the API answers", &story::kubectl("get --raw /readyz"))?;
    let token = server.sh("cat /var/lib/decapod/token")?;
    let join = format!("agent --server https://10.99.0.1:6443 --token {token} --node-ip 10.99.0.2");
    story::install(&agent, &join)?;
    agent.sh("systemctl enable --now decapod")?;
    let ready = "get node node2 -o jsonpath='{.status.conditions[?(@.type==\"Ready\")].status}' | grep -x True";
    let (_, took) = server.until(90, "the second node is Ready", &story::kubectl(ready))?;
    story.note(format!("join: {:.1} s", took.as_secs_f32()));
    for machine in [&server, &agent] {
        story::import(machine)?;
    }
    let manifest = include_str!("main.yaml").to_owned() + "---\n" + AFAR;
    let manifest = quoted(&manifest.replace("IMAGE", story::IMAGE));
    server.sh(&format!("printf %s {manifest} | {}", story::kubectl("apply -f -")))?;
    across(story, &server)?;
    let (down, up) = agent.reboot()?;
    story.note(format!(
        "reboot of the second machine: down {:.1} s, up {:.1} s",
        down.as_secs_f32(),
        up.as_secs_f32()
    ));
    let boot = agent.sh("cat /proc/sys/kernel/random/boot_id")?;
    let back = format!("get node node2 -o jsonpath='{{.status.nodeInfo.bootID}}' | grep -x {boot}");
    server.until(90, "the second node is back", &story::kubectl(&back))?;
    across(story, &server)
}

/// From the second node's pod: a pod of the first by its address, and the Service, whose endpoints may be
/// on both.
fn across(story: &mut Story, server: &Machine) -> Outcome {
    let ready = "get deployment web -o jsonpath='{.status.readyReplicas}' | grep -x 2";
    server.until(90, "the pods are ready", &story::kubectl(ready))?;
    let phase = "get pod afar -o jsonpath='{.status.containerStatuses[0].ready}' | grep -x true";
    server.until(90, "the pod of the second node runs", &story::kubectl(phase))?;
    let pods = server.sh(&story::kubectl(
        "get pods -l app=web -o jsonpath='{range .items[*]}{.status.podIP} {end}'",
    ))?;
    let service = server.sh(&story::kubectl("get service web -o jsonpath='{.spec.clusterIP}'"))?;
    for address in pods.split(' ').chain([service.as_str()]) {
        let ask = format!(
            "exec afar -- sh -c \"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 {address} 80 | grep ^web-\""
        );
        let what = format!("a pod of the second node reaches {address}");
        let (_, took) = server.until(30, &what, &story::kubectl(&ask))?;
        story.note(format!("{what} after {:.1} s", took.as_secs_f32()));
    }
    let name = "exec afar -- nslookup -type=a web.default.svc.cluster.local";
    server.until(30, "the second node's DNS answers", &story::kubectl(name)).map(drop)
}
