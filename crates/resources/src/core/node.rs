//! Nodes.

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Strategy};
use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeSystemInfo};
use machinery::Object;
use serde_json::Value;

use crate::Row;
use crate::connect::{Connections, PROXY_VERBS, Target, to};
use crate::gated;
use crate::parts::{Parts, parts};
use crate::print::{age, or_none};

const PARTS: Parts<Node> = parts!(Node);
const ROLE_LABEL: &str = "node-role.kubernetes.io/";

pub(crate) fn row(connections: &Connections) -> Row {
    let options = Some(("", "v1", "NodeProxyOptions"));
    Row::new::<Node>(NodeStrategy).short(&["no"]).storage("minions").status().sub(
        "proxy",
        options,
        PROXY_VERBS,
        to(Target::NodeProxy, connections),
    )
}

struct NodeStrategy;

impl Strategy for NodeStrategy {
    crate::validate::checked!(Node);

    fn default(&self, object: &mut dyn Object) {
        let node = object.expect_mut::<Node>();
        let spec: &mut NodeSpec = node.spec.get_or_insert_default();
        spec.unschedulable.take_if(|unschedulable| !*unschedulable);
        one_name_for_ranges(spec);
        let status = node.status.get_or_insert_default();
        // What is not said to be taken may be given out.
        if status.allocatable.is_none() {
            status.allocatable = status.capacity.clone();
        }
    }

    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        gated::node(object.expect_mut(), None);
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        PARTS.prepare_update(ctx, object, old);
        gated::node(object.expect_mut(), Some(old.expect()));
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        &["spec.unschedulable"]
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        let spec = object.expect::<Node>().spec.as_ref();
        let unschedulable = spec.and_then(|spec| spec.unschedulable).unwrap_or_default();
        vec![("spec.unschedulable", unschedulable.to_string())]
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<Node>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let node = object.expect::<Node>();
        let info =
            node.status.as_ref().and_then(|status| status.node_info.clone()).unwrap_or_default();
        let kernel = kernel(&info);
        let known = |text: String| if text.is_empty() { "<unknown>".to_owned() } else { text };
        vec![
            object.name().into(),
            state(node).into(),
            roles(node).into(),
            age(object),
            info.kubelet_version.into(),
            address(node, "InternalIP").into(),
            address(node, "ExternalIP").into(),
            known(info.os_image).into(),
            known(kernel).into(),
            known(info.container_runtime_version).into(),
        ]
    }
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
    use super::*;

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
}
