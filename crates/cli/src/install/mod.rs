//! `decapod install`: makes Decapod a service of this machine, or upgrades it in place.
//!
//! In: what the machine becomes (server or agent), and its settings, which the caller has checked. Out: files, and a
//! service that runs and starts at boot.
//!
//! ```text
//!  program ─► /usr/local/bin/decapod          settings ─► /etc/decapod/config.yaml
//!  unit or init script, logind's drop-in       token   ─► /etc/decapod/token
//!  the runtime's socket ─► /etc/crictl.yaml, unless there is one
//! ```
//!
//! Invariants: a file is replaced as a whole or not at all, and a running program is never written to. What the user
//! wrote into config.yaml stays, except for the keys that this run sets. A second run without changes restarts
//! nothing. With `--root` no other directory and no service is touched.
//! Upstream: k3s' install script.

mod files;
mod service;
mod settings;
mod texts;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

pub use self::files::Root;
pub use self::service::Init;
pub use self::settings::Setting;

/// Below the root.
const CONFIG: &str = "/etc/decapod/config.yaml";
const TOKEN: &str = "/etc/decapod/token";
const ENVIRONMENT: &str = "/etc/decapod/decapod.env";
const CONFIG_DIRECTORY: &str = "/etc/decapod";
const CRICTL: &str = "/etc/crictl.yaml";
const LOGIND: &str = "/etc/systemd/logind.conf.d/99-decapod.conf";
/// A program here is started from where it is; one elsewhere is copied.
const PROGRAM_DIRECTORIES: [&str; 5] =
    ["/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin", "/opt/bin"];
const PROGRAM: &str = "decapod";
/// Keys of config.yaml with which crictl does not find this node's runtime at the usual place.
const CRICTL_UNLESS: [&str; 3] = ["container-runtime-endpoint", "cri-socket", "data-dir"];

/// What the machine becomes.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Server,
    Agent,
}

impl Role {
    /// The command that the service runs.
    pub fn command(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Agent => "agent",
        }
    }
}

#[derive(clap::Args, Clone, Debug)]
pub struct Install {
    /// What the machine becomes [default: agent with --server, otherwise server]
    #[arg(value_enum)]
    role: Option<Role>,
    /// URLs of the servers to join, for example https://192.168.0.1:6443 [env: DECAPOD_URL]
    #[arg(long, value_delimiter = ',', value_name = "URL")]
    pub server: Vec<String>,
    /// The token to join with; it is copied to /etc/decapod/token [env: DECAPOD_TOKEN]
    #[arg(long, value_name = "TOKEN")]
    token: Option<String>,
    /// A file with the token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// Write the files, but start and enable nothing
    #[arg(long)]
    no_start: bool,
    /// The machine's init system [default: the one that runs]
    #[arg(long, value_enum)]
    init: Option<Init>,
    /// Install below this directory, for an image of a machine; starts nothing
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
    /// Directory of the program
    #[arg(long, value_name = "DIRECTORY", default_value = "/usr/local/bin")]
    bin_dir: PathBuf,
    /// Also make `kubectl` a link to decapod, beside it
    #[arg(long)]
    link_kubectl: bool,
    /// Flags of `decapod server` or `decapod agent`, which become keys of /etc/decapod/config.yaml
    #[arg(last = true, value_name = "FLAGS")]
    pub flags: Vec<String>,
}

impl Install {
    pub fn role(&self) -> Role {
        match self.role {
            Some(role) => role,
            None if self.servers().is_empty() => Role::Server,
            None => Role::Agent,
        }
    }

    /// From the command line, or as k3s' script takes them from the environment.
    pub fn servers(&self) -> Vec<String> {
        if !self.server.is_empty() {
            return self.server.clone();
        }
        let list = variable("DECAPOD_URL").unwrap_or_default();
        list.split(',').filter(|url| !url.is_empty()).map(str::to_owned).collect()
    }

    fn token(&self) -> Result<Option<String>> {
        let text = match (&self.token, &self.token_file) {
            (Some(text), _) => Some(text.clone()),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path);
                Some(text.with_context(|| format!("cannot read --token-file {}", path.display()))?)
            }
            (None, None) => variable("DECAPOD_TOKEN"),
        };
        Ok(text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()))
    }

    /// `settings` are the checked flags, without the servers and the token.
    pub fn run(&self, settings: Vec<Setting>) -> Result<()> {
        let root = Root::new(self.root.as_deref());
        ensure!(
            !root.is_machine() || nix::unistd::geteuid().is_root(),
            "installing needs root: run `sudo decapod install`, or install into a directory with --root"
        );
        let init = match self.init {
            Some(init) => init,
            None => Init::of(&root)?,
        };
        let role = self.role();
        refuse_other(&root, init, role)?;
        let token = self.token()?;
        if let Some(token) = &token {
            check_token(role, token)?;
        }
        let settings = self.all_settings(&root, role, token.is_some(), settings)?;
        let mut wrote = Wrote::default();
        let program = self.program(&root, &mut wrote)?;
        if let Some(token) = token {
            wrote.file(&root, TOKEN, &format!("{token}\n"), 0o600)?;
        }
        let old = root.read(CONFIG)?;
        let text = settings::merged(old.as_deref(), &settings)
            .with_context(|| format!("cannot change {CONFIG}"))?;
        wrote.file(&root, CONFIG, &text, 0o600)?;
        let is_usual = |key| !settings::has(&text, key);
        if CRICTL_UNLESS.into_iter().all(is_usual) && root.read(CRICTL)?.is_none() {
            wrote.file(&root, CRICTL, texts::CRICTL, 0o644)?;
        }
        if root.read(ENVIRONMENT)?.is_none() {
            wrote.file(&root, ENVIRONMENT, texts::ENVIRONMENT, 0o600)?;
        }
        match init {
            Init::Systemd => {
                wrote.file(&root, init.path(), &texts::unit(&program, role), 0o644)?;
                wrote.file(&root, LOGIND, texts::LOGIND, 0o644)?;
            }
            Init::Openrc => {
                wrote.file(&root, init.path(), &texts::init_script(&program, role), 0o755)?;
            }
        }
        if self.link_kubectl {
            let link = program.with_file_name("kubectl");
            wrote.note(root.link(&link, Path::new(PROGRAM))?, &root.at(&link));
        }
        self.finish(&root, init, role, wrote.any)
    }

    /// Adds what every installation has.
    fn all_settings(
        &self,
        root: &Root,
        role: Role,
        has_token: bool,
        mut settings: Vec<Setting>,
    ) -> Result<Vec<Setting>> {
        let old = root.read(CONFIG)?;
        let knows = |key: &str| old.as_deref().is_some_and(|text| settings::has(text, key));
        let servers = self.servers();
        if !servers.is_empty() {
            settings.push(Setting::list("server", servers));
        } else if role == Role::Agent && !knows("server") {
            bail!("an agent needs the URL of a server: --server https://SERVER:6443");
        }
        if has_token {
            settings.push(Setting::text("token-file", TOKEN));
        } else if role == Role::Agent && !knows("token") && !knows("token-file") {
            bail!(
                "an agent needs a token to join: --token-file FILE, with the output of `decapod token create` on the server"
            );
        }
        if old.is_none() {
            // A reboot ends pods in order: see logind's drop-in.
            for (key, value) in texts::GRACE {
                if settings.iter().all(|one| one.key != key) {
                    settings.push(Setting::text(key, value));
                }
            }
        }
        Ok(settings)
    }

    /// The program that the service starts, as a path of the installed machine.
    fn program(&self, root: &Root, wrote: &mut Wrote) -> Result<PathBuf> {
        let own = std::env::current_exe().context("cannot find this program's file")?;
        let own = own.canonicalize().unwrap_or(own);
        if root.is_machine()
            && own.file_name().is_some_and(|name| name == PROGRAM)
            && own
                .parent()
                .is_some_and(|at| PROGRAM_DIRECTORIES.iter().any(|one| at == Path::new(one)))
        {
            return Ok(own);
        }
        ensure!(
            self.bin_dir.is_absolute(),
            "--bin-dir {}: expected an absolute path",
            self.bin_dir.display()
        );
        let target = self.bin_dir.join(PROGRAM);
        let copied = root.copy(&own, &target).with_context(|| {
            format!(
                "cannot write {}; choose another directory with --bin-dir",
                root.at(&target).display()
            )
        })?;
        wrote.note(copied, &root.at(&target));
        Ok(target)
    }

    fn finish(&self, root: &Root, init: Init, role: Role, has_changed: bool) -> Result<()> {
        let command = role.command();
        if !root.is_machine() {
            init.enable_offline(root)?;
            println!("decapod {command} starts at the next boot of {}", root.display());
            return Ok(());
        }
        if self.no_start {
            println!(
                "decapod {command} is installed and not started; start it: {}",
                init.by_hand()
            );
            return Ok(());
        }
        init.start(has_changed)?;
        println!(
            "decapod {command} runs, and starts at each boot; its log: {}",
            init.log_by_hand()
        );
        if role == Role::Server {
            println!("next: decapod kubectl get nodes");
        }
        Ok(())
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// An agent's token also names the cluster's authority; a server's secret may be any text.
fn check_token(role: Role, token: &str) -> Result<()> {
    if role == Role::Agent {
        pki::JoinToken::parse(token).context(
            "the token cannot be used; take the output of `decapod token create` on the server",
        )?;
    }
    Ok(())
}

/// Another program's service of this name, or the other role, is not replaced.
fn refuse_other(root: &Root, init: Init, role: Role) -> Result<()> {
    let Some(text) = root.read(init.path())? else { return Ok(()) };
    let place = root.at(Path::new(init.path()));
    match texts::role_of(&text) {
        None => bail!(
            "{} exists and was not written by `decapod install`; move it away and try again",
            place.display()
        ),
        Some(other) if other != role => bail!(
            "this machine is installed as {other}; `decapod uninstall` removes that first",
            other = other.command()
        ),
        Some(_) => Ok(()),
    }
}

/// Prints what changes.
#[derive(Default)]
struct Wrote {
    any: bool,
}

impl Wrote {
    fn file(&mut self, root: &Root, path: &str, text: &str, mode: u32) -> Result<()> {
        let changed = root.write(Path::new(path), text.as_bytes(), mode)?;
        self.note(changed, &root.at(Path::new(path)));
        Ok(())
    }

    fn note(&mut self, changed: bool, path: &Path) {
        if changed {
            println!("wrote {}", path.display());
            self.any = true;
        }
    }
}

/// The installed service, for `decapod uninstall`.
pub struct Installed {
    root: Root,
    init: Init,
    program: PathBuf,
}

impl Installed {
    /// `None`: `decapod install` did not run here.
    pub fn find(root: Root) -> Result<Option<Self>> {
        for init in [Init::Systemd, Init::Openrc] {
            let Some(text) = root.read(init.path())? else { continue };
            if texts::role_of(&text).is_some()
                && let Some(program) = texts::program_of(&text)
            {
                return Ok(Some(Self { root, init, program }));
            }
        }
        Ok(None)
    }

    /// Stops the service, so that nothing starts it again during the removal.
    pub fn stop(&self) -> Result<()> {
        if self.root.is_machine() { self.init.stop() } else { Ok(()) }
    }

    /// Removes everything that was installed; returns a line for each.
    pub fn remove(&self) -> Result<Vec<String>> {
        let mut said = vec![];
        let mut paths = vec![self.init.path().to_owned(), LOGIND.to_owned()];
        paths.extend(self.init.links().map(str::to_owned));
        for path in &paths {
            said.extend(self.root.remove(Path::new(path))?);
        }
        if self.root.read(CRICTL)?.as_deref() == Some(texts::CRICTL) {
            said.extend(self.root.remove(Path::new(CRICTL))?);
        }
        let kubectl = self.program.with_file_name("kubectl");
        if self.root.is_link_to(&kubectl, Path::new(PROGRAM)) {
            said.extend(self.root.remove(&kubectl)?);
        }
        said.extend(self.root.remove_tree(Path::new(CONFIG_DIRECTORY))?);
        // A package's program is its package manager's.
        match self.program.starts_with("/usr/bin") {
            true => said.push(format!(
                "{} stays: it belongs to a package; remove that with the package manager",
                self.program.display()
            )),
            false => said.extend(self.root.remove(&self.program)?),
        }
        if self.root.is_machine() {
            self.init.forget()?;
        }
        Ok(said)
    }
}
