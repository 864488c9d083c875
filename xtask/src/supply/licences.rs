//! Licence expressions of packages: `(MIT OR Apache-2.0) AND Unicode-3.0`.
//!
//! In: an expression, and the accepted licences. Out: whether accepted licences alone satisfy it.
//! `/` is an older word for `OR`.

/// `None`: not an expression.
pub fn is_kept(expression: &str, is_good: &dyn Fn(&str) -> bool) -> Option<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let kept = either(&words, &mut at, is_good)?;
    (at == words.len()).then_some(kept)
}

fn either(words: &[&str], at: &mut usize, is_good: &dyn Fn(&str) -> bool) -> Option<bool> {
    let mut kept = both(words, at, is_good)?;
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        // The right side must be parsed even if the left side is true already.
        kept |= both(words, at, is_good)?;
    }
    Some(kept)
}

fn both(words: &[&str], at: &mut usize, is_good: &dyn Fn(&str) -> bool) -> Option<bool> {
    let mut kept = one(words, at, is_good)?;
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        kept &= one(words, at, is_good)?;
    }
    Some(kept)
}

fn one(words: &[&str], at: &mut usize, is_good: &dyn Fn(&str) -> bool) -> Option<bool> {
    let word = *words.get(*at)?;
    *at += 1;
    match word {
        "(" => {
            let kept = either(words, at, is_good)?;
            let closes = words.get(*at) == Some(&")");
            *at += 1;
            closes.then_some(kept)
        }
        ")" | "OR" | "AND" | "WITH" => None,
        licence if words.get(*at) == Some(&"WITH") => {
            let exception = words.get(*at + 1)?;
            *at += 2;
            Some(is_good(&format!("{licence} WITH {exception}")))
        }
        licence => Some(is_good(licence)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_judged() {
        let is_good = |one: &str| matches!(one, "MIT" | "ISC" | "Apache-2.0 WITH LLVM-exception");
        for (text, expected) in [
            ("MIT", Some(true)),
            ("GPL-3.0", Some(false)),
            ("GPL-3.0 OR MIT", Some(true)),
            ("GPL-3.0/MIT", Some(true)),
            ("Apache-2.0 / MIT", Some(true)),
            ("GPL-3.0 AND MIT", Some(false)),
            ("(GPL-3.0 OR MIT) AND ISC", Some(true)),
            ("ISC AND (GPL-3.0 OR LGPL-3.0)", Some(false)),
            ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", Some(true)),
            ("Apache-2.0", Some(false)),
            ("", None),
            ("MIT OR", None),
            ("(MIT", None),
            ("MIT ISC", None),
        ] {
            assert_eq!(is_kept(text, &is_good), expected, "{text}");
        }
    }
}
