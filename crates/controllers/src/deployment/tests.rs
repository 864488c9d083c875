//! Rollouts played out: passes of [`plan`] against ReplicaSets that obey.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus, ReplicaSet, ReplicaSetStatus};
use serde_json::{Value, from_value, json};

use super::arithmetic::{
    annotation, available, is_rolling, max_surge, max_unavailable, replicas, wanted,
};
use super::plan::{self, Action, Observed};
use super::status::{self, condition};

/// A Deployment with its ReplicaSets, and pods that become available when told.
struct Play {
    deployment: Deployment,
    sets: Vec<ReplicaSet>,
    now: i64,
    events: Vec<String>,
    /// Images whose pods never become available.
    broken: &'static str,
}

impl Play {
    fn new(spec: Value) -> Self {
        let mut whole = json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "d", "generation": 1},
            "spec": {"selector": {"matchLabels": {"app": "web"}}, "progressDeadlineSeconds": 600,
                "revisionHistoryLimit": 10, "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "one"}]}}},
        });
        whole["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        Self {
            deployment: from_value(whole).unwrap(),
            sets: vec![],
            now: 1000,
            events: vec![],
            broken: "bad",
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut Deployment)) {
        change(&mut self.deployment);
        self.deployment.metadata.generation =
            self.deployment.metadata.generation.map(|one| one + 1);
    }

    fn set_image(&mut self, image: &str) {
        let image = image.to_owned();
        self.change(|deployment| {
            let template = &mut deployment.spec.as_mut().unwrap().template;
            template.spec.as_mut().unwrap().containers[0].image = Some(image);
        });
    }

    /// One pass; false if it changed nothing.
    fn pass(&mut self) -> bool {
        self.now += 1;
        let observed = Observed {
            deployment: self.deployment.clone(),
            sets: self.sets.clone(),
            pods: vec![],
            now: Timestamp::from_second(self.now).unwrap(),
        };
        let plan = plan::plan(observed);
        let mut changed = !plan.actions.is_empty() || plan.deployment != self.deployment;
        self.deployment = plan.deployment;
        for action in plan.actions {
            let (mut set, event) = match action {
                Action::Create { set, event } | Action::Update { set, event } => (set, event),
                Action::Delete(name) => {
                    self.sets.retain(|one| one.metadata.name.as_ref() != Some(&name));
                    continue;
                }
            };
            self.events.extend(event);
            let name = set.metadata.name.clone();
            if set.metadata.creation_timestamp.is_none() {
                set.metadata.creation_timestamp =
                    Some(machinery::Time(Timestamp::from_second(self.now).unwrap()));
                set.metadata.uid = name.clone();
            }
            self.sets.retain(|one| one.metadata.name != name);
            self.sets.push(set);
        }
        changed |= self.obey();
        self.check();
        changed
    }

    /// The ReplicaSets do as they are told.
    fn obey(&mut self) -> bool {
        let mut changed = false;
        for set in &mut self.sets {
            let spec = set.spec.as_ref().unwrap();
            let count = spec.replicas.unwrap();
            let image =
                spec.template.as_ref().unwrap().spec.as_ref().unwrap().containers[0].image.clone();
            let serves = if image.as_deref() == Some(self.broken) { 0 } else { count };
            let status = ReplicaSetStatus {
                replicas: count,
                ready_replicas: Some(serves),
                available_replicas: Some(serves),
                observed_generation: set.metadata.generation,
                ..Default::default()
            };
            changed |= set.status.as_ref() != Some(&status);
            set.status = Some(status);
        }
        changed
    }

    /// Invariant of a rolling update: neither too many pods nor too few that serve.
    fn check(&self) {
        let available_now =
            condition(&self.status(), status::AVAILABLE).is_some_and(|one| one.status == "True");
        if !available_now || !is_rolling(&self.deployment) {
            return;
        }
        let total: i32 = self.sets.iter().map(replicas).sum();
        let serving: i32 = self.sets.iter().map(available).sum();
        let deployment = &self.deployment;
        assert!(total <= wanted(deployment) + max_surge(deployment), "{total} pods");
        assert!(serving >= wanted(deployment) - max_unavailable(deployment), "{serving} serve");
    }

    fn run(&mut self) {
        for _ in 0..200 {
            if !self.pass() {
                return;
            }
        }
        panic!("no end: {:?}", self.events);
    }

    fn status(&self) -> DeploymentStatus {
        self.deployment.status.clone().unwrap_or_default()
    }

    fn reason(&self) -> String {
        condition(&self.status(), status::PROGRESSING)
            .and_then(|one| one.reason.clone())
            .unwrap_or_default()
    }

    /// Sizes of the sets, oldest first.
    fn sizes(&self) -> Vec<i32> {
        let mut sets = self.sets.clone();
        sets.sort_by(super::arithmetic::by_age);
        sets.iter().map(replicas).collect()
    }
}

#[test]
fn a_rollout_completes_with_upstreams_events_and_conditions() {
    let mut play = Play::new(json!({"replicas": 3}));
    play.run();
    assert_eq!(play.reason(), "NewReplicaSetAvailable");
    let name = play.sets[0].metadata.name.clone().unwrap();
    assert_eq!(play.events, [format!("Scaled up replica set {name} from 0 to 3")]);
    let message = condition(&play.status(), status::PROGRESSING).unwrap().message.clone().unwrap();
    assert_eq!(message, format!("ReplicaSet {name:?} has successfully progressed."));
    assert_eq!(
        play.deployment.metadata.annotations.as_ref().unwrap()["deployment.kubernetes.io/revision"],
        "1"
    );

    play.set_image("two");
    play.run();
    assert_eq!(play.sizes(), [0, 3]);
    assert_eq!(play.status().updated_replicas, Some(3));
    assert_eq!(play.reason(), "NewReplicaSetAvailable");
    let steps: Vec<_> =
        play.events[1..].iter().map(|event| event.rsplit_once(" from ").unwrap().1).collect();
    assert_eq!(steps, ["0 to 1", "3 to 2", "1 to 2", "2 to 1", "2 to 3", "1 to 0"]);

    // Back to the first template: its set is taken up again, under a new revision.
    play.set_image("one");
    play.run();
    assert_eq!(play.sizes(), [3, 0]);
    let old = play.sets.iter().find(|set| set.metadata.name == Some(name.clone())).unwrap();
    assert_eq!(annotation(old, "deployment.kubernetes.io/revision"), Some("3"));
    assert_eq!(annotation(old, "deployment.kubernetes.io/revision-history"), Some("1"));
}

#[test]
fn surge_and_unavailability_are_kept_for_many_settings() {
    for (replicas, surge, unavailable) in [
        (1, json!("25%"), json!("25%")),
        (10, json!(3), json!(0)),
        (10, json!(0), json!(2)),
        (7, json!("100%"), json!("100%")),
        (4, json!(0), json!(0)),
    ] {
        let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}});
        let mut play = Play::new(json!({"replicas": replicas, "strategy": strategy}));
        play.run();
        play.set_image("two");
        play.run();
        assert_eq!(play.sizes(), [0, replicas]);
    }
}

#[test]
fn a_broken_template_keeps_the_old_pods_and_runs_into_the_deadline() {
    let mut play = Play::new(json!({"replicas": 10}));
    play.run();
    play.set_image("bad");
    play.run();
    // 25% of ten: three more (up), two fewer (down).
    assert_eq!(play.sizes(), [8, 5]);
    assert_eq!(play.reason(), "ReplicaSetUpdated");
    play.now += 601;
    play.run();
    assert_eq!(play.reason(), "ProgressDeadlineExceeded");
    let progressing = condition(&play.status(), status::PROGRESSING).unwrap().clone();
    assert_eq!(progressing.status, "False");
    assert!(progressing.message.unwrap().ends_with("has timed out progressing."));
    // Scaling in the middle of it is shared in proportion.
    play.change(|deployment| deployment.spec.as_mut().unwrap().replicas = Some(20));
    play.pass();
    assert_eq!(play.sizes().iter().sum::<i32>(), 25);
    assert_eq!(play.sizes(), [15, 10]);
}

#[test]
fn a_paused_deployment_scales_but_does_not_roll() {
    let mut play = Play::new(json!({"replicas": 4}));
    play.run();
    play.change(|deployment| deployment.spec.as_mut().unwrap().paused = Some(true));
    play.set_image("two");
    play.run();
    assert_eq!(play.reason(), "DeploymentPaused");
    play.change(|deployment| deployment.spec.as_mut().unwrap().replicas = Some(6));
    play.run();
    assert_eq!(play.sizes(), [6]);
    play.change(|deployment| deployment.spec.as_mut().unwrap().paused = None);
    play.pass();
    assert_eq!(play.reason(), "NewReplicaSetCreated");
    play.run();
    assert_eq!(play.sizes(), [0, 6]);
}

#[test]
fn history_is_limited_and_zero_is_a_size() {
    let mut play = Play::new(json!({"replicas": 2, "revisionHistoryLimit": 1}));
    for image in ["one", "two", "three", "four"] {
        play.set_image(image);
        play.run();
    }
    assert_eq!(play.sizes(), [0, 2]);
    play.change(|deployment| deployment.spec.as_mut().unwrap().replicas = Some(0));
    play.run();
    assert_eq!(play.sizes(), [0, 0]);
    assert_eq!(play.status().replicas, None);
}

#[test]
fn recreate_stops_all_before_it_starts_any() {
    let mut play = Play::new(json!({"replicas": 3, "strategy": {"type": "Recreate"}}));
    play.run();
    play.set_image("two");
    play.pass();
    assert_eq!(play.sizes(), [0]);
    play.run();
    assert_eq!(play.sizes(), [0, 3]);
}

#[test]
fn hashes_are_safe_and_collisions_change_them() {
    let play = Play::new(json!({}));
    let template = play.deployment.spec.unwrap().template;
    let hash = plan::template_hash(&template, None);
    assert!(
        hash.len() <= 10 && hash.chars().all(|c| "bcdfghjklmnpqrstvwxz2456789".contains(c)),
        "{hash}"
    );
    assert_ne!(hash, plan::template_hash(&template, Some(1)));
}
