//! Match conditions of webhooks: expressions that restrict which requests call them.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::Attributes;
use apiserver::authz::Authorizer;
use apiserver::resource::Resource;

use crate::policy::Environment;
use crate::webhook::Hook;

/// If the conditions cannot be evaluated, the failure policy decides: the webhook is not called, or the
/// request is rejected.
pub(crate) async fn hold(
    hook: &Hook,
    attributes: &Attributes<'_>,
    row: &Resource,
    authorizer: Option<&Arc<dyn Authorizer>>,
) -> Result<bool, StatusError> {
    if hook.conditions.is_empty() {
        return Ok(true);
    }
    let environment = Environment::new(attributes, row, authorizer, &[]).await?;
    match hook.conditions.hold(&environment) {
        Ok(holds) => Ok(holds),
        Err(_) if hook.fails_open => Ok(false),
        Err(why) => Err(attributes.forbidden(why)),
    }
}
