//! DNS messages as bytes: what a query asks, what an answer holds.
//!
//! In: packets from clients and from other servers. Out: a [`Query`], a checked [`Answer`], packets for clients.
//! Invariants: no bytes make these functions panic or loop (each step moves forward). An answer keeps its
//! length and its compression when it is sent to a client: only the header, the letters' case in the
//! question, the TTLs and the order of addresses change. The OPT record belongs to one hop, so it is removed
//! from each answer and written again for each client; with it go client subnets (ECS) and cookies.
//!
//! Answers stay bytes, so that a hit of the cache decodes and encodes no records.

use std::sync::Arc;

pub const HEADER: usize = 12;
/// A root name, type, size, extended code, version, flags and length of an OPT record without options.
const OPT_LENGTH: usize = 11;
const LONGEST_NAME: usize = 255;
const LONGEST_LABEL: usize = 63;
/// The size limit of a UDP answer without EDNS, and with EDNS ([`WITH_EDNS`]).
const PLAIN: usize = 512;
pub const WITH_EDNS: u16 = 1232;

pub mod kind {
    pub const A: u16 = 1;
    pub const CNAME: u16 = 5;
    pub const SOA: u16 = 6;
    pub const AAAA: u16 = 28;
    pub const OPT: u16 = 41;
    pub const IXFR: u16 = 251;
    pub const AXFR: u16 = 252;
}
pub const INTERNET: u16 = 1;

pub mod code {
    pub const NO_ERROR: u16 = 0;
    pub const FORM_ERR: u16 = 1;
    pub const SERV_FAIL: u16 = 2;
    pub const NX_DOMAIN: u16 = 3;
    pub const NOT_IMP: u16 = 4;
    pub const REFUSED: u16 = 5;
    pub const BAD_VERS: u16 = 16;
}

const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
pub const AUTHORITATIVE: u16 = 0x0400;
pub const TRUNCATED: u16 = 0x0200;
const DESIRED: u16 = 0x0100;
const AVAILABLE: u16 = 0x0080;
const AUTHENTIC: u16 = 0x0020;
const UNCHECKED: u16 = 0x0010;

/// A name in wire form: labels with their lengths, up to the root's zero.
pub type Wire = Arc<[u8]>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Edns {
    pub payload: u16,
    pub version: u8,
    /// The DO bit.
    pub dnssec: bool,
}

/// A client's question with what its answer must repeat.
#[derive(Clone, Debug)]
pub struct Query {
    pub id: u16,
    flags: u16,
    /// In the client's case.
    pub name: Wire,
    pub kind: u16,
    pub class: u16,
    pub edns: Option<Edns>,
    pub by_tcp: bool,
    /// The length of the packet.
    pub length: usize,
}

/// Why a packet is not a query.
#[derive(Debug, PartialEq)]
pub enum Malformed {
    /// An answer, or too short for a header: a reply could start an endless exchange.
    Silent,
    /// The packet to send back.
    Refused(Vec<u8>),
}

/// What other servers are asked; equal questions share an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asked {
    /// In lower case.
    pub name: Wire,
    pub kind: u16,
    pub class: u16,
    pub dnssec: bool,
    /// The CD bit: the client checks signatures itself.
    pub unchecked: bool,
}

impl Query {
    pub fn parse(packet: &[u8], by_tcp: bool) -> Result<Self, Malformed> {
        let (Some(id), Some(flags)) = (u16_at(packet, 0), u16_at(packet, 2)) else {
            return Err(Malformed::Silent);
        };
        if packet.len() < HEADER || flags & RESPONSE != 0 {
            return Err(Malformed::Silent);
        }
        let refused = |code| Malformed::Refused(bare(id, flags, code));
        if flags & OPCODE != 0 {
            return Err(refused(code::NOT_IMP));
        }
        let parsed = question(packet).and_then(|end| {
            let kind = u16_at(packet, end)?;
            let class = u16_at(packet, end + 2)?;
            Some((Wire::from(&packet[HEADER..end]), kind, class, edns(packet, end + 4)?))
        });
        let Some((name, kind, class, edns)) = parsed else { return Err(refused(code::FORM_ERR)) };
        Ok(Self { id, flags, name, kind, class, edns, by_tcp, length: packet.len() })
    }

    pub fn asked(&self) -> Asked {
        Asked {
            name: lower(&self.name),
            kind: self.kind,
            class: self.class,
            dnssec: self.edns.is_some_and(|edns| edns.dnssec),
            unchecked: self.flags & UNCHECKED != 0,
        }
    }

    /// An answer without records.
    pub fn reply(&self, code: u16) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + self.name.len() + 4 + OPT_LENGTH);
        out.extend_from_slice(&self.id.to_be_bytes());
        out.extend_from_slice(&self.answer_flags(code, 0).to_be_bytes());
        out.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        self.write_question(&mut out);
        self.finish(out, code)
    }

    fn write_question(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.name);
        out.extend_from_slice(&self.kind.to_be_bytes());
        out.extend_from_slice(&self.class.to_be_bytes());
    }

    /// `kept`: the flags that the answer brings itself.
    fn answer_flags(&self, code: u16, kept: u16) -> u16 {
        RESPONSE | AVAILABLE | (self.flags & (DESIRED | UNCHECKED)) | kept | (code & 0xf)
    }

    /// The largest answer that the client takes.
    fn limit(&self) -> usize {
        match (self.by_tcp, &self.edns) {
            (true, _) => usize::from(u16::MAX),
            (false, Some(edns)) => usize::from(edns.payload.min(WITH_EDNS)).max(PLAIN),
            (false, None) => PLAIN,
        }
    }

    /// Completes a message of our own making: id, flags, the client's limit, OPT.
    pub fn complete(&self, mut message: Vec<u8>, code: u16, kept: u16) -> Vec<u8> {
        if message.len() < HEADER {
            return self.reply(code::SERV_FAIL);
        }
        put_u16(&mut message, 0, self.id);
        put_u16(&mut message, 2, self.answer_flags(code, kept));
        self.finish(message, code)
    }

    /// The answer for this client, with `ttl` in all records.
    pub fn answer(&self, answer: &Answer, ttl: u32) -> Vec<u8> {
        if answer.bytes.is_empty() {
            return self.reply(answer.code);
        }
        let mut out = answer.bytes.clone();
        let wants = self.flags & AUTHENTIC != 0 || self.edns.is_some_and(|edns| edns.dnssec);
        let kept = answer.flags & if wants { AUTHENTIC | TRUNCATED } else { TRUNCATED };
        put_u16(&mut out, 0, self.id);
        put_u16(&mut out, 2, self.answer_flags(answer.code, kept));
        let name = HEADER..HEADER + self.name.len();
        if out.len() > name.end {
            out[name].copy_from_slice(&self.name);
        }
        for record in records(&answer.bytes) {
            out[record.ttl..record.ttl + 4].copy_from_slice(&ttl.to_be_bytes());
        }
        rotate(&mut out, answer);
        self.finish(out, answer.code)
    }

    /// Drops the last records until the message fits, says so by TC, and appends the OPT record.
    /// Additional records are dropped without TC: nobody needs them.
    fn finish(&self, mut out: Vec<u8>, code: u16) -> Vec<u8> {
        let room = self.limit() - if self.edns.is_some() { OPT_LENGTH } else { 0 };
        if out.len() > room {
            cut(&mut out, room);
        }
        if self.edns.is_some() {
            let size = WITH_EDNS.to_be_bytes();
            out.extend_from_slice(&[0, 0, kind::OPT as u8, size[0], size[1], (code >> 4) as u8, 0]);
            let dnssec = self.edns.is_some_and(|edns| edns.dnssec);
            out.extend_from_slice(&[if dnssec { 0x80 } else { 0 }, 0, 0, 0]);
            let count = u16_at(&out, 10).unwrap_or(0);
            put_u16(&mut out, 10, count + 1);
        }
        out
    }
}

/// A header alone: the question could not be read.
fn bare(id: u16, flags: u16, code: u16) -> Vec<u8> {
    let flags = RESPONSE | (flags & (OPCODE | DESIRED)) | code;
    let mut out = id.to_be_bytes().to_vec();
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&[0; 8]);
    out
}

impl Asked {
    /// The query for another server. It always asks for recursion, as the answer is shared.
    pub fn packet(&self, id: u16, with_edns: bool) -> Vec<u8> {
        let mut out = id.to_be_bytes().to_vec();
        let flags = DESIRED | if self.unchecked { UNCHECKED } else { 0 };
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, u8::from(with_edns)]);
        out.extend_from_slice(&self.name);
        out.extend_from_slice(&self.kind.to_be_bytes());
        out.extend_from_slice(&self.class.to_be_bytes());
        if with_edns {
            let size = WITH_EDNS.to_be_bytes();
            out.extend_from_slice(&[0, 0, kind::OPT as u8, size[0], size[1], 0, 0]);
            out.extend_from_slice(&[if self.dnssec { 0x80 } else { 0 }, 0, 0, 0]);
        }
        out
    }
}

/// Another server's answer, checked, without its OPT record.
#[derive(Debug, PartialEq)]
pub struct Answer {
    bytes: Vec<u8>,
    flags: u16,
    pub code: u16,
    /// The smallest TTL of its records; for a denial also the SOA's minimum. `None`: it has no records.
    pub ttl: Option<u32>,
    /// It has records in the answer section.
    pub has_answers: bool,
}

impl Answer {
    /// `None` if the bytes are no answer to this question.
    pub fn check(mut bytes: Vec<u8>, asked: &Asked) -> Option<Self> {
        let flags = u16_at(&bytes, 2)?;
        if flags & RESPONSE == 0 || flags & OPCODE != 0 {
            return None;
        }
        let mut code = flags & 0xf;
        // Servers that do not understand a query may leave out its question.
        if u16_at(&bytes, 4)? == 0 && code != code::NO_ERROR && code != code::NX_DOMAIN {
            return Some(Self { bytes: vec![], flags, code, ttl: None, has_answers: false });
        }
        let end = question(&bytes)?;
        let same = bytes[HEADER..end].eq_ignore_ascii_case(&asked.name)
            && u16_at(&bytes, end)? == asked.kind
            && u16_at(&bytes, end + 2)? == asked.class;
        if !same {
            return None;
        }
        let (length, extended) = without_opt(&mut bytes)?;
        bytes.truncate(length);
        code |= extended << 4;
        let has_answers = u16_at(&bytes, 6)? > 0;
        let mut ttl: Option<u32> = None;
        for record in records(&bytes) {
            let mut own = u32_at(&bytes, record.ttl)?;
            if record.kind == kind::SOA && !has_answers && record.end >= record.data + 4 {
                own = own.min(u32_at(&bytes, record.end - 4)?);
            }
            // A TTL with its highest bit set counts as 0 (RFC 2181).
            let own = if own > i32::MAX as u32 { 0 } else { own };
            ttl = Some(ttl.map_or(own, |ttl| ttl.min(own)));
        }
        Some(Self { bytes, flags, code, ttl, has_answers })
    }

    pub fn id_is(&self, id: u16) -> bool {
        self.bytes.is_empty() || u16_at(&self.bytes, 0) == Some(id)
    }

    pub fn is_truncated(&self) -> bool {
        self.flags & TRUNCATED != 0
    }

    /// It says that the name or the records do not exist.
    pub fn is_denial(&self) -> bool {
        self.code == code::NX_DOMAIN || (self.code == code::NO_ERROR && !self.has_answers)
    }

    /// It says something about the name, not about the server.
    pub fn is_useful(&self) -> bool {
        matches!(self.code, code::NO_ERROR | code::NX_DOMAIN)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Where the name of the question ends; `None` unless there is exactly one question.
fn question(packet: &[u8]) -> Option<usize> {
    if u16_at(packet, 4)? != 1 {
        return None;
    }
    let mut at = HEADER;
    loop {
        let length = usize::from(*packet.get(at)?);
        at += 1 + length;
        if length > LONGEST_LABEL || at - HEADER > LONGEST_NAME {
            return None;
        }
        if length == 0 {
            return (packet.len() >= at + 4).then_some(at);
        }
    }
}

/// The OPT record after a question; the outer `None` for malformed records, or two OPT records.
fn edns(packet: &[u8], mut at: usize) -> Option<Option<Edns>> {
    let mut found = None;
    let total: usize =
        [6, 8, 10].iter().filter_map(|at| u16_at(packet, *at)).map(usize::from).sum();
    for _ in 0..total {
        let record = record(packet, at)?;
        if record.kind == kind::OPT {
            if found.is_some() || packet[at] != 0 {
                return None;
            }
            let ttl = u32_at(packet, record.ttl)?;
            found = Some(Edns {
                payload: u16_at(packet, record.ttl - 2)?,
                version: (ttl >> 16) as u8,
                dnssec: ttl & 0x8000 != 0,
            });
        }
        at = record.end;
    }
    Some(found)
}

/// Positions in a message.
#[derive(Clone, Copy)]
struct Record {
    start: usize,
    kind: u16,
    ttl: usize,
    data: usize,
    end: usize,
}

fn record(packet: &[u8], start: usize) -> Option<Record> {
    let mut at = start;
    loop {
        let length = *packet.get(at)?;
        match length {
            0 => {
                at += 1;
                break;
            }
            // A pointer ends a name.
            0xc0.. => {
                at += 2;
                break;
            }
            1..0x40 => at += 1 + usize::from(length),
            _ => return None,
        }
    }
    let data = at + 10;
    let end = data + usize::from(u16_at(packet, at + 8)?);
    (end <= packet.len()).then_some(Record {
        start,
        kind: u16_at(packet, at)?,
        ttl: at + 4,
        data,
        end,
    })
}

/// The records of a checked message, of all sections.
fn records(packet: &[u8]) -> impl Iterator<Item = Record> {
    let total: usize =
        [6, 8, 10].iter().filter_map(|at| u16_at(packet, *at)).map(usize::from).sum();
    let mut at = question(packet).map_or(packet.len(), |end| end + 4);
    (0..total).map_while(move |_| {
        let found = record(packet, at)?;
        at = found.end;
        Some(found)
    })
}

/// The message's length without OPT, and the upper bits of the response code. Records after an OPT record are
/// dropped too: names in them could point behind it.
fn without_opt(bytes: &mut [u8]) -> Option<(usize, u16)> {
    let counts = [6, 8, 10].map(|at| u16_at(bytes, at).map_or(0, usize::from));
    let before = counts[0] + counts[1];
    let mut at = question(bytes)? + 4;
    for seen in 0..before + counts[2] {
        let found = record(bytes, at)?;
        if found.kind == kind::OPT {
            if seen < before {
                return None;
            }
            let extended = u16::from(bytes[found.ttl]);
            put_u16(bytes, 10, u16::try_from(seen - before).ok()?);
            return Some((at, extended));
        }
        at = found.end;
    }
    Some((at, 0))
}

/// Drops records from the end until the message has at most `room` bytes.
fn cut(out: &mut Vec<u8>, room: usize) {
    let counts = [6, 8, 10].map(|at| u16_at(out, at).map_or(0, usize::from));
    let (mut kept, mut length) = (0, question(out).map_or(HEADER, |end| end + 4));
    for record in records(out).take_while(|record| record.end <= room) {
        kept += 1;
        length = record.end;
    }
    out.truncate(length);
    let mut left = kept;
    for (place, count) in [6, 8, 10].into_iter().zip(counts) {
        let own = count.min(left);
        left -= own;
        put_u16(out, place, own as u16);
    }
    if kept < counts[0] + counts[1] {
        let flags = u16_at(out, 2).unwrap_or(0);
        put_u16(out, 2, flags | TRUNCATED);
    }
}

/// Starts the addresses of one name at a random one, so that clients spread their load.
fn rotate(out: &mut [u8], answer: &Answer) {
    let count = u16_at(&answer.bytes, 6).map_or(0, usize::from);
    let all = || records(&answer.bytes).take(count);
    for (kind, size) in [(kind::A, 4), (kind::AAAA, 16)] {
        let Some(first) = all().find(|record| record.kind == kind) else { continue };
        let owner = &answer.bytes[first.start..first.ttl - 4];
        let places: Vec<usize> = all()
            .filter(|r| r.kind == kind && r.end - r.data == size)
            .filter(|r| &answer.bytes[r.start..r.ttl - 4] == owner)
            .map(|r| r.data)
            .collect();
        if places.len() < 2 {
            continue;
        }
        let shift = base::rng::below(places.len() as u64) as usize;
        for (index, to) in places.iter().enumerate() {
            let from = places[(index + shift) % places.len()];
            out[*to..*to + size].copy_from_slice(&answer.bytes[from..from + size]);
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// In lower case. Lengths of labels are below `A`, so that they stay.
pub fn lower(name: &[u8]) -> Wire {
    name.iter().map(u8::to_ascii_lowercase).collect()
}

/// `name` and all names above it up to the root, as suffixes of its bytes.
pub fn ancestors(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(name);
    std::iter::from_fn(move || {
        let current = rest.filter(|rest| !rest.is_empty())?;
        let length = usize::from(current[0]);
        rest = if length == 0 { None } else { current.get(1 + length..) };
        Some(current)
    })
}

/// The labels, without the root.
pub fn labels(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    ancestors(name).filter_map(|rest| rest.get(1..=usize::from(rest[0])).filter(|l| !l.is_empty()))
}

/// `www.example.com`; the root is empty. Bytes that no name of a cluster has become `?`, a dot within a label
/// too, so that the text of such a name equals no other name.
pub fn text(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for label in labels(name) {
        if !out.is_empty() {
            out.push('.');
        }
        let shown = |byte: &u8| if byte.is_ascii_graphic() && *byte != b'.' { *byte } else { b'?' };
        out.extend(label.iter().map(shown).map(char::from));
    }
    out
}

/// The wire form of `www.example.com` or `www.example.com.`, in lower case.
pub fn from_text(text: &str) -> Option<Wire> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let mut out = vec![];
    for label in text.split('.').filter(|_| !text.is_empty()) {
        if label.is_empty() || label.len() > LONGEST_LABEL || !label.is_ascii() {
            return None;
        }
        out.push(label.len() as u8);
        out.extend(label.bytes().map(|byte| byte.to_ascii_lowercase()));
    }
    out.push(0);
    (out.len() <= LONGEST_NAME).then(|| out.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::op::{Edns as Opt, Message, MessageType, OpCode, Query as Question};
    use hickory_proto::rr::rdata::opt::{ClientSubnet, EdnsOption};
    use hickory_proto::rr::{Name, RData, Record as Full, RecordType};
    use proptest::prelude::*;

    fn query(name: &str, kind: RecordType) -> Message {
        let mut query = Message::new(7, MessageType::Query, OpCode::Query);
        query.metadata.recursion_desired = true;
        query.add_query(Question::query(Name::from_ascii(name).expect("a name"), kind));
        query
    }

    fn parsed(message: &Message) -> Query {
        Query::parse(&message.to_vec().expect("bytes"), false).expect("a query")
    }

    fn answer(asked: &Asked, addresses: usize, ttl: u32) -> Message {
        let mut reply = Message::response(9, OpCode::Query);
        let name = Name::from_ascii(format!("{}.", text(&asked.name))).expect("a name");
        reply.add_query(Question::query(name.clone(), asked.kind.into()));
        for index in 0..addresses {
            let ip = std::net::Ipv4Addr::from(0xc000_0200 + index as u32);
            reply.add_answer(Full::from_rdata(name.clone(), ttl, RData::A(ip.into())));
        }
        reply
    }

    fn shown(bytes: &[u8]) -> Message {
        Message::from_vec(bytes).expect("a message")
    }

    #[test]
    fn the_case_of_the_question_and_the_flags_come_back() {
        let query = parsed(&query("WwW.Example.com.", RecordType::A));
        let asked = query.asked();
        assert_eq!(text(&asked.name), "www.example.com");
        let upstream = answer(&asked, 3, 300).to_vec().expect("bytes");
        let checked = Answer::check(upstream, &asked).expect("an answer");
        assert_eq!(
            (checked.ttl, checked.is_denial(), checked.is_useful()),
            (Some(300), false, true)
        );
        let reply = shown(&query.answer(&checked, 17));
        assert_eq!(reply.metadata.id, 7);
        assert!(reply.metadata.recursion_desired && reply.metadata.recursion_available);
        assert_eq!(reply.queries[0].name().to_ascii(), "WwW.Example.com.");
        assert_eq!(reply.answers[0].name.to_ascii(), "WwW.Example.com.");
        assert!(reply.answers.iter().all(|record| record.ttl == 17));
        let mut all: Vec<String> = reply.answers.iter().map(|r| r.data.to_string()).collect();
        all.sort();
        assert_eq!(all, ["192.0.2.0", "192.0.2.1", "192.0.2.2"]);
        assert!(reply.edns.is_none());
    }

    #[test]
    fn the_order_of_addresses_changes() {
        let query = parsed(&query("a.example.", RecordType::A));
        let asked = query.asked();
        let checked = Answer::check(answer(&asked, 4, 9).to_vec().expect("bytes"), &asked);
        let checked = checked.expect("an answer");
        let first = || shown(&query.answer(&checked, 1)).answers[0].data.to_string();
        let seen: std::collections::BTreeSet<String> = (0..200).map(|_| first()).collect();
        assert_eq!(seen.len(), 4, "{seen:?}");
    }

    #[test]
    fn opt_records_stay_on_their_hop() {
        let mut with = query("a.example.", RecordType::A);
        let mut edns = Opt::new();
        edns.set_max_payload(4096).set_version(0);
        edns.set_dnssec_ok(true);
        let subnet = ClientSubnet::new("10.1.2.3".parse().expect("an address"), 24, 0);
        edns.options_mut().insert(EdnsOption::Subnet(subnet));
        with.set_edns(edns);
        let query = parsed(&with);
        assert_eq!(query.edns, Some(Edns { payload: 4096, version: 0, dnssec: true }));
        let asked = query.asked();
        let forwarded = shown(&asked.packet(3, true));
        let opt = forwarded.edns.expect("an OPT record");
        assert!(opt.flags().dnssec_ok && opt.options().as_ref().is_empty(), "no client subnet");
        let mut reply = answer(&asked, 1, 60);
        let mut edns = Opt::new();
        edns.set_max_payload(512);
        reply.set_edns(edns);
        let checked = Answer::check(reply.to_vec().expect("bytes"), &asked).expect("an answer");
        let sent = shown(&query.answer(&checked, 5));
        let opt = sent.edns.expect("an OPT record");
        assert_eq!((opt.max_payload(), opt.flags().dnssec_ok), (WITH_EDNS, true));
    }

    #[test]
    fn answers_are_cut_to_the_clients_size() {
        let check = |payload: Option<u16>, by_tcp: bool, most: usize, truncated: bool| {
            let mut with = query("a.example.", RecordType::A);
            if let Some(payload) = payload {
                let mut edns = Opt::new();
                edns.set_max_payload(payload);
                with.set_edns(edns);
            }
            let mut query = parsed(&with);
            query.by_tcp = by_tcp;
            let asked = query.asked();
            let checked = Answer::check(answer(&asked, 100, 9).to_vec().expect("bytes"), &asked);
            let bytes = query.answer(&checked.expect("an answer"), 9);
            assert!(bytes.len() <= most && bytes.len() + 16 > most.min(1640), "{}", bytes.len());
            let reply = shown(&bytes);
            assert_eq!(reply.metadata.truncation, truncated);
            assert_eq!(reply.answers.len() < 100, truncated);
            assert_eq!(reply.edns.is_some(), payload.is_some());
        };
        check(None, false, 512, true);
        check(Some(100), false, 512, true);
        check(Some(900), false, 900, true);
        check(Some(4096), false, usize::from(WITH_EDNS), true);
        check(Some(4096), true, 65_535, false);
        check(None, true, 65_535, false);
    }

    #[test]
    fn other_answers_and_broken_queries_are_refused() {
        let query = query("a.example.", RecordType::A);
        let bytes = query.to_vec().expect("bytes");
        let asked = parsed(&query).asked();
        let other = Asked { name: from_text("b.example").expect("a name"), ..asked.clone() };
        assert_eq!(Answer::check(answer(&other, 1, 1).to_vec().expect("bytes"), &asked), None);
        assert_eq!(Answer::check(bytes.clone(), &asked), None, "a query is no answer");
        let refused = |bytes: &[u8]| match Query::parse(bytes, false) {
            Ok(_) => panic!("accepted"),
            Err(Malformed::Silent) => None,
            Err(Malformed::Refused(reply)) => Some(reply[3] & 0xf),
        };
        assert_eq!(refused(&bytes[..11]), None);
        assert_eq!(refused(&bytes[..bytes.len() - 1]), Some(1));
        let changed = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            refused(&bytes)
        };
        assert_eq!(changed(2, 0x81), None, "an answer");
        assert_eq!(changed(2, 0x29), Some(4), "an update");
        assert_eq!(changed(5, 0), Some(1), "no question");
        assert_eq!(changed(5, 2), Some(1), "two questions");
        assert_eq!(changed(12, 0xc0), Some(1), "a pointer");
        assert_eq!(changed(11, 1), Some(1), "a missing record");
    }

    #[test]
    fn a_denial_lives_as_long_as_its_soa_says() {
        let asked = parsed(&query("a.example.", RecordType::A)).asked();
        let mut reply = answer(&asked, 0, 0);
        let name = |text: &str| Name::from_ascii(text).expect("a name");
        let soa = hickory_proto::rr::rdata::SOA::new(name("n."), name("h."), 1, 2, 3, 4, 40);
        reply.add_authority(Full::from_rdata(name("example."), 900, RData::SOA(soa)));
        let checked = Answer::check(reply.to_vec().expect("bytes"), &asked).expect("an answer");
        assert_eq!((checked.ttl, checked.is_denial()), (Some(40), true));
    }

    #[test]
    fn names_have_ancestors_and_text() {
        let name = from_text("WWW.Example.com.").expect("a name");
        let all: Vec<String> = ancestors(&name).map(text).collect();
        assert_eq!(all, ["www.example.com", "example.com", "com", ""]);
        assert_eq!(from_text("").as_deref(), Some(&[0][..]));
        assert_eq!(from_text("a..b"), None);
        assert_eq!(from_text(&"a".repeat(64)), None);
        assert_eq!(text(b"\x03a.b\x01c\0"), "a?b.c");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), by_tcp: bool) {
            if let Ok(query) = Query::parse(&bytes, by_tcp) {
                let asked = query.asked();
                prop_assert!(query.reply(3).len() <= query.limit());
                // The same bytes as an answer to their own question.
                let mut reply = bytes.clone();
                reply[2] |= 0x80;
                if let Some(answer) = Answer::check(reply, &asked) {
                    prop_assert!(query.answer(&answer, 1).len() <= query.limit());
                }
            }
        }

        /// A real message with some bytes changed reaches deeper than noise.
        #[test]
        fn no_changed_message_panics(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            length in any::<prop::sample::Index>(),
        ) {
            let query = parsed(&query("www.example.com.", RecordType::A));
            let asked = query.asked();
            let mut bytes = answer(&asked, 40, 60).to_vec().expect("bytes");
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(length.index(bytes.len()) + 1);
            let _ = Query::parse(&bytes, false);
            if let Some(answer) = Answer::check(bytes, &asked) {
                prop_assert!(query.answer(&answer, 1).len() <= query.limit());
            }
        }
    }
}
