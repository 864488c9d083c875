//! Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// A sample's labels in their text form: `verb="GET",code="200"`.
pub type Labels = String;

/// Counts of observations by upper bound.
#[derive(Clone)]
pub(crate) struct Histogram {
    limits: &'static [f64],
    buckets: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    pub fn new(limits: &'static [f64]) -> Self {
        Self { limits, buckets: vec![0; limits.len()], sum: 0.0, count: 0 }
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn observe(&mut self, value: f64) {
        if let Some(index) = self.limits.iter().position(|limit| value <= *limit) {
            self.buckets[index] += 1;
        }
        self.sum += value;
        self.count += 1;
    }

    pub fn encode(&self, out: &mut String, name: &str, labels: &str) {
        let mut below = 0;
        for (limit, count) in self.limits.iter().zip(&self.buckets) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{limit}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}", self.sum);
        let _ = writeln!(out, "{name}_count{{{labels}}} {}", self.count);
    }
}

/// The two header lines of a family.
pub fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

pub fn samples<'a, V: Display>(
    out: &mut String,
    name: &str,
    samples: impl IntoIterator<Item = (&'a Labels, V)>,
) {
    for (labels, value) in samples {
        let _ = writeln!(out, "{name}{{{labels}}} {value}");
    }
}

pub(crate) fn histograms(out: &mut String, name: &str, all: &BTreeMap<Labels, Histogram>) {
    for (labels, histogram) in all {
        histogram.encode(out, name, labels);
    }
}

/// Appends `name="value"`, with a separator if needed. Values may come from clients and are escaped.
pub fn label(labels: &mut Labels, name: &str, value: &str) {
    if !labels.is_empty() {
        labels.push(',');
    }
    let value = match value.contains(['\\', '"', '\n']) {
        true => value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").into(),
        false => std::borrow::Cow::Borrowed(value),
    };
    let _ = write!(labels, "{name}=\"{value}\"");
}

pub fn labels<const N: usize>(pairs: [(&str, &str); N]) -> Labels {
    let mut labels = String::with_capacity(128);
    for (name, value) in pairs {
        label(&mut labels, name, value);
    }
    labels
}
