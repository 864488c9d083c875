//! The envelope around every object, and watch events.

use serde_json::{Map, Value};

use super::Error;
use super::descriptors::{Descriptors, MessageId};
use super::wire::{Reader, Wire, put_bytes, put_nested};

/// The first bytes of every object in protobuf.
pub const MAGIC: &[u8] = b"k8s\0";

/// An opened envelope.
#[derive(Debug, PartialEq, Eq)]
pub struct Envelope<'a> {
    pub api_version: String,
    pub kind: String,
    pub raw: &'a [u8],
}

impl<'a> Envelope<'a> {
    pub fn open(body: &'a [u8]) -> Result<Self, Error> {
        if body.is_empty() {
            return Err(Error::Empty);
        }
        let rest = body.strip_prefix(MAGIC).ok_or(Error::NoPrefix)?;
        if rest.is_empty() {
            return Err(Error::EmptyBody);
        }
        let mut envelope = Self { api_version: String::new(), kind: String::new(), raw: b"" };
        let mut reader = Reader(rest);
        while let Some((number, wire)) = reader.field()? {
            match (number, wire) {
                (1, Wire::Bytes(bytes)) => envelope.read_type(bytes)?,
                (2, Wire::Bytes(bytes)) => envelope.raw = bytes,
                _ => {}
            }
        }
        Ok(envelope)
    }

    fn read_type(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let mut reader = Reader(bytes);
        while let Some((number, wire)) = reader.field()? {
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            match (number, wire) {
                (1, Wire::Bytes(bytes)) => self.api_version = text(bytes),
                (2, Wire::Bytes(bytes)) => self.kind = text(bytes),
                _ => {}
            }
        }
        Ok(())
    }

    pub fn message(&self, table: &Descriptors) -> Result<MessageId, Error> {
        find(table, &self.api_version, &self.kind)
    }
}

fn find(table: &Descriptors, api_version: &str, kind: &str) -> Result<MessageId, Error> {
    let found = table.kind(api_version, kind);
    found.ok_or_else(|| Error::NoMessage(format!("{kind} in version {api_version:?}")))
}

/// Appends an envelope around what `write` appends.
pub(super) fn seal(
    out: &mut Vec<u8>,
    api_version: &str,
    kind: &str,
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), Error>,
) -> Result<(), Error> {
    out.extend_from_slice(MAGIC);
    put_nested(out, 1, |out| {
        put_bytes(out, 1, api_version.as_bytes());
        put_bytes(out, 2, kind.as_bytes());
        Ok(())
    })?;
    put_nested(out, 2, write)?;
    put_bytes(out, 3, b"");
    put_bytes(out, 4, b"");
    Ok(())
}

impl Descriptors {
    /// An object's tree, with `apiVersion` and `kind`, in an envelope.
    pub fn seal(&self, tree: &Value) -> Result<Vec<u8>, Error> {
        let text = |name: &str| tree.get(name).and_then(Value::as_str).unwrap_or_default();
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        let message = find(self, api_version, kind)?;
        let mut out = Vec::with_capacity(1024);
        seal(&mut out, api_version, kind, |out| self.encode(message, tree, out))?;
        Ok(out)
    }

    /// A whole body as JSON, as the same client would have sent it.
    pub fn to_json(&self, body: &[u8]) -> Result<Vec<u8>, Error> {
        Ok(Value::Object(self.unseal(body)?).to_string().into_bytes())
    }

    /// The tree of an object in an envelope, with `apiVersion` and `kind` as that says.
    pub fn unseal(&self, body: &[u8]) -> Result<Map<String, Value>, Error> {
        let envelope = Envelope::open(body)?;
        let message = envelope.message(self)?;
        let mut tree = self.decode(message, envelope.raw)?;
        tree.insert("apiVersion".into(), envelope.api_version.into());
        tree.insert("kind".into(), envelope.kind.into());
        Ok(tree)
    }
}

/// A watch event: its length, and a message of the event's type and the object in its envelope.
pub fn watch_frame(event: &str, object: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(object.len() + 32);
    out.extend_from_slice(&[0; 4]);
    put_bytes(&mut out, 1, event.as_bytes());
    let written = put_nested(&mut out, 2, |out| {
        put_bytes(out, 1, object);
        Ok(())
    });
    debug_assert!(written.is_ok(), "writing bytes does not fail");
    let length = u32::try_from(out.len() - 4).expect("an object has less than 4 GiB");
    out[..4].copy_from_slice(&length.to_be_bytes());
    out
}
