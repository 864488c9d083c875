//! What this machine is, in the names that Go gave the field: nodes, images and versions use them.

/// The operating system's.
pub const OS: &str = "linux";

/// The processor architecture's.
pub const ARCHITECTURE: &str = match std::env::consts::ARCH.as_bytes() {
    b"x86_64" => "amd64",
    b"aarch64" => "arm64",
    b"powerpc64" => "ppc64le",
    _ => std::env::consts::ARCH,
};

/// Both, as versions tell it: `linux/amd64`.
pub fn platform() -> String {
    format!("{OS}/{ARCHITECTURE}")
}
