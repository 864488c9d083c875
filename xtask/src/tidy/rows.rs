//! Tables of kinds, plugins and controllers: each row lies in the file of its unit and has one line in its table.
//!
//! In: the sources of the crates with such tables. Out: a breach for each row that its table does not name, and for
//! each table of which no row was found. A new kind, controller, scheduler plugin, admission plugin or volume plugin
//! is thus one file and one line (and its `mod`), and a row that nothing runs is found.

use std::fs;
use std::path::Path;

use super::{Breach, sources};
use crate::sh::Outcome;

/// A crate, the file of its table, and how a row is declared and named there.
const TABLES: &[(&str, &str, Declared)] = &[
    ("controllers", "table.rs", Declared::Const("&dyn Row")),
    ("scheduler", "plugins/mod.rs", Declared::Const("Row")),
    ("admission", "lib.rs", Declared::Const("Row")),
    ("resources", "lib.rs", Declared::Static(&["Kind<", "Form<"])),
    ("kubelet", "volumes/mod.rs", Declared::Impl("VolumePlugin")),
];

#[derive(Clone, Copy)]
enum Declared {
    /// `pub const NAME: TYPE = …`; the table has `file::NAME`.
    Const(&'static str),
    /// `pub(crate) static NAME: TYPE… = …` with one of these types; the table has `&file::NAME`.
    Static(&'static [&'static str]),
    /// `impl TRAIT for NAME`; the table has `&file::NAME`.
    Impl(&'static str),
}

pub fn check(root: &Path) -> Outcome<Vec<Breach>> {
    let mut breaches = vec![];
    for (name, table, declared) in TABLES {
        let src = root.join("crates").join(name).join("src");
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let folder = src.join(table).parent().map_or_else(|| src.clone(), Path::to_path_buf);
        let place = *table;
        let table = read(&src.join(table))?;
        let mut found = 0;
        for path in sources(vec![src.clone()])? {
            let text = read(&path)?;
            let relative = path.strip_prefix(&folder).or(path.strip_prefix(&src)).unwrap_or(&path);
            for (line, row) in rows(&text, *declared) {
                found += 1;
                let borrow = if matches!(declared, Declared::Const(_)) { "" } else { "&" };
                let entry = format!("{borrow}{}::{row},", module(relative));
                let is_it = |line: &&str| line.trim().trim_start_matches("crate::") == entry;
                if table.lines().filter(is_it).count() == 1 {
                    continue;
                }
                let file = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
                let text = format!("the table of {name} has no line {entry}");
                breaches.push(Breach { file, line: line + 1, rule: "rows", text });
            }
        }
        if found == 0 {
            let file = format!("crates/{name}/src/{place}");
            let text = format!("no row of the table of {name} was found");
            breaches.push(Breach { file, line: 1, rule: "rows", text });
        }
    }
    Ok(breaches)
}

/// Line and name of each row outside of tests.
fn rows(text: &str, declared: Declared) -> impl Iterator<Item = (usize, &str)> {
    let row = move |text: &'_ str| -> Option<(usize, usize)> {
        let rest = match declared {
            Declared::Const(_) => text.strip_prefix("pub")?.split_once("const ")?.1,
            Declared::Static(_) => text.strip_prefix("pub")?.split_once("static ")?.1,
            Declared::Impl(of) => text.strip_prefix(&format!("impl {of} for "))?,
        };
        let (name, of) = match declared {
            Declared::Impl(_) => rest.split_once(' ')?,
            Declared::Const(_) | Declared::Static(_) => rest.split_once(": ")?,
        };
        let is_row = match declared {
            Declared::Const(kind) => of.strip_prefix(kind)?.trim_start().starts_with('='),
            Declared::Static(kinds) => kinds.iter().any(|kind| of.starts_with(kind)),
            Declared::Impl(_) => true,
        };
        let start = text.len() - rest.len();
        is_row.then_some((start, start + name.len()))
    };
    let lines = text.lines().enumerate();
    lines.filter_map(move |(line, text)| row(text).map(|(from, to)| (line, &text[from..to])))
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
        let check = |text: &str, declared, expected: &[(usize, &str)]| {
            assert_eq!(rows(text, declared).collect::<Vec<_>>(), expected);
        };
        check(text, Declared::Const("&dyn Row"), &[(0, "A"), (1, "B")]);
        let kinds = "pub(crate) static KIND: Kind<Pod> = Kind {\npub static OTHER: Codec = x;";
        check(kinds, Declared::Static(&["Kind<"]), &[(0, "KIND")]);
        let plugins = "#[async_trait]\nimpl VolumePlugin for A {\nimpl Other for B {";
        check(plugins, Declared::Impl("VolumePlugin"), &[(1, "A")]);
        assert_eq!(module(Path::new("a/b/mod.rs")), "a::b");
        assert_eq!(module(Path::new("a/b.rs")), "a::b");
    }
}
