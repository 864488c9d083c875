//! `cargo fuzz run protobuf`: see `targets.rs`.
#![no_main]

mod program;
#[path = "../targets.rs"]
mod targets;

program!("protobuf");
