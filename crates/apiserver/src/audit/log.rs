//! The log backend: a line per event, to standard output or to a file that is rotated.
//!
//! ```text
//! audit.log ► audit-2026-01-02T03-04-05.123.log[.gz]     when it would exceed its size
//! ```
//!
//! Invariants: a line is written whole; files have mode 0600. When a new file begins, old ones are removed
//! by number and by the age in their name. Neither that nor compression blocks writers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use flate2::Compression;
use flate2::write::GzEncoder;

const MEGABYTE: u64 = 1 << 20;
const DAY_SECONDS: i64 = 86_400;
const STAMP: &str = "%Y-%m-%dT%H-%M-%S.%3f";
const STAMP_READ: &str = "%Y-%m-%dT%H-%M-%S%.f";

/// Upstream's `--audit-log-*`.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// 0: one file without limit.
    pub max_megabytes: u64,
    /// Old files that are kept; 0 for all.
    pub max_backups: usize,
    /// Days; 0 for no limit.
    pub max_age_days: u64,
    pub compress: bool,
}

pub struct Log {
    rotation: Rotation,
    /// Locked for one write, or one change of files.
    state: Mutex<Target>,
    /// Locked while old files are removed or compressed.
    old: Mutex<()>,
}

enum Target {
    StandardOutput,
    File { path: PathBuf, file: File, size: u64 },
}

impl Log {
    /// `-` is standard output.
    pub fn open(path: &str, rotation: Rotation) -> io::Result<Self> {
        let target = match path {
            "-" => Target::StandardOutput,
            path => {
                let path = PathBuf::from(path);
                if let Some(parent) = path.parent() {
                    fs::create_dir_all(parent)?;
                }
                let file = append(&path)?;
                let size = file.metadata()?.len();
                Target::File { path, file, size }
            }
        };
        Ok(Self { rotation, state: Mutex::new(target), old: Mutex::default() })
    }

    /// Writes lines with their newlines. True: a new file was begun, and the caller should call
    /// [`Log::tidy`].
    pub fn write(&self, lines: &[u8]) -> io::Result<bool> {
        let mut state = self.state.lock().expect("no panic under the lock");
        let Target::File { path, file, size } = &mut *state else {
            return io::stdout().lock().write_all(lines).map(|()| false);
        };
        let limit = self.rotation.max_megabytes.saturating_mul(MEGABYTE);
        let is_full = limit > 0 && *size > 0 && *size + lines.len() as u64 > limit;
        if is_full {
            fs::rename(&*path, backup_of(path))?;
            *file = append(path)?;
            *size = 0;
        }
        file.write_all(lines)?;
        *size += lines.len() as u64;
        Ok(is_full)
    }

    /// Removes files that are too old or too many, and compresses the rest. May take long.
    pub fn tidy(&self) -> io::Result<()> {
        let path = match &*self.state.lock().expect("no panic under the lock") {
            Target::StandardOutput => return Ok(()),
            Target::File { path, .. } => path.clone(),
        };
        let _one = self.old.lock().expect("no panic under the lock");
        let mut old = backups(&path)?;
        // The names contain the time: the newest come first.
        old.sort_unstable();
        old.reverse();
        let days = i64::try_from(self.rotation.max_age_days).unwrap_or(i64::MAX);
        let oldest =
            base::clock::now().as_second().saturating_sub(days.saturating_mul(DAY_SECONDS));
        for (index, Old { stamp, path }) in old.iter().enumerate() {
            let too_many = self.rotation.max_backups > 0 && index >= self.rotation.max_backups;
            let too_old = days > 0 && stamp.as_second() < oldest;
            if too_many || too_old {
                fs::remove_file(path)?;
            } else if self.rotation.compress && path.extension().is_none_or(|end| end != "gz") {
                compress(path)?;
            }
        }
        Ok(())
    }
}

/// A rotated file, and its time.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Old {
    stamp: jiff::Timestamp,
    path: PathBuf,
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// `audit.log` becomes `audit-` before the time and `.log` after it.
fn name_parts(path: &Path) -> (String, String) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let end = path.extension().map(|end| format!(".{}", end.to_string_lossy()));
    (format!("{stem}-"), end.unwrap_or_default())
}

fn backup_of(path: &Path) -> PathBuf {
    let (prefix, end) = name_parts(path);
    let stamp = base::clock::now().strftime(STAMP);
    path.with_file_name(format!("{prefix}{stamp}{end}"))
}

fn backups(path: &Path) -> io::Result<Vec<Old>> {
    let (prefix, end) = name_parts(path);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut found = vec![];
    for entry in fs::read_dir(directory.unwrap_or(Path::new(".")))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let rest = name.strip_suffix(".gz").unwrap_or(&name);
        let stamp = rest.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(&end));
        let time = stamp.and_then(|stamp| jiff::civil::DateTime::strptime(STAMP_READ, stamp).ok());
        if let Some(stamp) = time.and_then(|time| time.to_zoned(jiff::tz::TimeZone::UTC).ok()) {
            found.push(Old { stamp: stamp.timestamp(), path: entry.path() });
        }
    }
    Ok(found)
}

fn compress(path: &Path) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".gz");
    let packed =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&name)?;
    let mut encoder = GzEncoder::new(packed, Compression::default());
    io::copy(&mut File::open(path)?, &mut encoder)?;
    encoder.finish()?.sync_data()?;
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn rotation(max_backups: usize, compress: bool) -> Rotation {
        Rotation { max_megabytes: 1, max_backups, max_age_days: 0, compress }
    }

    /// Two lines fill a file: the third begins a new one.
    fn line(first: u8) -> Vec<u8> {
        let mut line = vec![first; MEGABYTE as usize / 2 - 1];
        line.push(b'\n');
        line
    }

    fn scratch(name: &str) -> PathBuf {
        let unique = base::rng::uuid();
        std::env::temp_dir().join(format!("decapod-audit-{name}-{unique}"))
    }

    /// Writes a line, and tidies if a new file was begun.
    fn write(log: &Log, first: u8) {
        if log.write(&line(first)).expect("written") {
            log.tidy().expect("tidied");
        }
        // Names differ by the millisecond.
        let before = base::clock::now();
        while base::clock::now().as_millisecond() == before.as_millisecond() {}
    }

    fn firsts(path: &Path) -> Vec<u8> {
        let mut old = backups(path).expect("listed");
        old.sort();
        old.iter().map(|one| fs::read(&one.path).expect("there")[0]).collect()
    }

    #[test]
    fn files_are_rotated_and_old_ones_are_removed() {
        let directory = scratch("rotate");
        let path = directory.join("audit.log");
        let log = Log::open(&path.to_string_lossy(), rotation(2, false)).expect("a log");
        for first in b'a'..=b'i' {
            write(&log, first);
        }
        let present = fs::read(&path).expect("there");
        assert_eq!((present.len(), present[0]), (MEGABYTE as usize / 2, b'i'));
        assert_eq!(firsts(&path), *b"eg");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::remove_dir_all(directory).expect("removed");
    }

    /// The time in the name counts: a copy of a log may have a newer modification time.
    #[test]
    fn old_files_are_removed_by_the_age_in_their_name() {
        let directory = scratch("age");
        let path = directory.join("audit.log");
        let rotation = Rotation { max_age_days: 30, ..rotation(0, false) };
        let log = Log::open(&path.to_string_lossy(), rotation).expect("a log");
        let at = |days: i64| {
            let then = base::clock::now() - jiff::SignedDuration::from_hours(days * 24);
            directory.join(format!("audit-{}.log.gz", then.strftime(STAMP)))
        };
        for days in [29, 31] {
            fs::write(at(days), b"x").expect("written");
        }
        // Not our files: without a time, or with another name.
        for name in ["audit-notes.log", "audit-2026.log", "other-2020-01-02T03-04-05.123.log"] {
            fs::write(directory.join(name), b"y").expect("written");
        }
        for first in b'a'..=b'c' {
            write(&log, first);
        }
        assert_eq!(firsts(&path), *b"xa");
        assert_eq!(fs::read_dir(&directory).expect("listed").count(), 6);
        fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn without_a_size_there_is_one_file() {
        let directory = scratch("one");
        let path = directory.join("audit.log");
        let rotation = Rotation { max_megabytes: 0, ..rotation(1, true) };
        let log = Log::open(&path.to_string_lossy(), rotation).expect("a log");
        for first in b'a'..=b'e' {
            write(&log, first);
        }
        assert_eq!(fs::metadata(&path).expect("there").len(), 5 * MEGABYTE / 2);
        assert!(backups(&path).expect("listed").is_empty());
        fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn old_files_are_compressed() {
        let directory = scratch("compress");
        let path = directory.join("audit.log");
        let log = Log::open(&path.to_string_lossy(), rotation(0, true)).expect("a log");
        for first in b'a'..=b'c' {
            write(&log, first);
        }
        let old = backups(&path).expect("listed");
        assert_eq!(old.len(), 1);
        let mut text = vec![];
        let packed = File::open(&old[0].path).expect("there");
        flate2::read::GzDecoder::new(packed).read_to_end(&mut text).expect("gzip");
        assert_eq!(text, [line(b'a'), line(b'b')].concat());
        // Files of an earlier process count.
        drop(log);
        let log = Log::open(&path.to_string_lossy(), rotation(0, true)).expect("a log");
        log.write(&line(b'd')).expect("written");
        assert_eq!(fs::read(&path).expect("there").len(), MEGABYTE as usize);
        fs::remove_dir_all(directory).expect("removed");
    }
}
