//! The ruleset as data: tables, chains, rules, sets and maps. Equal rulesets behave the same. All
//! collections are ordered, so that equal input gives equal text and equal bytes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;

/// Tables by family and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ruleset {
    pub tables: BTreeMap<(Family, String), Table>,
}

impl Ruleset {
    /// `family` is the kernel's number of the family.
    pub fn has_table(&self, family: u8, name: &str) -> bool {
        self.tables.keys().any(|(known, table)| known.number() == family && table == name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    Inet,
    Ip,
    Ip6,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub comment: Option<String>,
    /// Sets and maps; they share one name space.
    pub sets: BTreeMap<String, Set>,
    pub chains: BTreeMap<String, Chain>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The hook where packets enter; none for a chain that is only jumped to.
    pub base: Option<BaseChain>,
    pub comment: Option<String>,
    pub rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseChain {
    pub kind: ChainKind,
    pub hook: Hook,
    pub priority: i32,
    pub policy: Policy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    Filter,
    Nat,
    Route,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Accept,
    Drop,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub stmts: Vec<Stmt>,
    pub comment: Option<String>,
}

/// A set, or with `map` a map from keys to verdicts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Set {
    /// The key's parts; more than one form a concatenation.
    pub key: Vec<Type>,
    pub map: bool,
    /// Elements are ranges of one key part, from the key to [`Element::last`]. They must not touch each other.
    pub interval: bool,
    /// Packets fill it ([`Stmt::Update`]); the diff ignores its elements.
    pub dynamic: bool,
    pub timeout: Option<Duration>,
    pub size: Option<u32>,
    pub comment: Option<String>,
    pub elements: BTreeMap<Vec<Value>, Element>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// Set in maps.
    pub verdict: Option<Verdict>,
    /// In interval sets: the last value of the range; none: the key alone.
    pub last: Option<Value>,
    pub comment: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Ipv4Addr,
    Ipv6Addr,
    InetProto,
    InetService,
    Mark,
    Ifname,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ip {
    V4,
    V6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proto {
    Tcp,
    Udp,
    Sctp,
}

/// A packet field or other value that a rule can match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    Saddr(Ip),
    Daddr(Ip),
    L4proto,
    /// The destination port of TCP, UDP or SCTP.
    Dport,
    /// The type of an ICMPv6 message.
    Icmpv6Type,
    Mark,
    Iifname,
    Oifname,
    CtState,
    CtStatus,
    /// [`Value::Byte`] 0: the direction of the connection's first packet; 1: the reply.
    CtDirection,
    /// The address type of the source (destination) in the routing table; [`Value::Number`] 2 means
    /// "local".
    FibSaddrType,
    FibDaddrType,
    /// A random number below this one.
    Random(u32),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    Ip(IpAddr),
    Proto(Proto),
    Port(u16),
    Byte(u8),
    Number(u32),
    Name(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Eq,
    Ne,
}

/// The bits of [`Field::CtState`].
pub mod ct_state {
    pub const INVALID: u32 = 1;
    pub const ESTABLISHED: u32 = 2;
    pub const RELATED: u32 = 4;
    pub const NEW: u32 = 8;
}

/// A statement of a rule. A failed match ends the rule; other statements act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stmt {
    Match {
        field: Field,
        op: Op,
        value: Value,
    },
    /// An address in (or not in) a network.
    InNet {
        field: Field,
        op: Op,
        net: IpNet,
    },
    /// Matches if any of these bits is set.
    AnyBit {
        field: Field,
        bits: u32,
    },
    /// Matches if none of these bits is set.
    NoBit {
        field: Field,
        bits: u32,
    },
    /// `tcp dport 80`.
    Dport {
        proto: Proto,
        port: u16,
    },
    /// `tcp dport 80-90`.
    DportIn {
        proto: Proto,
        first: u16,
        last: u16,
    },
    /// `meta l4proto icmpv6 icmpv6 type { … }`: any of these types.
    Icmpv6In(Vec<u8>),
    InSet {
        key: Vec<Field>,
        op: Op,
        set: String,
    },
    /// Looks the key up in a map and runs the verdict; continues when the map lacks the key.
    Vmap {
        key: Vec<Field>,
        map: String,
    },
    /// The same, with an anonymous map in the rule.
    VmapInline {
        key: Field,
        entries: Vec<(Value, Verdict)>,
    },
    /// Adds the key to a dynamic set, or restarts its timeout.
    Update {
        set: String,
        key: Vec<Field>,
    },
    MarkOr(u32),
    MarkXor(u32),
    Dnat(SocketAddr),
    Masquerade {
        fully_random: bool,
    },
    /// Answers with "port unreachable".
    Reject,
    Counter,
    Verdict(Verdict),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Jump(String),
    Goto(String),
}

impl Ruleset {
    /// The table, created if missing.
    pub fn table(&mut self, family: Family, name: &str) -> &mut Table {
        self.tables.entry((family, name.to_owned())).or_default()
    }
}

impl Table {
    /// The chain, created if missing.
    pub fn chain(&mut self, name: &str) -> &mut Chain {
        self.chains.entry(name.to_owned()).or_default()
    }

    /// Appends a rule to a chain.
    pub fn rule(&mut self, chain: &str, stmts: Vec<Stmt>) -> &mut Rule {
        let rules = &mut self.chain(chain).rules;
        rules.push(Rule { stmts, comment: None });
        rules.last_mut().expect("just pushed")
    }

    /// Adds an element to an existing set or map.
    pub fn element(&mut self, set: &str, key: Vec<Value>, element: Element) {
        let set = self.sets.get_mut(set).expect("elements come after their set");
        debug_assert_eq!(set.map, element.verdict.is_some());
        set.elements.insert(key, element);
    }
}

impl Ip {
    pub fn of(address: &IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    pub fn family(self) -> Family {
        match self {
            Self::V4 => Family::Ip,
            Self::V6 => Family::Ip6,
        }
    }

    pub fn addr_type(self) -> Type {
        match self {
            Self::V4 => Type::Ipv4Addr,
            Self::V6 => Type::Ipv6Addr,
        }
    }
}

impl Proto {
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl Rule {
    pub fn comment(&mut self, text: &str) {
        self.comment = Some(text.to_owned());
    }
}

impl Stmt {
    pub fn jump(chain: &str) -> Self {
        Self::Verdict(Verdict::Jump(chain.to_owned()))
    }

    pub fn goto(chain: &str) -> Self {
        Self::Verdict(Verdict::Goto(chain.to_owned()))
    }

    pub fn equals(field: Field, value: Value) -> Self {
        Self::Match { field, op: Op::Eq, value }
    }

    /// The named set or map that this statement refers to.
    pub(crate) fn set_name(&self) -> Option<&str> {
        match self {
            Self::InSet { set, .. } | Self::Update { set, .. } => Some(set),
            Self::Vmap { map, .. } => Some(map),
            _ => None,
        }
    }
}
