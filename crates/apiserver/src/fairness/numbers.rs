//! Counters of a FlowSchema's requests, and the families of metrics that show them.

use std::fmt::Write;
use std::time::Duration;

use super::{Fairness, Level};
use crate::metrics::{Histogram, family};

const SECONDS: &[f64] = &[0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0];
/// Reasons of refusals.
const REASONS: [&str; 3] = ["concurrency-limit", "queue-full", "time-out"];

pub struct Numbers {
    dispatched: u64,
    rejected: [u64; REASONS.len()],
    waiting: i64,
    waiting_seats: i64,
    executing: i64,
    executing_seats: i64,
    /// Wait times of executed requests, and of the others.
    waits: [Histogram; 2],
    executions: Histogram,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            dispatched: 0,
            rejected: [0; REASONS.len()],
            waiting: 0,
            waiting_seats: 0,
            executing: 0,
            executing_seats: 0,
            waits: [Histogram::new(SECONDS), Histogram::new(SECONDS)],
            executions: Histogram::new(SECONDS),
        }
    }
}

impl Numbers {
    pub fn waiting(&mut self, by: i64, seats: u32) {
        self.waiting += by;
        self.waiting_seats += by * i64::from(seats);
    }

    pub fn waited(&mut self, is_run: bool, time: Duration) {
        self.waits[usize::from(!is_run)].observe(time.as_secs_f64());
    }

    pub fn dispatched(&mut self, seats: u32) {
        self.dispatched += 1;
        self.executing += 1;
        self.executing_seats += i64::from(seats);
    }

    pub fn rejected(&mut self, reason: &str) {
        if let Some(index) = REASONS.iter().position(|one| *one == reason) {
            self.rejected[index] += 1;
        }
    }

    pub fn finished(&mut self, seats: u32, time: Duration) {
        self.executing -= 1;
        self.executing_seats -= i64::from(seats);
        self.executions.observe(time.as_secs_f64());
    }
}

/// A gauge of levels: name, help, and its value.
type OfLevel = (&'static str, &'static str, fn(&Level) -> f64);

const OF_LEVELS: &[OfLevel] = &[
    (
        "current_limit_seats",
        "[ALPHA] current derived number of execution seats available to each priority level",
        |level| f64::from(level.live.queues().limit()),
    ),
    (
        "demand_seats_average",
        "[ALPHA] Time-weighted average, over last adjustment period, of demand_seats",
        |level| level.live.queues().demand.stats.average,
    ),
    (
        "demand_seats_high_watermark",
        "[ALPHA] High watermark, over last adjustment period, of demand_seats",
        |level| f64::from(level.live.queues().demand.stats.high),
    ),
    ("demand_seats_smoothed", "[ALPHA] Smoothed seat demands", |level| {
        level.live.queues().demand.stats.smoothed
    }),
    (
        "demand_seats_stdev",
        "[ALPHA] Time-weighted standard deviation, over last adjustment period, of demand_seats",
        |level| level.live.queues().demand.stats.deviation,
    ),
    (
        "lower_limit_seats",
        "[ALPHA] Configured lower bound on number of execution seats available to each priority level",
        |level| f64::from(level.limits.lower),
    ),
    (
        "nominal_limit_seats",
        "[BETA] Nominal number of execution seats configured for each priority level",
        |level| f64::from(level.limits.nominal),
    ),
    (
        "upper_limit_seats",
        "[ALPHA] Configured upper bound on number of execution seats available to each priority level",
        |level| f64::from(level.limits.upper),
    ),
];

/// A metric of schemas: name, type, help, and its value; `None` if it was never set.
type OfSchema = (&'static str, &'static str, &'static str, fn(&Numbers) -> Option<i64>);

const OF_SCHEMAS: &[OfSchema] = &[
    (
        "current_executing_requests",
        "gauge",
        "[BETA] Number of requests in initial (for a WATCH) or any (for a non-WATCH) execution stage in the API Priority and Fairness subsystem",
        |numbers| ran(numbers, numbers.executing),
    ),
    (
        "current_executing_seats",
        "gauge",
        "[BETA] Concurrency (number of seats) occupied by the currently executing (initial stage for a WATCH, any stage otherwise) requests in the API Priority and Fairness subsystem",
        |numbers| ran(numbers, numbers.executing_seats),
    ),
    (
        "current_inqueue_requests",
        "gauge",
        "[BETA] Number of requests currently pending in queues of the API Priority and Fairness subsystem",
        |numbers| ran(numbers, numbers.waiting),
    ),
    (
        "current_inqueue_seats",
        "gauge",
        "[ALPHA] Number of seats currently pending in queues of the API Priority and Fairness subsystem",
        |numbers| ran(numbers, numbers.waiting_seats),
    ),
    (
        "dispatched_requests_total",
        "counter",
        "[BETA] Number of requests executed by API Priority and Fairness subsystem",
        |numbers| ran(numbers, i64::try_from(numbers.dispatched).unwrap_or(i64::MAX)),
    ),
];

fn ran(numbers: &Numbers, figure: i64) -> Option<i64> {
    (numbers.dispatched > 0 || numbers.waiting > 0).then_some(figure)
}

const PREFIX: &str = "apiserver_flowcontrol_";

impl Fairness {
    /// A source of [`crate::metrics::Metrics`].
    pub fn encode(&self, out: &mut String) {
        let plan = self.0.plan.load();
        for (name, help, figure) in OF_LEVELS {
            let name = format!("{PREFIX}{name}");
            family(out, &name, "gauge", help);
            for (level, state) in &plan.levels {
                let _ = writeln!(out, "{name}{{priority_level=\"{level}\"}} {}", figure(state));
            }
        }
        for (name, kind, help, figure) in OF_SCHEMAS {
            let name = format!("{PREFIX}{name}");
            family(out, &name, kind, help);
            for schema in &plan.schemas {
                if let Some(figure) = figure(&schema.numbers()) {
                    let _ = writeln!(out, "{name}{{{}}} {figure}", schema.labels());
                }
            }
        }
        let name = format!("{PREFIX}seat_fair_frac");
        family(
            out,
            &name,
            "gauge",
            "[ALPHA] Fair fraction of server's concurrency to allocate to each priority level that can use it",
        );
        let _ = writeln!(out, "{name} {}", self.0.settings().fair_fraction);
        self.encode_rejected(out);
        self.encode_durations(out);
    }

    fn encode_rejected(&self, out: &mut String) {
        let name = format!("{PREFIX}rejected_requests_total");
        let help = "[BETA] Number of requests rejected by API Priority and Fairness subsystem";
        family(out, &name, "counter", help);
        for schema in &self.0.plan.load().schemas {
            let rejected = schema.numbers().rejected;
            for (reason, count) in REASONS.iter().zip(rejected).filter(|(_, count)| *count > 0) {
                let labels = schema.labels();
                let _ = writeln!(out, "{name}{{{labels},reason=\"{reason}\"}} {count}");
            }
        }
    }

    fn encode_durations(&self, out: &mut String) {
        let plan = self.0.plan.load();
        let name = format!("{PREFIX}request_execution_seconds");
        let help = "[ALPHA] Duration of initial stage (for a WATCH) or any (for a non-WATCH) stage of request execution in the API Priority and Fairness subsystem";
        family(out, &name, "histogram", help);
        for schema in &plan.schemas {
            let numbers = schema.numbers();
            if numbers.dispatched > 0 {
                numbers.executions.encode(out, &name, &schema.labels());
            }
        }
        let name = format!("{PREFIX}request_wait_duration_seconds");
        let help = "[BETA] Length of time a request spent waiting in its queue";
        family(out, &name, "histogram", help);
        for schema in &plan.schemas {
            let numbers = schema.numbers();
            for (execute, waits) in ["true", "false"].iter().zip(&numbers.waits) {
                if !waits.is_empty() {
                    let labels = format!("execute=\"{execute}\",{}", schema.labels());
                    waits.encode(out, &name, &labels);
                }
            }
        }
    }
}

impl super::Schema {
    fn labels(&self) -> String {
        let (schema, level) = (&self.spec.name, &self.level.spec.name);
        format!("flow_schema=\"{schema}\",priority_level=\"{level}\"")
    }
}
