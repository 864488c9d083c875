//! Sets of completion indexes, as `status.completedIndexes` writes them: `0,2-5,7`. Pure.
//!
//! Invariant: intervals are in order and neither touch nor overlap.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::core::v1::Pod;

pub const INDEX: &str = "batch.kubernetes.io/job-completion-index";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intervals(Vec<(usize, usize)>);

impl Intervals {
    /// Invalid parts are left out, and so are indexes from `completions` on.
    pub fn parse(text: &str, completions: usize) -> Self {
        let mut all = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
                tracing::warn!(part, "ignoring an invalid range of completed indexes");
                continue;
            };
            if first >= completions {
                break;
            }
            all.push((first, last.min(completions - 1)));
        }
        all
    }

    fn push(&mut self, next: (usize, usize)) {
        match self.0.last_mut() {
            Some(last) if next.0 <= last.1 + 1 => last.1 = last.1.max(next.1),
            _ => self.0.push(next),
        }
    }

    pub fn merged(&self, other: &Self) -> Self {
        let mut parts: Vec<_> = self.0.iter().chain(&other.0).copied().collect();
        parts.sort_unstable();
        let mut all = Self::default();
        parts.into_iter().for_each(|part| all.push(part));
        all
    }

    pub fn with(&self, indexes: impl IntoIterator<Item = usize>) -> Self {
        let indexes: BTreeSet<usize> = indexes.into_iter().collect();
        self.merged(&Self(indexes.into_iter().map(|index| (index, index)).collect()))
    }

    pub fn total(&self) -> usize {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, index: usize) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < index);
        self.0.get(at).is_some_and(|(first, _)| *first <= index)
    }

    /// How many indexes both have.
    pub fn common(&self, other: &Self) -> usize {
        let overlap = |a: &(usize, usize), b: &(usize, usize)| {
            (a.1.min(b.1) + 1).saturating_sub(a.0.max(b.0))
        };
        let (mut mine, mut theirs, mut count) = (0, 0, 0);
        while let (Some(a), Some(b)) = (self.0.get(mine), other.0.get(theirs)) {
            count += overlap(a, b);
            if a.1 <= b.1 {
                mine += 1;
            } else {
                theirs += 1;
            }
        }
        count
    }

    /// The first `count` indexes below `completions` that are not in the set.
    pub fn missing(&self, count: usize, completions: usize) -> Vec<usize> {
        let (mut found, mut candidate) = (vec![], 0);
        for (first, last) in self.0.iter().copied().chain([(completions, completions)]) {
            while candidate < first.min(completions) && found.len() < count {
                found.push(candidate);
                candidate += 1;
            }
            candidate = candidate.max(last + 1);
        }
        found
    }
}

impl fmt::Display for Intervals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// Which index the pod works on, if it says so and the Job has it.
pub fn index_of(pod: &Pod, completions: Option<i32>) -> Option<usize> {
    let index: usize = pod.metadata.annotations.as_ref()?.get(INDEX)?.parse().ok()?;
    (index < completions.unwrap_or_default().max(0) as usize).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_read_and_written() {
        let check = |text: &str, completions: usize, expected: &str, total: usize| {
            let read = Intervals::parse(text, completions);
            assert_eq!((read.to_string().as_str(), read.total()), (expected, total), "{text}");
        };
        check("", 10, "", 0);
        check("0", 10, "0", 1);
        check("0-2", 10, "0-2", 3);
        check("0,1", 10, "0,1", 2);
        check("0,1,2,5", 10, "0-2,5", 4);
        check("0-20", 10, "0-9", 10);
        check("0,x,3", 10, "0,3", 2);
        check("12", 10, "", 0);
    }

    #[test]
    fn indexes_are_added_and_found() {
        let set = Intervals::parse("1,3-4", 10);
        assert_eq!(set.with([0, 6]).to_string(), "0,1,3,4,6");
        assert_eq!(set.with([2]).to_string(), "1-4");
        assert!(set.has(3) && set.has(1) && !set.has(2) && !set.has(5));
        assert_eq!(set.missing(3, 10), [0, 2, 5]);
        assert_eq!(set.missing(9, 6), [0, 2, 5]);
        assert_eq!(Intervals::parse("0-5", 10).common(&set), 3);
    }
}
