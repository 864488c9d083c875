//! What limits how many requests a server works on at one time.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::fairness::Fairness;

/// By priority and fairness, or, where that is turned off, reads and writes apart.
pub enum Limiter {
    Fair(Fairness),
    InFlight(InFlight),
}

/// Places of reads and of writes; none where there is no limit.
pub struct InFlight {
    pub reads: Option<Arc<Semaphore>>,
    pub writes: Option<Arc<Semaphore>>,
}

impl InFlight {
    /// 0 stands for no limit.
    pub fn new(reads: usize, writes: usize) -> Self {
        let places = |count| (count > 0).then(|| Arc::new(Semaphore::new(count)));
        Self { reads: places(reads), writes: places(writes) }
    }
}
