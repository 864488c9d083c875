//! The node as a whole: its object and lease, its resources and their limits, its shutdown.

pub mod cgroups;
pub mod eviction;
pub mod families;
pub mod figures;
pub mod image_gc;
pub mod local_storage;
pub mod log_links;
pub mod log_rotation;
pub mod logind;
pub mod machine;
pub mod measured;
pub mod reserve;
pub mod shutdown;
pub mod slices;
pub mod status;
pub mod this;
pub mod upkeep;
