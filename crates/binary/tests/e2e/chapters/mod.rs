//! The chapters, in order.

mod apply;
mod balancers;
mod block;
mod cis;
mod clients;
mod commands;
mod containerd;
mod containers;
mod csi;
mod definitions;
mod density;
mod devices;
mod ending;
mod folders;
mod healing;
mod helm;
mod hostile;
mod keeping;
mod killing;
mod kubeadm;
mod leaders;
mod names;
mod nodes;
mod operator;
mod policies;
mod pulling;
mod rolling;
mod servers;
mod service;
mod start;
mod statics;
mod stores;
mod users;
mod workloads;

use anyhow::Result;

use crate::story::Story;

pub struct Chapter {
    pub name: &'static str,
    /// Runs whatever chapters are selected; if it fails, the story ends.
    pub needed_by_all: bool,
    pub tell: fn(&mut Story) -> Result<()>,
}

pub const CHAPTERS: &[Chapter] = &[
    needed("start: the node becomes Ready", start::node_ready),
    chapter("start: the API server's surface", start::api_surface),
    chapter("start: a second node on the machine is refused", start::second_node),
    needed("images: archives of every shape are imported", start::images),
    needed("apply: a Deployment becomes Ready", apply::ready),
    chapter("apply: settings, secrets and limits reach the container", apply::inside),
    chapter("apply: events tell what happened", apply::events),
    chapter("service: the ClusterIP answers on the node and spreads", service::cluster_ip),
    chapter("service: the NodePort answers outside", service::node_port),
    chapter("service: names answer in a pod", service::names),
    chapter("service: a pod that is not Ready gets nothing", service::not_ready),
    chapter("names: hosts, zones and other names by coredns-custom", names::by_settings),
    chapter("names: the DNS has metrics and says that it is ready", names::metrics),
    chapter("policies: what is not allowed is dropped", policies::are_enforced),
    chapter("policies: they hold while the server is killed", policies::outlive_the_server),
    chapter("policies: flushed rules return", policies::return_after_a_flush),
    chapter("commands: lists and columns", commands::lists),
    chapter("commands: the kubectl of the machine prints the same", commands::other_kubectl),
    chapter("commands: describe", commands::describe),
    chapter("commands: logs, exec, cp, port-forward", commands::streams),
    chapter("commands: changes", commands::changes),
    chapter("commands: watch and wait", commands::watch),
    chapter("commands: discovery, schema, identity, health", commands::surface),
    chapter("clients: Python's works unchanged", clients::python),
    chapter("clients: kr8s and kopf work unchanged", clients::python_operators),
    chapter("clients: Ansible's collection works unchanged", clients::ansible),
    chapter("clients: JavaScript's works unchanged", clients::javascript),
    chapter("clients: fabric8, Java, works unchanged", clients::fabric8),
    chapter("clients: the official one of Java works unchanged", clients::official_java),
    chapter("clients: Go's, which speak CBOR", clients::go_in_cbor),
    chapter("clients: an operator made with kube-rs works unchanged", operator::kube_rs),
    chapter("clients: definitions of well-known projects", definitions::of_well_known_projects),
    chapter("keeping: secrets are encrypted on the disk", keeping::secrets_are_sealed),
    chapter("keeping: certificates are replaced while in use", keeping::certificates_are_replaced),
    chapter("cis: the node is as docs/security.md says", cis::of_a_node),
    chapter("pulling: a registry behind a mirror", pulling::through_a_mirror),
    chapter("healing: a killed process is restarted", healing::killed_process),
    chapter("healing: a deleted pod is replaced", healing::deleted_pod),
    chapter("healing: a failing liveness probe restarts", healing::liveness),
    chapter("healing: a crash loop backs off", healing::crash_loop),
    chapter("healing: a pod that does not fit fails", healing::does_not_fit),
    chapter("healing: a ReplicaSet replaces a pod that does not fit", healing::replaces_misfit),
    chapter("containers: restart rules and variables from files", containers::of_their_own),
    chapter("rolling: an update drops nothing, undo restores", rolling::update_and_undo),
    chapter("rolling: a paused rollout waits", rolling::pause_and_resume),
    chapter("statics: a static pod has a mirror", statics::mirror),
    chapter("statics: the server's components are pods", statics::of_components),
    chapter("folders: archives are imported, manifests applied", folders::images_and_manifests),
    chapter("workloads: a database keeps its volumes", workloads::database),
    chapter("workloads: a CronJob and a DaemonSet", workloads::regular),
    chapter("workloads: a guestbook of three tiers", workloads::guestbook),
    chapter("workloads: kubectl top, and an autoscaler under load", workloads::autoscaling),
    chapter("volumes: an unmodified storage driver", csi::driver),
    chapter("volumes: a device of the node reaches containers", block::raw),
    chapter("devices: an unmodified device plugin", devices::plugin),
    chapter("users: pods with user namespaces", users::of_their_own),
    chapter("helm: install, upgrade, rollback, uninstall", helm::chart),
    chapter("killing: the server is killed at any moment", killing::at_any_moment),
    chapter("leaders: one of two leads, the other takes over", leaders::one_of_each_works),
    chapter("stores: history, a snapshot, a server restored from it", stores::past_and_snapshots),
    chapter("stores: three API servers share an etcd", stores::several_api_servers),
    chapter("stores: upstream's API server runs on ours", stores::upstreams_api_server),
    chapter("servers: a node follows the servers that live", servers::nodes_follow),
    chapter("containerd: another runtime runs a node", containerd::runs_a_node),
    chapter("density: many pods on one node", density::many_pods),
    chapter("kubeadm: from init to reset", kubeadm::whole_life),
    chapter("nodes: a wrong token or server is refused", nodes::wrong_tokens),
    chapter("nodes: a second one joins", nodes::joins),
    chapter("nodes: pods spread over both", nodes::spread),
    chapter("nodes: pods and Services reach across", nodes::traffic),
    chapter("nodes: logs, exec and port-forward reach across", nodes::streams),
    chapter("balancers: Services on the nodes' addresses", balancers::on_nodes),
    chapter("balancers: another node takes over an address of a pool", balancers::of_a_pool),
    chapter("nodes: a new authority interrupts no client", nodes::new_authority),
    chapter("nodes: a node works without a server", nodes::without_a_server),
    chapter("nodes: a node that is cut off loses its pods, and returns", nodes::cut_off),
    chapter("nodes: a machine whose Node is deleted joins again", nodes::joins_again),
    chapter("nodes: a node leaves without a trace", nodes::leaves),
    chapter("hostile: a join token gives no other access", hostile::a_join_token_leads_nowhere),
    chapter("ending: deletion removes dependents", ending::dependents),
    chapter("ending: Ctrl-C stops the server cleanly, pods keep running", ending::interrupt),
    chapter("ending: uninstall leaves no trace", ending::uninstall),
];

const fn needed(name: &'static str, tell: fn(&mut Story) -> Result<()>) -> Chapter {
    Chapter { name, needed_by_all: true, tell }
}

const fn chapter(name: &'static str, tell: fn(&mut Story) -> Result<()>) -> Chapter {
    Chapter { name, needed_by_all: false, tell }
}
