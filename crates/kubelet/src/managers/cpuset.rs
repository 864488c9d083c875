//! Sets of CPUs, in the kernel's notation: `0-3,8`.
//!
//! Upstream: `k8s.io/utils/cpuset`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A range with more CPUs is a mistake. The kernel's own limit is 8,192.
const LARGEST: usize = 1 << 16;

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuSet(BTreeSet<usize>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuSetError {
    #[error("strconv.Atoi: parsing {0:?}: invalid syntax")]
    Number(String),
    #[error("invalid range {0:?} ({1} > {2})")]
    Range(String, usize, usize),
}

impl CpuSet {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, cpu: usize) -> bool {
        self.0.contains(&cpu)
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    pub fn union(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    pub fn difference(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<T: IntoIterator<Item = usize>>(all: T) -> Self {
        Self(all.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let number = |text: &str| {
            let known = text.parse::<usize>().ok().filter(|cpu| *cpu < LARGEST);
            known.ok_or_else(|| CpuSetError::Number(text.to_owned()))
        };
        let mut out = BTreeSet::new();
        if text.is_empty() {
            return Ok(Self(out));
        }
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(CpuSetError::Range(part.to_owned(), first, last));
            }
            out.extend(first..=last);
        }
        Ok(Self(out))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(usize, usize)> = vec![];
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        for (index, (first, last)) in ranges.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match first == last {
                true => write!(out, "{comma}{first}")?,
                false => write!(out, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_the_kernels_notation() {
        let check = |text: &str, expected: &str| {
            assert_eq!(text.parse::<CpuSet>().expect("a set").to_string(), expected, "{text}");
        };
        check("", "");
        check("0", "0");
        check("0-3,8", "0-3,8");
        check("3,1,2,0,8-9", "0-3,8-9");
        check("0,2,4", "0,2,4");
        for wrong in ["a", "1,", "-1", "3-1", "0-9999999999", "99999999"] {
            assert!(wrong.parse::<CpuSet>().is_err(), "{wrong}");
        }
    }
}
