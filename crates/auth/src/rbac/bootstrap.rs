//! The bootstrap roles and bindings of every cluster, reconciled at every start.
//!
//! In: the table `policy.txt` (facts of upstream's bootstrap policy). Out: API objects, and writes
//! through the registry that add what is missing. Objects whose annotation
//! `rbac.authorization.kubernetes.io/autoupdate` is `false` are not changed; rules and subjects that
//! users added stay. Upstream: `rbac/reconciliation`.
//!
//! Deviation: objects of `retired.txt`, which earlier versions created and upstream does not have, are
//! removed, unless users changed them. Upstream removes nothing.

use std::collections::BTreeMap;

use apiserver::registry::Intent;
use apiserver::request::{Key, RequestContext};
use apiserver::{Registry, StatusError};
use futures::StreamExt;
use k8s_openapi::api::rbac::v1::{
    AggregationRule, ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef,
    Subject,
};
use machinery::status::Reason;
use machinery::{LabelSelector, Object, ObjectMeta};
use release::features::{self, Feature};

use super::index::rule_of;
use super::{broken_down, is_covered};

const TABLE: &str = include_str!("policy.txt");
const RETIRED: &str = include_str!("retired.txt");
const API_GROUP: &str = "rbac.authorization.k8s.io";
const AUTOUPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";
/// Concurrent writes: enough to share the store's syncs.
const AT_ONCE: usize = 32;

/// The bootstrap objects.
#[derive(Default)]
pub struct Policy {
    pub cluster_roles: Vec<ClusterRole>,
    pub roles: Vec<Role>,
    pub cluster_role_bindings: Vec<ClusterRoleBinding>,
    pub role_bindings: Vec<RoleBinding>,
}

/// Parses the table into objects.
///
/// # Panics
/// If the table is malformed, which its test excludes.
pub fn policy() -> Policy {
    parse(TABLE)
}

fn parse(table: &str) -> Policy {
    let mut policy = Policy::default();
    // Whether rules belong to the last Role, not to the last ClusterRole.
    let mut in_role = false;
    let lines = table.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    for line in lines.filter_map(open_line) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [..] if line.starts_with(' ') => {
                let rules = match in_role {
                    true => policy.roles.last_mut().map(|role| &mut role.rules),
                    false => policy.cluster_roles.last_mut().map(|role| &mut role.rules),
                };
                let rules = rules.expect("rules follow their role");
                rules.get_or_insert_default().push(parse_rule(&words));
            }
            ["ClusterRole", name, flags @ ..] => {
                in_role = false;
                policy.cluster_roles.push(cluster_role(name, flags));
            }
            ["Role", place] => {
                in_role = true;
                let (metadata, rules) = (namespaced(place), Some(vec![]));
                policy.roles.push(Role { metadata, rules });
            }
            ["ClusterRoleBinding", name, role, subjects @ ..] => {
                policy.cluster_role_bindings.push(ClusterRoleBinding {
                    metadata: metadata(name),
                    role_ref: role_ref("ClusterRole", role),
                    subjects: parse_subjects(subjects),
                });
            }
            ["RoleBinding", place, role, subjects @ ..] => {
                let (kind, role) = role.split_once(':').expect("KIND:ROLE");
                policy.role_bindings.push(RoleBinding {
                    metadata: namespaced(place),
                    role_ref: role_ref(kind, role),
                    subjects: parse_subjects(subjects),
                });
            }
            other => panic!("malformed line of the policy table: {other:?}"),
        }
    }
    policy
}

/// The line without its gate; `None` if the gate is disabled.
fn open_line(line: &str) -> Option<&str> {
    let Some((line, gate)) = line.rsplit_once(" gate=") else { return Some(line) };
    let gate = Feature::parse(gate).expect("the table names gates");
    features::enabled(gate).then_some(line)
}

/// The rules of one of the table's ClusterRoles.
pub(crate) fn rules_of_cluster_role(name: &str) -> Vec<apiserver::authz::PolicyRule> {
    let role = policy().cluster_roles.into_iter().find(|role| role.name() == name);
    role.and_then(|role| role.rules).unwrap_or_default().into_iter().map(rule_of).collect()
}

fn cluster_role(name: &str, flags: &[&str]) -> ClusterRole {
    let mut role =
        ClusterRole { metadata: metadata(name), rules: Some(vec![]), ..ClusterRole::default() };
    for flag in flags {
        match flag.split_once('=').expect("to=ROLE or from=ROLE") {
            ("to", other) => {
                let labels = role.metadata.labels.get_or_insert_default();
                labels.insert(aggregate_label(other), "true".into());
            }
            (_, other) => {
                let selector = LabelSelector {
                    match_labels: Some([(aggregate_label(other), "true".to_owned())].into()),
                    ..LabelSelector::default()
                };
                let rule = AggregationRule { cluster_role_selectors: Some(vec![selector]) };
                role.aggregation_rule = Some(rule);
                // The aggregation controller writes them.
                role.rules = None;
            }
        }
    }
    role
}

fn aggregate_label(role: &str) -> String {
    format!("rbac.authorization.k8s.io/aggregate-to-{role}")
}

fn metadata(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        labels: Some(
            [("kubernetes.io/bootstrapping".to_owned(), "rbac-defaults".to_owned())].into(),
        ),
        annotations: Some([(AUTOUPDATE.to_owned(), "true".to_owned())].into()),
        ..ObjectMeta::default()
    }
}

/// `NAMESPACE/NAME`
fn namespaced(place: &str) -> ObjectMeta {
    let (namespace, name) = place.split_once('/').expect("NAMESPACE/NAME");
    ObjectMeta { namespace: Some(namespace.into()), ..metadata(name) }
}

fn role_ref(kind: &str, name: &str) -> RoleRef {
    RoleRef { api_group: Some(API_GROUP.into()), kind: kind.into(), name: name.into() }
}

fn parse_rule(words: &[&str]) -> PolicyRule {
    let list = |text: &str| -> Vec<String> {
        text.split(',').map(|one| if one == "core" { "" } else { one }.to_owned()).collect()
    };
    let mut rule = PolicyRule { verbs: list(words[0]), ..PolicyRule::default() };
    match words[1..] {
        [urls] => {
            rule.non_resource_urls = Some(list(urls.strip_prefix("url=").expect("url=PATHS")));
        }
        [groups, resources, ref names @ ..] => {
            rule.api_groups = Some(list(groups));
            rule.resources = Some(list(resources));
            let names =
                names.first().map(|names| names.strip_prefix("names=").expect("names=NAMES"));
            rule.resource_names = names.map(list);
        }
        [] => panic!("a rule of the policy table has verbs only"),
    }
    rule
}

fn parse_subjects(words: &[&str]) -> Option<Vec<Subject>> {
    let subject = |word: &&str| {
        let (kind, name) = word.split_once(':').expect("KIND:NAME");
        match kind {
            "ServiceAccount" => {
                let (namespace, name) = name.split_once('/').expect("NAMESPACE/NAME");
                let (kind, name) = (kind.to_owned(), name.to_owned());
                Subject { api_group: None, kind, name, namespace: Some(namespace.into()) }
            }
            _ => Subject {
                api_group: Some(API_GROUP.into()),
                kind: kind.into(),
                name: name.into(),
                namespace: None,
            },
        }
    };
    (!words.is_empty()).then(|| words.iter().map(subject).collect())
}

/// Creates missing objects and completes existing ones. The namespaces kube-system and kube-public must
/// exist. An object that cannot be written is logged, and the others are still written; an error means
/// that the store does not answer.
pub async fn reconcile(registry: &Registry) -> Result<(), StatusError> {
    let policy = policy();
    let mut all = vec![];
    all.extend(
        policy.cluster_roles.into_iter().map(|one| desired(registry, one, cluster_role_lacks)),
    );
    all.extend(policy.roles.into_iter().map(|one| desired(registry, one, role_lacks)));
    let bindings = policy.cluster_role_bindings.into_iter();
    all.extend(bindings.map(|one| desired(registry, one, cluster_binding_lacks)));
    all.extend(policy.role_bindings.into_iter().map(|one| desired(registry, one, binding_lacks)));
    let writes = all.into_iter().map(async |one: Desired| {
        let what = format!("{} {}", one.ctx.resource.kind, one.object.name());
        (what, ensure(registry, one).await)
    });
    let mut writes = futures::stream::iter(writes).buffer_unordered(AT_ONCE);
    while let Some((what, result)) = writes.next().await {
        match result {
            Ok(()) => {}
            Err(error) if error.is(Reason::ServiceUnavailable) => return Err(error),
            Err(error) => {
                tracing::warn!(what, %error, "failed to write a bootstrap role or binding");
            }
        }
    }
    drop(writes);
    withdraw_pods_from_dns(registry).await?;
    retire(registry).await
}

/// Earlier versions gave the DNS server the role of the usual add-on, which reads whole pods. The role
/// and other bindings to it stay if an add-on uses them.
async fn withdraw_pods_from_dns(registry: &Registry) -> Result<(), StatusError> {
    const FORMER: &str = "system:coredns";
    const USER: &str = "system:kube-dns";
    let is_dns = |subject: &Subject| subject.kind == "User" && subject.name == USER;
    let found = registry.find::<ClusterRoleBinding>("", FORMER).await?;
    let subjects = found.as_ref().and_then(|binding| binding.subjects.as_deref());
    let subjects = subjects.unwrap_or_default();
    if !subjects.iter().any(is_dns) || found.as_ref().is_some_and(|one| is_frozen(&one.metadata)) {
        return Ok(());
    }
    let (key, binding) = (Key::new("", FORMER), registry.own_context::<ClusterRoleBinding>());
    let is_shared = !subjects.iter().all(is_dns);
    if is_shared {
        let modify = move |present: &mut dyn Object| {
            let subjects = &mut present.expect_mut::<ClusterRoleBinding>().subjects;
            subjects.get_or_insert_default().retain(|subject| !is_dns(subject));
            Ok(())
        };
        registry.write(&binding, &key, Intent::Modify(Box::new(modify))).await?;
        return Ok(());
    }
    for ctx in [binding, registry.own_context::<ClusterRole>()] {
        match registry.write(&ctx, &key, Intent::Delete { options: Default::default() }).await {
            Err(error) if error.is(Reason::NotFound) => {}
            other => drop(other?),
        }
    }
    Ok(())
}

/// Removes unchanged objects of earlier versions. Bindings go first.
async fn retire(registry: &Registry) -> Result<(), StatusError> {
    let retired = parse(RETIRED);
    for binding in retired.cluster_role_bindings {
        let is_as_made = |there: &ClusterRoleBinding| {
            there.subjects == binding.subjects && there.role_ref == binding.role_ref
        };
        remove(registry, binding.name(), is_as_made).await?;
    }
    for role in retired.cluster_roles {
        let is_as_made = |there: &ClusterRole| there.rules == role.rules;
        remove(registry, role.name(), is_as_made).await?;
    }
    Ok(())
}

async fn remove<T>(
    registry: &Registry,
    name: &str,
    is_as_made: impl Fn(&T) -> bool,
) -> Result<(), StatusError>
where
    T: Object + k8s_openapi::Metadata<Ty = ObjectMeta> + Clone,
{
    let Some(there) = registry.find::<T>("", name).await? else { return Ok(()) };
    if is_frozen(there.metadata()) || !is_as_made(&there) {
        tracing::warn!(
            kind = T::KIND,
            name,
            "keeping a changed bootstrap object of an earlier version that upstream does not have"
        );
        return Ok(());
    }
    tracing::info!(
        kind = T::KIND,
        name,
        "removing a bootstrap object of an earlier version that upstream does not have"
    );
    let (ctx, key) = (registry.own_context::<T>(), Key::new("", name));
    match registry.write(&ctx, &key, Intent::Delete { options: Default::default() }).await {
        Err(error) if error.is(Reason::NotFound) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Adds the missing parts of the first object to the second, of the same kind. Returns true if the second
/// must be recreated instead.
type Complete = fn(&dyn Object, &mut dyn Object) -> bool;

struct Desired {
    ctx: RequestContext,
    object: Box<dyn Object>,
    complete: Complete,
}

fn desired<T>(registry: &Registry, object: T, complete: Complete) -> Desired
where
    T: k8s_openapi::Resource + Object,
{
    Desired { ctx: registry.own_context::<T>(), object: Box::new(object), complete }
}

async fn ensure(registry: &Registry, desired: Desired) -> Result<(), StatusError> {
    let Desired { ctx, object, complete } = desired;
    let key = Key::new(object.namespace(), object.name());
    let create = || Intent::Create { object: object.boxed_clone() };
    // Reads first: a start without changes needs no store that accepts writes.
    let present = match registry.get(&ctx.resource, &key, None).await {
        Ok(present) => present.object()?,
        Err(error) if error.is(Reason::NotFound) => {
            return match registry.write(&ctx, &key, create()).await {
                Err(error) if !error.is(Reason::AlreadyExists) => Err(error),
                _ => Ok(()),
            };
        }
        Err(error) => return Err(error),
    };
    if is_frozen(present.meta()) {
        return Ok(());
    }
    let mut completed = present.boxed_clone();
    if complete(&*object, &mut *completed) {
        // A role reference is immutable: the binding is recreated.
        registry.write(&ctx, &key, Intent::Delete { options: Default::default() }).await?;
        return registry.write(&ctx, &key, create()).await.map(|_| ());
    }
    if completed.to_value() == present.to_value() {
        return Ok(());
    }
    let wanted = object.boxed_clone();
    let modify = move |present: &mut dyn Object| {
        complete(&*wanted, present);
        Ok(())
    };
    registry.write(&ctx, &key, Intent::Modify(Box::new(modify))).await.map(|_| ())
}

/// Whether users have disabled updates of the object.
fn is_frozen(meta: &ObjectMeta) -> bool {
    let annotation = meta.annotations.as_ref().and_then(|all| all.get(AUTOUPDATE));
    annotation.is_some_and(|value| value == "false")
}

fn cluster_role_lacks(wanted: &dyn Object, present: &mut dyn Object) -> bool {
    let (wanted, present) = (wanted.expect::<ClusterRole>(), present.expect_mut::<ClusterRole>());
    complete_meta(&wanted.metadata, &mut present.metadata);
    if wanted.aggregation_rule.is_some() && present.aggregation_rule.is_none() {
        present.aggregation_rule = wanted.aggregation_rule.clone();
    }
    complete_rules(&wanted.rules, &mut present.rules);
    false
}

fn role_lacks(wanted: &dyn Object, present: &mut dyn Object) -> bool {
    let (wanted, present) = (wanted.expect::<Role>(), present.expect_mut::<Role>());
    complete_meta(&wanted.metadata, &mut present.metadata);
    complete_rules(&wanted.rules, &mut present.rules);
    false
}

fn cluster_binding_lacks(wanted: &dyn Object, present: &mut dyn Object) -> bool {
    let wanted = wanted.expect::<ClusterRoleBinding>();
    let present = present.expect_mut::<ClusterRoleBinding>();
    complete_meta(&wanted.metadata, &mut present.metadata);
    complete_subjects(&wanted.subjects, &mut present.subjects);
    wanted.role_ref != present.role_ref
}

fn binding_lacks(wanted: &dyn Object, present: &mut dyn Object) -> bool {
    let (wanted, present) = (wanted.expect::<RoleBinding>(), present.expect_mut::<RoleBinding>());
    complete_meta(&wanted.metadata, &mut present.metadata);
    complete_subjects(&wanted.subjects, &mut present.subjects);
    wanted.role_ref != present.role_ref
}

fn complete_meta(wanted: &ObjectMeta, meta: &mut ObjectMeta) {
    type Map = Option<BTreeMap<String, String>>;
    let merge = |wanted: &Map, have: &mut Map| {
        for (key, value) in wanted.iter().flatten() {
            have.get_or_insert_default().entry(key.clone()).or_insert_with(|| value.clone());
        }
    };
    merge(&wanted.labels, &mut meta.labels);
    merge(&wanted.annotations, &mut meta.annotations);
}

fn complete_rules(wanted: &Option<Vec<PolicyRule>>, rules: &mut Option<Vec<PolicyRule>>) {
    for rule in wanted.iter().flatten() {
        let held: Vec<_> = rules.iter().flatten().cloned().map(rule_of).collect();
        let parts = broken_down(&rule_of(rule.clone()));
        if !parts.iter().all(|part| is_covered(&held, part)) {
            rules.get_or_insert_default().push(rule.clone());
        }
    }
}

fn complete_subjects(wanted: &Option<Vec<Subject>>, subjects: &mut Option<Vec<Subject>>) {
    for subject in wanted.iter().flatten() {
        let list = subjects.get_or_insert_default();
        if !list.contains(subject) {
            list.push(subject.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use serde_json::Value;

    use super::*;

    /// Our objects besides upstream's.
    const OURS: &[&str] = &[
        "decapod:kube-dns",
        "decapod:kube-proxy",
        "decapod:network-policy",
        "decapod:service-lb",
        "decapod:apiserver-kubelet-client",
        "decapod:kubelet-bootstrap",
        "decapod:node-autoapprove-bootstrap",
        "decapod:node-autoapprove-certificate-rotation",
        "decapod:certificatesigningrequests:node",
        "decapod:node-autoapprove-node",
        "decapod:node-approver",
        "decapod:cluster-info",
        "decapod:cluster-config",
        "decapod:aggregated-metrics-reader",
        "decapod:kube-scheduler-gangs",
    ];

    #[test]
    fn gates_enable_lines() {
        for (is_on, expected) in [(false, 0), (true, 1)] {
            let gates = features::Gates::DEFAULT.with(Feature::ClusterTrustBundle, is_on);
            let policy = features::scoped(gates, policy);
            let roles = policy.cluster_roles.iter().map(Object::name);
            let bindings = policy.cluster_role_bindings.iter().map(Object::name);
            let names: Vec<&str> = roles.chain(bindings).collect();
            let name = "system:cluster-trust-bundle-discovery";
            assert_eq!(names.iter().filter(|one| **one == name).count(), expected * 2);
            let node = policy.cluster_roles.iter().find(|role| role.name() == "system:node");
            let rules = node.and_then(|role| role.rules.as_deref()).expect("rules").iter();
            let mut bundles = rules.flat_map(|rule| rule.resources.iter().flatten());
            assert_eq!(bundles.any(|one| one == "clustertrustbundles"), is_on);
        }
    }

    /// The recorded cluster was a distribution's, which adds objects and rules to upstream's. A test removes
    /// them from the record.
    const FOREIGN: [&str; 3] =
        ["openshift", "service-ca-cert-publisher", "endpointslices/restricted"];

    /// The objects of upstream's own empty cluster, if the specification's folder exists.
    fn golden() -> Option<Value> {
        let spec = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/spec");
        let path = spec.join("golden/empty-cluster.json.gz");
        let file = std::fs::File::open(path).ok()?;
        let mut text = String::new();
        flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("gzip");
        Some(serde_json::from_str(&text).expect("JSON"))
    }

    fn check_kind<T: Object>(golden: &Value, resource: &str, ours: &[T]) {
        let list = &golden[format!("{resource}.v1.rbac.authorization.k8s.io")]["items"];
        let theirs = list.as_array().expect("a list");
        let is_foreign = |value: &Value| {
            let text = value.to_string();
            FOREIGN.iter().any(|foreign| text.contains(foreign))
        };
        for their in theirs.iter().filter(|their| !is_foreign(&their["metadata"])) {
            let mut expected = their.clone();
            if let Some(rules) = expected.get_mut("rules").and_then(Value::as_array_mut) {
                rules.retain(|rule| !is_foreign(rule));
            }
            let metadata = expected["metadata"].as_object_mut().expect("metadata");
            for minted in ["creationTimestamp", "resourceVersion", "uid"] {
                metadata.remove(minted);
            }
            let name = their["metadata"]["name"].as_str().expect("a name");
            let namespace = their["metadata"]["namespace"].as_str().unwrap_or_default();
            let own = ours.iter().find(|one| one.name() == name && one.namespace() == namespace);
            let mut own = own.unwrap_or_else(|| panic!("{resource} {name} is missing")).to_value();
            if expected.get("aggregationRule").is_some() {
                expected.as_object_mut().expect("an object").remove("rules");
            }
            let fields = own.as_object_mut().expect("an object");
            fields.retain(|key, _| key != "kind" && key != "apiVersion");
            assert_eq!(own, expected, "{resource} {name}");
        }
        let known = |one: &&T| theirs.iter().any(|their| their["metadata"]["name"] == one.name());
        for extra in ours.iter().filter(|one| !known(one)) {
            assert!(OURS.contains(&extra.name()), "{resource} {} is not upstream's", extra.name());
        }
    }

    #[test]
    fn the_table_equals_upstreams() {
        let policy = policy();
        assert!(policy.cluster_roles.len() > 70 && policy.cluster_role_bindings.len() > 50);
        let Some(golden) = golden() else {
            println!("skipped: the specification is not beside the repository");
            return;
        };
        check_kind(&golden, "clusterroles", &policy.cluster_roles);
        check_kind(&golden, "roles", &policy.roles);
        check_kind(&golden, "clusterrolebindings", &policy.cluster_role_bindings);
        check_kind(&golden, "rolebindings", &policy.role_bindings);
    }

    /// Upstream's names: those of its own groups, `system:` and its user-facing roles.
    #[test]
    fn no_name_is_of_another_distribution() {
        let policy = policy();
        let names = policy.cluster_roles.iter().map(Object::name);
        let names = names.chain(policy.cluster_role_bindings.iter().map(Object::name));
        for name in names {
            let parts: Vec<&str> = name.split(':').collect();
            let is_known = matches!(
                parts[..],
                ["admin" | "cluster-admin" | "edit" | "view"]
                    | ["decapod" | "system", _]
                    | ["decapod" | "system", "certificatesigningrequests" | "controller", _]
                    | ["system", "certificates.k8s.io", ..]
            );
            assert!(is_known, "{name}");
            assert!(!FOREIGN.iter().any(|foreign| name.contains(foreign)), "{name}");
        }
        assert!(!TABLE.contains("endpointslices/restricted"));
    }

    #[test]
    fn retired_objects_are_not_in_the_table() {
        let (policy, retired) = (policy(), parse(RETIRED));
        assert!(retired.roles.is_empty() && retired.role_bindings.is_empty(), "not looked at");
        for role in &retired.cluster_roles {
            assert!(policy.cluster_roles.iter().all(|one| one.name() != role.name()));
        }
        for binding in &retired.cluster_role_bindings {
            assert!(policy.cluster_role_bindings.iter().all(|one| one.name() != binding.name()));
        }
    }

    #[test]
    fn completing_adds_and_never_removes() {
        let wanted = policy().cluster_roles.into_iter().find(|role| role.name() == "view");
        assert!(wanted.expect("it is in the table").rules.is_none());
        let policy = policy();
        let wanted = &policy.cluster_roles[1];
        let mut present = wanted.clone();
        let own = parse_rule(&["get", "core", "pods"]);
        present.rules = Some(vec![own.clone()]);
        present.metadata.labels = None;
        assert!(!cluster_role_lacks(wanted, &mut present));
        let rules = present.rules.as_ref().expect("rules");
        assert_eq!(rules.len(), 1 + wanted.rules.as_ref().expect("rules").len());
        assert_eq!(rules[0], own);
        assert!(present.metadata.labels.is_some());
        let once = present.clone();
        cluster_role_lacks(wanted, &mut present);
        assert_eq!(present, once, "completing again changes nothing");
    }
}
