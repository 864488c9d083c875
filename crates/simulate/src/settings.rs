//! How simulated pods and nodes behave, as annotations and rules say it. Pure.
//!
//! In: the annotation `decapod.io/simulate` of a pod or node, the rules of a file. Out: [`Behaviour`] and
//! [`Mode`]. What a pod's annotation says wins over the first rule that matches, which wins over the defaults.
//! Invariant: chance is a hash of the object's uid or name, so that a pod behaves the same after a restart.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// On pods and nodes: settings, separated by commas.
pub const ANNOTATION: &str = "decapod.io/simulate";
/// Pods of Jobs run for this long unless something else is said.
const JOB_RUNS: Duration = Duration::from_secs(5);
const INIT_RUNS: Duration = Duration::from_secs(1);
/// A container that crashes runs for this long.
const CRASH: Duration = Duration::from_secs(1);

/// A duration as Go writes it: `1m30s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span(pub Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        base::duration::parse(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// The settings of a pod's status; other fields are not written.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodSettings {
    /// From the binding to the start of the first container.
    pub start_delay: Option<Span>,
    /// Added to `startDelay`, `runFor` and `terminationDelay`: between nothing and so much.
    pub jitter: Option<Span>,
    /// Each init container.
    pub init_for: Option<Span>,
    /// From the start of the containers until they are ready.
    pub ready_delay: Option<Span>,
    /// Until the containers end by themselves.
    pub run_for: Option<Span>,
    pub exit_code: Option<i32>,
    /// `false`: never ready.
    pub ready: Option<bool>,
    /// From the request of a deletion until the containers have ended.
    pub termination_delay: Option<Span>,
    /// Containers end with code 1 after a second.
    pub crash_loop: Option<bool>,
}

/// Why an annotation cannot be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unreadable {
    #[error("unknown setting {0:?}")]
    Unknown(String),
    #[error("{0}: {1}")]
    Value(String, String),
}

impl PodSettings {
    /// From an annotation: `start-delay=2s,run-for=1m,exit-code=1`, `crash-loop`, `not-ready`.
    pub fn parse(text: &str) -> Result<Self, Unreadable> {
        let mut settings = Self::default();
        for word in words(text) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let span = || {
                let parsed = base::duration::parse(value).map(Span);
                parsed.map(Some).map_err(|why| Unreadable::Value(name.to_owned(), why))
            };
            match name {
                "start-delay" => settings.start_delay = span()?,
                "jitter" => settings.jitter = span()?,
                "init-for" => settings.init_for = span()?,
                "ready-delay" => settings.ready_delay = span()?,
                "run-for" => settings.run_for = span()?,
                "termination-delay" => settings.termination_delay = span()?,
                "exit-code" => settings.exit_code = Some(exit_code(value)?),
                "crash-loop" if value.is_empty() => settings.crash_loop = Some(true),
                "not-ready" if value.is_empty() => settings.ready = Some(false),
                _ => return Err(Unreadable::Unknown(word.to_owned())),
            }
        }
        Ok(settings)
    }

    /// These settings, and what `other` says where they say nothing.
    pub fn or(self, other: &Self) -> Self {
        Self {
            start_delay: self.start_delay.or(other.start_delay),
            jitter: self.jitter.or(other.jitter),
            init_for: self.init_for.or(other.init_for),
            ready_delay: self.ready_delay.or(other.ready_delay),
            run_for: self.run_for.or(other.run_for),
            exit_code: self.exit_code.or(other.exit_code),
            ready: self.ready.or(other.ready),
            termination_delay: self.termination_delay.or(other.termination_delay),
            crash_loop: self.crash_loop.or(other.crash_loop),
        }
    }

    /// With the defaults, for the pod of this uid on a node in this mode.
    pub fn resolve(&self, uid: &str, is_of_job: bool, mode: Mode) -> Behaviour {
        let slower = match mode {
            Mode::Slow(by) => by,
            _ => Duration::ZERO,
        };
        let span = |span: Option<Span>| span.map_or(Duration::ZERO, |span| span.0);
        let jitter = span(self.jitter).mul_f64(fraction(uid)) + slower;
        let crashes = self.crash_loop == Some(true) || mode == Mode::CrashLoop;
        let usual = is_of_job.then_some(JOB_RUNS);
        let run_for = self.run_for.map(|span| span.0).or(usual).map(|time| time + jitter);
        Behaviour {
            start_delay: span(self.start_delay) + jitter,
            init_for: self.init_for.map_or(INIT_RUNS, |span| span.0) + slower,
            ready_delay: span(self.ready_delay) + slower,
            run_for: if crashes { Some(CRASH) } else { run_for },
            exit_code: if crashes { 1 } else { self.exit_code.unwrap_or(0) },
            is_ready: self.ready.unwrap_or(true),
            termination_delay: span(self.termination_delay) + jitter,
            holds_starts: mode == Mode::NotReady,
        }
    }
}

fn exit_code(text: &str) -> Result<i32, Unreadable> {
    let code = text.parse::<u8>().map(i32::from);
    code.map_err(|_| Unreadable::Value("exit-code".into(), format!("{text:?} is not in 0..=255")))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty())
}

/// The behaviour of one pod, with its times.
#[derive(Clone, Debug, PartialEq)]
pub struct Behaviour {
    pub start_delay: Duration,
    pub init_for: Duration,
    pub ready_delay: Duration,
    pub run_for: Option<Duration>,
    pub exit_code: i32,
    pub is_ready: bool,
    pub termination_delay: Duration,
    /// No container starts.
    pub holds_starts: bool,
}

/// How a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    #[default]
    Well,
    /// Behaves like a machine without power: no Lease, no status, no changes of its pods.
    Silent,
    /// It says that it is not ready, and starts no containers.
    NotReady,
    /// Every step of its pods takes so much longer.
    Slow(Duration),
    /// All its containers crash.
    CrashLoop,
}

impl Mode {
    /// From an annotation or a rule: `silent`, `not-ready`, `slow=5s`, `crash-loop`.
    pub fn parse(text: &str) -> Result<Self, Unreadable> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        match (name.trim(), value.trim()) {
            ("" | "well", "") => Ok(Self::Well),
            ("silent", "") => Ok(Self::Silent),
            ("not-ready", "") => Ok(Self::NotReady),
            ("crash-loop", "") => Ok(Self::CrashLoop),
            ("slow", value) => {
                let parsed = base::duration::parse(value).map(Self::Slow);
                parsed.map_err(|why| Unreadable::Value("slow".into(), why))
            }
            _ => Err(Unreadable::Unknown(text.to_owned())),
        }
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// A number in `0.0..1.0` that is always the same for the same text.
pub fn fraction(text: &str) -> f64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    // 53 bits are what a float holds.
    (hasher.finish() >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_are_read_or_refused() {
        let second = |seconds| Some(Span(Duration::from_secs(seconds)));
        let check = |text: &str, expected: Result<PodSettings, &str>| {
            let found = PodSettings::parse(text).map_err(|why| why.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{text}");
        };
        check("", Ok(PodSettings::default()));
        check(
            "start-delay=2s, run-for=1m,exit-code=3",
            Ok(PodSettings {
                start_delay: second(2),
                run_for: second(60),
                exit_code: Some(3),
                ..PodSettings::default()
            }),
        );
        check(
            "crash-loop,not-ready",
            Ok(PodSettings {
                crash_loop: Some(true),
                ready: Some(false),
                ..PodSettings::default()
            }),
        );
        check("run-for=5", Err("run-for: time: missing unit in duration \"5\""));
        check("exit-code=256", Err("exit-code: \"256\" is not in 0..=255"));
        check("sleep=1s", Err("unknown setting \"sleep=1s\""));
        check("crash-loop=no", Err("unknown setting \"crash-loop=no\""));
    }

    #[test]
    fn modes_of_nodes_are_read_or_refused() {
        let check = |text: &str, expected: Result<Mode, &str>| {
            let found = Mode::parse(text).map_err(|why| why.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{text}");
        };
        check("", Ok(Mode::Well));
        check("silent", Ok(Mode::Silent));
        check("not-ready", Ok(Mode::NotReady));
        check("slow=1500ms", Ok(Mode::Slow(Duration::from_millis(1500))));
        check("slow", Err("slow: time: invalid duration \"\""));
        check("dead", Err("unknown setting \"dead\""));
    }

    #[test]
    fn the_annotation_wins_over_the_rule_and_the_rule_over_the_default() {
        let own = PodSettings::parse("run-for=9s").expect("readable");
        let rule = PodSettings::parse("run-for=1s,start-delay=3s").expect("readable");
        let found = own.or(&rule).resolve("uid", true, Mode::Well);
        assert_eq!(found.run_for, Some(Duration::from_secs(9)));
        assert_eq!(found.start_delay, Duration::from_secs(3));
        let job = PodSettings::default().resolve("uid", true, Mode::Well);
        assert_eq!((job.run_for, job.exit_code), (Some(JOB_RUNS), 0));
        assert_eq!(PodSettings::default().resolve("uid", false, Mode::Well).run_for, None);
        let crash = PodSettings::default().resolve("uid", false, Mode::CrashLoop);
        assert_eq!((crash.run_for, crash.exit_code), (Some(CRASH), 1));
        let slow = Mode::Slow(Duration::from_secs(5));
        let slow = PodSettings::default().resolve("uid", false, slow);
        assert_eq!(slow.start_delay, Duration::from_secs(5));
    }

    #[test]
    fn jitter_is_within_its_bound_and_the_same_each_time() {
        let settings = PodSettings::parse("start-delay=1s,jitter=1s").expect("readable");
        let mut delays = Vec::new();
        for number in 0..100 {
            let uid = format!("uid-{number}");
            let delay = settings.resolve(&uid, false, Mode::Well).start_delay;
            assert_eq!(delay, settings.resolve(&uid, false, Mode::Well).start_delay);
            assert!((1..2).contains(&delay.as_secs()), "{delay:?}");
            delays.push(delay);
        }
        delays.sort();
        assert!(delays[99] - delays[0] > Duration::from_millis(500), "{delays:?}");
    }
}
