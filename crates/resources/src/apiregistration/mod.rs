//! apiregistration.k8s.io: which server answers for a group's version.

pub mod api_service;
