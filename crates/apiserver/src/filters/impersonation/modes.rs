//! The impersonation modes: which rights a user needs to act as another user.
//!
//! ```text
//!  wanted user                   mode              rights that the real user needs
//!  the node of its own pod       associated-node   impersonate-on:associated-node:VERB on the object,
//!                                                  impersonate:associated-node nodes/*
//!  any node                      arbitrary-node    impersonate-on:arbitrary-node:VERB …, and so on
//!  a service account             serviceaccount
//!  any other user                user-info
//!  any user                      (legacy)          impersonate users, groups, uids, userextras
//! ```
//!
//! In: the request with its real user, the wanted user. Out: the wanted user with the groups of that
//! identity, and the verb that allowed it; or the refusal of the first mode.
//! Modes are tried in this order, but the mode that last worked for a user comes first: users of the legacy
//! right cause no additional checks. Decisions of a constrained mode are cached for ten seconds, as upstream
//! (`cache.go`): `outer` for an equal request, `inner` for the same two users.
//! Invariant: [`applies`](Mode::applies) of a mode is called before any cache is read.
//! Upstream: KEP-5284, `impersonation/mode.go`.

use std::sync::Arc;
use std::time::Duration;

use machinery::StatusError;
use tokio::time::Instant;

use super::figures::Figures;
use super::names::{is_associated, node, service_account, wrong_extra};
use crate::authn::{ANONYMOUS, UNAUTHENTICATED, with_group};
use crate::authz::{Attributes, Authorizer, Decision, decide, forbidden};
use crate::metrics::Metrics;
use crate::request::{RequestInfo, UserInfo};
use base::memory::{Memory, key_of};

/// A mode. Verbs are literals, because the audit log and error messages contain them.
pub struct Mode {
    /// In metrics.
    label: &'static str,
    /// The verb of the check on the wanted user.
    verb: &'static str,
    /// Prefix of the request's verb; `None` for the legacy mode, which does not check the request.
    on: Option<&'static str>,
    /// Whether the mode applies to this real user and this wanted user.
    applies: fn(&UserInfo, &UserInfo) -> bool,
}

pub const ALL: &[Mode] = &[
    Mode {
        label: "associated-node",
        verb: ASSOCIATED,
        on: Some("impersonate-on:associated-node:"),
        applies: |wanted, real| is_name_only(wanted) && is_associated(real, &wanted.name),
    },
    Mode {
        label: "arbitrary-node",
        verb: "impersonate:arbitrary-node",
        on: Some("impersonate-on:arbitrary-node:"),
        applies: |wanted, _| is_name_only(wanted) && node(&wanted.name).is_some(),
    },
    Mode {
        label: "serviceaccount",
        verb: "impersonate:serviceaccount",
        on: Some("impersonate-on:serviceaccount:"),
        applies: |wanted, _| is_name_only(wanted) && service_account(&wanted.name).is_some(),
    },
    Mode {
        label: "user-info",
        verb: "impersonate:user-info",
        on: Some("impersonate-on:user-info:"),
        applies: |wanted, _| {
            node(&wanted.name).is_none() && service_account(&wanted.name).is_none()
        },
    },
    Mode { label: "legacy", verb: "impersonate", on: None, applies: |_, _| true },
];
/// The modes while the gate is off.
pub const LEGACY: &[Mode] = ALL.split_at(ALL.len() - 1).1;

pub(super) const AUTHENTICATION: &str = "authentication.k8s.io";
const ASSOCIATED: &str = "impersonate:associated-node";
/// Replaces a service account's extras: the pod and node in them would make every check different.
const ASSOCIATED_KEYS: &str = "authentication.kubernetes.io/associated-node-keys";
const NODES: &str = "system:nodes";
const MASTERS: &str = "system:masters";
/// From this number on, one check for all of them comes first. Upstream:
/// `manyAuthorizationChecksInLoop`.
const MANY: usize = 4;
/// How long a positive decision is cached. Upstream: `TokenSuccessCacheTTL`.
const LASTS: Duration = Duration::from_secs(10);
const REMEMBERED: usize = 10_000;
/// Practically unlimited: the mode that worked is only a hint.
const HINT_LASTS: Duration = Duration::from_secs(u32::MAX as u64);

/// The impersonated user, and the right that allowed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Impersonated {
    pub user: UserInfo,
    /// The verb of a constrained mode, for the audit log.
    pub constraint: Option<&'static str>,
}

/// The caches between requests.
pub struct Impersonation {
    /// By the real user's name: the index of the mode that worked last.
    last: Memory<usize>,
    allowed: Memory<Impersonated>,
    figures: Arc<Figures>,
}

/// A check of one mode.
struct Ask<'a> {
    mode: &'a Mode,
    authorizers: &'a [Box<dyn Authorizer>],
    figures: &'a Figures,
    /// As authorizers see the user.
    real: UserInfo,
    wanted: &'a UserInfo,
}

impl Impersonation {
    pub fn new(metrics: &Metrics) -> Self {
        let figures = Arc::<Figures>::default();
        let source = figures.clone();
        metrics.register(Box::new(move |out| source.encode(out)));
        Self { last: Memory::new(REMEMBERED), allowed: Memory::new(REMEMBERED), figures }
    }

    /// See the module.
    pub async fn resolve(
        &self,
        modes: &[Mode],
        authorizers: &[Box<dyn Authorizer>],
        request: &Attributes,
        wanted: &UserInfo,
    ) -> Result<Impersonated, StatusError> {
        let start = Instant::now();
        let hint = key_of([request.user.name.as_str()]);
        let known = self.last.get(&hint).filter(|at| *at < modes.len());
        let order = known.into_iter().chain((0..modes.len()).filter(|at| Some(*at) != known));
        let mut first = None;
        for at in order {
            let mode = &modes[at];
            match self.attempt(mode, authorizers, request, wanted).await {
                Ok(Some(found)) => {
                    if Some(at) != known {
                        self.last.put(hint, at, HINT_LASTS);
                    }
                    self.figures.attempted(mode.label, true, start.elapsed());
                    return Ok(found);
                }
                Ok(None) => {}
                Err(refusal) => _ = first.get_or_insert(refusal),
            }
        }
        self.figures.attempted("", false, start.elapsed());
        Err(first.unwrap_or_else(|| StatusError::internal("all impersonation modes failed")))
    }

    /// `None` if the mode does not apply to these users.
    async fn attempt(
        &self,
        mode: &Mode,
        authorizers: &[Box<dyn Authorizer>],
        request: &Attributes,
        wanted: &UserInfo,
    ) -> Result<Option<Impersonated>, StatusError> {
        if !(mode.applies)(wanted, &request.user) {
            return Ok(None);
        }
        let real = as_seen(mode, &request.user);
        let ask = Ask { mode, authorizers, figures: &self.figures, real, wanted };
        let Some(on) = mode.on else { return ask.whole().await.map(Some) };
        let info = &request.request;
        let outer = key(mode, &ask.real, wanted, Some(info));
        let mut found = match self.allowed.get(&outer) {
            Some(found) => found,
            None => {
                let verb = format!("{on}{}", info.verb);
                ask.may(RequestInfo { verb, ..info.clone() }).await?;
                let inner = key(mode, &ask.real, wanted, None);
                let found = match self.allowed.get(&inner) {
                    Some(found) => found,
                    None => {
                        let found = ask.whole().await?;
                        self.allowed.put(inner, found.clone(), LASTS);
                        found
                    }
                };
                self.allowed.put(outer, found.clone(), LASTS);
                found
            }
        };
        // The cached decision for a service account is the same for all nodes.
        found.user.name.clone_from(&wanted.name);
        Ok(Some(found))
    }
}

impl Ask<'_> {
    fn is_constrained(&self) -> bool {
        self.mode.on.is_some()
    }

    /// Checks each property of the wanted user.
    async fn whole(&self) -> Result<Impersonated, StatusError> {
        let mut user = self.wanted.clone();
        let mut about = self.about("users", &user.name);
        if let Some(name) = node(&self.wanted.name).filter(|_| self.is_constrained()) {
            about.resource = "nodes".into();
            let is_any = self.mode.verb == ASSOCIATED;
            about.name = if is_any { "*".into() } else { name.into() };
            user.groups = vec![NODES.into()];
        } else if let Some((namespace, name)) = service_account(&self.wanted.name) {
            about.resource = "serviceaccounts".into();
            about.namespace = namespace.into();
            about.name = name.into();
            if user.groups.is_empty() {
                let all = "system:serviceaccounts";
                user.groups = vec![all.into(), format!("{all}:{namespace}")];
            }
        }
        self.may(about).await?;
        if !self.wanted.uid.is_empty() {
            self.may(self.about("uids", &self.wanted.uid)).await?;
        }
        self.groups().await?;
        self.extra().await?;
        let constraint = self.is_constrained().then_some(self.mode.verb);
        Ok(Impersonated { user: complete(user), constraint })
    }

    async fn groups(&self) -> Result<(), StatusError> {
        let groups = &self.wanted.groups;
        if self.is_constrained() {
            let refuse =
                |group: &str, why: &str| Err(self.refusal(self.about("groups", group), why));
            if groups.iter().any(String::is_empty) {
                return refuse("", "impersonating the empty string group is not allowed");
            }
            if self.wanted.in_group(MASTERS) {
                return refuse(MASTERS, "impersonating the system:masters group is not allowed");
            }
            if groups.len() >= MANY && self.may(self.about("groups", "*")).await.is_ok() {
                return Ok(());
            }
        }
        for group in groups {
            self.may(self.about("groups", group)).await?;
        }
        Ok(())
    }

    async fn extra(&self) -> Result<(), StatusError> {
        let extra = &self.wanted.extra;
        let about = |key: &str, value: &str| RequestInfo {
            subresource: key.into(),
            ..self.about("userextras", value)
        };
        if self.is_constrained() {
            if let Some(why) = wrong_extra(extra) {
                return Err(self.refusal(about("", ""), &why));
            }
            let is_large =
                extra.len() >= MANY || extra.values().map(Vec::len).sum::<usize>() >= MANY;
            if is_large && self.may(about("*", "*")).await.is_ok() {
                return Ok(());
            }
        }
        for (key, values) in extra {
            for value in values {
                self.may(about(key, value)).await?;
            }
        }
        Ok(())
    }

    /// Users and groups are in the core group for historical reasons; the rest is in another group.
    fn about(&self, resource: &str, name: &str) -> RequestInfo {
        let is_old = !self.is_constrained() && matches!(resource, "users" | "groups");
        RequestInfo {
            is_resource: true,
            verb: self.mode.verb.into(),
            group: if is_old { "" } else { AUTHENTICATION }.into(),
            version: "v1".into(),
            resource: resource.into(),
            name: name.into(),
            ..RequestInfo::default()
        }
    }

    fn refusal(&self, request: RequestInfo, why: &str) -> StatusError {
        forbidden(&Attributes { user: self.real.clone(), request }, why)
    }

    async fn may(&self, request: RequestInfo) -> Result<(), StatusError> {
        let attributes = Attributes { user: self.real.clone(), request };
        let start = Instant::now();
        let decision = decide(self.authorizers, &attributes).await;
        let is_allowed = matches!(decision, Decision::Allow { .. });
        self.figures.authorized(self.mode.label, is_allowed, start.elapsed());
        match decision {
            Decision::Allow { .. } => Ok(()),
            Decision::Deny { reason } | Decision::NoOpinion { reason } => {
                tracing::trace!(?attributes, reason, "may not impersonate");
                Err(forbidden(&attributes, &reason))
            }
        }
    }
}

fn is_name_only(user: &UserInfo) -> bool {
    user.uid.is_empty() && user.groups.is_empty() && user.extra.is_empty()
}

/// The real user as authorizers see it. That a service account is on the wanted node is checked already;
/// details of its pod are removed, because they would prevent caching.
fn as_seen(mode: &Mode, real: &UserInfo) -> UserInfo {
    let mut user = real.clone();
    if mode.verb == ASSOCIATED {
        let keys = user.extra.into_keys().collect();
        user.extra = [(ASSOCIATED_KEYS.to_owned(), keys)].into();
    }
    user
}

/// Adds the groups of an identity.
fn complete(mut user: UserInfo) -> UserInfo {
    if user.name == ANONYMOUS {
        if !user.in_group(UNAUTHENTICATED) {
            user.groups.push(UNAUTHENTICATED.into());
        }
        return user;
    }
    with_group(user)
}

/// The cache key. It lists every field of a request, so that a new field cannot be forgotten.
fn key(mode: &Mode, real: &UserInfo, wanted: &UserInfo, info: Option<&RequestInfo>) -> [u8; 32] {
    let any = UserInfo::new("system:node:*", &[]);
    let wanted = if mode.verb == ASSOCIATED { &any } else { wanted };
    let mut parts = vec![mode.verb.to_owned()];
    for user in [real, wanted] {
        parts.extend([user.name.clone(), user.uid.clone(), user.groups.len().to_string()]);
        parts.extend(user.groups.iter().cloned());
        parts.push(user.extra.len().to_string());
        for (key, values) in &user.extra {
            parts.extend([key.clone(), values.len().to_string()]);
            parts.extend(values.iter().cloned());
        }
    }
    if let Some(info) = info {
        let RequestInfo {
            is_resource,
            path,
            verb,
            group,
            version,
            namespace,
            resource,
            subresource,
            name,
            rest,
            field_selector,
        } = info;
        parts.push(is_resource.to_string());
        let texts = [
            path,
            verb,
            group,
            version,
            namespace,
            resource,
            subresource,
            name,
            rest,
            field_selector,
        ];
        parts.extend(texts.map(String::clone));
    }
    key_of(parts.iter().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use async_trait::async_trait;

    use super::*;

    /// Allows the rights in a list, and records the checks.
    #[derive(Default)]
    struct Listed {
        rights: Vec<String>,
        asked: Arc<Mutex<Vec<String>>>,
    }

    #[async_trait]
    impl Authorizer for Listed {
        async fn authorize(&self, attributes: &Attributes) -> Decision {
            let line = line(attributes);
            let is_allowed = self.rights.contains(&line);
            self.asked.lock().expect("no panic").push(line);
            let reason = String::new();
            if is_allowed { Decision::Allow { reason } } else { Decision::NoOpinion { reason } }
        }
    }

    /// `impersonate:user-info users.authentication.k8s.io jane`
    fn line(Attributes { request, .. }: &Attributes) -> String {
        if !request.is_resource {
            return format!("{} {}", request.verb, request.path);
        }
        let mut resource = machinery::status::qualified(&request.resource, &request.group);
        if !request.subresource.is_empty() {
            resource = format!("{resource}/{}", request.subresource);
        }
        let name = [request.namespace.as_str(), request.name.as_str()];
        let name: Vec<&str> = name.into_iter().filter(|part| !part.is_empty()).collect();
        format!("{} {resource} {}", request.verb, name.join("/"))
    }

    struct Bench {
        impersonation: Impersonation,
        authorizers: Vec<Box<dyn Authorizer>>,
        asked: Arc<Mutex<Vec<String>>>,
    }

    impl Bench {
        fn new(rights: &[&str]) -> Self {
            let rights = rights.iter().map(|right| (*right).to_owned()).collect();
            let listed = Listed { rights, ..Listed::default() };
            let asked = listed.asked.clone();
            let impersonation = Impersonation::new(&Metrics::default());
            Self { impersonation, authorizers: vec![Box::new(listed)], asked }
        }

        async fn ask(
            &self,
            real: &UserInfo,
            wanted: &UserInfo,
        ) -> Result<Impersonated, StatusError> {
            self.ask_in(ALL, real, wanted, "list").await
        }

        /// A request for pods of a namespace.
        async fn ask_in(
            &self,
            modes: &[Mode],
            real: &UserInfo,
            wanted: &UserInfo,
            verb: &str,
        ) -> Result<Impersonated, StatusError> {
            let request = RequestInfo {
                is_resource: true,
                verb: verb.into(),
                version: "v1".into(),
                resource: "pods".into(),
                namespace: "default".into(),
                ..RequestInfo::default()
            };
            let request = Attributes { user: real.clone(), request };
            self.impersonation.resolve(modes, &self.authorizers, &request, wanted).await
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.asked.lock().expect("no panic"))
        }
    }

    fn user(name: &str, uid: &str, groups: &[&str], extra: &[(&str, &[&str])]) -> UserInfo {
        let extra = extra.iter().map(|(key, values)| {
            ((*key).to_owned(), values.iter().map(|value| (*value).to_owned()).collect())
        });
        UserInfo { uid: uid.into(), extra: extra.collect(), ..UserInfo::new(name, groups) }
    }

    fn named(name: &str) -> UserInfo {
        UserInfo::new(name, &[])
    }

    const ON_NODE: (&str, &[&str]) = ("authentication.kubernetes.io/node-name", &["n1"]);

    fn agent() -> UserInfo {
        user("system:serviceaccount:a:agent", "", &[], &[ON_NODE, ("other", &["x"])])
    }

    #[tokio::test]
    async fn each_mode_has_its_rights() {
        let check = async |real: &UserInfo,
                           wanted: UserInfo,
                           rights: &[&str],
                           verb: Option<&str>,
                           groups: &[&str]| {
            let found = Bench::new(rights).ask(real, &wanted).await.expect("allowed");
            assert_eq!(found.constraint, verb, "{wanted:?}");
            let groups = groups.iter().map(|group| (*group).to_owned()).collect();
            assert_eq!(found.user, UserInfo { groups, ..wanted });
            for left_out in 0..rights.len() {
                let mut some = rights.to_vec();
                some.remove(left_out);
                let refused = Bench::new(&some).ask(real, &named(&found.user.name)).await;
                // The rights for other properties are not needed if only the name is wanted.
                let needed = left_out < 2 || rights.len() < 3;
                assert_eq!(refused.is_err(), needed, "{some:?}");
            }
        };
        let jane = named("jane");
        check(
            &jane,
            named("joe"),
            &[
                "impersonate-on:user-info:list pods default",
                "impersonate:user-info users.authentication.k8s.io joe",
            ],
            Some("impersonate:user-info"),
            &["system:authenticated"],
        )
        .await;
        check(
            &jane,
            user("joe", "1", &["g"], &[("acme.io/x", &["v"])]),
            &[
                "impersonate-on:user-info:list pods default",
                "impersonate:user-info users.authentication.k8s.io joe",
                "impersonate:user-info uids.authentication.k8s.io 1",
                "impersonate:user-info groups.authentication.k8s.io g",
                "impersonate:user-info userextras.authentication.k8s.io/acme.io/x v",
            ],
            Some("impersonate:user-info"),
            &["g", "system:authenticated"],
        )
        .await;
        check(
            &jane,
            named("system:serviceaccount:b:bot"),
            &[
                "impersonate-on:serviceaccount:list pods default",
                "impersonate:serviceaccount serviceaccounts.authentication.k8s.io b/bot",
            ],
            Some("impersonate:serviceaccount"),
            &["system:serviceaccounts", "system:serviceaccounts:b", "system:authenticated"],
        )
        .await;
        check(
            &jane,
            named("system:node:n1"),
            &[
                "impersonate-on:arbitrary-node:list pods default",
                "impersonate:arbitrary-node nodes.authentication.k8s.io n1",
            ],
            Some("impersonate:arbitrary-node"),
            &["system:nodes", "system:authenticated"],
        )
        .await;
        check(
            &agent(),
            named("system:node:n1"),
            &[
                "impersonate-on:associated-node:list pods default",
                "impersonate:associated-node nodes.authentication.k8s.io *",
            ],
            Some("impersonate:associated-node"),
            &["system:nodes", "system:authenticated"],
        )
        .await;
        check(
            &jane,
            named("system:anonymous"),
            &["impersonate users system:anonymous"],
            None,
            &["system:unauthenticated"],
        )
        .await;
    }

    #[tokio::test]
    async fn the_first_modes_refusal_is_returned() {
        let check = async |real: &UserInfo, wanted: UserInfo, rights: &[&str], expected: &str| {
            let refusal = Bench::new(rights).ask(real, &wanted).await.expect_err("refused");
            assert_eq!((refusal.code, refusal.message.as_str()), (403, expected));
        };
        let jane = named("jane");
        check(
            &jane,
            named("joe"),
            &[],
            r#"pods is forbidden: User "jane" cannot impersonate-on:user-info:list resource "pods" in API group "" in the namespace "default""#,
        )
        .await;
        check(
            &agent(),
            named("system:node:n1"),
            &["impersonate-on:associated-node:list pods default"],
            r#"nodes.authentication.k8s.io "*" is forbidden: User "system:serviceaccount:a:agent" cannot impersonate:associated-node resource "nodes" in API group "authentication.k8s.io" at the cluster scope"#,
        )
        .await;
        check(
            &jane,
            named("system:serviceaccount:b:bot"),
            &["impersonate-on:serviceaccount:list pods default"],
            r#"serviceaccounts.authentication.k8s.io "bot" is forbidden: User "jane" cannot impersonate:serviceaccount resource "serviceaccounts" in API group "authentication.k8s.io" in the namespace "b""#,
        )
        .await;
        // Only the legacy mode allows a service account with groups.
        check(
            &jane,
            user("system:serviceaccount:b:bot", "", &["g"], &[]),
            &["impersonate serviceaccounts b/bot"],
            r#"groups "g" is forbidden: User "jane" cannot impersonate resource "groups" in API group "" at the cluster scope"#,
        )
        .await;
        let rights = [
            "impersonate-on:user-info:list pods default",
            "impersonate:user-info users.authentication.k8s.io joe",
        ];
        check(
            &jane,
            user("joe", "", &["system:masters"], &[]),
            &rights,
            r#"groups.authentication.k8s.io "system:masters" is forbidden: User "jane" cannot impersonate:user-info resource "groups" in API group "authentication.k8s.io" at the cluster scope: impersonating the system:masters group is not allowed"#,
        )
        .await;
        check(
            &jane,
            user("joe", "", &[""], &[]),
            &rights,
            r#"groups.authentication.k8s.io is forbidden: User "jane" cannot impersonate:user-info resource "groups" in API group "authentication.k8s.io" at the cluster scope: impersonating the empty string group is not allowed"#,
        )
        .await;
        check(
            &jane,
            user("joe", "", &[], &[("x", &["v"])]),
            &rights,
            r#"userextras.authentication.k8s.io is forbidden: User "jane" cannot impersonate:user-info resource "userextras" in API group "authentication.k8s.io" at the cluster scope: impersonating an invalid key in extra is not allowed: extra.key: Invalid value: "x": must be a domain-prefixed path (such as "acme.io/foo")"#,
        )
        .await;
    }

    #[tokio::test]
    async fn the_legacy_right_causes_no_additional_checks() {
        let bench = Bench::new(&["impersonate users joe", "impersonate groups g"]);
        let wanted = user("joe", "", &["g"], &[]);
        let jane = named("jane");
        assert!(bench.ask(&jane, &wanted).await.is_ok());
        let first = [
            "impersonate-on:user-info:list pods default",
            "impersonate users joe",
            "impersonate groups g",
        ];
        assert_eq!(bench.take(), first);
        assert!(bench.ask(&jane, &wanted).await.is_ok());
        assert_eq!(bench.take(), first[1..]);
        // The mode that worked last is tried first, and its refusal is returned.
        let refusal = bench.ask(&jane, &named("jim")).await.expect_err("refused");
        let expected = r#"users "jim" is forbidden: User "jane" cannot impersonate resource "users" in API group "" at the cluster scope"#;
        assert_eq!(refusal.message, expected);
        // Another user does not get jane's cached decision.
        bench.take();
        assert!(bench.ask(&named("june"), &wanted).await.is_ok());
        assert_eq!(bench.take(), first);
    }

    #[tokio::test]
    async fn a_closed_gate_leaves_the_legacy_right() {
        let bench = Bench::new(&["impersonate:user-info users.authentication.k8s.io joe"]);
        let refusal = bench.ask_in(LEGACY, &named("jane"), &named("joe"), "list").await;
        let expected = r#"users "joe" is forbidden: User "jane" cannot impersonate resource "users" in API group "" at the cluster scope"#;
        assert_eq!(refusal.expect_err("refused").message, expected);
        assert_eq!(bench.take(), ["impersonate users joe"]);
    }

    #[tokio::test(start_paused = true)]
    async fn positive_decisions_are_cached_for_ten_seconds() {
        let rights = [
            "impersonate-on:user-info:list pods default",
            "impersonate-on:user-info:get pods default",
            "impersonate:user-info users.authentication.k8s.io joe",
        ];
        let bench = Bench::new(&rights);
        let (jane, joe) = (named("jane"), named("joe"));
        let check = async |verb: &str, wanted: &UserInfo, expected: &[&str]| {
            let found = bench.ask_in(ALL, &jane, wanted, verb).await;
            assert_eq!(bench.take(), expected, "{verb}");
            found.is_ok()
        };
        assert!(check("list", &joe, &[rights[0], rights[2]]).await);
        assert!(check("list", &joe, &[]).await);
        assert!(check("get", &joe, &rights[1..2]).await);
        let more = user("joe", "", &["g"], &[]);
        let group = "impersonate:user-info groups.authentication.k8s.io g";
        let legacy = "impersonate users joe";
        assert!(!check("list", &more, &[rights[0], rights[2], group, legacy]).await);
        tokio::time::advance(LASTS).await;
        assert!(check("list", &joe, &[rights[0], rights[2]]).await);
    }

    #[tokio::test]
    async fn a_service_account_on_all_nodes_is_checked_once() {
        let rights = [
            "impersonate-on:associated-node:list pods default",
            "impersonate:associated-node nodes.authentication.k8s.io *",
        ];
        let bench = Bench::new(&rights);
        let on = |node: &str| {
            let extra = BTreeMap::from([(ON_NODE.0.to_owned(), vec![node.to_owned()])]);
            UserInfo { extra, ..named("system:serviceaccount:a:agent") }
        };
        let ask = async |node: &str, wanted: &str| {
            bench.ask(&on(node), &named(wanted)).await.map(|found| found.user.name)
        };
        assert_eq!(ask("n1", "system:node:n1").await.expect("its own"), "system:node:n1");
        assert_eq!(bench.take(), rights);
        assert_eq!(ask("n2", "system:node:n2").await.expect("its own"), "system:node:n2");
        assert_eq!(bench.take(), [""; 0]);
        // The decision for another node is not cached for this one.
        assert!(ask("n2", "system:node:n1").await.is_err());
    }

    #[tokio::test]
    async fn many_properties_are_first_checked_together() {
        let name = "impersonate:user-info users.authentication.k8s.io joe";
        let on = "impersonate-on:user-info:list pods default";
        let check = async |wanted: UserInfo, rights: &[&str], expected: &[&str]| {
            let rights = [&[on, name][..], rights].concat();
            let bench = Bench::new(&rights);
            assert!(bench.ask(&named("jane"), &wanted).await.is_ok(), "{rights:?}");
            assert_eq!(bench.take()[2..], *expected);
        };
        let group =
            |name: &str| format!("impersonate:user-info groups.authentication.k8s.io {name}");
        let (all, each) = (group("*"), ["a", "b", "c", "d"].map(group));
        let each: Vec<&str> = each.iter().map(String::as_str).collect();
        let few = user("joe", "", &["a", "b", "c"], &[]);
        check(few, &each, &each[..3]).await;
        let many = user("joe", "", &["a", "b", "c", "d"], &[]);
        check(many.clone(), &[&all], &[&all]).await;
        check(many, &each, &[&[all.as_str()][..], &each[..]].concat()).await;
        let extra = user("joe", "", &[], &[("a.b/x", &["1", "2", "3"]), ("a.b/y", &["4"])]);
        let all = "impersonate:user-info userextras.authentication.k8s.io/* *";
        check(extra, &[all], &[all]).await;
    }

    #[tokio::test]
    async fn attempts_and_checks_are_counted() {
        let bench = Bench::new(&["impersonate users joe"]);
        let _ = bench.ask(&named("jane"), &named("joe")).await;
        let _ = bench.ask(&named("jane"), &named("jim")).await;
        let mut out = String::new();
        bench.impersonation.figures.encode(&mut out);
        for line in [
            r#"apiserver_impersonation_attempts_total{decision="allowed",mode="legacy"} 1"#,
            r#"apiserver_impersonation_attempts_total{decision="denied",mode=""} 1"#,
            r#"apiserver_impersonation_attempts_duration_seconds_count{decision="denied",mode=""} 1"#,
            r#"apiserver_impersonation_authorization_attempts_total{decision="allowed",mode="legacy"} 1"#,
            r#"apiserver_impersonation_authorization_attempts_total{decision="denied",mode="user-info"} 2"#,
        ] {
            assert!(out.lines().any(|one| one == line), "{line} in\n{out}");
        }
    }
}
