//! Clients from kubeconfig files, for components that run alone.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use client::Client;
use client::exec::Plugin;
use transport::{ClientOptions, CredentialSource, HttpClient, Token};

pub fn client(path: &Path, agent: &str) -> anyhow::Result<Client> {
    Ok(Client::over(http(path)?.0, agent))
}

/// This cluster's name in a file with other clusters.
const NAME: &str = "decapod";

/// Writes the administrator's kubeconfig to the given path. Other clusters in the file are kept; a file
/// that is not a kubeconfig is not overwritten.
pub fn write_beside_others(config: &pki::Kubeconfig, path: &Path, mode: u32) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.with_context(|| format!("--write-kubeconfig: cannot make {}", parent.display()))?;
    }
    let has_content = std::fs::metadata(path).is_ok_and(|meta| meta.len() > 0);
    let there = match has_content {
        true => Some(pki::Kubeconfig::read(path).context(
            "--write-kubeconfig names a file that is not a kubeconfig; it was not changed",
        )?),
        false => None,
    };
    let merged = there.and_then(|there| config.merged_into(&there, NAME));
    merged.as_ref().unwrap_or(config).write(path, mode).context("--write-kubeconfig")
}

/// An HTTP client for the kubeconfig, and the server's URL.
pub fn http(path: &Path) -> anyhow::Result<(HttpClient, String)> {
    let options = options(path, None)?;
    let http = HttpClient::new(&options).with_context(|| path.display().to_string())?;
    Ok((http, options.server))
}

/// The settings of a client for the kubeconfig; `master` overrides its server.
pub fn options(path: &Path, master: Option<&str>) -> anyhow::Result<ClientOptions> {
    let config = pki::Kubeconfig::read(path)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    let credentials = config.resolve(None, directory)?;
    let plugin = credentials.exec.map(|exec| Plugin::new(&exec.config, exec.cluster, directory));
    let plugin = plugin.transpose().with_context(|| path.display().to_string())?;
    Ok(ClientOptions {
        server: master.map_or(credentials.server, str::to_owned),
        ca_pem: credentials.ca_pem,
        cert_pem: credentials.client_cert_pem,
        key_pem: credentials.client_key_pem,
        insecure: credentials.insecure_skip_tls_verify,
        server_name: credentials.tls_server_name,
        token: credentials.token.map(Token::fixed),
        user_agent: None,
        source: plugin.map(|plugin| Arc::new(plugin) as Arc<dyn CredentialSource>),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_with_other_clusters_keeps_them() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("home/.kube/config");
        let own =
            |token| pki::Kubeconfig::with_token("https://127.0.0.1:6443", "CA", "admin", token);
        write_beside_others(&own("1"), &path, 0o600).expect("the directory is made");
        write_beside_others(&own("2"), &path, 0o600).expect("its own file is replaced");
        assert_eq!(pki::Kubeconfig::read(&path).expect("readable"), own("2"));
        let other = pki::Kubeconfig::with_token("https://prod:6443", "CA", "jane", "3");
        other.write(&path, 0o600).expect("written");
        for token in ["4", "5"] {
            write_beside_others(&own(token), &path, 0o600).expect("merged");
            let both = pki::Kubeconfig::read(&path).expect("readable");
            let token_of = |context| both.resolve(context, root.path()).expect("there").token;
            assert_eq!(token_of(Some("default")).as_deref(), Some("3"));
            assert_eq!(token_of(None).as_deref(), Some(token));
        }
        std::fs::write(&path, "a letter: [").expect("written");
        let why = write_beside_others(&own("6"), &path, 0o600).expect_err("no kubeconfig");
        assert!(crate::process::told(&why).contains("was not changed"));
        assert_eq!(std::fs::read_to_string(&path).expect("readable"), "a letter: [");
    }
}
