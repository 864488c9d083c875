//! The kernel's rules equal the model: compared with the listing of the real `nft`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use base::rng;
use net::netns;
use net::nft::{
    BaseChain, ChainKind, Element, Error, Family, Field, Hook, Ip, Nft, Op, Policy, Proto, Ruleset,
    Set, Stmt, Table, Type, Value, Verdict, ct_state, diff,
};

use crate::lab::{Netns, ip, net, skipped};

/// The output of `nft list ruleset`, with numeric priorities; none when the program is not installed.
fn listing(at: &Path) -> Option<String> {
    let output = netns::run(at, || Command::new("nft").args(["-y", "list", "ruleset"]).output());
    match output.expect("enter") {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8(output.stdout).expect("text"))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no nft program to compare with");
            None
        }
        Err(error) => panic!("nft: {error}"),
    }
}

/// The listing as blocks by table and header, with lines in order and elements sorted: the kernel
/// has its own order of tables and elements.
fn normal(text: &str) -> BTreeMap<(String, String), Vec<String>> {
    let mut blocks = BTreeMap::new();
    let (mut table, mut block) = (String::new(), String::new());
    let mut elements: Option<String> = None;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(list) = &mut elements {
            list.push_str(line);
        } else if let Some(list) = line.strip_prefix("elements = {") {
            elements = Some(list.to_owned());
        } else if line.starts_with("table ") {
            (table, block) = (line.to_owned(), String::new());
            blocks.insert((table.clone(), String::new()), Vec::new());
            continue;
        } else if line.ends_with('{') {
            block = line.to_owned();
            blocks.insert((table.clone(), block.clone()), Vec::new());
            continue;
        }
        let lines = blocks.entry((table.clone(), block.clone())).or_default();
        match &elements {
            Some(list) if list.ends_with('}') => {
                let mut parts: Vec<&str> =
                    list.trim_end_matches('}').split(',').map(str::trim).collect();
                parts.sort_unstable();
                lines.push(parts.join(", "));
                elements = None;
            }
            Some(_) => {}
            None if line == "}" => block.clear(),
            None => lines.push(line.to_owned()),
        }
    }
    blocks
}

fn assert_kernel_holds(at: &Path, model: &Ruleset) {
    if let Some(text) = listing(at) {
        assert_eq!(normal(&text), normal(&model.to_string()), "kernel:\n{text}\nmodel:\n{model}");
    }
}

fn base(kind: ChainKind, hook: Hook, priority: i32) -> Option<BaseChain> {
    Some(BaseChain { kind, hook, priority, policy: Policy::Accept })
}

fn set(key: &[Type]) -> Set {
    Set { key: key.to_vec(), ..Set::default() }
}

fn map(key: &[Type]) -> Set {
    Set { map: true, ..set(key) }
}

fn goto(chain: &str) -> Element {
    let comment = Some(format!("to {chain}"));
    Element { verdict: Some(Verdict::Goto(chain.into())), comment, ..Element::default() }
}

/// Every kind of statement, set and chain.
fn kitchen_sink(family: Ip) -> Table {
    let mut t = Table { comment: Some("all there is".into()), ..Table::default() };
    let (one, prefix) = match family {
        Ip::V4 => ("10.96.0.1", "10.42.0.0/20"),
        Ip::V6 => ("fd00::1", "fd00:1::/61"),
    };
    let (saddr, daddr) = (Field::Saddr(family), Field::Daddr(family));
    let service = [family.addr_type(), Type::InetProto, Type::InetService];
    t.sets.insert("ips".into(), Set { comment: Some("set".into()), ..set(&service[..1]) });
    t.sets.insert("services".into(), Set { comment: Some("map".into()), ..map(&service) });
    t.sets.insert("ports".into(), map(&service[1..]));
    let timeout = Some(Duration::from_secs(10_800));
    let dynamic = Set { dynamic: true, timeout, size: Some(65_535), ..set(&service[..1]) };
    t.sets.insert("affinity".into(), dynamic);
    t.chain("endpoint");
    t.element("ips", vec![Value::Ip(ip(one))], Element::default());
    for port in [80, 443] {
        let key = vec![Value::Ip(ip(one)), Value::Proto(Proto::Tcp), Value::Port(port)];
        t.element("services", key, goto("service/a-b.c_d"));
        t.element("ports", vec![Value::Proto(Proto::Udp), Value::Port(port)], goto("endpoint"));
    }
    t.chain("in").base = base(ChainKind::Nat, Hook::Prerouting, -100);
    t.chain("in").comment = Some("base".into());
    let key = vec![daddr.clone(), Field::L4proto, Field::Dport];
    t.rule("in", vec![Stmt::Vmap { key: key.clone(), map: "services".into() }]);
    let local = Stmt::InSet { key: key[..1].to_vec(), op: Op::Eq, set: "ips".into() };
    t.rule("in", vec![local, Stmt::Vmap { key: key[1..].to_vec(), map: "ports".into() }]);
    let not_pod = Stmt::InNet { field: saddr.clone(), op: Op::Ne, net: net(prefix) };
    let dport = Stmt::Dport { proto: Proto::Tcp, port: 80 };
    t.rule("service/a-b.c_d", vec![dport, not_pod, Stmt::jump("mark")]);
    let known = Stmt::InSet { key: vec![saddr.clone()], op: Op::Eq, set: "affinity".into() };
    t.rule("service/a-b.c_d", vec![known, Stmt::goto("endpoint")]);
    let entries = vec![
        (Value::Number(0), Verdict::Goto("endpoint".into())),
        (Value::Number(1), Verdict::Drop),
    ];
    t.rule("service/a-b.c_d", vec![Stmt::VmapInline { key: Field::Random(2), entries }])
        .comment("spread");
    t.rule("endpoint", vec![Stmt::equals(saddr.clone(), Value::Ip(ip(one))), Stmt::jump("mark")]);
    t.rule("endpoint", vec![Stmt::Update { set: "affinity".into(), key: vec![saddr] }]);
    let tcp = Stmt::equals(Field::L4proto, Value::Proto(Proto::Tcp));
    t.rule("endpoint", vec![tcp, Stmt::Dnat((ip(one), 8080).into())]);
    t.rule("mark", vec![Stmt::MarkOr(0x4000)]);
    t.chain("out").base = base(ChainKind::Nat, Hook::Postrouting, 100);
    let mark = Field::Mark;
    t.rule("out", vec![Stmt::NoBit { field: mark, bits: 0x4000 }, Stmt::Verdict(Verdict::Return)]);
    t.rule("out", vec![Stmt::MarkXor(0x4000)]);
    t.rule("out", vec![Stmt::Masquerade { fully_random: true }]);
    t.chain("filter").base = base(ChainKind::Filter, Hook::Forward, -110);
    let fresh = Stmt::AnyBit { field: Field::CtState, bits: ct_state::NEW };
    t.rule("filter", vec![fresh, Stmt::Counter, Stmt::jump("reject")]);
    let both = ct_state::ESTABLISHED | ct_state::NEW;
    let state = Stmt::AnyBit { field: Field::CtState, bits: both };
    t.rule("filter", vec![state, Stmt::Verdict(Verdict::Accept)]);
    t.rule("filter", vec![Stmt::AnyBit { field: Field::CtStatus, bits: 32 }, Stmt::Counter]);
    let local = Stmt::equals(Field::FibSaddrType, Value::Number(2));
    t.rule("filter", vec![local, Stmt::Verdict(Verdict::Drop)]);
    let eth0 = Stmt::equals(Field::Iifname, Value::Name("eth0".into()));
    t.rule("filter", vec![eth0, Stmt::Verdict(Verdict::Accept)]);
    t.rule("reject", vec![Stmt::Reject]);
    ranges(&mut t, family);
    t
}

/// What network policies use besides.
fn ranges(t: &mut Table, family: Ip) {
    let saddr = Field::Saddr(family);
    let (first, last, alone, greatest) = match family {
        Ip::V4 => ("10.0.0.0", "10.0.0.9", "10.0.1.7", ("255.255.255.7", "255.255.255.255")),
        Ip::V6 => (
            "fd00::",
            "fd00::9",
            "fd00::1:7",
            ("ffff::7", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ),
    };
    let blocks = Set { interval: true, ..set(&[family.addr_type()]) };
    t.sets.insert("blocks".into(), blocks);
    for (from, to) in [(first, last), (alone, alone), greatest] {
        let last = Some(Value::Ip(ip(to)));
        t.element("blocks", vec![Value::Ip(ip(from))], Element { last, ..Element::default() });
    }
    let key = vec![saddr];
    let within = Stmt::InSet { key, op: Op::Eq, set: "blocks".into() };
    t.rule("ranges", vec![within, Stmt::Verdict(Verdict::Return)]);
    let ports = Stmt::DportIn { proto: Proto::Sctp, first: 80, last: 90 };
    t.rule("ranges", vec![ports, Stmt::Verdict(Verdict::Drop)]);
    let reply = Stmt::equals(Field::CtDirection, Value::Byte(1));
    t.rule("ranges", vec![reply, Stmt::Verdict(Verdict::Accept)]);
    if family == Ip::V6 {
        let found = Stmt::Icmpv6In(vec![133, 134, 135, 136, 137]);
        t.rule("ranges", vec![found, Stmt::Verdict(Verdict::Accept)]);
    }
}

#[test]
fn every_statement_reads_as_written() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let mut nft = Nft::open_in(&space.path).expect("socket");
    let mut model = Ruleset::default();
    model.tables.insert((Family::Ip, "sink".into()), kitchen_sink(Ip::V4));
    model.tables.insert((Family::Ip6, "sink".into()), kitchen_sink(Ip::V6));
    nft.apply(&diff(&Ruleset::default(), &model)).expect("first");
    assert_kernel_holds(&space.path, &model);
    // A new process does not know the existing tables.
    nft.apply(&diff(&Ruleset::default(), &model)).expect("adopt");
    assert_kernel_holds(&space.path, &model);
    assert!(diff(&model, &model).is_empty());
    // Another program's table does not change.
    let mut other = Ruleset::default();
    other.table(Family::Inet, "other").comment = Some("not ours".into());
    nft.apply(&diff(&Ruleset::default(), &other)).expect("other");
    nft.apply(&diff(&model, &Ruleset::default())).expect("gone");
    assert_kernel_holds(&space.path, &other);
}

/// A random table from a small space, so that most pairs have common parts.
fn random_table() -> Table {
    let mut t = Table::default();
    let pick = |n| rng::below(n);
    t.sets.insert("m".into(), map(&[Type::Ipv4Addr, Type::InetService]));
    for n in 0..pick(6) {
        let chain = format!("c{n}");
        for _ in 0..pick(3) {
            t.rule(&chain, vec![Stmt::MarkOr(1 << pick(4))]);
        }
        t.chain(&chain);
        for port in 0..pick(4) {
            let key = vec![Value::Ip(ip("10.0.0.1")), Value::Port(port as u16)];
            t.element("m", key, goto(&chain));
        }
    }
    let size = Some(10 + pick(2) as u32);
    if pick(2) == 0 {
        t.sets.insert("s".into(), Set { size, ..set(&[Type::Ipv4Addr]) });
        let key = vec![Field::Saddr(Ip::V4)];
        t.rule("uses", vec![Stmt::InSet { key, op: Op::Eq, set: "s".into() }, Stmt::Counter]);
        for n in 0..pick(5) {
            t.element("s", vec![Value::Ip(ip(&format!("10.0.1.{n}")))], Element::default());
        }
    }
    if pick(2) == 0 {
        t.chain("base").base = base(ChainKind::Filter, Hook::Input, pick(2) as i32);
        t.rule(
            "base",
            vec![Stmt::Vmap { key: vec![Field::Saddr(Ip::V4), Field::Dport], map: "m".into() }],
        );
    }
    t
}

#[test]
fn any_ruleset_can_change_into_any_other() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let mut nft = Nft::open_in(&space.path).expect("socket");
    let mut now = Ruleset::default();
    for _ in 0..60 {
        let mut next = Ruleset::default();
        for name in ["a", "b"] {
            if rng::below(8) > 0 {
                next.tables.insert((Family::Ip, name.into()), random_table());
            }
        }
        let batch = diff(&now, &next);
        nft.apply(&batch).unwrap_or_else(|e| panic!("{e}\n{now}\n{next}\n{:#?}", batch.describe()));
        now = next;
        assert_kernel_holds(&space.path, &now);
    }
}

#[test]
fn a_refused_batch_names_the_request_and_changes_nothing() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let mut nft = Nft::open_in(&space.path).expect("socket");
    let mut good = Ruleset::default();
    good.table(Family::Ip, "t").rule("a", vec![Stmt::Counter]);
    nft.apply(&diff(&Ruleset::default(), &good)).expect("good");
    let mut bad = good.clone();
    bad.table(Family::Ip, "t").rule("b", vec![Stmt::Counter]);
    bad.table(Family::Ip, "t").rule("c", vec![Stmt::jump("nowhere")]);
    let error = nft.apply(&diff(&good, &bad)).expect_err("no such chain");
    let Error::Refused(failures) = &error else { panic!("{error}") };
    assert_eq!(failures.len(), 1, "{error}");
    assert_eq!(failures[0].about, "add [ip] rule t c jump nowhere");
    assert_eq!(failures[0].errno, libc::ENOENT);
    assert_kernel_holds(&space.path, &good);
}

#[test]
fn thousands_of_services_fit_one_transaction() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let mut nft = Nft::open_in(&space.path).expect("socket");
    let mut model = Ruleset::default();
    let t = model.table(Family::Ip, "big");
    t.sets.insert("m".into(), map(&[Type::Ipv4Addr, Type::InetProto, Type::InetService]));
    for n in 0..2000u32 {
        let chain = format!("service-ABCDEFGH-namespace/name-{n}/tcp/http");
        let entries = (0..3u32).map(|i| (Value::Number(i), Verdict::Accept)).collect();
        t.rule(&chain, vec![Stmt::VmapInline { key: Field::Random(3), entries }]);
        let address = std::net::Ipv4Addr::from(0x0a60_0000 + n);
        let key = vec![Value::Ip(address.into()), Value::Proto(Proto::Tcp), Value::Port(80)];
        t.element("m", key, goto(&chain));
    }
    nft.apply(&diff(&Ruleset::default(), &model)).expect("load");
    let mut less = model.clone();
    let t = less.table(Family::Ip, "big");
    let key = t.sets["m"].elements.keys().next().expect("one").clone();
    let chain = "service-ABCDEFGH-namespace/name-0/tcp/http";
    t.sets.get_mut("m").expect("the map").elements.remove(&key);
    t.chains.remove(chain);
    let batch = diff(&model, &less);
    assert_eq!(batch.len(), 3, "{:?}", batch.describe());
    nft.apply(&batch).expect("change");
    assert_kernel_holds(&space.path, &less);
}

#[tokio::test]
async fn probing_the_modules_leaves_nothing() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    net::modules::load(net::modules::SERVICES).await;
    let mut nft = Nft::open_in(&space.path).expect("a socket");
    assert_eq!(net::modules::missing(&mut nft).expect("tried"), Vec::<&str>::new());
    assert!(listing(&space.path).is_none_or(|text| text.trim().is_empty()));
}
