//! The ruleset as text, in the layout of `nft -y list ruleset`. For golden files and logs only.

use std::fmt::{self, Display, Formatter, Write};
use std::net::SocketAddr;
use std::time::Duration;

use super::model::{
    BaseChain, Chain, ChainKind, Element, Family, Field, Hook, Ip, Op, Policy, Rule, Ruleset, Set,
    Stmt, Table, Type, Value, Verdict, ct_state,
};

impl Display for Ruleset {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for ((family, name), table) in &self.tables {
            writeln!(f, "table {family} {name} {{")?;
            write_table(f, table)?;
            writeln!(f, "}}")?;
        }
        Ok(())
    }
}

fn write_table(f: &mut Formatter<'_>, table: &Table) -> fmt::Result {
    if let Some(comment) = &table.comment {
        writeln!(f, "\tcomment {comment:?}")?;
    }
    let mut first = true;
    for (name, set) in &table.sets {
        if !std::mem::take(&mut first) {
            f.write_char('\n')?;
        }
        write_set(f, name, set)?;
    }
    for (name, chain) in &table.chains {
        if !std::mem::take(&mut first) {
            f.write_char('\n')?;
        }
        write_chain(f, name, chain)?;
    }
    Ok(())
}

fn write_set(f: &mut Formatter<'_>, name: &str, set: &Set) -> fmt::Result {
    let types: Vec<&str> = set.key.iter().map(|t| t.name()).collect();
    let value = if set.map { " : verdict" } else { "" };
    writeln!(f, "\t{} {name} {{", if set.map { "map" } else { "set" })?;
    writeln!(f, "\t\ttype {}{value}", types.join(" . "))?;
    if let Some(size) = set.size {
        writeln!(f, "\t\tsize {size}")?;
    }
    if set.interval {
        writeln!(f, "\t\tflags interval")?;
    }
    match (set.dynamic, set.timeout.is_some()) {
        (true, true) => writeln!(f, "\t\tflags dynamic,timeout")?,
        (true, false) => writeln!(f, "\t\tflags dynamic")?,
        (false, true) => writeln!(f, "\t\tflags timeout")?,
        (false, false) => {}
    }
    if let Some(timeout) = set.timeout {
        writeln!(f, "\t\ttimeout {}", duration(timeout))?;
    }
    if let Some(comment) = &set.comment {
        writeln!(f, "\t\tcomment {comment:?}")?;
    }
    if !set.elements.is_empty() {
        let elements: Vec<String> = set.elements.iter().map(element).collect();
        writeln!(f, "\t\telements = {{ {} }}", elements.join(",\n\t\t\t     "))?;
    }
    writeln!(f, "\t}}")
}

fn element((key_parts, element): (&Vec<Value>, &Element)) -> String {
    let key: Vec<String> = key_parts.iter().map(Value::to_string).collect();
    let mut text = key.join(" . ");
    if let Some(last) = element.last.as_ref().filter(|last| Some(*last) != key_parts.first()) {
        let _ = write!(text, "-{last}");
    }
    if let Some(comment) = &element.comment {
        let _ = write!(text, " comment {comment:?}");
    }
    if let Some(verdict) = &element.verdict {
        let _ = write!(text, " : {verdict}");
    }
    text
}

fn write_chain(f: &mut Formatter<'_>, name: &str, chain: &Chain) -> fmt::Result {
    writeln!(f, "\tchain {name} {{")?;
    if let Some(comment) = &chain.comment {
        writeln!(f, "\t\tcomment {comment:?}")?;
    }
    if let Some(base) = &chain.base {
        writeln!(f, "\t\t{base}")?;
    }
    for rule in &chain.rules {
        writeln!(f, "\t\t{rule}")?;
    }
    writeln!(f, "\t}}")
}

/// A duration in nft's format: `3h`, `1m30s`.
fn duration(time: Duration) -> String {
    let mut rest = time.as_secs();
    let mut text = String::new();
    for (unit, seconds) in [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)] {
        if rest >= seconds {
            let _ = write!(text, "{}{unit}", rest / seconds);
            rest %= seconds;
        }
    }
    text
}

impl Display for Family {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        })
    }
}

impl Display for BaseChain {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ChainKind::Filter => "filter",
            ChainKind::Nat => "nat",
            ChainKind::Route => "route",
        };
        let hook = match self.hook {
            Hook::Prerouting => "prerouting",
            Hook::Input => "input",
            Hook::Forward => "forward",
            Hook::Output => "output",
            Hook::Postrouting => "postrouting",
        };
        let policy = match self.policy {
            Policy::Accept => "accept",
            Policy::Drop => "drop",
        };
        let priority = self.priority;
        write!(f, "type {kind} hook {hook} priority {priority}; policy {policy};")
    }
}

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.stmts.iter().map(Stmt::to_string).collect();
        f.write_str(&parts.join(" "))?;
        match &self.comment {
            Some(comment) => write!(f, " comment {comment:?}"),
            None => Ok(()),
        }
    }
}

impl Display for Stmt {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Match { field, op, value } => {
                write!(f, "{field} {}{}", op.prefix(), named_value(field, value))
            }
            Self::InNet { field, op, net } if net.prefix_len() == net.max_prefix_len() => {
                write!(f, "{field} {}{}", op.prefix(), net.addr())
            }
            Self::InNet { field, op, net } => write!(f, "{field} {}{}", op.prefix(), net.trunc()),
            Self::AnyBit { field, bits } => write!(f, "{field} {}", bit_names(field, *bits)),
            Self::NoBit { field, bits } => write!(f, "{field} & {bits:#010x} == 0x00000000"),
            Self::Dport { proto, port } => write!(f, "{} dport {port}", proto.name()),
            Self::DportIn { proto, first, last } => {
                write!(f, "{} dport {first}-{last}", proto.name())
            }
            Self::Icmpv6In(types) => {
                let names: Vec<String> = types.iter().map(|kind| icmpv6_name(*kind)).collect();
                write!(f, "icmpv6 type {{ {} }}", names.join(", "))
            }
            Self::InSet { key, op, set } => write!(f, "{} {}@{set}", keys(key), op.prefix()),
            Self::Vmap { key, map } => write!(f, "{} vmap @{map}", keys(key)),
            Self::VmapInline { key, entries } => {
                let entries: Vec<String> =
                    entries.iter().map(|(v, to)| format!("{v} : {to}")).collect();
                write!(f, "{key} vmap {{ {} }}", entries.join(", "))
            }
            Self::Update { set, key } => write!(f, "update @{set} {{ {} }}", keys(key)),
            Self::MarkOr(bits) => write!(f, "meta mark set meta mark | {bits:#010x}"),
            Self::MarkXor(bits) => write!(f, "meta mark set meta mark ^ {bits:#010x}"),
            Self::Dnat(SocketAddr::V4(to)) => write!(f, "dnat to {to}"),
            Self::Dnat(SocketAddr::V6(to)) => write!(f, "dnat to [{}]:{}", to.ip(), to.port()),
            Self::Masquerade { fully_random: true } => f.write_str("masquerade fully-random"),
            Self::Masquerade { fully_random: false } => f.write_str("masquerade"),
            Self::Reject => f.write_str("reject"),
            Self::Counter => f.write_str("counter packets 0 bytes 0"),
            Self::Verdict(verdict) => verdict.fmt(f),
        }
    }
}

fn keys(fields: &[Field]) -> String {
    fields.iter().map(Field::to_string).collect::<Vec<_>>().join(" . ")
}

fn named_value(field: &Field, value: &Value) -> String {
    match (field, value) {
        (Field::FibSaddrType | Field::FibDaddrType, Value::Number(2)) => "local".into(),
        (Field::CtDirection, Value::Byte(0)) => "original".into(),
        (Field::CtDirection, Value::Byte(_)) => "reply".into(),
        (Field::Mark, Value::Number(mark)) => format!("{mark:#010x}"),
        _ => value.to_string(),
    }
}

fn icmpv6_name(kind: u8) -> String {
    match kind {
        133 => "nd-router-solicit".into(),
        134 => "nd-router-advert".into(),
        135 => "nd-neighbor-solicit".into(),
        136 => "nd-neighbor-advert".into(),
        137 => "nd-redirect".into(),
        other => other.to_string(),
    }
}

fn bit_names(field: &Field, bits: u32) -> String {
    let names: &[(u32, &str)] = match field {
        Field::CtState => &[
            (ct_state::INVALID, "invalid"),
            (ct_state::ESTABLISHED, "established"),
            (ct_state::RELATED, "related"),
            (ct_state::NEW, "new"),
        ],
        Field::CtStatus => &[(16, "snat"), (32, "dnat")],
        _ => return format!("& {bits:#010x} != 0x00000000"),
    };
    let set: Vec<&str> = names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, n)| *n).collect();
    set.join(",")
}

impl Op {
    fn prefix(self) -> &'static str {
        match self {
            Self::Eq => "",
            Self::Ne => "!= ",
        }
    }
}

impl Display for Field {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Saddr(Ip::V4) => "ip saddr",
            Self::Saddr(Ip::V6) => "ip6 saddr",
            Self::Daddr(Ip::V4) => "ip daddr",
            Self::Daddr(Ip::V6) => "ip6 daddr",
            Self::L4proto => "meta l4proto",
            Self::Dport => "th dport",
            Self::Icmpv6Type => "icmpv6 type",
            Self::Mark => "meta mark",
            Self::Iifname => "iifname",
            Self::Oifname => "oifname",
            Self::CtState => "ct state",
            Self::CtStatus => "ct status",
            Self::CtDirection => "ct direction",
            Self::FibSaddrType => "fib saddr type",
            Self::FibDaddrType => "fib daddr type",
            Self::Random(modulus) => return write!(f, "numgen random mod {modulus}"),
        })
    }
}

impl Display for Value {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Proto(proto) => f.write_str(proto.name()),
            Self::Port(port) => port.fmt(f),
            Self::Byte(byte) => byte.fmt(f),
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => f.write_str("accept"),
            Self::Drop => f.write_str("drop"),
            Self::Return => f.write_str("return"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
            Self::Goto(chain) => write!(f, "goto {chain}"),
        }
    }
}

impl Type {
    fn name(self) -> &'static str {
        match self {
            Self::Ipv4Addr => "ipv4_addr",
            Self::Ipv6Addr => "ipv6_addr",
            Self::InetProto => "inet_proto",
            Self::InetService => "inet_service",
            Self::Mark => "mark",
            Self::Ifname => "ifname",
        }
    }
}
