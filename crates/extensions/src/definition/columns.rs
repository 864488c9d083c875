//! Checks of printer columns and scale paths.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceColumnDefinition, CustomResourceSubresources,
};
use machinery::field::{FieldErrors, Path};

const TYPES: &str = "boolean,date,integer,number,string";
const FORMATS: &str = "byte,date,date-time,double,float,int32,int64,password";

pub fn check_column(
    column: &CustomResourceColumnDefinition,
    path: &Path,
    errors: &mut FieldErrors,
) {
    if column.name.is_empty() {
        errors.required(&path.child("name"), "");
    }
    if column.type_.is_empty() {
        errors.required(&path.child("type"), &format!("must be one of {TYPES}"));
    } else if !TYPES.split(',').any(|known| known == column.type_) {
        errors.invalid(&path.child("type"), &column.type_, &format!("must be one of {TYPES}"));
    }
    let format = column.format.as_deref().unwrap_or_default();
    if !format.is_empty() && !FORMATS.split(',').any(|known| known == format) {
        errors.invalid(&path.child("format"), format, &format!("must be one of {FORMATS}"));
    }
    if column.json_path.is_empty() {
        errors.required(&path.child("JSONPath"), "");
    } else {
        check_simple_path(&column.json_path, &path.child("JSONPath"), errors);
    }
}

/// Reports whether the text is a valid simple JSON path.
fn check_simple_path(text: &str, path: &Path, errors: &mut FieldErrors) -> bool {
    let is_simple = text.starts_with('.');
    if !is_simple {
        errors.invalid(path, text, "must be a simple json path starting with .");
    }
    is_simple
}

pub fn check_subresources(
    subresources: &CustomResourceSubresources,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let Some(scale) = &subresources.scale else { return };
    let mut check = |name: &str, text: &str, roots: &[&str], detail: &str| {
        let path = path.child("scale").named(name);
        if text.is_empty() {
            errors.required(&path, "");
        } else if check_simple_path(text, &path, errors)
            && !roots.iter().any(|root| text.starts_with(root))
        {
            errors.invalid(&path, text, detail);
        }
    };
    let spec = "should be a json path under .spec";
    check("specReplicasPath", &scale.spec_replicas_path, &[".spec."], spec);
    let status = "should be a json path under .status";
    check("statusReplicasPath", &scale.status_replicas_path, &[".status."], status);
    if let Some(text) = scale.label_selector_path.as_deref().filter(|text| !text.is_empty()) {
        let detail = "should be a json path under either .spec or .status";
        check("labelSelectorPath", text, &[".spec.", ".status."], detail);
    }
}
