//! The ciphers, with upstream's byte layout.
//!
//! In: a key; a value and its storage key, to which it may be bound. Out: sealed bytes:
//!
//! ```text
//! aescbc     IV (16)    | AES-CBC, PKCS#7                    (not bound, changes are not detected)
//! aesgcm     nonce (12) | ciphertext | tag (16)              (bound to the storage key)
//! secretbox  nonce (24) | tag (16) | XSalsa20 ciphertext     (not bound)
//! xnonce     info (32)  | nonce (12) | ciphertext | tag (16) (KMS v2; bound to the storage key)
//! ```
//!
//! Invariant: nonces come from the crypto provider's random source, never from the seeded one.

use aws_lc_rs::aead::{self, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::cipher::{
    self, DecryptionContext, EncryptionContext, PaddedBlockDecryptingKey, PaddedBlockEncryptingKey,
    UnboundCipherKey,
};
use aws_lc_rs::hkdf;
use aws_lc_rs::iv::FixedLength;
use poly1305::Poly1305;
use poly1305::universal_hash::KeyInit;
use salsa20::XSalsa20;
use salsa20::cipher::{KeyIvInit, StreamCipher};

use crate::Error;

const BLOCK: usize = 16;
const TAG: usize = 16;
const BOX_NONCE: usize = 24;
/// The size of seeds, of derived keys, and of the random input of a key derivation.
const SEED: usize = 32;

/// One key for one cipher. `open(seal(v)) == v` with the same `place`, the storage key.
pub trait Cipher: Send + Sync {
    fn seal(&self, place: &[u8], value: &[u8]) -> Result<Vec<u8>, Error>;
    fn open(&self, place: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Error>;
}

/// AES-CBC. Most changes of the ciphertext are not detected: prefer any other.
pub struct Cbc {
    seals: PaddedBlockEncryptingKey,
    opens: PaddedBlockDecryptingKey,
}

impl Cbc {
    pub fn new(key: &[u8]) -> Result<Self, Error> {
        let algorithm = match key.len() {
            16 => &cipher::AES_128,
            24 => &cipher::AES_192,
            32 => &cipher::AES_256,
            length => return Err(Error::KeySize(length)),
        };
        let unbound = || UnboundCipherKey::new(algorithm, key).map_err(|_| Error::Cipher);
        Ok(Self {
            seals: PaddedBlockEncryptingKey::cbc_pkcs7(unbound()?).map_err(|_| Error::Cipher)?,
            opens: PaddedBlockDecryptingKey::cbc_pkcs7(unbound()?).map_err(|_| Error::Cipher)?,
        })
    }
}

impl Cipher for Cbc {
    fn seal(&self, _: &[u8], value: &[u8]) -> Result<Vec<u8>, Error> {
        let iv = pki::random_bytes::<BLOCK>();
        let mut body = value.to_vec();
        let context = EncryptionContext::Iv128(FixedLength::from(iv));
        self.seals.less_safe_encrypt(&mut body, context).map_err(|_| Error::Cipher)?;
        Ok([&iv[..], &body].concat())
    }

    fn open(&self, _: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Error> {
        let (iv, body) = sealed.split_first_chunk::<BLOCK>().ok_or(Error::TooShort)?;
        if !body.len().is_multiple_of(BLOCK) {
            return Err(Error::NotBlocks);
        }
        let mut body = body.to_vec();
        let context = DecryptionContext::Iv128(FixedLength::from(*iv));
        let length = self.opens.decrypt(&mut body, context).map_err(|_| Error::Padding)?.len();
        body.truncate(length);
        Ok(body)
    }
}

/// AES-GCM with random nonces: a key is safe for a few hundred thousand writes only.
pub struct Gcm(LessSafeKey);

impl Gcm {
    pub fn new(key: &[u8]) -> Result<Self, Error> {
        let algorithm = match key.len() {
            16 => &aead::AES_128_GCM,
            24 => &aead::AES_192_GCM,
            32 => &aead::AES_256_GCM,
            length => return Err(Error::KeySize(length)),
        };
        let key = UnboundKey::new(algorithm, key).map_err(|_| Error::Cipher)?;
        Ok(Self(LessSafeKey::new(key)))
    }
}

impl Cipher for Gcm {
    fn seal(&self, place: &[u8], value: &[u8]) -> Result<Vec<u8>, Error> {
        let nonce = pki::random_bytes::<NONCE_LEN>();
        let mut out = Vec::with_capacity(NONCE_LEN + value.len() + TAG);
        out.extend_from_slice(&nonce);
        out.extend_from_slice(value);
        let unique = Nonce::assume_unique_for_key(nonce);
        let tag = self
            .0
            .seal_in_place_separate_tag(unique, Aad::from(place), &mut out[NONCE_LEN..])
            .map_err(|_| Error::Cipher)?;
        out.extend_from_slice(tag.as_ref());
        Ok(out)
    }

    fn open(&self, place: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Error> {
        let (nonce, body) = sealed.split_first_chunk::<NONCE_LEN>().ok_or(Error::TooShort)?;
        let mut body = body.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = self.0.open_in_place(nonce, Aad::from(place), &mut body);
        let length = opened.map_err(|_| Error::Authentication)?.len();
        body.truncate(length);
        Ok(body)
    }
}

/// NaCl's secretbox: the first 32 bytes of the key stream are the authenticator's key.
pub struct Secretbox([u8; SEED]);

impl Secretbox {
    pub fn new(key: &[u8]) -> Result<Self, Error> {
        key.try_into().map(Self).map_err(|_| Error::KeySize(key.len()))
    }

    fn stream(&self, nonce: &[u8; BOX_NONCE]) -> (XSalsa20, Poly1305) {
        let mut stream = XSalsa20::new(&self.0.into(), &(*nonce).into());
        let mut first = [0; SEED];
        stream.apply_keystream(&mut first);
        (stream, Poly1305::new(&first.into()))
    }
}

impl Cipher for Secretbox {
    fn seal(&self, _: &[u8], value: &[u8]) -> Result<Vec<u8>, Error> {
        Ok(self.seal_with(&pki::random_bytes(), value))
    }

    fn open(&self, _: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Error> {
        let (nonce, rest) = sealed.split_first_chunk::<BOX_NONCE>().ok_or(Error::TooShort)?;
        let (tag, body) = rest.split_first_chunk::<TAG>().ok_or(Error::TooShort)?;
        let (mut stream, authenticator) = self.stream(nonce);
        let expected = authenticator.compute_unpadded(body);
        aws_lc_rs::constant_time::verify_slices_are_equal(&expected, tag)
            .map_err(|_| Error::Authentication)?;
        let mut body = body.to_vec();
        stream.apply_keystream(&mut body);
        Ok(body)
    }
}

impl Secretbox {
    fn seal_with(&self, nonce: &[u8; BOX_NONCE], value: &[u8]) -> Vec<u8> {
        let (mut stream, authenticator) = self.stream(nonce);
        let mut body = value.to_vec();
        stream.apply_keystream(&mut body);
        let tag = authenticator.compute_unpadded(&body);
        [&nonce[..], &tag, &body].concat()
    }
}

/// AES-GCM with a separate key for every value, derived from a seed: the seed does not wear out.
pub struct ExtendedNonce(hkdf::Prk);

impl ExtendedNonce {
    pub const SEED: usize = SEED;

    pub fn new(seed: &[u8]) -> Result<Self, Error> {
        if seed.len() < SEED {
            return Err(Error::KeySize(seed.len()));
        }
        Ok(Self(hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, seed)))
    }

    fn derived(&self, info: &[u8]) -> Result<Gcm, Error> {
        struct Length;
        impl hkdf::KeyType for Length {
            fn len(&self) -> usize {
                SEED
            }
        }
        let info = [info];
        let stream = self.0.expand(&info, Length).map_err(|_| Error::Cipher)?;
        let mut key = [0; SEED];
        stream.fill(&mut key).map_err(|_| Error::Cipher)?;
        Gcm::new(&key)
    }
}

impl Cipher for ExtendedNonce {
    fn seal(&self, place: &[u8], value: &[u8]) -> Result<Vec<u8>, Error> {
        let info = pki::random_bytes::<SEED>();
        Ok([&info[..], &self.derived(&info)?.seal(place, value)?].concat())
    }

    fn open(&self, place: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Error> {
        let (info, body) = sealed.split_first_chunk::<SEED>().ok_or(Error::TooShort)?;
        self.derived(info)?.open(place, body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: &[u8] = b"/registry/secrets/default/s";

    fn unhex(text: &str) -> Vec<u8> {
        let text: String = text.split_whitespace().collect();
        let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
        (0..text.len()).step_by(2).map(digit).collect()
    }

    /// Published vectors: NIST SP 800-38A F.2.5, the GCM specification's case 16, and NaCl's own.
    #[test]
    fn published_vectors_are_opened() {
        let check = |cipher: &dyn Cipher, place: &str, sealed: &str, expected: &str| {
            let opened = cipher.open(&unhex(place), &unhex(sealed)).expect("it can be opened");
            assert_eq!(opened, unhex(expected));
        };
        let gcm =
            Gcm::new(&unhex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"));
        check(
            &gcm.expect("a key"),
            "feedfacedeadbeeffeedfacedeadbeefabaddad2",
            "cafebabefacedbaddecaf888
             522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa
             8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662
             76fc6ece0f4e1768cddf8853bb2d551b",
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72
             1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        );
        let secretbox = Secretbox::new(&unhex(
            "1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389",
        ));
        check(
            &secretbox.expect("a key"),
            "",
            "69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37
             f3ffc7703f9400e52a7dfb4b3d3305d9
             8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186a
             c0dfc17c98dce87b4da7f011ec48c97271d2c20f9b928fe2270d6fb863d51738
             b48eeee314a7cc8ab932164548e526ae90224368517acfeabd6bb3732bc0e9da
             99832b61ca01b6de56244a9e88d5f9b37973f622a43d14a6599b1f654cb45a74
             e355a5",
            "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffc
             e5ecbaaf33bd751a1ac728d45e6c61296cdc3c01233561f41db66cce314adb31
             0e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f21af1fde
             048977eb48f59ffd4924ca1c60902e52f0a089bc76897040e082f93776384864
             5e0705",
        );
    }

    /// The same vector's key and IV: the first block is NIST's ciphertext.
    #[test]
    fn cbc_matches_nists_vector() {
        let key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4";
        let cipher = Cbc::new(&unhex(key)).expect("a key");
        let iv: [u8; BLOCK] = std::array::from_fn(|index| index as u8);
        let mut body = unhex("6bc1bee22e409f96e93d7e117393172a");
        let context = EncryptionContext::Iv128(FixedLength::from(iv));
        cipher.seals.less_safe_encrypt(&mut body, context).expect("it seals");
        assert_eq!(body[..BLOCK], unhex("f58c4c04d6e5f1ba779eabfb5f7bfbd6"));
        let opened = cipher.open(PLACE, &[&iv[..], &body].concat()).expect("it opens");
        assert_eq!(opened, unhex("6bc1bee22e409f96e93d7e117393172a"));
    }

    #[test]
    fn only_sealed_values_can_be_opened() {
        let key = pki::random_bytes::<32>();
        let other = pki::random_bytes::<32>();
        let all = |key: &[u8]| -> Vec<(Box<dyn Cipher>, bool)> {
            vec![
                (Box::new(Cbc::new(key).expect("32 bytes")), false),
                (Box::new(Gcm::new(key).expect("32 bytes")), true),
                (Box::new(Secretbox::new(key).expect("32 bytes")), true),
                (Box::new(ExtendedNonce::new(key).expect("32 bytes")), true),
            ]
        };
        for ((cipher, detects), (wrong, _)) in all(&key).into_iter().zip(all(&other)) {
            for value in [&b""[..], b"x", b"0123456789abcdef", &[7; 1000]] {
                let sealed = cipher.seal(PLACE, value).expect("it seals");
                assert_eq!(cipher.open(PLACE, &sealed).expect("it opens"), value);
                assert_ne!(wrong.open(PLACE, &sealed).ok().as_deref(), Some(value));
                assert!(cipher.open(PLACE, &sealed[..8]).is_err(), "too short");
                for at in (0..sealed.len()).filter(|_| detects) {
                    let mut changed = sealed.clone();
                    changed[at] ^= 1;
                    assert!(cipher.open(PLACE, &changed).is_err(), "byte {at} was changed");
                }
            }
        }
    }

    #[test]
    fn a_value_moved_to_another_key_is_refused() {
        let gcm = Gcm::new(&[1; 16]).expect("a key");
        let sealed = gcm.seal(PLACE, b"value").expect("it seals");
        assert!(gcm.open(b"/registry/secrets/other/s", &sealed).is_err());
    }

    #[test]
    fn keys_have_sizes() {
        for length in [0, 8, 31, 33] {
            assert!(Cbc::new(&vec![0; length]).is_err());
            assert!(Gcm::new(&vec![0; length]).is_err());
            assert!(Secretbox::new(&vec![0; length]).is_err());
        }
    }
}
