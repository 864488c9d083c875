//! Applies and deletes single objects of any kind.
//!
//! In: objects. Out: requests; the resource of a kind comes from the discovery document of its group and version, which
//! is read once for each round.
//! Upstream: `kubectl apply --server-side --force-conflicts`.

use std::collections::HashMap;

use client::{Client, ErrorExt, Gvr};
use http::Method;
use serde_json::{Value, json};

use crate::MANAGER;
use crate::object::Identity;

const APPLY: &str = "application/apply-patch+yaml";
const JSON: &str = "application/json";
/// The file that an object is from.
const ANNOTATION: &str = "decapod.io/manifest";

/// Why an object is not applied, or not deleted.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("no matches for kind {kind:?} in version {version:?}")]
    NoKind { kind: String, version: String },
    #[error("{0}")]
    Server(String),
}

impl From<client::Error> for Failure {
    fn from(error: client::Error) -> Self {
        Self::Server(error.text())
    }
}

/// One round of requests.
pub struct Round<'c> {
    client: &'c Client,
    /// Group and version, with the resources by kind and whether they have namespaces.
    known: HashMap<String, HashMap<String, (String, bool)>>,
}

impl<'c> Round<'c> {
    pub fn new(client: &'c Client) -> Self {
        Self { client, known: HashMap::new() }
    }

    /// The annotation tells users where the object is from. It is also the one field that is always ours: a manager
    /// without fields is forgotten, and a Namespace may have nothing but a name.
    pub async fn apply(
        &mut self,
        identity: &Identity,
        object: &Value,
        file: &str,
    ) -> Result<(), Failure> {
        let path = self.path(identity).await?.ok_or_else(|| Failure::NoKind {
            kind: identity.kind.clone(),
            version: identity.api_version.clone(),
        })?;
        let path = format!("{path}?fieldManager={MANAGER}&force=true&fieldValidation=Strict");
        let mut object = object.clone();
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
            metadata.remove("resourceVersion");
            metadata.remove("uid");
        }
        if !object["metadata"]["annotations"].is_object() {
            object["metadata"]["annotations"] = json!({});
        }
        object["metadata"]["annotations"][ANNOTATION] = file.into();
        self.client.call(Method::PATCH, &path, APPLY, object.to_string()).await?;
        Ok(())
    }

    /// Deletes the object if it is still managed from here. False if it is not, or is gone.
    pub async fn delete(&mut self, identity: &Identity) -> Result<bool, Failure> {
        // A kind that is gone has no objects.
        let Some(path) = self.path(identity).await? else { return Ok(false) };
        let object: Value = match self.client.get(&path).await {
            Ok(object) => object,
            Err(error) if error.is_not_found() => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        if !is_managed(&object) {
            tracing::info!(object = %identity, "another manager has taken the object over; it stays");
            return Ok(false);
        }
        let options = json!({
            "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background",
            "preconditions": {"uid": object["metadata"]["uid"]},
        });
        match self.client.call(Method::DELETE, &path, JSON, options.to_string()).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// `None`: the server has no such kind.
    async fn path(&mut self, identity: &Identity) -> Result<Option<String>, Failure> {
        let (group, version) = identity.group_version();
        if !self.known.contains_key(&identity.api_version) {
            let page = match group {
                "" => format!("/api/{version}"),
                group => format!("/apis/{group}/{version}"),
            };
            let kinds = match self.client.get::<Value>(&page).await {
                Ok(document) => kinds(&document),
                Err(error) if error.is_not_found() => HashMap::new(),
                Err(error) => return Err(error.into()),
            };
            self.known.insert(identity.api_version.clone(), kinds);
        }
        let kinds = &self.known[&identity.api_version];
        let Some((resource, namespaced)) = kinds.get(&identity.kind) else { return Ok(None) };
        let namespace = identity.namespace.as_deref().unwrap_or("default");
        let gvr = Gvr::new(group, version, resource);
        Ok(Some(gvr.object(namespaced.then_some(namespace), &identity.name)))
    }
}

fn kinds(document: &Value) -> HashMap<String, (String, bool)> {
    let rows = document["resources"].as_array().into_iter().flatten();
    let row = |row: &Value| {
        let (name, kind) = (row["name"].as_str()?, row["kind"].as_str()?);
        let is_whole = !name.contains('/');
        is_whole.then(|| (kind.to_owned(), (name.to_owned(), row["namespaced"] == true)))
    };
    rows.filter_map(row).collect()
}

fn is_managed(object: &Value) -> bool {
    let managers = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    managers.into_iter().any(|one| one["manager"] == MANAGER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_come_from_discovery() {
        let document = json!({"resources": [
            {"name": "pods", "kind": "Pod", "namespaced": true},
            {"name": "pods/eviction", "kind": "Eviction", "namespaced": true},
            {"name": "nodes", "kind": "Node", "namespaced": false},
        ]});
        let found = kinds(&document);
        assert_eq!(found.get("Pod"), Some(&("pods".to_owned(), true)));
        assert_eq!(found.get("Node"), Some(&("nodes".to_owned(), false)));
        assert_eq!(found.get("Eviction"), None);
        assert!(kinds(&json!({})).is_empty());
    }

    #[test]
    fn only_own_objects_are_deleted() {
        let object = |managers: &[&str]| {
            let list: Vec<Value> = managers.iter().map(|one| json!({"manager": one})).collect();
            json!({"metadata": {"managedFields": list}})
        };
        assert!(is_managed(&object(&["kubectl", MANAGER])));
        assert!(!is_managed(&object(&["kubectl"])));
        assert!(!is_managed(&json!({})));
    }
}
