//! PEM as Go's `encoding/pem` reads it: what upstream takes is taken, what it does not see is not there.
//!
//! ```text
//! whatever                          skipped: it need not be text
//! -----BEGIN LABEL-----             at the beginning of a line
//! Name: value                       headers, if any
//! aGVsbG8=                          base64; spaces, tabs and line ends in it do not count
//! -----END LABEL-----               the same label, and nothing but blanks behind it
//! whatever                          left for the next call
//! ```
//!
//! Invariant: a block that is broken is skipped, and those behind it are found.

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

const BEGIN: &[u8] = b"-----BEGIN ";
const END: &[u8] = b"\n-----END ";
const DASHES: &[u8] = b"-----";

/// Go's `base64.StdEncoding`: padded, with whatever bits are left over.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// `CERTIFICATE`
    pub label: String,
    pub has_headers: bool,
    pub bytes: Vec<u8>,
}

/// All blocks of a text.
pub fn blocks(text: &[u8]) -> impl Iterator<Item = Block> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (block, behind) = next(rest)?;
        rest = behind;
        Some(block)
    })
}

/// The first block, and the text behind it.
pub fn next(text: &[u8]) -> Option<(Block, &[u8])> {
    let mut from = 0;
    loop {
        let end = from + find(&text[from..], END)?;
        // The last beginning before an end is its own: those before it have none.
        let begin = find_last(&text[from..end], BEGIN).map(|at| from + at);
        let begin = begin.filter(|at| *at == from || text[at - 1] == b'\n');
        match begin.map_or(Found::Broken, |at| block(text, at + BEGIN.len(), end)) {
            Found::Block(block) => {
                let mut at = end + END.len();
                line(text, &mut at);
                return Some((block, &text[at..]));
            }
            Found::Broken => from = end + END.len(),
            Found::Runaway => return None,
        }
    }
}

enum Found {
    Block(Block),
    Broken,
    /// Headers that do not end before the block does: Go looks no further.
    Runaway,
}

/// The block whose label is at `at` and whose last line begins behind the line end at `end`.
fn block(text: &[u8], mut at: usize, end: usize) -> Found {
    let Some(label) = line(text, &mut at).strip_suffix(DASHES) else { return Found::Broken };
    let mut has_headers = false;
    loop {
        let mut behind = at;
        if at == text.len() {
            return Found::Runaway;
        }
        if !line(text, &mut behind).contains(&b':') {
            break;
        }
        (at, has_headers) = (behind, true);
    }
    let trailer = end + END.len();
    match at > end {
        true if at > trailer => return Found::Runaway,
        // Between headers and the end there is a line at least.
        true if has_headers => return Found::Broken,
        _ => {}
    }
    let mut trailer = trailer;
    let last = line(text, &mut trailer);
    if last.strip_prefix(label).and_then(|rest| rest.strip_prefix(DASHES)) != Some(b"") {
        return Found::Broken;
    }
    let body = text.get(at..end).unwrap_or_default();
    let body: Vec<u8> = body.iter().copied().filter(|byte| !b" \t\r\n".contains(byte)).collect();
    let Ok(bytes) = BASE64.decode(body) else { return Found::Broken };
    Found::Block(Block { label: String::from_utf8_lossy(label).into(), has_headers, bytes })
}

/// The line at `at`, without its end and the blanks before that; `at` is moved behind it.
fn line<'a>(text: &'a [u8], at: &mut usize) -> &'a [u8] {
    let rest = &text[*at..];
    let (mut line, count) = match rest.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&rest[..end], end + 1),
        None => (rest, rest.len()),
    };
    if count > line.len() {
        line = line.strip_suffix(b"\r").unwrap_or(line);
    }
    *at += count;
    while let [head @ .., b' ' | b'\t'] = line {
        line = head;
    }
    line
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

fn find_last(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).rposition(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of a text, each as `LABEL=content`, `LABEL+=content` with headers.
    fn check(text: &str, expected: &[&str]) {
        let shown = |block: Block| {
            let plus = if block.has_headers { "+" } else { "" };
            format!("{}{plus}={}", block.label, String::from_utf8_lossy(&block.bytes))
        };
        let got: Vec<String> = blocks(text.as_bytes()).map(shown).collect();
        assert_eq!(got, expected, "{text:?}");
    }

    #[test]
    fn blocks_are_what_go_reads() {
        const ONE: &str = "-----BEGIN A-----\naGVsbG8=\n-----END A-----\n";
        const TWO: &str = "-----BEGIN B-----\r\naG Vs\t\r\nbG8=  \r\n-----END B-----  \r\n";
        check("", &[]);
        check(ONE, &["A=hello"]);
        check(ONE.trim_end(), &["A=hello"]);
        check(&format!("{TWO}{ONE}"), &["B=hello", "A=hello"]);
        check(&format!("junk before\n{ONE}between\n{TWO}behind"), &["A=hello", "B=hello"]);
        check("-----BEGIN A-----\n-----END A-----", &["A="]);
        check("-----BEGIN A-----\nK: v\n\naGVsbG8=\n-----END A-----", &["A+=hello"]);
        // A beginning without an end is skipped, and so is whatever stands before the last one.
        check(&format!("-----BEGIN C-----\njunk\n{ONE}"), &["A=hello"]);
        // Broken ones are skipped.
        for broken in [
            "-----BEGIN A-----\njunk!\n-----END A-----\n",
            "-----BEGIN A-----\naGVsbG8\n-----END A-----\n",
            "-----BEGIN A-----\naGVsbG8=\n-----END B-----\n",
            "-----BEGIN A-----\naGVsbG8=\n-----END A----- junk\n",
            "-----BEGIN A----\naGVsbG8=\n-----END A----\n",
            "junk -----BEGIN A-----\naGVsbG8=\n-----END A-----\n",
            "-----BEGIN A-----\nK: v\n-----END A-----\n",
            "-----BEGIN A-----\naGVsbG8=-----END A-----\n",
        ] {
            check(broken, &[]);
            check(&format!("{broken}{ONE}"), &["A=hello"]);
        }
        check(&format!("-----BEGIN A-----\nK: v\n-----END A:-----\n{ONE}"), &[]);
        // The remaining bits must be zero.
        check("-----BEGIN A-----\naGVsbG9=\n-----END A-----", &["A=hello"]);
    }

    #[test]
    fn what_is_behind_a_block_is_left() {
        let text = b"-----BEGIN A-----\n\n-----END A-----\r\nrest";
        let (block, rest) = next(text).expect("a block");
        assert_eq!((block.label.as_str(), rest), ("A", &b"rest"[..]));
    }
}
