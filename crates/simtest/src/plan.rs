//! What a round does, decided before it begins: which faults are on, what users do, what is killed, and when.
//!
//! In: a seed and a scenario. Out: a [`Plan`], which is data: it can be printed, and a shorter one can be tried.
//! Invariant: steps that name an object that is not there by then are harmless.

use std::collections::BTreeSet;
use std::time::Duration;

use base::rng::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cluster::{FLEETS, NODES_OF_FLEET};
use crate::faults::{self, Fault};

/// Their names, for `--scenario`. A seed without a scenario chooses one.
pub const SCENARIOS: &[&str] = &[
    "calm",
    "deployments",
    "statefulsets",
    "daemonsets",
    "jobs",
    "disruption",
    "quota",
    "namespaces",
    "mixed",
];

/// Users are at work for so long; faults go on a little longer.
const SCRIPT_MILLIS: u64 = 150_000;
const NAMESPACE: &str = "default";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub seed: u64,
    pub scenario: String,
    pub faults: BTreeSet<Fault>,
    pub steps: Vec<Step>,
    /// Faults end.
    pub calm_at: Duration,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    pub at: Duration,
    pub act: Act,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Act {
    /// A POST to a collection.
    Create(String, Value),
    /// A strategic merge patch.
    Patch(String, Value),
    /// With this propagation policy.
    Delete(String, String),
    /// The template of the Deployment's ReplicaSet before the newest.
    RollBack {
        namespace: String,
        name: String,
    },
    /// The n-th pod of a namespace, modulo their number.
    DeletePod {
        namespace: String,
        nth: u64,
    },
    Evict {
        namespace: String,
        nth: u64,
    },
    Cordon {
        node: String,
        is_on: bool,
    },
    /// Cordons, and evicts all pods.
    Drain {
        node: String,
    },
    Kill {
        part: String,
        lasts: Duration,
    },
    CutOff {
        part: String,
        lasts: Duration,
    },
    /// As a machine without power.
    Silence {
        node: String,
        lasts: Duration,
    },
}

impl Plan {
    pub fn new(seed: u64, scenario: Option<&str>) -> Self {
        let mut random = Stream::new(seed);
        let chosen = *random.pick(&SCENARIOS[1..]);
        let scenario = scenario.unwrap_or(chosen);
        let mut faults = faults::swarm(&mut random);
        if scenario == "calm" {
            faults.clear();
        }
        let mut writer = Writer { random, steps: vec![], faults: faults.clone(), now: 0 };
        match scenario {
            "calm" => writer.calm(),
            "deployments" => writer.slots(4, &["deployments", "replicasets"]),
            "statefulsets" => writer.slots(3, &["statefulsets"]),
            "daemonsets" => writer.slots(3, &["daemonsets"]),
            "jobs" => writer.slots(5, &["jobs"]),
            "disruption" => writer.disruption(),
            "quota" => writer.quota(),
            "namespaces" => writer.namespaces(),
            _ => writer.mixed(),
        }
        writer.trouble();
        let mut steps = writer.steps;
        steps.sort_by_key(|step| step.at);
        let calm_at = Duration::from_millis(if scenario == "calm" { 1_000 } else { SCRIPT_MILLIS });
        Self { seed, scenario: scenario.to_owned(), faults, steps, calm_at }
    }
}

struct Writer {
    random: Stream,
    steps: Vec<Step>,
    faults: BTreeSet<Fault>,
    now: u64,
}

impl Writer {
    fn add(&mut self, act: Act) {
        self.steps.push(Step { at: Duration::from_millis(self.now), act });
    }

    /// Up to so long passes.
    fn wait(&mut self, millis: u64) {
        self.now += self.random.below(millis) + 50;
    }

    fn calm(&mut self) {
        self.add(Act::Create(collection("deployments", NAMESPACE), deployment("web-0", 3, "", 0)));
    }

    /// Workloads of these kinds, each with a life of its own.
    fn slots(&mut self, count: u64, kinds: &[&str]) {
        let slots = 1 + self.random.below(count);
        for slot in 0..slots {
            let kind = *self.random.pick(kinds);
            self.life(kind, NAMESPACE, slot);
        }
    }

    /// Created, changed, deleted, perhaps created again under its name.
    fn life(&mut self, kind: &str, namespace: &str, slot: u64) {
        self.now = 0;
        self.wait(40_000);
        while self.now < SCRIPT_MILLIS - 20_000 {
            let name = format!("{}-{slot}", &kind[..3]);
            let object = self.workload(kind, &name);
            self.add(Act::Create(collection(kind, namespace), object));
            let changes = self.random.below(4);
            for _ in 0..changes {
                self.wait(30_000);
                if self.now > SCRIPT_MILLIS - 10_000 {
                    return;
                }
                self.change(kind, namespace, &name);
            }
            if self.random.chance(0.5) {
                return;
            }
            self.wait(30_000);
            let policy = *self.random.pick(&["Background", "Foreground", "Orphan"]);
            self.add(Act::Delete(path(kind, namespace, &name), policy.to_owned()));
            // At once, or when everything is gone.
            let pause = *self.random.pick(&[10, 2_000, 20_000]);
            self.wait(pause);
        }
    }

    fn workload(&mut self, kind: &str, name: &str) -> Value {
        let behaviour = self.behaviour(kind);
        let replicas = self.random.below(5) as i64;
        match kind {
            "deployments" => {
                let mut object = deployment(name, replicas, &behaviour, 0);
                let strategies = [
                    json!({"type": "Recreate"}),
                    json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
                    json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}),
                    json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "50%", "maxUnavailable": "25%"}}),
                ];
                object["spec"]["strategy"] = self.random.pick(&strategies).clone();
                object
            }
            "replicasets" => workload(
                "apps/v1",
                "ReplicaSet",
                name,
                json!({"replicas": replicas}),
                &behaviour,
                0,
            ),
            "statefulsets" => {
                let policy = *self.random.pick(&["OrderedReady", "Parallel"]);
                let spec = json!({"replicas": replicas, "serviceName": name, "podManagementPolicy": policy});
                workload("apps/v1", "StatefulSet", name, spec, &behaviour, 0)
            }
            "daemonsets" => {
                let strategies = [
                    json!({"type": "OnDelete"}),
                    json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}),
                    json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}),
                ];
                let spec = json!({"updateStrategy": self.random.pick(&strategies)});
                workload("apps/v1", "DaemonSet", name, spec, &behaviour, 0)
            }
            _ => self.job(name),
        }
    }

    fn job(&mut self, name: &str) -> Value {
        let completions = 1 + self.random.below(5) as i64;
        let parallelism = 1 + self.random.below(3) as i64;
        let mut spec =
            json!({"completions": completions, "parallelism": parallelism, "backoffLimit": 2});
        if self.random.chance(0.4) {
            spec["completionMode"] = "Indexed".into();
        }
        if self.random.chance(0.2) {
            spec["suspend"] = true.into();
        }
        if self.random.chance(0.2) {
            spec["ttlSecondsAfterFinished"] = 5.into();
        }
        let fails = self.faults.contains(&Fault::Containers) && self.random.chance(0.3);
        let runs = 1 + self.random.below(10);
        let code = u8::from(fails);
        let mut job = workload(
            "batch/v1",
            "Job",
            name,
            spec,
            &format!("run-for={runs}s,exit-code={code}"),
            0,
        );
        let fields = job["spec"].as_object_mut().expect("made as a map");
        fields.remove("selector");
        let policy = *self.random.pick(&["Never", "OnFailure"]);
        fields["template"]["spec"]["restartPolicy"] = policy.into();
        job
    }

    fn behaviour(&mut self, kind: &str) -> String {
        let mut words = vec![];
        if self.random.chance(0.5) {
            words.push(format!("start-delay={}ms", self.random.below(4_000)));
        }
        if self.random.chance(0.5) {
            words.push(format!("termination-delay={}ms", self.random.below(6_000)));
        }
        if self.faults.contains(&Fault::Containers) && self.random.chance(0.4) {
            words.push(format!("ready-delay={}ms", self.random.below(8_000)));
        }
        let _ = kind;
        words.join(",")
    }

    fn change(&mut self, kind: &str, namespace: &str, name: &str) {
        let path = path(kind, namespace, name);
        let number = self.random.below(1_000);
        let image = json!({"spec": {"template": {"metadata": {"labels": {"version": number.to_string()}}}}});
        let replicas = json!({"spec": {"replicas": self.random.below(6)}});
        let act = match (kind, self.random.below(4)) {
            ("deployments", 0) => Act::RollBack { namespace: namespace.into(), name: name.into() },
            ("deployments", 3) => {
                Act::Patch(path, json!({"spec": {"paused": self.random.chance(0.3)}}))
            }
            ("deployments" | "statefulsets", 1) => Act::Patch(path, replicas),
            ("replicasets", _) => Act::Patch(path, replicas),
            ("jobs", 0) => Act::Patch(path, json!({"spec": {"suspend": self.random.chance(0.3)}})),
            ("jobs", _) => {
                Act::Patch(path, json!({"spec": {"parallelism": 1 + self.random.below(4)}}))
            }
            (_, 2) => Act::DeletePod { namespace: namespace.into(), nth: self.random.below(100) },
            _ => Act::Patch(path, image),
        };
        self.add(act);
    }

    /// Budgets, evictions, drains.
    fn disruption(&mut self) {
        self.slots(2, &["deployments", "statefulsets"]);
        self.now = 0;
        let budgets = [
            json!({"minAvailable": 1}),
            json!({"maxUnavailable": 1}),
            json!({"minAvailable": "50%"}),
        ];
        for (number, prefix) in ["dep-0", "sta-0", "dep-1", "sta-1"].into_iter().enumerate() {
            self.wait(4_000);
            let mut spec = self.random.pick(&budgets).clone();
            spec["selector"] = json!({"matchLabels": {"app": prefix}});
            let budget = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
                "metadata": {"name": format!("budget-{number}")}, "spec": spec});
            self.add(Act::Create(collection("poddisruptionbudgets", NAMESPACE), budget));
        }
        while self.now < SCRIPT_MILLIS - 20_000 {
            self.wait(12_000);
            let nth = self.random.below(100);
            let act = match self.random.below(6) {
                0 => Act::Drain { node: self.node() },
                1 => Act::Cordon { node: self.node(), is_on: false },
                _ => Act::Evict { namespace: NAMESPACE.into(), nth },
            };
            self.add(act);
        }
    }

    fn quota(&mut self) {
        self.now = 10;
        let pods = 3 + self.random.below(6);
        let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"},
            "spec": {"hard": {"pods": pods.to_string(), "services": "3"}}});
        self.add(Act::Create(collection("resourcequotas", NAMESPACE), quota));
        self.slots(3, &["deployments", "jobs", "statefulsets"]);
        self.services(6);
        self.now = 60_000;
        self.wait(40_000);
        let pods = 2 + self.random.below(12);
        let path = path("resourcequotas", NAMESPACE, "quota");
        self.add(Act::Patch(path, json!({"spec": {"hard": {"pods": pods.to_string()}}})));
    }

    /// Namespaces that end in the middle of it.
    fn namespaces(&mut self) {
        let count = 1 + self.random.below(3);
        for number in 0..count {
            let name = format!("space-{number}");
            self.now = 0;
            self.wait(10_000);
            let begun = self.now;
            let namespace =
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            self.add(Act::Create("/api/v1/namespaces".into(), namespace));
            for slot in 0..2 {
                let kind =
                    *self.random.pick(&["deployments", "statefulsets", "jobs", "daemonsets"]);
                self.now = begun;
                self.life_in(kind, &name, slot);
            }
            self.now = begun + 20_000;
            self.wait(80_000);
            self.add(Act::Delete(format!("/api/v1/namespaces/{name}"), "Background".into()));
            if self.random.chance(0.5) {
                self.wait(30_000);
                let namespace =
                    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
                self.add(Act::Create("/api/v1/namespaces".into(), namespace));
            }
        }
    }

    fn life_in(&mut self, kind: &str, namespace: &str, slot: u64) {
        self.wait(20_000);
        let name = format!("{}-{slot}", &kind[..3]);
        let object = self.workload(kind, &name);
        self.add(Act::Create(collection(kind, namespace), object));
        for _ in 0..self.random.below(3) {
            self.wait(25_000);
            self.change(kind, namespace, &name);
        }
    }

    fn services(&mut self, count: u64) {
        for number in 0..self.random.below(count + 1) {
            self.now = 0;
            self.wait(60_000);
            let app = *self.random.pick(&["dep-0", "dep-1", "sta-0", "dae-0"]);
            let name = format!("service-{number}");
            let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
                "spec": {"selector": {"app": app}, "ports": [{"port": 80}]}});
            self.add(Act::Create(collection("services", NAMESPACE), object));
            if self.random.chance(0.3) {
                self.wait(60_000);
                self.add(Act::Delete(path("services", NAMESPACE, &name), "Background".into()));
            }
        }
    }

    fn mixed(&mut self) {
        self.slots(4, &["deployments", "statefulsets", "daemonsets", "jobs", "replicasets"]);
        self.services(4);
        self.now = 0;
        while self.now < SCRIPT_MILLIS - 20_000 {
            self.wait(40_000);
            let nth = self.random.below(100);
            let node = self.node();
            let act = match self.random.below(4) {
                0 => Act::Cordon { node, is_on: self.random.chance(0.5) },
                1 => Act::Evict { namespace: NAMESPACE.into(), nth },
                2 => Act::DeletePod { namespace: NAMESPACE.into(), nth },
                _ => Act::Drain { node },
            };
            self.add(act);
        }
    }

    fn node(&mut self) -> String {
        let fleet = *self.random.pick(&FLEETS);
        format!("{fleet}-{:05}", self.random.below(NODES_OF_FLEET as u64))
    }

    fn part(&mut self) -> String {
        let mut parts = vec!["controllers-0".to_owned(), "scheduler-0".into()];
        parts.extend(FLEETS.map(|fleet| format!("kubelets-{fleet}")));
        if self.faults.contains(&Fault::Leaders) {
            parts.extend(["controllers-1".to_owned(), "scheduler-1".into()]);
        }
        self.random.pick(&parts).clone()
    }

    /// What befalls parts and nodes.
    fn trouble(&mut self) {
        let longest = |random: &mut Stream| Duration::from_millis(random.below(25_000));
        for (fault, every) in
            [(Fault::Crashes, 40_000), (Fault::Partitions, 60_000), (Fault::Silence, 70_000)]
        {
            if !self.faults.contains(&fault) {
                continue;
            }
            self.now = 2_000;
            self.wait(every);
            while self.now < SCRIPT_MILLIS - 10_000 {
                let lasts = longest(&mut self.random);
                let act = match fault {
                    Fault::Crashes => Act::Kill { part: self.part(), lasts },
                    Fault::Partitions => Act::CutOff { part: self.part(), lasts },
                    _ => Act::Silence { node: self.node(), lasts: lasts * 4 },
                };
                self.add(act);
                self.wait(every);
            }
        }
    }
}

pub fn collection(kind: &str, namespace: &str) -> String {
    let group = match kind {
        "deployments" | "replicasets" | "statefulsets" | "daemonsets" => "/apis/apps/v1",
        "jobs" => "/apis/batch/v1",
        "poddisruptionbudgets" => "/apis/policy/v1",
        _ => "/api/v1",
    };
    format!("{group}/namespaces/{namespace}/{kind}")
}

pub fn path(kind: &str, namespace: &str, name: &str) -> String {
    format!("{}/{name}", collection(kind, namespace))
}

fn deployment(name: &str, replicas: i64, behaviour: &str, version: u64) -> Value {
    workload("apps/v1", "Deployment", name, json!({"replicas": replicas}), behaviour, version)
}

/// An object with a pod template; `spec` is what it has besides.
fn workload(
    api_version: &str,
    kind: &str,
    name: &str,
    spec: Value,
    behaviour: &str,
    version: u64,
) -> Value {
    let mut object = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": {
        "selector": {"matchLabels": {"app": name}},
        "template": {
            "metadata": {"labels": {"app": name, "version": version.to_string()},
                "annotations": {"decapod.io/simulate": behaviour}},
            "spec": {
                "terminationGracePeriodSeconds": 10,
                "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "200m"}}}],
            },
        },
    }});
    if let (Some(all), Value::Object(more)) = (object["spec"].as_object_mut(), spec) {
        all.extend(more);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_plan() {
        let text = |seed| format!("{:?}", Plan::new(seed, None));
        assert_eq!(text(5), text(5));
        assert_ne!(text(5), text(6));
    }

    #[test]
    fn every_scenario_has_steps_in_order() {
        for scenario in SCENARIOS {
            for seed in 0..50 {
                let plan = Plan::new(seed, Some(scenario));
                assert!(!plan.steps.is_empty(), "{scenario} {seed}");
                assert!(plan.steps.is_sorted_by_key(|step| step.at), "{scenario} {seed}");
            }
        }
    }
}
