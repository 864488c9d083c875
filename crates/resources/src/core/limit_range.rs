//! LimitRange: how much each container of a namespace may have, and gets.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::core::v1::LimitRange;

use super::podspec;
use crate::kind::{Kind, Rules};
use crate::validate::core;

pub(crate) static KIND: Kind<LimitRange> = Kind {
    short: &["limits"],
    default,
    rules: Rules {
        create: core::limit_range,
        create_on_update: true,
        metadata: MetadataRules::WHOLE,
        ..Rules::NONE
    },
    ..Kind::BASE
};

/// What containers may have at most is what they get, and what they must have is what they ask for,
/// where nothing else is said.
fn default(range: &mut LimitRange) {
    // One that has no name gets one; no other kind does.
    if range.metadata.name.is_none() && range.metadata.generate_name.is_none() {
        range.metadata.name = Some(base::rng::uuid());
    }
    let spec = range.spec.get_or_insert_default();
    for item in &mut spec.limits {
        podspec::round([&mut item.max, &mut item.min, &mut item.default]);
        podspec::round([&mut item.default_request, &mut item.max_limit_request_ratio]);
    }
    for item in spec.limits.iter_mut().filter(|item| item.type_ == "Container") {
        let default = item.default.get_or_insert_default();
        for (name, size) in item.max.iter().flatten() {
            default.entry(name.clone()).or_insert_with(|| size.clone());
        }
        let request = item.default_request.get_or_insert_default();
        for (name, size) in default.iter().chain(item.min.iter().flatten()) {
            request.entry(name.clone()).or_insert_with(|| size.clone());
        }
        item.default.take_if(|map| map.is_empty());
        item.default_request.take_if(|map| map.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::defaults::tests::defaulted;

    #[test]
    fn limits_are_what_containers_ask_for() {
        let range = json!({"spec": {"limits": [
            {"type": "Container", "max": {"cpu": "2"}, "min": {"memory": "1"}},
        ]}});
        let found = defaulted(KIND.default, range);
        let expected = json!({"cpu": "2", "memory": "1"});
        assert_eq!(found["spec"]["limits"][0]["defaultRequest"], expected);
    }
}
