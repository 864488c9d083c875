//! What a node and a pod cost must not depend on how many there are.
//!
//! Simulated nodes, which renew their Leases and run their pods, so that a size may take its time. Compared by
//! the server's CPU, not by time: the machine may do much else. Each size has a server of its own.

use std::path::Path;

use anyhow::{Result, ensure};
use testkit::throughput::hollow::{self, Depth, NODE_CPU, POD_CPU, Plan, RENEWAL_CPU};

/// A look at all nodes for each of them would cost five times as much.
const SIZES: [usize; 2] = [200, 1000];
/// Maps grow deeper, caches miss more often.
const ALLOWED: f64 = 1.5;
/// The same number for both sizes: a size of a thousand pods takes a minute in a program that is not optimised.
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
