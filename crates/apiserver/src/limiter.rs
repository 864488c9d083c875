//! The limiter of requests in flight.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::fairness::Fairness;

/// Priority and fairness, or, if that is off, separate limits for reads and writes.
pub enum Limiter {
    Fair(Fairness),
    InFlight(InFlight),
}

/// Places of reads and of writes; `None` without a limit.
pub struct InFlight {
    pub reads: Option<Arc<Semaphore>>,
    pub writes: Option<Arc<Semaphore>>,
}

impl InFlight {
    /// 0 means no limit.
    pub fn new(reads: usize, writes: usize) -> Self {
        let places = |count| (count > 0).then(|| Arc::new(Semaphore::new(count)));
        Self { reads: places(reads), writes: places(writes) }
    }
}
