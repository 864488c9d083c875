//! Words and openings of comments that a reader must read twice.
//!
//! In: a source. Out: breaches. CONTRIBUTING.md has the rules of plain English; these are the commonest
//! mistakes: a sentence without its subject in front, and a pronoun in place of the thing.

use super::{Breach, Source};

/// The first words of a comment.
const OPENINGS: &[&str] = &[
    "Of what ",
    "Of who",
    "Who ",
    "Whoever ",
    "What there is",
    "What is to be ",
    "It is not that ",
    "Nobody ",
    "Somebody ",
    "Told ",
];

/// Words anywhere in a comment.
const WORDS: &[&str] = &["whoever", "somebody", "anew", "for ever", "nobody's"];

pub fn check(source: &Source) -> Vec<Breach> {
    let lines = source.raw.iter().enumerate();
    let breaches = lines.filter_map(|(number, line)| {
        let comment = comment(line, &source.masked.lines[number])?;
        let opening = OPENINGS.iter().find(|opening| comment.starts_with(**opening));
        let word = WORDS.iter().find(|word| has_word(comment, word));
        let found = opening.or(word)?;
        let text =
            format!("{:?}: name the thing, subject first (see CONTRIBUTING.md)", found.trim());
        Some(source.breach(number, "english", text))
    });
    breaches.collect()
}

/// The text of a line's comment. `masked` is the same line without comments and strings.
fn comment<'a>(line: &'a str, masked: &str) -> Option<&'a str> {
    let code = masked.trim_end().len();
    let start = line.get(code..)?.find("//")? + code;
    Some(line[start..].trim_start_matches(['/', '!']).trim_start())
}

fn has_word(text: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '`';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn riddles_are_breaches() {
        let check = |text: &str, is_breach: bool| {
            let found = check(&Source::new("crates/a/src/b.rs".to_owned(), text));
            assert_eq!(found.len(), usize::from(is_breach), "{text}");
        };
        check("/// Of what is refused nothing else is said.", true);
        check("//! Starts again, for whoever asks.", true);
        check("let a = 1; // made anew", true);
        check("/// The subject comes first. `somebody` is a variable.", false);
        check("let text = \"// whoever\";", false);
        check("let whoever = 1;", false);
        check("/// A renewal. The file foranew.rs is another.", false);
    }
}
