//! `POST serviceaccounts/NAME/token`: a TokenRequest becomes a token.
//! Upstream: `pkg/registry/core/serviceaccount/storage/token.go`.

use apiserver::request::{Key, RequestContext};
use apiserver::resource::{CreateHandler, Created};
use apiserver::{Registry, StatusError};
use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest, TokenRequestStatus,
};
use k8s_openapi::api::core::v1::{Node, Pod, Secret, ServiceAccount};
use machinery::field::{FieldErrors, Path};
use machinery::object::{Codec, Typed};
use machinery::{Object, ObjectMeta, Time};
use release::features::{self, Feature};

use super::{Claims, Private, Reference, TokenKeys, USER_PREFIX};

const GROUP: &str = "authentication.k8s.io";
const DEFAULT_SECONDS: i64 = 3600;
const MINIMUM_SECONDS: i64 = 600;
const MAXIMUM_SECONDS: i64 = 1 << 32;
/// The lifetime that kubelets request for pods without a requested one (3600 s and a little, so that it
/// can be distinguished). Such tokens live for a year, because old clients never reload them; `warnafter`
/// says when they should have.
const WARN_ONLY_SECONDS: i64 = 3607;
const EXTENDED_SECONDS: i64 = 365 * 24 * 3600;

/// Limits of tokens' lifetimes.
#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    /// Upstream's `--service-account-max-token-expiration`: longer requests are shortened.
    pub longest_seconds: Option<i64>,
    /// Upstream's `--service-account-extend-token-expiration`.
    pub extends: bool,
}

impl Default for Lifetimes {
    fn default() -> Self {
        Self { longest_seconds: None, extends: true }
    }
}

/// The handler of the subresource `token`.
pub struct TokenRequests {
    keys: TokenKeys,
    lifetimes: Lifetimes,
}

static CODEC: Typed<TokenRequest> = Typed::new();

impl TokenRequests {
    pub fn new(keys: TokenKeys, lifetimes: Lifetimes) -> Self {
        Self { keys, lifetimes }
    }

    async fn mint(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        key: &Key,
        mut request: TokenRequest,
    ) -> Result<TokenRequest, StatusError> {
        check_names(key, &request.metadata)?;
        let account = registry.find::<ServiceAccount>(&key.namespace, &key.name).await?;
        let account =
            account.ok_or_else(|| StatusError::not_found("", "serviceaccounts", &key.name))?;
        check_account(key, &request.metadata, &account.metadata)?;
        let spec = request.spec.get_or_insert_default();
        let seconds = spec.expiration_seconds.unwrap_or(DEFAULT_SECONDS);
        check_seconds(seconds)?;
        let seconds = self.shortened(ctx, seconds);
        spec.expiration_seconds = Some(seconds);
        if spec.audiences.as_ref().is_none_or(Vec::is_empty) {
            spec.audiences = Some(self.keys.audiences().to_vec());
        }
        let audiences = spec.audiences.clone().unwrap_or_default();
        let mut private = Private {
            namespace: key.namespace.clone(),
            serviceaccount: reference(&account.metadata),
            ..Private::default()
        };
        if let Some(bound) = &spec.bound_object_ref {
            bind(registry, key, bound, &mut private).await?;
        }
        let now = base::clock::now_seconds();
        let mut lifetime = seconds;
        if self.lifetimes.extends
            && seconds == WARN_ONLY_SECONDS
            && private.pod.is_some()
            && audiences.iter().all(|one| self.keys.audiences().contains(one))
        {
            private.warnafter = Some(now.as_second() + seconds);
            lifetime = EXTENDED_SECONDS;
        }
        let token = self.sign(now, lifetime, audiences, private)?;
        let until = now + SignedDuration::from_secs(seconds);
        request.metadata.name = Some(key.name.clone());
        request.metadata.namespace = Some(key.namespace.clone());
        request.metadata.uid = account.metadata.uid.clone();
        request.metadata.creation_timestamp = Some(Time(now));
        request.status = Some(TokenRequestStatus {
            token: Some(token),
            expiration_timestamp: Some(Time(until)),
        });
        Ok(request)
    }

    fn shortened(&self, ctx: &RequestContext, seconds: i64) -> i64 {
        match self.lifetimes.longest_seconds {
            Some(longest) if seconds > longest => {
                ctx.warn(format!(
                    "requested expiration of {seconds} seconds shortened to {longest} seconds"
                ));
                longest
            }
            _ => seconds,
        }
    }

    fn sign(
        &self,
        now: Timestamp,
        lifetime: i64,
        aud: Vec<String>,
        private: Private,
    ) -> Result<String, StatusError> {
        let now = now.as_second();
        let claims = Claims {
            aud,
            exp: Some(now + lifetime),
            iat: Some(now),
            nbf: Some(now),
            iss: self.keys.issuer().to_owned(),
            jti: base::rng::uuid(),
            sub: format!("{USER_PREFIX}{}:{}", private.namespace, private.serviceaccount.name),
            kubernetes: Some(private),
            ..Claims::default()
        };
        self.keys.sign(&claims).map_err(StatusError::internal)
    }
}

#[async_trait]
impl CreateHandler for TokenRequests {
    fn codec(&self) -> &dyn Codec {
        &CODEC
    }

    async fn create(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        key: &Key,
        body: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let request = body.downcast::<TokenRequest>().cloned();
        let request =
            request.ok_or_else(|| StatusError::bad_request("the body must be a TokenRequest"))?;
        let answer = self.mint(registry, ctx, key, request).await?;
        Ok(Created::Object(Box::new(answer)))
    }
}

/// Rejects a request for another account of the same name.
fn check_account(key: &Key, request: &ObjectMeta, account: &ObjectMeta) -> Result<(), StatusError> {
    let wanted = request.uid.as_deref().unwrap_or_default();
    let uid = account.uid.as_deref().unwrap_or_default();
    if wanted.is_empty()
        || wanted == uid
        || !features::enabled(Feature::TokenRequestServiceAccountUIDValidation)
    {
        return Ok(());
    }
    let why = format!(
        "the UID in the token request ({wanted}) does not match the UID of the service account ({uid})"
    );
    Err(StatusError::conflict("authentication.k8s.io", "TokenRequest", &key.name, why))
}

fn reference(meta: &ObjectMeta) -> Reference {
    Reference {
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
    }
}

/// Checks that the body's name and namespace, if any, equal those of the path.
fn check_names(key: &Key, meta: &ObjectMeta) -> Result<(), StatusError> {
    let differs = |given: &Option<String>, path: &str| {
        given.as_deref().is_some_and(|given| !given.is_empty() && given != path)
    };
    if differs(&meta.name, &key.name) {
        let mut errors = FieldErrors::default();
        errors.invalid(
            &Path::new("metadata").child("name"),
            meta.name.as_deref().unwrap_or_default(),
            "must match the service account name if specified",
        );
        return Err(StatusError::invalid(GROUP, "TokenRequest", &key.name, errors));
    }
    if differs(&meta.namespace, &key.namespace) {
        return Err(StatusError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    Ok(())
}

fn check_seconds(seconds: i64) -> Result<(), StatusError> {
    let path = Path::new("spec").child("expirationSeconds");
    let mut errors = FieldErrors::default();
    if seconds < MINIMUM_SECONDS {
        errors.invalid(&path, seconds, "may not specify a duration less than 10 minutes");
    }
    if seconds > MAXIMUM_SECONDS {
        errors.invalid(&path, seconds, "may not specify a duration larger than 2^32 seconds");
    }
    if errors.is_empty() {
        return Ok(());
    }
    Err(StatusError::invalid(GROUP, "TokenRequest", "", errors))
}

/// Binds the token to an object: it is invalid when the object is deleted.
async fn bind(
    registry: &Registry,
    key: &Key,
    bound: &BoundObjectReference,
    private: &mut Private,
) -> Result<(), StatusError> {
    let name = bound.name.as_deref().unwrap_or_default();
    let kind = bound.kind.as_deref().unwrap_or_default();
    let namespace = key.namespace.as_str();
    let version = bound.api_version.as_deref().unwrap_or_default();
    let is_core = !version.contains('/');
    if !is_core || !matches!(kind, "Node" | "Pod" | "Secret") {
        let group_version = if is_core { format!("/{version}") } else { version.to_owned() };
        return Err(StatusError::bad_request(format!(
            "cannot bind token to object of type {group_version}, Kind={kind}"
        )));
    }
    if name.is_empty() {
        return Err(StatusError::bad_request("Name parameter required."));
    }
    let missing = |resource: &str| StatusError::not_found("", resource, name);
    match kind {
        "Pod" => {
            let pod =
                registry.find::<Pod>(namespace, name).await?.ok_or_else(|| missing("pods"))?;
            check_uid(kind, name, bound, &pod.metadata)?;
            let spec = pod.spec.as_ref();
            let account = spec.and_then(|spec| spec.service_account_name.as_deref());
            if account != Some(key.name.as_str()) {
                return Err(StatusError::bad_request(format!(
                    "cannot bind token for serviceaccount {:?} to pod running with different serviceaccount name.",
                    key.name
                )));
            }
            private.pod = Some(reference(&pod.metadata));
            let node = spec.and_then(|spec| spec.node_name.clone()).filter(|node| !node.is_empty());
            if let Some(name) = node {
                let found = registry.find::<Node>("", &name).await?;
                let uid = found.and_then(|node| node.metadata.uid).unwrap_or_default();
                private.node = Some(Reference { name, uid });
            }
        }
        "Secret" => {
            let found = registry.find::<Secret>(namespace, name).await?;
            let secret = found.ok_or_else(|| missing("secrets"))?;
            check_uid(kind, name, bound, &secret.metadata)?;
            private.secret = Some(reference(&secret.metadata));
        }
        "Node" => {
            let node = registry.find::<Node>("", name).await?.ok_or_else(|| missing("nodes"))?;
            check_uid(kind, name, bound, &node.metadata)?;
            private.node = Some(reference(&node.metadata));
        }
        _ => {}
    }
    Ok(())
}

/// Upstream names the kind, not the resource.
fn check_uid(
    kind: &str,
    name: &str,
    bound: &BoundObjectReference,
    meta: &ObjectMeta,
) -> Result<(), StatusError> {
    let uid = meta.uid.as_deref().unwrap_or_default();
    match bound.uid.as_deref().filter(|wanted| !wanted.is_empty() && *wanted != uid) {
        Some(wanted) => {
            let why = format!(
                "the UID in the bound object reference ({wanted}) does not match the UID in record. The object might have been deleted and then recreated"
            );
            Err(StatusError::conflict("", kind, name, why))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_for_the_existing_account() {
        let check = |is_on: bool, wanted: &str, expected: Result<(), &str>| {
            let with = |uid: &str| ObjectMeta { uid: Some(uid.into()), ..ObjectMeta::default() };
            let gate = Feature::TokenRequestServiceAccountUIDValidation;
            let gates = features::Gates::DEFAULT.with(gate, is_on);
            let key = Key::new("n", "a");
            let said = features::scoped(gates, || check_account(&key, &with(wanted), &with("u")));
            assert_eq!(
                said.map_err(|error| error.message.clone()),
                expected.map_err(str::to_owned)
            );
        };
        check(true, "", Ok(()));
        check(true, "u", Ok(()));
        check(false, "other", Ok(()));
        check(
            true,
            "other",
            Err(
                "Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"a\": the UID in the token request (other) does not match the UID of the service account (u)",
            ),
        );
    }
}
