//! Versions and version requirements: `>=1.2, <2.0.0-0`.
//!
//! In: texts of Cargo.lock and of advisories. Out: whether a version matches. Upstream: the crate
//! `semver`; this is the part that advisories use.

use std::cmp::Ordering;

/// Three numbers, and a tag for pre-releases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    numbers: [u64; 3],
    /// Empty for a release.
    tag: String,
}

impl Version {
    /// Missing numbers are 0; the second result is the number of numbers in the text.
    fn parse(text: &str) -> Option<(Self, usize)> {
        let text = text.split('+').next().unwrap_or_default();
        let (front, tag) = text.split_once('-').unwrap_or((text, ""));
        let mut numbers = [0; 3];
        let mut count = 0;
        for part in front.split('.') {
            *numbers.get_mut(count)? = part.trim().parse().ok()?;
            count += 1;
        }
        Some((Self { numbers, tag: tag.to_owned() }, count))
    }

    pub fn of(text: &str) -> Option<Self> {
        Self::parse(text).map(|(version, _)| version)
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let tags = match (self.tag.as_str(), other.tag.as_str()) {
            ("", "") => Ordering::Equal,
            ("", _) => Ordering::Greater,
            (_, "") => Ordering::Less,
            (a, b) => compare_tags(a, b),
        };
        self.numbers.cmp(&other.numbers).then(tags)
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Compares part by part; numbers as numbers, and numbers before words.
fn compare_tags(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.split('.'), b.split('.'));
    loop {
        let (one, other) = match (a.next(), b.next()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(one), Some(other)) => (one, other),
        };
        let order = match (one.parse::<u64>(), other.parse::<u64>()) {
            (Ok(one), Ok(other)) => one.cmp(&other),
            (Ok(_), Err(_)) => Ordering::Less,
            (Err(_), Ok(_)) => Ordering::Greater,
            (Err(_), Err(_)) => one.cmp(other),
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

/// Whether a version satisfies a requirement; `None` if the requirement is invalid.
pub fn matches(requirement: &str, version: &Version) -> Option<bool> {
    let mut all = true;
    for part in requirement.split(',') {
        all &= matches_one(part.trim(), version)?;
    }
    Some(all)
}

fn matches_one(part: &str, version: &Version) -> Option<bool> {
    if part == "*" {
        return Some(true);
    }
    let end = part.find(|c: char| c.is_ascii_digit())?;
    let (operator, text) = part.split_at(end);
    let (wanted, count) = Version::parse(text.trim())?;
    let below = |at: usize| {
        let mut numbers = wanted.numbers;
        numbers[at] += 1;
        numbers[at + 1..].fill(0);
        *version < Version { numbers, tag: "0".to_owned() }
    };
    let from = *version >= wanted;
    Some(match operator.trim() {
        ">=" => from,
        ">" => *version > wanted,
        "<" => *version < wanted,
        "<=" => *version <= wanted,
        "=" if count == 3 => *version == wanted,
        "=" => from && below(count - 1),
        "~" => from && below(usize::from(count > 1)),
        // Up to the first number that is not 0.
        "" | "^" => {
            let first = wanted.numbers.iter().position(|number| *number > 0);
            from && below(first.unwrap_or(2).min(count - 1))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_match_as_in_manifests() {
        for (requirement, version, expected) in [
            (">=1.2.3", "1.2.3", Some(true)),
            (">= 1.2.3", "1.2.2", Some(false)),
            ("^0.3.26", "0.3.27", Some(true)),
            ("^0.3.26", "0.4.0", Some(false)),
            ("0.13.10", "0.13.11", Some(true)),
            ("0.13.10", "0.14.0", Some(false)),
            ("^1", "1.9.0", Some(true)),
            ("^1", "2.0.0", Some(false)),
            ("^0.0.3", "0.0.4", Some(false)),
            ("^0", "0.9.9", Some(true)),
            ("~1.2", "1.2.9", Some(true)),
            ("~1.2", "1.3.0", Some(false)),
            ("=0.2.0", "0.2.0", Some(true)),
            ("=0.2.0", "0.2.1", Some(false)),
            ("=0.2", "0.2.7", Some(true)),
            (">=0.4.8, <1.0.0-0", "1.0.0", Some(false)),
            (">=0.4.8, <1.0.0-0", "0.5.0", Some(true)),
            ("<0.10.0,>=0.9.18", "0.9.20", Some(true)),
            (">=1.0.0-alpha.2", "1.0.0-alpha.10", Some(true)),
            (">=1.0.0-alpha.2", "1.0.0", Some(true)),
            (">=1.0.0", "1.0.0-rc.1", Some(false)),
            ("<0.12", "0.11.9", Some(true)),
            (">=0.39.0", "0.47.0+build", Some(true)),
            ("*", "3.0.0", Some(true)),
            ("nonsense", "1.0.0", None),
            ("!1.0", "1.0.0", None),
        ] {
            let given = Version::of(version).expect("a version");
            assert_eq!(matches(requirement, &given), expected, "{requirement} {version}");
        }
    }
}
