//! APIServices: which server answers for a group's version.
//!
//! Without a Service it is this one, and the object is there for others to read. The aggregator asks
//! the other servers.

use apiserver::request::RequestContext;
use apiserver::resource::{Examined, MetadataRules};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::{
    APIService, APIServiceCondition, APIServiceSpec, ServiceReference,
};
use machinery::field::{FieldErrors, Path};
use machinery::{Time, names};

use crate::kind::{Hooks, Kind, Rules, STATUS, age, name, spec_and_bare_status, text};

const HTTPS: i32 = 443;

pub(crate) static KIND: Kind<APIService> = Kind {
    categories: &["api-extensions"],
    storage: Some("apiregistration.k8s.io/apiservices"),
    subresources: &[STATUS],
    default: |object| {
        let spec = object.spec.get_or_insert_default();
        if let Some(service) = &mut spec.service {
            service.port.get_or_insert(HTTPS);
        }
    },
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        typed: Some(|object, subresource| match subresource {
            "status" => validate_status(object),
            _ => validate(object),
        }),
        // Names follow from the spec: see `own_name_errors`.
        name: names::path_segment,
        unconditional_update: false,
        metadata: MetadataRules { needs_domains: false, ..MetadataRules::UPDATE_AND_WHOLE },
        ..Rules::NONE
    },
    columns: &[
        name(),
        text(
            "Service",
            "string",
            "The reference to the service that hosts this API endpoint.",
            |object| place(object).into(),
        ),
        text("Available", "string", "Whether this service is available.", |object| {
            availability(object).into()
        }),
        age(),
    ],
    hooks: &Life,
    ..Kind::BASE
};

/// What every group that this server itself serves says of itself.
pub fn local_condition() -> APIServiceCondition {
    APIServiceCondition {
        type_: "Available".into(),
        status: "True".into(),
        reason: Some("Local".into()),
        message: Some("Local APIServices are always available".into()),
        last_transition_time: Some(Time(base::clock::now_seconds())),
    }
}

struct Life;

impl Hooks<APIService> for Life {
    fn prepare_create(&self, _ctx: &RequestContext, object: &mut APIService) {
        if object.spec.as_ref().is_none_or(|spec| spec.service.is_none()) {
            let status = object.status.get_or_insert_default();
            status.conditions = Some(vec![local_condition()]);
        }
    }

    fn own_name_errors(&self, object: &APIService, name: &str) -> Vec<String> {
        let spec = object.spec.clone().unwrap_or_default();
        let (group, version) = (spec.group.unwrap_or_default(), spec.version.unwrap_or_default());
        let wanted = format!("{version}.{group}");
        let is_wrong = names::path_segment(name).is_empty() && name != wanted;
        if is_wrong {
            vec![format!("must be `spec.version+\".\"+spec.group`: {wanted:?}")]
        } else {
            vec![]
        }
    }
}

fn validate(object: &Examined<'_>) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let service = object.expect::<APIService>();
    let spec = service.spec.clone().unwrap_or_default();
    let (group, version) =
        (spec.group.clone().unwrap_or_default(), spec.version.clone().unwrap_or_default());
    validate_place(&group, &version, &spec, &mut errors);
    validate_service(&spec, &mut errors);
    errors
}

fn validate_status(object: &Examined<'_>) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let status = object.expect::<APIService>().status.clone().unwrap_or_default();
    let path = Path::new("status").child("conditions");
    for (index, condition) in status.conditions.iter().flatten().enumerate() {
        if !matches!(condition.status.as_str(), "True" | "False" | "Unknown") {
            let known = ["False", "True", "Unknown"];
            errors.not_supported(&path.index(index).child("status"), &condition.status, &known);
        }
    }
    errors
}

fn place(service: &APIService) -> String {
    let place = service.spec.as_ref().and_then(|spec| spec.service.as_ref());
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    place
        .map_or("Local".into(), |place| format!("{}/{}", text(&place.namespace), text(&place.name)))
}

/// `True`, or `False (WhyNot)`.
fn availability(service: &APIService) -> String {
    let conditions = service.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut conditions = conditions.filter(|condition| condition.type_ == "Available");
    match conditions.next() {
        None => "Unknown".into(),
        Some(condition) if condition.status == "True" => condition.status.clone(),
        Some(condition) => {
            let reason = condition.reason.clone().unwrap_or_default();
            format!("{} ({reason})", condition.status)
        }
    }
}

fn validate_place(group: &str, version: &str, spec: &APIServiceSpec, errors: &mut FieldErrors) {
    let path = Path::new("spec");
    if group.is_empty() && version != "v1" {
        let why = "only v1 may have an empty group and it better be legacy kube";
        errors.required(&path.child("group"), why);
    }
    if !group.is_empty() {
        for why in names::dns1123_subdomain(group) {
            errors.invalid(&path.child("group"), group, &why);
        }
    }
    for why in names::dns1035_label(version) {
        errors.invalid(&path.child("version"), version, &why);
    }
    if !(1..=20_000).contains(&spec.group_priority_minimum) {
        let why = "must be positive and less than 20000";
        errors.invalid(&path.child("groupPriorityMinimum"), spec.group_priority_minimum, why);
    }
    if !(1..=1000).contains(&spec.version_priority) {
        let why = "must be positive and less than 1000";
        errors.invalid(&path.child("versionPriority"), spec.version_priority, why);
    }
}

fn validate_service(spec: &APIServiceSpec, errors: &mut FieldErrors) {
    let path = Path::new("spec");
    let bundle = spec.ca_bundle.as_ref().map_or(0, |bundle| bundle.0.len());
    let skips = spec.insecure_skip_tls_verify.unwrap_or_default();
    let Some(ServiceReference { name, namespace, port }) = &spec.service else {
        if bundle > 0 {
            let why = "local APIServices may not have a caBundle";
            errors.invalid(&path.child("caBundle"), format!("{bundle} bytes"), why);
        }
        if skips {
            let why = "local APIServices may not have insecureSkipTLSVerify";
            errors.invalid(&path.child("insecureSkipTLSVerify"), skips, why);
        }
        return;
    };
    let at = path.child("service");
    for (field, value) in [("namespace", namespace), ("name", name)] {
        if value.as_ref().is_none_or(|value| value.is_empty()) {
            errors.required(&at.child(field), "");
        }
    }
    let port = port.unwrap_or_default();
    if !(1..=65535).contains(&port) {
        let why = "port is not valid: must be between 1 and 65535, inclusive";
        errors.invalid(&at.child("port"), port, why);
    }
    if skips && bundle > 0 {
        let why = "may not be true if caBundle is present";
        errors.invalid(&path.child("insecureSkipTLSVerify"), skips, why);
    }
}
