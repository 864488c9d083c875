//! PriorityLevelConfiguration: how many requests of a level run at once, and how the rest wait.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::flowcontrol::v1::{PriorityLevelConfiguration, QueuingConfiguration};
use serde_json::{Value, json};

use crate::defaults::fill_number;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_bare_status};
use crate::validate::at::At;
use crate::validate::{internal, status};

const SHARES: i32 = 30;

pub(crate) static KIND: Kind<PriorityLevelConfiguration> = Kind {
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_bare_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: level,
        parts: &[("status", status::conditions_of_flows)],
        metadata: MetadataRules::WHOLE,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "Type",
            "string",
            "api.flowcontrol.v1.PriorityLevelConfigurationSpec.type",
            |level| level.spec.as_ref().map_or("", |spec| spec.type_.as_str()).into(),
        ),
        field(
            "NominalConcurrencyShares",
            "string",
            "api.flowcontrol.v1.LimitedPriorityLevelConfiguration.nominalConcurrencyShares",
            |level| {
                let limited = level.spec.as_ref().and_then(|spec| spec.limited.as_ref());
                let shares = |shares: Option<i32>| shares.unwrap_or_default().into();
                limited.map_or("<none>".into(), |one| shares(one.nominal_concurrency_shares))
            },
        ),
        field("Queues", "string", "api.flowcontrol.v1.QueuingConfiguration.queues", |level| {
            queuing(level, |queuing| queuing.queues)
        }),
        field("HandSize", "string", "api.flowcontrol.v1.QueuingConfiguration.handSize", |level| {
            queuing(level, |queuing| queuing.hand_size)
        }),
        field(
            "QueueLengthLimit",
            "string",
            "api.flowcontrol.v1.QueuingConfiguration.queueLengthLimit",
            |level| queuing(level, |queuing| queuing.queue_length_limit),
        ),
        age(),
    ],
    ..Kind::BASE
};

fn default(level: &mut PriorityLevelConfiguration) {
    let spec = level.spec.get_or_insert_default();
    if let Some(exempt) = &mut spec.exempt {
        exempt.nominal_concurrency_shares.get_or_insert(0);
        exempt.lendable_percent.get_or_insert(0);
    }
    let Some(limited) = &mut spec.limited else { return };
    limited.nominal_concurrency_shares.get_or_insert(SHARES);
    limited.lendable_percent.get_or_insert(0);
    let response = limited.limit_response.as_mut();
    if let Some(queuing) = response.and_then(|response| response.queuing.as_mut()) {
        for (number, default) in [
            (&mut queuing.hand_size, 8),
            (&mut queuing.queues, 64),
            (&mut queuing.queue_length_limit, 50),
        ] {
            fill_number(number, default);
        }
    }
}

fn queuing(
    level: &PriorityLevelConfiguration,
    number: fn(&QueuingConfiguration) -> Option<i32>,
) -> Value {
    let limited = level.spec.as_ref().and_then(|spec| spec.limited.as_ref());
    let queuing = limited.and_then(|limited| limited.limit_response.as_ref()?.queuing.as_ref());
    queuing.map_or("<none>".into(), |queuing| number(queuing).unwrap_or_default().into())
}

fn level(at: &At<'_>) {
    let (spec, name) = (at.get("spec"), at.get("metadata.name").str());
    let kind = spec.get("type");
    if (name == "exempt") != kind.is("Exempt") {
        kind.invalid_text("must be 'Exempt' if and only if `name` is 'exempt'");
    }
    let (limited, exempt) = (spec.get("limited"), spec.get("exempt"));
    match kind.str() {
        "Exempt" => {
            if limited.is_set() {
                limited.forbidden("must be nil if the type is not Limited");
            }
            if exempt.get("nominalConcurrencyShares").int() < 0 {
                exempt.get("nominalConcurrencyShares").invalid("must be a non-negative integer");
            }
            percent(&exempt.get("lendablePercent"));
        }
        "Limited" => {
            if exempt.is_set() {
                exempt.forbidden("must be nil if the type is Limited");
            }
            if limited.is_set() {
                limited_level(&limited);
            } else {
                limited.required("must not be empty when type is Limited");
            }
        }
        _ => kind.unsupported(&["Exempt", "Limited"]),
    }
    mandatory_level(&spec, name);
}

fn mandatory_level(spec: &At<'_>, name: &str) {
    let show = |detail: &str| {
        let shown = internal::shown("PriorityLevelConfigurationSpec", spec.value);
        spec.errors().invalid_shown(&spec.path, Some(&shown), detail);
    };
    let is_fixed = match name {
        "exempt" => spec.get("type").is("Exempt") && !spec.has("limited"),
        "catch-all" => {
            *spec.value
                == json!({"type": "Limited", "limited": {
                    "nominalConcurrencyShares": 5, "lendablePercent": 0,
                    "limitResponse": {"type": "Reject"}}})
        }
        _ => true,
    };
    match name {
        _ if is_fixed => {}
        "exempt" => {
            show("spec of 'exempt' except the 'spec.exempt' field must equal the fixed value")
        }
        _ => show(&format!("spec of '{name}' must equal the fixed value")),
    }
}

fn percent(at: &At<'_>) {
    if at.number().is_some_and(|percent| !(0..=100).contains(&percent)) {
        at.invalid("must be between 0 and 100, inclusive");
    }
}

fn limited_level(at: &At<'_>) {
    if at.get("nominalConcurrencyShares").int() < 0 {
        at.get("nominalConcurrencyShares").invalid("must be a non-negative integer");
    }
    let response = at.get("limitResponse");
    let queuing = response.get("queuing");
    match response.get("type").str() {
        "Reject" => {
            if queuing.is_set() {
                queuing.forbidden("must be nil if limited.limitResponse.type is not Limited");
            }
        }
        "Queue" if !queuing.is_set() => {
            queuing.required("must not be empty if limited.limitResponse.type is Limited");
        }
        "Queue" => queues(&queuing),
        _ => response.get("type").unsupported(&["Queue", "Reject"]),
    }
    percent(&at.get("lendablePercent"));
    if at.get("borrowingLimitPercent").int() < 0 {
        at.get("borrowingLimitPercent").invalid("if specified, must be a non-negative integer");
    }
}

fn queues(at: &At<'_>) {
    const MOST: i64 = 10_000_000;
    let [length, queues, hand] =
        ["queueLengthLimit", "queues", "handSize"].map(|field| at.get(field));
    for place in [&length, &queues, &hand].into_iter().filter(|place| place.int() <= 0) {
        place.invalid_as(place.int(), "must be positive");
    }
    if queues.int() > MOST {
        queues.invalid(&format!("must not be greater than {MOST}"));
    }
    if hand.int() <= 0 {
        return;
    }
    // How many bits it takes to deal a hand: log2 of the number of hands in order.
    let bits: f64 = (0..hand.int()).map(|dealt| ((queues.int() - dealt) as f64).log2()).sum();
    if hand.int() > queues.int() {
        hand.invalid(&format!("should not be greater than queues ({})", queues.int()));
    } else if bits.ceil() > 60.0 {
        let detail = format!(
            "required entropy bits of deckSize {} and handSize {} should not be greater than 60",
            queues.int(),
            hand.int()
        );
        hand.invalid(&detail);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::defaults::tests::defaulted;

    #[test]
    fn zeros_of_queues_are_filled_in() {
        let level = json!({"spec": {"type": "Limited", "limited": {
            "limitResponse": {"type": "Queue", "queuing": {"queues": 0}},
        }}});
        let found = defaulted(KIND.default, level);
        assert_eq!(
            found["spec"]["limited"]["limitResponse"]["queuing"],
            json!({"handSize": 8, "queues": 64, "queueLengthLimit": 50})
        );
    }
}
