//! The providers of a resource in order: the first one writes, and the one that knows a value's prefix
//! reads it.
//!
//! In: a checked configuration. Out: [`Chain`]s, each shared by the resources of its rule.
//!
//! Invariant: a matching prefix does not end the search. Two providers of one type share their prefix, and
//! the second may have the key that was removed from the first.

use std::sync::Arc;

use bytes::Bytes;

use crate::Error;
use crate::cipher::{Cbc, Cipher, Gcm, Secretbox};
use crate::config::{self, Key};
use crate::kms::Kms;

/// Only sealed values of an API server start with this.
pub const SEALED: &[u8] = b"k8s:enc:";

/// One provider.
pub enum Step {
    /// Values are stored unchanged.
    Identity,
    /// The keys of one provider, by name: `NAME:` follows the prefix.
    Keys {
        prefix: &'static str,
        what: &'static str,
        keys: Vec<(String, Box<dyn Cipher>)>,
    },
    Kms {
        prefix: String,
        kms: Arc<Kms>,
    },
}

/// The providers of some resources, in order.
pub struct Chain(pub Vec<Step>);

type MakeCipher = fn(&[u8]) -> Result<Box<dyn Cipher>, Error>;

fn keys(
    prefix: &'static str,
    what: &'static str,
    given: &[Key],
    make: MakeCipher,
) -> Result<Step, Error> {
    let one = |key: &Key| Ok((key.name.clone(), make(&key.bytes()?)?));
    Ok(Step::Keys { prefix, what, keys: given.iter().map(one).collect::<Result<_, Error>>()? })
}

impl Step {
    /// `kms` makes the client of a KMS plugin.
    pub fn new(
        provider: &config::Provider,
        kms: &mut dyn FnMut(&config::Kms) -> Result<Arc<Kms>, Error>,
    ) -> Result<Self, Error> {
        if let Some(given) = &provider.aesgcm {
            return keys("k8s:enc:aesgcm:v1:", "AES", &given.keys, |key| {
                Ok(Box::new(Gcm::new(key)?))
            });
        }
        if let Some(given) = &provider.aescbc {
            return keys("k8s:enc:aescbc:v1:", "AES", &given.keys, |key| {
                Ok(Box::new(Cbc::new(key)?))
            });
        }
        if let Some(given) = &provider.secretbox {
            return keys("k8s:enc:secretbox:v1:", "Secretbox", &given.keys, |key| {
                Ok(Box::new(Secretbox::new(key)?))
            });
        }
        match &provider.kms {
            Some(given) => {
                let prefix = format!("k8s:enc:kms:v2:{}:", given.name);
                Ok(Self::Kms { prefix, kms: kms(given)? })
            }
            None => Ok(Self::Identity),
        }
    }

    /// The bytes after this provider's prefix; `None` if the value has another prefix.
    fn body<'a>(&self, value: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            Self::Identity => (!value.starts_with(SEALED)).then_some(value),
            Self::Keys { prefix, .. } => value.strip_prefix(prefix.as_bytes()),
            Self::Kms { prefix, .. } => value.strip_prefix(prefix.as_bytes()),
        }
    }

    fn seal(&self, place: &[u8], value: Bytes) -> Result<Bytes, Error> {
        let (prefix, sealed) = match self {
            Self::Identity => return Ok(value),
            Self::Keys { prefix, keys, .. } => {
                let (name, cipher) = keys.first().ok_or(Error::NoKeys)?;
                (format!("{prefix}{name}:"), cipher.seal(place, &value)?)
            }
            Self::Kms { prefix, kms } => (prefix.clone(), kms.seal(place, &value)?),
        };
        Ok([prefix.as_bytes(), &sealed].concat().into())
    }

    /// The value, and whether a write would seal it differently.
    fn open(&self, place: &[u8], whole: &Bytes, body: &[u8]) -> Result<(Bytes, bool), Error> {
        match self {
            Self::Identity => Ok((whole.clone(), false)),
            Self::Kms { kms, .. } => {
                let (value, is_stale) = kms.open(place, body)?;
                Ok((value.into(), is_stale))
            }
            Self::Keys { what, keys, .. } => {
                let mut failure = Error::NoKeyFits(what);
                for (index, (name, cipher)) in keys.iter().enumerate() {
                    let sealed = body.strip_prefix(name.as_bytes());
                    let Some(sealed) = sealed.and_then(|rest| rest.strip_prefix(b":")) else {
                        continue;
                    };
                    match cipher.open(place, sealed) {
                        Ok(value) => return Ok((value.into(), index > 0)),
                        Err(error) => failure = error,
                    }
                }
                Err(failure)
            }
        }
    }
}

impl Chain {
    pub fn seal(&self, place: &[u8], value: Bytes) -> Result<Bytes, Error> {
        self.0.first().ok_or(Error::NoKeys)?.seal(place, value)
    }

    /// The value, and whether it is stale: a write would seal it differently now.
    pub fn open(&self, place: &[u8], value: &Bytes) -> Result<(Bytes, bool), Error> {
        let mut failure = Error::NoPrefixFits;
        for (index, step) in self.0.iter().enumerate() {
            let Some(body) = step.body(value) else { continue };
            match step.open(place, value, body) {
                Ok((opened, is_stale)) => return Ok((opened, is_stale || index > 0)),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// The KMS plugin that must open the value's seed first, and the bytes for it.
    pub fn awaited<'a>(&self, value: &'a [u8]) -> Option<(&Arc<Kms>, &'a [u8])> {
        self.0.iter().find_map(|step| match step {
            Step::Kms { kms, .. } => {
                let body = step.body(value)?;
                (!kms.has_key_for(body)).then_some((kms, body))
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;
    use crate::config::{Empty, Keys, Provider};

    const PLACE: &[u8] = b"/registry/secrets/default/s";

    fn key(name: &str, byte: u8) -> Key {
        Key { name: name.into(), secret: STANDARD.encode([byte; 32]) }
    }

    fn provider(kind: &str, keys: Vec<Key>) -> Provider {
        let keys = Some(Keys { keys });
        match kind {
            "aesgcm" => Provider { aesgcm: keys, ..Provider::default() },
            "aescbc" => Provider { aescbc: keys, ..Provider::default() },
            "secretbox" => Provider { secretbox: keys, ..Provider::default() },
            _ => Provider { identity: Some(Empty {}), ..Provider::default() },
        }
    }

    fn chain(providers: &[Provider]) -> Chain {
        let mut none = |_: &config::Kms| Err(Error::NoKeys);
        Chain(providers.iter().map(|one| Step::new(one, &mut none).expect("valid")).collect())
    }

    fn plain() -> Bytes {
        Bytes::from_static(b"{\"kind\":\"Secret\"}")
    }

    #[test]
    fn values_carry_upstreams_prefixes() {
        for kind in ["aesgcm", "aescbc", "secretbox"] {
            let chain = chain(&[provider(kind, vec![key("key1", 1)])]);
            let sealed = chain.seal(PLACE, plain()).expect("it seals");
            assert!(sealed.starts_with(format!("k8s:enc:{kind}:v1:key1:").as_bytes()));
            assert_eq!(chain.open(PLACE, &sealed).expect("it opens"), (plain(), false));
        }
        let identity = chain(&[provider("identity", vec![])]);
        assert_eq!(identity.seal(PLACE, plain()).expect("unchanged"), plain());
    }

    /// The steps of a key rotation, with a value from each step.
    #[test]
    fn the_order_determines_the_writer_and_stale_values() {
        let (old, new) = (key("old", 1), key("new", 2));
        let identity = || provider("identity", vec![]);
        let before = chain(&[provider("aescbc", vec![old.clone()]), identity()]);
        let sealed = before.seal(PLACE, plain()).expect("it seals");
        let is_stale = |chain: &Chain, value: &Bytes| chain.open(PLACE, value).map(|out| out.1);
        assert!(is_stale(&before, &plain()).expect("plain values are read"));
        let second = chain(&[provider("aescbc", vec![old.clone(), new.clone()]), identity()]);
        assert!(!is_stale(&second, &sealed).expect("the old key still writes"));
        let first = chain(&[provider("aescbc", vec![new.clone(), old.clone()]), identity()]);
        assert!(is_stale(&first, &sealed).expect("the old key still reads"));
        let apart = chain(&[provider("aescbc", vec![new.clone()]), provider("aescbc", vec![old])]);
        assert!(is_stale(&apart, &sealed).expect("a second provider of the type is tried"));
        let after = chain(&[provider("aescbc", vec![new]), identity()]);
        let error = is_stale(&after, &sealed).expect_err("the key was removed");
        assert_eq!(error.to_string(), "no matching key was found for the provided AES transformer");
        let off = chain(&[identity(), provider("aescbc", vec![key("old", 1)])]);
        assert!(is_stale(&off, &sealed).expect("decrypting for good"));
        assert_eq!(off.seal(PLACE, plain()).expect("unchanged"), plain());
    }

    #[test]
    fn a_wrong_key_and_no_key_are_errors() {
        let sealed = chain(&[provider("secretbox", vec![key("k", 1)])]).seal(PLACE, plain());
        let sealed = sealed.expect("it seals");
        let wrong =
            chain(&[provider("secretbox", vec![key("k", 2)]), provider("identity", vec![])]);
        assert!(matches!(wrong.open(PLACE, &sealed), Err(Error::Authentication)));
        let identity = chain(&[provider("identity", vec![])]);
        let error = identity.open(PLACE, &sealed).expect_err("it is sealed");
        assert_eq!(error.to_string(), "no matching prefix found");
    }
}
