//! May they? The seam to crate `auth`, whose authorizers run in order.

use async_trait::async_trait;

pub use crate::filters::authorization::{decide, forbidden};
use crate::request::{RequestInfo, UserInfo};

/// What is to be decided. Upstream: `authorizer.Attributes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub user: UserInfo,
    pub request: RequestInfo,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Allow { reason: String },
    Deny { reason: String },
    NoOpinion { reason: String },
}

#[async_trait]
pub trait Authorizer: Send + Sync {
    async fn authorize(&self, attributes: &Attributes) -> Decision;

    /// The rules that hold for a user in a namespace, for SelfSubjectRulesReview.
    async fn rules(&self, _user: &UserInfo, _namespace: &str) -> Vec<PolicyRule> {
        vec![]
    }

    /// Why [`rules`](Self::rules) does not tell everything that this user may do, if so.
    async fn unresolved(&self, _user: &UserInfo, _namespace: &str) -> Option<String> {
        None
    }
}

/// RBAC's rule, as far as reviews report it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyRule {
    pub verbs: Vec<String>,
    pub api_groups: Vec<String>,
    pub resources: Vec<String>,
    pub resource_names: Vec<String>,
    pub non_resource_urls: Vec<String>,
}
