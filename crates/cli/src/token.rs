//! `decapod token`: tokens with which nodes join.
//!
//! In: flags. Out: a bootstrap token as a Secret in kube-system (in upstream's form, so that `kubeadm`
//! and the token controllers understand it), printed as the complete join token, which also contains the
//! hash of the cluster's CA.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::List;
use k8s_openapi::api::core::v1::Secret;
use machinery::ObjectMeta;
use pki::{BootstrapToken, JoinToken};

use crate::cluster::{Cluster, Connection, JSON, with_query};
use crate::duration;
use crate::grid::Grid;

const SECRETS: &str = "/api/v1/namespaces/kube-system/secrets";
const SECRET_TYPE: &str = "bootstrap.kubernetes.io/token";
const TIME_FORMAT: &str = "%Y-%m-%dT%H:%M:%SZ";

#[derive(clap::Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Token {
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Create a token with which nodes can join, and print it
    Create(Create),
    /// List the tokens with which nodes can join
    #[command(visible_alias = "ls")]
    List,
}

#[derive(clap::Args, Clone, Debug)]
pub struct Create {
    /// The token to use, e.g. abcdef.0123456789abcdef [default: a new one]
    pub secret: Option<String>,
    /// How long the token is valid; 0 means without a limit
    #[arg(long, default_value = "24h", value_parser = duration::parse)]
    pub ttl: Duration,
    /// A description for people
    #[arg(long, default_value = "")]
    pub description: String,
}

impl Token {
    pub async fn run(self, data_dir: &Path) -> Result<ExitCode> {
        let cluster = self.connection.open(data_dir).map_err(plain)?;
        let text = match self.command {
            Command::Create(create) => create.run(&cluster).await?,
            Command::List => list(&cluster).await?,
        };
        print!("{text}");
        Ok(ExitCode::SUCCESS)
    }
}

/// Removes the prefix, because the binary adds its own to errors.
fn plain(failure: crate::failure::Failure) -> anyhow::Error {
    let text = failure.to_string();
    anyhow::anyhow!("{}", text.strip_prefix("error: ").unwrap_or(&text))
}

impl Create {
    async fn run(self, cluster: &Cluster) -> Result<String> {
        let token = match &self.secret {
            None => BootstrapToken::generate(),
            Some(text) => BootstrapToken::parse(text).with_context(|| {
                format!("the token {text:?} is not of the form [a-z0-9]{{6}}.[a-z0-9]{{16}}")
            })?,
        };
        let until = match self.ttl {
            Duration::ZERO => None,
            ttl => {
                Some(base::clock::now().checked_add(ttl).context("the time to live is too long")?)
            }
        };
        let join = join_token(&token, cluster.ca_pem.as_deref())?;
        let body = serde_json::to_vec(&secret(&token, &self.description, until))?;
        cluster.call(Method::POST, SECRETS, JSON, body).await.map_err(plain)?;
        Ok(format!("{join}\n"))
    }
}

/// With the hash of the CA, so that a node can verify the cluster.
fn join_token(token: &BootstrapToken, ca_pem: Option<&str>) -> Result<JoinToken> {
    let pem =
        ca_pem.context("the kubeconfig has no certificate authority, which a join token needs")?;
    let certificates = pki::certificates(pem.as_bytes())?;
    let ca = certificates
        .first()
        .context("the kubeconfig's certificate authority is not a certificate")?;
    Ok(JoinToken { ca_hash: Some(ca.fingerprint()), secret: token.to_string() })
}

fn secret(token: &BootstrapToken, description: &str, until: Option<Timestamp>) -> Secret {
    let until = until.map(|until| until.strftime(TIME_FORMAT).to_string());
    let fields = [
        ("token-id", Some(token.id.clone())),
        ("token-secret", Some(token.secret.clone())),
        ("usage-bootstrap-authentication", Some("true".into())),
        ("usage-bootstrap-signing", Some("true".into())),
        ("description", Some(description.to_owned()).filter(|text| !text.is_empty())),
        ("expiration", until),
    ];
    let field = |(name, value): (&str, Option<String>)| {
        Some((name.to_owned(), ByteString(value?.into_bytes())))
    };
    Secret {
        metadata: ObjectMeta {
            name: Some(token.secret_name()),
            namespace: Some("kube-system".into()),
            ..ObjectMeta::default()
        },
        type_: Some(SECRET_TYPE.into()),
        data: Some(fields.into_iter().filter_map(field).collect()),
        ..Secret::default()
    }
}

async fn list(cluster: &Cluster) -> Result<String> {
    let selector = format!("type={SECRET_TYPE}");
    let path = with_query(SECRETS, &[("fieldSelector", &selector)]);
    let list: List<Secret> = serde_json::from_value(cluster.get(&path).await.map_err(plain)?)?;
    let now = base::clock::now();
    let headers = ["TOKEN", "TTL", "EXPIRES", "USAGES", "DESCRIPTION", "EXTRA GROUPS"];
    let mut lines = vec![headers.map(str::to_owned).to_vec()];
    lines.extend(list.items.iter().filter_map(|secret| row(secret, now)));
    Ok(Grid::default().render(&lines))
}

/// Upstream: `kubeadm token list`.
fn row(secret: &Secret, now: Timestamp) -> Option<Vec<String>> {
    let field = |name: &str| -> Option<String> {
        let bytes = secret.data.as_ref()?.get(name)?;
        String::from_utf8(bytes.0.clone()).ok().filter(|text| !text.is_empty())
    };
    let token = format!("{}.{}", field("token-id")?, field("token-secret")?);
    let none = || "<none>".to_owned();
    let (ttl, expires) = match field("expiration") {
        None => ("<forever>".to_owned(), "<never>".to_owned()),
        Some(text) => match text.parse::<Timestamp>() {
            Ok(until) => (duration::short(until.as_second() - now.as_second()), text),
            Err(_) => ("<invalid>".into(), text),
        },
    };
    let mut usages = vec![];
    for usage in ["authentication", "signing"] {
        if field(&format!("usage-bootstrap-{usage}")).as_deref() == Some("true") {
            usages.push(usage);
        }
    }
    let usages = if usages.is_empty() { none() } else { usages.join(",") };
    let description = field("description").unwrap_or_else(none);
    let groups = field("auth-extra-groups").unwrap_or_else(none);
    Some(vec![token, ttl, expires, usages, description, groups])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_listed_like_kubeadm() {
        let token = BootstrapToken::parse("abcdef.0123456789abcdef").expect("a token");
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        let check = |description: &str, until: Option<&str>, expected: [&str; 6]| {
            let until = until.map(|text| text.parse().expect("a time"));
            let got = row(&secret(&token, description, until), now).expect("a row");
            assert_eq!(got, expected);
        };
        let text = "abcdef.0123456789abcdef";
        check(
            "",
            None,
            [text, "<forever>", "<never>", "authentication,signing", "<none>", "<none>"],
        );
        check(
            "for node 2",
            Some("2026-01-01T23:30:00Z"),
            [text, "23h", "2026-01-01T23:30:00Z", "authentication,signing", "for node 2", "<none>"],
        );
        check(
            "old",
            Some("2025-12-31T00:00:00Z"),
            [text, "<invalid>", "2025-12-31T00:00:00Z", "authentication,signing", "old", "<none>"],
        );
    }

    #[test]
    fn join_tokens_contain_the_authoritys_hash() {
        let authority = pki::Authority::generate("kubernetes").expect("an authority");
        let token = BootstrapToken::generate();
        let join = join_token(&token, Some(authority.cert_pem())).expect("a join token");
        assert_eq!(join.ca_hash, Some(authority.fingerprint()));
        assert_eq!(JoinToken::parse(&join.to_string()).expect("parses").bootstrap(), token);
        assert!(join_token(&token, None).is_err());
    }
}
