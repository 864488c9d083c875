//! Unified diffs of lines, as Go's `difflib` makes them: by the longest common runs, not by the
//! fewest changes, for the text must be upstream's.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;

/// Lines around a change.
const CONTEXT: usize = 3;
/// In longer texts lines that occur often do not begin a run.
const POPULAR_FROM: usize = 200;

/// A stretch of the old lines and what stands in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    is_equal: bool,
    old: Range<usize>,
    new: Range<usize>,
}

pub(crate) fn unified(old: &[String], new: &[String]) -> String {
    let mut out = String::new();
    for hunk in hunks(changes(old, new)) {
        let (Some(first), Some(last)) = (hunk.first(), hunk.last()) else { continue };
        let _ = writeln!(
            out,
            "@@ -{} +{} @@",
            span(first.old.start..last.old.end),
            span(first.new.start..last.new.end)
        );
        for change in &hunk {
            if change.is_equal {
                write_lines(&mut out, ' ', &old[change.old.clone()]);
            } else {
                write_lines(&mut out, '-', &old[change.old.clone()]);
                write_lines(&mut out, '+', &new[change.new.clone()]);
            }
        }
    }
    out
}

fn write_lines(out: &mut String, mark: char, lines: &[String]) {
    for line in lines {
        let _ = writeln!(out, "{mark}{line}");
    }
}

fn span(range: Range<usize>) -> String {
    match range.len() {
        1 => format!("{}", range.start + 1),
        0 => format!("{},0", range.start),
        length => format!("{},{length}", range.start + 1),
    }
}

/// Changes with their surroundings; far apart ones are hunks of their own.
fn hunks(mut all: Vec<Change>) -> Vec<Vec<Change>> {
    if all.iter().all(|change| change.is_equal) {
        return vec![];
    }
    let cut = |range: &Range<usize>, keep_end: bool| match keep_end {
        true => range.start.max(range.end.saturating_sub(CONTEXT))..range.end,
        false => range.start..range.end.min(range.start + CONTEXT),
    };
    if let Some(first) = all.first_mut().filter(|change| change.is_equal) {
        (first.old, first.new) = (cut(&first.old, true), cut(&first.new, true));
    }
    if let Some(last) = all.last_mut().filter(|change| change.is_equal) {
        (last.old, last.new) = (cut(&last.old, false), cut(&last.new, false));
    }
    let (mut hunks, mut hunk) = (vec![], vec![]);
    for change in all {
        if change.is_equal && change.old.len() > 2 * CONTEXT {
            let (old, new) = (cut(&change.old, false), cut(&change.new, false));
            hunk.push(Change { is_equal: true, old, new });
            hunks.push(std::mem::take(&mut hunk));
            let (old, new) = (cut(&change.old, true), cut(&change.new, true));
            hunk.push(Change { is_equal: true, old, new });
            continue;
        }
        hunk.push(change);
    }
    if hunk.iter().any(|change| !change.is_equal) {
        hunks.push(hunk);
    }
    hunks
}

/// Equal and unequal stretches, in order.
fn changes(old: &[String], new: &[String]) -> Vec<Change> {
    let positions = positions(new);
    let mut runs = vec![];
    find_runs(old, new, &positions, 0..old.len(), 0..new.len(), &mut runs);
    runs.push((old.len(), new.len(), 0));
    let (mut all, mut at_old, mut at_new): (Vec<Change>, _, _) = (vec![], 0, 0);
    for (start_old, start_new, length) in runs {
        if at_old < start_old || at_new < start_new {
            let (old, new) = (at_old..start_old, at_new..start_new);
            all.push(Change { is_equal: false, old, new });
        }
        let (old, new) = (start_old..start_old + length, start_new..start_new + length);
        (at_old, at_new) = (old.end, new.end);
        match all.last_mut().filter(|last| last.is_equal && last.old.end == old.start) {
            Some(last) if last.new.end == new.start => {
                (last.old.end, last.new.end) = (old.end, new.end);
            }
            _ if length > 0 => all.push(Change { is_equal: true, old, new }),
            _ => {}
        }
    }
    all
}

/// Where each line stands, popular ones left out.
fn positions(lines: &[String]) -> HashMap<&str, Vec<usize>> {
    let mut positions: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, line) in lines.iter().enumerate() {
        positions.entry(line).or_default().push(index);
    }
    if lines.len() >= POPULAR_FROM {
        let most = lines.len() / 100 + 1;
        positions.retain(|_, places| places.len() <= most);
    }
    positions
}

/// The longest run, then those on both sides of it.
fn find_runs(
    old: &[String],
    new: &[String],
    positions: &HashMap<&str, Vec<usize>>,
    in_old: Range<usize>,
    in_new: Range<usize>,
    runs: &mut Vec<(usize, usize, usize)>,
) {
    let (mut best_old, mut best_new, mut best) = (in_old.start, in_new.start, 0);
    let mut lengths: HashMap<usize, usize> = HashMap::new();
    for index in in_old.clone() {
        let mut next = HashMap::new();
        for place in positions.get(old[index].as_str()).into_iter().flatten().copied() {
            if !in_new.contains(&place) {
                continue;
            }
            let before = place.checked_sub(1).and_then(|before| lengths.get(&before));
            let length = before.copied().unwrap_or_default() + 1;
            next.insert(place, length);
            if length > best {
                (best_old, best_new, best) = (index + 1 - length, place + 1 - length, length);
            }
        }
        lengths = next;
    }
    // Popular lines do not begin a run, but belong to one.
    while best_old > in_old.start
        && best_new > in_new.start
        && old[best_old - 1] == new[best_new - 1]
    {
        (best_old, best_new, best) = (best_old - 1, best_new - 1, best + 1);
    }
    while best_old + best < in_old.end
        && best_new + best < in_new.end
        && old[best_old + best] == new[best_new + best]
    {
        best += 1;
    }
    if best == 0 {
        return;
    }
    if in_old.start < best_old && in_new.start < best_new {
        find_runs(old, new, positions, in_old.start..best_old, in_new.start..best_new, runs);
    }
    runs.push((best_old, best_new, best));
    let (end_old, end_new) = (best_old + best, best_new + best);
    if end_old < in_old.end && end_new < in_new.end {
        find_runs(old, new, positions, end_old..in_old.end, end_new..in_new.end, runs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diffs_read_as_upstreams() {
        let lines = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for (old, new, expected) in [
            ("a b c", "a b c", ""),
            ("a b c", "a x c", "@@ -1,3 +1,3 @@\n a\n-b\n+x\n c\n"),
            ("a", "a b", "@@ -1 +1,2 @@\n a\n+b\n"),
            (
                "1 2 3 4 5 6 7 8 9 10 11 12",
                "1 x 3 4 5 6 7 8 9 10 y 12",
                "@@ -1,5 +1,5 @@\n 1\n-2\n+x\n 3\n 4\n 5\n@@ -8,5 +8,5 @@\n 8\n 9\n 10\n-11\n+y\n 12\n",
            ),
        ] {
            assert_eq!(unified(&lines(old), &lines(new)), expected, "{old} → {new}");
        }
    }
}
