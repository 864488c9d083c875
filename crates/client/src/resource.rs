//! The collection of the API for a Rust type or a discovered resource.

use std::fmt;

use base::percent;
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::Api;
use machinery::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A resource of the API, as in a path: group, version, plural name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gvr {
    pub group: String,
    pub version: String,
    pub resource: String,
}

impl Gvr {
    pub fn new(group: &str, version: &str, resource: &str) -> Self {
        Self { group: group.into(), version: version.into(), resource: resource.into() }
    }

    pub fn of<T: Kind>() -> Self {
        Self::new(T::GROUP, T::VERSION, T::URL_PATH_SEGMENT)
    }

    /// `/apis/apps/v1/namespaces/default/deployments`; all namespaces (or cluster scope) for `None`.
    pub fn collection(&self, namespace: Option<&str>) -> String {
        let root = if self.group.is_empty() {
            format!("/api/{}", self.version)
        } else {
            format!("/apis/{}/{}", self.group, self.version)
        };
        match namespace {
            Some(namespace) => format!("{root}/namespaces/{namespace}/{}", self.resource),
            None => format!("{root}/{}", self.resource),
        }
    }

    /// The path of one object.
    pub fn object(&self, namespace: Option<&str>, name: &str) -> String {
        format!("{}/{}", self.collection(namespace), percent::encode(name))
    }
}

impl fmt::Display for Gvr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&machinery::status::qualified(&self.resource, &self.group))
    }
}

/// A built-in kind: each `k8s-openapi` struct that is an API object.
pub trait Kind:
    k8s_openapi::Resource
    + k8s_openapi::Metadata<Ty = ObjectMeta>
    + kube::Resource<DynamicType = ()>
    + DeserializeOwned
    + Serialize
    + Clone
    + fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// A cluster-scoped kind ignores the namespace.
    fn api(client: kube::Client, namespace: Option<&str>) -> Api<Self>;
}

/// Chooses the constructor by scope.
pub trait ScopeOf<T> {
    fn api(client: kube::Client, namespace: Option<&str>) -> Api<T>;
}

impl<T> ScopeOf<T> for NamespaceResourceScope
where
    T: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    fn api(client: kube::Client, namespace: Option<&str>) -> Api<T> {
        match namespace {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::all(client),
        }
    }
}

impl<T> ScopeOf<T> for ClusterResourceScope
where
    T: kube::Resource<DynamicType = (), Scope = ClusterResourceScope>,
{
    fn api(client: kube::Client, _namespace: Option<&str>) -> Api<T> {
        Api::all(client)
    }
}

impl<T> Kind for T
where
    T: k8s_openapi::Resource
        + k8s_openapi::Metadata<Ty = ObjectMeta>
        + kube::Resource<DynamicType = ()>
        + DeserializeOwned
        + Serialize
        + Clone
        + fmt::Debug
        + Send
        + Sync
        + 'static,
    <T as k8s_openapi::Resource>::Scope: ScopeOf<T>,
{
    fn api(client: kube::Client, namespace: Option<&str>) -> Api<Self> {
        <<T as k8s_openapi::Resource>::Scope as ScopeOf<T>>::api(client, namespace)
    }
}
