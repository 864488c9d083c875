//! One query's answer: who answers the name, and how the answer looks.
//!
//! ```text
//! query ─► block of its zone ─► rewrite ─► hosts ─► the cluster's zone ─► cache ─► other servers
//!                                            ▲            │
//!                                            └── alias ───┘  (ExternalName)
//! ```
//!
//! In: a [`Query`]. Out: a [`Reply`] at once, or [`Work`] that waits for other servers. The order is that of
//! CoreDNS' plugins. Invariants: a chain of aliases ends after [`ALIASES`]; an answer has the question as the client
//! wrote it, whatever name was looked up.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use hickory_proto::op::{Message, OpCode, Query as Question};
use hickory_proto::rr::rdata::PTR;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

use crate::cache::{Counts, Key};
use crate::directory::Directory;
use crate::hosts::Hosts;
use crate::metrics::Metrics;
use crate::resolve::{Quick, Resolved, Resolver, Source};
use crate::rewrite;
use crate::settings::{Block, Plan};
use crate::wire::{self, AUTHORITATIVE, Asked, INTERNET, Query, Wire, code, kind};
use crate::zone::{Answer, Records, Zone, reverse_address};

/// How many aliases within the zone are followed.
const ALIASES: usize = 8;

pub struct Reply {
    pub bytes: Vec<u8>,
    pub code: u16,
    /// CoreDNS' plugin that would have answered, for metrics.
    pub plugin: &'static str,
}

pub enum Step {
    Reply(Reply),
    Wait(Box<Work>),
}

/// A question to other servers, whose answer completes the reply.
pub struct Work {
    source: Arc<Source>,
    key: Key,
    stale: Option<Arc<wire::Answer>>,
    frame: Frame,
}

/// What the answer of other servers becomes.
enum Frame {
    /// The whole answer.
    Plain,
    /// The records after the aliases. Those of the first name, which was looked up, get the second one.
    Around { aliases: Vec<Record>, names: Box<[Name; 2]> },
}

pub struct Answers {
    zone: Zone,
    directory: Arc<dyn Directory>,
    plan: ArcSwap<Plan>,
    resolver: Arc<Resolver>,
    metrics: Arc<Metrics>,
}

/// The name that is looked up, as bytes and as text, and whose records they become, if that is known already.
struct At {
    name: Wire,
    text: String,
    owner: Option<Name>,
}

/// What this server itself says about a name.
enum Local {
    Says(Answer, &'static str),
    Refuses(u16, &'static str),
    Nothing,
}

impl Answers {
    pub fn new(
        zone: Zone,
        directory: Arc<dyn Directory>,
        plan: Plan,
        resolver: Arc<Resolver>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { zone, directory, plan: ArcSwap::from_pointee(plan), resolver, metrics }
    }

    pub fn use_plan(&self, plan: Plan) {
        self.plan.store(Arc::new(plan));
    }

    pub fn is_ready(&self) -> bool {
        self.directory.is_ready()
    }

    pub fn cache_counts(&self) -> [Counts; 2] {
        self.resolver.cache().counts()
    }

    /// The block that has the name, and the answer or the work for it. Never waits.
    pub fn step(&self, query: &Query) -> (Arc<Block>, Step) {
        let asked = query.asked();
        let plan = self.plan.load();
        let block = plan.block(&asked.name).clone();
        let refused = match query.edns {
            Some(edns) if edns.version > 0 => Some(code::BAD_VERS),
            _ if query.class != INTERNET => Some(code::REFUSED),
            _ if matches!(query.kind, kind::AXFR | kind::IXFR) => Some(code::REFUSED),
            _ => None,
        };
        let step = match refused {
            Some(code) => bare(query, code, ""),
            None => self.decide(query, asked, &plan, &block),
        };
        (block, step)
    }

    fn decide(&self, query: &Query, asked: Asked, plan: &Plan, block: &Arc<Block>) -> Step {
        let text = wire::text(&asked.name);
        let mut at = At { name: asked.name.clone(), text, owner: None };
        if let Some(text) = rewrite::apply(&block.rewrites, &at.text) {
            let Some(name) = wire::from_text(&text) else {
                return bare(query, code::SERV_FAIL, "rewrite");
            };
            (at.name, at.text) = (name, text);
        }
        let is_rewritten = at.name != asked.name;
        let mut block = block.clone();
        let mut aliases: Vec<Record> = vec![];
        for _ in 0..=ALIASES {
            let (record, target, plugin) = match self.local(query, &block, &mut at) {
                Local::Says(Answer::Alias(record, target), plugin) => (record, target, plugin),
                Local::Says(answer, plugin) => return self.said(query, aliases, answer, plugin),
                Local::Nothing if !is_rewritten && aliases.is_empty() => {
                    return self.elsewhere(
                        query,
                        Asked { name: at.name, ..asked },
                        &block,
                        Frame::Plain,
                    );
                }
                Local::Nothing => {
                    let owner = at.owner.or_else(|| decoded(&query.name));
                    let (Some(looked_up), Some(owner)) = (decoded(&at.name), owner) else {
                        return bare(query, code::FORM_ERR, "");
                    };
                    let names = Box::new([looked_up, owner]);
                    let frame = Frame::Around { aliases, names };
                    return self.elsewhere(query, Asked { name: at.name, ..asked }, &block, frame);
                }
                Local::Refuses(code, plugin) => return bare(query, code, plugin),
            };
            aliases.push(*record);
            if query.kind == kind::CNAME {
                return self.said(query, aliases, Answer::Found(Records::default()), plugin);
            }
            let mut text = target.to_ascii().to_lowercase();
            text.truncate(text.trim_end_matches('.').len());
            let Some(name) = wire::from_text(&text) else {
                return bare(query, code::SERV_FAIL, plugin);
            };
            // The target may have a zone of its own.
            block = plan.block(&name).clone();
            at = At { name, text, owner: Some(target) };
        }
        bare(query, code::SERV_FAIL, "kubernetes")
    }

    /// Whether this server could answer the name itself. Cheap: most names are other servers'.
    fn concerns(&self, block: &Block, name: &[u8], text: &str) -> bool {
        block.hosts.iter().any(|hosts| hosts.concerns(name) || text.ends_with(".arpa"))
            || (block.is_rest && self.zone.concerns(text))
    }

    /// Lists of hosts, then the cluster's zone.
    fn local(&self, query: &Query, block: &Block, at: &mut At) -> Local {
        if !self.concerns(block, &at.name, &at.text) {
            return Local::Nothing;
        }
        let Some(owner) = at.owner.take().or_else(|| decoded(&query.name)) else {
            return Local::Refuses(code::FORM_ERR, "");
        };
        let mut found = Local::Nothing;
        for hosts in &block.hosts {
            found = in_hosts(hosts, &owner, &at.name, &at.text, query.kind);
            if !matches!(found, Local::Nothing) {
                break;
            }
        }
        if matches!(found, Local::Nothing) && block.is_rest {
            let kind = query.kind.into();
            let answer = self.zone.answer(&owner, &at.text, kind, &*self.directory);
            if answer != Answer::Elsewhere {
                found = Local::Says(answer, "kubernetes");
            }
        }
        at.owner = Some(owner);
        found
    }

    fn elsewhere(&self, query: &Query, asked: Asked, block: &Block, frame: Frame) -> Step {
        let Some(source) = block.source(&asked.name) else {
            return bare(query, code::SERV_FAIL, "");
        };
        let key = source.key(asked);
        match self.resolver.look(source, &key) {
            Quick::Fresh(resolved) => {
                self.metrics.looked_up(true);
                Step::Reply(framed(query, frame, Some(resolved), "cache"))
            }
            Quick::Later(stale) => {
                self.metrics.looked_up(false);
                Step::Wait(Box::new(Work { source: source.clone(), key, stale, frame }))
            }
        }
    }

    pub async fn finish(&self, query: &Query, work: Work) -> Reply {
        let Work { source, key, stale, frame } = work;
        let resolved = self.resolver.resolve(&source, &key, stale).await;
        framed(query, frame, resolved, "forward")
    }

    fn said(
        &self,
        query: &Query,
        aliases: Vec<Record>,
        answer: Answer,
        plugin: &'static str,
    ) -> Step {
        let (records, code) = match answer {
            Answer::Found(records) => (records, code::NO_ERROR),
            Answer::NoSuchName => (Records::default(), code::NX_DOMAIN),
            _ => return bare(query, code::SERV_FAIL, plugin),
        };
        let Some(mut reply) = reply_to(query) else { return bare(query, code::FORM_ERR, "") };
        let is_empty = aliases.is_empty() && records.answers.is_empty();
        reply.answers = aliases;
        reply.answers.extend(records.answers);
        reply.additionals = records.additionals;
        // A list of hosts has no SOA.
        if plugin == "kubernetes" && (is_empty || code == code::NX_DOMAIN) {
            reply.add_authority(self.zone.soa());
        }
        Step::Reply(encoded(query, &reply, code, plugin))
    }
}

fn in_hosts(hosts: &Hosts, owner: &Name, name: &[u8], text: &str, kind: u16) -> Local {
    let record = |data| Record::from_rdata(owner.clone(), hosts.ttl, data);
    let says = |answers: Vec<Record>| {
        let records = Records { answers, additionals: vec![] };
        Local::Says(Answer::Found(records), "hosts")
    };
    if let Some(ip) = reverse_address(text) {
        let names = hosts.names(ip).iter().filter_map(|name| decoded(name));
        let answers: Vec<Record> = names.map(|name| record(RData::PTR(PTR(name)))).collect();
        return if answers.is_empty() { Local::Nothing } else { says(answers) };
    }
    if !hosts.concerns(name) {
        return Local::Nothing;
    }
    match hosts.addresses(name) {
        Some(addresses) => {
            let data = addresses.iter().filter_map(|ip| match (ip, kind) {
                (IpAddr::V4(ip), kind::A) => Some(RData::A((*ip).into())),
                (IpAddr::V6(ip), kind::AAAA) => Some(RData::AAAA((*ip).into())),
                _ => None,
            });
            says(data.map(record).collect())
        }
        None if hosts.falls_through(name) => Local::Nothing,
        // Upstream: a list has no SOA, which a denial needs.
        None => Local::Refuses(code::SERV_FAIL, "hosts"),
    }
}

fn bare(query: &Query, code: u16, plugin: &'static str) -> Step {
    Step::Reply(Reply { bytes: query.reply(code), code, plugin })
}

fn framed(query: &Query, frame: Frame, resolved: Option<Resolved>, plugin: &'static str) -> Reply {
    match (frame, resolved) {
        (Frame::Plain, Some((answer, ttl))) => {
            Reply { bytes: query.answer(&answer, ttl), code: answer.code, plugin }
        }
        (Frame::Plain, None) => {
            Reply { bytes: query.reply(code::SERV_FAIL), code: code::SERV_FAIL, plugin }
        }
        (Frame::Around { aliases, names }, resolved) => {
            around(query, aliases, &names, resolved, plugin)
        }
    }
}

/// Decodes the answer: names with other lengths need another compression.
fn around(
    query: &Query,
    aliases: Vec<Record>,
    [looked_up, owner]: &[Name; 2],
    resolved: Option<Resolved>,
    plugin: &'static str,
) -> Reply {
    let failed = |code| Reply { bytes: query.reply(code), code, plugin };
    let Some(mut reply) = reply_to(query) else { return failed(code::FORM_ERR) };
    let kept = if aliases.is_empty() { 0 } else { AUTHORITATIVE };
    let is_alias = !aliases.is_empty();
    reply.answers = aliases;
    let decoded = resolved.and_then(|(answer, ttl)| {
        let message = Message::from_vec(answer.bytes()).ok()?;
        Some((message, answer.code, ttl))
    });
    let Some((message, code, ttl)) = decoded else {
        // The aliases alone: the client may ask for the target itself.
        let code = if is_alias { code::NO_ERROR } else { code::SERV_FAIL };
        let bytes = encoded(query, &reply, code, plugin).bytes;
        return Reply { bytes, code, plugin };
    };
    let named = |mut record: Record| {
        if record.name == *looked_up {
            record.name = owner.clone();
        }
        record.ttl = ttl;
        record
    };
    reply.answers.extend(message.answers.into_iter().map(named));
    if !is_alias {
        reply.authorities.extend(message.authorities.into_iter().map(named));
    }
    // Upstream: an alias exists, whatever its target does.
    let code = if is_alias { code::NO_ERROR } else { code };
    match reply.to_vec() {
        Ok(bytes) => Reply { bytes: query.complete(bytes, code, kept), code, plugin },
        Err(_) => failed(code::SERV_FAIL),
    }
}

fn encoded(query: &Query, reply: &Message, code: u16, plugin: &'static str) -> Reply {
    match reply.to_vec() {
        Ok(bytes) => Reply { bytes: query.complete(bytes, code, AUTHORITATIVE), code, plugin },
        Err(error) => {
            tracing::warn!(%error, "failed to encode a DNS answer");
            Reply { bytes: query.reply(code::SERV_FAIL), code: code::SERV_FAIL, plugin }
        }
    }
}

/// Header flags and id come later, by [`Query::complete`].
fn reply_to(query: &Query) -> Option<Message> {
    let mut reply = Message::response(query.id, OpCode::Query);
    reply.add_query(Question::query(decoded(&query.name)?, RecordType::from(query.kind)));
    Some(reply)
}

fn decoded(name: &[u8]) -> Option<Name> {
    Name::read(&mut BinDecoder::new(name)).ok()
}
