//! How the program is linked.
//!
//! At a fixed address, as Kubernetes' own programs are: a relocatable one has megabytes of tables that
//! the loader rewrites at each start, so that no two processes share them; a node has a process per
//! container. In a release functions that compile to the same instructions are kept once, and texts that
//! end alike share their end, where the linker is the one that the Rust toolchain brings: others do not
//! know how.

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
