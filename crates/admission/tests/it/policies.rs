//! Admission policies and match conditions.

use apiserver::StatusError;
use apiserver::resource::Resource;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, MutatingWebhookConfiguration,
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ResourceQuota};
use serde_json::{Value, json};

use crate::world::{World, row};

const GROUP: &str = "admissionregistration.k8s.io/v1";

fn rows() -> Vec<Resource> {
    vec![
        row::<ConfigMap>(),
        row::<Namespace>(),
        row::<ResourceQuota>(),
        row::<MutatingAdmissionPolicy>(),
        row::<MutatingAdmissionPolicyBinding>(),
        row::<MutatingWebhookConfiguration>(),
        row::<ValidatingAdmissionPolicy>(),
        row::<ValidatingAdmissionPolicyBinding>(),
        row::<ValidatingWebhookConfiguration>(),
    ]
}

fn constraints() -> Value {
    json!({"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}],
        "namespaceSelector": {"matchLabels": {"judged": "yes"}}})
}

async fn world(kind: &str, spec: Value, binding: Value) -> World {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({"judged": "yes"})).await;
    let named = |kind: &str, spec: Value| json!({"apiVersion": GROUP, "kind": kind, "metadata": {"name": "p"}, "spec": spec});
    world.write(named(kind, spec)).await.expect("is written");
    world.write(named(&format!("{kind}Binding"), binding)).await.expect("is written");
    world
}

fn config_map(namespace: &str, name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace}, "data": data})
}

fn message(outcome: Result<Value, StatusError>) -> String {
    outcome.err().map(|error| error.message.clone()).unwrap_or_default()
}

#[tokio::test]
async fn a_validating_policy_refuses_with_its_messages() {
    let spec = json!({
        "matchConstraints": constraints(),
        "matchConditions": [{"name": "not-exempt", "expression": "object.metadata.name != 'exempt'"}],
        "variables": [
            {"name": "n", "expression": "size(object.data)"},
            {"name": "broken", "expression": "object.data.nope == 'x'"},
        ],
        "validations": [
            {"expression": "variables.n < 3",
                "messageExpression": "'too many keys: ' + string(variables.n)"},
            {"expression": "!('bad' in object.data)", "message": "bad key", "reason": "Forbidden"},
            {"expression": "request.userInfo.username == 'jane' && namespaceObject.metadata.name == 'web'"},
            {"expression": "object.data.must == 'x'"},
        ],
    });
    let binding = json!({"policyName": "p", "validationActions": ["Deny", "Audit"]});
    let world = world("ValidatingAdmissionPolicy", spec, binding).await;
    world.namespace("other", json!({})).await;
    let check = async |data: Value, expected: &str, code: u16| {
        let error = world.write(config_map("web", "m", data)).await.expect_err("is refused");
        let prefix = "configmaps \"m\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: ";
        assert_eq!((error.message.clone(), error.code), (format!("{prefix}{expected}"), code));
    };
    check(json!({"a": "1", "b": "2", "c": "3"}), "too many keys: 3", 422).await;
    check(json!({"bad": "1"}), "bad key", 403).await;
    check(
        json!({"a": "1"}),
        "expression 'object.data.must == 'x'' resulted in error: no such key: must",
        422,
    )
    .await;
    check(json!({"must": "y"}), "failed expression: object.data.must == 'x'", 422).await;
    for (namespace, name, data) in [
        ("web", "m", json!({"must": "x"})),
        ("web", "exempt", json!({"bad": "1"})),
        ("other", "m", json!({"bad": "1"})),
    ] {
        assert_eq!(message(world.write(config_map(namespace, name, data)).await), "");
    }
    world.shutdown().await;
}

/// Three calls would turn four characters into a gigabyte: the write is refused before that, for an
/// expression and for a variable that it refers to.
#[tokio::test]
async fn a_policy_with_a_huge_text_is_stopped() {
    let grown = format!(".replace('a', '{}')", "a".repeat(1000)).repeat(3);
    let direct = format!("size(object.data.text{grown}) > 0");
    let cases = [
        (json!([]), direct.clone()),
        (
            json!([{"name": "v", "expression": format!("object.data.text{grown}")}]),
            "size(variables.v) > 0".to_owned(),
        ),
    ];
    for (variables, expression) in cases {
        let spec = json!({
            "matchConstraints": constraints(),
            "variables": variables,
            "validations": [{"expression": expression}],
        });
        let binding = json!({"policyName": "p", "validationActions": ["Deny"]});
        let world = world("ValidatingAdmissionPolicy", spec, binding).await;
        let said = message(world.write(config_map("web", "m", json!({"text": "aaaa"}))).await);
        assert!(said.contains("operation cancelled: actual cost limit exceeded"), "{said}");
        world.shutdown().await;
    }
}

#[tokio::test]
async fn policies_take_parameters_and_warn() {
    let spec = json!({
        "matchConstraints": constraints(),
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "validations": [{"expression": "object.data.size <= params.data.limit",
            "messageExpression": "'at most ' + params.data.limit"}],
    });
    let binding = json!({"policyName": "p", "validationActions": ["Warn"],
        "paramRef": {"namespace": "params", "name": "limits", "parameterNotFoundAction": "Deny"}});
    let world = world("ValidatingAdmissionPolicy", spec, binding).await;
    world.namespace("params", json!({})).await;
    let big = || config_map("web", "m", json!({"size": "9"}));
    assert_eq!(
        message(world.write(big()).await),
        "configmaps \"m\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction"
    );
    world.write(config_map("params", "limits", json!({"limit": "5"}))).await.expect("is written");
    let ctx = world.context("v1", "ConfigMap");
    world.write_in(&ctx, big()).await.expect("only a warning");
    assert_eq!(
        ctx.take_warnings(),
        ["Validation failed for ValidatingAdmissionPolicy 'p' with binding 'p': at most 5"]
    );
    world.shutdown().await;
}

#[tokio::test]
async fn a_mutating_policy_applies_and_patches() {
    let spec = json!({
        "matchConstraints": constraints(),
        "reinvocationPolicy": "Never",
        "mutations": [
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression":
                "Object{metadata: Object.metadata{labels: {'added': 'yes'}}}"}},
            {"patchType": "JSONPatch", "jsonPatch": {"expression":
                "[JSONPatch{op: 'add', path: '/metadata/annotations', value: {'n': object.metadata.name, 'added': object.metadata.labels.added}}]"}},
        ],
    });
    let world = world("MutatingAdmissionPolicy", spec, json!({"policyName": "p"})).await;
    let written = world.write(config_map("web", "m", json!({"a": "1"}))).await.expect("is written");
    assert_eq!(written["metadata"]["labels"], json!({"added": "yes"}));
    assert_eq!(written["metadata"]["annotations"], json!({"n": "m", "added": "yes"}));
    assert_eq!(written["data"], json!({"a": "1"}));
    world.shutdown().await;
}

#[tokio::test]
async fn match_conditions_restrict_webhooks() {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({})).await;
    let set = async |expression: &str, policy: &str| {
        let hook = json!({"name": "v.example.com", "sideEffects": "None", "failurePolicy": policy,
            "admissionReviewVersions": ["v1"], "clientConfig": {"url": "https://127.0.0.1:1/x"},
            "matchConditions": [{"name": "c", "expression": expression}],
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"],
                "resources": ["configmaps"]}]});
        let config = json!({"apiVersion": GROUP, "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "hooks"}, "webhooks": [hook]});
        world.write(config).await.expect("is written");
    };
    let ask = async || message(world.write(config_map("web", "m", json!({}))).await);
    set("request.userInfo.username != 'jane'", "Fail").await;
    assert_eq!(ask().await, "");
    world.delete(&world.context("v1", "ConfigMap"), "web", "m").await.expect("is deleted");
    set("'dev' in request.userInfo.groups", "Fail").await;
    assert!(ask().await.contains("failed calling webhook"));
    set("object.nope == 'x'", "Fail").await;
    assert_eq!(
        ask().await,
        "configmaps \"m\" is forbidden: expression 'object.nope == 'x'' resulted in error: no such key: nope"
    );
    set("object.nope == 'x'", "Ignore").await;
    assert_eq!(ask().await, "");
    set(
        "!authorizer.group('').resource('configmaps').namespace('web').check('delete').allowed()",
        "Fail",
    )
    .await;
    let update = message(world.write(config_map("web", "m", json!({"a": "b"}))).await);
    assert!(update.contains("failed calling webhook"), "{update}");
    world.shutdown().await;
}
