//! The backends: what can stand behind `cri::Runtime`.

pub mod embedded;
pub mod fake;
mod io;

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
    Backend { name: fake::NAME, about: "nothing runs; for tests", endpoints: &["fake"] },
];
