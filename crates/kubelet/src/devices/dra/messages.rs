//! The messages of DRA's kubelet plugin API, v1; those of v1beta1 are equal.

use std::collections::BTreeMap;

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct Claim {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// The request of both calls.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// By the claims' uids.
#[derive(Clone, PartialEq, Message)]
pub struct PrepareAnswer {
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, Prepared>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Prepared {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Device {
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    #[prost(string, tag = "2")]
    pub pool_name: String,
    #[prost(string, tag = "3")]
    pub device_name: String,
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct UnprepareAnswer {
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, Unprepared>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Unprepared {
    #[prost(string, tag = "1")]
    pub error: String,
}
