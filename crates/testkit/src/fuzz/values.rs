//! Values made from a schema: mostly valid, sometimes invalid.
//!
//! In: the schemas of an OpenAPI document, a seed. Out: JSON trees. The same seed gives the same trees.
//! Strings come from typical values of such fields (quantities, selectors, addresses, expressions), from
//! quoted words in the field's description, and from a list of malicious ones.

use serde_json::{Map, Value, json};

/// Deeper than any kind needs; also ends recursive schemas.
const DEPTH: usize = 12;

/// Random numbers from a seed (SplitMix64), so that a finding can be repeated.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In `0..limit`; 0 for a limit of 0.
    pub fn below(&mut self, limit: usize) -> usize {
        if limit == 0 { 0 } else { (self.next() % limit as u64) as usize }
    }

    /// True in this percentage of calls.
    pub fn percent(&mut self, share: u64) -> bool {
        self.next() % 100 < share
    }

    pub fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

const USUAL: &[&str] = &[
    "a",
    "b",
    "default",
    "kube-system",
    "x-1",
    "app",
    "nginx:1",
    "1",
    "0",
    "2",
    "80",
    "http",
    "100m",
    "1Gi",
    "1Mi",
    "10%",
    "TCP",
    "Always",
    "true",
    "false",
    "10.0.0.1",
    "10.0.0.0/24",
    "fd00::1",
    "fd00::/64",
    "example.com",
    "example.com/name",
    "a=b",
    "a in (b,c),!d",
    "/healthz",
    "/tmp",
    "*/5 * * * *",
    "2026-01-02T03:04:05Z",
    "2026-01-02T03:04:05.000006Z",
    "1h",
    "5s",
    "YQ==",
    "v1",
    "apps/v1",
    "self.a == oldSelf.a",
    "object.metadata.name == 'a'",
    "[1,2].all(x, x > 0)",
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "In",
    "Exists",
    "DoNotSchedule",
    "RollingUpdate",
    "system:masters",
    "kubernetes.io/tls",
    "IPv4",
    "node1",
    "{.a}",
    "$(A)",
    "spec.a",
    ".spec.replicas",
    "Pod",
    "pods",
    "*",
];

const NASTY: &[&str] = &[
    "",
    " ",
    "\u{0}",
    "\n",
    "é",
    "😀",
    "\u{202e}",
    "\u{feff}",
    "..",
    "../../etc/passwd",
    "%2e%2e%2f",
    "%",
    "~1",
    "-1",
    "9223372036854775808",
    "1e308",
    "1e-999",
    "-0",
    "NaN",
    "0x10",
    "1EEi",
    "99999999999999999999Ei",
    "1.000000000000000000000000001",
    "9999-99-99T99:99:99Z",
    "0000-01-01T00:00:00Z",
    "10.0.0.256",
    "0.0.0.0/0",
    "::/0",
    "1:2:3:4:5:6:7:8:9",
    "a,b,,=",
    "a in (",
    "!=",
    "((((((((((",
    "[[[[[[[[[[",
    "{{}}",
    "${",
    "$(",
    "'",
    "\"",
    "\\",
    "\\u0000",
    "* * * * * *",
    "@every 1ns",
    "60 24 32 13 8",
    "CRON_TZ=x * * * * *",
    "a.b.c.d.e.f/g/h",
    "-a-",
    "A_B",
    "a..b",
    "====",
    "(?P<n>(a+)+)$",
    "a{99999}",
    "1d",
    "-5s",
    "9999999999h",
];

/// Any string.
pub fn text(rng: &mut Rng) -> String {
    match rng.below(20) {
        0..=12 => rng.pick(USUAL).to_owned(),
        13..=17 => rng.pick(NASTY).to_owned(),
        18 => rng.pick(NASTY).repeat(rng.below(300)),
        _ => {
            let length = rng.below(40);
            (0..length).filter_map(|_| char::from_u32((rng.next() % 0x3000) as u32)).collect()
        }
    }
}

pub fn number(rng: &mut Rng) -> Value {
    const NUMBERS: &[i64] = &[
        0,
        1,
        2,
        3,
        10,
        80,
        100,
        443,
        1000,
        65535,
        65536,
        -1,
        -2,
        2_147_483_647,
        2_147_483_648,
        -2_147_483_648,
        -2_147_483_649,
        i64::MAX,
        i64::MIN,
        86400,
        4294967296,
        1 << 53,
    ];
    if rng.percent(3) {
        return json!(rng.pick(&[&0.5, &-0.0, &1e300, &1.0, &1e19, &-1e19]));
    }
    let likely = if rng.percent(60) { 9 } else { NUMBERS.len() };
    json!(NUMBERS[rng.below(likely)])
}

/// Any JSON value.
pub fn anything(rng: &mut Rng, depth: usize) -> Value {
    match rng.below(if depth == 0 { 5 } else { 8 }) {
        0 => Value::Null,
        1 => json!(rng.percent(50)),
        2 => number(rng),
        3 | 4 => json!(text(rng)),
        5 => (0..rng.below(4)).map(|_| anything(rng, depth - 1)).collect(),
        6 => {
            let count = rng.below(4);
            Value::Object((0..count).map(|_| (text(rng), anything(rng, depth - 1))).collect())
        }
        _ => nested(rng.below(60)),
    }
}

fn nested(depth: usize) -> Value {
    let wrap = |inner, level| if level % 2 == 0 { json!([inner]) } else { json!({"a": inner}) };
    (0..depth).fold(Value::Null, wrap)
}

/// The schemas of a document.
pub struct Schemas(pub Map<String, Value>);

impl Schemas {
    /// The target of a reference; otherwise the schema itself.
    fn resolve<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        while let Some(next) =
            schema["$ref"].as_str().or_else(|| schema["allOf"][0]["$ref"].as_str())
        {
            match self.0.get(next.rsplit('/').next().unwrap_or_default()) {
                Some(found) => schema = found,
                None => break,
            }
        }
        schema
    }

    pub fn value(&self, rng: &mut Rng, schema: &Value) -> Value {
        self.make(rng, schema, DEPTH)
    }

    fn make(&self, rng: &mut Rng, reference: &Value, depth: usize) -> Value {
        let schema = self.resolve(reference);
        if rng.percent(1) {
            return anything(rng, 3);
        }
        if let Some(one) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
            let picked = rng.below(one.len());
            return self.make(rng, &one[picked], depth);
        }
        match schema["type"].as_str() {
            Some("object") if schema["properties"].is_object() => self.object(rng, schema, depth),
            Some("object") => {
                let count = if depth == 0 { 0 } else { rng.below(3) };
                let values = &schema["additionalProperties"];
                let entry = |_| (text(rng), self.make(rng, values, depth.saturating_sub(1)));
                Value::Object((0..count).map(entry).collect())
            }
            Some("array") => {
                let count = if depth == 0 { 0 } else { rng.below(3) };
                (0..count).map(|_| self.make(rng, &schema["items"], depth - 1)).collect()
            }
            Some("integer" | "number") => number(rng),
            Some("boolean") => json!(rng.percent(50)),
            Some("string") => self.string(rng, reference, schema),
            _ if depth == 0 => Value::Null,
            _ => anything(rng, 3),
        }
    }

    fn object(&self, rng: &mut Rng, schema: &Value, depth: usize) -> Value {
        let required = schema["required"].as_array();
        let needs = |name: &str| required.is_some_and(|names| names.iter().any(|it| it == name));
        let properties = schema["properties"].as_object().into_iter().flatten();
        // Small objects pass more checks: each field is one more possible error.
        let share = [5, 15, 40][rng.below(3)];
        let mut object = Map::new();
        for (name, property) in properties {
            let is_wanted =
                if needs(name) { !rng.percent(3) } else { depth > 0 && rng.percent(share) };
            if is_wanted {
                object.insert(name.clone(), self.make(rng, property, depth.saturating_sub(1)));
            }
        }
        if rng.percent(2) {
            object.insert(text(rng), anything(rng, 2));
        }
        Value::Object(object)
    }

    fn string(&self, rng: &mut Rng, reference: &Value, schema: &Value) -> Value {
        let known = schema["enum"].as_array().filter(|words| !words.is_empty());
        if let Some(words) = known.filter(|_| rng.percent(90)) {
            return words[rng.below(words.len())].clone();
        }
        let about = reference["description"].as_str().or(schema["description"].as_str());
        let quoted: Vec<&str> = about.into_iter().flat_map(quoted).collect();
        match schema["format"].as_str() {
            Some("date-time") if rng.percent(85) => json!("2026-01-02T03:04:05Z"),
            Some("byte") if rng.percent(85) => json!("YWJj"),
            Some("int-or-string") if rng.percent(60) => number(rng),
            _ if !quoted.is_empty() && rng.percent(50) => json!(rng.pick(&quoted)),
            _ => json!(text(rng)),
        }
    }
}

/// The words in quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    let odd = text.split(['"', '`']).skip(1).step_by(2);
    odd.filter(|word| (1..40).contains(&word.len()) && !word.contains(' '))
}

/// Changes one or a few places of a tree.
pub fn mutate(rng: &mut Rng, value: &mut Value) {
    for _ in 0..=rng.below(3) {
        mutate_once(rng, value);
    }
}

fn mutate_once(rng: &mut Rng, value: &mut Value) {
    let size = match value {
        Value::Object(map) => map.len(),
        Value::Array(items) => items.len(),
        _ => 0,
    };
    if size == 0 || rng.percent(8) {
        *value = match value {
            Value::String(_) if rng.percent(80) => json!(text(rng)),
            Value::Number(_) if rng.percent(80) => number(rng),
            _ => anything(rng, 3),
        };
        return;
    }
    let at = rng.below(size);
    match value {
        Value::Object(map) => {
            let name = map.keys().nth(at).cloned().unwrap_or_default();
            match rng.below(12) {
                0 => drop(map.remove(&name)),
                1 => drop(map.insert(text(rng), anything(rng, 2))),
                _ => mutate_once(rng, &mut map[&name]),
            }
        }
        Value::Array(items) => match rng.below(12) {
            0 => drop(items.remove(at)),
            1 => items.push(items[at].clone()),
            _ => mutate_once(rng, &mut items[at]),
        },
        _ => {}
    }
}

/// A random JSON pointer into a tree.
pub fn pointer(rng: &mut Rng, value: &Value) -> String {
    let mut path = String::new();
    let mut here = value;
    loop {
        let next = match here {
            Value::Object(map) if !map.is_empty() => {
                map.iter().nth(rng.below(map.len())).map(|(name, value)| (name.clone(), value))
            }
            Value::Array(items) if !items.is_empty() => {
                let at = rng.below(items.len());
                Some((at.to_string(), &items[at]))
            }
            _ => None,
        };
        let Some((name, value)) = next.filter(|_| !rng.percent(20)) else { return path };
        path.push('/');
        path.push_str(&name.replace('~', "~0").replace('/', "~1"));
        here = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schemas() -> Schemas {
        let own = json!({"Loop": {
            "type": "object", "required": ["kind"],
            "properties": {
                "kind": {"type": "string", "description": "Either \"Left\" or `Right`."},
                "inner": {"allOf": [{"$ref": "#/components/schemas/Loop"}]},
                "all": {"type": "array", "items": {"$ref": "#/components/schemas/Loop"}},
            },
        }});
        Schemas(own.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn a_seed_gives_one_series_and_recursive_schemas_end() {
        let (schemas, reference) = (schemas(), json!({"$ref": "#/components/schemas/Loop"}));
        let series = |seed| {
            let mut rng = Rng::new(seed);
            (0..200).map(|_| schemas.value(&mut rng, &reference)).collect::<Vec<_>>()
        };
        assert_eq!(series(7), series(7));
        assert_ne!(series(7), series(8));
        let quotes =
            series(7).iter().filter(|it| it["kind"] == "Left" || it["kind"] == "Right").count();
        assert!(quotes > 20, "{quotes}");
    }

    #[test]
    fn a_pointer_leads_somewhere() {
        let tree = json!({"a/b": [{"~": 1}], "c": null});
        let mut rng = Rng::new(1);
        for _ in 0..100 {
            let path = pointer(&mut rng, &tree);
            assert!(tree.pointer(&path).is_some(), "{path}");
        }
    }
}
