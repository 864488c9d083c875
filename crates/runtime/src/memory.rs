//! Returns memory to the kernel that only the start needed.
//!
//! A start touches megabytes that the main loop never uses: code, read-only data, freed heap. Each
//! shim calls this, and so do a server and its DNS. Program pages that equal the file are unmapped;
//! the page cache restores them on demand.
//!
//! Invariant: a mapping with a private page (for example, relocated data) stays, since dropping
//! that page would lose its content.

use std::fs;

/// Best effort: a failure only costs memory.
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

/// Read-only mappings of files without private pages.
fn clean_file_mappings(smaps: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut current: Option<(usize, usize)> = None;
    for line in smaps.lines() {
        if let Some(range) = head(line) {
            current = range;
        } else if let Some(rest) = line.strip_prefix("Anonymous:") {
            // The last line about private pages: it also counts written pages of a file mapping.
            if rest.trim() == "0 kB" {
                found.extend(current.take());
            }
        }
    }
    found
}

/// Parses a mapping's first line: `Some(None)` when the mapping is not of this kind.
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
    fn only_unmodified_file_pages_are_released() {
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
