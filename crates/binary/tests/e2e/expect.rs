//! Compares printed text with a pattern.
//!
//! Several spaces count as one, because column widths depend on random names. `*` in a line matches any
//! text, and a line `...` matches any lines.
//!
//! ```text
//! NAME  READY  AGE        NAME   READY   AGE
//! web-* 1/1    *    fits  web-x  1/1     3s
//! ```

use anyhow::{Result, bail};

pub fn like(text: &str, pattern: &str) -> Result<()> {
    let text: Vec<String> = text.lines().map(squeeze).collect();
    let pattern: Vec<String> = pattern.trim().lines().map(squeeze).collect();
    let found: Vec<&str> = trim(&text);
    let wanted: Vec<&str> = trim(&pattern);
    if lines_match(&found, &wanted) {
        return Ok(());
    }
    bail!("wanted:\n  {}\nfound:\n  {}", wanted.join("\n  "), found.join("\n  "))
}

fn squeeze(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn trim(lines: &[String]) -> Vec<&str> {
    let mut lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    while lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    lines
}

fn lines_match(found: &[&str], wanted: &[&str]) -> bool {
    match wanted {
        [] => found.is_empty(),
        ["...", rest @ ..] => (0..=found.len()).any(|skip| lines_match(&found[skip..], rest)),
        [first, rest @ ..] => match found {
            [line, more @ ..] => line_matches(line, first) && lines_match(more, rest),
            [] => false,
        },
    }
}

fn line_matches(line: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => line == pattern,
        Some((start, rest)) => line.strip_prefix(start).is_some_and(|after| {
            let ends = after.char_indices().map(|(at, _)| at).chain([after.len()]);
            ends.into_iter().any(|at| line_matches(&after[at..], rest))
        }),
    }
}
