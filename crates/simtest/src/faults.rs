//! The faults that a round may have on.
//!
//! Each is within the promises of the protocol: a client that follows the rules survives it. Seed-swarm: a
//! round has a random half of them on, because some faults hide what others show.

use std::collections::BTreeSet;

use base::rng::Stream;

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub enum Fault {
    /// A request arrives, or its answer does, seconds late.
    Slow,
    /// The connection breaks before the request arrives.
    Dropped,
    /// The connection breaks after the write took place.
    Lost,
    /// 429 with Retry-After.
    TooMany,
    /// 500, 503 and 504; nothing was written.
    Errors,
    /// 409 for a replacement or a patch that would have succeeded.
    Conflicts,
    /// Watches end after a while.
    Cuts,
    /// Watches deliver late.
    Stalls,
    /// Watches are refused with 410.
    Expired,
    /// No bookmarks, where watches are read as bytes.
    NoBookmarks,
    /// Parts read watches as bytes, not as the server's own objects.
    Bytes,
    /// Parts are killed and start again.
    Crashes,
    /// A part reaches nobody for a while.
    Partitions,
    /// Two of each component compete for its Lease.
    Leaders,
    /// Nodes fall silent and come back.
    Silence,
    /// Containers crash, never become ready, or take long.
    Containers,
}

pub const ALL: [Fault; 16] = [
    Fault::Slow,
    Fault::Dropped,
    Fault::Lost,
    Fault::TooMany,
    Fault::Errors,
    Fault::Conflicts,
    Fault::Cuts,
    Fault::Stalls,
    Fault::Expired,
    Fault::NoBookmarks,
    Fault::Bytes,
    Fault::Crashes,
    Fault::Partitions,
    Fault::Leaders,
    Fault::Silence,
    Fault::Containers,
];

/// A random half.
pub fn swarm(random: &mut Stream) -> BTreeSet<Fault> {
    ALL.into_iter().filter(|_| random.chance(0.5)).collect()
}
