//! The texts of `Warning:` headers, limited to what an answer may contain.
//!
//! In: any number of texts: an object of a few megabytes may cause tens of thousands. Out: the shown ones.
//! Upstream: `warning.go` of the endpoints' filters.
//!
//! ```text
//! all fit into TOTAL characters      → all, whole
//! they do not                        → each truncated to ITEM characters, until TOTAL is reached
//! ```

/// Characters of all texts together.
const TOTAL: usize = 4 * 1024;
/// Characters of a text, if not all fit.
const ITEM: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct Warnings {
    texts: Vec<String>,
    written: usize,
    is_cutting: bool,
}

impl Warnings {
    /// Adds a text, unless it was added before.
    pub(crate) fn add(&mut self, text: String) {
        let is_full = self.is_cutting && self.written >= TOTAL;
        if is_full || text.is_empty() || self.texts.contains(&text) {
            return;
        }
        let length = text.chars().count();
        self.texts.push(text);
        if self.is_cutting {
            self.written += length.min(ITEM);
        } else if self.written + length <= TOTAL {
            self.written += length;
        } else {
            self.is_cutting = true;
            self.written = self.texts.iter().map(|text| text.chars().count().min(ITEM)).sum();
        }
    }

    /// Returns the shown texts, and clears the list.
    pub(crate) fn take(&mut self) -> Vec<String> {
        let Self { texts, is_cutting, .. } = std::mem::take(self);
        if !is_cutting {
            return texts;
        }
        texts.iter().map(|text| text.chars().take(ITEM).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_texts_are_whole_and_many_are_truncated() {
        let check = |count: usize, length: usize, expected: (usize, usize)| {
            let mut all = Warnings::default();
            for index in 0..count {
                let text = format!("{index:é>length$}");
                all.add(text.clone());
                all.add(text);
            }
            all.add(String::new());
            let shown = all.take();
            let longest = shown.iter().map(|text| text.chars().count()).max().unwrap_or_default();
            assert_eq!((shown.len(), longest), expected, "{count} of {length}");
            assert!(all.take().is_empty());
        };
        check(0, 10, (0, 0));
        check(3, 1000, (3, 1000));
        check(4, 1024, (4, 1024));
        check(5, 1024, (5, 256));
        check(100, 1024, (16, 256));
        check(10_000, 64, (65, 64));
    }
}
