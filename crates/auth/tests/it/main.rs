//! The authorizers and authenticators with a real registry: writes go through it, indexes follow it.

mod escalation;
mod hostile;
mod stolen;

use std::sync::Arc;
use std::time::Duration;

use apiserver::Registry;
use apiserver::admission::Chain;
use apiserver::authz::{Attributes, Authorizer, Decision};
use apiserver::registry::{Intent, Modify};
use apiserver::request::{Key, RequestInfo, UserInfo};
use apiserver::resource::{
    CreateHandler, Created, FieldValues, Resource, ResourceTable, SelectableFields, Settings,
};
use base::task::Tasks;
use decapod_auth as auth;
use k8s_openapi::Metadata;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, Pod, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use machinery::object::Typed;
use machinery::{Object, ObjectMeta};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

/// Pods with their node as a field, which the authorizer uses.
fn pods() -> Resource {
    let read = |object: &dyn Object| {
        let spec = object.expect::<Pod>().spec.as_ref();
        vec![spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default()]
    };
    let fields = SelectableFields {
        names: vec!["spec.nodeName".into()],
        values: FieldValues::OfObject(Arc::new(read)),
        unknown: None,
    };
    Resource { fields, ..row::<Pod>() }
}

fn row<T>() -> Resource
where
    T: Metadata<Ty = ObjectMeta> + Serialize + DeserializeOwned + Default + Clone,
    T: Send + Sync + 'static,
{
    let settings = Settings { name_errors: |_| vec![], ..Settings::DEFAULT };
    Resource { settings, ..Resource::of::<T>(Arc::new(Typed::<T>::new())) }
}

struct World {
    registry: Registry,
    tasks: Tasks,
}

impl World {
    fn start() -> Self {
        let table = ResourceTable::new([
            row::<ClusterRole>(),
            row::<ClusterRoleBinding>(),
            row::<Role>(),
            row::<RoleBinding>(),
            pods(),
            row::<Node>(),
            row::<PersistentVolume>(),
            row::<ResourceSlice>(),
            row::<VolumeAttachment>(),
            row::<Secret>(),
            row::<ServiceAccount>(),
        ]);
        let tasks = Tasks::new("test");
        let registry = Registry::new(store::Sim::open(), table, Chain::default(), tasks.clone());
        Self { registry, tasks }
    }

    async fn create<T>(&self, namespace: &str, name: &str, object: serde_json::Value) -> T
    where
        T: k8s_openapi::Resource + machinery::Object + DeserializeOwned + Clone + 'static,
    {
        let mut object: T = serde_json::from_value(object).expect("an object of the kind");
        object.meta_mut().name = Some(name.into());
        object.meta_mut().namespace = (!namespace.is_empty()).then(|| namespace.into());
        let ctx = self.registry.own_context::<T>();
        let key = Key::new(namespace, name);
        let intent = Intent::Create { object: Box::new(object) };
        let written = self.registry.write(&ctx, &key, intent).await.expect("is created");
        let object = written.object.object().expect("decodes");
        object.downcast::<T>().expect("the kind").clone()
    }

    async fn modify<T: k8s_openapi::Resource>(&self, namespace: &str, name: &str, how: Modify) {
        let ctx = self.registry.own_context::<T>();
        let key = Key::new(namespace, name);
        let written = self.registry.write(&ctx, &key, Intent::Modify(how)).await;
        written.expect("is modified");
    }

    async fn delete<T: k8s_openapi::Resource>(&self, namespace: &str, name: &str) {
        let ctx = self.registry.own_context::<T>();
        let intent = Intent::Delete { options: Default::default() };
        let key = Key::new(namespace, name);
        self.registry.write(&ctx, &key, intent).await.expect("is deleted");
    }

    async fn shutdown(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

fn question(
    user: &UserInfo,
    verb: &str,
    resource: &str,
    namespace: &str,
    name: &str,
) -> Attributes {
    let (group, resource) = resource.split_once(':').unwrap_or(("", resource));
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let request = RequestInfo {
        is_resource: true,
        verb: verb.into(),
        group: group.into(),
        resource: resource.into(),
        subresource: subresource.into(),
        namespace: namespace.into(),
        name: name.into(),
        ..RequestInfo::default()
    };
    Attributes { user: user.clone(), request }
}

async fn may(authorizer: &dyn Authorizer, attributes: &Attributes) -> bool {
    matches!(authorizer.authorize(attributes).await, Decision::Allow { .. })
}

/// Waits until the index has seen the registry's writes.
async fn until(authorizer: &dyn Authorizer, attributes: &Attributes, expected: bool) {
    let what = format!("{attributes:?}");
    let is_so = async || (may(authorizer, attributes).await == expected).then_some(());
    testkit::wait::found(&what, is_so).await;
}

#[tokio::test]
async fn the_bootstrap_policy_lets_components_work() {
    let world = World::start();
    auth::rbac::bootstrap::reconcile(&world.registry).await.expect("an empty cluster is filled");
    let before = world.registry.revision().await.expect("a revision");
    auth::rbac::bootstrap::reconcile(&world.registry).await.expect("a second start");
    assert_eq!(before, world.registry.revision().await.expect("a revision"), "nothing to do");

    let rbac = auth::Rbac::start(&world.registry, &world.tasks).await;
    let scheduler = UserInfo::new("system:kube-scheduler", &["system:authenticated"]);
    let dns = UserInfo::new("system:kube-dns", &["system:authenticated"]);
    let check = async |user: &UserInfo, verb: &str, resource: &str, expected: bool| {
        let attributes = question(user, verb, resource, "", "");
        assert_eq!(may(&rbac, &attributes).await, expected, "{verb} {resource}");
    };
    check(&scheduler, "list", "pods", true).await;
    check(&scheduler, "create", "pods/binding", true).await;
    check(&scheduler, "list", "secrets", false).await;
    check(&dns, "watch", "discovery.k8s.io:endpointslices", true).await;
    check(&dns, "delete", "services", false).await;
    // The other components on a node have rights by group, and may not list pods: specs show everything.
    let on_node = |component: pki::Component| {
        let identity = component.on_node("n1").expect("nodes have it");
        let groups: Vec<&str> = identity.groups.iter().map(String::as_str).collect();
        UserInfo::new(identity.user.as_str(), &groups)
    };
    let (dns_there, proxy) = (on_node(pki::Component::Dns), on_node(pki::Component::Proxy));
    for user in [&dns, &dns_there, &proxy] {
        check(user, "list", "services", true).await;
        check(user, "watch", "discovery.k8s.io:endpointslices", true).await;
        check(user, "list", "pods", false).await;
        check(user, "list", "secrets", false).await;
        check(user, "list", "nodes", user.name == proxy.name).await;
    }
    // The DNS reads its own settings, and no other ConfigMap.
    for user in [&dns, &dns_there] {
        for (verb, name, namespace, expected) in [
            ("watch", "coredns-custom", "kube-system", true),
            ("list", "coredns-custom", "kube-system", true),
            ("list", "", "kube-system", false),
            ("get", "extension-apiserver-authentication", "kube-system", false),
            ("get", "coredns-custom", "default", false),
            ("update", "coredns-custom", "kube-system", false),
        ] {
            let attributes = question(user, verb, "configmaps", namespace, name);
            assert_eq!(may(&rbac, &attributes).await, expected, "{verb} {namespace}/{name}");
        }
        check(user, "list", "namespaces", true).await;
        check(user, "create", "events", false).await;
        let event = question(user, "create", "events", "kube-system", "");
        assert!(may(&rbac, &event).await);
    }
    let to_kubelets = UserInfo::new("kube-apiserver-kubelet-client", &["system:authenticated"]);
    check(&to_kubelets, "create", "nodes/proxy", true).await;
    check(&to_kubelets, "get", "nodes/log", true).await;
    check(&to_kubelets, "get", "nodes/stats", true).await;
    check(&to_kubelets, "get", "nodes/metrics", true).await;
    check(&to_kubelets, "get", "secrets", false).await;
    check(&to_kubelets, "create", "pods", false).await;
    check(&to_kubelets, "update", "nodes", false).await;
    let controller = "system:serviceaccount:kube-system:replicaset-controller";
    check(&UserInfo::new(controller, &[]), "create", "pods", true).await;
    world.shutdown().await;
}

#[tokio::test]
async fn reconciling_repairs_damage_and_keeps_additions() {
    let world = World::start();
    let own = json!({"rules": [{"verbs": ["get"], "apiGroups": ["x"], "resources": ["y"]}]});
    world.create::<ClusterRole>("", "system:node-proxier", own.clone()).await;
    let frozen = json!({"metadata": {"annotations": {"rbac.authorization.kubernetes.io/autoupdate": "false"}}});
    world.create::<ClusterRole>("", "system:discovery", frozen).await;
    let wrong = json!({"roleRef": {"apiGroup": "", "kind": "ClusterRole", "name": "view"}});
    world.create::<ClusterRoleBinding>("", "system:node-proxier", wrong).await;
    auth::rbac::bootstrap::reconcile(&world.registry).await.expect("reconciles");

    let role = |name: &'static str| world.registry.find::<ClusterRole>("", name);
    let proxier = role("system:node-proxier").await.expect("reads").expect("exists");
    let rules = proxier.rules.expect("rules");
    assert!(rules.len() > 1 && rules[0].resources.as_deref() == Some(&["y".to_owned()][..]));
    let discovery = role("system:discovery").await.expect("reads").expect("exists");
    assert!(discovery.rules.is_none_or(|rules| rules.is_empty()));
    let binding = world.registry.find::<ClusterRoleBinding>("", "system:node-proxier").await;
    let binding = binding.expect("reads").expect("exists");
    assert_eq!(binding.role_ref.name, "system:node-proxier");
    world.shutdown().await;
}

/// The DNS server loses the role of earlier versions; an add-on of the same name keeps its own.
#[tokio::test]
async fn the_dns_servers_former_role_is_withdrawn() {
    const FORMER: &str = "system:coredns";
    let subject = |kind: &str, name: &str| json!({"kind": kind, "name": name});
    let dns = subject("User", "system:kube-dns");
    let account = subject("ServiceAccount", "coredns");
    for (subjects, left) in [(json!([dns]), None), (json!([dns, account]), Some(1))] {
        let world = World::start();
        let rules = json!([{"verbs": ["list"], "apiGroups": [""], "resources": ["pods"]}]);
        world.create::<ClusterRole>("", FORMER, json!({ "rules": rules })).await;
        let role = json!({"apiGroup": "", "kind": "ClusterRole", "name": FORMER});
        let binding = json!({"roleRef": role, "subjects": subjects});
        world.create::<ClusterRoleBinding>("", FORMER, binding).await;
        for _ in 0..2 {
            auth::rbac::bootstrap::reconcile(&world.registry).await.expect("reconciles");
        }
        let binding = world.registry.find::<ClusterRoleBinding>("", FORMER).await.expect("reads");
        let subjects = binding.map(|binding| binding.subjects.unwrap_or_default().len());
        assert_eq!(subjects, left);
        let role = world.registry.find::<ClusterRole>("", FORMER).await.expect("reads");
        assert_eq!(role.is_some(), left.is_some());
        world.shutdown().await;
    }
}

/// A certificate with a Node's UID is valid as long as that Node exists.
#[tokio::test]
async fn a_nodes_certificate_ends_with_its_node() {
    use apiserver::authn::{Authenticator, PeerCertificates};
    let world = World::start();
    let node = world.create::<Node>("", "n1", json!({})).await;
    let authority = pki::Authority::generate("ca").expect("keys can be made");
    let (request, _) = pki::new_request(&pki::Identity::node("n1").profile()).expect("a request");
    let uid = node.metadata.uid.as_deref();
    let csr = pki::Csr::parse(request.as_bytes()).expect("parses").with_uid(uid);
    let pem = authority.sign_request(&csr, &[pki::Usage::Client], 1, pki::LEAF_LIFETIME);
    let chain = pki::certificates(pem.expect("signs").as_bytes()).expect("parses");
    let chain = chain.iter().map(|cert| cert.der().to_vec()).collect();
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.extensions.insert(PeerCertificates(chain));

    let nodes = auth::node_certificates::NodeCertificates::start(&world.registry, &world.tasks);
    let x509 = auth::x509::X509::new(authority.cert_pem()).expect("an authority");
    let x509 = x509.with_nodes(nodes.await);
    let groups = async || {
        let user = x509.authenticate(&parts).await.expect("valid").expect("a user");
        assert_eq!((user.name.as_str(), Some(user.uid.as_str())), ("system:node:n1", uid));
        user.groups.join(",")
    };
    assert_eq!(groups().await, "system:nodes");
    let ctx = world.registry.own_context::<Node>();
    let delete = Intent::Delete { options: Default::default() };
    world.registry.write(&ctx, &Key::new("", "n1"), delete).await.expect("deletes");
    let retired = async || (groups().await == "decapod:retired-nodes").then_some(());
    testkit::wait::found("the certificate ends", retired).await;
    // Another Node of that name does not make it valid again.
    world.create::<Node>("", "n1", json!({})).await;
    assert_eq!(groups().await, "decapod:retired-nodes");
    world.shutdown().await;
}

#[tokio::test]
async fn retired_objects_are_removed_unless_users_changed_them() {
    let world = World::start();
    let reference = |name: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name});
    let group = |name: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": name});
    let foreign = "system:openshift:public-info-viewer";
    let rules = json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/.well-known", "/.well-known/*"]}]});
    world.create::<ClusterRole>("", foreign, rules).await;
    let all = [group("system:authenticated"), group("system:unauthenticated")];
    let binding = json!({"roleRef": reference(foreign), "subjects": all});
    world.create::<ClusterRoleBinding>("", foreign, binding).await;
    let publisher = "system:controller:service-ca-cert-publisher";
    let changed = json!({"roleRef": reference(publisher), "subjects": [group("mine")]});
    world.create::<ClusterRoleBinding>("", publisher, changed).await;
    auth::rbac::bootstrap::reconcile(&world.registry).await.expect("reconciles");

    let role = world.registry.find::<ClusterRole>("", foreign).await.expect("reads");
    let binding = world.registry.find::<ClusterRoleBinding>("", foreign).await.expect("reads");
    assert!(role.is_none() && binding.is_none());
    let kept = world.registry.find::<ClusterRoleBinding>("", publisher).await.expect("reads");
    assert!(kept.is_some());
    world.shutdown().await;
}

#[tokio::test]
async fn the_indexes_follow_the_registry() {
    let world = World::start();
    let rbac = auth::Rbac::start(&world.registry, &world.tasks).await;
    let node = auth::node::NodeAuthorizer::start(&world.registry, &world.tasks).await;
    let jane = UserInfo::new("jane", &[]);
    let asks = question(&jane, "get", "pods", "web", "p");
    assert!(!may(&rbac, &asks).await);
    let rules = json!({"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]});
    world.create::<Role>("web", "reader", rules).await;
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "User", "name": "jane"}],
    });
    world.create::<RoleBinding>("web", "readers", binding).await;
    until(&rbac, &asks, true).await;
    world.delete::<RoleBinding>("web", "readers").await;
    until(&rbac, &asks, false).await;

    let kubelet = UserInfo::new("system:node:n1", &["system:nodes"]);
    let asks = question(&kubelet, "get", "secrets", "web", "password");
    assert!(!may(&node, &asks).await);
    let pod = |node: &str| {
        json!({"spec": {
            "nodeName": node, "containers": [{"name": "c"}],
            "volumes": [{"name": "v", "secret": {"secretName": "password"}}],
        }})
    };
    world.create::<Pod>("web", "p", pod("n1")).await;
    until(&node, &asks, true).await;
    world.delete::<Pod>("web", "p").await;
    until(&node, &asks, false).await;
    // An unscheduled pod grants nothing.
    world.create::<Pod>("web", "p", pod("n1")).await;
    until(&node, &asks, true).await;
    let unplaced = |object: &mut dyn Object| {
        object.expect_mut::<Pod>().spec.get_or_insert_default().node_name = None;
        Ok(())
    };
    world.modify::<Pod>("web", "p", Box::new(unplaced)).await;
    until(&node, &asks, false).await;
    world.shutdown().await;
}

#[tokio::test]
async fn users_grant_only_what_they_hold() {
    let world = World::start();
    let rules = json!({"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]});
    world.create::<ClusterRole>("", "reader", rules.clone()).await;
    let all = json!({"rules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]});
    world.create::<ClusterRole>("", "anything", all).await;
    let subjects = json!([{"kind": "User", "name": "jane"}]);
    let reader = json!({"apiGroup": "", "kind": "ClusterRole", "name": "reader"});
    let binding = json!({"roleRef": reader, "subjects": subjects});
    world.create::<RoleBinding>("web", "jane", binding).await;
    let rbac = auth::Rbac::start(&world.registry, &world.tasks).await;
    let plugin = auth::rbac::NoEscalation::new(rbac.clone(), Arc::new(rbac));

    let jane = UserInfo::new("jane", &["system:authenticated"]);
    let check = async |namespace: &str, object: Box<dyn machinery::Object>, expected: &str| {
        let ctx = match object.kind() {
            "Role" => world.registry.own_context::<Role>(),
            _ => world.registry.own_context::<RoleBinding>(),
        };
        let ctx = apiserver::request::RequestContext::new(jane.clone(), ctx.resource, "");
        let (key, mut object) = (Key::new(namespace, "x"), object);
        object.meta_mut().name = Some("x".into());
        let attributes = apiserver::admission::Attributes::new(
            &ctx,
            &world.registry,
            apiserver::admission::Operation::Create,
            &key,
            Some(&mut object),
            None,
            &serde_json::Value::Null,
        );
        let got = apiserver::admission::Plugin::validate(&plugin, &attributes).await;
        let got = got.err().map(|error| error.message.clone()).unwrap_or_default();
        assert_eq!(got, expected);
    };
    let role = |rules: &serde_json::Value| -> Box<dyn machinery::Object> {
        Box::new(serde_json::from_value::<Role>(rules.clone()).expect("a role"))
    };
    let binding = |kind: &str, name: &str| -> Box<dyn machinery::Object> {
        let binding = json!({"roleRef": {"apiGroup": "", "kind": kind, "name": name}});
        Box::new(serde_json::from_value::<RoleBinding>(binding).expect("a binding"))
    };
    check("web", role(&rules), "").await;
    let more = r#"roles.rbac.authorization.k8s.io "x" is forbidden: user "jane" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
{APIGroups:[""], Resources:["pods"], Verbs:["get"]}"#;
    check("other", role(&rules), more).await;
    check("web", binding("ClusterRole", "reader"), "").await;
    let more = r#"rolebindings.rbac.authorization.k8s.io "x" is forbidden: user "jane" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
{APIGroups:["*"], Resources:["*"], Verbs:["*"]}"#;
    check("web", binding("ClusterRole", "anything"), more).await;
    let none = r#"rolebindings.rbac.authorization.k8s.io "missing" not found"#;
    check("web", binding("Role", "missing"), none).await;
    world.shutdown().await;
}

#[tokio::test]
async fn a_token_is_valid_while_its_pod_exists() {
    use auth::tokens::TokenAuthenticator;
    let root = tempfile::tempdir().expect("a temporary directory");
    let pki = pki::Pki::open_or_create(root.path()).expect("creates");
    let issuer = "https://kubernetes.default.svc.cluster.local";
    let keys = auth::service_account::TokenKeys::of_cluster(&pki, issuer).expect("keys");
    let world = World::start();
    let account = world.create::<ServiceAccount>("web", "bot", json!({})).await;
    world.create::<Node>("", "n1", json!({})).await;
    let spec = json!({"nodeName": "n1", "serviceAccountName": "bot", "containers": []});
    world.create::<Pod>("web", "p", json!({"spec": spec})).await;

    let mint = auth::service_account::TokenRequests::new(keys.clone(), Default::default());
    let ask = async |body: serde_json::Value| {
        let request: TokenRequest = serde_json::from_value(body).expect("a TokenRequest");
        let ctx = world.registry.own_context::<ServiceAccount>();
        let key = Key::new("web", "bot");
        let created = mint.create(&world.registry, &ctx, &key, Box::new(request)).await;
        created.map(|created| match created {
            Created::Object(object) => {
                let request = object.downcast::<TokenRequest>().expect("the kind");
                request.status.clone().and_then(|status| status.token).expect("a token")
            }
            Created::Success => panic!("an answer without a token"),
        })
    };
    let bound = json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p"}});
    let token = ask(json!({"spec": bound})).await.expect("a token");
    let foreign = ask(json!({"spec": {"audiences": ["vault"]}})).await.expect("a token");
    let short = ask(json!({"spec": {"expirationSeconds": 60}})).await.expect_err("too short");
    assert!(short.message.contains("may not specify a duration less than 10 minutes"), "{short}");

    let accounts = auth::service_account::ServiceAccounts::new(world.registry.clone(), keys);
    let ours = [issuer.to_owned()];
    let found = accounts.recognize(&token, &ours).await.expect("valid").expect("recognized");
    assert_eq!(found.user.name, "system:serviceaccount:web:bot");
    assert_eq!(Some(&found.user.uid), account.metadata.uid.as_ref());
    assert_eq!(found.user.extra["authentication.kubernetes.io/node-name"], ["n1"]);
    assert!(accounts.recognize(&foreign, &ours).await.is_err());
    let vault = accounts.recognize(&foreign, &["vault".to_owned()]).await;
    assert_eq!(vault.expect("valid").expect("recognized").audiences, ["vault"]);
    assert_eq!(accounts.recognize("opaque", &ours).await.expect("not ours"), None);

    world.delete::<Pod>("web", "p").await;
    assert!(accounts.recognize(&token, &ours).await.is_err(), "its pod is gone");
    world.shutdown().await;
}

#[tokio::test]
async fn the_clusters_token_lets_a_node_join() {
    use auth::tokens::TokenAuthenticator;
    let world = World::start();
    let token = pki::BootstrapToken::from_secret("anything");
    for _ in 0..2 {
        auth::bootstrap_token::ensure(&world.registry, &token).await.expect("exists");
    }
    let tokens = auth::bootstrap_token::BootstrapTokens::new(world.registry.clone());
    let found = tokens.recognize(&token.to_string(), &[]).await.expect("reads").expect("known");
    assert_eq!(found.user.name, format!("system:bootstrap:{}", token.id));
    let other = pki::BootstrapToken { secret: "0123456789abcdef".into(), ..token };
    assert_eq!(tokens.recognize(&other.to_string(), &[]).await.expect("reads"), None);
    world.shutdown().await;
}
