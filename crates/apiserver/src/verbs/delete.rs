//! `DELETE` of an object, and of a collection.

use std::borrow::Cow;

use http::{Response, StatusCode};
use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::body;
use super::options::{check_dry_run, finish};
use super::{Call, list_options};
use crate::codec::decode::{self, BodyFormat};
use crate::codec::explain::Reader;
use crate::codec::{self, cbor, gojson};
use crate::query::Query;
use crate::registry::{DeleteOptions, Intent, Outcome, Stored};
use crate::resource::Body;
use crate::schemas::SchemaSource;

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
struct Kind {
    kind: Option<String>,
    api_version: Option<String>,
}

/// Made of a map: serde would accept an array for a struct.
#[derive(Default, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
struct Preconditions {
    uid: Option<String>,
    resource_version: Option<String>,
}

impl TryFrom<Map<String, Value>> for Preconditions {
    type Error = &'static str;

    fn try_from(mut map: Map<String, Value>) -> Result<Self, Self::Error> {
        let mut text = |name| match map.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err("a precondition is a string"),
        };
        Ok(Self { uid: text("uid")?, resource_version: text("resourceVersion")? })
    }
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
        from_json(&json, call.shared.openapi.schemas())?
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

/// Kinds of the options' own version that are no options for a delete.
const OTHERS: &[&str] = &[
    "APIGroup",
    "APIGroupList",
    "APIResourceList",
    "APIVersions",
    "CreateOptions",
    "GetOptions",
    "ListOptions",
    "PatchOptions",
    "Status",
    "UpdateOptions",
    "WatchEvent",
];

/// The name of upstream's scheme, which errors show.
const SCHEME: &str = "pkg/apis/meta/internalversion/scheme/register.go:27";

fn from_json(json: &[u8], schemas: &dyn SchemaSource) -> Result<Given, StatusError> {
    const DEFINITION: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
    let refused = |why: String| Err(StatusError::bad_request(why));
    if json.trim_ascii() == b"null" {
        return Ok(Given::default());
    }
    let is_object = json.trim_ascii_start().first() == Some(&b'{');
    let kind = serde_json::from_slice::<Kind>(json).ok().filter(|_| is_object);
    let Some(Kind { kind, api_version }) = kind else {
        if let Err(why) = gojson::check(json) {
            return refused(format!("couldn't get version/kind; json parse error: {why}"));
        }
        return refused(decode::type_meta_error(Reader::Json, json));
    };
    match kind.as_deref().unwrap_or_default() {
        "" | "DeleteOptions" => {}
        other if OTHERS.contains(&other) => {
            let text = format!("converting (v1.{other}) to (v1.DeleteOptions): unknown conversion");
            return refused(text);
        }
        other => {
            let version = api_version.filter(|version| !version.is_empty());
            let version = version.unwrap_or_else(|| "v1".into());
            return refused(format!(
                "no kind {other:?} is registered for version {version:?} in scheme {SCHEME:?}"
            ));
        }
    }
    serde_json::from_slice(json)
        .or_else(|error| refused(decode::shared_misfit(json, DEFINITION, schemas, &error)))
}

fn from_query(query: &Query) -> Result<Given, StatusError> {
    let text = |name: &str| query.first(name).filter(|text| !text.is_empty());
    let grace_period_seconds = match query.first("gracePeriodSeconds") {
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
        orphan_dependents: query.optional_flag("orphanDependents"),
        propagation_policy: text("propagationPolicy").map(str::to_owned),
        dry_run: (!dry_run.is_empty()).then_some(dry_run),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schemas::NoSchemas;

    #[test]
    fn bodies_that_are_no_options_are_refused_in_upstreams_words() {
        for (body, expected) in [
            (
                r#"{"kind":"Odd","apiVersion":"v1"}"#,
                r#"no kind "Odd" is registered for version "v1" in scheme "pkg/apis/meta/internalversion/scheme/register.go:27""#,
            ),
            (
                r#"{"kind":"Status","apiVersion":"v1"}"#,
                "converting (v1.Status) to (v1.DeleteOptions): unknown conversion",
            ),
            ("{", "couldn't get version/kind; json parse error: unexpected end of JSON input"),
            (
                "5",
                r#"couldn't get version/kind; json parse error: json: cannot unmarshal number into Go value of type struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" }"#,
            ),
        ] {
            let found =
                from_json(body.as_bytes(), &NoSchemas).err().map(|error| error.message.clone());
            assert_eq!(found.as_deref(), Some(expected), "{body}");
        }
        for body in
            ["null", "{}", r#"{"unknown":1}"#, r#"{"kind":"DeleteOptions","apiVersion":"odd/v1"}"#]
        {
            assert!(from_json(body.as_bytes(), &NoSchemas).is_ok(), "{body}");
        }
    }

    #[test]
    fn an_empty_grace_period_is_no_number() {
        let error = from_query(&Query::parse("gracePeriodSeconds=")).err();
        let error = error.map(|error| error.message.clone());
        assert_eq!(error.as_deref(), Some(r#"strconv.ParseInt: parsing "": invalid syntax"#));
        let given = from_query(&Query::parse("orphanDependents=x")).expect("valid");
        assert_eq!(given.orphan_dependents, Some(true));
    }
}
