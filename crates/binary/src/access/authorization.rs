//! The authorizers, in the order of the flags or of the configuration.

use std::sync::Arc;

use anyhow::{Context, bail};
use apiserver::authz::Authorizer;
use auth::abac::Abac;
use auth::modes::{
    AuthorizationConfiguration, Available, Configured, ConnectionInfo, MODES, Modes,
    WebhookConfiguration,
};
use auth::reload::Followed;
use auth::{Authorizers, Rbac, node};
use base::task::Tasks;

use super::{Access, read};

const USUAL: [&str; 2] = ["Node", "RBAC"];

impl Access {
    pub(super) fn check_authorization(&self) -> anyhow::Result<()> {
        let modes = self.modes();
        let has = |mode: &str| modes.iter().any(|one| one == mode);
        if self.authorization_config.is_some()
            && (!self.authorization_mode.is_empty()
                || self.authorization_webhook_config_file.is_some()
                || self.authorization_webhook_version.is_some()
                || self.authorization_webhook_cache_authorized_ttl.is_some()
                || self.authorization_webhook_cache_unauthorized_ttl.is_some())
        {
            bail!(
                "--authorization-config can not be specified when --authorization-mode or --authorization-webhook-* flags are defined"
            );
        }
        for mode in &modes {
            if !MODES.contains(&mode.as_str()) {
                bail!("authorization-mode {mode:?} is not a valid mode");
            }
        }
        let mut sorted = modes.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != modes.len() {
            bail!("authorization-mode {modes:?} has mode specified more than once");
        }
        if has("ABAC") && self.authorization_policy_file.is_none() {
            bail!("authorization-mode ABAC's authorization policy file not passed");
        }
        if has("Webhook") && self.authorization_webhook_config_file.is_none() {
            bail!("authorization-mode Webhook's authorization config file not passed");
        }
        // The configuration file may also define these modes.
        let may_have = |mode: &str| has(mode) || self.authorization_config.is_some();
        if self.authorization_policy_file.is_some() && !may_have("ABAC") {
            bail!("cannot specify --authorization-policy-file without mode ABAC");
        }
        if self.authorization_webhook_config_file.is_some() && !may_have("Webhook") {
            bail!("cannot specify --authorization-webhook-config-file without mode Webhook");
        }
        Ok(())
    }

    fn modes(&self) -> Vec<String> {
        match &self.authorization_mode[..] {
            [] => USUAL.map(str::to_owned).into(),
            named => named.to_vec(),
        }
    }

    /// The flags as a configuration.
    fn authorization(&self) -> AuthorizationConfiguration {
        let entry = |mode: String| {
            let webhook = (mode == "Webhook").then(|| self.webhook());
            let name = if webhook.is_some() { "default".into() } else { mode.to_lowercase() };
            Configured { mode, name, webhook }
        };
        AuthorizationConfiguration {
            authorizers: self.modes().into_iter().map(entry).collect(),
            ..Default::default()
        }
    }

    fn webhook(&self) -> WebhookConfiguration {
        let file = self.authorization_webhook_config_file.as_deref();
        let file = file.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.into()));
        let text = |flag: &Option<String>| flag.clone().unwrap_or_default();
        let version = text(&self.authorization_webhook_version);
        // In a flag, a TTL of zero disables the cache.
        let is_kept = |lasts: &str| base::duration::nanos(lasts) != Ok(0);
        let authorized_ttl = text(&self.authorization_webhook_cache_authorized_ttl);
        let unauthorized_ttl = text(&self.authorization_webhook_cache_unauthorized_ttl);
        WebhookConfiguration {
            cache_authorized_requests: Some(is_kept(&authorized_ttl)),
            cache_unauthorized_requests: Some(is_kept(&unauthorized_ttl)),
            authorized_ttl,
            unauthorized_ttl,
            timeout: "30s".into(),
            subject_access_review_version: if version.is_empty() {
                "v1beta1".into()
            } else {
                version
            },
            failure_policy: "NoOpinion".into(),
            connection_info: ConnectionInfo {
                kind: "KubeConfigFile".into(),
                kube_config_file: file.map(|path| path.display().to_string()),
            },
            ..WebhookConfiguration::default()
        }
    }
}

/// The chain of authorizers, and RBAC, which admission uses too.
pub async fn authorizers(
    access: &Access,
    registry: &apiserver::Registry,
    tasks: &Tasks,
) -> anyhow::Result<(Authorizers, Rbac)> {
    let (node, rbac) =
        tokio::join!(node::NodeAuthorizer::start(registry, tasks), Rbac::start(registry, tasks));
    let abac = match &access.authorization_policy_file {
        Some(path) => {
            let shown = path.display().to_string();
            Some(Abac::parse(&read(path)?, &shown).map_err(anyhow::Error::msg)?)
        }
        None => None,
    };
    let (configuration, followed) = match &access.authorization_config {
        Some(path) => {
            let failed = "failed to load AuthorizationConfiguration from file";
            let (followed, text) = Followed::open(path).context(failed)?;
            let parsed = AuthorizationConfiguration::parse(&text);
            (parsed.map_err(anyhow::Error::msg).context(failed)?, Some(followed))
        }
        None => (access.authorization(), None),
    };
    let named = |mode: &str| configuration.authorizers.iter().any(|one| one.mode == mode);
    let available = Available {
        node: named("Node").then(|| Arc::new(node) as Arc<dyn Authorizer>),
        rbac: named("RBAC").then(|| Arc::new(rbac.clone()) as Arc<dyn Authorizer>),
        abac: abac.map(|abac| Arc::new(abac) as Arc<dyn Authorizer>),
    };
    let modes = Modes::new(&configuration, available).map_err(anyhow::Error::msg);
    let modes = Arc::new(modes.context("the authorization configuration is not valid")?);
    if let Some(followed) = followed {
        tasks.spawn("authorization configuration", follow(followed, modes.clone()));
    }
    Ok((Authorizers(vec![modes]), rbac))
}

async fn follow(mut followed: Followed, modes: Arc<Modes>) {
    loop {
        let text = followed.changed().await;
        let outcome = AuthorizationConfiguration::parse(&text);
        match outcome.and_then(|configuration| modes.replace(&configuration)) {
            Ok(()) => tracing::info!("reloaded authz config"),
            Err(why) => tracing::error!(%why, "reloading authorization config"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicting_flags_are_refused() {
        let check = |modes: &[&str], change: &dyn Fn(&mut Access), expected: &str| {
            let authorization_mode = modes.iter().map(|mode| (*mode).to_owned()).collect();
            let mut access = Access { authorization_mode, ..Access::default() };
            change(&mut access);
            let got = access.check().err().map(|error| error.to_string());
            assert_eq!(got.as_deref().unwrap_or_default(), expected);
        };
        check(&[], &|_| {}, "");
        check(&["Node", "RBAC"], &|_| {}, "");
        check(&["Magic"], &|_| {}, "authorization-mode \"Magic\" is not a valid mode");
        check(
            &["RBAC", "RBAC"],
            &|_| {},
            "authorization-mode [\"RBAC\", \"RBAC\"] has mode specified more than once",
        );
        check(&["ABAC"], &|_| {}, "authorization-mode ABAC's authorization policy file not passed");
        check(
            &[],
            &|access| access.authorization_policy_file = Some("f".into()),
            "cannot specify --authorization-policy-file without mode ABAC",
        );
        check(
            &["RBAC"],
            &|access| access.authorization_config = Some("f".into()),
            "--authorization-config can not be specified when --authorization-mode or --authorization-webhook-* flags are defined",
        );
    }
}
