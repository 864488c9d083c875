//! Writes of a role or a binding that would grant more than the writer holds are refused.

use std::sync::Arc;

use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::request::{Key, RequestContext, UserInfo};
use decapod_auth::Rbac;
use decapod_auth::rbac::NoEscalation;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, RoleBinding};
use machinery::Object;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::World;

/// The method of a write.
#[derive(Clone, Copy, PartialEq)]
enum By {
    /// A create without a name in its path.
    Post,
    /// An update, or an apply that creates.
    Put,
}

struct Judge<'a> {
    world: &'a World,
    plugin: NoEscalation,
}

impl Judge<'_> {
    /// The plugin's refusal of a write of `x`; empty if it is allowed.
    async fn says<T>(&self, user: &UserInfo, by: By, old: Option<Value>, new: Value) -> String
    where
        T: k8s_openapi::Resource + Object + DeserializeOwned,
    {
        let read = |value: Value| -> Box<dyn Object> {
            let mut object: T = serde_json::from_value(value).expect("an object of the kind");
            object.meta_mut().name = Some("x".into());
            Box::new(object)
        };
        let row = self.world.registry.own_context::<T>().resource;
        let namespace = if row.namespaced { "web" } else { "" };
        let mut ctx = RequestContext::new(user.clone(), row, "");
        if by == By::Put {
            ctx.may_create = Some(Arc::new(|| Box::pin(async { Ok(()) })));
        }
        let operation = if old.is_some() { Operation::Update } else { Operation::Create };
        let (key, old, mut new) = (Key::new(namespace, "x"), old.map(read), read(new));
        let attributes = Attributes::new(
            &ctx,
            &self.world.registry,
            operation,
            &key,
            Some(&mut new),
            old.as_deref(),
            &Value::Null,
        );
        let got = self.plugin.validate(&attributes).await;
        got.err().map(|error| error.message.clone()).unwrap_or_default()
    }

    async fn check<T>(&self, user: &UserInfo, by: By, old: Option<Value>, new: Value, part: &str)
    where
        T: k8s_openapi::Resource + Object + DeserializeOwned,
    {
        let case = format!("{} writes {old:?} -> {new}", user.name);
        let got = self.says::<T>(user, by, old, new).await;
        match part {
            "" => assert_eq!(got, "", "{case}"),
            part => assert!(got.contains(part), "{case}: {got:?} lacks {part:?}"),
        }
    }
}

/// `writer` may write roles and bindings and holds nothing else. `namer` may escalate the ClusterRole
/// `x` and bind the ClusterRole `anything`. `root` holds everything, by RBAC.
async fn judge(world: &World) -> Judge<'_> {
    let group = "rbac.authorization.k8s.io";
    let roles = [
        (
            "writer",
            json!([{
                "verbs": ["create", "update", "patch", "get", "list", "watch"],
                "apiGroups": [group],
                "resources": ["clusterroles", "clusterrolebindings", "rolebindings"],
            }]),
        ),
        (
            "namer",
            json!([
                {"verbs": ["escalate"], "apiGroups": [group], "resources": ["clusterroles"],
                 "resourceNames": ["x"]},
                {"verbs": ["bind"], "apiGroups": [group], "resources": ["clusterroles"],
                 "resourceNames": ["anything"]},
            ]),
        ),
        (
            "root",
            json!([
                {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
                {"verbs": ["*"], "nonResourceURLs": ["*"]},
            ]),
        ),
        ("anything", json!([{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}])),
    ];
    for (name, rules) in roles {
        world.create::<ClusterRole>("", name, json!({"rules": rules})).await;
        let binding = json!({
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "User", "name": name}],
        });
        world.create::<ClusterRoleBinding>("", name, binding).await;
    }
    let rbac = Rbac::start(&world.registry, &world.tasks).await;
    Judge { world, plugin: NoEscalation::new(rbac.clone(), Arc::new(rbac)) }
}

fn selecting(selectors: Value) -> Value {
    json!({"aggregationRule": {"clusterRoleSelectors": selectors}})
}

const NOT_HELD: &str = "is attempting to grant RBAC permissions not currently held";
const NOT_ADMIN: &str = "must have cluster-admin privileges to use the aggregationRule";

#[tokio::test]
async fn an_aggregation_rule_needs_full_authority() {
    let world = World::start();
    let judge = judge(&world).await;
    let user = |name: &str| UserInfo::new(name, &["system:authenticated"]);
    let (writer, namer, root) = (user("writer"), user("namer"), user("root"));
    let anything = user("anything");
    let everything =
        selecting(json!([{"matchExpressions": [{"key": "nope", "operator": "DoesNotExist"}]}]));
    let (plain, empty) = (json!({"rules": []}), selecting(json!([])));
    let cases: [(&UserInfo, By, Option<&Value>, &Value, &str); 13] = [
        // The attack of the report: a patch that adds the rule, and the same by create and by apply.
        (&writer, By::Put, Some(&plain), &everything, NOT_ADMIN),
        (&writer, By::Post, None, &everything, NOT_ADMIN),
        (&writer, By::Put, None, &everything, NOT_ADMIN),
        // The removal of the rule, or a change of a label beside it, needs the same.
        (&writer, By::Put, Some(&everything), &plain, NOT_ADMIN),
        (&writer, By::Put, Some(&everything), &empty, NOT_ADMIN),
        // A rule without selectors collects nothing.
        (&writer, By::Put, Some(&plain), &empty, ""),
        (&writer, By::Post, None, &empty, ""),
        // All verbs on all resources include `escalate`.
        (&anything, By::Put, Some(&plain), &everything, ""),
        (&root, By::Put, Some(&plain), &everything, ""),
        (&root, By::Post, None, &everything, ""),
        // A right to escalate `x` applies if the request names `x`.
        (&namer, By::Put, Some(&plain), &everything, ""),
        (&namer, By::Put, None, &everything, ""),
        (&namer, By::Post, None, &everything, NOT_ADMIN),
    ];
    for (user, by, old, new, part) in cases {
        judge.check::<ClusterRole>(user, by, old.cloned(), new.clone(), part).await;
    }
    world.shutdown().await;
}

#[tokio::test]
async fn a_write_that_leaves_the_rules_is_checked_too() {
    let world = World::start();
    let judge = judge(&world).await;
    let writer = UserInfo::new("writer", &["system:authenticated"]);
    let more = json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]);
    let role = |metadata: Value| json!({"metadata": metadata, "rules": more});
    let old = role(json!({"labels": {"a": "b"}}));
    let aggregated = json!({"labels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}});
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"}]);
    let collected = json!({"labels": {"a": "b"}, "finalizers": ["x/y"], "ownerReferences": owner});
    for (new, part) in [(role(aggregated), NOT_HELD), (role(collected), "")] {
        judge.check::<ClusterRole>(&writer, By::Put, Some(old.clone()), new, part).await;
    }

    let binding = |role: &str, metadata: Value| {
        let reference =
            json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role});
        json!({"metadata": metadata, "roleRef": reference, "subjects": []})
    };
    let old = binding("anything", json!({}));
    let labelled = binding("anything", json!({"labels": {"a": "b"}}));
    let namer = UserInfo::new("namer", &["system:authenticated"]);
    for (user, part) in [(&writer, NOT_HELD), (&namer, "")] {
        let (old, new) = (Some(old.clone()), labelled.clone());
        judge.check::<ClusterRoleBinding>(user, By::Put, old.clone(), new.clone(), part).await;
        judge.check::<RoleBinding>(user, By::Put, old, new.clone(), part).await;
        judge.check::<RoleBinding>(user, By::Post, None, new, part).await;
    }
    let missing = r#"clusterrolebindings.rbac.authorization.k8s.io "missing" not found"#;
    let new = binding("missing", json!({}));
    judge.check::<ClusterRoleBinding>(&writer, By::Post, None, new, missing).await;
    world.shutdown().await;
}
