//! Acting as somebody else: `Impersonate-User`, `-Group`, `-Uid` and `-Extra-*`, each of which the
//! real user must be allowed to `impersonate`.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::request::Parts;
use http::{HeaderMap, HeaderName};
use machinery::StatusError;

use super::authentication::{ANONYMOUS, UNAUTHENTICATED, with_group};
use super::authorization::{decide, forbidden};
use crate::authz::{Attributes, Decision};
use crate::query::decode_path;
use crate::request::{RequestInfo, UserInfo, header_text};
use crate::shared::Shared;

const USER: HeaderName = HeaderName::from_static("impersonate-user");
const GROUP: HeaderName = HeaderName::from_static("impersonate-group");
const UID: HeaderName = HeaderName::from_static("impersonate-uid");
const EXTRA: &str = "impersonate-extra-";
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// The user that the request counts for. The headers are taken off, so that a proxied request does
/// not carry them on.
pub async fn impersonate(
    shared: &Shared,
    info: &Arc<RequestInfo>,
    parts: &mut Parts,
    user: UserInfo,
) -> Result<UserInfo, StatusError> {
    let Some(wanted) = wanted(&parts.headers)? else { return Ok(user) };
    let allowed = async |attributes: &Attributes| {
        matches!(decide(&shared.authorizers, attributes).await, Decision::Allow { .. })
    };
    for request in demands(&wanted) {
        let attributes = Attributes { user: user.clone(), request };
        if !allowed(&attributes).await {
            return Err(refusal(info, &wanted, user));
        }
    }
    tracing::debug!(user = user.name, wanted = wanted.name, "impersonates");
    take_off(&mut parts.headers);
    Ok(complete(wanted))
}

/// Who is to be impersonated; nothing without any of the headers.
fn wanted(headers: &HeaderMap) -> Result<Option<UserInfo>, StatusError> {
    let text = |name: &HeaderName| {
        headers.get(name).map(|value| header_text(value).into_owned()).unwrap_or_default()
    };
    let texts = |name: &HeaderName| {
        headers.get_all(name).iter().map(|value| header_text(value).into_owned()).collect()
    };
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix(EXTRA) {
            extra.insert(decode_path(key).to_ascii_lowercase(), texts(name));
        }
    }
    let wanted = UserInfo { name: text(&USER), uid: text(&UID), groups: texts(&GROUP), extra };
    if !wanted.name.is_empty() {
        return Ok(Some(wanted));
    }
    if wanted == UserInfo::default() {
        return Ok(None);
    }
    Err(StatusError::bad_request(format!(
        "requested {} without impersonating a user name",
        go_debug(&wanted)
    )))
}

/// As Go's `%#v` shows a `user.DefaultInfo`.
fn go_debug(user: &UserInfo) -> String {
    let list = |texts: &[String]| match texts {
        [] => "[]string(nil)".to_owned(),
        texts => {
            let quoted: Vec<String> = texts.iter().map(|text| format!("{text:?}")).collect();
            format!("[]string{{{}}}", quoted.join(", "))
        }
    };
    let extra = if user.extra.is_empty() {
        "map[string][]string(nil)".to_owned()
    } else {
        let pairs: Vec<String> =
            user.extra.iter().map(|(key, values)| format!("{key:?}:{}", list(values))).collect();
        format!("map[string][]string{{{}}}", pairs.join(", "))
    };
    format!(
        "&user.DefaultInfo{{Name:{:?}, UID:{:?}, Groups:{}, Extra:{extra}}}",
        user.name,
        user.uid,
        list(&user.groups)
    )
}

/// What the real user must be allowed to do.
fn demands(wanted: &UserInfo) -> Vec<RequestInfo> {
    let demand = |group: &str, resource: &str, namespace: &str, name: &str| RequestInfo {
        is_resource: true,
        verb: "impersonate".into(),
        group: group.into(),
        version: "v1".into(),
        resource: resource.into(),
        namespace: namespace.into(),
        name: name.into(),
        ..RequestInfo::default()
    };
    let mut demands = vec![match service_account(&wanted.name) {
        Some((namespace, name)) => demand("", "serviceaccounts", namespace, name),
        None => demand("", "users", "", &wanted.name),
    }];
    demands.extend(wanted.groups.iter().map(|group| demand("", "groups", "", group)));
    const AUTHENTICATION: &str = "authentication.k8s.io";
    if !wanted.uid.is_empty() {
        demands.push(demand(AUTHENTICATION, "uids", "", &wanted.uid));
    }
    for (key, values) in &wanted.extra {
        for value in values {
            let mut one = demand(AUTHENTICATION, "userextras", "", value);
            one.subresource.clone_from(key);
            demands.push(one);
        }
    }
    demands
}

fn service_account(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(SERVICE_ACCOUNT)?.split_once(':')
}

/// Upstream v1.36 asks first whether the user may impersonate for this very action, and refuses in
/// those words.
fn refusal(info: &RequestInfo, wanted: &UserInfo, user: UserInfo) -> StatusError {
    let mode = match wanted.name.as_str() {
        name if service_account(name).is_some() => "serviceaccount",
        name if name.starts_with("system:node:") => "arbitrary-node",
        _ => "user-info",
    };
    let mut request = info.clone();
    request.verb = format!("impersonate-on:{mode}:{}", info.verb);
    forbidden(&Attributes { user, request }, "")
}

/// The groups that come with an identity.
fn complete(mut user: UserInfo) -> UserInfo {
    if let Some((namespace, _)) = service_account(&user.name)
        && user.groups.is_empty()
    {
        user.groups =
            vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")];
    }
    if user.name == ANONYMOUS {
        if !user.in_group(UNAUTHENTICATED) {
            user.groups.push(UNAUTHENTICATED.into());
        }
        return user;
    }
    with_group(user)
}

fn take_off(headers: &mut HeaderMap) {
    let names: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with("impersonate-")).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_no_text_is_a_name() {
        let mut headers = HeaderMap::new();
        headers.append(&USER, http::HeaderValue::from_bytes(b"\xff\xfe").expect("a value"));
        let wanted = wanted(&headers).expect("valid").expect("some");
        assert_eq!(wanted.name, "\u{fffd}\u{fffd}");
    }

    #[test]
    fn headers_name_the_user() {
        let mut headers = HeaderMap::new();
        assert_eq!(wanted(&headers).expect("none"), None);
        headers.append(&GROUP, "g".parse().expect("a value"));
        assert_eq!(
            wanted(&headers).expect_err("no name").message,
            r#"requested &user.DefaultInfo{Name:"", UID:"", Groups:[]string{"g"}, Extra:map[string][]string(nil)} without impersonating a user name"#
        );
        headers.append(&USER, "system:serviceaccount:a:b".parse().expect("a value"));
        headers.append("impersonate-extra-acme.io%2fx", "1".parse().expect("a value"));
        let wanted = wanted(&headers).expect("valid").expect("some");
        let demands = demands(&wanted);
        let shown: Vec<_> = demands
            .iter()
            .map(|d| {
                (d.resource.as_str(), d.namespace.as_str(), d.name.as_str(), d.subresource.as_str())
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("serviceaccounts", "a", "b", ""),
                ("groups", "", "g", ""),
                ("userextras", "", "1", "acme.io/x")
            ]
        );
    }
}
