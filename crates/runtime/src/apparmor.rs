//! AppArmor: the profile of a container, and the default profile.
//!
//! In: the pod's profile, and the machine's support. Out: a profile name for `config.json` and for
//! later processes, or the reason why there is none.
//!
//! ```text
//!  the pod says      kernel without it   no apparmor_parser    both present
//!  nothing           none                none (a warning)      default, none if privileged
//!  Unconfined        none                none                  none
//!  RuntimeDefault    an error            an error              default, none if privileged
//!  Localhost         an error            applied if loaded     applied if loaded
//! ```
//!
//! Invariant: a profile that the pod names is applied, or its container does not start.
//! Upstream: containerd's `generateApparmorSpecOpts` and its default profile, with our own rules.

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
    /// The kernel does not support it, or it is disabled.
    Off,
    /// It is enabled, but no `apparmor_parser` is installed to load a profile.
    NoParser,
    Full,
}

/// This machine's AppArmor support.
#[derive(Debug)]
pub(crate) struct AppArmor {
    support: Support,
    /// The result of loading the default profile, which happens for the first container that uses it.
    default: OnceCell<std::result::Result<(), String>>,
}

/// The profile for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// `true`: the pod asks for the default profile. `false`: it is applied where possible.
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

    /// The profile name for a container.
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
            let done = done.unwrap_or_else(|_| Err(io::Error::other("a blocking task panicked")));
            done.map_err(|error| {
                tracing::warn!(%error, "failed to load the default AppArmor profile for containers");
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

/// Checks a name that goes unchanged into the kernel's `exec NAME`.
fn named(name: &str) -> Result<Wanted> {
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(Error::InvalidArgument(format!("invalid AppArmor profile name {name:?}")));
    }
    Ok(Wanted::Named(name.to_owned()))
}

/// Whether the kernel's table of `NAME (MODE)` contains the name.
fn is_loaded(table: &str, name: &str) -> bool {
    table.lines().any(|line| line.rsplit_once(" (").is_some_and(|(known, _)| known == name))
}

fn parser() -> Option<&'static str> {
    PARSERS.into_iter().find(|path| Path::new(path).exists())
}

fn load_default() -> io::Result<()> {
    let parser = parser().ok_or_else(|| io::Error::other("apparmor_parser is not installed"))?;
    // Passed on standard input, so that no file remains. Replaces the profile of an older release.
    let mut child = Command::new(parser)
        .args(["--replace", "--skip-cache"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let text = default_profile(Path::new(INCLUDES));
    // The input is closed at once: the parser reads to its end. A write error shows in the exit status.
    let _ = child.stdin.take().map(|mut input| input.write_all(text.as_bytes()));
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("{parser}: {said}")))
}

/// Allows everything except mounts and changes to the kernel. Includes the distribution's own rules
/// if they exist.
fn default_profile(includes: &Path) -> String {
    let include = |name: &str, indent: &str| match includes.join(name).exists() {
        true => format!("{indent}#include <{name}>\n"),
        false => String::new(),
    };
    let tunables = include("tunables/global", "");
    // The tunables define the variable.
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

/// Applies the profile to the next program that the calling process executes, and to its children.
pub(crate) fn apply_at_exec(profile: &str) -> io::Result<()> {
    let write = |path: &str| {
        let mut file = fs::OpenOptions::new().write(true).open(path)?;
        file.write_all(format!("exec {profile}").as_bytes())
    };
    // Kernels before 5.8 have only the second path.
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
    fn a_pods_profile_is_applied_or_refused() {
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
    fn the_default_profile_includes_existing_files() {
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
        // Counts the braces: the parser may not be installed where this test runs.
        let count = |sign| full.matches(sign).count();
        assert_eq!(count('{'), count('}'));
    }
}
