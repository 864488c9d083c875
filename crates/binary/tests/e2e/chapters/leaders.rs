//! Single components: an API server under upstream's name, two controller managers and two schedulers.
//! On its own host; leaves nothing.
//!
//! No kubelet takes part: the node is an object, and pods are counted, not run.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use testkit::daemon::Daemon;
use testkit::host::Host;
use testkit::{places, wait};

use crate::story::{LONG, Story};

/// 15 s until the Lease of a dead leader expires, and time for requests on a busy machine. A candidate
/// with upstream's retry period may need 24 s.
const TAKE_OVER: Duration = Duration::from_secs(23);
const COMPONENTS: [&str; 2] = ["kube-controller-manager", "kube-scheduler"];

pub fn one_of_each_works(story: &mut Story) -> Result<()> {
    let host = Host::new("control")?;
    let address = story.switch.connect(&host)?;
    let control = Control::start(&host, story, &address)?;
    let told = control.tell(story);
    told.with_context(|| control.api.log())
}

/// An API server without other components on a host.
struct Control<'h> {
    api: Daemon,
    host: &'h Host,
}

impl<'h> Control<'h> {
    fn start(host: &'h Host, story: &Story, address: &str) -> Result<Self> {
        std::fs::create_dir(host.directory().join("home"))?;
        let data = host.directory().join("data").display().to_string();
        let words = [
            "kube-apiserver",
            "--data-dir",
            &data,
            "--secure-port=6443",
            "--advertise-address",
            address,
            "--service-cluster-ip-range=10.43.0.0/16",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
        ];
        let words = words.map(str::to_owned).to_vec();
        let mut api = Daemon::new(host, "kube-apiserver", &story.binary, words);
        api.launch(host)?;
        let mut control = Self { api, host };
        let ended = wait::until(LONG, "the API server is ready", || {
            if let Some(status) = control.api.exit_status()? {
                return Ok(Some(status));
            }
            control.kubectl(&["get", "--raw", "/readyz"]).map(|_| None)
        })?;
        match ended {
            Some(status) => bail!("the API server ended: {status}\n{}", control.api.log()),
            None => Ok(control),
        }
    }

    fn kubeconfig(&self) -> String {
        self.host.directory().join("data/kubeconfig").display().to_string()
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.host.command(places::kubectl()?);
        command.args(arguments).env("KUBECONFIG", self.kubeconfig());
        let output = self.host.output(command.env("HOME", self.host.directory().join("home")))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {stderr}", arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn list(&self, what: &str) -> Result<Vec<Value>> {
        let list: Value = serde_json::from_str(&self.kubectl(&["get", what, "-o", "json"])?)?;
        Ok(list["items"].as_array().context("a list has items")?.clone())
    }

    fn candidate(&self, story: &Story, component: &str, number: usize) -> Result<Daemon> {
        let mut words = vec![component.to_owned(), "--kubeconfig".into(), self.kubeconfig()];
        if component == "kube-controller-manager" {
            let pki = self.host.directory().join("data/pki");
            let root = pki.join("ca.crt").display().to_string();
            words.extend(["--root-ca-file".into(), root]);
        }
        // Two on one host cannot use the same port: the first has upstream's, the second none.
        if number > 1 {
            words.push("--secure-port=0".into());
        }
        let name = format!("{component}-{number}");
        let mut daemon = Daemon::new(self.host, &name, &story.binary, words);
        daemon.launch(self.host)?;
        Ok(daemon)
    }

    fn tell(&self, story: &Story) -> Result<()> {
        let mut pairs = vec![];
        for component in COMPONENTS {
            let pair = [self.candidate(story, component, 1)?, self.candidate(story, component, 2)?];
            pairs.push((component, pair));
        }
        self.paper_node()?;
        for (component, pair) in &mut pairs {
            leader_first(component, pair)?;
        }
        self.kubectl(&["create", "deployment", "many", "--image=busybox:1.35", "--replicas=5"])?;
        self.soon_scheduled(5)?;
        self.leases()?;

        let killed = wait::now();
        for (_, [leader, _]) in &mut pairs {
            leader.kill()?;
        }
        self.kubectl(&["scale", "deployment", "many", "--replicas=8"])?;
        wait::until(TAKE_OVER, "the others take over", || {
            let idle = pairs.iter().find(|(_, [_, other])| !leads(other));
            idle.map_or(Ok(()), |(component, _)| bail!("{component} has no leader"))
        })?;
        println!("taken over after {:.1} s", killed.elapsed().as_secs_f32());
        self.soon_scheduled(8)?;
        // Two active leaders would create more pods, or bind one twice. Events are sent asynchronously.
        for (reason, count) in [("SuccessfulCreate", 8), ("Scheduled", 8)] {
            wait::until(LONG, "an event for each pod", || {
                let events = self.list("events")?;
                let found = events.iter().filter(|event| event["reason"] == reason);
                let found: i64 = found.map(|event| event["count"].as_i64().unwrap_or(1)).sum();
                ensure!(found == count, "{found} events {reason}");
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A Ready Node without a kubelet.
    fn paper_node(&self) -> Result<()> {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "paper"}});
        let path = self.host.directory().join("node.json");
        std::fs::write(&path, node.to_string())?;
        self.kubectl(&["create", "-f", &path.display().to_string()])?;
        let status = json!({"status": {
            "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"},
            "capacity": {"cpu": "4", "memory": "8Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "OnPaper"}],
        }});
        let patch = status.to_string();
        self.kubectl(&["patch", "node", "paper", "--subresource=status", "-p", &patch]).map(drop)
    }

    fn soon_scheduled(&self, count: usize) -> Result<()> {
        wait::until(LONG, &format!("{count} pods are scheduled"), || {
            let pods = self.list("pods")?;
            let bound = pods.iter().filter(|pod| pod["spec"]["nodeName"] == "paper").count();
            ensure!(pods.len() == count && bound == count, "{} pods, {bound} bound", pods.len());
            Ok(())
        })
    }

    fn leases(&self) -> Result<()> {
        for component in COMPONENTS {
            let lease =
                self.kubectl(&["get", "lease", "-n", "kube-system", component, "-o", "json"])?;
            let spec = &serde_json::from_str::<Value>(&lease)?["spec"];
            let holder = spec["holderIdentity"].as_str().unwrap_or_default();
            ensure!(spec["leaseDurationSeconds"] == 15, "{component}: {spec}");
            ensure!(holder.starts_with("control_"), "{component} is held by {holder:?}");
        }
        Ok(())
    }
}

fn leads(candidate: &Daemon) -> bool {
    candidate.log().contains("became leader")
}

/// Waits until one of the two leads, and moves it to the front.
fn leader_first(component: &str, pair: &mut [Daemon; 2]) -> Result<()> {
    wait::until(LONG, &format!("a {component} leads"), || {
        ensure!(pair.iter().any(leads), "{}", pair[0].log());
        Ok(())
    })?;
    if leads(&pair[1]) {
        pair.reverse();
    }
    ensure!(!leads(&pair[1]), "two {component}s lead");
    Ok(())
}
