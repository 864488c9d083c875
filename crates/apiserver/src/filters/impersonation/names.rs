//! The kind of user behind a name, and the extras that it may have.

use std::collections::BTreeMap;

use machinery::field::{FieldErrors, Path};
use machinery::names::{dns1123_label, dns1123_subdomain};

use crate::request::UserInfo;

const SERVICE_ACCOUNT: &str = "system:serviceaccount:";
const NODE: &str = "system:node:";
/// An extra of service account tokens: the node of the pod.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Namespace and name. Upstream: `serviceaccount.SplitUsername`.
pub fn service_account(user: &str) -> Option<(&str, &str)> {
    let (namespace, name) = user.strip_prefix(SERVICE_ACCOUNT)?.split_once(':')?;
    let is_valid = dns1123_label(namespace).is_empty() && dns1123_subdomain(name).is_empty();
    is_valid.then_some((namespace, name))
}

pub fn node(user: &str) -> Option<&str> {
    user.strip_prefix(NODE).filter(|name| dns1123_subdomain(name).is_empty())
}

/// Whether it is a service account whose pod is on the wanted node.
pub fn is_associated(real: &UserInfo, wanted: &str) -> bool {
    let Some(node) = node(wanted) else { return false };
    let on: &[String] = real.extra.get(NODE_NAME).map_or(&[], Vec::as_slice);
    service_account(&real.name).is_some() && matches!(on, [one] if one == node)
}

/// The error of invalid extras; legacy impersonation accepts any.
pub fn wrong_extra(extra: &BTreeMap<String, Vec<String>>) -> Option<String> {
    extra.iter().find_map(|(key, values)| {
        if key.is_empty() {
            return Some("impersonating the empty string key in extra is not allowed".into());
        }
        let wrong = domain_prefixed_path(key);
        if !wrong.is_empty() {
            let why = wrong.summary();
            return Some(format!("impersonating an invalid key in extra is not allowed: {why}"));
        }
        if *key != key.to_lowercase() {
            let why = "impersonating a non-lowercase key in extra is not allowed";
            return Some(format!("{why}: {key:?}"));
        }
        if values.is_empty() {
            return Some("impersonating empty values in extra is not allowed".into());
        }
        let why = "impersonating the empty string value in extra is not allowed";
        values.iter().any(String::is_empty).then(|| why.into())
    })
}

/// `acme.io/foo`. Upstream: `IsDomainPrefixedPath`.
fn domain_prefixed_path(key: &str) -> FieldErrors {
    let at = Path::new("extra").child("key");
    let mut wrong = FieldErrors::default();
    let parts = key.split_once('/').filter(|(host, path)| !host.is_empty() && !path.is_empty());
    let Some((host, path)) = parts else {
        wrong.invalid(&at, key, "must be a domain-prefixed path (such as \"acme.io/foo\")");
        return wrong;
    };
    for why in dns1123_subdomain(host) {
        wrong.invalid(&at, host, &why);
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || r"/-._~%!$&'()*+,;=:".contains(c);
    if !path.chars().all(allowed) {
        let why = r"Invalid path (regex used for validation is '[A-Za-z0-9/\-._~%!$&'()*+,;=:]+')";
        wrong.invalid(&at, path, why);
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_service_accounts_nodes_and_others() {
        let check = |name: &str, expected: (Option<(&str, &str)>, Option<&str>)| {
            assert_eq!((service_account(name), node(name)), expected, "{name}");
        };
        check("system:serviceaccount:a:b.c", (Some(("a", "b.c")), None));
        check("system:serviceaccount:a:b:c", (None, None));
        check("system:serviceaccount:a.b:c", (None, None));
        check("system:serviceaccount:a:", (None, None));
        check("system:serviceaccount:A:b", (None, None));
        check("system:node:n.example", (None, Some("n.example")));
        check("system:node:", (None, None));
        check("system:node:N", (None, None));
        check("system:nodes", (None, None));
        check("jane", (None, None));
    }

    #[test]
    fn a_service_account_is_on_one_node() {
        let check = |real: &str, nodes: &[&str], wanted: &str, expected: bool| {
            let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
            let extra = BTreeMap::from([(NODE_NAME.to_owned(), nodes)]);
            let user = UserInfo { name: real.into(), extra, ..UserInfo::default() };
            assert_eq!(is_associated(&user, wanted), expected, "{real} {wanted}");
        };
        let account = "system:serviceaccount:a:b";
        check(account, &["n"], "system:node:n", true);
        check(account, &["n"], "system:node:m", false);
        check(account, &["n", "m"], "system:node:n", false);
        check(account, &[], "system:node:n", false);
        check(account, &["n"], "n", false);
        check("jane", &["n"], "system:node:n", false);
        check("system:node:n", &["n"], "system:node:n", false);
    }

    #[test]
    fn extras_need_domain_prefixed_keys() {
        let check = |key: &str, values: &[&str], expected: &str| {
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            let found = wrong_extra(&BTreeMap::from([(key.to_owned(), values)]));
            assert_eq!(found.unwrap_or_default(), expected, "{key}");
        };
        check("acme.io/x", &["v"], "");
        check("", &["v"], "impersonating the empty string key in extra is not allowed");
        check(
            "x",
            &["v"],
            r#"impersonating an invalid key in extra is not allowed: extra.key: Invalid value: "x": must be a domain-prefixed path (such as "acme.io/foo")"#,
        );
        check(
            "a.b/c d",
            &["v"],
            r#"impersonating an invalid key in extra is not allowed: extra.key: Invalid value: "c d": Invalid path (regex used for validation is '[A-Za-z0-9/\-._~%!$&'()*+,;=:]+')"#,
        );
        check(
            "acme.io/X",
            &["v"],
            r#"impersonating a non-lowercase key in extra is not allowed: "acme.io/X""#,
        );
        check("acme.io/x", &[], "impersonating empty values in extra is not allowed");
        check(
            "acme.io/x",
            &["v", ""],
            "impersonating the empty string value in extra is not allowed",
        );
    }
}
