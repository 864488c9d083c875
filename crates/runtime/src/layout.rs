//! The paths of all files. There are two roots: the data directory survives a reboot; the run
//! directory must not, because it holds sockets and pinned namespaces.
//!
//! ```text
//! <data>/images/blobs/sha256/<hex>      content, named by its hash
//!        images/layers/<hex>/           one unpacked layer, by diff id
//!        images/index.json              names → images
//!        images/leases/<container>      the layers that a container uses
//!        sandboxes/<id>/                config.pb state.json resolv.conf hostname shm/
//!        containers/<id>/               config.pb state.json started exit.json config.json upper/ …
//!        ipam/<address>                 the sandbox that holds it
//! <run>/sandboxes/<id20>/               net uts ipc user (pinned), pause.pid
//!       containers/<id20>/              shim.json shim.sock started.json oci/ shim.log
//!       cri.sock                        CRI for other programs; the default cluster's is
//!                                       /run/decapod/cri.sock
//! ```
//!
//! Socket addresses are limited to 108 bytes. Therefore the ids are shortened and the directory
//! below `/run` is a hash.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The data directory of a cluster that did not choose another.
pub const DEFAULT_CLUSTER: &str = "/var/lib/decapod";
const RUN: &str = "/run/decapod";

#[derive(Clone, Debug)]
pub struct Layout {
    pub data: PathBuf,
    pub run: PathBuf,
}

/// The directory of the sockets for the cluster with this data directory: `/run/decapod/<hash>`.
pub fn run_dir(data_dir: &Path) -> PathBuf {
    let full = data_dir.canonicalize().unwrap_or_else(|_| data_dir.to_owned());
    let hash = hex(&Sha256::digest(full.as_os_str().as_encoded_bytes()));
    Path::new(RUN).join(&hash[..12])
}

/// The socket at which the runtime of the cluster with this data directory serves CRI. Clients find the
/// default cluster's without knowing its directory.
pub fn cri_socket(cluster: &Path) -> PathBuf {
    let directory = match cluster == Path::new(DEFAULT_CLUSTER) {
        true => PathBuf::from(RUN),
        false => run_dir(&cluster.join("runtime")),
    };
    directory.join("cri.sock")
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A new id of 64 hexadecimal digits.
pub fn new_id() -> String {
    (0..4).map(|_| format!("{:016x}", base::rng::below(u64::MAX))).collect()
}

fn short(id: &str) -> &str {
    id.get(..20).unwrap_or(id)
}

impl Layout {
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    pub fn sandboxes(&self) -> PathBuf {
        self.data.join("sandboxes")
    }

    pub fn containers(&self) -> PathBuf {
        self.data.join("containers")
    }

    pub fn ipam(&self) -> PathBuf {
        self.data.join("ipam")
    }

    pub fn sandbox(&self, id: &str) -> PathBuf {
        self.sandboxes().join(id)
    }

    pub fn container(&self, id: &str) -> PathBuf {
        self.containers().join(id)
    }

    pub fn run_sandbox(&self, id: &str) -> PathBuf {
        self.run.join("sandboxes").join(short(id))
    }

    pub fn run_container(&self, id: &str) -> PathBuf {
        self.run.join("containers").join(short(id))
    }

    pub fn socket(&self, container: &str) -> PathBuf {
        self.run_container(container).join("shim.sock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_cluster_has_the_well_known_socket() {
        let check = |cluster: &str| cri_socket(Path::new(cluster)).display().to_string();
        assert_eq!(check("/var/lib/decapod/"), "/run/decapod/cri.sock");
        let other = check("/srv/other");
        assert!(other.starts_with("/run/decapod/") && other != check("/srv/second"), "{other}");
    }

    #[test]
    fn socket_addresses_fit() {
        let layout = Layout {
            data: "/var/lib/decapod".into(),
            run: run_dir(Path::new(
                "/a/very/long/path/that/is/hashed/away/anyhow/and/never/counts",
            )),
        };
        let socket = layout.socket(&new_id());
        assert!(socket.as_os_str().len() < 80, "{}", socket.display());
    }
}
