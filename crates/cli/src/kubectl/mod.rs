//! `decapod kubectl`: the part of kubectl that is needed to try a cluster without it.
//!
//! In: kubectl's flags. Out: kubectl's output, messages and exit codes. It works against any API
//! server: kinds, their names and their columns come from the server.
//!
//! ```text
//!  words ─► target ─► resources (discovery) ─► cluster ─► print
//!  -f    ─► manifests ─┘
//! ```

mod apply;
pub mod console;
mod delete;
mod diff;
mod exec;
mod get;
mod logs;
mod manifests;
mod past;
mod pods;
mod print;
mod resources;
mod stdin;
mod target;
mod three_way;
mod version;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use self::console::Console;
use crate::cluster::Connection;
use crate::failure::Result;

#[derive(clap::Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Kubectl {
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Display one or many resources
    Get(get::Get),
    /// Apply a configuration to a resource by file name or stdin
    Apply(apply::Apply),
    /// Show an object at a revision, its changes since then, and who made them
    Diff(diff::Diff),
    /// Delete resources by file names, stdin, resources and names, or by resources and label selector
    Delete(delete::Delete),
    /// Print the logs for a container in a pod
    #[command(visible_alias = "log")]
    Logs(logs::Logs),
    /// Execute a command in a container
    Exec(exec::Exec),
    /// Print the client and server version information
    Version(version::Version),
}

/// The values of `--dry-run`.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DryRun {
    #[default]
    None,
    Client,
    Server,
}

impl DryRun {
    fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Client => " (dry run)",
            Self::Server => " (server dry run)",
        }
    }
}

/// The values of `--validate`.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Validate {
    #[default]
    #[value(alias = "true")]
    Strict,
    Warn,
    #[value(alias = "false")]
    Ignore,
}

impl Validate {
    fn as_query(self) -> &'static str {
        match self {
            Self::Strict => "Strict",
            Self::Warn => "Warn",
            Self::Ignore => "Ignore",
        }
    }
}

impl Kubectl {
    /// Runs the command; prints failures in kubectl's words.
    pub async fn run(self, data_dir: &Path) -> anyhow::Result<ExitCode> {
        Ok(self.run_on(data_dir, &Console::standard()).await)
    }

    pub async fn run_on(self, data_dir: &Path, console: &Console) -> ExitCode {
        match self.dispatch(data_dir, console).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                failure.lines().iter().for_each(|line| console.note(line));
                ExitCode::from(failure.exit_code())
            }
        }
    }

    async fn dispatch(self, data_dir: &Path, console: &Console) -> Result<()> {
        let open = || self.connection.open(data_dir);
        match self.command {
            Command::Get(get) => get.run(&open()?, console).await,
            Command::Apply(apply) => apply.run(&open()?, console).await,
            Command::Diff(diff) => diff.run(&open()?, console).await,
            Command::Delete(delete) => delete.run(&open()?, console).await,
            Command::Logs(logs) => logs.run(&open()?, console).await,
            Command::Exec(exec) => exec.run(&open()?, console).await,
            Command::Version(version) => version.run(open, console).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::{Cluster, Connection};

    pub fn cluster(server: &str) -> Cluster {
        let connection = Connection { server: Some(server.into()), ..Connection::default() };
        connection.open(std::path::Path::new("/nowhere")).expect("opens")
    }
}
