//! Computes usage from a kubelet's `/metrics/resource`: two samples make a rate.
//!
//! In: Prometheus text. Out: [`Sample`]s, and from a [`History`] of them [`Usage`]. Pure.
//! Upstream: metrics-server's `pkg/scraper/client/resource`, `pkg/storage`.

use std::collections::{BTreeMap, HashMap, VecDeque};

/// The window that figures are taken over when there is a choice.
const WINDOW_MS: i64 = 15_000;
/// Two samples closer than this make no rate.
const SHORTEST_MS: i64 = 250;
/// Older samples say nothing about now.
const LONGEST_MS: i64 = 90_000;
/// A container that is in no earlier sample is measured from its start, once it is this old.
const FRESH_MS: i64 = 10_000;
const KEPT: usize = 16;

/// Counters of a container or node at a moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    pub at_ms: i64,
    pub cpu_seconds: Option<f64>,
    pub memory_bytes: Option<f64>,
    pub started_ms: Option<i64>,
}

/// Readings of a pod's containers by name.
pub type PodReading = BTreeMap<String, Reading>;

/// The values of one scrape of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub node: Reading,
    /// By namespace and name.
    pub pods: HashMap<(String, String), PodReading>,
}

/// The usage over a window that ends at `at_ms`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    pub at_ms: i64,
    pub window_ms: i64,
    pub cpu_nanos: u64,
    pub memory_bytes: u64,
}

impl Sample {
    /// `now_ms` is the time of figures without one.
    pub fn parse(text: &str, now_ms: i64) -> Self {
        let mut sample =
            Self { node: Reading { at_ms: now_ms, ..Reading::default() }, ..Self::default() };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            sample.add(line, now_ms);
        }
        sample
    }

    /// Takes in a line; those that say nothing of interest are passed over.
    fn add(&mut self, line: &str, now_ms: i64) -> Option<()> {
        let end = line.find(['{', ' '])?;
        let (family, rest) = line.split_at(end);
        let (labels, rest) = labels(rest)?;
        let mut numbers = rest.split_whitespace();
        let value: f64 = numbers.next()?.parse().ok()?;
        let at_ms = numbers.next().and_then(|at| at.parse().ok()).unwrap_or(now_ms);
        let (reading, figure) = match family.strip_prefix("node_") {
            Some(figure) => (&mut self.node, figure),
            None => {
                let figure = family.strip_prefix("container_")?;
                let label = |name: &str| labels.get(name).cloned();
                let pod = (label("namespace")?, label("pod")?);
                let containers = self.pods.entry(pod).or_default();
                let reading = containers.entry(label("container")?).or_default();
                (reading, figure)
            }
        };
        match figure {
            "cpu_usage_seconds_total" => {
                reading.cpu_seconds = Some(value);
                reading.at_ms = at_ms;
            }
            "memory_working_set_bytes" => reading.memory_bytes = Some(value),
            "start_time_seconds" => reading.started_ms = Some((value * 1e3) as i64),
            _ => {}
        }
        Some(())
    }
}

/// The labels at the start of `text`, and what follows them.
fn labels(text: &str) -> Option<(HashMap<String, String>, &str)> {
    let mut labels = HashMap::new();
    let Some(mut rest) = text.strip_prefix('{') else { return Some((labels, text)) };
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let (mut value, mut end) = (String::new(), None);
        let mut characters = quoted.char_indices();
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    end = Some(at + 1);
                    break;
                }
                '\\' => match characters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                other => value.push(other),
            }
        }
        labels.insert(name.to_owned(), value);
        rest = &quoted[end?..];
    }
}

/// The latest samples of a node, oldest first.
#[derive(Default)]
pub struct History(VecDeque<Sample>);

impl History {
    pub fn push(&mut self, sample: Sample) {
        let at = sample.node.at_ms;
        if self.0.back().is_some_and(|last| at - last.node.at_ms < SHORTEST_MS) {
            return;
        }
        self.0.retain(|old| at - old.node.at_ms <= LONGEST_MS);
        if self.0.len() >= KEPT {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// Can a rate be told, and is it not older than `fresh_ms`?
    pub fn is_fresh(&self, now_ms: i64, fresh_ms: i64) -> bool {
        self.pair().is_some_and(|(_, last)| now_ms - last.node.at_ms < fresh_ms)
    }

    /// Is one sample more all that is missing for a rate?
    pub fn lacks_one(&self) -> bool {
        self.0.len() == 1
    }

    /// The last sample, and the one before it that the window begins with.
    fn pair(&self) -> Option<(&Sample, &Sample)> {
        let last = self.0.back()?;
        let before = self.0.iter().rev().skip(1);
        // A scrape a moment earlier than a whole window is as good.
        let is_wide = |old: &&Sample| last.node.at_ms - old.node.at_ms >= WINDOW_MS - 1_000;
        let first = before.clone().find(is_wide).or_else(|| before.last())?;
        Some((first, last))
    }

    pub fn node(&self) -> Option<Usage> {
        let (first, last) = self.pair()?;
        between(Some(&first.node), &last.node)
    }

    /// The usage of each container of a pod; `None` unless all running containers have samples.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<BTreeMap<&str, Usage>> {
        let key = (namespace.to_owned(), name.to_owned());
        let (first, last) = self.pair()?;
        let (first, last) = (first.pods.get(&key), last.pods.get(&key)?);
        let mut all = BTreeMap::new();
        for (container, reading) in last {
            let before = first.and_then(|containers| containers.get(container));
            all.insert(container.as_str(), between(before, reading)?);
        }
        Some(all).filter(|all| !all.is_empty())
    }
}

/// The rate between two readings, or since the start of what was not there before.
fn between(before: Option<&Reading>, now: &Reading) -> Option<Usage> {
    let (cpu, memory) = (now.cpu_seconds?, now.memory_bytes?);
    let same = before.filter(|one| one.started_ms == now.started_ms && one.at_ms < now.at_ms);
    let same = same.and_then(|one| Some((one.at_ms, one.cpu_seconds.filter(|old| *old <= cpu)?)));
    let since_start =
        || now.started_ms.filter(|start| now.at_ms - start >= FRESH_MS).map(|start| (start, 0.0));
    let (from, used) = same.or_else(since_start)?;
    let window_ms = now.at_ms - from;
    let cpu_nanos = (cpu - used) * 1e12 / window_ms as f64;
    Some(Usage {
        at_ms: now.at_ms,
        window_ms,
        cpu_nanos: cpu_nanos.round() as u64,
        memory_bytes: memory.round() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node at `at` seconds, on which container `c` of pod `p` has used `cpu` seconds since `start`.
    fn text(at: i64, start: f64, cpu: f64) -> String {
        let ms = at * 1000;
        format!(
            "# HELP container_cpu_usage_seconds_total Cumulative\n\
             container_cpu_usage_seconds_total{{container=\"c\",namespace=\"n\",pod=\"p\"}} {cpu} {ms}\n\
             container_memory_working_set_bytes{{container=\"c\",namespace=\"n\",pod=\"p\"}} 2.097152e+06 {ms}\n\
             container_start_time_seconds{{container=\"c\",namespace=\"n\",pod=\"p\"}} {start}\n\
             node_cpu_usage_seconds_total {} {ms}\n\
             node_memory_working_set_bytes 1e9 {ms}\n",
            at * 2
        )
    }

    fn check(samples: &[(i64, f64, f64)], expected: Option<(i64, u64)>) {
        let mut history = History::default();
        for (at, start, cpu) in samples {
            history.push(Sample::parse(&text(*at, *start, *cpu), 0));
        }
        let found = history.pod("n", "p").map(|all| (all["c"].window_ms, all["c"].cpu_nanos));
        assert_eq!(found, expected, "{samples:?}");
    }

    #[test]
    fn two_samples_make_a_rate() {
        check(&[(100, 0.0, 1.0)], None);
        check(&[(100, 0.0, 1.0), (110, 0.0, 6.0)], Some((10_000, 500_000_000)));
        // The window is the one that is asked for, where there is a choice.
        let many = [(100, 0.0, 1.0), (105, 0.0, 1.0), (110, 0.0, 1.0), (120, 0.0, 2.5)];
        check(&many, Some((15_000, 100_000_000)));
        // An old sample says nothing about the current usage.
        check(&[(100, 0.0, 1.0), (1000, 0.0, 6.0)], None);
        // A container that restarted, or is new, is measured from its start, not at once.
        check(&[(100, 0.0, 9.0), (115, 101.0, 7.0)], Some((14_000, 500_000_000)));
        check(&[(100, 0.0, 9.0), (115, 110.0, 1.0)], None);
    }

    #[test]
    fn nodes_are_measured_too() {
        let mut history = History::default();
        history.push(Sample::parse(&text(100, 0.0, 1.0), 0));
        assert!(history.lacks_one() && history.node().is_none());
        history.push(Sample::parse(&text(101, 0.0, 1.0), 0));
        let usage = history.node().expect("two samples");
        assert_eq!((usage.cpu_nanos, usage.memory_bytes), (2_000_000_000, 1_000_000_000));
        assert!(history.is_fresh(101_500, 1_000) && !history.is_fresh(103_000, 1_000));
    }

    #[test]
    fn labels_may_be_escaped() {
        let (labels, rest) = labels(r#"{a="x\"y\\z",b="{1,2}"} 3"#).expect("labels");
        assert_eq!((labels["a"].as_str(), labels["b"].as_str()), ("x\"y\\z", "{1,2}"));
        assert_eq!(rest, " 3");
        assert!(super::labels(r#"{a="x"#).is_none());
    }
}
