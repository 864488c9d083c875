//! Tables: objects as rows of printed cells, for `kubectl get`.
//!
//! In: stored objects, whose row defines columns and cells. Out: a `meta.k8s.io` Table as JSON.

use machinery::StatusError;
use serde_json::{Value, json};

use super::partial;
use crate::query::Query;
use crate::resource::{Column, Resource};
use crate::stored::Stored;

/// The content of a row in addition to its cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Include {
    Nothing,
    #[default]
    Metadata,
    Object,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct TableOptions {
    pub include: Include,
    pub no_headers: bool,
}

impl TableOptions {
    pub fn parse(query: &Query) -> Result<Self, StatusError> {
        let include = match query.first("includeObject") {
            None | Some("" | "Metadata") => Include::Metadata,
            Some("None") => Include::Nothing,
            Some("Object") => Include::Object,
            Some(other) => {
                return Err(StatusError::bad_request(format!(
                    "invalid option specified: includeObject: Invalid value: {other:?}: must be 'Metadata', 'Object', 'None', or empty"
                )));
            }
        };
        Ok(Self { include, no_headers: false })
    }
}

/// The Table of one object.
pub fn one(version: &str, stored: &Stored, options: &TableOptions) -> Result<Vec<u8>, StatusError> {
    // An object that was not stored has no revision.
    let metadata = match stored.revision().0 {
        0 => json!({}),
        revision => json!({ "resourceVersion": revision.to_string() }),
    };
    whole(version, stored.row(), std::slice::from_ref(stored), &metadata, options)
}

/// The Table of several objects of one kind.
pub fn whole(
    version: &str,
    row: &Resource,
    items: &[Stored],
    metadata: &Value,
    options: &TableOptions,
) -> Result<Vec<u8>, StatusError> {
    let mut out = Vec::with_capacity(4096 + items.len() * 512);
    out.extend_from_slice(br#"{"kind":"Table","apiVersion":""#);
    out.extend_from_slice(version.as_bytes());
    out.extend_from_slice(br#"","metadata":"#);
    out.extend_from_slice(metadata.to_string().as_bytes());
    out.extend_from_slice(br#","columnDefinitions":"#);
    if options.no_headers {
        out.extend_from_slice(b"null");
    } else {
        let columns: Vec<Value> = row.table.columns().iter().map(Column::definition).collect();
        out.extend_from_slice(Value::from(columns).to_string().as_bytes());
    }
    out.extend_from_slice(br#","rows":["#);
    for (index, stored) in items.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_row(&mut out, version, stored, options)?;
    }
    out.extend_from_slice(b"]}");
    Ok(out)
}

fn write_row(
    out: &mut Vec<u8>,
    version: &str,
    stored: &Stored,
    options: &TableOptions,
) -> Result<(), StatusError> {
    let object = stored.stored_object()?;
    let cells = stored.row().table.cells(&*object);
    out.extend_from_slice(br#"{"cells":"#);
    out.extend_from_slice(Value::from(cells).to_string().as_bytes());
    let conditions = stored.row().table.row_conditions(&*object);
    if !conditions.is_empty() {
        out.extend_from_slice(br#","conditions":"#);
        out.extend_from_slice(Value::from(conditions).to_string().as_bytes());
    }
    out.extend_from_slice(br#","object":"#);
    match options.include {
        Include::Nothing => out.extend_from_slice(b"null"),
        Include::Metadata => partial::write_object(out, version, stored),
        Include::Object => stored.write_to(out),
    }
    out.push(b'}');
    Ok(())
}
