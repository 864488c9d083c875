//! Device selectors: CEL expressions over a device's attributes and capacity.
//!
//! Programs are kept, as classes are used again and again. Upstream:
//! `k8s.io/dynamic-resource-allocation/cel`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use cel::environments::{self, Domains};
use cel::{Budget, Program, Value};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

/// The maximum cost of one evaluation. Upstream: `CELSelectorExpressionMaxCost`.
const MOST_COST: u64 = 1_000_000;
/// Programs that are kept.
const MOST_PROGRAMS: usize = 128;

type Compiled = Arc<Result<Program, String>>;

#[derive(Default)]
pub struct Selectors {
    /// By expression. A mutex, as decisions of different profiles may share it; held for a lookup.
    programs: Mutex<HashMap<String, Compiled>>,
}

impl Selectors {
    fn compiled(&self, expression: &str) -> Compiled {
        let mut programs = self.programs.lock().expect("lookups do not panic");
        if let Some(known) = programs.get(expression) {
            return known.clone();
        }
        if programs.len() >= MOST_PROGRAMS {
            programs.clear();
        }
        let compiled = Arc::new(environments::selector(expression));
        programs.insert(expression.to_owned(), compiled.clone());
        compiled
    }

    /// Whether the selector selects the device, or the selector's error.
    pub fn matches(&self, expression: &str, driver: &str, device: &Device) -> Result<bool, String> {
        let program = self.compiled(expression);
        let program = match &*program {
            Ok(program) => program,
            Err(why) => return Err(format!("CEL compile error: {why}")),
        };
        let failed = |why: String| format!("CEL runtime error: {why}");
        let value = value_of(driver, device).map_err(failed)?;
        let variable = |name: &str| (name == "device").then(|| value.clone());
        let found = program.evaluate(&variable, &mut Budget::new(MOST_COST));
        let found = found.map_err(|why| failed(why.to_string()))?;
        found.as_bool().ok_or_else(|| {
            let kind = found.type_name();
            failed(format!("CEL result of type {kind} could not be converted to bool: unsupported native conversion from {kind} to 'bool'"))
        })
    }
}

fn value_of(driver: &str, device: &Device) -> Result<Value, String> {
    let mut attributes = Domains::new();
    for (name, attribute) in device.attributes.iter().flatten() {
        let value = attribute_value(attribute).map_err(|why| format!("attribute {name}: {why}"))?;
        let (domain, id) = name.split_once('/').unwrap_or((driver, name));
        attributes.entry(domain.to_owned()).or_default().insert(id.to_owned(), value);
    }
    let mut capacity = Domains::new();
    for (name, one) in device.capacity.iter().flatten() {
        let (domain, id) = name.split_once('/').unwrap_or((driver, name));
        let value = environments::of_text("quantity", &one.value.0)?;
        capacity.entry(domain.to_owned()).or_default().insert(id.to_owned(), value);
    }
    let is_shared = device.allow_multiple_allocations == Some(true);
    Ok(environments::device_value(driver, is_shared, attributes, capacity))
}

fn attribute_value(attribute: &DeviceAttribute) -> Result<Value, String> {
    if let Some(number) = attribute.int {
        return Ok(Value::Int(number));
    }
    if let Some(flag) = attribute.bool {
        return Ok(Value::Bool(flag));
    }
    if let Some(text) = &attribute.string {
        return Ok(Value::string(text.as_str()));
    }
    let version = attribute.version.as_ref().ok_or("unsupported attribute value")?;
    environments::of_text("semver", version).map_err(|why| format!("parse semantic version: {why}"))
}
