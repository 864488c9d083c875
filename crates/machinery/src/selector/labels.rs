//! The text form of label selectors: `a=b,c!=d,e in (f,g),h,!i,j>1`.
//! Upstream: the lexer and parser of `k8s.io/apimachinery/pkg/labels`.
//!
//! In: a text. Out: requirements, or upstream's error. As upstream, the text is cut
//! into tokens first, for its errors name tokens.

use super::{ParseError, Requirement, Test};
use crate::names;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Error,
    End,
    Identifier,
    Not,
    In,
    NotIn,
    Equals,
    DoubleEquals,
    NotEquals,
    Greater,
    Less,
    Comma,
    Open,
    Close,
}

const SYMBOLS: &[(&str, Token)] = &[
    (")", Token::Close),
    (",", Token::Comma),
    ("!", Token::Not),
    ("==", Token::DoubleEquals),
    ("=", Token::Equals),
    (">", Token::Greater),
    ("<", Token::Less),
    ("!=", Token::NotEquals),
    ("(", Token::Open),
];

fn is_symbol(c: char) -> bool {
    "=!(),><".contains(c)
}

fn is_space(c: char) -> bool {
    " \t\r\n".contains(c)
}

/// The tokens with their texts; the last is the end.
fn tokens(text: &str) -> Vec<(Token, String)> {
    let mut all = vec![];
    let mut rest = text.trim_start_matches(is_space);
    // A zero byte ends the text, to upstream.
    while let Some(first) = rest.chars().next().filter(|c| *c != '\0') {
        let (token, shown, length) = if is_symbol(first) { symbol(rest) } else { identifier(rest) };
        all.push((token, shown));
        rest = rest[length..].trim_start_matches(is_space);
    }
    all.push((Token::End, String::new()));
    all
}

/// The longest symbol at the beginning.
fn symbol(text: &str) -> (Token, String, usize) {
    let mut found: Option<(Token, usize)> = None;
    let end = text.find(|c| !is_symbol(c)).unwrap_or(text.len());
    for length in 1..=end {
        let known = SYMBOLS.iter().find(|(symbol, _)| *symbol == &text[..length]);
        match (known, found) {
            (Some((_, token)), _) => found = Some((*token, length)),
            (None, Some(_)) => break,
            (None, None) => {}
        }
    }
    match found {
        Some((token, length)) => (token, text[..length].to_owned(), length),
        None => (Token::Error, format!("error expected: keyword found '{}'", &text[..end]), end),
    }
}

fn identifier(text: &str) -> (Token, String, usize) {
    let end = text.find(|c| is_symbol(c) || is_space(c) || c == '\0').unwrap_or(text.len());
    let word = &text[..end];
    let token = match word {
        "in" => Token::In,
        "notin" => Token::NotIn,
        _ => Token::Identifier,
    };
    (token, word.to_owned(), end)
}

struct Parser {
    tokens: Vec<(Token, String)>,
    at: usize,
}

fn found(text: &str, expected: &str) -> ParseError {
    ParseError(format!("found '{text}', expected: {expected}"))
}

impl Parser {
    /// `in` and `notin` are words like others where values may stand.
    fn peek(&self) -> (Token, &str) {
        // The end stays when it was taken.
        let (token, text) = &self.tokens[self.at.min(self.tokens.len() - 1)];
        match token {
            Token::In | Token::NotIn => (Token::Identifier, text),
            token => (*token, text),
        }
    }

    fn take(&mut self) -> (Token, String) {
        let (token, text) = self.peek();
        let taken = (token, text.to_owned());
        self.at += 1;
        taken
    }

    fn take_operator(&mut self) -> (Token, String) {
        let taken = self.tokens[self.at.min(self.tokens.len() - 1)].clone();
        self.at += 1;
        taken
    }

    fn requirement(&mut self) -> Result<Requirement, ParseError> {
        let (mut token, mut key) = self.take();
        let is_absent = token == Token::Not;
        if is_absent {
            (token, key) = self.take();
        }
        if token != Token::Identifier {
            return Err(found(&key, "identifier"));
        }
        let wrong = names::qualified_name(&key);
        if !wrong.is_empty() {
            let why = wrong.join("; ");
            return Err(ParseError(format!("<nil>: Invalid value: {key:?}: {why}")));
        }
        if is_absent {
            return Ok(Requirement { key, test: Test::DoesNotExist });
        }
        if matches!(self.peek().0, Token::End | Token::Comma) {
            return Ok(Requirement { key, test: Test::Exists });
        }
        let (operator, text) = self.take_operator();
        let values = match operator {
            Token::In | Token::NotIn => self.set()?,
            Token::Equals
            | Token::DoubleEquals
            | Token::NotEquals
            | Token::Greater
            | Token::Less => vec![self.value()?],
            _ => return Err(found(&text, "in, notin, =, ==, !=, gt, lt")),
        };
        let test = test(operator, &key, values)?;
        Ok(Requirement { key, test })
    }

    fn value(&mut self) -> Result<String, ParseError> {
        if matches!(self.peek().0, Token::End | Token::Comma) {
            return Ok(String::new());
        }
        match self.take() {
            (Token::Identifier, text) => Ok(text),
            (_, text) => Err(found(&text, "identifier")),
        }
    }

    /// Sorted, each once.
    fn set(&mut self) -> Result<Vec<String>, ParseError> {
        let (token, text) = self.take();
        if token != Token::Open {
            return Err(ParseError(format!("found '{text}' expected: '('")));
        }
        let (token, text) = self.peek();
        let mut values = match token {
            Token::Identifier | Token::Comma => self.identifiers()?,
            Token::Close => vec![String::new()],
            _ => return Err(found(text, "',', ')' or identifier")),
        };
        self.take();
        values.sort_unstable();
        values.dedup();
        Ok(values)
    }

    /// Reads up to the closing parenthesis. A missing value between commas is empty.
    fn identifiers(&mut self) -> Result<Vec<String>, ParseError> {
        let mut values = vec![];
        loop {
            let (token, text) = self.take();
            let (next, after) = self.peek();
            match token {
                Token::Identifier => {
                    values.push(text);
                    match next {
                        Token::Comma => {}
                        Token::Close => return Ok(values),
                        _ => return Err(found(after, "',' or ')'")),
                    }
                }
                Token::Comma => {
                    if values.is_empty() || matches!(next, Token::Comma | Token::Close) {
                        values.push(String::new());
                    }
                    if next == Token::Close {
                        return Ok(values);
                    }
                }
                _ => return Err(found(&text, "',', or identifier")),
            }
        }
    }
}

/// Upstream: `NewRequirement`, which finds all that is wrong.
fn test(operator: Token, key: &str, values: Vec<String>) -> Result<Test, ParseError> {
    let mut wrong: Vec<String> = vec![];
    let mut numbers = vec![];
    if matches!(operator, Token::Greater | Token::Less) {
        for (index, value) in values.iter().enumerate() {
            match value.parse::<i64>() {
                Ok(number) => numbers.push(number),
                Err(_) => wrong.push(format!("values[{index}]: Invalid value: {value:?}: for 'Gt', 'Lt' operators, the value must be an integer")),
            }
        }
    }
    for (index, value) in values.iter().enumerate() {
        let why = names::label_value(value);
        if !why.is_empty() {
            let why = why.join("; ");
            wrong.push(format!("values[{index}][{key}]: Invalid value: {value:?}: {why}"));
        }
    }
    match wrong.len() {
        0 => {}
        1 => return Err(ParseError(wrong.remove(0))),
        _ => return Err(ParseError(format!("[{}]", wrong.join(", ")))),
    }
    let number = numbers.first().copied().unwrap_or_default();
    Ok(match operator {
        Token::Greater => Test::GreaterThan(number),
        Token::Less => Test::LessThan(number),
        Token::NotIn | Token::NotEquals => Test::NotIn(values),
        _ => Test::In(values),
    })
}

pub(super) fn parse(text: &str) -> Result<Vec<Requirement>, ParseError> {
    let mut parser = Parser { tokens: tokens(text), at: 0 };
    let mut requirements = vec![];
    loop {
        let (token, text) = parser.peek();
        match token {
            Token::Identifier | Token::Not => {}
            Token::End => return Ok(requirements),
            _ => return Err(found(text, "!, identifier, or 'end of string'")),
        }
        let requirement = parser.requirement();
        requirements.push(requirement.map_err(|ParseError(why)| {
            ParseError(format!("unable to parse requirement: {why}"))
        })?);
        match parser.take() {
            (Token::End, _) => return Ok(requirements),
            (Token::Comma, _) => {
                let (token, text) = parser.peek();
                if !matches!(token, Token::Identifier | Token::Not) {
                    return Err(found(text, "identifier after ','"));
                }
            }
            (_, text) => return Err(found(&text, "',' or 'end of string'")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Selector;

    #[test]
    fn errors_have_upstreams_words() {
        const HEAD: &str = "unable to parse requirement: ";
        const NUMBER: &str = "for 'Gt', 'Lt' operators, the value must be an integer";
        let values = |value: &str| format!("{HEAD}values[0]: Invalid value: {value:?}: {NUMBER}");
        for (text, expected) in [
            ("a>b", values("b")),
            ("a<", values("")),
            ("a=b c", "found 'c', expected: ',' or 'end of string'".into()),
            ("!a b", "found 'b', expected: ',' or 'end of string'".into()),
            ("a=b=c", "found '=', expected: ',' or 'end of string'".into()),
            ("a,", "found '', expected: identifier after ','".into()),
            ("a,,b", "found ',', expected: identifier after ','".into()),
            (",a", "found ',', expected: !, identifier, or 'end of string'".into()),
            ("(a)", "found '(', expected: !, identifier, or 'end of string'".into()),
            ("!", format!("{HEAD}found '', expected: identifier")),
            ("a<=1", format!("{HEAD}found '=', expected: identifier")),
            ("a in", format!("{HEAD}found '' expected: '('")),
            ("a in b", format!("{HEAD}found 'b' expected: '('")),
            ("a in (", format!("{HEAD}found '', expected: ',', ')' or identifier")),
            ("a in (b", format!("{HEAD}found '', expected: ',' or ')'")),
            ("a in (b,", format!("{HEAD}found '', expected: ',', or identifier")),
            ("a in (b c)", format!("{HEAD}found 'c', expected: ',' or ')'")),
            ("a)", format!("{HEAD}found ')', expected: in, notin, =, ==, !=, gt, lt")),
            ("a!b", format!("{HEAD}found '!', expected: in, notin, =, ==, !=, gt, lt")),
        ] {
            let error = Selector::parse_labels(text).err().map(|error| error.0);
            assert_eq!(error.as_deref(), Some(expected.as_str()), "{text}");
        }
        // Each of these has two rules against it.
        for (text, count) in [("x.y/=b", 2), ("a>-x", 2), ("a>-1", 1)] {
            let error = Selector::parse_labels(text).err().map(|error| error.0).unwrap_or_default();
            let wrong = error.matches("must").count();
            assert!(error.starts_with(HEAD) && wrong >= count, "{text}: {error}");
        }
    }

    #[test]
    fn words_and_gaps_are_values() {
        for (text, expected) in [
            ("in in (in, notin)", "in in (in,notin)"),
            ("a=in", "a=in"),
            ("a=", "a="),
            ("a in ()", "a="),
            ("a in (,)", "a="),
            ("a in (b,,c)", "a in (,b,c)"),
            ("a in (c,b,c)", "a in (b,c)"),
            ("a notin (,b)", "a notin (,b)"),
            (" a\t==\nb , !c", "a=b,!c"),
        ] {
            let parsed = Selector::parse_labels(text).map(|selector| selector.to_string());
            assert_eq!(parsed.as_deref(), Ok(expected), "{text}");
        }
    }
}
