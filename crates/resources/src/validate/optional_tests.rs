//! The rules of kinds of which no version is served by default.

use serde_json::{Value, json};

use super::at::{judge, judge_both};
use crate::kind::Rules;

fn rule(kind: &str) -> &'static Rules {
    crate::tests::kind_of(kind).rules()
}

#[test]
fn new_objects_are_judged() {
    let check = |kind: &str, object: Value, expected: &[&str]| {
        let errors = judge(&object, rule(kind).create);
        let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(fields, expected, "{kind}");
    };
    let candidate = |emulation: &str, binary: &str, strategy: &str| {
        json!({"spec": {"leaseName": "l", "emulationVersion": emulation,
            "binaryVersion": binary, "strategy": strategy}})
    };
    const OLDEST: &str = "OldestEmulationVersion";
    check("LeaseCandidate", candidate("1.30.0", "1.30.0", OLDEST), &[]);
    check("LeaseCandidate", candidate("1.30.0", "1.30.0", "a.example/b"), &[]);
    check(
        "LeaseCandidate",
        json!({"spec": {}}),
        &["spec.leaseName", "spec.binaryVersion", "spec.strategy"],
    );
    check("LeaseCandidate", candidate("1.30.0", "1.29.9", OLDEST), &["spec.binaryVersion"]);
    check("LeaseCandidate", candidate("", "1.30.0", OLDEST), &["spec.emulationVersion"]);
    check(
        "LeaseCandidate",
        candidate("1.30", "1.30.0", "x"),
        &["spec.emulationVersion", "spec.strategy.strategy"],
    );
    let server = json!({"apiServerID": "a", "encodingVersion": "v1",
        "decodableVersions": ["v1", "apps/v1"], "servedVersions": ["v1", "V2"]});
    check(
        "StorageVersion",
        json!({"status": {"storageVersions": [server.clone(), server]}}),
        &[
            "status.storageVersions[1].apiServerID",
            "status.storageVersions[0].servedVersions[1]",
            "status.storageVersions[0].servedVersions[1]",
            "status.storageVersions[1].servedVersions[1]",
            "status.storageVersions[1].servedVersions[1]",
            "status.commonEncodingVersion",
        ],
    );
    check(
        "DeviceTaintRule",
        json!({"spec": {"deviceSelector": {"device": "A"}, "taint": {"effect": "Evil"}}}),
        &["spec.deviceSelector.device", "spec.taint.key", "spec.taint.effect"],
    );
    check(
        "ResourcePoolStatusRequest",
        json!({"spec": {"limit": 1001, "poolName": "a"}}),
        &["spec.driver", "spec.limit"],
    );
    let both = json!({"basic": {}, "gang": {"minCount": 0}});
    check(
        "Workload",
        json!({"spec": {"podGroupTemplates": [{"name": "a", "schedulingPolicy": both},
            {"name": "a", "schedulingPolicy": {"basic": {}}}]}}),
        &[
            "spec.podGroupTemplates[1]",
            "spec.podGroupTemplates[0].schedulingPolicy",
            "spec.podGroupTemplates[0].schedulingPolicy.gang.minCount",
        ],
    );
    check("PodGroup", json!({"spec": {}}), &["spec.schedulingPolicy"]);
}

#[test]
fn what_is_said_once_stays() {
    let check = |kind: &str, old: Value, new: Value, part: &str, expected: &[&str]| {
        let rules = rule(kind);
        let parts = rules.parts.iter().find(|(name, _)| *name == part);
        let update = parts.map_or(rules.update, |(_, check)| Some(*check));
        let errors = judge_both(&new, &old, update.expect("rules for updates"));
        let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(fields, expected, "{kind}");
    };
    let of = |policy: &str| json!({"spec": {"schedulingPolicy": {policy: {}}}});
    check("PodGroup", of("basic"), of("gang"), "", &["spec.schedulingPolicy"]);
    let answer = |count: i64| json!({"status": {"poolCount": count}});
    check("ResourcePoolStatusRequest", answer(1), answer(2), "status", &["status"]);
    check("ResourcePoolStatusRequest", json!({}), answer(2), "status", &[]);
}
