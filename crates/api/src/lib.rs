//! The built-in kinds: their types (re-exported), their schemas, and the facts about their fields
//! that the types lack.
//!
//! Invariants: no I/O; facts come from `facts/*.tsv`, which an xtask derives from published data;
//! nothing but the schemas is generated at build time, by `build.rs`.

pub mod declared;
pub mod facts;
pub mod go;
pub mod kinds;
pub mod load_balancers;
pub mod node_selectors;
pub mod nodes;
pub mod protobuf;
pub mod qos;
pub mod quota;
pub mod restarts;
pub mod scale;
pub mod schema;
pub mod taints;
pub mod types;
pub mod versions;
pub mod volumes;

pub use k8s_openapi;

/// Groups in the order of discovery: by upstream's group priorities.
pub const GROUP_ORDER: &[&str] = &[
    "",
    "apiregistration.k8s.io",
    "apps",
    "events.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "autoscaling",
    "batch",
    "certificates.k8s.io",
    "networking.k8s.io",
    "policy",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "scheduling.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
    "discovery.k8s.io",
    "resource.k8s.io",
    "flowcontrol.apiserver.k8s.io",
    "internal.apiserver.k8s.io",
    "storagemigration.k8s.io",
];
