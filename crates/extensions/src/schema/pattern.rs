//! Regular expressions of schemas.
//!
//! An expression is compiled at its first use. The small engine has ASCII classes, as Go has. The big
//! engine serves expressions with Unicode classes. Both match in linear time.

use std::sync::OnceLock;

/// The largest compiled expression that is accepted, in bytes.
const SIZE_LIMIT: usize = 1 << 20;

pub struct Pattern {
    text: Box<str>,
    compiled: OnceLock<Option<Engine>>,
}

enum Engine {
    Small(regex_lite::Regex),
    Big(Box<regex::Regex>),
}

impl Pattern {
    pub fn new(text: &str) -> Self {
        Self { text: text.into(), compiled: OnceLock::new() }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Reports whether the text has a match anywhere. An expression that does not compile matches nothing.
    pub fn matches(&self, value: &str) -> bool {
        match self.compiled.get_or_init(|| compile(&self.text).ok()) {
            Some(Engine::Small(regex)) => regex.is_match(value),
            Some(Engine::Big(regex)) => regex.is_match(value),
            None => false,
        }
    }

    /// The error of an expression that does not compile.
    pub fn check(text: &str) -> Result<(), String> {
        compile(text).map(|_| ())
    }
}

fn compile(text: &str) -> Result<Engine, String> {
    if let Ok(regex) = regex_lite::RegexBuilder::new(text).size_limit(SIZE_LIMIT).build() {
        return Ok(Engine::Small(regex));
    }
    let built = regex::RegexBuilder::new(text).size_limit(SIZE_LIMIT).build();
    built.map(|regex| Engine::Big(Box::new(regex))).map_err(|_| go_error(text))
}

/// The error in the words of Go's parser, for the common cases.
fn go_error(text: &str) -> String {
    let mut open = 0i32;
    let mut class = None;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match (c, class) {
            ('\\', _) => match chars.next() {
                None => {
                    return "error parsing regexp: trailing backslash at end of expression: ``"
                        .into();
                }
                Some((_, next)) if next.is_ascii_digit() && next != '0' => {
                    return format!("error parsing regexp: invalid escape sequence: `\\{next}`");
                }
                _ => {}
            },
            (']', Some(_)) => class = None,
            (_, Some(_)) => {}
            ('[', None) => {
                class = Some(at);
                // A bracket that comes first is a member.
                chars.next_if(|(_, next)| *next == '^');
                chars.next_if(|(_, next)| *next == ']');
            }
            ('(', None) => {
                open += 1;
                if text[at..].starts_with("(?=")
                    || text[at..].starts_with("(?!")
                    || text[at..].starts_with("(?<!")
                    || text[at..].starts_with("(?<=")
                {
                    let end = text[at..]
                        .chars()
                        .take(if text[at..].starts_with("(?<") { 4 } else { 3 })
                        .collect::<String>();
                    return format!(
                        "error parsing regexp: invalid or unsupported Perl syntax: `{end}`"
                    );
                }
            }
            (')', None) => {
                open -= 1;
                if open < 0 {
                    return format!("error parsing regexp: unexpected ): `{text}`");
                }
            }
            ('*' | '+' | '?', None) if at == 0 => {
                return format!(
                    "error parsing regexp: missing argument to repetition operator: `{c}`"
                );
            }
            _ => {}
        }
    }
    match class {
        Some(at) => format!("error parsing regexp: missing closing ]: `{}`", &text[at..]),
        None if open > 0 => format!("error parsing regexp: missing closing ): `{text}`"),
        None => format!("error parsing regexp: invalid expression: `{text}`"),
    }
}

impl std::fmt::Debug for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pattern({:?})", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_expressions_are_told_as_go_tells_them() {
        let check = |text: &str, expected: &str| {
            assert_eq!(Pattern::check(text).err().as_deref(), Some(expected), "{text}");
        };
        check("[a", "error parsing regexp: missing closing ]: `[a`");
        check("(a", "error parsing regexp: missing closing ): `(a`");
        check("a)", "error parsing regexp: unexpected ): `a)`");
        check("*a", "error parsing regexp: missing argument to repetition operator: `*`");
        check("(?!a)b", "error parsing regexp: invalid or unsupported Perl syntax: `(?!`");
        assert!(Pattern::check(r"^\p{L}+$").is_ok());
        assert!(Pattern::new("^[a-z]+$").matches("abc"));
        assert!(!Pattern::new("^[a-z]+$").matches("ab1"));
    }
}
