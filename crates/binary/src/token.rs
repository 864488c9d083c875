//! The server's join token: from the flag, or created at the first start.

use std::path::Path;

use anyhow::Context;
use pki::{JoinToken, Pki};

const FILE: &str = "token";
const LENGTH: usize = 32;

/// The server's token, which starts with the hash of its authority; kept in `<data-dir>/token`.
pub fn of_server(flag: Option<&str>, data_dir: &Path, pki: &Pki) -> anyhow::Result<JoinToken> {
    let path = data_dir.join(FILE);
    let secret = match flag {
        Some(text) => JoinToken::parse(text).context("--token")?.secret,
        None => match std::fs::read_to_string(&path) {
            Ok(text) => JoinToken::parse(&text).with_context(|| path.display().to_string())?.secret,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => pki::random_token(LENGTH),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        },
    };
    let token = JoinToken { ca_hash: Some(pki.cluster_ca.fingerprint()), secret };
    pki::write_private(&path, token.to_string().as_bytes(), 0o600)?;
    Ok(token)
}
