//! `/scale` of custom resources: replicas at the paths that the CRD names.
//! Upstream: `registry/customresource/etcd.go`.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::resource::View;
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceSubresourceScale;
use machinery::Object;
use machinery::field::{FieldErrors, Path};
use machinery::object::{Codec, Typed, Unstructured};
use serde_json::{Map, Value};

use super::Family;

/// The paths of the numbers. A path is a chain of plain fields.
pub struct Scaling {
    pub spec: FieldPath,
    pub status: FieldPath,
    pub selector: Option<FieldPath>,
}

pub struct FieldPath {
    /// The path as the CRD spells it.
    pub text: String,
    parts: Vec<String>,
}

impl FieldPath {
    fn new(text: &str) -> Self {
        let parts = text.trim_start_matches('.').split('.').map(str::to_owned).collect();
        Self { text: text.into(), parts }
    }

    pub fn get<'a>(&self, fields: &'a Map<String, Value>) -> Option<&'a Value> {
        let (first, rest) = self.parts.split_first()?;
        rest.iter().try_fold(fields.get(first)?, |value, name| value.get(name))
    }

    /// Creates missing parents. Fails if a parent is not an object.
    fn set(&self, fields: &mut Map<String, Value>, value: Value) -> bool {
        let Some((last, way)) = self.parts.split_last() else { return false };
        let mut at = fields;
        for name in way {
            let inner = at.entry(name.clone()).or_insert_with(|| Value::Object(Map::new()));
            let Value::Object(inner) = inner else { return false };
            at = inner;
        }
        at.insert(last.clone(), value);
        true
    }
}

impl Scaling {
    pub fn of(from: &CustomResourceSubresourceScale) -> Self {
        Self {
            spec: FieldPath::new(&from.spec_replicas_path),
            status: FieldPath::new(&from.status_replicas_path),
            selector: from
                .label_selector_path
                .as_deref()
                .filter(|path| !path.is_empty())
                .map(FieldPath::new),
        }
    }

    /// The errors of the numbers in an object.
    pub fn check(&self, fields: &Map<String, Value>, status_only: bool) -> FieldErrors {
        let mut errors = FieldErrors::default();
        let mut check = |path: &FieldPath| {
            let (field, value) = (Path::default().named(&path.text), path.get(fields));
            match value.map(|value| (value, value.as_i64())) {
                None => {}
                Some((_, Some(count))) if count < 0 => {
                    errors.invalid(&field, count, "should be a non-negative integer");
                }
                Some((_, Some(count))) if count > i64::from(i32::MAX) => {
                    let detail = format!("should be less than or equal to {}", i32::MAX);
                    errors.invalid(&field, count, &detail);
                }
                Some((_, Some(_))) => {}
                Some((other, None)) => {
                    let detail = format!(
                        "{} accessor error: {} is of the type {}, expected int64",
                        path.text,
                        shown(other),
                        go_type(other)
                    );
                    errors.invalid(&field, 0, &detail);
                }
            }
        };
        if !status_only {
            check(&self.spec);
        }
        check(&self.status);
        if let Some(path) = &self.selector
            && let Some(other) = path.get(fields).filter(|value| !value.is_string())
        {
            let detail = format!(
                "{} accessor error: {} is of the type {}, expected string",
                path.text,
                shown(other),
                go_type(other)
            );
            errors.invalid(&Path::default().named(&path.text), "", &detail);
        }
        errors
    }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "<nil>",
        Value::Bool(_) => "bool",
        Value::Number(number) if number.is_i64() => "int64",
        Value::Number(_) => "float64",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}

pub struct ScaleOf {
    pub family: Arc<Family>,
    pub index: usize,
}

static CODEC: Typed<Scale> = Typed::new();

impl ScaleOf {
    fn scaling(&self) -> Result<&Scaling, StatusError> {
        let scaling = self.family.versions[self.index].scaling.as_ref();
        scaling.ok_or_else(|| StatusError::internal("a version without scale has no such view"))
    }
}

impl View for ScaleOf {
    fn codec(&self) -> &dyn Codec {
        &CODEC
    }

    fn view(&self, parent: &dyn Object) -> Result<Box<dyn Object>, StatusError> {
        let scaling = self.scaling()?;
        let (of, meta) = (parent.expect::<Unstructured>(), parent.meta());
        let count = |path: &FieldPath| path.get(&of.fields).and_then(Value::as_i64);
        let Some(replicas) = count(&scaling.spec) else {
            return Err(StatusError::internal(format!(
                "the spec replicas field {:?} does not exist",
                scaling.spec.text
            )));
        };
        let selector = scaling.selector.as_ref().and_then(|path| path.get(&of.fields));
        let selector = selector.and_then(Value::as_str).map(str::to_owned);
        let small = |count: i64| i32::try_from(count).unwrap_or_default();
        let current = count(&scaling.status).map(small).unwrap_or_default();
        Ok(Box::new(api::scale::of(meta, small(replicas), current, selector)))
    }

    fn replicas_path(&self) -> Vec<&str> {
        let parts = self.scaling().map(|scaling| scaling.spec.parts.iter()).unwrap_or_default();
        parts.map(String::as_str).collect()
    }

    fn merge(&self, view: &dyn Object, parent: &mut dyn Object) -> Result<(), StatusError> {
        let replicas = api::scale::replicas(view.expect())?;
        let path = &self.scaling()?.spec;
        let custom = parent.expect_mut::<Unstructured>();
        if path.set(&mut custom.fields, replicas.into()) {
            return Ok(());
        }
        Err(StatusError::internal(format!("the path {:?} leads through a value", path.text)))
    }
}
