//! Impersonation: `Impersonate-User`, `-Group`, `-Uid` and `-Extra-*`.
//!
//! In: the headers, and the real user. Out: the user of the request, recorded in the audit trail. [`modes`]
//! decides which rights the real user needs, [`figures`] counts the decisions.
//! Upstream: `k8s.io/apiserver/pkg/endpoints/filters/impersonation`.

mod figures;
pub(crate) mod modes;
mod names;

use std::collections::BTreeMap;
use std::sync::Arc;

use base::percent;
use http::request::Parts;
use http::{HeaderMap, HeaderName};
use machinery::StatusError;
use release::features::{self, Feature};

use self::modes::AUTHENTICATION;

use crate::audit::Trail;
use crate::authz::Attributes;
use crate::request::{RequestInfo, UserInfo, header_text};
use crate::shared::Shared;

const USER: HeaderName = HeaderName::from_static("impersonate-user");
const GROUP: HeaderName = HeaderName::from_static("impersonate-group");
const UID: HeaderName = HeaderName::from_static("impersonate-uid");
const EXTRA: &str = "impersonate-extra-";

/// Returns the user of the request. The headers are removed, so that a proxied request does not contain
/// them.
pub async fn impersonate(
    shared: &Shared,
    info: &Arc<RequestInfo>,
    parts: &mut Parts,
    user: UserInfo,
) -> Result<UserInfo, StatusError> {
    let is_constrained = features::enabled(Feature::ConstrainedImpersonation);
    let Some(wanted) = wanted(&parts.headers, is_constrained)? else { return Ok(user) };
    take_off(&mut parts.headers);
    let request = Attributes { user, request: (**info).clone() };
    let modes = if is_constrained { modes::ALL } else { modes::LEGACY };
    let found = shared.impersonation.resolve(modes, &shared.authorizers, &request, &wanted).await?;
    tracing::debug!(user = request.user.name, wanted = wanted.name, "impersonates");
    if let Some(trail) = Trail::of(parts) {
        trail.impersonated(&found.user, found.constraint);
    }
    Ok(found.user)
}

/// The user to impersonate; `None` without any of the headers.
fn wanted(headers: &HeaderMap, is_constrained: bool) -> Result<Option<UserInfo>, StatusError> {
    let text = |name: &HeaderName| {
        headers.get(name).map(|value| header_text(value).into_owned()).unwrap_or_default()
    };
    let texts = |name: &HeaderName| {
        headers.get_all(name).iter().map(|value| header_text(value).into_owned())
    };
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix(EXTRA) {
            // Several spellings of a key are one key: authorization checks all its values.
            extra.entry(percent::decode_whole(key)).or_default().extend(texts(name));
        }
    }
    let groups = texts(&GROUP).collect();
    let wanted = UserInfo { name: text(&USER), uid: text(&UID), groups, extra };
    if !wanted.name.is_empty() {
        return Ok(Some(wanted));
    }
    if wanted == UserInfo::default() {
        return Ok(None);
    }
    Err(StatusError::bad_request(match is_constrained {
        true => format!("requested {} without impersonating a user name", go_debug(&wanted)),
        false => format!("requested {} without impersonating a user", references(&wanted)),
    }))
}

/// Go's `%#v` of a `user.DefaultInfo`.
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

/// Go's `%v` of the `ObjectReference`s that are checked. Their fields: kind, namespace, name, uid, version,
/// resource version, field path.
fn references(user: &UserInfo) -> String {
    let mut all: Vec<String> =
        user.groups.iter().map(|group| format!("{{Group  {group}    }}")).collect();
    for (key, values) in &user.extra {
        let shown = values
            .iter()
            .map(|value| format!("{{UserExtra  {value}  {AUTHENTICATION}/v1  {key}}}"));
        all.extend(shown);
    }
    if !user.uid.is_empty() {
        all.push(format!("{{UID  {}  {AUTHENTICATION}/v1  }}", user.uid));
    }
    format!("[{}]", all.join(" "))
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
    use http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
        }
        headers
    }

    #[test]
    fn a_name_may_be_invalid_utf8() {
        let mut headers = HeaderMap::new();
        headers.append(&USER, HeaderValue::from_bytes(b"\xff\xfe").expect("a value"));
        let wanted = wanted(&headers, true).expect("valid").expect("some");
        assert_eq!(wanted.name, "\u{fffd}\u{fffd}");
    }

    #[test]
    fn headers_name_the_user() {
        assert_eq!(wanted(&headers(&[]), true).expect("none"), None);
        let given = headers(&[
            ("impersonate-user", "system:serviceaccount:a:b"),
            ("impersonate-group", "g"),
            ("impersonate-group", "h"),
            ("impersonate-uid", "u"),
            ("impersonate-extra-acme.io%2fx", "1"),
            ("impersonate-extra-acme.io%2f%78", "2"),
            ("impersonate-extra-%41", "3"),
            ("impersonate-extra-%zz%41", "4"),
        ]);
        let mut found = wanted(&given, true).expect("valid").expect("some");
        assert_eq!(found.name, "system:serviceaccount:a:b");
        assert_eq!(found.groups, ["g", "h"]);
        assert_eq!(found.uid, "u");
        // Headers have no order.
        found.extra.values_mut().for_each(|values| values.sort());
        let extra: Vec<(&str, String)> =
            found.extra.iter().map(|(key, values)| (key.as_str(), values.join(","))).collect();
        let expected = [("%zz%41", "4"), ("A", "3"), ("acme.io/x", "1,2")];
        assert_eq!(extra, expected.map(|(key, values)| (key, values.to_owned())));
    }

    #[test]
    fn impersonation_needs_a_user_name() {
        let check = |pairs: &[(&'static str, &str)], constrained: &str, legacy: &str| {
            for (is_constrained, expected) in [(true, constrained), (false, legacy)] {
                let error = wanted(&headers(pairs), is_constrained).expect_err("no name");
                assert_eq!((error.code, error.message.as_str()), (400, expected), "{pairs:?}");
            }
        };
        check(
            &[("impersonate-group", "g")],
            r#"requested &user.DefaultInfo{Name:"", UID:"", Groups:[]string{"g"}, Extra:map[string][]string(nil)} without impersonating a user name"#,
            "requested [{Group  g    }] without impersonating a user",
        );
        check(
            &[("impersonate-uid", "u"), ("impersonate-extra-k", "v")],
            r#"requested &user.DefaultInfo{Name:"", UID:"u", Groups:[]string(nil), Extra:map[string][]string{"k":[]string{"v"}}} without impersonating a user name"#,
            "requested [{UserExtra  v  authentication.k8s.io/v1  k} {UID  u  authentication.k8s.io/v1  }] without impersonating a user",
        );
    }

    #[test]
    fn headers_are_removed() {
        let mut given =
            headers(&[("impersonate-user", "a"), ("impersonate-extra-k", "v"), ("x", "y")]);
        take_off(&mut given);
        assert_eq!(given.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x"]);
    }
}
