//! Events in both of their forms. They are stored as core/v1; events.k8s.io/v1 is a view of the
//! same, with its own names for most fields. They expire after an hour.

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Conversion, Examined, MetadataRules, Strategy};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::events::v1 as events;
use machinery::field::FieldErrors;
use machinery::object::{Codec, Typed};
use machinery::{Object, StatusError, Time};
use serde_json::Value;

use crate::Row;
use crate::print::since;

/// Upstream's `--event-ttl`.
const TTL_SECONDS: i64 = 3600;

pub(crate) const ROWS: &[fn() -> Row] = &[
    || Row::new::<core::Event>(EventStrategy { is_new: false }).short(&["ev"]),
    || Row::new::<events::Event>(EventStrategy { is_new: true }).short(&["ev"]).converted(Forms),
];

/// Of both forms; the newer one demands more.
struct EventStrategy {
    is_new: bool,
}

impl EventStrategy {
    fn rules(&self) -> &'static crate::validate::Rules {
        match self.is_new {
            true => crate::validate::rules::<events::Event>(),
            false => crate::validate::rules::<core::Event>(),
        }
    }
}

impl Strategy for EventStrategy {
    fn validate(&self, object: &Examined<'_>) -> FieldErrors {
        match self.is_new {
            true => crate::validate::create::<events::Event>(object),
            false => crate::validate::create::<core::Event>(object),
        }
    }

    fn validate_update(
        &self,
        ctx: &RequestContext,
        object: &Examined<'_>,
        old: &Examined<'_>,
    ) -> FieldErrors {
        crate::validate::update::<core::Event>(ctx, object, old)
    }

    fn metadata_rules(&self) -> MetadataRules {
        self.rules().metadata
    }

    fn create_on_update(&self) -> bool {
        self.rules().create_on_update
    }

    /// Both forms are one to upstream, which has the old one's name.
    fn error_group<'a>(&self, _group: &'a str) -> &'a str {
        ""
    }

    fn ttl_seconds(&self, _object: &dyn Object) -> Option<i64> {
        Some(TTL_SECONDS)
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        SELECTABLE
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        let event = object.expect::<core::Event>();
        let about = event.involved_object.clone();
        let component = event.source.as_ref().and_then(|source| source.component.clone());
        let reporting = event.reporting_component.clone().unwrap_or_default();
        let source = component.filter(|name| !name.is_empty()).unwrap_or_else(|| reporting.clone());
        let text = |text: Option<String>| text.unwrap_or_default();
        SELECTABLE
            .iter()
            .copied()
            .zip([
                text(about.kind),
                text(about.namespace),
                text(about.name),
                text(about.uid),
                text(about.api_version),
                text(about.resource_version),
                text(about.field_path),
                text(event.reason.clone()),
                reporting,
                source,
                text(event.type_.clone()),
                event.reporting_component.clone().unwrap_or_default(),
            ])
            .collect()
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<core::Event>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let event = object.expect::<core::Event>();
        let micro = event.event_time.as_ref().map(|time| Time(time.0));
        let first = event.first_timestamp.clone().or(micro.clone());
        let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
        let last = series.map(|time| Time(time.0)).or(event.last_timestamp.clone()).or(micro);
        let count = event
            .series
            .as_ref()
            .and_then(|series| series.count)
            .or(event.count)
            .unwrap_or(1)
            .max(1);
        let source = event.source.clone().unwrap_or_default();
        let component = source.component.or(event.reporting_component.clone()).unwrap_or_default();
        let host = source.host.or(event.reporting_instance.clone()).filter(|host| !host.is_empty());
        let about = &event.involved_object;
        let kind = about.kind.clone().unwrap_or_default().to_lowercase();
        vec![
            since(last.as_ref()).into(),
            event.type_.clone().unwrap_or_default().into(),
            event.reason.clone().unwrap_or_default().into(),
            match about.name.as_deref().filter(|name| !name.is_empty()) {
                Some(name) => format!("{kind}/{name}").into(),
                None => kind.into(),
            },
            about.field_path.clone().unwrap_or_default().into(),
            host.map_or(component.clone(), |host| format!("{component}, {host}")).into(),
            event.message.clone().unwrap_or_default().trim().into(),
            since(first.as_ref()).into(),
            count.into(),
            object.name().into(),
        ]
    }
}

/// In the order of `selectable_fields`.
const SELECTABLE: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
    // As events.k8s.io calls it.
    "reportingController",
];

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
