//! How long things may be, and how a module opens.
//!
//! In: a source. Out: breaches. A function has at most 70 lines, a file 1,000 lines; tests do not count.
//! A module opens with a line that says what the module is for.

use super::{Breach, Source};

const FUNCTION_LINES: usize = 70;
const FILE_LINES: usize = 1000;

pub fn check(source: &Source) -> Vec<Breach> {
    let mut breaches = Vec::new();
    breaches.extend(header(source));
    if source.is_test {
        return breaches;
    }
    let lines = source.masked.in_test.iter().filter(|in_test| !**in_test).count();
    if lines > FILE_LINES {
        breaches.push(source.breach(0, "long-file", format!("{lines} lines without tests")));
    }
    breaches.extend(long_functions(source));
    breaches
}

fn header(source: &Source) -> Option<Breach> {
    let first = source.raw.iter().find(|line| !line.trim().is_empty())?;
    let text = "the first line must say what the module is for (`//! …`)";
    if first.trim() == "//! To be written." || !first.starts_with("//!") {
        return Some(source.breach(0, "header", text));
    }
    None
}

fn long_functions(source: &Source) -> Vec<Breach> {
    let mut breaches = Vec::new();
    for (number, line) in source.masked.lines.iter().enumerate() {
        if source.masked.in_test[number] {
            continue;
        }
        let Some((column, name)) = function_start(line) else { continue };
        let Some(end) = source.masked.block_end(number, column) else { continue };
        let length = end - number + 1;
        if length > FUNCTION_LINES {
            breaches.push(source.breach(
                number,
                "long-function",
                format!("{name} has {length} lines"),
            ));
        }
    }
    breaches
}

/// Where a line starts a named function, and its name.
fn function_start(line: &str) -> Option<(usize, &str)> {
    let column = if line.starts_with("fn ") { 0 } else { line.find(" fn ")? + 1 };
    let name = line[column + 3..].trim_start();
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    (end > 0).then(|| (column, &name[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_rules(name: &str, text: &str, expected: &[&str]) {
        let breaches = check(&Source::new(name.to_owned(), text));
        let rules: Vec<&str> = breaches.iter().map(|breach| breach.rule).collect();
        assert_eq!(rules, expected, "{text}");
    }

    #[test]
    fn finds_what_is_too_long() {
        let long = format!("//! Is.\npub async fn f(a: u8) {{\n{}}}\n", "    g();\n".repeat(70));
        check_rules("crates/a/src/b.rs", &long, &["long-function"]);
        check_rules("crates/a/tests/it/b.rs", &long, &[]);
        let fits = format!("//! Is.\nfn f() {{\n{}}}\n", "    g();\n".repeat(68));
        check_rules("crates/a/src/b.rs", &fits, &[]);
        let file = format!("//! Is.\n{}", "use a;\n".repeat(1000));
        check_rules("crates/a/src/b.rs", &file, &["long-file"]);
        let tests = format!("//! Is.\n#[cfg(test)]\nmod tests {{\n{}}}\n", "use a;\n".repeat(1000));
        check_rules("crates/a/src/b.rs", &tests, &[]);
    }

    #[test]
    fn wants_a_header() {
        check_rules("crates/a/src/b.rs", "use a;\n", &["header"]);
        check_rules("crates/a/src/b.rs", "//! To be written.\n", &["header"]);
        check_rules("crates/a/src/b.rs", "//! Is for this.\nuse a;\n", &[]);
    }
}
