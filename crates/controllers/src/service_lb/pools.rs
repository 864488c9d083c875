//! Addresses of pools, and the Services that have them.
//!
//! In: pools, wishes of Services. Out: addresses; Services that should try again. Pure.
//! Invariants: Services share an address only if both allow it and their ports differ
//! ([`Wish::shares_with`]). A Service keeps its address while it may have it.
//! Cost: an address of a free list; a shared address costs the Services that share it.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use client::ObjectKey;
use machinery::address_range::AddressRange;

use super::refusal::Refusal;
use super::wish::Wish;

#[derive(Default)]
pub struct Pools {
    pools: Vec<Pool>,
    /// The Services that have an address.
    users: HashMap<IpAddr, BTreeSet<ObjectKey>>,
    by_service: HashMap<ObjectKey, Held>,
    /// The Services of a sharing key that have an address.
    by_share: HashMap<String, BTreeSet<ObjectKey>>,
    /// Services that found no free address: whether IPv4, the age, the key.
    waiting: BTreeSet<(bool, i64, ObjectKey)>,
    /// Services that wait for one address.
    waiting_for: HashMap<IpAddr, BTreeSet<ObjectKey>>,
    /// What each of them waits for.
    waits: HashMap<ObjectKey, Wait>,
    /// Set with the first decision: from then on, only decisions give out addresses.
    is_settled: bool,
}

struct Held {
    wish: Wish,
    addresses: Vec<IpAddr>,
}

enum Wait {
    /// Any address of a family: whether IPv4, the Service's age.
    Any(bool, i64),
    For(IpAddr),
}

/// Invariant: an address is in `free` or above `untouched`, or a Service has it.
struct Pool {
    range: AddressRange,
    /// Numbers below `untouched` that were given back.
    free: BTreeSet<u128>,
    untouched: u128,
}

impl Pools {
    pub fn new(ranges: &[AddressRange]) -> Self {
        let pool =
            |range: &AddressRange| Pool { range: *range, free: BTreeSet::new(), untouched: 0 };
        Self { pools: ranges.iter().map(pool).collect(), ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Before the first decision: the Service keeps the addresses that its status has.
    pub fn note(&mut self, key: &ObjectKey, wish: &Wish) {
        if self.is_settled || self.by_service.contains_key(key) {
            return;
        }
        let has = wish.has.iter().copied();
        let addresses: Vec<IpAddr> =
            has.filter(|one| self.refusal(key, wish, *one).is_none()).collect();
        if !addresses.is_empty() {
            self.hold(key, wish, addresses);
        }
    }

    /// The Service's addresses, one per family, and the Services that should try again.
    pub fn assign(
        &mut self,
        key: &ObjectKey,
        wish: &Wish,
    ) -> (Result<Vec<IpAddr>, Refusal>, Vec<ObjectKey>) {
        self.is_settled = true;
        self.stop_waiting(key);
        let chosen = self.choose(key, wish);
        let kept = chosen.as_ref().map(Vec::as_slice).unwrap_or_default();
        let woken = self.release(key, kept);
        match &chosen {
            Ok(addresses) => self.hold(key, wish, addresses.clone()),
            Err(refusal) => self.wait(key, wish, refusal),
        }
        (chosen, woken)
    }

    /// The Service wants no address any more. Returns the Services that should try again.
    pub fn leave(&mut self, key: &ObjectKey) -> Vec<ObjectKey> {
        self.stop_waiting(key);
        self.release(key, &[])
    }

    fn choose(&mut self, key: &ObjectKey, wish: &Wish) -> Result<Vec<IpAddr>, Refusal> {
        if self.pools.is_empty() {
            return Err(Refusal::NoPool);
        }
        let has_pool =
            |is_ipv4: bool| self.pools.iter().any(|pool| pool.range.is_ipv4() == is_ipv4);
        let (with, without): (Vec<bool>, Vec<bool>) =
            wish.families.iter().copied().partition(|is_ipv4| has_pool(*is_ipv4));
        if let Some(missing) = without.first()
            && (wish.needs_all_families || with.is_empty())
        {
            return Err(Refusal::NoFamily(*missing));
        }
        with.into_iter().map(|is_ipv4| self.choose_one(key, wish, is_ipv4)).collect()
    }

    fn choose_one(
        &mut self,
        key: &ObjectKey,
        wish: &Wish,
        is_ipv4: bool,
    ) -> Result<IpAddr, Refusal> {
        if let Some(asked) = wish.requested.iter().find(|one| one.is_ipv4() == is_ipv4) {
            return self.refusal(key, wish, *asked).map_or(Ok(*asked), Err);
        }
        if let Some(found) = self.reusable(key, wish, is_ipv4) {
            return Ok(found);
        }
        let users = &self.users;
        let pools = self.pools.iter_mut().filter(|pool| pool.range.is_ipv4() == is_ipv4);
        pools.into_iter().find_map(|pool| pool.first_free(users)).ok_or(Refusal::Exhausted(is_ipv4))
    }

    /// The address that the Service has, or one that it may share.
    fn reusable(&self, key: &ObjectKey, wish: &Wish, is_ipv4: bool) -> Option<IpAddr> {
        let of_service =
            |of: &ObjectKey| self.by_service.get(of).map(|held| held.addresses.clone());
        let own = of_service(key).into_iter().flatten();
        let sharing = wish.share.iter().filter_map(|share| self.by_share.get(share)).flatten();
        let shared = sharing.filter_map(of_service).flatten();
        let mut fit = own.chain(shared).filter(|one| one.is_ipv4() == is_ipv4);
        fit.find(|one| self.refusal(key, wish, *one).is_none())
    }

    /// Why the Service may not have this address.
    fn refusal(&self, key: &ObjectKey, wish: &Wish, address: IpAddr) -> Option<Refusal> {
        if !self.pools.iter().any(|pool| pool.range.contains(address)) {
            return Some(Refusal::Outside(address));
        }
        let others = self.users.get(&address).into_iter().flatten().filter(|other| *other != key);
        let mut stranger = others.filter(|other| {
            let held = self.by_service.get(*other);
            held.is_none_or(|held| !held.wish.shares_with(wish))
        });
        stranger.next().map(|other| Refusal::Address(address, other.clone()))
    }

    fn hold(&mut self, key: &ObjectKey, wish: &Wish, addresses: Vec<IpAddr>) {
        for address in &addresses {
            self.users.entry(*address).or_default().insert(key.clone());
            for pool in &mut self.pools {
                if let Some(number) = pool.range.number_of(*address) {
                    pool.free.remove(&number);
                }
            }
        }
        if let Some(share) = &wish.share {
            self.by_share.entry(share.clone()).or_default().insert(key.clone());
        }
        self.by_service.insert(key.clone(), Held { wish: wish.clone(), addresses });
    }

    /// Takes all addresses but `kept` from the Service.
    fn release(&mut self, key: &ObjectKey, kept: &[IpAddr]) -> Vec<ObjectKey> {
        let Some(held) = self.by_service.remove(key) else { return vec![] };
        if let Some(share) = &held.wish.share
            && let Some(all) = self.by_share.get_mut(share)
        {
            all.remove(key);
            if all.is_empty() {
                self.by_share.remove(share);
            }
        }
        let mut woken = vec![];
        for address in held.addresses.into_iter().filter(|one| !kept.contains(one)) {
            let Some(users) = self.users.get_mut(&address) else { continue };
            users.remove(key);
            let is_free = users.is_empty();
            woken.extend(self.waiting_for.remove(&address).into_iter().flatten());
            if is_free {
                self.users.remove(&address);
                for pool in &mut self.pools {
                    let number = pool.range.number_of(address);
                    pool.free.extend(number.filter(|number| *number < pool.untouched));
                }
                woken.extend(self.first_waiting(address.is_ipv4()));
            }
        }
        woken
    }

    /// The oldest Service that waits for any address of the family.
    fn first_waiting(&self, is_ipv4: bool) -> Option<ObjectKey> {
        let start = (is_ipv4, i64::MIN, ObjectKey::new("", ""));
        let first = self.waiting.range(start..).next().filter(|(family, _, _)| *family == is_ipv4);
        first.map(|(_, _, key)| key.clone())
    }

    fn wait(&mut self, key: &ObjectKey, wish: &Wish, refusal: &Refusal) {
        let wait = match refusal {
            Refusal::Exhausted(is_ipv4) => {
                self.waiting.insert((*is_ipv4, wish.created, key.clone()));
                Wait::Any(*is_ipv4, wish.created)
            }
            Refusal::Address(address, _) => {
                self.waiting_for.entry(*address).or_default().insert(key.clone());
                Wait::For(*address)
            }
            // Only a change of the Service, or of the server's flags, helps.
            _ => return,
        };
        self.waits.insert(key.clone(), wait);
    }

    fn stop_waiting(&mut self, key: &ObjectKey) {
        match self.waits.remove(key) {
            Some(Wait::Any(is_ipv4, created)) => {
                self.waiting.remove(&(is_ipv4, created, key.clone()));
            }
            Some(Wait::For(address)) => {
                let Some(all) = self.waiting_for.get_mut(&address) else { return };
                all.remove(key);
                if all.is_empty() {
                    self.waiting_for.remove(&address);
                }
            }
            None => {}
        }
    }
}

impl Pool {
    fn first_free(&mut self, users: &HashMap<IpAddr, BTreeSet<ObjectKey>>) -> Option<IpAddr> {
        if let Some(number) = self.free.first() {
            return self.range.nth(*number);
        }
        // Each address that was taken by request is skipped once.
        loop {
            let address = self.range.nth(self.untouched)?;
            self.untouched += 1;
            if !users.contains_key(&address) {
                // Until it is held it counts as given back.
                self.free.insert(self.untouched - 1);
                return Some(address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey::new("ns", name)
    }

    fn pools(ranges: &[&str]) -> Pools {
        let ranges: Vec<_> = ranges.iter().map(|text| text.parse().expect("a range")).collect();
        Pools::new(&ranges)
    }

    fn wish(spec: Value, annotations: Value) -> Wish {
        let mut service = json!({"metadata": {"name": "s", "annotations": annotations},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}], "ipFamilies": ["IPv4"]}});
        for (name, value) in spec.as_object().expect("fields") {
            service["spec"][name] = value.clone();
        }
        Wish::of(&from_value(service).expect("a Service"), true).expect("it wants one")
    }

    fn any() -> Wish {
        wish(json!({}), json!({}))
    }

    /// The addresses, or the refusal, as text.
    fn assigned(pools: &mut Pools, name: &str, wish: &Wish) -> String {
        match pools.assign(&key(name), wish).0 {
            Ok(all) => all.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            Err(refusal) => refusal.to_string(),
        }
    }

    #[test]
    fn addresses_are_given_out_and_given_back() {
        let mut pools = pools(&["10.0.0.1-10.0.0.2"]);
        assert_eq!(assigned(&mut pools, "a", &any()), "10.0.0.1");
        assert_eq!(assigned(&mut pools, "a", &any()), "10.0.0.1", "twice is once");
        assert_eq!(assigned(&mut pools, "b", &any()), "10.0.0.2");
        let full = "no free IPv4 address in --load-balancer-pool";
        assert_eq!(assigned(&mut pools, "c", &any()), full);
        assert_eq!(pools.leave(&key("a")), [key("c")]);
        assert_eq!(assigned(&mut pools, "c", &any()), "10.0.0.1");
        assert!(pools.leave(&key("c")).is_empty());
    }

    #[test]
    fn a_service_may_ask_for_an_address() {
        let mut pools = pools(&["10.0.0.1-10.0.0.3"]);
        let asks = |address: &str| wish(json!({"loadBalancerIP": address}), json!({}));
        assert_eq!(assigned(&mut pools, "a", &asks("10.0.0.2")), "10.0.0.2");
        let taken = "address 10.0.0.2 is used by Service ns/a";
        assert_eq!(assigned(&mut pools, "b", &asks("10.0.0.2")), taken);
        let outside = "address 10.9.9.9 is outside of --load-balancer-pool";
        assert_eq!(assigned(&mut pools, "c", &asks("10.9.9.9")), outside);
        assert_eq!(assigned(&mut pools, "d", &any()), "10.0.0.1");
        assert_eq!(assigned(&mut pools, "e", &any()), "10.0.0.3", "the asked one is skipped");
        // The Service changes its mind; the waiting one is told.
        let (changed, woken) = pools.assign(&key("a"), &asks("10.0.0.9"));
        assert!(changed.is_err());
        assert_eq!(woken, [key("b")]);
        assert_eq!(assigned(&mut pools, "b", &asks("10.0.0.2")), "10.0.0.2");
        let annotated = wish(json!({}), json!({"decapod.io/load-balancer-ips": "10.0.0.3"}));
        assert!(pools.leave(&key("e")).is_empty());
        assert_eq!(assigned(&mut pools, "e", &annotated), "10.0.0.3");
    }

    #[test]
    fn each_family_gets_an_address() {
        let both = |policy: &str| {
            wish(json!({"ipFamilies": ["IPv6", "IPv4"], "ipFamilyPolicy": policy}), json!({}))
        };
        let mut two = pools(&["10.0.0.1", "fd00::/126"]);
        assert_eq!(assigned(&mut two, "a", &both("RequireDualStack")), "fd00::1,10.0.0.1");
        assert!(assigned(&mut two, "b", &both("PreferDualStack")).contains("no free IPv4"));
        let mut one = pools(&["10.0.0.1"]);
        let missing = "no --load-balancer-pool has IPv6 addresses";
        assert_eq!(assigned(&mut one, "a", &both("RequireDualStack")), missing);
        assert_eq!(assigned(&mut one, "a", &both("PreferDualStack")), "10.0.0.1");
        let six = wish(json!({"ipFamilies": ["IPv6"]}), json!({}));
        assert_eq!(assigned(&mut one, "b", &six), missing);
        assert_eq!(
            assigned(&mut pools(&[]), "a", &any()),
            "the server has no --load-balancer-pool"
        );
    }

    #[test]
    fn services_share_an_address_if_both_say_so() {
        let shared = |port: u16| {
            let key = json!({"decapod.io/load-balancer-share": "k"});
            wish(json!({"ports": [{"port": port}]}), key)
        };
        let mut pools = pools(&["10.0.0.1-10.0.0.2"]);
        assert_eq!(assigned(&mut pools, "a", &shared(80)), "10.0.0.1");
        assert_eq!(assigned(&mut pools, "b", &shared(81)), "10.0.0.1");
        assert_eq!(assigned(&mut pools, "c", &shared(80)), "10.0.0.2", "the port is taken");
        // The port changes: it may not stay with the others.
        assert!(assigned(&mut pools, "b", &shared(80)).contains("no free"));
        assert_eq!(assigned(&mut pools, "b", &shared(82)), "10.0.0.1");
    }

    #[test]
    fn addresses_survive_a_restart() {
        let mut pools = pools(&["10.0.0.1-10.0.0.3"]);
        let had = |address: &str| Wish { has: [address.parse().expect("one")].into(), ..any() };
        pools.note(&key("b"), &had("10.0.0.1"));
        pools.note(&key("c"), &had("10.0.0.1"));
        pools.note(&key("d"), &had("192.168.0.1"));
        assert_eq!(assigned(&mut pools, "a", &any()), "10.0.0.2");
        assert_eq!(assigned(&mut pools, "b", &had("10.0.0.1")), "10.0.0.1");
        pools.note(&key("e"), &had("10.0.0.3"));
        assert_eq!(assigned(&mut pools, "c", &any()), "10.0.0.3", "too late to be noted");
    }
}
