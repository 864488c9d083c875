//! Identities: user names and groups of the components, as upstream has them. RBAC's bootstrap
//! roles refer to these names, so they cannot be chosen freely.

use crate::Profile;

/// A component with an identity of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// The cluster's administrator.
    Admin,
    /// The API server's client to itself.
    Loopback,
    ControllerManager,
    Scheduler,
    Proxy,
    Dns,
    /// The API server's client to kubelets. A kubelet's address comes from its Node, which the node itself
    /// writes. So a stolen node could name the API server's own address and use this identity's rights at the
    /// API. Therefore RBAC allows it only the kubelets' resources. Upstream: so does kubeadm.
    KubeletClient,
    /// The API server's client to aggregated API servers (signed by the front-proxy authority).
    FrontProxyClient,
}

/// A user name and groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: String,
    pub groups: Vec<String>,
}

/// `(component, file name, user, groups)`.
const IDENTITIES: &[(Component, &str, &str, &[&str])] = &[
    (Component::Admin, "admin", "kubernetes-admin", &["system:masters"]),
    (Component::Loopback, "apiserver-loopback", "system:apiserver", &["system:masters"]),
    (Component::ControllerManager, "controller-manager", "system:kube-controller-manager", &[]),
    (Component::Scheduler, "scheduler", "system:kube-scheduler", &[]),
    (Component::Proxy, "kube-proxy", "system:kube-proxy", &[]),
    (Component::Dns, "kube-dns", "system:kube-dns", &[]),
    (Component::KubeletClient, "apiserver-kubelet-client", "kube-apiserver-kubelet-client", &[]),
    (Component::FrontProxyClient, "front-proxy-client", "front-proxy-client", &[]),
];

/// Components that run on every node, and their group.
const NODE_COMPONENTS: &[(Component, &str)] =
    &[(Component::Proxy, "decapod:kube-proxies"), (Component::Dns, "decapod:kube-dns")];
const NODE_PREFIX: &str = "system:node:";
const NODES: &str = "system:nodes";

impl Component {
    fn row(self) -> &'static (Self, &'static str, &'static str, &'static [&'static str]) {
        IDENTITIES.iter().find(|row| row.0 == self).expect("every component has a row")
    }

    /// The base name of its files: `<name>.crt`, `<name>.key`, `<name>.conf`.
    pub fn file_name(self) -> &'static str {
        self.row().1
    }

    pub fn identity(self) -> Identity {
        let (_, _, user, groups) = self.row();
        Identity {
            user: (*user).to_owned(),
            groups: groups.iter().map(|&group| group.to_owned()).collect(),
        }
    }

    pub fn profile(self) -> Profile {
        self.identity().profile()
    }

    /// The identity of a component that runs beside a node's kubelet: the name is the node's own,
    /// so that it ends with the node, and the group has the rights. `None` for other components.
    pub fn on_node(self, node: &str) -> Option<Identity> {
        let (_, group) = NODE_COMPONENTS.iter().find(|(component, _)| *component == self)?;
        let user = format!("{}:{node}", self.identity().user);
        Some(Identity { user, groups: vec![(*group).to_owned()] })
    }
}

impl Identity {
    /// The identity of a node's kubelet.
    pub fn node(name: &str) -> Self {
        Self { user: format!("{NODE_PREFIX}{name}"), groups: vec![NODES.to_owned()] }
    }

    /// The node of a user, by its name and groups: the user is a kubelet or a component beside it.
    pub fn node_of<'a>(user: &'a str, groups: &[String]) -> Option<&'a str> {
        let is_in = |group: &str| groups.iter().any(|one| one == group);
        if let Some(node) = user.strip_prefix(NODE_PREFIX).filter(|_| is_in(NODES)) {
            return Some(node);
        }
        NODE_COMPONENTS.iter().filter(|(_, group)| is_in(group)).find_map(|(component, _)| {
            user.strip_prefix(component.identity().user.as_str())?.strip_prefix(':')
        })
    }

    /// The profile of a client certificate for this identity.
    pub fn profile(&self) -> Profile {
        let groups: Vec<&str> = self.groups.iter().map(String::as_str).collect();
        Profile::client(self.user.as_str(), &groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_upstreams() {
        let check = |component: Component, user: &str, groups: &[&str]| {
            let got = component.identity();
            assert_eq!((got.user.as_str(), got.groups.len()), (user, groups.len()));
        };
        check(Component::Scheduler, "system:kube-scheduler", &[]);
        check(Component::Admin, "kubernetes-admin", &["system:masters"]);
        check(Component::KubeletClient, "kube-apiserver-kubelet-client", &[]);
        assert_eq!(Identity::node("a").profile().common_name, "system:node:a");
    }

    #[test]
    fn a_nodes_identities_name_the_node() {
        assert_eq!(Component::Scheduler.on_node("a"), None);
        let of = |identity: &Identity| {
            Identity::node_of(&identity.user, &identity.groups).map(str::to_owned)
        };
        for component in [Component::Proxy, Component::Dns] {
            let identity = component.on_node("a.b").expect("nodes have it");
            assert_eq!(of(&identity).as_deref(), Some("a.b"));
            let bare = Identity { groups: vec![], ..identity };
            assert_eq!(of(&bare), None, "the group makes it");
            assert_eq!(of(&component.identity()), None);
        }
        assert_eq!(of(&Identity::node("n")).as_deref(), Some("n"));
        let mixed = Identity { user: "system:kube-dns:a".into(), groups: vec![NODES.into()] };
        assert_eq!(of(&mixed), None);
    }
}
