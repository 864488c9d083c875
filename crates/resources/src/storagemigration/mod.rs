//! storagemigration.k8s.io: objects that are to be stored in another version.

pub(crate) mod storage_version_migration;
