//! node.k8s.io: how containers are run.

pub(crate) mod runtime_class;
