//! The rules at work: an object, and the fields that are wrong in it.

use serde_json::{Value, json};

use machinery::field::FieldErrors;

use super::at::{judge, judge_both};
use super::{core, workloads};
use crate::kind::Rules;
use crate::tests::kind_of;

fn rule(kind: &str) -> &'static Rules {
    kind_of(kind).rules()
}

fn warned(kind: &str, object: &Value) -> Vec<String> {
    let mut all = vec![];
    if let Some(warn) = kind_of(kind).warnings() {
        judge(object, |at| warn(at, &mut all));
    }
    all
}

fn fields(errors: &FieldErrors) -> Vec<&str> {
    errors.0.iter().map(|error| error.field.as_str()).collect()
}

/// A pod's spec as defaulting leaves it, with one thing changed.
fn pod_spec(pointer: &str, value: Value) -> Value {
    let mut spec = json!({
        "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "s",
        "terminationGracePeriodSeconds": 30, "securityContext": {},
        "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{
            "name": "c", "image": "i", "imagePullPolicy": "Always", "resources": {},
            "terminationMessagePath": "/t", "terminationMessagePolicy": "File",
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        }],
    });
    if let Some(place) = spec.pointer_mut(pointer) {
        *place = value;
    }
    spec
}

fn deployment(replicas: i64, label: &str) -> Value {
    json!({"metadata": {"name": "d"}, "spec": {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": "a"}},
        "strategy": {"type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
        "template": {"metadata": {"labels": {"app": label}}, "spec": pod_spec("/none", json!(0))},
    }})
}

fn pod(pointer: &str, value: Value) -> Value {
    json!({"metadata": {"name": "p"}, "spec": pod_spec(pointer, value)})
}

/// A pod with the annotation that old versions read tolerations from.
fn noted(tolerations: &str) -> Value {
    let mut pod = pod("/none", json!(0));
    let key = "scheduler.alpha.kubernetes.io/tolerations";
    pod["metadata"]["annotations"] = json!({ key: tolerations });
    pod
}

/// As it is once the pod's own labels were merged into a selector that asks about a itself.
fn asked_twice() -> Value {
    let mut pod = pod("/none", json!(0));
    pod["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": 1, "topologyKey": "t",
        "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["b", "a"],
        "labelSelector": {"matchLabels": {"a": "1"}, "matchExpressions": [
            {"key": "b", "operator": "In", "values": ["1"]},
            {"key": "a", "operator": "In", "values": ["1"]}]}}]);
    pod
}

#[test]
fn new_objects_are_told_every_wrong_field() {
    let rules = json!({"rules": [{"verbs": [], "apiGroups": [""], "resources": ["pods"]}]});
    let request = json!({"spec": {"signerName": "a.b/c", "usages": ["x"], "request": ""}});
    let mount = json!([{"name": "w", "mountPath": "/w"}]);
    for (kind, object, expected) in [
        ("ConfigMap", json!({"data": {"a b": "x", "c": "y"}}), vec!["data[a b]"]),
        ("Pod", asked_twice(), vec!["spec.topologySpreadConstraints[0][1]"]),
        ("Lease", json!({"spec": {"leaseDurationSeconds": 0}}), vec!["spec.leaseDurationSeconds"]),
        (
            "ValidatingAdmissionPolicy",
            json!({"metadata": {"name": "p"}, "spec": {"failurePolicy": "Fail",
                "matchConstraints": {"matchPolicy": "Exact", "namespaceSelector": {}, "objectSelector": {},
                    "resourceRules": [{"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*"]}]},
                "matchConditions": [{"name": "a", "expression": "1"}],
                "variables": [{"name": "v", "expression": "zzz"}],
                "validations": [{"expression": "variables.v == 1"}, {"expression": "object.a", "messageExpression": "authorizer"}]}}),
            vec![
                "spec.matchConditions[0].expression",
                "spec.variables[0].expression",
                "spec.validations[1].expression",
                "spec.validations[1].messageExpression",
            ],
        ),
        (
            "ResourceClaim",
            json!({"spec": {"devices": {
                "requests": [{"name": "a", "exactly": {"deviceClassName": "c", "allocationMode": "All",
                    "selectors": [{"cel": {"expression": "device.driver =="}}, {}]}}, {"name": "a"}],
                "constraints": [{"requests": ["b"], "matchAttribute": "x"}]}}}),
            vec![
                "spec.devices.requests[0].exactly.selectors[0].cel.expression",
                "spec.devices.requests[0].exactly.selectors[1].cel",
                "spec.devices.requests[1]",
                "spec.devices.requests[1]",
                "spec.devices.constraints[0].requests[0]",
                "spec.devices.constraints[0].matchAttribute",
            ],
        ),
        (
            "ResourceSlice",
            json!({"spec": {"driver": "d.io", "pool": {"name": "p", "resourceSliceCount": 0},
                "devices": [{"name": "B", "attributes": {"a": {"int": 1, "bool": true}}}]}}),
            vec![
                "spec.pool.resourceSliceCount",
                "spec",
                "spec.devices[0].name",
                "spec.devices[0].attributes[a]",
            ],
        ),
        ("Role", rules, vec!["rules[0].verbs"]),
        ("CertificateSigningRequest", request, vec!["spec.request", "spec.usages[0]"]),
        ("Pod", pod("/none", json!(0)), vec![]),
        ("Pod", pod("/containers", json!([])), vec!["spec.containers"]),
        ("Pod", pod("/containers/0/image", json!("")), vec!["spec.containers[0].image"]),
        (
            "Pod",
            pod("/containers/0/volumeMounts", mount),
            vec!["spec.containers[0].volumeMounts[0].name"],
        ),
        ("Pod", pod("/restartPolicy", json!("Maybe")), vec!["spec.restartPolicy"]),
        ("Pod", noted("{bad"), vec!["metadata.annotations"]),
        ("Pod", noted("[]"), vec![]),
        ("Deployment", deployment(1, "a"), vec![]),
        ("Deployment", deployment(-1, "b"), vec!["spec.replicas", "spec.template.metadata.labels"]),
    ] {
        let errors = judge(&object, rule(kind).create);
        assert_eq!(fields(&errors), expected, "{kind}: {}", errors.summary());
    }
}

#[test]
fn what_must_stay_is_held() {
    let reference = |name: &str| json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}});
    let map = |value: &str| json!({"immutable": true, "data": {"a": value}});
    for (kind, old, new, expected) in [
        ("ConfigMap", map("1"), map("2"), vec!["data"]),
        ("ConfigMap", map("1"), map("1"), vec![]),
        ("RoleBinding", reference("a"), reference("b"), vec!["roleRef"]),
        ("Pod", pod("/none", json!(0)), pod("/containers/0/image", json!("j")), vec![]),
        ("Pod", pod("/none", json!(0)), pod("/dnsPolicy", json!("Default")), vec!["spec"]),
    ] {
        let update = rule(kind).update.expect("a rule for updates");
        let errors = judge_both(&new, &old, update);
        assert_eq!(fields(&errors), expected, "{kind}: {}", errors.summary());
    }
}

#[test]
fn containers_fit_into_the_pod_as_a_whole() {
    let check = |container: Value, whole: Value, expected: &[&str]| {
        let mut pod = pod("/containers/0/resources", container);
        pod["spec"]["resources"] = whole;
        let errors = judge(&pod, rule("Pod").create);
        assert_eq!(fields(&errors), expected, "{}", errors.summary());
    };
    let one = json!({"requests": {"cpu": "1"}, "limits": {"cpu": "3"}});
    check(json!({"requests": {"cpu": "1"}}), one.clone(), &[]);
    check(json!({"requests": {"cpu": "2"}}), one.clone(), &["spec.resources.requests[cpu]"]);
    let both = json!({"requests": {"cpu": "1"}, "limits": {"cpu": "4"}});
    check(both, one, &["spec.resources.containers[0][cpu].limits"]);
}

#[test]
fn gates_change_the_rules() {
    use release::features::{self, Feature as F};
    let check = |gate: F, kind: &str, object: &Value, closed: &[&str], open: &[&str]| {
        for (is_on, expected) in [(false, closed), (true, open)] {
            let gates = features::Gates::DEFAULT.with(gate, is_on);
            let errors = features::scoped(gates, || judge(object, rule(kind).create));
            assert_eq!(fields(&errors), expected, "{gate} {is_on}: {}", errors.summary());
        }
    };
    let metric = |kind: &str, field: &str, source: Value| json!([{"type": kind, field: source}]);
    let scaled = |metrics: Value| {
        let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
        json!({"metadata": {"name": "a"}, "spec": {"minReplicas": 0, "maxReplicas": 2,
            "scaleTargetRef": target, "metrics": metrics}})
    };
    let target = json!({"type": "AverageValue", "averageValue": "1"});
    let outside =
        metric("External", "external", json!({"metric": {"name": "m"}, "target": target}));
    let inside = metric("Pods", "pods", json!({"metric": {"name": "m"}, "target": target}));
    let least = "spec.minReplicas";
    check(F::HPAScaleToZero, "HorizontalPodAutoscaler", &scaled(outside), &[least], &[]);
    check(
        F::HPAScaleToZero,
        "HorizontalPodAutoscaler",
        &scaled(inside),
        &[least, "spec.metrics"],
        &["spec.metrics"],
    );
    let tolerating = |value: &str| {
        let mut pod = pod("/none", json!(0));
        pod["spec"]["tolerations"] = json!([{"key": "k", "operator": "Gt", "value": value}]);
        pod
    };
    let operator = "spec.tolerations[0].operator";
    let value = "spec.tolerations[0].value";
    let gate = F::TaintTolerationComparisonOperators;
    check(gate, "Pod", &tolerating("5"), &[operator], &[]);
    check(gate, "Pod", &tolerating("05"), &[operator], &[value]);
    check(gate, "Pod", &tolerating("x"), &[operator], &[value, value]);
    let mut priced = pod("/none", json!(0));
    let cost = "controller.kubernetes.io/pod-deletion-cost";
    priced["metadata"]["annotations"] = json!({cost: "much"});
    check(F::PodDeletionCost, "Pod", &priced, &[], &[&format!("metadata.annotations[{cost}]")]);
    let block = json!({"metadata": {"name": "n"}, "spec": {"podSelector": {},
        "policyTypes": ["Ingress"], "ingress": [{"from": [{"ipBlock": {"cidr": "010.0.0.0/8"}}]}]}});
    let cidr = "spec.ingress[0].from[0].ipBlock.cidr";
    check(F::StrictIPCIDRValidation, "NetworkPolicy", &block, &[], &[cidr]);
    for (is_on, count) in [(false, 1), (true, 0)] {
        let gates = features::Gates::DEFAULT.with(F::RelaxedServiceNameValidation, is_on);
        let wrong = features::scoped(gates, || (rule("Service").name)("1st"));
        assert_eq!(wrong.len(), count, "{wrong:?}");
    }
}

/// Upstream's ratcheting: `restartAllContainersActionInUse`.
#[test]
fn an_action_behind_a_closed_gate_stays_where_it_stood() {
    use release::features::{self, Feature};
    let rules =
        |action: &str| json!([{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]);
    let object = |kind: &str, action: &str| {
        let mut spec = pod_spec("/none", json!(0));
        spec["restartPolicy"] = if kind == "CronJob" { "Never".into() } else { "Always".into() };
        spec["containers"][0]["restartPolicy"] = "Never".into();
        spec["containers"][0]["restartPolicyRules"] = rules(action);
        let template = json!({"metadata": {"labels": {"app": "a"}}, "spec": spec});
        match kind {
            "PodTemplate" => json!({"metadata": {"name": "t"}, "template": template}),
            "CronJob" => json!({"metadata": {"name": "j"}, "spec": {
                "schedule": "* * * * *", "concurrencyPolicy": "Allow",
                "jobTemplate": {"spec": {"template": template}}}}),
            "ReplicationController" => json!({"metadata": {"name": "r"}, "spec": {
                "replicas": 1, "selector": {"app": "a"}, "template": template}}),
            _ => {
                let mut deployment = deployment(1, "a");
                deployment["spec"]["template"] = template;
                deployment
            }
        }
    };
    let gates = features::Gates::DEFAULT;
    features::scoped(gates.with(Feature::RestartAllContainersOnContainerExits, false), || {
        for kind in ["Deployment", "ReplicationController", "PodTemplate", "CronJob"] {
            let check = |old: &str, expected: usize| {
                let (new, old) = (object(kind, "RestartAllContainers"), object(kind, old));
                let rules = rule(kind);
                let errors = match rules.update {
                    Some(update) => judge_both(&new, &old, update),
                    None => judge_both(&new, &old, |new, _| (rules.create)(new)),
                };
                assert_eq!(errors.0.len(), expected, "{kind}: {errors:?}");
            };
            check("RestartAllContainers", 0);
            check("Restart", 1);
            let new = object(kind, "RestartAllContainers");
            assert_eq!(judge(&new, rule(kind).create).0.len(), 1, "{kind}");
        }
    });
}

/// Lists of thousands are within what a request may have. What compares each element with each takes
/// sixty-four times as long for eight times as many.
#[test]
fn time_grows_with_the_length_of_lists() {
    use std::time::Duration;

    let many = |count: usize, one: &dyn Fn(usize) -> Value| Value::from_iter((0..count).map(one));
    let service = |count: usize| {
        let port = |n: usize| {
            json!({"name": format!("p{n}"), "port": n % 65535 + 1, "protocol": "TCP",
                "targetPort": 80, "nodePort": 30_000 + n})
        };
        json!({"metadata": {"name": "s"}, "spec": {"type": "NodePort", "sessionAffinity": "None",
            "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster",
            "ports": many(count, &port)}})
    };
    let containers = |count: usize| {
        let container = |n: usize| {
            let mut container = pod_spec("/none", json!(0))["containers"][0].take();
            container["name"] = format!("c{n}").into();
            container["ports"] = json!([{"name": format!("p{n}"), "protocol": "TCP",
                "containerPort": 80, "hostPort": n % 65535 + 1}]);
            container
        };
        pod("/containers", many(count, &container))
    };
    let addresses = |count: usize| {
        let port = |n: usize| {
            json!({"name": format!("p{n}"), "protocol": "TCP", "containerPort": 80, "hostPort": 80,
                "hostIP": format!("10.0.{}.{}", n / 256, n % 256)})
        };
        let mut pod = pod("/none", json!(0));
        pod["spec"]["containers"][0]["ports"] = many(count, &port);
        pod
    };
    let volumes = |count: usize| {
        let mut pod =
            pod("/volumes", many(count, &|n| json!({"name": format!("v{n}"), "emptyDir": {}})));
        let mount = |n: usize| json!({"name": format!("v{n}"), "mountPath": format!("/{n}")});
        pod["spec"]["containers"][0]["volumeMounts"] = many(count, &mount);
        pod["spec"]["containers"][0]["env"] =
            many(count, &|n| json!({"name": format!("V{n}"), "value": "x"}));
        pod["spec"]["tolerations"] = many(
            count,
            &|n| json!({"key": format!("k{n}"), "operator": "Exists", "effect": "NoSchedule"}),
        );
        pod
    };
    type Make<'a> = &'a dyn Fn(usize) -> Value;
    let makers: [(&str, &str, Make<'_>); 4] = [
        ("ports", "Service", &service),
        ("containers", "Pod", &containers),
        ("addresses", "Pod", &addresses),
        ("volumes", "Pod", &volumes),
    ];
    for (name, kind, make) in makers {
        let rules = rule(kind);
        let once = |object: &Value| {
            let begun = base::clock::busy();
            assert_eq!(judge(object, rules.create), FieldErrors::default(), "{name}");
            let update = rules.update.expect("rules for updates");
            assert_eq!(judge_both(object, object, update), FieldErrors::default(), "{name}");
            assert!(warned(kind, object).is_empty(), "{name}");
            base::clock::busy().saturating_sub(begun)
        };
        // The best of some, of this thread's own time: the machine does other things, too.
        let best = |object: Value| (0..3).map(|_| once(&object)).min().unwrap_or(Duration::MAX);
        let (few, lots) = (best(make(500)), best(make(4000)));
        assert!(lots < few * 20, "{name}: {few:?} for 500, {lots:?} for 4000");
    }
}

/// A workload with a template that has the label `app=a`.
fn workload(kind: &str, selector: Value) -> Value {
    let mut object = deployment(1, "a");
    object["kind"] = kind.into();
    object["spec"]["selector"] = selector;
    object["spec"]["updateStrategy"] = json!({"type": "OnDelete"});
    object["spec"]["podManagementPolicy"] = "Parallel".into();
    object
}

/// The errors of an object, without the values.
fn said(kind: &str, object: &Value) -> Vec<String> {
    let errors = judge(object, rule(kind).create);
    errors.0.iter().map(ToString::to_string).collect()
}

/// Upstream's selectors are pointers: absent ones select nothing, empty ones everything.
#[test]
fn selectors_are_absent_empty_or_wrong() {
    const MISMATCH: &str = "spec.template.metadata.labels: Invalid value: {\"app\":\"a\"}: `selector` does not match template `labels`";
    let absent = json!({});
    let empty = json!({"matchLabels": {}});
    let broken = json!({"matchExpressions": [{"key": "a", "operator": "X"}]});
    let bad_label = json!({"matchLabels": {"app": "a a"}, "matchExpressions": []});
    for (kind, name, detail) in [
        ("Deployment", "deployment", Some("invalid label selector")),
        ("ReplicaSet", "deployment", Some("invalid label selector")),
        ("StatefulSet", "statefulset", Some("")),
        ("DaemonSet", "daemonset", None),
    ] {
        let is_daemon_set = kind == "DaemonSet";
        let mut expected = vec!["spec.selector: Required value"];
        expected.retain(|_| !is_daemon_set);
        expected.push(MISMATCH);
        assert_eq!(said(kind, &workload(kind, absent.clone())), expected, "{kind}");
        let why =
            format!("spec.selector: Invalid value: {{}}: empty selector is invalid for {name}");
        assert_eq!(said(kind, &workload(kind, empty.clone())), [why], "{kind}");
        let all = said(kind, &workload(kind, broken.clone()));
        let operator = "spec.selector.matchExpressions[0].operator: Invalid value: \"X\": not a valid selector operator";
        assert_eq!(all[0], operator, "{kind}");
        assert_eq!(all.len(), 1 + usize::from(detail.is_some()), "{kind}: {all:?}");
        let last = all.last().map(String::as_str).unwrap_or_default();
        assert!(detail.is_none_or(|detail| last.ends_with(detail)), "{kind}: {last}");
        let all = said(kind, &workload(kind, bad_label.clone()));
        assert_eq!(all.len(), 1 + usize::from(detail.is_some()), "{kind}: {all:?}");
        let shown = "spec.selector: Invalid value: {\"matchLabels\":{\"app\":\"a a\"},\"matchExpressions\":[]}";
        assert!(detail.is_none_or(|_| all[1].starts_with(shown)), "{kind}: {all:?}");
    }
}

/// Upstream: `validateGeneratedSelector`.
#[test]
fn jobs_have_the_selector_that_was_made_for_them() {
    let job = |manual: bool, selector: Value, labels: Value| {
        let mut template =
            json!({"metadata": {"labels": labels}, "spec": pod_spec("/none", json!(0))});
        template["spec"]["restartPolicy"] = "Never".into();
        json!({"metadata": {"name": "j", "uid": "u"}, "spec": {"manualSelector": manual,
            "completionMode": "NonIndexed", "selector": selector, "template": template}})
    };
    let own = json!({"controller-uid": "u", "job-name": "j",
        "batch.kubernetes.io/controller-uid": "u", "batch.kubernetes.io/job-name": "j"});
    let by = |key: &str, value: &str| json!({"matchLabels": {key: value}});
    let of_uid = || by("batch.kubernetes.io/controller-uid", "u");
    let with = |key: &str, value: &str| {
        let mut labels = own.clone();
        labels[key] = value.into();
        labels
    };
    for (object, expected) in [
        (job(false, of_uid(), own.clone()), vec![]),
        (job(false, by("a", "b"), with("a", "b")), vec!["spec.selector"]),
        (
            job(false, of_uid(), with("job-name", "k")),
            vec!["spec.template.metadata.labels[job-name]"],
        ),
        (
            job(
                false,
                of_uid(),
                json!({"batch.kubernetes.io/controller-uid": "u", "batch.kubernetes.io/job-name": "j"}),
            ),
            vec![
                "spec.template.metadata.labels[controller-uid]",
                "spec.template.metadata.labels[job-name]",
            ],
        ),
        (job(true, by("a", "b"), json!({"a": "b"})), vec![]),
        (job(true, json!({}), json!({"a": "b"})), vec![]),
        (job(true, by("a", "c"), json!({"a": "b"})), vec!["spec.template.metadata.labels"]),
        (
            job(true, json!(null), json!({"a": "b"})),
            vec!["spec.selector", "spec.template.metadata.labels"],
        ),
    ] {
        let errors = judge(&object, rule("Job").create);
        assert_eq!(fields(&errors), expected, "{object}: {errors:?}");
    }
}

#[test]
fn statuses_count_what_there_is() {
    for (kind, status, before, expected) in [
        (
            "Deployment",
            json!({"replicas": 1, "readyReplicas": 2}),
            json!({}),
            vec!["readyReplicas"],
        ),
        (
            "Deployment",
            json!({"collisionCount": 1}),
            json!({"collisionCount": 2}),
            vec!["collisionCount"],
        ),
        ("StatefulSet", json!({}), json!({"collisionCount": 1}), vec!["collisionCount"]),
        ("ReplicaSet", json!({}), json!({"collisionCount": 1}), vec![]),
        (
            "StatefulSet",
            json!({"replicas": -1, "currentReplicas": 0}),
            json!({}),
            vec![
                "replicas",
                "readyReplicas",
                "currentReplicas",
                "updatedReplicas",
                "availableReplicas",
            ],
        ),
        (
            "DaemonSet",
            json!({"numberReady": -1, "numberUnavailable": -1}),
            json!({}),
            vec!["numberReady", "numberUnavailable"],
        ),
        (
            "ReplicationController",
            json!({"replicas": 1, "fullyLabeledReplicas": 2}),
            json!({}),
            vec!["fullyLabeledReplicas"],
        ),
    ] {
        let object = |status: &Value| json!({"kind": kind, "status": status});
        let errors = judge_both(&object(&status), &object(&before), workloads::counts);
        let expected: Vec<String> = expected.iter().map(|name| format!("status.{name}")).collect();
        assert_eq!(fields(&errors), expected, "{kind} {status}");
    }
}

#[test]
fn a_node_keeps_its_ranges_and_provider() {
    let node = |cidrs: Value, provider: &str, external: &str| json!({"metadata": {"name": "n"}, "spec": {"podCIDRs": cidrs, "providerID": provider, "externalID": external}});
    let had = node(json!(["10.0.0.0/24", "fd00::/64"]), "p", "");
    for (new, expected) in [
        (had.clone(), vec![]),
        (node(json!(["10.0.1.0/24", "fd01::/64"]), "p", ""), vec!["spec.podCIDRs"; 2]),
        (node(json!(["10.0.0.0/24", "fd01::/64"]), "p", ""), vec!["spec.podCIDRs"]),
        (node(json!(["10.0.0.0/24"]), "p", ""), vec!["spec.podCIDRs"]),
        (node(json!(null), "q", "x"), vec!["spec.podCIDRs", "spec.providerID", "spec.externalID"]),
    ] {
        let errors = judge_both(&new, &had, core::node_update);
        assert_eq!(fields(&errors), expected, "{new}");
    }
    assert!(judge_both(&had, &node(json!(null), "", ""), core::node_update).is_empty());
}

#[test]
fn annotations_of_old_name_containers_and_profiles() {
    const KEY: &str = "container.apparmor.security.beta.kubernetes.io/";
    for (container, profile, expected) in [
        ("c", "", 0),
        ("c", "unconfined", 0),
        ("c", "localhost/x", 0),
        ("c", "x", 1),
        ("d", "runtime/default", 1),
        ("d", "x", 2),
    ] {
        let key = format!("{KEY}{container}");
        let mut object = pod("/none", json!(0));
        object["metadata"]["annotations"] = json!({key.clone(): profile});
        let errors = judge(&object, rule("Pod").create);
        assert_eq!(fields(&errors), vec![format!("metadata.annotations[{key}]"); expected]);
    }
}

#[test]
fn the_path_of_a_webhook_is_read_from_its_second_letter() {
    for (path, expected) in [
        ("/", 0),
        ("", 0),
        ("/a/b/", 0),
        ("//", 1),
        ("/a//", 1),
        ("//a", 1),
        // It must start with a slash, and goes on with nothing.
        ("a", 2),
        ("ab", 1),
        ("/a/ ", 1),
    ] {
        let hook = json!({"name": "a.b.c", "failurePolicy": "Fail", "matchPolicy": "Exact",
            "namespaceSelector": {}, "objectSelector": {}, "timeoutSeconds": 1, "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "rules": [],
            "clientConfig": {"service": {"name": "n", "namespace": "s", "port": 1, "path": path}}});
        let object = json!({"metadata": {"name": "w"}, "webhooks": [hook]});
        let errors = judge(&object, rule("ValidatingWebhookConfiguration").create);
        assert_eq!(errors.0.len(), expected, "{path:?}: {errors:?}");
    }
}

#[test]
fn tolerations_of_a_runtime_class_differ() {
    let one = |key: &str, seconds: i64| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
    let number = json!({"key": "a", "operator": "Gt", "value": "1"});
    for (list, expected) in [
        (json!([one("a", 1), one("b", 1)]), vec![]),
        (json!([one("a", 1), one("a", 2)]), vec!["scheduling.tolerations[1]"]),
        (json!([number]), vec!["scheduling.tolerations[0].operator"]),
    ] {
        let object = json!({"handler": "h", "scheduling": {"tolerations": list}});
        let errors = judge(&object, rule("RuntimeClass").create);
        assert_eq!(fields(&errors), expected, "{list}");
    }
}
