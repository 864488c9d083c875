//! Runs rules on a packet as the kernel does, for the statements that policies use.

use std::net::IpAddr;

use net::nft::{Field, Ip, Op, Proto, Ruleset, Stmt, Table, Value, Verdict, ct_state};
use policy::rules::TABLE;

use crate::naive::Packet;

/// Whether the rules let the first packet of a connection through the hook's chain.
pub fn accepts(rules: &Ruleset, chain: &str, packet: &Packet) -> bool {
    let family = Ip::of(&packet.from).family();
    let table = &rules.tables[&(family, TABLE.to_owned())];
    !matches!(run(table, chain, packet, 0), End::Drop)
}

enum End {
    Accept,
    Drop,
    Return,
}

fn run(table: &Table, chain: &str, packet: &Packet, depth: usize) -> End {
    assert!(depth < 16, "the kernel's limit of jumps");
    for rule in &table.chains[chain].rules {
        for stmt in &rule.stmts {
            let verdict = match step(table, stmt, packet) {
                Step::Next => continue,
                Step::Fails => break,
                Step::Takes(verdict) => verdict,
            };
            match verdict {
                Verdict::Accept => return End::Accept,
                Verdict::Drop => return End::Drop,
                Verdict::Return => return End::Return,
                Verdict::Goto(to) => return run(table, &to, packet, depth + 1),
                Verdict::Jump(to) => match run(table, &to, packet, depth + 1) {
                    End::Return => break,
                    end => return end,
                },
            }
        }
    }
    End::Return
}

enum Step {
    Next,
    Fails,
    Takes(Verdict),
}

fn step(table: &Table, stmt: &Stmt, packet: &Packet) -> Step {
    let proto = |proto: Proto| proto.name().eq_ignore_ascii_case(packet.proto);
    let next = |holds: bool| if holds { Step::Next } else { Step::Fails };
    match stmt {
        Stmt::Verdict(verdict) => Step::Takes(verdict.clone()),
        Stmt::AnyBit { field: Field::CtState, bits } => next(bits & ct_state::NEW != 0),
        Stmt::Match { field: Field::CtDirection, value, .. } => next(*value == Value::Byte(0)),
        Stmt::Match { field: Field::Iifname, .. } | Stmt::Icmpv6In(_) => Step::Fails,
        Stmt::Match { field: Field::L4proto, value: Value::Proto(wanted), .. } => {
            next(proto(*wanted))
        }
        Stmt::DportIn { proto: wanted, first, last } => {
            next(proto(*wanted) && (*first..=*last).contains(&packet.port))
        }
        Stmt::InNet { field, op, net } => {
            next(net.contains(&address(field, packet)) == (*op == Op::Eq))
        }
        Stmt::InSet { key, op, set } => {
            let set = &table.sets[set];
            let Some(key) = values(key, packet) else { return Step::Fails };
            let holds = match set.interval {
                true => set.elements.iter().any(|(first, element)| {
                    let last = element.last.as_ref().unwrap_or(&first[0]);
                    first[0] <= key[0] && key[0] <= *last
                }),
                false => set.elements.contains_key(&key),
            };
            next(holds == (*op == Op::Eq))
        }
        Stmt::Vmap { key, map } => {
            let found = values(key, packet).and_then(|key| table.sets[map].elements.get(&key));
            match found {
                Some(element) => Step::Takes(element.verdict.clone().expect("a map")),
                None => Step::Fails,
            }
        }
        other => panic!("policies do not use {other}"),
    }
}

/// `None`: the packet has no such field.
fn values(fields: &[Field], packet: &Packet) -> Option<Vec<Value>> {
    let all = fields.iter().map(|field| match field {
        Field::L4proto => match packet.proto {
            "TCP" => Some(Value::Proto(Proto::Tcp)),
            "UDP" => Some(Value::Proto(Proto::Udp)),
            "SCTP" => Some(Value::Proto(Proto::Sctp)),
            _ => None,
        },
        Field::Dport => Some(Value::Port(packet.port)),
        field => Some(Value::Ip(address(field, packet))),
    });
    all.collect()
}

fn address(field: &Field, packet: &Packet) -> IpAddr {
    match field {
        Field::Saddr(_) => packet.from,
        Field::Daddr(_) => packet.to,
        other => panic!("{other} is no address"),
    }
}
