//! Tables of plugins and controllers: each row lies in the file of its unit and has one line in its table.
//!
//! In: the sources of the crates with such tables. Out: a breach for each row that its table does not name. A new
//! controller, scheduler plugin or admission plugin is thus one file and one line (and its `mod`), and a row that
//! nothing runs is found.

use std::fs;
use std::path::Path;

use super::{Breach, sources};
use crate::sh::Outcome;

/// A crate, the file of its table, the type of a row.
const TABLES: &[(&str, &str, &str)] = &[
    ("controllers", "table.rs", "&dyn Row"),
    ("scheduler", "plugins/mod.rs", "Row"),
    ("admission", "lib.rs", "Row"),
];

pub fn check(root: &Path) -> Outcome<Vec<Breach>> {
    let mut breaches = vec![];
    for (name, table, kind) in TABLES {
        let src = root.join("crates").join(name).join("src");
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let folder = src.join(table).parent().map_or_else(|| src.clone(), Path::to_path_buf);
        let table = read(&src.join(table))?;
        for path in sources(vec![src.clone()])? {
            let text = read(&path)?;
            let relative = path.strip_prefix(&folder).or(path.strip_prefix(&src)).unwrap_or(&path);
            for (line, row) in rows(&text, kind) {
                let entry = format!("{}::{row},", module(relative));
                let is_it = |line: &&str| line.trim().trim_start_matches("crate::") == entry;
                if table.lines().filter(is_it).count() == 1 {
                    continue;
                }
                let file = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
                let text = format!("the table of {name} has no line {entry}");
                breaches.push(Breach { file, line: line + 1, rule: "rows", text });
            }
        }
    }
    Ok(breaches)
}

/// Line and name of each constant of the type of a row.
fn rows<'a>(text: &'a str, kind: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    text.lines().enumerate().filter_map(move |(line, text)| {
        let (_, constant) = text.strip_prefix("pub")?.split_once("const ")?;
        let (name, of) = constant.split_once(": ")?;
        (of.strip_prefix(kind)?.trim_start().starts_with('=')).then_some((line, name))
    })
}

/// The module of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module(path: &Path) -> String {
    let path = path.with_extension("");
    let parts = path.iter().map(|part| part.to_string_lossy());
    parts.filter(|part| part != "mod").collect::<Vec<_>>().join("::")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_their_type() {
        let text = "pub const A: &dyn Row = &Descriptor {\npub(crate) const B: &dyn Row =\n\
            pub const C: &str = x;\nconst D: &dyn Row = x;\npub const E: Rows = x;";
        let found: Vec<_> = rows(text, "&dyn Row").collect();
        assert_eq!(found, [(0, "A"), (1, "B")]);
        assert_eq!(module(Path::new("a/b/mod.rs")), "a::b");
        assert_eq!(module(Path::new("a/b.rs")), "a::b");
    }
}
