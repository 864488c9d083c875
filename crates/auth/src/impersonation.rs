//! `Impersonate-User` and its like: acting as somebody else, if one may.
//!
//! Pure: from the headers come the user to be, and the questions that the authorizer must all
//! answer with yes. The filter asks them.

use std::collections::BTreeMap;

use apiserver::StatusError;
use apiserver::authz::Attributes;
use apiserver::request::{RequestInfo, UserInfo};
use http::HeaderMap;

use crate::request_header::{extras, texts};
use crate::{ALL_AUTHENTICATED, ALL_UNAUTHENTICATED, ANONYMOUS};

const USER: &str = "impersonate-user";
const UID: &str = "impersonate-uid";
const GROUP: &str = "impersonate-group";
const EXTRA_PREFIX: &str = "impersonate-extra-";
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";
const AUTHENTICATION_GROUP: &str = "authentication.k8s.io";

/// Who is to be acted as, once every question is answered with yes.
#[derive(Debug, PartialEq, Eq)]
pub struct Impersonation {
    pub user: UserInfo,
    pub questions: Vec<Attributes>,
}

/// Reads the headers of a request by `requestor`. `None`: no impersonation is asked for.
pub fn requested(
    headers: &HeaderMap,
    requestor: &UserInfo,
) -> Result<Option<Impersonation>, StatusError> {
    let name = texts(headers, USER).into_iter().next().unwrap_or_default();
    let uid = texts(headers, UID).into_iter().next().unwrap_or_default();
    let groups = texts(headers, GROUP);
    let extra = extras(headers, EXTRA_PREFIX);
    if name.is_empty() {
        if uid.is_empty() && groups.is_empty() && extra.is_empty() {
            return Ok(None);
        }
        let message = format!(
            "requested {:?} without impersonating a user",
            groups.first().or(Some(&uid)).map(String::as_str).unwrap_or_default()
        );
        return Err(StatusError::internal(message));
    }
    let questions = questions(requestor, &name, &uid, &groups, &extra);
    Ok(Some(Impersonation { user: resulting_user(name, uid, groups, extra), questions }))
}

fn questions(
    requestor: &UserInfo,
    name: &str,
    uid: &str,
    groups: &[String],
    extra: &BTreeMap<String, Vec<String>>,
) -> Vec<Attributes> {
    let ask = |group: &str, namespace: &str, resource: &str, subresource: &str, name: &str| {
        let request = RequestInfo {
            is_resource: true,
            verb: "impersonate".into(),
            group: group.into(),
            version: if group.is_empty() { String::new() } else { "v1".into() },
            namespace: namespace.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            name: name.into(),
            ..RequestInfo::default()
        };
        Attributes { user: requestor.clone(), request }
    };
    let mut questions = vec![];
    match service_account(name) {
        Some((namespace, account)) => {
            questions.push(ask("", namespace, "serviceaccounts", "", account));
        }
        None => questions.push(ask("", "", "users", "", name)),
    }
    questions.extend(groups.iter().map(|group| ask("", "", "groups", "", group)));
    for (key, values) in extra {
        let each = values.iter();
        questions.extend(each.map(|value| ask(AUTHENTICATION_GROUP, "", "userextras", key, value)));
    }
    if !uid.is_empty() {
        questions.push(ask(AUTHENTICATION_GROUP, "", "uids", "", uid));
    }
    questions
}

/// The impersonated user has the groups that it would have had by logging in.
fn resulting_user(
    name: String,
    uid: String,
    mut groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
) -> UserInfo {
    if groups.is_empty()
        && let Some((namespace, _)) = service_account(&name)
    {
        groups.push("system:serviceaccounts".into());
        groups.push(format!("system:serviceaccounts:{namespace}"));
    }
    let has = |wanted: &str| groups.iter().any(|group| group == wanted);
    if name == ANONYMOUS {
        if !has(ALL_UNAUTHENTICATED) {
            groups.push(ALL_UNAUTHENTICATED.into());
        }
    } else if !has(ALL_AUTHENTICATED) && !has(ALL_UNAUTHENTICATED) {
        groups.push(ALL_AUTHENTICATED.into());
    }
    UserInfo { name, uid, groups, extra }
}

/// `system:serviceaccount:NAMESPACE:NAME`, taken apart.
pub(crate) fn service_account(name: &str) -> Option<(&str, &str)> {
    let (namespace, account) = name.strip_prefix(SERVICE_ACCOUNT)?.split_once(':')?;
    (!namespace.is_empty() && !account.is_empty() && !account.contains(':'))
        .then_some((namespace, account))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_become_a_user_and_questions() {
        let check = |pairs: &[(&str, &str)], user: &str, groups: &str, asked: &[&str]| {
            let mut request = http::Request::builder();
            for (name, value) in pairs {
                request = request.header(*name, *value);
            }
            let request = request.body(()).expect("a request");
            let got = requested(request.headers(), &UserInfo::new("root", &[])).expect("valid");
            let got = got.expect("it is asked for");
            assert_eq!(
                (got.user.name.as_str(), got.user.groups.join(",").as_str()),
                (user, groups)
            );
            let questions = got.questions.iter().map(|question| {
                let info = &question.request;
                format!("{}/{}/{}/{}", info.namespace, info.resource, info.subresource, info.name)
            });
            assert_eq!(questions.collect::<Vec<_>>(), asked);
        };
        check(&[("Impersonate-User", "jane")], "jane", ALL_AUTHENTICATED, &["/users//jane"]);
        check(
            &[("Impersonate-User", "jane"), ("Impersonate-Group", "dev"), ("Impersonate-Uid", "7")],
            "jane",
            "dev,system:authenticated",
            &["/users//jane", "/groups//dev", "/uids//7"],
        );
        check(
            &[("Impersonate-User", "system:serviceaccount:web:bot")],
            "system:serviceaccount:web:bot",
            "system:serviceaccounts,system:serviceaccounts:web,system:authenticated",
            &["web/serviceaccounts//bot"],
        );
        check(
            &[("Impersonate-User", "a"), ("Impersonate-Extra-Scopes", "view")],
            "a",
            ALL_AUTHENTICATED,
            &["/users//a", "/userextras/scopes/view"],
        );
        check(
            &[("Impersonate-User", ANONYMOUS)],
            ANONYMOUS,
            ALL_UNAUTHENTICATED,
            &["/users//system:anonymous"],
        );
    }

    #[test]
    fn groups_without_a_user_are_an_error() {
        let request = http::Request::builder().header("Impersonate-Group", "g").body(());
        let request = request.expect("a request");
        assert!(requested(request.headers(), &UserInfo::default()).is_err());
    }
}
