//! Encodes the model as netlink requests. As in `nft`, keys start at register 1, and each key part
//! takes whole 32-bit slots.

use std::net::SocketAddr;

use super::model::{
    BaseChain, Chain, ChainKind, Element, Family, Field, Hook, Ip, Op, Policy, Rule, Set, Stmt,
    Table, Type, Value, Verdict,
};
use super::wire::{Attrs, Message, NLM_F_APPEND, NLM_F_CREATE};

const NEWTABLE: u16 = 0;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const DELCHAIN: u16 = 5;
const NEWRULE: u16 = 6;
const DELRULE: u16 = 8;
const NEWSET: u16 = 9;
const DELSET: u16 = 11;
const NEWSETELEM: u16 = 12;
const DELSETELEM: u16 = 14;

const SET_ANONYMOUS: u32 = 0x1;
const SET_CONSTANT: u32 = 0x2;
const SET_INTERVAL: u32 = 0x4;
const SET_MAP: u32 = 0x8;
const SET_TIMEOUT: u32 = 0x10;
const SET_EVAL: u32 = 0x20;
const DATA_VERDICT: u32 = 0xffff_ff00;
const ANONYMOUS_MAP: &str = "__map%d";
const ANONYMOUS_SET: &str = "__set%d";
/// Operators of `cmp` besides those of [`Op`].
const LTE: u32 = 3;
const GTE: u32 = 5;
/// Marks the first value after an interval.
const ELEMENT_INTERVAL_END: u32 = 0x1;
const IPPROTO_ICMPV6: u8 = 58;
/// nft's number for the type "icmpv6 type".
const TYPE_ICMPV6: u32 = 29;
/// nft's number for the type "integer".
const TYPE_INTEGER: u32 = 4;

/// The limit on the elements of one request: an attribute's length has 16 bits.
const ELEMENTS_BYTES: usize = 32 << 10;
/// The limit on a comment: user data has at most 256 bytes, with its two-byte header.
const COMMENT_BYTES: usize = 250;

/// Writes requests for one table.
pub struct Encoder<'a> {
    pub family: Family,
    pub table: &'a str,
    /// The last set number in this transaction. All tables of a batch share the counter.
    pub set_id: &'a mut u32,
    pub out: &'a mut Vec<Message>,
}

impl Encoder<'_> {
    pub fn new_table(&mut self, table: &Table) {
        let mut body = Attrs::new().text(1, self.table).number(2, 0);
        body = with_comment(body, 6, 0, table.comment.as_deref());
        self.push(NEWTABLE, NLM_F_CREATE, body, format!("add table {}", self.table));
    }

    pub fn delete_table(&mut self) {
        let body = Attrs::new().text(1, self.table);
        self.push(DELTABLE, 0, body, format!("delete table {}", self.table));
    }

    pub fn new_chain(&mut self, name: &str, chain: &Chain) {
        let mut body = Attrs::new().text(1, self.table).text(3, name);
        if let Some(base) = &chain.base {
            body = base_chain(body, base);
        }
        body = with_comment(body, 12, 0, chain.comment.as_deref());
        self.push(NEWCHAIN, NLM_F_CREATE, body, format!("add chain {} {name}", self.table));
    }

    pub fn delete_chain(&mut self, name: &str) {
        let body = Attrs::new().text(1, self.table).text(3, name);
        self.push(DELCHAIN, 0, body, format!("delete chain {} {name}", self.table));
    }

    /// Deletes all rules of a chain.
    pub fn flush_chain(&mut self, name: &str) {
        let body = Attrs::new().text(1, self.table).text(2, name);
        self.push(DELRULE, 0, body, format!("flush chain {} {name}", self.table));
    }

    pub fn new_rule(&mut self, chain: &str, rule: &Rule) {
        let mut list = Attrs::new();
        for stmt in &rule.stmts {
            list = self.stmt(list, stmt);
        }
        let mut body = Attrs::new().text(1, self.table).text(2, chain).nest(4, list);
        body = with_comment(body, 7, 0, rule.comment.as_deref());
        let about = format!("add rule {} {chain} {rule}", self.table);
        self.push(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, body, about);
    }

    pub fn new_set(&mut self, name: &str, set: &Set) {
        *self.set_id += 1;
        let mut flags = 0;
        flags |= if set.map { SET_MAP } else { 0 };
        flags |= if set.interval { SET_INTERVAL } else { 0 };
        flags |= if set.timeout.is_some() { SET_TIMEOUT } else { 0 };
        flags |= if set.dynamic { SET_EVAL } else { 0 };
        let key_type = set.key.iter().fold(0, |sum, t| sum << 6 | t.number());
        let length: usize = set.key.iter().map(|t| t.length().next_multiple_of(4)).sum();
        let single = (set.key.len() == 1).then(|| set.key[0]);
        let length = single.map_or(length, Type::length);
        let mut body = Attrs::new()
            .text(1, self.table)
            .text(2, name)
            .number(3, flags)
            .number(4, key_type)
            .number(5, length as u32)
            .number(10, *self.set_id);
        if set.map {
            body = body.number(6, DATA_VERDICT).number(7, 0);
        }
        if let Some(size) = set.size {
            body = body.nest(9, Attrs::new().number(1, size));
        }
        if let Some(timeout) = set.timeout {
            body = body.number64(11, timeout.as_millis() as u64);
        }
        let order = single.map_or(0, Type::byte_order);
        body = body.bytes(13, &set_user_data(order, set.comment.as_deref()));
        self.push(NEWSET, NLM_F_CREATE, body, format!("add set {} {name}", self.table));
    }

    pub fn delete_set(&mut self, name: &str) {
        let body = Attrs::new().text(1, self.table).text(2, name);
        self.push(DELSET, 0, body, format!("delete set {} {name}", self.table));
    }

    pub fn new_elements<'e>(
        &mut self,
        set: &str,
        elements: impl Iterator<Item = (&'e Vec<Value>, &'e Element)>,
    ) {
        let encoded = elements.flat_map(|(key, value)| {
            let end = value.last.as_ref().and_then(interval_end);
            std::iter::once(element(key, Some(value))).chain(end)
        });
        self.elements(NEWSETELEM, NLM_F_CREATE, set, encoded);
    }

    pub fn delete_elements<'e>(&mut self, set: &str, keys: impl Iterator<Item = &'e Vec<Value>>) {
        self.elements(DELSETELEM, 0, set, keys.map(|key| element(key, None)));
    }

    fn elements(
        &mut self,
        kind: u16,
        flags: u16,
        set: &str,
        elements: impl Iterator<Item = Attrs>,
    ) {
        let about = format!("{} elements {} {set}", verb(kind), self.table);
        let mut list = Attrs::new();
        let flush = |list: Attrs, out: &mut Self| {
            let body = Attrs::new().text(1, out.table).text(2, set).nest(3, list);
            out.push(kind, flags, body, about.clone());
        };
        for element in elements {
            list = list.nest(1, element);
            if list.0.len() > ELEMENTS_BYTES {
                flush(std::mem::take(&mut list), self);
            }
        }
        if !list.0.is_empty() {
            flush(list, self);
        }
    }

    fn push(&mut self, kind: u16, flags: u16, body: Attrs, about: String) {
        let about = about.replacen(' ', &format!(" [{}] ", self.family), 1);
        let family = self.family.number();
        self.out.push(Message { kind, flags, family, body: body.0, about });
    }

    fn stmt(&mut self, list: Attrs, stmt: &Stmt) -> Attrs {
        match stmt {
            Stmt::Match { field, op, value } => {
                let bytes = field.bytes_of(value);
                compare(load(list, field, 0), *op, &bytes)
            }
            Stmt::InNet { field, op, net } => {
                let list = load(list, field, 0);
                let network = octets(&net.network());
                let list = if net.prefix_len() == net.max_prefix_len() {
                    list
                } else {
                    bitwise(list, &octets(&net.netmask()), &vec![0; network.len()])
                };
                compare(list, *op, &network)
            }
            Stmt::AnyBit { field, bits } => any_bit(load(list, field, 0), *bits, Op::Ne),
            Stmt::NoBit { field, bits } => any_bit(load(list, field, 0), *bits, Op::Eq),
            Stmt::Dport { proto, port } => {
                let list = compare(load(list, &Field::L4proto, 0), Op::Eq, &[proto.number()]);
                compare(load(list, &Field::Dport, 0), Op::Eq, &port.to_be_bytes())
            }
            Stmt::DportIn { proto, first, last } => {
                let list = compare(load(list, &Field::L4proto, 0), Op::Eq, &[proto.number()]);
                let list = load(list, &Field::Dport, 0);
                let list = relate(list, GTE, &first.to_be_bytes());
                relate(list, LTE, &last.to_be_bytes())
            }
            Stmt::Icmpv6In(types) => {
                let list = compare(load(list, &Field::L4proto, 0), Op::Eq, &[IPPROTO_ICMPV6]);
                let id = self.anonymous_set(types);
                let lookup = Attrs::new().number(2, 1).text(1, ANONYMOUS_SET).number(4, id);
                expr(load(list, &Field::Icmpv6Type, 0), "lookup", lookup)
            }
            Stmt::InSet { key, op, set } => {
                let flags = if *op == Op::Ne { 1 } else { 0 };
                let lookup = Attrs::new().text(1, set).number(2, 1).number(5, flags);
                expr(load_all(list, key), "lookup", lookup)
            }
            Stmt::Vmap { key, map } => {
                let lookup = Attrs::new().text(1, map).number(2, 1).number(3, 0);
                expr(load_all(list, key), "lookup", lookup)
            }
            Stmt::VmapInline { key, entries } => {
                let id = self.anonymous_map(key, entries);
                let lookup =
                    Attrs::new().number(2, 1).number(3, 0).text(1, ANONYMOUS_MAP).number(4, id);
                expr(load(list, key, 0), "lookup", lookup)
            }
            Stmt::Update { set, key } => {
                let dynset = Attrs::new().text(1, set).number(3, 1).number(4, 1);
                expr(load_all(list, key), "dynset", dynset)
            }
            Stmt::MarkOr(bits) => set_mark(list, !bits, *bits),
            Stmt::MarkXor(bits) => set_mark(list, u32::MAX, *bits),
            Stmt::Dnat(to) => dnat(list, to),
            Stmt::Masquerade { fully_random } => {
                let data = Attrs::new();
                expr(list, "masq", if *fully_random { data.number(1, 0x10) } else { data })
            }
            Stmt::Reject => expr(list, "reject", self.reject()),
            Stmt::Counter => expr(list, "counter", Attrs::new()),
            Stmt::Verdict(verdict) => immediate(list, 0, verdict_data(verdict)),
        }
    }

    /// Rejects with "port unreachable" in the table's family.
    fn reject(&self) -> Attrs {
        let (kind, code) = match self.family {
            Family::Ip => (0, 3),
            Family::Ip6 => (0, 4),
            Family::Inet => (2, 1),
        };
        Attrs::new().number(1, kind).bytes(2, &[code])
    }

    /// Adds an anonymous set of ICMPv6 types.
    fn anonymous_set(&mut self, types: &[u8]) -> u32 {
        *self.set_id += 1;
        let id = *self.set_id;
        let body = Attrs::new()
            .text(1, self.table)
            .text(2, ANONYMOUS_SET)
            .number(3, SET_ANONYMOUS | SET_CONSTANT)
            .number(4, TYPE_ICMPV6)
            .number(5, 1)
            .number(10, id)
            .nest(9, Attrs::new().number(1, types.len() as u32))
            .bytes(13, &set_user_data(1, None));
        self.push(NEWSET, NLM_F_CREATE, body, format!("add set {} of a rule", self.table));
        let mut list = Attrs::new();
        for kind in types {
            list = list.nest(1, Attrs::new().nest(1, Attrs::new().bytes(1, &[*kind])));
        }
        let body =
            Attrs::new().text(1, self.table).text(2, ANONYMOUS_SET).number(4, id).nest(3, list);
        let about = format!("add elements {} of a rule's set", self.table);
        self.push(NEWSETELEM, NLM_F_CREATE, body, about);
        id
    }

    /// Adds an anonymous map. The kernel names it; this transaction refers to it by number.
    fn anonymous_map(&mut self, key: &Field, entries: &[(Value, Verdict)]) -> u32 {
        *self.set_id += 1;
        let id = *self.set_id;
        let (kind, length, order) = key.map_key();
        let body = Attrs::new()
            .text(1, self.table)
            .text(2, ANONYMOUS_MAP)
            .number(3, SET_ANONYMOUS | SET_CONSTANT | SET_MAP)
            .number(4, kind)
            .number(5, length)
            .number(6, DATA_VERDICT)
            .number(7, 0)
            .number(10, id)
            .nest(9, Attrs::new().number(1, entries.len() as u32))
            .bytes(13, &set_user_data(order, None));
        self.push(NEWSET, NLM_F_CREATE, body, format!("add map {} of a rule", self.table));
        for chunk in entries.chunks(100) {
            let mut list = Attrs::new();
            for (value, verdict) in chunk {
                let data = Attrs::new()
                    .nest(1, Attrs::new().bytes(1, &key.bytes_of(value)))
                    .nest(2, verdict_data(verdict));
                list = list.nest(1, data);
            }
            let body =
                Attrs::new().text(1, self.table).text(2, ANONYMOUS_MAP).number(4, id).nest(3, list);
            let about = format!("add elements {} of a rule's map", self.table);
            self.push(NEWSETELEM, NLM_F_CREATE, body, about);
        }
        id
    }
}

fn verb(kind: u16) -> &'static str {
    if kind == NEWSETELEM { "add" } else { "delete" }
}

fn base_chain(body: Attrs, base: &BaseChain) -> Attrs {
    let hook = match base.hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    };
    let kind = match base.kind {
        ChainKind::Filter => "filter",
        ChainKind::Nat => "nat",
        ChainKind::Route => "route",
    };
    let policy = match base.policy {
        Policy::Drop => 0,
        Policy::Accept => 1,
    };
    let place = Attrs::new().number(1, hook).number(2, base.priority as u32);
    body.text(7, kind).nest(4, place).number(5, policy)
}

/// User data is a list of (type, length, bytes) with one byte each for type and length.
fn with_comment(body: Attrs, attribute: u16, kind: u8, comment: Option<&str>) -> Attrs {
    match comment {
        Some(comment) => body.bytes(attribute, &comment_data(kind, comment)),
        None => body,
    }
}

fn comment_data(kind: u8, comment: &str) -> Vec<u8> {
    let mut end = comment.len().min(COMMENT_BYTES);
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    let mut data = vec![kind, end as u8 + 1];
    data.extend_from_slice(&comment.as_bytes()[..end]);
    data.push(0);
    data
}

/// User data for nft's listing only: the key's byte order (1 host, 2 network) and a comment.
fn set_user_data(order: u32, comment: Option<&str>) -> Vec<u8> {
    let mut data = vec![0, 4];
    data.extend_from_slice(&order.to_ne_bytes());
    if let Some(comment) = comment {
        let end = comment.len().min(COMMENT_BYTES - 8);
        data.extend(comment_data(7, comment.get(..end).unwrap_or_default()));
    }
    data
}

/// The element that ends an interval: the value after `last`, or nothing after the greatest value.
fn interval_end(last: &Value) -> Option<Attrs> {
    let mut bytes = last.bytes();
    let carried = bytes.iter_mut().rev().find_map(|byte| {
        *byte = byte.wrapping_add(1);
        (*byte != 0).then_some(())
    });
    carried?;
    let key = Attrs::new().bytes(1, &bytes);
    Some(Attrs::new().nest(1, key).number(3, ELEMENT_INTERVAL_END))
}

fn element(key: &[Value], value: Option<&Element>) -> Attrs {
    let mut bytes = Vec::new();
    for part in key {
        bytes.extend(part.bytes());
        if key.len() > 1 {
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
    }
    let mut data = Attrs::new().nest(1, Attrs::new().bytes(1, &bytes));
    if let Some(verdict) = value.and_then(|element| element.verdict.as_ref()) {
        data = data.nest(2, verdict_data(verdict));
    }
    let comment = value.and_then(|element| element.comment.as_deref());
    with_comment(data, 6, 0, comment)
}

fn verdict_data(verdict: &Verdict) -> Attrs {
    let (code, chain) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
    };
    let mut inner = Attrs::new().number(1, code as u32);
    if let Some(chain) = chain {
        inner = inner.text(2, chain);
    }
    Attrs::new().nest(2, inner)
}

fn expr(list: Attrs, name: &str, data: Attrs) -> Attrs {
    list.nest(1, Attrs::new().text(1, name).nest(2, data))
}

/// The number of the register that starts at this 32-bit slot.
fn register(slot: usize) -> u32 {
    if slot.is_multiple_of(4) { 1 + slot as u32 / 4 } else { 8 + slot as u32 }
}

fn load_all(mut list: Attrs, fields: &[Field]) -> Attrs {
    let mut slot = 0;
    for field in fields {
        list = load(list, field, slot);
        slot += field.length().div_ceil(4);
    }
    list
}

fn load(list: Attrs, field: &Field, slot: usize) -> Attrs {
    let to = register(slot);
    let payload = |list, base, offset| {
        let data = Attrs::new()
            .number(1, to)
            .number(2, base)
            .number(3, offset)
            .number(4, field.length() as u32);
        expr(list, "payload", data)
    };
    let meta = |list, key| expr(list, "meta", Attrs::new().number(2, key).number(1, to));
    let ct = |list, key| expr(list, "ct", Attrs::new().number(2, key).number(1, to));
    let fib =
        |list, flags| expr(list, "fib", Attrs::new().number(3, flags).number(2, 3).number(1, to));
    match field {
        Field::Saddr(Ip::V4) => payload(list, 1, 12),
        Field::Daddr(Ip::V4) => payload(list, 1, 16),
        Field::Saddr(Ip::V6) => payload(list, 1, 8),
        Field::Daddr(Ip::V6) => payload(list, 1, 24),
        Field::Dport => payload(list, 2, 2),
        Field::Icmpv6Type => payload(list, 2, 0),
        Field::Mark => meta(list, 3),
        Field::Iifname => meta(list, 6),
        Field::Oifname => meta(list, 7),
        Field::L4proto => meta(list, 16),
        Field::CtState => ct(list, 0),
        Field::CtStatus => ct(list, 2),
        Field::CtDirection => ct(list, 1),
        Field::FibSaddrType => fib(list, 1),
        Field::FibDaddrType => fib(list, 2),
        Field::Random(modulus) => {
            let data = Attrs::new().number(1, to).number(2, *modulus).number(3, 1).number(4, 0);
            expr(list, "numgen", data)
        }
    }
}

fn compare(list: Attrs, op: Op, bytes: &[u8]) -> Attrs {
    let op = match op {
        Op::Eq => 0,
        Op::Ne => 1,
    };
    relate(list, op, bytes)
}

/// Compares register 1 by an operator's number.
fn relate(list: Attrs, op: u32, bytes: &[u8]) -> Attrs {
    expr(list, "cmp", Attrs::new().number(1, 1).number(2, op).nest(3, value(bytes)))
}

fn value(bytes: &[u8]) -> Attrs {
    Attrs::new().bytes(1, bytes)
}

fn bitwise(list: Attrs, mask: &[u8], xor: &[u8]) -> Attrs {
    let data = Attrs::new()
        .number(1, 1)
        .number(2, 1)
        .number(3, mask.len() as u32)
        .nest(4, value(mask))
        .nest(5, value(xor));
    expr(list, "bitwise", data)
}

fn any_bit(list: Attrs, bits: u32, op: Op) -> Attrs {
    compare(bitwise(list, &bits.to_ne_bytes(), &[0; 4]), op, &[0; 4])
}

fn set_mark(list: Attrs, and: u32, xor: u32) -> Attrs {
    let list = load(list, &Field::Mark, 0);
    let list = bitwise(list, &and.to_ne_bytes(), &xor.to_ne_bytes());
    expr(list, "meta", Attrs::new().number(2, 3).number(3, 1))
}

fn immediate(list: Attrs, to: u32, data: Attrs) -> Attrs {
    expr(list, "immediate", Attrs::new().number(1, to).nest(2, data))
}

fn dnat(list: Attrs, to: &SocketAddr) -> Attrs {
    let family = match to {
        SocketAddr::V4(_) => Family::Ip,
        SocketAddr::V6(_) => Family::Ip6,
    };
    let list = immediate(list, 1, value(&octets(&to.ip())));
    let list = immediate(list, 2, value(&to.port().to_be_bytes()));
    let data = Attrs::new()
        .number(1, 1)
        .number(2, u32::from(family.number()))
        .number(3, 1)
        .number(5, 2)
        .number(7, 2);
    expr(list, "nat", data)
}

fn octets(address: &std::net::IpAddr) -> Vec<u8> {
    match address {
        std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
        std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

impl Family {
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ip => 2,
            Self::Ip6 => 10,
        }
    }
}

impl Type {
    /// nft's number for this type; the kernel stores it without interpretation.
    fn number(self) -> u32 {
        match self {
            Self::Ipv4Addr => 7,
            Self::Ipv6Addr => 8,
            Self::InetProto => 12,
            Self::InetService => 13,
            Self::Mark => 19,
            Self::Ifname => 41,
        }
    }

    fn length(self) -> usize {
        match self {
            Self::Ipv4Addr | Self::Mark => 4,
            Self::Ipv6Addr | Self::Ifname => 16,
            Self::InetProto => 1,
            Self::InetService => 2,
        }
    }

    fn byte_order(self) -> u32 {
        match self {
            Self::Mark | Self::Ifname => 1,
            _ => 2,
        }
    }
}

impl Field {
    fn length(&self) -> usize {
        match self {
            Self::Saddr(Ip::V6) | Self::Daddr(Ip::V6) | Self::Iifname | Self::Oifname => 16,
            Self::L4proto | Self::Icmpv6Type | Self::CtDirection => 1,
            Self::Dport => 2,
            _ => 4,
        }
    }

    /// Type, length and byte order of this field as the key of a map in a rule.
    fn map_key(&self) -> (u32, u32, u32) {
        let kind = match self {
            Self::Saddr(ip) | Self::Daddr(ip) => ip.addr_type(),
            Self::L4proto => Type::InetProto,
            Self::Dport => Type::InetService,
            Self::Iifname | Self::Oifname => Type::Ifname,
            Self::Mark => Type::Mark,
            _ => return (TYPE_INTEGER, 4, 1),
        };
        (kind.number(), kind.length() as u32, kind.byte_order())
    }

    fn bytes_of(&self, value: &Value) -> Vec<u8> {
        let bytes = value.bytes();
        debug_assert_eq!(bytes.len(), self.length(), "{self} takes no {value}");
        bytes
    }
}

impl Value {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Ip(address) => octets(address),
            Self::Proto(proto) => vec![proto.number()],
            Self::Port(port) => port.to_be_bytes().to_vec(),
            Self::Byte(byte) => vec![*byte],
            Self::Number(number) => number.to_ne_bytes().to_vec(),
            Self::Name(name) => {
                let mut bytes = name.as_bytes().to_vec();
                bytes.resize(16, 0);
                bytes
            }
        }
    }
}
