//! Service account tokens: issues (TokenRequest) and verifies them.
//!
//! A token is a JWT signed with the cluster's key (ES256, or RS256 for an imported key):
//!
//! ```text
//! {"alg":"ES256","kid":…} . {"iss":…,"aud":[…],"exp":…,"iat":…,"nbf":…,"jti":…,
//!   "sub":"system:serviceaccount:web:bot",
//!   "kubernetes.io":{"namespace":"web","serviceaccount":{"name":"bot","uid":…},
//!                    "pod":{…},"node":{…},"secret":{…},"warnafter":…}} . signature
//! ```
//!
//! Invariant: a token is valid only while its objects exist: account, pod, secret and node must exist with
//! the same uid when it is used.

mod keys;
mod mint;

use apiserver::registry::Intent;
use apiserver::request::{Key, UserInfo};
use apiserver::{Registry, StatusError};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Pod, Secret, ServiceAccount};
use machinery::{Object, ObjectMeta};
use serde::{Deserialize, Serialize};

pub use keys::{KeyError, TokenKeys};
pub use mint::{Lifetimes, TokenRequests};

use crate::tokens::{Recognized, TokenAuthenticator};

pub const USER_PREFIX: &str = "system:serviceaccount:";
const GROUP: &str = "system:serviceaccounts";
/// The issuer of tokens that live in Secrets and never expire.
const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";
/// Labels: when the token in a Secret was last used, and since when it is invalid.
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
const EXTRA: &str = "authentication.kubernetes.io/";

/// The payload. Unknown claims are ignored.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Claims {
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    pub aud: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exp: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iat: Option<i64>,
    #[serde(default)]
    pub iss: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub jti: String,
    #[serde(rename = "kubernetes.io", skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<Private>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbf: Option<i64>,
    #[serde(default)]
    pub sub: String,
    /// Only in tokens that live in Secrets.
    #[serde(
        rename = "kubernetes.io/serviceaccount/namespace",
        skip_serializing_if = "Option::is_none"
    )]
    legacy_namespace: Option<String>,
    #[serde(
        rename = "kubernetes.io/serviceaccount/secret.name",
        skip_serializing_if = "Option::is_none"
    )]
    legacy_secret: Option<String>,
    #[serde(
        rename = "kubernetes.io/serviceaccount/service-account.name",
        skip_serializing_if = "Option::is_none"
    )]
    legacy_name: Option<String>,
    #[serde(
        rename = "kubernetes.io/serviceaccount/service-account.uid",
        skip_serializing_if = "Option::is_none"
    )]
    legacy_uid: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Private {
    pub namespace: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<Reference>,
    pub serviceaccount: Reference,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warnafter: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    pub name: String,
    #[serde(default)]
    pub uid: String,
}

impl TokenKeys {
    /// For tokens in Secrets, which have no audience, and not the cluster's issuer.
    pub fn of_secrets(signing_key_pem: &str) -> Result<Self, KeyError> {
        Self::new(signing_key_pem, "", vec![LEGACY_ISSUER.to_owned()], vec![])
    }

    /// The token of a Secret: it does not expire, but is valid only while the Secret and its account exist.
    /// Upstream: `serviceaccount.LegacyClaims`.
    pub fn sign_secret(&self, account: &ObjectMeta, secret: &str) -> Result<String, KeyError> {
        let text = |field: &Option<String>| field.clone().unwrap_or_default();
        let (namespace, name) = (text(&account.namespace), text(&account.name));
        self.sign(&Claims {
            iss: LEGACY_ISSUER.to_owned(),
            sub: format!("{USER_PREFIX}{namespace}:{name}"),
            legacy_namespace: Some(namespace),
            legacy_secret: Some(secret.to_owned()),
            legacy_name: Some(name),
            legacy_uid: Some(text(&account.uid)),
            ..Claims::default()
        })
    }
}

fn one_or_many<'de, D: serde::Deserializer<'de>>(decoder: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Audience {
        One(String),
        Many(Vec<String>),
    }
    Ok(match Audience::deserialize(decoder)? {
        Audience::One(one) => vec![one],
        Audience::Many(many) => many,
    })
}

/// Verifies the cluster's own service account tokens.
pub struct ServiceAccounts {
    registry: Registry,
    keys: TokenKeys,
}

impl ServiceAccounts {
    pub fn new(registry: Registry, keys: TokenKeys) -> Self {
        Self { registry, keys }
    }

    /// Checks that all objects that the token names exist.
    async fn check_objects(&self, private: &Private) -> Result<(), StatusError> {
        let refused = |why: &str| {
            tracing::debug!(
                account = private.serviceaccount.name,
                why,
                "refused a service account token"
            );
            Err(StatusError::unauthorized())
        };
        let namespace = private.namespace.as_str();
        let account = &private.serviceaccount;
        let found = self.registry.find::<ServiceAccount>(namespace, &account.name).await?;
        if !found.is_some_and(|found| is_same(&found.metadata, account)) {
            return refused("no such service account");
        }
        if let Some(pod) = &private.pod {
            let found = self.registry.find::<Pod>(namespace, &pod.name).await?;
            if !found.is_some_and(|found| is_same(&found.metadata, pod)) {
                return refused("no such pod");
            }
        }
        if let Some(secret) = &private.secret {
            let found = self.registry.find::<Secret>(namespace, &secret.name).await?;
            if !found.is_some_and(|found| is_same(&found.metadata, secret)) {
                return refused("no such secret");
            }
        }
        // A token bound to a pod names the pod's node for information only.
        if let Some(node) = private.node.as_ref().filter(|_| private.pod.is_none()) {
            let found = self.registry.find::<Node>("", &node.name).await?;
            if !found.is_some_and(|found| is_same(&found.metadata, node)) {
                return refused("no such node");
            }
        }
        Ok(())
    }

    async fn legacy(&self, token: &str, claims: &Claims) -> Result<Option<UserInfo>, StatusError> {
        let text = |claim: &Option<String>| claim.clone().unwrap_or_default();
        let namespace = text(&claims.legacy_namespace);
        let secret = text(&claims.legacy_secret);
        let found = self.registry.find::<Secret>(&namespace, &secret).await?;
        let found = found.filter(|secret| secret.metadata.deletion_timestamp.is_none());
        let Some(found) = found.filter(|secret| {
            let stored = secret.data.as_ref().and_then(|data| data.get("token"));
            stored.is_some_and(|stored| stored.0 == token.as_bytes())
        }) else {
            return Err(StatusError::unauthorized());
        };
        let serviceaccount =
            Reference { name: text(&claims.legacy_name), uid: text(&claims.legacy_uid) };
        let private = Private { namespace, serviceaccount, ..Private::default() };
        self.check_objects(&private).await?;
        if is_unmarked(&found, base::clock::now()) {
            self.mark_used(&found).await;
        }
        if label(&found, INVALID_SINCE).is_some_and(|since| !since.is_empty()) {
            tracing::warn!(
                secret = found.metadata.name,
                namespace = private.namespace,
                "refused the token of a Secret that is marked invalid; remove the label {INVALID_SINCE} to accept it again"
            );
            return Err(StatusError::unauthorized());
        }
        Ok(Some(user_of(&private, "")))
    }

    /// Writes the day into the Secret: a controller may remove tokens that were unused for a year.
    async fn mark_used(&self, secret: &Secret) {
        let today = day(base::clock::now());
        let modify = move |object: &mut dyn Object| {
            let labels = object.meta_mut().labels.get_or_insert_default();
            labels.insert(LAST_USED.into(), today.clone());
            Ok(())
        };
        let ctx = self.registry.own_context::<Secret>();
        let key = Key::new(secret.namespace(), secret.name());
        let intent = Intent::Modify(Box::new(modify));
        if let Err(error) = self.registry.write(&ctx, &key, intent).await {
            tracing::warn!(%error, secret = secret.name(), "failed to record the use of the Secret's token");
        }
    }
}

fn label<'a>(secret: &'a Secret, name: &str) -> Option<&'a str> {
    secret.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

fn day(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%d").to_string()
}

/// Whether its use must be recorded. Servers with different clocks must not undo each other's records.
fn is_unmarked(secret: &Secret, now: jiff::Timestamp) -> bool {
    let tomorrow = now + std::time::Duration::from_secs(24 * 60 * 60);
    label(secret, LAST_USED).is_none_or(|last| last != day(now) && last != day(tomorrow))
}

fn is_same(meta: &ObjectMeta, reference: &Reference) -> bool {
    meta.uid.as_deref() == Some(reference.uid.as_str()) && !is_long_deleted(meta)
}

/// Deleted objects count for one more minute, so that a terminating pod may use its account.
fn is_long_deleted(meta: &ObjectMeta) -> bool {
    let deleted = meta.deletion_timestamp.as_ref();
    deleted.is_some_and(|at| at.0.as_second() + 60 < base::clock::now().as_second())
}

#[async_trait]
impl TokenAuthenticator for ServiceAccounts {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let Some(unverified) = TokenKeys::peek(token) else { return Ok(None) };
        let is_legacy = unverified.iss == LEGACY_ISSUER;
        if !is_legacy && !self.keys.is_issuer(&unverified.iss) {
            return Ok(None);
        }
        let claims = self.keys.verify(token).map_err(|error| {
            tracing::debug!(%error, "refused a service account token");
            StatusError::unauthorized()
        })?;
        if is_legacy {
            // Such a token has no audience: it is for the API server only.
            let own = |one: &&String| self.keys.audiences().contains(one);
            let audiences: Vec<String> = audiences.iter().filter(own).cloned().collect();
            if audiences.is_empty() {
                return Ok(None);
            }
            let user = self.legacy(token, &claims).await?;
            return Ok(user.map(|user| Recognized { user, audiences }));
        }
        let now = base::clock::now().as_second();
        let is_timely =
            claims.exp.is_some_and(|exp| now < exp) && claims.nbf.is_none_or(|nbf| nbf <= now);
        let wanted = |audience: &&String| audiences.contains(audience);
        let common: Vec<String> = claims.aud.iter().filter(wanted).cloned().collect();
        if common.is_empty() {
            let quoted = |list: &[String]| {
                let all: Vec<String> = list.iter().map(|one| format!("{one:?}")).collect();
                format!("[{}]", all.join(" "))
            };
            return Err(StatusError::unauthorized().with_message(format!(
                "token audiences {} is invalid for the target audiences {}",
                quoted(&claims.aud),
                quoted(audiences)
            )));
        }
        let Some(private) = claims.kubernetes.filter(|_| is_timely) else {
            return Err(StatusError::unauthorized());
        };
        self.check_objects(&private).await?;
        let user = user_of(&private, &claims.jti);
        Ok(Some(Recognized { user, audiences: common }))
    }
}

fn user_of(private: &Private, jti: &str) -> UserInfo {
    let Private { namespace, serviceaccount: account, .. } = private;
    let mut user = UserInfo::new(format!("{USER_PREFIX}{namespace}:{}", account.name), &[GROUP]);
    user.uid = account.uid.clone();
    user.groups.push(format!("{GROUP}:{namespace}"));
    let mut put = |key: &str, value: String| {
        user.extra.insert(format!("{EXTRA}{key}"), vec![value]);
    };
    if !jti.is_empty() {
        put("credential-id", format!("JTI={jti}"));
    }
    for (kind, reference) in [("pod", &private.pod), ("node", &private.node)] {
        if let Some(reference) = reference {
            put(&format!("{kind}-name"), reference.name.clone());
            if !reference.uid.is_empty() {
                put(&format!("{kind}-uid"), reference.uid.clone());
            }
        }
    }
    user
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_become_a_user() {
        let reference = |name: &str| Reference { name: name.into(), uid: format!("uid-{name}") };
        let private = Private {
            namespace: "web".into(),
            serviceaccount: reference("bot"),
            pod: Some(reference("p")),
            node: Some(reference("n")),
            ..Private::default()
        };
        let user = user_of(&private, "7");
        assert_eq!(user.name, "system:serviceaccount:web:bot");
        assert_eq!(user.groups, ["system:serviceaccounts", "system:serviceaccounts:web"]);
        assert_eq!(user.uid, "uid-bot");
        let keys: Vec<&str> = user.extra.keys().map(|key| &key[EXTRA.len()..]).collect();
        assert_eq!(keys, ["credential-id", "node-name", "node-uid", "pod-name", "pod-uid"]);
    }

    #[test]
    fn an_audience_may_be_one_string() {
        let claims: Claims = serde_json::from_str(r#"{"aud":"a","sub":"s"}"#).expect("claims");
        assert_eq!(claims.aud, ["a"]);
    }

    #[test]
    fn the_use_of_a_secret_is_recorded_once_a_day() {
        let now: jiff::Timestamp = "2026-03-01T23:59:00Z".parse().expect("a time");
        for (last, expected) in [
            ("", true),
            ("2026-02-28", true),
            ("2026-03-01", false),
            // Recorded by a server whose clock is ahead.
            ("2026-03-02", false),
            ("2026-03-03", true),
        ] {
            let mut secret = Secret::default();
            if !last.is_empty() {
                secret.metadata.labels = Some([(LAST_USED.to_owned(), last.to_owned())].into());
            }
            assert_eq!(is_unmarked(&secret, now), expected, "{last}");
        }
    }
}
