//! Which release of Kubernetes this tree is: its version, and its feature gates.
//!
//! In: nothing. Out: [`KUBERNETES`], in the forms that answers, user agents and tools need, and
//! [`features`]. No other crate spells out the version; `cargo xtask tidy` checks it. The steps from one
//! release to the next are in `docs/releasing.md`.

pub mod features;
pub mod stable_metrics;

/// A release of Kubernetes, in all forms in which it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// `1`
    pub major: &'static str,
    /// `36`
    pub minor: &'static str,
    /// `1.36`
    pub short: &'static str,
    /// `1.36.2`
    pub full: &'static str,
    /// `v1.36.2`, the release's tag.
    pub tag: &'static str,
    /// `v0.36.2`, the tag of the Go libraries of the release.
    pub libraries: &'static str,
    /// `v1.36.2+decapod-0.1.0`, for what names the program that answers.
    pub build: &'static str,
}

macro_rules! version {
    ($major:literal, $minor:literal, $patch:literal) => {
        Version {
            major: stringify!($major),
            minor: stringify!($minor),
            short: concat!($major, ".", $minor),
            full: concat!($major, ".", $minor, ".", $patch),
            tag: concat!("v", $major, ".", $minor, ".", $patch),
            libraries: concat!("v0.", $minor, ".", $patch),
            build: concat!(
                "v",
                $major,
                ".",
                $minor,
                ".",
                $patch,
                "+decapod-",
                env!("CARGO_PKG_VERSION")
            ),
        }
    };
}

/// The release whose API, behaviour and words this tree has.
pub const KUBERNETES: Version = version!(1, 36, 2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_forms_name_one_release() {
        let Version { major, minor, short, full, tag, libraries, build } = KUBERNETES;
        assert_eq!(short, format!("{major}.{minor}"));
        let patch = full.strip_prefix(&format!("{short}.")).expect("a patch of the minor release");
        assert!(patch.parse::<u32>().is_ok(), "{patch}");
        assert_eq!(tag, format!("v{full}"));
        assert_eq!(libraries, format!("v0.{minor}.{patch}"));
        assert!(build.starts_with(&format!("{tag}+decapod-")), "{build}");
    }
}
