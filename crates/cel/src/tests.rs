//! Expressions and their results.

use std::sync::Arc;

use serde_json::json;

use super::*;

/// Evaluated with the object of [`expressions`].
const EXPRESSIONS: &[(&str, &str)] = &[
    ("self.n + 1 == 4", "true"),
    ("dyn(1) == 1.0 && 2u < 3", "true"),
    ("7 % 3 * 2 - -1", "3"),
    ("1 / 0", "error: division by zero"),
    ("9223372036854775807 + 1", "error: integer overflow"),
    ("self.missing", "error: no such key: missing"),
    ("has(self.missing) || has(self.n)", "true"),
    ("self.missing == 1 || true", "true"),
    ("self.d__dash__e", "true"),
    ("size('é') == 1 && 'é'.size() == 1", "true"),
    ("self.l.all(x, x > 0) && self.l.exists(x, x == 2) && self.l.exists_one(x, x > 2)", "true"),
    ("self.l.map(x, x * 2)", "[2,4,6]"),
    ("self.l.filter(x, x != 2)", "[1,3]"),
    ("self.l.map(x, x > 1, x * x)", "[4,9]"),
    ("self.l.all(x, 10 / (x - 2) > 0 || x == 1)", "error: division by zero"),
    ("self.m.all(k, k in ['a', 'b'])", "true"),
    ("self.m.all(k, v, v > 0)", "true"),
    ("self.l.transformList(i, v, i + v)", "[1,3,5]"),
    ("self.m.transformMap(k, v, v > 1, v * 10)", r#"{"b":20}"#),
    ("cel.bind(x, self.n * 2, x + x)", "12"),
    ("self.?missing.orValue('none')", r#""none""#),
    ("self.?n.orValue(0) + 1", "4"),
    ("self[?'n'].hasValue()", "true"),
    ("optional.of(2).optMap(x, x + 1).value()", "3"),
    ("[1, ?self.?missing, 2]", "[1,2]"),
    ("self.items.map(i, i.k).join('-')", r#""x-y""#),
    ("self.items.sortBy(i, -i.v).map(i, i.k)", r#"["y","x"]"#),
    ("'a,b,c'.split(',')", r#"["a","b","c"]"#),
    ("'hello'.substring(1, 3) + 'HEL'.lowerAscii()", r#""elhel""#),
    ("'abcb'.indexOf('b') + 'abcb'.lastIndexOf('b')", "4"),
    ("'%s has %d (%.2f)'.format(['x', 3, 1.5])", r#""x has 3 (1.50)""#),
    ("'abc'.matches('^[a-z]+$') && 'a1b22'.findAll('[0-9]+') == ['1', '22']", "true"),
    ("[3, 1, 2].sum() + [3, 1].min() + [1, 5].max()", "12"),
    ("[1, 2, 2].isSorted() && [3, 1].sort() == [1, 3] && [1, 1].distinct() == [1]", "true"),
    ("sets.contains([1, 2, 3], [2]) && !sets.intersects([1], [2])", "true"),
    (
        "quantity('1.5Gi').isGreaterThan(quantity('1G')) && isQuantity('1k') && !isQuantity('x')",
        "true",
    ),
    ("quantity('50k').add(2).asInteger()", "50002"),
    ("url('https://a.b:80/p?x=1').getHost() + url('https://a.b:80/p').getPort()", r#""a.b:8080""#),
    (
        "url(':')",
        "error: URL parse error during conversion from string: parse \":\": missing protocol scheme",
    ),
    ("ip('10.0.0.1').family() == 4 && cidr('10.0.0.0/8').containsIP('10.1.2.3')", "true"),
    ("cidr('10.1.2.3/8').masked() == cidr('10.0.0.0/8')", "true"),
    (
        "semver('1.2.3').isLessThan(semver('1.10.0')) && semver('1.0.0-rc.1').isLessThan(semver('1.0.0'))",
        "true",
    ),
    ("format.dns1123Label().validate('A').hasValue()", "true"),
    (
        "timestamp('2024-01-02T03:04:05Z') + duration('1h') == timestamp('2024-01-02T04:04:05Z')",
        "true",
    ),
    ("timestamp('2024-01-02T03:04:05Z').getDayOfWeek()", "2"),
    ("duration('90s').getMinutes()", "1"),
    ("type(1) == int && type('x') == string", "true"),
    ("string(1.5) + string(true) + string(duration('1m'))", r#""1.5true60s""#),
    ("'x' in {'x': 1} && !('y' in ['x'])", "true"),
    ("self.n > 2 ? 'big' : 'small'", r#""big""#),
    ("self.__null__ == null", "true"),
    ("base64.encode(b'hi') + jsonpatch.escapeKey('a/b~')", r#""aGk=a~1b~0""#),
];

fn evaluate(text: &str, self_value: &serde_json::Value) -> String {
    let program = match compile(text, &[("self", Type::Dyn)]) {
        Ok(program) => program,
        Err(error) => return format!("compile: {error}"),
    };
    let value = Value::from_json(self_value, &Type::Dyn);
    let mut budget = Budget::new(100_000);
    match program.evaluate(&|name| (name == "self").then(|| value.clone()), &mut budget) {
        Ok(value) => value.to_json().to_string(),
        Err(error) => format!("error: {error}"),
    }
}

#[test]
fn expressions() {
    let object = json!({
        "n": 3, "s": "abc", "l": [1, 2, 3], "m": { "a": 1, "b": 2 }, "d-e": true, "null": null,
        "items": [{ "k": "x", "v": 1 }, { "k": "y", "v": 2 }],
    });
    let mut wrong = vec![];
    for (text, expected) in EXPRESSIONS {
        let (text, expected) = (*text, *expected);
        let got = evaluate(text, &object);
        if got != expected {
            wrong.push(format!("{text}: {got}, not {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn type_errors_are_refused_before_evaluation() {
    let object = Object {
        name: "object".into(),
        fields: [
            ("n".to_owned(), Type::Int),
            ("s".to_owned(), Type::String),
            ("l".to_owned(), Type::list(Type::String)),
        ]
        .into(),
        is_open: false,
    };
    let variables = [("self", Type::Object(Arc::new(object)))];
    for (text, expected) in [
        ("self.n > 0", ""),
        ("self.l.all(x, x.startsWith('a'))", ""),
        ("self.foo", "ERROR: <input>:1:5: undefined field 'foo'\n | self.foo\n | ....^"),
        (
            "other == 1",
            "ERROR: <input>:1:1: undeclared reference to 'other' (in container '')\n | other == 1\n | ^",
        ),
        (
            "self.n == 'x'",
            "ERROR: <input>:1:8: found no matching overload for '_==_' applied to '(int, string)'\n | self.n == 'x'\n | .......^",
        ),
        (
            "self.s.foo()",
            "ERROR: <input>:1:11: undeclared reference to 'foo' (in container '')\n | self.s.foo()\n | ..........^",
        ),
        (
            "self.s.x",
            "ERROR: <input>:1:7: type 'string' does not support field selection\n | self.s.x\n | ......^",
        ),
    ] {
        let got =
            compile(text, &variables).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(got, expected, "{text}");
    }
    assert!(compile("1 +", &[]).is_err_and(|error| error.0.contains("Syntax error")));
    assert_eq!(*compile("self.n > 1", &variables).expect("fits").kind(), Type::Bool);
    assert!(
        compile("oldSelf == self", &[("self", Type::Dyn), ("oldSelf", Type::Dyn)])
            .is_ok_and(|program| program.uses("oldSelf"))
    );
}

#[test]
fn expensive_expressions_are_stopped() {
    let list = serde_json::Value::from((0..100).collect::<Vec<i32>>());
    let text = "self.all(a, self.all(b, self.all(c, self.all(d, a + b + c + d >= 0))))";
    assert_eq!(evaluate(text, &list), "error: operation cancelled: actual cost limit exceeded");
}

#[test]
fn lists_are_compared_and_added_by_their_kind() {
    let set = Type::List(Arc::new(Type::Int), ListKind::Set);
    let program = compile("a == b && a + b == [1, 2]", &[("a", set.clone()), ("b", set.clone())]);
    let program = program.expect("an expression");
    let (a, b) = (Value::from_json(&json!([1, 2]), &set), Value::from_json(&json!([2, 1]), &set));
    let of = |name: &str| Some(if name == "a" { a.clone() } else { b.clone() });
    assert_eq!(program.evaluate(&of, &mut Budget::new(1000)), Ok(Value::Bool(true)));
}

/// Deeper expressions once crashed the process, because the parser recurses.
#[test]
fn too_deeply_nested_expressions_are_refused() {
    let nested = |depth: usize| format!("{}1{} == 1", "(".repeat(depth), ")".repeat(depth));
    assert!(compile(&nested(64), &[]).is_ok());
    let why = compile(&nested(65), &[]).expect_err("too deep").to_string();
    assert_eq!(why, "ERROR: <input>:-1:0: expression recursion limit exceeded: 64");
    let texts = format!("{:?} == ''", "(".repeat(100));
    assert!(compile(&texts, &[]).is_ok(), "brackets in a text do not nest");
}
