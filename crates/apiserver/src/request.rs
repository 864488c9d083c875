//! Who asks for what: the facts about a request that every stage behind the filters needs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use http::HeaderValue;
use machinery::StatusError;

use crate::resource::Resource;
use crate::warnings::Warnings;

/// Who a request comes from, as the authenticators found out (or impersonation decided).
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

    /// The server itself, for its own bookkeeping writes.
    pub fn apiserver() -> Self {
        Self::new("system:apiserver", &["system:masters", "system:authenticated"])
    }

    pub fn in_group(&self, group: &str) -> bool {
        self.groups.iter().any(|one| one == group)
    }
}

/// What a request asks for, parsed from method and path.
/// Upstream: `k8s.io/apiserver/pkg/endpoints/request.RequestInfo`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// False for `/healthz`, `/version`, discovery and the like.
    pub is_resource: bool,
    pub path: String,
    /// get, list, watch, create, update, patch, delete, deletecollection; for other paths the
    /// lower-case method.
    pub verb: String,
    pub group: String,
    pub version: String,
    pub namespace: String,
    pub resource: String,
    pub subresource: String,
    pub name: String,
    /// For `proxy` subresources: what follows, with its leading slash.
    pub rest: String,
    /// Of list, watch and deletecollection, as the query has it: a node may list its own pods only.
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

/// What a header says that may hold names of people: clients send those as UTF-8, as they are.
pub fn header_text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

/// One object's place: a resource's name within an (optional) namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Empty for cluster-scoped resources.
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// What travels with a request through registry, admission and strategies.
#[derive(Clone)]
pub struct RequestContext {
    pub user: UserInfo,
    pub resource: Arc<Resource>,
    /// The part behind the name, as `status`; empty for the object itself.
    pub subresource: String,
    /// `fieldManager` of the query, else the User-Agent's first part, else `unknown`.
    pub field_manager: String,
    pub dry_run: bool,
    pub field_validation: FieldValidation,
    /// The other end of the connection; none within this process. No header says otherwise.
    pub remote: Option<IpAddr>,
    /// Of a PUT or a patch: may its user create, too? Asked before either makes an object that was
    /// not there; nothing where the server writes for itself.
    pub may_create: Option<MayCreate>,
    /// Texts for `Warning:` headers, collected on the way. Guards a short list; never held across
    /// an await.
    warnings: Arc<Mutex<Warnings>>,
    /// What admission went by: a create that does not find it so is judged again.
    relied: Arc<[store::Compare]>,
    /// What authorization and admission note for the audit log. As above.
    annotations: Arc<Mutex<BTreeMap<String, String>>>,
}

pub type MayCreate = Arc<dyn Fn() -> BoxFuture<'static, Result<(), StatusError>> + Send + Sync>;

/// What to do about fields that a kind does not have, or that are given twice.
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

    /// The same request, on its way into the store.
    pub(crate) fn relying_on(&self, relied: Vec<store::Compare>) -> Self {
        Self { relied: relied.into(), ..self.clone() }
    }

    pub(crate) fn relied(&self) -> &[store::Compare] {
        &self.relied
    }

    pub fn warn(&self, text: impl Into<String>) {
        self.warnings.lock().expect("no panic while the list is held").add(text.into());
    }

    /// Notes something for the audit log; the first note under a key stays.
    pub fn annotate(&self, key: impl Into<String>, value: impl Into<String>) {
        let mut annotations = self.annotations.lock().expect("as above");
        annotations.entry(key.into()).or_insert_with(|| value.into());
    }

    pub fn annotations(&self) -> BTreeMap<String, String> {
        self.annotations.lock().expect("as above").clone()
    }

    /// The collected warnings; the list is empty afterwards.
    pub fn take_warnings(&self) -> Vec<String> {
        self.warnings.lock().expect("as above").take()
    }
}
