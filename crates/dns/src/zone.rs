//! The cluster's zone: the records of a name.
//!
//! ```text
//! <svc>.<ns>.svc.<zone>                 A, AAAA, SRV; CNAME for ExternalName
//! _<port>._<proto>.<svc>.<ns>.svc.<zone>  SRV, A, AAAA
//! <endpoint>.<svc>.<ns>.svc.<zone>      A, AAAA, SRV of one endpoint
//! <a-b-c-d>.<ns>.pod.<zone>             A, AAAA: the address in the name
//! dns-version.<zone>                    TXT
//! ns.dns.<zone>                         A, AAAA: this server
//! <d.c.b.a>.in-addr.arpa                PTR
//! ```
//!
//! In: a name, a type, a [`Directory`]. Out: [`Answer`]. Pure. Costs the addresses of the answer.
//! NODATA (a name without records of that type) and NXDOMAIN (no such name) differ: resolvers end
//! their search at NODATA and continue at NXDOMAIN. Upstream: the DNS specification 1.1.0, and CoreDNS'
//! `kubernetes` where that says nothing: a headless Service without ready endpoints is NXDOMAIN, endpoints of
//! any Service have names, a name of a port has addresses too, with and without underscores.
//! Deviation: names between others (`dns`, `_tcp` below a Service, `dns-version` for other types) are NODATA
//! (RFC 8020) where CoreDNS says NXDOMAIN; an ExternalName whose target does not exist is NXDOMAIN with its
//! CNAME, where CoreDNS says NODATA.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use hickory_proto::rr::rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};

use crate::directory::{Directory, EndpointFacts, Port, ServiceFacts, SliceFacts, Target};

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
    /// An alias to a name: the server must resolve the target and add its records.
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
    /// The addresses of this server.
    servers: Vec<IpAddr>,
}

/// A question, and the name that its records have: with `rewrite` they differ.
struct Asked<'a> {
    owner: &'a Name,
    kind: RecordType,
    cluster: &'a dyn Directory,
}

impl Zone {
    pub fn new(domain: &str, servers: Vec<IpAddr>) -> Option<Self> {
        let origin = Name::from_ascii(format!("{domain}.")).ok()?;
        Some(Self { origin, domain: domain.to_string(), servers })
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

    /// Whether the zone may have the name: it is below the domain, or an address. Costs no look-up.
    pub fn concerns(&self, text: &str) -> bool {
        text.ends_with(self.domain.as_str()) || text.ends_with(".arpa")
    }

    /// `text` is the name to look up, in lower case, without its last dot. Records belong to `owner`.
    pub fn answer(
        &self,
        owner: &Name,
        text: &str,
        kind: RecordType,
        cluster: &dyn Directory,
    ) -> Answer {
        let asked = Asked { owner, kind, cluster };
        if let Some(ip) = reverse_address(text) {
            return self.reverse(&asked, ip);
        }
        let below = match text.strip_suffix(self.domain.as_str()) {
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
                found(owner, (kind == RecordType::TXT).then_some(text))
            }
            ["ns", "dns"] => asked.addresses(self.servers.iter().copied()),
            ["dns"] | ["svc"] | ["pod"] => nodata(),
            [namespace, "svc" | "pod"] => match cluster.has_namespace(namespace) {
                true => nodata(),
                false => Answer::NoSuchName,
            },
            [dashed, namespace, "pod"] => match undash(dashed) {
                Some(ip) if cluster.has_namespace(namespace) => found(owner, address(ip, kind)),
                _ => Answer::NoSuchName,
            },
            [service, namespace, "svc"] => self.service(&asked, service, namespace),
            [protocol, service, namespace, "svc"] if protocol.starts_with('_') => {
                let known = cluster.service(namespace, service);
                let has = known.is_some_and(|s| s.ports.iter().any(|p| is_port(p, None, protocol)));
                if has { nodata() } else { Answer::NoSuchName }
            }
            [endpoint, service, namespace, "svc"] => {
                self.endpoint(&asked, endpoint, (service, namespace))
            }
            [port, protocol, service, namespace, "svc"] => {
                self.named_port(&asked, (port, protocol), (service, namespace))
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
                    let data = RData::NS(NS(server.clone()));
                    out.answers.push(Record::from_rdata(self.origin.clone(), TTL, data));
                    out.additionals.extend(self.servers.iter().map(|ip| glue(&server, *ip)));
                }
            }
            _ => {}
        }
        out
    }

    fn service(&self, asked: &Asked<'_>, service: &str, namespace: &str) -> Answer {
        let Some(object) = asked.cluster.service(namespace, service) else {
            return Answer::NoSuchName;
        };
        match &object.target {
            // An address is no name; upstream has no record for it either.
            Target::Name(target) if target.parse::<IpAddr>().is_ok() => Answer::NoSuchName,
            Target::Name(target) => match Name::from_ascii(format!("{target}.")) {
                Ok(target) => {
                    let data = RData::CNAME(CNAME(target.clone()));
                    let record = Record::from_rdata(asked.owner.clone(), TTL, data);
                    Answer::Alias(Box::new(record), target)
                }
                Err(_) => Answer::NoSuchName,
            },
            Target::Addresses(_) if asked.kind == RecordType::SRV => {
                Answer::Found(self.srv(asked, &object, None))
            }
            Target::Addresses(ips) => asked.addresses(ips.iter().copied()),
            Target::Headless => self.endpoints(asked, &object, |_, _| true, None),
        }
    }

    /// One endpoint by its name; also of a Service with an address.
    fn endpoint(
        &self,
        asked: &Asked<'_>,
        host: &str,
        (service, namespace): (&str, &str),
    ) -> Answer {
        let Some(object) = asked.cluster.service(namespace, service) else {
            return Answer::NoSuchName;
        };
        let is = |endpoint: &EndpointFacts, ip| endpoint_name(endpoint, ip) == host;
        match object.target {
            Target::Name(_) => Answer::NoSuchName,
            _ => self.endpoints(asked, &object, is, None),
        }
    }

    fn named_port(
        &self,
        asked: &Asked<'_>,
        (port, protocol): (&str, &str),
        (service, namespace): (&str, &str),
    ) -> Answer {
        let Some(object) = asked.cluster.service(namespace, service) else {
            return Answer::NoSuchName;
        };
        let only = Some((port.strip_prefix('_').unwrap_or(port), protocol));
        match &object.target {
            Target::Name(_) => Answer::NoSuchName,
            Target::Headless => self.endpoints(asked, &object, |_, _| true, only),
            Target::Addresses(_) if !object.ports.iter().any(|port| is_wanted(port, only)) => {
                Answer::NoSuchName
            }
            Target::Addresses(_) if asked.kind == RecordType::SRV => {
                Answer::Found(self.srv(asked, &object, only))
            }
            Target::Addresses(ips) => asked.addresses(ips.iter().copied()),
        }
    }

    /// The addresses, or the SRV records, of the endpoints that `is` selects.
    fn endpoints(
        &self,
        asked: &Asked<'_>,
        service: &ServiceFacts,
        is: impl Fn(&EndpointFacts, IpAddr) -> bool,
        only: Option<(&str, &str)>,
    ) -> Answer {
        let slices = asked.cluster.slices(&service.namespace, &service.name);
        let mut ips = vec![];
        let mut targets = vec![];
        for (slice, endpoint) in endpoints(service, &slices) {
            let ports = || slice.ports.iter().filter(|port| is_wanted(port, only));
            // A Service without ports has addresses all the same.
            if only.is_some() && ports().next().is_none() {
                continue;
            }
            for ip in endpoint.ips.iter().copied().filter(|ip| is(endpoint, *ip)) {
                ips.push(ip);
                targets.extend(ports().map(|port| (port.number, endpoint, ip)));
            }
        }
        if ips.is_empty() {
            return Answer::NoSuchName;
        }
        if asked.kind == RecordType::SRV {
            let home = format!("{}.{}.svc", service.name, service.namespace);
            let named = targets.into_iter().filter_map(|(port, endpoint, ip)| {
                let host = endpoint_name(endpoint, ip);
                Some((port, self.name(&format!("{host}.{home}"))?, ip))
            });
            return Answer::Found(srv_records(asked.owner, named.collect()));
        }
        ips.sort_unstable();
        ips.dedup();
        shuffle(&mut ips);
        asked.addresses(ips.into_iter())
    }

    /// The SRV records of all ports of a Service with an address, or of one.
    fn srv(&self, asked: &Asked<'_>, object: &ServiceFacts, only: Option<(&str, &str)>) -> Records {
        let home = format!("{}.{}.svc", object.name, object.namespace);
        let (Some(target), Target::Addresses(ips)) = (self.name(&home), &object.target) else {
            return Records::default();
        };
        let ports = object.ports.iter().filter(|port| is_wanted(port, only));
        let all = ports.flat_map(|p| ips.iter().map(|ip| (p.number, target.clone(), *ip)));
        srv_records(asked.owner, all.collect())
    }

    fn reverse(&self, asked: &Asked<'_>, ip: IpAddr) -> Answer {
        if !asked.cluster.is_ready() {
            return Answer::Elsewhere;
        }
        let mut names = vec![];
        if let Some(service) = asked.cluster.services_at(ip).first() {
            names.extend(self.name(&format!("{}.{}.svc", service.name, service.namespace)));
        } else {
            for slice in asked.cluster.slices_at(ip) {
                let home = format!("{}.{}.svc", slice.service, slice.namespace);
                for endpoint in slice.endpoints.iter().filter(|e| e.ips.contains(&ip)) {
                    let host = endpoint_name(endpoint, ip);
                    names.extend(self.name(&format!("{host}.{home}")));
                }
            }
        }
        names.sort();
        names.dedup();
        if names.is_empty() {
            // Addresses outside of the cluster have names in other zones.
            return Answer::Elsewhere;
        }
        if asked.kind != RecordType::PTR {
            return nodata();
        }
        let record = |target| Record::from_rdata(asked.owner.clone(), TTL, RData::PTR(PTR(target)));
        Answer::Found(Records {
            answers: names.into_iter().map(record).collect(),
            additionals: vec![],
        })
    }
}

impl Asked<'_> {
    fn addresses(&self, ips: impl Iterator<Item = IpAddr>) -> Answer {
        let data = ips.filter_map(|ip| address(ip, self.kind));
        let answers = data.map(|data| Record::from_rdata(self.owner.clone(), TTL, data));
        Answer::Found(Records { answers: answers.collect(), additionals: vec![] })
    }
}

/// Equal targets with equal ports are one record; each address of a target is one more.
fn srv_records(owner: &Name, targets: Vec<(u16, Name, IpAddr)>) -> Records {
    let weight = u16::try_from(100 / targets.len().max(1)).unwrap_or(1).max(1);
    let mut seen = std::collections::HashSet::new();
    let mut known = std::collections::HashSet::new();
    let mut out = Records::default();
    for (port, target, ip) in targets {
        if known.insert((target.clone(), ip)) {
            out.additionals.push(glue(&target, ip));
        }
        if seen.insert((target.clone(), port)) {
            let data = RData::SRV(SRV::new(0, weight, port, target));
            out.answers.push(Record::from_rdata(owner.clone(), TTL, data));
        }
    }
    out
}

fn nodata() -> Answer {
    Answer::Found(Records::default())
}

fn found(name: &Name, data: Option<RData>) -> Answer {
    let answers = data.map(|data| Record::from_rdata(name.clone(), TTL, data));
    Answer::Found(Records { answers: answers.into_iter().collect(), additionals: vec![] })
}

fn glue(name: &Name, ip: IpAddr) -> Record {
    let data = match ip {
        IpAddr::V4(ip) => RData::A(A(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
    };
    Record::from_rdata(name.clone(), TTL, data)
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

/// `None` matches any port name.
fn is_port(port: &Port, name: Option<&str>, protocol: &str) -> bool {
    let protocol = protocol.strip_prefix('_').unwrap_or(protocol);
    name.is_none_or(|name| name == &*port.name) && protocol == &*port.protocol
}

fn is_wanted(port: &Port, only: Option<(&str, &str)>) -> bool {
    only.is_none_or(|(name, protocol)| is_port(port, Some(name), protocol))
}

/// The endpoints with records: ready ones, or all with `publishNotReadyAddresses`.
fn endpoints<'a>(
    service: &ServiceFacts,
    slices: &'a [Arc<SliceFacts>],
) -> impl Iterator<Item = (&'a SliceFacts, &'a EndpointFacts)> {
    let all = service.publishes_not_ready;
    slices
        .iter()
        .flat_map(|slice| slice.endpoints.iter().map(move |endpoint| (slice.as_ref(), endpoint)))
        .filter(move |(_, endpoint)| all || endpoint.is_ready)
}

/// The endpoint's hostname, else its address with dashes.
fn endpoint_name(endpoint: &EndpointFacts, ip: IpAddr) -> String {
    endpoint.hostname.as_deref().map_or_else(|| dashed(ip), str::to_owned)
}

/// As upstream: a name must not end with a dash.
fn dashed(ip: IpAddr) -> String {
    let mut name = ip.to_string().replace(['.', ':'], "-");
    if name.ends_with('-') {
        name.push('0');
    }
    name
}

/// The inverse of [`dashed`].
fn undash(label: &str) -> Option<IpAddr> {
    let v4 = label.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
    v4.or_else(|_| label.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6)).ok()
}

/// `4.3.2.1.in-addr.arpa` → 1.2.3.4, and the nibbles of ip6.arpa.
pub fn reverse_address(text: &str) -> Option<IpAddr> {
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
    use k8s_openapi::api::core::v1::Service;
    use k8s_openapi::api::discovery::v1::EndpointSlice;
    use serde_json::{Value, json};

    #[derive(Default)]
    pub(crate) struct Fixed {
        pub services: Vec<Arc<ServiceFacts>>,
        pub slices: Vec<Arc<SliceFacts>>,
        pub cold: bool,
    }

    impl Directory for Fixed {
        fn is_ready(&self) -> bool {
            !self.cold
        }

        fn service(&self, namespace: &str, name: &str) -> Option<Arc<ServiceFacts>> {
            let is = |s: &&Arc<ServiceFacts>| &*s.name == name && &*s.namespace == namespace;
            self.services.iter().find(is).cloned()
        }

        fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<SliceFacts>> {
            let is = |s: &&Arc<SliceFacts>| &*s.service == service && &*s.namespace == namespace;
            self.slices.iter().filter(is).cloned().collect()
        }

        fn services_at(&self, ip: IpAddr) -> Vec<Arc<ServiceFacts>> {
            let has = |s: &&Arc<ServiceFacts>| match &s.target {
                Target::Addresses(ips) => ips.contains(&ip),
                _ => false,
            };
            self.services.iter().filter(has).cloned().collect()
        }

        fn slices_at(&self, ip: IpAddr) -> Vec<Arc<SliceFacts>> {
            let has = |s: &&Arc<SliceFacts>| s.endpoints.iter().any(|e| e.ips.contains(&ip));
            self.slices.iter().filter(has).cloned().collect()
        }

        fn has_namespace(&self, namespace: &str) -> bool {
            ["ns", "bare"].contains(&namespace)
        }
    }

    pub(crate) fn cluster() -> Fixed {
        let service = |name: &str, spec: Value| {
            let object = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec});
            let object: Service = serde_json::from_value(object).expect("a service");
            Arc::new(ServiceFacts::of(&object).expect("with a spec"))
        };
        let ports = json!([{"name": "http", "port": 80, "protocol": "TCP"}]);
        let slice = json!({"metadata": {"name": "db-1", "namespace": "ns",
            "labels": {"kubernetes.io/service-name": "db"}}, "addressType": "IPv4",
            "ports": [{"name": "sql", "port": 5432, "protocol": "TCP"}],
            "endpoints": [
                {"addresses": ["10.42.0.5"], "hostname": "db-0", "conditions": {"ready": true}},
                {"addresses": ["10.42.0.6"], "conditions": {"ready": true}},
                {"addresses": ["10.42.0.7"], "hostname": "db-2", "conditions": {"ready": false}}]});
        let slice_of = |object: Value| {
            let object: EndpointSlice = serde_json::from_value(object).expect("a slice");
            Arc::new(SliceFacts::of(&object).expect("of a Service"))
        };
        let web = json!({"metadata": {"name": "web-1", "namespace": "ns",
            "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["10.42.0.9"], "conditions": {"ready": true}}]});
        let portless = json!({"metadata": {"name": "bare-1", "namespace": "ns",
            "labels": {"kubernetes.io/service-name": "portless"}}, "addressType": "IPv6",
            "endpoints": [
                {"addresses": ["fd00::"], "conditions": {"ready": true}},
                {"addresses": ["fd00::8"], "conditions": {"ready": false}}]});
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
                service(
                    "in",
                    json!({"type": "ExternalName", "externalName": "web.ns.svc.cluster.local"}),
                ),
                service("stub", json!({"type": "ExternalName", "externalName": "db.corp.example"})),
                service("wrong", json!({"type": "ExternalName", "externalName": "10.0.0.1"})),
                service("portless", json!({"clusterIP": "None", "publishNotReadyAddresses": true})),
            ],
            slices: vec![slice_of(slice), slice_of(web), slice_of(portless)],
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

    fn zone() -> Zone {
        Zone::new("cluster.local", vec!["10.43.0.10".parse().expect("an address")]).expect("a zone")
    }

    fn check(name: &str, kind: RecordType, expected: &str) {
        let question = Name::from_ascii(name).expect("a name");
        let text = name.trim_end_matches('.').to_lowercase();
        let answer = zone().answer(&question, &text, kind, &cluster());
        assert_eq!(show(answer), expected, "{name} {kind}");
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
            "0 50 80 web.ns.svc.cluster.local. + 10.43.0.9, fd00::9",
        );
        check("_nope._tcp.web.ns.svc.cluster.local.", Srv, "NXDOMAIN");
        check("_http._udp.web.ns.svc.cluster.local.", Srv, "NXDOMAIN");
        check("_tcp.web.ns.svc.cluster.local.", RecordType::A, "NODATA");
        check("_http._tcp.web.ns.svc.cluster.local.", RecordType::A, "10.43.0.9");
        check("http.tcp.web.ns.svc.cluster.local.", RecordType::A, "10.43.0.9");
        check("in.ns.svc.cluster.local.", RecordType::A, "alias web.ns.svc.cluster.local.");
        check("wrong.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("x.out.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("*.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
    }

    #[test]
    fn headless_services_have_endpoint_records() {
        check("db.ns.svc.cluster.local.", RecordType::A, "10.42.0.5, 10.42.0.6");
        check("db.ns.svc.cluster.local.", V6, "NODATA");
        check("empty.ns.svc.cluster.local.", RecordType::A, "NXDOMAIN");
        check("portless.ns.svc.cluster.local.", V6, "fd00::, fd00::8");
        check("portless.ns.svc.cluster.local.", RecordType::A, "NODATA");
        check("portless.ns.svc.cluster.local.", Srv, "NODATA");
        check("fd00--0.portless.ns.svc.cluster.local.", V6, "fd00::");
        check("10-42-0-9.web.ns.svc.cluster.local.", RecordType::A, "10.42.0.9");
        check("_sql._tcp.db.ns.svc.cluster.local.", RecordType::A, "10.42.0.5, 10.42.0.6");
        check("_nope._tcp.db.ns.svc.cluster.local.", Srv, "NXDOMAIN");
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
        check("cluster.local.", RecordType::NS, "ns.dns.cluster.local. + 10.43.0.10");
        check("ns.dns.cluster.local.", RecordType::A, "10.43.0.10");
        check("ns.dns.cluster.local.", V6, "NODATA");
        check("bare.pod.cluster.local.", RecordType::A, "NODATA");
        check("10-42-0-5.nons.pod.cluster.local.", RecordType::A, "NXDOMAIN");
        check("10-42-0-5.bare.pod.cluster.local.", V6, "NODATA");
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
        check("9.0.43.10.in-addr.arpa.", RecordType::A, "NODATA");
        let nine = format!("9.{}d.f.ip6.arpa.", "0.".repeat(27) + "0.0.");
        check(&nine, Ptr, "web.ns.svc.cluster.local.");
        check("1.1.1.1.in-addr.arpa.", Ptr, "elsewhere");
        check("example.com.", RecordType::A, "elsewhere");
        check("notcluster.local.", RecordType::A, "elsewhere");
    }

    #[test]
    fn a_zone_before_its_sync_is_not_ready() {
        let cold = Fixed { cold: true, ..cluster() };
        let name = Name::from_ascii("web.ns.svc.cluster.local.").expect("a name");
        let text = "web.ns.svc.cluster.local";
        assert_eq!(zone().answer(&name, text, RecordType::A, &cold), Answer::NotReady);
    }
}
