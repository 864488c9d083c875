//! Events in both of their forms. They are stored as core/v1; events.k8s.io/v1 is a view of the
//! same, with its own names for most fields. They expire after `--event-ttl`, an hour by default.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use apiserver::resource::{Conversion, MetadataRules};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::events::v1 as events;
use machinery::object::{Codec, Typed};
use machinery::{Object, StatusError, Time, names};

use crate::generic::Form;
use crate::kind::{Fields, Kind, Rules, as_name, field, wide};
use crate::print::since;
use crate::validate::at::At;
use crate::validate::{self, internal};

/// Upstream's `--event-ttl`, of the whole process.
static TTL_SECONDS: AtomicI64 = AtomicI64::new(3600);

/// Sets `--event-ttl`, before anything is served. Existing Events keep their leases.
pub(crate) fn set_ttl(time: std::time::Duration) {
    TTL_SECONDS.store(i64::try_from(time.as_secs()).unwrap_or(i64::MAX), Ordering::Relaxed);
}

pub(crate) static CORE: Kind<core::Event> =
    Kind { rules: Rules { name: names::path_segment, ..RULES }, ..EVENT };

/// The newer form, which demands more of new objects.
pub(crate) static KIND: Form<core::Event, events::Event> = Form {
    kind: Kind {
        rules: Rules {
            create: validate::core::new_event,
            update: Some(event_update),
            metadata: MetadataRules { last: true, ..MetadataRules::FULL },
            ..RULES
        },
        ..EVENT
    },
    conversion: || Arc::new(Forms),
    form: PhantomData,
};

/// Texts of an Event that the newer form keeps, before and after its type. Some are checked twice.
const KEPT: [&[&str]; 2] = [&["reason", "message"], &["reason", "type"]];

/// Upstream: `ValidateEventUpdate`, which demands more of the newer form.
fn event_update(at: &At<'_>, old: &At<'_>) {
    validate::core::event(at);
    if at.get("series").value != old.get("series").value && at.has("series") {
        let series = at.get("series");
        if series.get("count").int() < 2 {
            series.get("count").invalid_as("", "should be at least 2");
        }
        series.get("lastObservedTime").need();
    }
    let object = |name| (at.get(name), old.get(name));
    let (now, was) = object("involvedObject");
    internal::unchanged(&now, &was, "ObjectReference");
    for name in KEPT[0] {
        at.get(name).unchanged_text(&old.get(name));
    }
    let (now, was) = object("source");
    if now.get("component").str() != was.get("component").str()
        || now.get("host").str() != was.get("host").str()
    {
        internal::unchanged(&now, &was, "EventSource");
    }
    for name in ["firstTimestamp", "lastTimestamp"] {
        at.get(name).unchanged(&old.get(name));
    }
    let (now, was) = object("count");
    if now.int() != was.int() {
        now.invalid_as(now.int(), "field is immutable");
    }
    for name in KEPT[1] {
        at.get(name).unchanged_text(&old.get(name));
    }
    at.get("eventTime").unchanged(&old.get("eventTime"));
    at.get("action").unchanged_text(&old.get("action"));
    let (now, was) = object("related");
    internal::unchanged(&now, &was, "ObjectReference");
    let (now, was) = object("reportingComponent");
    now.called(at.path.named("reportingController")).unchanged_text(&was);
    at.get("reportingInstance").unchanged_text(&old.get("reportingInstance"));
}

const RULES: Rules = Rules {
    create: validate::core::event,
    metadata: MetadataRules::NONE,
    create_on_update: true,
    ..Rules::NONE
};

const EVENT: Kind<core::Event> = Kind {
    short: &["ev"],
    // Both forms are one to upstream, which has the old one's name.
    error_group: Some(""),
    columns: &[
        field("Last Seen", "string", "api.core.v1.Event.lastTimestamp", |event| {
            let series = event.series.as_ref().and_then(|one| one.last_observed_time.as_ref());
            let last = series.map(|time| Time(time.0)).or(event.last_timestamp.clone());
            since(last.or(micro(event)).as_ref()).into()
        }),
        field("Type", "string", "api.core.v1.Event.type", |event| text(&event.type_).into()),
        field("Reason", "string", "api.core.v1.Event.reason", |event| text(&event.reason).into()),
        field("Object", "string", "api.core.v1.Event.involvedObject", |event| {
            let about = &event.involved_object;
            let kind = text(&about.kind).to_lowercase();
            match about.name.as_deref().filter(|name| !name.is_empty()) {
                Some(name) => format!("{kind}/{name}").into(),
                None => kind.into(),
            }
        }),
        wide(field("Subobject", "string", "api.core.v1.ObjectReference.fieldPath", |event| {
            text(&event.involved_object.field_path).into()
        })),
        wide(field("Source", "string", "api.core.v1.Event.source", |event| shown(event).into())),
        field("Message", "string", "api.core.v1.Event.message", |event| {
            event.message.as_deref().unwrap_or_default().trim().into()
        }),
        wide(field("First Seen", "string", "api.core.v1.Event.firstTimestamp", |event| {
            since(event.first_timestamp.clone().or(micro(event)).as_ref()).into()
        })),
        wide(field("Count", "string", "api.core.v1.Event.count", |event| {
            let series = event.series.as_ref().and_then(|series| series.count);
            series.or(event.count).unwrap_or(1).max(1).into()
        })),
        wide(as_name(field(
            "Name",
            "string",
            "apimachinery.pkg.apis.meta.v1.ObjectMeta.name",
            |event| event.name().into(),
        ))),
    ],
    fields: Fields::Of(&[
        ("involvedObject.kind", |event| text(&event.involved_object.kind)),
        ("involvedObject.namespace", |event| text(&event.involved_object.namespace)),
        ("involvedObject.name", |event| text(&event.involved_object.name)),
        ("involvedObject.uid", |event| text(&event.involved_object.uid)),
        ("involvedObject.apiVersion", |event| text(&event.involved_object.api_version)),
        ("involvedObject.resourceVersion", |event| text(&event.involved_object.resource_version)),
        ("involvedObject.fieldPath", |event| text(&event.involved_object.field_path)),
        ("reason", |event| text(&event.reason)),
        ("reportingComponent", |event| text(&event.reporting_component)),
        ("source", source),
        ("type", |event| text(&event.type_)),
        // As events.k8s.io calls it.
        ("reportingController", |event| text(&event.reporting_component)),
    ]),
    // Without a lease, the Event stays.
    ttl_seconds: || Some(TTL_SECONDS.load(Ordering::Relaxed)).filter(|seconds| *seconds > 0),
    ..Kind::BASE
};

fn text(text: &Option<String>) -> String {
    text.clone().unwrap_or_default()
}

fn micro(event: &core::Event) -> Option<Time> {
    event.event_time.as_ref().map(|time| Time(time.0))
}

/// The component that reports.
fn source(event: &core::Event) -> String {
    let component = event.source.as_ref().and_then(|source| source.component.clone());
    let component = component.filter(|name| !name.is_empty());
    component.unwrap_or_else(|| text(&event.reporting_component))
}

/// The component that reports, and where.
fn shown(event: &core::Event) -> String {
    let source = event.source.clone().unwrap_or_default();
    let component = source.component.or(event.reporting_component.clone()).unwrap_or_default();
    let host = source.host.or(event.reporting_instance.clone()).filter(|host| !host.is_empty());
    host.map_or(component.clone(), |host| format!("{component}, {host}"))
}

/// events.k8s.io/v1 ↔ core/v1.
struct Forms;

static STORED: Typed<core::Event> = Typed::new();

impl Conversion for Forms {
    fn to_stored(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        let event = object.expect::<events::Event>().clone();
        Ok(Box::new(core::Event {
            metadata: event.metadata,
            action: event.action,
            count: event.deprecated_count,
            event_time: event.event_time,
            first_timestamp: event.deprecated_first_timestamp,
            involved_object: event.regarding.unwrap_or_default(),
            last_timestamp: event.deprecated_last_timestamp,
            message: event.note,
            reason: event.reason,
            related: event.related,
            reporting_component: event.reporting_controller,
            reporting_instance: event.reporting_instance,
            series: event.series.map(|series| core::EventSeries {
                count: Some(series.count),
                last_observed_time: Some(series.last_observed_time),
            }),
            source: event.deprecated_source,
            type_: event.type_,
        }))
    }

    fn to_served(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        let event = object.expect::<core::Event>().clone();
        let series = event.series.and_then(|series| {
            let last_observed_time = series.last_observed_time?;
            Some(events::EventSeries {
                count: series.count.unwrap_or_default(),
                last_observed_time,
            })
        });
        Ok(Box::new(events::Event {
            metadata: event.metadata,
            action: event.action,
            deprecated_count: event.count,
            deprecated_first_timestamp: event.first_timestamp,
            deprecated_last_timestamp: event.last_timestamp,
            deprecated_source: event.source,
            event_time: event.event_time,
            note: event.message,
            reason: event.reason,
            regarding: Some(event.involved_object),
            related: event.related,
            reporting_controller: event.reporting_component,
            reporting_instance: event.reporting_instance,
            series,
            type_: event.type_,
        }))
    }

    fn stored_codec(&self) -> &dyn Codec {
        &STORED
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge_both;

    #[test]
    fn the_newer_form_changes_its_series_only() {
        let event = |reason: &str, series: serde_json::Value| json!({"metadata": {"namespace": "n"}, "involvedObject": {"namespace": "n"}, "reason": reason, "series": series});
        let check = |new: serde_json::Value, expected: &[&str]| {
            let errors = judge_both(&new, &event("R", json!(null)), event_update);
            let texts: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
            assert_eq!(texts, expected);
        };
        check(event("R", json!({"count": 2, "lastObservedTime": "t"})), &[]);
        check(
            event("R", json!({"count": 1})),
            &[
                "series.count: Invalid value: \"\": should be at least 2",
                "series.lastObservedTime: Required value",
            ],
        );
        let changed = "reason: Invalid value: \"S\": field is immutable";
        check(event("S", json!(null)), &[changed, changed]);
        let mut other = event("R", json!(null));
        other["involvedObject"]["name"] = "x".into();
        check(
            other,
            &[
                r#"involvedObject: Invalid value: {"Kind":"","Namespace":"n","Name":"x","UID":"","APIVersion":"","ResourceVersion":"","FieldPath":""}: field is immutable"#,
            ],
        );
    }
}
