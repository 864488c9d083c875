//! MutatingAdmissionWebhook: calls webhooks one after the other; each sees the earlier changes.
//!
//! After a change, the plugins run once more, and with them the webhooks that have
//! `reinvocationPolicy: IfNeeded` and ran before the change.

use std::collections::BTreeSet;
use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::Authorizer;
use apiserver::registry::Compiled;
use apiserver::resource::Resource;
use async_trait::async_trait;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use machinery::patch;

use super::call::Clients;
use super::hooks::{self, Hook};
use super::{Failure, ask, failed};
use crate::Row;
use crate::matching::{is_exempt, shown, take_back};

const NAME: &str = "MutatingAdmissionWebhook";
/// Audit annotations.
const MUTATION: &str = "mutation.webhook.admission.k8s.io/";
const FAILED_OPEN: &str = "failed-open.mutation.webhook.admission.k8s.io/";

pub(crate) const ROW: Row =
    Row::enabled(NAME, |options| Ok(Box::new(MutatingWebhooks::new(options.authorizer.clone()))));

pub(crate) struct MutatingWebhooks {
    hooks: Compiled<MutatingWebhookConfiguration, Vec<Hook>>,
    clients: Clients,
    /// For match conditions.
    authorizer: Option<Arc<dyn Authorizer>>,
}

/// The state that the first round keeps for the reinvocation. Upstream: `webhookReinvokeContext`.
#[derive(Default)]
struct Memory {
    /// The object after the webhooks' changes.
    output: Option<Vec<u8>>,
    /// Webhooks that may be reinvoked and were called since the last change.
    called: BTreeSet<String>,
    /// Webhooks to reinvoke.
    again: BTreeSet<String>,
}

impl Memory {
    fn require_again(&mut self) {
        self.again.append(&mut self.called);
    }
}

impl MutatingWebhooks {
    pub fn new(authorizer: Option<Arc<dyn Authorizer>>) -> Self {
        Self { hooks: Compiled::new(hooks::mutating), clients: Clients::default(), authorizer }
    }

    /// True if the object changed.
    async fn apply(
        &self,
        attributes: &mut Attributes<'_>,
        hook: &Hook,
        row: &Resource,
    ) -> Result<bool, Failure> {
        let verdict = ask(&self.clients, attributes, hook, row, true).await?;
        let Some(text) = verdict.patch else { return Ok(false) };
        if matches!(serde_json::from_slice::<Vec<serde_json::Value>>(&text), Ok(all) if all.is_empty())
        {
            return Ok(false);
        }
        let Some(object) = attributes.object.as_deref_mut() else {
            return Err(Failure::Refused(StatusError::internal(format!(
                "admission webhook {:?} attempted to modify the object, which is not supported for this operation",
                hook.name
            ))));
        };
        let subresource = &attributes.ctx.subresource;
        let before = shown(row, subresource, &**object).map_err(Failure::Refused)?;
        let after = patch::json(&before, &text).map_err(|error| match error {
            patch::PatchError::Malformed(why) => {
                Failure::Calling(format!("received undecodable patch in webhook response: {why}"))
            }
            patch::PatchError::Unfit(why) | patch::PatchError::Broken(why) => {
                Failure::Refused(StatusError::internal(why))
            }
        })?;
        let changed = before != after;
        take_back(row, subresource, after, object).map_err(Failure::Refused)?;
        Ok(changed)
    }

    async fn call_all(
        &self,
        attributes: &mut Attributes<'_>,
        hooks: &[Hook],
    ) -> Result<(), StatusError> {
        for (index, hook) in hooks.iter().enumerate() {
            let Some(row) = hook.criteria.matched(attributes).await? else { continue };
            if !crate::conditions::hold(hook, attributes, &row, self.authorizer.as_ref()).await? {
                continue;
            }
            let is_again = attributes.reinvocation.is_again();
            // A webhook that did not match in the first round is not called in the second.
            let memory = attributes.reinvocation.memory::<Memory>(NAME);
            if is_again && !memory.again.contains(&hook.id) {
                continue;
            }
            let outcome = self.apply(attributes, hook, &row).await;
            let place = format!("round_{}_index_{index}", u8::from(is_again));
            let note = serde_json::json!({
                "configuration": hook.configuration, "webhook": hook.name,
                "mutated": matches!(outcome, Ok(true)),
            });
            attributes.ctx.annotate(format!("{MUTATION}{place}"), note.to_string());
            if matches!(outcome, Ok(true)) {
                attributes.reinvocation.memory::<Memory>(NAME).require_again();
                attributes.reinvocation.ask();
            }
            if hook.reinvoked {
                let memory = attributes.reinvocation.memory::<Memory>(NAME);
                memory.called.insert(hook.id.clone());
            }
            match outcome {
                Ok(_) => {}
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Calling(why)) if hook.fails_open => {
                    tracing::warn!(
                        webhook = hook.name,
                        why,
                        "failed calling webhook, failing open"
                    );
                    attributes.ctx.annotate(format!("{FAILED_OPEN}{place}"), hook.name.as_str());
                }
                Err(Failure::Calling(why)) => return Err(failed(hook, &why)),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Plugin for MutatingWebhooks {
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
        let hooks = self.hooks.get(attributes.registry).await?;
        if hooks.is_empty() {
            return Ok(());
        }
        let encoded = |attributes: &Attributes<'_>| {
            attributes.object.as_deref().map(|object| object.encode())
        };
        if attributes.reinvocation.is_again() {
            let now = encoded(attributes);
            let memory = attributes.reinvocation.memory::<Memory>(NAME);
            if memory.output != now {
                memory.require_again();
            }
        }
        self.call_all(attributes, &hooks).await?;
        let now = encoded(attributes);
        attributes.reinvocation.memory::<Memory>(NAME).output = now;
        Ok(())
    }
}
