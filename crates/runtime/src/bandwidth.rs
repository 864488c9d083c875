//! The limits of a pod's traffic, from its annotations.
//!
//! In: annotations `kubernetes.io/ingress-bandwidth` and `kubernetes.io/egress-bandwidth`, quantities of bits per
//! second. Out: numbers. Upstream: `pkg/util/bandwidth` of Kubernetes, also its limits and texts.

use std::collections::BTreeMap;

const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";
const SMALLEST: u64 = 1_000;
const LARGEST: u64 = 1_000_000_000_000_000;

/// In bits per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bandwidth {
    /// Towards the pod.
    pub ingress: Option<u64>,
    pub egress: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BandwidthError {
    #[error("reading pod bandwidth annotations: {0}: {1:?} is no quantity")]
    Quantity(&'static str, String),
    #[error("reading pod bandwidth annotations: resource is unreasonably small (< 1kbit)")]
    Small,
    #[error("reading pod bandwidth annotations: resource is unreasonably large (> 1Pbit)")]
    Large,
}

impl Bandwidth {
    pub(crate) fn of(annotations: &BTreeMap<String, String>) -> Result<Self, BandwidthError> {
        let limit = |name: &'static str| {
            let Some(text) = annotations.get(name) else { return Ok(None) };
            let wrong = || BandwidthError::Quantity(name, text.clone());
            match bits(text).ok_or_else(wrong)? {
                ..SMALLEST => Err(BandwidthError::Small),
                bits if bits > LARGEST => Err(BandwidthError::Large),
                bits => Ok(Some(bits)),
            }
        };
        Ok(Self { ingress: limit(INGRESS)?, egress: limit(EGRESS)? })
    }
}

/// The value of a quantity, rounded up.
fn bits(text: &str) -> Option<u64> {
    let end =
        text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '+').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let factor = match suffix {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        other => 10f64.powi(other.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    let value = number.parse::<f64>().ok()? * factor;
    // A conversion from a float saturates.
    value.is_finite().then_some(value.ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_become_bits_per_second() {
        let check = |text: &str, expected: Result<u64, &str>| {
            let annotations = [(EGRESS.to_owned(), text.to_owned())].into();
            match (Bandwidth::of(&annotations), expected) {
                (Ok(got), Ok(bits)) => {
                    assert_eq!(got, Bandwidth { ingress: None, egress: Some(bits) }, "{text}");
                }
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (got, _) => panic!("{text}: {got:?}"),
            }
        };
        check("10M", Ok(10_000_000));
        check("1Gi", Ok(1 << 30));
        check("1.5k", Ok(1500));
        check("1e6", Ok(1_000_000));
        check("1000", Ok(1000));
        check("1P", Ok(LARGEST));
        check("999", Err("unreasonably small (< 1kbit)"));
        check("10m", Err("unreasonably small"));
        check("2P", Err("unreasonably large (> 1Pbit)"));
        check("fast", Err("\"fast\" is no quantity"));
        check("-1M", Err("is no quantity"));
        check("", Err("is no quantity"));
        assert_eq!(Bandwidth::of(&BTreeMap::new()), Ok(Bandwidth::default()));
    }
}
