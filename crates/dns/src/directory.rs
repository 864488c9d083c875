//! The zone's view of the cluster, from informers.
//!
//! In: Services, EndpointSlices, Namespaces. Out: look-ups by name and by address.
//! Invariant: each object is decoded once for each change, into the few facts that names need; a query decodes
//! nothing. A change costs its own addresses, whatever the number of objects; a look-up costs one table.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use client::{Event, Informer, Informers, ObjectKey, RawEvent};
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;

const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The zone's view of the cluster.
pub trait Directory: Send + Sync {
    /// True after all objects have been listed once.
    fn is_ready(&self) -> bool;
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<ServiceFacts>>;
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<SliceFacts>>;
    fn services_at(&self, ip: IpAddr) -> Vec<Arc<ServiceFacts>>;
    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<SliceFacts>>;
    fn has_namespace(&self, namespace: &str) -> bool;
}

/// What names need of a Service.
#[derive(Debug, PartialEq)]
pub struct ServiceFacts {
    pub namespace: Box<str>,
    pub name: Box<str>,
    pub target: Target,
    pub ports: Vec<Port>,
    pub publishes_not_ready: bool,
}

#[derive(Debug, PartialEq)]
pub enum Target {
    /// The name of an ExternalName Service.
    Name(Box<str>),
    Addresses(Vec<IpAddr>),
    Headless,
}

/// What names need of an EndpointSlice.
#[derive(Debug, PartialEq)]
pub struct SliceFacts {
    pub namespace: Box<str>,
    pub service: Box<str>,
    pub ports: Vec<Port>,
    pub endpoints: Vec<EndpointFacts>,
}

#[derive(Debug, PartialEq)]
pub struct EndpointFacts {
    pub ips: Vec<IpAddr>,
    /// In lower case.
    pub hostname: Option<Box<str>>,
    pub is_ready: bool,
}

#[derive(Debug, PartialEq)]
pub struct Port {
    pub name: Box<str>,
    /// In lower case.
    pub protocol: Box<str>,
    pub number: u16,
}

impl Port {
    fn new(name: Option<&String>, protocol: Option<&String>, number: i32) -> Option<Self> {
        Some(Self {
            name: name.map(String::as_str).unwrap_or_default().into(),
            protocol: protocol
                .map_or_else(|| "tcp".into(), |protocol| protocol.to_lowercase())
                .into(),
            number: u16::try_from(number).ok()?,
        })
    }
}

impl ServiceFacts {
    pub fn of(service: &Service) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        let target = if spec.type_.as_deref() == Some("ExternalName") {
            let name = spec.external_name.as_deref().unwrap_or_default();
            Target::Name(name.trim_end_matches('.').into())
        } else {
            let mut texts: Vec<&String> = spec.cluster_ips.iter().flatten().collect();
            if texts.is_empty() {
                texts.extend(&spec.cluster_ip);
            }
            let ips: Vec<IpAddr> = texts.iter().filter_map(|text| text.parse().ok()).collect();
            if ips.is_empty() { Target::Headless } else { Target::Addresses(ips) }
        };
        let ports = spec.ports.iter().flatten();
        Some(Self {
            namespace: service.metadata.namespace.as_deref()?.into(),
            name: service.metadata.name.as_deref()?.into(),
            target,
            ports: ports
                .filter_map(|p| Port::new(p.name.as_ref(), p.protocol.as_ref(), p.port))
                .collect(),
            publishes_not_ready: spec.publish_not_ready_addresses == Some(true),
        })
    }

    fn addresses(&self) -> &[IpAddr] {
        match &self.target {
            Target::Addresses(ips) => ips,
            Target::Name(_) | Target::Headless => &[],
        }
    }
}

impl SliceFacts {
    /// `None` for a slice without a Service.
    pub fn of(slice: &EndpointSlice) -> Option<Self> {
        let labels = slice.metadata.labels.as_ref()?;
        let ports = slice.ports.iter().flatten();
        let endpoints = slice.endpoints.iter().flatten().map(|endpoint| EndpointFacts {
            ips: endpoint.addresses.iter().filter_map(|address| address.parse().ok()).collect(),
            hostname: endpoint
                .hostname
                .as_deref()
                .filter(|name| !name.is_empty())
                .map(|name| name.to_lowercase().into()),
            is_ready: endpoint.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true),
        });
        Some(Self {
            namespace: slice.metadata.namespace.as_deref()?.into(),
            service: labels.get(SERVICE_NAME)?.as_str().into(),
            ports: ports
                .filter_map(|p| Port::new(p.name.as_ref(), p.protocol.as_ref(), p.port?))
                .collect(),
            endpoints: endpoints.collect(),
        })
    }

    fn addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.endpoints.iter().flat_map(|endpoint| &endpoint.ips)
    }
}

/// Tables over facts, without a source.
#[derive(Default)]
struct Tables {
    services: HashMap<String, Arc<ServiceFacts>>,
    services_at: HashMap<IpAddr, Vec<Arc<ServiceFacts>>>,
    slices: HashMap<ObjectKey, Arc<SliceFacts>>,
    /// By namespace and Service, then by slice, so that answers have a stable order.
    slices_of: HashMap<String, BTreeMap<ObjectKey, Arc<SliceFacts>>>,
    slices_at: HashMap<IpAddr, Vec<Arc<SliceFacts>>>,
    namespaces: HashSet<Box<str>>,
}

impl Tables {
    fn put_service(&mut self, key: &ObjectKey, facts: Option<ServiceFacts>) {
        let home = home(&key.namespace, &key.name);
        if let Some(old) = self.services.remove(&home) {
            for ip in old.addresses() {
                forget(&mut self.services_at, *ip, &old);
            }
        }
        let Some(facts) = facts.map(Arc::new) else { return };
        for ip in facts.addresses() {
            self.services_at.entry(*ip).or_default().push(facts.clone());
        }
        self.services.insert(home, facts);
    }

    fn put_slice(&mut self, key: ObjectKey, facts: Option<SliceFacts>) {
        if let Some(old) = self.slices.remove(&key) {
            for ip in old.addresses() {
                forget(&mut self.slices_at, *ip, &old);
            }
            let home = home(&old.namespace, &old.service);
            if let Some(slices) = self.slices_of.get_mut(&home) {
                slices.remove(&key);
                if slices.is_empty() {
                    self.slices_of.remove(&home);
                }
            }
        }
        let Some(facts) = facts.map(Arc::new) else { return };
        for ip in facts.addresses() {
            let there = self.slices_at.entry(*ip).or_default();
            if !there.iter().any(|known| Arc::ptr_eq(known, &facts)) {
                there.push(facts.clone());
            }
        }
        let home = home(&facts.namespace, &facts.service);
        self.slices_of.entry(home).or_default().insert(key.clone(), facts.clone());
        self.slices.insert(key, facts);
    }
}

fn writing(tables: &RwLock<Tables>) -> RwLockWriteGuard<'_, Tables> {
    tables.write().expect("no panic while held")
}

fn home(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

fn forget<T>(table: &mut HashMap<IpAddr, Vec<Arc<T>>>, ip: IpAddr, old: &Arc<T>) {
    if let Some(there) = table.get_mut(&ip) {
        there.retain(|known| !Arc::ptr_eq(known, old));
        if there.is_empty() {
            table.remove(&ip);
        }
    }
}

pub struct Cluster {
    /// Guards all tables; written by the reflectors' tasks, for one change at a time.
    tables: Arc<RwLock<Tables>>,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    namespaces: Informer<Namespace>,
}

impl Cluster {
    pub fn new(informers: &Informers) -> Self {
        let tables: Arc<RwLock<Tables>> = Arc::default();
        let services = informers.of::<Service>();
        let kept = tables.clone();
        services.subscribe(move |event| {
            let facts = match event {
                Event::Applied { new, .. } => ServiceFacts::of(new),
                Event::Deleted(_) => None,
            };
            writing(&kept).put_service(&event.key(), facts);
        });
        let slices = informers.of::<EndpointSlice>();
        let kept = tables.clone();
        slices.subscribe(move |event| {
            let facts = match event {
                Event::Applied { new, .. } => SliceFacts::of(new),
                Event::Deleted(_) => None,
            };
            writing(&kept).put_slice(event.key(), facts);
        });
        let namespaces = informers.of::<Namespace>();
        let kept = tables.clone();
        namespaces.subscribe_raw(move |event| {
            let name: Box<str> = (&*event.entry().header.key.name).into();
            let mut tables = writing(&kept);
            match event {
                RawEvent::Applied { .. } => tables.namespaces.insert(name),
                RawEvent::Deleted(_) => tables.namespaces.remove(&name),
            };
        });
        Self { tables, services, slices, namespaces }
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().expect("no panic while held")
    }
}

impl Directory for Cluster {
    fn is_ready(&self) -> bool {
        self.services.has_synced() && self.slices.has_synced()
    }

    fn service(&self, namespace: &str, name: &str) -> Option<Arc<ServiceFacts>> {
        self.read().services.get(&home(namespace, name)).cloned()
    }

    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<SliceFacts>> {
        let tables = self.read();
        let found = tables.slices_of.get(&home(namespace, service));
        found.map(|slices| slices.values().cloned().collect()).unwrap_or_default()
    }

    fn services_at(&self, ip: IpAddr) -> Vec<Arc<ServiceFacts>> {
        self.read().services_at.get(&ip).cloned().unwrap_or_default()
    }

    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<SliceFacts>> {
        self.read().slices_at.get(&ip).cloned().unwrap_or_default()
    }

    /// Servers of earlier versions do not let the DNS read Namespaces: then every name may be one.
    fn has_namespace(&self, namespace: &str) -> bool {
        !self.namespaces.has_synced() || self.read().namespaces.contains(namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn slice(service: &str, ips: &[&str]) -> Option<SliceFacts> {
        let endpoints: Vec<_> = ips.iter().map(|ip| json!({"addresses": [ip]})).collect();
        let object = json!({"metadata": {"name": "s", "namespace": "ns",
            "labels": {SERVICE_NAME: service}}, "addressType": "IPv4", "endpoints": endpoints});
        SliceFacts::of(&serde_json::from_value(object).expect("a slice"))
    }

    #[test]
    fn a_change_leaves_nothing_of_the_state_before_it() {
        let mut tables = Tables::default();
        let key = ObjectKey::new("ns", "s");
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        tables.put_slice(key.clone(), slice("a", &["10.0.0.1", "10.0.0.2", "10.0.0.1"]));
        tables.put_slice(key.clone(), slice("b", &["10.0.0.2", "10.0.0.3"]));
        assert!(!tables.slices_at.contains_key(&ip("10.0.0.1")));
        assert_eq!(tables.slices_at[&ip("10.0.0.2")].len(), 1);
        assert_eq!(tables.slices_of.keys().collect::<Vec<_>>(), ["ns/b"]);
        tables.put_slice(key, None);
        assert!(tables.slices.is_empty() && tables.slices_of.is_empty());
        assert!(tables.slices_at.is_empty());

        let service = |ips: &[&str]| {
            let object = json!({"metadata": {"name": "s", "namespace": "ns"},
                "spec": {"clusterIP": ips[0], "clusterIPs": ips}});
            ServiceFacts::of(&serde_json::from_value(object).expect("a Service"))
        };
        let key = ObjectKey::new("ns", "s");
        tables.put_service(&key, service(&["10.43.0.1", "fd00::1"]));
        tables.put_service(&key, service(&["10.43.0.2"]));
        assert_eq!(tables.services_at.keys().collect::<Vec<_>>(), [&ip("10.43.0.2")]);
        tables.put_service(&key, None);
        assert!(tables.services.is_empty() && tables.services_at.is_empty());
    }
}
