//! Authentication and authorization: upstream's flags for `decapod server` and `decapod kube-apiserver`.
//!
//! In: flags and the files that they name. Out: authenticators and authorizers in order, which continue
//! to watch their files.

mod authentication;
mod authorization;
mod credentials;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
pub use authentication::Authentication;
pub use authorization::authorizers;
pub use credentials::{Brought, Credentials, ISSUER};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Access {
    /// Treat requests without credentials as system:anonymous [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub anonymous_auth: Option<bool>,
    /// File with an AuthenticationConfiguration; watched while the server runs
    #[arg(long, value_name = "FILE")]
    pub authentication_config: Option<PathBuf>,
    /// Issuer of OpenID tokens, https only
    #[arg(long, value_name = "URL")]
    pub oidc_issuer_url: Option<String>,
    /// Required audience of OpenID tokens
    #[arg(long, value_name = "ID")]
    pub oidc_client_id: Option<String>,
    /// Authorities of the issuer's certificate, PEM [default: the machine's authorities]
    #[arg(long, value_name = "FILE")]
    pub oidc_ca_file: Option<PathBuf>,
    /// The claim that names the user [default: sub]
    #[arg(long, value_name = "CLAIM")]
    pub oidc_username_claim: Option<String>,
    /// Prefix of user names; - for none [default: the issuer and #, but none for emails]
    #[arg(long, value_name = "PREFIX")]
    pub oidc_username_prefix: Option<String>,
    /// The claim that names groups
    #[arg(long, value_name = "CLAIM")]
    pub oidc_groups_claim: Option<String>,
    /// Prefix of groups
    #[arg(long, value_name = "PREFIX")]
    pub oidc_groups_prefix: Option<String>,
    /// A claim that tokens must have, with its value
    #[arg(long, value_name = "KEY=VALUE")]
    pub oidc_required_claim: Vec<String>,
    /// Accepted: RS256, RS384, RS512, ES256, ES384, ES512, PS256, PS384, PS512 [default: RS256]
    #[arg(long, value_delimiter = ',', value_name = "ALGORITHM")]
    pub oidc_signing_algs: Vec<String>,
    /// CSV file of token, user, uid and groups
    #[arg(long, value_name = "FILE")]
    pub token_auth_file: Option<PathBuf>,
    /// Kubeconfig of a webhook that checks tokens
    #[arg(long, value_name = "FILE")]
    pub authentication_token_webhook_config_file: Option<PathBuf>,
    /// Version of the TokenReviews that it gets: v1 or v1beta1 [default: v1beta1]
    #[arg(long, value_name = "VERSION")]
    pub authentication_token_webhook_version: Option<String>,
    /// How long its answers are cached [default: 2m0s]
    #[arg(long, value_name = "DURATION", value_parser = base::duration::parse)]
    pub authentication_token_webhook_cache_ttl: Option<Duration>,
    /// Authorities of front proxies, PEM [default: the cluster's own authority]
    #[arg(long, value_name = "FILE")]
    pub requestheader_client_ca_file: Option<PathBuf>,
    /// Common names of front proxies [default: any of --requestheader-client-ca-file]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub requestheader_allowed_names: Vec<String>,
    /// Headers that name the user [default: X-Remote-User]
    #[arg(long, value_delimiter = ',', value_name = "HEADER")]
    pub requestheader_username_headers: Vec<String>,
    #[arg(long, value_delimiter = ',', value_name = "HEADER")]
    pub requestheader_uid_headers: Vec<String>,
    #[arg(long, value_delimiter = ',', value_name = "HEADER")]
    pub requestheader_group_headers: Vec<String>,
    #[arg(long, value_delimiter = ',', value_name = "PREFIX")]
    pub requestheader_extra_headers_prefix: Vec<String>,
    /// Modes in order: AlwaysAllow, AlwaysDeny, ABAC, Webhook, RBAC, Node [default: Node,RBAC]
    #[arg(long, value_delimiter = ',', value_name = "MODE")]
    pub authorization_mode: Vec<String>,
    /// File with an AuthorizationConfiguration; watched while the server runs
    #[arg(long, value_name = "FILE")]
    pub authorization_config: Option<PathBuf>,
    /// Policies of the mode ABAC, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub authorization_policy_file: Option<PathBuf>,
    /// Kubeconfig of the webhook of the mode Webhook
    #[arg(long, value_name = "FILE")]
    pub authorization_webhook_config_file: Option<PathBuf>,
    /// Version of the SubjectAccessReviews that it gets: v1 or v1beta1 [default: v1beta1]
    #[arg(long, value_name = "VERSION")]
    pub authorization_webhook_version: Option<String>,
    /// How long an allowed answer is cached [default: 5m0s]
    #[arg(long, value_name = "DURATION")]
    pub authorization_webhook_cache_authorized_ttl: Option<String>,
    /// How long a denied answer is cached [default: 30s]
    #[arg(long, value_name = "DURATION")]
    pub authorization_webhook_cache_unauthorized_ttl: Option<String>,
}

impl Access {
    /// Checks that need only the flags.
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_authorization()?;
        let has_oidc = self.oidc_issuer_url.is_some()
            || self.oidc_client_id.is_some()
            || self.oidc_ca_file.is_some()
            || self.oidc_username_claim.is_some()
            || self.oidc_username_prefix.is_some()
            || self.oidc_groups_claim.is_some()
            || self.oidc_groups_prefix.is_some()
            || !self.oidc_required_claim.is_empty()
            || !self.oidc_signing_algs.is_empty();
        if has_oidc && self.authentication_config.is_some() {
            bail!("authentication-config file and oidc-* flags are mutually exclusive");
        }
        if has_oidc && (self.oidc_issuer_url.is_none() || self.oidc_client_id.is_none()) {
            bail!(
                "oidc-issuer-url and oidc-client-id must be specified together when any oidc-* flags are set"
            );
        }
        Ok(())
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
