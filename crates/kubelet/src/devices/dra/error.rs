//! Errors of dynamic resource allocation: a driver does not register, or a claim is not prepared.
//!
//! The texts are upstream's: drivers and events show them.

use std::io;

use client::ErrorExt;

use crate::plugins::rpc::RpcError;

#[derive(Debug, thiserror::Error)]
pub enum DraError {
    #[error("pod {0:?}: ResourceClaim not created yet")]
    NotCreated(String),
    #[error(
        "ResourceClaim {namespace}/{claim} was not created for Pod {namespace}/{pod} (Pod is not owner)"
    )]
    NotOwner { namespace: String, claim: String, pod: String },
    #[error("pod {pod} ({uid}) is not allowed to use ResourceClaim {claim} ({claim_uid})")]
    NotReserved { pod: String, uid: String, claim: String, claim_uid: String },
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    #[error("DRA driver {0} is not registered")]
    NotRegistered(String),
    #[error("fetch ResourceClaim {claim}: {}", .error.text())]
    Fetch { claim: String, error: Box<client::Error> },
    #[error("prepare dynamic resources: {0}")]
    Prepare(Box<Self>),
    #[error("{call}: {error}")]
    Call { call: &'static str, error: RpcError },
    #[error("{call} failed for ResourceClaim {claim}: {why}")]
    Failed { call: &'static str, claim: String, why: String },
    #[error("{call} skipped {count} ResourceClaims")]
    Skipped { call: &'static str, count: usize },
    #[error("NodePrepareResources returned result for unknown claim UID {0}")]
    UnknownClaim(String),
    #[error(
        "internal error: unable to get claim info for ResourceClaim {claim} in namespace {namespace}"
    )]
    NoRecord { claim: String, namespace: String },
    #[error("checkpoint ResourceClaim state: {0}")]
    Checkpoint(io::Error),
    #[error(
        "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    OldClaim { name: String, uid: String },
    #[error("empty list of supported gRPC services (aka supported versions)")]
    NoVersions,
    #[error(
        "none of services supported by the plugin ({theirs}) are supported by the kubelet ({ours})"
    )]
    Versions { theirs: String, ours: String },
    #[error(
        "plugin validation failed with err: invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}: {why}"
    )]
    Validation { driver: String, endpoint: String, why: Box<Self> },
    #[error("plugin registration failed with err: {0}")]
    Registration(RpcError),
    #[error(
        "plugin registration failed with err: endpoint {endpoint} already registered for DRA driver plugin {driver}"
    )]
    Registered { endpoint: String, driver: String },
}
