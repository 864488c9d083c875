//! events.k8s.io: what has happened.

pub(crate) mod event;
