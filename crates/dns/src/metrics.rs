//! Counters under CoreDNS' names, so that its dashboards and alerts work.
//!
//! In: what each part did. Out: a page in Prometheus' text format. Upstream: CoreDNS 1.12, plugins `prometheus`,
//! `cache`, `forward`, `hosts`, `reload`.
//! Invariant: the number of series is bounded by zones of the settings, servers of the settings and kinds of
//! messages; nothing that a client sends becomes a label as it is. One lock and a few additions for a query.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::Histogram;

use crate::cache::Counts;
use crate::wire::Query;

/// CoreDNS' server block of the usual Corefile.
const SERVER: &str = "dns://:53";
/// CoreDNS' zone of packets that are no queries.
const DROPPED: &str = "dropped";

const TIMES: [f64; 16] = [
    0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024,
    2.048, 4.096, 8.192,
];
const SIZES: [f64; 14] = [
    0.0, 100.0, 200.0, 300.0, 400.0, 511.0, 1023.0, 2047.0, 4095.0, 8291.0, 16e3, 32e3, 48e3, 64e3,
];

pub struct Metrics {
    /// Guards all counters; held for a few additions, or for writing the page.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    zones: HashMap<Arc<str>, Zone>,
    servers: BTreeMap<SocketAddr, Server>,
    malformed: BTreeMap<&'static str, u64>,
    plain: Plain,
}

#[derive(Default)]
struct Plain {
    limited: u64,
    rejected: u64,
    all_down: u64,
    prefetched: u64,
    stale: u64,
    lookups: u64,
    misses: u64,
    hosts: usize,
    reload_failures: u64,
    reloaded: i64,
}

struct Zone {
    /// By protocol, family, type.
    requests: BTreeMap<(&'static str, u8, &'static str), u64>,
    /// By code and plugin.
    responses: BTreeMap<(&'static str, &'static str), u64>,
    dnssec: u64,
    seconds: Histogram<16>,
    /// By protocol: UDP, TCP.
    request_bytes: [Histogram<14>; 2],
    response_bytes: [Histogram<14>; 2],
}

#[derive(Default)]
struct Server {
    /// By code.
    seconds: BTreeMap<&'static str, Histogram<16>>,
    failures: u64,
}

/// One answer to a client.
pub struct Served<'a> {
    pub zone: &'a Arc<str>,
    pub query: &'a Query,
    pub is_ipv6: bool,
    pub code: u16,
    pub size: usize,
    /// CoreDNS' plugin that would have answered.
    pub plugin: &'static str,
    pub took: Duration,
}

impl Metrics {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default() })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    pub fn served(&self, served: &Served<'_>) {
        let query = served.query;
        let (protocol, slot) = if query.by_tcp { ("tcp", 1) } else { ("udp", 0) };
        let mut state = self.state();
        if !state.zones.contains_key(served.zone) {
            state.zones.insert(served.zone.clone(), Zone::new());
        }
        let Some(zone) = state.zones.get_mut(served.zone) else { return };
        let family = if served.is_ipv6 { 2 } else { 1 };
        *zone.requests.entry((protocol, family, type_name(query.kind))).or_default() += 1;
        *zone.responses.entry((code_name(served.code), served.plugin)).or_default() += 1;
        zone.dnssec += u64::from(query.edns.is_some_and(|edns| edns.dnssec));
        zone.seconds.observe(served.took.as_secs_f64());
        zone.request_bytes[slot].observe(query.length as f64);
        zone.response_bytes[slot].observe(served.size as f64);
    }

    pub fn malformed(&self, is_answered: bool) {
        let code = if is_answered { "FORMERR" } else { "" };
        *self.state().malformed.entry(code).or_default() += 1;
    }

    /// A client asked too often.
    pub fn limited(&self) {
        self.state().plain.limited += 1;
    }

    pub fn looked_up(&self, hit: bool) {
        let plain = &mut self.state().plain;
        plain.lookups += 1;
        plain.misses += u64::from(!hit);
    }

    pub fn prefetched(&self) {
        self.state().plain.prefetched += 1;
    }

    pub fn served_stale(&self) {
        self.state().plain.stale += 1;
    }

    pub fn rejected(&self) {
        self.state().plain.rejected += 1;
    }

    pub fn all_servers_down(&self) {
        self.state().plain.all_down += 1;
    }

    pub fn forwarded(&self, server: SocketAddr, code: u16, took: Duration) {
        let mut state = self.state();
        let times = &mut state.servers.entry(server).or_default().seconds;
        let times = times.entry(code_name(code)).or_insert_with(|| Histogram::new(&TIMES));
        times.observe(took.as_secs_f64());
    }

    pub fn failed(&self, server: SocketAddr) {
        self.state().servers.entry(server).or_default().failures += 1;
    }

    /// New settings: what they do not name loses its series.
    pub fn reloaded(&self, zones: &[Arc<str>], servers: &[SocketAddr], hosts: usize, failed: bool) {
        let mut state = self.state();
        state.zones.retain(|zone, _| zones.contains(zone));
        state.servers.retain(|server, _| servers.contains(server));
        state.plain.hosts = hosts;
        state.plain.reload_failures += u64::from(failed);
        state.plain.reloaded = base::clock::now().as_second();
    }

    pub fn page(&self, cache: [Counts; 2]) -> String {
        let mut out = String::with_capacity(16 << 10);
        let state = self.state();
        let _ = writeln!(
            out,
            "# TYPE coredns_build_info gauge\n\
             coredns_build_info{{goversion=\"\",revision=\"\",version=\"decapod-{}\"}} 1",
            env!("CARGO_PKG_VERSION")
        );
        write_requests(&mut out, &state);
        write_cache(&mut out, &state.plain, cache);
        write_servers(&mut out, &state);
        let plain = &state.plain;
        let counter = "counter";
        for (name, kind, value) in [
            ("coredns_panics_total", counter, 0),
            ("coredns_forward_max_concurrent_rejects_total", counter, plain.rejected),
            ("coredns_forward_healthcheck_broken_total", counter, plain.all_down),
            ("coredns_hosts_entries", "gauge", plain.hosts as u64),
            ("coredns_hosts_reload_timestamp_seconds", "gauge", plain.reloaded.unsigned_abs()),
            ("coredns_reload_failed_total", counter, plain.reload_failures),
            ("decapod_dns_rate_limited_total", counter, plain.limited),
        ] {
            let _ = writeln!(out, "# TYPE {name} {kind}\n{name} {value}");
        }
        out
    }
}

fn write_requests(out: &mut String, state: &State) {
    let mut zones: Vec<(&Arc<str>, &Zone)> = state.zones.iter().collect();
    zones.sort_unstable_by_key(|(name, _)| *name);
    let base = |zone: &str| format!("server=\"{SERVER}\",view=\"\",zone=\"{zone}\"");
    let _ = writeln!(out, "# TYPE coredns_dns_requests_total counter");
    for (name, zone) in &zones {
        for ((protocol, family, kind), count) in &zone.requests {
            let base = base(name);
            let own = format!("family=\"{family}\",proto=\"{protocol}\",{base},type=\"{kind}\"");
            let _ = writeln!(out, "coredns_dns_requests_total{{{own}}} {count}");
        }
    }
    let _ = writeln!(out, "# TYPE coredns_dns_responses_total counter");
    for (name, zone) in &zones {
        for ((code, plugin), count) in &zone.responses {
            let own = format!("plugin=\"{plugin}\",rcode=\"{code}\",{}", base(name));
            let _ = writeln!(out, "coredns_dns_responses_total{{{own}}} {count}");
        }
    }
    for (code, count) in &state.malformed {
        let own = format!("plugin=\"\",rcode=\"{code}\",{}", base(DROPPED));
        let _ = writeln!(out, "coredns_dns_responses_total{{{own}}} {count}");
    }
    let _ = writeln!(out, "# TYPE coredns_dns_do_requests_total counter");
    for (name, zone) in &zones {
        let _ = writeln!(out, "coredns_dns_do_requests_total{{{}}} {}", base(name), zone.dnssec);
    }
    let family = "coredns_dns_request_duration_seconds";
    let _ = writeln!(out, "# TYPE {family} histogram");
    for (name, zone) in &zones {
        zone.seconds.write(out, family, &base(name));
    }
    type Sizes = fn(&Zone) -> &[Histogram<14>; 2];
    let (requests, responses): (Sizes, Sizes) = (|z| &z.request_bytes, |z| &z.response_bytes);
    for (family, sizes) in [
        ("coredns_dns_request_size_bytes", requests),
        ("coredns_dns_response_size_bytes", responses),
    ] {
        let _ = writeln!(out, "# TYPE {family} histogram");
        for (name, zone) in &zones {
            for (protocol, histogram) in ["udp", "tcp"].iter().zip(sizes(zone)) {
                histogram.write(out, family, &format!("proto=\"{protocol}\",{}", base(name)));
            }
        }
    }
}

fn write_cache(out: &mut String, plain: &Plain, cache: [Counts; 2]) {
    let base = format!("server=\"{SERVER}\",view=\"\",zones=\".\"");
    type Of = fn(&Counts) -> u64;
    let families: [(&str, &str, Of); 3] = [
        ("coredns_cache_entries", "gauge", |counts| counts.entries as u64),
        ("coredns_cache_hits_total", "counter", |counts| counts.hits),
        ("coredns_cache_evictions_total", "counter", |counts| counts.evictions),
    ];
    for (name, kind, of) in families {
        let _ = writeln!(out, "# TYPE {name} {kind}");
        for (which, counts) in ["success", "denial"].iter().zip(&cache) {
            let _ = writeln!(out, "{name}{{type=\"{which}\",{base}}} {}", of(counts));
        }
    }
    for (name, value) in [
        ("coredns_cache_requests_total", plain.lookups),
        ("coredns_cache_misses_total", plain.misses),
        ("coredns_cache_prefetch_total", plain.prefetched),
        ("coredns_cache_served_stale_total", plain.stale),
    ] {
        let _ = writeln!(out, "# TYPE {name} counter\n{name}{{{base}}} {value}");
    }
}

fn write_servers(out: &mut String, state: &State) {
    let family = "coredns_proxy_request_duration_seconds";
    let _ = writeln!(out, "# TYPE {family} histogram");
    for (server, facts) in &state.servers {
        for (code, seconds) in &facts.seconds {
            let own = format!("proxy_name=\"forward\",rcode=\"{code}\",to=\"{server}\"");
            seconds.write(out, family, &own);
        }
    }
    let family = "coredns_proxy_healthcheck_failures_total";
    let _ = writeln!(out, "# TYPE {family} counter");
    for (server, facts) in &state.servers {
        let own = format!("proxy_name=\"forward\",to=\"{server}\"");
        let _ = writeln!(out, "{family}{{{own}}} {}", facts.failures);
    }
}

impl Zone {
    fn new() -> Self {
        Self {
            requests: BTreeMap::new(),
            responses: BTreeMap::new(),
            dnssec: 0,
            seconds: Histogram::new(&TIMES),
            request_bytes: [Histogram::new(&SIZES); 2],
            response_bytes: [Histogram::new(&SIZES); 2],
        }
    }
}

/// As CoreDNS labels it.
pub fn type_name(kind: u16) -> &'static str {
    match kind {
        1 => "A",
        2 => "NS",
        5 => "CNAME",
        6 => "SOA",
        12 => "PTR",
        15 => "MX",
        16 => "TXT",
        28 => "AAAA",
        33 => "SRV",
        43 => "DS",
        46 => "RRSIG",
        47 => "NSEC",
        48 => "DNSKEY",
        50 => "NSEC3",
        65 => "HTTPS",
        251 => "IXFR",
        252 => "AXFR",
        255 => "ANY",
        _ => "other",
    }
}

pub fn code_name(code: u16) -> &'static str {
    match code {
        0 => "NOERROR",
        1 => "FORMERR",
        2 => "SERVFAIL",
        3 => "NXDOMAIN",
        4 => "NOTIMP",
        5 => "REFUSED",
        16 => "BADVERS",
        _ => "other",
    }
}
