//! apps: workloads that run until they are deleted.

pub(crate) mod controller_revision;
pub(crate) mod daemon_set;
pub(crate) mod deployment;
pub(crate) mod replica_set;
pub(crate) mod stateful_set;

use crate::kind::UpdateCheck;
use crate::validate::workloads;

/// How the counts of a status are checked.
const COUNTS: &[(&str, UpdateCheck)] = &[("status", workloads::counts)];

/// Go leaves out counts of zero.
fn tidy_counts<const N: usize>(counts: [&mut Option<i32>; N]) {
    for count in counts {
        count.take_if(|count| *count == 0);
    }
}
