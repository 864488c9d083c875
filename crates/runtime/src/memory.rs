//! Giving back what a start needed.
//!
//! A start touches megabytes that the loop afterwards never looks at: code, read-only data, freed
//! heap. Shims do this, one per container, and so do a server and its DNS. Pages of the program that
//! are as they are in the file are unmapped; they come back from the page cache when they are needed.
//!
//! Invariant: a mapping with a page of its own (relocated data, say) is left alone, since dropping
//! that page would lose what is in it.

use std::fs;

/// Best effort: programs work as well without.
pub fn trim() {
    let Ok(smaps) = fs::read_to_string("/proc/self/smaps") else { return };
    for (start, end) in clean_file_mappings(&smaps) {
        // SAFETY: the range is a read-only mapping of a file without private pages: its content
        // is the file's, now and when it is mapped again.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED) };
    }
    drop(smaps);
    #[cfg(target_env = "gnu")]
    // SAFETY: a library call without preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Read-only mappings of files none of whose pages are private to us.
fn clean_file_mappings(smaps: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut current: Option<(usize, usize)> = None;
    for line in smaps.lines() {
        if let Some(range) = head(line) {
            current = range;
        } else if let Some(rest) = line.strip_prefix("Anonymous:") {
            // The last word on private pages: a written page of a file mapping counts here.
            if rest.trim() == "0 kB" {
                found.extend(current.take());
            }
        }
    }
    found
}

/// A mapping's first line: `Some(None)` when it is not of the kind.
fn head(line: &str) -> Option<Option<(usize, usize)>> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let flags = words.next()?;
    let path = words.nth(3).unwrap_or_default();
    let fits = matches!(flags, "r--p" | "r-xp") && path.starts_with('/');
    Some(fits.then_some((start, end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_as_in_the_file_is_given_back() {
        let smaps = "\
1000-2000 r-xp 00000000 fe:00 7 /bin/x
Rss: 4 kB
Anonymous: 0 kB
2000-3000 r--p 00001000 fe:00 7 /bin/x
Anonymous: 4 kB
3000-4000 rw-p 00002000 fe:00 7 /bin/x
Anonymous: 0 kB
4000-5000 rw-p 00000000 00:00 0 [heap]
Anonymous: 0 kB
5000-6000 r-xp 00000000 00:00 0 [vdso]
Anonymous: 0 kB
6000-7000 r--p 00000000 fe:00 8 /lib/y
Anonymous: 0 kB
";
        assert_eq!(clean_file_mappings(smaps), [(0x1000, 0x2000), (0x6000, 0x7000)]);
    }
}
