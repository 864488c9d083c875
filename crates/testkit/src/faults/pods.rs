//! Pods that write down when they run, and a `kubectl exec` that lasts.
//!
//! In: the cluster. Out: each pod that ran twice, or two pods of one ordinal that ran at the same time. All test
//! hosts share one file system: the ledger is a directory of it, which the pods mount.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base::task::Tasks;
use http::Method;
use serde_json::{Value, json};

use super::link::{Ask, Failure, Link};
use super::load::NAMESPACE;
use super::trio::Trio;
use crate::{images, places, wait};

/// Between two pods that run once.
const EVERY: Duration = Duration::from_secs(3);
const REQUEST: Duration = Duration::from_secs(10);
const KEEPERS: usize = 2;
/// Holds a directory as long as it runs, which a second pod of its name cannot make.
const KEEPS: &str = r#"mkdir /ledger/$NAME || echo "$NAME $ID" >> /ledger/twice
trap 'rmdir /ledger/$NAME; exit 0' TERM
while :; do sleep 1 & wait $!; done"#;
const RUNS: &str = r#"echo "$ID" >> /ledger/starts"#;
/// A line five times a second.
const SPEAKS: &str = "while :; do echo .; sleep 0.2; done";

pub struct Pods {
    directory: tempfile::TempDir,
    link: Arc<Link>,
    /// The uids of pods that run once and whose creation was acknowledged.
    made: Arc<Mutex<Vec<String>>>,
    tasks: Tasks,
}

impl Pods {
    /// Makes the namespace and the pods that stay; waits until those run.
    pub async fn start(link: &Arc<Link>) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("decapod-ledger-").tempdir()?;
        let pods =
            Self { directory, link: link.clone(), made: Arc::default(), tasks: Tasks::new("pods") };
        let namespace = json!({"metadata": {"name": NAMESPACE}});
        pods.post("/api/v1/namespaces", &namespace).await?;
        let labels = json!({"app": "keeper"});
        let set = json!({"metadata": {"name": "keeper"}, "spec": {
            "replicas": KEEPERS, "serviceName": "keeper", "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pods.spec(KEEPS, "Always")},
        }});
        pods.post(&format!("/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"), &set).await?;
        let path = format!("/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/keeper");
        wait::found("the pods that stay run", async || {
            let set = pods.link.ask(Ask::get(&path, REQUEST)).await.ok()?;
            let set: Value = serde_json::from_slice(&set.body).ok()?;
            (set["status"]["readyReplicas"] == KEEPERS).then_some(())
        })
        .await;
        Ok(pods)
    }

    /// Creates a pod every few seconds until [`Pods::check`].
    pub fn create(&self) {
        let (link, made, run) = (self.link.clone(), self.made.clone(), base::rng::alphanumeric(5));
        let (spec, run) = (self.spec(RUNS, "Never"), run.to_lowercase());
        self.tasks.spawn("pods", async move {
            for number in 0_u32.. {
                let pod =
                    json!({"metadata": {"name": format!("once-{run}-{number}")}, "spec": spec});
                let path = format!("/api/v1/namespaces/{NAMESPACE}/pods");
                let ask = Ask::new(Method::POST, path, pod.to_string(), REQUEST);
                // A pod that was not acknowledged may run, too, but only once.
                let created = link.ask(ask).await.ok().filter(|answer| answer.status == 201);
                let created: Option<Value> =
                    created.and_then(|answer| serde_json::from_slice(&answer.body).ok());
                if let Some(uid) = created.as_ref().and_then(|pod| pod["metadata"]["uid"].as_str())
                {
                    made.lock().expect("no panic under the lock").push(uid.to_owned());
                }
                tokio::time::sleep(EVERY).await;
            }
        });
    }

    /// Waits until every pod has run; returns what ran twice, and the number of pods.
    pub async fn check(&self) -> (Vec<String>, usize) {
        self.tasks.shutdown(REQUEST).await;
        let made = self.made.lock().expect("no panic under the lock").clone();
        let starts = || self.read("starts");
        let all_ran = async {
            while !made.iter().all(|uid| starts().contains(uid)) {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let mut found = vec![];
        if tokio::time::timeout(wait::LONG, all_ran).await.is_err() {
            let missing = made.iter().filter(|uid| !starts().contains(uid)).count();
            found.push(format!("{missing} of {} pods did not run", made.len()));
        }
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        starts().into_iter().for_each(|uid| *counts.entry(uid).or_default() += 1);
        let twice = counts.into_iter().filter(|(_, count)| *count > 1);
        found.extend(twice.map(|(uid, count)| format!("the pod {uid} ran {count} times")));
        found.extend(
            self.read("twice").into_iter().map(|line| format!("{line} ran beside another")),
        );
        (found, made.len())
    }

    fn read(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.directory.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn spec(&self, script: &str, restarts: &str) -> Value {
        let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        json!({
            "restartPolicy": restarts, "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": images::BUSYBOX, "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", script],
                "env": [field("NAME", "metadata.name"), field("ID", "metadata.uid")],
                "volumeMounts": [{"name": "ledger", "mountPath": "/ledger"}],
            }],
            "volumes": [{"name": "ledger", "hostPath": {"path": self.directory.path()}}],
        })
    }

    async fn post(&self, path: &str, body: &Value) -> Result<()> {
        let ask = Ask::new(Method::POST, path.to_owned(), body.to_string(), REQUEST);
        let answer = self.link.ask(ask).await.map_err(|failure| match failure {
            Failure::Unsent(why) | Failure::Unknown(why) => anyhow::anyhow!("{path}: {why}"),
        })?;
        let text = String::from_utf8_lossy(&answer.body);
        ensure!(matches!(answer.status, 201 | 409), "{path}: {text}");
        Ok(())
    }
}

/// `kubectl exec` in a pod that stays, by the balancer of the first node.
pub struct Exec {
    child: Child,
    output: PathBuf,
}

impl Exec {
    pub fn start(trio: &Trio, directory: &Path) -> Result<Self> {
        let host = trio.nodes[0].host();
        let (config, output) = (directory.join("kubeconfig"), directory.join("exec.out"));
        fs::write(&config, trio.kubeconfig("127.0.0.1:6444")?)?;
        let file = File::create(&output)?;
        let mut command = host.command(places::kubectl()?);
        command.args(["exec", "-n", NAMESPACE, "keeper-0", "--", "sh", "-c", SPEAKS]);
        command.env("KUBECONFIG", config).env("HOME", directory);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let exec = Self { child: host.spawn(&mut command)?, output };
        wait::until(wait::LONG, "the exec speaks", || {
            ensure!(exec.lines()? > 0, "{}", fs::read_to_string(&exec.output)?);
            Ok(())
        })?;
        Ok(exec)
    }

    fn lines(&self) -> Result<usize> {
        let text = fs::read_to_string(&self.output)?;
        Ok(text.lines().filter(|line| *line == ".").count())
    }

    /// What became of it.
    pub fn end(mut self) -> Result<String> {
        let lines = self.lines()?;
        match self.child.try_wait()? {
            Some(status) => {
                let text = fs::read_to_string(&self.output)?;
                let last = text.lines().rfind(|line| *line != ".").unwrap_or_default();
                Ok(format!("ended after {lines} lines: {status}, {last}"))
            }
            None => {
                let moves = wait::until(Duration::from_secs(5), "the exec goes on", || {
                    ensure!(self.lines()? > lines, "{lines} lines");
                    Ok(())
                });
                match moves {
                    Ok(()) => Ok("runs".into()),
                    Err(error) => Ok(format!("is silent: {error:#}")),
                }
            }
        }
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory for files of one fault.
pub fn scratch() -> Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("decapod-fault-").tempdir().context("a directory")
}
