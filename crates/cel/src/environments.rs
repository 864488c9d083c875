//! The variables and result types of expressions in Kubernetes' own kinds.
//!
//! In: an expression and its place (a policy's validation, a webhook's condition, a device's
//! selector). Out: a program, or upstream's error message. Upstream:
//! `k8s.io/apiserver/pkg/admission/plugin/cel`, `k8s.io/dynamic-resource-allocation/cel`.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::types::{Object, Type};
use crate::value::{Host, Value};
use crate::{Program, compile};

/// The type of `authorizer`.
pub const AUTHORIZER: &str = "kubernetes.authorization.Authorizer";
const RESOURCE_CHECK: &str = "kubernetes.authorization.ResourceCheck";

/// The parts of the environment that depend on the expression's place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Offers {
    /// The policy has a `paramKind`.
    pub params: bool,
    pub authorizer: bool,
    /// `Object{…}` and `JSONPatch{…}` can be constructed.
    pub patches: bool,
}

/// The variables for expressions of admission policies and webhooks. `variables` are those composed
/// before it; `None`: composition is not available.
pub fn admission(
    offers: Offers,
    variables: Option<&[(String, Type)]>,
) -> Vec<(&'static str, Type)> {
    let mut all = vec![
        ("object", Type::Dyn),
        ("oldObject", Type::Dyn),
        ("namespaceObject", namespace_type()),
        ("request", request_type()),
    ];
    if offers.params {
        all.push(("params", Type::Dyn));
    }
    if offers.authorizer {
        all.push(("authorizer", Type::Opaque(AUTHORIZER)));
        all.push(("authorizer.requestResource", Type::Opaque(RESOURCE_CHECK)));
    }
    if offers.patches {
        all.extend([("Object", Type::Type), ("JSONPatch", Type::Type)]);
    }
    if let Some(variables) = variables {
        let fields = variables.iter().cloned().collect();
        let name = "kubernetes.variables".to_owned();
        all.push(("variables", Type::Object(Arc::new(Object { name, fields, is_open: false }))));
    }
    all
}

/// The variables for a device's selector.
pub fn device() -> Vec<(&'static str, Type)> {
    let map = |of: Type| Type::Map(Arc::new(of));
    let device = object(
        "kubernetes.DRADevice",
        [
            ("driver", Type::String),
            ("allowMultipleAllocations", Type::Bool),
            ("attributes", map(map(Type::Dyn))),
            ("capacity", map(map(Type::Opaque("kubernetes.Quantity")))),
        ],
    );
    vec![("device", device)]
}

/// Attributes or capacities by domain and name.
pub type Domains = BTreeMap<String, BTreeMap<String, Value>>;

/// The value of `device` in selectors.
pub fn device_value(
    driver: &str,
    is_shared: bool,
    attributes: Domains,
    capacity: Domains,
) -> Value {
    let domains = |all: Domains| {
        let all = all.into_iter().map(|(domain, named)| (domain, Value::map(named)));
        Value::host(ByDomain { known: Value::map(all), nothing: Value::map([]) })
    };
    Value::map([
        ("driver".to_owned(), Value::string(driver)),
        ("allowMultipleAllocations".to_owned(), Value::Bool(is_shared)),
        ("attributes".to_owned(), domains(attributes)),
        ("capacity".to_owned(), domains(capacity)),
    ])
}

/// Parses a value of a library type: `quantity`, `semver`.
pub fn of_text(function: &'static str, text: &str) -> Result<Value, String> {
    let unknown = || Err(format!("no such function: {function}"));
    crate::functions::call(function, None, &[Value::string(text)]).unwrap_or_else(unknown)
}

/// A domain without attributes reads as empty, so that selectors may access its attributes.
struct ByDomain {
    known: Value,
    nothing: Value,
}

impl Host for ByDomain {
    fn type_name(&self) -> &'static str {
        "map"
    }

    fn call(&self, _: &str, _: &[Value]) -> Option<Result<Value, String>> {
        None
    }

    fn as_map(&self) -> Option<(&Value, &Value)> {
        Some((&self.known, &self.nothing))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// Compiles a device's selector; the types of attributes are unknown at this time.
pub fn selector(text: &str) -> Result<Program, String> {
    let program =
        compile(text, &device()).map_err(|error| format!("compilation failed: {error}"))?;
    match program.kind() {
        Type::Bool | Type::Dyn => Ok(program),
        other => {
            Err(format!("must evaluate to bool or the unknown type, not {}", other.declared()))
        }
    }
}

/// Compiles an expression that must evaluate to one of `wanted` (empty: any type), or returns the error.
pub fn checked(text: &str, variables: &[(&str, Type)], wanted: &[Type]) -> Result<Program, String> {
    let program =
        compile(text, variables).map_err(|error| format!("compilation failed: {error}"))?;
    let kind = program.kind();
    if wanted.is_empty() || (*kind == Type::Dyn && !program.is_surely_dynamic(variables)) {
        return Ok(program);
    }
    if wanted.iter().any(|wanted| *kind != Type::Dyn && is_same(kind, wanted)) {
        return Ok(program);
    }
    Err(match wanted {
        [one] => format!("must evaluate to {} but got {}", one.declared(), kind.declared()),
        all => {
            let all: Vec<String> = all.iter().map(Type::declared).collect();
            format!("must evaluate to one of [{}] but got {}", all.join(" "), kind.declared())
        }
    })
}

/// Whether the types are equal, as far as both are known.
fn is_same(kind: &Type, wanted: &Type) -> bool {
    match (kind, wanted) {
        (Type::Null, Type::Null) => true,
        (Type::Null, _) | (_, Type::Null) => false,
        _ => kind.fits(wanted),
    }
}

/// The result type of a mutation.
pub fn patched() -> Type {
    Type::Object(Arc::new(Object { name: "Object".into(), is_open: true, ..Object::default() }))
}

/// The result type of a JSON patch expression.
pub fn patches() -> Type {
    let one = Object { name: "JSONPatch".into(), is_open: true, ..Object::default() };
    Type::list(Type::Object(Arc::new(one)))
}

fn object<const N: usize>(name: &str, fields: [(&str, Type); N]) -> Type {
    let fields: BTreeMap<String, Type> =
        fields.into_iter().map(|(name, kind)| (name.to_owned(), kind)).collect();
    Type::Object(Arc::new(Object { name: name.into(), fields, is_open: false }))
}

fn strings() -> Type {
    Type::list(Type::String)
}

fn request_type() -> Type {
    let of = |name: &str, last: &str| {
        object(name, [("group", Type::String), ("version", Type::String), (last, Type::String)])
    };
    let kind = || of("kubernetes.GroupVersionKind", "kind");
    let resource = || of("kubernetes.GroupVersionResource", "resource");
    let user = object(
        "kubernetes.UserInfo",
        [
            ("username", Type::String),
            ("uid", Type::String),
            ("groups", strings()),
            ("extra", Type::Map(Arc::new(strings()))),
        ],
    );
    object(
        "kubernetes.AdmissionRequest",
        [
            ("kind", kind()),
            ("resource", resource()),
            ("subResource", Type::String),
            ("requestKind", kind()),
            ("requestResource", resource()),
            ("requestSubResource", Type::String),
            ("name", Type::String),
            ("namespace", Type::String),
            ("operation", Type::String),
            ("userInfo", user),
            ("dryRun", Type::Bool),
            ("options", Type::Dyn),
        ],
    )
}

fn namespace_type() -> Type {
    let labels = || Type::Map(Arc::new(Type::String));
    let condition = object(
        "kubernetes.NamespaceCondition",
        [
            ("status", Type::String),
            ("type", Type::String),
            ("lastTransitionTime", Type::Timestamp),
            ("message", Type::String),
            ("reason", Type::String),
        ],
    );
    let metadata = object(
        "kubernetes.NamespaceMetadata",
        [
            ("name", Type::String),
            ("generateName", Type::String),
            ("namespace", Type::String),
            ("labels", labels()),
            ("annotations", labels()),
            ("UID", Type::String),
            ("creationTimestamp", Type::Timestamp),
            ("deletionGracePeriodSeconds", Type::Int),
            ("deletionTimestamp", Type::Timestamp),
            ("generation", Type::Int),
            ("resourceVersion", Type::String),
            ("finalizers", strings()),
        ],
    );
    let status = object(
        "kubernetes.NamespaceStatus",
        [("conditions", Type::list(condition)), ("phase", Type::String)],
    );
    object(
        "kubernetes.Namespace",
        [
            ("metadata", metadata),
            ("spec", object("kubernetes.NamespaceSpec", [("finalizers", strings())])),
            ("status", status),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, wanted: &[Type], expected: &str) {
        let offers = Offers { params: false, authorizer: true, patches: true };
        let variables = [("n".to_owned(), Type::Int), ("any".to_owned(), Type::Dyn)];
        let got = checked(text, &admission(offers, Some(&variables)), wanted);
        assert_eq!(got.err().unwrap_or_default(), expected, "{text}");
    }

    #[test]
    fn expressions_have_the_result_type_of_their_place() {
        let bool = &[Type::Bool][..];
        check("object.spec.replicas > 5 && request.name != ''", bool, "");
        check("variables.n > 1 || variables.any", bool, "");
        check("authorizer.group('').resource('pods').check('get').allowed()", bool, "");
        check("authorizer.requestResource.check('get').allowed()", bool, "");
        check("namespaceObject.metadata.labels['a'] == 'b'", bool, "");
        check("has(object.metadata.labels) && 'a' in object.metadata.labels", bool, "");
        check("object.spec.containers.all(c, c.image.startsWith('a/'))", bool, "");
        check("object.a ? object.b == 1 : true", bool, "");
        check("1 + 1", bool, "must evaluate to bool but got int");
        check("object.x", bool, "must evaluate to bool but got dyn");
        check("object.x[0].y", bool, "must evaluate to bool but got dyn");
        check("variables.any", bool, "must evaluate to bool but got dyn");
        check("'a'.size()", &[Type::String], "must evaluate to string but got int");
        check("timestamp('x')", bool, "must evaluate to bool but got google.protobuf.Timestamp");
        let note = &[Type::String, Type::Null][..];
        check(
            "object.x == 1 ? 'a' : null",
            &[],
            "compilation failed: ERROR: <input>:1:15: found no matching overload for '_?_:_' applied to '(bool, string, null)'\n | object.x == 1 ? 'a' : null\n | ..............^",
        );
        check("null", note, "");
        check("1", note, "must evaluate to one of [string null_type] but got int");
        check(
            "params.x == 1",
            bool,
            "compilation failed: ERROR: <input>:1:1: undeclared reference to 'params' (in container '')\n | params.x == 1\n | ^",
        );
        check(
            "request.nope == 1",
            bool,
            "compilation failed: ERROR: <input>:1:8: undefined field 'nope'\n | request.nope == 1\n | .......^",
        );
        check(
            "variables.m",
            bool,
            "compilation failed: ERROR: <input>:1:10: undefined field 'm'\n | variables.m\n | .........^",
        );
    }

    #[test]
    fn mutations_evaluate_to_patches() {
        check("Object{spec: Object.spec{replicas: 2}}", &[patched()], "");
        check("[JSONPatch{op: 'add', path: '/a', value: 1}]", &[patches()], "");
        check("object.a ? [JSONPatch{op: 'remove', path: '/a'}] : []", &[patches()], "");
        check("'a'", &[patches()], "must evaluate to list(JSONPatch) but got string");
        check("'a'", &[patched()], "must evaluate to Object but got string");
    }

    #[test]
    fn incomplete_texts_have_antlrs_message() {
        const STARTS: &str = "{'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}";
        check(
            "object.x >",
            &[],
            &format!(
                "compilation failed: ERROR: <input>:1:11: Syntax error: mismatched input '<EOF>' expecting {STARTS}\n | object.x >\n | ..........^"
            ),
        );
        check(
            "Object{",
            &[],
            "compilation failed: ERROR: <input>:1:8: Syntax error: mismatched input '<EOF>' expecting {'}', ',', '?', IDENTIFIER, ESC_IDENTIFIER}\n | Object{\n | .......^",
        );
    }

    #[test]
    fn selectors_of_devices_are_checked() {
        for (text, expected) in [
            ("device.driver == 'a' && device.attributes['a'].b", ""),
            ("device.attributes['a'].b", ""),
            ("device.capacity['a'].b.compareTo(quantity('1')) > 0", ""),
            (
                "device.foo",
                "compilation failed: ERROR: <input>:1:7: undefined field 'foo'\n | device.foo\n | ......^",
            ),
            ("1", "must evaluate to bool or the unknown type, not int"),
        ] {
            let got = selector(text).err().unwrap_or_default();
            assert_eq!(got, expected, "{text}");
        }
    }

    #[test]
    fn selectors_read_a_devices_domains() {
        let attributes = BTreeMap::from([
            ("model".to_owned(), Value::string("A100")),
            ("version".to_owned(), of_text("semver", "1.2.3").unwrap()),
        ]);
        let memory = BTreeMap::from([("memory".to_owned(), of_text("quantity", "40Gi").unwrap())]);
        let domain = "gpu.example.com".to_owned();
        let device = device_value(
            "gpu.example.com",
            true,
            [(domain.clone(), attributes)].into(),
            [(domain, memory)].into(),
        );
        for (text, expected) in [
            ("device.driver == 'gpu.example.com' && device.allowMultipleAllocations", "true"),
            ("device.attributes['gpu.example.com'].model == 'A100'", "true"),
            ("device.attributes['gpu.example.com'].model == 'H100'", "false"),
            ("device.attributes['gpu.example.com'].version.isGreaterThan(semver('1.0.0'))", "true"),
            ("device.capacity['gpu.example.com'].memory.compareTo(quantity('40Gi')) >= 0", "true"),
            ("'other.example.com' in device.attributes", "false"),
            ("'gpu.example.com' in device.attributes", "true"),
            ("has(device.attributes['other.example.com'].model)", "false"),
            ("device.attributes['other.example.com'].model == 'x'", "no such key: model"),
            ("device.attributes.exists(d, d == 'gpu.example.com')", "true"),
            (
                "cel.bind(gpu, device.attributes['gpu.example.com'], gpu.model != '' && !has(gpu.b))",
                "true",
            ),
        ] {
            let program = selector(text).unwrap_or_else(|why| panic!("{text}: {why}"));
            let variable = |name: &str| (name == "device").then(|| device.clone());
            let found = match program.evaluate(&variable, &mut crate::Budget::new(1_000_000)) {
                Ok(value) => value.as_bool().map_or("no bool".to_owned(), |flag| flag.to_string()),
                Err(why) => why.to_string(),
            };
            assert_eq!(found, expected, "{text}");
        }
    }
}
