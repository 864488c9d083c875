//! Claims: the owners of unique things that are not objects (node ports). Each has a key in the store, so
//! that several servers on one etcd cannot assign it twice.
//!
//! ```text
//! /registry/decapod/nodeports/30080 ─► "default/web 1767225600": owner, and Unix time of the claim
//! ```
//!
//! In: a thing and its owner. Out: whether the owner has it now. A claim is written by compare-and-put
//! before its object. A server that stops in between leaves a claim without an object, which is ignored
//! after a while ([`SETTLED`]).
//!
//! Invariant: an object that was written has its claims.

use bytes::Bytes;
use machinery::StatusError;
use store::{Compare, KeyRange, Op, RangeRequest, Revision, Txn};

use super::Registry;

const PREFIX: &str = "/registry/decapod/";
/// Maximum seconds of a write from its claims to its object.
const SETTLED: i64 = 60;

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Claim {
    owner: String,
    since: i64,
    revision: Revision,
}

impl Claim {
    fn parse(value: &[u8], revision: Revision) -> Option<Self> {
        let (owner, since) = std::str::from_utf8(value).ok()?.split_once(' ')?;
        Some(Self { owner: owner.to_owned(), since: since.parse().ok()?, revision })
    }
}

fn key(thing: &str) -> Bytes {
    format!("{PREFIX}{thing}").into()
}

fn unavailable(error: &store::Error) -> StatusError {
    StatusError::internal(format!("cannot read or write the claim: {error}"))
}

impl Registry {
    /// Claims `thing` (for example `nodeports/30080`) for `owner` (for example `default/web`), who may have
    /// it already. `holds` says whether the object of another owner really uses it.
    pub async fn claim<F>(
        &self,
        thing: &str,
        owner: &str,
        holds: impl Fn(String) -> F + Send,
    ) -> Result<bool, StatusError>
    where
        F: Future<Output = Result<bool, StatusError>> + Send,
    {
        loop {
            let now = base::clock::now().as_second();
            let expected = match self.claim_of(thing).await? {
                None => Revision(0),
                Some(claim) if claim.owner == owner => return Ok(true),
                Some(claim) if now - claim.since < SETTLED => return Ok(false),
                Some(claim) if holds(claim.owner.clone()).await? => return Ok(false),
                Some(claim) => claim.revision,
            };
            let value = Bytes::from(format!("{owner} {now}"));
            let txn = Txn {
                compare: vec![Compare::ModRevision(key(thing), expected)],
                success: vec![Op::Put { key: key(thing), value, lease: 0 }],
                failure: vec![],
            };
            // Another server may have written meanwhile: read again and decide by its value.
            if self.store().txn(txn).await.map_err(|error| unavailable(&error))?.succeeded {
                return Ok(true);
            }
        }
    }

    /// Releases `thing`, if `owner` has it.
    pub async fn release_claim(&self, thing: &str, owner: &str) {
        let Ok(Some(claim)) = self.claim_of(thing).await else { return };
        if claim.owner != owner {
            return;
        }
        let txn = Txn {
            compare: vec![Compare::ModRevision(key(thing), claim.revision)],
            success: vec![Op::DeleteRange { range: KeyRange::one(key(thing)) }],
            failure: vec![],
        };
        if let Err(error) = self.store().txn(txn).await {
            // A later claim notices that the thing is not used.
            tracing::warn!(thing, %error, "failed to release the claim");
        }
    }

    async fn claim_of(&self, thing: &str) -> Result<Option<Claim>, StatusError> {
        let request = RangeRequest::new(KeyRange::one(key(thing)));
        let found = self.store().range(request).await.map_err(|error| unavailable(&error))?;
        Ok(found.kvs.first().and_then(|kv| Claim::parse(&kv.value.bytes(), kv.mod_revision)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::task::Tasks;

    #[test]
    fn claims_are_read_as_written() {
        let claim = Claim::parse(b"default/web 5", Revision(7)).expect("a claim");
        assert_eq!((claim.owner.as_str(), claim.since, claim.revision.0), ("default/web", 5, 7));
        assert_eq!(Claim::parse(b"nonsense", Revision(7)), None);
    }

    /// Two servers on one store.
    #[tokio::test]
    async fn only_one_of_two_servers_gets_it() {
        let store = store::Sim::open();
        let server = || {
            let tasks = Tasks::new("test");
            Registry::new(store.clone(), Default::default(), Default::default(), tasks)
        };
        let (one, two) = (server(), server());
        let needs = async |registry: &Registry, thing: &str, owner: &str, is_needed: bool| {
            let holds = |_| std::future::ready(Ok(is_needed));
            registry.claim(thing, owner, holds).await.expect("decided")
        };
        for port in 0..50 {
            let thing = format!("nodeports/{port}");
            let (a, b) = tokio::join!(
                needs(&one, &thing, "default/a", true),
                needs(&two, &thing, "default/b", true)
            );
            assert!(a != b, "{thing}: {a} {b}");
        }
        assert!(needs(&one, "nodeports/x", "default/a", true).await);
        assert!(needs(&two, "nodeports/x", "default/a", true).await, "it is theirs already");
        assert!(!needs(&two, "nodeports/x", "default/b", false).await, "too young to be doubted");
        two.release_claim("nodeports/x", "default/b").await;
        assert!(!needs(&two, "nodeports/x", "default/b", true).await, "it was not theirs to give");
        two.release_claim("nodeports/x", "default/a").await;
        assert!(needs(&two, "nodeports/x", "default/b", true).await);
        let old = Txn {
            success: vec![Op::Put {
                key: key("nodeports/y"),
                value: "default/a 5".into(),
                lease: 0,
            }],
            ..Txn::default()
        };
        store.txn(old).await.expect("written");
        assert!(!needs(&one, "nodeports/y", "default/b", true).await, "its object needs it");
        assert!(needs(&one, "nodeports/y", "default/b", false).await, "nothing stands for it");
    }
}
