//! Tokens that an external server verifies: `--authentication-token-webhook-config-file`.
//!
//! In: tokens that no other authenticator recognized. Out: the user of the answered TokenReview. Positive
//! and negative answers are cached for `--authentication-token-webhook-cache-ttl`; failures are not.
//! Upstream: `plugin/pkg/authenticator/token/webhook`.

use std::time::Duration;

use apiserver::StatusError;
use apiserver::request::UserInfo;
use async_trait::async_trait;
use base::memory::{Memory, key_of};
use k8s_openapi::api::authentication::v1 as authentication;
use serde::Deserialize;
use serde_json::json;

use crate::ConfigError;
use crate::tokens::{Recognized, TokenAuthenticator};
use crate::webhook::Webhook;

/// The timeout, with all retries. Upstream's context ends with the request, a minute later.
const LIMIT: Duration = Duration::from_secs(30);
const REMEMBERED: usize = 4096;

pub struct TokenWebhook {
    webhook: Webhook,
    /// `v1` or `v1beta1`.
    version: String,
    lasts: Duration,
    memory: Memory<Option<Recognized>>,
}

/// The part of the answer that is used.
#[derive(Default, Deserialize)]
struct Answer {
    #[serde(default)]
    status: authentication::TokenReviewStatus,
}

impl TokenWebhook {
    pub fn new(webhook: Webhook, version: &str, lasts: Duration) -> Result<Self, ConfigError> {
        if !matches!(version, "v1" | "v1beta1") {
            return Err(ConfigError::WebhookVersion(version.to_owned()));
        }
        let memory = Memory::new(REMEMBERED);
        Ok(Self { webhook, version: version.to_owned(), lasts, memory })
    }
}

#[async_trait]
impl TokenAuthenticator for TokenWebhook {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let parts = std::iter::once(token).chain(audiences.iter().map(String::as_str));
        let key = key_of(parts);
        if let Some(known) = self.memory.get(&key) {
            return Ok(known);
        }
        let review = json!({
            "apiVersion": format!("authentication.k8s.io/{}", self.version),
            "kind": "TokenReview",
            "metadata": {},
            "spec": {"token": token, "audiences": audiences},
        });
        let refused = |why: String| StatusError::unauthorized().with_message(why);
        let answer = self.webhook.ask(&review, LIMIT).await.map_err(|why| {
            tracing::error!(%why, "Failed to make webhook authenticator request");
            refused(why.to_string())
        })?;
        let answer: Answer =
            serde_json::from_value(answer).map_err(|error| refused(error.to_string()))?;
        let found = recognized(answer.status, audiences).map_err(refused)?;
        self.memory.put(key, found.clone(), self.lasts);
        Ok(found)
    }
}

fn recognized(
    status: authentication::TokenReviewStatus,
    asked: &[String],
) -> Result<Option<Recognized>, String> {
    if !status.authenticated.unwrap_or_default() {
        return match status.error.filter(|error| !error.is_empty()) {
            Some(error) => Err(error),
            None => Ok(None),
        };
    }
    // A server that does not support audiences accepts tokens for the API server only.
    let audiences = match status.audiences.filter(|list| !list.is_empty()) {
        None => asked.to_vec(),
        Some(named) => asked.iter().filter(|one| named.contains(one)).cloned().collect(),
    };
    if audiences.is_empty() && !asked.is_empty() {
        return Ok(None);
    }
    let user = status.user.unwrap_or_default();
    let user = UserInfo {
        name: user.username.unwrap_or_default(),
        uid: user.uid.unwrap_or_default(),
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    };
    Ok(Some(Recognized { user, audiences }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::Value;

    use super::*;
    use crate::testing::Loopback;

    #[tokio::test]
    async fn the_webhook_verifies_tokens() {
        let asked = Arc::<AtomicUsize>::default();
        let counter = asked.clone();
        let server = Loopback::start(|_| {
            move |path: &str, review: Value| {
                assert_eq!((path, &review["kind"]), ("/review", &json!("TokenReview")));
                // The very first request fails, and is retried.
                if counter.fetch_add(1, Ordering::Relaxed) == 0 {
                    return (503, json!({}));
                }
                match review["spec"]["token"].as_str() {
                    Some("good") => {
                        let user = json!({"username": "jane", "groups": ["dev"]});
                        (200, json!({"status": {"authenticated": true, "user": user}}))
                    }
                    Some("odd") => (400, json!({"message": "odd"})),
                    _ => (200, json!({"status": {"authenticated": false}})),
                }
            }
        })
        .await;
        let webhook = Webhook::from_kubeconfig(&server.kubeconfig()).expect("a kubeconfig");
        let webhook = TokenWebhook::new(webhook, "v1", Duration::from_secs(3600)).expect("v1");
        let own = ["api".to_owned()];
        let check = async |token: &str, expected: Option<&str>, questions: usize| {
            let got = webhook.recognize(token, &own).await;
            let got = match got {
                Ok(found) => found.map(|found| found.user.name),
                Err(error) => Some(error.message.clone()),
            };
            assert_eq!(got.as_deref(), expected, "{token}");
            assert_eq!(asked.load(Ordering::Relaxed), questions, "{token}");
        };
        check("good", Some("jane"), 2).await;
        check("good", Some("jane"), 2).await;
        check("bad", None, 3).await;
        check("bad", None, 3).await;
        check("odd", Some("odd"), 4).await;
        check("odd", Some("odd"), 5).await;
        assert!(TokenWebhook::new(webhook.webhook.clone(), "v2", Duration::ZERO).is_err());
        server.shutdown().await;
    }

    #[test]
    fn answers_become_users() {
        let check = |status: Value, expected: Result<Option<(&str, &str)>, &str>| {
            let status = serde_json::from_value(status).expect("a status");
            let asked = ["api".to_owned(), "other".to_owned()];
            let got = recognized(status, &asked)
                .map(|found| found.map(|found| (found.user.name, found.audiences.join(","))));
            let expected = expected
                .map(|found| found.map(|(name, list)| (name.to_owned(), list.to_owned())))
                .map_err(str::to_owned);
            assert_eq!(got, expected);
        };
        let yes = |audiences: &[&str]| json!({"authenticated": true, "user": {"username": "jane"}, "audiences": audiences});
        check(yes(&[]), Ok(Some(("jane", "api,other"))));
        check(yes(&["api"]), Ok(Some(("jane", "api"))));
        check(yes(&["else"]), Ok(None));
        check(json!({"authenticated": false}), Ok(None));
        check(json!({"error": "no such token"}), Err("no such token"));
        check(json!({}), Ok(None));
    }
}
