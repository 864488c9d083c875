//! The backends: one file and one row each. Every row passes the contract suite in `tests/it`.

use std::path::Path;
use std::sync::Arc;

use crate::{Error, Op, Options, Result, Store, Txn, VALUE_LIMIT};

pub mod embedded;
pub mod sim;

/// A backend.
pub struct Backend {
    pub name: &'static str,
    /// Opens the store in a directory, which is created if missing.
    pub open: fn(&Path, Options) -> Result<Arc<dyn Store>>,
    /// Whether data survives closing and opening.
    pub durable: bool,
}

pub const BACKENDS: &[Backend] = &[
    Backend { name: "embedded", open: embedded::Embedded::open, durable: true },
    Backend { name: "sim", open: |_, _| Ok(sim::Sim::open()), durable: false },
];

/// Rejects values over the limit in both branches, whichever would run.
pub fn check_sizes(txn: &Txn) -> Result<()> {
    for op in txn.success.iter().chain(&txn.failure) {
        if let Op::Put { key, value, .. } = op
            && value.len() > VALUE_LIMIT
        {
            let key = String::from_utf8_lossy(key).into_owned();
            return Err(Error::TooLarge { key, size: value.len(), limit: VALUE_LIMIT });
        }
    }
    Ok(())
}
