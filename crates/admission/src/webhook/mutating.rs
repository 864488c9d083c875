//! MutatingAdmissionWebhook: calls webhooks one after the other; each sees the earlier changes.
//!
//! After a change, the plugins run once more, and with them the webhooks that have
//! `reinvocationPolicy: IfNeeded` and ran before the change.

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
use crate::rounds::Rounds;

const NAME: &str = "MutatingAdmissionWebhook";
const ROUNDS: Rounds = Rounds(NAME);
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
            if !ROUNDS.calls(attributes, &hook.id) {
                continue;
            }
            let outcome = self.apply(attributes, hook, &row).await;
            let place = format!("round_{}_index_{index}", u8::from(is_again));
            let note = serde_json::json!({
                "configuration": hook.configuration, "webhook": hook.name,
                "mutated": matches!(outcome, Ok(true)),
            });
            attributes.ctx.annotate(format!("{MUTATION}{place}"), note.to_string());
            ROUNDS.called(attributes, &hook.id, matches!(outcome, Ok(true)), hook.reinvoked);
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
        ROUNDS.begin(attributes);
        self.call_all(attributes, &hooks).await?;
        ROUNDS.end(attributes);
        Ok(())
    }
}
