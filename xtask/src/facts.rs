//! `cargo xtask facts [FILE]`: the field facts of `crates/api`, from the published OpenAPI document.
//!
//! In: Kubernetes' OpenAPI v2 JSON (plain or gzip); without FILE, that of Kubernetes' Go module. Out:
//! `crates/api/facts/fields.tsv`, which is committed: facts, no prose. A line without a leading tab is a definition, the lines after it are its
//! fields:
//!
//! ```text
//! NAME ⇥ MAP-TYPE ⇥ GROUP/VERSION/KIND,…
//! ⇥ FIELD ⇥ SHAPE+DEFINITION ⇥ LIST-TYPE ⇥ MAP-KEYS ⇥ MERGE-KEY ⇥ STRATEGY
//! ```
//!
//! SHAPE is `[]` for lists, `{}` for maps, nothing for the rest. Empty columns at the end are left
//! off. Apply's columns (list type, map keys) and strategic merge's (merge key, strategy) differ.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use crate::foreign;
use crate::sh::Outcome;

const OUTPUT: &str = "crates/api/facts/fields.tsv";
/// The document in the module `k8s.io/kubernetes`.
const DOCUMENT: &str = "api/openapi-spec/swagger.json";

pub fn run(args: &[String]) -> Outcome<()> {
    let path = match args {
        [] => {
            let document = foreign::module("k8s.io/kubernetes")?.join(DOCUMENT);
            document.to_string_lossy().into_owned()
        }
        [path] => path.clone(),
        _ => return Err("usage: cargo xtask facts [OPENAPI.json[.gz]]".to_owned()),
    };
    let text = if path.ends_with(".gz") {
        let output = Command::new("gzip")
            .arg("-dc")
            .arg(&path)
            .output()
            .map_err(|error| format!("gzip: {error}"))?;
        String::from_utf8(output.stdout).map_err(|error| format!("{path}: {error}"))?
    } else {
        fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?
    };
    let document = Parser { text: text.as_bytes(), at: 0 }.value()?;
    let table = table(document.get("definitions").ok_or("no definitions in the document")?);
    fs::write(OUTPUT, &table).map_err(|error| format!("{OUTPUT}: {error}"))?;
    println!("{OUTPUT}: {} lines", table.lines().count());
    Ok(())
}

fn table(definitions: &Json) -> String {
    let mut out = String::new();
    for (name, definition) in definitions.fields() {
        let kinds: Vec<String> =
            definition.get("x-kubernetes-group-version-kind").map_or(vec![], |kinds| {
                let part = |kind: &Json, key: &str| kind.get(key).map_or("", Json::text).to_owned();
                let one = |kind: &Json| {
                    format!(
                        "{}/{}/{}",
                        part(kind, "group"),
                        part(kind, "version"),
                        part(kind, "kind")
                    )
                };
                kinds.items().iter().map(one).collect()
            });
        let map_type = definition.get("x-kubernetes-map-type").map_or("", Json::text);
        line(&mut out, &[name, map_type, &kinds.join(",")]);
        for (field, schema) in definition.get("properties").map_or(&EMPTY, Json::fields) {
            let (shape, definition) = shape(schema);
            let text = |key: &str| schema.get(key).map_or("", Json::text);
            let list_type = match text("x-kubernetes-list-type") {
                "" => text("x-kubernetes-map-type"),
                list_type => list_type,
            };
            let keys: Vec<&str> = schema
                .get("x-kubernetes-list-map-keys")
                .map_or(vec![], |keys| keys.items().iter().map(Json::text).collect());
            let columns = [
                "",
                field,
                &format!("{shape}{definition}"),
                list_type,
                &keys.join(","),
                text("x-kubernetes-patch-merge-key"),
                text("x-kubernetes-patch-strategy"),
            ];
            line(&mut out, &columns);
        }
    }
    out
}

/// List, map or neither, and the definition of the field or of its elements.
fn shape(schema: &Json) -> (&'static str, String) {
    let reference = |schema: &Json| {
        let reference = schema.get("$ref").map_or("", Json::text);
        reference.strip_prefix("#/definitions/").unwrap_or_default().to_owned()
    };
    if let Some(items) = schema.get("items") {
        return ("[]", reference(items));
    }
    if let Some(values) = schema.get("additionalProperties") {
        return ("{}", reference(values));
    }
    ("", reference(schema))
}

fn line(out: &mut String, columns: &[&str]) {
    let used = columns.iter().rposition(|column| !column.is_empty()).map_or(0, |last| last + 1);
    let _ = writeln!(out, "{}", columns[..used].join("\t"));
}

static EMPTY: BTreeMap<String, Json> = BTreeMap::new();

/// The part of JSON that the document uses.
enum Json {
    Object(BTreeMap<String, Json>),
    Array(Vec<Json>),
    Text(String),
    /// Numbers, booleans and null: no fact depends on them.
    Other,
}

impl Json {
    fn fields(&self) -> &BTreeMap<String, Json> {
        if let Self::Object(fields) = self { fields } else { &EMPTY }
    }

    fn get(&self, key: &str) -> Option<&Json> {
        self.fields().get(key)
    }

    fn items(&self) -> &[Json] {
        if let Self::Array(items) = self { items } else { &[] }
    }

    fn text(&self) -> &str {
        if let Self::Text(text) = self { text } else { "" }
    }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn peek(&mut self) -> Outcome<u8> {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.text.get(self.at) {
            self.at += 1;
        }
        self.text.get(self.at).copied().ok_or_else(|| "the document ends early".to_owned())
    }

    fn expect(&mut self, byte: u8) -> Outcome<()> {
        if self.peek()? != byte {
            return Err(format!("expected {:?} at byte {}", char::from(byte), self.at));
        }
        self.at += 1;
        Ok(())
    }

    fn value(&mut self) -> Outcome<Json> {
        match self.peek()? {
            b'{' => {
                let mut fields = BTreeMap::new();
                self.list(b'}', |parser| {
                    parser.peek()?;
                    let key = parser.string()?;
                    parser.expect(b':')?;
                    fields.insert(key, parser.value()?);
                    Ok(())
                })?;
                Ok(Json::Object(fields))
            }
            b'[' => {
                let mut items = vec![];
                self.list(b']', |parser| {
                    items.push(parser.value()?);
                    Ok(())
                })?;
                Ok(Json::Array(items))
            }
            b'"' => self.string().map(Json::Text),
            _ => {
                while self.text.get(self.at).is_some_and(|byte| !b",]} \n\r\t".contains(byte)) {
                    self.at += 1;
                }
                Ok(Json::Other)
            }
        }
    }

    /// The elements between brackets; the opening bracket is the next character.
    fn list(
        &mut self,
        close: u8,
        mut element: impl FnMut(&mut Self) -> Outcome<()>,
    ) -> Outcome<()> {
        self.at += 1;
        while self.peek()? != close {
            element(self)?;
            if self.peek()? == b',' {
                self.at += 1;
            }
        }
        self.at += 1;
        Ok(())
    }

    /// Names have no escapes. Prose may have them, but is not kept, so escapes are not decoded.
    fn string(&mut self) -> Outcome<String> {
        self.expect(b'"')?;
        let start = self.at;
        loop {
            match self.text.get(self.at) {
                None => return Err("a string does not end".to_owned()),
                Some(b'\\') => self.at += 2,
                Some(b'"') => break,
                Some(_) => self.at += 1,
            }
        }
        let text = String::from_utf8_lossy(&self.text[start..self.at]).into_owned();
        self.at += 1;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_lines() {
        let text = r##"{"a.B": {"x-kubernetes-map-type": "atomic", "x-kubernetes-group-version-kind":
            [{"group": "g", "version": "v1", "kind": "B"}], "properties": {
            "ports": {"items": {"$ref": "#/definitions/a.P"}, "type": "array", "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["port", "protocol"], "x-kubernetes-patch-merge-key": "port",
                "x-kubernetes-patch-strategy": "merge"},
            "s": {"type": "string", "description": "a \"quoted\" word"}}}}"##;
        let document = Parser { text: text.as_bytes(), at: 0 }.value().expect("JSON");
        assert_eq!(
            table(&document),
            "a.B\tatomic\tg/v1/B\n\tports\t[]a.P\tmap\tport,protocol\tport\tmerge\n\ts\n"
        );
    }
}
