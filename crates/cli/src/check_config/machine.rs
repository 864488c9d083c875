//! The machine as files: `/proc`, `/sys`, `/lib/modules`, the kernel's configuration.
//!
//! Invariant: what cannot be read is unknown, not absent: in a container much is hidden.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result};

pub struct Machine {
    root: PathBuf,
    /// As `uname -r` prints it.
    pub release: String,
    pub name: String,
    /// Modules that can be loaded or are built in; `None` if there is no list.
    modules: Option<BTreeSet<String>>,
    /// Options with their values; `None` if the kernel's configuration cannot be read.
    config: Option<BTreeMap<String, String>>,
}

/// How the kernel has a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Has {
    Loaded,
    /// The start loads it.
    Loadable,
    No,
    Unknown,
}

impl Machine {
    pub fn this() -> Result<Self> {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease");
        let release = release.context("cannot read the kernel's release; is /proc mounted?")?;
        let name = nix::unistd::gethostname().context("cannot read the host's name")?;
        let name = name.to_string_lossy().into_owned();
        Ok(Self::at("/".into(), release.trim().to_owned(), name))
    }

    pub fn at(root: PathBuf, release: String, name: String) -> Self {
        let mut machine = Self { root, release, name, modules: None, config: None };
        machine.modules = machine.list_modules();
        machine.config = machine.read_config();
        machine
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok()
    }

    pub fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.trim().parse().ok()
    }

    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    fn list_modules(&self) -> Option<BTreeSet<String>> {
        let directory = format!("/lib/modules/{}", self.release);
        let lists = ["modules.builtin", "modules.dep"];
        let texts = lists.map(|list| self.read(&format!("{directory}/{list}")));
        if texts.iter().all(Option::is_none) {
            return None;
        }
        let name = |line: &str| {
            let path = line.split(':').next()?;
            let file = path.rsplit('/').next()?;
            file.split_once(".ko").map(|(name, _)| name.replace('-', "_"))
        };
        Some(texts.iter().flatten().flat_map(|text| text.lines().filter_map(name)).collect())
    }

    fn read_config(&self) -> Option<BTreeMap<String, String>> {
        let packed = fs::File::open(self.path("/proc/config.gz")).ok().and_then(|file| {
            let mut text = String::new();
            flate2::read::GzDecoder::new(file).read_to_string(&mut text).ok().map(|_| text)
        });
        let release = &self.release;
        let places = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
        let text = packed.or_else(|| places.iter().find_map(|place| self.read(place)))?;
        let pair = |line: &str| {
            let (key, value) = line.split_once('=')?;
            Some((key.to_owned(), value.trim().to_owned()))
        };
        Some(text.lines().filter(|line| !line.starts_with('#')).filter_map(pair).collect())
    }

    /// A module, or the same code in the kernel; `option` is its name in the kernel's configuration.
    pub fn has(&self, module: &str, option: &str) -> Has {
        if self.exists(&format!("/sys/module/{module}")) {
            return Has::Loaded;
        }
        match self.option(option) {
            Some("y") => return Has::Loaded,
            // Without its file it cannot be loaded.
            Some("m") if self.modules.is_none() => return Has::Unknown,
            None if self.config.is_some() => return Has::No,
            _ => {}
        }
        match &self.modules {
            Some(modules) if modules.contains(module) => Has::Loadable,
            Some(_) => Has::No,
            None => Has::Unknown,
        }
    }

    /// `y`, `m`, or another value.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.config.as_ref()?.get(name).map(String::as_str)
    }

    pub fn knows_options(&self) -> bool {
        self.config.is_some()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A machine of these files.
    pub fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("inside")).expect("made");
            fs::write(path, text).expect("written");
        }
        let machine = Machine::at(root.path().to_owned(), "6.1.0".into(), "node".into());
        (root, machine)
    }

    #[test]
    fn modules_are_loaded_loadable_or_absent() {
        let dep = "kernel/fs/overlayfs/overlay.ko.xz: \nkernel/net/nf-tables.ko: kernel/x.ko\n";
        let (_root, with_list) = machine(&[
            ("sys/module/bridge/version", ""),
            ("lib/modules/6.1.0/modules.dep", dep),
            ("lib/modules/6.1.0/modules.builtin", "kernel/net/veth.ko\n"),
        ]);
        let check = |module: &str, expected: Has| {
            assert_eq!(with_list.has(module, "CONFIG_NONE"), expected, "{module}");
        };
        check("bridge", Has::Loaded);
        check("overlay", Has::Loadable);
        check("nf_tables", Has::Loadable);
        check("veth", Has::Loadable);
        check("vxlan", Has::No);

        let config = "# CONFIG_Z is not set\nCONFIG_VXLAN=y\nCONFIG_VETH=m\n";
        let (_root, with_config) = machine(&[("boot/config-6.1.0", config)]);
        assert_eq!(with_config.has("vxlan", "CONFIG_VXLAN"), Has::Loaded);
        assert_eq!(with_config.has("veth", "CONFIG_VETH"), Has::Unknown);
        assert_eq!(with_config.has("z", "CONFIG_Z"), Has::No);

        let (_root, bare) = machine(&[]);
        assert_eq!(bare.has("vxlan", "CONFIG_VXLAN"), Has::Unknown);
        assert!(!bare.knows_options());
    }
}
