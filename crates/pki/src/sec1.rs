//! Elliptic curve private keys in upstream's format.
//!
//! In: PEM of a private key in any form. Out: an elliptic curve key as `BEGIN EC PRIVATE KEY` (SEC1, RFC
//! 5915), which some clients require; other keys unchanged. This program reads both forms.
//!
//! ```text
//!  PKCS#8   SEQUENCE { 0, SEQUENCE { id-ecPublicKey, curve }, OCTET STRING { SEC1 } }
//!  SEC1     SEQUENCE { 1, OCTET STRING key, [0] curve, [1] public key }
//! ```
//!
//! Upstream: `k8s.io/client-go/util/keyutil.MarshalPrivateKeyToPEM`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::der::{self, INTEGER, OBJECT_ID, OCTET_STRING, SEQUENCE};

const EC_PUBLIC_KEY: &[u64] = &[1, 2, 840, 10045, 2, 1];
/// The line length of Go's PEM.
const LINE: usize = 64;

/// The key in upstream's format.
pub fn private_key_pem(pem: &str) -> String {
    let block = base::pem::blocks(pem.as_bytes()).find(|block| block.label == "PRIVATE KEY");
    let sec1 = block.and_then(|block| from_pkcs8(&block.bytes));
    sec1.map_or_else(|| pem.to_owned(), |der| to_pem("EC PRIVATE KEY", &der))
}

/// `None`: not an elliptic curve key.
fn from_pkcs8(der: &[u8]) -> Option<Vec<u8>> {
    let (all, _) = der::split(SEQUENCE, der)?;
    let (_, rest) = der::split(INTEGER, all)?;
    let (algorithm, rest) = der::split(SEQUENCE, rest)?;
    let curve = algorithm.strip_prefix(&*der::oid(EC_PUBLIC_KEY))?;
    der::split(OBJECT_ID, curve)?;
    let (inner, _) = der::split(OCTET_STRING, rest)?;
    let (inner, _) = der::split(SEQUENCE, inner)?;
    let (version, rest) = der::split(INTEGER, inner)?;
    let (key, rest) = der::split(OCTET_STRING, rest)?;
    let mut parts = vec![
        der::element(INTEGER, version),
        der::element(OCTET_STRING, key),
        der::explicit(0, curve),
    ];
    // Optionally the curve again, then the public key.
    let rest = der::split(0xa0, rest).map_or(rest, |(_, behind)| behind);
    if let Some((public, _)) = der::split(0xa1, rest) {
        parts.push(der::explicit(1, public));
    }
    Some(der::sequence(&parts))
}

fn to_pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    for line in text.as_bytes().chunks(LINE) {
        out.extend(line.iter().map(|byte| char::from(*byte)));
        out.push('\n');
    }
    out + "-----END " + label + "-----\n"
}

#[cfg(test)]
mod tests {
    use rcgen::KeyPair;

    use super::*;

    #[test]
    fn curve_keys_are_converted_to_upstreams_format() {
        for algorithm in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384] {
            let key = KeyPair::generate_for(algorithm).expect("a key");
            let pem = private_key_pem(&key.serialize_pem());
            assert!(pem.starts_with("-----BEGIN EC PRIVATE KEY-----\n"), "{pem}");
            assert!(pem.ends_with("\n-----END EC PRIVATE KEY-----\n"));
            let again = KeyPair::from_pem(&pem).expect("it is read");
            assert_eq!(again.public_key_raw(), key.public_key_raw());
            assert_eq!(private_key_pem(&pem), pem, "what has the form keeps it");
            // Java's and Go's parsers expect the curve at this place.
            let block = base::pem::blocks(pem.as_bytes()).next().expect("a block");
            let (inner, _) = der::split(SEQUENCE, &block.bytes).expect("a sequence");
            let (version, rest) = der::split(INTEGER, inner).expect("a number");
            let (_, rest) = der::split(OCTET_STRING, rest).expect("the key");
            let (curve, rest) = der::split(0xa0, rest).expect("the curve");
            assert!(version == [1] && der::split(OBJECT_ID, curve).is_some());
            assert!(der::split(0xa1, rest).is_some_and(|(_, rest)| rest.is_empty()));
        }
    }

    #[test]
    fn other_keys_are_not_changed() {
        let ed25519 = KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key").serialize_pem();
        for pem in [&ed25519, "no key", ""] {
            assert_eq!(private_key_pem(pem), *pem);
        }
    }
}
