//! The keys of service account tokens: one that signs, and any number of trusted ones.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use pki::KeyPair;
use rustls_pki_types::SubjectPublicKeyInfoDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;

use super::Claims;

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("service account key: {0}")]
    Key(String),
    #[error("token: {0}")]
    Token(String),
}

/// A trusted public key.
struct Trusted {
    /// The `kid` of tokens: base64url of SHA-256 of the DER key. Upstream: the same.
    id: String,
    algorithm: Algorithm,
    key: DecodingKey,
    jwk: Value,
}

struct Inner {
    signer: EncodingKey,
    signer_id: String,
    algorithm: Algorithm,
    trusted: Vec<Trusted>,
    /// Tokens get the first one; all are accepted.
    issuers: Vec<String>,
    /// The API server's audiences, for tokens without an audience.
    audiences: Vec<String>,
}

/// Cheap to clone.
#[derive(Clone)]
pub struct TokenKeys(Arc<Inner>);

impl TokenKeys {
    /// `signing_key_pem`: a private key. `public_pem`: further trusted keys (the signer's own always is).
    /// `audiences` may be empty: like upstream, the issuers then, so that tokens of an older issuer are for
    /// this server, too.
    pub fn new(
        signing_key_pem: &str,
        public_pem: &str,
        issuers: Vec<String>,
        audiences: Vec<String>,
    ) -> Result<Self, KeyError> {
        let bad = |error: &dyn std::fmt::Display| KeyError::Key(error.to_string());
        let pair = KeyPair::from_pem(signing_key_pem).map_err(|error| bad(&error))?;
        let own = Trusted::new(&public_key_info(&pair))?;
        let signer = match own.algorithm {
            Algorithm::RS256 => EncodingKey::from_rsa_pem(signing_key_pem.as_bytes()),
            // jsonwebtoken reads PKCS#8 only; an imported key may have the older form.
            _ => Ok(EncodingKey::from_ec_der(pair.serialized_der())),
        };
        let signer = signer.map_err(|error| bad(&error))?;
        let (signer_id, algorithm) = (own.id.clone(), own.algorithm);
        let mut trusted = vec![own];
        for der in SubjectPublicKeyInfoDer::pem_slice_iter(public_pem.as_bytes()) {
            let key = Trusted::new(&der.map_err(|error| bad(&error))?)?;
            if trusted.iter().all(|one| one.id != key.id) {
                trusted.push(key);
            }
        }
        if issuers.is_empty() {
            return Err(KeyError::Key("there must be an issuer".to_owned()));
        }
        let audiences = if audiences.is_empty() { issuers.clone() } else { audiences };
        Ok(Self(Arc::new(Inner { signer, signer_id, algorithm, trusted, issuers, audiences })))
    }

    /// The default: the cluster's own key and issuer.
    pub fn of_cluster(pki: &pki::Pki, issuer: &str) -> Result<Self, KeyError> {
        let (key, public) = (pki.service_account_key_pem(), pki.service_account_public_pem());
        Self::new(key, public, vec![issuer.to_owned()], vec![])
    }

    pub fn issuer(&self) -> &str {
        &self.0.issuers[0]
    }

    pub fn issuers(&self) -> &[String] {
        &self.0.issuers
    }

    pub fn audiences(&self) -> &[String] {
        &self.0.audiences
    }

    pub(super) fn is_issuer(&self, name: &str) -> bool {
        self.0.issuers.iter().any(|issuer| issuer == name)
    }

    pub fn sign(&self, claims: &Claims) -> Result<String, KeyError> {
        let mut header = Header::new(self.0.algorithm);
        header.kid = Some(self.0.signer_id.clone());
        header.typ = None;
        jsonwebtoken::encode(&header, claims, &self.0.signer)
            .map_err(|error| KeyError::Token(error.to_string()))
    }

    /// The claims of a token in JWT form, not verified.
    pub(super) fn peek(token: &str) -> Option<Claims> {
        let mut parts = token.split('.');
        let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
        let payload = URL_SAFE_NO_PAD.decode(payload).ok().filter(|_| parts.next().is_none())?;
        serde_json::from_slice(&payload).ok()
    }

    /// Checks only the signature.
    pub fn verify(&self, token: &str) -> Result<Claims, KeyError> {
        let bad = |error: jsonwebtoken::errors::Error| KeyError::Token(error.to_string());
        let header = jsonwebtoken::decode_header(token).map_err(bad)?;
        let mut last = KeyError::Token("no key fits".to_owned());
        for key in &self.0.trusted {
            let is_candidate = header.kid.as_ref().is_none_or(|id| *id == key.id);
            if !is_candidate || header.alg != key.algorithm {
                continue;
            }
            // The caller checks times and audiences, because it knows the clock and the expected audience.
            let mut checks = Validation::new(key.algorithm);
            checks.required_spec_claims.clear();
            (checks.validate_exp, checks.validate_nbf, checks.validate_aud) = (false, false, false);
            match jsonwebtoken::decode::<Claims>(token, &key.key, &checks) {
                Ok(data) => return Ok(data.claims),
                Err(error) => last = bad(error),
            }
        }
        Err(last)
    }

    /// The document at `/openid/v1/jwks`.
    pub fn jwks(&self) -> Value {
        json!({ "keys": self.0.trusted.iter().map(|key| key.jwk.clone()).collect::<Vec<_>>() })
    }

    /// The document at `/.well-known/openid-configuration`; `jwks_uri` is where [`Self::jwks`] is.
    pub fn openid_configuration(&self, jwks_uri: &str) -> Value {
        let mut algorithms: Vec<String> =
            self.0.trusted.iter().map(|key| format!("{:?}", key.algorithm)).collect();
        algorithms.sort_unstable();
        algorithms.dedup();
        json!({
            "issuer": self.issuer(),
            "jwks_uri": jwks_uri,
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": algorithms,
        })
    }
}

fn public_key_info(pair: &KeyPair) -> Vec<u8> {
    pki::public_key_info(pair)
}

impl Trusted {
    /// From a DER SubjectPublicKeyInfo: P-256, P-384 or RSA.
    fn new(der: &[u8]) -> Result<Self, KeyError> {
        let bad = |why: &str| KeyError::Key(why.to_owned());
        let (_, info) = SubjectPublicKeyInfo::from_der(der).map_err(|_| bad("not a public key"))?;
        let id = URL_SAFE_NO_PAD.encode(Sha256::digest(der));
        let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        match info.parsed().map_err(|_| bad("not a public key"))? {
            PublicKey::EC(point) => {
                let point = point.data();
                // An uncompressed point: 4, x, y.
                let (curve, algorithm, size) = match point.len() {
                    65 => ("P-256", Algorithm::ES256, 32),
                    97 => ("P-384", Algorithm::ES384, 48),
                    _ => return Err(bad("an unsupported elliptic curve")),
                };
                let (x, y) = (text(&point[1..=size]), text(&point[size + 1..]));
                let key = DecodingKey::from_ec_components(&x, &y);
                let jwk = json!({
                    "use": "sig", "kty": "EC", "kid": id, "crv": curve,
                    "alg": format!("{algorithm:?}"), "x": x, "y": y,
                });
                let key = key.map_err(|error| KeyError::Key(error.to_string()))?;
                Ok(Self { id, algorithm, key, jwk })
            }
            PublicKey::RSA(rsa) => {
                let unsigned = |bytes: &[u8]| {
                    let skip = bytes.iter().take_while(|byte| **byte == 0).count();
                    text(&bytes[skip..])
                };
                let (n, e) = (unsigned(rsa.modulus), unsigned(rsa.exponent));
                let key = DecodingKey::from_rsa_components(&n, &e);
                let jwk =
                    json!({"use": "sig", "kty": "RSA", "kid": id, "alg": "RS256", "n": n, "e": e});
                let key = key.map_err(|error| KeyError::Key(error.to_string()))?;
                Ok(Self { id, algorithm: Algorithm::RS256, key, jwk })
            }
            _ => Err(bad("an unsupported kind of key")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(root: &std::path::Path) -> TokenKeys {
        let pki = pki::Pki::open_or_create(root).expect("creates");
        TokenKeys::of_cluster(&pki, "https://kubernetes.default.svc").expect("keys")
    }

    #[test]
    fn only_signed_tokens_are_verified() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let (one, two) = (keys(&root.path().join("1")), keys(&root.path().join("2")));
        let claims = Claims { sub: "me".into(), exp: Some(1), ..Claims::default() };
        let token = one.sign(&claims).expect("signs");
        assert_eq!(one.verify(&token).expect("valid").sub, "me");
        assert!(two.verify(&token).is_err());
        let mut forged = token.into_bytes();
        let last = forged.len() - 10;
        forged[last] = if forged[last] == b'A' { b'B' } else { b'A' };
        assert!(one.verify(std::str::from_utf8(&forged).expect("ASCII")).is_err());
        assert_eq!(one.audiences(), ["https://kubernetes.default.svc"]);
        assert_eq!(one.jwks()["keys"][0]["crv"], "P-256");
        // Unsigned tokens, a classic attack.
        let none = format!("{}.{}.", URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#), "e30");
        assert!(one.verify(&none).is_err());
    }
}
