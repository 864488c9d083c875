//! Rust source with comments and literals blanked out.
//!
//! In: a file's text. Out: the same lines, with comments and the content of string and character literals
//! replaced by spaces, and a mark on every line of a test item. Braces can then be counted, and words
//! found, without a parser.

pub struct Masked {
    pub lines: Vec<String>,
    /// For each line: inside an item under `#[cfg(test)]`.
    pub in_test: Vec<bool>,
}

impl Masked {
    pub fn new(text: &str) -> Self {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let (length, keep) = token(rest, first, out.chars().next_back());
            let (piece, after) = rest.split_at(length);
            if keep {
                out.push_str(piece);
            } else {
                out.extend(piece.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            }
            rest = after;
        }
        let lines: Vec<String> = out.lines().map(str::to_owned).collect();
        let in_test = test_lines(&lines);
        Self { lines, in_test }
    }

    /// The line on which the block that opens at or after `start` closes. `None` for `…;`.
    pub fn block_end(&self, start: usize, column: usize) -> Option<usize> {
        block_end(&self.lines, start, column)
    }
}

/// The length of the token at the start of `rest`, and whether it is code.
fn token(rest: &str, first: char, before: Option<char>) -> (usize, bool) {
    let plain = (first.len_utf8(), true);
    match first {
        '/' if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), false),
        '/' if rest.starts_with("/*") => (block_comment(rest), false),
        '"' => (quoted(rest, 1), false),
        'r' | 'b' | 'c' if !before.is_some_and(is_word) => match raw_string(rest) {
            Some(length) => (length, false),
            None => plain,
        },
        '\'' => match character(rest) {
            Some(length) => (length, false),
            None => plain,
        },
        _ => plain,
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// A string literal whose opening quote ends at `start`.
fn quoted(rest: &str, start: usize) -> usize {
    let mut escaped = false;
    for (at, c) in rest[start..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return start + at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// `r"…"`, `r#"…"#`, `b"…"`, `br"…"`, `c"…"`; `None` for an ordinary word.
fn raw_string(rest: &str) -> Option<usize> {
    let prefix = rest.find(|c| !matches!(c, 'r' | 'b' | 'c'))?;
    if prefix > 2 {
        return None;
    }
    let body = &rest[prefix..];
    let hashes = body.len() - body.trim_start_matches('#').len();
    if !body[hashes..].starts_with('"') {
        return None;
    }
    if !rest[..prefix].contains('r') {
        return (hashes == 0).then(|| quoted(rest, prefix + 1));
    }
    let close = format!("\"{}", "#".repeat(hashes));
    let start = prefix + hashes + 1;
    Some(rest[start..].find(&close).map_or(rest.len(), |at| start + at + close.len()))
}

/// A character literal; `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        let (after, _) = chars.nth(1)?;
        return rest[after..].find('\'').map(|at| after + at + 1);
    }
    let (at, quote) = chars.next()?;
    (quote == '\'').then_some(at + 1)
}

fn test_lines(lines: &[String]) -> Vec<bool> {
    let mut marks = vec![false; lines.len()];
    for (number, line) in lines.iter().enumerate() {
        let attribute = line.trim();
        if marks[number]
            || !(attribute.starts_with("#[cfg(test)]") || attribute.starts_with("#[cfg(all(test"))
        {
            continue;
        }
        let end = block_end(lines, number, 0).unwrap_or(number + 1);
        let last = end.min(lines.len() - 1);
        marks[number..=last].fill(true);
    }
    marks
}

fn block_end(lines: &[String], start: usize, column: usize) -> Option<usize> {
    // Round and square brackets may contain `;`, as in `[u8; 4]`.
    let (mut braces, mut others) = (0_i32, 0_i32);
    for (number, line) in lines.iter().enumerate().skip(start) {
        let from = if number == start { column } else { 0 };
        for c in line[from..].chars() {
            match c {
                '(' | '[' => others += 1,
                ')' | ']' => others -= 1,
                '{' => braces += 1,
                '}' => {
                    braces -= 1;
                    if braces == 0 && others == 0 {
                        return Some(number);
                    }
                }
                ';' if braces == 0 && others == 0 => return None,
                _ => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        assert_eq!(Masked::new(text).lines.join("\n"), expected, "{text}");
    }

    #[test]
    fn blanks_what_is_not_code() {
        check("a // b {", "a       ");
        check("a /* { /* } */ */ b", "a                 b");
        check(r#"f("{\"}", 1)"#, "f(      , 1)");
        check(r##"f(r#"{"}"#, b"{", b'{')"##, "f(        ,     , b   )");
        check("fn f<'a>(x: &'a str) { '{' }", "fn f<'a>(x: &'a str) {     }");
        check(r"['\'', '\\', '\u{7f}']", "[    ,     ,         ]");
        check("for r in b {}", "for r in b {}");
    }

    #[test]
    fn marks_test_items() {
        let masked = Masked::new("fn a() {}\n#[cfg(test)]\nmod tests {\n  fn b() {}\n}\nfn c() {}");
        assert_eq!(masked.in_test, [false, true, true, true, true, false]);
    }

    #[test]
    fn finds_the_end_of_a_block() {
        let masked = Masked::new("fn a(x: [u8; 2]) -> u8 {\n  { 1 }\n}\nfn b();");
        assert_eq!(masked.block_end(0, 0), Some(2));
        assert_eq!(masked.block_end(3, 0), None);
    }
}
