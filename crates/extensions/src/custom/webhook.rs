//! Conversion by webhook: a ConversionReview there, converted objects back.
//!
//! In: objects in one version, the version wanted. Out: the same objects in it, whose metadata is
//! what it was but for labels and annotations. Upstream: `apiserver/conversion/webhook_converter.go`.

use std::sync::Arc;
use std::time::Duration;

use apiserver::StatusError;
use bytes::Bytes;
use futures::future::BoxFuture;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, WebhookClientConfig,
};
use machinery::Object;
use machinery::object::Unstructured;
use serde_json::{Value, json};

/// How long a webhook may take. Upstream: 30 s.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Posts a body to where a client configuration leads. The server's own webhook client does it: its
/// connections are kept, and Services are found.
pub type Post = Arc<
    dyn Fn(WebhookClientConfig, Bytes, Duration) -> BoxFuture<'static, Result<Bytes, String>>
        + Send
        + Sync,
>;

pub struct Webhook {
    post: Post,
    client: WebhookClientConfig,
    /// The version of the review that both sides know.
    review: String,
}

impl Webhook {
    /// `None`: the CRD converts by name only.
    pub fn of(crd: &CustomResourceDefinition, post: &Post) -> Option<Self> {
        let conversion = crd.spec.conversion.as_ref()?;
        let webhook = conversion.webhook.as_ref().filter(|_| conversion.strategy == "Webhook")?;
        let known = |version: &&String| matches!(version.as_str(), "v1" | "v1beta1");
        let review = webhook.conversion_review_versions.iter().find(known);
        Some(Self {
            post: post.clone(),
            client: webhook.client_config.clone()?,
            review: review.cloned().unwrap_or_else(|| "v1".into()),
        })
    }

    /// Waits for the answer: conversions happen where bytes become objects, which is not the place
    /// to yield. Other tasks of this thread are moved to another one meanwhile.
    pub fn convert(
        &self,
        object: &Unstructured,
        wanted: &str,
    ) -> Result<Unstructured, StatusError> {
        use tokio::runtime::{Handle, RuntimeFlavor};
        let failed = |why: String| {
            let (group, kind) = (&object.api_version, &object.kind);
            StatusError::internal(format!(
                "conversion webhook for {group}, Kind={kind} failed: {why}"
            ))
        };
        let handle = Handle::try_current().map_err(StatusError::internal)?;
        if handle.runtime_flavor() == RuntimeFlavor::CurrentThread {
            return Err(failed("the runtime has one thread only".into()));
        }
        let uid = base::rng::uuid();
        let review = json!({
            "kind": "ConversionReview",
            "apiVersion": format!("apiextensions.k8s.io/{}", self.review),
            "request": {
                "uid": uid, "desiredAPIVersion": wanted, "objects": [object.to_value()],
            },
        });
        let call = (self.post)(self.client.clone(), review.to_string().into(), TIMEOUT);
        let answer = tokio::task::block_in_place(|| handle.block_on(call)).map_err(|why| {
            failed(why.strip_prefix("failed to call webhook: ").unwrap_or(&why).to_owned())
        })?;
        let answer: Value = serde_json::from_slice(&answer).map_err(|e| failed(e.to_string()))?;
        let converted = self.converted(&answer, &uid).map_err(&failed)?;
        checked(object, converted, wanted).map_err(failed)
    }

    fn converted(&self, answer: &Value, uid: &str) -> Result<Value, String> {
        let response = answer.get("response").ok_or("no response provided")?;
        let version = format!("apiextensions.k8s.io/{}", self.review);
        if answer["kind"] != "ConversionReview" || answer["apiVersion"] != *version {
            return Err(format!(
                "expected webhook response of {version}, Kind=ConversionReview, got {}, Kind={}",
                answer["apiVersion"].as_str().unwrap_or_default(),
                answer["kind"].as_str().unwrap_or_default()
            ));
        }
        if response["uid"] != *uid {
            return Err(format!("expected response.uid={uid:?}, got {}", response["uid"]));
        }
        let result = &response["result"];
        if result["status"] != "Success" {
            let message = result["message"].as_str().filter(|text| !text.is_empty());
            return Err(match message {
                Some(message) => message.to_owned(),
                None => format!(
                    "expected response.result.status to be {:?}, got {}",
                    "Success", result["status"]
                ),
            });
        }
        let objects = response["convertedObjects"].as_array().map(Vec::as_slice);
        match objects.unwrap_or_default() {
            [one] => Ok(one.clone()),
            other => Err(format!("expected 1 converted objects, got {}", other.len())),
        }
    }
}

/// The converted object, if it still is the one that was sent.
fn checked(sent: &Unstructured, converted: Value, wanted: &str) -> Result<Unstructured, String> {
    let mut got = Unstructured::from_value(converted).map_err(|error| error.to_string())?;
    if got.api_version != wanted {
        return Err(format!(
            "invalid converted object at index 0: invalid groupVersion (expected {wanted}, received {})",
            got.api_version
        ));
    }
    if got.kind != sent.kind {
        return Err(format!(
            "invalid converted object at index 0: invalid kind (expected {}, received {})",
            sent.kind, got.kind
        ));
    }
    for (name, now, then) in [
        ("name", &got.metadata.name, &sent.metadata.name),
        ("namespace", &got.metadata.namespace, &sent.metadata.namespace),
        ("UID", &got.metadata.uid, &sent.metadata.uid),
    ] {
        if now.as_deref().unwrap_or_default() != then.as_deref().unwrap_or_default() {
            return Err(format!(
                "invalid metadata in converted object at index 0: metadata.{name} must not be changed"
            ));
        }
    }
    let (labels, annotations) = (got.metadata.labels.take(), got.metadata.annotations.take());
    got.metadata = sent.metadata.clone();
    got.metadata.labels = labels;
    got.metadata.annotations = annotations;
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answering(answer: fn(&Value) -> Value) -> Webhook {
        let post: Post = Arc::new(move |_, body, _| {
            Box::pin(async move {
                let review: Value = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
                Ok(answer(&review).to_string().into())
            })
        });
        Webhook { post, client: WebhookClientConfig::default(), review: "v1".into() }
    }

    fn object() -> Unstructured {
        let tree = json!({ "apiVersion": "e.com/v1", "kind": "Thing",
            "metadata": { "name": "a", "uid": "u" }, "host": "h:1" });
        Unstructured::from_value(tree).expect("an object")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn objects_come_back_in_the_wanted_version() {
        let webhook = answering(|review| {
            let mut object = review["request"]["objects"][0].clone();
            object["apiVersion"] = review["request"]["desiredAPIVersion"].clone();
            object["metadata"]["labels"] = json!({ "a": "b" });
            object["metadata"]["finalizers"] = json!(["x/y"]);
            json!({ "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1", "response": {
                "uid": review["request"]["uid"], "result": { "status": "Success" },
                "convertedObjects": [object] } })
        });
        let converted = webhook.convert(&object(), "e.com/v2").expect("converted");
        assert_eq!(converted.api_version, "e.com/v2");
        assert!(converted.metadata.labels.is_some() && converted.metadata.finalizers.is_none());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn refusals_are_told() {
        let webhook = answering(|review| {
            json!({ "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1", "response": {
                "uid": review["request"]["uid"], "result": { "status": "Failed", "message": "no" } } })
        });
        let error = webhook.convert(&object(), "e.com/v2").expect_err("refused");
        assert!(
            error.message.contains("conversion webhook for e.com/v1, Kind=Thing failed: no"),
            "{error}"
        );
    }
}
