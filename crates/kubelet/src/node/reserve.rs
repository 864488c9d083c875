//! The parts of the node that are not for pods: reservations for the system and for Kubernetes itself.
//!
//! ```text
//!  capacity = kubeReserved + systemReserved + hard eviction thresholds + allocatable (what the API shows)
//!  enforced: pods     the cgroup of all pods has capacity − reservations
//!            system-reserved, kube-reserved     existing cgroups get the reservations as limits
//!            …-compressible                     only their CPU weight
//! ```
//!
//! In: settings, the capacity. Out: allocatable amounts, limits of cgroups. Pure but for [`enforce_existing`].
//! Upstream: `cm/node_container_manager_linux.go`.

use std::collections::BTreeMap;
use std::io;

use cri::LinuxContainerResources;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::config::Config;
use crate::managers::cpuset::CpuSet;
use crate::node::cgroups::Cgroups;
use crate::node::eviction::threshold::Signal;
use crate::node::machine::{Machine, processes};
use crate::resources::{ResourceList, bytes_quantity, cpu_shares, milli, milli_quantity, units};

/// By resource: thousandths of CPUs; bytes, processes.
pub type Amounts = BTreeMap<String, i64>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    Pods,
    System,
    SystemCompressible,
    Kube,
    KubeCompressible,
}

impl Enforcement {
    pub const ALL: [(&'static str, Self); 5] = [
        ("pods", Self::Pods),
        ("system-reserved", Self::System),
        ("system-reserved-compressible", Self::SystemCompressible),
        ("kube-reserved", Self::Kube),
        ("kube-reserved-compressible", Self::KubeCompressible),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, one)| *one)
    }
}

#[derive(Clone, Debug)]
pub struct Reservation {
    pub kube: Amounts,
    pub system: Amounts,
    /// These CPUs are reserved, instead of amounts.
    pub cpus: Option<CpuSet>,
    pub enforce: Vec<Enforcement>,
    pub kube_cgroup: String,
    pub system_cgroup: String,
}

impl Default for Reservation {
    fn default() -> Self {
        Self {
            kube: Amounts::new(),
            system: Amounts::new(),
            cpus: None,
            enforce: vec![Enforcement::Pods],
            kube_cgroup: String::new(),
            system_cgroup: String::new(),
        }
    }
}

impl Reservation {
    /// The sum for one resource.
    pub fn of(&self, resource: &str) -> i64 {
        if let Some(cpus) = self.cpus.as_ref().filter(|_| resource == "cpu") {
            return i64::try_from(cpus.len()).unwrap_or_default() * 1000;
        }
        let of = |all: &Amounts| all.get(resource).copied().unwrap_or_default();
        of(&self.kube).saturating_add(of(&self.system))
    }

    fn enforces(&self, what: Enforcement) -> bool {
        self.enforce.contains(&what)
    }
}

/// Why a kubelet does not start.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    #[error(
        "invalid Node Allocatable configuration. Resource {resource:?} has a reservation of {reserved} but capacity of {capacity}. Expected capacity >= reservation."
    )]
    TooMuch { resource: String, reserved: String, capacity: String },
    #[error(
        "reservedSystemCPUs (--reserved-cpus) {0:?} are not all online: this machine has {1:?}"
    )]
    NoSuchCpus(String, String),
    #[error("Failed to enforce {what} Reserved Cgroup Limits on {cgroup:?}: {error}")]
    Cgroup { what: &'static str, cgroup: String, error: io::Error },
}

fn amount(resource: &str, quantity: &Quantity) -> i64 {
    if resource == "cpu" { milli(quantity) } else { units(quantity) }
}

fn shown(resource: &str, amount: i64) -> Quantity {
    match resource {
        "cpu" => milli_quantity(amount),
        "memory" => bytes_quantity(amount),
        _ => Quantity(amount.to_string()),
    }
}

/// The amount that hard thresholds keep free.
fn kept_free(config: &Config, resource: &str, capacity: i64) -> i64 {
    let signal = match resource {
        "memory" => Signal::Memory,
        "ephemeral-storage" => Signal::NodeFs,
        _ => return 0,
    };
    let capacity = u64::try_from(capacity).unwrap_or_default();
    i64::try_from(config.eviction.hard(signal, capacity)).unwrap_or(i64::MAX)
}

/// Capacity minus reservations and hard eviction thresholds; memory without huge pages.
pub fn allocatable(config: &Config, capacity: &ResourceList) -> ResourceList {
    let mut out = capacity.clone();
    let mut huge = 0;
    for (resource, quantity) in capacity {
        let all = amount(resource, quantity);
        let kept = config.reserve.of(resource).saturating_add(kept_free(config, resource, all));
        if kept > 0 || resource == "memory" {
            out.insert(resource.clone(), shown(resource, (all - kept).max(0)));
        }
        if resource.starts_with("hugepages-") {
            huge += all;
        }
    }
    if let Some(memory) = out.get("memory").filter(|_| huge > 0) {
        let left = bytes_quantity((units(memory) - huge).max(0));
        out.insert("memory".into(), left);
    }
    out
}

/// Refuses reservations that the machine does not have.
pub fn check(
    config: &Config,
    machine: &Machine,
    capacity: &ResourceList,
) -> Result<(), ReserveError> {
    if let Some(cpus) = &config.reserve.cpus {
        let online = machine.hardware.topology.cpus.all();
        if !cpus.is_subset(&online) {
            return Err(ReserveError::NoSuchCpus(cpus.to_string(), online.to_string()));
        }
    }
    for (resource, quantity) in capacity {
        let all = amount(resource, quantity);
        let kept = config.reserve.of(resource).saturating_add(kept_free(config, resource, all));
        if kept > all {
            return Err(ReserveError::TooMuch {
                resource: resource.clone(),
                reserved: shown(resource, kept).0,
                capacity: quantity.0.clone(),
            });
        }
    }
    Ok(())
}

/// The limits of a cgroup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    pub resources: LinuxContainerResources,
    /// 0: no limit.
    pub pids: i64,
}

/// The limits of all pods together: capacity minus the reservations, if they are enforced. The eviction
/// threshold is not enforced by cgroups. Upstream: `getNodeAllocatableAbsolute`.
pub fn of_pods(config: &Config, capacity: &ResourceList) -> Limits {
    let is_enforced = config.reserve.enforces(Enforcement::Pods);
    let left = |resource: &str| {
        let all = capacity.get(resource).map_or(0, |quantity| amount(resource, quantity));
        let kept = if is_enforced { config.reserve.of(resource) } else { 0 };
        (all - kept).max(0)
    };
    let most = i64::try_from(processes().1).unwrap_or(i64::MAX);
    let kept = if is_enforced { config.reserve.of("pid") } else { 0 };
    let resources = LinuxContainerResources {
        cpu_shares: cpu_shares(left("cpu")),
        memory_limit_in_bytes: left("memory"),
        ..LinuxContainerResources::default()
    };
    Limits { resources, pids: (most - kept).max(1) }
}

/// Limits the cgroups of the system and of Kubernetes, which must exist.
pub fn enforce_existing(config: &Config, cgroups: &Cgroups) -> Result<(), ReserveError> {
    let own = &config.reserve;
    let all = [
        (Enforcement::System, "System", &own.system_cgroup, &own.system, false),
        (Enforcement::SystemCompressible, "System", &own.system_cgroup, &own.system, true),
        (Enforcement::Kube, "Kube", &own.kube_cgroup, &own.kube, false),
        (Enforcement::KubeCompressible, "Kube", &own.kube_cgroup, &own.kube, true),
    ];
    for (what, name, cgroup, amounts, only_cpu) in all {
        if !own.enforces(what) {
            continue;
        }
        let of = |resource: &str| {
            let hides = only_cpu && resource != "cpu";
            amounts.get(resource).copied().filter(|_| !hides).unwrap_or_default()
        };
        let resources = LinuxContainerResources {
            cpu_shares: if of("cpu") > 0 { cpu_shares(of("cpu")) } else { 0 },
            memory_limit_in_bytes: of("memory"),
            ..LinuxContainerResources::default()
        };
        let limits = Limits { resources, pids: of("pid") };
        cgroups.limit_existing(cgroup, &limits).map_err(|error| ReserveError::Cgroup {
            what: name,
            cgroup: cgroup.clone(),
            error,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capacity() -> ResourceList {
        [
            ("cpu", "4"),
            ("memory", "4Gi"),
            ("ephemeral-storage", "1000"),
            ("pods", "110"),
            ("hugepages-2Mi", "64Mi"),
        ]
        .map(|(name, text)| (name.to_owned(), Quantity(text.to_owned())))
        .into()
    }

    fn config() -> Config {
        let mut config = Config::new("n", "/data".into());
        config.reserve.kube = [("cpu".into(), 250), ("memory".into(), 256 << 20)].into();
        config.reserve.system = [("cpu".into(), 250), ("ephemeral-storage".into(), 100)].into();
        config
    }

    #[test]
    fn pods_get_the_rest() {
        let list = allocatable(&config(), &capacity());
        let check = |name: &str, expected: &str| assert_eq!(list[name].0, expected, "{name}");
        check("cpu", "3500m");
        // 4 GiB − 256 MiB − 100 MiB for evictions − 64 MiB of huge pages
        check("memory", "3676Mi");
        check("ephemeral-storage", "850");
        check("pods", "110");
        check("hugepages-2Mi", "64Mi");
        let limits = of_pods(&config(), &capacity());
        assert_eq!(limits.resources.memory_limit_in_bytes, (4096 - 256) << 20);
        assert_eq!(limits.resources.cpu_shares, 3584);
        let mut none = config();
        none.reserve.enforce.clear();
        assert_eq!(of_pods(&none, &capacity()).resources.memory_limit_in_bytes, 4 << 30);
    }

    #[test]
    fn reservations_must_fit() {
        let mut config = config();
        let machine = Machine::default();
        check(&config, &machine, &capacity()).expect("fits");
        config.reserve.kube.insert("cpu".into(), 4000);
        assert_eq!(
            check(&config, &machine, &capacity()).expect_err("too much").to_string(),
            "invalid Node Allocatable configuration. Resource \"cpu\" has a reservation of 4250m but \
             capacity of 4. Expected capacity >= reservation."
        );
        config.reserve.cpus = "0-1".parse().ok();
        assert!(matches!(check(&config, &machine, &capacity()), Err(ReserveError::NoSuchCpus(..))));
        assert_eq!(config.reserve.of("cpu"), 2000, "named CPUs replace amounts");
    }
}
