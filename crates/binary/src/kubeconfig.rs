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

/// The connections below it, and the URL of the server.
pub fn http(path: &Path) -> anyhow::Result<(HttpClient, String)> {
    let config = pki::Kubeconfig::read(path)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    let credentials = config.resolve(None, directory)?;
    let plugin = credentials.exec.map(|exec| Plugin::new(&exec.config, exec.cluster, directory));
    let plugin = plugin.transpose().with_context(|| path.display().to_string())?;
    let server = credentials.server.clone();
    let http = HttpClient::new(&ClientOptions {
        server: credentials.server,
        ca_pem: credentials.ca_pem,
        cert_pem: credentials.client_cert_pem,
        key_pem: credentials.client_key_pem,
        insecure: credentials.insecure_skip_tls_verify,
        server_name: credentials.tls_server_name,
        token: credentials.token.map(Token::fixed),
        user_agent: None,
        source: plugin.map(|plugin| Arc::new(plugin) as Arc<dyn CredentialSource>),
    })
    .with_context(|| path.display().to_string())?;
    Ok((http, server))
}
