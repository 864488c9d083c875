//! The contract suite on the backends of this crate.

use store::backend::{BACKENDS, Backend};

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
