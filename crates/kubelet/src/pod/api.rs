//! The pods of this node in the API.

use client::{Client, Informer};
use k8s_openapi::api::core::v1::Pod;

pub struct PodApi {
    pub client: Client,
    pub pods: Informer<Pod>,
}
