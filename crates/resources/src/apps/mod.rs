//! The apps group: Deployments and what they are made of.

mod kinds;

use crate::Row;

pub(crate) const ROWS: &[fn() -> Row] = &[
    kinds::controller_revision,
    kinds::daemon_set,
    kinds::deployment,
    kinds::replica_set,
    kinds::stateful_set,
];
