//! `authorizer` in expressions: `authorizer.group('apps').resource('deployments').check('create')
//! .allowed()`, `authorizer.path('/healthz').check('get')`, `authorizer.requestResource`,
//! `authorizer.serviceAccount('ns', 'name')`.
//!
//! The authorizers of this process decide from memory, without waiting; one that would have to wait is
//! treated as failed.

use std::any::Any;
use std::sync::Arc;

use apiserver::admission::Attributes;
use apiserver::authz::{self, Authorizer, Decision};
use apiserver::request::{RequestInfo, UserInfo};
use cel::{Host, Value};
use futures::FutureExt;

pub(super) const TYPE: &str = "kubernetes.authorization.Authorizer";

type Answer = Option<Result<Value, String>>;

/// A user, and the request that is built so far.
#[derive(Clone)]
struct Question {
    authorizer: Arc<dyn Authorizer>,
    user: UserInfo,
    request: RequestInfo,
    /// The resource of the admission request.
    own: Arc<RequestInfo>,
}

struct Answered(Decision);

pub(super) fn value(authorizer: Arc<dyn Authorizer>, attributes: &Attributes<'_>) -> Value {
    let row = &attributes.ctx.resource;
    let own = RequestInfo {
        is_resource: true,
        group: row.group.clone(),
        version: row.version.clone(),
        resource: row.plural.clone(),
        subresource: attributes.ctx.subresource.clone(),
        namespace: attributes.key.namespace.clone(),
        name: attributes.key.name.clone(),
        ..RequestInfo::default()
    };
    Value::host(Question {
        authorizer,
        user: attributes.ctx.user.clone(),
        request: RequestInfo::default(),
        own: Arc::new(own),
    })
}

impl Question {
    fn with(&self, change: impl FnOnce(&mut RequestInfo)) -> Answer {
        let mut next = self.clone();
        change(&mut next.request);
        Some(Ok(Value::host(next)))
    }

    fn check(&self, verb: &str) -> Answer {
        let request = RequestInfo { verb: verb.into(), ..self.request.clone() };
        let question = authz::Attributes { user: self.user.clone(), request };
        let decision = self.authorizer.authorize(&question).now_or_never();
        Some(match decision {
            Some(decision) => Ok(Value::host(Answered(decision))),
            None => Err("the authorizer did not answer immediately".into()),
        })
    }
}

impl Host for Question {
    fn type_name(&self) -> &'static str {
        TYPE
    }

    fn call(&self, method: &str, arguments: &[Value]) -> Answer {
        let text = |at: usize| arguments.get(at).and_then(Value::as_str).map(str::to_owned);
        let first = text(0);
        match (method, first) {
            ("requestResource", None) => {
                let own = (*self.own).clone();
                self.with(|request| *request = own)
            }
            ("group", Some(group)) => self.with(|request| {
                request.is_resource = true;
                request.group = group;
            }),
            ("resource", Some(resource)) => self.with(|request| {
                request.is_resource = true;
                request.version = "*".into();
                request.resource = resource;
            }),
            ("subresource", Some(subresource)) => {
                self.with(|request| request.subresource = subresource)
            }
            ("namespace", Some(namespace)) => self.with(|request| request.namespace = namespace),
            ("name", Some(name)) => self.with(|request| request.name = name),
            ("fieldSelector", Some(selector)) => {
                self.with(|request| request.field_selector = selector)
            }
            ("labelSelector", Some(_)) => Some(Ok(Value::host(self.clone()))),
            ("path", Some(path)) => self.with(|request| {
                request.is_resource = false;
                request.path = path;
            }),
            ("serviceAccount", Some(namespace)) => {
                let name = text(1)?;
                let mut next = self.clone();
                let own = format!("system:serviceaccounts:{namespace}");
                let groups = ["system:serviceaccounts", own.as_str(), "system:authenticated"];
                let user = format!("system:serviceaccount:{namespace}:{name}");
                next.user = UserInfo::new(user, &groups);
                Some(Ok(Value::host(next)))
            }
            ("check", Some(verb)) => self.check(&verb),
            _ => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Host for Answered {
    fn type_name(&self) -> &'static str {
        "kubernetes.authorization.Decision"
    }

    fn call(&self, method: &str, _: &[Value]) -> Answer {
        let (allowed, reason) = match &self.0 {
            Decision::Allow { reason } => (true, reason),
            Decision::Deny { reason } | Decision::NoOpinion { reason } => (false, reason),
        };
        let value = match method {
            "allowed" => Value::Bool(allowed),
            "reason" => Value::string(reason.as_str()),
            "errored" => Value::Bool(false),
            "error" => Value::string(""),
            _ => return None,
        };
        Some(Ok(value))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
