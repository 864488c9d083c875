//! How fast an autoscaler may follow its metrics.
//!
//! In: what was recommended and done of late, the rules, what the metrics ask for now. Out: a count
//! within limits, and the conditions that say what limited it. Pure but for the memory, [`History`].
//! Upstream: `normalizeDesiredReplicas` and `normalizeDesiredReplicasWithBehaviors`.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{
    HPAScalingRules, HorizontalPodAutoscalerBehavior, HorizontalPodAutoscalerSpec,
};

/// Upstream: `--horizontal-pod-autoscaler-downscale-stabilization`
pub const DOWNSCALE_STABILIZATION: i32 = 300;
/// Without rules: twice as many at once, or this many.
const LEAST_STEP: i32 = 4;

/// What an autoscaler remembers between looks. Lost with the process, as upstream's.
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    /// Seconds for which the highest recommendation holds, where the object says nothing.
    pub down_window: i32,
    /// What the metrics asked for, before anything limited it.
    recommendations: Vec<(i32, Timestamp)>,
    /// By how many pods it scaled up, and down.
    ups: Vec<(i32, Timestamp)>,
    downs: Vec<(i32, Timestamp)>,
}

impl Default for History {
    fn default() -> Self {
        let down_window = DOWNSCALE_STABILIZATION;
        Self { down_window, recommendations: vec![], ups: vec![], downs: vec![] }
    }
}

/// A condition's status, reason and message.
pub type Verdict = (bool, &'static str, &'static str);

/// A count within limits.
#[derive(Debug, PartialEq)]
pub struct Limited {
    pub replicas: i32,
    /// `AbleToScale`; always true.
    pub able: (&'static str, &'static str),
    /// `ScalingLimited`
    pub limited: Verdict,
}

const READY: (&str, &str) = ("ReadyForNewScale", "recommended size matches current size");
const STABLE_UP: (&str, &str) = (
    "ScaleUpStabilized",
    "recent recommendations were lower than current one, applying the lowest recent recommendation",
);
const STABLE_DOWN: (&str, &str) = (
    "ScaleDownStabilized",
    "recent recommendations were higher than current one, applying the highest recent recommendation",
);
const WITHIN: (&str, &str) =
    ("DesiredWithinRange", "the desired count is within the acceptable range");
const TOO_FAST_UP: (&str, &str) =
    ("ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate");
const TOO_FAST_DOWN: (&str, &str) = (
    "ScaleDownLimit",
    "the desired replica count is decreasing faster than the maximum scale rate",
);
const TOO_MANY: (&str, &str) =
    ("TooManyReplicas", "the desired replica count is more than the maximum replica count");
const TOO_FEW: (&str, &str) =
    ("TooFewReplicas", "the desired replica count is less than the minimum replica count");

fn ago(now: Timestamp, seconds: i32) -> Timestamp {
    now.checked_sub(SignedDuration::from_secs(seconds.into())).unwrap_or(Timestamp::MIN)
}

impl History {
    /// The first reconcile takes the current replicas as a recommendation, so a restart does not scale down.
    pub fn begin(&mut self, current: i32, now: Timestamp) {
        if self.recommendations.is_empty() {
            self.recommendations.push((current, now));
        }
    }

    /// What was done, for rules about changes per period.
    pub fn scaled(
        &mut self,
        behavior: Option<&HorizontalPodAutoscalerBehavior>,
        from: i32,
        to: i32,
        now: Timestamp,
    ) {
        let Some(behavior) = behavior else { return };
        let (changes, rules) = match to > from {
            true => (&mut self.ups, &behavior.scale_up),
            false => (&mut self.downs, &behavior.scale_down),
        };
        let policies = rules.iter().flat_map(|rules| rules.policies.iter().flatten());
        let longest = policies.map(|policy| policy.period_seconds).max().unwrap_or(0);
        let cutoff = ago(now, longest);
        changes.retain(|(_, at)| *at >= cutoff);
        changes.push(((to - from).abs(), now));
    }

    /// The count that the metrics ask for, within the limits of the spec.
    pub fn limit(
        &mut self,
        spec: &HorizontalPodAutoscalerSpec,
        current: i32,
        desired: i32,
        now: Timestamp,
    ) -> Limited {
        let least = spec.min_replicas.unwrap_or(1);
        let most = spec.max_replicas;
        let (stable, able, (replicas, why)) = match &spec.behavior {
            None => {
                let stable = self.stabilize(desired, now);
                (stable, STABLE_DOWN, by_default(current, stable, least, most))
            }
            Some(behavior) => {
                let rules = Rules::of(behavior, self.down_window);
                let (stable, able) = self.stabilize_by(&rules, current, desired, now);
                let rates = Rates { ups: &self.ups, downs: &self.downs, current, now };
                (stable, able, rates.limit(&rules, stable, least, most))
            }
        };
        Limited {
            replicas,
            able: if stable == desired { READY } else { able },
            limited: (replicas != stable, why.0, why.1),
        }
    }

    fn stabilize(&mut self, desired: i32, now: Timestamp) -> i32 {
        let cutoff = ago(now, self.down_window);
        self.recommendations.retain(|(_, at)| *at >= cutoff);
        let highest = self.recommendations.iter().map(|(count, _)| *count).max();
        self.recommendations.push((desired, now));
        highest.map_or(desired, |highest| highest.max(desired))
    }

    fn stabilize_by(
        &mut self,
        rules: &Rules<'_>,
        current: i32,
        desired: i32,
        now: Timestamp,
    ) -> (i32, (&'static str, &'static str)) {
        let (up_cutoff, down_cutoff) = (ago(now, rules.up_window), ago(now, rules.down_window));
        let since = |cutoff: Timestamp| {
            let recent = self.recommendations.iter().filter(move |(_, at)| *at > cutoff);
            recent.map(|(count, _)| *count)
        };
        let lowest = since(up_cutoff).min().unwrap_or(desired).min(desired);
        let highest = since(down_cutoff).max().unwrap_or(desired).max(desired);
        let stable = current.max(lowest).min(highest);
        self.recommendations.retain(|(_, at)| *at >= up_cutoff || *at >= down_cutoff);
        self.recommendations.push((desired, now));
        (stable, if desired >= current { STABLE_UP } else { STABLE_DOWN })
    }
}

/// Without rules: within the range, and not more than double.
fn by_default(
    current: i32,
    desired: i32,
    least: i32,
    most: i32,
) -> (i32, (&'static str, &'static str)) {
    let fastest = current.saturating_mul(2).max(LEAST_STEP);
    let (highest, why) = if most > fastest { (fastest, TOO_FAST_UP) } else { (most, TOO_MANY) };
    if desired < least {
        (least, TOO_FEW)
    } else if desired > highest {
        (highest, why)
    } else {
        (desired, WITHIN)
    }
}

struct Rules<'a> {
    up: Option<&'a HPAScalingRules>,
    down: Option<&'a HPAScalingRules>,
    up_window: i32,
    down_window: i32,
}

impl<'a> Rules<'a> {
    fn of(behavior: &'a HorizontalPodAutoscalerBehavior, down_window: i32) -> Self {
        let (up, down) = (behavior.scale_up.as_ref(), behavior.scale_down.as_ref());
        let window = |rules: Option<&HPAScalingRules>, default| {
            rules.and_then(|rules| rules.stabilization_window_seconds).unwrap_or(default)
        };
        Self { up, down, up_window: window(up, 0), down_window: window(down, down_window) }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Up,
    Down,
}

/// What was changed of late, and how many pods there are.
struct Rates<'a> {
    ups: &'a [(i32, Timestamp)],
    downs: &'a [(i32, Timestamp)],
    current: i32,
    now: Timestamp,
}

impl Rates<'_> {
    fn limit(
        &self,
        rules: &Rules<'_>,
        desired: i32,
        least: i32,
        most: i32,
    ) -> (i32, (&'static str, &'static str)) {
        let current = self.current;
        if desired > current {
            let fastest = self.furthest(Way::Up, rules.up).max(current);
            let (highest, why) =
                if most > fastest { (fastest, TOO_FAST_UP) } else { (most, TOO_MANY) };
            if desired > highest {
                return (highest, why);
            }
        } else if desired < current {
            let fastest = self.furthest(Way::Down, rules.down).min(current);
            let (lowest, why) =
                if least < fastest { (fastest, TOO_FAST_DOWN) } else { (least, TOO_FEW) };
            if desired < lowest {
                return (lowest, why);
            }
        }
        (desired, WITHIN)
    }

    /// The count that the policies allow at most, or at least.
    fn furthest(&self, way: Way, rules: Option<&HPAScalingRules>) -> i32 {
        let select = rules.and_then(|rules| rules.select_policy.as_deref()).unwrap_or("Max");
        if select == "Disabled" {
            return self.current;
        }
        let policies = rules.into_iter().flat_map(|rules| rules.policies.iter().flatten());
        let allowed = policies.map(|policy| {
            let since = ago(self.now, policy.period_seconds);
            let sum = |changes: &[(i32, Timestamp)]| -> i32 {
                changes.iter().filter(|(_, at)| *at > since).map(|(count, _)| count).sum()
            };
            let start = self.current - sum(self.ups) + sum(self.downs);
            let share = f64::from(policy.value) / 100.0;
            match (policy.type_.as_str(), way) {
                ("Pods", Way::Up) => start.saturating_add(policy.value),
                ("Pods", Way::Down) => start.saturating_sub(policy.value),
                // Rounded so that there is a change at all.
                (_, Way::Up) => (f64::from(start) * (1.0 + share)).ceil() as i32,
                (_, Way::Down) => (f64::from(start) * (1.0 - share)) as i32,
            }
        });
        // The most change is the highest count on the way up and the lowest on the way down.
        let found = match (select == "Min") == (way == Way::Up) {
            true => allowed.min(),
            false => allowed.max(),
        };
        found.unwrap_or(self.current)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    fn spec(behavior: Value) -> HorizontalPodAutoscalerSpec {
        from_value(json!({
            "scaleTargetRef": {"kind": "Deployment", "name": "web"},
            "minReplicas": 2, "maxReplicas": 100, "behavior": behavior,
        }))
        .unwrap()
    }

    /// Follows `desired` from `current` as time goes by: `(seconds, desired, replicas, reason)`.
    fn check(behavior: Value, mut current: i32, steps: &[(i64, i32, i32, &str)]) {
        let spec = spec(behavior);
        let mut history = History::default();
        history.begin(current, at(0));
        for (seconds, desired, expected, reason) in steps {
            let now = at(*seconds);
            let limited = history.limit(&spec, current, *desired, now);
            let why = if limited.limited.0 { limited.limited.1 } else { limited.able.0 };
            assert_eq!((limited.replicas, why), (*expected, *reason), "{seconds} s: {desired}");
            if limited.replicas != current {
                history.scaled(spec.behavior.as_ref(), current, limited.replicas, now);
                current = limited.replicas;
            }
        }
    }

    #[test]
    fn without_rules_it_doubles_and_waits_before_it_shrinks() {
        let steps = [
            (15, 50, 6, "ScaleUpLimit"),
            (30, 50, 12, "ScaleUpLimit"),
            (45, 12, 24, "ScaleUpLimit"),
            (60, 3, 48, "ScaleUpLimit"),
        ];
        check(json!(null), 3, &steps);
        let steps = [
            (15, 8, 8, "ReadyForNewScale"),
            (30, 3, 8, "ScaleDownStabilized"),
            (314, 3, 8, "ScaleDownStabilized"),
            (316, 3, 3, "ReadyForNewScale"),
            (700, 1, 2, "TooFewReplicas"),
        ];
        check(json!(null), 5, &steps);
        check(json!(null), 60, &[(15, 200, 100, "TooManyReplicas")]);
    }

    #[test]
    fn rules_limit_the_rate() {
        let pods = |value, period| json!({"type": "Pods", "value": value, "periodSeconds": period});
        let percent =
            |value, period| json!({"type": "Percent", "value": value, "periodSeconds": period});
        let up = |policies: Value, select: &str| {
            json!({"scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": select,
                "policies": policies}, "scaleDown": {"policies": [percent(100, 15)]}})
        };
        let steps = [
            (15, 50, 14, "ScaleUpLimit"),
            (30, 50, 14, "ScaleUpLimit"),
            (76, 50, 18, "ScaleUpLimit"),
        ];
        check(up(json!([pods(4, 60)]), "Max"), 10, &steps);
        let both = json!([pods(4, 60), percent(100, 60)]);
        check(up(both.clone(), "Max"), 10, &[(15, 50, 20, "ScaleUpLimit")]);
        check(up(both.clone(), "Min"), 10, &[(15, 50, 14, "ScaleUpLimit")]);
        check(up(both, "Disabled"), 10, &[(15, 50, 10, "ScaleUpLimit")]);
        let down = json!({"scaleUp": {"policies": [pods(4, 15)]}, "scaleDown": {
            "stabilizationWindowSeconds": 0, "policies": [percent(10, 60)]}});
        let steps = [
            (15, 2, 45, "ScaleDownLimit"),
            (30, 2, 45, "ScaleDownLimit"),
            (76, 2, 40, "ScaleDownLimit"),
        ];
        check(down, 50, &steps);
    }

    #[test]
    fn windows_hold_back_either_way() {
        let slow = json!({
            "scaleUp": {"stabilizationWindowSeconds": 60, "policies": [
                {"type": "Pods", "value": 100, "periodSeconds": 15}]},
            "scaleDown": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]},
        });
        let steps = [
            (15, 10, 5, "ScaleUpStabilized"),
            (59, 12, 5, "ScaleUpStabilized"),
            (61, 12, 10, "ScaleUpStabilized"),
            (100, 3, 10, "ScaleDownStabilized"),
            (462, 3, 3, "ReadyForNewScale"),
        ];
        check(slow, 5, &steps);
    }
}
