//! The components of a server as pods of kube-system, which users of other clusters expect there:
//! `kube-apiserver-NODE`, `kube-controller-manager-NODE`, `kube-scheduler-NODE`, and `etcd-NODE` beside a
//! member of etcd.
//!
//! In: the server's flags. Out: a static pod and a [`runtime::Part`] for each component that this server
//! runs. The kubelet makes mirror pods of them; the runtime never runs a process for them.
//!
//! Invariant: the same flags give the same uid. The pods request nothing.
//! Upstream: `cmd/kubeadm/app/phases/controlplane`, `…/etcd`.
//! Deviation: their image is in no registry, as no image of ours runs there.

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use runtime::Part;
use serde_json::json;

use crate::command_line;
use crate::control_plane::ControlPlane;
use crate::flags::Server;

/// What the node needs to run the pods.
#[derive(Default)]
pub struct OwnPods {
    pub pods: Vec<Pod>,
    pub parts: Vec<Part>,
}

/// A component, with the crates that log for it.
struct Component {
    name: &'static str,
    crates: &'static [&'static str],
}

/// The first one gets the log lines that are no other's.
const API_SERVER: Component = Component { name: "kube-apiserver", crates: &[] };
const CONTROLLERS: Component =
    Component { name: "kube-controller-manager", crates: &["decapod_controllers"] };
const SCHEDULER: Component = Component { name: "kube-scheduler", crates: &["decapod_scheduler"] };
/// Its log is on the server's standard error, which it shares.
const ETCD: Component = Component { name: "etcd", crates: &[] };

/// The pods of this server.
pub fn of_server(
    flags: &Server,
    control: &ControlPlane,
    has_member: bool,
    node: &str,
) -> anyhow::Result<OwnPods> {
    let runs = |name: &str| !flags.disable.iter().any(|disabled| disabled == name);
    let others = [(CONTROLLERS, runs(CONTROLLERS.name)), (SCHEDULER, runs(SCHEDULER.name))];
    let others = others.into_iter().chain([(ETCD, has_member)]);
    let shown = others.filter(|(_, runs)| *runs).map(|(component, _)| (component, vec![]));
    let mut out = OwnPods::default();
    for (component, command) in
        [(API_SERVER, command_of_api_server(flags, control))].into_iter().chain(shown)
    {
        let endpoint = (component.name == API_SERVER.name)
            .then(|| std::net::SocketAddr::new(control.address, control.port).to_string());
        let pod = pod(component.name, &command, endpoint)?;
        let pod = kubelet::own_pod(pod, node)?;
        out.parts.push(Part {
            name: component.name,
            pod_uid: pod.metadata.uid.clone().unwrap_or_default(),
            image: image(component.name),
            crates: component.crates,
            answer,
        });
        out.pods.push(pod);
    }
    Ok(out)
}

/// The flags that people look for.
fn command_of_api_server(flags: &Server, control: &ControlPlane) -> Vec<String> {
    let join = |words: &[String]| words.join(",");
    let ranges: Vec<String> = flags.service_cidr.iter().map(ToString::to_string).collect();
    let mut out = vec![
        format!("--advertise-address={}", control.address),
        format!("--secure-port={}", control.port),
        format!("--service-cluster-ip-range={}", join(&ranges)),
    ];
    let plugins = [
        ("enable", &flags.enable_admission_plugins),
        ("disable", &flags.disable_admission_plugins),
    ];
    for (what, names) in plugins.into_iter().filter(|(_, names)| !names.is_empty()) {
        out.push(format!("--{what}-admission-plugins={}", join(names)));
    }
    out.extend(flags.audit.shown());
    out
}

fn image(name: &str) -> String {
    format!("localhost/decapod/{name}:{}", release::KUBERNETES.tag)
}

fn pod(name: &str, flags: &[String], endpoint: Option<String>) -> anyhow::Result<Pod> {
    let command: Vec<&str> =
        std::iter::once(name).chain(flags.iter().map(String::as_str)).collect();
    let mut pod = json!({
        "metadata": {
            "name": name,
            "namespace": "kube-system",
            "labels": {"component": name, "tier": "control-plane"},
            "annotations": {},
        },
        "spec": {
            "containers": [{
                "name": name,
                "image": image(name),
                "imagePullPolicy": "IfNotPresent",
                "command": command,
            }],
            "hostNetwork": true,
            "priority": 2_000_001_000,
            "priorityClassName": "system-node-critical",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        },
    });
    if let Some(endpoint) = endpoint {
        let key = "kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint";
        pod["metadata"]["annotations"][key] = endpoint.into();
    }
    serde_json::from_value(pod).with_context(|| format!("the pod of {name}"))
}

/// The only commands that can be "run" in these pods.
fn answer(name: &str, words: &[&str]) -> Option<String> {
    match words {
        ["--help" | "-h"] => command_line::help(name).ok(),
        ["--version"] => Some(format!("{}\n", command_line::version(false))),
        ["--version=raw"] => Some(format!("{}\n", command_line::version(true))),
        _ => None,
    }
    // etcd is another program: its help is not known here.
    .filter(|_| name != ETCD.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_components_are_help_and_version() {
        let help = answer("kube-apiserver", &["--help"]).expect("help");
        assert!(help.contains("--enable-admission-plugins"), "{help}");
        assert!(
            answer("kube-scheduler", &["-h"]).is_some_and(|help| help.contains("--leader-elect"))
        );
        let version = answer("kube-controller-manager", &["--version"]).expect("a version");
        assert_eq!(version, format!("Kubernetes {}\n", release::KUBERNETES.tag));
        for refused in [&[][..], &["--help", "--v=2"], &["--config", "/etc/shadow"]] {
            assert_eq!(answer("kube-apiserver", refused), None);
        }
        assert_eq!(answer("etcd", &["--version"]), None);
    }

    #[test]
    fn pods_are_as_upstreams() {
        let made =
            pod("kube-apiserver", &["--secure-port=6443".into()], Some("192.0.2.1:6443".into()));
        let made = kubelet::own_pod(made.expect("a pod"), "node1").expect("a static pod");
        assert_eq!(made.metadata.name.as_deref(), Some("kube-apiserver-node1"));
        let labels = made.metadata.labels.clone().expect("labels");
        assert_eq!(labels["tier"], "control-plane");
        assert_eq!(labels["component"], "kube-apiserver");
        let spec = made.spec.clone().expect("a spec");
        assert!(spec.containers[0].resources.is_none(), "it requests nothing");
        let other = pod("kube-apiserver", &["--secure-port=6444".into()], None).expect("a pod");
        let other = kubelet::own_pod(other, "node1").expect("a static pod");
        assert_ne!(made.metadata.uid, other.metadata.uid, "other flags are another pod");
    }
}
