//! `cargo fuzz run patch`: see `targets.rs`.
#![no_main]

mod program;
#[path = "../targets.rs"]
mod targets;

program!("patch");
