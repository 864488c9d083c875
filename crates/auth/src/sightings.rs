//! Records which users still authenticate with certificates of a replaced CA.
//!
//! While a new CA replaces an old one, both are trusted (`certificate rotate-ca`). Before the old one can
//! be removed from the bundle, the administrator has to know which users would lose access: a metric lists
//! them.
//!
//! In: verified chains. Out: users, with the time and CA of their last authentication.
//! Invariants: only users with a certificate of a CA are recorded, so entries cannot be forged; the table
//! is still bounded; with a single CA it costs nothing.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use apiserver::metrics::{family, labels, samples};
use jiff::Timestamp;
use lru::LruCache;
use pki::Certificate;
use rustls_pki_types::CertificateDer;

/// The metric's name: `decapod certificate rotate-ca --finish` reads it, too.
pub const FIGURE: &str = "decapod_old_authority_last_seen_timestamp_seconds";
const HELP: &str = "When a user last authenticated with a certificate of a replaced authority. Such users lose access when that authority is removed from the bundle.";
/// The maximum number of users in the table.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// Clones share the table.
#[derive(Clone)]
pub struct Sightings(Arc<Inner>);

struct Inner {
    /// The first certificate of the bundle, and the other self-signed ones.
    present: Option<Certificate>,
    older: Vec<Certificate>,
    /// By user and name of the older CA. Guards plain values, never held across an await.
    seen: Mutex<LruCache<(String, String), Timestamp>>,
}

impl Sightings {
    /// From a bundle, the current CA first.
    pub fn of(ca_pem: &str) -> Self {
        let mut all = pki::certificates(ca_pem.as_bytes()).unwrap_or_default().into_iter();
        let present = all.next();
        let older = all
            .filter(|one| one.is_issued_by(one))
            .filter(|one| present.as_ref().is_none_or(|present| present.der() != one.der()))
            .collect();
        let seen = Mutex::new(LruCache::new(REMEMBERED));
        Self(Arc::new(Inner { present, older, seen }))
    }

    /// Records a verified chain, leaf first.
    pub(crate) fn note(&self, user: &str, leaf: &Certificate, chain: &[CertificateDer<'_>]) {
        let Inner { present, older, seen } = &*self.0;
        let Some(present) = present.as_ref().filter(|_| !older.is_empty()) else { return };
        // A chain below the current CA may contain cross-signed certificates of older ones.
        let between = chain.iter().skip(1).filter_map(|der| Certificate::parse(der).ok());
        let between: Vec<Certificate> = between.collect();
        let is_of = |authority: &Certificate| {
            leaf.is_issued_by(authority)
                || between.iter().any(|one| leaf.is_issued_by(one) && one.is_issued_by(authority))
        };
        if is_of(present) {
            return;
        }
        let Some(authority) = older.iter().find(|one| is_of(one)) else { return };
        let key = (user.to_owned(), authority.common_name.clone());
        seen.lock().expect("no panic while held").put(key, base::clock::now());
    }

    /// Writes the metric, also without samples: that shows that no such user was seen.
    pub fn encode(&self, out: &mut String) {
        if self.0.older.is_empty() {
            return;
        }
        family(out, FIGURE, "gauge", HELP);
        let seen = self.0.seen.lock().expect("no panic while held");
        for ((user, authority), at) in seen.iter() {
            let labels = labels([("authority", authority.as_str()), ("user", user.as_str())]);
            samples(out, FIGURE, [(&labels, at.as_second())]);
        }
    }
}

#[cfg(test)]
mod tests {
    use pki::{Authority, Profile};

    use super::*;

    fn shown(issued: &str) -> (Certificate, Vec<CertificateDer<'static>>) {
        let mut chain = pki::certificates(issued.as_bytes()).expect("PEM");
        let ders = chain.iter().map(|one| one.der().to_vec().into()).collect();
        (chain.swap_remove(0), ders)
    }

    #[test]
    fn users_of_the_older_ca_are_recorded() {
        let old = Authority::generate("old").expect("an authority");
        let new = Authority::generate("new").expect("an authority");
        let vouched = new.vouched_for_by(&old).expect("signs");
        let bundle = [new.cert_pem(), &vouched, old.cert_pem()].concat();
        let carried = Authority::from_pem(&bundle, new.key_pem()).expect("an authority");
        let check = |bundle: &str, issuer: &Authority, expected: usize| {
            let sightings = Sightings::of(bundle);
            let issued = issuer.issue(&Profile::client("jane", &[])).expect("signs");
            let (leaf, chain) = shown(&issued.cert_pem);
            sightings.note("jane", &leaf, &chain);
            sightings.note("jane", &leaf, &chain);
            let mut out = String::new();
            sightings.encode(&mut out);
            let told = out.lines().filter(|line| line.starts_with(FIGURE)).count();
            assert_eq!(told, expected, "{out}");
        };
        check(&bundle, &old, 1);
        check(&bundle, &new, 0);
        // Its leaves carry the old CA's cross-signature, but belong to the new CA.
        check(&bundle, &carried, 0);
        check(new.cert_pem(), &new, 0);
        check(old.cert_pem(), &old, 0);
    }
}
