//! Randomness that is not secret: jitter, name suffixes, uids, picks. Keys and tokens come from the
//! crypto provider in `pki`.

use crate::sim::WORLD;

/// The alphabet of generated names: no vowels, no look-alikes, so that no words appear.
/// Upstream: `k8s.io/apimachinery/pkg/util/rand`.
const NAME_ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

fn with<T>(f: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
    WORLD.with_borrow_mut(|world| match world {
        Some(world) => f(&mut world.rng),
        None => f(&mut fastrand::Rng::new()),
    })
}

/// A uniform number in `0..limit`; `limit` must be positive.
pub fn below(limit: u64) -> u64 {
    with(|rng| rng.u64(0..limit))
}

/// A uniform number in `0.0..1.0`.
pub fn unit() -> f64 {
    with(|rng| rng.f64())
}

/// `length` characters for a generated name.
pub fn alphanumeric(length: usize) -> String {
    with(|rng| {
        (0..length).map(|_| NAME_ALPHABET[rng.usize(0..NAME_ALPHABET.len())] as char).collect()
    })
}

/// A random (version 4) UUID in its usual text form.
pub fn uuid() -> String {
    let mut b = [0u8; 16];
    with(|rng| rng.fill(&mut b));
    b[6] = (b[6] & 0x0f) | 0x40;
    b[8] = (b[8] & 0x3f) | 0x80;
    let hex: String = b.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// A stream of its own: what it yields depends on its seed alone, in a simulation or not.
#[derive(Clone, Debug)]
pub struct Stream(fastrand::Rng);

impl Stream {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A uniform number in `0..limit`; `limit` must be positive.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.u64(0..limit)
    }

    /// A uniform number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// One of `all`, which must not be empty.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.0.usize(0..all.len())]
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_has_version_and_variant() {
        let id = super::uuid();
        assert_eq!(id.len(), 36);
        assert_eq!(&id[14..15], "4");
        assert!("89ab".contains(&id[19..20]), "{id}");
    }
}
