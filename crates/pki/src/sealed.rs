//! Text sealed under a token: only a holder of the token can read it, and a change of it is noticed.
//!
//! ```text
//! base64( version │ salt 16 │ nonce 12 │ AES-256-GCM(text) )      key = PBKDF2-HMAC-SHA256(secret, salt)
//! ```
//!
//! The secret of a generated token has 165 bits; the rounds are for tokens that people choose.

use std::num::NonZeroU32;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::pbkdf2;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::{Error, malformed};

const VERSION: u8 = 1;
const SALT: usize = 16;
const ROUNDS: NonZeroU32 = NonZeroU32::new(200_000).expect("not zero");

pub fn seal(secret: &str, text: &[u8]) -> Result<String, Error> {
    let (salt, nonce) = (crate::random_bytes::<SALT>(), crate::random_bytes::<NONCE_LEN>());
    let mut sealed = text.to_vec();
    key(secret, &salt)?
        .seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from([VERSION]),
            &mut sealed,
        )
        .map_err(|_| Error::Crypto("the text cannot be sealed".into()))?;
    Ok(STANDARD.encode([&[VERSION][..], &salt, &nonce, &sealed].concat()))
}

/// An error says that the text was sealed under another token, or was changed.
pub fn open(secret: &str, text: &str) -> Result<Vec<u8>, Error> {
    let bad = |why: &str| malformed("sealed text", why);
    let bytes = STANDARD.decode(text.trim()).map_err(|error| bad(&error.to_string()))?;
    let (version, rest) = bytes.split_first().ok_or_else(|| bad("it is empty"))?;
    if *version != VERSION {
        return Err(bad("another version of Decapod wrote it"));
    }
    let (salt, rest) = rest.split_at_checked(SALT).ok_or_else(|| bad("it is cut"))?;
    let (nonce, sealed) = rest.split_at_checked(NONCE_LEN).ok_or_else(|| bad("it is cut"))?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| bad("it is cut"))?;
    let mut sealed = sealed.to_vec();
    let opened = key(secret, salt)?.open_in_place(nonce, Aad::from([VERSION]), &mut sealed);
    let opened = opened.map_err(|_| bad("it was sealed under another token"))?;
    Ok(opened.to_vec())
}

fn key(secret: &str, salt: &[u8]) -> Result<LessSafeKey, Error> {
    let mut key = [0; 32];
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, ROUNDS, salt, secret.as_bytes(), &mut key);
    let key = UnboundKey::new(&AES_256_GCM, &key);
    Ok(LessSafeKey::new(key.map_err(|_| Error::Crypto("the key does not fit".into()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens_it() {
        let sealed = seal("secret", b"text").expect("seals");
        assert_ne!(sealed, seal("secret", b"text").expect("seals"), "each has its own salt");
        assert_eq!(open("secret", &sealed).expect("opens"), b"text");
        let told = |secret: &str, text: &str| {
            open(secret, text).expect_err("it does not open").to_string()
        };
        assert!(told("other", &sealed).contains("under another token"));
        let mut changed = STANDARD.decode(&sealed).expect("base64");
        if let Some(last) = changed.last_mut() {
            *last ^= 1;
        }
        assert!(told("secret", &STANDARD.encode(&changed)).contains("under another token"));
        assert!(told("secret", &STANDARD.encode(&changed[..20])).contains("cut"));
        changed[0] = 9;
        assert!(told("secret", &STANDARD.encode(&changed)).contains("another version"));
        assert!(told("secret", "").contains("empty"));
    }
}
