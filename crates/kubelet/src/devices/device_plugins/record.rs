//! The record of allocated devices: `<root>/device-plugins/kubelet_internal_checkpoint`.
//!
//! ```text
//! {"Data": {"PodDeviceEntries": [{"PodUID", "ContainerName", "ResourceName",
//!                                 "DeviceIDs": {"<NUMA node>": [<id>]}, "AllocResp": <base64>}],
//!           "RegisteredDevices": {"<resource>": [<id>]}},
//!  "Checksum": <32 bits of FNV-1a of the data as Go prints them>}
//! ```
//!
//! Invariant: the format is upstream's, so that either kubelet can read the other's record. An
//! unreadable record is logged and ignored.
//! Upstream: `devicemanager/checkpoint`, `checkpointmanager/checksum`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::messages::Allocated;
use super::table::{Given, OfPod, Table};

pub const FILE: &str = "kubelet_internal_checkpoint";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    devices: Option<BTreeMap<i64, Option<Vec<String>>>>,
    /// The plugin's answer: the protocol's message in base64.
    #[serde(rename = "AllocResp")]
    answer: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<Entry>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: Data,
    checksum: u64,
}

fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Whether an earlier kubelet left a record here.
pub fn exists(dir: &Path) -> bool {
    path(dir).exists()
}

/// The record of an earlier kubelet.
pub fn read(dir: &Path, now: Instant) -> Table {
    let file = path(dir);
    let data = match read_file(&file) {
        Ok(data) => data,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Table::default(),
        Err(error) => {
            tracing::error!(file = %file.display(), %error, "failed to read the devices of pods");
            return Table::default();
        }
    };
    let mut pods: BTreeMap<String, OfPod> = BTreeMap::new();
    for entry in data.pod_device_entries.into_iter().flatten() {
        let bytes = STANDARD.decode(entry.answer.unwrap_or_default()).unwrap_or_default();
        let Ok(answer) = Allocated::decode(bytes.as_slice()) else {
            tracing::error!(
                pod = entry.pod,
                resource = entry.resource_name,
                "failed to decode the recorded answer of the device plugin"
            );
            continue;
        };
        let devices = entry.devices.into_iter().flatten();
        let devices = devices.map(|(node, ids)| (node, ids.unwrap_or_default())).collect();
        let given = Given { devices, answer: Some(answer) };
        let of_container = pods.entry(entry.pod).or_default().entry(entry.container_name);
        of_container.or_default().insert(entry.resource_name, given);
    }
    let names = data.registered_devices.into_iter().flatten().map(|(name, _)| name).collect();
    Table::restored(names, pods, now)
}

fn read_file(file: &Path) -> io::Result<Data> {
    let checkpoint: Checkpoint = serde_json::from_slice(&std::fs::read(file)?)?;
    if checkpoint.checksum != u64::from(checksum(&checkpoint.data)) {
        return Err(io::Error::other("checkpoint is corrupted"));
    }
    Ok(checkpoint.data)
}

pub fn write(dir: &Path, table: &Table) -> io::Result<()> {
    let mut entries = vec![];
    for (pod, containers) in table.pods() {
        for (container, resources) in containers {
            for (resource, given) in resources {
                let Some(answer) = &given.answer else { continue };
                let devices = given.devices.iter().map(|(node, ids)| (*node, Some(ids.clone())));
                entries.push(Entry {
                    pod: pod.clone(),
                    container_name: container.clone(),
                    resource_name: resource.clone(),
                    devices: Some(devices.collect()),
                    answer: Some(STANDARD.encode(answer.encode_to_vec())),
                });
            }
        }
    }
    let ids = |ids: BTreeSet<String>| Some(ids.into_iter().collect());
    let registered = table.registered().into_iter().map(|(name, all)| (name, ids(all))).collect();
    let data = Data { pod_device_entries: Some(entries), registered_devices: Some(registered) };
    let checkpoint = Checkpoint { checksum: u64::from(checksum(&data)), data };
    let next = dir.join(format!(".{FILE}.new"));
    let bytes = serde_json::to_vec(&checkpoint)?;
    // Answers of plugins may hold secrets; a file left from before may be readable by everyone.
    match std::fs::remove_file(&next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next)?;
    file.write_all(&bytes)?;
    drop(file);
    std::fs::rename(next, path(dir))
}

/// FNV-1a of the text that Go's spew prints for the data.
fn checksum(data: &Data) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    shown(data).bytes().fold(0x811c_9dc5, step)
}

fn list<T>(out: &mut String, all: Option<&[T]>, mut one: impl FnMut(&mut String, &T)) {
    let Some(all) = all else { return out.push_str("<nil>") };
    out.push('[');
    for (index, item) in all.iter().enumerate() {
        if index > 0 {
            out.push(' ');
        }
        one(out, item);
    }
    out.push(']');
}

/// Keys in Go's order: numbers by size, text by bytes.
fn map<K: std::fmt::Display>(out: &mut String, all: Option<&BTreeMap<K, Option<Vec<String>>>>) {
    let Some(all) = all else { return out.push_str("<nil>") };
    out.push_str("map");
    let all: Vec<_> = all.iter().collect();
    list(out, Some(&all), |out, (key, ids)| {
        let _ = write!(out, "{key}:");
        list(out, ids.as_deref(), |out, id| out.push_str(id));
    });
}

fn shown(data: &Data) -> String {
    let mut out =
        String::from("(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)");
    list(&mut out, data.pod_device_entries.as_deref(), |out, entry| {
        let Entry { pod, container_name, resource_name, devices, answer } = entry;
        let _ = write!(
            out,
            "{{PodUID:(string){pod} ContainerName:(string){container_name} \
             ResourceName:(string){resource_name} DeviceIDs:(checkpoint.DevicesPerNUMA)"
        );
        map(out, devices.as_ref());
        out.push_str(" AllocResp:([]uint8)");
        let bytes = answer.as_ref().map(|text| STANDARD.decode(text).unwrap_or_default());
        list(out, bytes.as_deref(), |out, byte| {
            let _ = write!(out, "{byte}");
        });
        out.push('}');
    });
    out.push_str(" RegisteredDevices:(map[string][]string)");
    map(&mut out, data.registered_devices.as_ref());
    out.push('}');
    out
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::{Value, from_value, json};

    use super::*;

    /// The expected numbers come from upstream's code for the same data.
    #[test]
    fn checksums_are_upstreams() {
        let check = |data: Value, expected: u32| {
            let data: Data = from_value(data).expect("data");
            assert_eq!(checksum(&data), expected, "{}", shown(&data));
        };
        check(
            json!({"PodDeviceEntries": [
                {"PodUID": "u1", "ContainerName": "c \"q", "ResourceName": "example.com/d",
                 "DeviceIDs": {"-1": ["a", "b"], "10": ["z"], "2": ["z"]}, "AllocResp": "CgD/"},
                {"PodUID": "u2", "ContainerName": "c", "ResourceName": "r",
                 "DeviceIDs": null, "AllocResp": null}],
                "RegisteredDevices": {"example.com/d": ["a", "b"], "e": [], "f": null}}),
            1_155_528_096,
        );
        check(json!({"PodDeviceEntries": null, "RegisteredDevices": {}}), 3_467_439_661);
    }

    #[test]
    fn records_survive_a_restart() {
        let dir = tempfile::tempdir().expect("a directory");
        let answer = Allocated {
            envs: [("KEY".to_owned(), "value".to_owned())].into(),
            ..Allocated::default()
        };
        let given = Given { devices: [(-1, vec!["a".to_owned()])].into(), answer: Some(answer) };
        let asked = Given { answer: None, ..given.clone() };
        let of = |given: Given| -> OfPod { [("c".into(), [("r/d".into(), given)].into())].into() };
        let pods = [("1".to_owned(), of(given)), ("2".to_owned(), of(asked))].into();
        assert!(!exists(dir.path()));
        let table = Table::restored(vec!["r/d".into()], pods, Instant::now());
        write(dir.path(), &table).expect("written");
        let again = read(dir.path(), Instant::now());
        assert_eq!(again.registered(), table.registered());
        assert_eq!(again.pods().len(), 1, "an allocation without an answer is not recorded");
        assert_eq!(again.pods()["1"], table.pods()["1"]);

        let file = dir.path().join(FILE);
        let mode = std::fs::metadata(&file).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let broken = std::fs::read_to_string(&file).expect("text").replace("\"c\"", "\"d\"");
        std::fs::write(&file, broken).expect("written");
        assert!(read(dir.path(), Instant::now()).pods().is_empty(), "the record is corrupted");
    }
}
