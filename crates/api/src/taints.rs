//! Matches tolerations with taints, for the scheduler, the kubelet and the controllers.
//!
//! Upstream: `Toleration.ToleratesTaint`.

use std::cmp::Ordering;

use k8s_openapi::api::core::v1::{Taint, Toleration};
use release::features::{self, Feature};

pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let fits = |wanted: Option<&str>, is: &str| wanted.is_none_or(|it| it.is_empty() || it == is);
    if !fits(toleration.effect.as_deref(), &taint.effect)
        || !fits(toleration.key.as_deref(), &taint.key)
    {
        return false;
    }
    let wanted = toleration.value.as_deref().unwrap_or_default();
    let value = taint.value.as_deref().unwrap_or_default();
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => wanted == value,
        "Exists" => true,
        "Lt" => compared(value, wanted) == Some(Ordering::Less),
        "Gt" => compared(value, wanted) == Some(Ordering::Greater),
        _ => false,
    }
}

/// `Gt` and `Lt` compare numbers if their feature gate is enabled.
fn compared(value: &str, bound: &str) -> Option<Ordering> {
    if !features::enabled(Feature::TaintTolerationComparisonOperators) {
        return None;
    }
    let number = |text: &str| text.parse::<i64>().ok().filter(|_| is_decimal(text));
    Some(number(value)?.cmp(&number(bound)?))
}

/// An integer without leading zeros, optionally with `-`.
pub fn is_decimal(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    text == "0"
        || !digits.is_empty()
            && !digits.starts_with('0')
            && digits.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_cover_taints() {
        let check = |toleration: [&str; 4], taint: [&str; 3], is_open: bool, expected: bool| {
            let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            let [key, operator, value, effect] = toleration.map(some);
            let toleration = Toleration { key, operator, value, effect, toleration_seconds: None };
            let [key, value, effect] = taint;
            let taint = Taint {
                key: key.into(),
                value: some(value),
                effect: effect.into(),
                time_added: None,
            };
            let gate = Feature::TaintTolerationComparisonOperators;
            let gates = features::Gates::DEFAULT.with(gate, is_open);
            let is = features::scoped(gates, || tolerates(&toleration, &taint));
            assert_eq!(is, expected, "{toleration:?} {taint:?} {is_open}");
        };
        let taint = ["sla", "950", "NoSchedule"];
        for (toleration, expected) in [
            (["sla", "", "950", ""], true),
            (["sla", "Equal", "950", "NoSchedule"], true),
            (["sla", "Equal", "950", "NoExecute"], false),
            (["sla", "Equal", "1", ""], false),
            (["", "Exists", "", ""], true),
            (["other", "Exists", "", ""], false),
            (["sla", "Magic", "950", ""], false),
        ] {
            check(toleration, taint, false, expected);
        }
        for (operator, bound, expected) in [
            ("Gt", "900", true),
            ("Gt", "950", false),
            ("Lt", "951", true),
            ("Lt", "-1", false),
            ("Gt", "0900", false),
            ("Gt", "x", false),
        ] {
            check(["sla", operator, bound, ""], taint, true, expected);
            check(["sla", operator, bound, ""], taint, false, false);
        }
    }
}
