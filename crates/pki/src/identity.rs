//! Who is who: the user names and groups of the components, as upstream has them. RBAC's bootstrap
//! roles refer to these names, so they are facts, not choices.

use crate::Profile;

/// A component with an identity of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// The person who runs the cluster.
    Admin,
    /// The API server's client to itself.
    Loopback,
    ControllerManager,
    Scheduler,
    Proxy,
    Dns,
    /// The API server's client to kubelets. Who a kubelet is says a Node, which the node itself
    /// writes: what this identity may do at the API, a stolen node could do by naming the API server's
    /// own address. RBAC allows it kubelets' resources only. Upstream: so does kubeadm.
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

impl Component {
    fn row(self) -> &'static (Self, &'static str, &'static str, &'static [&'static str]) {
        IDENTITIES.iter().find(|row| row.0 == self).expect("every component has a row")
    }

    /// The stem of its files: `<name>.crt`, `<name>.key`, `<name>.conf`.
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
}

impl Identity {
    /// The kubelet of a node.
    pub fn node(name: &str) -> Self {
        Self { user: format!("system:node:{name}"), groups: vec!["system:nodes".to_owned()] }
    }

    /// A client certificate for this identity.
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
}
