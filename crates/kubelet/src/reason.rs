//! A reason with its message, as events, conditions and statuses show them.

use std::borrow::Cow;

/// `reason` is one word for programs, `message` a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Reason {
    pub reason: Cow<'static, str>,
    pub message: String,
}

impl Reason {
    pub fn new(reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}
