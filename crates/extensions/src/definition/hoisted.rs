//! The field paths of upstream's errors. Before upstream validates, it moves fields that all versions
//! share to the spec (`spec.validation` instead of `spec.versions[0].schema`).

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinitionSpec, CustomResourceDefinitionVersion,
};

use serde::Serialize;
use serde_json::{Value, json};

type Version = CustomResourceDefinitionVersion;

/// The fields that all versions share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hoisted {
    pub schema: bool,
    pub subresources: bool,
    pub columns: bool,
    pub selectable: bool,
}

impl Hoisted {
    pub fn of(spec: &CustomResourceDefinitionSpec) -> Self {
        let Some(first) = spec.versions.first() else { return Self::default() };
        let same = |equal: &dyn Fn(&Version) -> bool| spec.versions.iter().all(equal);
        Self {
            schema: same(&|one| one.schema == first.schema),
            subresources: same(&|one| one.subresources == first.subresources),
            columns: same(&|one| {
                one.additional_printer_columns == first.additional_printer_columns
            }),
            selectable: same(&|one| one.selectable_fields == first.selectable_fields),
        }
    }
}

/// Prints a version as Go does in an error: Go's field names in Go's order.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Shown<'a> {
    name: &'a str,
    served: bool,
    storage: bool,
    deprecated: bool,
    deprecation_warning: Option<&'a str>,
    schema: Value,
    subresources: Value,
    additional_printer_columns: Value,
    selectable_fields: Value,
}

/// The versions in an error. An absent list prints as `null`.
pub fn shown(spec: &CustomResourceDefinitionSpec, hoisted: Hoisted) -> impl Serialize + use<'_> {
    let unless = |hoisted: bool, value: Value| if hoisted { Value::Null } else { value };
    let one = move |version| {
        let version: &Version = version;
        Shown {
            name: &version.name,
            served: version.served,
            storage: version.storage,
            deprecated: version.deprecated.unwrap_or_default(),
            deprecation_warning: version.deprecation_warning.as_deref(),
            schema: unless(hoisted.schema, json!(version.schema)),
            subresources: unless(hoisted.subresources, json!(version.subresources)),
            additional_printer_columns: unless(
                hoisted.columns,
                json!(version.additional_printer_columns),
            ),
            selectable_fields: unless(hoisted.selectable, json!(version.selectable_fields)),
        }
    };
    let all: Vec<Shown<'_>> = spec.versions.iter().map(one).collect();
    (!all.is_empty()).then_some(all)
}
