//! `cargo xtask images DIRECTORY`: the images that `kubeadm init` asks for.
//!
//! In: the debug binary, which is built, and etcd from the cache. Out: docker archives for
//! `decapod images import`, or for `ctr images import`. The test kit makes them.

use crate::foreign;
use crate::sh::{self, Outcome};

/// The tag of the etcd image that kubeadm of this release wants. Upstream: `DefaultEtcdVersion`.
const ETCD: &str = "3.6.8-0";

pub fn run(arguments: &[String]) -> Outcome {
    let [directory] = arguments else {
        return Err("usage: cargo xtask images DIRECTORY".to_owned());
    };
    let etcd = foreign::etcd()?;
    sh::run(sh::cargo().args(["build", "-p", "decapod", "-p", "decapod-testkit"]))?;
    let target = sh::target_directory().join("debug");
    let mut command = std::process::Command::new(target.join("decapod-testkit"));
    command.arg("kubeadm-images").arg(target.join("decapod")).arg(etcd);
    sh::run(command.args([&format!("v{}", foreign::KUBERNETES), ETCD, directory]))
}
