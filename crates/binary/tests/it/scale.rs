//! The cost of a node and of a pod must not depend on their number.
//!
//! Simulated nodes, which renew their Leases and run their pods, so a size may take long. Compared by the
//! server's CPU, not by time: the machine may be under load. Each size has its own server.

use std::path::Path;

use anyhow::{Result, ensure};
use testkit::throughput::hollow::{self, Depth, NODE_CPU, POD_CPU, Plan, RENEWAL_CPU};

/// A loop over all nodes for each node would cost five times as much.
const SIZES: [usize; 2] = [200, 1000];
/// Deeper maps and cache misses may cost this factor.
const ALLOWED: f64 = 1.5;
/// The same number for both sizes: a size of a thousand pods takes a minute in an unoptimised program.
const PODS: usize = 300;

#[test]
fn a_node_costs_the_same_among_many() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_decapod"));
    let run = |nodes: usize| hollow::run(binary, Plan { nodes, pods: PODS, depth: Depth::Brief });
    let [few, many] = [run(SIZES[0])?, run(SIZES[1])?];
    for what in [NODE_CPU, POD_CPU, RENEWAL_CPU] {
        let (small, large) = (few.get(what)?, many.get(what)?);
        ensure!(
            large / small <= ALLOWED,
            "{what}: {small:.1} ms among {} nodes and {large:.1} ms among {}: {:.2} times",
            SIZES[0],
            SIZES[1],
            large / small
        );
    }
    Ok(())
}
