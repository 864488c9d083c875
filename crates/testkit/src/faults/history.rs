//! The history checker: what clients were told, compared with what watches and the last list show.
//!
//! In: all attempts to write, the events of each watch, the objects at the end. Out: each contradiction as one
//! line. Pure.
//!
//! It checks that
//! - each acknowledged write is an event with the acknowledged revision and value, exactly once;
//! - each event is a write that was acknowledged, or one whose fate was unknown to its client;
//! - all watches of a group have the same events, in growing revisions;
//! - the last list is the result of the events;
//! - no read returned an older state than the reader had been told.

use std::collections::{BTreeMap, HashMap};

/// Contradictions beyond this are counted, not shown.
const SHOWN: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verb {
    Create,
    Update,
    Delete,
}

/// A change of an object; a deletion has no value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Change {
    pub verb: Verb,
    pub name: String,
    pub value: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// With the revision of the answer; an answer to a deletion has none.
    Acknowledged(Option<u64>),
    /// No answer, or one that does not say what happened.
    Unknown(String),
    /// The server has refused it.
    Refused(String),
}

#[derive(Clone, Debug)]
pub struct Attempt {
    pub change: Change,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub change: Change,
    pub revision: u64,
}

#[derive(Default)]
pub struct History {
    pub attempts: Vec<Attempt>,
    /// The events of each watch, by group.
    pub watches: BTreeMap<usize, Vec<Vec<Event>>>,
    /// Name, revision and value of each object at the end.
    pub last: BTreeMap<String, (u64, u64)>,
    /// The revision of that list. A write whose client gave up may happen later.
    pub listed_at: u64,
    /// What clients themselves noticed, such as a stale read or a watch that had to list again.
    pub noticed: Vec<String>,
}

impl History {
    /// The contradictions.
    pub fn check(&self) -> Vec<String> {
        let mut found = Found(self.noticed.clone());
        let mut events: Vec<&Event> = vec![];
        for (group, watches) in &self.watches {
            let Some(longest) = watches.iter().max_by_key(|one| one.len()) else { continue };
            for pair in longest.windows(2).filter(|pair| pair[0].revision >= pair[1].revision) {
                found.add(format!("group {group}: {:?} came after {:?}", pair[1], pair[0]));
            }
            for (number, watch) in watches.iter().enumerate().filter(|(_, one)| *one != longest) {
                found.add(format!("group {group}, watch {number}: {}", difference(longest, watch)));
            }
            events.extend(longest);
        }
        events.sort_by_key(|event| event.revision);
        self.check_writes(&events, &mut found);
        self.check_last(&events, &mut found);
        found.shown()
    }

    fn check_writes(&self, events: &[&Event], found: &mut Found) {
        let mut seen: HashMap<&Change, Vec<u64>> = HashMap::new();
        for event in events {
            seen.entry(&event.change).or_default().push(event.revision);
        }
        let mut may: HashMap<&Change, bool> = HashMap::new();
        for Attempt { change, outcome } in &self.attempts {
            let revisions = seen.get(change).map_or(&[][..], Vec::as_slice);
            match outcome {
                Outcome::Acknowledged(revision) => {
                    may.insert(change, true);
                    let is_there = match revision {
                        Some(revision) => revisions == [*revision],
                        None => revisions.len() == 1,
                    };
                    if !is_there {
                        found.add(format!(
                            "{change:?} was acknowledged at {revision:?}, watches saw it at {revisions:?}"
                        ));
                    }
                }
                Outcome::Unknown(_) => drop(may.entry(change).or_insert(true)),
                Outcome::Refused(why) if !revisions.is_empty() => {
                    found.add(format!("{change:?} was refused ({why}), and happened"));
                }
                Outcome::Refused(_) => {}
            }
        }
        for (change, revisions) in seen {
            if !may.contains_key(change) {
                found.add(format!("no client wrote {change:?}, watches saw it at {revisions:?}"));
            } else if revisions.len() > 1 {
                found.add(format!("{change:?} happened more than once: at {revisions:?}"));
            }
        }
    }

    fn check_last(&self, events: &[&Event], found: &mut Found) {
        let mut replayed: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for Event { change, revision } in events {
            if *revision > self.listed_at {
                break;
            }
            match change.verb {
                Verb::Delete => drop(replayed.remove(change.name.as_str())),
                _ => drop(replayed.insert(&change.name, (*revision, change.value))),
            }
        }
        for (name, there) in &self.last {
            let expected = replayed.remove(name.as_str());
            if expected != Some(*there) {
                found.add(format!("{name} is {there:?} at the end, by the events {expected:?}"));
            }
        }
        for (name, expected) in replayed {
            found.add(format!("{name} is not there at the end, by the events {expected:?}"));
        }
    }
}

/// Says where two watches differ first.
fn difference(longest: &[Event], watch: &[Event]) -> String {
    let at = longest.iter().zip(watch).take_while(|(one, other)| one == other).count();
    format!(
        "{} events instead of {}; after {at} equal ones {:?} instead of {:?}",
        watch.len(),
        longest.len(),
        watch.get(at),
        longest.get(at)
    )
}

struct Found(Vec<String>);

impl Found {
    fn add(&mut self, text: String) {
        self.0.push(text);
    }

    fn shown(mut self) -> Vec<String> {
        if self.0.len() > SHOWN {
            let more = self.0.len() - SHOWN;
            self.0.truncate(SHOWN);
            self.0.push(format!("and {more} more"));
        }
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(verb: Verb, name: &str, value: u64) -> Change {
        Change { verb, name: name.to_owned(), value }
    }

    fn event(verb: Verb, name: &str, value: u64, revision: u64) -> Event {
        Event { change: change(verb, name, value), revision }
    }

    fn attempt(verb: Verb, name: &str, value: u64, outcome: Outcome) -> Attempt {
        Attempt { change: change(verb, name, value), outcome }
    }

    /// Two watches, an object that stays, one that is deleted, and a write without an answer.
    fn sound() -> History {
        let done = |revision| Outcome::Acknowledged(Some(revision));
        let unknown = Outcome::Unknown("cut".into());
        let events = vec![
            event(Verb::Create, "a", 1, 5),
            event(Verb::Create, "b", 1, 7),
            event(Verb::Update, "a", 2, 8),
            event(Verb::Delete, "b", 0, 9),
        ];
        History {
            attempts: vec![
                attempt(Verb::Create, "a", 1, done(5)),
                attempt(Verb::Create, "b", 1, done(7)),
                attempt(Verb::Update, "a", 2, unknown.clone()),
                attempt(Verb::Update, "a", 3, unknown),
                attempt(Verb::Delete, "b", 0, Outcome::Acknowledged(None)),
            ],
            watches: BTreeMap::from([(0, vec![events.clone(), events])]),
            last: BTreeMap::from([("a".to_owned(), (8, 2))]),
            listed_at: 9,
            noticed: vec![],
        }
    }

    fn check(spoil: impl FnOnce(&mut History), expected: &str) {
        let mut history = sound();
        spoil(&mut history);
        let found = history.check();
        assert!(found.iter().any(|line| line.contains(expected)), "{expected}: {found:?}");
    }

    #[test]
    fn a_sound_history_passes() {
        assert_eq!(sound().check(), Vec::<String>::new());
    }

    #[test]
    fn a_write_without_an_answer_may_happen_after_the_list() {
        let mut history = sound();
        let late = event(Verb::Update, "a", 3, 12);
        history.watches.values_mut().flatten().for_each(|all| all.push(late.clone()));
        assert_eq!(history.check(), Vec::<String>::new());
        history.listed_at = 12;
        assert_eq!(history.check().len(), 1);
    }

    #[test]
    fn contradictions_are_found() {
        let watches = |history: &mut History, spoil: fn(&mut Vec<Event>)| {
            history.watches.values_mut().flatten().for_each(spoil);
        };
        check(|it| it.last.clear(), "a is not there at the end");
        check(|it| it.last.extend([("a".into(), (5, 1))]), "a is (5, 1) at the end");
        check(|it| it.last.extend([("b".into(), (7, 1))]), "by the events None");
        check(|it| watches(it, |all| drop(all.remove(1))), "was acknowledged at Some(7)");
        check(|it| watches(it, |all| all[0].revision = 4), "was acknowledged at Some(5)");
        check(|it| watches(it, |all| all.swap(1, 2)), "came after");
        check(|it| watches(it, |all| all[2].change.value = 9), "no client wrote");
        check(|it| drop(it.watches.entry(0).or_default()[1].pop()), "3 events instead of 4");
        let again = |all: &mut Vec<Event>| all.push(event(Verb::Update, "a", 2, 10));
        check(|it| watches(it, again), "more than once");
        let refused = Outcome::Refused("status 409".into());
        check(|it| it.attempts[0].outcome = refused, "and happened");
        check(|it| it.noticed.push("a stale read".into()), "a stale read");
    }
}
