//! Client libraries from other projects, as users install them: with their package managers, once, into
//! the cache.
//!
//! In: Python with pip, Node.js with npm, Java with Maven, and their registries. Out: a directory with
//! the library. If the tools are missing or the registry does not provide it: `None`, and a printed line.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::places;

/// A library in another language.
pub struct Library {
    pub package: &'static str,
    pub version: &'static str,
    /// Both must exist: the interpreter, and the package manager.
    tools: [&'static str; 2],
    /// The command; `DIRECTORY` in a word is replaced by the target directory.
    install: &'static [&'static str],
}

const DIRECTORY: &str = "DIRECTORY";

/// The client of our Kubernetes release.
pub const PYTHON: Library = Library {
    package: "kubernetes",
    version: "36.0.2",
    tools: ["python3", "pip"],
    install: &[
        "python3",
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        DIRECTORY,
        "kubernetes==36.0.2",
    ],
};

/// Two clients that do not use the official library.
pub const OPERATORS: Library = Library {
    package: "kr8s-kopf",
    version: "0.20.15-1.45.2",
    tools: ["python3", "pip"],
    install: &[
        "python3",
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        DIRECTORY,
        "kr8s==0.20.15",
        "kopf==1.45.2",
        "kubernetes==36.0.2",
    ],
};

/// With the collection `kubernetes.core`, one of many in its package, and the client that it uses.
pub const ANSIBLE: Library = Library {
    package: "ansible",
    version: "12.3.0",
    tools: ["python3", "pip"],
    install: &["sh", "-e", "-c", INSTALL_ANSIBLE],
};

const INSTALL_ANSIBLE: &str = "\
python3 -m pip install -q --target DIRECTORY ansible-core==2.19.14 kubernetes==36.0.2
python3 -m pip download -q --no-deps -d DIRECTORY/package ansible==12.3.0
python3 -c 'import sys, zipfile
package = zipfile.ZipFile(sys.argv[1])
package.extractall(sys.argv[2], [name for name in package.namelist() if \"/kubernetes/core/\" in name])
' DIRECTORY/package/*.whl DIRECTORY
rm -r DIRECTORY/package
";

/// fabric8's client and the official one, as `pom.xml` names them.
pub const JAVA: Library = Library {
    package: "java",
    version: "fabric8-7.3.1-official-24.0.0",
    tools: ["java", "mvn"],
    install: &[
        "mvn",
        "-q",
        "-B",
        "-f",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../binary/tests/e2e/clients/pom.xml"),
        "-DoutputDirectory=DIRECTORY",
        "dependency:copy-dependencies",
    ],
};

/// The newest version that runs on Node.js 20.
pub const JAVASCRIPT: Library = Library {
    package: "@kubernetes/client-node",
    version: "1.4.0",
    tools: ["node", "npm"],
    install: &[
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--prefix",
        DIRECTORY,
        "@kubernetes/client-node@1.4.0",
    ],
};

impl Library {
    /// The library's directory, after it is installed.
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
        let place = partial.to_str().context("the cache is a text")?;
        let mut words = self.install.iter().map(|word| word.replace(DIRECTORY, place));
        let program = words.next().context("a command")?;
        let output = Command::new(&program).args(words).output()?;
        if !output.status.success() {
            let _ = std::fs::remove_dir_all(&partial);
            let told = [output.stdout, output.stderr].concat();
            let told = String::from_utf8_lossy(&told).into_owned();
            let why = told.lines().rfind(|line| line.to_lowercase().contains("error"));
            let why = why.unwrap_or("no reason is given").trim();
            println!("skipped: {program} cannot install {} {}: {why}", self.package, self.version);
            return Ok(None);
        }
        // If two runs install at once, the first one wins; their results are the same.
        if std::fs::rename(&partial, &directory).is_err() {
            std::fs::remove_dir_all(&partial)?;
        }
        Ok(Some(directory))
    }
}
