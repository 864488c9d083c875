//! AppArmor: which profile a container runs under, and the default one.
//!
//! In: what the pod asks for, what this machine has. Out: a profile's name for `config.json` and for
//! processes that are started later, or why there is none.
//!
//! ```text
//!  the pod says      kernel without it   no apparmor_parser    both there
//!  nothing           none                none (a warning)      default, none if privileged
//!  Unconfined        none                none                  none
//!  RuntimeDefault    an error            an error              default, none if privileged
//!  Localhost         an error            applied if loaded     applied if loaded
//! ```
//!
//! Invariant: what a pod asks for by name is applied, or its container does not start.
//! Upstream: containerd's `generateApparmorSpecOpts` and its default profile, in rules of our own.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use cri::{Error, ProfileType, Result, SecurityProfile};
use tokio::sync::OnceCell;

pub(crate) const DEFAULT: &str = "decapod-default";

const ENABLED: &str = "/sys/module/apparmor/parameters/enabled";
const LOADED: &str = "/sys/kernel/security/apparmor/profiles";
const PARSERS: [&str; 2] = ["/sbin/apparmor_parser", "/usr/sbin/apparmor_parser"];
const INCLUDES: &str = "/etc/apparmor.d";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    /// The kernel does not have it, or it is off.
    Off,
    /// It is on, but nothing here can compile a profile.
    NoParser,
    Full,
}

/// This machine's AppArmor.
#[derive(Debug)]
pub(crate) struct AppArmor {
    support: Support,
    /// Loaded at the first container that wants it; why it could not be.
    default: OnceCell<std::result::Result<(), String>>,
}

/// What to do for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// `true`: the pod asks for it; otherwise it is applied where that is possible.
    Default(bool),
    Named(String),
}

impl AppArmor {
    pub(crate) fn of_this_machine() -> Self {
        let is_on = fs::read_to_string(ENABLED).is_ok_and(|text| text.starts_with('Y'));
        let support = match is_on {
            false => Support::Off,
            true if parser().is_none() => Support::NoParser,
            true => Support::Full,
        };
        if support == Support::NoParser {
            tracing::warn!(
                "AppArmor is on in the kernel, but there is no apparmor_parser (Debian: package \
                 apparmor): containers run without the default profile, and pods that ask for it do \
                 not start"
            );
        }
        Self { support, default: OnceCell::new() }
    }

    /// The name of the profile for a container.
    pub(crate) async fn profile(
        &self,
        asked: Option<&SecurityProfile>,
        privileged: bool,
    ) -> Result<Option<String>> {
        match wanted(self.support, asked, privileged)? {
            Wanted::Nothing => Ok(None),
            Wanted::Default(asked) => match self.load_default().await {
                Ok(()) => Ok(Some(DEFAULT.into())),
                Err(why) if asked => {
                    Err(Error::Internal(format!("cannot load the default AppArmor profile: {why}")))
                }
                Err(_) => Ok(None),
            },
            Wanted::Named(name) => {
                let table = fs::read_to_string(LOADED).map_err(|error| {
                    Error::Internal(format!("cannot read the AppArmor profiles {LOADED}: {error}"))
                })?;
                match is_loaded(&table, &name) {
                    true => Ok(Some(name)),
                    false => {
                        Err(Error::NotFound(format!("AppArmor profile {name:?} is not loaded")))
                    }
                }
            }
        }
    }

    async fn load_default(&self) -> std::result::Result<(), String> {
        let load = || async {
            let done = tokio::task::spawn_blocking(load_default).await;
            let done = done.unwrap_or_else(|_| Err(io::Error::other("a thread died")));
            done.map_err(|error| {
                tracing::warn!(%error, "cannot load the default AppArmor profile for containers");
                error.to_string()
            })
        };
        self.default.get_or_init(load).await.clone()
    }
}

/// Pure.
fn wanted(support: Support, asked: Option<&SecurityProfile>, privileged: bool) -> Result<Wanted> {
    let kind = asked.map(SecurityProfile::profile_type);
    if support == Support::Off {
        return match kind {
            None | Some(ProfileType::Unconfined) => Ok(Wanted::Nothing),
            Some(_) => Err(Error::FailedPrecondition(
                "cannot enforce AppArmor: AppArmor is not enabled on this node".into(),
            )),
        };
    }
    match (kind, asked) {
        (Some(ProfileType::Unconfined), _) => Ok(Wanted::Nothing),
        (Some(ProfileType::Localhost), Some(asked)) => {
            let name = asked.localhost_ref.strip_prefix("localhost/");
            named(name.unwrap_or(&asked.localhost_ref))
        }
        _ if privileged => Ok(Wanted::Nothing),
        (None, _) if support == Support::NoParser => Ok(Wanted::Nothing),
        (_, asked) => Ok(Wanted::Default(asked.is_some())),
    }
}

/// A name goes into the kernel's `exec NAME` as it is.
fn named(name: &str) -> Result<Wanted> {
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(Error::InvalidArgument(format!("invalid AppArmor profile name {name:?}")));
    }
    Ok(Wanted::Named(name.to_owned()))
}

/// Whether the kernel's table of `NAME (MODE)` has it.
fn is_loaded(table: &str, name: &str) -> bool {
    table.lines().any(|line| line.rsplit_once(" (").is_some_and(|(known, _)| known == name))
}

fn parser() -> Option<&'static str> {
    PARSERS.into_iter().find(|path| Path::new(path).exists())
}

fn load_default() -> io::Result<()> {
    let parser = parser().ok_or_else(|| io::Error::other("there is no apparmor_parser"))?;
    // From its input: nothing is left on the disk. Replaced where an older release loaded one.
    let mut child = Command::new(parser)
        .args(["--replace", "--skip-cache"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let text = default_profile(Path::new(INCLUDES));
    // Dropped at once: the parser reads to the end. One that died says why below.
    let _ = child.stdin.take().map(|mut input| input.write_all(text.as_bytes()));
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("{parser}: {said}")))
}

/// Everything but mounts, and but what changes the kernel. The distribution's own rules are included
/// where they are there.
fn default_profile(includes: &Path) -> String {
    let include = |name: &str, indent: &str| match includes.join(name).exists() {
        true => format!("{indent}#include <{name}>\n"),
        false => String::new(),
    };
    let tunables = include("tunables/global", "");
    // The variable is defined there.
    let proc = if tunables.is_empty() { "/proc/" } else { "@{PROC}/" };
    let base = include("abstractions/base", "  ");
    format!(
        "{tunables}
profile {DEFAULT} flags=(attach_disconnected,mediate_deleted) {{
{base}  capability,
  file,
  network,
  umount,

  # The node ends containers; processes of containers talk among themselves.
  signal (receive) peer=unconfined,
  signal (send, receive) peer={DEFAULT},
  ptrace (read, readby, trace, tracedby) peer={DEFAULT},

  deny mount,

  # Of /proc a container writes what belongs to processes, and shared memory's switches.
  deny {proc}* w,
  deny {proc}{{[^1-9],[^1-9][^0-9],[^1-9s][^0-9y][^0-9s],[^1-9][^0-9][^0-9][^0-9]*}}/** w,
  deny {proc}sys/[^k]** w,
  deny {proc}sys/kernel/{{?,??,[^s][^h][^m]**}} w,
  deny {proc}kcore rwklx,
  deny {proc}kmem rwklx,
  deny {proc}mem rwklx,
  deny {proc}sysrq-trigger rwklx,

  # Of /sys nothing but cgroups.
  deny /sys/[^f]*/** wklx,
  deny /sys/f[^s]*/** wklx,
  deny /sys/fs/[^c]*/** wklx,
  deny /sys/fs/c[^g]*/** wklx,
  deny /sys/fs/cg[^r]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,
  deny /sys/kernel/security/** rwklx,
}}
"
    )
}

/// Has the calling process's next program, and those of its children, run under the profile.
pub(crate) fn apply_at_exec(profile: &str) -> io::Result<()> {
    let write = |path: &str| {
        let mut file = fs::OpenOptions::new().write(true).open(path)?;
        file.write_all(format!("exec {profile}").as_bytes())
    };
    // The second one is that of kernels before 5.8.
    let done = write("/proc/thread-self/attr/apparmor/exec")
        .or_else(|_| write("/proc/thread-self/attr/exec"));
    done.map_err(|error| {
        io::Error::new(error.kind(), format!("apply the AppArmor profile {profile:?}: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(kind: ProfileType, name: &str) -> Option<SecurityProfile> {
        Some(SecurityProfile { profile_type: kind as i32, localhost_ref: name.into() })
    }

    #[test]
    fn what_a_pod_asks_for_is_applied_or_refused() {
        use Support::{Full, NoParser, Off};
        let check =
            |support, asked: &Option<SecurityProfile>, privileged, expected: Option<Wanted>| {
                let got = wanted(support, asked.as_ref(), privileged).ok();
                assert_eq!(got, expected, "{support:?} {asked:?} {privileged}");
            };
        let nothing = Some(Wanted::Nothing);
        for support in [Off, NoParser, Full] {
            check(support, &asked(ProfileType::Unconfined, ""), false, nothing.clone());
        }
        let default = asked(ProfileType::RuntimeDefault, "");
        check(Off, &None, false, nothing.clone());
        check(Off, &default, false, None);
        check(Off, &asked(ProfileType::Localhost, "p"), false, None);
        check(NoParser, &None, false, nothing.clone());
        check(NoParser, &default, false, Some(Wanted::Default(true)));
        check(Full, &None, false, Some(Wanted::Default(false)));
        check(Full, &None, true, nothing.clone());
        check(Full, &default, false, Some(Wanted::Default(true)));
        check(Full, &default, true, nothing);
        for name in ["p", "localhost/p"] {
            let profile = asked(ProfileType::Localhost, name);
            check(Full, &profile, true, Some(Wanted::Named("p".into())));
        }
        check(Full, &asked(ProfileType::Localhost, ""), false, None);
        check(Full, &asked(ProfileType::Localhost, "p\nq"), false, None);
    }

    #[test]
    fn loaded_profiles_are_found_by_their_whole_name() {
        let table = "decapod-default (enforce)\n/usr/bin/man (complain)\na (b) (enforce)\n";
        let check = |name, expected| assert_eq!(is_loaded(table, name), expected, "{name}");
        check("decapod-default", true);
        check("/usr/bin/man", true);
        check("a (b)", true);
        check("decapod", false);
        check("", false);
    }

    #[test]
    fn the_default_profile_includes_what_is_there() {
        let includes = tempfile::tempdir().expect("a directory");
        let bare = default_profile(includes.path());
        assert!(!bare.contains("#include") && !bare.contains('@'), "{bare}");
        assert!(
            bare.contains("deny mount,") && bare.contains("deny /proc/sysrq-trigger"),
            "{bare}"
        );
        for name in ["tunables/global", "abstractions/base"] {
            let path = includes.path().join(name);
            fs::create_dir_all(path.parent().expect("it has one")).expect("made");
            fs::write(path, "").expect("written");
        }
        let full = default_profile(includes.path());
        assert!(full.starts_with("#include <tunables/global>\n"), "{full}");
        assert!(full.contains("  #include <abstractions/base>\n"), "{full}");
        assert!(full.contains("deny @{PROC}/kcore rwklx,"), "{full}");
        // Every brace has its other half: the parser is not at hand where this runs.
        let count = |sign| full.matches(sign).count();
        assert_eq!(count('{'), count('}'));
    }
}
