//! The holders of ports on the nodes' addresses.
//!
//! In: the ports that Services want. Out: the Service that has a port; Services that should try again. Pure.
//! Invariant: a port has one holder, and a Service has all its ports or none. The oldest Service gets a free
//! port; a holder keeps its ports until it gives them up.
//! Cost: a Service costs its ports, and for each the older Services that want it too.

use std::collections::{BTreeSet, HashMap};
use std::ops::RangeInclusive;

use client::ObjectKey;

use super::refusal::Refusal;
use super::wish::{Port, Wish};

/// Services without an address come after those that have one; then older ones first.
type Rank = (bool, i64, ObjectKey);

#[derive(Default)]
pub struct Ports {
    /// Ports of the nodes' own programs, and those of NodePort Services.
    reserved: Vec<RangeInclusive<u16>>,
    by_service: HashMap<ObjectKey, (Rank, BTreeSet<Port>)>,
    wanted: HashMap<Port, BTreeSet<Rank>>,
    held: HashMap<Port, ObjectKey>,
}

impl Ports {
    pub fn new(reserved: Vec<RangeInclusive<u16>>) -> Self {
        Self { reserved, ..Self::default() }
    }

    /// Notes what a Service wants, in place of what it wanted. Returns the Services that should try again.
    pub fn want(&mut self, key: &ObjectKey, wish: &Wish) -> Vec<ObjectKey> {
        let rank = (wish.has.is_empty(), wish.created, key.clone());
        let old = self.by_service.insert(key.clone(), (rank.clone(), wish.ports.clone()));
        let (old_rank, old_ports) = old.unwrap_or_else(|| (rank.clone(), BTreeSet::new()));
        let woken = self.give_up(key, &old_rank, old_ports.difference(&wish.ports));
        for port in &wish.ports {
            let all = self.wanted.entry(port.clone()).or_default();
            all.remove(&old_rank);
            all.insert(rank.clone());
        }
        woken
    }

    /// The Service wants no port any more. Returns the Services that should try again.
    pub fn leave(&mut self, key: &ObjectKey) -> Vec<ObjectKey> {
        let Some((rank, ports)) = self.by_service.remove(key) else { return vec![] };
        self.give_up(key, &rank, ports.iter())
    }

    /// Takes all ports that the Service wants, or none. Returns the Services that should try again, if it
    /// loses the ports that it had.
    pub fn take(&mut self, key: &ObjectKey) -> Result<(), (Refusal, Vec<ObjectKey>)> {
        let Some((rank, ports)) = self.by_service.get(key).cloned() else { return Ok(()) };
        match self.obstacle(key, &rank, &ports) {
            None => {
                self.held.extend(ports.into_iter().map(|port| (port, key.clone())));
                Ok(())
            }
            Some(refusal) => {
                let lost: Vec<Port> =
                    ports.into_iter().filter(|port| self.held.get(port) == Some(key)).collect();
                let mut woken = vec![];
                for port in lost {
                    self.held.remove(&port);
                    woken.extend(self.others(key, &port));
                }
                Err((refusal, woken))
            }
        }
    }

    fn obstacle(&self, key: &ObjectKey, rank: &Rank, ports: &BTreeSet<Port>) -> Option<Refusal> {
        let is_reserved = |port: &&Port| self.reserved.iter().any(|range| range.contains(&port.1));
        if let Some(port) = ports.iter().find(is_reserved) {
            return Some(Refusal::Reserved(port.clone()));
        }
        let taken = |port: &Port, by: &ObjectKey| Refusal::Port(port.clone(), by.clone());
        for port in ports {
            if let Some(holder) = self.held.get(port).filter(|holder| *holder != key) {
                return Some(taken(port, holder));
            }
        }
        for port in ports.iter().filter(|port| !self.held.contains_key(*port)) {
            let older = self.wanted.get(port).into_iter().flat_map(|all| all.range(..rank.clone()));
            for (_, _, other) in older {
                if other != key && self.can_take(other) {
                    return Some(taken(port, other));
                }
            }
        }
        None
    }

    /// Whether no other Service has any of the ports that this one wants.
    fn can_take(&self, key: &ObjectKey) -> bool {
        let Some((_, ports)) = self.by_service.get(key) else { return false };
        let is_free = |port: &Port| self.held.get(port).is_none_or(|holder| holder == key);
        ports
            .iter()
            .all(|port| is_free(port) && !self.reserved.iter().any(|range| range.contains(&port.1)))
    }

    fn give_up<'a>(
        &mut self,
        key: &ObjectKey,
        rank: &Rank,
        ports: impl Iterator<Item = &'a Port>,
    ) -> Vec<ObjectKey> {
        let mut woken = vec![];
        for port in ports {
            if let Some(all) = self.wanted.get_mut(port) {
                all.remove(rank);
                if all.is_empty() {
                    self.wanted.remove(port);
                }
            }
            if self.held.get(port) == Some(key) {
                self.held.remove(port);
            }
            // Services also wait for one that came first and has not taken its ports yet.
            woken.extend(self.others(key, port));
        }
        woken
    }

    /// The other Services that want the port.
    fn others(&self, key: &ObjectKey, port: &Port) -> Vec<ObjectKey> {
        let all = self.wanted.get(port).into_iter().flatten();
        all.map(|(_, _, other)| other.clone()).filter(|other| other != key).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey::new("ns", name)
    }

    fn wish(created: u32, has: bool, ports: &[u16]) -> Wish {
        let ports: Vec<_> = ports.iter().map(|port| json!({"port": port})).collect();
        let ingress = if has { json!([{"ip": "10.0.0.1"}]) } else { json!([]) };
        let service = json!({
            "metadata": {"name": "s", "creationTimestamp": format!("2026-01-01T00:00:{created:02}Z")},
            "spec": {"type": "LoadBalancer", "ports": ports},
            "status": {"loadBalancer": {"ingress": ingress}},
        });
        Wish::of(&from_value(service).expect("a Service"), false).expect("it wants one")
    }

    fn refused(ports: &mut Ports, name: &str) -> Option<String> {
        ports.take(&key(name)).err().map(|(refusal, _)| refusal.to_string())
    }

    #[test]
    fn the_older_service_gets_a_free_port() {
        let mut ports = Ports::default();
        ports.want(&key("young"), &wish(2, false, &[80]));
        ports.want(&key("old"), &wish(1, false, &[80, 443]));
        let text = "port 80/TCP of the nodes is used by Service ns/old";
        assert_eq!(refused(&mut ports, "young").as_deref(), Some(text));
        assert_eq!(refused(&mut ports, "old"), None);
        assert_eq!(refused(&mut ports, "young").as_deref(), Some(text));
        assert_eq!(ports.leave(&key("old")), [key("young")]);
        assert_eq!(refused(&mut ports, "young"), None);
    }

    #[test]
    fn a_holder_keeps_its_ports_whatever_its_age() {
        let mut ports = Ports::default();
        ports.want(&key("young"), &wish(2, true, &[80]));
        assert_eq!(refused(&mut ports, "young"), None);
        ports.want(&key("old"), &wish(1, false, &[80, 81]));
        assert!(refused(&mut ports, "old").is_some());
        // A Service that cannot have all its ports blocks none of them.
        ports.want(&key("third"), &wish(3, false, &[81]));
        assert_eq!(refused(&mut ports, "third"), None);
        // After a restart, the Service with an address comes first.
        let mut ports = Ports::default();
        ports.want(&key("old"), &wish(1, false, &[80, 81]));
        ports.want(&key("young"), &wish(2, true, &[80]));
        assert!(refused(&mut ports, "old").is_some());
        assert_eq!(refused(&mut ports, "young"), None);
    }

    #[test]
    fn a_changed_service_wakes_those_that_wait() {
        let mut ports = Ports::default();
        ports.want(&key("a"), &wish(1, false, &[80]));
        assert_eq!(refused(&mut ports, "a"), None);
        ports.want(&key("b"), &wish(2, false, &[80]));
        assert!(refused(&mut ports, "b").is_some());
        assert_eq!(ports.want(&key("a"), &wish(1, true, &[81])), [key("b")]);
        assert_eq!(refused(&mut ports, "b"), None);
        // It adds a port that another Service has: it loses its own, too.
        ports.want(&key("a"), &wish(1, true, &[80, 81]));
        assert!(refused(&mut ports, "a").is_some());
        ports.want(&key("c"), &wish(3, false, &[81]));
        assert_eq!(refused(&mut ports, "c"), None);
    }

    #[test]
    fn the_nodes_own_ports_are_reserved() {
        let mut ports = Ports::new(vec![6443..=6443, 30000..=32767]);
        ports.want(&key("a"), &wish(1, false, &[6443]));
        let text = "port 6443/TCP is reserved on nodes; use another port, or a pool of addresses";
        assert_eq!(refused(&mut ports, "a").as_deref(), Some(text));
        ports.want(&key("a"), &wish(1, false, &[6444]));
        assert_eq!(refused(&mut ports, "a"), None);
    }
}
