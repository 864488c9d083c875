//! NodeRestriction: a node may change only itself and its own pods, and only the necessary fields.
//!
//! Authorization says which resources a node may write; this plugin checks the objects and their fields,
//! so that a stolen node certificate gives access to that node only.

mod audience;
mod certificates;
mod own_node;
mod references;

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::Authorizer;
use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use machinery::Object;
use release::features::{self, Feature};

use references::Reference;

use crate::Row;

const USER_PREFIX: &str = "system:node:";
const GROUP: &str = "system:nodes";
const MIRROR: &str = "kubernetes.io/config.mirror";
const LEASES: &str = "kube-node-lease";

pub(crate) const ROW: Row = Row::enabled("NodeRestriction", |options| {
    let authorizer = options.authorizer("NodeRestriction")?;
    Ok(Box::new(NodeRestriction { authorizer }))
});

/// See the module.
pub(crate) struct NodeRestriction {
    /// Decides which audiences, besides those of its pods, a node may request tokens for.
    pub authorizer: Arc<dyn Authorizer>,
}

#[async_trait]
impl Plugin for NodeRestriction {
    fn name(&self) -> &'static str {
        "NodeRestriction"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Connect
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let user = &attributes.ctx.user;
        let Some(node) = user.name.strip_prefix(USER_PREFIX).filter(|_| user.in_group(GROUP))
        else {
            return Ok(());
        };
        if node.is_empty() {
            let why = format!("could not determine node from user {:?}", user.name);
            return Err(attributes.forbidden(why));
        }
        let row = &attributes.ctx.resource;
        let outcome = match (&*row.group, &*row.plural) {
            ("", "pods") => return pod(attributes, node).await,
            ("", "serviceaccounts") => return token(attributes, node, &*self.authorizer).await,
            ("certificates.k8s.io", "podcertificaterequests") => {
                return certificates::of_pod(attributes, node).await;
            }
            ("", "nodes") => own_node::admit(attributes, node),
            ("", "persistentvolumeclaims") => claim_status(attributes, node),
            ("coordination.k8s.io", "leases") => lease(attributes, node),
            ("storage.k8s.io", "csinodes") => named_like(attributes, node),
            ("resource.k8s.io", "resourceslices") => slice(attributes, node),
            ("certificates.k8s.io", "certificatesigningrequests") => {
                certificates::of_node(attributes, user.name.as_str())
            }
            _ => Ok(()),
        };
        outcome.map_err(|why| attributes.forbidden(why))
    }
}

async fn pod(attributes: &Attributes<'_>, node: &str) -> Result<(), StatusError> {
    let forbidden = |why: String| Err(attributes.forbidden(why));
    let operation = attributes.operation;
    match (attributes.ctx.subresource.as_str(), operation) {
        ("", Operation::Create) => mirror_pod(attributes, node).await,
        ("", Operation::Delete) => match on_node(attributes.old, node) {
            true => Ok(()),
            false => forbidden(format!(
                "node {node:?} can only delete pods with spec.nodeName set to itself"
            )),
        },
        ("", _) => forbidden(format!(
            "unexpected operation {:?}, node {node:?} can only create and delete mirror pods",
            operation.as_str()
        )),
        ("status", Operation::Update) => {
            let why = match (on_node(attributes.old, node), same_labels(attributes)) {
                (false, _) => {
                    "can only update pod status for pods with spec.nodeName set to itself"
                }
                (true, false) => "cannot update labels through pod status",
                (true, true) => return claims_unchanged(attributes, node),
            };
            forbidden(format!("node {node:?} {why}"))
        }
        ("eviction", Operation::Create) => {
            let key = attributes.key;
            let found = attributes.registry.find::<Pod>(&key.namespace, &key.name).await?;
            let pod = found.ok_or_else(|| StatusError::not_found("", "pod", &key.name))?;
            match on_node(Some(&pod), node) {
                true => Ok(()),
                false => forbidden(format!(
                    "node {node} can only evict pods with spec.nodeName set to itself"
                )),
            }
        }
        ("status" | "eviction", _) => {
            forbidden(format!("unexpected operation {:?}", operation.as_str()))
        }
        (other, _) => forbidden(format!(
            "unexpected pod subresource {other:?}, only 'status' and 'eviction' are allowed"
        )),
    }
}

fn on_node(pod: Option<&dyn Object>, node: &str) -> bool {
    let spec = pod.and_then(|pod| pod.downcast::<Pod>()).and_then(|pod| pod.spec.as_ref());
    spec.and_then(|spec| spec.node_name.as_deref()) == Some(node)
}

fn same_labels(attributes: &Attributes<'_>) -> bool {
    let labels = |object: Option<&dyn Object>| {
        object.and_then(|object| object.meta().labels.clone()).unwrap_or_default()
    };
    labels(attributes.object.as_deref().map(|object| &**object)) == labels(attributes.old)
}

fn claims_unchanged(attributes: &Attributes<'_>, node: &str) -> Result<(), StatusError> {
    let claims = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        let claims = status.and_then(|status| status.resource_claim_statuses.clone());
        let names = claims.unwrap_or_default().into_iter();
        names.map(|claim| (claim.name, claim.resource_claim_name)).collect::<Vec<_>>()
    };
    if claims(attributes.object_as()) != claims(attributes.old_as()) {
        let why = format!("node {node:?} cannot update resource claim statues");
        return Err(attributes.forbidden(why));
    }
    let extended = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        status.and_then(|status| status.extended_resource_claim_status.clone())
    };
    if extended(attributes.object_as()) != extended(attributes.old_as()) {
        let why = format!("node {node:?} cannot update extended resource claim status");
        return Err(attributes.forbidden(why));
    }
    Ok(())
}

async fn mirror_pod(attributes: &Attributes<'_>, node: &str) -> Result<(), StatusError> {
    let Some(pod) = attributes.object_as::<Pod>() else { return Ok(()) };
    if let Err(why) = check_mirror(pod, node) {
        return Err(attributes.forbidden(why));
    }
    let found = attributes.registry.find::<Node>("", node).await?;
    let own = found.ok_or_else(|| StatusError::not_found("", "node", node))?;
    let owner = pod.metadata.owner_references.iter().flatten().next();
    let claimed = owner.map(|owner| owner.uid.as_str()).unwrap_or_default();
    if claimed != own.uid() {
        let why = format!("node {node} UID mismatch: expected {claimed} got {}", own.uid());
        return Err(attributes.forbidden(why));
    }
    match pod.spec.as_ref().map_or(Ok(()), references::none) {
        Ok(()) => Ok(()),
        Err(Reference::Kind(kind)) => {
            let why = format!("node {node:?} can not create pods that reference {kind}");
            Err(attributes.forbidden(why))
        }
        Err(Reference::Unknown(what)) => {
            let why = format!("error checking mirror pod for API references: {what}");
            Err(attributes.forbidden(why))
        }
    }
}

fn check_mirror(pod: &Pod, node: &str) -> Result<(), String> {
    let annotations = pod.metadata.annotations.as_ref();
    if !annotations.is_some_and(|map| map.contains_key(MIRROR)) {
        return Err(format!(
            "pod does not have {MIRROR:?} annotation, node {node:?} can only create mirror pods"
        ));
    }
    if !on_node(Some(pod), node) {
        return Err(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
    }
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let why = match owners {
        [_, _, ..] => "can only create pods with a single owner reference set to itself",
        [owner] if owner.api_version == "v1" && owner.kind == "Node" && owner.name == node => {
            match (owner.controller, owner.block_owner_deletion) {
                (Some(true), Some(true)) => "must not set blockOwnerDeletion on an owner reference",
                (Some(true), _) => return Ok(()),
                _ => "can only create pods with a controller owner reference set to itself",
            }
        }
        _ => "can only create pods with an owner reference set to itself",
    };
    Err(format!("node {node:?} {why}"))
}

fn claim_status(attributes: &Attributes<'_>, node: &str) -> Result<(), String> {
    if attributes.ctx.subresource != "status" {
        return Err("may only update PVC status".into());
    }
    let stripped = |claim: &PersistentVolumeClaim| {
        let mut claim = claim.clone();
        claim.metadata.resource_version = None;
        claim.metadata.managed_fields = None;
        let status = claim.status.get_or_insert_default();
        status.capacity = None;
        status.conditions = None;
        status.allocated_resource_statuses = None;
        status.allocated_resources = None;
        claim
    };
    let claims = (
        attributes.object_as::<PersistentVolumeClaim>(),
        attributes.old_as::<PersistentVolumeClaim>(),
    );
    match claims {
        (Some(new), Some(old)) if stripped(new) == stripped(old) => Ok(()),
        (Some(_), Some(_)) => Err(format!(
            "node {node:?} is not allowed to update fields other than status.quantity and status.conditions"
        )),
        _ => Err(format!("unexpected operation {:?}", attributes.operation.as_str())),
    }
}

fn lease(attributes: &Attributes<'_>, node: &str) -> Result<(), String> {
    if attributes.key.namespace != LEASES {
        return Err(format!("can only access leases in the {LEASES:?} system namespace"));
    }
    if attributes.key.name == node {
        return Ok(());
    }
    Err("can only access node lease with the same name as the requesting node".into())
}

fn named_like(attributes: &Attributes<'_>, node: &str) -> Result<(), String> {
    if attributes.key.name == node {
        return Ok(());
    }
    Err("can only access CSINode with the same name as the requesting node".into())
}

fn slice(attributes: &Attributes<'_>, node: &str) -> Result<(), String> {
    // The node authorizer checks the other verbs by the existing slice (a slice keeps its node). It does
    // not see the content of a new slice, or the slices of a collection.
    let (verb, tree) = match attributes.operation {
        Operation::Create => ("create", attributes.object.as_deref().map(|one| one.to_value())),
        Operation::Delete => ("delete", attributes.old.map(Object::to_value)),
        Operation::Update | Operation::Connect => return Ok(()),
    };
    if tree.is_some_and(|tree| tree["spec"]["nodeName"] == node) {
        return Ok(());
    }
    Err(format!("can only {verb} ResourceSlice with the same NodeName as the requesting node"))
}

async fn token(
    attributes: &Attributes<'_>,
    node: &str,
    authorizer: &dyn Authorizer,
) -> Result<(), StatusError> {
    let asked = attributes.object_as::<TokenRequest>();
    let wanted = attributes.operation == Operation::Create && attributes.ctx.subresource == "token";
    let Some(asked) = asked.filter(|_| wanted) else { return Ok(()) };
    let forbidden = |why: &str| Err(attributes.forbidden(why));
    let bound =
        asked.spec.as_ref().and_then(|spec| spec.bound_object_ref.clone()).unwrap_or_default();
    let is_pod = bound.api_version.as_deref() == Some("v1") && bound.kind.as_deref() == Some("Pod");
    let Some(name) = bound.name.filter(|name| is_pod && !name.is_empty()) else {
        return forbidden("node requested token not bound to a pod");
    };
    let Some(uid) = bound.uid.filter(|uid| !uid.is_empty()) else {
        return forbidden("node requested token with a pod binding without a uid");
    };
    let found = attributes.registry.find::<Pod>(&attributes.key.namespace, &name).await?;
    let pod = found.ok_or_else(|| StatusError::not_found("", "pod", &name))?;
    if pod.uid() != uid {
        return forbidden(&format!(
            "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
        ));
    }
    if !on_node(Some(&pod), node) {
        return forbidden("node requested token bound to a pod scheduled on a different node");
    }
    match features::enabled(Feature::ServiceAccountNodeAudienceRestriction) {
        true => audience::check(attributes, asked, &pod, authorizer).await,
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn nodes_create_only_their_own_mirror_pods() {
        let check = |meta: Value, node: &str, expected: &str| {
            let pod: Pod = serde_json::from_value(json!({"metadata": meta,
                "spec": {"nodeName": node, "containers": []}}))
            .expect("a pod");
            assert_eq!(check_mirror(&pod, "n").err().unwrap_or_default(), expected);
        };
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true});
        let mirror =
            |owners: Value| json!({"annotations": {MIRROR: "x"}, "ownerReferences": owners});
        check(mirror(json!([owner])), "n", "");
        check(
            json!({}),
            "n",
            "pod does not have \"kubernetes.io/config.mirror\" annotation, node \"n\" can only create mirror pods",
        );
        check(
            mirror(json!([owner])),
            "m",
            "node \"n\" can only create pods with spec.nodeName set to itself",
        );
        check(
            mirror(json!([])),
            "n",
            "node \"n\" can only create pods with an owner reference set to itself",
        );
    }
}
