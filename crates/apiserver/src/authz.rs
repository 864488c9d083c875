//! The interface for authorization: crate `auth` has authorizers, which run in order.

use async_trait::async_trait;

pub use crate::filters::authorization::{decide, forbidden};
use crate::request::{RequestInfo, UserInfo};

/// The facts of a decision. Upstream: `authorizer.Attributes`.
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

    /// A user's rules in a namespace, for SelfSubjectRulesReview.
    async fn rules(&self, _user: &UserInfo, _namespace: &str) -> Vec<PolicyRule> {
        vec![]
    }

    /// Why [`rules`](Self::rules) is incomplete for this user, if it is.
    async fn unresolved(&self, _user: &UserInfo, _namespace: &str) -> Option<String> {
        None
    }
}

/// The fields of an RBAC rule that reviews report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyRule {
    pub verbs: Vec<String>,
    pub api_groups: Vec<String>,
    pub resources: Vec<String>,
    pub resource_names: Vec<String>,
    pub non_resource_urls: Vec<String>,
}
