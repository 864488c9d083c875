//! Families of metrics that count for the whole process, in Prometheus' text format.
//!
//! A crate declares its families as statics and lists them in one function that writes them:
//!
//! ```text
//! static JOBS: Family = Family::counter("job_controller_jobs_finished_total", "[STABLE] …", &["result"]);
//! JOBS.count(&["succeeded"]);                  anywhere
//! pub fn encode(out) { metrics::encode(&[&JOBS, …], out) }
//! ```
//!
//! In: label values in the order of the names, and numbers. Out: text. A family without labels starts at 0,
//! as in upstream; a family with labels has its two header lines from the start, and series when they are
//! first used.
//!
//! Cost: an observation takes one lock and a binary search, about 100 ns, and allocates for a new series only.
//! Invariant: the caller bounds the values of its labels; [`Family::forget`] removes series of objects that
//! are gone.

pub mod process;

use std::cmp::Ordering;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    fn text(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The upper bounds of a histogram's buckets.
#[derive(Clone, Copy, Debug)]
pub enum Buckets {
    None,
    Listed(&'static [f64]),
    /// The first bound, the factor, the number of bounds.
    Exponential(f64, f64, usize),
}

impl Buckets {
    fn bounds(self) -> impl Iterator<Item = f64> {
        let (listed, first, factor, count): (&[f64], _, _, _) = match self {
            Self::None => (&[], 0.0, 0.0, 0),
            Self::Listed(bounds) => (bounds, 0.0, 0.0, 0),
            Self::Exponential(first, factor, count) => (&[], first, factor, count),
        };
        let computed = std::iter::successors(Some(first), move |bound| Some(bound * factor));
        listed.iter().copied().chain(computed.take(count))
    }
}

/// Go's default buckets.
pub const DEFAULT_BUCKETS: Buckets =
    Buckets::Listed(&[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]);

pub struct Family {
    pub name: &'static str,
    help: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    buckets: Buckets,
    /// Sorted by label values. Locked for one observation or one scrape.
    series: Mutex<Vec<Series>>,
}

struct Series {
    labels: Box<[Box<str>]>,
    /// The number, or the sum of a histogram.
    value: f64,
    /// Observations by bucket; the last one counts those above all bounds.
    counts: Vec<u64>,
}

impl Family {
    pub const fn counter(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Self {
        Self::new(name, help, Kind::Counter, labels, Buckets::None)
    }

    pub const fn gauge(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Self {
        Self::new(name, help, Kind::Gauge, labels, Buckets::None)
    }

    pub const fn histogram(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        buckets: Buckets,
    ) -> Self {
        Self::new(name, help, Kind::Histogram, labels, buckets)
    }

    const fn new(
        name: &'static str,
        help: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        buckets: Buckets,
    ) -> Self {
        Self { name, help, kind, labels, buckets, series: Mutex::new(vec![]) }
    }

    pub fn count(&self, labels: &[&str]) {
        self.add(labels, 1.0);
    }

    pub fn add(&self, labels: &[&str], value: f64) {
        self.with(labels, |series| series.value += value);
    }

    pub fn set(&self, labels: &[&str], value: f64) {
        self.with(labels, |series| series.value = value);
    }

    pub fn observe(&self, labels: &[&str], value: f64) {
        let at = self.buckets.bounds().position(|bound| value <= bound);
        self.with(labels, |series| {
            let last = series.counts.len() - 1;
            series.counts[at.unwrap_or(last)] += 1;
            series.value += value;
        });
    }

    pub fn took(&self, labels: &[&str], time: Duration) {
        self.observe(labels, time.as_secs_f64());
    }

    /// Removes the series whose labels `is_gone` selects.
    pub fn forget(&self, is_gone: impl Fn(&[Box<str>]) -> bool) {
        self.series().retain(|series| !is_gone(&series.labels));
    }

    fn series(&self) -> MutexGuard<'_, Vec<Series>> {
        self.series.lock().expect("no panic under the lock")
    }

    fn with(&self, labels: &[&str], act: impl FnOnce(&mut Series)) {
        debug_assert_eq!(labels.len(), self.labels.len(), "{}", self.name);
        let mut all = self.series();
        let at = match all.binary_search_by(|series| series.order(labels)) {
            Ok(at) => at,
            Err(at) => {
                all.insert(at, self.empty(labels));
                at
            }
        };
        act(&mut all[at]);
    }

    fn empty(&self, labels: &[&str]) -> Series {
        let counts = match self.kind {
            Kind::Histogram => vec![0; self.buckets.bounds().count() + 1],
            Kind::Counter | Kind::Gauge => vec![],
        };
        Series {
            labels: labels.iter().map(|value| Box::from(*value)).collect(),
            value: 0.0,
            counts,
        }
    }

    pub fn encode(&self, out: &mut String) {
        let (name, kind) = (self.name, self.kind.text());
        let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {kind}", self.help);
        let mut all = self.series();
        if all.is_empty() && self.labels.is_empty() {
            all.push(self.empty(&[]));
        }
        for series in all.iter() {
            self.encode_one(out, series);
        }
    }

    fn encode_one(&self, out: &mut String, series: &Series) {
        let mut labels = String::new();
        for (name, value) in self.labels.iter().zip(&series.labels) {
            push_label(&mut labels, name, value);
        }
        let braced = |labels: &str| match labels.is_empty() {
            true => String::new(),
            false => format!("{{{labels}}}"),
        };
        let (name, plain) = (self.name, braced(&labels));
        if self.kind != Kind::Histogram {
            let _ = writeln!(out, "{name}{plain} {}", shown(series.value));
            return;
        }
        let mut below = 0;
        let bounds = self.buckets.bounds().map(|bound| bound.to_string());
        for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(&series.counts) {
            below += count;
            let mut labels = labels.clone();
            push_label(&mut labels, "le", &bound);
            let _ = writeln!(out, "{name}_bucket{{{labels}}} {below}");
        }
        let _ = writeln!(out, "{name}_sum{plain} {}\n{name}_count{plain} {below}", series.value);
    }
}

impl Series {
    fn order(&self, labels: &[&str]) -> Ordering {
        self.labels.iter().map(|value| &**value).cmp(labels.iter().copied())
    }
}

/// Measures time for [`Family::took`]; for crates without a runtime, too.
#[derive(Clone, Copy, Debug)]
pub struct Timer(tokio::time::Instant);

impl Timer {
    pub fn start() -> Self {
        Self(tokio::time::Instant::now())
    }

    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    /// The time since the start or the last lap, which begins the next one.
    pub fn lap(&mut self) -> Duration {
        let now = tokio::time::Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}

/// Writes families in their order.
pub fn encode(families: &[&Family], out: &mut String) {
    for family in families {
        family.encode(out);
    }
}

static DISABLED: Family =
    Family::counter("disabled_metrics_total", "[BETA] The count of disabled metrics.", &[]);
static HIDDEN: Family =
    Family::counter("hidden_metrics_total", "[BETA] The count of hidden metrics.", &[]);

/// Writes the families about families at the end of a page; they count what is on it by stability. None is
/// ever hidden or disabled. Upstream: `component-base/metrics/registry.go`.
pub fn encode_registered(page: &mut String) {
    const NAME: &str = "registered_metrics_total";
    encode(&[&DISABLED, &HIDDEN], page);
    let _ = writeln!(
        page,
        "# HELP {NAME} [BETA] The count of registered metrics broken by stability level and deprecation version.\n# TYPE {NAME} counter"
    );
    let levels = ["ALPHA", "BETA", "STABLE"];
    let counts = levels.map(|level| {
        let mark = format!(" [{level}]");
        let is_marked = |line: &&str| line.starts_with("# HELP ") && line.contains(&mark);
        page.lines().filter(is_marked).count()
    });
    for (level, count) in levels.iter().zip(counts) {
        let labels = format!("deprecated_version=\"\",stability_level=\"{level}\"");
        let _ = writeln!(page, "{NAME}{{{labels}}} {count}");
    }
}

/// As Prometheus reads it; Rust writes `inf`.
fn shown(value: f64) -> String {
    match value.is_infinite() {
        true if value > 0.0 => "+Inf".to_owned(),
        true => "-Inf".to_owned(),
        false => value.to_string(),
    }
}

fn push_label(labels: &mut String, name: &str, value: &str) {
    if !labels.is_empty() {
        labels.push(',');
    }
    let _ = write!(labels, "{name}=\"");
    for character in value.chars() {
        match character {
            '\\' => labels.push_str("\\\\"),
            '"' => labels.push_str("\\\""),
            '\n' => labels.push_str("\\n"),
            other => labels.push(other),
        }
    }
    labels.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(family: &Family, expected: &str) {
        let mut out = String::new();
        family.encode(&mut out);
        assert_eq!(out, expected);
    }

    #[test]
    fn families_are_written_as_prometheus_reads_them() {
        let plain = Family::counter("a_total", "Help.", &[]);
        check(&plain, "# HELP a_total Help.\n# TYPE a_total counter\na_total 0\n");
        let gauge = Family::gauge("b", "[BETA] Help.", &["y", "x"]);
        check(&gauge, "# HELP b [BETA] Help.\n# TYPE b gauge\n");
        gauge.set(&["2", "q\"\\\n"], 1.5);
        gauge.add(&["1", "z"], 2.0);
        gauge.add(&["1", "z"], -1.0);
        gauge.set(&["3", "gone"], 1.0);
        gauge.forget(|labels| &*labels[1] == "gone");
        let expected = "# HELP b [BETA] Help.\n# TYPE b gauge\n\
                        b{y=\"1\",x=\"z\"} 1\nb{y=\"2\",x=\"q\\\"\\\\\\n\"} 1.5\n";
        check(&gauge, expected);
    }

    #[test]
    fn a_page_counts_its_families() {
        let mut page =
            "# HELP a [STABLE] A.\n# TYPE a gauge\na 1\n# HELP b [ALPHA] B.\n".to_owned();
        encode_registered(&mut page);
        for (level, count) in [("ALPHA", 1), ("BETA", 3), ("STABLE", 1)] {
            let labels = format!("deprecated_version=\"\",stability_level=\"{level}\"");
            let line = format!("registered_metrics_total{{{labels}}} {count}");
            assert!(page.lines().any(|one| one == line), "{line}\n{page}");
        }
    }

    #[test]
    fn observations_are_counted_by_bucket() {
        let buckets = Buckets::Exponential(1.0, 2.0, 3);
        let family = Family::histogram("c", "H.", &["l"], buckets);
        for value in [0.5, 2.0, 3.0, 100.0] {
            family.observe(&["v"], value);
        }
        let expected = "# HELP c H.\n# TYPE c histogram\n\
            c_bucket{l=\"v\",le=\"1\"} 1\nc_bucket{l=\"v\",le=\"2\"} 2\nc_bucket{l=\"v\",le=\"4\"} 3\n\
            c_bucket{l=\"v\",le=\"+Inf\"} 4\nc_sum{l=\"v\"} 105.5\nc_count{l=\"v\"} 4\n";
        check(&family, expected);
    }
}
