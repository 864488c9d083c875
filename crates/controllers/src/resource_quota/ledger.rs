//! The usage of one quota by the objects of a namespace: the sum, and each object's part.
//!
//! In: the parts of objects, as they change. Out: the sums. A change costs the names of one part, however many
//! objects there are.
//!
//! ```text
//!   parts: pod a {cpu 1, pods 1}  pod b {cpu 500m, pods 1}      sums: {cpu 1500m, pods 2}
//!   put(b, {cpu 250m, pods 1})  ──►  less than before           sums: {cpu 1250m, pods 2}
//! ```
//!
//! Invariant: the sums are those of the parts.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use api::quota::{self, Amounts};
use client::ObjectKey;
use k8s_openapi::api::core::v1::ScopedResourceSelectorRequirement;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity::{Amount, Format};

/// An object that is counted by its contents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    Pod(ObjectKey),
    Service(ObjectKey),
    Claim(ObjectKey),
    DeviceClaim(ObjectKey),
}

/// The effect of a change on the sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    #[default]
    None,
    More,
    /// Some amount is smaller than before.
    Less,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    amount: Amount,
    format: Format,
    /// How many parts have the name.
    parts: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Ledger {
    scopes: Vec<ScopedResourceSelectorRequirement>,
    parts: HashMap<Subject, Amounts>,
    sums: BTreeMap<String, Sum>,
    /// While the namespace is read for the first time: what changed meanwhile, which is newer.
    newer: Option<HashSet<Subject>>,
    /// Pods by the second after which they count no more.
    ends: BTreeSet<(i64, ObjectKey)>,
}

impl Ledger {
    /// Empty, and to be filled by [`fill`](Self::fill).
    pub fn new(scopes: Vec<ScopedResourceSelectorRequirement>) -> Self {
        Self { scopes, newer: Some(HashSet::new()), ..Self::default() }
    }

    pub fn scopes(&self) -> &[ScopedResourceSelectorRequirement] {
        &self.scopes
    }

    pub fn is_filled(&self) -> bool {
        self.newer.is_none()
    }

    /// The part of the namespace that was read.
    pub fn fill(&mut self, read: impl IntoIterator<Item = (Subject, Amounts)>) {
        let newer = self.newer.take().unwrap_or_default();
        for (subject, part) in read {
            if !newer.contains(&subject) {
                self.put(subject, part);
            }
        }
    }

    /// The object uses this much now; nothing, if it is gone or out of scope.
    pub fn put(&mut self, subject: Subject, part: Amounts) -> Effect {
        if let Some(newer) = &mut self.newer {
            newer.insert(subject.clone());
        }
        let old = self.parts.get(&subject).cloned().unwrap_or_default();
        if old == part {
            return Effect::None;
        }
        self.take(&old);
        for (name, quantity) in &part {
            let sum = self.sums.entry(name.clone()).or_default();
            // Sums keep the form of the first that is not zero.
            if sum.amount.is_zero() {
                sum.format = Format::of(&quantity.0);
            }
            sum.amount = sum.amount + quota::value(quantity);
            sum.parts += 1;
        }
        let smaller = |(name, amount): (&String, &Quantity)| {
            part.get(name).is_none_or(|new| quota::value(new) < quota::value(amount))
        };
        let effect = if old.iter().any(smaller) { Effect::Less } else { Effect::More };
        match part.is_empty() {
            true => self.parts.remove(&subject),
            false => self.parts.insert(subject, part),
        };
        effect
    }

    fn take(&mut self, part: &Amounts) {
        for (name, quantity) in part {
            let Some(sum) = self.sums.get_mut(name) else { continue };
            sum.amount = sum.amount - quota::value(quantity);
            sum.parts -= 1;
            if sum.parts == 0 {
                self.sums.remove(name);
            }
        }
    }

    pub fn used(&self) -> Amounts {
        let text = |sum: &Sum| Quantity(sum.amount.canonical(sum.format));
        self.sums.iter().map(|(name, sum)| (name.clone(), text(sum))).collect()
    }

    /// The pod counts no more after this second.
    pub fn ends(&mut self, second: i64, pod: ObjectKey) {
        self.ends.insert((second, pod));
    }

    /// Pods whose time is over, once.
    pub fn ended(&mut self, now: i64) -> Vec<ObjectKey> {
        let mut ended = vec![];
        while self.ends.first().is_some_and(|(second, _)| *second < now) {
            ended.extend(self.ends.pop_first().map(|(_, pod)| pod));
        }
        ended
    }

    /// The second after which the next pod's time is over.
    pub fn next_end(&self) -> Option<i64> {
        self.ends.first().map(|(second, _)| *second)
    }

    pub fn has_device_claims(&self) -> bool {
        self.parts.keys().any(|subject| matches!(subject, Subject::DeviceClaim(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amounts(all: &[(&str, &str)]) -> Amounts {
        all.iter().map(|(name, text)| ((*name).to_owned(), Quantity((*text).to_owned()))).collect()
    }

    fn pod(name: &str) -> Subject {
        Subject::Pod(ObjectKey::new("ns", name))
    }

    #[test]
    fn sums_follow_the_parts() {
        let mut ledger = Ledger::new(vec![]);
        ledger.fill([]);
        let mut check = |name: &str, part: &[(&str, &str)], effect, used: &[(&str, &str)]| {
            assert_eq!(ledger.put(pod(name), amounts(part)), effect, "{name} {part:?}");
            assert_eq!(ledger.used(), amounts(used), "{name} {part:?}");
        };
        let one = [("cpu", "1"), ("memory", "1Gi")];
        check("a", &one, Effect::More, &one);
        check("a", &one, Effect::None, &one);
        let both = [("cpu", "1500m"), ("memory", "2Gi")];
        check("b", &[("cpu", "500m"), ("memory", "1024Mi")], Effect::More, &both);
        check("b", &[("cpu", "600m")], Effect::Less, &[("cpu", "1600m"), ("memory", "1Gi")]);
        check("a", &[], Effect::Less, &[("cpu", "600m")]);
        check("gone", &[], Effect::None, &[("cpu", "600m")]);
        check("b", &[], Effect::Less, &[]);
    }

    #[test]
    fn what_changes_while_a_namespace_is_read_counts() {
        let mut ledger = Ledger::new(vec![]);
        ledger.put(pod("changed"), amounts(&[("cpu", "2")]));
        ledger.put(pod("gone"), amounts(&[]));
        let read = ["changed", "gone", "same"].map(|name| (pod(name), amounts(&[("cpu", "1")])));
        ledger.fill(read);
        assert_eq!(ledger.used(), amounts(&[("cpu", "3")]));
    }

    #[test]
    fn pods_that_do_not_end_count_until_their_time_is_over() {
        let mut ledger = Ledger::new(vec![]);
        for (second, name) in [(30, "b"), (10, "a"), (20, "c")] {
            ledger.ends(second, ObjectKey::new("ns", name));
        }
        assert_eq!(ledger.next_end(), Some(10));
        assert!(ledger.ended(10).is_empty(), "it counts in its last second");
        let names: Vec<_> = ledger.ended(21).iter().map(|key| key.name.to_string()).collect();
        assert_eq!(names, ["a", "c"]);
        assert_eq!(ledger.next_end(), Some(30));
    }
}
