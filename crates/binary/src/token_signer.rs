//! Service account tokens in Secrets, signed with the service account key.
//!
//! In: the key, as PEM. Out: the signer for the controller of such Secrets. (The controllers' crate does
//! not depend on a crate for tokens.)

use std::sync::Arc;

use anyhow::Context;
use auth::service_account::TokenKeys;
use controllers::{SignError, TokenSigner};
use machinery::ObjectMeta;

struct Signer(TokenKeys);

pub fn of_key(pem: &str) -> anyhow::Result<Arc<dyn TokenSigner>> {
    let keys = TokenKeys::of_secrets(pem).context("the service account key cannot be used")?;
    Ok(Arc::new(Signer(keys)))
}

impl TokenSigner for Signer {
    fn sign(&self, account: &ObjectMeta, secret: &str) -> Result<String, SignError> {
        self.0.sign_secret(account, secret).map_err(|error| SignError(error.into()))
    }
}

/// Keeps the key out of logs.
impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signer").finish_non_exhaustive()
    }
}
