//! The rules at work: an object, and the fields that are wrong in it.

use serde_json::{Value, json};

use super::*;

fn rule(kind: &str) -> &'static Rules {
    RULES.iter().find(|row| row.kind == kind).expect("a kind with rules")
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
    use base::features::{self, Feature as F};
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
    use base::features::{self, Feature};
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
            assert!(warnings::told("", kind, object).is_empty(), "{name}");
            base::clock::busy().saturating_sub(begun)
        };
        // The best of some, of this thread's own time: the machine does other things, too.
        let best = |object: Value| (0..3).map(|_| once(&object)).min().unwrap_or(Duration::MAX);
        let (few, lots) = (best(make(500)), best(make(4000)));
        assert!(lots < few * 20, "{name}: {few:?} for 500, {lots:?} for 4000");
    }
}
