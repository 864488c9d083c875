//! ValidatingAdmissionWebhook: calls all webhooks concurrently; the first refusal counts.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::Authorizer;
use apiserver::registry::Compiled;
use async_trait::async_trait;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;

use super::call::Clients;
use super::hooks::{self, Hook};
use super::{Failure, ask, failed};
use crate::Row;
use crate::matching::is_exempt;

/// An audit annotation.
const FAILED_OPEN: &str = "failed-open.validating.webhook.admission.k8s.io/";

pub(crate) const ROW: Row = Row::enabled("ValidatingAdmissionWebhook", |options| {
    Ok(Box::new(ValidatingWebhooks::new(options.authorizer.clone())))
});

pub(crate) struct ValidatingWebhooks {
    hooks: Compiled<ValidatingWebhookConfiguration, Vec<Hook>>,
    clients: Clients,
    /// For match conditions.
    authorizer: Option<Arc<dyn Authorizer>>,
}

impl ValidatingWebhooks {
    pub fn new(authorizer: Option<Arc<dyn Authorizer>>) -> Self {
        Self { hooks: Compiled::new(hooks::validating), clients: Clients::default(), authorizer }
    }
}

#[async_trait]
impl Plugin for ValidatingWebhooks {
    fn name(&self) -> &'static str {
        "ValidatingAdmissionWebhook"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if is_exempt(attributes) {
            return Ok(());
        }
        let hooks = self.hooks.get(attributes.registry).await?;
        let mut matched = vec![];
        for hook in hooks.iter() {
            let Some(row) = hook.criteria.matched(attributes).await? else { continue };
            if crate::conditions::hold(hook, attributes, &row, self.authorizer.as_ref()).await? {
                matched.push((hook, row));
            }
        }
        let calls = matched.iter().enumerate().map(async |(index, (hook, row))| {
            match ask(&self.clients, attributes, hook, row, false).await {
                Ok(_) => Ok(()),
                Err(Failure::Refused(error)) => Err(error),
                Err(Failure::Calling(why)) if hook.fails_open => {
                    tracing::warn!(
                        webhook = hook.name,
                        why,
                        "failed calling webhook, failing open"
                    );
                    let key = format!("{FAILED_OPEN}round_0_index_{index}");
                    attributes.ctx.annotate(key, hook.name.as_str());
                    Ok(())
                }
                Err(Failure::Calling(why)) => Err(failed(hook, &why)),
            }
        });
        futures::future::join_all(calls).await.into_iter().collect()
    }
}
