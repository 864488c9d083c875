//! Requests to the registry: reads, writes, and their results.

use std::time::Duration;

use bytes::Bytes;
use machinery::Object;
use machinery::patch::PatchKind;
use machinery::selector::Selector;

use crate::StatusError;
use crate::stored::Stored;

/// The options of list and watch. Upstream: `metainternalversion.ListOptions`.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    pub labels: Selector,
    pub fields: Selector,
    pub resource_version: Option<String>,
    pub resource_version_match: Option<String>,
    /// 0 for all.
    pub limit: usize,
    pub continue_token: Option<String>,
    pub timeout: Option<Duration>,
    pub allow_bookmarks: bool,
    pub send_initial_events: Option<bool>,
}

/// The change of a write. This is the only difference between create, update, patch, apply, delete, status,
/// scale, bind and evict.
pub enum Intent {
    Create {
        object: Box<dyn Object>,
    },
    /// The whole object, or the whole view of a subresource.
    Update {
        object: Box<dyn Object>,
    },
    /// `body` is JSON.
    Patch {
        kind: PatchKind,
        body: Bytes,
    },
    /// A change that the server itself computes, in the stored version: binding, eviction, allocation. It may
    /// run several times, each time on the current state.
    Modify(Modify),
    Delete {
        options: DeleteOptions,
    },
}

pub type Modify = Box<dyn Fn(&mut dyn Object) -> Result<(), StatusError> + Send + Sync>;

#[derive(Clone, Debug, Default)]
pub struct DeleteOptions {
    pub grace_period_seconds: Option<i64>,
    /// Orphan, Background or Foreground.
    pub propagation_policy: Option<String>,
    pub orphan_dependents: Option<bool>,
    pub precondition_uid: Option<String>,
    pub precondition_resource_version: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Created,
    Updated,
    /// Nothing changed, so nothing was written.
    Unchanged,
    /// Removed; the object is its last state.
    Deleted,
    /// Being deleted: finalizers or a grace period still keep it.
    Deleting,
}

pub struct Written {
    pub object: Stored,
    pub outcome: Outcome,
}
