//! batch: work that ends.

pub(crate) mod cron_job;
pub(crate) mod job;
