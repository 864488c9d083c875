//! The variables of expressions in policies and match conditions, and their evaluation.
//!
//! In: a request in the version that matched; parameters; the policy's variables. Out: values,
//! or errors in upstream's words. Upstream: `k8s.io/apiserver/pkg/admission/plugin/cel`.

use std::cell::RefCell;
use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::Attributes;
use apiserver::authz::Authorizer;
use apiserver::resource::Resource;
use cel::{Budget, EvalError, Program, Type, Value};
use k8s_openapi::api::admissionregistration::v1::{MatchCondition, Variable};
use k8s_openapi::api::core::v1::Namespace;
use machinery::Object;
use serde_json::Value as Json;

use super::authorizer;
use crate::matching::{namespace_of, shown};
use crate::webhook::request_of;

/// The cost limit of all expressions of one policy for one request.
pub(crate) const POLICY_COST: u64 = 10_000_000;
/// The same limit for match conditions.
const CONDITIONS_COST: u64 = 2_500_000;
/// The cost limit of one expression. Upstream: `PerCallLimit`.
const CALL_COST: u64 = 1_000_000;
pub(super) const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";
const NAMES: [&str; 6] =
    ["object", "oldObject", "request", "params", "namespaceObject", "variables"];

/// A compiled expression; a compile error is returned at every evaluation.
pub(crate) struct Expression {
    pub text: String,
    program: Result<Program, String>,
}

impl Expression {
    pub fn new(text: &str) -> Self {
        let mut variables = NAMES.map(|name| (name, Type::Dyn)).to_vec();
        variables.push(("authorizer", Type::Opaque(authorizer::TYPE)));
        let program = cel::compile(text, &variables);
        let program =
            program.map_err(|error| format!("compilation error: compilation failed: {error}"));
        Self { text: text.trim().to_owned(), program }
    }
}

/// A named expression that other expressions may refer to.
pub(crate) struct Composed {
    name: String,
    expression: Expression,
}

pub(crate) fn composed(variables: Option<&[Variable]>) -> Vec<Composed> {
    let one = |variable: &Variable| Composed {
        name: variable.name.clone(),
        expression: Expression::new(&variable.expression),
    };
    variables.unwrap_or_default().iter().map(one).collect()
}

/// Why an expression has no value.
enum Failure {
    /// Has a complete message.
    Said(String),
    Evaluating(String),
}

/// The values of one request.
pub(crate) struct Environment<'a> {
    object: Json,
    old: Json,
    request: Json,
    pub params: Json,
    namespace: Json,
    authorizer: Option<Value>,
    variables: &'a [Composed],
    /// Cached values of composed variables. One request means one task, so no lock is needed.
    known: RefCell<Vec<Option<Result<Value, String>>>>,
}

impl<'a> Environment<'a> {
    pub async fn new(
        attributes: &Attributes<'_>,
        row: &Resource,
        authorizer: Option<&Arc<dyn Authorizer>>,
        variables: &'a [Composed],
    ) -> Result<Self, StatusError> {
        let sub = attributes.ctx.subresource.as_str();
        let tree = |object: Option<&dyn Object>| {
            object.map_or(Ok(Json::Null), |object| shown(row, sub, object))
        };
        let object = tree(attributes.object.as_deref().map(|object| &**object))?;
        let old = tree(attributes.old)?;
        let request = request_of(attributes, "", row);
        let authorizer = authorizer.map(|one| authorizer::value(one.clone(), attributes));
        Ok(Self {
            object,
            old,
            request,
            params: Json::Null,
            namespace: namespace_object(attributes).await?,
            authorizer,
            variables,
            known: RefCell::new(variables.iter().map(|_| None).collect()),
        })
    }

    /// Sets other parameters, and drops the values that were computed with the last ones.
    pub fn set_params(&mut self, params: Json) {
        self.params = params;
        self.known.borrow_mut().fill_with(|| None);
    }

    pub fn evaluate(&self, expression: &Expression, budget: &mut Budget) -> Result<Value, String> {
        self.value(expression, budget).map_err(|failure| match failure {
            Failure::Said(why) => why,
            Failure::Evaluating(why) => {
                format!("expression '{}' resulted in error: {why}", expression.text)
            }
        })
    }

    fn value(&self, expression: &Expression, budget: &mut Budget) -> Result<Value, Failure> {
        let program = expression.program.as_ref().map_err(|why| Failure::Said(why.clone()))?;
        if program.uses("variables") {
            self.compute_named(&expression.text, budget);
        }
        let start = budget.left.min(CALL_COST);
        let mut call = Budget::new(start);
        let outcome = program.evaluate(&|name| self.variable(name), &mut call);
        budget.left -= start - call.left;
        outcome.map_err(|error| match error {
            EvalError::TooExpensive if budget.left > 0 => Failure::Evaluating(error.to_string()),
            EvalError::TooExpensive => Failure::Said(OUT_OF_BUDGET.to_owned()),
            EvalError::Failed(why) => {
                Failure::Evaluating(self.failed_variable(&expression.text).unwrap_or(why))
            }
        })
    }

    fn variable(&self, name: &str) -> Option<Value> {
        let tree = |json: &Json| Some(Value::from_json(json, &Type::Dyn));
        match name {
            "object" => tree(&self.object),
            "oldObject" => tree(&self.old),
            "request" => tree(&self.request),
            "params" => tree(&self.params),
            "namespaceObject" => tree(&self.namespace),
            "authorizer" => self.authorizer.clone(),
            "variables" => {
                let known = self.known.borrow();
                let pairs = self.variables.iter().zip(known.iter());
                let values = pairs.filter_map(|(one, known)| match known {
                    Some(Ok(value)) => Some((one.name.clone(), value.clone())),
                    _ => None,
                });
                Some(Value::map(values))
            }
            _ => None,
        }
    }

    /// Computes the variables that a text refers to, which may refer to earlier ones.
    fn compute_named(&self, text: &str, budget: &mut Budget) {
        for (index, one) in self.variables.iter().enumerate() {
            let is_known = self.known.borrow()[index].is_some();
            if is_known || !names(text, &one.name) {
                continue;
            }
            // Prevents infinite recursion.
            self.known.borrow_mut()[index] = Some(Err("it refers to itself".into()));
            let value = self.value(&one.expression, budget);
            let value = value.map_err(|failure| match failure {
                Failure::Said(why) | Failure::Evaluating(why) => why,
            });
            self.known.borrow_mut()[index] = Some(value);
        }
    }

    /// The error of a variable that a text refers to.
    fn failed_variable(&self, text: &str) -> Option<String> {
        let known = self.known.borrow();
        let mut pairs = self.variables.iter().zip(known.iter());
        pairs.find_map(|(one, known)| match known {
            Some(Err(why)) if names(text, &one.name) => {
                Some(format!("composited variable {:?} fails to evaluate: {why}", one.name))
            }
            _ => None,
        })
    }
}

/// Whether a text contains `variables.<name>`.
fn names(text: &str, name: &str) -> bool {
    text.match_indices("variables.").any(|(at, dotted)| {
        let rest = &text[at + dotted.len()..];
        rest.strip_prefix(name)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    })
}

/// The request's namespace, with the fields that policies may see.
async fn namespace_object(attributes: &Attributes<'_>) -> Result<Json, StatusError> {
    let name = namespace_of(attributes);
    let row = &attributes.ctx.resource;
    if name.is_empty() || (row.group.is_empty() && row.plural == "namespaces") {
        return Ok(Json::Null);
    }
    let found = attributes.registry.find::<Namespace>("", name).await?;
    let mut tree = found.map_or(Json::Null, |namespace| namespace.to_value());
    if let Some(meta) = tree.get_mut("metadata").and_then(Json::as_object_mut) {
        meta.remove("managedFields");
        meta.remove("ownerReferences");
    }
    Ok(tree)
}

/// Match conditions, which must all be true.
pub(crate) struct Conditions(Vec<Expression>);

impl Conditions {
    pub fn new(all: Option<&[MatchCondition]>) -> Self {
        Self(all.unwrap_or_default().iter().map(|one| Expression::new(&one.expression)).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One condition that is false decides; errors count only if none is false.
    pub fn hold(&self, environment: &Environment<'_>) -> Result<bool, String> {
        let mut budget = Budget::new(CONDITIONS_COST);
        let mut errors = vec![];
        for condition in &self.0 {
            match environment.evaluate(condition, &mut budget) {
                Ok(value) if value.as_bool() == Some(false) => return Ok(false),
                Ok(_) => {}
                Err(why) => errors.push(why),
            }
        }
        crate::aggregate(errors).map_or(Ok(true), Err)
    }
}
