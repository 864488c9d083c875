//! The implementations of `cri::Runtime`.

pub mod embedded;
pub mod fake;
mod io;
pub mod remote;

/// A row of [`BACKENDS`].
pub struct Backend {
    /// The same text as [`cri::RuntimeService::name`].
    pub name: &'static str,
    pub about: &'static str,
    /// The values of `--container-runtime-endpoint` that select it; empty means the default.
    pub endpoints: &'static [&'static str],
}

pub const BACKENDS: &[Backend] = &[
    Backend {
        name: embedded::NAME,
        about: "containers by a shim of this binary, no other program",
        endpoints: &["", "embedded"],
    },
    Backend {
        name: remote::NAME,
        about: "another runtime (containerd, CRI-O), reached over CRI v1",
        endpoints: &["unix:///PATH", "/PATH"],
    },
    Backend { name: fake::NAME, about: "runs nothing; for tests", endpoints: &["fake"] },
];
