//! The contract suite on the backends of this crate.

use std::sync::Arc;

use bytes::Bytes;
use store::backend::{BACKENDS, Backend};
use store::{Sim, Transform, Transformed};

use crate::contract::run;

fn backend(name: &str) -> &'static Backend {
    BACKENDS.iter().find(|backend| backend.name == name).expect("a row of the table")
}

#[test]
fn the_embedded_backend_keeps_the_contract() {
    run(backend("embedded"), usize::MAX, &[], |_| {});
}

#[test]
fn the_embedded_backend_keeps_it_with_history_on_disk_only() {
    run(backend("embedded"), usize::MAX, &[], |lab| {
        lab.options.ring_bytes = 0;
        lab.options.watch_queue = 1;
    });
}

#[test]
fn the_simulated_backend_keeps_the_contract() {
    run(backend("sim"), usize::MAX, &[], |_| {});
}

/// Values back to front at rest.
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
    run(&TRANSFORMED, usize::MAX, &[], |_| {});
}
