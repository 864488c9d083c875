//! `cargo fuzz run configuration`: see `targets.rs`.
#![no_main]

mod program;
#[path = "../targets.rs"]
mod targets;

program!("configuration");
