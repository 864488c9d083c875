//! CDI: resolves device names to devices in a container.
//!
//! In: names (`vendor.com/class=device`), and the drivers' specifications in two directories. Out:
//! a container's configuration with the devices' nodes, mounts, variables, groups and hooks.
//! Upstream: the Container Device Interface, `tags.cncf.io/container-device-interface`.
//!
//! Invariants: the directories are read for each new container, so that a driver's new file applies
//! at once. A name without a definition, or with two in one directory, is an error.
//! Deviation: Intel RDT and network devices are refused, not ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use cri::{ContainerConfig, Device, Error, KeyValue, Mount, MountPropagation, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// If both define a device, the later directory wins.
pub(crate) const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    kind: String,
    #[serde(default)]
    devices: Vec<Described>,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    name: String,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Edits {
    env: Vec<String>,
    device_nodes: Vec<Node>,
    mounts: Vec<Bind>,
    hooks: Vec<Hook>,
    additional_gids: Vec<u32>,
    intel_rdt: Option<Value>,
    net_devices: Vec<Value>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Node {
    path: String,
    host_path: String,
    permissions: String,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Bind {
    host_path: String,
    container_path: String,
    options: Vec<String>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Hook {
    hook_name: String,
    path: String,
    args: Vec<String>,
    env: Vec<String>,
    timeout: Option<i64>,
}

/// The edits that do not fit into a CRI container configuration.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Extra {
    pub groups: Vec<u32>,
    /// As in `config.json`: hooks by the moment of their execution.
    pub hooks: Map<String, Value>,
}

/// The definition of each name; `None` where two files of one directory define it.
type Known = BTreeMap<String, Option<(PathBuf, Edits)>>;

/// Resolves the CDI devices of the configuration and applies their edits to it.
pub(crate) fn inject(directories: &[&Path], config: &mut ContainerConfig) -> Result<Extra> {
    let names: Vec<String> =
        std::mem::take(&mut config.cdi_devices).into_iter().map(|device| device.name).collect();
    let mut extra = Extra::default();
    if names.is_empty() {
        return Ok(extra);
    }
    let (known, common) = read(directories);
    let unknown: Vec<&str> = names
        .iter()
        .filter(|name| !matches!(known.get(*name), Some(Some(_))))
        .map(String::as_str)
        .collect();
    if !unknown.is_empty() {
        let why = format!("unresolvable CDI devices {}", unknown.join(", "));
        return Err(Error::Internal(format!("CDI device injection failed: {why}")));
    }
    let mut seen = BTreeSet::new();
    for name in &names {
        let Some((file, edits)) = known.get(name).and_then(Option::as_ref) else { continue };
        // A file's common edits are applied once.
        if seen.insert(file)
            && let Some(common) = common.get(file)
        {
            apply(common, config, &mut extra)?;
        }
        apply(edits, config, &mut extra)?;
    }
    Ok(extra)
}

/// All devices, and the common edits of each file.
fn read(directories: &[&Path]) -> (Known, BTreeMap<PathBuf, Edits>) {
    let (mut all, mut common) = (Known::new(), BTreeMap::new());
    for directory in directories {
        let mut own = Known::new();
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        files.sort_unstable();
        for file in files {
            let is_spec = file.extension().is_some_and(|one| one == "json" || one == "yaml");
            if !is_spec {
                continue;
            }
            let text = std::fs::read_to_string(&file);
            let parsed = text.map_err(|error| error.to_string()).and_then(|text| {
                // YAML includes JSON.
                serde_saphyr::from_str::<Spec>(&text).map_err(|error| error.to_string())
            });
            match parsed {
                Err(error) => {
                    tracing::warn!(file = %file.display(), error, "failed to parse the CDI file")
                }
                Ok(spec) => {
                    for device in spec.devices {
                        let name = format!("{}={}", spec.kind, device.name);
                        let found = Some((file.clone(), device.container_edits));
                        own.entry(name).and_modify(|known| *known = None).or_insert(found);
                    }
                    common.insert(file, spec.container_edits);
                }
            }
        }
        all.extend(own);
    }
    (all, common)
}

fn apply(edits: &Edits, config: &mut ContainerConfig, extra: &mut Extra) -> Result<()> {
    if edits.intel_rdt.is_some() || !edits.net_devices.is_empty() {
        let why = "CDI devices with intelRdt or netDevices are not supported";
        return Err(Error::Unimplemented(why.into()));
    }
    for variable in &edits.env {
        let (key, value) = variable.split_once('=').unwrap_or((variable, ""));
        config.envs.push(KeyValue { key: key.into(), value: Bytes::from(value.to_owned()) });
    }
    for node in &edits.device_nodes {
        let or =
            |text: &String, other: &str| if text.is_empty() { other.into() } else { text.clone() };
        config.devices.retain(|known| known.container_path != node.path);
        config.devices.push(Device {
            container_path: node.path.clone(),
            host_path: or(&node.host_path, &node.path),
            permissions: or(&node.permissions, "rwm"),
        });
    }
    for bind in &edits.mounts {
        let has = |option: &str| bind.options.iter().any(|one| one == option);
        let propagation = match () {
            () if has("rshared") || has("shared") => MountPropagation::Bidirectional,
            () if has("rslave") || has("slave") => MountPropagation::HostToContainer,
            () => MountPropagation::Private,
        };
        config.mounts.retain(|known| known.container_path != bind.container_path);
        config.mounts.push(Mount {
            container_path: bind.container_path.clone(),
            host_path: bind.host_path.clone(),
            readonly: has("ro"),
            propagation: propagation as i32,
            ..Mount::default()
        });
    }
    for group in &edits.additional_gids {
        if *group != 0 && !extra.groups.contains(group) {
            extra.groups.push(*group);
        }
    }
    for hook in &edits.hooks {
        let mut shown = json!({"path": hook.path, "args": hook.args, "env": hook.env});
        if let Some(timeout) = hook.timeout {
            shown["timeout"] = timeout.into();
        }
        let moment = extra.hooks.entry(hook.hook_name.clone()).or_insert_with(|| json!([]));
        moment.as_array_mut().into_iter().for_each(|all| all.push(shown.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cri::CDIDevice;

    use super::*;

    fn config(names: &[&str]) -> ContainerConfig {
        let cdi_devices = names.iter().map(|name| CDIDevice { name: (*name).into() }).collect();
        ContainerConfig { cdi_devices, ..ContainerConfig::default() }
    }

    #[test]
    fn devices_are_resolved_from_their_files() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let spec = json!({"cdiVersion": "0.8.0", "kind": "example.com/gpu",
            "containerEdits": {"env": ["DRIVER=1"], "mounts": [{"hostPath": "/lib/gpu",
                "containerPath": "/usr/lib/gpu", "options": ["ro", "rbind", "rslave"]}]},
            "devices": [
                {"name": "a", "containerEdits": {"env": ["GPU_A=yes"], "additionalGids": [44, 0],
                    "deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}]}},
                {"name": "b", "containerEdits": {"env": ["GPU_B=yes"],
                    "deviceNodes": [{"path": "/dev/zero", "permissions": "r"}],
                    "hooks": [{"hookName": "createContainer", "path": "/bin/true",
                        "args": ["true", "x"], "timeout": 3}]}}]});
        std::fs::write(old.path().join("gpu.json"), spec.to_string()).unwrap();
        let newer = "cdiVersion: 0.8.0\nkind: example.com/nic\ndevices:\n- name: n\n  containerEdits:\n    env: [NIC=new]\n";
        std::fs::write(new.path().join("nic.yaml"), newer).unwrap();
        std::fs::write(old.path().join("nic.yaml"), newer.replace("new", "old")).unwrap();
        std::fs::write(old.path().join("note.txt"), "no").unwrap();
        std::fs::write(old.path().join("broken.json"), "{").unwrap();
        let directories = [old.path(), new.path()];

        let mut all = config(&["example.com/gpu=a", "example.com/gpu=b", "example.com/nic=n"]);
        let extra = inject(&directories, &mut all).unwrap();
        let env: Vec<String> = all
            .envs
            .iter()
            .map(|one| format!("{}={}", one.key, String::from_utf8_lossy(&one.value)))
            .collect();
        assert_eq!(env, ["DRIVER=1", "GPU_A=yes", "GPU_B=yes", "NIC=new"]);
        let nodes: Vec<_> = all
            .devices
            .iter()
            .map(|one| (&*one.container_path, &*one.host_path, &*one.permissions))
            .collect();
        assert_eq!(nodes, [("/dev/gpu0", "/dev/null", "rwm"), ("/dev/zero", "/dev/zero", "r")]);
        assert_eq!(all.mounts.len(), 1);
        assert!(all.mounts[0].readonly);
        assert_eq!(all.mounts[0].propagation, MountPropagation::HostToContainer as i32);
        assert_eq!(extra.groups, [44]);
        let hook = json!([{"path": "/bin/true", "args": ["true", "x"], "env": [], "timeout": 3}]);
        assert_eq!(extra.hooks["createContainer"], hook);
        assert!(all.cdi_devices.is_empty());

        let mut unknown = config(&["example.com/gpu=a", "example.com/gpu=z", "other.com/x=y"]);
        let why = inject(&directories, &mut unknown).unwrap_err().to_string();
        assert_eq!(
            why,
            "CDI device injection failed: unresolvable CDI devices example.com/gpu=z, other.com/x=y"
        );
        // Two files of one directory conflict.
        std::fs::write(new.path().join("other.yaml"), newer).unwrap();
        assert!(inject(&directories, &mut config(&["example.com/nic=n"])).is_err());
        assert_eq!(inject(&directories, &mut config(&[])).unwrap(), Extra::default());
    }
}
