//! Types in the expressions of ValidatingAdmissionPolicies: what does not fit the kinds that a policy
//! is about is told in its status, and changes nothing else.
//!
//! In: policies, the kinds and schemas that the server publishes. Out: `status.typeChecking`.
//! Upstream: `pkg/controller/validatingadmissionpolicystatus`; schemas that cannot be had are skipped, and a
//! policy is looked at once for each of its generations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cel::Type;
use cel::environments::{self, Offers};
use client::{Client, ErrorExt, Lister, Outcome, Result};
use http::Method;
use k8s_openapi::api::admissionregistration::v1::{
    NamedRuleWithOperations, ValidatingAdmissionPolicy,
};
use serde_json::{Value, json};

use crate::descriptor::{Descriptor, Row, or_gone, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: NAME,
    account: NAME,
    component: NAME,
    queue: "validatingadmissionpolicy-status",
    workers: 5,
    new: |setup| Some(Controller { client: setup.client.clone(), policies: setup.lister() }),
    watches: &[&own::<ValidatingAdmissionPolicy>()],
    reconcile: |this, name| {
        Box::pin(async move { reconcile(&this.client, &this.policies, &name).await })
    },
};

struct Controller {
    client: Client,
    policies: Lister<ValidatingAdmissionPolicy>,
}

const NAME: &str = "validatingadmissionpolicy-status-controller";
/// Kinds that a policy's expressions are checked against.
const MOST_KINDS: usize = 10;
/// The maximum depth of nested types. Deeper or recursive fields have the type `dyn`.
const DEEPEST: usize = 24;
const APPLY: &str = "application/apply-patch+yaml";

async fn reconcile(
    client: &Client,
    policies: &Lister<ValidatingAdmissionPolicy>,
    name: &str,
) -> Result<Outcome> {
    let Some(policy) = policies.get("", name) else { return Ok(Outcome::Done) };
    let observed = policy.status.as_ref().and_then(|status| status.observed_generation);
    let generation = policy.metadata.generation.unwrap_or_default();
    if generation <= observed.unwrap_or_default() {
        return Ok(Outcome::Done);
    }
    let subjects = subjects(client, &policy).await?;
    let warnings: Vec<Value> = check(&policy, &subjects)
        .into_iter()
        .map(|(place, warning)| json!({ "fieldRef": place, "warning": warning }))
        .collect();
    let mut checked = json!({});
    if !warnings.is_empty() {
        checked["expressionWarnings"] = warnings.into();
    }
    let body = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": name },
        "status": { "observedGeneration": generation, "typeChecking": checked },
    });
    let path = format!(
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{name}/status?fieldManager={NAME}&force=true"
    );
    or_gone(client.call(Method::PATCH, &path, APPLY, body.to_string()).await)
}

/// The resources of a policy.
#[derive(Default)]
struct Subjects {
    /// Kinds as they are shown, with their types, in order.
    kinds: Vec<(String, Type)>,
    /// `None`: the policy has no parameters.
    params: Option<Type>,
}

/// A served kind.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Gvk {
    group: String,
    version: String,
    kind: String,
}

impl Gvk {
    fn base(&self) -> String {
        match self.group.as_str() {
            "" => format!("api/{}", self.version),
            group => format!("apis/{group}/{}", self.version),
        }
    }

    /// As Go shows it.
    fn shown(&self) -> String {
        format!("{}/{}, Kind={}", self.group, self.version, self.kind)
    }
}

async fn subjects(client: &Client, policy: &ValidatingAdmissionPolicy) -> Result<Subjects> {
    let mut subjects = Subjects::default();
    let Some(spec) = &policy.spec else { return Ok(subjects) };
    let constraints = spec.match_constraints.as_ref();
    let rules = constraints.and_then(|all| all.resource_rules.as_deref()).unwrap_or_default();
    let mut documents = Documents { client, known: BTreeMap::new() };
    let mut kinds = BTreeSet::new();
    for (group, version, resource) in rules.iter().flat_map(named) {
        let gvk = Gvk { group, version, kind: String::new() };
        let found = documents.kind_of(&gvk, &resource).await?;
        kinds.extend(found.map(|kind| Gvk { kind, ..gvk }));
        if kinds.len() == MOST_KINDS {
            break;
        }
    }
    for gvk in kinds {
        if let Some(kind) = documents.type_of(&gvk).await? {
            subjects.kinds.push((gvk.shown(), kind));
        }
    }
    if let Some(params) = &spec.param_kind {
        let version = params.api_version.as_deref().unwrap_or_default();
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let kind = params.kind.clone().unwrap_or_default();
        let gvk = Gvk { group: group.into(), version: version.into(), kind };
        subjects.params = Some(documents.type_of(&gvk).await?.unwrap_or_default());
    }
    Ok(subjects)
}

/// Groups, versions and resources that a rule names; none where it names them by a pattern. Pure.
fn named(rule: &NamedRuleWithOperations) -> Vec<(String, String, String)> {
    let list = |list: &Option<Vec<String>>| {
        let mut list = list.clone().unwrap_or_default();
        list.sort_unstable();
        list
    };
    let (groups, versions) = (list(&rule.api_groups), list(&rule.api_versions));
    let mut resources = list(&rule.resources);
    if groups.iter().chain(&versions).any(|one| one.contains('*')) {
        return vec![];
    }
    resources.retain(|one| !one.contains(['*', '/']));
    let mut all = vec![];
    for group in &groups {
        for version in &versions {
            let of = |resource: String| (group.clone(), version.clone(), resource);
            all.extend(resources.iter().cloned().map(of));
        }
    }
    all
}

/// The server's OpenAPI, read once.
struct Documents<'a> {
    client: &'a Client,
    known: BTreeMap<String, Value>,
}

impl Documents<'_> {
    async fn kind_of(&mut self, gvk: &Gvk, resource: &str) -> Result<Option<String>> {
        let list = self.get(format!("/{}", gvk.base())).await?;
        let resources = list["resources"].as_array().map(Vec::as_slice).unwrap_or_default();
        let found = resources.iter().find(|one| one["name"] == resource);
        Ok(found.and_then(|one| one["kind"].as_str()).map(str::to_owned))
    }

    /// `None`: there is no schema.
    async fn type_of(&mut self, gvk: &Gvk) -> Result<Option<Type>> {
        let document = self.get(format!("/openapi/v3/{}", gvk.base())).await?;
        let schemas = &document["components"]["schemas"];
        let is_it = |schema: &Value| {
            let all = schema["x-kubernetes-group-version-kind"].as_array();
            all.into_iter().flatten().any(|one| {
                one["group"] == *gvk.group
                    && one["version"] == *gvk.version
                    && one["kind"] == *gvk.kind
            })
        };
        let all = schemas.as_object();
        let found = all.and_then(|all| all.values().find(|schema| is_it(schema)));
        Ok(found.map(|schema| declared(schema, schemas, &gvk.kind, DEEPEST)))
    }

    async fn get(&mut self, path: String) -> Result<&Value> {
        if !self.known.contains_key(&path) {
            let document = match self.client.get::<Value>(&path).await {
                Err(error) if error.is_not_found() => Value::Null,
                other => other?,
            };
            self.known.insert(path.clone(), document);
        }
        Ok(&self.known[&path])
    }
}

/// The type that a published schema declares. Pure.
fn declared(schema: &Value, schemas: &Value, name: &str, depth: usize) -> Type {
    const REFERENCE: &str = "#/components/schemas/";
    if depth == 0 {
        return Type::Dyn;
    }
    let text = |name: &str| schema[name].as_str().unwrap_or_default();
    let all_of = schema["allOf"].as_array().filter(|all| all.len() == 1);
    let reference = all_of.map_or(schema, |all| &all[0])["$ref"].as_str();
    if let Some(name) = reference.and_then(|text| text.strip_prefix(REFERENCE)) {
        return declared(&schemas[name], schemas, name, depth - 1);
    }
    let inner = |schema: &Value| declared(schema, schemas, &format!("{name}.inner"), depth - 1);
    if schema["x-kubernetes-int-or-string"] == true || text("format") == "int-or-string" {
        return Type::Dyn;
    }
    match (text("type"), text("format")) {
        ("string", "byte") => Type::Bytes,
        ("string", "duration") => Type::Duration,
        ("string", "date" | "date-time") => Type::Timestamp,
        ("string", _) => Type::String,
        ("boolean", _) => Type::Bool,
        ("integer", _) => Type::Int,
        ("number", _) => Type::Double,
        ("array", _) => Type::list(inner(&schema["items"])),
        ("object", _) if schema["additionalProperties"].is_object() => {
            Type::Map(Arc::new(inner(&schema["additionalProperties"])))
        }
        ("object", _) if schema["properties"].is_object() => {
            let fields = schema["properties"].as_object().into_iter().flatten();
            let fields = fields.map(|(name, schema)| (name.clone(), inner(schema))).collect();
            let is_open = schema["x-kubernetes-preserve-unknown-fields"] == true;
            Type::Object(Arc::new(cel::Object { name: name.to_owned(), fields, is_open }))
        }
        // Objects of any shape, and numbers with units.
        _ => Type::Dyn,
    }
}

/// The places of expressions that do not fit, and why. Pure.
fn check(policy: &ValidatingAdmissionPolicy, subjects: &Subjects) -> Vec<(String, String)> {
    let rules = policy.spec.iter().flat_map(|spec| spec.validations.iter().flatten());
    let mut warnings = vec![];
    for (index, rule) in rules.enumerate() {
        let message = rule.message_expression.as_deref().filter(|text| !text.is_empty());
        let texts =
            [("expression", Some(rule.expression.as_str())), ("messageExpression", message)];
        for (field, text) in texts {
            let Some(text) = text else { continue };
            let wrong: Vec<String> = subjects
                .kinds
                .iter()
                .filter_map(|(shown, kind)| {
                    let why = misfit(policy, text, kind, subjects.params.as_ref())?;
                    Some(format!("{shown}: {why}\n"))
                })
                .collect();
            if !wrong.is_empty() {
                warnings.push((format!("spec.validations[{index}].{field}"), wrong.join("\n")));
            }
        }
    }
    warnings
}

/// Why an expression cannot be about objects of a type.
fn misfit(
    policy: &ValidatingAdmissionPolicy,
    text: &str,
    kind: &Type,
    params: Option<&Type>,
) -> Option<String> {
    let offers = Offers { params: params.is_some(), authorizer: true, patches: false };
    let known = |variables: &[(String, Type)]| {
        let mut known = environments::admission(offers, Some(variables));
        for (name, declared) in &mut known {
            match (*name, params) {
                ("object" | "oldObject", _) => *declared = kind.clone(),
                ("params", Some(params)) => *declared = params.clone(),
                _ => {}
            }
        }
        known
    };
    let mut variables: Vec<(String, Type)> = vec![];
    for one in policy.spec.iter().flat_map(|spec| spec.variables.iter().flatten()) {
        let program = cel::compile(&one.expression, &known(&variables));
        let kind = program.map_or(Type::Dyn, |program| program.kind().clone());
        variables.push((one.name.clone(), kind));
    }
    cel::compile(text, &known(&variables)).err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::from_value;

    use super::*;

    fn schemas() -> Value {
        json!({
            "Set": { "type": "object", "properties": {
                "metadata": { "allOf": [{ "$ref": "#/components/schemas/Meta" }] },
                "spec": { "allOf": [{ "$ref": "#/components/schemas/Spec" }] } } },
            "Meta": { "type": "object", "properties": { "name": { "type": "string" },
                "labels": { "type": "object", "additionalProperties": { "type": "string" } } } },
            "Spec": { "type": "object", "properties": {
                "replicas": { "type": "integer" },
                "port": { "format": "int-or-string", "oneOf": [] },
                "inner": { "$ref": "#/components/schemas/Spec" } } },
        })
    }

    fn policy(expression: &str) -> ValidatingAdmissionPolicy {
        from_value(json!({ "metadata": {}, "spec": {
            "variables": [{ "name": "n", "expression": "object.spec.replicas" }],
            "validations": [{ "expression": expression }] } }))
        .expect("a policy")
    }

    #[test]
    fn expressions_that_do_not_fit_are_told_with_their_place() {
        let schemas = schemas();
        let kind = declared(&schemas["Set"], &schemas, "Set", DEEPEST);
        let kinds = vec![("apps/v1, Kind=Set".to_owned(), kind)];
        let subjects = Subjects { kinds, params: None };
        for (expression, expected) in [
            ("object.spec.replicas > 1 && variables.n < 5", None),
            ("object.spec.port == 80 || object.metadata.labels['a'] == 'b'", None),
            ("object.spec.inner.inner.replicas == 1", None),
            (
                "object.replicas > 1",
                Some(
                    "apps/v1, Kind=Set: ERROR: <input>:1:7: undefined field 'replicas'\n | object.replicas > 1\n | ......^\n",
                ),
            ),
            (
                "variables.n > '1'",
                Some(
                    "apps/v1, Kind=Set: ERROR: <input>:1:13: found no matching overload for '_>_' applied to '(int, string)'\n | variables.n > '1'\n | ............^\n",
                ),
            ),
        ] {
            let got = check(&policy(expression), &subjects);
            let expected: Vec<(String, String)> = expected
                .map(|text| ("spec.validations[0].expression".to_owned(), text.to_owned()))
                .into_iter()
                .collect();
            assert_eq!(got, expected, "{expression}");
        }
    }

    #[test]
    fn rules_with_patterns_name_no_kind() {
        let rule = |groups: &[&str], resources: &[&str]| -> NamedRuleWithOperations {
            from_value(
                json!({ "apiGroups": groups, "apiVersions": ["v1"], "resources": resources }),
            )
            .expect("a rule")
        };
        assert_eq!(named(&rule(&["*"], &["pods"])), []);
        let found = named(&rule(&["apps", ""], &["pods", "pods/log", "*"]));
        let shown: Vec<String> = found.iter().map(|(g, v, r)| format!("{g}/{v}/{r}")).collect();
        assert_eq!(shown, ["/v1/pods", "apps/v1/pods"]);
    }
}
