//! Servers of one cluster share one certificate authority: they accept each other's certificates.
//!
//! ```text
//! /registry/decapod/authority ─► fingerprints of CA certificates, the newest first, one a line
//! ```
//!
//! In: this server's `pki`, and a store that other servers share. Out: agreement, or an error before the
//! server serves anything. The first server writes its fingerprint. A server without any of the stored
//! authorities never belonged to this cluster. A new authority (`decapod certificate rotate-ca`) is
//! accepted because of the old one, which stays in `ca.crt`, or in `pki/old-TIME` on the server where it
//! was replaced.

use std::path::Path;

use anyhow::{Context, bail};
use bytes::Bytes;
use pki::Pki;
use store::{Compare, KeyRange, Op, RangeRequest, Revision, Store, Txn};

const KEY: &[u8] = b"/registry/decapod/authority";

/// Writes this server's authority if it is the first or a new one; returns an error for a foreign one.
pub async fn agree(store: &dyn Store, pki: &Pki) -> anyhow::Result<()> {
    let (own, past) = (present(pki)?, past(pki.directory())?);
    loop {
        let range = KeyRange::one(KEY);
        let found = store.range(RangeRequest::new(range)).await.context("cannot read the store")?;
        let (known, seen) = match found.kvs.first() {
            Some(kv) => (String::from_utf8_lossy(&kv.value.bytes()).into_owned(), kv.mod_revision),
            None => (String::new(), Revision(0)),
        };
        let known: Vec<&str> = known.lines().collect();
        let Some(next) = agreed(&known, &own, &past) else {
            bail!(
                "the authority of this server ({}) is not the one of the cluster in this datastore: \
                 copy {} from another server of the cluster, or name another datastore",
                own.first().map_or("none", String::as_str),
                pki.directory().display()
            );
        };
        if next == known {
            return Ok(());
        }
        let value = Bytes::from(next.join("\n"));
        let txn = Txn {
            compare: vec![Compare::ModRevision(Bytes::from_static(KEY), seen)],
            success: vec![Op::Put { key: Bytes::from_static(KEY), value, lease: 0 }],
            failure: vec![],
        };
        // Another server may have written meanwhile: read again and decide by its value.
        if store.txn(txn).await.context("cannot write to the store")?.succeeded {
            return Ok(());
        }
    }
}

/// The value to store; `None` for a foreign authority. Pure. `own` is the content of `ca.crt`, with the
/// signing authority first; `past` are the earlier ones.
fn agreed(known: &[&str], own: &[String], past: &[String]) -> Option<Vec<String>> {
    let (signs, others) = own.split_first()?;
    let owned = || known.iter().map(|one| (*one).to_owned());
    let is_known = |one: &String| known.contains(&one.as_str());
    match known.first() {
        None => Some(own.to_vec()),
        // The old authority was removed.
        Some(newest) if newest == signs && others.is_empty() => Some(vec![signs.clone()]),
        // The stored value already contains this authority: another server may have a newer one.
        Some(_) if is_known(signs) => Some(owned().collect()),
        Some(_) if others.iter().chain(past).any(is_known) => {
            Some(std::iter::once(signs.clone()).chain(owned()).collect())
        }
        Some(_) => None,
    }
}

fn present(pki: &Pki) -> anyhow::Result<Vec<String>> {
    fingerprints(pki.cluster_ca.cert_pem().as_bytes())
}

fn fingerprints(pem: &[u8]) -> anyhow::Result<Vec<String>> {
    let hex = |bytes: [u8; 32]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(pki::certificates(pem)?.iter().map(|one| hex(one.fingerprint())).collect())
}

/// The authorities that were replaced on this server.
fn past(directory: &Path) -> anyhow::Result<Vec<String>> {
    let mut all = vec![];
    let cannot = || format!("cannot read {}", directory.display());
    for entry in std::fs::read_dir(directory).with_context(cannot)? {
        let entry = entry.with_context(cannot)?;
        if !entry.file_name().to_string_lossy().starts_with("old-") {
            continue;
        }
        // Another certificate was rotated there, not the authority.
        let Ok(pem) = std::fs::read(entry.path().join("ca.crt")) else { continue };
        all.extend(fingerprints(&pem).with_context(|| entry.path().display().to_string())?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_authority_is_known_by_the_old_one() {
        let check = |known: &[&str], own: &[&str], past: &[&str], expected: Option<&[&str]>| {
            let all =
                |names: &[&str]| names.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
            let next = agreed(known, &all(own), &all(past));
            assert_eq!(next, expected.map(all), "{known:?} {own:?} {past:?}");
        };
        check(&[], &["a"], &[], Some(&["a"]));
        check(&["a"], &["a"], &[], Some(&["a"]));
        check(&["a"], &["b"], &[], None);
        // Rotation: the first server has both authorities; the second does not have the new one, then it has.
        check(&["a"], &["b", "a"], &["a"], Some(&["b", "a"]));
        check(&["b", "a"], &["a"], &[], Some(&["b", "a"]));
        check(&["b", "a"], &["b", "a"], &[], Some(&["b", "a"]));
        // Finished.
        check(&["b", "a"], &["b"], &["a"], Some(&["b"]));
        check(&["b"], &["b", "a"], &[], Some(&["b"]));
        check(&["b"], &["a"], &[], None);
        // With --force: the old authority did not sign the new one, but its files are beside it.
        check(&["a"], &["c"], &["b", "a"], Some(&["c", "a"]));
        check(&["a"], &[], &[], None);
    }

    #[tokio::test]
    async fn a_foreign_authority_is_refused() {
        let store = store::Sim::open();
        let dir = tempfile::tempdir().expect("a directory");
        let open = |name: &str| Pki::open_or_create(&dir.path().join(name)).expect("certificates");
        let (own, other) = (open("own"), open("other"));
        agree(&*store, &own).await.expect("the first");
        agree(&*store, &own).await.expect("the same again");
        let refused = agree(&*store, &other).await.expect_err("another authority").to_string();
        assert!(refused.contains("is not the one of the cluster"), "{refused}");
        // The state after `rotate-ca --force`.
        let aside = other.directory().join("old-20260101T000000Z");
        std::fs::create_dir(&aside).expect("ours");
        std::fs::write(aside.join("ca.crt"), own.cluster_ca.cert_pem()).expect("ours");
        agree(&*store, &other).await.expect("it was replaced here");
    }
}
