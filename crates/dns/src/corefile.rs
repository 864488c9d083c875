//! Reads the text of a Corefile: blocks, directives, their words.
//!
//! In: the text of a `*.server` or `*.override` file. Out: what it says, without a meaning.
//! Upstream: Caddy's format as CoreDNS reads it: words in quotes, `#` to the end of the line, `{` at the end of a line
//! and `}` alone on one. Deviation: no snippets, no `import`, no environment variables.

/// `example.com:53 { forward . 10.0.0.1 }`
#[derive(Debug, PartialEq)]
pub struct Block {
    pub labels: Vec<String>,
    pub directives: Vec<Directive>,
}

/// A plugin with its arguments, and the lines between its braces.
#[derive(Clone, Debug, PartialEq)]
pub struct Directive {
    pub line: usize,
    pub words: Vec<String>,
    pub lines: Vec<Vec<String>>,
}

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct SyntaxError {
    pub line: usize,
    pub why: &'static str,
}

type Line = (usize, Vec<String>);

/// The blocks of a `*.server` file.
pub fn blocks(text: &str) -> Result<Vec<Block>, SyntaxError> {
    let mut lines = lines(text)?.into_iter().peekable();
    let mut out = vec![];
    while let Some((line, words)) = lines.next() {
        let mut labels: Vec<String> = split_labels(&words);
        let mut last = line;
        // Labels may stand on several lines, each but the last with a comma at its end.
        while words_continue(&words, &labels) && lines.peek().is_some() {
            let Some((line, more)) = lines.next() else { break };
            labels.retain(|label| !label.is_empty());
            labels.extend(split_labels(&more));
            last = line;
            if more.last().is_some_and(|word| word == "{") {
                break;
            }
        }
        if labels.pop().as_deref() != Some("{") {
            return Err(SyntaxError { line: last, why: "a zone must be followed by {" });
        }
        labels.retain(|label| !label.is_empty());
        if labels.is_empty() {
            return Err(SyntaxError { line, why: "a block needs a zone before {" });
        }
        out.push(Block { labels, directives: body(&mut lines, last)? });
    }
    Ok(out)
}

/// The directives of a `*.override` file.
pub fn directives(text: &str) -> Result<Vec<Directive>, SyntaxError> {
    let mut lines = lines(text)?.into_iter().peekable();
    let mut out = vec![];
    while let Some(line) = lines.next() {
        out.push(directive(line, &mut lines)?);
    }
    Ok(out)
}

fn split_labels(words: &[String]) -> Vec<String> {
    words.iter().flat_map(|word| word.split(',')).map(str::to_owned).collect()
}

fn words_continue(words: &[String], labels: &[String]) -> bool {
    words.last().is_some_and(|word| word.ends_with(','))
        && labels.last().is_none_or(|label| label != "{")
}

type Lines = std::iter::Peekable<std::vec::IntoIter<Line>>;

fn body(lines: &mut Lines, opened: usize) -> Result<Vec<Directive>, SyntaxError> {
    let mut out = vec![];
    loop {
        match lines.next() {
            None => return Err(SyntaxError { line: opened, why: "the block does not end" }),
            Some((_, words)) if words == ["}"] => return Ok(out),
            Some(line) => out.push(directive(line, lines)?),
        }
    }
}

fn directive((line, mut words): Line, lines: &mut Lines) -> Result<Directive, SyntaxError> {
    let mut inner = vec![];
    if words.last().is_some_and(|word| word == "{") {
        words.pop();
        loop {
            match lines.next() {
                None => return Err(SyntaxError { line, why: "the braces do not close" }),
                Some((_, words)) if words == ["}"] => break,
                Some((line, words)) if words.last().is_some_and(|word| word == "{") => {
                    return Err(SyntaxError { line, why: "braces within a plugin's braces" });
                }
                Some((_, words)) => inner.push(words),
            }
        }
    }
    match words.first().map(String::as_str) {
        None | Some("{") => Err(SyntaxError { line, why: "a plugin's name is missing before {" }),
        Some("}") => Err(SyntaxError { line, why: "a } without its {" }),
        Some(_) => Ok(Directive { line, words, lines: inner }),
    }
}

/// The words of each line that has some. A `}` at the end of a line counts as a line of its own.
fn lines(text: &str) -> Result<Vec<Line>, SyntaxError> {
    let mut out: Vec<Line> = vec![];
    for (index, text) in text.lines().enumerate() {
        let line = index + 1;
        let mut words = words(text, line)?;
        // `{ forward . 10.0.0.1 }` on one line, as people write it in examples.
        while let Some(at) = words.iter().position(|word| word == "{" || word == "}") {
            let rest = words.split_off(at + 1);
            let brace = words.pop().unwrap_or_default();
            match (brace.as_str(), words.is_empty()) {
                ("}", false) => out.push((line, std::mem::take(&mut words))),
                ("{", _) => words.push(brace.clone()),
                _ => {}
            }
            match brace.as_str() {
                "}" => out.push((line, vec![brace])),
                _ => out.push((line, std::mem::take(&mut words))),
            }
            words = rest;
        }
        if !words.is_empty() {
            out.push((line, words));
        }
    }
    Ok(out)
}

fn words(text: &str, line: usize) -> Result<Vec<String>, SyntaxError> {
    let mut out = vec![];
    let mut word: Option<String> = None;
    let mut quoted = false;
    let mut all = text.chars().peekable();
    while let Some(next) = all.next() {
        match next {
            '\\' if quoted && all.peek() == Some(&'"') => {
                word.get_or_insert_default().extend(all.next());
            }
            '"' if quoted => quoted = false,
            '"' if word.is_none() => {
                quoted = true;
                word = Some(String::new());
            }
            '#' if !quoted && word.is_none() => break,
            next if next.is_whitespace() && !quoted => out.extend(word.take()),
            next => word.get_or_insert_default().push(next),
        }
    }
    if quoted {
        return Err(SyntaxError { line, why: "a quote does not end" });
    }
    out.extend(word);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(blocks: &[Block]) -> String {
        let directive = |d: &Directive| {
            let lines: Vec<String> = d.lines.iter().map(|line| line.join(" ")).collect();
            match lines.is_empty() {
                true => d.words.join(" "),
                false => format!("{} {{{}}}", d.words.join(" "), lines.join("; ")),
            }
        };
        let block = |block: &Block| {
            let all: Vec<String> = block.directives.iter().map(directive).collect();
            format!("{} [{}]", block.labels.join("+"), all.join(", "))
        };
        blocks.iter().map(block).collect::<Vec<_>>().join(" | ")
    }

    #[test]
    fn blocks_are_read() {
        let check = |text: &str, expected: &str| {
            assert_eq!(show(&blocks(text).expect(text)), expected, "{text}");
        };
        check("", "");
        check("# nothing\n\n", "");
        check("a.b:53 {\n  forward . 10.0.0.1\n}", "a.b:53 [forward . 10.0.0.1]");
        check("a.b:53 { forward . 10.0.0.1 }", "a.b:53 [forward . 10.0.0.1]");
        check("a { log }\nb {\n}\n", "a [log] | b []");
        check("a, b c {\nlog\n}", "a+b+c [log]");
        check("a,\nb {\nlog\n}", "a+b [log]");
        check(
            "a { # why\n cache 30 # seconds\n hosts {\n  10.0.0.1 x y\n  fallthrough\n }\n}",
            "a [cache 30, hosts {10.0.0.1 x y; fallthrough}]",
        );
        check(r#"a { log "{type} \"x\"" }"#, r#"a [log {type} "x"]"#);
    }

    #[test]
    fn broken_text_says_where() {
        let check = |text: &str, expected: &str| {
            let error = blocks(text).expect_err(text).to_string();
            assert_eq!(error, expected, "{text}");
        };
        check("a {\n log", "line 1: the block does not end");
        check("a\nlog", "line 1: a zone must be followed by {");
        check("{\n}", "line 1: a block needs a zone before {");
        check("a {\n}\n}", "line 3: a zone must be followed by {");
        check("a {\n log \"x\n}", "line 2: a quote does not end");
        check("a {\n hosts {\n", "line 2: the braces do not close");
        assert_eq!(
            directives("log\n}").expect_err("a brace").to_string(),
            "line 2: a } without its {"
        );
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "[a-z{}\"#\\\\, \n.]{0,80}") {
            let _ = blocks(&text);
            let _ = directives(&text);
        }
    }
}
