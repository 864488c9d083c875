//! ValidatingAdmissionPolicy: all policies are evaluated; the client gets the first refusal.

use std::sync::Arc;
use std::time::Duration;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::Authorizer;
use apiserver::registry::Compiled;
use async_trait::async_trait;
use base::metrics::{Buckets, Family, Timer};
use cel::{Budget, Value};
use k8s_openapi::api::admissionregistration::v1::{
    ParamKind, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use machinery::Object;
use machinery::status::Reason;
use serde_json::json;

use super::environment::{Composed, Expression, OUT_OF_BUDGET, POLICY_COST, composed};
use super::{Binding, Conditions, Environment, params};
use crate::Row;
use crate::matching::{Criteria, is_exempt};

/// The maximum length of a message from an expression.
const LONGEST_MESSAGE: usize = 5 << 10;
const LONGEST_ANNOTATION: usize = 10 << 10;
const AUDIT_KEY: &str = "validation.policy.admission.k8s.io/validation_failure";

struct Policy {
    name: String,
    criteria: Result<Criteria, String>,
    conditions: Conditions,
    variables: Vec<Composed>,
    validations: Vec<Validation>,
    annotations: Vec<(String, Expression)>,
    params: Option<ParamKind>,
    fails_open: bool,
}

struct Validation {
    expression: Expression,
    message: String,
    message_expression: Option<Expression>,
    reason: Reason,
}

/// A failed validation.
struct Refusal {
    message: String,
    reason: Reason,
    /// The index in the policy's validations.
    index: usize,
    /// The metrics' name of the error, if the expression failed.
    error: &'static str,
    took: Duration,
}

const CHECK_LABELS: &[&str] = &["enforcement_action", "error_type", "policy", "policy_binding"];
static CHECKS: Family = Family::counter(
    "apiserver_validating_admission_policy_check_total",
    "[BETA] Validation admission policy check total, labeled by policy and further identified by binding and enforcement action taken.",
    CHECK_LABELS,
);
static CHECK_SECONDS: Family = Family::histogram(
    "apiserver_validating_admission_policy_check_duration_seconds",
    "[BETA] Validation admission latency for individual validation expressions in seconds, labeled by policy and further including binding and enforcement action taken.",
    CHECK_LABELS,
    Buckets::Listed(&[0.000_000_5, 0.001, 0.01, 0.1, 1.0]),
);

/// Writes the families of policies, and of their language. Refusals are counted by the action that was taken;
/// upstream also counts errors that a policy ignores.
pub fn encode_metrics(out: &mut String) {
    base::metrics::encode(&[&CHECKS, &CHECK_SECONDS], out);
    cel::encode_metrics(out);
}

pub(crate) const ROW: Row = Row::enabled("ValidatingAdmissionPolicy", |options| {
    Ok(Box::new(ValidatingPolicies::new(options.authorizer.clone())))
});

pub(crate) struct ValidatingPolicies {
    policies: Compiled<ValidatingAdmissionPolicy, Vec<Policy>>,
    bindings: Compiled<ValidatingAdmissionPolicyBinding, Vec<Binding>>,
    authorizer: Option<Arc<dyn Authorizer>>,
}

impl ValidatingPolicies {
    pub fn new(authorizer: Option<Arc<dyn Authorizer>>) -> Self {
        let (policies, bindings) = (Compiled::new(compiled), Compiled::new(bound));
        Self { policies, bindings, authorizer }
    }

    /// Evaluates one policy for all its bindings.
    async fn ask(
        &self,
        attributes: &Attributes<'_>,
        policy: &Policy,
        bindings: &[&Binding],
    ) -> Result<(), StatusError> {
        let criteria = match &policy.criteria {
            Ok(criteria) => criteria.matched(attributes).await.map_err(|error| error.to_string()),
            Err(why) => Err(why.clone()),
        };
        let row = match criteria {
            Ok(Some(row)) => row,
            Ok(None) => return Ok(()),
            Err(_) if policy.fails_open => return Ok(()),
            Err(why) => {
                let why = format!("failed to configure policy: {why}");
                return Err(denied(attributes, policy, None, &why, Reason::Invalid));
            }
        };
        let mut environment = None;
        for &binding in bindings {
            let found = match binding.matches(attributes).await {
                Ok(false) => continue,
                Ok(true) => params(attributes, policy.params.as_ref(), binding).await,
                Err(why) => Err(why),
            };
            let found = match found {
                Ok(found) => found,
                Err(_) if policy.fails_open => continue,
                Err(why) => {
                    let why = format!("failed to configure binding: {why}");
                    return Err(denied(attributes, policy, Some(binding), &why, Reason::Invalid));
                }
            };
            if environment.is_none() {
                let authorizer = self.authorizer.as_ref();
                let made =
                    Environment::new(attributes, &row, authorizer, &policy.variables).await?;
                environment = Some(made);
            }
            let Some(environment) = &mut environment else { continue };
            for one in found {
                environment.set_params(one);
                let refusals = judge(attributes, policy, environment);
                act(attributes, policy, binding, refusals)?;
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Plugin for ValidatingPolicies {
    fn name(&self) -> &'static str {
        "ValidatingAdmissionPolicy"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if is_exempt(attributes) {
            return Ok(());
        }
        let policies = self.policies.get(attributes.registry).await?;
        if policies.is_empty() {
            return Ok(());
        }
        let bindings = self.bindings.get(attributes.registry).await?;
        let mut first = Ok(());
        for policy in policies.iter() {
            let bound: Vec<&Binding> =
                bindings.iter().filter(|binding| binding.policy == policy.name).collect();
            if bound.is_empty() {
                continue;
            }
            // Later policies still warn and write audit annotations.
            first = first.and(self.ask(attributes, policy, &bound).await);
        }
        first
    }
}

fn compiled(all: &[ValidatingAdmissionPolicy]) -> Vec<Policy> {
    let policy = |policy: &ValidatingAdmissionPolicy| {
        let spec = policy.spec.clone().unwrap_or_default();
        let validation =
            |one: &k8s_openapi::api::admissionregistration::v1::Validation| Validation {
                expression: Expression::new(&one.expression),
                message: one.message.clone().unwrap_or_default().trim().to_owned(),
                message_expression: one.message_expression.as_deref().map(Expression::new),
                reason: match one.reason.as_deref() {
                    Some("Unauthorized") => Reason::Unauthorized,
                    Some("Forbidden") => Reason::Forbidden,
                    Some("RequestEntityTooLarge") => Reason::RequestEntityTooLarge,
                    _ => Reason::Invalid,
                },
            };
        let annotations = spec.audit_annotations.iter().flatten();
        Policy {
            name: policy.name().to_owned(),
            criteria: Criteria::of_policy(spec.match_constraints.as_ref())
                .map_err(|error| error.to_string()),
            conditions: Conditions::new(spec.match_conditions.as_deref()),
            variables: composed(spec.variables.as_deref()),
            validations: spec.validations.iter().flatten().map(validation).collect(),
            annotations: annotations
                .map(|one| (one.key.clone(), Expression::new(&one.value_expression)))
                .collect(),
            params: spec.param_kind,
            fails_open: spec.failure_policy.as_deref() == Some("Ignore"),
        }
    };
    all.iter().map(policy).collect()
}

fn bound(all: &[ValidatingAdmissionPolicyBinding]) -> Vec<Binding> {
    let binding = |one: &ValidatingAdmissionPolicyBinding| {
        let spec = &one.spec;
        Binding::new(
            one.name(),
            &spec.policy_name,
            spec.match_resources.as_ref(),
            spec.param_ref.as_ref(),
            &spec.validation_actions,
        )
    };
    all.iter().map(binding).collect()
}

/// The failed validations of one policy with one parameter.
fn judge(
    attributes: &Attributes<'_>,
    policy: &Policy,
    environment: &Environment<'_>,
) -> Vec<Refusal> {
    let mut timer = Timer::start();
    let failed = |message: String, index: usize, took: Duration| {
        let error = if message == OUT_OF_BUDGET { "out_of_budget" } else { "invalid_error" };
        let reason = Reason::Invalid;
        (!policy.fails_open).then_some(Refusal { message, reason, index, error, took })
    };
    match policy.conditions.hold(environment) {
        Ok(true) => {}
        Ok(false) => return vec![],
        Err(why) => return failed(why, 0, timer.elapsed()).into_iter().collect(),
    }
    let mut budget = Budget::new(POLICY_COST);
    let mut refusals = vec![];
    for (index, validation) in policy.validations.iter().enumerate() {
        timer.lap();
        let outcome = environment.evaluate(&validation.expression, &mut budget);
        let took = timer.elapsed();
        match outcome {
            Ok(value) if value.as_bool() == Some(true) => {}
            Ok(_) => {
                let message = message(validation, environment, &mut budget);
                let (reason, error) = (validation.reason, "no_error");
                refusals.push(Refusal { message, reason, index, error, took });
            }
            Err(why) => refusals.extend(failed(why, index, took)),
        }
    }
    for (key, expression) in &policy.annotations {
        match environment.evaluate(expression, &mut Budget::new(POLICY_COST)) {
            Ok(Value::String(text)) if !text.trim().is_empty() => {
                let text: String = text.trim().chars().take(LONGEST_ANNOTATION).collect();
                attributes.ctx.annotate(format!("{}/{key}", policy.name), text);
            }
            Ok(Value::String(_) | Value::Null) => {}
            Ok(other) => refusals.extend(failed(
                format!(
                    "valueExpression '{}' resulted in unsupported return type: {}. Return type must be either string or null.",
                    expression.text,
                    other.type_name()
                ),
                0,
                timer.elapsed(),
            )),
            Err(why) => refusals.extend(failed(why, 0, timer.elapsed())),
        }
    }
    refusals
}

/// The message of a failed validation: from an expression, a text, or the default.
fn message(validation: &Validation, environment: &Environment<'_>, budget: &mut Budget) -> String {
    let computed = validation.message_expression.as_ref().and_then(|expression| {
        let value = environment.evaluate(expression, budget);
        let text = value.ok()?.as_str()?.trim().to_owned();
        let fine = !text.is_empty() && text.len() <= LONGEST_MESSAGE && !text.contains('\n');
        fine.then_some(text)
    });
    let given = (!validation.message.is_empty()).then(|| validation.message.clone());
    computed
        .or(given)
        .unwrap_or_else(|| format!("failed expression: {}", validation.expression.text))
}

/// Rejects, warns or audits, by the binding's actions.
fn act(
    attributes: &Attributes<'_>,
    policy: &Policy,
    binding: &Binding,
    refusals: Vec<Refusal>,
) -> Result<(), StatusError> {
    let mut first = Ok(());
    for refusal in refusals {
        for action in &binding.actions {
            let taken = action.to_ascii_lowercase();
            let labels = [taken.as_str(), refusal.error, &policy.name, &binding.name];
            CHECKS.count(&labels);
            CHECK_SECONDS.took(&labels, refusal.took);
            match action.as_str() {
                "Deny" => {
                    first = first.and(Err(denied(
                        attributes,
                        policy,
                        Some(binding),
                        &refusal.message,
                        refusal.reason,
                    )));
                }
                "Warn" => attributes.ctx.warn(format!(
                    "Validation failed for ValidatingAdmissionPolicy '{}' with binding '{}': {}",
                    policy.name, binding.name, refusal.message
                )),
                "Audit" => {
                    let note = json!([{
                        "message": refusal.message, "policy": policy.name, "binding": binding.name,
                        "expressionIndex": refusal.index, "validationActions": binding.actions,
                    }]);
                    attributes.ctx.annotate(AUDIT_KEY, note.to_string());
                }
                _ => {}
            }
        }
    }
    first
}

fn denied(
    attributes: &Attributes<'_>,
    policy: &Policy,
    binding: Option<&Binding>,
    why: &str,
    reason: Reason,
) -> StatusError {
    let by = binding.map_or(String::new(), |binding| format!(" with binding '{}'", binding.name));
    let why = format!("ValidatingAdmissionPolicy '{}'{by} denied request: {why}", policy.name);
    let row = &attributes.ctx.resource;
    let text = attributes.forbidden(&why).message.clone();
    StatusError::new(reason, text)
        .about(&row.group, &row.plural, attributes.shown_name())
        .cause("", "", why)
}
