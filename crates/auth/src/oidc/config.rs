//! `AuthenticationConfiguration`: from a file, or from the `--oidc-*` flags.
//!
//! In: YAML. Out: issuers with all fields checked; errors have upstream's paths and words.
//! Upstream: `k8s.io/apiserver/pkg/apis/apiserver/{v1,validation}`.

use machinery::field::{FieldErrors, Path};
use serde::{Deserialize, Serialize};

use super::mapping::{Expression, Mapping, Rule, Source};

/// Domains of `extra` keys that are reserved for Kubernetes.
const RESERVED: [&str; 2] = ["kubernetes.io", "k8s.io"];
const VERSIONS: [&str; 3] = [
    "apiserver.config.k8s.io/v1",
    "apiserver.config.k8s.io/v1beta1",
    "apiserver.config.k8s.io/v1alpha1",
];

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AuthenticationConfiguration {
    #[serde(default)]
    pub api_version: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub jwt: Vec<JwtAuthenticator>,
    pub anonymous: Option<Anonymous>,
}

/// Whether, and for which paths, requests without credentials are allowed.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Anonymous {
    #[serde(default)]
    pub enabled: bool,
    #[serde(default)]
    pub conditions: Vec<AnonymousCondition>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnonymousCondition {
    pub path: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct JwtAuthenticator {
    pub issuer: Issuer,
    pub claim_validation_rules: Vec<ClaimRule>,
    pub claim_mappings: ClaimMappings,
    pub user_validation_rules: Vec<UserRule>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Issuer {
    pub url: String,
    #[serde(rename = "discoveryURL")]
    pub discovery_url: String,
    /// PEM; empty means the machine's CAs.
    pub certificate_authority: String,
    pub audiences: Vec<String>,
    pub audience_match_policy: String,
    pub egress_selector_type: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ClaimRule {
    pub claim: String,
    pub required_value: String,
    pub expression: String,
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClaimMappings {
    pub username: PrefixedClaim,
    pub groups: PrefixedClaim,
    pub uid: Claim,
    pub extra: Vec<ExtraMapping>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixedClaim {
    pub claim: String,
    pub prefix: Option<String>,
    pub expression: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Claim {
    pub claim: String,
    pub expression: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ExtraMapping {
    pub key: String,
    pub value_expression: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UserRule {
    pub expression: String,
    pub message: String,
}

/// A valid issuer.
#[derive(Debug)]
pub struct CheckedIssuer {
    pub issuer: Issuer,
    pub mapping: Mapping,
}

impl AuthenticationConfiguration {
    pub fn parse(yaml: &str) -> Result<Self, String> {
        let config: Self = serde_saphyr::from_str(yaml).map_err(|error| error.to_string())?;
        if config.kind != "AuthenticationConfiguration"
            || !VERSIONS.contains(&config.api_version.as_str())
        {
            return Err(format!(
                "no kind {:?} is registered for version {:?}",
                config.kind, config.api_version
            ));
        }
        Ok(config)
    }

    /// Checks all fields. `disallowed`: issuers of the cluster's own tokens.
    pub fn check(&self, disallowed: &[String]) -> Result<Vec<CheckedIssuer>, String> {
        let mut errors = FieldErrors::default();
        let mut checked = vec![];
        let root = Path::new("jwt");
        if self.jwt.len() > 64 {
            errors.too_many(&root, self.jwt.len(), 64);
        }
        for (index, one) in self.jwt.iter().enumerate() {
            let path = root.index(index);
            let mapping = one.check(&path, disallowed, &mut errors);
            let before = &self.jwt[..index];
            let place = path.child("issuer");
            if before.iter().any(|other| other.issuer.url == one.issuer.url) {
                errors.duplicate(&place.child("url"), &one.issuer.url);
            }
            let discovery = &one.issuer.discovery_url;
            let is_same = |other: &JwtAuthenticator| other.issuer.discovery_url == *discovery;
            if !discovery.is_empty() && before.iter().any(is_same) {
                errors.duplicate(&place.child("discoveryURL"), discovery);
            }
            checked.push(CheckedIssuer { issuer: one.issuer.clone(), mapping });
        }
        if let Some(anonymous) = &self.anonymous
            && !anonymous.enabled
            && !anonymous.conditions.is_empty()
        {
            let why = "enabled should be set to true when conditions are defined";
            let path = Path::new("anonymous").child("conditions");
            errors.invalid(&path, &anonymous.conditions, why);
        }
        if errors.is_empty() { Ok(checked) } else { Err(errors.summary()) }
    }
}

impl JwtAuthenticator {
    fn check(&self, path: &Path, disallowed: &[String], errors: &mut FieldErrors) -> Mapping {
        check_issuer(&self.issuer, disallowed, &path.child("issuer"), errors);
        let mut mapping = Mapping::default();
        let rules = path.child("claimValidationRules");
        check_claim_rules(&self.claim_validation_rules, &rules, &mut mapping, errors);
        check_mappings(&self.claim_mappings, &path.child("claimMappings"), &mut mapping, errors);
        let rules = path.child("userValidationRules");
        check_user_rules(&self.user_validation_rules, &rules, &mut mapping, errors);
        mapping
    }
}

fn check_issuer(issuer: &Issuer, disallowed: &[String], path: &Path, errors: &mut FieldErrors) {
    match issuer.url.as_str() {
        "" => errors.required(&path.child("url"), ""),
        url => check_url(url, disallowed, &path.child("url"), errors),
    }
    let discovery = issuer.discovery_url.as_str();
    if !discovery.is_empty() {
        let place = path.child("discoveryURL");
        let bare = |url: &str| url.trim_end_matches('/').to_owned();
        if !issuer.url.is_empty() && bare(&issuer.url) == bare(discovery) {
            errors.invalid(&place, discovery, "discoveryURL must be different from URL");
        }
        check_url(discovery, &[], &place, errors);
    }
    check_audiences(issuer, path, errors);
    let authority = &issuer.certificate_authority;
    let is_pem = |pem: &str| transport::tls::certificates(pem).is_ok_and(|certs| !certs.is_empty());
    if !authority.is_empty() && !is_pem(authority) {
        let why = "data does not contain any valid RSA or ECDSA certificates";
        errors.invalid(&path.child("certificateAuthority"), "<omitted>", why);
    }
    let egress = issuer.egress_selector_type.as_str();
    if !matches!(egress, "" | "controlplane" | "cluster") {
        let why = "egress selector must be either controlplane or cluster";
        errors.invalid(&path.child("egressSelectorType"), egress, why);
    }
}

fn check_url(url: &str, disallowed: &[String], path: &Path, errors: &mut FieldErrors) {
    if disallowed.iter().any(|one| one == url) {
        let all = disallowed.join(" ");
        let why = format!("URL must not overlap with disallowed issuers: [{all}]");
        errors.invalid(path, url, &why);
    }
    // `http::Uri` drops fragments silently: so look for them in the text.
    let (bare, fragment) = url.split_once('#').map_or((url, ""), |(bare, rest)| (bare, rest));
    let Ok(parsed) = bare.parse::<http::Uri>() else {
        errors.invalid(path, url, &format!("parse {url:?}: invalid URI for request"));
        return;
    };
    if parsed.scheme_str() != Some("https") {
        errors.invalid(path, url, "URL scheme must be https");
    }
    if parsed.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        errors.invalid(path, url, "URL must not contain a username or password");
    }
    if parsed.query().is_some_and(|query| !query.is_empty()) {
        errors.invalid(path, url, "URL must not contain a query");
    }
    if !fragment.is_empty() {
        errors.invalid(path, url, "URL must not contain a fragment");
    }
}

fn check_audiences(issuer: &Issuer, path: &Path, errors: &mut FieldErrors) {
    let place = path.child("audiences");
    let audiences = &issuer.audiences;
    if audiences.is_empty() {
        return errors.required(&place, &format!("at least one {place} is required"));
    }
    for (index, audience) in audiences.iter().enumerate() {
        let place = place.index(index);
        if audience.is_empty() {
            errors.required(&place, "");
        }
        if audiences[..index].contains(audience) {
            errors.duplicate(&place, audience);
        }
    }
    let policy = issuer.audience_match_policy.as_str();
    let place = path.child("audienceMatchPolicy");
    match (audiences.len(), policy) {
        (1, "" | "MatchAny") | (2.., "MatchAny") => {}
        (1, _) => {
            let why = "audienceMatchPolicy must be empty or MatchAny for single audience";
            errors.invalid(&place, policy, why);
        }
        _ => {
            let why = "audienceMatchPolicy must be MatchAny for multiple audiences";
            errors.invalid(&place, policy, why);
        }
    }
}

fn check_claim_rules(
    rules: &[ClaimRule],
    path: &Path,
    mapping: &mut Mapping,
    errors: &mut FieldErrors,
) {
    for (index, rule) in rules.iter().enumerate() {
        let (path, before) = (path.index(index), &rules[..index]);
        match (rule.claim.as_str(), rule.expression.as_str()) {
            ("", "") => errors.required(&path, "claim or expression is required"),
            ("", expression) => {
                if !rule.required_value.is_empty() {
                    let why = "may not be specified when expression is set";
                    errors.invalid(&path.child("requiredValue"), &rule.required_value, why);
                }
                let place = path.child("expression");
                if before.iter().any(|other| other.expression == expression) {
                    errors.duplicate(&place, expression);
                } else if let Some(expression) = condition(expression, true, &place, errors) {
                    mapping.claim_rules.push(Rule { expression, message: rule.message.clone() });
                }
            }
            (claim, "") => {
                if !rule.message.is_empty() {
                    let why = "may not be specified when claim is set";
                    errors.invalid(&path.child("message"), &rule.message, why);
                }
                if before.iter().any(|other| other.claim == claim) {
                    errors.duplicate(&path.child("claim"), claim);
                }
                mapping.required.push((claim.to_owned(), rule.required_value.clone()));
            }
            (claim, _) => {
                errors.invalid(&path, claim, "claim and expression can't both be set");
            }
        }
    }
}

fn check_user_rules(
    rules: &[UserRule],
    path: &Path,
    mapping: &mut Mapping,
    errors: &mut FieldErrors,
) {
    for (index, rule) in rules.iter().enumerate() {
        let place = path.index(index).child("expression");
        if rule.expression.is_empty() {
            errors.required(&place, "");
        } else if rules[..index].iter().any(|other| other.expression == rule.expression) {
            errors.duplicate(&place, &rule.expression);
        } else if let Some(expression) = condition(&rule.expression, false, &place, errors) {
            mapping.user_rules.push(Rule { expression, message: rule.message.clone() });
        }
    }
}

/// Compiles an expression that must return a boolean.
fn condition(
    text: &str,
    of_claims: bool,
    path: &Path,
    errors: &mut FieldErrors,
) -> Option<Expression> {
    let expression = compiled(text, of_claims, path, errors)?;
    if *expression.program.kind() == cel::Type::Bool {
        return Some(expression);
    }
    errors.invalid(path, text, "must evaluate to bool");
    None
}

fn compiled(
    text: &str,
    of_claims: bool,
    path: &Path,
    errors: &mut FieldErrors,
) -> Option<Expression> {
    let outcome = if of_claims { Expression::of_claims(text) } else { Expression::of_user(text) };
    match outcome {
        Ok(expression) => Some(expression),
        Err(error) => {
            errors.invalid(path, text, &format!("compilation failed: {error}"));
            None
        }
    }
}

fn check_mappings(
    wanted: &ClaimMappings,
    path: &Path,
    mapping: &mut Mapping,
    errors: &mut FieldErrors,
) {
    let place = path.child("username");
    mapping.username = prefixed(&wanted.username, &place, true, errors);
    mapping.groups = prefixed(&wanted.groups, &path.child("groups"), false, errors);
    let place = path.child("uid");
    mapping.uid = match (wanted.uid.claim.as_str(), wanted.uid.expression.as_str()) {
        ("", "") => Source::Absent,
        (claim, "") => Source::Claim { name: claim.to_owned(), prefix: String::new() },
        ("", text) => compiled(text, true, &place.child("expression"), errors)
            .map_or(Source::Absent, Source::Expression),
        _ => {
            errors.invalid(&place, "", "claim and expression can't both be set");
            Source::Absent
        }
    };
    for (index, one) in wanted.extra.iter().enumerate() {
        let place = path.child("extra").index(index);
        let is_repeated = wanted.extra[..index].iter().any(|other| other.key == one.key);
        check_extra_key(&one.key, is_repeated, &place.child("key"), errors);
        let place = place.child("valueExpression");
        if one.value_expression.is_empty() {
            errors.required(&place, "valueExpression is required");
        } else if let Some(value) = compiled(&one.value_expression, true, &place, errors) {
            mapping.extra.push((one.key.clone(), value));
        }
    }
    let rules = mapping.claim_rules.iter().map(|rule| &rule.expression);
    let mut verifying = mapping.extra.iter().map(|(_, value)| value).chain(rules);
    if let Source::Expression(username) = &mapping.username
        && username.program.selects("claims", "email")
        && !username.program.selects("claims", "email_verified")
        && !verifying.any(|one| one.program.selects("claims", "email_verified"))
    {
        let why = "claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression";
        let place = path.child("username").child("expression");
        errors.invalid(&place, &wanted.username.expression, why);
    }
}

fn prefixed(
    wanted: &PrefixedClaim,
    path: &Path,
    is_required: bool,
    errors: &mut FieldErrors,
) -> Source {
    match (wanted.claim.as_str(), wanted.expression.as_str()) {
        ("", "") => {
            if is_required {
                errors.required(path, "claim or expression is required");
            }
            Source::Absent
        }
        (claim, "") => {
            if wanted.prefix.is_none() {
                let why = "prefix is required when claim is set. It can be set to an empty string to disable prefixing";
                errors.required(&path.child("prefix"), why);
            }
            let prefix = wanted.prefix.clone().unwrap_or_default();
            Source::Claim { name: claim.to_owned(), prefix }
        }
        ("", text) => {
            if let Some(prefix) = &wanted.prefix {
                let why = "may not be specified when expression is set";
                errors.invalid(&path.child("prefix"), prefix, why);
            }
            compiled(text, true, &path.child("expression"), errors)
                .map_or(Source::Absent, Source::Expression)
        }
        _ => {
            errors.invalid(path, "", "claim and expression can't both be set");
            Source::Absent
        }
    }
}

fn check_extra_key(key: &str, is_repeated: bool, path: &Path, errors: &mut FieldErrors) {
    let Some((domain, rest)) = key.split_once('/') else {
        if key.is_empty() {
            return errors.required(path, "");
        }
        let why = "must be a domain-prefixed path (such as \"acme.io/foo\")";
        return errors.invalid(path, key, why);
    };
    if rest.is_empty() {
        errors.invalid(path, key, "must be a domain-prefixed path (such as \"acme.io/foo\")");
    }
    for why in machinery::names::dns1123_subdomain(domain) {
        errors.invalid(path, domain, &why);
    }
    if key != key.to_lowercase() {
        errors.invalid(path, key, "must be lowercase");
    }
    let is_reserved =
        |own: &str| domain.strip_suffix(own).is_some_and(|d| d.is_empty() || d.ends_with('.'));
    if RESERVED.iter().any(|own| is_reserved(own)) {
        let why = "k8s.io, kubernetes.io and their subdomains are reserved for Kubernetes use";
        errors.invalid(path, key, why);
    }
    if is_repeated {
        errors.duplicate(path, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n";
    const GOOD: &str = "jwt:
- issuer: {url: https://a, audiences: [x]}
  claimMappings: {username: {claim: sub, prefix: ''}}
";

    #[test]
    fn mistakes_have_upstreams_messages() {
        let check = |change: (&str, &str), expected: &str| {
            let text = format!("{HEAD}{}", GOOD.replacen(change.0, change.1, 1));
            let outcome = AuthenticationConfiguration::parse(&text);
            let outcome = outcome.and_then(|config| config.check(&["https://own".into()]));
            match outcome {
                Ok(_) => assert_eq!(expected, "", "{text}"),
                Err(error) => assert_eq!(error, expected, "{text}"),
            }
        };
        check(("", ""), "");
        check(("https://a", "''"), "jwt[0].issuer.url: Required value");
        let http = "jwt[0].issuer.url: Invalid value: \"http://a\": URL scheme must be https";
        check(("https://a", "http://a"), http);
        let own = "jwt[0].issuer.url: Invalid value: \"https://own\": URL must not overlap with disallowed issuers: [https://own]";
        check(("https://a", "https://own"), own);
        let none = "jwt[0].issuer.audiences: Required value: at least one jwt[0].issuer.audiences is required";
        check(("[x]", "[]"), none);
        let many = "jwt[0].issuer.audienceMatchPolicy: Invalid value: \"\": audienceMatchPolicy must be MatchAny for multiple audiences";
        check(("[x]", "[x, y]"), many);
        check(("[x]", "[x, y], audienceMatchPolicy: MatchAny"), "");
        let prefix = "jwt[0].claimMappings.username.prefix: Required value: prefix is required when claim is set. It can be set to an empty string to disable prefixing";
        check((", prefix: ''", ""), prefix);
        let both = "jwt[0].claimMappings.username: Invalid value: \"\": claim and expression can't both be set";
        check(("prefix: ''", "expression: 'claims.sub'"), both);
        check(("claim: sub, prefix: ''", "expression: 'claims.sub'"), "");
        let email = "claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression";
        check(
            ("claim: sub, prefix: ''", "expression: 'claims.email'"),
            &format!(
                "jwt[0].claimMappings.username.expression: Invalid value: \"claims.email\": {email}"
            ),
        );
        check(
            (
                "claim: sub, prefix: ''",
                "expression: 'claims.?email_verified.orValue(true) ? claims.email : \"\"'",
            ),
            "",
        );
        let rules = |rules: &str| format!("  claimValidationRules: {rules}\n  claimMappings");
        check(
            ("  claimMappings", &rules("[{expression: '1 + 1'}]")),
            "jwt[0].claimValidationRules[0].expression: Invalid value: \"1 + 1\": must evaluate to bool",
        );
        check(("  claimMappings", &rules("[{claim: hd, requiredValue: x}]")), "");
        let reserved =
            "  claimMappings: {extra: [{key: a.k8s.io/b, valueExpression: \"'x'\"}], username";
        check(
            ("  claimMappings: {username", reserved),
            "jwt[0].claimMappings.extra[0].key: Invalid value: \"a.k8s.io/b\": k8s.io, kubernetes.io and their subdomains are reserved for Kubernetes use",
        );
    }

    #[test]
    fn other_documents_are_rejected() {
        for text in ["", "kind: Pod", "apiVersion: apiserver.config.k8s.io/v1\nkind: X", "jwt: {"] {
            assert!(AuthenticationConfiguration::parse(text).is_err(), "{text}");
        }
        let unknown = format!("{HEAD}jwks: []\n");
        let error = AuthenticationConfiguration::parse(&unknown).expect_err("unknown");
        assert!(error.contains("jwks"), "{error}");
    }
}
