//! internal.apiserver.k8s.io: what servers tell each other.

pub(crate) mod storage_version;
