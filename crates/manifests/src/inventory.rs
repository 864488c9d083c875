//! What was applied from a file, in a ConfigMap of the namespace kube-system.
//!
//! ```text
//!  manifest-web.yaml-1f2e3d4c   labels: decapod.io/manifest-server=SERVER
//!    file: web.yaml   server: SERVER   status: Applied | the errors   objects: a line for each
//! ```
//!
//! Invariant: the name follows from the server and the file, so that there is one for each.

use std::collections::BTreeMap;

use client::{Client, ErrorExt, ListParams, Patch, PatchParams};
use k8s_openapi::api::core::v1::ConfigMap;
use machinery::ObjectMeta;
use sha2::{Digest, Sha256};

use crate::MANAGER;
use crate::object::Identity;

const NAMESPACE: &str = "kube-system";
const LABEL: &str = "decapod.io/manifest-server";
pub const APPLIED: &str = "Applied";
/// The longest part of a ConfigMap's name that comes from the file's.
const NAME: usize = 200;

/// The list of one file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    pub file: String,
    pub objects: Vec<Identity>,
    pub status: String,
}

/// Reads and writes the lists of one server.
pub struct Inventories {
    client: Client,
    server: String,
}

impl Inventories {
    pub fn new(client: Client, server: &str) -> Self {
        Self { client, server: server.to_owned() }
    }

    /// All lists of this server, by file.
    pub async fn read(&self) -> client::Result<BTreeMap<String, Inventory>> {
        let params = ListParams::default().labels(&format!("{LABEL}={}", label(&self.server)));
        let all = self.client.api::<ConfigMap>(Some(NAMESPACE)).list(&params).await?;
        let parsed = all.items.iter().filter_map(|map| self.parse(map));
        Ok(parsed.map(|inventory| (inventory.file.clone(), inventory)).collect())
    }

    fn parse(&self, map: &ConfigMap) -> Option<Inventory> {
        let data = map.data.as_ref()?;
        // Two servers may share a label, which is shorter.
        let is_ours = data.get("server") == Some(&self.server);
        let text = |key: &str| data.get(key).map(String::as_str).unwrap_or_default();
        is_ours.then(|| Inventory {
            file: text("file").to_owned(),
            objects: text("objects").lines().filter_map(Identity::parse).collect(),
            status: text("status").to_owned(),
        })
    }

    /// Returns the written ConfigMap, for Events.
    pub async fn write(&self, inventory: &Inventory) -> client::Result<ConfigMap> {
        let map = self.map(inventory);
        let name = map.metadata.name.clone().unwrap_or_default();
        let params = PatchParams::apply(MANAGER).force();
        self.client
            .api::<ConfigMap>(Some(NAMESPACE))
            .patch(&name, &params, &Patch::Apply(&map))
            .await
    }

    pub async fn remove(&self, file: &str) -> client::Result<()> {
        let name = name_of(&self.server, file);
        let api = self.client.api::<ConfigMap>(Some(NAMESPACE));
        match api.delete(&name, &client::DeleteParams::default()).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    fn map(&self, inventory: &Inventory) -> ConfigMap {
        let objects: String = inventory.objects.iter().map(|one| format!("{one}\n")).collect();
        let pairs = [
            ("file", inventory.file.clone()),
            ("server", self.server.clone()),
            ("status", inventory.status.clone()),
            ("objects", objects),
        ];
        ConfigMap {
            metadata: ObjectMeta {
                name: Some(name_of(&self.server, &inventory.file)),
                namespace: Some(NAMESPACE.into()),
                labels: Some([(LABEL.to_owned(), label(&self.server))].into()),
                ..ObjectMeta::default()
            },
            data: Some(pairs.map(|(key, value)| (key.to_owned(), value)).into()),
            ..ConfigMap::default()
        }
    }
}

/// A label value has 63 characters at most, and ends with a letter or a digit.
fn label(server: &str) -> String {
    let short: String = server.chars().take(63).collect();
    short.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

fn name_of(server: &str, file: &str) -> String {
    let digest = Sha256::digest(format!("{server}\n{file}"));
    let hash: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    let fit = |c: char| match c.to_ascii_lowercase() {
        c if c.is_ascii_alphanumeric() => c,
        '.' => '.',
        _ => '-',
    };
    let fit: String = file.chars().map(fit).take(NAME).collect();
    // Each part between dots begins and ends with a letter or a digit.
    let parts = fit.split('.').map(|part| part.trim_matches('-')).filter(|part| !part.is_empty());
    let fit = parts.collect::<Vec<_>>().join(".");
    format!("manifest-{fit}-{hash}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_and_differ() {
        let check = |file: &str, expected: &str| {
            let name = name_of("s", file);
            let (readable, hash) = name.rsplit_once('-').expect("a hash");
            assert_eq!((readable, hash.len()), (expected, 8), "{file}");
            assert_eq!(machinery::names::dns1123_subdomain(&name), Vec::<String>::new(), "{name}");
        };
        check("web.yaml", "manifest-web.yaml");
        check("Sub Dir/a_b.yaml", "manifest-sub-dir-a-b.yaml");
        check("-.-.yaml", "manifest-yaml");
        check(&"x".repeat(300), &format!("manifest-{}", "x".repeat(200)));
        assert_ne!(name_of("s", "a_b.yaml"), name_of("s", "a-b.yaml"));
        assert_ne!(name_of("s", "a.yaml"), name_of("t", "a.yaml"));
        assert_eq!(label(&format!("{}.x", "a".repeat(62))), "a".repeat(62));
    }
}
