//! Node: a machine that runs pods.

use apiserver::request::RequestContext;
use apiserver::resource::MetadataRules;
use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeSystemInfo};
use release::features::Feature;

use super::podspec;
use crate::connect::{PROXY_VERBS, Target, to};
use crate::gated::{Gated, close, gated, taken};
use crate::kind::{
    Fields, Hooks, Kind, Made, Parts, Rules, STATUS, Sub, Updates, age, field, name,
    spec_and_status, text, wide,
};
use crate::print::or_none;
use crate::validate::{core, warnings};

const PARTS: Parts<Node> = spec_and_status!();
const ROLE_LABEL: &str = "node-role.kubernetes.io/";

pub(crate) static KIND: Kind<Node> = Kind {
    short: &["no"],
    storage: Some("minions"),
    subresources: &[
        STATUS,
        Sub {
            name: "proxy",
            kind: Some(("", "v1", "NodeProxyOptions")),
            verbs: PROXY_VERBS,
            behaviour: Made::Wired(|wiring| to(Target::NodeProxy, wiring)),
        },
    ],
    default,
    gated: |new, old| close(GATED, new, old),
    rules: Rules {
        create: core::node,
        update: Some(core::node_update),
        parts: &[("status", core::node_status)],
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    warnings: Some(warnings::addresses::node),
    warns_on_update: Updates::All,
    columns: &[
        name(),
        text("Status", "string", "The status of the node", |node| state(node).into()),
        text("Roles", "string", "The roles of the node", |node| roles(node).into()),
        age(),
        field("Version", "string", "api.core.v1.NodeSystemInfo.kubeletVersion", |node| {
            info(node).map_or("", |info| info.kubelet_version.as_str()).into()
        }),
        wide(field("Internal-IP", "string", "api.core.v1.NodeStatus.addresses", |node| {
            address(node, "InternalIP").into()
        })),
        wide(field("External-IP", "string", "api.core.v1.NodeStatus.addresses", |node| {
            address(node, "ExternalIP").into()
        })),
        wide(field("OS-Image", "string", "api.core.v1.NodeSystemInfo.osImage", |node| {
            known(info(node).map_or(String::new(), |info| info.os_image.clone())).into()
        })),
        wide(field(
            "Kernel-Version",
            "string",
            "api.core.v1.NodeSystemInfo.kernelVersion",
            |node| known(info(node).map_or(String::new(), kernel)).into(),
        )),
        wide(field(
            "Container-Runtime",
            "string",
            "api.core.v1.NodeSystemInfo.containerRuntimeVersion",
            |node| {
                let version = info(node).map(|info| info.container_runtime_version.clone());
                known(version.unwrap_or_default()).into()
            },
        )),
    ],
    fields: Fields::Of(&[("spec.unschedulable", |node| {
        let spec = node.spec.as_ref();
        spec.and_then(|spec| spec.unschedulable).unwrap_or_default().to_string()
    })]),
    hooks: &Life,
    ..Kind::BASE
};

const GATED: &[Gated<Node>] = &[gated(&[Feature::NodeDeclaredFeatures], |node| {
    node.status.as_mut().is_some_and(|status| taken(&mut status.declared_features))
})];

fn default(node: &mut Node) {
    let spec: &mut NodeSpec = node.spec.get_or_insert_default();
    spec.unschedulable.take_if(|unschedulable| !*unschedulable);
    one_name_for_ranges(spec);
    let status = node.status.get_or_insert_default();
    // Without allocatable, all of the capacity may be allocated.
    if status.allocatable.is_none() {
        status.allocatable = status.capacity.clone();
    }
    podspec::round([&mut status.capacity, &mut status.allocatable]);
}

struct Life;

impl Hooks<Node> for Life {
    /// A new node may bring its status; from then on both are written apart.
    fn prepare_update(&self, ctx: &RequestContext, object: &mut Node, old: &Node) {
        PARTS.prepare_update(ctx, object, old);
    }
}

fn info(node: &Node) -> Option<&NodeSystemInfo> {
    node.status.as_ref().and_then(|status| status.node_info.as_ref())
}

fn known(text: String) -> String {
    if text.is_empty() { "<unknown>".to_owned() } else { text }
}

/// `podCIDR` is the old name of the first range. Where it says another than the list, it wins.
/// Upstream: `Convert_v1_NodeSpec_To_core_NodeSpec`.
fn one_name_for_ranges(spec: &mut NodeSpec) {
    spec.pod_cidr.take_if(|one| one.is_empty());
    let first = spec.pod_cidrs.as_ref().and_then(|all| all.first());
    if let Some(one) = &spec.pod_cidr
        && first != Some(one)
    {
        spec.pod_cidrs = Some(vec![one.clone()]);
    }
    spec.pod_cidr = spec.pod_cidrs.as_ref().and_then(|all| all.first()).cloned();
}

fn kernel(info: &NodeSystemInfo) -> String {
    match (info.kernel_version.as_str(), info.architecture.as_str()) {
        ("", _) => String::new(),
        (kernel, "") => kernel.to_owned(),
        (kernel, architecture) => format!("{kernel} ({architecture})"),
    }
}

fn state(node: &Node) -> String {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
    let mut state = match ready.map(|condition| condition.status.as_str()) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
        state.push_str(",SchedulingDisabled");
    }
    state
}

fn roles(node: &Node) -> String {
    let mut roles: Vec<&str> = vec![];
    for (key, value) in node.metadata.labels.iter().flatten() {
        match key.strip_prefix(ROLE_LABEL) {
            Some(role) if !role.is_empty() => roles.push(role),
            _ if key == "kubernetes.io/role" && !value.is_empty() => roles.push(value),
            _ => {}
        }
    }
    roles.sort_unstable();
    roles.dedup();
    or_none(roles.join(","))
}

fn address(node: &Node, kind: &str) -> String {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let found = addresses.into_iter().find(|address| address.type_ == kind);
    or_none(found.map(|address| address.address.clone()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn ranges_have_one_name() {
        for (one, all, expected) in [
            ("", &[][..], &[][..]),
            ("a", &[], &["a"]),
            ("", &["a"], &["a"]),
            ("a", &["a", "b"], &["a", "b"]),
            ("b", &["a"], &["b"]),
            ("c", &["a", "b"], &["c"]),
        ] {
            let list = |all: &[&str]| {
                (!all.is_empty()).then(|| all.iter().map(|one| (*one).to_owned()).collect())
            };
            let mut spec = NodeSpec {
                pod_cidr: Some(one.to_owned()),
                pod_cidrs: list(all),
                ..NodeSpec::default()
            };
            one_name_for_ranges(&mut spec);
            assert_eq!(spec.pod_cidrs, list(expected), "{one} {all:?}");
            assert_eq!(spec.pod_cidr.as_deref(), expected.first().copied(), "{one} {all:?}");
        }
    }

    #[test]
    fn closed_gates_take_their_fields() {
        check(
            KIND.gated,
            Feature::NodeDeclaredFeatures,
            "/status/declaredFeatures",
            json!({"metadata": {"name": "x"}, "status": {"declaredFeatures": ["A"]}}),
        );
    }
}
