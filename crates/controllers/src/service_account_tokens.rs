//! Tokens that live in Secrets: one of type `kubernetes.io/service-account-token` is filled for the
//! ServiceAccount that it names, and goes with it.
//!
//! In: such Secrets, ServiceAccounts, a signer. Out: `token`, `ca.crt` and `namespace` in the Secret,
//! the account's uid in its annotations; deletions of Secrets whose account is gone; accounts without
//! references to Secrets that are gone.
//! Upstream: `pkg/controller/serviceaccount/tokens_controller.go`, which tells no events, either.
//!
//! Invariant: the Secret that is written is the one that was judged: same uid, same version.

use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, Event, Lister, ObjectKey, Outcome, PostParams, Preconditions,
    RawEvent, Result, WorkQueue, retry_on_conflict,
};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};

use crate::context::TokenSigner;
use crate::descriptor::{Descriptor, Row, Setup, on, on_metadata};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Tokens, Work> {
    name: "serviceaccount-token-controller",
    // Upstream's has no account of its own, for it makes the tokens of all others.
    account: "kube-controller-manager",
    component: "serviceaccount-token-controller",
    queue: "serviceaccount_tokens_service",
    workers: 5,
    new: Tokens::new,
    watches: &[
        &on(Tokens::secret_event).within(None, TYPE),
        &on_metadata::<ServiceAccount, _, _>(Tokens::account_event),
    ],
    reconcile: |this, work| {
        Box::pin(async move {
            let done = match work {
                Work::Secret(key) => match this.secrets.get_key(&key) {
                    Some(secret) => this.keep(&secret).await,
                    None => Ok(()),
                },
                Work::Gone { namespace, secret, account, uid } => {
                    this.forget(&namespace, &secret, &account, &uid).await
                }
            };
            done.map(|()| Outcome::Done)
        })
    },
};

const TYPE: &str = "type=kubernetes.io/service-account-token";
const ACCOUNT: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";
const CA: &str = "ca.crt";
const NAMESPACE: &str = "namespace";
const TOKEN: &str = "token";
/// Secrets by namespace and name of their account.
const BY_ACCOUNT: &str = "account";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Secret(ObjectKey),
    /// A Secret that is gone, which its account may refer to.
    Gone {
        namespace: Arc<str>,
        secret: Arc<str>,
        account: String,
        uid: String,
    },
}

fn annotation<'a>(secret: &'a Secret, name: &str) -> &'a str {
    let annotations = secret.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(name)).map_or("", String::as_str)
}

struct Tokens {
    root_ca: Option<String>,
    signer: Arc<dyn TokenSigner>,
    client: client::Client,
    accounts: Lister<ServiceAccount>,
    secrets: Lister<Secret>,
}

/// The parts that a Secret lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lacks {
    ca: bool,
    namespace: bool,
    token: bool,
}

impl Lacks {
    const NOTHING: Self = Self { ca: false, namespace: false, token: false };

    fn of(secret: &Secret, root_ca: Option<&str>) -> Self {
        let data = |key: &str| {
            let found = secret.data.as_ref().and_then(|data| data.get(key));
            found.map_or(&[][..], |value| value.0.as_slice())
        };
        let root_ca = root_ca.filter(|root_ca| !root_ca.is_empty());
        Self {
            ca: root_ca.is_some_and(|root_ca| root_ca.as_bytes() != data(CA)),
            namespace: data(NAMESPACE).is_empty(),
            token: data(TOKEN).is_empty(),
        }
    }
}

impl Tokens {
    fn new(setup: &Setup<Work>) -> Option<Self> {
        let Some(signer) = setup.options.token_signer.clone() else {
            tracing::info!("no key signs tokens of service accounts: Secrets get none");
            return None;
        };
        let secrets = setup.scoped::<Secret>(None, TYPE);
        secrets.index(BY_ACCOUNT, |secret| {
            let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
            vec![format!("{namespace}/{}", annotation(secret, ACCOUNT))]
        });
        Some(Self {
            root_ca: setup.options.root_ca.clone(),
            signer,
            client: setup.client.clone(),
            accounts: setup.lister(),
            secrets: secrets.lister(),
        })
    }

    fn secret_event(&self, queue: &WorkQueue<Work>, event: &Event<Secret>) {
        let (key, secret) = (event.key(), event.object());
        queue.add(match event.is_deleted() {
            false => Work::Secret(key),
            true => Work::Gone {
                namespace: key.namespace,
                secret: key.name,
                account: annotation(secret, ACCOUNT).to_owned(),
                uid: annotation(secret, ACCOUNT_UID).to_owned(),
            },
        });
    }

    fn account_event(&self, queue: &WorkQueue<Work>, event: &RawEvent) {
        let RawEvent::Deleted(entry) = event else { return };
        for secret in self.secrets.entries_by_index(BY_ACCOUNT, &entry.header.key.to_string()) {
            queue.add(Work::Secret(secret.header.key.clone()));
        }
    }

    /// Fills a Secret for its account, or deletes it with that.
    async fn keep(&self, secret: &Secret) -> Result<()> {
        let (namespace, account) =
            (secret.metadata.namespace.as_deref().unwrap_or_default(), annotation(secret, ACCOUNT));
        if account.is_empty() {
            return Ok(());
        }
        let api: Api<Secret> = self.client.api(Some(namespace));
        match self.account(namespace, account, annotation(secret, ACCOUNT_UID)).await? {
            Some(account) => self.fill(&api, secret, &account).await,
            None => delete(&api, secret).await,
        }
    }

    /// The account of that name, and of that uid if one is given. A Secret is often made together
    /// with its account, which the cache then does not have yet.
    async fn account(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<Option<Arc<ServiceAccount>>> {
        let is_it = |account: &ServiceAccount| {
            uid.is_empty() || account.metadata.uid.as_deref() == Some(uid)
        };
        if let Some(account) = self.accounts.get(namespace, name).filter(|account| is_it(account)) {
            return Ok(Some(account));
        }
        let api: Api<ServiceAccount> = self.client.api(Some(namespace));
        match api.get(name).await {
            Ok(account) => Ok(Some(Arc::new(account)).filter(|account| is_it(account))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn fill(
        &self,
        api: &Api<Secret>,
        secret: &Secret,
        account: &ServiceAccount,
    ) -> Result<()> {
        let root_ca = self.root_ca.as_deref();
        if Lacks::of(secret, root_ca) == Lacks::NOTHING {
            return Ok(());
        }
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        let mut live = match api.get(name).await {
            Err(error) if error.is_not_found() => return Ok(()),
            live => live?,
        };
        // A newer one comes as an event.
        if live.metadata.resource_version != secret.metadata.resource_version {
            return Ok(());
        }
        let lacks = Lacks::of(&live, root_ca);
        let token = match lacks.token {
            true => match self.signer.sign(&account.metadata, name) {
                Ok(token) => Some(token),
                Err(error) => {
                    tracing::error!(%error, secret = name, "failed to sign the token of the Secret");
                    return Ok(());
                }
            },
            false => None,
        };
        complete(&mut live, lacks, root_ca, token, account);
        match api.replace(name, &PostParams::default(), &live).await {
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }

    /// Takes a Secret that is gone out of its account's list.
    async fn forget(&self, namespace: &str, secret: &str, name: &str, uid: &str) -> Result<()> {
        if name.is_empty() || self.accounts.get(namespace, name).is_none() {
            return Ok(());
        }
        let api: Api<ServiceAccount> = self.client.api(Some(namespace));
        retry_on_conflict(|| async {
            let mut account = match api.get(name).await {
                Err(error) if error.is_not_found() => return Ok(()),
                account => account?,
            };
            let is_other = !uid.is_empty() && account.metadata.uid.as_deref() != Some(uid);
            let Some(secrets) = account.secrets.as_mut().filter(|_| !is_other) else {
                return Ok(());
            };
            let before = secrets.len();
            secrets.retain(|one| one.name.as_deref() != Some(secret));
            if secrets.len() == before {
                return Ok(());
            }
            match api.replace(name, &PostParams::default(), &account).await {
                Err(error) if error.is_not_found() => Ok(()),
                done => done.map(drop),
            }
        })
        .await
    }
}

/// Fills in the lacking parts. Pure.
fn complete(
    secret: &mut Secret,
    lacks: Lacks,
    root_ca: Option<&str>,
    token: Option<String>,
    account: &ServiceAccount,
) {
    let namespace = secret.metadata.namespace.clone().unwrap_or_default();
    let data = secret.data.get_or_insert_default();
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    if let Some(root_ca) = root_ca.filter(|_| lacks.ca) {
        data.insert(CA.into(), bytes(root_ca));
    }
    if lacks.namespace {
        data.insert(NAMESPACE.into(), bytes(&namespace));
    }
    if let Some(token) = token {
        data.insert(TOKEN.into(), bytes(&token));
    }
    let annotations = secret.metadata.annotations.get_or_insert_default();
    for (key, value) in [(ACCOUNT, &account.metadata.name), (ACCOUNT_UID, &account.metadata.uid)] {
        annotations.insert(key.into(), value.clone().unwrap_or_default());
    }
}

async fn delete(api: &Api<Secret>, secret: &Secret) -> Result<()> {
    let preconditions = Preconditions { uid: secret.metadata.uid.clone(), resource_version: None };
    let options = DeleteParams::default().preconditions(preconditions);
    let name = secret.metadata.name.as_deref().unwrap_or_default();
    match api.delete(name, &options).await {
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
        done => done.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use base::task::Tasks;
    use client::Informers;
    use machinery::ObjectMeta;
    use serde_json::{Value, from_value, json};

    use super::*;
    use crate::context::SignError;
    use crate::testing;

    #[derive(Debug)]
    struct Plain;

    impl TokenSigner for Plain {
        fn sign(
            &self,
            account: &ObjectMeta,
            secret: &str,
        ) -> std::result::Result<String, SignError> {
            let text = |field: &Option<String>| field.clone().unwrap_or_default();
            Ok(format!("{} {} {secret}", text(&account.name), text(&account.uid)))
        }
    }

    fn secret(data: Value, uid: &str) -> Value {
        let mut annotations = json!({ACCOUNT: "bot"});
        if !uid.is_empty() {
            annotations[ACCOUNT_UID] = uid.into();
        }
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n",
            "uid": "of-secret", "resourceVersion": "3", "annotations": annotations},
            "type": "kubernetes.io/service-account-token", "data": data})
    }

    /// The writes that the controller asks for.
    async fn writes(known: Value, live: Value, account: Option<Value>) -> Vec<String> {
        let asked = Arc::new(Mutex::new(vec![]));
        let seen = asked.clone();
        let client = testing::client(move |one| {
            if one.method != http::Method::GET {
                seen.lock().expect("no panic").push(format!("{} {}", one.method, one.path()));
            }
            match one.path() {
                "/api/v1/namespaces/n/secrets/s" => Some(live.clone()),
                "/api/v1/namespaces/n/serviceaccounts/bot" => account.clone(),
                _ => None,
            }
        });
        let tasks = Tasks::new("test");
        let informers = Informers::new(client.clone(), tasks.clone());
        let tokens = Tokens {
            root_ca: Some("pem".into()),
            signer: Arc::new(Plain),
            client,
            accounts: informers.of().lister(),
            secrets: informers.of().lister(),
        };
        let known: Secret = from_value(known).expect("a Secret");
        tokens.keep(&known).await.expect("kept");
        tasks.shutdown(std::time::Duration::from_secs(1)).await;
        asked.lock().expect("no panic").clone()
    }

    #[tokio::test]
    async fn a_secret_is_filled_for_its_account_and_goes_with_it() {
        let account = |uid: &str| {
            Some(json!({"apiVersion": "v1", "kind": "ServiceAccount",
                "metadata": {"name": "bot", "namespace": "n", "uid": uid}}))
        };
        let (put, gone) =
            ("PUT /api/v1/namespaces/n/secrets/s", "DELETE /api/v1/namespaces/n/secrets/s");
        let full = json!({"token": "dA==", "namespace": "bg==", "ca.crt": "cGVt"});
        let old_ca = json!({"token": "dA==", "namespace": "bg==", "ca.crt": "b2xk"});
        for (data, uid, account, expected) in [
            (json!({}), "", account("u"), vec![put]),
            (json!({}), "u", account("u"), vec![put]),
            (full.clone(), "u", account("u"), vec![]),
            (old_ca, "u", account("u"), vec![put]),
            (full.clone(), "u", None, vec![gone]),
            (full, "u", account("another"), vec![gone]),
        ] {
            let secret = secret(data.clone(), uid);
            let got = writes(secret.clone(), secret, account).await;
            assert_eq!(got, expected, "{data} {uid}");
        }
        // Another client wrote meanwhile: its event queues the Secret again.
        let (known, mut live) = (secret(json!({}), ""), secret(json!({}), ""));
        live["metadata"]["resourceVersion"] = "4".into();
        assert_eq!(writes(known, live, account("u")).await, Vec::<String>::new());
    }

    #[test]
    fn only_what_lacks_is_written() {
        let account: ServiceAccount =
            from_value(json!({"metadata": {"name": "bot", "namespace": "n", "uid": "u"}}))
                .expect("an account");
        let complete = |data: Value| {
            let mut secret: Secret = from_value(secret(data, "")).expect("a Secret");
            let lacks = Lacks::of(&secret, Some("pem"));
            let token = lacks.token.then(|| "signed".to_owned());
            complete(&mut secret, lacks, Some("pem"), token, &account);
            assert_eq!(Lacks::of(&secret, Some("pem")), Lacks::NOTHING);
            assert_eq!(annotation(&secret, ACCOUNT_UID), "u");
            let data = secret.data.expect("data");
            let text = |key: &str| String::from_utf8(data[key].0.clone()).expect("text");
            [text(TOKEN), text(NAMESPACE), text(CA)]
        };
        assert_eq!(complete(json!({})), ["signed", "n", "pem"]);
        assert_eq!(complete(json!({"token": "dA=="})), ["t", "n", "pem"]);
        assert_eq!(complete(json!({"namespace": "eA=="})), ["signed", "x", "pem"]);
    }
}
