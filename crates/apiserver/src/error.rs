//! Flags and files of an API server that cannot be used, in upstream's words.

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("--cors-allowed-origins has an invalid regular expression: {0}")]
    Origin(regex_lite::Error),
    #[error(
        "--cors-allowed-origins has an invalid regular expression: regular expression does not pin to start/end of host in the origin header"
    )]
    LooseOrigin,
    #[error("empty value in strict-transport-security-directives")]
    NoDirective,
    #[error(
        "--strict-transport-security-directives invalid, allowed values: max-age=expireTime, includeSubDomains, preload. see https://tools.ietf.org/html/rfc6797#section-6.1 for more information"
    )]
    Directive,
    #[error(transparent)]
    Header(#[from] http::header::InvalidHeaderValue),
    #[error("invalid runtime-config with only {0}=false")]
    NothingServed(&'static str),
    #[error("runtime-config invalid key {0}")]
    Key(String),
    #[error("unknown api groups {0}")]
    UnknownGroups(String),
    #[error("invalid value {key}={value}")]
    Matcher { key: &'static str, value: String },
    #[error("group version {group}/{version} that has not been registered")]
    UnknownVersion { group: String, version: String },
    #[error(
        "invalid value of {key}: {value}, err: strconv.ParseBool: parsing {value:?}: invalid syntax"
    )]
    Boolean { key: String, value: String },
    #[error(
        "invalid key {key}: group/version/resource and resource is always lowercase plural, not {resource:?}"
    )]
    Plural { key: String, resource: String },
    #[error("failed decoding: {0}")]
    AuditPolicy(Box<serde_saphyr::Error>),
    #[error("unknown group version field {version}, Kind={kind} in policy")]
    AuditPolicyKind { version: String, kind: String },
    /// Field errors.
    #[error("{0}")]
    AuditPolicyFields(String),
    #[error("loaded illegal policy with 0 rules")]
    NoAuditRules,
}
