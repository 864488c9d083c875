//! The admission chain: plugins that may change an object (`admit`), then plugins that may refuse
//! it (`validate`). The plugins live in crate `admission`; their table's order is the order here.

use async_trait::async_trait;
use machinery::Object;
use serde_json::Value;

use crate::request::{Key, RequestContext};
use crate::{Registry, StatusError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    /// exec, attach, portforward, proxy.
    Connect,
}

/// What a plugin sees of a request. Upstream: `admission.Attributes`.
pub struct Attributes<'a> {
    pub ctx: &'a RequestContext,
    pub registry: &'a Registry,
    pub operation: Operation,
    pub key: &'a Key,
    /// The state to be, `None` for deletes. For Create-subresources (eviction, binding) the body.
    pub object: Option<&'a mut Box<dyn Object>>,
    /// The state that is, `None` for creates.
    pub old: Option<&'a dyn Object>,
    /// CreateOptions, UpdateOptions, PatchOptions or DeleteOptions as a tree.
    pub options: &'a Value,
}

impl Attributes<'_> {
    /// Is it this built-in resource itself (no subresource)?
    pub fn is_resource(&self, group: &str, resource: &str) -> bool {
        let row = &self.ctx.resource;
        self.ctx.subresource.is_empty() && row.group == group && row.plural == resource
    }
}

#[async_trait]
pub trait Plugin: Send + Sync {
    fn name(&self) -> &'static str;

    fn handles(&self, operation: Operation) -> bool;

    async fn admit(&self, _attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        Ok(())
    }

    async fn validate(&self, _attributes: &Attributes<'_>) -> Result<(), StatusError> {
        Ok(())
    }
}

/// The plugins that are on, in order.
#[derive(Default)]
pub struct Chain(pub Vec<Box<dyn Plugin>>);

impl Chain {
    pub async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let operation = attributes.operation;
        for plugin in self.0.iter().filter(|plugin| plugin.handles(operation)) {
            plugin.admit(attributes).await?;
        }
        Ok(())
    }

    pub async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        for plugin in self.0.iter().filter(|plugin| plugin.handles(attributes.operation)) {
            plugin.validate(attributes).await?;
        }
        Ok(())
    }
}
