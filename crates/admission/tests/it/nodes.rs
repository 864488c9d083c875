//! NodeRestriction's checks that read other objects: tokens and certificates that a node requests.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::{self, Authorizer, Decision};
use apiserver::request::{Key, RequestContext, UserInfo};
use apiserver::resource::Resource;
use decapod_admission as admission;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::{
    LimitRange, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ResourceQuota,
    ServiceAccount,
};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use machinery::Object;
use release::features::{self, Feature, Gates};
use serde_json::{Value, json};

use crate::world::{World, row};

fn rows() -> Vec<Resource> {
    vec![
        row::<CSIDriver>(),
        row::<LimitRange>(),
        row::<Namespace>(),
        row::<Node>(),
        row::<PersistentVolume>(),
        row::<PersistentVolumeClaim>(),
        row::<Pod>(),
        row::<PodCertificateRequest>(),
        row::<PriorityClass>(),
        row::<ResourceQuota>(),
        row::<RuntimeClass>(),
        row::<ServiceAccount>(),
        row::<StorageClass>(),
        row::<k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy>(),
        row::<k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy>(),
        row::<k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration>(),
        row::<k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration>(),
    ]
}

/// Grants nodes one audience, for one service account.
struct Granted;

#[async_trait::async_trait]
impl Authorizer for Granted {
    async fn authorize(&self, attributes: &authz::Attributes) -> Decision {
        let authz::Attributes { user, request } = attributes;
        let asked = (user.name.as_str(), request.verb.as_str(), request.namespace.as_str());
        let what = [&request.group, &request.version, &request.resource, &request.name];
        let reason = String::new();
        match (asked, what.map(String::as_str)) {
            (
                ("system:node:n", "request-serviceaccounts-token-audience", "web"),
                ["", "v1", "granted", "bot"],
            ) => Decision::Allow { reason },
            _ => Decision::NoOpinion { reason },
        }
    }
}

fn plugin() -> Box<dyn Plugin> {
    let authorizer = Some(Arc::new(Granted) as Arc<dyn Authorizer>);
    let options = admission::Options { authorizer, ..admission::Options::default() };
    let chain = admission::chain(&options).expect("known plugins");
    let mut all = chain.0.into_iter().filter(|plugin| plugin.name() == "NodeRestriction");
    all.next().expect("is on by default")
}

/// Runs the future with feature gates, on this thread.
fn with_gates(gates: Gates, work: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().expect("a runtime");
    features::scoped(gates, || runtime.block_on(work));
}

struct Bench {
    world: World,
    plugin: Box<dyn Plugin>,
}

impl Bench {
    async fn start() -> Self {
        let world = World::start(rows(), &[]);
        world.namespace("web", json!({})).await;
        let bench = Self { world, plugin: plugin() };
        for account in ["default", "bot", "other"] {
            bench.write("v1", "ServiceAccount", account, json!({})).await;
        }
        for node in ["n", "m"] {
            bench.write("v1", "Node", node, json!({})).await;
        }
        bench
    }

    /// Creates an object; returns its UID.
    async fn write(&self, version: &str, kind: &str, name: &str, parts: Value) -> String {
        let mut tree = json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}});
        if self.world.context(version, kind).resource.namespaced {
            tree["metadata"]["namespace"] = "web".into();
        }
        for (key, value) in parts.as_object().expect("parts") {
            match key.as_str() {
                "annotations" => tree["metadata"][key] = value.clone(),
                _ => tree[key] = value.clone(),
            }
        }
        let made = self.world.write(tree).await.unwrap_or_else(|error| panic!("{error}"));
        made["metadata"]["uid"].as_str().expect("has one").to_owned()
    }

    async fn pod(&self, name: &str, node: &str, volumes: Value) -> String {
        let spec = json!({"nodeName": node, "serviceAccountName": "bot", "volumes": volumes,
            "automountServiceAccountToken": false, "containers": [{"name": "a", "image": "i"}]});
        self.write("v1", "Pod", name, json!({ "spec": spec })).await
    }

    async fn admit(
        &self,
        context: (&str, &str, &str),
        operation: Operation,
        name: &str,
        mut object: Box<dyn Object>,
    ) -> Result<(), StatusError> {
        let (version, kind, subresource) = context;
        let user = UserInfo::new("system:node:n", &["system:nodes"]);
        let resource = self.world.context(version, kind).resource;
        let ctx = RequestContext::new(user, resource, subresource);
        let (key, options) = (Key::new("web", name), Value::Null);
        let registry = &self.world.registry;
        let object = Some(&mut object);
        let mut attributes =
            Attributes::new(&ctx, registry, operation, &key, object, None, &options);
        self.plugin.admit(&mut attributes).await
    }

    /// The refusal of the node's token request for its pod; empty if it is allowed.
    async fn token(&self, pod: (&str, &str), audiences: &[&str]) -> String {
        let (name, uid) = pod;
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid});
        let spec = json!({"audiences": audiences, "boundObjectRef": bound});
        let request = json!({"metadata": {}, "spec": spec});
        let request: TokenRequest = serde_json::from_value(request).expect("a request");
        let context = ("v1", "ServiceAccount", "token");
        let outcome = self.admit(context, Operation::Create, "bot", Box::new(request)).await;
        let head = "serviceaccounts \"bot\" is forbidden: ";
        outcome.err().map_or_else(String::new, |error| {
            assert_eq!(error.code, 403, "{error}");
            error.message.strip_prefix(head).unwrap_or(&error.message).to_owned()
        })
    }
}

fn projected(audience: &str) -> Value {
    json!([{"name": "t", "projected": {"sources": [
        {"serviceAccountToken": {"path": "t", "audience": audience}}]}}])
}

fn claimed(claim: &str) -> Value {
    json!([{"name": "c", "persistentVolumeClaim": {"claimName": claim}}])
}

/// Creates pods whose volumes need an audience in all possible ways.
async fn volumes(bench: &Bench) {
    for (name, audience) in [("driver", "csi"), ("ebs.csi.aws.com", "ebs"), ("plain", "")] {
        let spec = json!({"tokenRequests": [{"audience": "unused"}, {"audience": audience}]});
        bench.write("storage.k8s.io/v1", "CSIDriver", name, json!({ "spec": spec })).await;
    }
    for (name, source) in [
        ("csi", json!({"csi": {"driver": "driver", "volumeHandle": "h"}})),
        ("ebs", json!({"awsElasticBlockStore": {"volumeID": "v"}})),
        ("local", json!({"local": {"path": "/x"}})),
    ] {
        let mut spec = source;
        spec["capacity"] = json!({"storage": "1Gi"});
        bench.write("v1", "PersistentVolume", name, json!({ "spec": spec })).await;
        let spec = json!({"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}});
        bench.write("v1", "PersistentVolumeClaim", name, json!({"spec": spec.clone()})).await;
        let ephemeral = format!("of-{name}");
        bench.write("v1", "PersistentVolumeClaim", &ephemeral, json!({ "spec": spec })).await;
    }
    let spec = json!({"volumeName": "gone", "resources": {"requests": {"storage": "1Gi"}}});
    bench.write("v1", "PersistentVolumeClaim", "dangling", json!({ "spec": spec })).await;
}

#[tokio::test]
async fn a_node_gets_tokens_for_the_audiences_of_its_pods() {
    let bench = Bench::start().await;
    volumes(&bench).await;
    let unknown = |audience: &str| {
        format!(
            "audience {audience:?} not found in pod spec volume, system:node:n is not authorized to request tokens for this audience"
        )
    };
    let template = json!({"spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let ephemeral = json!([{"name": "csi", "ephemeral": {"volumeClaimTemplate": template}}]);
    let inline = json!([{"name": "e", "awsElasticBlockStore": {"volumeID": "v"}}]);
    let driver = |name: &str| json!([{"name": "d", "csi": {"driver": name}}]);
    let missing = |what: &str| format!("error validating audience \"csi\": {what} not found");
    let mut broken_and_good = claimed("nothing");
    broken_and_good
        .as_array_mut()
        .expect("a list")
        .extend(projected("vault").as_array().expect("a list").clone());
    let both_broken = json!([claimed("nothing")[0], {"name": "d", "csi": {"driver": "nobody"}}]);
    // Pods named `of` have the claims of ephemeral volumes.
    for (name, volumes, audiences, expected) in [
        ("none", json!([]), &[""][..], unknown("")),
        ("of", projected(""), &[], String::new()),
        ("of", projected("vault"), &["vault"], String::new()),
        ("of", projected("vault"), &[], unknown("")),
        ("of", projected("vault"), &["other"], unknown("other")),
        ("of", projected("vault"), &["granted"], String::new()),
        ("of", projected("a"), &["a", "b"], "node may only request 0 or 1 audiences".to_owned()),
        ("of", driver("driver"), &["csi"], String::new()),
        ("of", driver("driver"), &["vault"], unknown("vault")),
        ("of", driver("plain"), &[], String::new()),
        ("of", driver("nobody"), &["csi"], missing("csidriver.storage.k8s.io \"nobody\"")),
        ("of", claimed("csi"), &["csi"], String::new()),
        ("of", claimed("csi"), &["vault"], unknown("vault")),
        ("of", claimed("ebs"), &["ebs"], String::new()),
        ("of", claimed("local"), &["csi"], unknown("csi")),
        ("of", claimed("nothing"), &["csi"], missing("persistentvolumeclaim \"nothing\"")),
        ("of", claimed("dangling"), &["csi"], missing("persistentvolume \"gone\"")),
        ("of", ephemeral.clone(), &["csi"], String::new()),
        ("on", ephemeral, &["csi"], missing("persistentvolumeclaim \"on-csi\"")),
        ("of", inline, &["ebs"], String::new()),
        ("of", broken_and_good, &["vault"], String::new()),
        (
            "of",
            both_broken,
            &["csi"],
            missing(
                "[persistentvolumeclaim \"nothing\" not found, csidriver.storage.k8s.io \"nobody\"",
            )
            .replace("\"nobody\" not found", "\"nobody\" not found]"),
        ),
    ] {
        let uid = bench.pod(name, "n", volumes.clone()).await;
        assert_eq!(bench.token((name, &uid), audiences).await, expected, "{volumes} {audiences:?}");
        let ctx = bench.world.context("v1", "Pod");
        bench.world.delete(&ctx, "web", name).await.expect("is deleted");
    }
    bench.world.shutdown().await;
}

#[tokio::test]
async fn a_token_is_bound_to_a_pod_on_the_node() {
    let bench = Bench::start().await;
    let own = bench.pod("own", "n", projected("vault")).await;
    let other = bench.pod("other", "m", projected("vault")).await;
    for (pod, expected) in [
        (("own", own.as_str()), ""),
        (("", ""), "node requested token not bound to a pod"),
        (("own", ""), "node requested token with a pod binding without a uid"),
        (
            ("own", "1"),
            "the UID in the bound object reference (1) does not match the UID in record. The object might have been deleted and then recreated",
        ),
        (
            ("other", other.as_str()),
            "node requested token bound to a pod scheduled on a different node",
        ),
    ] {
        assert_eq!(bench.token(pod, &["vault"]).await, expected);
    }
    bench.world.shutdown().await;
}

#[test]
fn audiences_are_not_restricted_without_the_gate() {
    let gates = Gates::DEFAULT.with(Feature::ServiceAccountNodeAudienceRestriction, false);
    with_gates(gates, async {
        let bench = Bench::start().await;
        let uid = bench.pod("p", "n", claimed("nothing")).await;
        assert_eq!(bench.token(("p", &uid), &["a", "b"]).await, "");
        bench.world.shutdown().await;
    });
}

const REQUESTS: (&str, &str) = ("certificates.k8s.io/v1beta1", "PodCertificateRequest");

impl Bench {
    /// Requests a certificate for the pod `own`, with some fields changed; returns the answer's code and
    /// message.
    async fn certificate(&self, operation: Operation, part: &str, changed: Value) -> (u16, String) {
        let uid = async |kind: &str, name: &str| {
            let context = self.world.context("v1", kind);
            let namespace = if context.resource.namespaced { "web" } else { "" };
            let key = Key::new(namespace, name);
            let found = self.world.registry.get(&context.resource, &key, None).await;
            found.expect("is there").object().expect("decodes").uid().to_owned()
        };
        let mut spec = json!({"signerName": "e.example/s", "podName": "own",
            "podUID": uid("Pod", "own").await, "serviceAccountName": "bot",
            "serviceAccountUID": uid("ServiceAccount", "bot").await, "nodeName": "n",
            "nodeUID": uid("Node", "n").await, "stubPKCS10Request": ""});
        for (key, value) in changed.as_object().expect("fields") {
            spec[key] = value.clone();
        }
        let request = json!({"metadata": {"name": "r", "namespace": "web"}, "spec": spec});
        let request: PodCertificateRequest = serde_json::from_value(request).expect("a request");
        let context = (REQUESTS.0, REQUESTS.1, part);
        let outcome = self.admit(context, operation, "r", Box::new(request)).await;
        let head = "podcertificaterequests.certificates.k8s.io \"r\" is forbidden: ";
        outcome.err().map_or_else(Default::default, |error| {
            let message = error.message.strip_prefix(head).unwrap_or(&error.message);
            (error.code, message.to_owned())
        })
    }
}

#[test]
fn a_node_gets_certificates_for_its_pods() {
    let gates = Gates::DEFAULT.with(Feature::PodCertificateRequest, true);
    with_gates(gates, async {
        let bench = Bench::start().await;
        let own = bench.pod("own", "n", json!([])).await;
        let other = bench.pod("other", "m", json!([])).await;
        let mirrored = bench.pod("mirrored", "n", json!([])).await;
        let mirror = json!({"annotations": {"kubernetes.io/config.mirror": "x"},
            "spec": {"nodeName": "n", "serviceAccountName": "bot",
                "containers": [{"name": "a", "image": "i"}]}});
        bench.write("v1", "Pod", "mirrored", mirror).await;
        let check = async |changed: Value, code: u16, expected: &str| {
            let found = bench.certificate(Operation::Create, "", changed.clone()).await;
            assert_eq!(found, (code, expected.to_owned()), "{changed}");
        };
        check(json!({}), 0, "").await;
        check(
            json!({"nodeName": "m"}),
            403,
            r#"PodCertificateRequest.Spec.NodeName="m", which is not the requesting node "n""#,
        )
        .await;
        let node = bench.world.registry.find::<Node>("", "n").await.expect("reads").expect("some");
        check(
            json!({"nodeUID": "1"}),
            500,
            &format!(
                r#"PodCertificateRequest for pod "web/own" names node UID "1", inconsistent with the running node ("{}")"#,
                node.uid()
            ),
        )
        .await;
        check(
            json!({"podName": "nobody"}),
            500,
            r#"while retrieving pod "web/nobody" named in the PodCertificateRequest: pod "nobody" not found"#,
        )
        .await;
        check(
            json!({"podUID": "1"}),
            500,
            &format!(
                r#"PodCertificateRequest for pod "web/own" contains pod UID ("1") which differs from running pod "{own}""#
            ),
        )
        .await;
        check(
            json!({"podName": "other", "podUID": other}),
            403,
            r#"pod "web/other" is not running on node "n" named in the PodCertificateRequest"#,
        )
        .await;
        check(
            json!({"podName": "mirrored", "podUID": mirrored}),
            403,
            r#"pod "web/mirrored" is a mirror pod"#,
        )
        .await;
        check(
            json!({"serviceAccountName": "other"}),
            403,
            r#"PodCertificateRequest for pod "web/own" contains serviceAccountName ("other") that differs from running pod ("bot")"#,
        )
        .await;
        let bot = bench.world.registry.find::<ServiceAccount>("web", "bot").await;
        check(
            json!({"serviceAccountUID": "1"}),
            500,
            &format!(
                r#"PodCertificateRequest for pod "web/own" names service account UID "1", which differs from the running service account ("{}")"#,
                bot.expect("reads").expect("some").uid()
            ),
        )
        .await;
        let found = bench.certificate(Operation::Update, "", json!({})).await;
        assert_eq!(found, (403, "unexpected operation UPDATE".to_owned()));
        let found = bench.certificate(Operation::Create, "status", json!({})).await;
        assert_eq!(found, (403, "unexpected subresource status".to_owned()));
        bench.world.shutdown().await;
    });
}

#[tokio::test]
async fn a_node_gets_no_pod_certificates_without_the_gate() {
    let bench = Bench::start().await;
    bench.pod("own", "n", json!([])).await;
    let found = bench.certificate(Operation::Create, "", json!({})).await;
    assert_eq!(found, (403, "PodCertificateRequest feature gate is disabled".to_owned()));
    bench.world.shutdown().await;
}
