//! `cargo fuzz run cel`: see `targets.rs`.
#![no_main]

mod program;
#[path = "../targets.rs"]
mod targets;

program!("cel");
