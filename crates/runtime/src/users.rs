//! User namespaces of pods (`hostUsers: false`): the mapping of ids 0, 1, 2 … to the node's ids.
//!
//! In: the CRI options of a sandbox or a container. Out: [`Mappings`], or the reason for a refusal.
//! Invariant: no id inside the pod maps to the node's user 0. Unsupported mappings are refused,
//! never replaced by the node's users. Upstream: containerd's `parseUsernsIDMap` and its checks.

use std::fs;
use std::path::Path;

use cri::{Error, IDMapping, NamespaceMode, NamespaceOption, Result};
use serde_json::{Value, json};

/// The first kernel whose tmpfs supports idmapped mounts: secrets and tokens are on tmpfs.
const KERNEL: (u32, u32) = (6, 3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// The node's id of the pod's id 0.
    pub host: u32,
    pub length: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mappings {
    pub uids: Range,
    pub gids: Range,
}

impl Range {
    fn of(all: &[IDMapping], what: &str) -> Result<Self> {
        let refuse = |why: &str| Err(Error::InvalidArgument(format!("{what} mappings: {why}")));
        let [one] = all else { return refuse("there must be exactly one range") };
        if one.container_id != 0 {
            return refuse("the range must start at container id 0");
        }
        if one.host_id == 0 || one.length == 0 {
            return refuse("the range must not be empty or contain the node's id 0");
        }
        // The kernel reserves the last id for "invalid".
        if one.host_id.checked_add(one.length).is_none() {
            return refuse("the range exceeds the largest id");
        }
        Ok(Self { host: one.host_id, length: one.length })
    }

    /// A line of `/proc/<pid>/uid_map`.
    pub fn line(self) -> String {
        format!("0 {} {}\n", self.host, self.length)
    }

    /// As in an OCI configuration.
    pub fn section(self) -> Value {
        json!([{"containerID": 0, "hostID": self.host, "size": self.length}])
    }
}

impl Mappings {
    /// `None`: no user namespace.
    pub fn of(options: &NamespaceOption) -> Result<Option<Self>> {
        let Some(users) = &options.userns_options else { return Ok(None) };
        match users.mode() {
            NamespaceMode::Node => return Ok(None),
            NamespaceMode::Pod => {}
            other => {
                let text = format!("unsupported user namespace mode: {other:?}");
                return Err(Error::InvalidArgument(text));
            }
        }
        let on_node = [options.network(), options.pid(), options.ipc()];
        if on_node.contains(&NamespaceMode::Node) {
            return Err(Error::InvalidArgument(
                "a pod with hostUsers: false cannot share the host's network, PID or IPC namespace"
                    .into(),
            ));
        }
        let mappings =
            Self { uids: Range::of(&users.uids, "uid")?, gids: Range::of(&users.gids, "gid")? };
        Ok(Some(mappings))
    }

    /// The container's mapping must equal its sandbox's. Upstream: containerd's check.
    pub fn agree(sandbox: Option<Self>, container: Option<&NamespaceOption>) -> Result<()> {
        let own = container.map(Self::of).transpose()?.flatten();
        if own == sandbox {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "user namespace config for sandbox is different from container. Sandbox userns config: \
             {sandbox:?} - Container userns config: {own:?}"
        )))
    }

    /// Whether a mount is to be mapped; its mapping must be the pod's.
    pub fn of_mount(mount: &cri::Mount, pod: Option<Self>) -> Result<bool> {
        if mount.uid_mappings.is_empty() && mount.gid_mappings.is_empty() {
            return Ok(false);
        }
        let own = Self {
            uids: Range::of(&mount.uid_mappings, "uid")?,
            gids: Range::of(&mount.gid_mappings, "gid")?,
        };
        if pod == Some(own) {
            return Ok(true);
        }
        let text =
            format!("the id mapping of mount {:?} differs from the pod's", mount.container_path);
        Err(Error::InvalidArgument(text))
    }
}

/// Whether this machine supports user namespaces for pods. Where the answer is wrongly yes (for
/// example, a node inside a container), creating the sandbox fails with the kernel's error.
pub(crate) fn supported() -> bool {
    let limit = fs::read_to_string("/proc/sys/user/max_user_namespaces").unwrap_or_default();
    let allowed = limit.trim().parse::<u64>().is_ok_and(|limit| limit > 0);
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    allowed && Path::new("/proc/self/ns/user").exists() && is_new_enough(&release)
}

fn is_new_enough(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= KERNEL,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cri::UserNamespace;

    fn one(host_id: u32, container_id: u32, length: u32) -> Vec<IDMapping> {
        vec![IDMapping { host_id, container_id, length }]
    }

    fn options(uids: Vec<IDMapping>, gids: Vec<IDMapping>) -> NamespaceOption {
        let users = UserNamespace { mode: NamespaceMode::Pod as i32, uids, gids };
        NamespaceOption { userns_options: Some(users), ..Default::default() }
    }

    #[test]
    fn unsupported_mappings_are_refused() {
        let check = |options: &NamespaceOption, expected: std::result::Result<bool, ()>| {
            let got = Mappings::of(options).map(|found| found.is_some()).map_err(|_| ());
            assert_eq!(got, expected, "{options:?}");
        };
        let usual = || one(65536, 0, 65536);
        check(&NamespaceOption::default(), Ok(false));
        let node = UserNamespace { mode: NamespaceMode::Node as i32, ..Default::default() };
        check(&NamespaceOption { userns_options: Some(node), ..Default::default() }, Ok(false));
        check(&options(usual(), usual()), Ok(true));
        check(&options(usual(), vec![]), Err(()));
        check(&options(usual(), one(65536, 1, 65536)), Err(()));
        check(&options(one(0, 0, 65536), usual()), Err(()));
        check(&options(one(65536, 0, 0), usual()), Err(()));
        check(&options(one(u32::MAX - 65536, 0, 65536), usual()), Ok(true));
        check(&options(one(u32::MAX - 65535, 0, 65536), usual()), Err(()));
        check(&options([usual(), usual()].concat(), usual()), Err(()));
        let network = NamespaceMode::Node as i32;
        check(&NamespaceOption { network, ..options(usual(), usual()) }, Err(()));
    }

    #[test]
    fn containers_and_mounts_have_their_pods_users() {
        let own = options(one(65536, 0, 65536), one(65536, 0, 65536));
        let pod = Mappings::of(&own).expect("fine");
        assert!(Mappings::agree(pod, Some(&own)).is_ok());
        assert!(Mappings::agree(pod, None).is_err());
        assert!(Mappings::agree(None, Some(&own)).is_err());
        let mount = |host: u32| cri::Mount {
            uid_mappings: one(host, 0, 65536),
            gid_mappings: one(host, 0, 65536),
            ..Default::default()
        };
        assert!(!Mappings::of_mount(&cri::Mount::default(), pod).expect("fine"));
        assert!(Mappings::of_mount(&mount(65536), pod).expect("fine"));
        assert!(Mappings::of_mount(&mount(131_072), pod).is_err());
        assert!(Mappings::of_mount(&mount(65536), None).is_err());
        let range = pod.expect("mapped").uids;
        assert_eq!(range.line(), "0 65536 65536\n");
    }

    #[test]
    fn user_namespaces_need_linux_6_3() {
        let check = |release: &str, expected| assert_eq!(is_new_enough(release), expected);
        check("6.18.44-fc\n", true);
        check("6.3.0", true);
        check("6.2.16-generic", false);
        check("5.15", false);
        check("10.0", true);
        check("", false);
    }
}
