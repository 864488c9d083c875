//! `/debug/api_priority_and_fairness/…`: the current state, as text tables.

use std::fmt::Write;

use super::Fairness;
use super::queues::QueueDump;

const PREFIX: &str = "/debug/api_priority_and_fairness/";

impl Fairness {
    /// The page at a path, if there is one.
    pub fn dump(&self, path: &str) -> Option<String> {
        match path.strip_prefix(PREFIX)? {
            "dump_priority_levels" => Some(self.dump_levels()),
            "dump_queues" => Some(self.dump_queues()),
            "dump_requests" => Some(self.dump_requests()),
            _ => None,
        }
    }

    fn dump_levels(&self) -> String {
        let mut rows = vec![texts([
            "PriorityLevelName",
            "ActiveQueues",
            "IsIdle",
            "IsQuiescing",
            "WaitingRequests",
            "ExecutingRequests",
            "DispatchedRequests",
            "RejectedRequests",
            "TimedoutRequests",
            "CancelledRequests",
        ])];
        for (name, level) in &self.0.plan.load().levels {
            let queues = level.live.queues();
            let is_leaving = level.live.is_leaving.load(std::sync::atomic::Ordering::Relaxed);
            let counts = queues.counts;
            rows.push(vec![
                name.clone(),
                queues.dump().filter(|queue| queue.waiting > 0).count().to_string(),
                queues.is_idle().to_string(),
                is_leaving.to_string(),
                queues.waiting().to_string(),
                queues.executing().to_string(),
                counts.dispatched.to_string(),
                counts.rejected.to_string(),
                counts.timed_out.to_string(),
                counts.cancelled.to_string(),
            ]);
        }
        table(&rows)
    }

    fn dump_queues(&self) -> String {
        let mut rows = vec![texts([
            "PriorityLevelName",
            "Index",
            "PendingRequests",
            "ExecutingRequests",
            "SeatsInUse",
            "NextDispatchR",
            "InitialSeatsSum",
            "MaxSeatsSum",
            "TotalWorkSum",
        ])];
        for (name, level) in &self.0.plan.load().levels {
            // Empty queues do not exist in memory, but are shown.
            let queues = level.live.queues();
            let count = match level.spec.handling {
                super::Handling::Queue { queues, .. } => queues,
                _ => 0,
            };
            let empty = |index| QueueDump {
                index,
                waiting: 0,
                executing: 0,
                seats: 0,
                next_r: 0,
                initial_seats: 0,
                widest_seats: 0,
                work: 0,
            };
            let mut all: Vec<QueueDump> = (0..count).map(empty).collect();
            for queue in queues.dump() {
                match all.get_mut(queue.index as usize) {
                    Some(place) => *place = queue,
                    None => all.push(queue),
                }
            }
            rows.extend(all.iter().map(|queue| {
                vec![
                    name.clone(),
                    queue.index.to_string(),
                    queue.waiting.to_string(),
                    queue.executing.to_string(),
                    queue.seats.to_string(),
                    seat_seconds(queue.next_r),
                    queue.initial_seats.to_string(),
                    queue.widest_seats.to_string(),
                    seat_seconds(queue.work),
                ]
            }));
        }
        table(&rows)
    }

    /// Waiting requests. Deviation: executing requests are not listed, because no data is kept about them.
    fn dump_requests(&self) -> String {
        let mut rows = vec![texts([
            "PriorityLevelName",
            "FlowSchemaName",
            "QueueIndex",
            "RequestIndexInQueue",
            "FlowDistingsher",
            "ArriveTime",
            "InitialSeats",
            "FinalSeats",
            "AdditionalLatency",
            "StartTime",
        ])];
        for (name, level) in &self.0.plan.load().levels {
            for (queue, place, flow, arrived, work) in level.live.queues().waiters() {
                let arrived = base::clock::now() - arrived.elapsed();
                rows.push(vec![
                    name.clone(),
                    flow.schema.clone(),
                    queue.to_string(),
                    place.to_string(),
                    flow.distinguisher.clone(),
                    arrived.to_string(),
                    work.initial.to_string(),
                    work.lasting.to_string(),
                    format!("{}s", work.lingers.as_secs_f64()),
                    "0001-01-01T00:00:00Z".to_owned(),
                ]);
            }
        }
        table(&rows)
    }
}

fn texts<const N: usize>(columns: [&str; N]) -> Vec<String> {
    columns.map(str::to_owned).into()
}

fn seat_seconds(time: i128) -> String {
    const SECOND: i128 = 1_000_000_000;
    format!("{}.{:08}ss", time.div_euclid(SECOND), time.rem_euclid(SECOND) / 10)
}

/// Cells end with a comma and are padded to the column's width. Upstream: `tabwriter`.
fn table(rows: &[Vec<String>]) -> String {
    const NARROWEST: usize = 8;
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let widest = rows.iter().map(|row| row[column].len()).max().unwrap_or_default();
        (widest + 2).max(NARROWEST)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        for (index, cell) in row.iter().enumerate() {
            if index + 1 == columns {
                let _ = writeln!(out, "{cell}");
            } else {
                let _ = write!(out, "{:<width$}", format!("{cell},"), width = widths[index]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_padded() {
        let rows = [texts(["Name", "Count", "Z"]), texts(["global-default", "1", "2"])];
        assert_eq!(table(&rows), "Name,           Count,  Z\nglobal-default, 1,      2\n");
        assert_eq!(seat_seconds(1_500_000_000), "1.50000000ss");
        assert_eq!(seat_seconds(3_000_000), "0.00300000ss");
    }
}
