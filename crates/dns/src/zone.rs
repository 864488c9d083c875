//! The cluster's zone: the records of a name.
//!
//! ```text
//! <svc>.<ns>.svc.<zone>                 A, AAAA, SRV; CNAME for ExternalName
//! _<port>._<proto>.<svc>.<ns>.svc.<zone>  SRV
//! <endpoint>.<svc>.<ns>.svc.<zone>      A, AAAA of one endpoint of a headless Service
//! <a-b-c-d>.<ns>.pod.<zone>             A, AAAA: the address in the name
//! dns-version.<zone>                    TXT
//! <d.c.b.a>.in-addr.arpa                PTR
//! ```
//!
//! In: a name, a type, a [`Directory`]. Out: [`Answer`]. Pure.
//! NODATA (a name without records of that type) and NXDOMAIN (no such name) differ: resolvers end
//! their search at NODATA and continue at NXDOMAIN. Upstream: the DNS specification 1.1.0.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use hickory_proto::rr::rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

use crate::directory::{Directory, service_of};

pub const TTL: u32 = 5;
const VERSION: &str = "1.1.0";

#[derive(Debug, Default, PartialEq)]
pub struct Records {
    pub answers: Vec<Record>,
    pub additionals: Vec<Record>,
}

#[derive(Debug, PartialEq)]
pub enum Answer {
    /// The name exists; the list is empty for NODATA.
    Found(Records),
    /// An alias to a name outside of the zone: the server must resolve the target and add its records.
    Alias(Box<Record>, Name),
    NoSuchName,
    /// The informers have not synced, so the zone cannot answer.
    NotReady,
    /// The name is outside of the zone.
    Elsewhere,
}

/// The zone of one cluster domain.
pub struct Zone {
    origin: Name,
    /// `cluster.local`
    domain: String,
}

impl Zone {
    pub fn new(domain: &str) -> Option<Self> {
        let origin = Name::from_ascii(format!("{domain}.")).ok()?;
        Some(Self { origin, domain: domain.to_string() })
    }

    pub fn soa(&self) -> Record {
        let named = |label: &str| self.name(label).unwrap_or_else(|| self.origin.clone());
        let serial = u32::try_from(base::clock::now().as_second()).unwrap_or(0);
        let soa = SOA::new(named("ns.dns"), named("hostmaster"), serial, 7200, 1800, 86400, TTL);
        Record::from_rdata(self.origin.clone(), TTL, RData::SOA(soa))
    }

    /// A name below the zone's domain.
    fn name(&self, below: &str) -> Option<Name> {
        Name::from_ascii(format!("{below}.{}.", self.domain)).ok()
    }

    pub fn answer(&self, name: &Name, kind: RecordType, cluster: &dyn Directory) -> Answer {
        let text = name.to_ascii().to_lowercase();
        let text = text.trim_end_matches('.');
        if let Some(ip) = reverse_address(text) {
            return self.reverse(name, ip, kind, cluster);
        }
        let below = match text.strip_suffix(&self.domain) {
            Some("") => "",
            Some(below) if below.ends_with('.') => below.trim_end_matches('.'),
            _ => return Answer::Elsewhere,
        };
        if !cluster.is_ready() {
            return Answer::NotReady;
        }
        let labels: Vec<&str> = below.split('.').filter(|label| !label.is_empty()).collect();
        match labels.as_slice() {
            [] => Answer::Found(self.apex(kind)),
            ["dns-version"] => {
                let text = RData::TXT(TXT::new(vec![VERSION.into()]));
                found(name, (kind == RecordType::TXT).then_some(text))
            }
            ["ns", "dns"] | ["dns"] | ["svc"] | ["pod"] => nodata(),
            [namespace, "svc" | "pod"] => match cluster.has_namespace(namespace) {
                true => nodata(),
                false => Answer::NoSuchName,
            },
            [dashed, _, "pod"] => match undash(dashed) {
                Some(ip) => found(name, address(ip, kind)),
                None => Answer::NoSuchName,
            },
            [service, namespace, "svc"] => self.service(name, service, namespace, kind, cluster),
            [endpoint, service, namespace, "svc"] if !endpoint.starts_with('_') => {
                endpoint_records(name, endpoint, service, namespace, kind, cluster)
            }
            [protocol, service, namespace, "svc"] => {
                let known = cluster.service(namespace, service);
                let has = known.is_some_and(|s| ports_of(&s).iter().any(|p| p.is(None, protocol)));
                if has { nodata() } else { Answer::NoSuchName }
            }
            [port, protocol, service, namespace, "svc"] => {
                self.named_port(name, (port, protocol), (service, namespace), kind, cluster)
            }
            _ => Answer::NoSuchName,
        }
    }

    fn apex(&self, kind: RecordType) -> Records {
        let mut out = Records::default();
        match kind {
            RecordType::SOA => out.answers.push(self.soa()),
            RecordType::NS => {
                if let Some(server) = self.name("ns.dns") {
                    let data = RData::NS(NS(server));
                    out.answers.push(Record::from_rdata(self.origin.clone(), TTL, data));
                }
            }
            _ => {}
        }
        out
    }

    fn service(
        &self,
        name: &Name,
        service: &str,
        namespace: &str,
        kind: RecordType,
        cluster: &dyn Directory,
    ) -> Answer {
        let Some(object) = cluster.service(namespace, service) else { return Answer::NoSuchName };
        let Some(spec) = &object.spec else { return Answer::NoSuchName };
        if spec.type_.as_deref() == Some("ExternalName") {
            let target = spec.external_name.as_deref().unwrap_or_default().trim_end_matches('.');
            return match Name::from_ascii(format!("{target}.")) {
                Ok(target) => {
                    let data = RData::CNAME(CNAME(target.clone()));
                    Answer::Alias(Box::new(Record::from_rdata(name.clone(), TTL, data)), target)
                }
                Err(_) => Answer::NoSuchName,
            };
        }
        if kind == RecordType::SRV {
            return Answer::Found(self.srv(name, &object, None, cluster));
        }
        let ips = match cluster_ips(&object) {
            Some(ips) => ips,
            None => {
                let slices = cluster.slices(namespace, service);
                let mut ips: Vec<IpAddr> =
                    endpoints(&object, &slices).flat_map(|e| ips_of(e.1)).collect();
                ips.sort_unstable();
                ips.dedup();
                shuffle(&mut ips);
                ips
            }
        };
        Answer::Found(Records {
            answers: ips.into_iter().filter_map(|ip| record(name, address(ip, kind)?)).collect(),
            additionals: vec![],
        })
    }

    fn named_port(
        &self,
        name: &Name,
        (port, protocol): (&str, &str),
        (service, namespace): (&str, &str),
        kind: RecordType,
        cluster: &dyn Directory,
    ) -> Answer {
        let Some(object) = cluster.service(namespace, service) else { return Answer::NoSuchName };
        let (Some(port), true) = (port.strip_prefix('_'), protocol.starts_with('_')) else {
            return Answer::NoSuchName;
        };
        if !ports_of(&object).iter().any(|known| known.is(Some(port), protocol)) {
            return Answer::NoSuchName;
        }
        if kind != RecordType::SRV {
            return nodata();
        }
        Answer::Found(self.srv(name, &object, Some((port, protocol)), cluster))
    }

    /// The SRV records of all ports, or of one.
    fn srv(
        &self,
        name: &Name,
        object: &Service,
        only: Option<(&str, &str)>,
        cluster: &dyn Directory,
    ) -> Records {
        let meta = &object.metadata;
        let service = meta.name.as_deref().unwrap_or_default();
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let home = format!("{service}.{namespace}.svc");
        let wanted =
            |port: &Port| only.is_none_or(|(name, protocol)| port.is(Some(name), protocol));
        let mut targets: Vec<(u16, Name, Vec<IpAddr>)> = vec![];
        if let Some(ips) = cluster_ips(object) {
            let Some(target) = self.name(&home) else { return Records::default() };
            for port in ports_of(object).into_iter().filter(wanted) {
                targets.push((port.number, target.clone(), ips.clone()));
            }
        } else {
            let slices = cluster.slices(namespace, service);
            for (slice, endpoint) in endpoints(object, &slices) {
                let ips = ips_of(endpoint);
                let host = ips.first().map(|ip| endpoint_name(endpoint, *ip));
                let Some(target) = host.and_then(|host| self.name(&format!("{host}.{home}")))
                else {
                    continue;
                };
                for port in slice_ports(slice).into_iter().filter(wanted) {
                    targets.push((port.number, target.clone(), ips.clone()));
                }
            }
        }
        let weight = u16::try_from(100 / targets.len().max(1)).unwrap_or(1).max(1);
        let mut out = Records::default();
        for (port, target, ips) in targets {
            let data = RData::SRV(SRV::new(0, weight, port, target.clone()));
            out.answers.push(Record::from_rdata(name.clone(), TTL, data));
            for ip in ips {
                let kind = if ip.is_ipv4() { RecordType::A } else { RecordType::AAAA };
                let extra = address(ip, kind).and_then(|data| record(&target, data));
                out.additionals.extend(extra.filter(|r| !out.additionals.contains(r)));
            }
        }
        out
    }

    fn reverse(
        &self,
        name: &Name,
        ip: IpAddr,
        kind: RecordType,
        cluster: &dyn Directory,
    ) -> Answer {
        if !cluster.is_ready() {
            return Answer::Elsewhere;
        }
        let mut names = vec![];
        for service in cluster.services_at(ip) {
            let meta = &service.metadata;
            let (Some(service), Some(namespace)) = (&meta.name, &meta.namespace) else { continue };
            names.extend(self.name(&format!("{service}.{namespace}.svc")));
        }
        if names.is_empty() {
            for slice in cluster.slices_at(ip) {
                let Some(home) = service_of(&slice) else { continue };
                let Some((namespace, service)) = home.split_once('/') else { continue };
                for endpoint in slice.endpoints.iter().flatten().filter(|e| ips_of(e).contains(&ip))
                {
                    let host = endpoint_name(endpoint, ip);
                    names.extend(self.name(&format!("{host}.{service}.{namespace}.svc")));
                }
            }
        }
        if names.is_empty() {
            // Addresses outside of the cluster have names in other zones.
            return Answer::Elsewhere;
        }
        if kind != RecordType::PTR {
            return nodata();
        }
        let records = names.into_iter().filter_map(|target| record(name, RData::PTR(PTR(target))));
        Answer::Found(Records { answers: records.collect(), additionals: vec![] })
    }
}

fn nodata() -> Answer {
    Answer::Found(Records::default())
}

fn found(name: &Name, data: Option<RData>) -> Answer {
    let answers = data.and_then(|data| record(name, data)).into_iter().collect();
    Answer::Found(Records { answers, additionals: vec![] })
}

fn record(name: &Name, data: RData) -> Option<Record> {
    Some(Record::from_rdata(name.clone(), TTL, data))
}

/// The address as a record of that type, if its family fits.
fn address(ip: IpAddr, kind: RecordType) -> Option<RData> {
    match (ip, kind) {
        (IpAddr::V4(ip), RecordType::A | RecordType::ANY) => Some(RData::A(A(ip))),
        (IpAddr::V6(ip), RecordType::AAAA | RecordType::ANY) => Some(RData::AAAA(AAAA(ip))),
        _ => None,
    }
}

/// Randomizes the order, so that the load is spread over equal endpoints.
fn shuffle(ips: &mut [IpAddr]) {
    for at in (1..ips.len()).rev() {
        ips.swap(at, base::rng::below(at as u64 + 1) as usize);
    }
}

struct Port {
    name: String,
    protocol: String,
    number: u16,
}

impl Port {
    /// `protocol` has its underscore; `None` matches any port name.
    fn is(&self, name: Option<&str>, protocol: &str) -> bool {
        let own = self.protocol.to_lowercase();
        name.is_none_or(|name| name == self.name) && protocol.strip_prefix('_') == Some(&own)
    }
}

fn port(name: Option<&String>, protocol: Option<&String>, number: i32) -> Option<Port> {
    Some(Port {
        name: name.cloned().unwrap_or_default(),
        protocol: protocol.cloned().unwrap_or_else(|| "TCP".into()),
        number: u16::try_from(number).ok()?,
    })
}

fn ports_of(service: &Service) -> Vec<Port> {
    let ports = service.spec.iter().flat_map(|s| s.ports.iter().flatten());
    ports.filter_map(|p| port(p.name.as_ref(), p.protocol.as_ref(), p.port)).collect()
}

fn slice_ports(slice: &EndpointSlice) -> Vec<Port> {
    let ports = slice.ports.iter().flatten();
    ports.filter_map(|p| port(p.name.as_ref(), p.protocol.as_ref(), p.port?)).collect()
}

/// `None` for a headless Service.
fn cluster_ips(service: &Service) -> Option<Vec<IpAddr>> {
    let spec = service.spec.as_ref()?;
    let mut texts: Vec<&String> = spec.cluster_ips.iter().flatten().collect();
    if texts.is_empty() {
        texts.extend(&spec.cluster_ip);
    }
    let ips: Vec<IpAddr> = texts.iter().filter_map(|text| text.parse().ok()).collect();
    (!ips.is_empty()).then_some(ips)
}

/// The endpoints with records: ready ones, or all with `publishNotReadyAddresses`.
fn endpoints<'a>(
    service: &Service,
    slices: &'a [Arc<EndpointSlice>],
) -> impl Iterator<Item = (&'a EndpointSlice, &'a Endpoint)> {
    let all = service.spec.as_ref().and_then(|s| s.publish_not_ready_addresses) == Some(true);
    slices
        .iter()
        .flat_map(|slice| slice.endpoints.iter().flatten().map(move |e| (slice.as_ref(), e)))
        .filter(move |(_, endpoint)| {
            all || endpoint.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true)
        })
}

fn ips_of(endpoint: &Endpoint) -> Vec<IpAddr> {
    endpoint.addresses.iter().filter_map(|address| address.parse().ok()).collect()
}

/// The endpoint's hostname, else its address with dashes.
fn endpoint_name(endpoint: &Endpoint, ip: IpAddr) -> String {
    match endpoint.hostname.as_deref() {
        Some(hostname) if !hostname.is_empty() => hostname.to_lowercase(),
        _ => dashed(ip),
    }
}

fn dashed(ip: IpAddr) -> String {
    ip.to_string().replace(['.', ':'], "-")
}

/// The inverse of [`dashed`].
fn undash(label: &str) -> Option<IpAddr> {
    let v4 = label.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
    v4.or_else(|_| label.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6)).ok()
}

fn endpoint_records(
    name: &Name,
    host: &str,
    service: &str,
    namespace: &str,
    kind: RecordType,
    cluster: &dyn Directory,
) -> Answer {
    let Some(object) = cluster.service(namespace, service) else { return Answer::NoSuchName };
    if cluster_ips(&object).is_some() {
        return Answer::NoSuchName;
    }
    let slices = cluster.slices(namespace, service);
    let mut ips = vec![];
    for (_, endpoint) in endpoints(&object, &slices) {
        ips.extend(ips_of(endpoint).into_iter().filter(|ip| endpoint_name(endpoint, *ip) == host));
    }
    if ips.is_empty() {
        return Answer::NoSuchName;
    }
    let answers = ips.into_iter().filter_map(|ip| record(name, address(ip, kind)?)).collect();
    Answer::Found(Records { answers, additionals: vec![] })
}

/// `4.3.2.1.in-addr.arpa` → 1.2.3.4, and the nibbles of ip6.arpa.
fn reverse_address(text: &str) -> Option<IpAddr> {
    if let Some(octets) = text.strip_suffix(".in-addr.arpa") {
        let parts: Vec<u8> = octets.split('.').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [d, c, b, a] = parts.try_into().ok()?;
        return Some(Ipv4Addr::new(a, b, c, d).into());
    }
    let nibbles = text.strip_suffix(".ip6.arpa")?;
    let digits: Vec<&str> = nibbles.split('.').collect();
    if digits.len() != 32 || digits.iter().any(|digit| digit.len() != 1) {
        return None;
    }
    let hex: String = digits.into_iter().rev().collect();
    Some(Ipv6Addr::from(u128::from_str_radix(&hex, 16).ok()?).into())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[derive(Default)]
    pub(crate) struct Fixed {
        pub services: Vec<Arc<Service>>,
        pub slices: Vec<Arc<EndpointSlice>>,
        pub cold: bool,
    }

    impl Directory for Fixed {
        fn is_ready(&self) -> bool {
            !self.cold
        }

        fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
            let is = |s: &&Arc<Service>| {
                s.metadata.name.as_deref() == Some(name)
                    && s.metadata.namespace.as_deref() == Some(namespace)
            };
            self.services.iter().find(is).cloned()
        }

        fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>> {
            let of = format!("{namespace}/{service}");
            self.slices.iter().filter(|s| service_of(s).as_ref() == Some(&of)).cloned().collect()
        }

        fn services_at(&self, ip: IpAddr) -> Vec<Arc<Service>> {
            let has = |s: &&Arc<Service>| cluster_ips(s).is_some_and(|ips| ips.contains(&ip));
            self.services.iter().filter(has).cloned().collect()
        }

        fn slices_at(&self, ip: IpAddr) -> Vec<Arc<EndpointSlice>> {
            let has = |s: &&Arc<EndpointSlice>| {
                s.endpoints.iter().flatten().any(|e| ips_of(e).contains(&ip))
            };
            self.slices.iter().filter(has).cloned().collect()
        }

        fn has_namespace(&self, namespace: &str) -> bool {
            self.services.iter().any(|s| s.metadata.namespace.as_deref() == Some(namespace))
        }
    }

    pub(crate) fn cluster() -> Fixed {
        let service = |name: &str, spec: Value| {
            let object = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec});
            Arc::new(serde_json::from_value(object).expect("a service"))
        };
        let ports = json!([{"name": "http", "port": 80, "protocol": "TCP"}]);
        let slice = json!({"metadata": {"name": "db-1", "namespace": "ns",
            "labels": {"kubernetes.io/service-name": "db"}}, "addressType": "IPv4",
            "ports": [{"name": "sql", "port": 5432, "protocol": "TCP"}],
            "endpoints": [
                {"addresses": ["10.42.0.5"], "hostname": "db-0", "conditions": {"ready": true}},
                {"addresses": ["10.42.0.6"], "conditions": {"ready": true}},
                {"addresses": ["10.42.0.7"], "hostname": "db-2", "conditions": {"ready": false}}]});
        Fixed {
            services: vec![
                service(
                    "web",
                    json!({"clusterIP": "10.43.0.9", "clusterIPs": ["10.43.0.9", "fd00::9"], "ports": ports}),
                ),
                service(
                    "db",
                    json!({"clusterIP": "None", "ports": [{"name": "sql", "port": 5432}]}),
                ),
                service("empty", json!({"clusterIP": "None"})),
                service("out", json!({"type": "ExternalName", "externalName": "example.com"})),
            ],
            slices: vec![Arc::new(serde_json::from_value(slice).expect("a slice"))],
            cold: false,
        }
    }

    fn show(answer: Answer) -> String {
        match answer {
            Answer::NoSuchName => "NXDOMAIN".into(),
            Answer::NotReady => "SERVFAIL".into(),
            Answer::Elsewhere => "elsewhere".into(),
            Answer::Alias(_, target) => format!("alias {target}"),
            Answer::Found(records) if records.answers.is_empty() => "NODATA".into(),
            Answer::Found(records) => {
                let mut all: Vec<String> =
                    records.answers.iter().map(|r| r.data.to_string()).collect();
                all.sort();
                let extra: Vec<String> =
                    records.additionals.iter().map(|r| r.data.to_string()).collect();
                match extra.is_empty() {
                    true => all.join(", "),
                    false => format!("{} + {}", all.join(", "), extra.join(", ")),
                }
            }
        }
    }

    fn check(name: &str, kind: RecordType, expected: &str) {
        let zone = Zone::new("cluster.local").expect("a zone");
        let question = Name::from_ascii(name).expect("a name");
        assert_eq!(show(zone.answer(&question, kind, &cluster())), expected, "{name} {kind}");
    }

    use RecordType::{AAAA as V6, MX, PTR as Ptr, SRV as Srv, TXT as Txt};

    #[test]
    fn services_have_records() {
        check("web.ns.svc.cluster.local.", RecordType::A, "10.43.0.9");
        check("WEB.ns.svc.Cluster.Local.", RecordType::A, "10.43.0.9");
        check("web.ns.svc.cluster.local.", V6, "fd00::9");
        check("web.ns.svc.cluster.local.", MX, "NODATA");
        check("none.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("web.other.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("out.ns.svc.cluster.local.", RecordType::A, "alias example.com.");
        check(
            "_http._tcp.web.ns.svc.cluster.local.",
            Srv,
            "0 100 80 web.ns.svc.cluster.local. + 10.43.0.9, fd00::9",
        );
        check("_nope._tcp.web.ns.svc.cluster.local.", Srv, "NXDOMAIN");
        check("_http._udp.web.ns.svc.cluster.local.", Srv, "NXDOMAIN");
        check("_tcp.web.ns.svc.cluster.local.", RecordType::A, "NODATA");
    }

    #[test]
    fn headless_services_have_endpoint_records() {
        check("db.ns.svc.cluster.local.", RecordType::A, "10.42.0.5, 10.42.0.6");
        check("db.ns.svc.cluster.local.", V6, "NODATA");
        check("empty.ns.svc.cluster.local.", RecordType::A, "NODATA");
        check("db-0.db.ns.svc.cluster.local.", RecordType::A, "10.42.0.5");
        check("10-42-0-6.db.ns.svc.cluster.local.", RecordType::A, "10.42.0.6");
        check("db-2.db.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("x.web.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check(
            "_sql._tcp.db.ns.svc.cluster.local.",
            Srv,
            "0 50 5432 10-42-0-6.db.ns.svc.cluster.local., 0 50 5432 db-0.db.ns.svc.cluster.local. \
             + 10.42.0.5, 10.42.0.6",
        );
    }

    #[test]
    fn pods_reverse_names_and_missing_names() {
        check("cluster.local.", RecordType::A, "NODATA");
        check("svc.cluster.local.", RecordType::A, "NODATA");
        check("ns.svc.cluster.local.", RecordType::A, "NODATA");
        check("nons.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("foo.cluster.local.", RecordType::A, "NXDOMAIN");
        check("dns-version.cluster.local.", Txt, "1.1.0");
        check("10-42-0-5.ns.pod.cluster.local.", RecordType::A, "10.42.0.5");
        check("fd00--5.ns.pod.cluster.local.", V6, "fd00::5");
        check("word.ns.pod.cluster.local.", RecordType::A, "NXDOMAIN");
        check("9.0.43.10.in-addr.arpa.", Ptr, "web.ns.svc.cluster.local.");
        check("5.0.42.10.in-addr.arpa.", Ptr, "db-0.db.ns.svc.cluster.local.");
        check("1.1.1.1.in-addr.arpa.", Ptr, "elsewhere");
        check("example.com.", RecordType::A, "elsewhere");
        check("notcluster.local.", RecordType::A, "elsewhere");
    }

    #[test]
    fn a_zone_before_its_sync_is_not_ready() {
        let zone = Zone::new("cluster.local").expect("a zone");
        let cold = Fixed { cold: true, ..cluster() };
        let name = Name::from_ascii("web.ns.svc.cluster.local.").expect("a name");
        assert_eq!(zone.answer(&name, RecordType::A, &cold), Answer::NotReady);
    }
}
