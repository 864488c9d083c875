//! LeaseCandidate: who would hold a Lease, in which version.

use std::cmp::Ordering;

use k8s_openapi::api::coordination::v1beta1::LeaseCandidate;
use machinery::names;

use crate::kind::{Kind, Rules, age, field, name, text};
use crate::validate::at::At;
use crate::validate::shared::is_version;

pub(crate) static KIND: Kind<LeaseCandidate> = Kind {
    optional: true,
    rules: Rules {
        create: lease_candidate,
        update: Some(lease_candidate_update),
        name: names::config_map_key,
        create_on_update: true,
        unconditional_update: false,
        ..Rules::NONE
    },
    deprecation: "coordination.k8s.io/v1beta1 LeaseCandidate is deprecated in v1.36+, unavailable in v1.39+",
    columns: &[
        name(),
        field(
            "LeaseName",
            "string",
            "api.coordination.v1beta1.LeaseCandidateSpec.leaseName",
            |candidate| candidate.spec.lease_name.clone().into(),
        ),
        text("BinaryVersion", "string", "", |candidate| {
            candidate.spec.binary_version.clone().into()
        }),
        text("EmulationVersion", "string", "", |candidate| {
            candidate.spec.emulation_version.clone().unwrap_or_default().into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn lease_candidate(at: &At<'_>) {
    const OLDEST: &str = "OldestEmulationVersion";
    const NO_VERSION: &str = "must be a valid semantic version";
    let spec = at.get("spec");
    spec.get("leaseName").need();
    let [emulation, binary, strategy] =
        ["emulationVersion", "binaryVersion", "strategy"].map(|field| spec.get(field));
    if !emulation.is_empty() && !is_version(emulation.str()) {
        emulation.invalid(NO_VERSION);
    }
    if binary.need() && !is_version(binary.str()) {
        binary.invalid(NO_VERSION);
    }
    let is_lower = compare(binary.str(), emulation.str()) == Ordering::Less;
    if !binary.is_empty() && !emulation.is_empty() && is_lower {
        binary.invalid("must be greater than or equal to `emulationVersion`");
    }
    if !strategy.need() {
        return;
    }
    if strategy.is(OLDEST) && compare(emulation.str(), "0.0.0") == Ordering::Equal {
        emulation.required("must be specified when `strategy` is 'OldestEmulationVersion'");
    }
    // Upstream names the field twice.
    let again = strategy.called(strategy.child_path("strategy"));
    match strategy.str().contains('/') {
        false => again.one_of(&[OLDEST]),
        true => again.name(names::qualified_name),
    }
}

fn lease_candidate_update(at: &At<'_>, old: &At<'_>) {
    lease_candidate(at);
    at.get("spec.leaseName").unchanged(&old.get("spec.leaseName"));
}

/// Semantic versions by their precedence; an invalid version counts as `0.0.0`.
fn compare(one: &str, other: &str) -> Ordering {
    fn parts(text: &str) -> (Vec<u64>, Vec<&str>) {
        let text = if is_version(text) { text } else { "0.0.0" };
        let text = text.split('+').next().unwrap_or_default();
        let (core, pre) = text.split_once('-').unwrap_or((text, ""));
        let numbers = core.split('.').map(|number| number.parse().unwrap_or(u64::MAX));
        (numbers.collect(), pre.split('.').filter(|part| !part.is_empty()).collect())
    }
    fn word((one, other): (&&str, &&str)) -> Ordering {
        match (one.parse::<u64>(), other.parse::<u64>()) {
            (Ok(one), Ok(other)) => one.cmp(&other),
            (Ok(_), Err(_)) => Ordering::Less,
            (Err(_), Ok(_)) => Ordering::Greater,
            (Err(_), Err(_)) => one.cmp(other),
        }
    }
    let ((core, pre), (other_core, other_pre)) = (parts(one), parts(other));
    // A release comes after its candidates.
    let by_kind = pre.is_empty().cmp(&other_pre.is_empty());
    let words = pre.iter().zip(&other_pre).map(word).find(|order| order.is_ne());
    core.cmp(&other_core)
        .then(by_kind)
        .then(words.unwrap_or(Ordering::Equal))
        .then(pre.len().cmp(&other_pre.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_an_order() {
        for (one, other, expected) in [
            ("1.36.0", "1.36.0+k3s1", Ordering::Equal),
            ("1.36.0", "1.36.0-rc.1", Ordering::Greater),
            ("1.36.0-rc.2", "1.36.0-rc.11", Ordering::Less),
            ("1.9.0", "1.36.0", Ordering::Less),
            ("x", "0.0.0", Ordering::Equal),
        ] {
            assert_eq!(compare(one, other), expected, "{one} {other}");
        }
    }
}
