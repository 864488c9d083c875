//! The log backend: a line per event, to standard output or to a file that is rotated.
//!
//! ```text
//! audit.log ► audit-2026-01-02T03-04-05.123.log[.gz]     when it would grow beyond its size
//! ```
//!
//! Invariants: a line is written whole; files are of mode 0600; old ones go by number and by age
//! when a new one begins.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;

const MEGABYTE: u64 = 1 << 20;
const STAMP: &str = "%Y-%m-%dT%H-%M-%S.%3f";
/// Upstream's rotation takes 0 for this.
const DEFAULT_MEGABYTES: u64 = 100;

/// Upstream's `--audit-log-*`.
#[derive(Clone, Debug)]
pub struct Rotation {
    pub max_megabytes: u64,
    /// Old files that are kept; 0 for all.
    pub max_backups: usize,
    /// Days; 0 for ever.
    pub max_age_days: u64,
    pub compress: bool,
}

pub struct Log {
    rotation: Rotation,
    /// Guards one write, or one rotation.
    state: Mutex<Target>,
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
        Ok(Self { rotation, state: Mutex::new(target) })
    }

    /// Writes lines, each with its end.
    pub fn write(&self, lines: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().expect("no panic under the lock");
        match &mut *state {
            Target::StandardOutput => io::stdout().lock().write_all(lines),
            Target::File { path, file, size } => {
                let limit = match self.rotation.max_megabytes {
                    0 => DEFAULT_MEGABYTES,
                    given => given,
                } * MEGABYTE;
                if *size > 0 && *size + lines.len() as u64 > limit {
                    fs::rename(&*path, backup_of(path))?;
                    *file = append(path)?;
                    *size = 0;
                    self.tidy(path)?;
                }
                file.write_all(lines)?;
                *size += lines.len() as u64;
                Ok(())
            }
        }
    }

    /// Removes what is too old or too many, and compresses the rest.
    fn tidy(&self, path: &Path) -> io::Result<()> {
        let mut old = backups(path)?;
        // Names carry the time: the newest first.
        old.sort();
        old.reverse();
        let now = base::clock::now();
        for (index, one) in old.iter().enumerate() {
            let too_many = self.rotation.max_backups > 0 && index >= self.rotation.max_backups;
            let age = fs::metadata(one)?.modified()?;
            let limit = Duration::from_secs(self.rotation.max_age_days * 86_400);
            let too_old = self.rotation.max_age_days > 0
                && jiff::Timestamp::try_from(age).is_ok_and(|age| age + limit < now);
            if too_many || too_old {
                fs::remove_file(one)?;
            } else if self.rotation.compress && one.extension().is_none_or(|end| end != "gz") {
                compress(one)?;
            }
        }
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// `audit.log` has `audit-` before the time and `.log` behind it.
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

fn backups(path: &Path) -> io::Result<Vec<PathBuf>> {
    let (prefix, end) = name_parts(path);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut found = vec![];
    for entry in fs::read_dir(directory.unwrap_or(Path::new(".")))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let rest = name.strip_suffix(".gz").unwrap_or(&name);
        let stamp = rest.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(&end));
        if stamp.is_some_and(|stamp| stamp.len() == "2026-01-02T03-04-05.123".len()) {
            found.push(entry.path());
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

    #[test]
    fn files_are_rotated_and_old_ones_go() {
        let directory = scratch("rotate");
        let path = directory.join("audit.log");
        let log = Log::open(&path.to_string_lossy(), rotation(2, false)).expect("a log");
        for first in b'a'..=b'i' {
            log.write(&line(first)).expect("written");
            // Names tell files apart by the millisecond.
            let before = base::clock::now();
            while base::clock::now().as_millisecond() == before.as_millisecond() {}
        }
        let present = fs::read(&path).expect("there");
        assert_eq!((present.len(), present[0]), (MEGABYTE as usize / 2, b'i'));
        let mut old = backups(&path).expect("listed");
        old.sort();
        let firsts: Vec<u8> = old.iter().map(|one| fs::read(one).expect("there")[0]).collect();
        assert_eq!(firsts, *b"eg");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn old_files_are_compressed() {
        let directory = scratch("compress");
        let path = directory.join("audit.log");
        let log = Log::open(&path.to_string_lossy(), rotation(0, true)).expect("a log");
        for first in b'a'..=b'c' {
            log.write(&line(first)).expect("written");
        }
        let old = backups(&path).expect("listed");
        assert_eq!(old.len(), 1);
        let mut text = vec![];
        let packed = File::open(&old[0]).expect("there");
        flate2::read::GzDecoder::new(packed).read_to_end(&mut text).expect("gzip");
        assert_eq!(text, [line(b'a'), line(b'b')].concat());
        // What an earlier life wrote counts.
        drop(log);
        let log = Log::open(&path.to_string_lossy(), rotation(0, true)).expect("a log");
        log.write(&line(b'd')).expect("written");
        assert_eq!(fs::read(&path).expect("there").len(), MEGABYTE as usize);
        fs::remove_dir_all(directory).expect("removed");
    }
}
