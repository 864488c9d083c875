//! Every bootstrap role × every resource × every verb, compared with upstream's empty cluster.
//!
//! In: our table of roles, and upstream's objects as recorded. The recorded rules have their own
//! evaluation here, so that a mistake of the index is not repeated.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use apiserver::authz::{Attributes, Decision};
use apiserver::request::{RequestInfo, UserInfo};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use serde_json::{Value, json};

use super::bootstrap::policy;
use super::index::Index;

const VERBS: [&str; 14] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "impersonate",
    "bind",
    "escalate",
    "approve",
    "sign",
    "use",
];
const PATHS: [&str; 10] = [
    "/api",
    "/apis/apps",
    "/healthz",
    "/livez/etcd",
    "/metrics",
    "/openapi/v3/api/v1",
    "/version",
    "/version/",
    "/logs/x",
    "/",
];

fn spec(file: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/spec").join(file);
    path.exists().then_some(path)
}

/// Upstream's objects and the resources that upstream serves.
fn recorded() -> Option<(Value, Vec<(String, String)>)> {
    let golden = std::fs::File::open(spec("golden/empty-cluster.json.gz")?).ok()?;
    let golden = serde_json::from_reader(flate2::read::GzDecoder::new(golden)).expect("JSON");
    let discovery =
        std::fs::read_to_string(spec(&format!("discovery-v{}.json", release::KUBERNETES.short))?)
            .expect("reads");
    let discovery: Value = serde_json::from_str(&discovery).expect("JSON");
    Some((golden, resources(&discovery)))
}

/// Groups and resources, subresources included, and kinds that only authorization knows.
fn resources(discovery: &Value) -> Vec<(String, String)> {
    let mut all = vec![
        (String::new(), "users".to_owned()),
        (String::new(), "groups".to_owned()),
        ("certificates.k8s.io".to_owned(), "signers".to_owned()),
        ("example.com".to_owned(), "widgets".to_owned()),
    ];
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for group in list(&discovery["items"]) {
        let name = group["metadata"]["name"].as_str().unwrap_or_default();
        for version in list(&group["versions"]) {
            for resource in list(&version["resources"]) {
                let plural = resource["resource"].as_str().expect("a name");
                all.push((name.to_owned(), plural.to_owned()));
                for sub in list(&resource["subresources"]) {
                    let sub = sub["subresource"].as_str().expect("a name");
                    all.push((name.to_owned(), format!("{plural}/{sub}")));
                }
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

/// The roles with the rules that the aggregation controller would add.
fn aggregated() -> Vec<ClusterRole> {
    let mut roles = policy().cluster_roles;
    // An aggregated role may collect other aggregated roles.
    for _ in 0..4 {
        let before = roles.clone();
        for role in &mut roles {
            let Some(rule) = &role.aggregation_rule else { continue };
            let mut rules: Vec<PolicyRule> = vec![];
            for selector in rule.cluster_role_selectors.iter().flatten() {
                let wanted = selector.match_labels.clone().unwrap_or_default();
                let has = |one: &&ClusterRole| {
                    let labels = one.metadata.labels.clone().unwrap_or_default();
                    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
                };
                rules.extend(
                    before.iter().filter(has).flat_map(|one| one.rules.clone().unwrap_or_default()),
                );
            }
            role.rules = Some(rules);
        }
    }
    roles
}

/// Whether recorded rules allow a request, by the words of the documentation.
fn says_yes(rules: &Value, request: &RequestInfo) -> bool {
    let has = |rule: &Value, field: &str, wanted: &dyn Fn(&str) -> bool| {
        let mut list = rule[field].as_array().into_iter().flatten().filter_map(Value::as_str);
        list.any(|one| one == "*" || wanted(one))
    };
    let full = match request.subresource.as_str() {
        "" => request.resource.clone(),
        sub => format!("{}/{sub}", request.resource),
    };
    let any_parent = format!("*/{}", request.subresource);
    rules.as_array().into_iter().flatten().any(|rule| {
        if !has(rule, "verbs", &|one| one == request.verb) {
            return false;
        }
        if !request.is_resource {
            return has(rule, "nonResourceURLs", &|one| match one.strip_suffix('*') {
                Some(front) => request.path.starts_with(front),
                None => one == request.path,
            });
        }
        let names = rule["resourceNames"].as_array().map_or(&[][..], Vec::as_slice);
        has(rule, "apiGroups", &|one| one == request.group)
            && has(rule, "resources", &|one| {
                one == full || (!request.subresource.is_empty() && one == any_parent)
            })
            && (names.is_empty() || names.iter().any(|name| *name == request.name))
    })
}

/// The names in rules, and one that is in none.
fn names(rules: &Value) -> Vec<String> {
    let mut all = vec![String::new(), "another".to_owned()];
    for rule in rules.as_array().into_iter().flatten() {
        let named = rule["resourceNames"].as_array().into_iter().flatten();
        all.extend(named.filter_map(Value::as_str).map(str::to_owned));
    }
    all.sort();
    all.dedup();
    all
}

#[test]
fn every_role_allows_the_same_as_upstreams() {
    let Some((golden, resources)) = recorded() else {
        println!("skipped: the specification is not beside the repository");
        return;
    };
    let mut index = Index::default();
    let ours = aggregated();
    for role in &ours {
        let name = role.metadata.name.clone().expect("a name");
        index.put_cluster_role(role.clone());
        let binding = json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "User", "name": name}],
        });
        index.put_cluster_binding(serde_json::from_value(binding).expect("a binding"));
    }
    let theirs = golden["clusterroles.v1.rbac.authorization.k8s.io"]["items"].as_array();
    let theirs: BTreeMap<&str, &Value> = theirs
        .expect("a list")
        .iter()
        .map(|role| (role["metadata"]["name"].as_str().expect("a name"), &role["rules"]))
        // The recorded cluster was a distribution's.
        .filter(|(name, _)| !name.contains("openshift") && !name.contains("service-ca-cert"))
        .collect();
    let (mut asked, mut allowed) = (0_u64, 0_u64);
    for (role, rules) in &theirs {
        let mut ask = |request: RequestInfo| {
            let expected = says_yes(rules, &request);
            let attributes = Attributes { user: UserInfo::new(*role, &[]), request };
            let got = matches!(index.decide(&attributes), Decision::Allow { .. });
            assert_eq!(got, expected, "{role}: {:?}", attributes.request);
            asked += 1;
            allowed += u64::from(got);
        };
        for (group, resource) in &resources {
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            for verb in VERBS {
                for name in names(rules) {
                    ask(RequestInfo {
                        is_resource: true,
                        verb: verb.into(),
                        group: group.clone(),
                        resource: resource.into(),
                        subresource: subresource.into(),
                        name,
                        ..RequestInfo::default()
                    });
                }
            }
        }
        for path in PATHS {
            for verb in ["get", "post"] {
                let (verb, path) = (verb.to_owned(), path.to_owned());
                ask(RequestInfo { verb, path, ..RequestInfo::default() });
            }
        }
    }
    assert!(theirs.len() > 60 && asked > 100_000 && allowed > 1000, "{asked} {allowed}");
    println!("{} roles, {asked} questions, {allowed} allowed", theirs.len());
}

#[test]
fn bindings_of_other_users_cost_nothing() {
    const OTHERS: usize = 10_000;
    let mut index = Index::default();
    let role = json!({"metadata": {"name": "reader"},
                      "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]});
    index.put_cluster_role(serde_json::from_value(role).expect("a role"));
    let bind = |index: &mut Index, user: &str, name: &str| {
        let binding = json!({
            "metadata": {"name": name, "namespace": "web"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"},
            "subjects": [{"kind": "User", "name": user}],
        });
        index.put_binding(serde_json::from_value(binding).expect("a binding"));
    };
    bind(&mut index, "jane", "jane");
    let question = |user: &str| Attributes {
        user: UserInfo::new(user, &["system:authenticated"]),
        request: RequestInfo {
            is_resource: true,
            verb: "get".into(),
            resource: "pods".into(),
            namespace: "web".into(),
            ..RequestInfo::default()
        },
    };
    // Counts the work instead of timing it: the bindings that a decision reads.
    let looked_at = |index: &Index, user: &str| index.bindings_of(&question(user).user, "web");
    let before = looked_at(&index, "jane");
    for number in 0..OTHERS {
        bind(&mut index, &format!("user-{number}"), &format!("binding-{number}"));
    }
    assert_eq!((before, looked_at(&index, "jane")), (1, 1));
    assert_eq!(looked_at(&index, "nobody"), 0);
    assert!(matches!(index.decide(&question("jane")), Decision::Allow { .. }));
    assert!(matches!(index.decide(&question("user-9999")), Decision::Allow { .. }));
    assert!(matches!(index.decide(&question("nobody")), Decision::NoOpinion { .. }));
    for number in 0..OTHERS {
        index.remove_binding("web", &format!("binding-{number}"));
    }
    assert!(matches!(index.decide(&question("user-9999")), Decision::NoOpinion { .. }));
}
