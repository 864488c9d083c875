//! The flow schemas and priority levels that every cluster has: as tables, and as objects.
//! Upstream: `pkg/apis/flowcontrol/bootstrap/default.go`.

use k8s_openapi::api::flowcontrol::v1::{
    ExemptPriorityLevelConfiguration, FlowDistinguisherMethod, FlowSchema, FlowSchemaSpec,
    GroupSubject, LimitResponse, LimitedPriorityLevelConfiguration, NonResourcePolicyRule,
    PolicyRulesWithSubjects, PriorityLevelConfiguration, PriorityLevelConfigurationReference,
    PriorityLevelConfigurationSpec, QueuingConfiguration, ResourcePolicyRule,
    ServiceAccountSubject, Subject, UserSubject,
};
use machinery::ObjectMeta;

/// `true` on objects that the server may keep as they are here.
pub const AUTO_UPDATE: &str = "apf.kubernetes.io/autoupdate-spec";

/// These must exist, and as they are here whatever their annotation says.
pub fn is_mandatory(name: &str) -> bool {
    name == apiserver::fairness::EXEMPT || name == apiserver::fairness::CATCH_ALL
}

struct Level {
    name: &'static str,
    shares: i32,
    lendable_percent: i32,
    /// Queues, hand size, length; without them the level rejects.
    queuing: Option<[i32; 3]>,
}

const LEVELS: &[Level] = &[
    level("system", 30, 33, Some([64, 6, 50])),
    level("node-high", 40, 25, Some([64, 6, 50])),
    level("leader-election", 10, 0, Some([16, 4, 50])),
    level("workload-high", 40, 50, Some([128, 6, 50])),
    level("workload-low", 100, 90, Some([128, 6, 50])),
    level("global-default", 20, 50, Some([128, 6, 50])),
    level("catch-all", 5, 0, None),
];

const fn level(
    name: &'static str,
    shares: i32,
    lendable_percent: i32,
    queuing: Option<[i32; 3]>,
) -> Level {
    Level { name, shares, lendable_percent, queuing }
}

enum Who {
    Groups(&'static [&'static str]),
    Users(&'static [&'static str]),
    /// All service accounts of kube-system.
    SystemAccounts,
}

enum What {
    Everything,
    /// Verbs, group, resources, and whether those without a namespace count.
    Resources(&'static [(&'static [&'static str], &'static str, &'static [&'static str], bool)]),
    Paths(&'static [&'static str]),
}

struct Schema {
    name: &'static str,
    level: &'static str,
    precedence: i32,
    distinguisher: Option<&'static str>,
    who: &'static [Who],
    what: What,
}

const BY_USER: Option<&str> = Some("ByUser");
const BY_NAMESPACE: Option<&str> = Some("ByNamespace");
const EVERYBODY: &[Who] = &[Who::Groups(&["system:unauthenticated", "system:authenticated"])];
const NODES: &[Who] = &[Who::Groups(&["system:nodes"])];
const LEASES: &str = "coordination.k8s.io";

const SCHEMAS: &[Schema] = &[
    Schema {
        name: "exempt",
        level: "exempt",
        precedence: 1,
        distinguisher: None,
        who: &[Who::Groups(&["system:masters"])],
        what: What::Everything,
    },
    Schema {
        name: "probes",
        level: "exempt",
        precedence: 2,
        distinguisher: None,
        who: EVERYBODY,
        what: What::Paths(&["/healthz", "/readyz", "/livez"]),
    },
    Schema {
        name: "system-leader-election",
        level: "leader-election",
        precedence: 100,
        distinguisher: BY_USER,
        who: &[
            Who::Users(&["system:kube-controller-manager", "system:kube-scheduler"]),
            Who::SystemAccounts,
        ],
        what: What::Resources(&[(&["get", "create", "update"], LEASES, &["leases"], false)]),
    },
    Schema {
        name: "system-node-high",
        level: "node-high",
        precedence: 400,
        distinguisher: BY_USER,
        who: NODES,
        what: What::Resources(&[
            (&["*"], "", &["nodes", "nodes/status"], true),
            (&["*"], LEASES, &["leases"], false),
        ]),
    },
    Schema {
        name: "system-nodes",
        level: "system",
        precedence: 500,
        distinguisher: BY_USER,
        who: NODES,
        what: What::Everything,
    },
    Schema {
        name: "kube-controller-manager",
        level: "workload-high",
        precedence: 800,
        distinguisher: BY_NAMESPACE,
        who: &[Who::Users(&["system:kube-controller-manager"])],
        what: What::Everything,
    },
    Schema {
        name: "kube-scheduler",
        level: "workload-high",
        precedence: 800,
        distinguisher: BY_NAMESPACE,
        who: &[Who::Users(&["system:kube-scheduler"])],
        what: What::Everything,
    },
    Schema {
        name: "kube-system-service-accounts",
        level: "workload-high",
        precedence: 900,
        distinguisher: BY_NAMESPACE,
        who: &[Who::SystemAccounts],
        what: What::Everything,
    },
    Schema {
        name: "service-accounts",
        level: "workload-low",
        precedence: 9000,
        distinguisher: BY_USER,
        who: &[Who::Groups(&["system:serviceaccounts"])],
        what: What::Everything,
    },
    Schema {
        name: "global-default",
        level: "global-default",
        precedence: 9900,
        distinguisher: BY_USER,
        who: EVERYBODY,
        what: What::Everything,
    },
    Schema {
        name: "catch-all",
        level: "catch-all",
        precedence: 10_000,
        distinguisher: BY_USER,
        who: EVERYBODY,
        what: What::Everything,
    },
];

pub fn levels() -> Vec<PriorityLevelConfiguration> {
    let exempt = PriorityLevelConfigurationSpec {
        type_: "Exempt".into(),
        exempt: Some(ExemptPriorityLevelConfiguration {
            nominal_concurrency_shares: Some(0),
            lendable_percent: Some(0),
        }),
        limited: None,
    };
    let limited = LEVELS.iter().map(|level| (level.name, limited(level)));
    let all = limited.chain([(apiserver::fairness::EXEMPT, exempt)]);
    all.map(|(name, spec)| PriorityLevelConfiguration {
        metadata: metadata(name),
        spec: Some(spec),
        status: None,
    })
    .collect()
}

fn limited(level: &Level) -> PriorityLevelConfigurationSpec {
    let queuing = level.queuing.map(|[queues, hand_size, length]| QueuingConfiguration {
        queues: Some(queues),
        hand_size: Some(hand_size),
        queue_length_limit: Some(length),
    });
    let response = if queuing.is_some() { "Queue" } else { "Reject" };
    PriorityLevelConfigurationSpec {
        type_: "Limited".into(),
        limited: Some(LimitedPriorityLevelConfiguration {
            nominal_concurrency_shares: Some(level.shares),
            lendable_percent: Some(level.lendable_percent),
            borrowing_limit_percent: None,
            limit_response: Some(LimitResponse { type_: response.into(), queuing }),
        }),
        exempt: None,
    }
}

pub fn schemas() -> Vec<FlowSchema> {
    SCHEMAS.iter().map(schema).collect()
}

fn schema(schema: &Schema) -> FlowSchema {
    let method = |name: &str| FlowDistinguisherMethod { type_: name.into() };
    FlowSchema {
        metadata: metadata(schema.name),
        spec: Some(FlowSchemaSpec {
            distinguisher_method: schema.distinguisher.map(method),
            matching_precedence: Some(schema.precedence),
            priority_level_configuration: PriorityLevelConfigurationReference {
                name: schema.level.into(),
            },
            rules: Some(vec![rule(schema)]),
        }),
        status: None,
    }
}

fn rule(schema: &Schema) -> PolicyRulesWithSubjects {
    let (resources, paths) = match &schema.what {
        What::Everything => {
            (Some(vec![resource_rule(&["*"], "*", &["*"], true)]), Some(path_rule("*", &["*"])))
        }
        What::Resources(rules) => {
            let rule = rules.iter().map(|(verbs, group, resources, cluster_scope)| {
                resource_rule(verbs, group, resources, *cluster_scope)
            });
            (Some(rule.collect()), None)
        }
        What::Paths(paths) => (None, Some(path_rule("get", paths))),
    };
    PolicyRulesWithSubjects {
        subjects: schema.who.iter().flat_map(subjects).collect(),
        resource_rules: resources,
        non_resource_rules: paths.map(|rule| vec![rule]),
    }
}

fn resource_rule(
    verbs: &[&str],
    group: &str,
    resources: &[&str],
    cluster_scope: bool,
) -> ResourcePolicyRule {
    ResourcePolicyRule {
        verbs: texts(verbs),
        api_groups: texts(&[group]),
        resources: texts(resources),
        cluster_scope: cluster_scope.then_some(true),
        namespaces: Some(texts(&["*"])),
    }
}

fn path_rule(verb: &str, paths: &[&str]) -> NonResourcePolicyRule {
    NonResourcePolicyRule { verbs: texts(&[verb]), non_resource_urls: texts(paths) }
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

fn subjects(who: &Who) -> Vec<Subject> {
    let none = || Subject { kind: String::new(), group: None, service_account: None, user: None };
    match who {
        Who::Groups(names) => {
            let group = |name: &&str| GroupSubject { name: (*name).to_owned() };
            let kind = || "Group".to_owned();
            names
                .iter()
                .map(|name| Subject { kind: kind(), group: Some(group(name)), ..none() })
                .collect()
        }
        Who::Users(names) => {
            let user = |name: &&str| UserSubject { name: (*name).to_owned() };
            let kind = || "User".to_owned();
            names
                .iter()
                .map(|name| Subject { kind: kind(), user: Some(user(name)), ..none() })
                .collect()
        }
        Who::SystemAccounts => {
            let account =
                ServiceAccountSubject { name: "*".into(), namespace: "kube-system".into() };
            vec![Subject {
                kind: "ServiceAccount".into(),
                service_account: Some(account),
                ..none()
            }]
        }
    }
}

fn metadata(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        annotations: Some([(AUTO_UPDATE.to_owned(), "true".to_owned())].into()),
        ..ObjectMeta::default()
    }
}
