//! The records of pinned CPUs and memory: `<root>/cpu_manager_state` and `<root>/memory_manager_state`.
//!
//! ```text
//! {"policyName": "static", "defaultCpuSet": "0,3", "entries": {"<uid>": {"<container>": "1-2"}}, "checksum": n}
//! {"policyName": "Static", "machineState": {"0": {"numberOfAssignments", "memoryMap", "cells"}},
//!  "entries": {"<uid>": {"<container>": [{"numaAffinity": [0], "type": "memory", "size": n}]}}, "checksum": n}
//! ```
//! The checksum is 32 bits of FNV-1a of the record as Go prints it, with a checksum of 0.
//!
//! Invariant: the formats are upstream's, so that either kubelet continues from the other's record. A record
//! that cannot be used stops the kubelet: other CPUs for running containers would be worse.
//! Upstream: `cm/cpumanager/state`, `cm/memorymanager/state`, `checkpointmanager/checksum`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub const CPU_FILE: &str = "cpu_manager_state";
pub const MEMORY_FILE: &str = "memory_manager_state";

/// By pod uid and container.
pub type Entries<T> = BTreeMap<String, BTreeMap<String, T>>;

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("checkpoint is corrupted")]
    Corrupt,
    #[error("configured policy {wanted:?} differs from state checkpoint policy {found:?}")]
    OtherPolicy { wanted: String, found: String },
    #[error("could not parse cpuset {0:?}: {1}")]
    CpuSet(String, super::cpuset::CpuSetError),
    #[error("{0}")]
    Invalid(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuRecord {
    pub policy_name: String,
    pub default_cpu_set: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub entries: Entries<String>,
    #[serde(default)]
    pub checksum: u64,
}

/// Bytes of one resource on one NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Table {
    pub total: u64,
    pub system_reserved: u64,
    pub allocatable: u64,
    pub reserved: u64,
    pub free: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeState {
    pub number_of_assignments: i64,
    /// By resource.
    pub memory_map: BTreeMap<String, Table>,
    /// The NUMA nodes that containers use together with this one.
    pub cells: Vec<usize>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Block {
    pub numa_affinity: Vec<usize>,
    #[serde(rename = "type")]
    pub resource: String,
    pub size: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryRecord {
    pub policy_name: String,
    pub machine_state: BTreeMap<usize, NodeState>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub entries: Entries<Vec<Block>>,
    #[serde(default)]
    pub checksum: u64,
}

/// A record, as Go prints it without its checksum.
pub trait Record: Serialize + DeserializeOwned {
    fn shown(&self) -> String;
    fn policy(&self) -> &str;
    fn checksum(&mut self) -> &mut u64;
}

/// Items between brackets, with spaces.
fn list<T>(
    out: &mut String,
    items: impl IntoIterator<Item = T>,
    mut one: impl FnMut(&mut String, T),
) {
    out.push('[');
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(' ');
        }
        one(out, item);
    }
    out.push(']');
}

fn entries<T>(out: &mut String, all: &Entries<T>, mut one: impl FnMut(&mut String, &T)) {
    out.push_str("map");
    list(out, all, |out, (pod, containers)| {
        let _ = write!(out, "{pod}:map");
        list(out, containers, |out, (container, value)| {
            let _ = write!(out, "{container}:");
            one(out, value);
        });
    });
}

impl Record for CpuRecord {
    fn shown(&self) -> String {
        let Self { policy_name, default_cpu_set, entries: all, .. } = self;
        let mut out = format!(
            "(*state.CPUManagerCheckpoint){{PolicyName:(string){policy_name} \
             DefaultCPUSet:(string){default_cpu_set} Entries:(map[string]map[string]string)"
        );
        entries(&mut out, all, |out, set| out.push_str(set));
        out.push_str(" Checksum:(checksum.Checksum)0}");
        out
    }

    fn policy(&self) -> &str {
        &self.policy_name
    }

    fn checksum(&mut self) -> &mut u64 {
        &mut self.checksum
    }
}

impl Record for MemoryRecord {
    fn shown(&self) -> String {
        let mut out = format!(
            "(*state.MemoryManagerCheckpoint){{PolicyName:(string){} \
             MachineState:(state.NUMANodeMap)map",
            self.policy_name
        );
        list(&mut out, &self.machine_state, show_node);
        out.push_str(" Entries:(state.ContainerMemoryAssignments)");
        entries(&mut out, &self.entries, |out, blocks| {
            list(out, blocks, |out, block| {
                out.push_str("{NUMAAffinity:([]int)");
                list(out, &block.numa_affinity, |out, node| {
                    let _ = write!(out, "{node}");
                });
                let Block { resource, size, .. } = block;
                let _ = write!(out, " Type:(v1.ResourceName){resource} Size:(uint64){size}}}");
            });
        });
        out.push_str(" Checksum:(checksum.Checksum)0}");
        out
    }

    fn policy(&self) -> &str {
        &self.policy_name
    }

    fn checksum(&mut self) -> &mut u64 {
        &mut self.checksum
    }
}

fn show_node(out: &mut String, (id, node): (&usize, &NodeState)) {
    let _ = write!(
        out,
        "{id}:<*>{{NumberOfAssignments:(int){} \
         MemoryMap:(map[v1.ResourceName]*state.MemoryTable)map",
        node.number_of_assignments
    );
    list(out, &node.memory_map, |out, (resource, table)| {
        let Table { total, system_reserved, allocatable, reserved, free } = table;
        let _ = write!(
            out,
            "{resource}:<*>{{TotalMemSize:(uint64){total} SystemReserved:(uint64){system_reserved} \
             Allocatable:(uint64){allocatable} Reserved:(uint64){reserved} Free:(uint64){free}}}"
        );
    });
    out.push_str(" Cells:([]int)");
    list(out, &node.cells, |out, cell| {
        let _ = write!(out, "{cell}");
    });
    out.push('}');
}

fn sum(record: &impl Record) -> u64 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    u64::from(record.shown().bytes().fold(0x811c_9dc5, step))
}

/// The record of an earlier kubelet with this policy; `None` if there is none.
pub fn read<R: Record>(file: &Path, policy: &str) -> Result<Option<R>, RecordError> {
    let bytes = match std::fs::read(file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut record: R = serde_json::from_slice(&bytes)?;
    let told = std::mem::take(record.checksum());
    // Old kubelets wrote no checksum.
    if told != 0 && told != sum(&record) {
        return Err(RecordError::Corrupt);
    }
    if record.policy() != policy {
        return Err(RecordError::OtherPolicy {
            wanted: policy.to_owned(),
            found: record.policy().to_owned(),
        });
    }
    Ok(Some(record))
}

/// Replaces the record.
pub fn write<R: Record>(file: &Path, mut record: R) -> io::Result<()> {
    *record.checksum() = sum(&record);
    let mut next = file.as_os_str().to_owned();
    next.push(".new");
    let next = PathBuf::from(next);
    std::fs::write(&next, serde_json::to_vec(&record).map_err(io::Error::other)?)?;
    std::fs::rename(next, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    /// The expected numbers come from Go's own printer for the same records; the first one is in the state
    /// files of every upstream node.
    #[test]
    fn checksums_are_upstreams() {
        fn check<R: Record>(record: Value, expected: u64) {
            let record: R = from_value(record).expect("a record");
            assert_eq!(sum(&record), expected, "{}", record.shown());
        }
        check::<CpuRecord>(json!({"policyName": "none", "defaultCpuSet": ""}), 1_353_318_690);
        check::<CpuRecord>(
            json!({"policyName": "static", "defaultCpuSet": "0,3",
                "entries": {"u1": {"c": "1-2", "b": "4"}, "u0": {"x": "5"}}}),
            839_309_446,
        );
        let table =
            json!({"total": 1, "systemReserved": 2, "allocatable": 3, "reserved": 4, "free": 5});
        let huge =
            json!({"total": 10, "systemReserved": 0, "allocatable": 10, "reserved": 0, "free": 10});
        check::<MemoryRecord>(
            json!({"policyName": "Static", "machineState": {
                "0": {"numberOfAssignments": 2, "cells": [0, 1],
                    "memoryMap": {"memory": table, "hugepages-2Mi": huge}},
                "1": {"numberOfAssignments": 0, "cells": [1], "memoryMap": {"memory": table}}},
                "entries": {"u1": {"c": [
                    {"numaAffinity": [0, 1], "type": "memory", "size": 7},
                    {"numaAffinity": [0], "type": "hugepages-2Mi", "size": 0}]}}}),
            2_466_179_453,
        );
        check::<MemoryRecord>(json!({"policyName": "Static", "machineState": {}}), 3_940_083_781);
    }

    #[test]
    fn a_record_is_verified() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join(CPU_FILE);
        assert!(matches!(read::<CpuRecord>(&file, "static"), Ok(None)));
        let record = CpuRecord {
            policy_name: "static".into(),
            default_cpu_set: "0-3".into(),
            ..CpuRecord::default()
        };
        write(&file, record.clone()).expect("written");
        assert_eq!(read(&file, "static").expect("read"), Some(record));
        let other = read::<CpuRecord>(&file, "none").expect_err("another policy").to_string();
        assert_eq!(
            other,
            "configured policy \"none\" differs from state checkpoint policy \"static\""
        );
        let text = std::fs::read_to_string(&file).expect("text").replace("0-3", "0-4");
        std::fs::write(&file, text).expect("written");
        assert!(matches!(read::<CpuRecord>(&file, "static"), Err(RecordError::Corrupt)));
    }
}
