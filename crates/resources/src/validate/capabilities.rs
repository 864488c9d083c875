//! Capabilities of this process' API server, such as `--allow-privileged`. They hold for all users.
//!
//! In: a flag, once, before anything is served. Out: an answer for the validation of containers, which
//! knows nothing but the object. That is why it is of the process, as upstream's is.

use std::sync::atomic::{AtomicBool, Ordering};

static ALLOWS_PRIVILEGED: AtomicBool = AtomicBool::new(true);

/// Sets `--allow-privileged`.
pub fn allow_privileged(is_allowed: bool) {
    ALLOWS_PRIVILEGED.store(is_allowed, Ordering::Relaxed);
}

/// May containers be privileged?
pub fn allows_privileged() -> bool {
    ALLOWS_PRIVILEGED.load(Ordering::Relaxed)
}
