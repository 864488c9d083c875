//! One request to a resource, with everything that its verb needs.

use std::sync::Arc;

use http::header::{CONTENT_TYPE, USER_AGENT};
use http::request::Parts;
use machinery::object::Codec;
use machinery::protobuf::Descriptors;
use machinery::status::Reason;
use machinery::{Object, StatusError};
use transport::ConnectionInfo;

use crate::audit::Trail;
use crate::authn::LocalIdentity;
use crate::authz::{Attributes, Decision, decide, forbidden};
use crate::codec::decode::{BodyFormat, Wanted, body_format};
use crate::codec::negotiate::{Messages, Offer, Speaks, choose, negotiate};
use crate::codec::protobuf::Protobuf;
use crate::codec::table::TableOptions;
use crate::codec::{Accept, cbor};
use crate::query::Query;
use crate::registry::{Registry, local};
use crate::request::{Key, MayCreate, RequestContext, RequestInfo, UserInfo};
use crate::resource::{Behaviour, Resource, ResourceTable};
use crate::schemas::SchemaSource;
use crate::shared::Shared;

pub(crate) struct Call {
    pub shared: Arc<Shared>,
    pub info: Arc<RequestInfo>,
    pub row: Arc<Resource>,
    pub table: Arc<ResourceTable>,
    pub parts: Parts,
    pub query: Query,
    pub accept: Accept,
    pub ctx: RequestContext,
}

impl Call {
    pub fn new(
        shared: &Arc<Shared>,
        info: &Arc<RequestInfo>,
        user: UserInfo,
        row: Arc<Resource>,
        table: Arc<ResourceTable>,
        parts: Parts,
    ) -> Result<Self, StatusError> {
        let query = Query::of(&parts.uri);
        let is_list = matches!(info.verb.as_str(), "list" | "watch" | "deletecollection");
        let is_stream = matches!(
            info.subresource.as_str(),
            "log" | "proxy" | "exec" | "attach" | "portforward"
        );
        let is_answer = match row.subresource(&info.subresource) {
            Some(sub) => matches!(sub.behaviour, Behaviour::Create(_)),
            None => !row.is_stored() && info.verb == "create",
        };
        let offer = match is_list && info.verb != "deletecollection" {
            true => Offer::List,
            false if is_answer => Offer::Answer,
            false => Offer::Object,
        };
        let protobuf = match shared.options.protobuf.map(Protobuf) {
            None => Messages::None,
            Some(protobuf) if !row.has_message() => Messages::Metadata(protobuf),
            Some(protobuf) => Messages::All(protobuf),
        };
        let speaks = Speaks { protobuf, cbor: cbor::is_served() };
        // Streams have other forms of answers.
        let accept = if is_stream {
            Accept::JSON
        } else if row.custom {
            choose(&parts.headers, &query, offer, speaks)?
        } else {
            negotiate(&parts.headers, &query, offer, speaks)?
        };
        let mut ctx = RequestContext::new(user, row.clone(), &info.subresource);
        ctx.field_manager = agent_name(&parts);
        let connection = parts.extensions.get::<ConnectionInfo>();
        let remote = connection.and_then(|info| info.remote);
        ctx.remote = remote.map(|remote| remote.ip().to_canonical());
        let (shared, info) = (shared.clone(), info.clone());
        if matches!(info.verb.as_str(), "update" | "patch") {
            ctx.may_create = Some(may_create(&shared, &info, &ctx.user));
        }
        Ok(Self { shared, info, row, table, parts, query, accept, ctx })
    }

    pub fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// The namespace of the resource's objects; empty for cluster-scoped resources, also for a Namespace,
    /// whose path contains its own name as the namespace.
    pub fn namespace(&self) -> &str {
        if self.row.namespaced { &self.info.namespace } else { "" }
    }

    /// Whether the client is of this process, can take objects without their encoding, and they are kept as it
    /// wants them.
    pub fn takes_objects(&self) -> bool {
        let extensions = &self.parts.extensions;
        extensions.get::<LocalIdentity>().is_some()
            && extensions.get::<transport::local::Wanted>().is_some()
            && self.query.first("continue").is_none()
            && local::is_shared(&self.row)
    }

    pub fn key(&self) -> Key {
        Key::new(self.namespace(), self.info.name.as_str())
    }

    pub fn table_options(&self) -> Result<TableOptions, StatusError> {
        TableOptions::parse(&self.query)
    }

    /// For the audit log: the object of the request, with its defaults.
    pub fn note_object(&self, object: &dyn Object, codec: &dyn Codec) {
        let Some(trail) = Trail::of(&self.parts) else { return };
        trail.request_object(object, || {
            let mut whole = object.boxed_clone();
            if self.row.conversion.is_none() && self.info.subresource.is_empty() {
                self.row.strategy.default(&mut *whole);
            }
            codec.settle(whole.encode())
        });
    }

    /// For the audit log: a patch or options, as JSON.
    pub fn note_json(&self, json: &[u8]) {
        if let Some(trail) = Trail::of(&self.parts) {
            trail.request_json(json);
        }
    }

    pub fn content_type(&self) -> Option<&str> {
        // Invalid text counts as an unknown type, not as a missing one.
        self.parts.headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap_or("?"))
    }

    pub fn body_format(&self) -> Result<BodyFormat, StatusError> {
        let protobuf = self.shared.options.protobuf.filter(|_| self.row.has_message());
        self.format(protobuf)
    }

    /// The format of a body with options, which custom resources have too.
    pub fn options_format(&self) -> Result<BodyFormat, StatusError> {
        self.format(self.shared.options.protobuf)
    }

    fn format(
        &self,
        protobuf: Option<fn() -> &'static Descriptors>,
    ) -> Result<BodyFormat, StatusError> {
        body_format(self.content_type(), protobuf.map(Protobuf)).ok_or_else(|| {
            unsupported_media_type(&cbor::listed(
                cbor::is_served(),
                "application/json, application/yaml, application/vnd.kubernetes.protobuf",
                cbor::MEDIA_TYPE,
            ))
        })
    }

    /// What explains why a value does not fit.
    pub fn schemas(&self) -> &dyn SchemaSource {
        self.shared.openapi.schemas()
    }

    /// The resource's own kind.
    pub fn wanted(&self) -> Wanted<'_> {
        Wanted {
            group: &self.row.group,
            version: &self.row.version,
            kind: &self.row.kind,
            codec: &*self.row.codec,
            table: &self.table,
            schemas: self.schemas(),
        }
    }

    /// Sets the object's namespace from the URL. Upstream: `EnsureObjectNamespaceMatchesRequestNamespace`.
    pub fn place(&self, object: &mut dyn Object) -> Result<(), StatusError> {
        let wanted = self.namespace();
        let given = object.namespace();
        if !given.is_empty() && !wanted.is_empty() && given != wanted {
            return Err(StatusError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        object.meta_mut().namespace = (!wanted.is_empty()).then(|| wanted.to_owned());
        Ok(())
    }

    /// Checks that the object of a PUT has the name in the URL.
    pub fn check_name(&self, object: &dyn Object) -> Result<(), StatusError> {
        let wanted = &self.info.name;
        match object.name() {
            "" => Err(StatusError::bad_request(format!(
                "the name of the object ({wanted} based on URL) was undeterminable: name must be provided"
            ))),
            name if name == wanted => Ok(()),
            name => Err(StatusError::bad_request(format!(
                "the name of the object ({name}) does not match the name on the URL ({wanted})"
            ))),
        }
    }
}

pub(crate) fn unsupported_media_type(accepted: &str) -> StatusError {
    let message = format!(
        "the body of the request was in an unknown format - accepted media types include: {accepted}"
    );
    StatusError::new(Reason::UnsupportedMediaType, message).without_details()
}

/// The check for `create` of the object that a PUT or a patch names. Upstream: `withAuthorization`.
fn may_create(shared: &Arc<Shared>, info: &RequestInfo, user: &UserInfo) -> MayCreate {
    let request = RequestInfo { verb: "create".into(), ..info.clone() };
    let asked = Arc::new((shared.clone(), Attributes { user: user.clone(), request }));
    Arc::new(move || {
        let asked = asked.clone();
        Box::pin(async move {
            let (shared, attributes) = &*asked;
            match decide(&shared.authorizers, attributes).await {
                Decision::Allow { .. } => Ok(()),
                Decision::Deny { reason } | Decision::NoOpinion { reason } => {
                    Err(forbidden(attributes, &reason))
                }
            }
        })
    })
}

/// The first part of the User-Agent: the field manager, if the query names none.
fn agent_name(parts: &Parts) -> String {
    const LONGEST: usize = 128;
    let agent =
        parts.headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    let name = agent.split('/').next().unwrap_or_default();
    let mut name: String = name.chars().filter(|c| !c.is_control()).collect();
    name.truncate(name.floor_char_boundary(LONGEST));
    if name.is_empty() { "unknown".into() } else { name }
}
