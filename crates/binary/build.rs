//! Linker options.
//!
//! The binary has a fixed address, like Kubernetes' own programs. A relocatable one has megabytes of
//! tables that the loader rewrites at each start, so processes cannot share them, and a node has one
//! process per container. In a release build the linker keeps identical functions once, and shares the
//! common ends of strings. Only the linker of the Rust toolchain supports this.

fn main() {
    println!("cargo:rustc-link-arg-bins=-no-pie");
    let is = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
    let brings_linker =
        is("TARGET", "x86_64-unknown-linux-gnu") && is("HOST", "x86_64-unknown-linux-gnu");
    if is("PROFILE", "release") && brings_linker {
        println!("cargo:rustc-link-arg-bins=-Wl,--icf=all,-O2");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
