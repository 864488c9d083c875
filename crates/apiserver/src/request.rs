//! The user and the target of a request, which every stage after the filters needs.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use http::HeaderValue;
use machinery::StatusError;

use crate::resource::Resource;
use crate::warnings::Warnings;

/// The user of a request, from authentication or impersonation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserInfo {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

impl UserInfo {
    pub fn new(name: impl Into<String>, groups: &[&str]) -> Self {
        let groups = groups.iter().map(|group| (*group).to_owned()).collect();
        Self { name: name.into(), groups, ..Self::default() }
    }

    /// The server itself, for its internal writes.
    pub fn apiserver() -> Self {
        Self::new("system:apiserver", &["system:masters", "system:authenticated"])
    }

    pub fn in_group(&self, group: &str) -> bool {
        self.groups.iter().any(|one| one == group)
    }
}

/// The target of a request, parsed from method and path.
/// Upstream: `k8s.io/apiserver/pkg/endpoints/request.RequestInfo`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// False for `/healthz`, `/version`, discovery and the like.
    pub is_resource: bool,
    pub path: String,
    /// get, list, watch, create, update, patch, delete, deletecollection; for other paths the method in lower
    /// case.
    pub verb: String,
    pub group: String,
    pub version: String,
    pub namespace: String,
    pub resource: String,
    pub subresource: String,
    pub name: String,
    /// For `proxy` subresources: the rest of the path, with its leading slash.
    pub rest: String,
    /// Of list, watch and deletecollection: a node may list only its own pods.
    pub field_selector: String,
}

impl RequestInfo {
    pub fn is_read(&self) -> bool {
        matches!(self.verb.as_str(), "get" | "list" | "watch" | "head" | "options")
    }

    /// Watches, and byte streams through the server.
    pub fn is_long_running(&self) -> bool {
        const STREAMS: &[&str] = &["attach", "exec", "proxy", "log", "portforward"];
        let is_stream = self.is_resource && STREAMS.contains(&self.subresource.as_str());
        self.verb == "watch"
            || self.verb == "proxy"
            || is_stream
            || self.path.starts_with("/debug/pprof/")
    }
}

/// The text of a header that may contain people's names: clients send them as plain UTF-8.
pub fn header_text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

/// The key of an object: name and (optional) namespace within a resource. Keys have the order of their storage
/// keys, as lists do: `a-b/x` comes before `a/x`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Key {
    /// Empty for cluster-scoped resources.
    pub namespace: String,
    pub name: String,
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        if self.namespace == other.namespace {
            return self.name.cmp(&other.name);
        }
        let ended = self.namespace.bytes().chain([b'/']);
        ended.cmp(other.namespace.bytes().chain([b'/']))
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Key {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// The context of a request in registry, admission and strategies.
#[derive(Clone)]
pub struct RequestContext {
    pub user: UserInfo,
    pub resource: Arc<Resource>,
    /// The part after the name, for example `status`; empty for the object itself.
    pub subresource: String,
    /// `fieldManager` of the query, else the User-Agent's first part, else `unknown`.
    pub field_manager: String,
    pub dry_run: bool,
    pub field_validation: FieldValidation,
    /// The client's address; `None` within this process. No header overrides it.
    pub remote: Option<IpAddr>,
    /// For PUT and patch: checks whether the user may create, before a missing object is created; `None` for
    /// the server's own writes.
    pub may_create: Option<MayCreate>,
    /// Texts for `Warning:` headers. Locked for a short time; never held across an await.
    warnings: Arc<Mutex<Warnings>>,
    /// Objects that admission relied on: a create that finds them changed is admitted again.
    relied: Arc<[store::Compare]>,
    /// Annotations of authorization and admission for the audit log. Locked as above.
    annotations: Arc<Mutex<BTreeMap<String, String>>>,
}

pub type MayCreate = Arc<dyn Fn() -> BoxFuture<'static, Result<(), StatusError>> + Send + Sync>;

/// How to handle unknown and duplicate fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldValidation {
    Ignore,
    #[default]
    Warn,
    Strict,
}

impl RequestContext {
    pub fn new(user: UserInfo, resource: Arc<Resource>, subresource: &str) -> Self {
        Self {
            user,
            resource,
            subresource: subresource.into(),
            field_manager: "unknown".into(),
            dry_run: false,
            field_validation: FieldValidation::default(),
            remote: None,
            may_create: None,
            relied: Arc::default(),
            warnings: Arc::default(),
            annotations: Arc::default(),
        }
    }

    /// The same request with the conditions of its write.
    pub(crate) fn relying_on(&self, relied: Vec<store::Compare>) -> Self {
        Self { relied: relied.into(), ..self.clone() }
    }

    pub(crate) fn relied(&self) -> &[store::Compare] {
        &self.relied
    }

    pub fn warn(&self, text: impl Into<String>) {
        self.warnings.lock().expect("no panic while the list is held").add(text.into());
    }

    /// Adds an annotation to the audit log; an existing one is kept.
    pub fn annotate(&self, key: impl Into<String>, value: impl Into<String>) {
        let mut annotations = self.annotations.lock().expect("as above");
        annotations.entry(key.into()).or_insert_with(|| value.into());
    }

    pub fn annotations(&self) -> BTreeMap<String, String> {
        self.annotations.lock().expect("as above").clone()
    }

    /// Returns the collected warnings, and clears the list.
    pub fn take_warnings(&self) -> Vec<String> {
        self.warnings.lock().expect("as above").take()
    }
}
