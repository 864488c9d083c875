//! The images that `kubeadm init` asks for, under upstream's names.
//!
//! In: the built binary, a real etcd. Out: archives: kube-apiserver, kube-controller-manager,
//! kube-scheduler and kube-proxy are the binary with links of these names; etcd is the real one; pause is a
//! process that sleeps. coredns is `decapod dns` with the cluster's domain from the Corefile; it has no other
//! setting from there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Image, Layer, busybox_layer, write_docker_archive};

/// The components whose programs are links to the binary.
const COMPONENTS: [&str; 4] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"];
/// Upstream: `CoreDNSVersion`, `PauseVersion` of kubeadm's constants.
const COREDNS: &str = "registry.k8s.io/coredns/coredns:v1.14.2";
const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
const COREDNS_PROGRAM: &str = include_str!("coredns.sh");
/// `kubeadm upgrade` runs `pause -v` as a Job.
const PAUSE_PROGRAM: &str =
    "#!/bin/sh\n[ \"$1\" = -v ] && exec echo pause 3.10.2\nexec sleep 2147483647\n";
/// Where the loader of Debian's and Ubuntu's programs looks.
const LIBRARIES: &str = "lib/x86_64-linux-gnu";

/// Writes the archives into a directory; `tag` is Kubernetes' version, for example `v1.36.2`, and
/// `etcd_tag` the one that kubeadm wants.
pub fn archives(
    binary: &Path,
    etcd: &Path,
    tag: &str,
    etcd_tag: &str,
    directory: &Path,
) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(directory).with_context(|| format!("{}", directory.display()))?;
    let stripped = directory.join("decapod.stripped");
    // Debug symbols make the image four times as large.
    let status = Command::new("strip").arg("-o").arg(&stripped).arg(binary).status()?;
    ensure!(status.success(), "strip {}: {status}", binary.display());
    let mut made = vec![];
    for component in COMPONENTS {
        let image = Image::new(&format!("registry.k8s.io/{component}:{tag}"))
            .layer(busybox_layer()?)
            .layer(binary_layer(&stripped)?)
            .command(&[component]);
        made.push(write(directory, component, &image)?);
    }
    let script = |name: &str, text: &str| -> Result<Layer> {
        let mut layer = Layer::new();
        layer.file(name, 0o755, text.as_bytes())?;
        Ok(layer)
    };
    let image = Image::new(COREDNS)
        .layer(busybox_layer()?)
        .layer(binary_layer(&stripped)?)
        .layer(script("coredns", COREDNS_PROGRAM)?)
        .entrypoint(&["/coredns"]);
    made.push(write(directory, "coredns", &image)?);
    let image = Image::new(PAUSE)
        .layer(busybox_layer()?)
        .layer(script("pause", PAUSE_PROGRAM)?)
        .entrypoint(&["/pause"]);
    made.push(write(directory, "pause", &image)?);
    fs::remove_file(&stripped)?;
    let mut layer = Layer::new();
    layer.directory("usr/local", 0o755)?;
    layer.directory("usr/local/bin", 0o755)?;
    layer.file("usr/local/bin/etcd", 0o755, &fs::read(etcd)?)?;
    let image = Image::new(&format!("registry.k8s.io/etcd:{etcd_tag}"))
        .layer(busybox_layer()?)
        .layer(layer)
        .command(&["etcd"]);
    made.push(write(directory, "etcd", &image)?);
    Ok(made)
}

fn write(directory: &Path, name: &str, image: &Image) -> Result<PathBuf> {
    let path = directory.join(format!("{name}.tar"));
    write_docker_archive(&path, image)?;
    Ok(path)
}

/// The binary, its links, and the libraries of this machine that it needs.
fn binary_layer(binary: &Path) -> Result<Layer> {
    let mut layer = Layer::new();
    for directory in ["usr/local", "usr/local/bin", "lib", LIBRARIES, "lib64"] {
        layer.directory(directory, 0o755)?;
    }
    layer.file("usr/local/bin/decapod", 0o755, &fs::read(binary)?)?;
    for component in COMPONENTS {
        layer.symlink(&format!("usr/local/bin/{component}"), "decapod")?;
    }
    for library in ["libc.so.6", "libm.so.6", "libgcc_s.so.1"] {
        let name = format!("{LIBRARIES}/{library}");
        let content = fs::read(Path::new("/").join(&name)).with_context(|| name.clone())?;
        layer.file(&name, 0o755, &content)?;
    }
    let loader = "lib64/ld-linux-x86-64.so.2";
    layer.file(loader, 0o755, &fs::read(Path::new("/").join(loader))?)?;
    Ok(layer)
}
