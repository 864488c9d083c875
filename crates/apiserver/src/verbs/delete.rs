//! `DELETE` of an object, and of a collection.

use std::borrow::Cow;

use http::{Response, StatusCode};
use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body;
use super::options::{check_dry_run, finish};
use super::{Call, list_options};
use crate::codec::decode::{self, BodyFormat};
use crate::codec::{self, cbor};
use crate::query::{Query, parse_bool};
use crate::registry::{DeleteOptions, Intent, Outcome, Stored};
use crate::resource::Body;

/// `DeleteOptions` from clients. Unknown fields are ignored, as upstream.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Given {
    grace_period_seconds: Option<i64>,
    preconditions: Option<Preconditions>,
    orphan_dependents: Option<bool>,
    propagation_policy: Option<String>,
    dry_run: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Preconditions {
    uid: Option<String>,
    resource_version: Option<String>,
}

pub async fn delete(mut call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let table_options = call.table_options()?;
    let options = read(&mut call, body).await?;
    // Upstream answers 202 to orphanDependents=false as long as the object is not deleted.
    let waits = options.orphan_dependents == Some(false);
    let written = call.registry().write(&call.ctx, &call.key(), Intent::Delete { options }).await?;
    let is_gone = written.outcome == Outcome::Deleted;
    if is_gone && !call.row.settings.returns_deleted_object {
        let status = success(&call, &written.object)?;
        return Ok(codec::json(&call.accept, StatusCode::OK, status.to_string().into()));
    }
    let code = if waits && !is_gone { StatusCode::ACCEPTED } else { StatusCode::OK };
    codec::object(&call.accept, code, &written.object, &table_options)
}

pub async fn delete_collection(mut call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let table_options = call.table_options()?;
    let list_options = list_options::read(&call, list_options::For::List)?;
    let options = read(&mut call, body).await?;
    let registry = call.registry();
    let workers = call.shared.options.delete_workers;
    let list = registry
        .delete_collection(&call.ctx, call.namespace(), &list_options, &options, workers)
        .await?;
    codec::list::list(&call.accept, &call.row, list, &table_options)
}

/// The answer of a delete after which the object is gone.
fn success(call: &Call, stored: &Stored) -> Result<Value, StatusError> {
    let mut details = json!({ "name": call.info.name, "kind": call.row.plural });
    if !call.row.group.is_empty() {
        details["group"] = call.row.group.as_str().into();
    }
    let object = stored.object()?;
    if !object.uid().is_empty() {
        details["uid"] = object.uid().into();
    }
    Ok(json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
    }))
}

/// From the body if there is one, else from the query.
async fn read(call: &mut Call, body: Body) -> Result<DeleteOptions, StatusError> {
    let bytes = body::read(body).await?;
    let given = if bytes.is_empty() {
        from_query(&call.query)?
    } else {
        let json = as_json(&bytes, call.options_format()?)?;
        call.note_json(&json);
        from_json(&json)?
    };
    let dry_run = given.dry_run.unwrap_or_default();
    let mut errors = FieldErrors::default();
    let policy_path = Path::new("propagationPolicy");
    if let Some(policy) = given.propagation_policy.as_deref() {
        if given.orphan_dependents.is_some() {
            errors.invalid(
                &policy_path,
                policy,
                "orphanDependents and deletionPropagation cannot be both set",
            );
        }
        if !matches!(policy, "Foreground" | "Background" | "Orphan") {
            errors.not_supported(
                &policy_path,
                policy,
                &["Foreground", "Background", "Orphan", "nil"],
            );
        }
    }
    check_dry_run(&dry_run.iter().map(String::as_str).collect::<Vec<_>>(), &mut errors);
    finish("DeleteOptions", errors)?;
    call.ctx.dry_run = !dry_run.is_empty();
    if given.propagation_policy.is_none()
        && given.orphan_dependents.is_none()
        && let Some(text) = call.row.settings.delete_warning
    {
        call.ctx.warn(text);
    }
    let preconditions = given.preconditions.unwrap_or_default();
    Ok(DeleteOptions {
        grace_period_seconds: given.grace_period_seconds,
        propagation_policy: given.propagation_policy,
        orphan_dependents: given.orphan_dependents,
        precondition_uid: preconditions.uid,
        precondition_resource_version: preconditions.resource_version,
    })
}

fn as_json(bytes: &[u8], format: BodyFormat) -> Result<Cow<'_, [u8]>, StatusError> {
    Ok(match format {
        BodyFormat::Json => bytes.into(),
        BodyFormat::Yaml => {
            let (tree, _) = decode::yaml(bytes).map_err(StatusError::bad_request)?;
            tree.to_string().into_bytes().into()
        }
        BodyFormat::Protobuf(protobuf) => protobuf.options(bytes)?.into(),
        BodyFormat::Cbor => cbor::options(bytes)?.into(),
    })
}

fn from_json(json: &[u8]) -> Result<Given, StatusError> {
    let given: Option<Given> = serde_json::from_slice(json).map_err(|error| {
        StatusError::bad_request(format!(
            "DeleteOptions in version \"v1\" cannot be handled as a DeleteOptions: {error}"
        ))
    })?;
    Ok(given.unwrap_or_default())
}

fn from_query(query: &Query) -> Result<Given, StatusError> {
    let text = |name: &str| query.first(name).filter(|text| !text.is_empty());
    let grace_period_seconds = match text("gracePeriodSeconds") {
        None => None,
        Some(text) => Some(text.parse().map_err(|_| {
            StatusError::bad_request(format!("strconv.ParseInt: parsing {text:?}: invalid syntax"))
        })?),
    };
    let dry_run: Vec<String> = query.all("dryRun").map(str::to_owned).collect();
    let preconditions = Preconditions {
        uid: text("uid").map(str::to_owned),
        resource_version: text("resourceVersion").map(str::to_owned),
    };
    Ok(Given {
        grace_period_seconds,
        preconditions: Some(preconditions),
        orphan_dependents: text("orphanDependents").and_then(parse_bool),
        propagation_policy: text("propagationPolicy").map(str::to_owned),
        dry_run: (!dry_run.is_empty()).then_some(dry_run),
    })
}
