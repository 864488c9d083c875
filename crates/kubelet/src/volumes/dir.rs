//! The directory of a pod under the kubelet's root.
//!
//! ```text
//! <root>/pods/<uid>/volumes/kubernetes.io~<plugin>/<volume>
//! <root>/pods/<uid>/volumeDevices/kubernetes.io~<plugin>/<volume>       a link to a device
//! <root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>
//! <root>/pods/<uid>/containers/<container>/<termination log>
//! <root>/pods/<uid>/etc-hosts
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub struct PodDir(pub PathBuf);

impl PodDir {
    pub fn new(root: &Path, uid: &str) -> Self {
        Self(root.join("pods").join(uid))
    }

    /// The directory of all volumes of a plugin.
    pub fn plugin(&self, plugin: &str) -> PathBuf {
        self.0.join("volumes").join(format!("kubernetes.io~{plugin}"))
    }

    pub fn volume(&self, plugin: &str, name: &str) -> PathBuf {
        self.plugin(plugin).join(name)
    }

    pub fn container(&self, name: &str) -> PathBuf {
        self.0.join("containers").join(name)
    }

    pub fn hosts(&self) -> PathBuf {
        self.0.join("etc-hosts")
    }

    pub fn subpaths(&self) -> PathBuf {
        self.0.join("volume-subpaths")
    }

    pub fn subpath(&self, volume: &str, container: &str, index: usize) -> PathBuf {
        self.subpaths().join(volume).join(container).join(index.to_string())
    }

    pub fn create(&self) -> io::Result<()> {
        for dir in [self.0.clone(), self.0.join("volumes"), self.0.join("containers")] {
            fs::create_dir_all(&dir)?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o750))?;
        }
        Ok(())
    }
}
