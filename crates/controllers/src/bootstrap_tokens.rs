//! Tokens that nodes join with: expired ones go; `cluster-info` is signed with those that remain.
//!
//! In: Secrets of type `bootstrap.kubernetes.io/token`, ConfigMap `kube-public/cluster-info`. Out:
//! deletions, signatures. Upstream: `pkg/controller/bootstrap`. A joining node that knows a token
//! verifies with it that the given CA is the cluster's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use client::{
    Api, Client, DeleteParams, ErrorExt, Lister, Outcome, PostParams, Preconditions, Result,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use machinery::selector::Selector;
use sha2::{Digest, Sha256};

use crate::descriptor::{Descriptor, Row, or_gone, own};

pub const CLEANER: &dyn Row = &Descriptor::<Cleaner> {
    name: "token-cleaner-controller",
    account: "token-cleaner",
    component: "token-cleaner",
    queue: "token_cleaner",
    workers: 1,
    new: |setup| {
        let secrets = setup.scoped(Some("kube-system"), TYPE).lister();
        Some(Cleaner { client: setup.client.clone(), secrets })
    },
    watches: &[&own::<Secret>().within(Some("kube-system"), TYPE)],
    reconcile: |this, key| {
        Box::pin(async move {
            let Some(secret) = this.secrets.get_key(&key) else { return Ok(Outcome::Done) };
            clean(&this.client.api(Some(&key.namespace)), &secret).await
        })
    },
};

pub const SIGNER: &dyn Row = &Descriptor::<Signer, ()> {
    name: "bootstrap-signer-controller",
    account: "bootstrap-signer",
    component: "bootstrap-signer",
    queue: "bootstrap_signer_queue",
    workers: 1,
    new: |setup| {
        Some(Signer {
            client: setup.client.clone(),
            secrets: setup.scoped(Some("kube-system"), TYPE).lister(),
            maps: setup.scoped(Some("kube-public"), INFO).lister(),
        })
    },
    watches: &[
        &own::<Secret>().within(Some("kube-system"), TYPE),
        &own::<ConfigMap>().within(Some("kube-public"), INFO),
    ],
    reconcile: |this, ()| Box::pin(async move { this.reconcile().await }),
};

const TYPE: &str = "type=bootstrap.kubernetes.io/token";
const INFO: &str = "metadata.name=cluster-info";
const PREFIX: &str = "bootstrap-token-";
const SIGNATURE: &str = "jws-kubeconfig-";
const CONFIG: &str = "kubeconfig";

struct Cleaner {
    client: Client,
    secrets: Lister<Secret>,
}

struct Signer {
    client: Client,
    secrets: Lister<Secret>,
    maps: Lister<ConfigMap>,
}

impl Signer {
    async fn reconcile(&self) -> Result<Outcome> {
        let map = self.maps.get("kube-public", "cluster-info");
        let all = self.secrets.list(None, &Selector::everything());
        let Some(map) = map.and_then(|map| sign(&map, &all, base::clock::now())) else {
            return Ok(Outcome::Done);
        };
        let api: Api<ConfigMap> = self.client.api(Some("kube-public"));
        or_gone(api.replace("cluster-info", &PostParams::default(), &map).await)
    }
}

async fn clean(api: &Api<Secret>, secret: &Secret) -> Result<Outcome> {
    match remaining(secret, base::clock::now()) {
        None => return Ok(Outcome::Done),
        Some(Duration::ZERO) => {}
        Some(left) => return Ok(Outcome::After(left)),
    }
    let preconditions = Preconditions { uid: secret.metadata.uid.clone(), resource_version: None };
    let options = DeleteParams::default().preconditions(preconditions);
    let name = secret.metadata.name.as_deref().unwrap_or_default();
    match api.delete(name, &options).await {
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(Outcome::Done),
        done => done.map(|_| Outcome::Done),
    }
}

fn text<'a>(secret: &'a Secret, key: &str) -> Option<&'a str> {
    std::str::from_utf8(&secret.data.as_ref()?.get(key)?.0).ok()
}

/// `None` if the token never expires. One whose expiry cannot be read has expired. Pure.
fn remaining(secret: &Secret, now: Timestamp) -> Option<Duration> {
    let expiry = text(secret, "expiration").filter(|text| !text.is_empty())?;
    let Ok(expiry) = expiry.parse::<Timestamp>() else { return Some(Duration::ZERO) };
    Some(Duration::try_from(expiry.duration_since(now)).unwrap_or_default())
}

/// The map with the signatures that it should have; `None` if it has them. Pure.
fn sign(map: &ConfigMap, secrets: &[Arc<Secret>], now: Timestamp) -> Option<ConfigMap> {
    let data = map.data.clone().unwrap_or_default();
    let config = data.get(CONFIG)?;
    let mut wanted: BTreeMap<_, _> =
        data.iter().filter(|(key, _)| !key.starts_with(SIGNATURE)).collect();
    let signatures: Vec<_> = secrets
        .iter()
        .filter(|secret| remaining(secret, now).is_none_or(|left| !left.is_zero()))
        .filter_map(|secret| token(secret))
        .map(|(id, key)| (format!("{SIGNATURE}{id}"), signature(config, id, key)))
        .collect();
    wanted.extend(signatures.iter().map(|(key, value)| (key, value)));
    let wanted: BTreeMap<_, _> =
        wanted.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    if wanted == data {
        return None;
    }
    let mut signed = map.clone();
    signed.data = Some(wanted);
    Some(signed)
}

/// Id and secret of a token that may sign.
fn token(secret: &Secret) -> Option<(&str, &str)> {
    let (id, key) = (text(secret, "token-id")?, text(secret, "token-secret")?);
    let named = secret.metadata.name.as_deref()?.strip_prefix(PREFIX) == Some(id);
    let signs = text(secret, "usage-bootstrap-signing") == Some("true");
    (named && signs && !key.is_empty()).then_some((id, key))
}

/// A JWS (HS256) without its payload.
fn signature(content: &str, id: &str, secret: &str) -> String {
    let header = format!("{{\"alg\":\"HS256\",\"kid\":\"{id}\"}}");
    let header = URL_SAFE_NO_PAD.encode(header);
    let payload = URL_SAFE_NO_PAD.encode(content);
    let code = hmac_sha256(secret.as_bytes(), format!("{header}.{payload}").as_bytes());
    format!("{header}..{}", URL_SAFE_NO_PAD.encode(code))
}

/// RFC 2104.
fn hmac_sha256(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut block = [0u8; 64];
    if key.len() > block.len() {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let padded = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new().chain_update(padded(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(padded(0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    fn secret(id: &str, expiry: &str) -> Arc<Secret> {
        let fields = [
            ("token-id", id),
            ("token-secret", "0123456789abcdef"),
            ("usage-bootstrap-signing", "true"),
            ("expiration", expiry),
        ];
        let data = fields.map(|(key, value)| (key.to_owned(), ByteString(value.into())));
        let mut secret = Secret { data: Some(data.into()), ..Secret::default() };
        secret.metadata.name = Some(format!("{PREFIX}{id}"));
        Arc::new(secret)
    }

    fn now() -> Timestamp {
        "2026-01-01T00:00:00Z".parse().unwrap()
    }

    #[test]
    fn tokens_expire() {
        let check = |expiry: &str, expected: Option<u64>| {
            let left = remaining(&secret("abcdef", expiry), now());
            assert_eq!(left.map(|left| left.as_secs()), expected, "{expiry}");
        };
        check("", None);
        check("nonsense", Some(0));
        check("2026-01-01T01:00:00Z", Some(3600));
        check("2025-01-01T01:00:00Z", Some(0));
    }

    #[test]
    fn the_code_is_rfc_4231s() {
        let code = hmac_sha256(b"Jefe", b"what do ya want for nothing?");
        let hex: String = code.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn the_map_has_a_signature_for_each_living_token() {
        let map: ConfigMap = from_value(json!({"metadata": {"name": "cluster-info"},
            "data": {"kubeconfig": "text", "jws-kubeconfig-gone": "x"}}))
        .unwrap();
        let secrets = [secret("abcdef", ""), secret("fedcba", "2025-01-01T00:00:00Z")];
        let signed = sign(&map, &secrets, now()).unwrap();
        let keys: Vec<_> = signed.data.as_ref().unwrap().keys().collect();
        assert_eq!(keys, ["jws-kubeconfig-abcdef", "kubeconfig"]);
        assert_eq!(sign(&signed, &secrets, now()), None);
    }
}
