//! The data for joining servers: the cluster's authorities and keys, sealed with the servers' token.
//!
//! ```text
//! kube-system/decapod-servers          Secret: the sealed bundle, the addresses of etcd's members
//!             bootstrap-token-ID       Secret: the token, by which the joining server authenticates
//!             decapod:servers          Role, RoleBinding: its holders may read that one Secret
//! ```
//!
//! In: the sealed text, and a hash of the token. Out: the objects. Invariants: nothing here opens the bundle;
//! the token that nodes join with opens none and may not read it.
//! Upstream: `kubeadm init --upload-certs` does the same with a Secret `kubeadm-certs`.

use apiserver::{Registry, StatusError};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};

use crate::bootstrap::{map, named, put};

/// The Secret in kube-system.
pub const SECRET: &str = "decapod-servers";
/// Its keys.
pub const BUNDLE: &str = "bundle";
pub const MEMBERS: &str = "members";
const GROUP: &str = "system:bootstrappers:decapod:servers";
const ROLE: &str = "decapod:servers";

/// For servers that join.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Id and secret of the bootstrap token.
    pub token: (String, String),
    pub bundle: String,
    /// Client URLs of etcd's members; empty if the etcd is the user's own.
    pub members: Vec<String>,
}

/// Writes the objects that differ.
pub async fn publish(registry: &Registry, offer: &Offer) -> Result<(), StatusError> {
    put(registry, role(), |new, old| old.rules = new.rules.clone()).await?;
    put(registry, binding(), |new, old| old.subjects = new.subjects.clone()).await?;
    put(registry, bundle(offer), |new, old| old.data = new.data.clone()).await?;
    // The token comes last: its holder may read the bundle at once.
    put(registry, token(offer), |new, old| old.data = new.data.clone()).await
}

/// The bundle that is published now.
pub async fn published(registry: &Registry) -> Result<Option<String>, StatusError> {
    let secret: Option<Secret> = registry.find("kube-system", SECRET).await?;
    Ok(secret.and_then(|secret| text(&secret, BUNDLE)))
}

/// A key of the Secret, as text.
pub fn text(secret: &Secret, key: &str) -> Option<String> {
    let ByteString(bytes) = secret.data.as_ref()?.get(key)?;
    String::from_utf8(bytes.clone()).ok()
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

fn token(offer: &Offer) -> Secret {
    let (id, secret) = &offer.token;
    let data = [
        ("token-id", id.as_str()),
        ("token-secret", secret.as_str()),
        ("usage-bootstrap-authentication", "true"),
        ("auth-extra-groups", GROUP),
        ("description", "The token that servers of this cluster join with."),
    ];
    Secret {
        metadata: named("kube-system", &format!("bootstrap-token-{id}")),
        type_: Some("bootstrap.kubernetes.io/token".into()),
        data: Some(data.map(|(key, value)| (key.to_owned(), bytes(value))).into()),
        ..Secret::default()
    }
}

fn bundle(offer: &Offer) -> Secret {
    let members = offer.members.join(",");
    let data = [(BUNDLE, offer.bundle.as_str()), (MEMBERS, members.as_str())];
    let mut metadata = named("kube-system", SECRET);
    metadata.annotations = map([(
        "kubernetes.io/description",
        "The authorities and keys of this cluster, sealed under the servers' token.",
    )]);
    Secret {
        metadata,
        type_: Some("decapod.io/servers".into()),
        data: Some(data.map(|(key, value)| (key.to_owned(), bytes(value))).into()),
        ..Secret::default()
    }
}

fn role() -> Role {
    let rule = PolicyRule {
        api_groups: Some(vec![String::new()]),
        resources: Some(vec!["secrets".into()]),
        resource_names: Some(vec![SECRET.into()]),
        verbs: vec!["get".into()],
        ..PolicyRule::default()
    };
    Role { metadata: named("kube-system", ROLE), rules: Some(vec![rule]) }
}

fn binding() -> RoleBinding {
    let subject = Subject {
        api_group: Some("rbac.authorization.k8s.io".into()),
        kind: "Group".into(),
        name: GROUP.into(),
        ..Subject::default()
    };
    RoleBinding {
        metadata: named("kube-system", ROLE),
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".into()),
            kind: "Role".into(),
            name: ROLE.into(),
        },
        subjects: Some(vec![subject]),
    }
}
