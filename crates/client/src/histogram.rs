//! A histogram with fixed limits, and its lines in Prometheus' text format.

use std::fmt::Write;

/// `N` ascending limits. A value above the last one counts in the sum only.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Histogram<const N: usize> {
    limits: &'static [f64; N],
    buckets: [u64; N],
    sum: f64,
    count: u64,
}

impl<const N: usize> Histogram<N> {
    pub const fn new(limits: &'static [f64; N]) -> Self {
        Self { limits, buckets: [0; N], sum: 0.0, count: 0 }
    }

    pub fn observe(&mut self, value: f64) {
        if let Some(index) = self.limits.iter().position(|limit| value <= *limit) {
            self.buckets[index] += 1;
        }
        self.sum += value;
        self.count += 1;
    }

    pub fn add(&mut self, other: &Self) {
        self.sum += other.sum;
        self.count += other.count;
        for (bucket, more) in self.buckets.iter_mut().zip(other.buckets) {
            *bucket += more;
        }
    }

    /// `labels` is the text between the braces. It may be empty.
    pub fn write(&self, out: &mut String, family: &str, labels: &str) {
        let (first, own) = match labels {
            "" => (String::new(), String::new()),
            labels => (format!("{labels},"), format!("{{{labels}}}")),
        };
        let mut below = 0;
        for (limit, count) in self.limits.iter().zip(self.buckets) {
            below += count;
            let _ = writeln!(out, "{family}_bucket{{{first}le=\"{limit}\"}} {below}");
        }
        let _ = writeln!(out, "{family}_bucket{{{first}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{family}_sum{own} {}", self.sum);
        let _ = writeln!(out, "{family}_count{own} {}", self.count);
    }
}
