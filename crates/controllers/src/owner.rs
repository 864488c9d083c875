//! Ownership: who controls an object, and how that changes.
//!
//! Upstream: `PodControllerRefManager`: an owner adopts what matches its selector and has no
//! controller, and releases what it controls and no longer matches.

use std::sync::Arc;

use client::{
    Api, Client, Entry, ErrorExt, Header, Informer, Kind, Lister, Patch, PatchParams, Result,
};
use machinery::selector::Selector;
use machinery::{ObjectMeta, OwnerReference};
use serde_json::json;

/// The owner that controls an object.
pub fn controller(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// A reference that makes `owner` the controller.
pub fn reference<T: Kind>(owner: &T) -> OwnerReference {
    reference_as(T::API_VERSION, T::KIND, owner.metadata())
}

pub fn reference_as(api_version: &str, kind: &str, owner: &ObjectMeta) -> OwnerReference {
    OwnerReference {
        api_version: api_version.into(),
        kind: kind.into(),
        name: owner.name.clone().unwrap_or_default(),
        uid: owner.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// The action of an owner for one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    Keep,
    Adopt,
    Release,
    Ignore,
}

/// Pure. `owner` is the owner's metadata, `header` the object's.
pub fn claim(owner: &ObjectMeta, selector: &Selector, header: &Header) -> Claim {
    let matches = selector.matches_pairs(&header.labels);
    let owner_goes = owner.deletion_timestamp.is_some();
    match header.controller() {
        Some(controller) if Some(&controller.uid) != owner.uid.as_ref() => Claim::Ignore,
        Some(_) if matches => Claim::Keep,
        Some(_) if owner_goes => Claim::Ignore,
        Some(_) => Claim::Release,
        None if !matches || owner_goes || header.deleting => Claim::Ignore,
        None => Claim::Adopt,
    }
}

/// Objects without a controller, by namespace.
const ORPHANS: &str = "orphans";

/// Prepares for [`claimable`].
pub fn index_orphans<T: Kind>(informer: &Informer<T>) {
    informer.index_headers(ORPHANS, |header| match header.controller() {
        None => vec![header.key.namespace.to_string()],
        Some(_) => vec![],
    });
}

/// What an owner has, and what it could adopt, in the order of names: not all objects of the namespace.
pub fn claimable<T: Kind>(lister: &Lister<T>, owner: &ObjectMeta) -> Vec<Arc<Entry>> {
    let namespace = owner.namespace.as_deref().unwrap_or_default();
    let mut all = lister.entries_by_owner(owner.uid.as_deref().unwrap_or_default());
    all.retain(|entry| &*entry.header.key.namespace == namespace);
    all.extend(lister.entries_by_index(ORPHANS, namespace));
    all.sort_by(|a, b| a.header.key.cmp(&b.header.key));
    all.dedup_by(|a, b| a.header.key == b.header.key);
    all
}

/// The objects of an owner of the kind `O`, after adopting and releasing. `wanted` may leave out an object.
/// Costs a look at [`claimable`] and a write for each object that changes hands.
pub async fn claim_all<T: Kind, O: Kind>(
    client: &Client,
    objects: &Lister<T>,
    owner: &ObjectMeta,
    selector: &Selector,
    wanted: impl Fn(&Header, Claim) -> bool,
) -> Result<Vec<Arc<Entry>>> {
    let api: Api<T> = client.api(owner.namespace.as_deref());
    let uid = owner.uid.as_deref().unwrap_or_default();
    let (mut all, mut allowed) = (vec![], None);
    for entry in claimable(objects, owner) {
        let header = &entry.header;
        let claim = claim(owner, selector, header);
        if !wanted(header, claim) {
            continue;
        }
        match claim {
            Claim::Keep => {}
            // An owner that goes keeps its objects until the end.
            Claim::Ignore if header.controller().is_some_and(|owner| owner.uid == uid) => {}
            Claim::Ignore => continue,
            Claim::Release => {
                release(&api, &header.key.name, &header.uid, uid).await?;
                continue;
            }
            Claim::Adopt => {
                if allowed.is_none() {
                    let owners: Api<O> = client.api(owner.namespace.as_deref());
                    allowed = Some(may_adopt(&owners, owner).await?);
                }
                if allowed != Some(true) {
                    continue;
                }
                let reference = reference_as(O::API_VERSION, O::KIND, owner);
                match adopt(&api, &header.key.name, &header.uid, &reference).await {
                    Err(error) if error.is_not_found() => continue,
                    done => done?,
                }
            }
        }
        all.push(entry);
    }
    Ok(all)
}

/// Makes `owner` the controller of an object, if it is still the one with `uid`.
pub async fn adopt<T: Kind>(
    api: &Api<T>,
    name: &str,
    uid: &str,
    owner: &OwnerReference,
) -> Result<()> {
    let patch = json!({"metadata": {"uid": uid, "ownerReferences": [owner]}});
    api.patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await.map(drop)
}

/// Removes the owner with `owner_uid`; that the object is gone, or changed hands, is fine.
pub async fn release<T: Kind>(api: &Api<T>, name: &str, uid: &str, owner_uid: &str) -> Result<()> {
    let patch = json!({
        "metadata": {"uid": uid, "ownerReferences": [{"$patch": "delete", "uid": owner_uid}]},
    });
    match api.patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
        Err(error) if error.is_not_found() || error.is_invalid() => Ok(()),
        done => done.map(drop),
    }
}

/// An owner found in a cache may be gone: adoption asks the API itself.
pub async fn may_adopt<T: Kind>(api: &Api<T>, owner: &ObjectMeta) -> Result<bool> {
    let name = owner.name.as_deref().unwrap_or_default();
    let Some(fresh) = api.get_opt(name).await? else {
        return Ok(false);
    };
    let meta = fresh.metadata();
    Ok(meta.uid == owner.uid && meta.deletion_timestamp.is_none())
}
