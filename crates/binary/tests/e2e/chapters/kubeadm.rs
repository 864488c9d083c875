//! An unmodified kubeadm, from `init` to `reset`, with our components in its static pods and our kubelet as
//! its service: three machines of their own. Leaves nothing. It takes minutes and a gigabyte of images, so it
//! runs only with `DECAPOD_KUBEADM`.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use testkit::kubeadm::{Machine, programs};
use testkit::switch::Switch;
use testkit::{images, wait};

use crate::story::{LONG, Story};

const SWITCH: &str = "DECAPOD_KUBEADM";
/// kubeadm looks for a CRI socket, which the embedded runtime does not have.
const NO_SOCKET: &str = "--skip-phases=preflight";
/// Archives that a worker does not need.
const OF_CONTROL_PLANES: [&str; 4] =
    ["etcd.tar", "kube-apiserver.tar", "kube-controller-manager.tar", "kube-scheduler.tar"];
const COMPONENTS: [&str; 4] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];

/// The machines of one cluster; each imports the images.
struct Cluster {
    first: Machine,
    worker: Machine,
    second: Machine,
    // Must be dropped last: the hosts are connected to it.
    _switch: Switch,
}

pub fn whole_life(told: &mut Story) -> Result<()> {
    if std::env::var_os(SWITCH).is_none() {
        println!("skipped: {SWITCH} is not set (a night run)");
        return Ok(());
    }
    let Some((kubeadm, etcd)) = programs() else {
        println!(
            "skipped: no kubeadm or no etcd in the cache (`cargo xtask kubeadm`, `cargo xtask etcd`)"
        );
        return Ok(());
    };
    let mut switch = Switch::new()?;
    let mut machine = |name| Machine::start(&mut switch, name, &told.binary, &kubeadm);
    let (first, worker, second) = (machine("node1")?, machine("node2")?, machine("node3")?);
    let version = first.kubeadm(&["version", "-o", "short"])?.trim().to_owned();
    let list = first.kubeadm(&["config", "images", "list", "--kubernetes-version", &version])?;
    let tag = list.lines().find_map(|line| line.split_once("/etcd:")).context("an etcd")?.1;
    let directory = first.host().directory().join("archives");
    let mut archives = images::kubeadm::archives(&told.binary, &etcd, &version, tag, &directory)?;
    archives.extend(images::all()?);
    for (machine, without) in [(&first, &[][..]), (&second, &[]), (&worker, &OF_CONTROL_PLANES)] {
        let is_left_out = |file: &Path| without.iter().any(|name| file.ends_with(name));
        let wanted = archives.iter().filter(|file| !is_left_out(file));
        wanted.into_iter().try_for_each(|archive| machine.import(&told.binary, archive))?;
    }
    let cluster = Cluster { first, worker, second, _switch: switch };
    tell(&cluster, &version).with_context(|| {
        let logs = [&cluster.first, &cluster.worker, &cluster.second].map(|machine| {
            let log = machine.log();
            let from = log.floor_char_boundary(log.len().saturating_sub(4000));
            format!("--- kubelet of {}\n{}", machine.host().name(), &log[from..])
        });
        let pods = cluster.first.kubectl("get nodes,pods,events -A -o wide").unwrap_or_default();
        format!("{pods}\n{}", logs.join("\n"))
    })
}

fn tell(cluster: &Cluster, version: &str) -> Result<()> {
    let key = init(&cluster.first, version)?;
    control_plane_runs(&cluster.first, "node1")?;
    addons_run(&cluster.first)?;
    certificates(&cluster.first)?;
    let tokens = cluster.first.kubeadm(&["token", "list"])?;
    ensure!(!tokens.contains("decapod"), "the API server has made a token of its own:\n{tokens}");
    let join = cluster.first.kubeadm(&["token", "create", "--print-join-command"])?;
    let join: Vec<&str> = join.split_whitespace().skip(1).collect();
    cluster.worker.kubeadm(&[&join[..], &[NO_SOCKET]].concat())?;
    ready(&cluster.first, "node2")?;
    pods_run(cluster)?;
    let more = ["--control-plane", "--certificate-key", &key, NO_SOCKET];
    cluster.second.kubeadm(&[&join[..], &more].concat())?;
    ready(&cluster.first, "node3")?;
    control_plane_runs(&cluster.second, "node3")?;
    upgrade(&cluster.first, version)?;
    reset(cluster)
}

/// Returns the key of the uploaded certificates.
fn init(machine: &Machine, version: &str) -> Result<String> {
    let endpoint = format!("{}:6443", machine.address());
    let said = machine.kubeadm(&[
        "init",
        "--kubernetes-version",
        version,
        "--apiserver-advertise-address",
        machine.address(),
        "--control-plane-endpoint",
        &endpoint,
        "--pod-network-cidr",
        "10.244.0.0/16",
        "--upload-certs",
        NO_SOCKET,
    ])?;
    ensure!(said.contains("Your Kubernetes control-plane has initialized successfully!"), "{said}");
    let key =
        said.split("--certificate-key ").nth(1).and_then(|rest| rest.split_whitespace().next());
    ready(machine, "node1")?;
    key.map(str::to_owned).context(said)
}

fn ready(machine: &Machine, node: &str) -> Result<()> {
    // There may be no such Node yet.
    wait::until(LONG, &format!("{node} is Ready"), || {
        machine.kubectl(&format!("wait --for=condition=Ready node/{node} --timeout=10s")).map(drop)
    })
}

/// Mirror pods of the static pods, and what people ask them.
fn control_plane_runs(machine: &Machine, node: &str) -> Result<()> {
    for component in COMPONENTS {
        let pod = format!("{component}-{node}");
        wait::until(LONG, &format!("{pod} is Ready"), || {
            machine.kubectl(&format!(
                "-n kube-system wait --for=condition=Ready pod/{pod} --timeout=5s"
            ))
        })?;
    }
    let pod = format!("kube-apiserver-{node}");
    let help = machine.kubectl(&format!("exec -n kube-system {pod} -- kube-apiserver --help"))?;
    ensure!(help.contains("--enable-admission-plugins"), "{help}");
    let log = machine.kubectl(&format!("logs -n kube-system {pod}"))?;
    ensure!(log.contains("audit is off"), "{log}");
    Ok(())
}

fn addons_run(machine: &Machine) -> Result<()> {
    machine.kubectl("-n kube-system rollout status ds/kube-proxy --timeout=90s")?;
    machine.kubectl("-n kube-system rollout status deploy/coredns --timeout=90s").map(drop)
}

fn certificates(machine: &Machine) -> Result<()> {
    let listed = machine.kubeadm(&["certs", "check-expiration"])?;
    ensure!(listed.contains("apiserver-kubelet-client") && !listed.contains("MISSING"), "{listed}");
    let renewed = machine.kubeadm(&["certs", "renew", "all"])?;
    ensure!(renewed.contains("Done renewing certificates"), "{renewed}");
    wait::until(LONG, "the API server takes the new certificates", || {
        let log = machine.kubectl("logs -n kube-system kube-apiserver-node1")?;
        ensure!(log.contains("replaced the certificate"), "{log}");
        Ok(())
    })
}

/// A Deployment on the worker, its Service from the first machine, and a name by the cluster's DNS.
fn pods_run(cluster: &Cluster) -> Result<()> {
    let machine = &cluster.first;
    machine.kubectl("create deployment web --image nginx:1.22 --replicas 2")?;
    machine.kubectl("expose deployment web --port 80")?;
    machine.kubectl("rollout status deploy/web --timeout=90s")?;
    let places = machine.kubectl("get pods -l app=web -o jsonpath={.items[*].spec.nodeName}")?;
    ensure!(places.split(' ').all(|node| node == "node2"), "{places}");
    let address = machine.kubectl("get service web -o jsonpath={.spec.clusterIP}")?;
    wait::until(LONG, "the Service answers on the worker", || {
        let said = cluster.worker.run("curl", &["-s", "-m", "5", &format!("http://{address}/")])?;
        ensure!(said.contains("one"), "{said}");
        Ok(())
    })
}

fn upgrade(machine: &Machine, version: &str) -> Result<()> {
    let plan = ["upgrade", "plan", version, "--ignore-preflight-errors=all"];
    machine.kubeadm(&plan).map(drop)
}

fn reset(cluster: &Cluster) -> Result<()> {
    cluster.first.kubectl("drain node2 --ignore-daemonsets --force --timeout=60s")?;
    cluster.first.kubectl("delete node node2")?;
    for machine in [&cluster.worker, &cluster.second, &cluster.first] {
        let said = machine.kubeadm(&["reset", "-f"])?;
        ensure!(said.contains("The reset process does not perform cleanup of CNI"), "{said}");
        let left = machine.run("ls", &["-A", "/etc/kubernetes/manifests"])?;
        ensure!(left.is_empty(), "{left}");
    }
    Ok(())
}
