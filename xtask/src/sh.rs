//! Runs other programs and reports their failures.
//!
//! In: commands. Out: success, or one line that names the command and how it ended.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub type Outcome<T = ()> = Result<T, String>;

/// A headline that a reader can find in a long log.
pub fn step(text: &str) {
    println!("\n==> {text}");
}

/// Runs a command; its output goes to our own output.
pub fn run(command: &mut Command) -> Outcome {
    let status = command.status().map_err(|error| format!("{}: {error}", line(command)))?;
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", line(command))) }
}

/// Runs a command and returns what it printed.
pub fn capture(command: &mut Command) -> Outcome<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| format!("{}: {error}", line(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}\n{stderr}", line(command), output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program of this name is in `PATH`.
pub fn exists(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

pub fn is_root() -> bool {
    capture(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // .cargo/config.toml has the path of most systems; this covers the others.
    if let Some(place) = crate::packages::library_directory("libseccomp.a")
        && std::env::var_os("LIBSECCOMP_LIB_PATH").is_none_or(|path| !Path::new(&path).exists())
    {
        command.env("LIBSECCOMP_LIB_PATH", place);
    }
    command
}

/// The top of the work tree.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies one level below the top").to_owned()
}

pub fn target_directory() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The directory of expensive build results, which survives between runs.
pub fn cache_directory() -> Outcome<PathBuf> {
    if let Some(path) = std::env::var_os("DECAPOD_CACHE") {
        return Ok(path.into());
    }
    match std::env::var_os("HOME") {
        Some(home) => Ok(PathBuf::from(home).join(".cache/decapod")),
        None => Err("neither DECAPOD_CACHE nor HOME is set: no place for the cache".to_owned()),
    }
}

/// A new, empty directory in the system's temporary directory. The process id alone is not unique: a run
/// in another PID namespace may have the same one.
pub fn temporary_directory(purpose: &str) -> Outcome<PathBuf> {
    for number in 0..1000 {
        let name = format!("decapod-{purpose}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        match std::fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => (),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
    }
    Err(format!("no free name for a directory ({purpose})"))
}

fn line(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}
