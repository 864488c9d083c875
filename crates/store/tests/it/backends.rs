//! The contract suite on the backends of this crate.

use std::sync::Arc;

use bytes::Bytes;
use store::backend::{BACKENDS, Backend};
use store::{Sim, Transform, Transformed};

use crate::contract::run;
use crate::linear;

fn backend(name: &str) -> &'static Backend {
    BACKENDS.iter().find(|backend| backend.name == name).expect("a row of the table")
}

#[test]
fn the_embedded_backend_keeps_the_contract() {
    run(backend("embedded"), usize::MAX, &[], |_| {});
}

#[test]
fn the_embedded_backend_keeps_the_contract_with_history_on_disk_only() {
    run(backend("embedded"), usize::MAX, &[], |lab| {
        lab.options.ring_bytes = 0;
        lab.options.watch_queue = 1;
    });
}

#[test]
fn the_simulated_backend_keeps_the_contract() {
    run(backend("sim"), usize::MAX, &[], |_| {});
}

/// Reverses values at rest.
struct Reversed;

impl Transform for Reversed {
    fn seal(&self, _: &[u8], value: Bytes) -> store::Result<Bytes> {
        Ok(value.iter().rev().copied().collect::<Vec<u8>>().into())
    }

    fn open(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        self.seal(key, value)
    }
}

static TRANSFORMED: Backend = Backend {
    name: "transformed",
    open: |_, _| Ok(Transformed::over(Sim::open(), Arc::new(Reversed))),
    durable: false,
};

#[test]
fn a_transformed_store_keeps_the_contract() {
    // It does not compare values, and its snapshots have values at rest.
    let except =
        ["comparisons_are_over_all_keys_of_a_range", "a_snapshot_holds_what_lives_and_its_leases"];
    run(&TRANSFORMED, usize::MAX, &except, |_| {});
}

/// Without failures; those are in the embedded backend's own tests.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_calls_are_linearizable() {
    let seed = crate::model::number("LINEAR_SEED", 1);
    for name in ["embedded", "sim"] {
        let lab = crate::lab::Lab::new(backend(name));
        let load = linear::Load { clients: 8, keys: 4, calls: 150 };
        let (calls, unknown) = linear::check(&lab.open(), load, seed).await;
        assert_eq!((calls, unknown), (1200, 0), "{name}");
    }
}
