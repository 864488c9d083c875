//! The policy of a namespace's labels: a level and a version for each of three modes.
//! Upstream: `k8s.io/pod-security-admission/api`.

use std::collections::BTreeMap;
use std::fmt;

use machinery::field::{FieldErrors, Path};

const PREFIX: &str = "pod-security.kubernetes.io/";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    #[default]
    Privileged,
    Baseline,
    Restricted,
}

/// The minor version whose rules apply; `None`: the latest.
pub(crate) type Version = Option<u32>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mode {
    pub level: Level,
    pub version: Version,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Policy {
    pub enforce: Mode,
    pub audit: Mode,
    pub warn: Mode,
}

impl Level {
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        match text {
            "privileged" => Ok(Self::Privileged),
            "baseline" => Ok(Self::Baseline),
            "restricted" => Ok(Self::Restricted),
            _ => Err("must be one of privileged, baseline, restricted"),
        }
    }
}

pub(crate) fn parse_version(text: &str) -> Result<Version, &'static str> {
    const WRONG: &str = "must be \"latest\" or \"v1.x\"";
    if text == "latest" {
        return Ok(None);
    }
    let minor = text.strip_prefix("v1.").ok_or(WRONG)?;
    let is_number = minor.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number || (minor.len() > 1 && minor.starts_with('0')) {
        return Err(WRONG);
    }
    minor.parse().map(Some).map_err(|_| WRONG)
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Privileged => "privileged",
            Level::Baseline => "baseline",
            Level::Restricted => "restricted",
        };
        match self.version {
            Some(minor) => write!(f, "{level}:v1.{minor}"),
            None => write!(f, "{level}:latest"),
        }
    }
}

impl Policy {
    pub fn is_privileged(&self) -> bool {
        [self.enforce, self.audit, self.warn].iter().all(|mode| mode.level == Level::Privileged)
    }

    /// The policy by labels and the cluster's defaults. An invalid label enforces the strictest level, and
    /// does not audit or warn.
    pub fn of_labels(
        labels: Option<&BTreeMap<String, String>>,
        defaults: &Self,
    ) -> (Self, FieldErrors) {
        let mut policy = *defaults;
        let mut errors = FieldErrors::default();
        let Some(labels) = labels else { return (policy, errors) };
        let mut level = |name: &str, mode: &mut Mode, otherwise: Level| -> Option<bool> {
            let text = labels.get(&format!("{PREFIX}{name}"))?;
            let parsed = Level::parse(text);
            mode.level = parsed.unwrap_or(otherwise);
            let _ = parsed.map_err(|why| complain(&mut errors, name, text, why));
            Some(parsed.is_ok())
        };
        let enforces = level("enforce", &mut policy.enforce, Level::Restricted) == Some(true);
        level("audit", &mut policy.audit, Level::Privileged);
        let warns = level("warn", &mut policy.warn, Level::Privileged).is_some();
        let mut version = |name: &str, mode: &mut Mode| -> bool {
            let Some(text) = labels.get(&format!("{PREFIX}{name}")) else { return false };
            let parsed = parse_version(text);
            mode.version = parsed.unwrap_or(None);
            let _ = parsed.map_err(|why| complain(&mut errors, name, text, why));
            true
        };
        version("enforce-version", &mut policy.enforce);
        version("audit-version", &mut policy.audit);
        let has_warn_version = version("warn-version", &mut policy.warn);
        if !warns && enforces && policy.enforce.level > policy.warn.level {
            policy.warn.level = policy.enforce.level;
            if !has_warn_version {
                policy.warn.version = policy.enforce.version;
            }
        }
        (policy, errors)
    }

    /// The modes that are set by labels, as `enforce=restricted:latest, warn=…`.
    pub fn shown(&self, labels: &BTreeMap<String, String>) -> String {
        let named = |name: &str| {
            let has = |suffix: &str| labels.contains_key(&format!("{PREFIX}{name}{suffix}"));
            has("") || has("-version")
        };
        let modes = [("enforce", self.enforce), ("audit", self.audit), ("warn", self.warn)];
        let shown = modes
            .iter()
            .filter(|(name, mode)| mode.level != Level::Privileged && named(name))
            .map(|(name, mode)| format!("{name}={mode}"));
        shown.collect::<Vec<_>>().join(", ")
    }
}

fn complain(errors: &mut FieldErrors, label: &str, value: &str, why: &str) {
    errors.invalid(
        &Path::new("metadata").child("labels").key(&format!("{PREFIX}{label}")),
        value,
        why,
    );
}
