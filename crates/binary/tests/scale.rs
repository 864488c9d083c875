//! The cost of a node and of a pod must not depend on their number.
//!
//! Compares the server's CPU, not time, among few and among many simulated nodes. Each size has its own
//! server. A test program of its own, so that cargo runs no other test beside it: on a shared core the
//! same work takes up to twice the CPU. Load from outside only adds to a figure, so the smallest of
//! several runs counts; a second run happens only where the first is over the limit.

use std::path::Path;

use anyhow::{Result, bail};
use testkit::throughput::hollow::{self, Depth, NODE_CPU, POD_CPU, Plan, RENEWAL_CPU};

/// A loop over all nodes for each node would cost five times as much.
const SIZES: [usize; 2] = [200, 1000];
/// Deeper maps and cache misses may cost this factor.
const ALLOWED: f64 = 1.5;
/// The same number for both sizes: a size of a thousand pods takes a minute in an unoptimised program.
const PODS: usize = 300;
const RUNS: usize = 3;
const WHAT: [&str; 3] = [NODE_CPU, POD_CPU, RENEWAL_CPU];

#[test]
fn a_node_costs_the_same_among_many() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_decapod"));
    // By size and figure, in milliseconds.
    let mut least = [[f64::INFINITY; WHAT.len()]; SIZES.len()];
    let mut over = Vec::new();
    for _ in 0..RUNS {
        for (nodes, least) in SIZES.into_iter().zip(&mut least) {
            let figures = hollow::run(binary, Plan { nodes, pods: PODS, depth: Depth::Brief })?;
            for (what, least) in WHAT.into_iter().zip(least) {
                *least = least.min(figures.get(what)?);
            }
        }
        over = (0..WHAT.len()).filter_map(|index| too_dear(index, &least)).collect();
        if over.is_empty() {
            return Ok(());
        }
        eprintln!("over the limit so far: {}", over.join("; "));
    }
    bail!("{}", over.join("; "))
}

fn too_dear(index: usize, least: &[[f64; WHAT.len()]; SIZES.len()]) -> Option<String> {
    let [few, many] = SIZES;
    let [small, large] = [least[0][index], least[1][index]];
    let ratio = large / small;
    (ratio > ALLOWED).then(|| {
        let what = WHAT[index];
        format!("{what}: {small:.1} ms among {few} nodes and {large:.1} ms among {many}: {ratio:.2} times")
    })
}
