//! Messages, trees and envelopes, over a table that has every shape and kind of field.

use serde_json::{Value, json};

use super::*;

const TABLE: &str = "@meta.v1\tmeta.k8s.io/v1\nOptions\n\t1\tdryRun\t[]string\t?\n\
    @a.v1\ta/v1\n\
    Inner\n\t1\tinner\tbool\t?\n\
    Part\n\t1\tn\tint64\n\
    Thing\n\t1\tname\tstring\t?\n\t2\tcount\tint32\t*?\n\t3\ttags\t[]string\t?\n\t4\tlabels\t{}string\t?\n\
    \t5\tinner\t<>Inner\n\t6\tdata\t{}bytes\t?\n\t7\tports\t[]int32\t?\n\t8\tat\ttime\t*?\n\
    \t9\tport\tintstr\t*?\n\t10\tparts\t[]Part\t?\n\t11\tthing\tThing\t*?\n\t12\traw\traw\t*?\n\
    \t13\twords\tstrings\t?\n\t14\talt\tor-list:Part\t*?\n\t15\teither\tor-bool:Part\t*?\n\
    \t16\tdeps\t{}or-strings:Part\t?\n\t17\tsize\tquantity\t*?\n\t18\twait\tduration\t*?\n\
    \t19\tbeat\tmicrotime\t*?\n\t20\tratio\tdouble\t*?\n\
    ThingList\n\t1\tmetadata\tPart\t?\n\t2\titems\t[]Thing\n";

fn descriptors() -> Descriptors {
    Descriptors::parse(TABLE, "meta.k8s.io/v1")
}

fn thing() -> MessageId {
    descriptors().kind("a/v1", "Thing").expect("a kind of the table")
}

fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![];
    wire::put_bytes(&mut out, number, bytes);
    out
}

fn number(number: u32, value: i64) -> Vec<u8> {
    let mut out = vec![];
    wire::put_number(&mut out, number, value);
    out
}

/// What is always there, as nothing in the message is a pointer.
fn with_always(rest: &[u8]) -> Vec<u8> {
    [&field(1, b"")[..], rest].concat()
}

#[test]
fn messages_become_trees() {
    let check = |bytes: &[u8], expected: Value| {
        let tree = descriptors().decode(thing(), bytes);
        assert_eq!(tree.map(Value::Object), Ok(expected), "{bytes:?}");
    };
    check(&[], json!({}));
    check(&field(1, b""), json!({}));
    check(&field(1, b"n"), json!({"name": "n"}));
    check(&field(1, &[0xff]), json!({"name": "\u{fffd}"}));
    check(&[field(1, b"n"), field(1, b"")].concat(), json!({}));
    check(&number(2, 0), json!({"count": 0}));
    check(&number(2, -1), json!({"count": -1}));
    check(&[field(3, b"a"), field(3, b"")].concat(), json!({"tags": ["a", ""]}));
    check(&field(4, &[field(1, b"k"), field(2, b"v")].concat()), json!({"labels": {"k": "v"}}));
    check(&field(4, &field(1, b"k")), json!({"labels": {"k": ""}}));
    check(&field(5, &number(1, 1)), json!({"inner": true}));
    check(&field(6, &[field(1, b"k"), field(2, b"v")].concat()), json!({"data": {"k": "dg=="}}));
    check(&field(7, &[80, 0xbb, 3]), json!({"ports": [80, 443]}));
    check(&[number(7, 80), number(7, 443)].concat(), json!({"ports": [80, 443]}));
    check(&field(8, b""), json!({}));
    check(&field(8, &number(1, 60)), json!({"at": "1970-01-01T00:01:00Z"}));
    check(&field(9, &number(2, 80)), json!({"port": 80}));
    check(&field(9, &[number(1, 1), field(3, b"http")].concat()), json!({"port": "http"}));
    check(&[field(10, &number(1, 1)), field(10, b"")].concat(), json!({"parts": [{"n": 1}, {}]}));
    // One message in two pieces.
    let pieces = [field(11, &field(1, b"n")), field(11, &number(2, 5))].concat();
    check(&pieces, json!({"thing": {"name": "n", "count": 5}}));
    check(&field(12, &field(1, br#"{"a":1}"#)), json!({"raw": {"a": 1}}));
    check(&field(12, b""), json!({}));
    let sealed =
        descriptors().seal(&json!({"apiVersion": "a/v1", "kind": "Part", "n": 7})).expect("seals");
    check(
        &field(12, &field(1, &sealed)),
        json!({"raw": {"apiVersion": "a/v1", "kind": "Part", "n": 7}}),
    );
    check(&[field(99, b"later"), field(1, b"n")].concat(), json!({"name": "n"}));
    // A group with a group in it, which no client sends.
    check(
        &[&[0x9b, 6, 0x0b, 8, 1, 0x0c, 0x9c, 6][..], &field(1, b"n")].concat(),
        json!({"name": "n"}),
    );
}

#[test]
fn trees_become_messages_and_trees_again() {
    let check = |tree: Value, bytes: &[u8]| {
        let mut out = vec![];
        descriptors().encode(thing(), &tree, &mut out).expect("a good tree");
        let mut expected = with_always(bytes);
        if bytes.starts_with(&field(1, b"n")) {
            expected.drain(..2);
        }
        let inner = field(5, &number(1, 0));
        let at = expected.windows(inner.len()).position(|window| window == inner);
        assert!(at.is_some() || tree.get("inner").is_some(), "{tree}: {out:?}");
        assert_eq!(out, expected, "{tree}");
        assert_eq!(descriptors().decode(thing(), &out).map(Value::Object), Ok(tree));
    };
    let none = field(5, &number(1, 0));
    check(json!({}), &none);
    check(json!({"name": "n"}), &[field(1, b"n"), none.clone()].concat());
    check(
        json!({"count": -1, "tags": ["a"]}),
        &[number(2, -1), field(3, b"a"), none.clone()].concat(),
    );
    check(json!({"inner": true}), &field(5, &number(1, 1)));
    let long = "x".repeat(300);
    check(
        json!({"thing": {"name": long}}),
        &[none.clone(), field(11, &[field(1, long.as_bytes()), none.clone()].concat())].concat(),
    );
    let after = |rest: &[u8]| [&none[..], rest].concat();
    check(
        json!({"at": "2026-01-02T03:04:05Z"}),
        &after(&field(8, &[number(1, 1_767_323_045), number(2, 0)].concat())),
    );
    check(
        json!({"port": "http"}),
        &after(&field(9, &[number(1, 1), number(2, 0), field(3, b"http")].concat())),
    );
    check(
        json!({"parts": [{"n": 1}, {"n": 0}]}),
        &after(&[field(10, &number(1, 1)), field(10, &number(1, 0))].concat()),
    );
    check(
        json!({"words": ["a", "b"]}),
        &after(&field(13, &[field(1, b"a"), field(1, b"b")].concat())),
    );
    check(json!({"alt": [{"n": 1}]}), &after(&field(14, &field(2, &number(1, 1)))));
    check(json!({"alt": {"n": 1}}), &after(&field(14, &field(1, &number(1, 1)))));
    check(json!({"either": false}), &after(&field(15, &number(1, 0))));
    check(
        json!({"either": {"n": 1}}),
        &after(&field(15, &[number(1, 1), field(2, &number(1, 1))].concat())),
    );
    check(
        json!({"deps": {"k": ["a"]}}),
        &after(&field(16, &[field(1, b"k"), field(2, &field(2, b"a"))].concat())),
    );
    check(json!({"size": "1Gi"}), &after(&field(17, &field(1, b"1Gi"))));
    check(json!({"wait": "1m30s"}), &after(&field(18, &number(1, 90_000_000_000))));
    let beat = [number(1, 0), number(2, 1000)].concat();
    check(json!({"beat": "1970-01-01T00:00:00.000001Z"}), &after(&field(19, &beat)));
}

#[test]
fn broken_messages_are_refused() {
    let check = |bytes: &[u8], expected: Error| {
        assert_eq!(descriptors().decode(thing(), bytes), Err(expected), "{bytes:?}");
    };
    check(&[0x0a, 5, b'x'], Error::Truncated);
    check(&[0x0a], Error::Truncated);
    check(&[0xff; 12], Error::Overflow);
    check(&[0x0f], Error::IllegalWireType(7));
    check(&[0x0c], Error::IllegalWireType(4));
    check(&[0x02, 0], Error::IllegalTag(0, 2));
    check(&[0x08, 1], Error::WrongWireType { field: "name", found: 0 });
    let mut deep = vec![];
    for _ in 0..200 {
        deep = field(11, &deep);
    }
    check(&deep, Error::TooDeep);
    let mut deep = json!({});
    for _ in 0..200 {
        deep = json!({ "thing": deep });
    }
    assert_eq!(descriptors().encode(thing(), &deep, &mut vec![]), Err(Error::TooDeep));
    let wrong = descriptors().encode(thing(), &json!({"name": 5}), &mut vec![]);
    assert_eq!(wrong, Err(Error::Value { field: "name", why: "unexpected a number".into() }));
}

#[test]
fn envelopes_open() {
    let check = |body: &[u8], expected: Result<Value, Error>| {
        assert_eq!(descriptors().unseal(body).map(Value::Object), expected, "{body:?}");
    };
    check(b"", Err(Error::Empty));
    check(b"{}", Err(Error::NoPrefix));
    check(b"k8s\0", Err(Error::EmptyBody));
    assert!(Error::NoPrefix.to_string().ends_with(&format!("{MAGIC:?}").replace(',', "")));
    let sealed = |tree: Value| descriptors().seal(&tree).expect("seals");
    let tree = json!({"apiVersion": "a/v1", "kind": "Part", "n": 7});
    check(&sealed(tree.clone()), Ok(tree));
    // Options are written under the group of what they are for.
    let options = json!({"apiVersion": "a/v1", "kind": "Options", "dryRun": ["All"]});
    check(&sealed(options.clone()), Ok(options));
    let zebra = descriptors().seal(&json!({"apiVersion": "v9", "kind": "Zebra"}));
    assert_eq!(zebra, Err(Error::NoMessage("Zebra in version \"v9\"".into())));
}

#[test]
fn lists_are_the_same_piece_by_piece() {
    let descriptors = descriptors();
    let mut writer =
        ListWriter::new(&descriptors, "a/v1", "ThingList", &json!({"n": 3})).expect("a list kind");
    for item in [json!({"name": "a"}), json!({"name": "b"})] {
        writer.push(&item).expect("an item");
    }
    let whole = json!({"apiVersion": "a/v1", "kind": "ThingList", "metadata": {"n": 3}, "items": [{"name": "a"}, {"name": "b"}]});
    assert_eq!(writer.finish(), descriptors.seal(&whole));
}

#[test]
fn watch_frames_have_their_length_in_front() {
    let frame = watch_frame("ADDED", b"k8s\0x");
    assert_eq!(frame, [&[0, 0, 0, 16][..], b"\x0a\x05ADDED\x12\x07\x0a\x05k8s\0x"].concat());
}
