//! Reads and checks `EncryptionConfiguration` of `apiserver.config.k8s.io/v1`.
//!
//! In: YAML or JSON. Out: the configuration, or all its errors with upstream's paths and wording. Errors
//! never show secrets of keys.

use std::collections::HashSet;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use machinery::field::{FieldErrors, Path};
use serde::{Deserialize, Serialize};

use crate::Error;

pub const API_VERSION: &str = "apiserver.config.k8s.io/v1";
pub const KIND: &str = "EncryptionConfiguration";

const AES_SIZES: &[usize] = &[16, 24, 32];
const BOX_SIZES: &[usize] = &[32];
const DEFAULT_KMS_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Configuration {
    pub api_version: String,
    pub kind: String,
    #[serde(default)]
    pub resources: Vec<ResourceRule>,
}

/// The providers of some resources: the first one writes, all read.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ResourceRule {
    #[serde(default)]
    pub resources: Vec<String>,
    #[serde(default)]
    pub providers: Vec<Provider>,
}

/// Exactly one of these must be set.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Provider {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aesgcm: Option<Keys>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aescbc: Option<Keys>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secretbox: Option<Keys>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Empty>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kms: Option<Kms>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Empty {}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    #[serde(default)]
    pub keys: Vec<Key>,
}

#[derive(Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    #[serde(default)]
    pub name: String,
    /// Base64. Never printed.
    #[serde(default)]
    pub secret: String,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Key").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Key {
    pub fn bytes(&self) -> Result<Vec<u8>, Error> {
        STANDARD.decode(&self.secret).map_err(|_| Error::Config("secrets must be base64".into()))
    }
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Kms {
    #[serde(rename = "apiVersion", default)]
    pub api_version: String,
    #[serde(default)]
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cachesize: Option<i32>,
    #[serde(default)]
    pub endpoint: String,
    /// A duration in Go's form: `3s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

impl Kms {
    /// The timeout of a call; `None` if the text is no positive duration.
    pub fn timeout(&self) -> Option<Duration> {
        match &self.timeout {
            None => Some(DEFAULT_KMS_TIMEOUT),
            Some(text) => base::duration::parse(text).ok().filter(|time| !time.is_zero()),
        }
    }
}

impl Configuration {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let config: Self = serde_saphyr::from_str(text).map_err(|error| {
            // The parser's message may quote a secret: the error has only the line.
            let place = error.location().map(|at| format!(" near line {}", at.line()));
            Error::Config(format!("the file is not a valid {KIND}{}", place.unwrap_or_default()))
        })?;
        if config.api_version != API_VERSION || config.kind != KIND {
            return Err(Error::Config(format!(
                "no kind {:?} is registered for version {:?}",
                config.kind, config.api_version
            )));
        }
        let errors = config.validate();
        match errors.is_empty() {
            true => Ok(config),
            false => Err(Error::Config(errors.summary())),
        }
    }

    pub fn validate(&self) -> FieldErrors {
        let (root, mut errors) = (Path::new("resources"), FieldErrors::default());
        if self.resources.is_empty() {
            errors.required(&root, "at least one resources is required");
        }
        let mut kms_names = HashSet::new();
        for (index, rule) in self.resources.iter().enumerate() {
            let at = root.index(index);
            let (resources, providers) = (at.child("resources"), at.child("providers"));
            if rule.resources.is_empty() {
                errors.required(&resources, &format!("at least one {resources} is required"));
            }
            check_overlap(&rule.resources, &resources, &mut errors);
            for (index, name) in rule.resources.iter().enumerate() {
                if let Some(why) = wrong_name(name) {
                    errors.invalid(&resources.index(index), name, why);
                }
            }
            if rule.providers.is_empty() {
                errors.required(&providers, &format!("at least one {providers} is required"));
            }
            for (index, provider) in rule.providers.iter().enumerate() {
                provider.validate(&providers.index(index), &mut kms_names, &mut errors);
            }
        }
        errors
    }
}

/// `secrets` or `deployments.apps`, as name and group.
pub fn group_resource(text: &str) -> (&str, &str) {
    text.split_once('.').unwrap_or((text, ""))
}

fn check_overlap(names: &[String], path: &Path, errors: &mut FieldErrors) {
    let parsed: Vec<_> = names.iter().map(|name| group_resource(name)).collect();
    let (mut is_twice, mut overlaps) = (false, false);
    for (index, one) in parsed.iter().enumerate() {
        for (_, other) in parsed.iter().enumerate().filter(|(at, _)| *at != index) {
            if one == other {
                is_twice = true;
                continue;
            }
            let masks = one.1 == other.1 && (one.0 == "*" || other.0 == "*");
            overlaps |= *one == ("*", "*") || masks;
        }
    }
    if is_twice {
        errors.invalid(path, names, "the same resource cannot be specified multiple times");
    }
    if overlaps {
        errors.invalid(
            path,
            names,
            "using overlapping resources such as 'secrets' and '*.' in the same resource list is not allowed as they will be masked",
        );
    }
}

fn wrong_name(name: &str) -> Option<&'static str> {
    let (resource, group) = group_resource(name);
    let not_served = ["apiserveripinfo", "serviceipallocations", "servicenodeportallocations"];
    if name.to_lowercase() != name {
        return Some("resource name should not contain capital letters");
    }
    match (resource, group) {
        ("*", _) if name == "*" => Some(
            "use '*.' to encrypt all the resources from core API group or *.* to encrypt all resources",
        ),
        _ if not_served.contains(&name) => {
            Some("resources which do not have REST API/s cannot be encrypted")
        }
        (_, "events.k8s.io") => Some(
            "'*.events.k8s.io' objects are stored using the 'events' API group in etcd. Use 'events' instead in the config file",
        ),
        (_, "extensions") => {
            Some("'extensions' group has been removed and cannot be used for encryption")
        }
        (resource, "*") if resource != "*" => {
            Some("encrypting the same resource across groups is not supported")
        }
        _ => None,
    }
}

impl Provider {
    fn validate(&self, path: &Path, kms_names: &mut HashSet<String>, errors: &mut FieldErrors) {
        let keys = [
            ("aesgcm", &self.aesgcm, AES_SIZES),
            ("aescbc", &self.aescbc, AES_SIZES),
            ("secretbox", &self.secretbox, BOX_SIZES),
        ];
        let found = keys.iter().filter(|(_, keys, _)| keys.is_some()).count()
            + usize::from(self.identity.is_some())
            + usize::from(self.kms.is_some());
        // Both errors omit the value, because it may contain a secret.
        match found {
            0 => errors.invalid_shown(path, Some("{}"), "provider does not contain any of the expected providers: KMS, AESGCM, AESCBC, Secretbox, Identity"),
            1 => {}
            _ => errors.invalid_shown(path, Some("REDACTED"), "more than one provider specified in a single element, should split into different list elements"),
        }
        for (name, keys, sizes) in keys {
            if let Some(keys) = keys {
                check_keys(&keys.keys, &path.child(name).child("keys"), sizes, errors);
            }
        }
        if let Some(kms) = &self.kms {
            kms.validate(&path.child("kms"), kms_names, errors);
        }
    }
}

fn check_keys(keys: &[Key], path: &Path, sizes: &[usize], errors: &mut FieldErrors) {
    if keys.is_empty() {
        errors.required(path, "at least one keys is required");
    }
    for (index, key) in keys.iter().enumerate() {
        let (name, secret) = (path.index(index).child("name"), path.index(index).child("secret"));
        if key.name.is_empty() {
            errors.required(&name, "name is a mandatory field for a key");
        }
        if key.secret.is_empty() {
            errors.required(&secret, "secret is a mandatory field for a key");
            continue;
        }
        match key.bytes() {
            Err(_) => errors.invalid(&secret, "REDACTED", "secrets must be base64 encoded"),
            Ok(bytes) if !sizes.contains(&bytes.len()) => {
                let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
                let (got, wanted) = (bytes.len(), sizes.join(" "));
                let why = format!(
                    "secret is not of the expected length, got {got}, expected one of [{wanted}]"
                );
                errors.invalid(&secret, "REDACTED", &why);
            }
            Ok(_) => {}
        }
    }
}

impl Kms {
    fn validate(&self, path: &Path, names: &mut HashSet<String>, errors: &mut FieldErrors) {
        let name = path.child("name");
        if self.name.is_empty() {
            errors.required(&name, "name is a mandatory field for a provider");
        }
        if self.name.contains(':') {
            let why = format!("invalid KMS provider name {}, must not contain ':'", self.name);
            errors.invalid(&name, &self.name, &why);
        }
        if !names.insert(self.name.clone()) {
            let why = format!("duplicate KMS provider name {}, names must be unique", self.name);
            errors.invalid(&name, &self.name, &why);
        }
        if self.timeout().is_none() {
            let why = "timeout should be a positive value";
            errors.invalid(&path.child("timeout"), self.timeout.as_deref(), why);
        }
        let endpoint = path.child("endpoint");
        match self.endpoint.split_once("://") {
            _ if self.endpoint.is_empty() => {
                errors.invalid(&endpoint, "", "endpoint is a mandatory field for a kms");
            }
            Some(("unix", _)) => {}
            other => {
                let scheme = other.map_or("", |(scheme, _)| scheme);
                let why = format!(
                    "unsupported scheme {scheme:?} for KMS provider, only unix is supported"
                );
                errors.invalid(&endpoint, &self.endpoint, &why);
            }
        }
        if let (Some(size), false) = (self.cachesize, self.api_version == "v1") {
            errors.invalid(&path.child("cachesize"), size, "cachesize is not supported in v2");
        }
        let version = path.child("apiVersion");
        match self.api_version.as_str() {
            "v2" => {}
            // Upstream disables it by default since v1.29; it is not supported here.
            "" | "v1" => errors.invalid(
                &version,
                "v1",
                "KMSv1 is deprecated and will only receive security updates going forward. Use KMSv2 instead.",
            ),
            other => errors.invalid(
                &version,
                other,
                "unsupported apiVersion apiVersion for KMS provider, only v1 and v2 are supported",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(resources: &str, provider: &str) -> String {
        format!(
            "apiVersion: {API_VERSION}\nkind: {KIND}\nresources:\n- resources: {resources}\n  providers:\n  - {provider}\n"
        )
    }

    #[test]
    fn mistakes_have_upstreams_messages() {
        let check = |resources: &str, provider: &str, expected: &str| {
            let outcome = Configuration::parse(&config(resources, provider));
            let told = outcome.map_or_else(|error| error.to_string(), |_| String::new());
            assert_eq!(told, expected, "{resources} {provider}");
        };
        check("[secrets]", "identity: {}", "");
        check("['*.', '*.apps', crontabs.example.com]", "identity: {}", "");
        check(
            "[secrets]",
            "aescbc: {keys: [{name: a, secret: c2VjcmV0}]}",
            "resources[0].providers[0].aescbc.keys[0].secret: Invalid value: \"REDACTED\": secret is not of the expected length, got 6, expected one of [16 24 32]",
        );
        check(
            "[secrets]",
            "secretbox: {keys: [{secret: '%%'}]}",
            "[resources[0].providers[0].secretbox.keys[0].name: Required value: name is a mandatory field for a key, resources[0].providers[0].secretbox.keys[0].secret: Invalid value: \"REDACTED\": secrets must be base64 encoded]",
        );
        check(
            "['*']",
            "identity: {}",
            "resources[0].resources[0]: Invalid value: \"*\": use '*.' to encrypt all the resources from core API group or *.* to encrypt all resources",
        );
        check(
            "[secrets, '*.']",
            "identity: {}",
            "resources[0].resources: Invalid value: [\"secrets\",\"*.\"]: using overlapping resources such as 'secrets' and '*.' in the same resource list is not allowed as they will be masked",
        );
        check(
            "[secrets]",
            "kms: {apiVersion: v2, name: 'a:b', endpoint: 'tcp://x'}",
            "[resources[0].providers[0].kms.name: Invalid value: \"a:b\": invalid KMS provider name a:b, must not contain ':', resources[0].providers[0].kms.endpoint: Invalid value: \"tcp://x\": unsupported scheme \"tcp\" for KMS provider, only unix is supported]",
        );
    }

    #[test]
    fn no_error_shows_a_secret() {
        for broken in ["aescbc: {keys: [{name: a, secret: [hunter2]}]}", "hunter2: {}", "hunter2"] {
            let error = Configuration::parse(&config("[secrets]", broken)).expect_err(broken);
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
        let key = Key { name: "a".into(), secret: "hunter2".into() };
        assert!(!format!("{key:?}").contains("hunter2"));
    }
}
