//! MutatingWebhookConfiguration: servers that change objects before they are written.

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;

use super::{API_EXTENSIONS, RULES, default_webhook, webhooks};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::at::At;

pub(crate) static KIND: Kind<MutatingWebhookConfiguration> = Kind {
    categories: API_EXTENSIONS,
    default: |configuration| {
        for hook in configuration.webhooks.iter_mut().flatten() {
            default_webhook!(&mut *hook);
            hook.reinvocation_policy.get_or_insert_with(|| "Never".into());
        }
    },
    generation: Some(|new, old| new.webhooks != old.webhooks),
    rules: Rules { create: mutating_webhooks, ..RULES },
    columns: &[
        name(),
        text(
            "Webhooks",
            "integer",
            "Webhooks indicates the number of webhooks registered in this configuration",
            |configuration| configuration.webhooks.as_ref().map_or(0, Vec::len).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

fn mutating_webhooks(at: &At<'_>) {
    webhooks(at, true);
}
