//! ValidatingWebhookConfiguration: servers that may refuse objects before they are written.

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;

use super::{API_EXTENSIONS, RULES, default_webhook, webhooks};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::at::At;

pub(crate) static KIND: Kind<ValidatingWebhookConfiguration> = Kind {
    categories: API_EXTENSIONS,
    default: |configuration| {
        configuration.webhooks.iter_mut().flatten().for_each(|hook| default_webhook!(hook));
    },
    generation: Some(|new, old| new.webhooks != old.webhooks),
    rules: Rules { create: validating_webhooks, ..RULES },
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

fn validating_webhooks(at: &At<'_>) {
    webhooks(at, false);
}
