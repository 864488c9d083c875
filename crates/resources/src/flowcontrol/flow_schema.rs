//! FlowSchema: which requests belong to a priority level.

use k8s_openapi::api::flowcontrol::v1::FlowSchema;

use crate::defaults::fill_number;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status, text};
use crate::validate::flow;

const PRECEDENCE: i32 = 1000;

pub(crate) static KIND: Kind<FlowSchema> = Kind {
    subresources: &[STATUS],
    default: |schema| {
        let spec = schema.spec.get_or_insert_default();
        fill_number(&mut spec.matching_precedence, PRECEDENCE);
    },
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: flow::schema, ..Rules::NONE },
    columns: &[
        name(),
        field(
            "PriorityLevel",
            "string",
            "api.flowcontrol.v1.PriorityLevelConfigurationReference.name",
            |schema| {
                let spec = schema.spec.as_ref();
                spec.map_or("", |spec| spec.priority_level_configuration.name.as_str()).into()
            },
        ),
        field(
            "MatchingPrecedence",
            "string",
            "api.flowcontrol.v1.FlowSchemaSpec.matchingPrecedence",
            |schema| {
                let spec = schema.spec.as_ref();
                spec.and_then(|spec| spec.matching_precedence).unwrap_or_default().into()
            },
        ),
        field(
            "DistinguisherMethod",
            "string",
            "api.flowcontrol.v1.FlowSchemaSpec.distinguisherMethod",
            |schema| {
                let spec = schema.spec.as_ref();
                let method = spec.and_then(|spec| spec.distinguisher_method.as_ref());
                method.map_or("<none>", |method| method.type_.as_str()).into()
            },
        ),
        age(),
        text(
            "MissingPL",
            "string",
            "references a broken or non-existent PriorityLevelConfiguration",
            |schema| dangling(schema).into(),
        ),
    ],
    ..Kind::BASE
};

fn dangling(schema: &FlowSchema) -> String {
    let mut conditions = schema.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let dangling = conditions.find(|condition| condition.type_.as_deref() == Some("Dangling"));
    dangling.and_then(|condition| condition.status.clone()).unwrap_or_else(|| "?".into())
}
