//! `$(NAME)` references in env values, commands, arguments and subPathExpr.
//!
//! In: a text and a lookup. Out: the text with every known reference replaced.
//! Upstream: `$$` is a literal dollar; an unknown or unfinished reference is kept unchanged.

/// Replaces the references that `lookup` knows.
pub fn expand(text: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    expand_noting(text, lookup).0
}

/// Like [`expand`], and returns the first name that `lookup` does not know.
pub fn expand_noting(
    text: &str,
    lookup: impl Fn(&str) -> Option<String>,
) -> (String, Option<String>) {
    let mut out = String::with_capacity(text.len());
    let mut missing = None;
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            out.push('$');
            rest = tail;
        } else if let Some(name_on) = after.strip_prefix('(') {
            let Some(end) = name_on.find(')') else {
                out.push_str("$(");
                rest = name_on;
                continue;
            };
            let name = &name_on[..end];
            match lookup(name) {
                Some(value) => out.push_str(&value),
                None => {
                    out.push_str("$(");
                    out.push_str(name);
                    out.push(')');
                    missing.get_or_insert_with(|| name.to_string());
                }
            }
            rest = &name_on[end + 1..];
        } else {
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    (out, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let lookup = |name: &str| match name {
            "A" => Some("a".to_string()),
            "EMPTY" => Some(String::new()),
            "DOLLAR" => Some("$(A)".to_string()),
            _ => None,
        };
        assert_eq!(expand(text, lookup), expected, "{text}");
    }

    #[test]
    fn references() {
        check("plain", "plain");
        check("$(A)-$(A)", "a-a");
        check("x$(EMPTY)y", "xy");
        check("$$(A)", "$(A)");
        check("$$$(A)", "$a");
        check("$(MISSING)", "$(MISSING)");
        check("$(A", "$(A");
        check("$A", "$A");
        check("tail$", "tail$");
        check("$(DOLLAR)", "$(A)");
        check("$()", "$()");
        check("é$(A)é", "éaé");
    }

    #[test]
    fn the_first_missing_name_is_reported() {
        let (text, missing) = expand_noting("$(X)/$(Y)", |_| None);
        assert_eq!((text.as_str(), missing.as_deref()), ("$(X)/$(Y)", Some("X")));
    }
}
