//! Links the program at a fixed address, as Kubernetes' own programs are. A relocatable one has
//! megabytes of tables that the loader rewrites at each start, so that no two processes share them;
//! a node has a process per container.

fn main() {
    println!("cargo:rustc-link-arg-bins=-no-pie");
    println!("cargo:rerun-if-changed=build.rs");
}
