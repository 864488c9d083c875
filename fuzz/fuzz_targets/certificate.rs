//! `cargo fuzz run certificate`: see `targets.rs`.
#![no_main]

#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let target = targets::TARGETS.iter().find(|target| target.name == "certificate").expect("a target");
    (target.run)(data);
});
