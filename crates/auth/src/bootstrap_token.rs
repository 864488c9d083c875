//! Bootstrap tokens: Secrets of type `bootstrap.kubernetes.io/token` in kube-system. Nodes join with them
//! before they have certificates.

use std::collections::BTreeMap;

use apiserver::registry::Intent;
use apiserver::request::{Key, UserInfo};
use apiserver::{Registry, StatusError};
use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use machinery::ObjectMeta;
use machinery::status::Reason;
use pki::BootstrapToken;

use crate::tokens::{Recognized, TokenAuthenticator, is_same_secret};

pub const SECRET_TYPE: &str = "bootstrap.kubernetes.io/token";
const NAMESPACE: &str = "kube-system";
const GROUP: &str = "system:bootstrappers";

pub struct BootstrapTokens {
    registry: Registry,
}

impl BootstrapTokens {
    pub fn new(registry: Registry) -> Self {
        Self { registry }
    }
}

#[async_trait]
impl TokenAuthenticator for BootstrapTokens {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let Some(token) = BootstrapToken::parse(token) else { return Ok(None) };
        let found = self.registry.find::<Secret>(NAMESPACE, &token.secret_name()).await?;
        let user = found.and_then(|secret| user_of(&secret, &token, base::clock::now()));
        Ok(user.map(|user| Recognized { user, audiences: audiences.to_vec() }))
    }
}

/// The user of `token` according to `secret`; `None` if the Secret does not allow it.
fn user_of(secret: &Secret, token: &BootstrapToken, now: Timestamp) -> Option<UserInfo> {
    let field = |name: &str| {
        let bytes = secret.data.as_ref()?.get(name)?;
        std::str::from_utf8(&bytes.0).ok()
    };
    let is_expired = field("expiration")
        .is_some_and(|text| text.parse::<Timestamp>().map_or(true, |until| until <= now));
    let is_good = secret.type_.as_deref() == Some(SECRET_TYPE)
        && secret.metadata.deletion_timestamp.is_none()
        && field("token-id") == Some(token.id.as_str())
        && field("token-secret")
            .is_some_and(|known| is_same_secret(known.as_bytes(), token.secret.as_bytes()))
        && !is_expired
        && field("usage-bootstrap-authentication") == Some("true");
    if !is_good {
        return None;
    }
    let mut user = UserInfo::new(format!("system:bootstrap:{}", token.id), &[GROUP]);
    for group in field("auth-extra-groups").unwrap_or_default().split(',').map(str::trim) {
        if group.starts_with("system:bootstrappers:") {
            user.groups.push(group.to_owned());
        }
    }
    Some(user)
}

/// The Secret of a token.
pub fn secret_for(
    token: &BootstrapToken,
    description: &str,
    expiration: Option<Timestamp>,
    extra_groups: &[&str],
) -> Secret {
    let mut data = BTreeMap::new();
    let mut put = |name: &str, value: String| {
        data.insert(name.to_owned(), ByteString(value.into_bytes()));
    };
    put("token-id", token.id.clone());
    put("token-secret", token.secret.clone());
    put("usage-bootstrap-authentication", "true".into());
    put("usage-bootstrap-signing", "true".into());
    put("description", description.into());
    if !extra_groups.is_empty() {
        put("auth-extra-groups", extra_groups.join(","));
    }
    if let Some(until) = expiration {
        put("expiration", until.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    let metadata = ObjectMeta {
        name: Some(token.secret_name()),
        namespace: Some(NAMESPACE.into()),
        ..ObjectMeta::default()
    };
    Secret { metadata, type_: Some(SECRET_TYPE.into()), data: Some(data), ..Secret::default() }
}

/// Creates the Secret of the cluster's own token (`--token`) if there is none.
/// kube-system must exist.
pub async fn ensure(registry: &Registry, token: &BootstrapToken) -> Result<(), StatusError> {
    let secret = secret_for(token, "The cluster's join token.", None, &[]);
    let key = Key::new(NAMESPACE, token.secret_name());
    let ctx = registry.own_context::<Secret>();
    match registry.write(&ctx, &key, Intent::Create { object: Box::new(secret) }).await {
        Err(error) if !error.is(Reason::AlreadyExists) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_valid_while_its_secret_allows_it() {
        let token = BootstrapToken::parse("abcdef.0123456789abcdef").expect("a token");
        let at = |text: &str| text.parse::<Timestamp>().expect("a time");
        let until = at("2030-01-01T00:00:00Z");
        let groups = ["system:bootstrappers:workers", "system:masters"];
        let good = secret_for(&token, "", Some(until), &groups);
        let check = |change: &dyn Fn(&mut Secret), now: &str, expected: bool| {
            let mut secret = good.clone();
            change(&mut secret);
            let user = user_of(&secret, &token, at(now));
            assert_eq!(user.is_some(), expected);
            if let Some(user) = user {
                assert_eq!(user.name, "system:bootstrap:abcdef");
                assert_eq!(user.groups, [GROUP, "system:bootstrappers:workers"]);
            }
        };
        let set = |name: &'static str, value: &'static str| {
            move |secret: &mut Secret| {
                let data = secret.data.as_mut().expect("data");
                data.insert(name.into(), ByteString(value.into()));
            }
        };
        let early = "2029-01-01T00:00:00Z";
        check(&|_| {}, early, true);
        check(&|_| {}, "2031-01-01T00:00:00Z", false);
        check(&set("token-secret", "0123456789abcdeX"), early, false);
        check(&set("usage-bootstrap-authentication", "false"), early, false);
        check(&set("expiration", "soon"), early, false);
        check(&|secret| secret.type_ = Some("Opaque".into()), early, false);
    }
}
