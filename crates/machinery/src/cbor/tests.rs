//! Against the RFC's examples, upstream's options, and whatever comes.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn bytes(hex: &str) -> Vec<u8> {
    let hex: String = hex.split_whitespace().collect();
    let pairs = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal")).collect()
}

/// The examples of RFC 8949, appendix A, that upstream's options let through.
#[test]
fn reads_what_upstream_reads() {
    for (hex, expected) in [
        ("00", "0"),
        ("17", "23"),
        ("1818", "24"),
        ("1b000000e8d4a51000", "1000000000000"),
        ("1b7fffffffffffffff", "9223372036854775807"),
        ("20", "-1"),
        ("3903e7", "-1000"),
        ("3b7fffffffffffffff", "-9223372036854775808"),
        ("f90000", "0.0"),
        ("f93c00", "1.0"),
        ("fb3ff199999999999a", "1.1"),
        ("f97bff", "65504.0"),
        ("fa47c35000", "100000.0"),
        ("f90001", "5.960464477539063e-8"),
        ("fbc010666666666666", "-4.1"),
        ("f4", "false"),
        ("f5", "true"),
        ("f6", "null"),
        ("c0 74 323031332d30332d32315432303a30343a30305a", r#""2013-03-21T20:04:00Z""#),
        ("c1 1a 514b67b0", r#""2013-03-21T20:04:00Z""#),
        ("c1 fb 41d452d9ec200000", r#""2013-03-21T20:04:00.5Z""#),
        ("d6 44 01020304", r#""AQIDBA==""#),
        ("d5 44 fbff0304", r#""-_8DBA""#),
        ("d7 44 01020304", r#""01020304""#),
        ("d6 82 41 ff 61 61", r#"["/w==","a"]"#),
        ("d8 18 45 6449455446", r#""dIETF""#),
        ("d9d9f7 a0", "{}"),
        ("44 49455446", r#""IETF""#),
        ("64 49455446", r#""IETF""#),
        ("62 225c", r#""\"\\""#),
        ("43 61ff62", "\"a\u{fffd}b\""),
        ("80", "[]"),
        ("8301820203820405", "[1,[2,3],[4,5]]"),
        ("a26161016162820203", r#"{"a":1,"b":[2,3]}"#),
        ("a24161016162820203", r#"{"a":1,"b":[2,3]}"#),
        ("5f42010243030405ff", r#""\u0001\u0002\u0003\u0004\u0005""#),
        ("7f657374726561646d696e67ff", r#""streaming""#),
        ("9f018202039f0405ffff", "[1,[2,3],[4,5]]"),
        ("bf61610161629f0203ffff", r#"{"a":1,"b":[2,3]}"#),
    ] {
        let json = to_json(&bytes(hex)).map(|json| String::from_utf8(json).expect("text"));
        assert_eq!(json.as_deref(), Ok(expected), "{hex}");
    }
}

fn malformed(why: &str) -> Error {
    Error::Malformed(why.into())
}

fn inadmissible(why: &str) -> Error {
    Error::Inadmissible(why.into())
}

#[test]
fn refuses_what_no_object_may_hold() {
    for (hex, expected) in [
        (
            "81a2616101416102",
            inadmissible("cbor: found duplicate map key \"a\" at map element index 1"),
        ),
        (
            "c24101",
            malformed("cbor: data item of cbor type tag is not accepted by protocol: bignum"),
        ),
        (
            "a10102",
            inadmissible("cbor: cannot unmarshal positive integer into Go value of type string"),
        ),
        ("61ff", inadmissible("cbor: invalid UTF-8 string")),
        (
            "1bffffffffffffffff",
            inadmissible(
                "cbor: cannot unmarshal positive integer into Go value of type int64 (18446744073709551615 overflows Go's int64)",
            ),
        ),
        (
            "3bffffffffffffffff",
            inadmissible(
                "cbor: cannot unmarshal negative integer into Go value of type int64 (-18446744073709551616 overflows Go's int64)",
            ),
        ),
        (
            "f97e00",
            malformed(
                "cbor: data item of cbor type primitives is not accepted by protocol: floating-point NaN",
            ),
        ),
        (
            "f7",
            inadmissible(
                "cbor: data item of cbor type primitives is not accepted by protocol: simple value 23 is not recognized",
            ),
        ),
        (
            "c0 01",
            inadmissible(
                "cbor: tag number 0 must be followed by text string, got positive integer",
            ),
        ),
    ] {
        assert_eq!(to_json(&bytes(hex)), Err(expected), "{hex}");
    }
}

#[test]
fn refuses_what_is_no_cbor_to_upstream() {
    for (hex, expected) in [
        ("", malformed("EOF")),
        ("18", malformed("unexpected EOF")),
        ("44 0102", malformed("unexpected EOF")),
        ("9b 7fffffffffffffff 01", malformed("unexpected EOF")),
        (
            "9b ffffffffffffffff 01",
            malformed(
                "cbor: array length 18446744073709551615 is too large, it would cause integer overflow",
            ),
        ),
        (
            "5b ffffffffffffffff 01",
            malformed(
                "cbor: byte string length 18446744073709551615 is too large, causing integer overflow",
            ),
        ),
        (
            "c1 f4",
            inadmissible(
                "cbor: tag number 1 must be followed by integer or floating-point number, got primitives",
            ),
        ),
        ("1c", malformed("cbor: invalid additional information 28 for type positive integer")),
        ("ff", malformed("cbor: unexpected \"break\" code")),
        ("f818", malformed("cbor: invalid simple value 24 for type primitives")),
        (
            "5f6161ff",
            malformed(
                "cbor: wrong element type UTF-8 text string for indefinite-length byte string",
            ),
        ),
        ("a000", malformed("cbor: 1 bytes of extraneous data starting at index 1")),
        ("a2616101416102", malformed("cbor: found duplicate map key \"a\" at map element index 1")),
    ] {
        assert_eq!(to_json(&bytes(hex)), Err(expected), "{hex}");
    }
}

#[test]
fn nesting_has_a_limit() {
    // What JSON's reader takes, comes back.
    for depth in [119, 120, 127] {
        let json = format!("{}0{}", "[".repeat(depth), "]".repeat(depth));
        let back = to_json(&object(json.as_bytes()).expect("it nests no deeper than JSON may"));
        assert_eq!(back.as_deref(), Ok(json.as_bytes()), "{depth}");
    }
    assert!(object("[".repeat(128).as_bytes()).is_err());
    for open in [0x81, 0x9f, 0xc6] {
        let deep = to_json(&vec![open; 100_000]);
        assert_eq!(deep, Err(malformed("cbor: exceeded max nested level 128")), "{open:x}");
    }
}

#[test]
fn writes_as_upstream_does() {
    for (json, expected) in [
        ("null", "f6"),
        ("[true,false]", "82f5f4"),
        (
            "[0,23,24,255,256,65536,4294967296]",
            "87 00 17 1818 18ff 190100 1a00010000 1b0000000100000000",
        ),
        ("[-1,-24,-25,-9223372036854775808]", "84 20 37 3818 3b7fffffffffffffff"),
        ("18446744073709551615", "fa5f800000"),
        ("[1.0,1.1,100000.5]", "83 f93c00 fb3ff199999999999a fa47c35040"),
        (r#"{"a":"b","n":[]}"#, "a2 4161 4162 416e 80"),
    ] {
        let mut out = vec![];
        from_json(json.as_bytes(), &mut out).expect("JSON");
        assert_eq!(out, bytes(expected), "{json}");
    }
    assert_eq!(object(br#"{"a":1}"#).expect("JSON"), bytes("d9d9f7 a1 4161 01"));
    assert_eq!(
        watch_frame("ADDED", b"{}").expect("JSON"),
        bytes("d9d9f7 a2 44 74797065 45 4144444544 46 6f626a656374 d9d9f7 a0")
    );
    let many: Value = (0..300).map(|number| (number.to_string(), Value::from(number))).collect();
    let mut out = vec![];
    from_json(many.to_string().as_bytes(), &mut out).expect("JSON");
    assert_eq!(out[..3], bytes("b9 012c"));
}

fn trees() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|value| json!(value)),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 30, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..30).prop_map(Value::from),
            prop::collection::btree_map(".{0,8}", inner, 0..30)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn trees_come_back(tree in trees()) {
        let item = object(tree.to_string().as_bytes()).expect("JSON");
        let json = to_json(&item).expect("reads its own");
        prop_assert_eq!(serde_json::from_slice::<Value>(&json).expect("JSON"), tree);
    }

    /// No input panics, and what is read is JSON.
    #[test]
    fn whatever_comes_is_json_or_refused(body in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(json) = to_json(&body) {
            serde_json::from_slice::<Value>(&json).expect("JSON");
        }
    }
}
