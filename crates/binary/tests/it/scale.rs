//! The cost of a node and of a pod must not depend on their number.
//!
//! Compared by CPU, not by time: the machine may be under load. Each size has its own server.

use std::path::Path;

use anyhow::{Result, ensure};
use testkit::throughput::nodes::{self, Figures};

/// A loop over all nodes for each node would cost five times as much. With more nodes, the first would
/// become NotReady before a busy machine is done, because they have no kubelets.
const SIZES: [usize; 2] = [60, 300];
const PODS_PER_NODE: usize = 2;
/// Deeper maps and cache misses may cost this factor.
const ALLOWED: f64 = 1.5;
/// The share of a core that an idle server may use.
const IDLE: f64 = 0.05;

#[test]
fn a_node_costs_the_same_among_many() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_decapod"));
    let run = |count: usize| nodes::run(binary, count, count * PODS_PER_NODE);
    let [few, many] = [run(SIZES[0])?, run(SIZES[1])?];
    let of_node = |figures: &Figures| figures.node_cpu / figures.nodes as f64;
    let of_pod = |figures: &Figures| figures.pod_cpu / figures.pods as f64;
    for (what, small, large) in
        [("node", of_node(&few), of_node(&many)), ("pod", of_pod(&few), of_pod(&many))]
    {
        let ratio = large / small;
        ensure!(
            ratio <= ALLOWED,
            "a {what} costs {:.1} ms of CPU among {} nodes and {:.1} ms among {}: {ratio:.2} times",
            small * 1e3,
            few.nodes,
            large * 1e3,
            many.nodes
        );
    }
    ensure!(many.idle < IDLE, "{} of a core without work", many.idle);
    Ok(())
}
