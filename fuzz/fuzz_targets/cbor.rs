//! `cargo fuzz run cbor`: see `targets.rs`.
#![no_main]

mod program;
#[path = "../targets.rs"]
mod targets;

program!("cbor");
