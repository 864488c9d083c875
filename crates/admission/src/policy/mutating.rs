//! MutatingAdmissionPolicy: policies change requests one after the other, by applying fields or by JSON
//! patches from their expressions.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::Authorizer;
use apiserver::registry::Compiled;
use apiserver::resource::Resource;
use async_trait::async_trait;
use cel::Budget;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, ParamKind,
};
use machinery::Object;
use machinery::patch;
use machinery::status::Reason;
use release::features::Feature;
use serde_json::Value as Json;

use super::environment::{Composed, Expression, POLICY_COST, composed};
use super::{Binding, Conditions, Environment, params};
use crate::Row;
use crate::matching::{Criteria, is_exempt, shown, take_back};
use crate::rounds::Rounds;

const NAME: &str = "MutatingAdmissionPolicy";
const ROUNDS: Rounds = Rounds(NAME);

struct Policy {
    name: String,
    criteria: Result<Criteria, String>,
    conditions: Conditions,
    variables: Vec<Composed>,
    mutations: Vec<Mutation>,
    params: Option<ParamKind>,
    fails_open: bool,
    reinvoked: bool,
}

enum Mutation {
    /// Fields to merge.
    Apply(Expression),
    /// A list of JSON patch operations.
    Patch(Expression),
}

pub(crate) const ROW: Row =
    Row::enabled(NAME, |options| Ok(Box::new(MutatingPolicies::new(options.authorizer.clone()))))
        .gated(Feature::MutatingAdmissionPolicy);

pub(crate) struct MutatingPolicies {
    policies: Compiled<MutatingAdmissionPolicy, Vec<Policy>>,
    bindings: Compiled<MutatingAdmissionPolicyBinding, Vec<Binding>>,
    authorizer: Option<Arc<dyn Authorizer>>,
}

impl MutatingPolicies {
    pub fn new(authorizer: Option<Arc<dyn Authorizer>>) -> Self {
        let (policies, bindings) = (Compiled::new(compiled), Compiled::new(bound));
        Self { policies, bindings, authorizer }
    }

    /// Runs one policy for one binding.
    async fn run(
        &self,
        attributes: &mut Attributes<'_>,
        policy: &Policy,
        binding: &Binding,
        row: &Resource,
    ) -> Result<(), String> {
        if !binding.matches(attributes).await? {
            return Ok(());
        }
        for param in params(attributes, policy.params.as_ref(), binding).await? {
            let key = format!("{}/{}/{}", policy.name, binding.name, param["metadata"]["name"]);
            let mut environment =
                Environment::new(attributes, row, self.authorizer.as_ref(), &policy.variables)
                    .await
                    .map_err(|error| error.to_string())?;
            environment.set_params(param.clone());
            if !policy.conditions.hold(&environment)? {
                continue;
            }
            drop(environment);
            if !ROUNDS.calls(attributes, &key) {
                continue;
            }
            let changed = self.mutate(attributes, policy, &param, row).await?;
            ROUNDS.called(attributes, &key, changed, policy.reinvoked);
        }
        Ok(())
    }

    async fn mutate(
        &self,
        attributes: &mut Attributes<'_>,
        policy: &Policy,
        param: &Json,
        row: &Resource,
    ) -> Result<bool, String> {
        let sub = attributes.ctx.subresource.clone();
        let mut budget = Budget::new(POLICY_COST);
        let mut any = false;
        for mutation in &policy.mutations {
            if attributes.object.is_none() {
                return Ok(false);
            }
            let text = |error: StatusError| error.to_string();
            let mut environment =
                Environment::new(attributes, row, self.authorizer.as_ref(), &policy.variables)
                    .await
                    .map_err(text)?;
            environment.set_params(param.clone());
            let (Mutation::Apply(expression) | Mutation::Patch(expression)) = mutation;
            let value = environment.evaluate(expression, &mut budget)?.to_json();
            drop(environment);
            let Some(object) = attributes.object.as_deref_mut() else { return Ok(false) };
            let before = shown(row, &sub, &**object).map_err(text)?;
            let after = match mutation {
                Mutation::Apply(_) => applied(row, &sub, &before, value)?,
                Mutation::Patch(_) => patched(&before, &value)?,
            };
            any |= after != before;
            take_back(row, &sub, after, object).map_err(text)?;
        }
        Ok(any)
    }
}

/// Merges the fields; lists merge by their keys according to the kind's schema.
fn applied(row: &Resource, sub: &str, before: &Json, fields: Json) -> Result<Json, String> {
    if !fields.is_object() {
        return Err("must evaluate to Object type".into());
    }
    let body = fields.to_string();
    let merged = match &row.schema {
        Some(schema)
            if !row.custom && row.subresource(sub).is_none_or(|sub| sub.kind.is_none()) =>
        {
            patch::strategic(before, body.as_bytes(), Some(&**schema), &row.definition)
        }
        _ => patch::merge(before, body.as_bytes()),
    };
    merged.map_err(|error| error.to_string())
}

fn patched(before: &Json, operations: &Json) -> Result<Json, String> {
    let after = patch::json(before, operations.to_string().as_bytes());
    after.map_err(|error| format!("JSON Patch: {error}"))
}

#[async_trait]
impl Plugin for MutatingPolicies {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if is_exempt(attributes) {
            return Ok(());
        }
        let policies = self.policies.get(attributes.registry).await?;
        if policies.is_empty() {
            return Ok(());
        }
        let bindings = self.bindings.get(attributes.registry).await?;
        ROUNDS.begin(attributes);
        for policy in policies.iter() {
            let matched = match &policy.criteria {
                Ok(criteria) => criteria.matched(attributes).await?,
                Err(why) if policy.fails_open => {
                    tracing::debug!(policy = policy.name, why, "skipping an invalid policy");
                    None
                }
                Err(why) => return Err(denied(attributes, policy, None, why)),
            };
            let Some(row) = matched else { continue };
            for binding in bindings.iter().filter(|binding| binding.policy == policy.name) {
                match self.run(attributes, policy, binding, &row).await {
                    Err(why) if !policy.fails_open => {
                        return Err(denied(attributes, policy, Some(binding), &why));
                    }
                    _ => {}
                }
            }
        }
        ROUNDS.end(attributes);
        Ok(())
    }
}

fn compiled(all: &[MutatingAdmissionPolicy]) -> Vec<Policy> {
    let policy = |policy: &MutatingAdmissionPolicy| {
        let spec = policy.spec.clone().unwrap_or_default();
        let mutation = |one: &k8s_openapi::api::admissionregistration::v1::Mutation| {
            let patch = one.json_patch.as_ref().and_then(|patch| patch.expression.as_deref());
            let apply = one.apply_configuration.as_ref().and_then(|one| one.expression.as_deref());
            match patch {
                Some(text) => Mutation::Patch(Expression::new(text)),
                None => Mutation::Apply(Expression::new(apply.unwrap_or_default())),
            }
        };
        Policy {
            name: policy.name().to_owned(),
            criteria: Criteria::of_policy(spec.match_constraints.as_ref())
                .map_err(|error| error.to_string()),
            conditions: Conditions::new(spec.match_conditions.as_deref()),
            variables: composed(spec.variables.as_deref()),
            mutations: spec.mutations.iter().flatten().map(mutation).collect(),
            params: spec.param_kind,
            fails_open: spec.failure_policy.as_deref() == Some("Ignore"),
            reinvoked: spec.reinvocation_policy.as_deref() == Some("IfNeeded"),
        }
    };
    all.iter().map(policy).collect()
}

fn bound(all: &[MutatingAdmissionPolicyBinding]) -> Vec<Binding> {
    let binding = |one: &MutatingAdmissionPolicyBinding| {
        let spec = one.spec.clone().unwrap_or_default();
        let policy = spec.policy_name.as_deref().unwrap_or_default();
        let (resources, params) = (spec.match_resources.as_ref(), spec.param_ref.as_ref());
        Binding::new(one.name(), policy, resources, params, &[])
    };
    all.iter().map(binding).collect()
}

fn denied(
    attributes: &Attributes<'_>,
    policy: &Policy,
    binding: Option<&Binding>,
    why: &str,
) -> StatusError {
    let by = binding.map_or(String::new(), |binding| format!(" with binding '{}'", binding.name));
    let why = format!("policy '{}'{by} denied request: {why}", policy.name);
    let row = &attributes.ctx.resource;
    let text = attributes.forbidden(&why).message.clone();
    StatusError::new(Reason::Invalid, text)
        .about(&row.group, &row.plural, attributes.shown_name())
        .cause("", "", why)
}
