//! The programs of the node that mount and format.

use std::io;
use std::process::Command;

/// A program that failed.
#[derive(Clone, Debug, Default)]
pub struct Ended {
    /// The exit code; `None`: it did not run.
    pub status: Option<i32>,
    /// In Go's words.
    pub why: String,
    pub output: String,
}

/// Runs a program; returns its output on both streams.
pub fn run(program: &str, arguments: &[&str]) -> Result<String, Ended> {
    let output = Command::new(program).args(arguments).output().map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "executable file not found in $PATH".to_owned(),
            _ => error.to_string(),
        };
        Ended { why, ..Ended::default() }
    })?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    match output.status.code() {
        Some(0) => Ok(text),
        Some(code) => {
            Err(Ended { status: Some(code), why: format!("exit status {code}"), output: text })
        }
        None => Err(Ended { status: None, why: output.status.to_string(), output: text }),
    }
}

pub type Run<'a> = &'a dyn Fn(&str, &[&str]) -> Result<String, Ended>;
