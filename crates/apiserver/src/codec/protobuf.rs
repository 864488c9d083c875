//! Protobuf of typed Go clients: converts bodies to JSON, and the server's JSON to messages.
//!
//! In: a function for the descriptors of the built-in kinds; this module knows no kind. Custom kinds have
//! no messages: their clients get JSON, except for metadata alone.

use machinery::StatusError;
use machinery::protobuf::{Descriptors, Envelope, Error, ListWriter, watch_frame};
use machinery::status::Reason;
use serde_json::Value;

use crate::resource::Resource;
use crate::stored::List;

pub const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";

/// Returns the descriptors, which are made at the first call.
#[derive(Clone, Copy)]
pub struct Protobuf(pub fn() -> &'static Descriptors);

// There is one set of descriptors in a server.
impl PartialEq for Protobuf {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Protobuf {}

impl std::fmt::Debug for Protobuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Protobuf")
    }
}

impl Protobuf {
    /// The object in a decoded envelope as JSON, decoded as the wanted kind. Of another kind it returns
    /// only the name.
    pub fn body(
        self,
        envelope: &Envelope<'_>,
        api_version: &str,
        kind: &str,
    ) -> Result<Vec<u8>, Error> {
        let given = |given: &str, wanted: &str| {
            if given.is_empty() { wanted.to_owned() } else { given.to_owned() }
        };
        let given = (given(&envelope.api_version, api_version), given(&envelope.kind, kind));
        let mut tree = if (given.0.as_str(), given.1.as_str()) == (api_version, kind) {
            let message = (self.0)().kind(api_version, kind);
            let message = message.ok_or_else(|| Error::NoMessage(kind.to_owned()))?;
            (self.0)().decode(message, envelope.raw)?
        } else {
            serde_json::Map::new()
        };
        tree.insert("apiVersion".into(), given.0.into());
        tree.insert("kind".into(), given.1.into());
        Ok(Value::Object(tree).to_string().into_bytes())
    }

    /// A body with options, in any group.
    pub fn options(self, body: &[u8]) -> Result<Vec<u8>, StatusError> {
        (self.0)().to_json(body).map_err(|error| StatusError::bad_request(error.to_string()))
    }

    /// An object or an error, in its envelope.
    pub fn object(self, json: &[u8]) -> Result<Vec<u8>, StatusError> {
        let tree = tree(json);
        (self.0)().seal(&tree).map_err(|error| cannot_encode(&tree, &error))
    }

    pub fn list(
        self,
        row: &Resource,
        list: List,
        metadata: &Value,
    ) -> Result<Vec<u8>, StatusError> {
        let api_version = row.api_version();
        let kind = format!("{}List", row.kind);
        let write = || {
            let mut writer = ListWriter::new((self.0)(), &api_version, &kind, metadata)?;
            for item in &list.items {
                writer.push(&tree(&item.list_item()))?;
            }
            writer.finish()
        };
        write().map_err(|error| StatusError::internal(format!("{kind}: {error}")))
    }

    pub fn watch_frame(self, event: &str, json: &[u8]) -> Result<Vec<u8>, StatusError> {
        Ok(watch_frame(event, &self.object(json)?))
    }
}

fn tree(json: &[u8]) -> Value {
    serde_json::from_slice(json).expect("the server's own JSON is JSON")
}

fn cannot_encode(tree: &Value, error: &Error) -> StatusError {
    let text = |name: &str| tree[name].as_str().unwrap_or_default();
    if !matches!(error, Error::NoMessage(_)) {
        return StatusError::internal(format!("{}: {error}", text("kind")));
    }
    let version = text("apiVersion").rsplit('/').next().unwrap_or_default();
    let message = format!(
        "object *{version}.{} does not implement the protobuf marshalling interface and cannot be encoded to a protobuf message",
        text("kind"),
    );
    StatusError::new(Reason::NotAcceptable, message).without_details()
}
