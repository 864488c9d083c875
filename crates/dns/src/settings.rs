//! The settings of the ConfigMap `kube-system/coredns-custom`, as a plan of zones and servers.
//!
//! ```text
//! NAME.server     blocks for zones: stub domains, servers for a zone, hosts
//! NAME.override   more plugins for all other names: forward, hosts, rewrite, log, cache
//! NodeHosts       lines of names and addresses for all zones (also: hosts)
//! ```
//!
//! In: the ConfigMap's data, the node's resolvers. Out: a [`Plan`] and complaints. Pure.
//! Upstream: k3s mounts this ConfigMap beside its Corefile, which imports the files; CoreDNS' plugins.
//! Deviation: the plugins `forward`, `hosts`, `rewrite name`, `cache` and `log` are understood, and those without
//! effect here are accepted; all else is a complaint. CoreDNS refuses the whole configuration for one wrong
//! line; here a line that is not understood changes nothing else, and a file with a syntax error is left out.
//! `hosts` in an override always falls through, and all zones have a cache.
//! Invariants: the cluster's zone belongs to the cluster; names of a zone whose servers are not understood are
//! SERVFAIL and do not leak to others.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use crate::cache::Limits;
use crate::corefile::{self, Directive};
use crate::forward::{Forward, Policy, Settings, read_resolvers};
use crate::hosts::{Hosts, is_below_any};
use crate::resolve::Source;
use crate::rewrite::Rewrite;
use crate::wire::{Wire, ancestors, from_text, text};

/// Plugins that change nothing here: what they do is always done, or is not needed.
const WITHOUT_EFFECT: [&str; 15] = [
    "errors",
    "loadbalance",
    "reload",
    "loop",
    "ready",
    "health",
    "prometheus",
    "cancel",
    "bufsize",
    "debug",
    "pprof",
    "metadata",
    "local",
    "multisocket",
    "timeouts",
];
const NODE_HOSTS_TTL: u32 = 60;

/// What the node brings itself.
#[derive(Clone, Debug)]
pub struct Base {
    /// `cluster.local`
    pub domain: String,
    /// The servers for all names without a zone of their own.
    pub servers: Vec<SocketAddr>,
    /// This server: forwarding to it would never end.
    pub own: Vec<SocketAddr>,
}

/// The source of answers for each name.
pub struct Plan {
    zones: HashMap<Wire, Arc<Block>>,
    rest: Arc<Block>,
}

/// One server block.
pub struct Block {
    /// As metrics name it: `.`, `example.com.`
    pub zone: Arc<str>,
    /// It has the cluster's zone.
    pub is_rest: bool,
    pub rewrites: Vec<Rewrite>,
    pub hosts: Vec<Hosts>,
    pub log: bool,
    routes: Vec<Route>,
}

struct Route {
    from: Wire,
    except: Vec<Wire>,
    source: Arc<Source>,
}

impl Plan {
    /// Costs the lines of the settings; they are read at a change only.
    pub fn new(data: &BTreeMap<String, String>, base: &Base) -> (Self, Vec<String>) {
        let mut reader = Reader { data, base, file: String::new(), complaints: vec![] };
        let mut rest = Draft { is_rest: true, ..Draft::new(from_text("").unwrap_or_default()) };
        let mut zones: HashMap<Wire, Arc<Block>> = HashMap::new();
        for (key, text) in data {
            reader.file.clone_from(key);
            if key.ends_with(".override") {
                match corefile::directives(text) {
                    Ok(directives) => reader.fill(&mut rest, &directives),
                    Err(error) => reader.complain(format!("{error}; the file is ignored")),
                }
            } else if key.ends_with(".server") {
                reader.server(text, &mut zones);
            } else if key == "NodeHosts" || key == "hosts" {
                let root = vec![rest.zone.clone()];
                let mut hosts = Hosts::new(root.clone());
                (hosts.ttl, hosts.fallthrough) = (NODE_HOSTS_TTL, root);
                reader.hosts_lines(&mut hosts, text.lines());
                rest.hosts.push(hosts);
            }
        }
        let servers = Settings { servers: base.servers.clone(), ..Settings::default() };
        rest.routes.push((rest.zone.clone(), vec![], reader.without_own(servers)));
        (Self { zones, rest: Arc::new(rest.done()) }, reader.complaints)
    }

    /// The block with the longest zone that has the name (in lower case). Costs a look-up for each label, if
    /// there are zones.
    pub fn block(&self, name: &[u8]) -> &Arc<Block> {
        if self.zones.is_empty() {
            return &self.rest;
        }
        ancestors(name).find_map(|above| self.zones.get(above)).unwrap_or(&self.rest)
    }

    fn blocks(&self) -> impl Iterator<Item = &Arc<Block>> {
        self.zones.values().chain([&self.rest])
    }

    pub fn zones(&self) -> Vec<Arc<str>> {
        self.blocks().map(|block| block.zone.clone()).collect()
    }

    pub fn servers(&self) -> Vec<SocketAddr> {
        let routes = self.blocks().flat_map(|block| &block.routes);
        routes.flat_map(|route| route.source.forward.settings().servers.clone()).collect()
    }

    /// The number of names in lists of hosts.
    pub fn hosts(&self) -> usize {
        self.blocks().flat_map(|block| &block.hosts).map(Hosts::len).sum()
    }
}

impl Block {
    /// The source for a name (in lower case), if there is one.
    pub fn source(&self, name: &[u8]) -> Option<&Arc<Source>> {
        let concerns = |route: &&Route| {
            is_below_any(name, std::slice::from_ref(&route.from))
                && !is_below_any(name, &route.except)
        };
        self.routes.iter().find(concerns).map(|route| &route.source)
    }
}

/// A block while its lines are read.
struct Draft {
    zone: Wire,
    is_rest: bool,
    rewrites: Vec<Rewrite>,
    hosts: Vec<Hosts>,
    log: bool,
    limits: Limits,
    routes: Vec<(Wire, Vec<Wire>, Settings)>,
}

impl Draft {
    fn new(zone: Wire) -> Self {
        Self {
            zone,
            is_rest: false,
            rewrites: vec![],
            hosts: vec![],
            log: false,
            limits: Limits::default(),
            routes: vec![],
        }
    }

    fn done(self) -> Block {
        let limits = self.limits;
        let route = |(from, except, settings)| {
            let source = Arc::new(Source::new(Forward::new(settings), limits));
            Route { from, except, source }
        };
        Block {
            zone: format!("{}.", text(&self.zone)).into(),
            is_rest: self.is_rest,
            rewrites: self.rewrites,
            hosts: self.hosts,
            log: self.log,
            routes: self.routes.into_iter().map(route).collect(),
        }
    }
}

struct Reader<'a> {
    data: &'a BTreeMap<String, String>,
    base: &'a Base,
    file: String,
    complaints: Vec<String>,
}

impl Reader<'_> {
    fn complain(&mut self, what: impl std::fmt::Display) {
        self.complaints.push(format!("{}: {what}", self.file));
    }

    fn refuse(&mut self, directive: &Directive, why: impl std::fmt::Display) {
        let (line, plugin) = (directive.line, &directive.words[0]);
        self.complain(format!("line {line}: {plugin}: {why}"));
    }

    fn server(&mut self, text: &str, zones: &mut HashMap<Wire, Arc<Block>>) {
        let blocks = match corefile::blocks(text) {
            Ok(blocks) => blocks,
            Err(error) => return self.complain(format!("{error}; the file is ignored")),
        };
        for block in blocks {
            for label in &block.labels {
                let zone = match self.zone(label) {
                    Ok(zone) if zones.contains_key(&zone) => {
                        self.complain(format!("zone {label}: another block has this zone already"));
                        continue;
                    }
                    Ok(zone) => zone,
                    Err(why) => {
                        self.complain(format!("zone {label}: {why}"));
                        continue;
                    }
                };
                let mut draft = Draft::new(zone.clone());
                self.fill(&mut draft, &block.directives);
                zones.insert(zone, Arc::new(draft.done()));
            }
        }
    }

    /// `example.com`, `example.com:53`, `dns://example.com`, `10.1.0.0/16`
    fn zone(&self, label: &str) -> Result<Wire, &'static str> {
        let label = match label.split_once("://") {
            None => label,
            Some(("dns", label)) => label,
            Some(_) => return Err("only plain DNS is served"),
        };
        let label = match label.rsplit_once(':') {
            Some((label, "53")) => label,
            Some((_, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
                return Err("only port 53 is served");
            }
            _ => label,
        };
        let wire = match label.split_once('/') {
            Some(_) => reverse_zone(label).ok_or("not an IPv4 network of whole octets")?,
            None => from_text(label).ok_or("not a domain name")?,
        };
        if *wire == [0] {
            return Err("the server has this zone itself; use a key NAME.override");
        }
        if from_text(&self.base.domain).is_some_and(|own| own == wire) {
            return Err("this is the cluster's own zone");
        }
        Ok(wire)
    }

    fn fill(&mut self, draft: &mut Draft, directives: &[Directive]) {
        for directive in directives {
            match directive.words[0].as_str() {
                "forward" => self.forward(draft, directive),
                "hosts" => self.hosts(draft, directive),
                "cache" => self.cache(draft, directive),
                "log" => draft.log = true,
                "rewrite" => match Rewrite::parse(&directive.words[1..], &directive.lines) {
                    Ok(rewrite) => draft.rewrites.push(rewrite),
                    Err(why) => self.refuse(directive, why),
                },
                plugin if WITHOUT_EFFECT.contains(&plugin) => {}
                _ => self.refuse(directive, "this plugin is not supported; the line is ignored"),
            }
        }
    }

    fn forward(&mut self, draft: &mut Draft, directive: &Directive) {
        let [_, from, to @ ..] = directive.words.as_slice() else {
            return self.refuse(directive, "it needs a zone and servers");
        };
        let Some(from) = from_text(from.trim_end_matches(':')) else {
            return self.refuse(directive, format!("{from:?} is not a domain name"));
        };
        let mut settings = Settings::default();
        for to in to {
            match self.servers(to) {
                Ok(servers) => settings.servers.extend(servers),
                Err(why) => self.refuse(directive, format!("{to}: {why}")),
            }
        }
        let mut except = vec![];
        for line in &directive.lines {
            if let Err(why) = forward_option(line, &mut settings, &mut except) {
                self.refuse(directive, format!("{}: {why}", line.join(" ")));
            }
        }
        let settings = self.without_own(settings);
        if settings.servers.is_empty() {
            self.refuse(directive, "it has no server to ask; its names get SERVFAIL");
        }
        draft.routes.push((from, except, settings));
    }

    fn without_own(&self, mut settings: Settings) -> Settings {
        settings.servers.retain(|server| !self.base.own.contains(server));
        settings
    }

    /// An address, an address with a port, or a file like resolv.conf.
    fn servers(&self, to: &str) -> Result<Vec<SocketAddr>, &'static str> {
        if to == "/etc/resolv.conf" {
            return Ok(self.base.servers.clone());
        }
        if to.starts_with('/') {
            let servers = read_resolvers(Path::new(to));
            return if servers.is_empty() { Err("the file has no servers") } else { Ok(servers) };
        }
        let to = to.strip_prefix("dns://").unwrap_or(to);
        if to.contains("://") {
            return Err("only plain DNS is supported");
        }
        let with_port = to.parse::<SocketAddr>().ok();
        let alone = || to.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        let server = with_port.or_else(|| Some(SocketAddr::new(alone()?, 53)));
        server.map(|server| vec![server]).ok_or("not an address")
    }

    fn hosts(&mut self, draft: &mut Draft, directive: &Directive) {
        let mut hosts = Hosts::new(vec![draft.zone.clone()]);
        if let [_, file, zones @ ..] = directive.words.as_slice() {
            let named: Vec<Wire> = zones.iter().filter_map(|zone| from_text(zone)).collect();
            if !named.is_empty() {
                hosts.zones = named;
            }
            let key = file.rsplit('/').next().unwrap_or_default();
            match self.data.get(key) {
                Some(text) => self.hosts_lines(&mut hosts, text.lines()),
                None => self.refuse(directive, format!("{file}: the ConfigMap has no key {key:?}")),
            }
        }
        for line in &directive.lines {
            match line.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
                ["ttl", seconds] => match seconds.parse() {
                    Ok(seconds) => hosts.ttl = seconds,
                    Err(_) => self.refuse(directive, format!("ttl {seconds}: not a number")),
                },
                ["no_reverse"] => hosts.reverse = false,
                ["reload", ..] => {}
                ["fallthrough"] => hosts.fallthrough = vec![vec![0].into()],
                ["fallthrough", zones @ ..] => {
                    hosts.fallthrough = zones.iter().filter_map(|zone| from_text(zone)).collect();
                }
                words => {
                    let line = words.join(" ");
                    self.hosts_lines(&mut hosts, [line.as_str()].into_iter());
                }
            }
        }
        if draft.is_rest {
            // Without this a list of two hosts would end all other names, the cluster's too.
            hosts.fallthrough = vec![draft.zone.clone()];
        }
        draft.hosts.push(hosts);
    }

    fn hosts_lines<'a>(&mut self, hosts: &mut Hosts, lines: impl Iterator<Item = &'a str>) {
        for line in lines {
            if !hosts.add(line) {
                self.complain(format!("{line:?} is not a line of an address and names"));
            }
        }
    }

    fn cache(&mut self, draft: &mut Draft, directive: &Directive) {
        let limits = &mut draft.limits;
        if let Some(seconds) = directive.words.get(1).and_then(|word| word.parse().ok()) {
            (limits.success, limits.denial) = (seconds, seconds);
        }
        let mut wrong = vec![];
        for line in &directive.lines {
            let number = |index: usize| line.get(index).and_then(|word| word.parse().ok());
            match (line[0].as_str(), line.get(1).map(String::as_str)) {
                ("success", _) => {
                    limits.success = number(2).unwrap_or(limits.success);
                    limits.least = number(3).unwrap_or(limits.least);
                }
                ("denial", _) => limits.denial = number(2).unwrap_or(limits.denial),
                ("disable", Some("success")) => limits.success = 0,
                ("disable", Some("denial")) => limits.denial = 0,
                // Always on.
                ("prefetch" | "serve_stale" | "servfail" | "keepttl", _) => {}
                _ => wrong.push(line.join(" ")),
            }
        }
        for line in wrong {
            self.refuse(directive, format!("{line:?} is not supported"));
        }
    }
}

fn forward_option(
    line: &[String],
    settings: &mut Settings,
    except: &mut Vec<Wire>,
) -> Result<(), &'static str> {
    match (line[0].as_str(), line.get(1).map(String::as_str)) {
        ("except", _) => except.extend(line[1..].iter().filter_map(|name| from_text(name))),
        ("policy", Some("random")) => settings.policy = Policy::Random,
        ("policy", Some("round_robin")) => settings.policy = Policy::RoundRobin,
        ("policy", Some("sequential")) => settings.policy = Policy::Sequential,
        ("policy", _) => return Err("the policies are random, round_robin and sequential"),
        ("force_tcp", _) => settings.force_tcp = true,
        ("max_concurrent", Some(most)) => {
            settings.max_concurrent = most.parse().map_err(|_| "not a number")?;
        }
        // What they tune is done without them.
        ("prefer_udp" | "expire" | "max_fails" | "health_check" | "failover" | "max_age", _) => {}
        _ => return Err("this option is not supported"),
    }
    Ok(())
}

/// `10.1.0.0/16` → `1.10.in-addr.arpa`
fn reverse_zone(network: &str) -> Option<Wire> {
    let (address, bits) = network.split_once('/')?;
    let octets = address.parse::<std::net::Ipv4Addr>().ok()?.octets();
    let bits: usize = bits.parse().ok()?;
    if !bits.is_multiple_of(8) || !(8..=32).contains(&bits) {
        return None;
    }
    let labels: Vec<String> = octets[..bits / 8].iter().rev().map(u8::to_string).collect();
    from_text(&format!("{}.in-addr.arpa", labels.join(".")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(data: &[(&str, &str)]) -> (Plan, Vec<String>) {
        let data = data.iter().map(|(key, text)| (key.to_string(), text.to_string())).collect();
        let server = |text: &str| text.parse().expect("an address");
        let base = Base {
            domain: "cluster.local".into(),
            servers: vec![server("192.0.2.53:53")],
            own: vec![server("10.43.0.10:53")],
        };
        Plan::new(&data, &base)
    }

    /// The block's zone and the servers for a name.
    fn show(plan: &Plan, name: &str) -> String {
        let name = from_text(name).expect("a name");
        let block = plan.block(&name);
        let servers = |source: &Arc<Source>| {
            let servers = &source.forward.settings().servers;
            servers.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(" ")
        };
        let servers = block.source(&name).map_or_else(|| "none".into(), servers);
        format!("{} {servers}", block.zone)
    }

    fn check(data: &[(&str, &str)], names: &[(&str, &str)], expected: &[&str]) {
        let (plan, complaints) = plan(data);
        for (name, expected) in names {
            assert_eq!(show(&plan, name), *expected, "{name} with {data:?}");
        }
        assert_eq!(complaints, expected, "{data:?}");
    }

    #[test]
    fn zones_have_servers_of_their_own() {
        check(&[], &[("a.example.com", ". 192.0.2.53:53"), ("", ". 192.0.2.53:53")], &[]);
        check(
            &[(
                "corp.server",
                "example.com:53 { forward . 10.0.0.1 [fd00::1]:5353 }\nb.example.com 10.0.0.0/8 {\n errors\n \
                 forward . /etc/resolv.conf\n}",
            )],
            &[
                ("www.example.com", "example.com. 10.0.0.1:53 [fd00::1]:5353"),
                ("EXAMPLE.com", "example.com. 10.0.0.1:53 [fd00::1]:5353"),
                ("a.b.example.com", "b.example.com. 192.0.2.53:53"),
                ("1.0.0.10.in-addr.arpa", "10.in-addr.arpa. 192.0.2.53:53"),
                ("nexample.com", ". 192.0.2.53:53"),
            ],
            &[],
        );
        check(
            &[(
                "a.override",
                "forward corp.example 10.0.0.1 {\n except x.corp.example\n}\nforward . 9.9.9.9",
            )],
            &[
                ("a.corp.example", ". 10.0.0.1:53"),
                ("y.x.corp.example", ". 9.9.9.9:53"),
                ("a.example", ". 9.9.9.9:53"),
            ],
            &[],
        );
    }

    #[test]
    fn wrong_lines_change_nothing_else() {
        check(
            &[
                ("a.server", "a.example {\n forward . 10.0.0.1\n template IN A\n}\n"),
                ("b.server", "b.example {\n forward . 10.0.0.2\n"),
                (
                    "c.server",
                    "tls://c.example d.example:5353 . cluster.local a.example e.example {\n}",
                ),
                ("d.server", "f.example {\n forward . tls://9.9.9.9 10.43.0.10\n}"),
                ("README", "not a Corefile {"),
            ],
            &[
                ("x.a.example", "a.example. 10.0.0.1:53"),
                ("x.b.example", ". 192.0.2.53:53"),
                ("x.e.example", "e.example. none"),
                ("x.f.example", "f.example. "),
                ("x.example", ". 192.0.2.53:53"),
            ],
            &[
                "a.server: line 3: template: this plugin is not supported; the line is ignored",
                "b.server: line 1: the block does not end; the file is ignored",
                "c.server: zone tls://c.example: only plain DNS is served",
                "c.server: zone d.example:5353: only port 53 is served",
                "c.server: zone .: the server has this zone itself; use a key NAME.override",
                "c.server: zone cluster.local: this is the cluster's own zone",
                "c.server: zone a.example: another block has this zone already",
                "d.server: line 2: forward: tls://9.9.9.9: only plain DNS is supported",
                "d.server: line 2: forward: it has no server to ask; its names get SERVFAIL",
            ],
        );
    }

    #[test]
    fn hosts_rewrites_and_caches_are_read() {
        let (plan, complaints) = plan(&[
            ("NodeHosts", "10.0.0.1 node-1\n10.0.0.2 node-2\nnonsense here\n"),
            ("list", "10.0.0.9 nine.example"),
            (
                "a.server",
                "example {\n hosts /etc/coredns/custom/list {\n  10.0.0.8 eight.example\n  ttl 7\n  fallthrough\n }\n \
                 cache 10 {\n  disable denial\n }\n log\n}",
            ),
            ("b.override", "rewrite name a.example b.example\nhosts nowhere {\n 10.0.0.7 seven\n}"),
        ]);
        assert_eq!(
            complaints,
            [
                "NodeHosts: \"nonsense here\" is not a line of an address and names",
                "b.override: line 2: hosts: nowhere: the ConfigMap has no key \"nowhere\"",
            ]
        );
        assert_eq!(plan.hosts(), 5);
        let name = |text| from_text(text).expect("a name");
        let block = plan.block(&name("x.example"));
        assert!(block.log && !block.is_rest && block.source(&name("x.example")).is_none());
        let hosts = &block.hosts[0];
        assert!(hosts.ttl == 7 && hosts.falls_through(&name("x.example")));
        assert_eq!(hosts.addresses(&name("eight.example")).map(<[_]>::len), Some(1));
        assert_eq!(hosts.addresses(&name("nine.example")).map(<[_]>::len), Some(1));
        let rest = plan.block(&name("node-1"));
        assert_eq!((rest.hosts.len(), rest.rewrites.len()), (2, 1));
        assert!(rest.is_rest && rest.hosts.iter().all(|hosts| hosts.falls_through(&name("x"))));
    }
}
