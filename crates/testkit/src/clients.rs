//! Foreign client libraries, as their users install them: by their package managers, once, into the
//! cache.
//!
//! In: a Python with pip, a Node.js with npm, and their registries. Out: a directory that holds the
//! library, or `None` with a line where the machine lacks the tools.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::places;

/// A library of some other language.
pub struct Library {
    pub package: &'static str,
    pub version: &'static str,
    /// Both must be there: what runs programs, and what installs packages.
    tools: [&'static str; 2],
    /// The words before the directory that is to be made, and those after it.
    install: (&'static [&'static str], &'static [&'static str]),
}

/// The client of the release that we follow.
pub const PYTHON: Library = Library {
    package: "kubernetes",
    version: "36.0.2",
    tools: ["python3", "pip"],
    install: (&["python3", "-m", "pip", "install", "--quiet", "--target"], &["kubernetes==36.0.2"]),
};

/// The newest that runs on Node.js 20.
pub const JAVASCRIPT: Library = Library {
    package: "@kubernetes/client-node",
    version: "1.4.0",
    tools: ["node", "npm"],
    install: (
        &["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix"],
        &["@kubernetes/client-node@1.4.0"],
    ),
};

impl Library {
    /// Where the library is, once it is there.
    pub fn ensure(&self) -> Result<Option<PathBuf>> {
        if let Some(missing) = self.tools.iter().find(|tool| places::program(tool).is_none()) {
            println!("skipped: {} needs {missing}", self.package);
            return Ok(None);
        }
        let name = format!("{}-{}", self.package.replace(['@', '/'], "_"), self.version);
        let directory = places::cache()?.join("clients").join(name);
        if directory.is_dir() {
            return Ok(Some(directory));
        }
        let partial = directory.with_extension(format!("partial-{}", std::process::id()));
        std::fs::create_dir_all(&partial).with_context(|| partial.display().to_string())?;
        let (before, after) = self.install;
        let mut command = Command::new(before[0]);
        let output = command.args(&before[1..]).arg(&partial).args(after).output()?;
        if !output.status.success() {
            let _ = std::fs::remove_dir_all(&partial);
            bail!("{}: {}", before.join(" "), String::from_utf8_lossy(&output.stderr));
        }
        // Of two runs at once the first one wins; they made the same.
        if std::fs::rename(&partial, &directory).is_err() {
            std::fs::remove_dir_all(&partial)?;
        }
        Ok(Some(directory))
    }
}
