//! The backends: what can stand behind `cri::Runtime`.

pub mod embedded;
pub mod fake;
mod io;
pub mod remote;

/// A row of [`BACKENDS`].
pub struct Backend {
    /// As [`cri::RuntimeService::name`] says it.
    pub name: &'static str,
    pub about: &'static str,
    /// The forms of `--container-runtime-endpoint` that choose it; empty is the default.
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
        about: "another runtime (containerd, CRI-O), asked over CRI v1",
        endpoints: &["unix:///PATH", "/PATH"],
    },
    Backend { name: fake::NAME, about: "nothing runs; for tests", endpoints: &["fake"] },
];
