//! How many seats a level could have used recently: the input of lending and borrowing.
//!
//! In: the demand at each change. Out, per period: its maximum, average and deviation, and the smoothed
//! value, which halves in five minutes. Upstream: `fairqueuing.Integrator` and `seatDemandStats`.

use tokio::time::Instant;

use super::ADJUSTMENT_PERIOD;

/// The weight of the old value after one period.
const SMOOTHING: f64 = 0.977;

pub struct Demand {
    at: Instant,
    since: Instant,
    now: f64,
    max: f64,
    /// Integrals over the period of the demand and of its square.
    sum: f64,
    squares: f64,
    pub stats: Stats,
}

/// Statistics of the last period.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub high: u32,
    pub average: f64,
    pub deviation: f64,
    pub smoothed: f64,
}

impl Demand {
    pub fn new(now: Instant) -> Self {
        let stats = Stats::default();
        Self { at: now, since: now, now: 0.0, max: 0.0, sum: 0.0, squares: 0.0, stats }
    }

    pub fn set(&mut self, demand: f64, now: Instant) {
        self.integrate(now);
        self.now = demand;
        self.max = self.max.max(demand);
    }

    fn integrate(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.sum += passed * self.now;
        self.squares += passed * self.now * self.now;
    }

    /// Ends a period. Several periods without a call count as one long one.
    pub fn end_period(&mut self, now: Instant) -> Stats {
        self.integrate(now);
        let length = now.saturating_duration_since(self.since).as_secs_f64();
        self.stats.high = self.max.round() as u32;
        if length > 0.0 {
            let average = self.sum / length;
            let deviation = (self.squares / length - average * average).max(0.0).sqrt();
            let envelope = average + deviation;
            let kept = SMOOTHING.powf(length / ADJUSTMENT_PERIOD.as_secs_f64());
            let faded = kept * self.stats.smoothed + (1.0 - kept) * envelope;
            self.stats.smoothed = envelope.max(faded);
            (self.stats.average, self.stats.deviation) = (average, deviation);
        }
        (self.since, self.max, self.sum, self.squares) = (now, self.now, 0.0, 0.0);
        self.stats
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_period_is_summed_up() {
        let start = Instant::now();
        let mut demand = Demand::new(start);
        demand.set(4.0, start + Duration::from_secs(5));
        demand.set(1.0, start + Duration::from_secs(10));
        let stats = demand.end_period(start + Duration::from_secs(10));
        assert_eq!((stats.high, stats.average, stats.deviation), (4, 2.0, 2.0));
        assert_eq!(stats.smoothed, 4.0);
        let stats = demand.end_period(start + Duration::from_secs(20));
        assert_eq!((stats.high, stats.average), (1, 1.0));
        assert!(stats.smoothed > 3.9 && stats.smoothed < 4.0, "{stats:?}");
        let stats = demand.end_period(start + Duration::from_secs(3600));
        assert!(stats.smoothed < 1.01, "an hour of quiet counts: {stats:?}");
    }
}
