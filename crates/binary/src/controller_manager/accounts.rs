//! Identities of controllers: a service account of kube-system for each, and tokens of an hour.
//!
//! In: the kubeconfig's identity, which may create accounts and tokens. Out: a client whose requests carry
//! the account's token. A token is asked for when the first request needs it, and again when four fifths of
//! its lifetime are over or the server refused it.
//! Upstream: `controller-manager/pkg/clientbuilder/client_builder_dynamic.go`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use client::{Api, Client, ErrorExt, PostParams};
use http::Method;
use k8s_openapi::api::core::v1::ServiceAccount;
use machinery::ObjectMeta;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;
use transport::{BoxError, ClientOptions, CredentialSource, HttpClient, Shown};

const NAMESPACE: &str = "kube-system";
const SECONDS: u64 = 3600;
/// A clock that is wrong must not cause a request for each request.
const SHORTEST: Duration = Duration::from_secs(600);

/// A client with the account's rights. `manager` is the component's name.
pub fn client(
    manager: &str,
    options: &ClientOptions,
    own: Client,
    account: &str,
) -> anyhow::Result<Client> {
    let source = Account { own, name: account.to_owned(), kept: Mutex::default() };
    let options = ClientOptions {
        cert_pem: None,
        key_pem: None,
        token: None,
        source: Some(Arc::new(source)),
        ..options.clone()
    };
    let agent = format!("{manager}/{account}");
    Ok(Client::over(HttpClient::new(&options)?, &agent))
}

struct Account {
    /// May create tokens.
    own: Client,
    name: String,
    /// Held while a token is asked for, so that many requests cause one.
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    generation: u64,
    token: Option<(String, Instant)>,
}

impl Account {
    async fn ask(&self) -> anyhow::Result<(String, Duration)> {
        self.ensure().await?;
        let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{}/token", self.name);
        let body = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": SECONDS, "audiences": []},
        });
        let sent = self.own.call(Method::POST, &path, "application/json", body.to_string());
        let answer: Value = serde_json::from_slice(&sent.await?)?;
        let text = |name: &str| answer["status"][name].as_str();
        let token = text("token").context("the answer has no token")?;
        let until: jiff::Timestamp =
            text("expirationTimestamp").context("the answer has no time")?.parse()?;
        let left = until.duration_since(base::clock::now());
        let left = Duration::try_from(left).unwrap_or_default().max(SHORTEST);
        Ok((token.to_owned(), left * 4 / 5))
    }

    /// Creates the account if it is missing.
    async fn ensure(&self) -> anyhow::Result<()> {
        let api: Api<ServiceAccount> = self.own.api(Some(NAMESPACE));
        match api.get(&self.name).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
        let account = ServiceAccount { metadata, ..ServiceAccount::default() };
        match api.create(&PostParams::default(), &account).await {
            Err(error) if !error.is_already_exists() => Err(error.into()),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl CredentialSource for Account {
    async fn current(&self) -> Result<Shown, BoxError> {
        let mut kept = self.kept.lock().await;
        let now = Instant::now();
        if kept.token.as_ref().is_none_or(|(_, until)| *until <= now) {
            let (token, lasts) = self
                .ask()
                .await
                .with_context(|| format!("failed to get token for {NAMESPACE}/{}", self.name))?;
            kept.generation += 1;
            kept.token = Some((token, now + lasts));
        }
        let token = kept.token.as_ref().map(|(token, _)| token.clone());
        Ok(Shown { generation: kept.generation, token, identity: None })
    }

    async fn refused(&self, generation: u64) {
        let mut kept = self.kept.lock().await;
        if kept.generation == generation {
            kept.token = None;
        }
    }
}
