//! Tokens with which a node joins.
//!
//! A join token is `K10<sha256 of the authority's DER certificate, hex>::<secret>`. With the hash
//! the node checks the server before it sends the secret. A bare secret is also accepted; the node
//! then trusts the server's authority at the first contact.
//!
//! On the wire the secret is a bootstrap token (`id.secret`, a Secret in kube-system), with which a joining
//! node authenticates upstream. Both sides map a secret of another form to a bootstrap token in the same way.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::{Error, malformed};

const PREFIX: &str = "K10";
const SEPARATOR: &str = "::";
const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
const ID_LENGTH: usize = 6;
const SECRET_LENGTH: usize = 16;

#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// SHA-256 of the cluster authority's certificate, DER. `None`: trust at first contact.
    pub ca_hash: Option<[u8; 32]>,
    pub secret: String,
}

impl JoinToken {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let bad = |why: &str| malformed("token", why);
        let Some(rest) = text.strip_prefix(PREFIX).filter(|rest| rest.contains(SEPARATOR)) else {
            return match text {
                "" => Err(bad("it is empty")),
                secret => Ok(Self { ca_hash: None, secret: secret.to_owned() }),
            };
        };
        let (hash, secret) = rest.split_once(SEPARATOR).expect("the filter saw it");
        let hash = decode_hex(hash).ok_or_else(|| bad("the hash must be 64 hex digits"))?;
        if secret.is_empty() {
            return Err(bad("it has no secret after the hash"));
        }
        Ok(Self { ca_hash: Some(hash), secret: secret.to_owned() })
    }

    pub fn bootstrap(&self) -> BootstrapToken {
        BootstrapToken::from_secret(&self.secret)
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(hash) = &self.ca_hash {
            f.write_str(PREFIX)?;
            hash.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            f.write_str(SEPARATOR)?;
        }
        f.write_str(&self.secret)
    }
}

/// Omits the secret, to keep it out of logs.
impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").field("ca_hash", &self.ca_hash).finish_non_exhaustive()
    }
}

/// Upstream's bootstrap token: `[a-z0-9]{6}.[a-z0-9]{16}`. The first part is public.
#[derive(Clone, PartialEq, Eq)]
pub struct BootstrapToken {
    pub id: String,
    pub secret: String,
}

impl BootstrapToken {
    /// `None` if the text does not have this form.
    pub fn parse(text: &str) -> Option<Self> {
        let (id, secret) = text.split_once('.')?;
        let is_fit = |part: &str, length| {
            part.len() == length && part.bytes().all(|byte| ALPHABET.contains(&byte))
        };
        (is_fit(id, ID_LENGTH) && is_fit(secret, SECRET_LENGTH))
            .then(|| Self { id: id.to_owned(), secret: secret.to_owned() })
    }

    /// The text itself if it is a bootstrap token, otherwise a token derived from it.
    pub fn from_secret(text: &str) -> Self {
        if let Some(token) = Self::parse(text) {
            return token;
        }
        // Two hashes, because 22 characters need two bytes each, and one hash has 32.
        let digest = |part: &str| Sha256::digest(format!("decapod bootstrap token {part}\0{text}"));
        let bytes = [digest("a"), digest("b")].concat();
        let mut characters = bytes.chunks_exact(2).map(|pair| {
            ALPHABET[usize::from(u16::from_be_bytes([pair[0], pair[1]])) % ALPHABET.len()] as char
        });
        let id = characters.by_ref().take(ID_LENGTH).collect();
        Self { id, secret: characters.take(SECRET_LENGTH).collect() }
    }

    pub fn generate() -> Self {
        let text = random_token(ID_LENGTH + SECRET_LENGTH);
        Self { id: text[..ID_LENGTH].to_owned(), secret: text[ID_LENGTH..].to_owned() }
    }

    /// The name of its Secret in kube-system.
    pub fn secret_name(&self) -> String {
        format!("bootstrap-token-{}", self.id)
    }
}

impl fmt::Display for BootstrapToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.id, self.secret)
    }
}

/// Prints the public id, but omits the secret.
impl fmt::Debug for BootstrapToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootstrapToken").field("id", &self.id).finish_non_exhaustive()
    }
}

/// `length` random characters of `[a-z0-9]`.
pub fn random_token(length: usize) -> String {
    let character = |_| loop {
        let [byte] = crate::random_bytes::<1>();
        // 252 is the largest multiple of 36 in a byte: larger values would make some characters likelier.
        if byte < 252 {
            return ALPHABET[usize::from(byte) % ALPHABET.len()] as char;
        }
    };
    (0..length).map(character).collect()
}

fn decode_hex(text: &str) -> Option<[u8; 32]> {
    let mut out = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (index, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_tokens_round_trip() {
        let token = JoinToken { ca_hash: Some([0xab; 32]), secret: "s3cret::x".into() };
        let text = token.to_string();
        assert!(text.starts_with("K10abab") && text.ends_with("::s3cret::x"));
        assert_eq!(JoinToken::parse(&text).expect("parses"), token);
        let bare = JoinToken::parse(" anything \n").expect("parses");
        assert_eq!((bare.ca_hash, bare.secret.as_str()), (None, "anything"));
        for bad in ["", "K10xyz::s", &format!("K10{}::", "0".repeat(64))] {
            assert!(JoinToken::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn any_secret_maps_to_one_bootstrap_token() {
        let check = |text: &str| {
            let token = BootstrapToken::from_secret(text);
            assert_eq!(token, BootstrapToken::from_secret(text));
            assert_eq!(BootstrapToken::parse(&token.to_string()), Some(token.clone()));
            token.to_string()
        };
        assert_eq!(check("abcdef.0123456789abcdef"), "abcdef.0123456789abcdef");
        assert_ne!(check("anything"), check("anything else"));
        assert_ne!(check("ABCDEF.0123456789abcdef"), "abcdef.0123456789abcdef");
        check(&BootstrapToken::generate().to_string());
    }
}
