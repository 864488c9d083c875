//! What upstream warns of although it is allowed. Upstream: `pkg/api/*/warnings.go`, and the
//! `WarningsOnCreate` of the strategies.

pub(crate) mod addresses;
pub(crate) mod kinds;
mod paths;

use std::collections::{HashMap, HashSet};

use machinery::names;
use serde_json::Value;

use super::at::At;
use super::pod::each_container;
use crate::core::app_armor;

fn say(at: &At<'_>, text: &str, out: &mut Vec<String>) {
    out.push(format!("{}: {text}", at.path));
}

/// For workloads whose name becomes a part of host names.
pub(crate) fn hostname(at: &At<'_>, place: &'static str, out: &mut Vec<String>) {
    no_host_name(at, "Pod names and hostnames", out);
    template(&at.get(place), out);
}

/// For pods.
pub(crate) fn pod(at: &At<'_>, out: &mut Vec<String>) {
    no_host_name(at, "the Pod's hostname", out);
    template(at, out);
}

fn no_host_name(at: &At<'_>, used_in: &str, out: &mut Vec<String>) {
    let wrong = names::dns1123_label(at.get("metadata.name").str());
    if !wrong.is_empty() {
        out.push(format!("metadata.name: this is used in {used_in}, which can result in surprising behavior; a DNS label is recommended: [{}]", wrong.join(" ")));
    }
}

pub(crate) fn stateful_set(at: &At<'_>, out: &mut Vec<String>) {
    template(&at.get("spec.template"), out);
    for one in at.get("spec.volumeClaimTemplates").items() {
        claim(&one.get("spec"), out);
    }
    if at.get("spec.revisionHistoryLimit").int() < 0 {
        say(
            &at.get("spec.revisionHistoryLimit"),
            "a negative value retains all historical revisions; a value >= 0 is recommended",
            out,
        );
    }
}

pub(crate) fn ingress(at: &At<'_>, out: &mut Vec<String>) {
    const CLASS: &str = "kubernetes.io/ingress.class";
    if at.get("metadata.annotations").has(CLASS) {
        out.push(format!(
            "annotation {CLASS:?} is deprecated, please use 'spec.ingressClassName' instead"
        ));
    }
}

pub(crate) fn csi_driver(at: &At<'_>, out: &mut Vec<String>) {
    let spec = at.get("spec");
    if !spec.get("tokenRequests").is_empty() && !spec.has("serviceAccountTokenInSecrets") {
        out.push("spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent possible logging of tokens in volume attributes".into());
    }
}

pub(crate) fn secret(at: &At<'_>, out: &mut Vec<String>) {
    use base64::Engine as _;
    if !at.get("type").is("kubernetes.io/tls") {
        return;
    }
    let text = |key: &str| {
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(at.get("data").key(key).str())
            .unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (certificate, key) = (text("tls.crt"), text("tls.key"));
    let problem = match (certificate.contains("-----BEGIN "), key.contains("-----BEGIN ")) {
        (false, _) => "tls: failed to find any PEM data in certificate input",
        (true, false) => "tls: failed to find any PEM data in key input",
        (true, true) => return,
    };
    out.push(problem.into());
}

pub(crate) fn service(at: &At<'_>, out: &mut Vec<String>) {
    const HINTS: &str = "service.kubernetes.io/topology-aware-hints";
    let spec = at.get("spec");
    let is_external_name = spec.get("type").is("ExternalName");
    let is_headless = spec.get("type").is("ClusterIP") && spec.get("clusterIP").is("None");
    let has = |field: &'static str| !spec.get(field).is_empty();
    if at.get("metadata.annotations").has(HINTS) {
        out.push(format!("annotation {HINTS} is deprecated, please use service.kubernetes.io/topology-mode instead"));
    }
    let told = |applies: bool, text: &str, out: &mut Vec<String>| {
        if applies {
            out.push(text.into());
        }
    };
    if !is_headless {
        spec.get("clusterIPs").items().for_each(|one| addresses::ip(&one, out));
    }
    let ignored = "is ignored for headless services";
    for field in ["loadBalancerIP", "externalIPs"] {
        told(is_headless && has(field), &format!("spec.{field} {ignored}"), out);
    }
    let has_affinity = !spec.get("sessionAffinity").is("None");
    told(is_headless && has_affinity, &format!("spec.SessionAffinity {ignored}"), out);
    spec.get("externalIPs").items().for_each(|one| addresses::ip(&one, out));
    let uses_external = has("externalIPs") && !is_headless && !is_external_name;
    let text = "spec.externalIPs is deprecated and may no longer be implemented in some clusters";
    told(uses_external, text, out);
    addresses::ip(&spec.get("loadBalancerIP"), out);
    spec.get("loadBalancerSourceRanges").items().for_each(|one| addresses::cidr(&one, out));
    let text = "spec.externalIPs is ignored when spec.type is \"ExternalName\"";
    told(is_external_name && has("externalIPs"), text, out);
    let text = "spec.externalName is ignored when spec.type is not \"ExternalName\"";
    told(!is_external_name && has("externalName"), text, out);
    let text = "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"";
    told(spec.get("trafficDistribution").is("PreferClose"), text, out);
}

pub(crate) fn claim(spec: &At<'_>, out: &mut Vec<String>) {
    for field in ["requests", "limits"] {
        fraction(&spec.get("resources").get(field).key("storage"), out);
    }
}

/// Upstream asks for whole bytes only.
fn fraction(at: &At<'_>, out: &mut Vec<String>) {
    let amount = machinery::quantity::Amount::parse(at.str());
    if amount.is_ok_and(machinery::quantity::Amount::is_fractional) {
        let text = format!("fractional byte value {:?} is invalid, must be an integer", at.str());
        say(at, &text, out);
    }
}

/// Volume sources that do nothing any more, and since when.
const SOURCES: &[(&str, &str)] = &[
    ("photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"),
    ("gitRepo", "deprecated in v1.11, and disabled by default in v1.33+"),
    ("scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
    ("flocker", "deprecated in v1.22, non-functional in v1.25+"),
    ("storageos", "deprecated in v1.22, non-functional in v1.25+"),
    ("quobyte", "deprecated in v1.22, non-functional in v1.25+"),
    ("glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
    ("cephfs", "deprecated in v1.28, non-functional in v1.31+"),
    ("rbd", "deprecated in v1.28, non-functional in v1.31+"),
];

/// Annotations of volumes and claims that fields replace.
const VOLUME_NOTES: &[(&str, &str)] = &[
    (STORAGE_CLASS_NOTE, CLASS_IS_A_FIELD),
    (
        "volume.beta.kubernetes.io/mount-options",
        "deprecated since v1.31; use \"mountOptions\" attribute instead",
    ),
];
const STORAGE_CLASS_NOTE: &str = "volume.beta.kubernetes.io/storage-class";
const CLASS_IS_A_FIELD: &str = "deprecated since v1.8; use \"storageClassName\" attribute instead";

/// Of a claim itself; templates of claims get [`claim`] only.
pub(crate) fn whole_claim(at: &At<'_>, out: &mut Vec<String>) {
    let note = at.get("metadata.annotations").key(STORAGE_CLASS_NOTE);
    if note.is_set() {
        say(&note, CLASS_IS_A_FIELD, out);
    }
    claim(&at.get("spec"), out);
}

pub(crate) fn volume(at: &At<'_>, out: &mut Vec<String>) {
    for (name, text) in VOLUME_NOTES {
        let note = at.get("metadata.annotations").key(name);
        if note.is_set() {
            say(&note, text, out);
        }
    }
    let spec = at.get("spec");
    if spec.get("persistentVolumeReclaimPolicy").is("Recycle") {
        say(
            &spec.get("persistentVolumeReclaimPolicy"),
            "The Recycle reclaim policy is deprecated. Instead, the recommended approach is to use dynamic provisioning.",
            out,
        );
    }
    for term in spec.get("nodeAffinity.required.nodeSelectorTerms").items() {
        for one in term.get("matchExpressions").items() {
            let key = one.get("key");
            if let Some(text) = old_label(key.str()) {
                say(&key, &format!("{} is {text}", key.str()), out);
            }
        }
    }
    sources(&spec, out);
}

fn sources(at: &At<'_>, out: &mut Vec<String>) {
    for (source, text) in SOURCES {
        if at.has(source) {
            // Upstream names this one by its field in Go.
            let shown = if *source == "storageos" { "storageOS" } else { *source };
            say(&at.called(at.child_path(shown)), text, out);
        }
    }
}

pub(crate) fn storage_class(at: &At<'_>, out: &mut Vec<String>) {
    for term in at.get("allowedTopologies").items() {
        for one in term.get("matchLabelExpressions").items() {
            let key = one.get("key");
            old_label(key.str()).into_iter().for_each(|text| say(&key, text, out));
        }
    }
}

/// Labels of nodes that have other names now.
const NODE_LABELS: &[(&str, &str)] = &[
    ("beta.kubernetes.io/arch", "deprecated since v1.14; use \"kubernetes.io/arch\" instead"),
    ("beta.kubernetes.io/os", "deprecated since v1.14; use \"kubernetes.io/os\" instead"),
    (
        "beta.kubernetes.io/instance-type",
        "deprecated since v1.17; use \"node.kubernetes.io/instance-type\" instead",
    ),
    (
        "failure-domain.beta.kubernetes.io/region",
        "deprecated since v1.17; use \"topology.kubernetes.io/region\" instead",
    ),
    (
        "failure-domain.beta.kubernetes.io/zone",
        "deprecated since v1.17; use \"topology.kubernetes.io/zone\" instead",
    ),
    ("app.kubernetes.io/created-by", "deprecated since v1.9"),
    (
        "scheduler.alpha.kubernetes.io/preferAvoidPods",
        "deprecated since v1.22; use Taints and Tolerations instead",
    ),
    ("node-role.kubernetes.io/master", "use \"node-role.kubernetes.io/control-plane\" instead"),
];

fn old_label(label: &str) -> Option<&'static str> {
    NODE_LABELS.iter().find(|(old, _)| *old == label).map(|(_, text)| *text)
}

const ANNOTATIONS: &[(&str, &str)] = &[
    (
        "scheduler.alpha.kubernetes.io/critical-pod",
        "non-functional in v1.16+; use the \"priorityClassName\" field instead",
    ),
    (
        "security.alpha.kubernetes.io/sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
    (
        "security.alpha.kubernetes.io/unsafe-sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
];

/// Of templates alone: pods were told when their fields were made of the annotations.
fn app_armor_annotation(at: &At<'_>, container: &At<'_>, out: &mut Vec<String>) {
    let key = format!("{}{}", app_armor::PREFIX, container.get("name").str());
    let note = at.get("metadata.annotations").key(&key);
    let is_template = at.get("kind").is_empty();
    if !is_template || !note.is_set() || container.get("securityContext").has("appArmorProfile") {
        return;
    }
    let of_pod = at.get("spec.securityContext.appArmorProfile");
    let same = app_armor::field_of(note.str()).and_then(|field| serde_json::to_value(field).ok());
    if !of_pod.is_set() || same.as_ref() != Some(of_pod.value) {
        say(&note, "deprecated since v1.30; use the \"appArmorProfile\" field instead", out);
    }
}

/// Pods and templates of pods.
pub(crate) fn template(at: &At<'_>, out: &mut Vec<String>) {
    const GONE: &str = "non-functional in v1.27+; use the \"seccompProfile\" field instead";
    let (notes, spec) = (at.get("metadata.annotations"), at.get("spec"));
    placement(&spec, out);
    for (key, text) in ANNOTATIONS {
        if notes.has(key) {
            say(&notes.key(key), text, out);
        }
    }
    for volume in spec.get("volumes").items() {
        sources(&volume, out);
        claim(&volume.get("ephemeral.volumeClaimTemplate.spec"), out);
    }
    paths::overlapping(&spec.get("volumes"), out);
    repeated(&spec.get("hostAliases"), "ip", "ip", out);
    repeated(&spec.get("imagePullSecrets"), "name", "name", out);
    for secret in spec.get("imagePullSecrets").items() {
        if secret.get("name").is_empty() {
            say(&secret.get("name"), "invalid empty name \"\"", out);
        }
    }
    byte_counts(&spec.get("overhead"), out);
    let pod_key = "seccomp.security.alpha.kubernetes.io/pod";
    if notes.has(pod_key) && !spec.get("securityContext").has("seccompProfile") {
        say(&notes.key(pod_key), GONE, out);
    }
    for container in each_container(&spec) {
        let key = format!(
            "container.seccomp.security.alpha.kubernetes.io/{}",
            container.get("name").str()
        );
        if notes.has(&key) && !container.get("securityContext").has("seccompProfile") {
            say(&notes.key(&key), GONE, out);
        }
        app_armor_annotation(at, &container, out);
        byte_counts(&container.get("resources.limits"), out);
        byte_counts(&container.get("resources.requests"), out);
        hidden_variables(&container.get("env"), out);
    }
    ports(&spec, out);
    if spec.get("terminationGracePeriodSeconds").int() < 0 {
        say(
            &spec.get("terminationGracePeriodSeconds"),
            "must be >= 0; negative values are invalid and will be treated as 1",
            out,
        );
    }
    affinities(&spec.get("affinity"), out);
    for address in spec.get("dnsConfig.nameservers").items() {
        addresses::ip(&address, out);
    }
    for alias in spec.get("hostAliases").items() {
        addresses::ip(&alias.get("ip"), out);
    }
}

fn byte_counts(amounts: &At<'_>, out: &mut Vec<String>) {
    for name in ["memory", "ephemeral-storage"] {
        fraction(&amounts.key(name), out);
    }
}

fn repeated(list: &At<'_>, field: &'static str, what: &str, out: &mut Vec<String>) {
    let mut seen = HashSet::new();
    for item in list.items() {
        let place = item.get(field);
        if !seen.insert(place.str()) {
            say(&place, &format!("duplicate {what} {:?}", place.str()), out);
        }
    }
}

const NO_SELECTOR: &str = "a null labelSelector results in matching no pod";

fn placement(spec: &At<'_>, out: &mut Vec<String>) {
    for (key, place) in spec.get("nodeSelector").entries() {
        if let Some(text) = old_label(key) {
            say(&place, text, out);
        }
    }
    let node = spec.get("affinity.nodeAffinity");
    let required = node.get("requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms");
    let preferred = node.get("preferredDuringSchedulingIgnoredDuringExecution");
    let terms = required.items().chain(preferred.items().map(|term| term.get("preference")));
    for expression in terms.flat_map(|term| term.get("matchExpressions").items()) {
        let key = expression.get("key");
        if let Some(text) = old_label(key.str()) {
            say(&key, &format!("{} is {text}", key.str()), out);
        }
    }
    for constraint in spec.get("topologySpreadConstraints").items() {
        let key = constraint.get("topologyKey");
        if let Some(text) = old_label(key.str()) {
            say(&key, &format!("{} is {text}", key.str()), out);
        }
        if !constraint.has("labelSelector") {
            say(&constraint.get("labelSelector"), NO_SELECTOR, out);
        }
    }
}

fn affinities(at: &At<'_>, out: &mut Vec<String>) {
    for kind in ["podAffinity", "podAntiAffinity"] {
        let required = at.get(kind).get("requiredDuringSchedulingIgnoredDuringExecution");
        let preferred = at.get(kind).get("preferredDuringSchedulingIgnoredDuringExecution");
        let weighted = preferred.items().map(|term| term.get("podAffinityTerm"));
        for term in required.items().chain(weighted) {
            if !term.has("labelSelector") {
                say(&term.get("labelSelector"), NO_SELECTOR, out);
            }
        }
    }
}

fn hidden_variables(list: &At<'_>, out: &mut Vec<String>) {
    let mut seen = HashSet::new();
    for variable in list.items() {
        let (name, value) = (variable.get("name").str(), variable.get("value").str());
        let reference = format!("$({name})");
        let builds_on_it =
            !variable.has("valueFrom") && value != reference && value.contains(&reference);
        if !seen.insert(name) && !builds_on_it {
            let text = format!(
                "hides previous definition of {name:?}, which may be dropped when using apply"
            );
            say(&variable, &text, out);
        }
    }
}

/// No answer has place for as many: ports that are all the same would be worth the square of their number.
const MOST: usize = 4096;

/// A port of a container, beside those that came before it.
struct Port<'a> {
    at: At<'a>,
    container: (&'a Value, &'a Value),
    host: i64,
    host_ip: &'a str,
}

impl<'a> Port<'a> {
    fn new(at: At<'a>) -> Self {
        let of = |field: &'static str| at.get(field);
        let container = (of("containerPort").value, of("protocol").value);
        let (host, host_ip) = (of("hostPort").int(), of("hostIP").str());
        Self { container, host, host_ip, at }
    }

    /// The warning for an object that sets both.
    fn beside(&self, other: &Self) -> Option<&'static str> {
        if self.host == other.host && self.host_ip == other.host_ip {
            Some("duplicate")
        } else if self.host == 0 || other.host == 0 {
            Some("overlapping")
        } else if self.host == other.host && self.host_ip.is_empty() != other.host_ip.is_empty() {
            Some("dangerously ambiguous")
        } else {
            None
        }
    }
}

fn ports(spec: &At<'_>, out: &mut Vec<String>) {
    let all: Vec<Port<'_>> = each_container(spec)
        .flat_map(|container| container.get("ports").items())
        .map(Port::new)
        .collect();
    overlapping(&all, out);
    let mut names: HashMap<&str, &At<'_>> = HashMap::new();
    for Port { at, .. } in &all {
        let name = at.get("name").str();
        match names.get(name) {
            _ if name.is_empty() => {}
            Some(other) => {
                let other = &other.path;
                let text = format!(
                    "duplicate port name {name:?} with {other}, services and probes that select ports by name will use {other}"
                );
                say(at, &text, out);
            }
            None => _ = names.insert(name, at),
        }
    }
}

/// Each port beside those before it that are of the same container port, and of a host port that may
/// overlap: its own (at its own address or at all; at any, if it has none) or none; of any, if it has
/// none. Whatever is looked at is worth a warning, so that there is an end to it.
fn overlapping(all: &[Port<'_>], out: &mut Vec<String>) {
    let mut of_container: HashMap<_, Vec<usize>> = HashMap::new();
    let mut of_host: HashMap<_, Vec<usize>> = HashMap::new();
    let mut of_address: HashMap<_, Vec<usize>> = HashMap::new();
    for (index, port) in all.iter().enumerate() {
        let of = |host: i64| of_host.get(&(port.container, host)).into_iter().flatten().copied();
        let others = match port.host {
            0 => of_container.get(&port.container).cloned().unwrap_or_default(),
            host if port.host_ip.is_empty() => sorted(of(0).chain(of(host))),
            host => {
                let at = |ip| of_address.get(&(port.container, host, ip)).into_iter().flatten();
                sorted(of(0).chain(at(port.host_ip).chain(at("")).copied()))
            }
        };
        for other in others.into_iter().map(|other| &all[other]) {
            if let Some(what) = port.beside(other) {
                say(&port.at, &format!("{what} port definition with {}", other.at.path), out);
            }
            if out.len() > MOST {
                return;
            }
        }
        of_container.entry(port.container).or_default().push(index);
        of_host.entry((port.container, port.host)).or_default().push(index);
        let address = (port.container, port.host, port.host_ip);
        of_address.entry(address).or_default().push(index);
    }
}

fn sorted(places: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all: Vec<usize> = places.collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kind::Warn;
    use crate::validate::at::judge;

    fn texts(tree: &Value, warn: Warn) -> Vec<String> {
        let mut all = vec![];
        judge(tree, |at| warn(at, &mut all));
        all
    }

    #[test]
    fn what_is_allowed_and_unwise_is_told() {
        let port = |host: i64| json!({"containerPort": 1, "protocol": "TCP", "hostPort": host});
        let at = |host: i64, ip: &str| json!({"containerPort": 1, "protocol": "TCP", "hostPort": host, "hostIP": ip});
        let addresses =
            json!([at(1, "10.0.0.1"), at(1, "10.0.0.2"), port(1), at(1, "10.0.0.1"), port(0)]);
        let container = json!({"name": "c", "ports": [port(1), port(1)],
            "env": [{"name": "A"}, {"name": "A", "value": "$(A)x"}, {"name": "A", "value": "x"}]});
        for (tree, warn, expected) in [
            (
                json!({"spec": {"containers": [container], "imagePullSecrets": [{}]}}),
                template as Warn,
                vec![
                    "spec.imagePullSecrets[0].name: invalid empty name \"\"",
                    "spec.containers[0].env[2]: hides previous definition of \"A\", which may be dropped when using apply",
                    "spec.containers[0].ports[1]: duplicate port definition with spec.containers[0].ports[0]",
                ],
            ),
            (
                json!({"spec": {"containers": [{"name": "c", "ports": addresses}]}}),
                template as Warn,
                vec![
                    "spec.containers[0].ports[2]: dangerously ambiguous port definition with spec.containers[0].ports[0]",
                    "spec.containers[0].ports[2]: dangerously ambiguous port definition with spec.containers[0].ports[1]",
                    "spec.containers[0].ports[3]: duplicate port definition with spec.containers[0].ports[0]",
                    "spec.containers[0].ports[3]: dangerously ambiguous port definition with spec.containers[0].ports[2]",
                    "spec.containers[0].ports[4]: overlapping port definition with spec.containers[0].ports[0]",
                    "spec.containers[0].ports[4]: overlapping port definition with spec.containers[0].ports[1]",
                    "spec.containers[0].ports[4]: overlapping port definition with spec.containers[0].ports[2]",
                    "spec.containers[0].ports[4]: overlapping port definition with spec.containers[0].ports[3]",
                ],
            ),
            (
                json!({"spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}}),
                template as Warn,
                vec![
                    "spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use \"kubernetes.io/os\" instead",
                ],
            ),
            (
                json!({"metadata": {"annotations": {"volume.beta.kubernetes.io/mount-options": "a"}},
                    "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                        {"key": "beta.kubernetes.io/os", "operator": "In", "values": ["x"]}]}]}}}}),
                volume as Warn,
                vec![
                    "metadata.annotations[volume.beta.kubernetes.io/mount-options]: deprecated since v1.31; use \"mountOptions\" attribute instead",
                    "spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].key: beta.kubernetes.io/os is deprecated since v1.14; use \"kubernetes.io/os\" instead",
                ],
            ),
            (
                json!({"metadata": {"annotations": {"volume.beta.kubernetes.io/storage-class": "a"}}, "spec": {}}),
                whole_claim as Warn,
                vec![
                    "metadata.annotations[volume.beta.kubernetes.io/storage-class]: deprecated since v1.8; use \"storageClassName\" attribute instead",
                ],
            ),
            (
                json!({"allowedTopologies": [{"matchLabelExpressions": [
                    {"key": "failure-domain.beta.kubernetes.io/zone"}]}]}),
                storage_class as Warn,
                vec![
                    "allowedTopologies[0].matchLabelExpressions[0].key: deprecated since v1.17; use \"topology.kubernetes.io/zone\" instead",
                ],
            ),
            (
                json!({"spec": {"type": "ClusterIP", "trafficDistribution": "PreferClose"}}),
                service as Warn,
                vec![
                    "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"",
                ],
            ),
        ] {
            assert_eq!(texts(&tree, warn), expected);
        }
    }
}
