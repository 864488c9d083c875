//! PriorityLevelConfiguration: how many requests of a level run at once, and how the rest wait.

use k8s_openapi::api::flowcontrol::v1::{PriorityLevelConfiguration, QueuingConfiguration};
use serde_json::Value;

use crate::defaults::fill_number;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status};
use crate::validate::flow;

const SHARES: i32 = 30;

pub(crate) static KIND: Kind<PriorityLevelConfiguration> = Kind {
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: flow::level, ..Rules::NONE },
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
