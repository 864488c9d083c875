//! Rewrites a configuration with node paths to one with paths of a [`Stage`], for a pod with a user
//! namespace.
//!
//! In: the usual `config.json`, with `uidMappings` on the mounts that need id mapping. Out: the
//! same, with every node path replaced by a stage path, and the stage. Pure.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::idmap::Travel;
use crate::shim::stage::{DIRECTORY, Item, Stage};

/// The devices that libcontainer creates in every `/dev`.
const DEVICES: [&str; 6] = ["null", "zero", "full", "tty", "urandom", "random"];

/// `devices`: host and container paths of the devices in the configuration.
pub(crate) fn plan(spec: &mut Value, users: &Path, devices: &[(PathBuf, PathBuf)]) -> Stage {
    let mut stage = Stage { users: users.to_owned(), items: vec![] };
    let mut replace = |path: &mut Value, name: String, mapped: bool, travel: Travel| {
        let source = PathBuf::from(path.as_str().unwrap_or_default());
        let item = Item { source, name: format!("{DIRECTORY}/{name}"), mapped, travel };
        *path = item.path().display().to_string().into();
        stage.items.push(item);
    };
    // No propagation: the container itself makes the mounts below its root.
    replace(&mut spec["root"]["path"], "root".into(), false, Travel::Not);
    for (index, mount) in list(&mut spec["mounts"]).iter_mut().enumerate() {
        let mapped = ["uidMappings", "gidMappings"].map(|field| {
            mount.as_object_mut().is_some_and(|fields| fields.remove(field).is_some())
        });
        if mount["type"] != "bind" {
            continue;
        }
        let is_private = list(&mut mount["options"]).iter().any(|option| option == "rprivate");
        let travel = if is_private { Travel::Not } else { Travel::Inwards };
        replace(&mut mount["source"], index.to_string(), mapped == [true, true], travel);
    }
    for namespace in list(&mut spec["linux"]["namespaces"]) {
        let name = format!("ns-{}", namespace["type"].as_str().unwrap_or_default());
        if namespace.get("path").is_some_and(Value::is_string) {
            replace(&mut namespace["path"], name, false, Travel::Not);
        }
    }
    let usual = DEVICES.map(|name| Path::new("/dev").join(name));
    let usual = usual.iter().map(|path| (path.clone(), path.clone()));
    for (host, inside) in devices.iter().cloned().chain(usual) {
        // libcontainer rejects devices outside of /dev with its own error.
        let Ok(name) = inside.strip_prefix("/dev") else { continue };
        let name = name.display().to_string();
        if stage.items.iter().any(|item| item.name == name) {
            continue;
        }
        stage.items.push(Item { source: host, name, mapped: false, travel: Travel::Not });
    }
    stage
}

fn list(value: &mut Value) -> &mut [Value] {
    value.as_array_mut().map(Vec::as_mut_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_path_of_the_node_is_replaced() {
        let range = json!([{"containerID": 0, "hostID": 65536, "size": 65536}]);
        let mut spec = json!({
            "root": {"path": "/c/rootfs", "readonly": true},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/data", "type": "bind", "source": "/v/data",
                 "options": ["rbind", "rprivate", "ro"],
                 "uidMappings": range, "gidMappings": range},
                {"destination": "/image", "type": "bind", "source": "/v/image",
                 "options": ["rbind", "rslave", "rw"]},
            ],
            "linux": {"namespaces": [
                {"type": "mount"}, {"type": "user", "path": "/s/user"},
                {"type": "pid", "path": "/proc/7/ns/pid"},
            ]},
        });
        let devices = [("/dev/host".into(), "/dev/net/tun".into()), ("/x".into(), "/y".into())];
        let stage = plan(&mut spec, Path::new("/s/user"), &devices);
        assert_eq!(spec["root"]["path"], "/dev/.decapod/root");
        assert_eq!(
            spec["mounts"],
            json!([
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/data", "type": "bind", "source": "/dev/.decapod/1",
                 "options": ["rbind", "rprivate", "ro"]},
                {"destination": "/image", "type": "bind", "source": "/dev/.decapod/2",
                 "options": ["rbind", "rslave", "rw"]},
            ])
        );
        let namespaces = &spec["linux"]["namespaces"];
        assert_eq!(namespaces[1]["path"], "/dev/.decapod/ns-user");
        assert_eq!(namespaces[2]["path"], "/dev/.decapod/ns-pid");
        assert!(namespaces[0].get("path").is_none());
        let items: Vec<(&str, &str, bool, Travel)> = stage
            .items
            .iter()
            .map(|i| (i.source.to_str().unwrap_or(""), i.name.as_str(), i.mapped, i.travel))
            .collect();
        assert_eq!(
            items[..6],
            [
                ("/c/rootfs", ".decapod/root", false, Travel::Not),
                ("/v/data", ".decapod/1", true, Travel::Not),
                ("/v/image", ".decapod/2", false, Travel::Inwards),
                ("/s/user", ".decapod/ns-user", false, Travel::Not),
                ("/proc/7/ns/pid", ".decapod/ns-pid", false, Travel::Not),
                ("/dev/host", "net/tun", false, Travel::Not),
            ]
        );
        assert_eq!(items.len(), 6 + DEVICES.len());
    }
}
