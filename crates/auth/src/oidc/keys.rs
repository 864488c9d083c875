//! The keys of an issuer, and the check of signatures.
//!
//! In: compact tokens (JWS), key sets (JWKS). Out: whether one of the keys signed the token.
//! Invariant: only the algorithms of [`ALGORITHMS`] are accepted, never `none` or shared secrets; the
//! algorithm must fit the type of the key.

use aws_lc_rs::signature::{
    self as sig, EcdsaVerificationAlgorithm, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;

/// The maximum number of keys, so that a hostile key set does not fill the memory.
const KEYS: usize = 1000;

#[derive(Clone, Copy)]
enum Method {
    Rsa(&'static RsaParameters),
    /// With the curve's name and the bytes of a coordinate.
    Ec(&'static EcdsaVerificationAlgorithm, &'static str, usize),
}

/// Upstream: `AllValidSigningAlgorithms`.
static ALGORITHMS: [(&str, Method); 9] = [
    ("ES256", Method::Ec(&sig::ECDSA_P256_SHA256_FIXED, "P-256", 32)),
    ("ES384", Method::Ec(&sig::ECDSA_P384_SHA384_FIXED, "P-384", 48)),
    ("ES512", Method::Ec(&sig::ECDSA_P521_SHA512_FIXED, "P-521", 66)),
    ("PS256", Method::Rsa(&sig::RSA_PSS_2048_8192_SHA256)),
    ("PS384", Method::Rsa(&sig::RSA_PSS_2048_8192_SHA384)),
    ("PS512", Method::Rsa(&sig::RSA_PSS_2048_8192_SHA512)),
    ("RS256", Method::Rsa(&sig::RSA_PKCS1_2048_8192_SHA256)),
    ("RS384", Method::Rsa(&sig::RSA_PKCS1_2048_8192_SHA384)),
    ("RS512", Method::Rsa(&sig::RSA_PKCS1_2048_8192_SHA512)),
];

pub fn is_algorithm(name: &str) -> bool {
    ALGORITHMS.iter().any(|(known, _)| *known == name)
}

/// The names of all algorithms.
pub fn algorithms() -> Vec<String> {
    ALGORITHMS.iter().map(|(name, _)| (*name).to_owned()).collect()
}

/// A public key, with the fields for verification.
#[derive(Debug, Default, Deserialize)]
pub struct Jwk {
    #[serde(default)]
    kty: String,
    #[serde(default)]
    kid: String,
    #[serde(default)]
    crv: String,
    #[serde(default)]
    n: String,
    #[serde(default)]
    e: String,
    #[serde(default)]
    x: String,
    #[serde(default)]
    y: String,
}

/// The keys of a JWKS document; keys of unknown types are kept, but never verify.
pub fn parse(document: &[u8]) -> Result<Vec<Jwk>, String> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<Jwk>,
    }
    let set: Set = serde_json::from_slice(document).map_err(|error| error.to_string())?;
    if set.keys.len() > KEYS {
        return Err(format!("{} keys are more than {KEYS}", set.keys.len()));
    }
    Ok(set.keys)
}

/// A parsed token. Its content is not verified yet.
#[derive(Debug)]
pub struct Jws<'a> {
    pub algorithm: String,
    pub key_id: String,
    pub payload: Vec<u8>,
    /// Header and payload as received.
    signed: &'a str,
    signature: Vec<u8>,
}

impl<'a> Jws<'a> {
    pub fn parse(token: &'a str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Header {
            #[serde(default)]
            alg: String,
            #[serde(default)]
            kid: String,
            crit: Option<serde_json::Value>,
        }
        let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|error| error.to_string());
        let (signed, signature) =
            token.rsplit_once('.').ok_or("compact JWS format must have three parts")?;
        let (header, payload) = signed
            .split_once('.')
            .filter(|(_, payload)| !payload.contains('.'))
            .ok_or("compact JWS format must have three parts")?;
        let header: Header =
            serde_json::from_slice(&bytes(header)?).map_err(|error| error.to_string())?;
        if header.crit.is_some() {
            return Err("unsupported crit header".into());
        }
        Ok(Self {
            algorithm: header.alg,
            key_id: header.kid,
            payload: bytes(payload)?,
            signed,
            signature: bytes(signature)?,
        })
    }

    /// Whether one of the keys signed it. If the token names a key, only that one is tried.
    pub fn is_signed_by(&self, keys: &[Jwk]) -> bool {
        let method = ALGORITHMS.iter().find(|(name, _)| *name == self.algorithm);
        let Some((_, method)) = method else { return false };
        let fits = |key: &&Jwk| self.key_id.is_empty() || self.key_id == key.kid;
        keys.iter().filter(fits).any(|key| self.is_signed_with(key, *method).is_some())
    }

    fn is_signed_with(&self, key: &Jwk, method: Method) -> Option<()> {
        let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok();
        let (message, signature) = (self.signed.as_bytes(), self.signature.as_slice());
        match method {
            Method::Rsa(parameters) => {
                let unsigned = |text: &str| {
                    let all = bytes(text)?;
                    let zeros = all.iter().take_while(|byte| **byte == 0).count();
                    Some(all[zeros..].to_vec())
                };
                if key.kty != "RSA" {
                    return None;
                }
                let (n, e) = (unsigned(&key.n)?, unsigned(&key.e)?);
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature).ok()
            }
            Method::Ec(algorithm, curve, size) => {
                if key.kty != "EC" || key.crv != curve {
                    return None;
                }
                let mut point = vec![4];
                for coordinate in [bytes(&key.x)?, bytes(&key.y)?] {
                    point.resize(point.len() + size.checked_sub(coordinate.len())?, 0);
                    point.extend(coordinate);
                }
                UnparsedPublicKey::new(algorithm, point).verify(message, signature).ok()
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A key pair of the cluster's type, for tests that act as an issuer.
    pub(crate) struct Signer {
        pair: sig::EcdsaKeyPair,
        kid: &'static str,
    }

    impl Signer {
        pub(crate) fn new(kid: &'static str) -> Self {
            let pair = sig::EcdsaKeyPair::generate(&sig::ECDSA_P256_SHA256_FIXED_SIGNING);
            Self { pair: pair.expect("a key"), kid }
        }

        pub(crate) fn jwk(&self) -> Value {
            use aws_lc_rs::signature::KeyPair;
            let point = self.pair.public_key().as_ref();
            let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
            json!({"kty": "EC", "crv": "P-256", "kid": self.kid, "use": "sig",
                   "x": text(&point[1..33]), "y": text(&point[33..])})
        }

        pub(crate) fn sign(&self, claims: &Value) -> String {
            self.sign_as(&json!({"alg": "ES256", "kid": self.kid}), claims)
        }

        pub(crate) fn sign_as(&self, header: &Value, claims: &Value) -> String {
            let text = |json: &Value| URL_SAFE_NO_PAD.encode(json.to_string());
            let signed = format!("{}.{}", text(header), text(claims));
            let random = aws_lc_rs::rand::SystemRandom::new();
            let signature = self.pair.sign(&random, signed.as_bytes()).expect("signs");
            format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
        }
    }

    fn keys(signers: &[&Signer]) -> Vec<Jwk> {
        let all: Vec<Value> = signers.iter().map(|one| one.jwk()).collect();
        parse(json!({"keys": all}).to_string().as_bytes()).expect("a key set")
    }

    #[test]
    fn only_the_issuers_keys_sign() {
        let (one, two) = (Signer::new("one"), Signer::new("two"));
        let claims = json!({"sub": "jane"});
        let check = |token: &str, keys: &[Jwk], expected: bool| {
            let is_signed = Jws::parse(token).is_ok_and(|jws| jws.is_signed_by(keys));
            assert_eq!(is_signed, expected, "{token}");
        };
        let both = keys(&[&one, &two]);
        check(&one.sign(&claims), &both, true);
        check(&two.sign(&claims), &both, true);
        check(&one.sign(&claims), &keys(&[&two]), false);
        // A token that names another key, or no key.
        check(&one.sign_as(&json!({"alg": "ES256", "kid": "two"}), &claims), &both, false);
        check(&one.sign_as(&json!({"alg": "ES256"}), &claims), &both, true);
        // An algorithm that does not fit the key, shared secrets, no signature, unknown critical headers.
        for alg in ["none", "HS256", "RS256", "ES384", ""] {
            check(&one.sign_as(&json!({"alg": alg, "kid": "one"}), &claims), &both, false);
        }
        check(&one.sign_as(&json!({"alg": "ES256", "crit": ["b64"]}), &claims), &both, false);
        let token = one.sign(&claims);
        let (head, _) = token.rsplit_once('.').expect("three parts");
        check(&format!("{head}."), &both, false);
        for bad in ["", ".", "..", "a.b", "a.b.c.d", "{}", "e30.e30.e30"] {
            check(bad, &both, false);
        }
    }

    #[test]
    fn unusual_key_sets() {
        assert!(parse(b"{}").is_err() && parse(b"[]").is_err());
        let odd =
            br#"{"keys":[{"kty":"oct","k":"AA"},{"kty":"EC","crv":"P-256","x":"%","y":""},{}]}"#;
        let odd = parse(odd).expect("a key set");
        let token = Signer::new("").sign(&json!({}));
        assert!(!Jws::parse(&token).expect("a token").is_signed_by(&odd));
    }
}
