//! Match conditions: CEL expressions that narrow down what a webhook is called for.
//!
//! Deviation: expressions are not evaluated yet. A webhook that has some counts as one whose
//! conditions cannot be evaluated, and its failure policy decides.

use apiserver::StatusError;
use apiserver::admission::Attributes;
use apiserver::resource::Resource;

use crate::webhook::Hook;

pub(crate) async fn hold(
    hook: &Hook,
    attributes: &Attributes<'_>,
    _row: &Resource,
) -> Result<bool, StatusError> {
    if hook.conditions.is_empty() {
        return Ok(true);
    }
    if hook.fails_open {
        return Ok(false);
    }
    Err(attributes.forbidden(format!(
        "webhook {:?} has match conditions, which cannot be evaluated",
        hook.name
    )))
}
