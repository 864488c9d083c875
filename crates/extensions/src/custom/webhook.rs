//! Conversion by webhook: sends a ConversionReview, gets converted objects.
//!
//! In: objects in one version, and the wanted version. Out: the same objects in that version. A webhook
//! can change only labels and annotations of the metadata. Upstream: `apiserver/conversion/webhook_converter.go`.

use std::sync::{Arc, Mutex};
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
use tokio::time::Instant;

/// A failure after more than this time counts as slow.
const SLOW: Duration = Duration::from_secs(1);
/// The pause after a slow failure. Requests fail at once meanwhile.
const PAUSE: Duration = Duration::from_secs(5);
/// The timeout of a call. Upstream: 30 s.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Why a webhook has not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PostError(pub String);

/// Posts a body to the address of a client configuration. The server's webhook client does it: it keeps
/// connections and resolves Services.
pub type Post = Arc<
    dyn Fn(WebhookClientConfig, Bytes, Duration) -> BoxFuture<'static, Result<Bytes, PostError>>
        + Send
        + Sync,
>;

pub struct Webhook {
    post: Post,
    client: WebhookClientConfig,
    /// The version of the review that both sides support.
    review: String,
    /// The time and the error of the last slow failure. The lock is held only for a read or a write.
    silent: Mutex<Option<(Instant, String)>>,
}

impl Webhook {
    /// `None` if the CRD's conversion strategy is `None`.
    pub fn of(crd: &CustomResourceDefinition, post: &Post) -> Option<Self> {
        let conversion = crd.spec.conversion.as_ref()?;
        let webhook = conversion.webhook.as_ref().filter(|_| conversion.strategy == "Webhook")?;
        let known = |version: &&String| matches!(version.as_str(), "v1" | "v1beta1");
        let review = webhook.conversion_review_versions.iter().find(known);
        Some(Self {
            post: post.clone(),
            client: webhook.client_config.clone()?,
            review: review.cloned().unwrap_or_else(|| "v1".into()),
            silent: Mutex::default(),
        })
    }

    /// Converts the objects to the wanted version with one review, and blocks until the answer comes:
    /// decoding cannot yield. Other tasks of this thread move to another thread meanwhile. After a timeout
    /// no request calls the webhook for [`PAUSE`]: each would wait as long and block a thread.
    pub fn convert(
        &self,
        mut objects: Vec<&mut Unstructured>,
        wanted: &str,
    ) -> Result<(), StatusError> {
        let Some(first) = objects.first() else { return Ok(()) };
        let (version, kind) = (first.api_version.clone(), first.kind.clone());
        let failed = |why: String| {
            let why = format!("conversion webhook for {version}, Kind={kind} failed: {why}");
            StatusError::internal(why)
        };
        let uid = base::rng::uuid();
        let sent: Vec<Value> = objects.iter().map(|object| object.to_value()).collect();
        let review = json!({
            "kind": "ConversionReview",
            "apiVersion": format!("apiextensions.k8s.io/{}", self.review),
            "request": { "uid": uid, "desiredAPIVersion": wanted, "objects": sent },
        });
        let answer = self.ask(review.to_string().into()).map_err(failed)?;
        let answer: Value = serde_json::from_slice(&answer).map_err(|e| failed(e.to_string()))?;
        let converted = self.converted(&answer, &uid, objects.len()).map_err(failed)?;
        for (index, (object, converted)) in objects.iter_mut().zip(converted).enumerate() {
            **object = checked(index, object, converted, wanted).map_err(failed)?;
        }
        Ok(())
    }

    fn ask(&self, review: Bytes) -> Result<Bytes, String> {
        use tokio::runtime::{Handle, RuntimeFlavor};
        let handle = Handle::try_current().map_err(|error| error.to_string())?;
        if handle.runtime_flavor() == RuntimeFlavor::CurrentThread {
            return Err("the runtime has one thread only".into());
        }
        let begun = Instant::now();
        let silent = self.silent.lock().expect("no panic under the lock").clone();
        if let Some((_, why)) = silent.filter(|(since, _)| begun - *since < PAUSE) {
            return Err(why);
        }
        let call = (self.post)(self.client.clone(), review, TIMEOUT);
        let answer = tokio::task::block_in_place(|| handle.block_on(call));
        answer.map_err(|why| {
            let why = why.0;
            let now = Instant::now();
            if now - begun >= SLOW {
                *self.silent.lock().expect("no panic under the lock") = Some((now, why.clone()));
            }
            why
        })
    }

    fn converted(&self, answer: &Value, uid: &str, count: usize) -> Result<Vec<Value>, String> {
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
        let objects = response["convertedObjects"].as_array().cloned().unwrap_or_default();
        match objects.len() == count {
            true => Ok(objects),
            false => Err(format!("expected {count} converted objects, got {}", objects.len())),
        }
    }
}

/// The converted object, if its identity is unchanged.
fn checked(
    index: usize,
    sent: &Unstructured,
    converted: Value,
    wanted: &str,
) -> Result<Unstructured, String> {
    let mut got = Unstructured::from_value(converted).map_err(|error| error.to_string())?;
    if got.api_version != wanted {
        return Err(format!(
            "invalid converted object at index {index}: invalid groupVersion (expected {wanted}, received {})",
            got.api_version
        ));
    }
    if got.kind != sent.kind {
        return Err(format!(
            "invalid converted object at index {index}: invalid kind (expected {}, received {})",
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
                "invalid metadata in converted object at index {index}: metadata.{name} must not be changed"
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn answering(answer: fn(&Value) -> Value) -> Webhook {
        let post: Post = Arc::new(move |_, body, _| {
            Box::pin(async move {
                let review: Value = serde_json::from_slice(&body).expect("a review");
                Ok(answer(&review).to_string().into())
            })
        });
        let (client, silent) = (WebhookClientConfig::default(), Mutex::default());
        Webhook { post, client, review: "v1".into(), silent }
    }

    fn object() -> Unstructured {
        let tree = json!({ "apiVersion": "e.com/v1", "kind": "Thing",
            "metadata": { "name": "a", "uid": "u" }, "host": "h:1" });
        Unstructured::from_value(tree).expect("an object")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn objects_come_back_in_the_wanted_version() {
        let webhook = answering(|review| {
            let mut objects = review["request"]["objects"].clone();
            for object in objects.as_array_mut().expect("a list") {
                object["apiVersion"] = review["request"]["desiredAPIVersion"].clone();
                object["metadata"]["labels"] = json!({ "a": "b" });
                object["metadata"]["finalizers"] = json!(["x/y"]);
            }
            json!({ "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1", "response": {
                "uid": review["request"]["uid"], "result": { "status": "Success" },
                "convertedObjects": objects } })
        });
        let (mut one, mut two) = (object(), object());
        two.metadata.name = Some("b".into());
        webhook.convert(vec![&mut one, &mut two], "e.com/v2").expect("converted");
        for (converted, name) in [(one, "a"), (two, "b")] {
            assert_eq!(converted.api_version, "e.com/v2");
            assert_eq!(converted.metadata.name.as_deref(), Some(name));
            assert!(converted.metadata.labels.is_some() && converted.metadata.finalizers.is_none());
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_does_not_answer_is_left_alone_for_a_while() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let post: Post = Arc::new(move |_, _, _| {
            count.fetch_add(1, Ordering::Relaxed);
            Box::pin(async {
                tokio::time::sleep(SLOW).await;
                Err(PostError("no answer".into()))
            })
        });
        let webhook = Webhook { post, ..answering(Value::clone) };
        let begun = Instant::now();
        for _ in 0..3 {
            let error = webhook.convert(vec![&mut object()], "e.com/v2").expect_err("refused");
            assert!(error.message.ends_with("failed: no answer"), "{error}");
        }
        let times = asked.load(Ordering::Relaxed);
        assert!(times == 1 || begun.elapsed() > PAUSE, "asked {times} times");
        let long_ago = Instant::now() - PAUSE;
        webhook.silent.lock().expect("no panic").as_mut().expect("noted").0 = long_ago;
        webhook.convert(vec![&mut object()], "e.com/v2").expect_err("refused");
        assert_eq!(asked.load(Ordering::Relaxed), times + 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn refusals_are_told() {
        let webhook = answering(|review| {
            json!({ "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1", "response": {
                "uid": review["request"]["uid"], "result": { "status": "Failed", "message": "no" } } })
        });
        let error = webhook.convert(vec![&mut object()], "e.com/v2").expect_err("refused");
        assert!(
            error.message.contains("conversion webhook for e.com/v1, Kind=Thing failed: no"),
            "{error}"
        );
    }
}
