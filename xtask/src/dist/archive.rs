//! Archives with the same bytes for the same content: tar by GNU tar, ar by hand.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::sh::{self, Outcome};

/// A directory that becomes an archive, removed when it is dropped.
pub struct Tree(PathBuf);

impl Tree {
    pub fn new(purpose: &str) -> Outcome<Self> {
        sh::temporary_directory(purpose).map(Self)
    }

    pub fn write(&self, path: &str, content: &[u8], is_program: bool) -> Outcome {
        let to = self.0.join(path);
        let failed = |error| format!("{}: {error}", to.display());
        let parent = to.parent().ok_or("a file is in a directory")?;
        fs::create_dir_all(parent).map_err(failed)?;
        fs::write(&to, content).map_err(failed)?;
        let mode = if is_program { 0o755 } else { 0o644 };
        fs::set_permissions(&to, Permissions::from_mode(mode)).map_err(failed)
    }

    pub fn copy(&self, from: &Path, path: &str, is_program: bool) -> Outcome {
        let content = fs::read(from).map_err(|error| format!("{}: {error}", from.display()))?;
        self.write(path, &content, is_program)
    }

    /// These entries of the tree as .tar.gz.
    pub fn packed(&self, entries: &[&str], epoch: &str) -> Outcome<Vec<u8>> {
        let mut tar = Command::new("tar");
        tar.arg("--directory").arg(&self.0);
        tar.args(["--create", "--format=gnu", "--sort=name", "--owner=root:0", "--group=root:0"]);
        tar.args(["--mode=u+rw,go=rX", "--numeric-owner", &format!("--mtime=@{epoch}")]);
        let tar = output(tar.args(entries), None)?;
        // Without a name and a time in the header.
        output(Command::new("gzip").args(["-9", "--no-name", "--stdout"]), Some(tar))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn output(command: &mut Command, input: Option<Vec<u8>>) -> Outcome<Vec<u8>> {
    use std::io::Write;
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |error: std::io::Error| format!("{name}: {error}");
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    let mut child = command.stdin(stdin).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let writing = child
        .stdin
        .take()
        .map(|mut pipe| std::thread::spawn(move || pipe.write_all(&input.unwrap_or_default())));
    let output = child.wait_with_output().map_err(failed)?;
    let is_written = writing.is_none_or(|thread| matches!(thread.join(), Ok(Ok(()))));
    match output.status.success() && is_written {
        true => Ok(output.stdout),
        false => Err(format!("{name}: {}", output.status)),
    }
}

/// An ar archive, as a .deb is one: entries with a name of 16 characters at most.
pub fn ar(entries: &[(&str, &[u8])], epoch: &str) -> Vec<u8> {
    let mut all = b"!<arch>\n".to_vec();
    for (name, content) in entries {
        let size = content.len();
        all.extend(
            format!("{name:<16}{epoch:<12}{:<6}{:<6}{:<8}{size:<10}`\n", 0, 0, 100_644).bytes(),
        );
        all.extend(*content);
        if size % 2 == 1 {
            all.push(b'\n');
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_ar_begin_at_even_places() {
        let archive = ar(&[("a", b"x"), ("debian-binary", b"2.0\n")], "1700000000");
        let text = String::from_utf8(archive).expect("text");
        let expected = "!<arch>\n\
            a               1700000000  0     0     100644  1         `\nx\n\
            debian-binary   1700000000  0     0     100644  4         `\n2.0\n";
        assert_eq!(text, expected);
    }
}
