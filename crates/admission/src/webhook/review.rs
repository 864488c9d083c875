//! AdmissionReview, version v1 (v1beta1 differs in its name and in the required fields of answers): the
//! request to a webhook, and the parsing of its answer.

use std::collections::BTreeMap;

use apiserver::admission::Attributes;
use apiserver::resource::Resource;
use base64::Engine;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::matching::{kind_of, namespace_of};

const V1: &str = "admission.k8s.io/v1";
const V1BETA1: &str = "admission.k8s.io/v1beta1";
const JSON_PATCH: &str = "JSONPatch";

/// A request, and the fields that its answer must repeat.
pub(super) struct Review {
    uid: String,
    api_version: &'static str,
    pub body: Bytes,
}

/// The content of an answer.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub allowed: bool,
    /// A Status.
    pub result: Option<Value>,
    /// JSON Patch; `None` for no change.
    pub patch: Option<Vec<u8>>,
    pub warnings: Vec<String>,
    pub annotations: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Answer {
    api_version: String,
    kind: String,
    response: Option<Response>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Response {
    uid: String,
    allowed: bool,
    status: Option<Value>,
    patch: Option<String>,
    patch_type: Option<String>,
    audit_annotations: Option<BTreeMap<String, String>>,
    warnings: Option<Vec<String>>,
}

impl Review {
    /// `object` and `old` are in `row`'s version; null if absent.
    pub fn new(
        attributes: &Attributes<'_>,
        versions: &[String],
        row: &Resource,
        object: Value,
        old: Value,
    ) -> Result<Self, &'static str> {
        let known = versions.iter().find_map(|version| match version.as_str() {
            "v1" => Some(V1),
            "v1beta1" => Some(V1BETA1),
            _ => None,
        });
        let api_version =
            known.ok_or("webhook does not accept known AdmissionReview versions (v1, v1beta1)")?;
        let uid = base::rng::uuid();
        let mut request = request_of(attributes, &uid, row);
        request["object"] = object;
        request["oldObject"] = old;
        let review =
            json!({"kind": "AdmissionReview", "apiVersion": api_version, "request": request});
        Ok(Self { uid, api_version, body: review.to_string().into() })
    }

    /// Upstream: `VerifyAdmissionResponse`.
    pub fn verdict(&self, is_mutating: bool, body: &[u8]) -> Result<Verdict, String> {
        let answer: Answer = serde_json::from_slice(body).map_err(|error| {
            format!("failed to call webhook: couldn't get version/kind; json parse error: {error}")
        })?;
        let invalid = |why: String| Err(format!("received invalid webhook response: {why}"));
        let Some(response) = answer.response else {
            return invalid("webhook response was absent".into());
        };
        let has_patch = response.patch.as_deref().is_some_and(|patch| !patch.is_empty());
        if self.api_version == V1 {
            if response.uid != self.uid {
                return invalid(format!(
                    "expected response.uid={:?}, got {:?}",
                    self.uid, response.uid
                ));
            }
            if (answer.api_version.as_str(), answer.kind.as_str()) != (V1, "AdmissionReview") {
                let got = if answer.api_version.is_empty() { "/" } else { &*answer.api_version };
                return invalid(format!(
                    "expected webhook response of {V1}, Kind=AdmissionReview, got {got}, Kind={}",
                    answer.kind
                ));
            }
            if let Some(why) = patch_mistake(is_mutating, has_patch, response.patch_type.as_deref())
            {
                return invalid(why);
            }
        }
        let patch = match response.patch.filter(|_| has_patch && is_mutating) {
            Some(text) => Some(decoded_patch(&text)?),
            None => None,
        };
        Ok(Verdict {
            allowed: response.allowed,
            result: response.status,
            patch,
            warnings: response.warnings.unwrap_or_default(),
            annotations: response.audit_annotations.unwrap_or_default(),
        })
    }
}

fn decoded_patch(text: &str) -> Result<Vec<u8>, String> {
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .map_err(|error| format!("failed to call webhook: illegal base64 data: {error}"))
}

fn patch_mistake(is_mutating: bool, has_patch: bool, patch_type: Option<&str>) -> Option<String> {
    let why = match (is_mutating, has_patch, patch_type) {
        (true, true, None) => "webhook returned response.patch but not response.patchType",
        (true, false, Some(_)) => "webhook returned response.patchType but not response.patch",
        (true, true, Some("")) => "webhook returned invalid response.patchType of \"\"",
        (true, true, Some(kind)) if kind != JSON_PATCH => {
            return Some(format!("unsupported patch type {kind:?}"));
        }
        (false, true, _) => "validating webhook may not return response.patch",
        (false, _, Some(_)) => "validating webhook may not return response.patchType",
        _ => return None,
    };
    Some(why.into())
}

/// `AdmissionRequest`, without the objects.
pub(crate) fn request_of(attributes: &Attributes<'_>, uid: &str, row: &Resource) -> Value {
    let ctx = attributes.ctx;
    let subresource = ctx.subresource.as_str();
    let kind = |row: &Resource| {
        let (group, version, kind) = kind_of(row, subresource);
        json!({"group": group, "version": version, "kind": kind})
    };
    let resource = |row: &Resource| json!({"group": row.group, "version": row.version, "resource": row.plural});
    let mut request = json!({
        "uid": uid,
        "kind": kind(row),
        "resource": resource(row),
        "requestKind": kind(&ctx.resource),
        "requestResource": resource(&ctx.resource),
        "operation": attributes.operation.as_str(),
        "userInfo": user_of(attributes),
        "dryRun": ctx.dry_run,
        "options": attributes.options,
    });
    let mut put = |name: &str, text: &str| {
        if !text.is_empty() {
            request[name] = text.into();
        }
    };
    put("subResource", subresource);
    put("requestSubResource", subresource);
    put("namespace", namespace_of(attributes));
    put("name", &attributes.key.name);
    request
}

pub(crate) fn user_of(attributes: &Attributes<'_>) -> Value {
    let user = &attributes.ctx.user;
    let mut info = json!({});
    if !user.name.is_empty() {
        info["username"] = user.name.clone().into();
    }
    if !user.uid.is_empty() {
        info["uid"] = user.uid.clone().into();
    }
    if !user.groups.is_empty() {
        info["groups"] = user.groups.clone().into();
    }
    if !user.extra.is_empty() {
        info["extra"] = json!(user.extra);
    }
    info
}
