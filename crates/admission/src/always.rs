//! AlwaysAdmit and AlwaysDeny, which upstream has for tests.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;

use crate::Row;

pub(crate) const ALWAYS_ADMIT: Row = Row::disabled("AlwaysAdmit", |_| Ok(Box::new(AlwaysAdmit)));

pub(crate) struct AlwaysAdmit;

#[async_trait]
impl Plugin for AlwaysAdmit {
    fn name(&self) -> &'static str {
        "AlwaysAdmit"
    }

    fn handles(&self, _: Operation) -> bool {
        false
    }
}

pub(crate) const ALWAYS_DENY: Row = Row::disabled("AlwaysDeny", |_| Ok(Box::new(AlwaysDeny)));

pub(crate) struct AlwaysDeny;

#[async_trait]
impl Plugin for AlwaysDeny {
    fn name(&self) -> &'static str {
        "AlwaysDeny"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        Err(attributes.forbidden("admission control is denying all modifications"))
    }
}
